"""Parts that all transports share.

Question: which methods must a transport have?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `collectives`: the table of collectives, with all facts that do not depend on the transport.
- `protocol`: the interface of a transport, also inside CUDA graphs.
- `checked_backend`: checks of arguments, the numbers of calls, copies in another dtype.
- `p2p_collectives`: collectives made of sends and receives.
- `launch_order`: one order of kernel launches on all CUDA streams and in CUDA graphs.
- `allreduce_model`: shape and layout of the allreduce kernel.
"""
