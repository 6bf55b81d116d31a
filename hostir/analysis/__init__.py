"""Analyses of host programs: everything that can be said without running one.

Question: is this program free of races, mismatches and deadlocks?
Imports: `hostir.ir` and what it may import.
Files, in reading order:

- `rank_values`: scalars of a program, for all ranks at once.
- `walker`: one walk through a program for all analyses: control flow, streams, communications.
- `clocks`: vector clocks over streams, and how long a buffer lives.
- `buffer_regions`, `rank_regions`: what a name means: parts of a buffer on one rank; parts of whole
  tensors on all ranks.
- `races`: accesses of one buffer that no stream orders; waits that make the steps of a loop run one
  after another.
- `collective_matching`: whether ranks post the same collectives and transfers.
- `deadlocks`: the same where ranks go different ways: who waits for whom.
- `preflight`: runs these checks before a first run, for one rank of each kind.
- `unrolled_program`: all work of a program, loop step by loop step.
- `sliced_inputs`: inputs that are cut again in each call.
"""
