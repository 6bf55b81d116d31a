"""The meaning of every op in torch, for library calls and for tests.

Question: which torch call computes an op?
Imports: `fuser.support` and `fuser.ir`.
Files, in reading order:

- `meaning`: one torch function per node.
- `library_calls`: calls that write into a given buffer, or return results in torch's own memory.
- `matmul_calls`: products, scaled and grouped, and the layouts that their kernels demand.
- `attention_kernels`: which of torch's attention kernels runs a call, and how it is called.
- `philox`: the random numbers of kernels, computed with torch.
"""
