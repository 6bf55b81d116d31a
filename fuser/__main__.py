"""`python -m fuser`: prints what this project finds on this machine, on one screen.

Every line has a version, a path or a number, or `not found` and the consequence. The command starts
nothing: no CUDA context, no MPI, no job. Under a launcher, one rank per host prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path

from fuser.support import options
from fuser.support.errors import FuserError
from fuser.support.version import __version__

_COMPILER_TIMEOUT_S = 1.0
_MIB, _GIB = 1 << 20, 1 << 30

Lines = Iterator[tuple[str, str]]


def _words(error: BaseException) -> str:
    """Returns the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _try(find: Callable[[], str], without: str) -> str:
    """Returns the text that `find` returns. After an error, returns a text that says why it failed.

    `without` says what does not work in this case.
    """
    try:
        return find()
    # Any fault of an installation is worth reporting on this page.
    except Exception as error:
        return (
            f"not found: {_words(error)}; {without}" if without else f"not found: {_words(error)}"
        )


def _installed(name: str, without: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"not found; {without}"


# ------------------------------------------------------------------ sections
def _versions() -> Lines:
    yield "fuser-hostir", f"{__version__} ({Path(__file__).parent})"
    cores = len(os.sched_getaffinity(0))
    yield "python", f"{platform.python_version()} ({sys.executable}), {cores} cores"
    yield "torch", _try(_torch, "nothing works without it")
    yield "numpy", _try(lambda: import_module("numpy").__version__, "nothing works without it")
    yield "cuda-bindings", _installed("cuda-bindings", "no kernels for GPUs: extra cu12 or cu13")
    yield "nccl", _try(_nccl, "GPUs of several ranks cannot communicate")
    yield "mpi4py", _installed("mpi4py", "ranks talk by gloo, under torchrun: extra mpi")
    yield "mpi", _try(_mpi, "mpirun starts no ranks")


def _torch() -> str:
    torch = import_module("torch")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    return f"{torch.__version__}, built for {built}"


def _nccl() -> str:
    from multidevice.transports.nccl_binding import load_binding

    binding = load_binding()
    number = binding.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100} by {binding.name}"


def _mpi() -> str:
    import_module("mpi4py").rc(initialize=False, finalize=False)
    text = str(import_module("mpi4py.MPI").Get_library_version())
    # MPICH adds many lines on how it was built.
    return " ".join(text.partition("\n")[0].replace("\0", "").split())


def _devices() -> Lines:
    yield "cpu", platform.machine()
    try:
        import torch

        count = torch.cuda.device_count()
        if not count:
            why = "torch sees no GPU" if torch.version.cuda else "torch is built for the CPU alone"
            yield "cuda", f"not found: {why}; programs run on CPU ranks"
        for index in range(count):
            yield f"cuda:{index}", _try(lambda index=index: _gpu(index, count), "")
    except Exception as error:  # a driver that does not fit raises anything
        yield "cuda", f"not found: {_words(error)}; programs run on CPU ranks"


def _gpu(index: int, count: int) -> str:
    import torch

    found = torch.cuda.get_device_properties(index)
    others = [i for i in range(count) if i != index]
    reached = [str(i) for i in others if torch.cuda.can_device_access_peer(index, i)]
    access = f", reads the memory of {' '.join(reached) or 'no other'}" if others else ""
    memory = f"{found.total_memory / _GIB:.1f} GiB"
    return f"{found.name}, sm_{found.major}{found.minor}, {memory}{access}"


def _compilers() -> Lines:
    from fuser.runtime import cpu_kernel, cuda_kernel

    none = "CPU ranks run library calls alone"
    yield "C++", _try(lambda: cpu_kernel.try_compiler(_COMPILER_TIMEOUT_S), none)
    yield "NVRTC", _try(cuda_kernel.version, "no kernels for GPUs")


def _cache() -> Lines:
    from fuser.runtime.kernel_cache import LIMIT_NBYTES, cache_folder, contents

    def told() -> str:
        found = contents()
        size = f"{found.nbytes / _MIB:.1f} of at most {LIMIT_NBYTES // _MIB} MiB"
        return f"{found.kernels} kernels, {found.tuned} tuned, {size}"

    yield "folder", _try(lambda: str(cache_folder()), "set FUSER_CACHE_DIR")
    yield "holds", _try(told, "every process compiles its kernels anew")


def _memory() -> Lines:
    yield (
        "intermediates",
        "one buffer per device and stream for all programs; fd.memory() counts it",
    )


def _options() -> Lines:
    chosen = {name for row in options.VARIABLES.values() for name in (row.name, row.alias) if name}
    chosen |= {name for name in os.environ if name.startswith("FUSER_")}
    values = [(name, os.environ[name]) for name in sorted(chosen) if os.environ.get(name)]
    yield from values or [("none", "docs/reference/options.md lists them")]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            options.check_environment()
        except FuserError as error:
            yield "refused", _words(error)
    for warning in warned:
        yield "warning", " ".join(str(warning.message).split())


def _launcher() -> Lines:
    from multidevice.coordination.launcher import ALONE, LauncherInfo, read_launch

    def told(found: LauncherInfo) -> str:
        local = f", {found.local_rank} of {found.local_size} on this host"
        return f"rank {found.rank} of {found.size}{local if found.local_rank >= 0 else ''}"

    try:
        found = read_launch()
    except FuserError as error:
        yield "refused", _words(error)
        return
    yield ("none", "rank 0 of 1") if found is ALONE else (found.launcher, told(found))


_SECTIONS: dict[str, Callable[[], Lines]] = {
    "versions": _versions,
    "devices": _devices,
    "compilers": _compilers,
    "cache": _cache,
    "memory": _memory,
    "options": _options,
    "launcher": _launcher,
}


def report() -> dict[str, dict[str, str]]:
    """Returns everything that the command prints, as nested dicts: section -> item -> text."""
    found: dict[str, dict[str, str]] = {}
    for title, section in _SECTIONS.items():
        found[title] = {}
        try:
            found[title].update(section())
        except Exception as error:  # nothing that is broken may hide the other sections
            found[title]["not found"] = _words(error)
    return found


def text(found: dict[str, dict[str, str]]) -> str:
    """Returns the text that the command prints, one line per item. `found` is the result of
    `report`.
    """
    width = max(len(what) for rows in found.values() for what in rows)
    lines: list[str] = []
    for title, rows in found.items():
        lines += [title, *(f"  {what:{width}}  {value}" for what, value in rows.items())]
    return "\n".join(lines)


def _is_first_of_host() -> bool:
    from multidevice.coordination.launcher import read_launch

    try:
        found = read_launch()
    except FuserError:
        return True
    return (found.local_rank if found.local_rank >= 0 else found.rank) == 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the command: prints the versions, paths and devices found, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuser", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    asked = parser.parse_args(arguments)
    if _is_first_of_host():
        found = report()
        print(json.dumps(found, indent=1) if asked.json else text(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
