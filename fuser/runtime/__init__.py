"""Compiles, caches and launches kernels, given their text and arguments only.

Question: how is a kernel's text compiled, cached and launched?
Imports: `fuser.support`.
Files, in reading order:

- `kernel_text`: a kernel's source with its headers.
- `kernel_cache`: compiled kernels on disk.
- `compile`: compilation of many kernels, each at most once in memory and on disk.
- `cuda_kernel`, `cpu_kernel`: NVRTC and the CUDA driver; g++ and the header that lets it compile
  CUDA text.
- `compiled_kernel`, `prepared_launch`: a kernel that can be launched; a launch with its arguments
  bound.
- `captured_graphs`, `graph_memory`: CUDA graphs, and the memory that they own.
- `compiled_runner`: C code that repeats the recorded calls of a program: `runner.c` and its
  headers.
"""

from fuser.runtime.compile import clear_memory_cache, compile_cubin, compile_kernels
from fuser.runtime.compiled_kernel import (
    CompiledKernel,
    PreparedLaunch,
    compilations,
    kernel_requests,
)
from fuser.support.kernel_source import KernelParam, KernelSource

__all__ = [
    "CompiledKernel",
    "KernelParam",
    "KernelSource",
    "PreparedLaunch",
    "clear_memory_cache",
    "compilations",
    "compile_cubin",
    "compile_kernels",
    "kernel_requests",
]
