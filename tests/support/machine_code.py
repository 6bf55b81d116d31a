"""Compiles the tests' kernels for GPUs of sm_90a with NVRTC, several kernels in one program.

A program of one kernel spends most of its time on code that all kernels share. Each kernel has an
entry of its own in the disk cache, so only new kernels are compiled. Long and short kernels are
mixed, so that all threads finish at about the same time.

Kernels with one thread per block are plain loops for the CPU, which no GPU runs; programs of them
are compiled without optimization. NVRTC would take up to a minute for each loop that g++ vectorizes
and unrolls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fuser.runtime import cuda_kernel
from fuser.runtime.kernel_cache import KernelCache, digest
from fuser.runtime.kernel_text import in_namespace
from fuser.support.errors import CompileError
from fuser.support.kernel_source import KernelSource

TOGETHER = 16
_ONE_THREAD = "__launch_bounds__(1)"


def compile_for_hopper(kernels: Mapping[str, str]) -> None:
    """Compiles kernels (text -> name) with the options that a GPU's kernels get.

    Raises:
        CompileError: NVRTC refuses a kernel, which is named.
    """
    sources = [KernelSource(name, text, (), False) for text, name in kernels.items()]
    by_key = {
        digest("beside others", cuda_kernel.kernel_key(k, cuda_kernel.HOPPER)): k for k in sources
    }
    cache = KernelCache()
    if not (missing := _missing(cache, by_key)):
        return
    with cache.lock(next(iter(missing))):  # ranks make the same kernels
        missing = _missing(cache, missing)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            jobs = [
                pool.submit(_compile, cache, part, options) for part, options in _parts(missing)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _missing(cache: KernelCache, by_key: Mapping[str, KernelSource]) -> dict[str, KernelSource]:
    return {key: k for key, k in by_key.items() if cache.find(key, k.name) is None}


def _parts(
    by_key: Mapping[str, KernelSource],
) -> Iterator[tuple[dict[str, KernelSource], tuple[str, ...]]]:
    """Yields the kernels of each program and its options, the slowest to compile first."""
    longest = sorted(by_key, key=lambda key: -len(by_key[key].text))
    plain = [key for key in longest if _ONE_THREAD in by_key[key].text]
    threaded = [key for key in longest if _ONE_THREAD not in by_key[key].text]
    for keys, more in ((threaded, ()), (plain, ("--device-debug",))):
        count = -(-len(keys) // TOGETHER)
        for first in range(count):
            yield {key: by_key[key] for key in keys[first::count]}, (*cuda_kernel.OPTIONS, *more)


def _compile(
    cache: KernelCache, by_key: Mapping[str, KernelSource], options: Sequence[str]
) -> None:
    units = [in_namespace(k, f"n{number}") for number, k in enumerate(by_key.values())]
    together = KernelSource("together", "".join(units), (), False)
    try:
        code = cuda_kernel._compile(together, cuda_kernel.HOPPER, options)
    except CompileError:
        for kernel in by_key.values():  # alone, for an error that names the kernel
            cuda_kernel._compile(kernel, cuda_kernel.HOPPER, options)
        raise
    assert code[:4] == b"\x7fELF", "machine code is no ELF file"
    cache.store({key: k.name for key, k in by_key.items()}, code, "cubin")
