"""Times of candidates that take turns on all ranks of a job."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fuser.multidevice import Communicator

WARM_UPS, LEAST_ROUNDS = 2, 3


@dataclass
class Times:
    """The times of each round, of the slowest rank.

    `ms` has milliseconds per call, `host_us` the microseconds that the host needs to start a call.
    """

    ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Returns median, smallest and largest round."""
        found = {"ms": statistics.median(self.ms), "min": min(self.ms), "max": max(self.ms)}
        return {k: round(v, 4) for k, v in found.items()}


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    burst: int,
    limit_s: float = float("inf"),
) -> dict[str, Times]:
    """Returns the times of each candidate in `rounds` rounds, after WARM_UPS.

    In each round, each candidate in turn is called once, which absorbs the ranks' skew after a
    barrier. Then it is called `burst` times between two events (on the CPU: by the clock). After
    `limit_s` no round begins, but at least LEAST_ROUNDS are made.
    """
    communicator = Communicator.instance()
    clock = _gpu_ms if device.type == "cuda" else _cpu_ms
    mine: dict[str, Times] = {name: Times() for name in runs}
    deadline = time.monotonic() + limit_s
    for number in range(-WARM_UPS, rounds):
        is_late = number >= LEAST_ROUNDS and time.monotonic() > deadline
        if any(communicator.exchange(b"late" if is_late else b"")):
            break
        for name, run in runs.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            communicator.barrier()
            run()
            ms, host_s = clock(run, burst)
            if number >= 0:
                mine[name].ms.append(ms / burst)
                mine[name].host_us.append(host_s * 1e6 / burst)
    values = {name: (times.ms, times.host_us) for name, times in mine.items()}
    ranks = [json.loads(text) for text in communicator.exchange(json.dumps(values).encode())]

    def slowest(name: str, which: int) -> list[float]:
        rows = (rank[name][which] for rank in ranks)
        return [max(each) for each in zip(*rows, strict=True)]

    return {name: Times(slowest(name, 0), slowest(name, 1)) for name in runs}


def _gpu_ms(run: Callable[[], object], calls: int) -> tuple[float, float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    host_s = time.perf_counter() - began
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop), host_s


def _cpu_ms(run: Callable[[], object], calls: int) -> tuple[float, float]:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - began
    return seconds * 1e3, seconds
