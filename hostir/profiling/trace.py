"""Timelines in the form that Perfetto and chrome://tracing read, and the predicted one.

A process per rank, a track per stream; of predicted ones two for copy engines and links, and of
many ranks a process per class. An event is a piece of work: its name is the op's text, its args say
where in the program it stands. Measured timelines (`hostir.profiling.timeline`) name their tracks
alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.op import op_text
from hostir.cost.report import stream_name
from hostir.cost.simulator import Timetable
from hostir.cost.timeline import WorkItem
from hostir.ir.diagnostics import line_numbers
from hostir.ir.program import HostIrContainer

Event = dict[str, Any]
# Of more ranks than this only the first of each class is drawn.
MAX_DRAWN = 64
# Streams count from here, the caller's comes first; copy engines and links are below them.
_FIRST_STREAM = 10
_LINKS = (1, "out", "link out"), (2, "in", "link in")
# Processes of predicted ranks beside measured ones count from here.
_FIRST_PREDICTED = 1_000_000


def trace_text(program: HostIrContainer, made: Timetable) -> str:
    """Return the JSON of the predicted timeline alone."""
    notes = {"machine": made.machine.name, "from": "the cost model; nothing was run"}
    return file_text(predicted_events(program, made), notes)


def file_text(events: Sequence[Event], notes: Mapping[str, object]) -> str:
    """Return the JSON of a timeline; times of events are in microseconds, as the format has
    them."""
    found = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}
    return json.dumps(found)


def stream_track(stream: int) -> int:
    """Return the track of a stream, by its number in `hostir.analysis.unrolled_program`."""
    return stream + _FIRST_STREAM


def titles(process: int, title: str, tracks: Mapping[int, str], *, place: int) -> list[Event]:
    """Return the names of a process and its tracks; processes are drawn in the order of `place`,
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
    """Return the events of a timetable, `beside` those of a measured run where that is so."""
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
    """Return the events of some work on its stream and on the link, as far as a class has them."""
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
