"""A measured timeline: what ran when on every rank of one traced run, and the sums of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.op import op_text
from fuser.support.arguments import show
from fuser.support.errors import InputError
from hostir.cost.report import (
    Busy,
    Intervals,
    StreamTimes,
    busy_lines,
    busy_of,
    ms,
    predict,
    stream_name,
    times_text,
    union,
)
from hostir.cost.simulator import Timetable, WorkItem
from hostir.ir.diagnostics import line_numbers
from hostir.ir.program import HostIrContainer
from hostir.profiling.op_recorder import TracedOp
from hostir.profiling.timers import Round, Timed

_WAITS = "the host waits until the device has done all of it"
# What the device is called where there is no GPU.
CPU = "the CPU"
# What a summary shows; the file has all.
_SHOWN_RANKS = 8
# The track of the host; streams of the program have the numbers of predicted ones.
_HOST = 0
_CATEGORY = {"communication": "communication", "wait": "communication"}


@dataclass(frozen=True)
class Slice:
    """A piece of work of the last run: which op, where (`on_host`, or on its stream), and when, in
    seconds since that run began on its rank."""

    op: int
    begin: float
    end: float
    on_host: bool
    activity: str = ""
    queue: str = ""


@dataclass(frozen=True)
class RunTimes:
    """Seconds of one run: until the host had issued it, until the device had done it (`wall`), and
    what streams did meanwhile. `busy.compute + busy.exposed + busy.idle == wall`."""

    host: float
    wall: float
    busy: Busy
    streams: tuple[StreamTimes, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """What one rank has measured. `began` is when its last run did, by the clock of the first rank
    of the program. Nobody watched the runs of `plain` and `usual`, (wall, host): those of the same
    plan, and what runs without a trace, by the CUDA graphs that `graphs` tells about. `skew_s`
    bounds how far the device's clock may be from the host's; `doubts` says what is not known for
    sure."""

    rank: int
    device: str
    source: str
    ops: tuple[TracedOp, ...]
    streams: Mapping[int, str]
    slices: tuple[Slice, ...]
    runs: tuple[RunTimes, ...]
    plain: tuple[tuple[float, float], ...]
    usual: tuple[tuple[float, float], ...]
    graphs: tuple[str, ...]
    began: float
    skew_s: float
    doubts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `rank_from_dict` takes, of lists, texts and numbers."""
        return {**asdict(self), "streams": list(self.streams.items())}


def rank_from_dict(d: dict[str, Any]) -> RankTrace:
    """Returns the trace of a rank that sent it as JSON."""
    made: dict[str, Any] = {
        "ops": tuple(_op_from_dict(op) for op in d["ops"]),
        "streams": dict(d["streams"]),
        "slices": tuple(Slice(**s) for s in d["slices"]),
        "runs": tuple(_run_from_dict(run) for run in d["runs"]),
        **{name: tuple((wall, host) for wall, host in d[name]) for name in ("plain", "usual")},
        **{name: tuple(d[name]) for name in ("graphs", "doubts")},
    }
    return RankTrace(**{**d, **made})


def _op_from_dict(d: dict[str, Any]) -> TracedOp:
    tensors: list[str] = d.pop("tensors")
    return TracedOp(**d, tensors=tuple(tensors))


def _run_from_dict(d: dict[str, Any]) -> RunTimes:
    streams = tuple(StreamTimes(**s) for s in d["streams"])
    return RunTimes(d["host"], d["wall"], Busy(**d["busy"]), streams)


# ------------------------------------------------------------------ the sums of a rank
def run_times(one: Round, ops: Sequence[TracedOp], streams: Mapping[int, str]) -> RunTimes:
    """Returns the sums of one run; what lies outside of it is cut off."""
    wall = one.end - one.begin
    pieces: dict[int, list[tuple[float, float, bool]]] = {}
    for t in one.work:
        begin, end = max(0.0, t.begin - one.begin), min(wall, t.end - one.begin)
        if begin < end:
            is_transfer = ops[t.step].kind in ("communication", "wait")
            pieces.setdefault(ops[t.step].stream, []).append((begin, end, is_transfer))
    every = [piece for found in pieces.values() for piece in found]
    computing: Intervals = union((a, b) for a, b, is_transfer in every if not is_transfer)
    rows = tuple(
        StreamTimes(streams[number], **asdict(busy_of(pieces.get(number, ()), wall, computing)))
        for number in sorted({*streams, *pieces})
    )
    return RunTimes(one.issued - one.begin, wall, busy_of(every, wall), rows)


def slices_of(one: Round) -> tuple[Slice, ...]:
    """Returns all that a run did, in the order of its begin."""

    def made(t: Timed, *, on_host: bool) -> Slice:
        begin, end = t.begin - one.begin, t.end - one.begin
        return Slice(t.step, begin, end, on_host, t.activity, t.queue)

    found = [made(t, on_host=True) for t in one.host]
    found += [made(t, on_host=False) for t in one.work]
    return tuple(sorted(found, key=lambda s: (s.begin, -s.end)))


# ------------------------------------------------------------------ the result
@dataclass(frozen=True, eq=False)
class Trace:
    """What `FusionDefinition.trace` and `HostIrEvaluator.trace` return, on every rank of the
    program: a timeline of the last of several runs, and the sums of one of them.

    Of the runs, `run` is the one of middle length (by the rank that took longest); all sums are
    of that one, so that they add up. On each rank, and of each run:

    wall            from the moment before its first step until its device has done all of it, as
                    the host's clock has it; what comes before (checks of inputs, the ranks'
                    agreement) is not in it
    host            the part of `wall` until the host had issued the last step
    compute         when at least one stream computes: kernels, library calls, copies, fills
    communication   when at least one stream communicates. On CUDA: while a kernel or a copy of a
                    communication runs, waits within it included; a stream that waits for a flag or
                    an event is idle. With CUDA events: from before to after the communication on
                    its stream. On the CPU: while the host is in the communication or in its Wait.
    exposed         when there is communication and nothing computes
    idle            when there is neither; the time before the first and after the last is in it

    So `wall = compute + exposed + idle`, exactly. `exposed_communication_ms`, `idle_ms`, `host_ms`
    and `wall_ms` are those of the rank that took longest.

    What ran is the recorded plan of these inputs, step by step: never a captured CUDA graph, and
    watched, which costs the host time. `plain_wall_ms` and `plain_host_ms` are medians of as many
    runs of the same plan that nobody watched, `usual_wall_ms` and `usual_host_ms` of runs as they
    are without a trace, by CUDA graphs where these repeat them (`graphs`, and
    `FusionDefinition.cuda_graphs`). `outputs` are those of the last run, on this rank.
    """

    ranks: tuple[RankTrace, ...]
    rank_clocks: str
    warm_up: int
    outputs: tuple[torch.Tensor, ...]
    predicted: tuple[HostIrContainer, Timetable] | None = None
    # Why there is no prediction, where one was asked for.
    not_predicted: str = ""

    @cached_property
    def run(self) -> int:
        """Which of the runs has the sums."""
        walls = [max(r.runs[i].wall for r in self.ranks) for i in range(self.repeat)]
        return sorted(range(self.repeat), key=walls.__getitem__)[(self.repeat - 1) // 2]

    @property
    def repeat(self) -> int:
        """How many runs were traced."""
        return len(self.ranks[0].runs)

    @property
    def source(self) -> str:
        """Where the times of devices come from."""
        return " and ".join(dict.fromkeys(r.source for r in self.ranks))

    @property
    def clocks(self) -> str:
        """How sure the times of ranks, and of their devices, are beside each other."""
        skew = max(r.skew_s for r in self.ranks)
        device = f"; times of devices may be {_ms(skew)} from their hosts'" if skew else ""
        return f"{self.rank_clocks}{device}"

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is not known for sure; () where all is."""
        return tuple(f"rank {r.rank}: {doubt}" for r in self.ranks for doubt in r.doubts)

    @property
    def _longest(self) -> RunTimes:
        return max((r.runs[self.run] for r in self.ranks), key=lambda one: one.wall)

    @property
    def wall_ms(self) -> float:
        return self._longest.wall * 1e3

    @property
    def host_ms(self) -> float:
        return self._longest.host * 1e3

    @property
    def exposed_communication_ms(self) -> float:
        return self._longest.busy.exposed * 1e3

    @property
    def compute_ms(self) -> float:
        return self._longest.busy.compute * 1e3

    @property
    def idle_ms(self) -> float:
        return self._longest.busy.idle * 1e3

    @property
    def streams(self) -> tuple[StreamTimes, ...]:
        """The times of each stream, of the rank that took longest, in seconds."""
        return self._longest.streams

    @property
    def plain_wall_ms(self) -> float:
        return max(_medians(r.plain)[0] for r in self.ranks) * 1e3

    @property
    def plain_host_ms(self) -> float:
        return max(_medians(r.plain)[1] for r in self.ranks) * 1e3

    @property
    def usual_wall_ms(self) -> float:
        return max(_medians(r.usual)[0] for r in self.ranks) * 1e3

    @property
    def usual_host_ms(self) -> float:
        return max(_medians(r.usual)[1] for r in self.ranks) * 1e3

    @property
    def graphs(self) -> tuple[str, ...]:
        """Which CUDA graphs repeat runs without a trace, or why none does."""
        return tuple(f"rank {r.rank}: {line}" for r in self.ranks for line in r.graphs)

    def save(self, path: str | Path, *, predicted: bool = True) -> None:
        """Writes the timeline for Perfetto or chrome://tracing, beside the predicted one if there
        is one and it is `predicted`.

        Raises `InputError` where `path` cannot be written.
        """
        text = self.to_json(predicted=predicted)
        try:
            Path(path).write_text(text)
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"trace: {show(path)} cannot be written: {error}") from error

    def to_json(self, *, predicted: bool = True) -> str:
        """Returns the text that `save` writes."""
        first = min(r.began for r in self.ranks)
        events = [event for r in self.ranks for event in _events(r, r.began - first)]
        notes: dict[str, Any] = {
            "from": "a real run",
            "source": self.source,
            "device": ", ".join(dict.fromkeys(r.device for r in self.ranks)),
            "clocks": self.clocks,
            "doubts": list(self.doubts),
            "summary": self.summary().splitlines(),
        }
        if self.predicted is not None and predicted:
            program, made = self.predicted
            events += predicted_events(program, made, beside=True)
            notes["predicted on"] = made.machine.name
        if self.not_predicted:
            notes["not predicted"] = self.not_predicted
        return file_text(events, notes)

    def summary(self) -> str:
        """Returns the sums as text."""
        device = ", ".join(dict.fromkeys(r.device for r in self.ranks))
        times = f"{self.repeat} run{'s' if self.repeat > 1 else ''}"
        lines = [
            f"measured on {device} by {self.source}",
            f"sums of the middle one of {times}, after {self.warm_up} to warm up; "
            "the recorded plan step by step, no CUDA graph",
        ]
        for r in self.ranks[:_SHOWN_RANKS]:
            lines += ["", *_rank_lines(r, self.run)]
        if (more := len(self.ranks) - _SHOWN_RANKS) > 0:
            lines += ["", f"and {more} more ranks"]
        if self.predicted is not None:
            found = predict(*self.predicted)
            for c in found.classes[:_SHOWN_RANKS]:
                busy = Busy(c.compute, c.communication, c.exposed, c.idle)
                lines += [
                    "",
                    f"predicted on {found.machine}, {times_text(c, found.device)}",
                    *busy_lines((), busy),
                ]
        if self.not_predicted:
            lines += ["", f"not predicted: {self.not_predicted}"]
        lines += ["", f"clocks: {self.clocks}"]
        lines += [f"not sure: {doubt}" for doubt in self.doubts]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.ranks)} ranks, {self.wall_ms:.3f} ms; print(trace.summary())>"


def _rank_lines(r: RankTrace, run: int) -> list[str]:
    one, walls = r.runs[run], [every.wall for every in r.runs]
    plain, usual = (" and ".join(map(_ms, _medians(times))) for times in (r.plain, r.usual))
    return [
        f"rank {r.rank}: {_ms(one.wall)} wall ({_ms(min(walls))} to {_ms(max(walls))}), the host "
        f"issues it in {_ms(one.host)}",
        *busy_lines(one.streams, one.busy),
        f"  wall and host unwatched: {plain}; without a trace: {usual}",
        *(f"  CUDA graphs: {line}" for line in r.graphs if r.device != CPU),
    ]


def _ms(seconds: float) -> str:
    return ms(seconds, 0)


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    walls, hosts = (sorted(found)[(len(found) - 1) // 2] for found in zip(*times, strict=True))
    return walls, hosts


# ------------------------------------------------------------------ the file
def _events(r: RankTrace, shift: float) -> list[Event]:
    """Returns the events of a rank whose last run began `shift` seconds after the first."""
    tracks = {_HOST: "host", **{stream_track(n): name for n, name in r.streams.items()}}
    events = titles(r.rank, f"rank {r.rank}", tracks, place=2 * r.rank)
    for s in r.slices:
        op = r.ops[s.op]
        args: dict[str, object] = {
            "where": op.where,
            "op": op.name,
            "tensors": ", ".join(op.tensors),
            "stream": r.streams.get(op.stream, "host"),
        }
        if s.activity:
            args["activity"] = s.activity
        if s.queue:
            args["queue"] = s.queue
        events.append(
            {
                "name": op.text,
                "cat": "host" if s.on_host else _CATEGORY.get(op.kind, "compute"),
                "ph": "X",
                "pid": r.rank,
                "tid": _HOST if s.on_host else stream_track(op.stream),
                "ts": (shift + s.begin) * 1e6,
                "dur": (s.end - s.begin) * 1e6,
                "args": args,
            }
        )
    last = r.runs[-1]
    if last.wall > last.host:
        waits: Event = {
            "name": _WAITS,
            "cat": "host",
            "ph": "X",
            "pid": r.rank,
            "tid": _HOST,
            "args": {},
        }
        times = {"ts": (shift + last.host) * 1e6, "dur": (last.wall - last.host) * 1e6}
        events.append({**waits, **times})
    return events


# ----------------------------------------------------------------------
# Timelines in the form that Perfetto and chrome://tracing read, and the predicted one.
#
# A process per rank, a track per stream; of predicted ones two for copy engines and links, and of
# many ranks a process per class. An event is a piece of work: its name is the op's text, its args
# say where in the program it stands. Measured timelines (`hostir.profiling.timeline`) name their
# tracks alike.

Event = dict[str, Any]
# Of more ranks than this only the first of each class is drawn.
MAX_DRAWN = 64
# Streams count from here, the caller's comes first; copy engines and links are below them.
_FIRST_STREAM = 10
_LINKS = (1, "out", "link out"), (2, "in", "link in")
# Processes of predicted ranks beside measured ones count from here.
_FIRST_PREDICTED = 1_000_000


def trace_text(program: HostIrContainer, made: Timetable) -> str:
    """Returns the JSON of the predicted timeline alone."""
    notes = {"machine": made.machine.name, "from": "the cost model; nothing was run"}
    return file_text(predicted_events(program, made), notes)


def file_text(events: Sequence[Event], notes: Mapping[str, object]) -> str:
    """Returns the JSON of a timeline; times of events are in microseconds, as the format has
    them."""
    found = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}
    return json.dumps(found)


def stream_track(stream: int) -> int:
    """Returns the track of a stream, by its number in `hostir.analysis.unrolled_program`."""
    return stream + _FIRST_STREAM


def titles(process: int, title: str, tracks: Mapping[int, str], *, place: int) -> list[Event]:
    """Returns the names of a process and its tracks; processes are drawn in the order of `place`,
    tracks in that of their numbers."""

    def note(kind: str, track: int, args: dict[str, object]) -> Event:
        return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": args}

    events = [
        note("process_name", 0, {"name": title}),
        note("process_sort_index", 0, {"sort_index": place}),
    ]
    for track, name in sorted(tracks.items()):
        events.append(note("thread_name", track, {"name": name}))
        events.append(note("thread_sort_index", track, {"sort_index": track}))
    return events


# ------------------------------------------------------------------ the predicted one
def predicted_events(
    program: HostIrContainer, made: Timetable, *, beside: bool = False
) -> list[Event]:
    """Returns the events of a timetable, `beside` those of a measured run where that is so."""
    lines = line_numbers(program)
    events: list[Event] = []
    every = len(made.ranks) <= MAX_DRAWN
    by_class: dict[int, list[int]] = {}
    for place, number in enumerate(made.classes.tolist()):
        by_class.setdefault(number, []).append(place)
    for number, places in by_class.items():
        of_class = [_event(w, number, lines) for w in made.work if number in w.classes]
        for place in places if every else places[:1]:
            rank = made.ranks[place]
            title = f"rank {rank}" if every else ranks_text([made.ranks[p] for p in places])
            title += f", predicted on {made.machine.name}" if beside else ""
            process = rank + (_FIRST_PREDICTED if beside else 0)
            events += titles(process, title, _tracks(made, number), place=2 * rank + 1)
            events += [{**event, "pid": process} for pair in of_class for event in pair]
    return events


def _event(work: WorkItem, number: int, lines: dict[int, int]) -> list[Event]:
    """Returns the events of some work on its stream and on the link, as far as a class has them."""
    site = work.item.site
    args = {
        "where": site.place(lines),
        "bytes": work.cost.nbytes,
        "flops": work.cost.flops,
    }
    event: Event = {
        "name": " ".join(op_text(site.op).split()),
        "cat": "communication" if work.is_transfer else "compute",
        "ph": "X",
        "ts": work.start * 1e6,
        "dur": (work.end - work.start) * 1e6,
        "args": args,
    }
    tracks: list[int] = []
    if number in work.streams:
        tracks.append(stream_track(work.streams[number]))
    tracks += [track for track, way, _ in _LINKS if (number, way) in work.needs]
    return [{**event, "tid": track} for track in tracks]


def _tracks(made: Timetable, number: int) -> dict[int, str]:
    streams = {w.streams[number] for w in made.work if number in w.streams}
    used = {way for w in made.work for c, way in w.needs if c == number}
    links = {track: name for track, way, name in _LINKS if way in used}
    return {**links, **{stream_track(s): stream_name(made, s) for s in streams}}
