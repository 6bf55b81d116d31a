"""Code generation: a kernel as CUDA C++ text.

Question: how is a lowered kernel spelled?
Imports: `fuser.support`, `fuser.ir.scalar` and `fuser.lower.kernel_ir`.
Files, in reading order:

- `cuda_text`: statements and expressions to text.
"""
