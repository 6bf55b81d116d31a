"""Shardings on the fusion IR: which rank stores which part of each tensor.

Question: how are the axes of a tensor divided over devices, and which communication follows?
Imports: `fuser` but its frontend.
Files, in reading order:

- `placement`: the cuts of a tensor, read and written; a cut divides one axis into blocks, one per
  device or one per step of a loop.
- `queries`: how a tensor is cut, and whether two tensors are cut in the same way.
- `propagation`: cuts of tensors that the user has not annotated: forward, then backward.
- `mesh_transfer`: which rank sends which part of a tensor when the tensor changes its mesh.
- `redistribution`: the cheapest sequence of communications that makes a change of cuts.
- `reshard`: the collective that makes one step of such a sequence.
- `streams`: the ops that a loop on the host computes block by block, and their loops.
"""
