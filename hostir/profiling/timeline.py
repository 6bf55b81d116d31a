"""A trace: the measured timeline of a program's run on every rank, the sums of its times, and the
file format of timelines."""

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
from fuser.support.errors import InputError, counted
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
from hostir.cost.simulator import SimulatedSchedule, WorkItem
from hostir.ir.diagnostics import line_numbers
from hostir.ir.program import HostIrContainer
from hostir.profiling.op_recorder import TracedOp
from hostir.profiling.timers import Round, Timed

_WAITS = "the host waits until the device has done all of it"
# The name of the device in a trace without a GPU.
CPU = "the CPU"
# The most ranks in a summary; the file has all of them.
_SHOWN_RANKS = 8
# The track of the host; streams of the program have the numbers of predicted ones.
_HOST = 0
_CATEGORY = {"communication": "communication", "wait": "communication"}


@dataclass(frozen=True)
class Slice:
    """One bar of the timeline: the time of one op, kernel or copy in the last traced run of a rank.

    - `op`: the index of the op in `RankTrace.ops`.
    - `begin`, `end`: seconds since the run began on this rank.
    - `on_host`: whether the host issued the op in this time; otherwise the op's stream worked on
      the op.
    - `activity`: the device's name of the kernel or copy; "" if unknown.
    - `queue`: the device's name of the stream; "" if unknown.
    """

    op: int
    begin: float
    end: float
    on_host: bool
    activity: str = ""
    queue: str = ""


@dataclass(frozen=True)
class RunTimes:
    """The times of one run on one rank, in seconds.

    - `host`: the time from the begin of the run until the host had issued all ops.
    - `wall`: the time from the begin of the run until the device was done.
    - `busy`: the parts of the wall time that the rank spent with computation, with communication
      alone (`exposed`), and with neither (`idle`): `busy.compute + busy.exposed + busy.idle ==
      wall`.
    - `streams`: the same parts for each stream.
    """

    host: float
    wall: float
    busy: Busy
    streams: tuple[StreamTimes, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """The measurements that one rank contributes to a trace.

    - `source`: the origin of the times, such as CUDA events.
    - `ops`: the op of each recorded step of the program; `streams`: the names of streams by number.
    - `runs`: the times of the traced runs; `slices`: the timeline of the last traced run.
    - `began`: the begin of the last run, by the clock of the program's first rank.
    - `plain`: (wall, host) seconds of runs of the same recorded steps without timers.
    - `usual`: (wall, host) seconds of ordinary runs, which may use CUDA graphs; `graphs`: lines of
      text about these graphs, or the reasons why there are none.
    - `skew_s`: an upper bound, in seconds, on how far the device's clock differs from the host's.
    - `doubts`: remarks about uncertain measurements.
    """

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
        """Returns the measurements as a dict of lists, texts and numbers, which ranks can exchange
        as JSON. `rank_from_dict` reads the dict."""
        return {**asdict(self), "streams": list(self.streams.items())}


def rank_from_dict(d: dict[str, Any]) -> RankTrace:
    """Returns the measurements of a rank from the dict that `RankTrace.to_dict` returned on that
    rank."""
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
def run_times(run: Round, ops: Sequence[TracedOp], streams: Mapping[int, str]) -> RunTimes:
    """Sums the times of one run on this rank, for the whole run and for each stream.

    The time of a kernel or copy outside the run, before its begin or after its end, does not count.
    `ops` has the op of each recorded step, and `streams` the names of streams by number.
    """
    wall = run.end - run.begin
    pieces: dict[int, list[tuple[float, float, bool]]] = {}
    for t in run.work:
        begin, end = max(0.0, t.begin - run.begin), min(wall, t.end - run.begin)
        if begin < end:
            is_transfer = ops[t.step].kind in ("communication", "wait")
            pieces.setdefault(ops[t.step].stream, []).append((begin, end, is_transfer))
    every = [piece for found in pieces.values() for piece in found]
    computing: Intervals = union((a, b) for a, b, is_transfer in every if not is_transfer)
    rows = tuple(
        StreamTimes(streams[number], **asdict(busy_of(pieces.get(number, ()), wall, computing)))
        for number in sorted({*streams, *pieces})
    )
    return RunTimes(run.issued - run.begin, wall, busy_of(every, wall), rows)


def slices_of(run: Round) -> tuple[Slice, ...]:
    """Returns the timeline of a run: the times of ops on the host, and of kernels and copies on
    streams, sorted by their begin."""

    def made(t: Timed, *, on_host: bool) -> Slice:
        begin, end = t.begin - run.begin, t.end - run.begin
        return Slice(t.step, begin, end, on_host, t.activity, t.queue)

    found = [made(t, on_host=True) for t in run.host]
    found += [made(t, on_host=False) for t in run.work]
    return tuple(sorted(found, key=lambda s: (s.begin, -s.end)))


# ------------------------------------------------------------------ the result
@dataclass(frozen=True, eq=False)
class Trace:
    """A measured trace: the timeline of the last of several runs, and the sums of the times of one
    run.

    `FusionDefinition.trace` and `HostIrEvaluator.trace` return a trace on each rank of the program.
    All sums are of one run, so that compute, exposed and idle time add up to the wall time. It is
    the run of median length, where the length of a run is that of its slowest rank; `run` is its
    index. On each rank, and for each run:

    - `wall`: from before the first op until the device is done, by the host's clock. Earlier work
      (checks of inputs, the ranks' agreement) does not count.
    - `host`: the part of `wall` until the host had issued the last op.
    - `compute`: the time in which at least one stream computes: kernels, library calls, copies,
      fills.
    - `communication`: the time in which at least one stream communicates. On CUDA: while a kernel
      or a copy of a communication runs, including waits within it; a stream that waits for a flag
      or an event is idle. With CUDA events: from before to after the communication on its stream.
      On the CPU: while the host is in the communication or in its `Wait`.
    - `exposed`: the time with communication and without computation.
    - `idle`: the time with neither, including the time before the first and after the last kernel,
      copy or communication.

    Therefore `wall = compute + exposed + idle`, exactly. `exposed_communication_ms`, `idle_ms`,
    `host_ms` and `wall_ms` are those of the slowest rank.

    The traced runs repeat the recorded steps one by one, never by a CUDA graph. Timing the steps
    costs the host time. For comparison:

    - `plain_wall_ms` and `plain_host_ms` are medians of as many runs of the same recorded steps
      without timers.
    - `usual_wall_ms` and `usual_host_ms` are medians of ordinary runs, which may use CUDA graphs
      (`graphs`, and `FusionDefinition.cuda_graphs`).

    `outputs` are the outputs of the last run on this rank.
    """

    ranks: tuple[RankTrace, ...]
    rank_clocks: str
    warm_up: int
    outputs: tuple[torch.Tensor, ...]
    predicted: tuple[HostIrContainer, SimulatedSchedule] | None = None
    # Why there is no prediction although one was requested; "" otherwise.
    not_predicted: str = ""

    @cached_property
    def run(self) -> int:
        """The index of the run whose times are summed. The wall time of a run is that of its
        slowest rank, and the run with the median wall time is taken.
        """
        walls = [max(r.runs[i].wall for r in self.ranks) for i in range(self.repeat)]
        return sorted(range(self.repeat), key=walls.__getitem__)[(self.repeat - 1) // 2]

    @property
    def repeat(self) -> int:
        """The number of traced runs, which is the argument `repeat` of `trace`."""
        return len(self.ranks[0].runs)

    @property
    def source(self) -> str:
        """The origins of the times on all ranks as text, such as "CUDA events around each op"."""
        return " and ".join(dict.fromkeys(r.source for r in self.ranks))

    @property
    def clocks(self) -> str:
        """A text that says how far the clocks of ranks and of their devices may differ."""
        skew = max(r.skew_s for r in self.ranks)
        device = f"; times of devices may be {_ms(skew)} from their hosts'" if skew else ""
        return f"{self.rank_clocks}{device}"

    @property
    def doubts(self) -> tuple[str, ...]:
        """Remarks about uncertain measurements on all ranks, each beginning with its rank; () if
        there are none."""
        return tuple(f"rank {r.rank}: {doubt}" for r in self.ranks for doubt in r.doubts)

    @property
    def _longest(self) -> RunTimes:
        return max((r.runs[self.run] for r in self.ranks), key=lambda run: run.wall)

    @property
    def wall_ms(self) -> float:
        """The wall time of the slowest rank, in milliseconds."""
        return self._longest.wall * 1e3

    @property
    def host_ms(self) -> float:
        """The time until the slowest rank's host had issued all ops, in milliseconds."""
        return self._longest.host * 1e3

    @property
    def exposed_communication_ms(self) -> float:
        """The time in which the slowest rank communicates while it computes nothing, in
        milliseconds."""
        return self._longest.busy.exposed * 1e3

    @property
    def compute_ms(self) -> float:
        """The time in which the slowest rank computes, in milliseconds."""
        return self._longest.busy.compute * 1e3

    @property
    def idle_ms(self) -> float:
        """The time in which the slowest rank neither computes nor communicates, in milliseconds."""
        return self._longest.busy.idle * 1e3

    @property
    def streams(self) -> tuple[StreamTimes, ...]:
        """The use of the run's time by each stream of the slowest rank, in seconds."""
        return self._longest.streams

    @property
    def plain_wall_ms(self) -> float:
        """The median wall time of runs of the recorded steps without timers, in milliseconds.
        Compare with `wall_ms` to see how much time the timers cost."""
        return max(_medians(r.plain)[0] for r in self.ranks) * 1e3

    @property
    def plain_host_ms(self) -> float:
        """The median time in which the host issues a run of the recorded steps without timers, in
        milliseconds."""
        return max(_medians(r.plain)[1] for r in self.ranks) * 1e3

    @property
    def usual_wall_ms(self) -> float:
        """The median wall time of ordinary runs, without a trace, in milliseconds."""
        return max(_medians(r.usual)[0] for r in self.ranks) * 1e3

    @property
    def usual_host_ms(self) -> float:
        """The median time in which the host issues an ordinary run, without a trace, in
        milliseconds."""
        return max(_medians(r.usual)[1] for r in self.ranks) * 1e3

    @property
    def graphs(self) -> tuple[str, ...]:
        """Lines about the CUDA graphs by which ordinary runs are launched, or the reasons why there
        are none. Each line begins with its rank."""
        return tuple(f"rank {r.rank}: {line}" for r in self.ranks for line in r.graphs)

    def save(self, path: str | Path, *, predicted: bool = True) -> None:
        """Writes the timeline as a file for Perfetto or chrome://tracing.

        The file also has the predicted timeline, if there is one, unless `predicted` is False.
        Raises `InputError` if the file `path` cannot be written.
        """
        text = self.to_json(predicted=predicted)
        try:
            Path(path).write_text(text)
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"trace: {show(path)} cannot be written: {error}") from error

    def to_json(self, *, predicted: bool = True) -> str:
        """Returns the JSON text that `save` writes. The text includes the predicted timeline, if
        there is one, unless `predicted` is False."""
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
        """Returns a report of the measured times of all ranks as text. If there is a prediction,
        the report also has the predicted times."""
        device = ", ".join(dict.fromkeys(r.device for r in self.ranks))
        times = counted(self.repeat, "run")
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
    times, walls = r.runs[run], [every.wall for every in r.runs]
    plain, usual = (" and ".join(map(_ms, _medians(pairs))) for pairs in (r.plain, r.usual))
    return [
        f"rank {r.rank}: {_ms(times.wall)} wall ({_ms(min(walls))} to {_ms(max(walls))}), the host "
        f"issues it in {_ms(times.host)}",
        *busy_lines(times.streams, times.busy),
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
    """Returns the events of the timeline file that draw one rank's last traced run.

    All ranks are drawn on one time axis, which begins with the rank whose run began first. The run
    of this rank began `shift` seconds later.
    """
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
# The file format of Perfetto and chrome://tracing, for measured and predicted timelines.
#
# - A process is a rank, and a track is a stream. A predicted timeline has two more tracks for the
#   link, and with many ranks one process per class of equal ranks.
# - An event is a piece of work. Its name is the op's text, and its args have the place in the
#   program.

Event = dict[str, Any]
# With more ranks than this, only the first rank of each class is drawn.
MAX_DRAWN = 64
# The track numbers of streams begin here, with the caller's stream; links have lower numbers.
_FIRST_STREAM = 10
_LINKS = (1, "out", "link out"), (2, "in", "link in")
# The process numbers of predicted ranks in a file with measured ones begin here.
_FIRST_PREDICTED = 1_000_000


def trace_text(program: HostIrContainer, made: SimulatedSchedule) -> str:
    """Returns the JSON text of a timeline file that has only the predicted timeline of `program`.
    `made` has the simulated begin and end of each op.
    """
    notes = {"machine": made.machine.name, "from": "the cost model; nothing was run"}
    return file_text(predicted_events(program, made), notes)


def file_text(events: Sequence[Event], notes: Mapping[str, object]) -> str:
    """Returns the JSON text of a timeline file. The times of `events` are in microseconds. `notes`
    are further facts about the timeline, such as the origin of the times."""
    found = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}
    return json.dumps(found)


def stream_track(stream: int) -> int:
    """Returns the number of the track (row) that draws a stream in the timeline file. The caller's
    stream has the stream number -1.
    """
    return stream + _FIRST_STREAM


def titles(process: int, title: str, tracks: Mapping[int, str], *, place: int) -> list[Event]:
    """Returns the events of a timeline file that name one process and its tracks. In the file, a
    process is a rank of the job and a track is a stream.

    `process` is the number of the process, and `title` its name. `tracks` maps the number of each
    track to its name. The viewer shows processes in the order of `place`, and the tracks of a
    process in the order of their numbers.
    """

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
    program: HostIrContainer, made: SimulatedSchedule, *, beside: bool = False
) -> list[Event]:
    """Returns the events of a timeline file that draw the predicted run of `program`. `made` has
    the simulated begin and end of each op.

    `beside` says whether the file also has a measured run. The predicted ranks then get other
    process numbers than the measured ranks.
    """
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
    """Returns the events of a timeline file that draw one piece of work of a predicted run. There
    is one event on its stream, and one on each link between ranks that it uses.

    `number` is a class of ranks that do the same work. `lines` maps the `id` of each op to its line
    in the program.
    """
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


def _tracks(made: SimulatedSchedule, number: int) -> dict[int, str]:
    streams = {w.streams[number] for w in made.work if number in w.streams}
    used = {way for w in made.work for c, way in w.needs if c == number}
    links = {track: name for track, way, name in _LINKS if way in used}
    return {**links, **{stream_track(s): stream_name(made, s) for s in streams}}
