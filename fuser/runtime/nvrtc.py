"""Kernels for CUDA devices: NVRTC compiles the CUDA text; needs no GPU."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fuser.runtime.compiled_kernel import count_compilations
from fuser.runtime.kernel_cache import KernelCache, digest
from fuser.runtime.kernel_text import RT_FILES, codegen_text, explain, preamble
from fuser.support.errors import CompileError, NoCompilerError
from fuser.support.kernel_source import KernelSource

HOPPER = "sm_90a"

# minimal: without textures and the CUDA runtime's types, a sixth of the time of a small kernel.
# 177: a function that nothing calls; most helpers of rt.h, in most kernels.
OPTIONS = ("--std=c++17", "--fmad=true", "--minimal", "--diag-suppress=177")
_MAX_THREADS = 8


@functools.cache
def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise NoCompilerError(
            f"kernels for CUDA devices need cuda-bindings and NVRTC ({error}):"
            " install fuser-hostir[nvrtc], or one of the extras cu12 and cu13"
        ) from error


def _call(function: str, *args: Any) -> Any:
    """What a function of NVRTC gives. Raises CompileError for anything but success."""
    status, *results = getattr(_nvrtc(), function)(*args)
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{function}: {status!r}")
    return results[0] if len(results) == 1 else results


def _content(kind: str, program: Any) -> bytes:
    """A result of a compilation: `CUBIN` or `ProgramLog`."""
    found = bytearray(_call(f"nvrtcGet{kind}Size", program))
    _call(f"nvrtcGet{kind}", program, found)
    return bytes(found)


@functools.cache
def version() -> str:
    """The compiler's version. Raises CompileError where there is none."""
    major, minor = _call("nvrtcVersion")
    return f"nvrtc {major}.{minor}"


def _text(source: KernelSource) -> str:
    return f'{preamble(RT_FILES)}\n#line 1 "{source.name}"\n{source.text}'


def kernel_key(source: KernelSource, arch: str) -> str:
    """The cache key of a kernel for one GPU architecture."""
    return digest(compiler_key(), arch, source.name, source.text)


@functools.cache
def compiler_key() -> str:
    """What, beside a kernel's text and the architecture, decides about its machine code."""
    return digest(preamble(RT_FILES), version(), *OPTIONS)


def _compile(source: KernelSource, arch: str, options: Sequence[str] = OPTIONS) -> bytes:
    """Compiles one kernel; other threads run meanwhile.

    Raises:
        CompileError: with NVRTC's log and the lines around the first error.
    """
    given = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
    text, name = _text(source).encode(), source.name.encode()
    program = _call("nvrtcCreateProgram", text, name, 0, [], [])
    try:
        try:
            _call("nvrtcCompileProgram", program, len(given), given)
        except CompileError as error:
            log = _content("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            texts = {name: codegen_text(name) for name in RT_FILES} | {source.name: source.text}
            raise CompileError(
                f"NVRTC refused kernel {source.name} for {arch} ({error}):\n{explain(log, texts)}"
            ) from None
        return _content("CUBIN", program)
    finally:
        _call("nvrtcDestroyProgram", program)


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


def cubins(sources: Iterable[KernelSource], arch: str) -> list[bytes]:
    """Returns each kernel's machine code, from the disk cache or from NVRTC.

    A kernel starts in a thread of its own as soon as `sources` yields it: while the compiler works,
    the caller makes the next one. NVRTC reads one program at a time, and optimises several.
    """
    cache = KernelCache()
    keys: list[str] = []
    codes: dict[str, Future[bytes]] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        try:
            for source in sources:
                key = kernel_key(source, arch)
                keys.append(key)
                if key not in codes:
                    codes[key] = pool.submit(_load_or_compile, cache, key, source, arch)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [codes[key].result() for key in keys]
