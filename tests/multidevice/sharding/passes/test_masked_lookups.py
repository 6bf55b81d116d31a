"""Lookups along a divided axis are made in the parts of the table, and never gather the table.

Expected values are torch's, and are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, Replicate, Shard, TensorView, shard
from fuser.ir.op import walk
from fuser.multidevice import DeviceMesh, shard_tensor, simulate
from fuser.support.errors import FuserError
from hostir.ir.ops import Communication
from hostir.ir.parser import parse
from hostir.ir.program import equal
from tests.support.lookup_programs import draw, draw_index, gather, index_select, take_along

pytestmark = pytest.mark.from_text

R, S = Replicate(), Shard
Placements = Sequence[Any]
LINE, SQUARE, BLOCK = [0, 1], [[0, 1], [2, 3]], [[[0, 1]], [[2, 3]]]


def embedding(fd: FusionDefinition, table: TensorView, index: TensorView) -> TensorView:
    return fd.ops.embedding_fwd(index, table)


def run(
    build: Callable[..., Any],
    table: torch.Tensor,
    index: torch.Tensor,
    devices: object,
    placements: tuple[Placements, Placements, Placements | None],
    *,
    static: bool = False,
) -> tuple[torch.Tensor, list[str], TensorView]:
    """Runs a lookup on a rank; returns its result, the communications, and the result's tensor."""
    mesh = DeviceMesh(devices)
    with FusionDefinition() as fd:
        t, i = (
            fd.define_tensor(
                [e if static or e == 1 else -1 for e in x.shape],
                True if 1 not in x.shape else [None if e == 1 else True for e in x.shape],
                x.dtype,
                mesh=mesh,
                placements=placed,
            )
            for x, placed in zip((table, index), placements, strict=False)
        )
        out = build(fd, t, i)
        if placements[2] is not None:
            shard(out, mesh, placements[2])
        fd.add_output(out)
    given = [shard_tensor(table, t), shard_tensor(index, i)]
    result = [fd.execute(given)[0] for _ in range(2)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    lines = program.names_text().splitlines()
    types = [line.split("(type=")[1].split(",")[0] for line in lines if "(type=" in line]
    return result, types, out


def check(
    build: Callable[..., Any],
    expected: torch.Tensor,
    table: torch.Tensor,
    index: torch.Tensor,
    devices: object,
    placements: tuple[Placements, Placements, Placements | None],
    **options: bool,
) -> list[str]:
    """Compares the results of all ranks with `expected`, bit for bit; returns the communications
    of a rank."""

    def on_rank() -> list[str]:
        result, types, out = run(build, table, index, devices, placements, **options)
        whole = expected if placements[2] is None else shard_tensor(expected, out)
        assert_same_bits(result, whole)
        return types

    with simulate(DeviceMesh(devices).size) as world:
        found = world.run(on_rank)
    assert all(types == found[0] for types in found)
    return found[0]


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Checks that all elements are equal, that NaN is at equal places, and that zeros have equal
    signs."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for part in (lambda x: x,) if not found.is_complex() else (torch.real, torch.imag):
        a, b = (part(x) for x in (found, expected))
        if a.is_floating_point() and a.element_size() > 1:
            a, b = (torch.where(x.isnan(), 1.0, x) for x in (a, b))
            torch.testing.assert_close(a.signbit(), b.signbit())


# ------------------------------------------------------------------ which communications
@pytest.mark.parametrize(
    ("placements", "types"),
    [
        (([S(0)], [R], None), ["Allreduce"]),
        (([S(0)], [R], [R]), ["Allreduce"]),
        (([S(0)], [R], [S(0)]), ["ReduceScatter"]),
        (([S(0)], [R], [S(2)]), ["ReduceScatter"]),
        (([S(0)], [S(0)], [S(0)]), ["Allgather", "ReduceScatter"]),
        (([S(0)], [S(1)], [R]), ["Allgather", "Allreduce"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("static", [False, True])
def test_embedding_adds_parts_and_never_gathers_the_table(
    placements: tuple[Placements, Placements, Placements | None], types: list[str], static: bool
) -> None:
    """The indices alone are gathered, even where the table is smaller than the result."""
    table, index = draw((8, 6), torch.float32), draw_index((4, 10), 8)
    found = check(embedding, table[index], table, index, LINE, placements, static=static)
    assert found == types


@pytest.mark.parametrize(
    ("placements", "types"),
    [
        (([S(0), S(0)], [R, R], [R, R]), ["Allreduce"] * 2),
        (([S(0), S(0)], [R, R], [S(0), R]), ["ReduceScatter", "Allreduce"]),
        (([S(0), S(0)], [R, R], [R, S(0)]), ["ReduceScatter", "Allreduce"]),
        (([S(0), S(0)], [R, R], [S(0), S(0)]), ["ReduceScatter"] * 2),
        (([S(0), S(0)], [R, R], [S(1), S(0)]), ["ReduceScatter"] * 2),
        (([S(0), S(1)], [R, R], [R, S(1)]), ["Allreduce"]),
        (([S(1), S(0)], [R, R], [S(1), R]), ["Allreduce"]),
        (([R, S(0)], [S(0), R], [S(0), R]), ["Allreduce"]),
        (([R, S(0)], [S(0), R], [S(0), S(0)]), ["ReduceScatter"]),
    ],
    ids=str,
)
def test_a_table_on_a_mesh_of_two_dimensions_is_looked_up_in_teams(
    placements: tuple[Placements, Placements, Placements], types: list[str]
) -> None:
    table, index = draw((8, 12), torch.float32), draw_index((8,), 8)
    found = check(embedding, table[index], table, index, SQUARE, placements)
    assert sorted(found) == sorted(types)


@pytest.mark.parametrize(
    ("placed", "types"),
    [
        ([R, R], ["Allreduce", "Allgather"]),
        ([S(0), R], ["ReduceScatter", "Allgather"]),
        ([R, S(0)], ["Allreduce", "AllToAll"]),
        ([S(0), S(0)], ["ReduceScatter", "AllToAll"]),
    ],
    ids=str,
)
def test_a_table_divided_along_both_axes_is_not_gathered_along_the_other_axis(
    placed: Placements, types: list[str]
) -> None:
    """The sum keeps the division of the columns, and is communicated instead of the table."""
    table, index = draw((8, 12), torch.float32), draw_index((8,), 8)
    placements = [S(0), S(1)], [R, R], placed
    found = check(embedding, table[index], table, index, SQUARE, placements)
    assert sorted(found) == sorted(types)


def test_a_mesh_dimension_of_one_device_is_no_division() -> None:
    table, index = draw((8, 4), torch.float32), draw_index((6,), 8)
    placements = [S(0), S(0), S(0)], [R, R, R], [R, R, R]
    found = check(embedding, table[index], table, index, BLOCK, placements)
    assert found == ["Allreduce"] * 2


# ------------------------------------------------------------------ all lookups
LOOKUPS: dict[str, tuple[Any, Any, tuple[int, ...], tuple[int, ...], int]] = {
    "embedding, no axis": (embedding, lambda t, i: t[i], (8, 6), (), 0),
    "embedding, three axes": (embedding, lambda t, i: t[i], (8, 6), (2, 2, 3), 0),
    "a row per device": (embedding, lambda t, i: t[i], (2, 6), (5,), 0),
    "a table of one axis": (*index_select(0), (8,), (6,), 0),
    "columns": (*index_select(1), (4, 6, 2), (8,), 1),
    "along, inner": (*take_along(2), (2, 3, 8), (2, 3, 4), 2),
    "along, outer": (*take_along(0), (8, 4), (2, 4), 0),
    "along, repeated": (*take_along(0), (8, 4), (6, 1), 0),
    "along a repeated table": (*take_along(1), (1, 8), (4, 2), 1),
    "gather": (*gather(1), (4, 8), (4, 6), 1),
    "gather less": (*gather(1), (6, 8), (4, 6), 1),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_every_lookup_with_any_result(name: str, static: bool) -> None:
    build, reference, shape, index_shape, axis = LOOKUPS[name]
    table, index = draw(shape, torch.float32), draw_index(index_shape, shape[axis])
    expected = reference(table, index)
    even = [k for k, extent in enumerate(expected.shape) if extent % 2 == 0]
    for placed in ([R], *([S(k)] for k in even)):
        found = check(build, expected, table, index, LINE, ([S(axis)], [R], placed), static=static)
        assert found == ["Allreduce" if placed == [R] else "ReduceScatter"]


def test_logits_that_a_linear_layer_has_divided_are_not_gathered() -> None:
    """The division of the logits comes from the weight; the index has one element per token."""
    x, weight = draw((6, 4), torch.float64), draw((8, 4), torch.float64, 1)
    index = draw_index((6, 1), 8)

    def build(fd: FusionDefinition, w: TensorView, i: TensorView) -> TensorView:
        features = fd.define_tensor(list(x.shape), True, x.dtype)
        return fd.ops.take_along_axis(fd.ops.linear(features, w), i, 1)

    mesh = DeviceMesh(LINE)

    def on_rank() -> list[str]:
        with FusionDefinition() as fd:
            w = fd.define_tensor([8, 4], True, weight.dtype, mesh=mesh, placements=[S(0)])
            i = fd.define_tensor([6, 1], True, index.dtype)
            fd.add_output(build(fd, w, i))
        result = fd.execute([shard_tensor(weight, w), index, x])[0]
        torch.testing.assert_close(result, (x @ weight.T).gather(1, index))
        text = fd.fec.host_program().names_text()
        return [line for line in text.splitlines() if "(type=" in line]

    with simulate(2) as world:
        (line,) = world.run(on_rank)[0]
    assert "type=Allreduce" in line


# ------------------------------------------------------------------ losses
def own_loss(fd: FusionDefinition, logits: TensorView, target: TensorView) -> TensorView:
    shifted = fd.ops.sub(logits, fd.ops.max(logits, [1], keepdim=True))
    total = fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), 1, keepdim=True))
    column = fd.ops.broadcast(target, [False, True])
    return fd.ops.mean(fd.ops.sub(total, fd.ops.take_along_axis(shifted, column, 1)))


def loss_of_log_softmax(fd: FusionDefinition, logits: TensorView, target: TensorView) -> TensorView:
    column = fd.ops.broadcast(target, [False, True])
    return fd.ops.neg(fd.ops.mean(fd.ops.gather(fd.ops.log_softmax(logits, 1), column, 1)))


def loss_of_op(fd: FusionDefinition, logits: TensorView, target: TensorView) -> TensorView:
    return fd.ops.cross_entropy(logits, target)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("build", [own_loss, loss_of_log_softmax, loss_of_op])
def test_a_cross_entropy_of_divided_logits_reduces_three_numbers_per_token(
    build: Callable[..., Any], static: bool
) -> None:
    logits, target = draw((6, 8), torch.float64), draw_index((6,), 8)

    def on_rank() -> list[tuple[str, str, int]]:
        with FusionDefinition() as fd:
            given = [list(x.shape) if static else [-1] * x.ndim for x in (logits, target)]
            x = fd.define_tensor(given[0], True, logits.dtype)
            shard(x, DeviceMesh(range(4)), [S(1)])
            fd.add_output(build(fd, x, fd.define_tensor(given[1], True, target.dtype)))
        (loss,) = fd.execute([shard_tensor(logits, x), target])
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
        found = (op for op in walk(fd.fec.host_program().ops) if isinstance(op, Communication))
        axes = ((op, op.out.domain.no_reductions) for op in found)
        return [(op.type, op.red_op, sum(not a.is_broadcast for a in mine)) for op, mine in axes]

    with simulate(4) as world:
        found = world.run(on_rank)[0]
    assert found == [("Allreduce", kind, 1) for kind in ("MAX", "SUM", "SUM")]


@pytest.mark.parametrize(("count", "types"), [(3, ["Allreduce"]), (5, ["Allgather"])])
def test_a_table_that_propagation_divided_is_gathered_where_fewer_elements_are_sent(
    count: int, types: list[str]
) -> None:
    """The table has 8 elements per row. An allreduce sends each element of the result twice."""
    terms, index = draw((2, 4, 8), torch.float32), draw_index((4, count), 8)

    def build(fd: FusionDefinition, t: TensorView, i: TensorView) -> TensorView:
        return fd.ops.take_along_axis(fd.ops.sum(t, 0), i, 1)

    expected = terms.sum(0).gather(1, index)
    placements = [S(2)], [R], [R]
    assert check(build, expected, terms, index, LINE, placements, static=True) == types
    assert check(build, expected, terms, index, LINE, placements) == ["Allreduce"]


# ------------------------------------------------------------------ values
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def special(dtype: torch.dtype) -> torch.Tensor:
    """Returns 8 rows with special values of the dtype."""
    inf, nan = float("inf"), float("nan")
    if dtype is torch.bool:
        values: list[Any] = [True, False, True, True, False, True, False, False]
    elif not dtype.is_floating_point and not dtype.is_complex:
        info = torch.iinfo(dtype)
        values = [info.min, info.max, 0, -1, 1, 7, -7, info.max - 1]
    else:
        values = [-0.0, 0.0, nan, inf, -inf, 1.5, -2.0, 0.25]
    if dtype.is_complex:
        values = [complex(a, b) for a, b in zip(values, reversed(values), strict=True)]
    rows = torch.tensor(values, dtype=torch.complex128 if dtype.is_complex else None)
    return torch.stack([rows, rows.flip(0)], 1).to(dtype)


def rows_of(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the selected rows; torch cannot select rows of a float of one byte."""
    if table.element_size() > 1 or table.dtype is torch.bool:
        return table[index]
    return table.view(torch.uint8)[index].view(table.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype_come_out_unchanged(dtype: torch.dtype) -> None:
    table = special(dtype)
    index = torch.tensor([0, 3, 4, 7, 1, 2, 5, 6, 3, 4])
    for placed in ([R], [S(0)]):
        check(embedding, rows_of(table, index), table, index, LINE, ([S(0)], [R], placed))


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_an_index_outside_of_the_table_gives_what_an_undivided_table_gives(
    dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """NaN, or 0 in a dtype without NaN; the neighbours, at the borders of the parts, are read."""
    table = draw((8, 3), dtype)
    index = torch.tensor([-1, 0, 3, 4, 7, 8, -8, 100, -(2**31), 2**31 - 1], dtype=index_dtype)
    is_inside = (index >= 0) & (index < 8)
    missing = torch.tensor(float("nan") if dtype.is_floating_point else 0, dtype=dtype)
    expected = torch.where(is_inside[:, None], table[index.clamp(0, 7).long()], missing)
    for placed in ([R], [S(0)]):
        check(embedding, expected, table, index, LINE, ([S(0)], [R], placed))


def test_the_checked_mode_raises_for_no_index_of_another_part() -> None:
    """An index outside of the whole table raises, as without a division."""
    table = draw((8, 3), torch.float32)

    def on_rank(index: torch.Tensor) -> torch.Tensor:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, 3], True, table.dtype)
            shard(t, DeviceMesh(LINE), [S(0)])
            i = fd.define_tensor([-1], True, index.dtype)
            fd.add_output(fd.ops.embedding_fwd(i, t))
        return fd.execute([shard_tensor(table, t), index], _enable_options=["checked"])[0]

    inside = torch.tensor([0, 7, 3, 4])
    with simulate(2) as world:
        for found in world.run(on_rank, inside):
            assert_same_bits(found, table[inside])
        with pytest.raises(FuserError, match="is out of range for an axis of 4 elements"):
            world.run(on_rank, torch.tensor([0, 9]))


@pytest.mark.parametrize("static", [False, True])
def test_an_empty_index_gives_an_empty_result(static: bool) -> None:
    table, index = draw((8, 4), torch.float32), torch.zeros(0, dtype=torch.int64)
    for placed in ([R], [S(0)], [S(1)]):
        placements = [S(0)], [R], placed
        check(embedding, table[index], table, index, LINE, placements, static=static)


def test_an_empty_table_gives_nan() -> None:
    table, index = torch.zeros(0, 4), torch.tensor([0, 1])
    expected = torch.full((2, 4), float("nan"))
    check(embedding, expected, table, index, LINE, ([S(0)], [R], [R]))


# ------------------------------------------------------------------ launched ranks
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("devices", "placements", "dtypes"),
    [
        ([0, 1, 2, 3], ([S(0)], [R], [R]), DTYPES),
        ([0, 1, 2, 3], ([S(0)], [S(0)], [S(0)]), DTYPES),
        (SQUARE, ([S(0), S(0)], [R, R], [S(0), R]), DTYPES[:2]),
        (SQUARE, ([S(0), S(1)], [S(0), R], [S(0), S(1)]), DTYPES[:2]),
    ],
    ids=["whole results", "divided results", "two dimensions", "both axes"],
)
def test_on_four_ranks(
    devices: object,
    placements: tuple[Placements, Placements, Placements],
    dtypes: list[torch.dtype],
    comm: Any,
) -> None:
    index = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 7, 4, 3])
    for dtype in dtypes:
        table = special(dtype)
        result, _, out = run(embedding, table, index, devices, placements)
        assert_same_bits(result, shard_tensor(rows_of(table, index), out))
