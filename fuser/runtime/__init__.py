"""Compiling, caching and launching kernels on the CPU and on CUDA devices."""

from fuser.kernel_source import KernelParam, KernelSource
from fuser.runtime.compile import clear_memory_cache, compile_cubin, compile_kernels
from fuser.runtime.kernel import CompiledKernel, PreparedLaunch, compilations, kernel_requests

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
