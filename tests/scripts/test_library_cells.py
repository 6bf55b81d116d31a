"""The rows of `scripts/bench.py library`: one per library op, with results equal to torch's."""

from __future__ import annotations

from argparse import Namespace

import bench
import library_cells
import pytest
import torch
from kernel_patterns.library import LIBRARY
from kernel_patterns.pattern import as_tuple

from fuser.ops.reference.meaning import nodes_computed

ON_CPU = [(name, dtype) for name, row in LIBRARY.items() if row.runs_on_cpu for dtype in row.dtypes]


@pytest.mark.finding("G36")
def test_every_library_op_has_a_row() -> None:
    """Each op that calls torch is timed against torch's best call for it."""
    missing = {cls.__name__ for cls in nodes_computed("library")}
    missing -= {row.node.__name__ for row in LIBRARY.values()}
    assert not missing, f"no row of kernel_patterns/library.py for {sorted(missing)}"
    assert all(len(set(row.shapes)) == 3 and row.dtypes for row in LIBRARY.values())


@pytest.mark.parametrize(("name", "dtype"), ON_CPU, ids=str)
def test_row_is_what_torch_computes(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    row = LIBRARY[name]
    inputs = list(row.operands(row.small, dtype, "cpu"))
    fd = row.define(inputs)
    outs = fd.execute(inputs)
    assert any(isinstance(op, row.node) for op in fd.fusion.exprs)
    if row.peer is None:
        return
    wide = [t.double() if t.is_floating_point() and not row.is_exact else t for t in inputs]
    expected = as_tuple(row.peer(*wide))

    close = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 0.0)
    for out, value in zip(outs, expected, strict=True):
        limit = 0.0 if row.is_exact else close
        torch.testing.assert_close(out, value.to(out.dtype), rtol=limit, atol=limit)


def test_cells_are_timed_and_those_behind_torch_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    header, *rows = bench.bench_library(Namespace(cpu=True, only="cumsum", seconds=0.0))
    assert header["machine"] == "CPU" and not bench.is_behind([header])
    assert [row["dtype"] for row in rows] == ["bfloat16", "float16", "float32"]
    behind = [row for row in rows if library_cells.is_behind(row)]
    printed = capsys.readouterr().err
    assert f"3 cells, {len(behind)} behind torch" in printed
    assert printed.count("cumsum") == len(behind)


def test_a_cell_behind_torch_ends_with_an_error() -> None:
    assert library_cells.is_even(100.0, 97.0) and library_cells.is_even(11.9, 10.0)
    assert not library_cells.is_even(100.0, 96.0)
    even = {"bench": "library", "eager_us": {"is_even": True}, "device_us": {"is_even": True}}
    assert not bench.is_behind([even, {"bench": "kernels"}])
    assert bench.is_behind([even, even | {"device_us": {"is_even": False}}])
    assert bench.is_behind([even | {"device_us": {"why_not": "no graph", "is_even": False}}])
