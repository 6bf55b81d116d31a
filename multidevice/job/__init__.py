"""The job: the ranks that a launcher has started, of which this process is one.

Question: which rank is this process, and how do ranks agree before each call and end together?
Imports: `multidevice.coordination`, `multidevice.transports` and `fuser` but its frontend.
Files, in reading order:

- `early_abort`, `failure_guard`: an error on one rank ends all ranks, also before MPI has started.
- `communicator`: the class `Communicator`: rank, size, and the transport for each device.
- `agreement`: ranks agree on each call, and resynchronise after an error.
- `shard_tensor`: `DeviceMesh` and `shard_tensor`.
- `simulation`: ranks as threads of one process.
"""
