"""Draws a timeline that `fd.trace` or `python -m hostir trace` wrote, as a picture for a page.

python scripts/draw_trace.py trace.json picture.svg [--processes 2]

There is one row per track, as in Perfetto. A piece of work has the name of its op if there is
space.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW, GAP = 960, 130, 10, 20, 14
FILLS = {"compute": "#4878a8", "communication": "#d9853b", "host": "#a0a0a0"}
Event = dict[str, Any]


def short(name: str) -> str:
    """Returns the op of an event's text: `linear` of `T5 = linear(T0, T1)`, `Allgather`."""
    if "(type=" in name:
        return name.partition("(type=")[2].partition(",")[0]
    return name.partition(" = ")[2].partition("(")[0].strip() or name.partition("(")[0]


def text(x: float, y: float, words: str, *, fill: str = "#222", extra: str = "") -> str:
    """Returns an SVG text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{extra}>{escape(words)}</text>'


def draw(trace: dict[str, Any], processes: int) -> str:
    """Returns the picture of the first processes of a trace."""
    events: list[Event] = trace["traceEvents"]

    def named(kind: str) -> dict[tuple[int, int], str]:
        found = (e for e in events if e["name"] == kind)
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in found}

    titles = {pid: name for (pid, _), name in named("process_name").items()}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    chosen = sorted(titles, key=lambda pid: order.get(pid, pid))[:processes]
    work = [e for e in events if e["ph"] == "X" and e["pid"] in chosen]
    end = max((e["ts"] + e["dur"] for e in work), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / end
    parts: list[str] = []
    y = 4.0
    for pid in chosen:
        parts.append(text(4, y + 13, titles[pid], extra=' font-weight="bold"'))
        y += ROW
        for (owner, tid), name in sorted(named("thread_name").items()):
            if owner != pid:
                continue
            parts.append(text(12, y + 13, name))
            parts.append(f'<path d="M{LEFT} {y + ROW - 1}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            mine = [e for e in work if (e["pid"], e["tid"]) == (pid, tid)]
            parts += [piece(e, y, scale) for e in mine]
            y += ROW
        y += GAP
    for k in range(5):
        anchor = ' text-anchor="middle"' if k < 4 else ' text-anchor="end"'
        parts.append(text(LEFT + k / 4 * end * scale, y, f"{k / 4 * end:.0f} us", extra=anchor))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8:.0f}"'
    style = ' font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f"{head}{style}>", ground, *parts, "</svg>\n"])


def piece(event: Event, y: float, scale: float) -> str:
    """Returns the SVG elements of one event."""
    x, width, name = LEFT + event["ts"] * scale, event["dur"] * scale, short(event["name"])
    box = f'<rect class="piece" x="{x:.2f}" y="{y + 2:.1f}" width="{max(width, 0.3):.2f}"'
    fill = FILLS.get(event["cat"], "#a0a0a0")
    drawn = f'{box} height="{ROW - 5}" fill="{fill}"><title>{escape(event["name"])}</title></rect>'
    if width > 6.5 * len(name):
        drawn += text(x + 3, y + 13, name, fill="#fff")
    return drawn


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the trace of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--processes", type=int, default=2, help="how many; default: 2")
    args = parser.parse_args(argv)
    args.picture.write_text(draw(json.loads(args.trace.read_text()), args.processes))


if __name__ == "__main__":
    main()
