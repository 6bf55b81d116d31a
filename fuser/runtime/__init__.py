"""Compiling, caching and launching kernels on the CPU and on CUDA devices."""

from fuser.runtime.device import H200, DeviceInfo, describe_device
from fuser.runtime.kernel import (
    CompiledKernel,
    KernelParam,
    KernelSource,
    PreparedLaunch,
    clear_memory_cache,
    compilations,
    compile_cubin,
    compile_kernels,
    kernel_requests,
)

__all__ = [
    "H200",
    "CompiledKernel",
    "DeviceInfo",
    "KernelParam",
    "KernelSource",
    "PreparedLaunch",
    "clear_memory_cache",
    "compilations",
    "compile_cubin",
    "compile_kernels",
    "describe_device",
    "kernel_requests",
]
