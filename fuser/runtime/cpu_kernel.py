"""Kernels for the CPU: g++ compiles the CUDA text against `simt.h`, many kernels at once.

A library exports, for each kernel, a C function of a launch record (`fuser.runtime.cpu_kernel`).
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fuser.runtime.compiled_kernel import CompiledKernel, count_compilations
from fuser.runtime.cpu_kernel_part import CheckedCpuKernel, CpuKernel, LaunchFunction
from fuser.runtime.kernel_cache import Binary, KernelCache, digest
from fuser.runtime.kernel_text import (
    ENGINE_FILE,
    RT_FILES,
    SIMT_FILES,
    codegen_text,
    explain,
    in_namespace,
    preamble,
)
from fuser.support.errors import CompileError, NoCompilerError
from fuser.support.kernel_source import KernelParam, KernelSource
from fuser.support.locks import make_lock

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
# GCC's vectoriser (seen in 12.2) may take loads by a condition that several iterations of an
# unrolled loop make for neighbours in memory, in this order, although their addresses lie in
# another: wrong numbers. So where a kernel has such loads, no loop is unrolled beforehand.
_LOADS_BY_CONDITION = re.compile(r"[?:] \w+\[|if \(")
_KEEP_LOOPS = ("--param=max-completely-peel-times=1", "-DFUSER_KEEPS_LOOPS")
_CHECKED_FLAGS = ("-Og", "-fno-math-errno", "-fno-trapping-math", "-DFUSER_SIMT_CHECKED")
_ENGINE_FLAGS = ("-O2", "-fno-exceptions")
# One thread compiles: others find what it made.
_lock = make_lock()


# What any C++ compiler compiles, and how long that may take.
_TRIVIAL = "int answer() { return 42; }\n"
_TRIAL_LIMIT_S = 60.0
_REMEDY = (
    "CXX names a C++ compiler that works, and g++ is taken without it: `apt-get install g++` "
    "(Fedora: dnf install gcc-c++), then `export CXX=g++`"
)


# ---- the compiler -------------------------------------------------------------------------------
def cxx_compiler() -> str:
    """The C++ compiler. Raises `CompileError` where there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise NoCompilerError(
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
        raise _not_started(compiler, error) from error
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


def try_compiler(timeout_s: float) -> str:
    """Compiles a line of C++ as a kernel would be; returns the compiler's path and version.

    Raises:
        CompileError: there is none, it refuses, or it does not answer in time.
    """
    _run_compiler((), _TRIVIAL, {}, timeout_s=timeout_s)
    compiler = cxx_compiler()
    return f"{compiler}, {_compiler_identity(compiler).partition(chr(10))[0].strip()}"


@contextlib.contextmanager
def _scratch_folder(text: str) -> Iterator[tuple[Path, Path]]:
    """Yields the paths of a source file with `text`, and of the library to make beside it."""
    try:
        with tempfile.TemporaryDirectory(prefix="fuser-") as folder:
            source = Path(folder, "unit.cpp")
            source.write_text(text)
            yield source, Path(folder, "unit.so")
    except OSError as error:
        raise NoCompilerError(
            f"no temporary files for the compiler ({error}): set TMPDIR to a folder with room"
        ) from error


def _run_compiler(
    flags: Sequence[str], text: str, texts: dict[str, str], *, timeout_s: float | None = None
) -> bytes:
    """Compiles one translation unit to a shared library.

    Raises:
        CompileError: with the log and the lines around the first error.
    """
    compiler = cxx_compiler()
    with _scratch_folder(text) as (source, library):
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
                timeout=timeout_s,
            )
        except OSError as error:
            raise _not_started(compiler, error) from error
        except subprocess.TimeoutExpired:
            raise NoCompilerError(f"{compiler} does not answer within {timeout_s:g} s") from None
        if answer.returncode != 0:
            raise _refused(compiler, answer, text, texts)
        try:
            return library.read_bytes()
        except FileNotFoundError:
            raise NoCompilerError(
                f"{compiler} ended with exit code 0 and made no library{_said(answer)}\n{_REMEDY}"
            ) from None


def _not_started(compiler: str, error: OSError) -> NoCompilerError:
    return NoCompilerError(f"the C++ compiler {compiler} cannot be started: {error}\n{_REMEDY}")


def _said(answer: subprocess.CompletedProcess[str]) -> str:
    """Returns what a compiler wrote, as the end of a sentence."""
    text = answer.stderr.strip() or answer.stdout.strip()
    return f":\n{text}" if text else ", and wrote nothing"


def _refused(
    compiler: str,
    answer: subprocess.CompletedProcess[str],
    text: str,
    texts: dict[str, str],
) -> CompileError:
    """Returns why there is no library: the machine's fault, where a line of C++ is refused too."""
    code = answer.returncode
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if not answer.stderr.strip() or text == _TRIVIAL:
        return NoCompilerError(f"{compiler} {ended}{_said(answer)}\n{_REMEDY}")
    try:
        _run_compiler((), _TRIVIAL, {}, timeout_s=_TRIAL_LIMIT_S)
    except NoCompilerError as error:
        return error
    return CompileError(f"{compiler} refused a generated kernel:\n{explain(answer.stderr, texts)}")


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
  return launch->engine->run(launch, {symbol}_thread, {int(checked)}, {source.cluster});
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
    launcher = f'#line 1 "{source.name}.launcher"\n{body}'
    return in_namespace(source, symbol, launcher)


@functools.cache
def compiler_key(checked: bool) -> str:
    """What, beside a kernel's text, decides about its machine code."""
    flags = _COMMON_FLAGS + (_CHECKED_FLAGS if checked else _FAST_FLAGS + _KEEP_LOOPS)
    return digest(
        preamble(SIMT_FILES + RT_FILES),
        " ".join([*flags, _LOADS_BY_CONDITION.pattern]),
        _compiler_identity(cxx_compiler()),
    )


def _kernel_key(source: KernelSource, *, checked: bool) -> str:
    # The launcher is part of the text, so a change of its template changes the key.
    return digest(compiler_key(checked), _unit(source, "k", checked=checked))


def kernel_key_unchecked(source: KernelSource) -> str:
    """The cache key of a kernel for the CPU."""
    return _kernel_key(source, checked=False)


def kernel_key_checked(source: KernelSource) -> str:
    """The cache key of a kernel for the CPU in checked mode."""
    return _kernel_key(source, checked=True)


def _symbol(key: str) -> str:
    return f"fuser_{key[:32]}"


def _fast_flags(sources: Iterable[KernelSource]) -> tuple[str, ...]:
    has_conditions = any(_LOADS_BY_CONDITION.search(source.text) for source in sources)
    return _FAST_FLAGS + (_KEEP_LOOPS if has_conditions else ())


def _compile_missing(
    cache: KernelCache, sources: dict[str, KernelSource], *, checked: bool
) -> Binary:
    """Compiles kernels together, in one compiler process, and stores them."""
    symbols = {key: _symbol(key) for key in sources}
    units = [_unit(source, symbols[key], checked=checked) for key, source in sources.items()]
    text = preamble(SIMT_FILES + RT_FILES) + "".join(units)
    texts = {name: codegen_text(name) for name in SIMT_FILES + RT_FILES}
    texts |= {source.name: source.text for source in sources.values()}
    flags = _CHECKED_FLAGS if checked else _fast_flags(sources.values())
    library = _run_compiler(flags, text, texts)
    count_compilations(len(sources))
    return cache.store(symbols, library, "so")


def _load_or_compile(
    cache: KernelCache, sources: dict[str, KernelSource], *, checked: bool
) -> dict[str, LaunchFunction]:
    """Finds each key on disk and loads it; compiles together what is missing or cannot be loaded,
    and what another rank has not compiled while this one waited."""
    functions: dict[str, LaunchFunction] = {}

    def load_known() -> dict[str, KernelSource]:
        for key in sources.keys() - functions.keys():
            binary = cache.find(key, _symbol(key))
            if binary is not None:
                with contextlib.suppress(OSError, AttributeError):
                    functions[key] = _function(binary, _symbol(key))
        return {key: source for key, source in sources.items() if key not in functions}

    missing = load_known()
    if missing:
        with cache.lock(next(iter(missing))):
            missing = load_known()
            if missing:
                binary = _compile_missing(cache, missing, checked=checked)
                functions |= {key: _function(binary, _symbol(key)) for key in missing}
    return functions


def _compile(requested: Iterable[KernelSource], *, checked: bool) -> list[CompiledKernel]:
    sources = list(requested)
    if not sources:
        return []
    keys = [_kernel_key(source, checked=checked) for source in sources]
    by_key = dict(zip(keys, sources, strict=True))
    kernels: dict[str, CompiledKernel] = {}
    with _lock:
        functions = _load_or_compile(KernelCache(), by_key, checked=checked)
        for key, source in by_key.items():
            engine = _engine_address() if checked or source.uses_barriers else 0
            make = CheckedCpuKernel if checked else CpuKernel
            kernels[key] = make(source, functions[key], engine)
    return [kernels[key] for key in keys]


def compile_unchecked(sources: Iterable[KernelSource]) -> list[CompiledKernel]:
    """Compiles kernels for the CPU."""
    return _compile(sources, checked=False)


def compile_checked(sources: Iterable[KernelSource]) -> list[CompiledKernel]:
    """Compiles kernels for the CPU in checked mode."""
    return _compile(sources, checked=True)


# ---- loading ------------------------------------------------------------------------------------
class _Library(ctypes.CDLL):
    """A loaded library, by content: unloaded with the last function that was taken from it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        weakref.finalize(self, _ctypes.dlclose, self._handle).atexit = False


_libraries: weakref.WeakValueDictionary[str, _Library] = weakref.WeakValueDictionary()
_loads = itertools.count(1)


@contextlib.contextmanager
def in_memory(binary: Binary) -> Iterator[str]:
    """Yields a path from which the loader reads an object."""
    handle = os.memfd_create(binary.name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(binary.data)
        # The loader takes one path for one library, and numbers of closed files come again: so
        # each load spells its path in a way of its own.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_loads):b}")
        yield f"/proc/self/fd/{spelling}{handle}"
    finally:
        os.close(handle)


def _library(binary: Binary) -> _Library:
    """Loads a library from memory that nobody else can change, or finds it loaded."""
    loaded = _libraries.get(binary.name)
    if loaded is None:
        with in_memory(binary) as path:
            loaded = _libraries[binary.name] = _Library(path)
    return loaded


def _function(binary: Binary, symbol: str) -> LaunchFunction:
    """Raises OSError or AttributeError for what is no library, or lacks the symbol."""
    # By index, because a library remembers, and so never lets go, what is asked for by attribute.
    function = _library(binary)[symbol]
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    return cast("LaunchFunction", function)


_ENGINE_SYMBOL = "fuser_simt_engine"


@functools.cache
def _engine() -> Callable[[], int]:
    """Loads the SIMT engine, compiled on first use, for good; it returns its function table."""
    text = preamble((SIMT_FILES[0],)) + preamble((ENGINE_FILE,)).replace(
        '#include "simt_abi.h"', ""
    )
    key = digest(
        text, " ".join(_COMMON_FLAGS + _ENGINE_FLAGS), _compiler_identity(cxx_compiler()), "engine"
    )
    cache = KernelCache()

    def load(binary: Binary | None) -> Any:
        if binary is not None:
            with contextlib.suppress(OSError, AttributeError):
                return _library(binary)[_ENGINE_SYMBOL]
        return None

    function = load(cache.find(key, _ENGINE_SYMBOL))
    if function is None:
        with cache.lock(key):
            function = load(cache.find(key, _ENGINE_SYMBOL))
            if function is None:
                texts = {name: codegen_text(name) for name in (SIMT_FILES[0], ENGINE_FILE)}
                library = _run_compiler(_ENGINE_FLAGS, text, texts)
                function = _library(cache.store({key: _ENGINE_SYMBOL}, library, "so"))[
                    _ENGINE_SYMBOL
                ]
    function.restype = ctypes.c_void_p
    return function


def _engine_address() -> int:
    """Returns the address of the SIMT engine's function table."""
    return int(_engine()())
