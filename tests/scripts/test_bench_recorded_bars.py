"""Checks the results recorded in `benchmarks/results` against the bars in `tests/findings.md`.

Every cell below its bar is listed by name here. A benchmark that finds such a cell ends with an
error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attention_cells
import bench
import library_cells
import lowering_time
import pytest
from kernel_patterns.library import LIBRARY

Row = dict[str, Any]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Cells that torch's calls lead: benchmarks/notes.md says why.
BEHIND_IN_ATTENTION = {
    ((16, 32, 32, 1, 4096, 128), "mask", "forward"),
    ((2, 16, 16, 2048, 2048, 256), "mask", "forward"),
}
BEHIND_IN_LIBRARY = {
    ("grouped_mm", (8, 4096, 4096, 4096), "bfloat16"),
    ("grouped_mm", (64, 4096, 2048, 1408), "bfloat16"),
    ("grouped_mm", (8, 512, 4096, 4096), "bfloat16"),
    *(("topk of 1", (4096, 256), dtype) for dtype in ("bfloat16", "float16", "float32")),
    *(("scatter", (8192, 1024), dtype) for dtype in ("bfloat16", "float16")),
}


def recorded(name: str) -> list[Row]:
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.finding("G1")
def test_recorded_attention_is_behind_torch_in_named_cells_alone() -> None:
    rows = [r for r in recorded("h200_attention") if r.get("bench") == "attention" and "mode" in r]
    cells = [(tuple(r["shape"]), r["mode"], r["direction"]) for r in rows]
    assert cells == [(tuple(z), *how) for z, *how in attention_cells.cells(attention_cells.SHAPES)]
    behind = set[Any]()
    for row, cell in zip(rows, cells, strict=True):
        is_long_mask = row["mode"] == "mask" and row["shape"][4] >= 512
        ratios = [row[us]["torch"] / row[us]["ours"] for us in ("us", "us_calls") if us in row]
        if max(ratios) < (1.995 if is_long_mask else 0.9695):
            behind.add(cell)
        errors = row["errors"]
        assert all(
            a <= 1.05 * b + 1e-6 for a, b in zip(errors["ours"], errors["torch"], strict=True)
        )
    assert behind == BEHIND_IN_ATTENTION


@pytest.mark.finding("G36")
def test_recorded_library_ops_are_behind_torch_in_named_cells_alone() -> None:
    rows = [r for r in recorded("h200_library") if "op" in r]
    cells = {(r["op"], tuple(r["shape"]), r["dtype"]): r for r in rows}
    timed = {name: row for name, row in LIBRARY.items() if not name.startswith("sdpfa")}
    assert {*cells} == {
        (name, tuple(shape), str(dtype).removeprefix("torch."))
        for name, row in timed.items()
        for shape in row.shapes
        for dtype in row.dtypes
    }
    behind = set[Any]()
    for cell, row in cells.items():
        for times in (row["eager_us"], row["device_us"]):
            if "torch" not in times:
                continue
            (ours, *_), (theirs, *_) = times["ours"], times["torch"]
            if theirs / ours < 0.97 and ours - theirs > 2:
                behind.add(cell)
                assert library_cells.is_behind(row)
    assert behind == BEHIND_IN_LIBRARY


@pytest.mark.finding("G37")
def test_recorded_statistics_looks_and_permutes_keep_up_with_torch_compile() -> None:
    rows = [r for r in recorded("h200_statistics") if "pattern" in r]
    cells = {(r["pattern"], tuple(r["shape"]), r["dtype"]): r["us"] for r in rows}
    dtypes = ("bfloat16", "float32")
    assert {*cells} == {(*cell, dtype) for cell in bench.HELD for dtype in dtypes}
    slow = {c: us for c, us in cells.items() if us["default"] / us["ours"] < 0.95}
    assert not slow and not bench.is_behind(rows)


@pytest.mark.finding("G3")
@pytest.mark.finding("G4")
def test_recorded_lowering_keeps_its_bars() -> None:
    rows = {r["case"]: r for r in recorded("cpu_lowering")}
    seconds = {case: r["s"] for case, r in rows.items() if "s" in r}
    assert seconds["transformer 64"] < 12
    assert seconds["transformer 64"] <= 10 * seconds["transformer 8"]
    assert seconds["devices 16384"] <= 1.5 * seconds["devices 64"]
    for (more, fewer), bar in lowering_time.RATIOS.items():
        if more in seconds and fewer in seconds:
            assert seconds[more] <= bar * seconds[fewer], (more, fewer)
    assert not bench.is_behind([*rows.values()])


@pytest.mark.parametrize("finding", ["G1", "G3", "G4", "G36", "G37"])
def test_a_benchmark_that_finds_a_cell_behind_its_bar_ends_with_an_error(
    finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"G1": "attention", "G36": "library", "G37": "kernels"}.get(finding, "lowering")
    slow: Row = {"bench": name}
    if finding == "G1":
        monkeypatch.setattr(attention_cells, "bench_attention", lambda *args, **named: 1)
    else:
        slow |= {
            "library": {"eager_us": {"is_even": False}},
            "kernels": {
                "pattern": "group_norm",
                "shape": [16384, 3136],
                "us": {"ours": 100.0, "eager": 300.0, "default": 94.0},
            },
            "lowering": {"case": "transformer 64", "s": 13.0, "is_kept": False},
        }[name]
        monkeypatch.setitem(bench.BENCHES, name, lambda args: [slow])
    monkeypatch.setattr(sys, "argv", ["bench.py", name, "--cpu"])
    if finding == "G1":
        with pytest.raises(SystemExit, match="1 cells are slower or less exact"):
            bench.main()
    else:
        assert bench.main() == 1
