"""Every public op has all its parts. If a row lacks one, a test here fails and names op and part.

The nodes, dtypes and shapes in the rows are checked against calls, and these against torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.attention_ops import TensorOp
from fuser.ir.ops.nodes import BroadcastOp, CastOp, LibraryOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.verify import verify_fusion
from fuser.lower import values
from fuser.ops.define import define_tensor
from fuser.ops.elementwise import DTYPE_RULES, typed
from fuser.ops.reference.meaning import NODES, NodeRow, evaluate_fusion, nodes_computed
from fuser.ops.rows import ROWS, SPELLED, OpRow
from hostir.cost.op_costs import COSTS
from scripts import document_ops
from tests.support.op_calls import CALLS, assert_near, calls_of, expected_of
from tests.support.op_cases import CASES
from tests.support.op_samples import DOMAINS, SAMPLES
from tools.fuzz import oracle

CASE_NAMES = {case.name for case in CASES}
# Ops that create no tensor, and therefore no node.
NODELESS = {"shape", "size"}


def missing_parts(
    row: OpRow, page: str, nodes: Mapping[type[TensorOp], NodeRow] = NODES
) -> list[str]:
    """Returns the names of the parts that a row lacks."""
    if not row.is_implemented:
        return [] if f"`{row.name}(" in page else ["docs/reference/operations.md"]
    parameters = list(inspect.signature(row.function).parameters.values())
    is_plain = row.name in PUBLIC and not row.sample
    parts = {
        "function": callable(row.function) and bool(inspect.getdoc(row.function)),
        "arguments": bool(parameters) and all(p.annotation is not p.empty for p in parameters),
        "dtype rule": row.dtype in DTYPE_RULES,
        "shape rule": bool(row.shape),
        "nodes": bool(row.nodes) or row.name in NODELESS,
        "sample class": is_plain or row.sample in SAMPLES,
        "meaning": bool(document_ops.meaning_of(row)),
        "docs/reference/operations.md": f"| `{row.name}(" in page,
        "case in tests/support": row.name in CASE_NAMES
        or row.name in CALLS
        or row.name in NODELESS,
        "fuzzer": row.name in oracle.OPS,
    }
    for node in row.nodes:
        parts[f"torch meaning of {node.__name__}"] = node in nodes
        parts[f"kernel or library call of {node.__name__}"] = node in nodes and _is_computed(
            node, nodes[node]
        )
        parts[f"sharding rule of {node.__name__}"] = callable(getattr(node, "cut_map", None))
    return [part for part, is_there in parts.items() if not is_there]


def _is_computed(node: type[TensorOp], row: NodeRow) -> bool:
    """Whether the stage that the row names has the class in its table."""
    match row.computed:
        case "element":
            return node in values._BY_OP  # pyright: ignore[reportPrivateUsage]
        case "index":
            return len(node.fields_of("operand")) == 1
        case "library":
            return issubclass(node, LibraryOp)
        case _:
            return True


@pytest.mark.parametrize("name", ROWS)
def test_every_op_has_all_parts(name: str) -> None:
    missing = missing_parts(ROWS[name], document_ops.PAGE.read_text())
    assert not missing, f"{name} lacks: {', '.join(missing)}"


def test_a_missing_part_is_named() -> None:
    """The test above can fail: each missing part is reported by name."""
    page = document_ops.PAGE.read_text()
    row = ROWS["cat"]
    assert missing_parts(row, page) == []
    assert missing_parts(replace(row, dtype="no such"), page) == ["dtype rule"]
    assert missing_parts(replace(row, shape=""), page) == ["shape rule"]
    assert missing_parts(replace(row, sample="no such"), page) == ["sample class"]
    assert missing_parts(replace(row, nodes=()), page) == ["nodes"]
    assert missing_parts(row, page.replace("`cat(", "`cut(")) == ["docs/reference/operations.md"]
    unknown = {cls: node for cls, node in NODES.items() if cls.__name__ != "CatOp"}
    assert missing_parts(row, page, unknown) == [
        "torch meaning of CatOp",
        "kernel or library call of CatOp",
    ]
    renamed = replace(row, name="cat2")
    assert missing_parts(renamed, page) == [
        "docs/reference/operations.md",
        "case in tests/support",
        "fuzzer",
    ]


def test_stages_and_rows_know_the_same_nodes() -> None:
    by_op = set(values._BY_OP)  # pyright: ignore[reportPrivateUsage]
    assert by_op == set(nodes_computed("element"))
    assert {cls for cls in NODES if issubclass(cls, LibraryOp)} == set(nodes_computed("library"))


# Library ops that take as long as a kernel that reads and writes the same tensors.
BOUND_BY_MEMORY = {"IndexPutAccumulateOp", "ScanOp", "ScatterOp"}


def test_library_ops_say_what_they_cost() -> None:
    without = {cls.__name__ for cls in nodes_computed("library") if cls not in COSTS}
    assert without == BOUND_BY_MEMORY, "a row of hostir/cost/op_costs.py, or a name here"


def test_the_page_of_ops_is_that_of_the_rows() -> None:
    assert document_ops.PAGE.read_text() == document_ops.page(), "python scripts/document_ops.py"


def test_the_signatures_for_type_checkers_are_those_of_the_rows() -> None:
    assert document_ops.STUB.read_text() == document_ops.stub(), "python scripts/document_ops.py"


@pytest.mark.parametrize("name", [row.name for row in ROWS.values() if row.is_implemented])
def test_help_shows_meaning_shape_and_dtype_rule(name: str) -> None:
    row, text = ROWS[name], getattr(ops, name).__doc__
    assert text.startswith(inspect.getdoc(row.function))
    assert text.splitlines()[0][0].isupper() and f"Shape: {row.shape}" in text
    assert f"rule `{row.dtype}`" in text and DTYPE_RULES[row.dtype].sentence in text


def test_help_of_a_division_in_floats_does_not_speak_of_rounding() -> None:
    div, truediv = (inspect.getdoc(op) or "" for op in (ops.div, ops.truediv))
    assert "rounded" in div and "rounded" not in truediv and "in floats" in truediv


def test_no_name_is_told_twice() -> None:
    assert not {*SPELLED} & {*ROWS}
    assert {*oracle.OPS} <= {*ROWS}
    assert {d for row in POINTWISE.values() for d in row.domains} <= {*DOMAINS}


# ------------------------------------------------------------------ what rows say, against calls
def _check_maps(op: TensorOp) -> None:
    """Checks the sharding maps of an op: for each operand, the axis that corresponds to each root
    axis."""
    for out in op.outputs:
        rank = len(out.domain.maybe_root)
        for at, tv in enumerate(op.inputs):
            if isinstance(tv, TensorView):
                for axes in (op.axis_map_to(at, out), op.cut_map(at, out)):
                    known = [a for a in axes if a is not None]
                    assert len(axes) == rank and len(known) == len(set(known)), f"{op.name}: {axes}"
                    assert all(0 <= a < len(tv.domain.no_reductions) for a in known), op.name


def _ruled(row: OpRow, dtypes: list[DataType]) -> DataType:
    """Returns the result dtype of the row's dtype rule, for operands with axes."""
    with FusionGuard(Fusion()):
        return typed(row.name, row.dtype, [define_tensor([-1], dtype=d) for d in dtypes])[1]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_what_their_row_says(name: str) -> None:
    row, seen = ROWS[name], set[type[TensorOp]]()
    for drawn in calls_of(name):
        fusion = drawn.fusion
        verify_fusion(fusion)
        for op in fusion.exprs:
            seen.add(type(op))
            _check_maps(op)
        dtypes = [x.dtype() for x in fusion.inputs if isinstance(x, TensorView) and x.ndim]
        if DTYPE_RULES[row.dtype].apply is not None and dtypes:
            (result,) = drawn.results
            assert isinstance(result, TensorView)
            assert result.dtype() is _ruled(row, dtypes), f"{name}: {result}"
    left = seen - {*row.nodes, *CALLS[name].beside, CastOp, BroadcastOp}
    assert not left, f"{name} appends {left}"
    assert seen & {*row.nodes} or name in NODELESS, f"{name} appends {seen}"


@pytest.mark.parametrize("name", CALLS)
def test_values_dtypes_and_shapes_are_those_of_torch(name: str) -> None:
    for drawn in calls_of(name):
        if CALLS[name].is_random:
            (tv,), (like,) = drawn.fusion.outputs, expected_of(name, drawn.inputs, is_wide=False)
            assert to_torch(tv.dtype()) is like.dtype and tv.ndim == like.ndim, f"{name}: {tv}"
            continue
        what = f"{name} of {[tuple(x.shape) for x in drawn.inputs]}, {drawn.dtype}"
        for dtype in (torch.float64, None):
            got = evaluate_fusion(drawn.fusion, drawn.inputs, dtype=dtype)
            expected = expected_of(name, drawn.inputs, is_wide=True)
            for mine, want, tv in zip(got, expected, drawn.fusion.outputs, strict=True):
                assert dtype is not None or mine.dtype is to_torch(tv.dtype()), what
                least = drawn.dtype if dtype is None and drawn.dtype else tv.dtype()
                assert_near(mine, want, least, what)
