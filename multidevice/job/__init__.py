"""The job: this process among the ranks.

Question: who am I among the ranks, and how do we agree and end together?
Imports: `multidevice.coordination`, `multidevice.transports` and `fuser` but its frontend.
Files, in reading order:

- `early_abort`, `failure_guard`: an error on one rank ends all, also before MPI has started.
- `communicator`: `Communicator`: rank and size; the transport that this launcher and device get.
- `agreement`: ranks agree on each call, and again after an error.
- `shard_tensor`: `DeviceMesh` and `shard_tensor`.
- `simulation`: ranks as threads of one process.
"""
