"""Timers for pytest-benchmark, under nvFuser's names.

pytest-benchmark calls a timer before and after the timed code. The difference is the time in
seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fuser.frontend.profiler import get_fusion_profile, reset_profiler
from fuser.support.errors import ExecutionError, UnsupportedError
from hostir.profiling.timers import Activity, read_profile

__all__ = ["CuptiProfiler", "CuptiTimer", "FusionProfileTimer", "Timer"]


class Timer:
    """A clock for host times. Each call waits until the current GPU is idle."""

    def __call__(self) -> float:
        """Returns the host's time in seconds, after waiting for the GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class CuptiProfiler:
    """Records the work of the GPU between `start` and `stop`, through torch.profiler and CUPTI.

    Raises:
        UnsupportedError: torch has no GPU.
        ExecutionError: another profiler is active, or CUPTI is not available.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"{type(self).__name__}: CUPTI measures GPUs, and torch finds none: use Timer or "
                "FusionProfileTimer on a CPU"
            )
        self._profile: Any = None

    def start(self) -> None:
        """Starts the recording of GPU work."""
        from torch.profiler import ProfilerActivity, profile

        if self._profile is not None:
            raise ExecutionError(
                "CuptiProfiler.start: this profiler has already been started; call stop first"
            )
        torch.cuda.synchronize()
        made = profile(activities=[ProfilerActivity.CUDA])
        try:
            made.__enter__()
        except Exception as error:  # another profiler is active, or CUPTI or its permissions fail
            raise ExecutionError(
                f"CuptiProfiler.start: torch.profiler cannot start: {type(error).__name__}: {error}"
            ) from error
        self._profile = made

    def stop(self) -> list[Activity]:
        """Ends the recording, and returns the kernels, copies and fills since `start`.

        They are in the order in which they began.
        """
        made, self._profile = self._profile, None
        if made is None:
            raise ExecutionError(
                "CuptiProfiler.stop: this profiler has not been started; call start first"
            )
        torch.cuda.synchronize()
        made.__exit__(None, None, None)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            made.export_chrome_trace(str(path))
            return read_profile(path.read_text(), "").activities


class CuptiTimer:
    """A clock that measures the run time of the GPU between two calls.

    Each second call advances the clock by the time of the kernels, copies and fills since the call
    before.
    """

    def __init__(self) -> None:
        self._profiler = CuptiProfiler()
        self._is_on = False
        self._now = 0.0

    def __call__(self) -> float:
        """Starts a recording, or ends the recording that the call before started.

        Returns the total seconds of GPU work in all recordings so far.
        """
        if self._is_on:
            self._now += sum(a.end - a.begin for a in self._profiler.stop())
        else:
            self._profiler.start()
        self._is_on = not self._is_on
        return self._now


class FusionProfileTimer:
    """A clock that measures the host's time of the profiled run between two calls.

    Each second call advances the clock by the run's `host_time_ms`. Runs are profiled if
    `FUSER_PROF` is set, or within a `PythonProfiler`.

    Raises:
        NotCompiledError: no run was profiled between the two calls.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._now = 0.0

    def __call__(self) -> float:
        """Begins the measurement of a run, or ends the measurement that the call before began.

        Returns the host's seconds of all measured runs so far.
        """
        if self._is_on:
            self._now += get_fusion_profile().host_time_ms * 1e-3
        else:
            reset_profiler()
        self._is_on = not self._is_on
        return self._now
