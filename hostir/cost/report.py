"""The predicted costs of a program: times, communication, memory, and the critical path.

The program is simulated, not run. `predict` returns the numbers, and `report` the text of `python
-m hostir cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.op import Op
from hostir.analysis.rank_values import at, np
from hostir.analysis.sliced_inputs import sliced_inputs
from hostir.cost.machine_model import CPU
from hostir.cost.simulator import SimulatedSchedule, WorkItem, critical_path
from hostir.cost.traffic import Traffic, traffic_of
from hostir.ir.diagnostics import Site, line_numbers
from hostir.ir.effects import CALLER
from hostir.ir.program import HostIrContainer

# The numbers of classes, links and critical ops in a text report. The JSON has all.
_SHOWN_CLASSES, _SHOWN_LINKS, _SHOWN_OPS = 8, 24, 12
# The place of a mesh dimension if sender and receiver are on different meshes.
BETWEEN_MESHES = "between meshes"
# Sorted intervals (begin, end) that do not touch.
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Busy:
    """The use of a period of time by a rank or a stream, in seconds.

    - `compute`: the time with computation; `communication`: the time with communication.
    - `exposed`: the time in which the rank or stream communicates, while no stream of the rank
      computes anything.
    - `idle`: the time with neither computation nor communication.

    For a whole rank, `compute + exposed + idle` is the length of the period.
    """

    compute: float
    communication: float
    exposed: float
    idle: float


def busy_of(
    pieces: Iterable[tuple[float, float, bool]], seconds: float, computing: Intervals | None = None
) -> Busy:
    """Computes how much of a period of `seconds` is spent with computation, communication, or
    nothing. A piece of work is (begin, end, whether it communicates).

    If the pieces are those of one stream, `computing` has the intervals in which any stream of the
    rank computes. By default, the pieces are those of the whole rank.
    """
    given = list(pieces)
    mine = union((a, b) for a, b, is_transfer in given if not is_transfer)
    moving = union((a, b) for a, b, is_transfer in given if is_transfer)
    beside = mine if computing is None else computing
    exposed = length(union([*beside, *moving])) - length(beside)
    used = length(union([*mine, *moving]))
    return Busy(length(mine), length(moving), exposed, seconds - used)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the time that is covered by at least one of the intervals, as sorted intervals that
    do not touch."""
    found: Intervals = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], b)
        else:
            found.append((a, b))
    return found


def length(intervals: Intervals) -> float:
    """Returns the total length of intervals that do not overlap."""
    return sum(b - a for a, b in intervals)


@dataclass(frozen=True)
class StreamTimes:
    """The use of the time of a run by one stream of a rank, in seconds. For the fields `compute`,
    `communication`, `exposed` and `idle`, see `Busy`.
    """

    stream: str
    compute: float
    communication: float
    exposed: float
    idle: float


@dataclass(frozen=True)
class CommunicationCost:
    """The cost of one communication for one rank, in one run of the program.

    - `line`: the number of the op's line in `str(program)`.
    - `op`: the line of the program, the user's line, and the text of the op.
    - `along`: the mesh dimensions along which the ranks of a team differ, such as `mesh_x`. It is
      "between meshes" if sender and receiver are on different meshes.
    - `members`: the number of ranks that communicate with one another.
    - `times`: how often the op runs; `sent_nbytes`, `received_nbytes`: the bytes of all its runs.
    - `seconds`: the time of all its runs if nothing else runs, or of the whole kernel if a kernel
      reads other ranks' memory; 0 if no machine was given.
    """

    line: int
    op: str
    along: str
    members: int
    times: int
    sent_nbytes: int
    received_nbytes: int
    seconds: float = 0.0


def along_text(along: str) -> str:
    """Returns the words for the mesh dimensions of a communication: `along mesh_x`, or `between
    meshes`."""
    return along if along == BETWEEN_MESHES else f"along {along}"


def sent_along(communications: Iterable[CommunicationCost]) -> dict[str, int]:
    """Returns the bytes that a rank sends along each mesh dimension in one run, such as `{"mesh_y":
    4096, "mesh_x": 512}`.

    A team that differs in several dimensions has a key of its own, such as `mesh_y mesh_x`.
    """
    found: dict[str, int] = {}
    for one in communications:
        found[one.along] = found.get(one.along, 0) + one.sent_nbytes
    return found


@dataclass(frozen=True)
class RankTimes:
    """The predicted times, memory and traffic of one rank. The ranks in `ranks` form a class: all
    values are the same for each of these ranks.

    - `seconds`: the time of the GPU; `host_seconds`: the time in which the host issues the work, in
      parallel with the GPU.
    - `compute`, `communication`, `exposed`: see `Busy`; `streams`: the same for each stream.
    - `input_nbytes`: the size of the inputs; `peak_nbytes`: the largest number of bytes allocated
      at one time.
    - `sent_nbytes`, `received_nbytes`: the traffic with other ranks; `communications`: the same for
      each communication in which the ranks take part, in program order.
    """

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
    communications: tuple[CommunicationCost, ...] = ()

    @property
    def sent_along(self) -> dict[str, int]:
        """The bytes that a rank sends along each mesh dimension; see the function `sent_along`."""
        return sent_along(self.communications)

    @property
    def idle(self) -> float:
        """The seconds in which the GPU neither computes nor communicates."""
        return self.seconds - self.compute - self.exposed


@dataclass(frozen=True)
class CriticalOp:
    """An op on the critical path: the chain of work that determines the total time.

    - `seconds`: the time that the op adds to the path, in all its iterations.
    - `times`: how often the op is on the path.
    - `part`: the fraction of the path's time that the op takes.
    """

    op: str
    seconds: float
    times: int
    part: float


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of one program on one machine.

    - `seconds`: the time per call if calls follow each other: that of the device or of the host,
      whichever is longer.
    - `classes`: the times of each class of ranks. Ranks of one class take the same time.
    - `links`: (sender, receiver, bytes) for each pair of ranks that exchange data; None if there
      are too many ranks.
    - `critical_path`: the ops that determine the total time.
    - `notes`: advice: sentences about inputs whose annotation would save time.
    """

    machine: str
    device: str
    seconds: float
    classes: tuple[RankTimes, ...]
    links: tuple[tuple[int, int, int], ...] | None
    critical_path: tuple[CriticalOp, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the prediction as data for JSON, as `python -m hostir cost --json` prints it."""
        return asdict(self)


def seconds_of(made: SimulatedSchedule) -> tuple[float, float]:
    """Returns (GPU seconds, host seconds) that the slowest rank needs for a program. `made` has the
    simulated begin and end of each op.
    """
    return max((w.end for w in made.work), default=0.0), max(made.host, default=0.0)


def predict(program: HostIrContainer, made: SimulatedSchedule) -> Prediction:
    """Returns the predicted costs of a program, computed from `made`, which has the simulated begin
    and end of each op.
    """
    traffic, unrolled = traffic_of(made.unrolled, made.firsts), made.unrolled
    by_class: dict[int, list[int]] = {n: [] for n in range(len(made.firsts))}
    numbers: list[int] = made.classes.tolist()
    for rank, number in zip(made.ranks, numbers, strict=True):
        by_class[number].append(rank)
    found: list[RankTimes] = []
    for number, place in enumerate(made.firsts):
        mine = made.of_class(number)
        end = max((w.end for w in mine), default=0.0)
        pieces = [(w.start, w.end, w.is_transfer) for w in mine]
        busy = busy_of(pieces, end)
        found.append(
            RankTimes(
                tuple(by_class[number]),
                end,
                made.host[number],
                busy.compute,
                busy.communication,
                busy.exposed,
                _streams(made, number, mine, end),
                _number(unrolled.inputs, place),
                _number(unrolled.peak, place),
                _number(traffic.sent, place),
                _number(traffic.received, place),
                communications_of(program, traffic, number, _seconds_of_class(made, number)),
            )
        )
    links = None
    if traffic.pairs is not None:
        ends: list[tuple[int, int]] = np.argwhere(traffic.pairs > 0).tolist()
        links = tuple(
            (made.ranks[a], made.ranks[b], round(float(traffic.pairs[a, b]))) for a, b in ends
        )
    seconds = max((max(c.seconds, c.host_seconds) for c in found), default=0.0)
    name, device = made.machine.name, made.machine.device
    path, notes = _path(program, made.work), sliced_inputs(program)
    return Prediction(name, device, seconds, tuple(found), links, path, notes)


def communications_of(
    program: HostIrContainer, traffic: Traffic, place: int, seconds: Mapping[Op, float]
) -> tuple[CommunicationCost, ...]:
    """Returns the cost of each communication in which a rank takes part, in program order.

    `traffic` has the bytes per op of some ranks, and `place` is the position of the rank among
    these. `seconds` has the times of communications.
    """
    lines = line_numbers(program)
    return tuple(
        CommunicationCost(
            lines[id(row.op)],
            Site(row.op).text(lines),
            row.along or BETWEEN_MESHES,
            row.members,
            int(row.times[place]),
            round(float(row.sent[place])),
            round(float(row.received[place])),
            seconds.get(row.op, 0.0),
        )
        for row in traffic.ops
        if row.times[place]
    )


def _seconds_of_class(made: SimulatedSchedule, number: int) -> dict[Op, float]:
    """Returns the seconds that each communication of the class `number` needs in all its runs if
    nothing else runs. A class consists of ranks that take the same time.

    The time of a transfer has the send as its key, not the receive. For a kernel that reads other
    ranks' memory, the time is that of the whole kernel.
    """
    found: dict[Op, float] = {}
    for work in made.work:
        item = work.item
        if number not in work.classes or not (work.is_transfer or item.far):
            continue
        is_receive = item.movement is not None and item.movement.sent is None
        op = (item.pairs[0][0] if is_receive else item).site.op
        found[op] = found.get(op, 0.0) + work.cost.seconds
    return found


def stream_name(made: SimulatedSchedule, number: int) -> str:
    """Returns the name of stream `number` in a simulation, as the program's text prints it, such as
    `Stream 2`.
    """
    unrolled = made.unrolled
    captured = {
        name: CALLER
        for name, found in unrolled.streams.captured.items()
        if np.all(np.asarray(found) == CALLER)
    }
    return spelled(number, captured, unrolled.streams.uncaptured)


def spelled(number: int, captured: Mapping[str, object], names: Mapping[str, int]) -> str:
    """Returns stream `number` as a program's text prints the stream, such as `Stream 2` or `Stream
    S0 (the caller's)`.

    `captured` maps names of streams to stream numbers, for the names that a `GetCurrentStream` op
    has introduced. `names` maps all other stream names of the program to stream numbers.
    """
    if number >= 0:
        return f"Stream {number}"
    if number == CALLER:
        name = next((name for name, s in captured.items() if s == CALLER), "Default")
        return f"Stream {name} (the caller's)"
    return f"Stream {next(str(n) for n, s in names.items() if s == number)}"


def _number(x: Any, place: int) -> int:
    value: Any = at(x, place)
    return round(value)


def _streams(
    made: SimulatedSchedule, number: int, mine: Sequence[WorkItem], end: float
) -> tuple[StreamTimes, ...]:
    computing = union((w.start, w.end) for w in mine if not w.is_transfer)
    rows: list[StreamTimes] = []
    for stream in sorted({w.streams[number] for w in mine}):
        here = [(w.start, w.end, w.is_transfer) for w in mine if w.streams[number] == stream]
        found = busy_of(here, end, computing)
        rows.append(StreamTimes(stream_name(made, stream), **asdict(found)))
    return tuple(rows)


def _path(program: HostIrContainer, work: Iterable[WorkItem]) -> tuple[CriticalOp, ...]:
    lines = line_numbers(program)
    found: dict[int, tuple[Site, float, int]] = {}
    for one, seconds in critical_path(work):
        op = one.item.site.op
        _, before, times = found.get(id(op), (None, 0.0, 0))
        found[id(op)] = Site(op), before + seconds, times + 1
    total = sum(s for _, s, _ in found.values()) or 1.0
    steps = [CriticalOp(site.text(lines), s, n, s / total) for site, s, n in found.values()]
    return tuple(sorted(steps, key=lambda s: -s.seconds))


# ------------------------------------------------------------------ the text
def report(found: Prediction) -> str:
    """Returns a prediction as the text that `python -m hostir cost` prints."""
    lines = [f"predicted on {found.machine}, not run: {ms(found.seconds)} per call"]
    for one in found.classes[:_SHOWN_CLASSES]:
        lines += ["", *_class_lines(one, found.device)]
    if (more := len(found.classes) - _SHOWN_CLASSES) > 0:
        lines += ["", f"and {more} more classes of ranks (--json has them)"]
    lines += ["", *_link_lines(found)]
    lines += ["critical path, most expensive first:"]
    for step in found.critical_path[:_SHOWN_OPS]:
        lines.append(f"  {ms(step.seconds)} {step.part:4.0%} {step.times:4} x  {step.op}")
    if (more := len(found.critical_path) - _SHOWN_OPS) > 0:
        lines.append(f"  and {more} more ops")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def times_text(one: RankTimes, device: str) -> str:
    """Returns one line with the predicted times of a class of ranks (ranks that take the same
    time). For a CPU, only one time is shown, because host and device are the same.
    """
    text = f"{ranks_text(one.ranks)}: {ms(one.seconds, 0)} on the {device}"
    return text if device == CPU else f"{text}; the host issues it in {ms(one.host_seconds, 0)}"


def _class_lines(one: RankTimes, device: str) -> list[str]:
    text = times_text(one, device)
    if one.host_seconds > one.seconds:
        text += ", which is what takes the time"
    lines = [
        text,
        *busy_lines(one.streams, Busy(one.compute, one.communication, one.exposed, one.idle)),
    ]
    lines.append(
        f"  memory: {size_text(one.input_nbytes)} of inputs, {size_text(one.peak_nbytes)} allocated"
    )
    lines.append(f"  sent {size_text(one.sent_nbytes)}, received {size_text(one.received_nbytes)}")
    return lines + _communication_lines(one)


def _communication_lines(one: RankTimes) -> list[str]:
    """Returns the lines about the bytes that each rank of a class sends along each mesh dimension,
    and in each communication."""
    lines = [f"  sent {along_text(along)}: {size_text(n)}" for along, n in one.sent_along.items()]
    if one.communications:
        lines.append("  communications, with the bytes that a rank sends and the time alone:")
    for row in one.communications[:_SHOWN_OPS]:
        sent = f"{size_text(row.sent_nbytes):>11} {ms(row.seconds)} {row.times:4} x"
        lines.append(f"  {sent}  {row.members} ranks {along_text(row.along)}, {row.op}")
    if (more := len(one.communications) - _SHOWN_OPS) > 0:
        lines.append(f"    and {more} more (--json has them)")
    return lines


def busy_lines(streams: Sequence[StreamTimes], whole: Busy) -> list[str]:
    """Returns the lines of a table with the compute, communication, exposed and idle times. There
    is a row for each stream, and a row for the rank (`whole`)."""
    rows = [(s.stream, s.compute, s.communication, s.exposed, s.idle) for s in streams]
    rows.append(("all", whole.compute, whole.communication, whole.exposed, whole.idle))
    width = max(len(name) for name, *_ in rows)
    lines = [f"  {'':{width}}   compute  communication    exposed       idle"]
    for name, compute, communication, exposed, idle in rows:
        times = f"{ms(compute)}  {ms(communication, 13)} {ms(exposed)} {ms(idle)}"
        lines.append(f"  {name:{width}} {times}")
    return lines


def _link_lines(found: Prediction) -> list[str]:
    if found.links is None:
        return ["links: too many ranks to list their pairs", ""]
    if not found.links:
        return []
    shown = [f"  {a} -> {b}: {size_text(n)}" for a, b, n in found.links[:_SHOWN_LINKS]]
    if (more := len(found.links) - _SHOWN_LINKS) > 0:
        shown.append(f"  and {more} more (--json has them)")
    return ["links, from rank to rank:", *shown, ""]


def ms(seconds: float, width: int = 10) -> str:
    """Returns a time as text of at least `width` characters: in milliseconds, or in microseconds if
    the time is below 1 ms."""
    text = f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
    return f"{text:>{width}}"


def size_text(nbytes: int) -> str:
    """Returns a number of bytes as text, such as `1.536 kB`. Units are powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3f} {unit}"
    return f"{nbytes} bytes"
