"""Times that fresh processes report, measured by pytest-benchmark.

A process that has compiled or imported something once does not do so again. Each round is therefore
a new process, which runs a script and prints its times as one JSON object. The time of a round is
the sum of the process's `seconds`, not the duration of the process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark_lines import product_path

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

TIMEOUT_S = 600
ROUNDS = 3


class ReportedClock:
    """A clock that advances by the seconds that processes report."""

    def __init__(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        """Adds the seconds of a process."""
        self._now += seconds

    def read(self) -> float:
        """Returns the seconds of all processes so far; the `timer` of a benchmark."""
        return self._now


CLOCK = ReportedClock()


def run_fresh(script: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Runs a script in a new process and returns the JSON object that it prints last.

    Raises:
        RuntimeError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": product_path(), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script.name} {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def time_fresh(
    benchmark: BenchmarkFixture,
    script: Path,
    *arguments: str,
    rounds: int = ROUNDS,
    variables: Callable[[], dict[str, str]] = dict,
) -> tuple[float, dict[str, Any]]:
    """Times a script in fresh processes; the benchmark's timer must be `CLOCK.read`.

    `variables` returns environment variables for the next process.
    Returns the median seconds, and the report of the median process. Its phases and its other facts
    become the benchmark's `extra_info`.
    """
    reports: list[tuple[float, dict[str, Any]]] = []

    def run() -> None:
        report = run_fresh(script, *arguments, **variables())
        seconds = sum(report["seconds"].values())
        CLOCK.advance(seconds)
        reports.append((seconds, report))

    benchmark.pedantic(run, rounds=rounds)
    reports.sort(key=lambda pair: pair[0])
    _, median = reports[len(reports) // 2]
    phases = {f"{phase}_s": round(s, 4) for phase, s in median["seconds"].items()}
    facts = {name: value for name, value in median.items() if name != "seconds"}
    benchmark.extra_info |= {**phases, **facts}
    return statistics.median(seconds for seconds, _ in reports), median
