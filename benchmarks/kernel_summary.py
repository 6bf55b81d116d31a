"""Summarises the lines of `bench.py kernels`, by dtype and by pattern; the summary is lines again.

A cell is a pattern, a dtype and a shape. Its ratio is the smallest of torch's medians divided by
ours. QuACK's ratio is reported separately.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_patterns import quack_peer

Row = dict[str, Any]
BARS = (0.95, 0.85)
# The largest relative error of a right result, by the dtype of the output.
ERROR_LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-11}
SIGMAS = 5.0


def ratio(row: Row) -> float | None:
    """Returns torch's best time divided by ours; None where either was not timed."""
    others = {"ours", quack_peer.NAME}
    theirs = [us for candidate, us in row.get("us", {}).items() if candidate not in others]
    return min(theirs) / row["us"]["ours"] if theirs else None


def is_wrong(row: Row) -> bool:
    """Whether an output of ours differs from float64 by more than the rounding of its dtype, or is
    NaN.
    """
    errors = zip(row["relative_errors"], row["output_dtypes"], strict=True)
    is_close = all(error <= ERROR_LIMITS[dtype] for error, dtype in errors)
    return not is_close or row.get("sigmas", 0.0) > SIGMAS


def geomean(values: Iterable[float]) -> float:
    """Returns the geometric mean, with 4 decimals."""
    return round(statistics.geometric_mean(values), 4)


def _name(row: Row) -> str:
    return "{} {}x{}".format(row["pattern"], *row["shape"])


def _below(cells: Sequence[tuple[Row, float]], bar: float) -> dict[str, float]:
    found = sorted((r, _name(row)) for row, r in cells if r < bar)
    return {name: round(r, 3) for r, name in found}


def summarise(rows: Iterable[Row]) -> list[Row]:
    """Returns a line for each dtype, followed by a line for each of its patterns."""
    by_dtype: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("bench") == "kernels" and "pattern" in row:
            by_dtype[row["dtype"]].append(row)
    return [line for dtype, cells in by_dtype.items() for line in _lines(dtype, cells)]


def _lines(dtype: str, rows: Sequence[Row]) -> list[Row]:
    timed = [row for row in rows if "us" in row]
    line: Row = {"bench": "kernels", "summary": dtype, "cells": len(timed)}
    line |= _ratios(timed)
    line["failed"] = [_name(row) for row in rows if "failed" in row]
    line["peer_failed"] = [_name(row) for row in timed if row.get("peers_failed")]
    line["wrong"] = [_name(row) for row in timed if is_wrong(row)]
    by_pattern: dict[str, list[Row]] = defaultdict(list)
    for row in timed:
        by_pattern[row["pattern"]].append(row)
    return [line, *(_pattern_line(dtype, name, found) for name, found in by_pattern.items())]


def _ratios(rows: Sequence[Row]) -> Row:
    cells = [(row, r) for row in rows if (r := ratio(row)) is not None]
    if not cells:
        return {}
    values = [r for _, r in cells]
    found: Row = {"best_of_torch_over_ours": geomean(values), "least": round(min(values), 3)}
    return found | {f"below_{bar}": _below(cells, bar) for bar in BARS}


def _pattern_line(dtype: str, name: str, rows: Sequence[Row]) -> Row:
    line: Row = {"bench": "kernels", "summary": dtype, "of_pattern": name, "cells": len(rows)}
    values = [r for row in rows if (r := ratio(row)) is not None]
    if values:
        line["best_of_torch_over_ours"] = geomean(values)
        line["ratios"] = {"{}x{}".format(*row["shape"]): round(ratio(row) or 0, 3) for row in rows}
    quack = {
        "{}x{}".format(*row["shape"]): round(row["us"][quack_peer.NAME] / row["us"]["ours"], 3)
        for row in rows
        if quack_peer.NAME in row["us"]
    }
    if quack:
        line |= {"quack_over_ours": geomean(quack.values()), "quack_ratios": quack}
    line["launches"] = sorted({row["kernels"] + row["library_calls"] for row in rows})
    shares = [row["of_same_shape_copy"] for row in rows if row.get("of_same_shape_copy")]
    if shares:
        line["of_same_shape_copy"] = round(statistics.median(shares), 3)
        line["of_same_shape_copy_least"] = min(shares)
    return line


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Returns the cells in files; of a cell that was timed again, the last line."""
    rows: dict[object, Row] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "pattern" in row:
                rows[row["pattern"], row["dtype"], tuple(row["shape"])] = row
    return [*rows.values()]
