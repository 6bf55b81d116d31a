"""When a rank computes, communicates and does neither, from the intervals in which it does.

Predicted and measured timelines are counted alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Sorted intervals (begin, end) that do not touch.
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Busy:
    """Seconds in which something computes, in which something communicates, in which it does while
    the rank computes nothing (`exposed`), and in which there is neither.

    Of a whole rank, `compute + exposed + idle` is the time that it was looked at.
    """

    compute: float
    communication: float
    exposed: float
    idle: float


def busy_of(
    pieces: Iterable[tuple[float, float, bool]], seconds: float, computing: Intervals | None = None
) -> Busy:
    """Return the times of pieces of work (begin, end, whether it communicates) within `seconds`.

    `computing` is when the rank computes, where the pieces are those of one stream; theirs by
    default.
    """
    given = list(pieces)
    mine = union((a, b) for a, b, is_transfer in given if not is_transfer)
    moving = union((a, b) for a, b, is_transfer in given if is_transfer)
    beside = mine if computing is None else computing
    exposed = length(union([*beside, *moving])) - length(beside)
    used = length(union([*mine, *moving]))
    return Busy(length(mine), length(moving), exposed, seconds - used)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return what the intervals cover."""
    found: Intervals = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], b)
        else:
            found.append((a, b))
    return found


def length(intervals: Intervals) -> float:
    """Return the sum of lengths."""
    return sum(b - a for a, b in intervals)
