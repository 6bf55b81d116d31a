"""Kernels for the CPU: g++ compiles the CUDA text against `simt.h`, many kernels at once.

A library exports, for each kernel, a C function of a launch record (`fuser.runtime.cpu_kernel`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fuser.errors import CompileError
from fuser.kernel_source import KernelParam, KernelSource
from fuser.runtime.cpu_kernel import CheckedCpuKernel, CpuKernel, LaunchFunction
from fuser.runtime.kernel import CompiledKernel, count_compilations
from fuser.runtime.kernel_cache import CachedKernel, KernelCache, digest
from fuser.runtime.sources import (
    ENGINE_FILE,
    RT_FILES,
    SIMT_FILES,
    codegen_text,
    explain,
    preamble,
)

_COMMON_FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-semantic-interposition",
    "-march=native",
    "-w",
)
# Vectorise, but keep the meaning of NaN and Inf: never -ffinite-math-only.
_FAST_FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
_CHECKED_FLAGS = ("-O1", "-fno-math-errno", "-fno-trapping-math", "-DFUSER_SIMT_CHECKED")
_ENGINE_FLAGS = ("-O2", "-fno-exceptions")


# ---- the compiler -------------------------------------------------------------------------------
def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise CompileError(
            f"kernels for the CPU need a C++ compiler, and {name!r} was not found: install g++"
            " (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or set CXX"
        )
    return path


@functools.cache
def _compiler_identity(compiler: str) -> str:
    """The compiler's version and what `-march=native` means to it on this machine."""
    try:
        answer = subprocess.run(
            [compiler, "-march=native", "-###", "-E", "-x", "c++", "-"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        raise CompileError(f"the C++ compiler {compiler} cannot be started: {error}") from error
    lines = answer.stderr.splitlines()
    version = next((line for line in lines if " version " in line), "unknown version")
    # Keep the code generation options; paths and temporary names would only disturb.
    features = sorted(
        {
            word.strip('"')
            for line in lines
            for word in line.split()
            if word.strip('"').startswith("-m") or "cache" in word
        }
    )
    return "\n".join([version, *features])


def _run_compiler(flags: Sequence[str], text: str, texts: dict[str, str]) -> bytes:
    """Compiles one translation unit to a shared library.

    Raises:
        CompileError: with the log and the lines around the first error.
    """
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="fuser-") as folder:
        source, library = Path(folder, "unit.cpp"), Path(folder, "unit.so")
        source.write_text(text)
        command = [compiler, *_COMMON_FLAGS, *flags, "-o", str(library), str(source), "-lm"]
        environment = os.environ | {"LC_ALL": "C"}
        try:
            answer = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                check=False,
            )
        except OSError as error:
            raise CompileError(f"the C++ compiler {compiler} cannot be started: {error}") from error
        if answer.returncode != 0:
            raise CompileError(
                f"{compiler} refused a generated kernel:\n{explain(answer.stderr, texts)}"
            )
        return library.read_bytes()


# ---- the translation unit -----------------------------------------------------------------------
def _argument(param: KernelParam, slot: int, slots: int) -> str:
    if param.is_pointer:
        return f'simt::pointer<{param.ctype}>(launch, {slot}, {slots}, "{param.name}")'
    return f"simt::scalar<{param.ctype}>(launch, {slot})"


def _unit(source: KernelSource, symbol: str, *, checked: bool) -> str:
    """The text of one kernel in its namespace, with the function that unpacks a launch record."""
    count = len(source.params)
    arguments = ",\n      ".join(
        _argument(param, slot, count) for slot, param in enumerate(source.params)
    )
    if checked or source.uses_barriers:
        body = f"""\
static void {symbol}_thread(const simt::Launch* launch, const simt::Thread* thread) {{
  simt::enter(launch, thread);
  {symbol}_kernel({arguments});
}}
FUSER_EXPORT int {symbol}(const simt::Launch* launch) {{
  return launch->engine->run(launch, {symbol}_thread, {int(checked)});
}}
"""
    else:
        names = ", ".join(f"p{i}" for i in range(count))
        unpack = "".join(
            f"  const auto p{slot} = {_argument(param, slot, count)};\n"
            for slot, param in enumerate(source.params)
        )
        body = f"""\
FUSER_EXPORT int {symbol}(const simt::Launch* launch) {{
{unpack}  simt::run_loops(launch, [=] {{ {symbol}_kernel({names}); }});
  return 0;
}}
"""
    return f"""
namespace {symbol}_unit {{
#define {source.name} {symbol}_kernel
#line 1 "{source.name}"
{source.text}
#undef {source.name}
#line 1 "{source.name}.launcher"
{body}
#ifdef nvfuser_index_t
#undef nvfuser_index_t
#endif
}}
"""


@functools.cache
def _key_prefix(checked: bool) -> str:
    flags = _COMMON_FLAGS + (_CHECKED_FLAGS if checked else _FAST_FLAGS)
    return digest(preamble(SIMT_FILES + RT_FILES), " ".join(flags), _compiler_identity(_compiler()))


def _kernel_key(source: KernelSource, *, checked: bool) -> str:
    # The launcher is part of the text, so a change of its template changes the key.
    return digest(_key_prefix(checked), _unit(source, "k", checked=checked))


def kernel_key_unchecked(source: KernelSource) -> str:
    """The cache key of a kernel for the CPU."""
    return _kernel_key(source, checked=False)


def kernel_key_checked(source: KernelSource) -> str:
    """The cache key of a kernel for the CPU in checked mode."""
    return _kernel_key(source, checked=True)


def _load_or_compile(
    cache: KernelCache, sources: dict[str, KernelSource], *, checked: bool
) -> dict[str, CachedKernel]:
    """Finds each key on disk; compiles the missing ones together, in one compiler process."""
    found = {key: entry for key in sources if (entry := cache.find(key))}
    missing = [key for key in sources if key not in found]
    if not missing:
        return found
    with cache.lock(missing[0]):
        # Another rank may have compiled them while this one waited.
        found |= {key: entry for key in missing if (entry := cache.find(key))}
        missing = [key for key in missing if key not in found]
        if missing:
            symbols = {key: f"fuser_{key[:32]}" for key in missing}
            units = [_unit(sources[key], symbols[key], checked=checked) for key in missing]
            text = preamble(SIMT_FILES + RT_FILES) + "".join(units)
            texts = {name: codegen_text(name) for name in SIMT_FILES + RT_FILES}
            texts |= {sources[key].name: sources[key].text for key in missing}
            library = _run_compiler(_CHECKED_FLAGS if checked else _FAST_FLAGS, text, texts)
            count_compilations(len(missing))
            found |= cache.store(symbols, library, "so")
    return found


def _compile(sources: Sequence[KernelSource], *, checked: bool) -> list[CompiledKernel]:
    by_key = {_kernel_key(source, checked=checked): source for source in sources}
    entries = _load_or_compile(KernelCache(), by_key, checked=checked)
    kernels: dict[str, CompiledKernel] = {}
    for key, source in by_key.items():
        function = _function(entries[key])
        engine = _engine_address() if checked or source.uses_barriers else 0
        make = CheckedCpuKernel if checked else CpuKernel
        kernels[key] = make(source, function, engine)
    return [kernels[_kernel_key(source, checked=checked)] for source in sources]


def compile_unchecked(sources: Sequence[KernelSource]) -> list[CompiledKernel]:
    """Compiles kernels for the CPU."""
    return _compile(sources, checked=False)


def compile_checked(sources: Sequence[KernelSource]) -> list[CompiledKernel]:
    """Compiles kernels for the CPU in checked mode."""
    return _compile(sources, checked=True)


# ---- loading ------------------------------------------------------------------------------------
_libraries: dict[str, ctypes.CDLL] = {}


def _library(path: Path) -> ctypes.CDLL:
    # Named by content: one name is one library for good, also when a damaged file was replaced.
    loaded = _libraries.get(path.name)
    if loaded is None:
        loaded = _libraries[path.name] = ctypes.CDLL(str(path))
    return loaded


def _function(entry: CachedKernel) -> LaunchFunction:
    function = getattr(_library(entry.path), entry.symbol)
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    return cast("LaunchFunction", function)


@functools.cache
def _engine_address() -> int:
    """Loads the SIMT engine, compiled on first use; returns the address of its function table."""
    text = preamble((SIMT_FILES[0],)) + preamble((ENGINE_FILE,)).replace(
        '#include "simt_abi.h"', ""
    )
    key = digest(
        text, " ".join(_COMMON_FLAGS + _ENGINE_FLAGS), _compiler_identity(_compiler()), "engine"
    )
    cache = KernelCache()
    entry = cache.find(key)
    if entry is None:
        with cache.lock(key):
            entry = cache.find(key)
            if entry is None:
                texts = {name: codegen_text(name) for name in (SIMT_FILES[0], ENGINE_FILE)}
                library = _run_compiler(_ENGINE_FLAGS, text, texts)
                entry = cache.store({key: "fuser_simt_engine"}, library, "so")[key]
    function = getattr(_library(entry.path), entry.symbol)
    function.restype = ctypes.c_void_p
    return int(function())
