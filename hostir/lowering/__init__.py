"""Lowering a fusion to a host program.

Question: how does a fusion become a host program?
Imports: `hostir.ir`, `hostir.passes` and what these may import.
Files, in reading order:

- `input_class`: the facts about inputs for which a program is made.
- `params`: the options of lowering.
- `pipeline`: all stages from fusion to program, in order; `lower_streams`.
- `segments`: the ops of each segment.
- `slices`: views of parts of tensors, and kernels over parts.
- `stream_loops`: loops over streams: their operands, kernels and communications.
- `random_offsets`: the offset of a shard in the random numbers of the whole.
"""
