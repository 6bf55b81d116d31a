"""Lowers a fusion to a host program.

Question: how does a fusion become a host program?
Imports: `hostir.ir`, `hostir.passes`, and the packages that they may import.
Files, in reading order:

- `input_class`: the facts about inputs for which a program is made.
- `params`: the options of lowering.
- `pipeline`: all stages from fusion to program, in order; `lower_streams`.
- `segments`: the ops of each segment.
- `stream_loops`: loops over streams, which run segments and communications one block at a time.
- `mesh_transfers`: sends and receives that bring a tensor from one mesh to another.
- `loop_steps`: the index of a loop, and the part of each tensor that one iteration uses.
- `slices`: views of parts of tensors, kernels over parts, and the first random number of a shard.
"""
