"""Compiles kernels for CPUs and GPUs, or takes them from the cache in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fuser.runtime import cpu_kernel, cuda_kernel
from fuser.runtime.compiled_kernel import CompiledKernel, count_requests
from fuser.runtime.kernel_cache import digest
from fuser.support.device import device_parts
from fuser.support.errors import KernelError
from fuser.support.kernel_source import KernelSource
from fuser.support.locks import make_lock

if TYPE_CHECKING:
    import torch

# A kernel is cached in memory as long as something can launch it.
_memory: weakref.WeakValueDictionary[tuple[str, str], CompiledKernel]
_memory = weakref.WeakValueDictionary()
_memory_lock = make_lock()


def clear_memory_cache() -> None:
    """Removes the compiled kernels of this process from the memory cache. Later requests use the
    disk cache.
    """
    with _memory_lock:
        _memory.clear()


def compile_kernels(
    sources: Iterable[KernelSource], device: torch.device | str, *, checked: bool = False
) -> list[CompiledKernel]:
    """Returns the compiled kernels for a device, in the order of `sources`. Kernels in the memory
    or disk cache are not compiled again.

    On the CPU, the missing kernels are compiled together in one translation unit. On CUDA, a thread
    compiles each kernel as soon as `sources` yields its source. `checked` (CPU only) adds checks of
    bounds, alignment and barriers, and of uninitialised reads and races in shared memory.

    Raises:
        CompileError: the compiler is missing or rejects a kernel.
        KernelError: the device is neither a CPU nor a CUDA device, or `checked` is used on CUDA.
    """
    kind, index = device_parts(device)
    compile_missing: Callable[[Iterable[KernelSource]], list[CompiledKernel]]
    if kind == "cpu":
        variant = "cpu-checked" if checked else "cpu"
        compile_missing = cpu_kernel.compile_checked if checked else cpu_kernel.compile_unchecked
        key_of = cpu_kernel.kernel_key_checked if checked else cpu_kernel.kernel_key_unchecked
    elif kind == "cuda":
        if checked:
            raise KernelError(
                f"kernels with checks of their accesses run on the CPU only, not on {device}: "
                "remove FUSER_ENABLE=checked"
            )
        arch = cuda_kernel.architecture(index)
        variant = f"cuda:{arch}"

        def compile_cuda(missing: Iterable[KernelSource]) -> list[CompiledKernel]:
            return cuda_kernel.compile_for_device(missing, arch)

        compile_missing = compile_cuda

        def key_of(source: KernelSource) -> str:
            return cuda_kernel.kernel_key(source, arch)
    else:
        raise KernelError(f"kernels run on cpu and cuda devices, not on {device}")
    keys: list[tuple[str, str]] = []
    found: dict[tuple[str, str], CompiledKernel] = {}
    missing: dict[tuple[str, str], KernelSource] = {}

    def yield_missing() -> Iterator[KernelSource]:
        for source in sources:
            key = (variant, key_of(source))
            keys.append(key)
            kernel = found.get(key) or _memory.get(key)
            if kernel is not None:
                found[key] = kernel
            elif key not in missing:
                missing[key] = source
                yield source

    # No lock is held during this call: `sources` takes other locks, and a thread that holds one of
    # them may be about to compile.
    compiled = compile_missing(yield_missing())
    with _memory_lock:
        for key, kernel in zip(missing, compiled, strict=True):
            found[key] = _memory.setdefault(key, kernel)
    count_requests(len(keys))
    return [found[key] for key in keys]


def compiler_of(device: torch.device | str, *, checked: bool = False) -> str:
    """Returns a digest of everything besides a kernel's text that determines its machine code:
    compiler, flags, headers and architecture. It is a part of cache keys. `checked` selects the
    flags for run-time checks on a CPU.
    """
    kind, index = device_parts(device)
    if kind == "cpu":
        return cpu_kernel.compiler_key(checked)
    return digest(cuda_kernel.compiler_key(), cuda_kernel.architecture(index))


def compile_cubin(sources: Sequence[KernelSource]) -> list[bytes]:
    """Compiles kernels for sm_90a with NVRTC, and returns their machine code. No GPU and no driver
    are needed.

    Raises:
        CompileError: NVRTC is not installed, or rejects a kernel.
    """
    count_requests(len(sources))
    return cuda_kernel.cubins(sources, cuda_kernel.HOPPER)
