"""Kernels for CUDA devices: NVRTC, through cuda-core, compiles the CUDA text; needs no GPU."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fuser.errors import CompileError
from fuser.kernel_source import KernelSource
from fuser.runtime.kernel import count_compilations
from fuser.runtime.kernel_cache import KernelCache, digest
from fuser.runtime.sources import RT_FILES, codegen_text, explain, preamble

HOPPER = "sm_90a"

_UNREFERENCED_FUNCTION = 177  # most helpers of rt.h, in most kernels
_MAX_THREADS = 8


@functools.cache
def _version() -> str:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompileError(
            f"kernels for CUDA devices need cuda-core and NVRTC ({error}):"
            " install fuser-hostir[nvrtc], or one of the extras cu12 and cu13"
        ) from error
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not tell its version: {status}")
    return f"nvrtc {major}.{minor}"


def _text(source: KernelSource) -> str:
    return f'{preamble(RT_FILES)}\n#line 1 "{source.name}"\n{source.text}'


def kernel_key(source: KernelSource, arch: str) -> str:
    """The cache key of a kernel for one GPU architecture."""
    return digest(_key_prefix(), arch, source.name, source.text)


@functools.cache
def _key_prefix() -> str:
    return digest(preamble(RT_FILES), _version(), f"c++17 fma suppress={_UNREFERENCED_FUNCTION}")


def _compile(source: KernelSource, arch: str) -> bytes:
    """Compiles one kernel.

    Raises:
        CompileError: with NVRTC's log and the lines around the first error.
    """
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(
        name=source.name,
        arch=arch,
        std="c++17",
        fma=True,
        diag_suppress=_UNREFERENCED_FUNCTION,
    )
    try:
        code = core.Program(_text(source), "c++", options).compile("cubin").code
    except Exception as error:
        # cuda-core keeps its NVRTCError private; whatever it raises here is the compiler's refusal.
        texts = {name: codegen_text(name) for name in RT_FILES} | {source.name: source.text}
        raise CompileError(
            f"NVRTC refused kernel {source.name} for {arch}:\n{explain(str(error), texts)}"
        ) from error
    if not isinstance(code, bytes):
        raise CompileError(f"NVRTC gave no machine code for kernel {source.name}")
    return code


def _load_or_compile(cache: KernelCache, key: str, source: KernelSource, arch: str) -> bytes:
    found = cache.find(key, source.name)
    if found is None:
        with cache.lock(key):
            # Another rank may have compiled it while this one waited.
            found = cache.find(key, source.name)
            if found is None:
                code = _compile(source, arch)
                count_compilations(1)
                found = cache.store({key: source.name}, code, "cubin")
    return found.data


def cubins(sources: Sequence[KernelSource], arch: str) -> list[bytes]:
    """Returns each kernel's machine code, from the disk cache or from NVRTC in parallel threads."""
    cache = KernelCache()
    by_key = {kernel_key(source, arch): source for source in sources}

    def load(item: tuple[str, KernelSource]) -> bytes:
        return _load_or_compile(cache, *item, arch)

    # Imported here first: cuda.core's own import is not safe from several threads at once.
    importlib.import_module("cuda.core")
    workers = min(len(by_key), os.cpu_count() or 1, _MAX_THREADS)
    if workers <= 1:
        codes = [load(item) for item in by_key.items()]
    else:
        with ThreadPoolExecutor(workers) as pool:
            codes = list(pool.map(load, by_key.items()))
    by_code = dict(zip(by_key, codes, strict=True))
    return [by_code[kernel_key(source, arch)] for source in sources]
