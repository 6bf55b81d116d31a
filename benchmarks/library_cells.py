"""Times library ops compared with torch's best call, on one GPU and in one process.

There are two times: of eager calls one after another, between events around ten of them, and of the
device alone, for ten calls in a CUDA graph. Our calls and torch's run in turns. A cell is even
where torch's time is at least 0.97 of ours, or ours is at most 2 us more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from kernel_patterns.library import LIBRARY, LibraryRow
from turns import Run, Spread, clock_of, spread, take_turns

from fuser import FusionDefinition

CALLS, REPEATS, WARM_UPS = 10, 9, 20
LEAST_RATIO, MOST_US = 0.97, 2.0
Row = dict[str, Any]


def is_even(ours_us: float, torch_us: float) -> bool:
    """Whether our time is no longer than torch's, within the precision of the measurement."""
    return torch_us / ours_us >= LEAST_RATIO or ours_us - torch_us <= MOST_US


def _timed(runs: dict[str, Run], calls: int, *, device: str, made: int = 1) -> Row:
    """Returns the summary of the times of runs; each run makes `made` calls."""
    measures = {who: clock_of(device)(run, calls) for who, run in runs.items()}
    found = take_turns(measures, rounds=REPEATS, warm_ups=0)
    return _summary({who: spread(s / made for s in seconds) for who, seconds in found.items()})


def _captured(call: Run) -> Run:
    """Returns the replay of a graph of CALLS calls. Raises torch's error if the capture
    fails.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def _summary(times: dict[str, Spread]) -> Row:
    row: Row = {who: found.scaled("us") for who, found in times.items()}
    if "torch" in row:
        ours, theirs = row["ours"][0], row["torch"][0]
        row["ratio"], row["is_even"] = round(theirs / ours, 3), is_even(ours, theirs)
    return row


def measure(name: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> Row:
    """Returns the times of one cell in us: median, least, most."""
    library_row: LibraryRow = LIBRARY[name]
    torch.manual_seed(0)
    inputs = list(library_row.operands(tuple(shape), dtype, device))
    fd: FusionDefinition = library_row.define(inputs)
    calls: dict[str, Run] = {"ours": lambda: fd.execute(inputs)}
    peer = library_row.peer
    if peer is not None:
        calls["torch"] = lambda: peer(*inputs)
    row: Row = {
        "bench": "library",
        "op": name,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
    }
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    row["eager_us"] = _timed(calls, CALLS, device=device)
    if device == "cuda":
        try:
            replays = {who: _captured(call) for who, call in calls.items()}
            for replay in replays.values():
                replay()
            row["device_us"] = _timed(replays, 1, device=device, made=CALLS)
        except RuntimeError as error:
            why_not = str(error).splitlines()[0][:200]
            row["device_us"] = {"why_not": why_not, "is_even": peer is None}
    return row


def cells(only: Sequence[str], device: str) -> Iterator[tuple[str, Sequence[int], torch.dtype]]:
    """Yields all cells; on a CPU, where the benchmark itself is tried, only small ones."""
    for name, row in LIBRARY.items():
        if only and name not in only:
            continue
        if device == "cpu" and not row.runs_on_cpu:
            continue
        for shape in row.shapes if device == "cuda" else (row.small,):
            for dtype in row.dtypes:
                yield name, shape, dtype


def is_behind(row: Row) -> bool:
    """Whether torch is faster in a cell that was timed."""
    times = [row[kind] for kind in ("eager_us", "device_us") if kind in row]
    return any(not time.get("is_even", True) for time in times)
