"""Hooks and fixtures of all tests: rank-aware selection, the communicator, printed seeds.

Marks: `mpi` tests run on every rank under mpirun, and nowhere else; `gpu` tests need a CUDA device
and everything under `tests/gpu` carries that mark; the tests that `slow.txt` names are `slow`. A
failing rank ends the job (`mpi_abort`).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import mpi_abort, program_copies

if TYPE_CHECKING:
    import torch

    from fuser.runtime.compiled_kernel import CompiledKernel
    from fuser.support.kernel_source import KernelSource
    from multidevice import Communicator

_ROOT = Path(__file__).parents[1]
_GPU_FOLDER = _ROOT / "tests" / "gpu"


def slow_names(folder: Path) -> set[str]:
    """Returns the files and test functions that `slow.txt` names (scripts/slow_tests.py)."""
    lines = (folder / "slow.txt").read_text().splitlines()
    return {line.split()[1] for line in lines if not line.startswith("#")}


_SLOW = slow_names(_ROOT / "tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    program_copies.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    if mpi_abort.world_size() > 1 and config.getoption("numprocesses", default=None):
        raise pytest.UsageError(
            "under mpirun, pytest-xdist's processes would inherit the connection of their rank, "
            "and no mpi test would run: leave -n out"
        )
    mpi_abort.register(config.pluginmanager)
    program_copies.register(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which the session selects no test: to import all takes a minute.

    Paths that the command line names are collected all the same.
    """
    if _is_daily(config):
        if collection_path == _GPU_FOLDER:
            return None if _has_cuda() else True
        if collection_path.is_relative_to(_ROOT):
            return collection_path.relative_to(_ROOT).as_posix() in _SLOW or None
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    return not all(mark in text for mark in _required_marks(config)) or None


def _is_daily(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "not slow"


def _required_marks(config: pytest.Config) -> Iterator[str]:
    """Returns the marks, as files spell them, without which a test is not selected."""
    if _is_only_mpi(config):
        yield "mark.mpi"
    if config.getoption("from_text") == "marked":
        yield "mark.from_text"


def pytest_itemcollected(item: pytest.Item) -> None:
    # At collection, so that `-m gpu` sees the mark.
    if _GPU_FOLDER in item.path.parents:
        item.add_marker(pytest.mark.gpu)
    name = item.nodeid.partition("[")[0]
    if name in _SLOW or name.partition("::")[0] in _SLOW:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_for_ranks(config, items)
    if any("gpu" in item.keywords for item in items) and not _has_cuda():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _select_for_ranks(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what does not belong here, so that the counts speak of tests that ran."""
    size = mpi_abort.world_size()
    only_mpi = _is_only_mpi(config)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("mpi")
        if mark is None:
            fits = not only_mpi
        else:
            fits = size > 1 and size >= mark.kwargs.get("min_size", 1)
        (kept if fits else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _is_only_mpi(config: pytest.Config) -> bool:
    return mpi_abort.world_size() > 1 and bool(config.getoption("only_mpi", default=False))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process per core, at most 8, as each holds torch; one where they would share a GPU."""
    return 1 if _has_cuda() else min(len(os.sched_getaffinity(0)), 8)


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """The communicator of this process; a barrier before and after keeps the ranks in one test."""
    from multidevice import Communicator

    communicator = Communicator.instance()
    if communicator.size() > 1:
        communicator.barrier()
    yield communicator
    if communicator.size() > 1:
        communicator.barrier()


@pytest.fixture
def seeded(request: pytest.FixtureRequest) -> int:
    """Seed random, numpy and torch from the test's name, the same on every rank; printed.

    The name has the function and the case, no folder: a test that moves draws the same numbers.
    """
    import numpy
    import torch

    seed = zlib.crc32(request.node.name.encode())
    print(f"seed {seed}")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def kernel_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty on-disk kernel cache, for tests that count compilations."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FUSER_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def only_new_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes `gc.collect` of a test look at the objects of that test alone.

    A long run keeps millions of older objects; to look at them takes seconds for each call.
    """
    if not hasattr(request.module, "gc"):
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


# The kernels that the tests made: text -> name.
_MADE: dict[str, str] = {}


@pytest.fixture(scope="session", autouse=True)
def record_every_kernel() -> Generator[None, None, None]:
    """Notes every kernel that the tests make."""
    from fuser.kernels import executor

    original = executor.compile_kernels

    def noted(kernels: Iterable[KernelSource]) -> Iterator[KernelSource]:
        for kernel in kernels:
            _MADE[kernel.text] = kernel.name
            yield kernel

    def recording(
        kernels: Iterable[KernelSource], device: torch.device | str, *, checked: bool = False
    ) -> list[CompiledKernel]:
        return original(noted(kernels), device, checked=checked)

    executor.compile_kernels = recording
    yield
    executor.compile_kernels = original


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the kernels of a process that pytest-xdist started; one that crashed tells none."""
    _MADE.update(getattr(node, "workeroutput", {}).get("kernels", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compiles every kernel that the tests made with NVRTC for sm_90a; it needs no GPU.

    Where NVRTC is not installed (the extra `nvrtc`), and in the daily run, nothing is checked.
    Here, not in a fixture: thousands of kernels take longer than one test may.
    """
    lowered = sys.modules.get("tests.support.hand_schedules")
    for kernel in lowered.LOWERED if lowered is not None else ():
        _MADE[kernel.source.text] = kernel.source.name
    worker_output = getattr(session.config, "workeroutput", None)
    if worker_output is not None:
        worker_output["kernels"] = _MADE
        return
    if _is_daily(session.config) or not _MADE or importlib.util.find_spec("cuda") is None:
        return
    from tests.support.machine_code import compile_for_hopper

    try:
        compile_for_hopper(_MADE)
    except Exception as error:
        print(f"\nthe kernels do not compile for sm_90a: {error}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return
    print(f"\n{len(_MADE)} kernels compiled for sm_90a")
