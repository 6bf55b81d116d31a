"""What a program will take, from the cost model: time, communication, memory, what it waits for.

Nothing is run. `predict` makes the numbers, `report` the text of `python -m hostir cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hostir.container import HostIrContainer
from hostir.findings import Site, line_numbers
from hostir.links import traffic_of
from hostir.rank_posts import ranks_text
from hostir.rank_values import at, np
from hostir.timeline import Work, critical_path
from hostir.timetable import Timetable
from hostir.unrolled import CALLER

# What a text report shows of classes, links, and the critical path; the JSON has all.
_SHOWN_CLASSES, _SHOWN_LINKS, _SHOWN_OPS = 8, 24, 12

Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class StreamTimes:
    """Seconds of one stream; `exposed`: communication while the rank computes nothing."""

    stream: str
    compute: float
    communication: float
    exposed: float
    idle: float


@dataclass(frozen=True)
class RankTimes:
    """What holds for every rank of a class; `seconds` are the GPU's, `host_seconds` those in which
    the host issues the work, beside it. Bytes of inputs and of allocations at their peak."""

    ranks: tuple[int, ...]
    seconds: float
    host_seconds: float
    compute: float
    communication: float
    exposed: float
    streams: tuple[StreamTimes, ...]
    input_nbytes: int
    peak_nbytes: int
    sent_nbytes: int
    received_nbytes: int


@dataclass(frozen=True)
class Step:
    """An op on the critical path: its seconds there, how often, and the part of the whole."""

    op: str
    seconds: float
    times: int
    part: float


@dataclass(frozen=True)
class Prediction:
    """`seconds` per call, where calls follow one another: the longer of GPU and host."""

    machine: str
    seconds: float
    classes: tuple[RankTimes, ...]
    links: tuple[tuple[int, int, int], ...] | None
    critical_path: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(program: HostIrContainer, made: Timetable) -> Prediction:
    """Return the numbers of a timetable; `links` are (from, to, bytes), None where pairs are too
    many."""
    traffic, unrolled = traffic_of(made.unrolled), made.unrolled
    by_class: dict[int, list[int]] = {n: [] for n in range(len(made.firsts))}
    numbers: list[int] = made.classes.tolist()
    for rank, number in zip(made.ranks, numbers, strict=True):
        by_class[number].append(rank)
    found: list[RankTimes] = []
    for number, place in enumerate(made.firsts):
        mine = made.of_class(number)
        end = max((w.end for w in mine), default=0.0)
        busy = _union((w.start, w.end) for w in mine if not w.is_transfer)
        transfers = [w for w in mine if w.is_transfer]
        covered = _union((w.start, w.end) for w in transfers)
        found.append(
            RankTimes(
                tuple(by_class[number]),
                end,
                made.host[number],
                _length(busy),
                _length(covered),
                _length(covered) - sum(_overlap(a, busy) for a in covered),
                _streams(made, number, mine, busy, end),
                _number(unrolled.inputs, place),
                _number(unrolled.peak, place),
                _number(traffic.sent, place),
                _number(traffic.received, place),
            )
        )
    links = None
    if traffic.pairs is not None:
        ends: list[tuple[int, int]] = np.argwhere(traffic.pairs > 0).tolist()
        links = tuple(
            (made.ranks[a], made.ranks[b], round(float(traffic.pairs[a, b]))) for a, b in ends
        )
    seconds = max((max(c.seconds, c.host_seconds) for c in found), default=0.0)
    return Prediction(made.machine.name, seconds, tuple(found), links, _path(program, made.work))


def stream_name(made: Timetable, number: int) -> str:
    """Return a stream as the program spells it."""
    unrolled = made.unrolled
    if number >= 0:
        return f"Stream {number}"
    if number == CALLER:
        captured = unrolled.clocks.captured.items()
        name = next((n for n, s in captured if np.all(np.asarray(s) == CALLER)), "Default")
        return f"Stream {name} (the caller's)"
    return f"Stream {next(str(n) for n, s in unrolled.names.items() if s == number)}"


def _number(x: Any, place: int) -> int:
    value: Any = at(x, place)
    return round(value)


def _streams(
    made: Timetable, number: int, mine: Sequence[Work], busy: Intervals, end: float
) -> tuple[StreamTimes, ...]:
    rows: list[StreamTimes] = []
    for stream in sorted({w.streams[number] for w in mine}):
        here = [w for w in mine if w.streams[number] == stream]
        moves = [(w.start, w.end) for w in here if w.is_transfer]
        computes = sum(w.end - w.start for w in here if not w.is_transfer)
        communicates = sum(b - a for a, b in moves)
        exposed = communicates - sum(_overlap(m, busy) for m in moves)
        used = _length(_union((w.start, w.end) for w in here))
        name = stream_name(made, stream)
        rows.append(StreamTimes(name, computes, communicates, exposed, end - used))
    return tuple(rows)


def _path(program: HostIrContainer, work: Iterable[Work]) -> tuple[Step, ...]:
    lines = line_numbers(program)
    found: dict[int, tuple[Site, float, int]] = {}
    for one, seconds in critical_path(work):
        op = one.item.site.op
        _, before, times = found.get(id(op), (None, 0.0, 0))
        found[id(op)] = Site(op), before + seconds, times + 1
    total = sum(s for _, s, _ in found.values()) or 1.0
    steps = [Step(site.text(lines), s, n, s / total) for site, s, n in found.values()]
    return tuple(sorted(steps, key=lambda s: -s.seconds))


# ------------------------------------------------------------------ intervals
def _union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    found: Intervals = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], b)
        else:
            found.append((a, b))
    return found


def _length(intervals: Intervals) -> float:
    return sum(b - a for a, b in intervals)


def _overlap(one: tuple[float, float], others: Intervals) -> float:
    return sum(max(0.0, min(one[1], b) - max(one[0], a)) for a, b in others)


# ------------------------------------------------------------------ the text
def report(found: Prediction) -> str:
    """Return the text of a prediction."""
    lines = [f"predicted on {found.machine}, not run: {_ms(found.seconds)} per call"]
    for one in found.classes[:_SHOWN_CLASSES]:
        lines += ["", *_class_lines(one)]
    if (more := len(found.classes) - _SHOWN_CLASSES) > 0:
        lines += ["", f"and {more} more classes of ranks (--json has them)"]
    lines += ["", *_link_lines(found)]
    lines += ["critical path, most expensive first:"]
    for step in found.critical_path[:_SHOWN_OPS]:
        lines.append(f"  {_ms(step.seconds)} {step.part:4.0%} {step.times:4} x  {step.op}")
    if (more := len(found.critical_path) - _SHOWN_OPS) > 0:
        lines.append(f"  and {more} more ops")
    return "\n".join(lines)


def _class_lines(one: RankTimes) -> list[str]:
    host = f"the host issues it in {_ms(one.host_seconds)}"
    if one.host_seconds > one.seconds:
        host += ", which is what takes the time"
    rows = [(s.stream, s.compute, s.communication, s.exposed, s.idle) for s in one.streams]
    rows.append(("all", one.compute, one.communication, one.exposed, one.seconds - _busy(one)))
    width = max(len(name) for name, *_ in rows)
    lines = [
        f"{ranks_text(one.ranks)}: {_ms(one.seconds)} on the GPU; {host}",
        f"  {'':{width}}   compute  communication    exposed       idle",
    ]
    for name, compute, communication, exposed, idle in rows:
        times = f"{_ms(compute)}  {_ms(communication, 13)} {_ms(exposed)} {_ms(idle)}"
        lines.append(f"  {name:{width}} {times}")
    lines.append(
        f"  memory: {_size(one.input_nbytes)} of inputs, {_size(one.peak_nbytes)} allocated"
    )
    lines.append(f"  sent {_size(one.sent_nbytes)}, received {_size(one.received_nbytes)}")
    return lines


def _busy(one: RankTimes) -> float:
    return one.compute + one.exposed


def _link_lines(found: Prediction) -> list[str]:
    if found.links is None:
        return ["links: too many ranks to list their pairs", ""]
    if not found.links:
        return []
    shown = [f"  {a} -> {b}: {_size(n)}" for a, b, n in found.links[:_SHOWN_LINKS]]
    if (more := len(found.links) - _SHOWN_LINKS) > 0:
        shown.append(f"  and {more} more (--json has them)")
    return ["links, from rank to rank:", *shown, ""]


def _ms(seconds: float, width: int = 10) -> str:
    text = f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
    return f"{text:>{width}}"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3f} {unit}"
    return f"{nbytes} bytes"
