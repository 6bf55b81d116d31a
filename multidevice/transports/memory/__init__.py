"""Memory that several processes map.

Question: how does a rank read another rank's memory?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `host_shared`: shared memory of a host.
- `handles`: the mapped pieces of peers' memory; all shards of a team as one range.
- `cuda_ipc`, `cuda_vmm`: GPU memory mapped by CUDA IPC; several shards as one range.
"""
