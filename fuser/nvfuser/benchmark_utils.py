"""Timers for pytest-benchmark, under nvFuser's names.

pytest-benchmark calls a timer before and after what it times, and takes the difference: seconds.
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
    """The host's clock, once the current GPU has nothing left to do."""

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class CuptiProfiler:
    """The work of the GPU between `start` and `stop`, by CUPTI, which torch.profiler asks.

    Raises `UnsupportedError` without a GPU, and `ExecutionError` where another profiler is on or
    CUPTI refuses.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"{type(self).__name__}: CUPTI times GPUs, and torch sees none: Timer and "
                "FusionProfileTimer also time CPUs"
            )
        self._profile: Any = None

    def start(self) -> None:
        """Watches what is launched from now on."""
        from torch.profiler import ProfilerActivity, profile

        if self._profile is not None:
            raise ExecutionError("CuptiProfiler.start: it has been started")
        torch.cuda.synchronize()
        made = profile(activities=[ProfilerActivity.CUDA])
        try:
            made.__enter__()
        except Exception as error:  # of another profiler that is on, of CUPTI, of its permissions
            raise ExecutionError(f"torch.profiler: {type(error).__name__}: {error}") from error
        self._profile = made

    def stop(self) -> list[Activity]:
        """Returns the kernels, copies and fills since `start`, in the order of their begin."""
        made, self._profile = self._profile, None
        if made is None:
            raise ExecutionError("CuptiProfiler.stop: it was not started")
        torch.cuda.synchronize()
        made.__exit__(None, None, None)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            made.export_chrome_trace(str(path))
            return read_profile(path.read_text(), "").activities


class CuptiTimer:
    """Goes on by the seconds that kernels, copies and fills of the GPU take, added up."""

    def __init__(self) -> None:
        self._profiler = CuptiProfiler()
        self._is_on = False
        self._now = 0.0

    def __call__(self) -> float:
        if self._is_on:
            self._now += sum(a.end - a.begin for a in self._profiler.stop())
        else:
            self._profiler.start()
        self._is_on = not self._is_on
        return self._now


class FusionProfileTimer:
    """Goes on by the `host_time_ms` of what is profiled between two calls: with `FUSER_PROF` or
    within a `PythonProfiler`.

    Raises `NotCompiledError` where nothing was.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._now = 0.0

    def __call__(self) -> float:
        if self._is_on:
            self._now += get_fusion_profile().host_time_ms * 1e-3
        else:
            reset_profiler()
        self._is_on = not self._is_on
        return self._now
