"""Memory of one process that other processes map into their address space.

Question: how does a rank read another rank's memory?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `host_shared`: shared memory of a host.
- `handles`: the memory of other ranks that this process has mapped; the shards of a team as one
  range of addresses.
- `cuda_ipc`, `cuda_vmm`: GPU memory mapped by CUDA IPC; several shards as one range of addresses.
"""
