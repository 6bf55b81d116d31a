"""A pytest plugin that ends the whole MPI job as soon as one rank fails, and names rank and
failure.

Without it, a failing rank leaves the others waiting in a collective until a timeout. The scripts
load it with `-p tests.support.mpi_abort`, early enough to see errors in conftest files too;
`tests/conftest.py` loads it for runs that were started by hand. In a run of one process it does
nothing.

It reacts to:

- failing tests, fixtures and teardowns;
- errors in collection, conftest files, usage and pytest itself;
- sessions that stop early, and processes that exit in a test;
- the thread method of pytest-timeout.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import time
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
_MPI_VARIABLES = _SIZE_VARIABLES[:2]


def world_size() -> int:
    """Returns the number of ranks that the launcher started (1 without one), without
    importing MPI.
    """
    return max(int(os.environ.get(name, "1")) for name in _SIZE_VARIABLES)


def _mpi_world_size() -> int:
    return max(int(os.environ.get(name, "1")) for name in _MPI_VARIABLES)


class MpiAbort:
    """The pytest hooks, registered only if mpirun started more than one rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        # Capturing replaces descriptor 2 while a test runs; this one always reaches the terminal.
        self._stderr = os.dup(2)
        self._is_finished = False
        if self._comm.size != _mpi_world_size():
            self.abort(
                f"mpirun started {_mpi_world_size()} processes but mpi4py sees {self._comm.size}: "
                "they belong to different MPI installations"
            )
        # Runs before mpi4py finalizes MPI, which would wait for the other ranks.
        atexit.register(self._check_finished)

    def tell(self, text: str) -> None:
        """Writes text to the terminal with the rank in front of each line."""
        mark = f"[rank {self._comm.rank}] "
        lines = "".join(f"{mark}{line}\n" for line in text.splitlines())
        os.write(self._stderr, lines.encode(errors="replace"))

    def abort(self, text: str) -> NoReturn:
        """Ends every rank of the job; `text` gives the reason."""
        self.tell(text)
        from multidevice.coordination import shared_page
        from multidevice.job import early_abort

        shared_page.unlink_mpich_segments()
        with os.fdopen(self._stderr, "w", closefd=False) as terminal:
            early_abort.wait_for_reader(terminal)  # before mpirun hears of the abort
        # MPI_Abort may itself wait for a thread that is inside MPI.
        threading.Thread(target=_exit_soon, daemon=True).start()
        self._comm.Abort(1)
        os._exit(1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except BaseException as error:
            cause = getattr(error, "cause", error)
            self.abort(f"while loading conftest files: {type(cause).__name__}: {cause}\n{error}")

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            with capture.global_and_fixture_disabled():
                os.dup2(2, self._stderr)
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        if self._comm.rank and reporter is not None:
            # One rank reports progress; failures of the others arrive through `tell`.
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (lives as long as we do)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.abort(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.abort(f"ERROR collecting {report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        self.abort(f"INTERNAL ERROR of pytest\n{excrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.abort(f"the session was stopped: {excinfo.typename}: {excinfo.value}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.abort(f"the session ended with exit status {exitstatus!r}")
        self._is_finished = True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: Any, settings: Any) -> bool:
        """Replaces the timer of pytest-timeout, which would end its own process without a
        message.
        """

        def expire() -> None:
            self.tell(f"TIMEOUT {item.nodeid}: not finished after {settings.timeout} s")
            faulthandler.dump_traceback(file=self._stderr, all_threads=True)
            self.abort(f"TIMEOUT {item.nodeid}")

        timer = threading.Timer(settings.timeout, expire)
        timer.daemon = True
        item.cancel_timeout = timer.cancel
        timer.start()
        return True

    def _check_finished(self) -> None:
        if not self._is_finished:
            self.abort("the process ends before its tests do (usage error, or an exit in a test)")


def _exit_soon() -> None:
    time.sleep(2.0)
    os._exit(1)


_plugin = MpiAbort() if _mpi_world_size() > 1 else None


def register(manager: pytest.PytestPluginManager) -> None:
    """Adds the hooks to `manager` once, even if this module was loaded twice."""
    if _plugin is not None and not manager.is_registered(_plugin):
        manager.register(_plugin, "fuser-mpi-abort")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # The first hook that runs after `-p` loads a plugin, before any conftest file.
    register(pluginmanager)
