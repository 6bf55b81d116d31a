"""The loop, the statistics and the output of measurements in which candidates take turns.

pytest-benchmark times one candidate after the other. A clock rate that drifts, or a neighbour on
the machine, then favours some of them. Candidates that are compared with each other (ours and
torch's), and those of the ranks of a job, are measured here instead: each candidate once per round.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from multidevice import Communicator

WARM_UPS, LEAST_ROUNDS = 2, 3
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
Run = Callable[[], object]
# Measures once; returns seconds per call.
Measure = Callable[[], float]
K = TypeVar("K")


# ------------------------------------------------------------------ clocks
def synchronize() -> None:
    """Waits until the GPU is idle, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def by_clock(run: Run, calls: int = 1, *, before: Run = synchronize) -> Measure:
    """Returns a measurement of the host's time per call of `run`.

    `before` is called first and not timed.
    """

    def measure() -> float:
        before()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls

    return measure


def by_events(run: Run, calls: int = 1, *, before: Run = synchronize) -> Measure:
    """Returns a measurement of the GPU's time per call of `run`, between two events.

    `before` is called first and not timed.
    """

    def measure() -> float:
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / calls

    return measure


def clock_of(device: torch.device | str) -> Callable[..., Measure]:
    """Returns `by_events` for a GPU, `by_clock` for the CPU."""
    return by_events if torch.device(device).type == "cuda" else by_clock


# ------------------------------------------------------------------ the loop
def _always(_: int) -> bool:
    return True


def take_turns(
    measures: Mapping[K, Measure],
    *,
    rounds: int,
    warm_ups: int = WARM_UPS,
    goes_on: Callable[[int], bool] = _always,
) -> dict[K, list[float]]:
    """Returns the seconds of each candidate in each round; the warm-up rounds are left out.

    `goes_on` is asked before each round, with its number (from `-warm_ups` on).
    """
    found: dict[K, list[float]] = {name: [] for name in measures}
    for number in range(-warm_ups, rounds):
        if not goes_on(number):
            break
        for name, measure in measures.items():
            seconds = measure()
            if number >= 0:
                found[name].append(seconds)
    return found


# ------------------------------------------------------------------ statistics
class Spread(NamedTuple):
    """The median, the smallest and the largest of some times in seconds."""

    median: float
    least: float
    most: float

    def scaled(self, unit: str, digits: int = 2) -> list[float]:
        """Returns the three times in a unit of `UNITS`."""
        return [round(seconds * UNITS[unit], digits) for seconds in self]

    def fields(self, unit: str, digits: int = 2) -> dict[str, float]:
        """Returns the fields of a line: `us`, `us_min` and `us_max` for the unit "us"."""
        names = unit, f"{unit}_min", f"{unit}_max"
        return dict(zip(names, self.scaled(unit, digits), strict=True))


def spread(seconds: Iterable[float]) -> Spread:
    """Returns the spread of some times."""
    found = [*seconds]
    return Spread(statistics.median(found), min(found), max(found))


# ------------------------------------------------------------------ output
class Lines:
    """Writes measurements as JSON lines at once: to the terminal, and to the end of a file.

    Every line begins with `labels`. Only rank 0 writes; `rows` has the lines on every rank.
    """

    def __init__(self, path: Path | None = None, *, rank: int = 0, **labels: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path, self._rank, self._labels = path, rank, labels

    def emit(self, row: Mapping[str, Any]) -> None:
        """Writes one measurement."""
        self.rows.append({**self._labels, **row})
        if self._rank:
            return
        line = json.dumps(self.rows[-1])
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


# ------------------------------------------------------------------ ranks
def slowest(communicator: Communicator, found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Returns the time of the slowest rank for each candidate and round."""
    ranks = [json.loads(text) for text in communicator.exchange(json.dumps(found).encode())]
    return {name: [max(t) for t in zip(*(r[name] for r in ranks), strict=True)] for name in found}


@dataclass
class Times:
    """The times of each round, of the slowest rank.

    `ms` has milliseconds per call, `host_us` the microseconds that the host needs to start a call.
    """

    ms: list[float] = field(default_factory=list[float])
    host_us: list[float] = field(default_factory=list[float])

    def row(self) -> dict[str, float]:
        """Returns median, smallest and largest round."""
        values = (round(v, 4) for v in spread(self.ms))
        return dict(zip(("ms", "min", "max"), values, strict=True))


def take_turns_on_ranks(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    rounds: int,
    burst: int,
    limit_s: float = float("inf"),
) -> dict[str, Times]:
    """Returns the times of each candidate in `rounds` rounds.

    In each round, each candidate in turn is called once, which absorbs the ranks' skew after a
    barrier. Then it is called `burst` times between two events (on the CPU: by the clock). After
    `limit_s` no round begins, but at least LEAST_ROUNDS are made.
    """
    from multidevice import Communicator

    communicator = Communicator.instance()
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.monotonic() + limit_s

    def measure(name: str, run: Run) -> Measure:
        def before() -> None:
            synchronize()
            communicator.barrier()
            run()

        def calls() -> None:
            began = time.perf_counter()
            for _ in range(burst):
                run()
            hosts[name].append((time.perf_counter() - began) / burst)

        return clock_of(device)(calls, before=before)

    def goes_on(number: int) -> bool:
        is_late = number >= LEAST_ROUNDS and time.monotonic() > deadline
        return not any(communicator.exchange(b"late" if is_late else b""))

    measures = {name: measure(name, run) for name, run in runs.items()}
    found = slowest(communicator, take_turns(measures, rounds=rounds, goes_on=goes_on))
    hosts = slowest(communicator, {name: times[WARM_UPS:] for name, times in hosts.items()})
    return {
        name: Times([s * 1e3 / burst for s in found[name]], [s * 1e6 for s in hosts[name]])
        for name in runs
    }
