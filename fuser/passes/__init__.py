"""Rewrites of a fusion (a graph of tensor ops), and its division into kernels and library calls.

Question: into which kernels and library calls is a fusion divided?
Imports: `fuser.support`, `fuser.ir` and `fuser.ops`.
Files, in reading order:

- `concretize`: a copy for one class of inputs, with symbolic reshapes and extents decided.
- `resolve_symbolic`: which axes of the results of symbolic reshapes are broadcasts.
- `fusion_passes`: the list of passes before segmentation, and the small passes.
- `infer_layouts`: the memory order of results.
- `view_ops`: which ops are views of stored tensors.
- `segment`: the division into kernels and library calls, and the tensors that memory must hold.
- `merge_groups`: which kernels are merged into one.
"""
