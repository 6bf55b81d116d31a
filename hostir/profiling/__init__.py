"""Measuring runs of host programs.

Question: where did the time of a run go?
Imports: every room of `hostir` but `tools`.
Files, in reading order:

- `timers`: the ways to time a step: the host's clock, CUDA events, CUPTI through torch's
  profiler.
- `op_recorder`: finds the op that each recorded step carries out.
- `timeline`: a trace: its events, its report and its file format.
- `tracer`: takes a trace on all ranks; `HostIrEvaluator`.
- `profiler`: takes a profile of one call.
"""
