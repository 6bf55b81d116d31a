"""Iteration domains: the axes of a tensor and the transforms that derive them from one another.

Question: how do the axes of a tensor relate?
Imports: `fuser.support`, `fuser.ir.scalar`, and types of `fuser.ir`.
Files, in reading order:

- `device_mesh`: a mesh of devices, and the text of sets of ranks.
- `tensor_domain`: axes, and root, logical, allocation and loop domains.
- `axis_path`: computes an index, size or stride of an axis from that of the axes it derives from.
- `equal_extents`: which extents of a fusion are equal.
- `strided_layout`: strides of views, computed without a torch tensor.
"""
