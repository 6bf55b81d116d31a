"""Measures real runs of host programs: a trace on all ranks, or a profile on one rank.

Question: where did the time of a run go? Imports: every package of `hostir` but `tools`. Files, in
reading order:

- `timers`: the ways to time the work of an op: the host's clock, CUDA events, CUPTI through torch's
  profiler.
- `op_recorder`: finds the op to which each recorded step of a plan belongs.
- `timeline`: a trace: its events, its report and its file format.
- `tracer`: takes a trace on all ranks; `HostIrEvaluator`.
- `profiler`: takes a profile of one call.
"""
