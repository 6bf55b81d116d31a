"""Draws the plots of docs/performance/index.md, and writes its tables, from recorded results.

python benchmarks/plots.py

It reads `benchmarks/results` and measures nothing. It writes `docs/assets/performance-*.svg`, and
the parts of the page between the comments that name this file. A test checks that they are up to
date.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from page_tables import table, with_parts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ASSETS = ROOT / "docs" / "assets"
PAGE = ROOT / "docs" / "performance" / "index.md"
OURS, OTHERS, PLAIN = "#2f6fa8", "#d9853b", "#9aa5b1"
WIDTH, LEFT = 760, 230
# A torch call that takes less than this launches no kernel (it returns a view): not compared.
VIEW_US = 0.5
Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    """Returns the rows of a file of results."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ drawing
def text(x: float, y: float, words: str, anchor: str = "start", fill: str = "#1f2933") -> str:
    """Returns an SVG text at a position."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )


def picture(title: str, height: int, parts: Iterable[str]) -> str:
    """Returns an SVG picture on a white background, for light and dark colour schemes."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" '
            'font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def legend(names: Sequence[tuple[str, str]], y: float) -> list[str]:
    """Returns a coloured square and a name for each candidate."""
    parts: list[str] = []
    for k, (name, colour) in enumerate(names):
        x = LEFT + 165 * k
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, y, name))
    return parts


def bars(
    title: str,
    names: Sequence[tuple[str, str]],
    groups: Sequence[tuple[str, Sequence[float | None]]],
    *,
    mark: float,
    most: float,
) -> str:
    """Returns a picture of horizontal bars, several per group, with a line at the value
    `mark`.
    """
    size, gap = 13, 9
    step = size * len(names) + gap
    scale = (WIDTH - LEFT - 60) / most
    height = 60 + step * len(groups)
    parts = legend(names, 26)
    for k, (group, values) in enumerate(groups):
        top = 44 + step * k
        parts.append(text(LEFT - 8, top + step / 2, group, "end"))
        for j, value in enumerate(values):
            if value is None:
                continue
            y = top + size * j
            length = min(value, most) * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{size - 2}" '
                f'fill="{names[j][1]}"/>'
            )
            parts.append(text(LEFT + length + 5, y + size - 3, f"{value:.2f}"))
    x = LEFT + mark * scale
    parts.append(f'<path d="M{x:.1f} 38V{height - 14}" stroke="#1f2933" stroke-dasharray="4 3"/>')
    return picture(title, height, parts)


def curves(
    title: str, series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], unit: str
) -> str:
    """Returns a picture of curves on logarithmic axes: bytes to the right, times upwards."""
    height, bottom, top = 400, 350, 50
    xs = [x for _, _, points in series for x, _ in points]
    ys = [y for _, _, points in series for _, y in points]
    (x0, x1), (y0, y1) = (math.log2(min(xs)), math.log2(max(xs))), (0.0, math.log2(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = 70 + (math.log2(x) - x0) / (x1 - x0) * (WIDTH - 110)
        return across, bottom - (math.log2(y) - y0) / (y1 - y0) * (bottom - top)

    parts: list[str] = []
    for power in range(math.ceil(y1) + 1):
        _, y = place(2**x0, 2**power)
        if y >= top - 5:
            parts.append(f'<path d="M70 {y:.1f}H{WIDTH - 40}" stroke="#e4e7eb"/>')
            parts.append(text(62, y + 4, f"{2**power} {unit}", "end"))
    for power in range(math.ceil(x0), math.floor(x1) + 1, 2):
        x, _ = place(2**power, 1)
        label = f"{2 ** (power - 10)} KB" if power < 20 else f"{2 ** (power - 20)} MB"
        parts.append(text(x, bottom + 20, label, "middle"))
    for k, (name, colour, points) in enumerate(series):
        dash = ' stroke-dasharray="6 4"' if "4 GPUs" in name else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*p) for p in points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        x = 72 + 172 * k
        parts.append(f'<path d="M{x} 22h26" stroke="{colour}" stroke-width="2.5"{dash}/>')
        parts.append(text(x + 32, 26, name))
    return picture(title, height, parts)


# ------------------------------------------------------------------ kernels
def kernel_ratios(dtype: str) -> dict[str, list[float]]:
    """Returns, per pattern, the ratio of each shape: torch's smallest median divided by ours."""
    found: dict[str, list[float]] = {}
    for row in rows("h200_cells"):
        times = row.get("us", {})
        if "pattern" in row and row["dtype"] == dtype and {"ours", "eager"} <= set(times):
            best = min(time for who, time in times.items() if who != "ours")
            if best < VIEW_US:
                continue
            found.setdefault(row["pattern"], []).append(best / times["ours"])
    return found


def kernels() -> dict[str, str]:
    """Draws the speed of generated kernels; returns the table of its ratios."""
    by_dtype = {dtype: kernel_ratios(dtype) for dtype in ("bfloat16", "float32")}
    lines: list[list[object]] = []
    for dtype, found in by_dtype.items():
        cells = [ratio for ratios in found.values() for ratio in ratios]
        slow = [sum(ratio < bound for ratio in cells) for bound in (0.95, 0.85)]
        lines.append([dtype, len(found), len(cells), f"{geometric_mean(cells):.2f}", *slow])
    order = sorted(
        by_dtype["bfloat16"], key=lambda p: geometric_mean(by_dtype["bfloat16"][p]), reverse=True
    )
    groups = [(p, [geometric_mean(by_dtype["bfloat16"][p])]) for p in order]
    title = "Speed of generated kernels against the faster of eager torch and torch.compile"
    (ASSETS / "performance-kernels.svg").write_text(
        bars(title, [("torch's time / ours, bf16", OURS)], groups, mark=1.0, most=2.6)
    )
    titles = ["dtype", "patterns", "cells", "mean speed", "below 0.95", "below 0.85"]
    return {"kernels": table(titles, lines, numbers=True)}


# ------------------------------------------------------------------ overlap
def overlap() -> dict[str, str]:
    """Draws the times of matmuls overlapped with communication; returns their table."""
    by_shape: dict[str, dict[str, float]] = {}
    heads: dict[str, str] = {}
    for row in rows("h200x4_overlap"):
        if "method" in row and "k" in row:
            by_shape.setdefault(row["shape"], {})[row["method"]] = row["ms"]
            heads[row["shape"]] = f"{row['op']} {row['m']} x {row['k']} x {row['n']}"
    lines: list[list[str]] = []
    groups: list[tuple[str, list[float | None]]] = []
    for shape, times in by_shape.items():
        if not {"mm", "nccl", "seq", "auto"} <= set(times):
            continue
        roof = max(times["mm"], times["nccl"])
        peers = [ms for name, ms in times.items() if "async_tp" in name or "symm" in name]
        peer = min(peers) if peers else None
        shown = [times["seq"], peer, times["auto"]]
        groups.append((heads[shape], [None if ms is None else ms / roof for ms in shown]))
        cells = ["-" if ms is None else f"{ms:.2f}" for ms in (roof, *shown)]
        lines.append([heads[shape], *cells, f"{times['auto'] / roof:.2f}"])
    names = [("one after the other", PLAIN), ("torch's async-TP", OTHERS), ("this project", OURS)]
    title = "Time to the larger of matmul and NCCL alone, on four H200"
    (ASSETS / "performance-overlap.svg").write_text(bars(title, names, groups, mark=1.0, most=2.2))
    titles = ["M x K x N", "roof, ms", "in sequence", "async-TP", "by itself", "to the roof"]
    return {"overlap": table(titles, lines, numbers=True)}


# ------------------------------------------------------------------ allreduces
def allreduces() -> dict[str, str]:
    """Draws the times of allreduces in a CUDA graph; returns their table."""
    times: dict[tuple[str, int], dict[int, float]] = {}
    for name, gpus in (("h200x2_allreduce", 2), ("h200x4_allreduce", 4)):
        for row in rows(name):
            if row["what"] == "graph":
                found = times.setdefault((row["who"], gpus), {})
                least = found.get(row["nbytes"], math.inf)
                found[row["nbytes"]] = min(least, row["us"])
    series = [
        (f"{label}, {gpus} GPUs", colour, sorted(times[who, gpus].items()))
        for who, label, colour in (("kernel", "this project", OURS), ("nccl", "NCCL", OTHERS))
        for gpus in (2, 4)
    ]
    (ASSETS / "performance-allreduce.svg").write_text(
        curves("Time of an allreduce inside a CUDA graph", series, "us")
    )
    lines: list[list[str]] = []
    for nbytes in sorted(times["kernel", 4]):
        cells = [times[who, gpus].get(nbytes) for gpus in (2, 4) for who in ("kernel", "nccl")]
        lines.append([f"{nbytes:,}", *("-" if us is None else f"{us:.1f}" for us in cells)])
    titles = ["bytes", "2 GPUs, us", "NCCL", "4 GPUs, us", "NCCL"]
    return {"allreduces": table(titles, lines, numbers=True)}


# ------------------------------------------------------------------ host time
HOST_COMMIT = "af6ec42"


def host_time() -> dict[str, str]:
    """Returns the table of host times per call."""
    found: dict[str, dict[str, float]] = {}
    for row in rows("h200_host"):
        if row["commit"] != HOST_COMMIT:
            continue
        name = row["who"] if row["what"] == "steady" else f"{row['what']} {row['who']}"
        found.setdefault(row["case"], {})[name] = row["us"]
    columns = ("ours", "eager", "compile", "reduce-overhead", "new_shape ours")
    lines = [
        [case, *(f"{times[c]:.1f}" if c in times else "-" for c in columns)]
        for case, times in found.items()
    ]
    titles = ["program", "this project", "eager", "torch.compile", "reduce-overhead", "new size"]
    return {"host time": table(titles, lines, numbers=True)}


def page(tables: dict[str, str]) -> str:
    """Returns the text of the page with new tables."""
    return with_parts(PAGE.read_text(), tables, "benchmarks/plots.py")


def main() -> None:
    """Draws all plots and updates the page."""
    tables = {**kernels(), **overlap(), **allreduces(), **host_time()}
    PAGE.write_text(page(tables))


if __name__ == "__main__":
    main()
