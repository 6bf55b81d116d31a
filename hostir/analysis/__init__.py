"""Analyses of host programs that run nothing.

Question: is this program free of races, mismatches and deadlocks?
Imports: `hostir.ir`, and the packages that it may import.
Files, in reading order:

- `rank_values`: scalars of a program, for all ranks at once.
- `walker`: the traversal of a program that all analyses use: control flow, streams, communications.
- `clocks`: vector clocks over streams, and the lifetimes of buffers.
- `buffer_regions`, `rank_regions`: the memory that a name refers to, as a part of a buffer on one
  rank, and as a part of a whole tensor on all ranks.
- `races`: accesses of one buffer that no wait orders, and waits that serialise
  the iterations of a loop.
- `collective_matching`: whether ranks post the same collectives and transfers.
- `deadlocks`: whether collectives and transfers match if ranks take different branches; cycles of
  waiting ranks.
- `preflight`: runs these checks before a first run, for one rank of each class.
- `unrolled_program`: all work of a program, loop iteration by loop iteration.
- `sliced_inputs`: replicated inputs that every call slices again.
"""
