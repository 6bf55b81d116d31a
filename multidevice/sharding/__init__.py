"""Shardings on the fusion IR.

Question: how is a tensor cut over devices, and which communication follows?
Imports: `fuser` but its frontend.
Files, in reading order:

- `placement`: the cuts of a tensor, read and written.
- `queries`: how a tensor is cut, and whether two tensors are cut alike.
- `propagation`: cuts of tensors that the user has not annotated, forward, then backward.
- `reshard`: which collective a change of cuts is, and its single steps.
- `streams`: which ops run block by block, and their loops.
"""
