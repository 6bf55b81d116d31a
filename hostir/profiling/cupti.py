"""What a device did, and for which range of the host: from the file that torch.profiler exports.

An activity (a kernel, a copy, a fill) names the call that launched it, by its correlation, and
the innermost op of torch that was running then, by an external id. Either leads to a range; where
both do and they differ, the id counts, for it needs no comparison of clocks.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuser.support.errors import ExecutionError

_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_OPS = ("cpu_op", "user_annotation")


@dataclass(frozen=True)
class Range:
    """A range of the host; seconds of the profile's clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Activity:
    """Something that a device did; `range` counts the ranges, None where none launched it."""

    name: str
    queue: str
    begin: float
    end: float
    range: int | None


@dataclass(frozen=True)
class Profile:
    """Ranges and activities in the order of their begin; `doubtful` counts those of which the two
    ways to their range disagree."""

    ranges: list[Range]
    activities: list[Activity]
    doubtful: int


def read_profile(text: str, prefix: str) -> Profile:
    """Return the ranges whose names begin with `prefix`, and what was launched in them.

    Ranges lie behind one another. Raises `ExecutionError` for what is no export of torch.profiler.
    """
    try:
        events: list[dict[str, Any]] = [
            e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"
        ]
        return _read(events, prefix)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ExecutionError(f"the export of torch.profiler cannot be read: {what}") from error


def _read(events: Sequence[dict[str, Any]], prefix: str) -> Profile:
    # The external id of each op of torch -> when it began; correlation -> when it was launched.
    ops: dict[int, float] = {}
    calls: dict[int, float] = {}
    ranges: list[Range] = []
    for event in events:
        kind, args = event.get("cat"), event.get("args", {})
        begin, end = _interval(event)
        if kind in _OPS:
            if "External id" in args:
                ops[args["External id"]] = begin
            if event["name"].startswith(prefix):
                ranges.append(Range(event["name"], begin, end))
        elif kind in _CALLS and "correlation" in args:
            calls[args["correlation"]] = begin
    ranges.sort(key=lambda r: r.begin)
    begins = [r.begin for r in ranges]

    def range_at(time: float | None) -> int | None:
        if time is None:
            return None
        place = bisect_right(begins, time) - 1
        return place if place >= 0 and time <= ranges[place].end else None

    activities: list[Activity] = []
    doubtful = 0
    for event in events:
        if event.get("cat") not in _ACTIVITIES:
            continue
        args = event["args"]
        by_id = range_at(ops.get(args.get("External id", 0)))
        by_call = range_at(calls.get(args.get("correlation", 0)))
        doubtful += by_id is not None and by_call is not None and by_id != by_call
        place = by_call if by_id is None else by_id
        queue = f"stream {args['stream']}" if "stream" in args else ""
        activities.append(Activity(event["name"], queue, *_interval(event), place))
    activities.sort(key=lambda a: a.begin)
    return Profile(ranges, activities, doubtful)


def _interval(event: dict[str, Any]) -> tuple[float, float]:
    """Return when an event began and ended; the file counts microseconds."""
    begin = float(event["ts"])
    return begin * 1e-6, (begin + float(event.get("dur", 0.0))) * 1e-6
