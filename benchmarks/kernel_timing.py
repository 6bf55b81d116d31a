"""Times calls on one GPU: CUDA graphs of rotated inputs, replayed in turns.

If several processes share the GPU, each uses it in its turn (`Turn`): to time, to check results,
and for torch's autotuning. Only host work such as compilation runs in parallel.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from turns import Measure, Spread, by_clock, by_events, spread, take_turns

REPLAYS, WARM_UPS = 15, 10
# A delay in cycles of the GPU, about a tenth of a millisecond. Meanwhile the host enqueues a replay
# and its events, so that they measure the GPU and not the host.
WAIT_CYCLES = 200_000


def set_count(nbytes: int) -> int:
    """Returns how many sets of inputs exceed four times the L2 cache and 256 MB; at most 16."""
    if not torch.cuda.is_available():
        return 2
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(16, -(-max(4 * l2, 256 << 20) // nbytes)))


class Turn:
    """A lock for the use of the GPU by one process at a time; the system releases it if the process
    ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else path.open("w")
        self._depth = 0

    def __enter__(self) -> None:
        if self._file is not None and not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._file is not None and not self._depth:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            fcntl.flock(self._file, fcntl.LOCK_UN)


def take_turns_at_autotuning(turn: Turn) -> None:
    """Makes torch.compile time its candidates while no other process uses the GPU.

    Otherwise their times would include the work of others, and torch.compile would be a worse peer.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    bench: Callable[..., Any] = CachingAutotuner.bench

    def bench_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            torch.cuda.synchronize()
            return bench(self, *args, **kwargs)

    CachingAutotuner.bench = bench_alone


class Replay:
    """The calls of one candidate on all input sets, captured in a CUDA graph.

    `measure` replays once and returns the seconds per call.
    """

    def __init__(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                for s in sets:
                    fn(*s)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            # Kept alive: no output buffer is reused inside a replay.
            self.kept = [fn(*s) for s in sets]
        measure, count = by_events(self.graph.replay, before=_delay), len(sets)
        self.measure: Measure = lambda: measure() / count


def _delay() -> None:
    torch.cuda._sleep(WAIT_CYCLES)


class Loop:
    """The calls of one candidate on the CPU, which has no graphs; to try the benchmark itself.

    `measure` calls once with each set and returns the seconds per call.
    """

    def __init__(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        def calls() -> None:
            for s in sets:
                fn(*s)

        measure, count = by_clock(calls), len(sets)
        self.measure: Measure = lambda: measure() / count


def timer(device: str) -> type[Replay] | type[Loop]:
    """Returns the class that times calls on a device."""
    return Replay if device == "cuda" else Loop


def time_interleaved(replays: Sequence[Replay | Loop]) -> list[Spread]:
    """Returns the spread of the seconds per call of each, measured in turns."""
    measures = {number: replay.measure for number, replay in enumerate(replays)}
    found = take_turns(measures, rounds=REPLAYS, warm_ups=WARM_UPS)
    return [spread(seconds) for seconds in found.values()]
