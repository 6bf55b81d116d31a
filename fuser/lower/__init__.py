"""Lowering: a scheduled fusion becomes loops, indices, buffers and barriers.

Question: which loops and statements compute this fusion?
Imports: `fuser.support`, `fuser.ir`, `fuser.passes` and `fuser.schedule`.
Files, in reading order:

- `kernel_ir`: the statements and expressions of a kernel.
- `pipeline`: all steps of lowering, in order.
- `loop_tree`: the loops that tensors share.
- `buffers`: what is kept in registers, shared and global memory.
- `context`: indices and predicates of an access.
- `values`, `vector_access`: the code that computes a value; vectors and asynchronous copies.
- `statements`, `reduction_code`: statements of a tensor; reductions over threads and blocks.
"""
