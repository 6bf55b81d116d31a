"""The compiled runner: a C extension module that repeats the recorded calls of a program, faster
than Python.

When a process repeats calls often, the runner is compiled in the background, with the C++ compiler
for CPU kernels. No call waits for the compilation. The compiled runner is stored in the kernel
cache. Its key contains its source text and Python's ABI.

If the compiler, Python's headers or the needed parts of torch are missing, programs run without the
runner, and `why_not` returns the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from fuser.runtime.cpu_kernel import cxx_compiler, in_memory
from fuser.runtime.kernel_cache import Binary, KernelCache, digest
from fuser.support.errors import CompileError, FuserError
from fuser.support.locks import make_lock

_NAME = "fuser_runner"
_FILES = ("runner.c", "runner_glance.h", "runner_graphs.h", "runner_tensors.h")
_FLAGS = ("-x", "c", "-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_POLL_S = 0.01


class _Absent(Exception):
    """Raised if there can be no compiled runner (the C extension that repeats recorded calls).

    The message is the reason.
    """


class _Build:
    """A running compiler process, which compiles the runner (the C extension that repeats recorded
    calls). It ends when the last reference to this object is dropped.
    """

    def __init__(self, key: str, cache: KernelCache) -> None:
        self._key, self._cache = key, cache
        self._owner = os.getpid()
        self._ends = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None
        # One process per host compiles, and the others find its result. The lock ends with this
        # process, even after a crash.
        if not self._ends.enter_context(cache.lock(key, deadline_s=0.001)) and cache.is_kept():
            self._ends.close()
            return
        try:
            folder = Path(tempfile.mkdtemp(prefix="fuser-"))
            self._ends.callback(shutil.rmtree, folder, ignore_errors=True)
            self._library, self._log = folder / "runner.so", folder / "log"
            command = [cxx_compiler(), *_FLAGS, *_include_flags(), str(_source(_FILES[0]))]
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, "-o", str(self._library)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"LC_ALL": "C"},
                )
        except (OSError, CompileError) as error:
            self.end()
            raise _Absent(str(error)) from error

    def poll(self) -> Binary | None:
        """Returns the compiled library of the runner (the C extension that repeats recorded calls),
        or None if the compiler still runs.

        The library is returned even if the cache could not store it.
        """
        if self.process is None or self.process.poll() is None:
            return None
        try:
            if self.process.returncode:
                log = self._log.read_text(errors="replace").strip()
                raise _Absent(
                    "the compiler rejected the compiled runner's source: "
                    f"{log.partition(chr(10))[0]}"
                )
            return self._cache.store({self._key: _NAME}, self._library.read_bytes(), "so")
        except OSError as error:
            raise _Absent(f"the compiled library cannot be read: {error}") from error
        finally:
            self.end()

    def end(self) -> None:
        """Ends the compiler process if it still runs, and removes its files.

        Does nothing in a forked child, because process and files belong to the parent.
        """
        if self._owner != os.getpid():
            return
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process = None
        self._ends.close()


# The reason while the compiler runs.
COMPILING = "it is being compiled"


class _State:
    """The compiled runner of this process (the C extension that repeats recorded calls), or the
    reason why there is none.
    """

    def __init__(self) -> None:
        self.lock = make_lock()
        self.module: ModuleType | None = None
        self.why = "no call has been repeated often enough"
        self.is_absent = False
        self.build: _Build | None = None
        # The time of the first search, 0 before that.
        self.began = 0.0


_state = _State()


def find() -> ModuleType | None:
    """Returns the compiled runner, the C extension that repeats recorded calls. Never waits.

    Returns None if the runner is still being compiled or cannot be compiled.
    """
    if _state.module is not None or _state.is_absent:
        return _state.module
    with _state.lock:
        _state.began = _state.began or time.monotonic()
        try:
            _state.module = _look()
            _state.why = "" if _state.module else COMPILING
        except (_Absent, FuserError) as error:
            _state.is_absent, _state.why = True, str(error)
    return _state.module


def why_not() -> str:
    """Returns the reason why there is no compiled runner (yet), or "" if there is one. The runner
    is the C extension that repeats recorded calls.
    """
    return _state.why


def waits_for() -> str:
    """Searches again for the compiled runner (the C extension that repeats recorded calls), and
    returns a text on the status of its compilation.
    """
    if find() is not None:
        return "it is compiled now"
    if _state.is_absent:
        return _state.why
    who = "" if _state.build is not None else " by another process"
    return f"{COMPILING}{who}, for {time.monotonic() - _state.began:.0f} s so far"


def wait(timeout_s: float) -> ModuleType | None:
    """Waits for the compiled runner (the C extension that repeats recorded calls), and returns it.
    Returns None if it cannot be compiled within `timeout_s` seconds.
    """
    expiry = time.monotonic() + timeout_s
    while find() is None and not _state.is_absent and time.monotonic() < expiry:
        time.sleep(_POLL_S)
    return _state.module


def _look() -> ModuleType | None:
    """Loads the compiled runner (the C extension that repeats recorded calls) from the cache.

    If the cache does not have it, starts the compiler, or checks whether the compiler has ended.
    Returns None as long as the compiler runs.
    """
    if _state.build is not None:
        made = _state.build.poll()
        if made is None:
            return None
        _state.build = None
        return _loaded(made)
    key, kernels = _key(), KernelCache()
    binary = kernels.find(key, _NAME)
    if binary is not None:
        _tables()
        # The entry may come from another compiler and not load. The library is then compiled again.
        with contextlib.suppress(_Absent):
            return _loaded(binary)
    build = _Build(key, kernels)
    if build.process is not None:
        _state.build = build
        atexit.register(build.end)
    return None


def _key() -> str:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise _Absent(
            "the compiled runner needs Python's global interpreter lock, which this Python lacks"
        )
    try:
        texts = [_source(name).read_text() for name in _FILES]
    except OSError as error:
        raise _Absent(f"the compiled runner's source cannot be read: {error}") from error
    return digest(*texts, " ".join(_FLAGS), sys.version, sysconfig.get_config_var("SOABI") or "")


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def _include_flags() -> list[str]:
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        raise _Absent(f"Python.h was not found in {' or '.join(folders)}: install Python's headers")
    return [f"-I{folder}" for folder in folders]


def _loaded(binary: Binary) -> ModuleType:
    tables = _tables()
    try:
        with in_memory(binary) as path:
            loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
            spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
            assert spec is not None, "a loader that is given has a spec"
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        module.setup(*tables)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise _Absent(f"the compiled runner cannot be loaded: {error}") from error
    return module


def _tables() -> tuple[Any, ...]:
    """Returns the arguments of the function `setup` of the compiled runner (the C extension that
    repeats recorded calls).

    These are torch's table of C functions for tensors, descriptors of tensor attributes, and the
    addresses of other C functions of torch.
    """
    import torch

    table: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    tells_modes: Any = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    base: Any = torch._C.TensorBase
    if table is None or tells_modes is None:
        raise _Absent("this version of torch has no C exchange table: use 2.10 or later")
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Torch has loaded this library; a second instance must not be loaded.
        shim = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD)
        asks = [shim[f"aoti_torch_get_storage_{what}"] for what in ("size", "offset")]
    except (OSError, AttributeError) as error:
        raise _Absent(f"torch's C shim cannot be loaded: {error}") from error
    addresses = [ctypes.cast(ask, ctypes.c_void_p).value for ask in asks]
    return table, base.requires_grad, base._cdata, base.is_neg, tells_modes, *addresses


# Builds of the parent process, in a forked child. They are stored, because dropping one would wait
# for a process that is not a child of this process.
_inherited: list[_Build] = []


def _forget() -> None:
    if _state.build is not None:
        _inherited.append(_state.build)
        if (process := _state.build.process) is not None:
            process.returncode = 0
        _state.build = None


os.register_at_fork(after_in_child=_forget)
