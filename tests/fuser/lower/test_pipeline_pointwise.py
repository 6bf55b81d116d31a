"""Tests pointwise kernels from manual schedules, in checked mode against torch in float64."""

from __future__ import annotations

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.schedule.inlining import inline_most
from fuser.schedule.loop_propagation import parallelize_like, transform_like
from fuser.support.errors import UnsupportedError
from tests.support.hand_schedules import (
    CPU,
    P,
    check,
    define,
    lower,
    new_input,
    parallelize,
    random,
)


def cache_io(fusion: Fusion) -> tuple[list[TensorView], list[TensorView]]:
    """Caches inputs and copies outputs; returns (input caches, copied outputs)."""
    with FusionGuard(fusion):
        reads = [
            v.cache_after() for v in list(fusion.inputs) if isinstance(v, TensorView) and v.ndim
        ]
        for out in list(fusion.outputs):
            out.cache_before()
    return reads, list(fusion.outputs)


def flat(fusion: Fusion, threads: int = 128) -> None:
    """Schedules one thread per element of the flattened output."""
    out = fusion.outputs[0]
    while len(out.domain.loop) > 1:
        out.merge(0)
    out.split(0, threads)
    parallelize(out, P.grid_x, P.block_x)
    transform_like(out)
    parallelize_like(out)
    inline_most(fusion=fusion)


def vectorized(
    fusion: Fusion, *, width: int = 4, threads: int = 32, unroll: int = 2, broadcast: str = "vector"
) -> None:
    """Schedules [blocks, unswitch, unroll, threads, vector] over the flattened output."""
    reads, writes = cache_io(fusion)
    ref = writes[0]
    while len(ref.domain.loop) > 1:
        ref.merge(0)
    ref.split(0, width)
    ref.split(0, threads)
    ref.split(0, unroll)
    ref.split(0, 1)
    # blocks, 1, unroll, threads, width
    parallelize(ref, P.grid_x, P.unswitch, P.unroll, P.block_x)
    transform_like(ref)
    parallelize_like(ref)
    rank = len(ref.domain.loop)
    for tv in (*reads, *writes):
        if len(tv.domain.loop) == rank and (broadcast == "vector" or tv in writes):
            tv.axis(-1).parallelize(P.vectorize)
    inline_most(fusion=fusion)
    for tv in reads:
        if tv.compute_at > 2 and tv.axis(-1).ptype is P.vectorize:
            tv.compute_at = 2
    for tv in fusion.tensors():
        if tv not in reads and tv not in fusion.inputs and tv not in writes:
            tv.compute_at = min(tv.compute_at, rank)


def test_flat_has_no_division() -> None:
    fusion = define(lambda a, b: ops.exp(ops.add(a, ops.mul(b, 2.5))), (-1, -1), (-1, -1))
    flat(fusion)
    kernel = check(fusion, [random((7, 33)), random((7, 33), seed=1)])
    assert "/" not in kernel.source.text and "%" not in kernel.source.text
    assert "double" not in kernel.source.text


def test_row_broadcast_flat_has_one_modulo() -> None:
    fusion = define(lambda a, b: ops.add(a, b), (-1, -1), (-1,))
    flat(fusion)
    kernel = check(fusion, [random((7, 33)), random((33,), seed=1)])
    assert kernel.source.text.count("%") == 1 and "/" not in kernel.source.text


def test_row_broadcast_2d_has_no_modulo() -> None:
    fusion = define(lambda a, b: ops.add(a, b), (-1, -1), (-1,))
    out = fusion.outputs[0]
    out.split(1, 32)
    parallelize(out, P.grid_x, P.grid_y, P.block_x)
    transform_like(out)
    parallelize_like(out)
    inline_most(fusion=fusion)
    kernel = check(fusion, [random((7, 33)), random((33,), seed=1)])
    assert "%" not in kernel.source.text and "/" not in kernel.source.text


@pytest.mark.parametrize("size", [8, 256, 264, 1000, 4096])
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Half])
def test_vectorized(size: int, dtype: DataType) -> None:
    fusion = define(lambda a, b: ops.add(a, ops.relu(b)), (-1,), (-1,), dtype=dtype)
    width = 4 if dtype is DataType.Float else 8
    if dtype is not DataType.Float:
        fusion = define(
            lambda a, b: ops.cast(ops.add(a, ops.relu(b)), dtype), (-1,), (-1,), dtype=dtype
        )
    vectorized(fusion, width=width)
    torch_dtype = {DataType.Float: torch.float32, DataType.Half: torch.float16}.get(
        dtype, torch.bfloat16
    )
    kernel = check(fusion, [random((size,), torch_dtype), random((size,), torch_dtype, 1)])
    text = kernel.source.text
    assert text.count(f"load_vec<{width}>") == 4  # two inputs, fast path and slow path
    assert text.count(f"store_vec_cs<{width}>") == 2 and "load_vec_cs" not in text
    assert "else" in text
    fast = text[text.index("if (") : text.index("else")]
    # The fast path has no predicates inside, and all loads precede the first use.
    assert fast.count("if (") == 1
    assert fast.rindex("load_vec") < fast.index("float t")
    assert all(n == 16 for _, n in kernel.alignments)


def test_vectorized_2d_flattened_guards_the_product() -> None:
    fusion = define(lambda a, b: ops.mul(a, b), (-1, -1), (-1, -1))
    vectorized(fusion)
    check(fusion, [random((6, 10)), random((6, 10), seed=1)])
    assert [str(g) for g in lower(fusion).guards[:1]] == ["( ( ( i0 * i2 ) % 4 ) == 0 )"]


def test_vectorized_row_broadcast() -> None:
    fusion = define(lambda a, b: ops.mul(a, b), (-1, -1), (-1,))
    vectorized(fusion)
    kernel = check(fusion, [random((6, 20)), random((20,), seed=1)])
    assert "load_vec<4>(T" in kernel.source.text  # not streamed: rows share it
    assert any("% 4" in str(g) and "*" not in str(g) for g in kernel.guards)


def test_scalar_row_broadcast_beside_vectors() -> None:
    fusion = define(lambda a, b: ops.mul(a, b), (-1, -1), (-1,))
    vectorized(fusion, broadcast="scalar")
    check(fusion, [random((6, 20)), random((20,), seed=1)])


def test_column_broadcast() -> None:
    fusion = define(lambda a, b: ops.mul(a, b), (-1, -1), (-1, 1))
    flat(fusion)
    check(fusion, [random((6, 20)), random((6, 1), seed=1)])


def test_outer_product_of_broadcasts() -> None:
    fusion = define(lambda a, b: ops.add(a, b), (-1, 1), (1, -1))
    flat(fusion)
    check(fusion, [random((6, 1)), random((1, 9), seed=1)])


@pytest.mark.parametrize("contiguity", [True, False, (False, True)])
def test_strided_inputs(contiguity: bool | tuple[bool, bool]) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1, -1), contiguity=contiguity)
        fusion.add_output(ops.exp(a))
    flat(fusion)
    x = random((12, 40))
    check(fusion, [x if contiguity is True else x[::2, :10] if contiguity else x[::2, ::3]])


def test_strided_rows_vectorized() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1, -1), contiguity=(False, True))
        fusion.add_output(ops.exp(a))
    vectorized(fusion)
    kernel = check(fusion, [random((12, 40))[:, :16]])
    assert any("T0_s0" in str(g) for g in kernel.guards)


def test_permuted_allocation() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1, -1), order=(1, 0))
        b = new_input(fusion, (-1, -1))
        fusion.add_output(ops.add(a, b))
    flat(fusion)
    check(fusion, [random((9, 5)).t(), random((5, 9), seed=1)])


def test_transposed_value() -> None:
    fusion = define(lambda a, b: ops.add(ops.permute(a, [1, 0]), b), (-1, -1), (-1, -1))
    flat(fusion)
    check(fusion, [random((9, 5)), random((5, 9), seed=1)])


def test_vectorized_along_a_strided_axis_is_refused() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1,), contiguity=False)
        fusion.add_output(ops.exp(a))
    vectorized(fusion)
    with pytest.raises(UnsupportedError, match="T0"):
        lower(fusion)


def test_scalar_inputs() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1,))
        d = fusion.new_symbol(DataType.Double)
        i = fusion.new_symbol(DataType.Int)
        fusion.add_input(d)
        fusion.add_input(i)
        fusion.add_output(ops.add(ops.mul(a, d), i))
    flat(fusion)
    kernel = check(fusion, [random((50,)), 1.5, 3])
    assert "double" not in kernel.source.text


def test_zero_dim() -> None:
    fusion = define(lambda a, b: ops.add(a, b), (-1, -1), ())
    flat(fusion)
    check(fusion, [random((5, 6)), torch.tensor(3.0)])
    alone = define(lambda a: ops.neg(a), ())
    check(alone, [torch.tensor(3.0)])


def test_two_outputs_share_values() -> None:
    def build(a: TensorView, b: TensorView) -> list[TensorView]:
        c = ops.mul(a, b)
        return [ops.exp(c), ops.neg(c)]

    fusion = define(build, (-1, -1), (-1, -1))
    flat(fusion)
    kernel = check(fusion, [random((5, 6)), random((5, 6), seed=1)])
    assert kernel.source.text.count("t0 * t1") == 1


def test_output_that_is_also_an_operand() -> None:
    def build(a: TensorView) -> list[TensorView]:
        c = ops.exp(a)
        return [c, ops.neg(c)]

    fusion = define(build, (-1, -1))
    flat(fusion)
    check(fusion, [random((5, 6))])


def test_smaller_output() -> None:
    def build(a: TensorView, b: TensorView) -> list[TensorView]:
        c = ops.exp(b)
        return [ops.add(a, c), c]

    fusion = define(build, (-1, -1), (-1,))
    flat(fusion, threads=16)
    check(fusion, [random((5, 23)), random((23,), seed=1)])


def test_outputs_that_use_the_launch_in_part() -> None:
    fusion = define(lambda a, b: [ops.exp(a), ops.neg(b)], (-1, 8), (-1, 12))
    for out in fusion.outputs:
        parallelize(out, P.grid_x, P.block_x)
    kernel = check(fusion, [random((5, 8)), random((3, 12), seed=1)])
    assert "bx < i" in kernel.source.text and "tx < 8" in kernel.source.text


def test_plain_loops() -> None:
    fusion = define(lambda a, b: ops.mul(ops.exp(a), b), (-1, -1), (-1,))
    transform_like(fusion.outputs[0])
    inline_most(fusion=fusion)
    kernel = check(fusion, [random((5, 23)), random((23,), seed=1)], device=CPU)
    assert "FUSER_SIMD" in kernel.source.text


@pytest.mark.parametrize("index", [DataType.Int, DataType.Int32])
def test_index_dtype(index: DataType) -> None:
    fusion = define(lambda a: ops.exp(a), (-1, -1))
    flat(fusion)
    kernel = check(fusion, [random((5, 6))], index=index)
    assert ("int64_t" in kernel.source.text) == (index is DataType.Int)


def test_views() -> None:
    def build(a: TensorView) -> TensorView:
        x = ops.reshape(a, [a.size(0), 6, 4])
        x = ops.permute(x, [1, 0, 2])
        x = ops.slice(x, [1, 0, 0], [5, x.size(1), 4])
        return ops.mul(x, 2.0)

    fusion = define(build, (-1, 24))
    flat(fusion, threads=32)
    check(fusion, [random((5, 24))])


def test_pad() -> None:
    fusion = define(lambda a: ops.exp(ops.pad(ops.neg(a), [2, 3, 1, 0], 7.0)), (-1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((5, 6))])


def test_pad_of_a_broadcast_axis() -> None:
    fusion = define(lambda a: ops.exp(ops.pad(a, [0, 0, 2, 1], 3.0)), (1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((1, 6))])


def test_cropping_pad() -> None:
    fusion = define(lambda a: ops.exp(ops.pad(a, [-1, 2])), (-1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((5, 6))])


def test_cat() -> None:
    def build(a: TensorView, b: TensorView) -> TensorView:
        return ops.neg(ops.cat([a, ops.exp(b), a], 1))

    fusion = define(build, (-1, -1), (-1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((5, 6)), random((5, 3), seed=1)])


def test_rotary_half() -> None:
    def build(a: TensorView) -> TensorView:
        left = ops.slice(a, [0, 0], [a.size(0), 4])
        right = ops.slice(a, [0, 4], [a.size(0), 8])
        return ops.add(a, ops.cat([ops.neg(right), left], 1))

    fusion = define(build, (-1, 8))
    flat(fusion, threads=32)
    check(fusion, [random((5, 8))])


def test_factories() -> None:
    def build(a: TensorView) -> TensorView:
        n = a.size(1)
        i = ops.iota(n, 3, 2, DataType.Int)
        full = ops.full([a.size(0), n], 2.0, DataType.Float)
        return ops.where(ops.gt(a, 0.0), ops.add(a, i), full)

    fusion = define(build, (-1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((5, 8))])


def test_integers_and_bools() -> None:
    def build(a: TensorView) -> list[TensorView]:
        return [ops.div(a, 3), ops.bitwise_and(a, 6), ops.logical_not(ops.gt(a, 2))]

    fusion = define(build, (-1, -1), dtype=DataType.Int)
    flat(fusion, threads=32)
    check(fusion, [random((5, 8), torch.int64)])


def test_expanded_output() -> None:
    fusion = define(lambda a: ops.exp(ops.expand(a, [5, -1])), (1, -1))
    flat(fusion, threads=32)
    check(fusion, [random((1, 8))])


def test_in_place_output() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = new_input(fusion, (-1,))
        fusion.add_output(ops.exp(a), a)
    flat(fusion)
    kernel = check(fusion, [random((50,))])
    assert kernel.source.text.count("FUSER_ALIASED_PTR") == 2
