"""Transports move bytes between ranks; they know nothing of fusions and host programs.

Question: which library or copy carries out a collective, on GPUs and on CPUs?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `mpi`, `gloo`: CPU tensors, under mpirun and under torchrun.
- `nccl`, `nccl_binding`: GPU tensors; the library's calls.
- `peer_copy`, `peer_copy_cpu`, `peer_copy_cuda`: copies out of memory that a peer has shared.
- `allreduce_kernel`: small allreduces between GPUs of a host, in one kernel.
- `simulated`: ranks that are threads.
"""
