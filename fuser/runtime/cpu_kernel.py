"""Kernels for the CPU: g++ compiles CUDA text with the header `simt.h`, many kernels at once.

A compiled library exports one C function per kernel. The function's argument is a launch record
(numbers of blocks and threads, and arguments), which the comment before `LaunchFunction` describes.
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
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from fuser.runtime.compiled_kernel import (
    NUMBERS,
    Argument,
    CompiledKernel,
    Dim3,
    LaunchCall,
    PreparedLaunch,
    count_compilations,
    slot_code,
)
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
from fuser.support.errors import CompileError, KernelError, NoCompilerError
from fuser.support.kernel_source import KernelParam, KernelSource
from fuser.support.locks import make_lock

if TYPE_CHECKING:
    import torch

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
# GCC's vectoriser (seen in 12.2) may miscompile conditional loads in an unrolled loop. It may treat
# loads of several iterations as consecutive although their addresses are in another order, which
# gives wrong numbers. Kernels with such loads are compiled without unrolling before vectorisation.
_LOADS_BY_CONDITION = re.compile(r"[?:] \w+\[|if \(")
_KEEP_LOOPS = ("--param=max-completely-peel-times=1", "-DFUSER_KEEPS_LOOPS")
_CHECKED_FLAGS = ("-Og", "-fno-math-errno", "-fno-trapping-math", "-DFUSER_SIMT_CHECKED")
_ENGINE_FLAGS = ("-O2", "-fno-exceptions")
# One thread compiles at a time; the others find its result.
_lock = make_lock()


# A source that any C++ compiler accepts, and the time limit for compiling it.
_TRIVIAL = "int answer() { return 42; }\n"
_TRIAL_LIMIT_S = 60.0
_REMEDY = (
    "set CXX to a C++ compiler that works, or unset it to use g++: `apt-get install g++` "
    "(Fedora: dnf install gcc-c++), then `export CXX=g++`"
)


# ---- the compiler -------------------------------------------------------------------------------
def cxx_compiler() -> str:
    """Returns the path of the C++ compiler: `$CXX` if set, else g++.

    Raises:
        CompileError: the compiler is not installed.
    """
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
    """Returns the compiler's version, and the options that `-march=native` selects on this machine.
    Both determine machine code, so they are a part of cache keys.
    """
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
    # Only options for code generation are used, because paths and temporary names differ between
    # runs.
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
    """Compiles one line of C++ with the flags of kernels, to find out whether the compiler works.
    Returns the compiler's path and version.

    Raises:
        CompileError: there is no compiler, or the compiler fails or does not end within `timeout_s`
            seconds.
    """
    _run_compiler((), _TRIVIAL, {}, timeout_s=timeout_s)
    compiler = cxx_compiler()
    return f"{compiler}, {_compiler_identity(compiler).partition(chr(10))[0].strip()}"


@contextlib.contextmanager
def _scratch_folder(text: str) -> Iterator[tuple[Path, Path]]:
    """Yields two paths in a temporary folder: that of a source file with `text`, and that of the
    library to create.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fuser-") as folder:
            source = Path(folder, "unit.cpp")
            source.write_text(text)
            yield source, Path(folder, "unit.so")
    except OSError as error:
        raise NoCompilerError(
            f"the compiler needs temporary files, which cannot be written ({error}): set TMPDIR to"
            " a folder with free space"
        ) from error


def _run_compiler(
    flags: Sequence[str], text: str, texts: dict[str, str], *, timeout_s: float | None = None
) -> bytes:
    """Compiles the C++ text `text` to a shared library, and returns the bytes of the library.

    `flags` are the compiler's options, and `timeout_s` limits its time. `texts` has the source
    texts by file name, for excerpts in error messages.

    Raises:
        CompileError: compilation failed. The message has the compiler's log, and the source lines
            around the first error.
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
            raise NoCompilerError(
                f"{compiler} did not finish within {timeout_s:g} s\n{_REMEDY}"
            ) from None
        if answer.returncode != 0:
            raise _refused(compiler, answer, text, texts)
        try:
            return library.read_bytes()
        except FileNotFoundError:
            raise NoCompilerError(
                f"{compiler} ended with exit code 0, but made no library{_said(answer)}\n{_REMEDY}"
            ) from None


def _not_started(compiler: str, error: OSError) -> NoCompilerError:
    return NoCompilerError(f"the C++ compiler {compiler} cannot be started: {error}\n{_REMEDY}")


def _said(answer: subprocess.CompletedProcess[str]) -> str:
    """Returns the end of a sentence about a failed compiler: a colon and the compiler's output, or
    the words ", and wrote nothing".
    """
    text = answer.stderr.strip() or answer.stdout.strip()
    return f":\n{text}" if text else ", and wrote nothing"


def _refused(
    compiler: str,
    answer: subprocess.CompletedProcess[str],
    text: str,
    texts: dict[str, str],
) -> CompileError:
    """Returns the error for a failed compilation of `text`. Compiles a trivial source to find out
    whether the compiler itself is broken.

    `answer` is the ended compiler process. `texts` has source texts by file name, for excerpts in
    the message.
    """
    code = answer.returncode
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if not answer.stderr.strip() or text == _TRIVIAL:
        return NoCompilerError(f"{compiler} {ended}{_said(answer)}\n{_REMEDY}")
    try:
        _run_compiler((), _TRIVIAL, {}, timeout_s=_TRIAL_LIMIT_S)
    except NoCompilerError as error:
        return error
    return CompileError(f"{compiler} rejected a generated kernel:\n{explain(answer.stderr, texts)}")


# ---- the translation unit -----------------------------------------------------------------------
def _argument(param: KernelParam, slot: int, slots: int) -> str:
    if param.is_pointer:
        return f'simt::pointer<{param.ctype}>(launch, {slot}, {slots}, "{param.name}")'
    return f"simt::scalar<{param.ctype}>(launch, {slot})"


def _unit(source: KernelSource, symbol: str, *, checked: bool) -> str:
    """Returns the C++ text of one kernel in its own namespace, with an exported function `symbol`
    that runs the kernel.

    The function takes a launch record: the numbers of CUDA blocks and threads, and the arguments of
    a launch, as bytes.
    """
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
    """Returns a digest of everything besides a kernel's text that determines its machine code:
    headers, flags and compiler.

    `checked` selects the flags for run-time checks.
    """
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
    """Returns the key under which a kernel for the CPU, without run-time checks, is cached."""
    return _kernel_key(source, checked=False)


def kernel_key_checked(source: KernelSource) -> str:
    """Returns the key under which a kernel for the CPU, with run-time checks, is cached."""
    return _kernel_key(source, checked=True)


def _symbol(key: str) -> str:
    return f"fuser_{key[:32]}"


def _fast_flags(sources: Iterable[KernelSource]) -> tuple[str, ...]:
    has_conditions = any(_LOADS_BY_CONDITION.search(source.text) for source in sources)
    return _FAST_FLAGS + (_KEEP_LOOPS if has_conditions else ())


def _compile_missing(
    cache: KernelCache, sources: dict[str, KernelSource], *, checked: bool
) -> Binary:
    """Compiles kernels together, in one compiler process, and stores the library in the cache.
    `sources` has the kernels by cache key.
    """
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
    """Returns the C function of each kernel, by cache key. `sources` has the kernels by cache key.

    Kernels that are not on disk, or that cannot be loaded, are compiled together. While this
    process waits for the lock, another process may compile some kernels. Such kernels are then
    loaded from disk.
    """
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
    """Compiles kernels for the CPU, without run-time checks."""
    return _compile(sources, checked=False)


def compile_checked(sources: Iterable[KernelSource]) -> list[CompiledKernel]:
    """Compiles kernels for the CPU, with run-time checks."""
    return _compile(sources, checked=True)


# ---- loading ------------------------------------------------------------------------------------
class _Library(ctypes.CDLL):
    """A loaded shared library. It is unloaded when the last reference to the library or to one of
    its functions is dropped.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        weakref.finalize(self, _ctypes.dlclose, self._handle).atexit = False


_libraries: weakref.WeakValueDictionary[str, _Library] = weakref.WeakValueDictionary()
_loads = itertools.count(1)


@contextlib.contextmanager
def in_memory(binary: Binary) -> Iterator[str]:
    """Yields a path from which the dynamic loader can read a library that exists only in memory."""
    handle = os.memfd_create(binary.name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(binary.data)
        # The loader identifies a library by its path, and file descriptors are reused. Each load
        # therefore uses a different spelling of the path.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_loads):b}")
        yield f"/proc/self/fd/{spelling}{handle}"
    finally:
        os.close(handle)


def _library(binary: Binary) -> _Library:
    """Returns the loaded library with the contents `binary`. If it is not loaded yet, loads it from
    memory, because no other process can change memory.
    """
    loaded = _libraries.get(binary.name)
    if loaded is None:
        with in_memory(binary) as path:
            loaded = _libraries[binary.name] = _Library(path)
    return loaded


def _function(binary: Binary, symbol: str) -> LaunchFunction:
    """Returns the C function `symbol`, which runs a kernel, from the library with the contents
    `binary`.

    Raises:
        OSError, AttributeError: the binary is not a library, or does not have the symbol.
    """
    # Access by index, because ctypes caches a function accessed by attribute, and never frees it.
    function = _library(binary)[symbol]
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    return cast("LaunchFunction", function)


_ENGINE_SYMBOL = "fuser_simt_engine"


@functools.cache
def _engine() -> Callable[[], int]:
    """Loads the SIMT engine: the C++ code that runs the threads of a CUDA block on a CPU.

    Returns the C function that returns the address of the engine's function table. The engine is
    compiled on first use, and remains loaded.
    """
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
    """Returns the address of the function table of the SIMT engine, which runs CUDA blocks on a
    CPU.
    """
    return int(_engine()())


# ----------------------------------------------------------------------
# Launching kernels on the CPU, with or without checks.
#
# The launch record is `simt::Launch` of `fuser/codegen/simt_abi.h`: 3+3 uint32 for grid and block,
# uint32 shared bytes, uint32 order seed, the addresses of the engine and of the report, and 8 bytes
# for each parameter. For a checked kernel, the extent of each parameter in bytes (8 bytes) follows.

# `int (*)(const simt::Launch*)`: takes the record's bytes or address. If the result is not 0, the
# report has the reason.
LaunchFunction: TypeAlias = "Callable[[Any], int]"

_HEADER = "=8I2Q"


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("message", ctypes.c_char * 1016),
        ("counters", ctypes.c_uint64 * 24),
    )


@dataclass(frozen=True)
class Counters:
    """Statistics of a checked kernel's last launch on the CPU, summed over all CUDA blocks.

    Each dict of loads or stores maps a width in bytes (1, 2, 4, 8, 16) to the number of accesses.
    The other fields are numbers of events.
    """

    global_loads: dict[int, int]
    global_stores: dict[int, int]
    shared_loads: dict[int, int]
    shared_stores: dict[int, int]
    block_barriers: int
    warp_exchanges: int
    atomics: int
    cluster_barriers: int

    @staticmethod
    def _from(report: _Report) -> Counters:
        values = list(report.counters)

        def widths(first: int) -> dict[int, int]:
            return {1 << i: values[first + i] for i in range(5) if values[first + i]}

        return Counters(widths(0), widths(5), widths(10), widths(15), *values[20:24])


def span_nbytes(tensor: torch.Tensor) -> int:
    """Returns the number of bytes from a tensor's first element to the end of its last element in
    memory."""
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


class CpuKernel(CompiledKernel):
    """A kernel compiled for the CPU, without run-time checks."""

    def __init__(self, source: KernelSource, function: LaunchFunction, engine: int) -> None:
        super().__init__(source)
        self._function = function
        self._engine = engine
        self._report = _Report()
        self._report_address = ctypes.addressof(self._report)
        self._pack = struct.Struct(_HEADER + "".join(map(slot_code, source.params))).pack

    def _record(
        self, args: Sequence[Argument], grid: Dim3, block: Dim3, smem_bytes: int, order_seed: int
    ) -> bytes:
        values = [a if a.__class__ in NUMBERS else cast("torch.Tensor", a).data_ptr() for a in args]
        return self._pack(
            *grid, *block, smem_bytes, order_seed, self._engine, self._report_address, *values
        )

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Runs the kernel on the CPU with one argument for each parameter, and waits for its end.
        `stream` has no effect.
        """
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._record(args, grid, block, smem_bytes, 0)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        if self._function(record):
            raise self._finding(grid, block)

    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        """Returns a launch on the CPU for repeated use, whose arguments are packed only once."""
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._record(args, grid, block, smem_bytes, 0)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        return PreparedCpuLaunch(self, record, grid, block)

    def _smem_error(self, smem_bytes: int) -> KernelError:
        return KernelError(
            f"kernel {self.name} was compiled without barriers, so it cannot have shared memory, "
            f"but is launched with {smem_bytes} bytes of it"
        )

    def _finding(self, grid: Dim3, block: Dim3) -> KernelError:
        message = self._report.message.decode(errors="replace")
        return KernelError(f"kernel {self.name}, grid {grid}, block {block}: {message}")


class PreparedCpuLaunch(PreparedLaunch):
    """A launch of a CPU kernel whose launch record is packed once, for repeated use.

    The record has the numbers of CUDA blocks and threads, and the arguments, in the format that the
    kernel's C function reads. The C code that repeats recorded calls uses the function `entry` with
    the record's `address`.
    """

    def __init__(self, kernel: CpuKernel, record: bytes, grid: Dim3, block: Dim3) -> None:
        self._kernel = kernel
        self._function = kernel._function
        self._shape = grid, block
        words = len(record) // 8
        self._words = (ctypes.c_uint64 * words).from_buffer_copy(record)
        self._first = words - len(kernel.source.params)
        self.address = ctypes.addressof(self._words)

    @property
    def entry(self) -> int:
        """The address of the C function `int (*)(const simt::Launch*)` that runs the kernel with
        the packed arguments at `address`.
        """
        return ctypes.cast(cast("Any", self._function), ctypes.c_void_p).value or 0

    def set_pointer(self, param: int, address: int) -> None:
        """Replaces the address of the tensor that is the argument for the parameter with index
        `param`.
        """
        self._words[self._first + param] = address

    def run(self, stream: int | None = None) -> None:
        """Runs the kernel on the CPU and waits for its end. `stream` has no effect."""
        if self._function(self.address):
            self._fail(0)

    def bind(self, stream: int) -> LaunchCall:
        """Returns the launch as a call of the kernel's C function with the packed arguments.
        `stream` has no effect.
        """
        params = len(self._words) - self._first
        words = (ctypes.c_uint64 * params).from_buffer(self._words, 8 * self._first)
        raw = self.entry, self.address
        return LaunchCall(words, self._function, (self.address,), self._fail, raw=raw)

    def _fail(self, status: int) -> None:
        del status
        raise self._kernel._finding(*self._shape)


class CheckedCpuKernel(CpuKernel):
    """A kernel compiled for the CPU with all run-time checks (bounds, alignment, barriers, races).
    `counters` has statistics of its last launch.

    `order_seed` selects the order in which CUDA blocks and threads run: 0 in order, 1 reversed. Any
    other number shuffles the order with that number as seed.
    """

    def __init__(self, source: KernelSource, function: LaunchFunction, engine: int) -> None:
        super().__init__(source, function, engine)
        self.order_seed = 0
        self._lock = make_lock()
        self._extents = struct.Struct(f"={len(source.params)}q")

    @property
    def counters(self) -> Counters:
        """The numbers of memory accesses and events of the last launch."""
        return Counters._from(self._report)

    def _checked_record(
        self, args: Sequence[Argument], grid: Dim3, block: Dim3, smem_bytes: int, order_seed: int
    ) -> bytes:
        values: list[Argument] = []
        extents: list[int] = []
        for index, arg in enumerate(args):
            param = self.source.params[index] if index < len(self.source.params) else None
            if param is None or not param.is_pointer:
                values.append(arg)
                extents.append(0)
            elif isinstance(arg, tuple):
                values.append(arg[0])
                extents.append(arg[1])
            elif isinstance(arg, (int, float)):
                raise TypeError(
                    f"the parameter {param.name} of a checked kernel must be a tensor or a pair "
                    f"(address, nbytes), but it is {arg!r}"
                )
            else:
                values.append(arg)
                extents.append(span_nbytes(cast("torch.Tensor", arg)))
        record = self._record(values, grid, block, smem_bytes, order_seed)
        return record + self._extents.pack(*extents)

    def launch(
        self,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Runs the kernel with run-time checks. Only one launch of the kernel runs at a time."""
        if smem_bytes and not self.source.uses_barriers:
            raise self._smem_error(smem_bytes)
        try:
            record = self._checked_record(args, grid, block, smem_bytes, self.order_seed)
        except (struct.error, ArithmeticError, AttributeError, TypeError) as error:
            raise self._argument_error(args, error) from error
        with self._lock:
            ctypes.memset(self._report_address, 0, ctypes.sizeof(_Report))
            if self._function(record):
                raise self._finding(grid, block)

    def prepare(
        self, args: Sequence[Argument], *, grid: Dim3, block: Dim3, smem_bytes: int = 0
    ) -> PreparedLaunch:
        """Returns a launch for repeated use. A checked kernel also checks the sizes of buffers, so
        each run packs the arguments again.
        """
        return _CheckedPreparedLaunch(self, args, grid=grid, block=block, smem_bytes=smem_bytes)


class _CheckedPreparedLaunch(PreparedLaunch):
    """A launch, for repeated use, of a CPU kernel with run-time checks. If an address is replaced,
    the checks assume that the new buffer has the size of the previous one.
    """

    def __init__(
        self,
        kernel: CheckedCpuKernel,
        args: Sequence[Argument],
        *,
        grid: Dim3,
        block: Dim3,
        smem_bytes: int,
    ) -> None:
        self._kernel = kernel
        self._args = list(args)
        self._shape = grid, block, smem_bytes

    def set_pointer(self, param: int, address: int) -> None:
        """Replaces the address of the tensor that is the argument for the parameter with index
        `param`. The checks assume that the new buffer has the size of the old one.
        """
        old = self._args[param]
        extent = old[1] if isinstance(old, tuple) else span_nbytes(cast("torch.Tensor", old))
        self._args[param] = (address, extent)

    def run(self, stream: int | None = None) -> None:
        """Runs the kernel on the CPU with the current addresses. `stream` has no effect."""
        grid, block, smem_bytes = self._shape
        self._kernel.launch(self._args, grid=grid, block=block, smem_bytes=smem_bytes)

    def bind(self, stream: int) -> LaunchCall:
        """Always raises `KernelError`: a launch with run-time checks cannot be one call of a C
        function, because each launch packs its arguments again.
        """
        raise KernelError(
            f"internal error: kernel {self._kernel.name} checks its accesses, and such a kernel "
            "cannot be called directly from C, because each launch packs its arguments again. "
            "Please report this definition"
        )
