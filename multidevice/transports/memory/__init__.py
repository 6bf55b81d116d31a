"""Memory of one process that other processes map into their address space.

Question: how does a rank read another rank's memory?
Imports: `fuser.support` and `multidevice.coordination`.
Files, in reading order:

- `host_shared`: shared memory of a host.
- `handles`: the memory of other ranks that this process has mapped; the parts that the ranks of a
  team store, as one range of addresses.
- `cuda_ipc`, `cuda_vmm`: GPU memory mapped by CUDA IPC; parts on several GPUs as one range of
  addresses.
"""
