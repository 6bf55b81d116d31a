"""Tests reduction kernels from manual schedules, in checked mode against torch in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import MemoryType
from fuser.schedule.inlining import inline_most
from fuser.schedule.loop_propagation import parallelize_like, transform_like
from fuser.support.errors import DefinitionError
from tests.support.hand_schedules import CPU, P, check, define, lower, parallelize, random


def spread(fusion: Fusion, reduction: TensorView) -> None:
    """Schedules all tensors like the reduction, and inlines them."""
    transform_like(reduction)
    parallelize_like(reduction)
    inline_most(fusion=fusion)


def staged(fusion: Fusion, *, cached: bool = True) -> TensorView:
    """Copies local tensors to the outputs; returns the first reduction."""
    with FusionGuard(fusion):
        if cached:
            for out in list(fusion.outputs):
                out.cache_before()
    return next(
        op.out_tensor
        for op in fusion.exprs
        if any(a.is_reduction() for a in op.out_tensor.domain.logical)
    )


SHAPES = [(7, 100), (1, 1), (5, 37), (3, 1031)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("threads", [1, 32, 96, 7])
def test_inner_block(shape: Sequence[int], cached: bool, threads: int) -> None:
    fusion = define(lambda a: ops.sum(ops.exp(a), [1]), (-1, -1))
    r = staged(fusion, cached=cached)
    r.split(1, threads)
    parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random(shape)])


@pytest.mark.parametrize("kind", ["max", "min", "prod", "sum"])
def test_kinds(kind: str) -> None:
    fusion = define(lambda a: getattr(ops, kind)(a, [1]), (-1, -1))
    r = staged(fusion)
    r.split(1, 32)
    parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    kernel = check(fusion, [random((5, 77))])
    assert "if (tx == 0)" in kernel.source.text  # one thread writes


def test_nan_reaches_the_maximum() -> None:
    for device in (CPU, None):
        fusion = define(lambda a: ops.max(a, [1]), (-1, -1))
        r = staged(fusion)
        if device is None:
            r.split(1, 32)
            parallelize(r, P.grid_x, None, P.block_x)
            spread(fusion, r)
        else:
            spread(fusion, r)
        x = random((5, 77))
        x[2, 40] = float("nan")
        if device is None:
            check(fusion, [x])
        else:
            check(fusion, [x], device=device)


@pytest.mark.parametrize("shape", SHAPES)
def test_inner_vectorized_unrolled(shape: Sequence[int]) -> None:
    """The loops are [rows, reduction steps, unswitch, unroll, threads, vector]."""
    rows, columns = shape
    fusion = define(lambda a: ops.sum(a, [1]), (-1, -1))
    with FusionGuard(fusion):
        read = fusion.inputs[0].cache_after()  # pyright: ignore
    r = staged(fusion)
    r.split(1, 4)
    r.split(1, 16)
    r.split(1, 2)
    r.split(1, 1)
    # rows, steps, 1, 2, 16, 4
    r.reorder({2: 2})
    parallelize(r, P.grid_x, None, P.unswitch, P.unroll, P.block_x)
    transform_like(r)
    parallelize_like(r)
    read.axis(-1).parallelize(P.vectorize)
    inline_most(fusion=fusion)
    read.compute_at = 3
    x = random((rows, columns * 4))
    kernel = check(fusion, [x])
    assert "load_vec_cs<4>" in kernel.source.text
    assert "else" in kernel.source.text


@pytest.mark.parametrize("shape", [(100, 24), (1, 8), (37, 40), (260, 16)])
@pytest.mark.parametrize("threads", [(4, 8), (2, 3), (1, 1)])
def test_outer_vectorized(shape: Sequence[int], threads: tuple[int, int]) -> None:
    """The loops are [columns/..(bx), columns(tx), vector, rows serial, rows(ty)], with vector
    accumulators."""
    tx, ty = threads
    fusion = define(lambda a: ops.sum(a, [0]), (-1, -1))
    with FusionGuard(fusion):
        read = fusion.inputs[0].cache_after()  # pyright: ignore
    r = staged(fusion)
    # r: [rows(r), columns]
    r.split(1, 4)
    r.split(1, tx)
    r.split(0, ty)
    # rows, ty, columns/tx, tx, 4
    r.reorder({2: 0, 3: 1, 0: 2, 1: 3, 4: 4})
    parallelize(r, P.grid_x, P.block_x, None, P.block_y, P.unroll)
    transform_like(r)
    parallelize_like(r)
    read.axis(-1).parallelize(P.vectorize)
    inline_most(fusion=fusion)
    read.compute_at = min(read.compute_at, 4)
    out = fusion.outputs[0]
    out.axis(-1).parallelize(P.vectorize)
    r.compute_at = 2
    kernel = check(fusion, [random(shape)])
    text = kernel.source.text
    assert "Array<float, 4> r" in text and "store_vec_cs<4>" in text
    # A thread that sums alone behaves like one of a pointwise kernel.
    assert ("load_vec_cs<4>" if ty > 1 else "load_vec<4>") in text


@pytest.mark.parametrize("blocks", [1, 3, 4])
@pytest.mark.parametrize("threads", [1, 32, 7])
def test_grid(blocks: int, threads: int) -> None:
    fusion = define(lambda a: ops.mul(ops.sum(a, [1]), 0.5), (-1, -1))
    r = staged(fusion)
    r.split(1, threads)
    r.split(1, blocks, False)
    parallelize(r, P.grid_y, P.grid_x, None, P.block_x)
    spread(fusion, r)
    kernel = check(fusion, [random((5, 213))])
    assert ("grid_reduce" in kernel.source.text) == (blocks > 1)


def test_grid_with_accumulator_arrays() -> None:
    fusion = define(lambda a: ops.sum(a, [0]), (-1, -1))
    r = staged(fusion)
    r.split(1, 4)
    r.split(0, 3, False)
    r.split(1, 2)
    # 3(bx), rows, 2(ty), columns, 4
    r.reorder({3: 0, 0: 1, 1: 2, 2: 3})
    parallelize(r, P.grid_y, P.grid_x, None, P.block_y, P.unroll)
    spread(fusion, r)
    r.compute_at = 1
    check(fusion, [random((29, 22))])


def test_grid_inside_a_serial_loop() -> None:
    fusion = define(lambda a: ops.sum(a, [1]), (-1, -1))
    r = staged(fusion)
    r.split(1, 3, False)
    parallelize(r, None, P.grid_x, None)
    spread(fusion, r)
    check(fusion, [random((5, 20))])


def test_two_axes() -> None:
    fusion = define(lambda a: ops.sum(a, [0, 2]), (-1, -1, -1))
    r = staged(fusion)
    r.reorder({1: 0, 0: 1})
    r.merge(1)
    r.split(1, 16)
    parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random((5, 4, 11))])


def test_two_axes_on_two_thread_axes() -> None:
    fusion = define(lambda a: ops.sum(a, [0, 2]), (-1, -1, -1))
    r = staged(fusion)
    r.reorder({1: 0, 0: 1})
    r.split(1, 3)
    r.split(3, 8)
    parallelize(r, P.grid_x, None, P.block_y, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random((5, 4, 11))])


def test_all_axes() -> None:
    fusion = define(lambda a: ops.sum(a, [0, 1]), (-1, -1))
    r = staged(fusion)
    r.merge(0)
    r.split(0, 32)
    r.split(0, 4, False)
    parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random((13, 29))])


@pytest.mark.parametrize("grid", [False, True])
def test_sum_and_sum_of_squares(grid: bool) -> None:
    def build(a: TensorView) -> list[TensorView]:
        return [ops.sum(a, [1]), ops.sum(ops.mul(a, a), [1])]

    fusion = define(build, (-1, -1))
    r = staged(fusion)
    r.split(1, 32)
    if grid:
        r.split(1, 3, False)
        parallelize(r, P.grid_y, P.grid_x, None, P.block_x)
    else:
        parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    kernel = check(fusion, [random((5, 213))])
    assert kernel.source.text.count("= T0[") == 1


@pytest.mark.parametrize("kinds", [("sum", "max"), ("sum", "max", "min")])
def test_grid_reductions_of_several_kinds_meet(kinds: Sequence[str]) -> None:
    """All use one exchange, because different blocks could complete two exchanges."""

    def build(a: TensorView) -> TensorView:
        results = [getattr(ops, kind)(a, [1]) for kind in kinds]
        return functools.reduce(ops.add, results)

    fusion = define(build, (-1, -1))
    r = staged(fusion)
    r.split(1, 16)
    r.split(1, 3, False)
    parallelize(r, P.grid_y, P.grid_x, None, P.block_x)
    spread(fusion, r)
    kernel = check(fusion, [random((5, 213))])
    assert kernel.source.text.count("grid_reduce<") == 1
    assert kernel.source.text.count("= T0[") == 1


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("cached", [True, False])
def test_welford(grid: bool, cached: bool) -> None:
    def build(a: TensorView) -> list[TensorView]:
        var, mean = ops.var_mean(a, [1], 0, False)
        return [var, mean]

    fusion = define(build, (-1, -1))
    r = staged(fusion, cached=cached)
    r.split(1, 16)
    if grid:
        r.split(1, 3, False)
        parallelize(r, P.grid_y, P.grid_x, None, P.block_x)
    else:
        parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random((5, 213)) + 10.0])


def test_serial_rows_and_columns_on_the_cpu() -> None:
    fusion = define(lambda a: ops.sum(a, [1]), (-1, -1))
    r = staged(fusion)
    spread(fusion, r)
    kernel = check(fusion, [random((5, 213))], device=CPU)
    assert "FUSER_SIMD_SUM" in kernel.source.text
    outer = define(lambda a: ops.sum(a, [0]), (-1, -1))
    r = staged(outer)
    r.split(1, 16)
    r.reorder({1: 0, 0: 1})
    spread(outer, r)
    r.compute_at = 1
    kernel = check(outer, [random((37, 50))], device=CPU)
    assert "FUSER_SIMD\n" in kernel.source.text


def test_half_accumulates_in_float() -> None:
    fusion = define(
        lambda a: ops.cast(ops.sum(ops.cast(a, DataType.Float), [1]), DataType.BFloat16),
        (-1, -1),
        dtype=DataType.BFloat16,
    )
    r = staged(fusion)
    r.split(1, 32)
    parallelize(r, P.grid_x, None, P.block_x)
    spread(fusion, r)
    check(fusion, [random((5, 300), torch.bfloat16)])


def test_softmax_rows_in_registers() -> None:
    """The row stays in registers for two reductions and another use, without a second read of
    memory."""

    def build(a: TensorView) -> TensorView:
        m = ops.broadcast(ops.max(a, [1]), [False, True])
        e = ops.exp(ops.sub(a, m))
        s = ops.broadcast(ops.sum(e, [1]), [False, True])
        return ops.div(e, s)

    fusion = define(build, (-1, 100))
    with FusionGuard(fusion):
        read = fusion.inputs[0].cache_after()  # pyright: ignore
    out = fusion.outputs[0]
    out.split(1, 32)
    parallelize(out, P.grid_x, None, P.block_x)
    spread(fusion, out)
    kernel = check(fusion, [random((5, 100))])
    assert read.compute_at == 1
    assert kernel.source.text.count("T0[") == 1
    assert kernel.source.text.count("block_reduce") == 2


def test_shared_transpose() -> None:
    fusion = define(lambda a: ops.permute(a, [1, 0]), (-1, -1))
    with FusionGuard(fusion):
        tile = fusion.inputs[0].cache_after()  # pyright: ignore
    out = fusion.outputs[0]
    for tv in (tile, out):
        tv.split(1, 8)
        tv.split(0, 8)
        tv.reorder({1: 2, 2: 1})
    # out [J/8, I/8, 8j, 8i]; tile [I/8, J/8, 8i, 8j]
    tile.reorder({0: 1, 1: 0})
    parallelize(out, P.grid_x, P.grid_y, P.block_y, P.block_x)
    parallelize(tile, P.grid_x, P.grid_y, P.block_y, P.block_x)
    tile.memory = MemoryType.shared
    tile.compute_at = 2
    kernel = check(fusion, [random((20, 13))])
    assert kernel.source.text.count("__syncthreads") == 1
    assert "FUSER_SHARED" in kernel.source.text


def test_shared_in_a_serial_loop_waits_twice() -> None:
    fusion = define(lambda a: ops.permute(a, [1, 0]), (-1, -1))
    with FusionGuard(fusion):
        tile = fusion.inputs[0].cache_after()  # pyright: ignore
    out = fusion.outputs[0]
    for tv in (tile, out):
        tv.split(1, 8)
        tv.split(0, 8)
        tv.reorder({1: 2, 2: 1})
    tile.reorder({0: 1, 1: 0})
    parallelize(out, P.grid_x, None, P.block_y, P.block_x)
    parallelize(tile, P.grid_x, None, P.block_y, P.block_x)
    tile.memory = MemoryType.shared
    tile.compute_at = 2
    kernel = check(fusion, [random((20, 13))])
    assert kernel.source.text.count("__syncthreads") == 2


def test_vectors_through_shared_memory() -> None:
    fusion = define(lambda a: ops.neg(a), (-1,))
    with FusionGuard(fusion):
        read = fusion.inputs[0].cache_after()  # pyright: ignore
    for tv in (read, fusion.outputs[0]):
        tv.split(0, 4)
        tv.split(0, 8)
        parallelize(tv, P.grid_x, P.block_x, P.vectorize)
    read.memory = MemoryType.shared
    read.compute_at = 1
    check(fusion, [random((100,))])


def test_registers_for_a_symbolic_extent_are_refused() -> None:
    fusion = define(lambda a: ops.sum(a, [1]), (-1, -1))
    r = staged(fusion)
    r.reorder({1: 0, 0: 1})
    with pytest.raises(DefinitionError, match="register"):
        lower(fusion)
