"""Analyses of host programs that run nothing.

Question: is a host program free of races, and do its ranks communicate without deadlocks?
Imports: `hostir.ir`, and the packages that `hostir.ir` may import.
Files, in reading order:

- `rank_values`: the values of a program's scalars, for all ranks at once.
- `walker`: the traversal of a program that all analyses use: control flow, streams, communications.
- `clocks`: vector clocks over streams, and the lifetimes of buffers.
- `buffer_regions`, `rank_regions`: the memory that a tensor refers to, as a part of a buffer on one
  rank, and as a part of a whole tensor on all ranks.
- `races`: accesses of one buffer that no wait orders, and waits that serialise the iterations of a
  loop.
- `collective_matching`: whether ranks start the same collectives and transfers.
- `deadlocks`: whether collectives and transfers match if ranks take different branches; cycles of
  waiting ranks.
- `preflight`: runs these checks before a program's first run. Ranks that run the same ops form a
  class, and one rank of each class is checked.
- `unrolled_program`: the ops of a program in each loop iteration, for the cost model.
- `sliced_inputs`: inputs that every rank passes whole although each rank uses only a slice.
"""
