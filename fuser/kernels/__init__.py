"""Runs one fusion as kernels: chooses parameters, lowers, generates the text, compiles, launches.

Question: which kernel runs for the inputs of a call?
Imports: every other package of `fuser` but `frontend` and `nvfuser`.
Files, in reading order:

- `executor`: the kernels of a fusion: the choice of a version, compilation, launch.
- `kernel_variant`: one version (variant) of a kernel: its key, its launch sizes and operands.
- `autotune`, `autotune_candidates`: the search for the fastest parameters; which parameters are
  tried.
"""
