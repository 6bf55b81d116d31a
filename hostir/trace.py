"""The timetable of a program, in the form that Perfetto and chrome://tracing read.

A process per rank, a track per stream and two for copy engines and links; of many ranks a process
per class. An event is a piece of work: its name is the op's text, its args are bytes and
operations.
"""

from __future__ import annotations

import json
from typing import Any

from fuser.ir.text import op_text
from hostir.container import HostIrContainer
from hostir.cost import stream_name
from hostir.findings import line_numbers
from hostir.rank_posts import ranks_text
from hostir.timeline import Work
from hostir.timetable import Timetable

# Of more ranks than this only the first of each class is drawn.
MAX_DRAWN = 64
# Streams count from here, the caller's comes first; copy engines and links are below them.
_FIRST_STREAM = 10
_LINKS = (1, "out", "link out"), (2, "in", "link in")


def trace_text(program: HostIrContainer, made: Timetable) -> str:
    """Return the JSON of the trace; times are in microseconds, as the format has them."""
    lines = line_numbers(program)
    events: list[dict[str, Any]] = []
    every = len(made.ranks) <= MAX_DRAWN
    by_class: dict[int, list[int]] = {}
    for place, number in enumerate(made.classes.tolist()):
        by_class.setdefault(number, []).append(place)
    for number, places in by_class.items():
        of_class = [_event(w, number, lines) for w in made.work if number in w.classes]
        for place in places if every else places[:1]:
            rank = made.ranks[place]
            title = f"rank {rank}" if every else ranks_text([made.ranks[p] for p in places])
            events += _titles(made, number, rank, title)
            events += [{**event, "pid": rank} for pair in of_class for event in pair]
    notes = {"machine": made.machine.name, "from": "the cost model; nothing was run"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes})


def _event(work: Work, number: int, lines: dict[int, int]) -> list[dict[str, Any]]:
    """Return the events of some work on its stream and on the link, as far as a class has them."""
    site = work.item.site
    name = " ".join(op_text(site.op).split())
    args = {
        "where": site.text(lines).partition(": ")[0],
        "bytes": work.cost.nbytes,
        "flops": work.cost.flops,
    }
    event: dict[str, Any] = {
        "name": name,
        "cat": "communication" if work.is_transfer else "compute",
        "ph": "X",
        "ts": work.start * 1e6,
        "dur": (work.end - work.start) * 1e6,
        "args": args,
    }
    tracks: list[int] = []
    if number in work.streams:
        tracks.append(work.streams[number] + _FIRST_STREAM)
    tracks += [track for track, way, _ in _LINKS if (number, way) in work.needs]
    return [{**event, "tid": track} for track in tracks]


def _titles(made: Timetable, number: int, rank: int, title: str) -> list[dict[str, Any]]:
    def note(kind: str, track: int, name: str) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}

    streams = sorted({w.streams[number] for w in made.work if number in w.streams})
    tracks = [(s + _FIRST_STREAM, stream_name(made, s)) for s in streams]
    used = {way for w in made.work for c, way in w.needs if c == number}
    tracks += [(track, name) for track, way, name in _LINKS if way in used]
    return [note("process_name", 0, title), *(note("thread_name", t, n) for t, n in tracks)]
