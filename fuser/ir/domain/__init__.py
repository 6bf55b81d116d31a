"""The axes of a tensor (iteration domains), and the splits and merges that derive them.

Question: which axes does a tensor have, and how are axes derived from others?
Imports: `fuser.support`, `fuser.ir.scalar`, and types of `fuser.ir`.
Files, in reading order:

- `device_mesh`: a mesh of devices, and the text of sets of ranks.
- `tensor_domain`: axes: those that users see, and those of the op, of memory and of the loops.
- `axis_path`: computes the index, size or stride of an axis from those of its source axes.
- `equal_extents`: which extents of a fusion are equal.
- `strided_layout`: strides of views, computed without a torch tensor.
"""
