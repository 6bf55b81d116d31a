"""Lowering: turns a scheduled fusion (its loops are chosen) into statements and barriers.

Question: which loops and statements compute a scheduled fusion?
Imports: `fuser.support`, `fuser.ir`, `fuser.passes` and `fuser.schedule`.
Files, in reading order:

- `kernel_ir`: the statements and expressions of a kernel.
- `pipeline`: all steps of lowering, in order.
- `loop_tree`: the loops around each op whose result is stored, and the tree of shared loops.
- `buffers`: the storage of intermediate tensors in registers and shared memory.
- `context`: indices and predicates of tensor accesses.
- `values`, `vector_access`: the code that computes a value; memory accesses by vectors.
- `statements`, `reduction_code`: statements that compute a tensor; reductions over threads and CUDA
  blocks.
"""
