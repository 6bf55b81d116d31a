"""Host programs: their ops, the effects of ops, their text, and the rules that a program must obey.

Question: what does a host program consist of, and is it well-formed?
Imports: `fuser` but its frontend, and `multidevice.sharding`.
Files, in reading order:

- `effects`: the tensors that an op reads, writes and allocates; the communications that an op
  starts and waits for.
- `ops`: a folder: the declarations of all host ops.
- `builder`, `printer`: building a program by hand, op by op; the text of a program.
- `program`: `HostIrContainer`, the class of host programs, which uses the builder and the printer.
- `queries`: questions about a whole program.
- `parser`: reads a program from text.
- `shard_layout`: sizes and strides of a device's shard.
- `buffer_aliasing`: the tensors that share a buffer, and the ops that may compute in place.
- `shape_rules`: the shapes that a tensor op requires, and the comparison of axes.
- `verifier`: the structural rules of a program, on all paths.
- `diagnostics`: the findings of checks, with source lines.
"""
