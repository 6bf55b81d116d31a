"""The host program: ops, effects, text, verification.

Question: of what does a host program consist, and is it well formed?
Imports: `fuser` but its frontend, and `multidevice.sharding`.
Files, in reading order:

- `effects`: what an op reads, writes, allocates, starts and waits for.
- `ops`: a folder: the declarations of all host ops.
- `builder`, `printer`: a program built by hand, op by op; its text.
- `program`: `HostIrContainer`: the program, which has both.
- `queries`: questions about a whole program.
- `parser`: text to program.
- `shard_layout`: sizes and strides of a device's shard.
- `buffer_aliasing`: which tensors share a buffer, and what may be computed in place.
- `shape_rules`: which shapes a tensor op demands, and how axes are compared.
- `verifier`: the structure of a program, on all paths.
- `diagnostics`: findings with their lines.
"""
