"""The host program: ops, effects, text, verification.

Question: what does a host program consist of, and is it well-formed?
Imports: `fuser` but its frontend, and `multidevice.sharding`.
Files, in reading order:

- `effects`: what an op reads, writes, allocates, starts and waits for.
- `ops`: a folder: the declarations of all host ops.
- `builder`, `printer`: building a program by hand, op by op; the text of a program.
- `program`: `HostIrContainer`, the program, which uses both.
- `queries`: questions about a whole program.
- `parser`: text to program.
- `shard_layout`: sizes and strides of a device's shard.
- `buffer_aliasing`: the tensors that share a buffer, and the ops that may compute in place.
- `shape_rules`: the shapes that a tensor op requires, and the comparison of axes.
- `verifier`: the structural rules of a program, on all paths.
- `diagnostics`: findings with their lines.
"""
