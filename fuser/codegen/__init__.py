"""Code generation: generates the CUDA C++ text of a kernel.

Question: which CUDA C++ text is generated for the statements of a kernel?
Imports: `fuser.support`, `fuser.ir.scalar` and `fuser.lower.kernel_ir`.
Files, in reading order:

- `cuda_text`: translates statements and expressions to text.
- `rt.h` and the other headers: functions that kernels call; `simt.h` and `simt_engine.cpp` run a
  kernel's text on a CPU.
"""
