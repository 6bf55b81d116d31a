"""Memory of one process that other processes map into their address space.

Question: how does a rank read another rank's memory?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `host_shared`: memory that the processes of a host share.
- `handles`: the memory of other processes that this process has mapped. Also maps the shards of a
  team's ranks (their parts of one tensor) as one range of addresses.
- `cuda_ipc`: GPU memory that other processes map by CUDA IPC.
- `cuda_vmm`: shards on several GPUs, mapped as one range of addresses.
"""
