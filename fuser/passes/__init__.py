"""Rewrites of a fusion before it is scheduled, and its segmentation.

Question: into which kernels and library calls is a fusion cut?
Imports: `fuser.support`, `fuser.ir` and `fuser.ops`.
Files, in reading order:

- `concretize`: a copy for one class of inputs: symbolic reshapes and extents are decided.
- `resolve_symbolic`: the results of symbolic reshapes.
- `fusion_passes`: the list of passes before segmentation, and the small ones.
- `infer_layouts`: the memory order of results.
- `view_ops`: which ops are views of stored tensors.
- `segment`: the segments: what memory must hold, and the kernels between.
- `merge_groups`: which kernels become one.
"""
