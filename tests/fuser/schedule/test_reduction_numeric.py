"""Tests pointwise and reduction kernels against torch in float64.

Each case runs with the CPU schedule, and with the H200 schedule on the CPU in checked mode. Checked
mode tests every access for bounds, alignment, initialisation and races.
"""

from __future__ import annotations

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import TensorView
from tests.support.kernel_checks import BOTH, back, check
from tests.support.small_fusions import define, make_executor, random, run

D = DataType


SHAPES = [
    (1,),
    (7,),
    (1, 1),
    (7, 96),
    (64, 100),
    (31, 37),
    (3, 770),
    (5, 1, 9),
    (2, 3, 4, 8),
    (130, 2056),
]


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pointwise_contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    inputs = [random(shape, dtype, seed) for seed in range(3)]
    check(
        lambda x, y, z: back(ops.add(ops.mul(ops.tanh(x), y), z), dtype),
        lambda x, y, z: torch.tanh(x) * y + z,
        inputs,
        device,
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16], ids=str)
def test_pointwise_other_dtypes(dtype: torch.dtype, device: str) -> None:
    inputs = [random((33, 40), dtype, seed) for seed in range(2)]
    check(
        lambda x, y: (back(ops.add(ops.mul(x, y), x), dtype), ops.lt(x, y)),
        lambda x, y: (x * y + x, x < y),
        inputs,
        device,
        scale=4,
    )


@BOTH
def test_booleans(device: str) -> None:
    inputs = [random((33, 40), torch.bool, seed) for seed in range(2)]
    check(lambda x, y: ops.logical_and(x, ops.logical_not(y)), lambda x, y: x & ~y, inputs, device)


@BOTH
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)], ids=str)
def test_permuted_inputs_of_one_order(order: tuple[int, ...], device: str) -> None:
    """All inputs have one memory order, which is not the output's."""
    shape = (6, 10, 16)
    inputs = [
        random([shape[k] for k in order], torch.float32, seed).permute(
            [order.index(k) for k in range(3)]
        )
        for seed in range(2)
    ]
    assert inputs[0].shape == shape
    check(lambda x, y: ops.mul(x, y), lambda x, y: x * y, inputs, device)


@BOTH
def test_mixed_orders_and_strides(device: str) -> None:
    x = random((20, 24), torch.float32, 0)
    y = random((24, 20), torch.float32, 1).t()
    z = random((40, 48), torch.float32, 2)[::2, ::2]
    w = random((20, 50), torch.float32, 3)[:, 1:25]
    check(
        lambda a, b, c, d: ops.add(ops.mul(a, b), ops.sub(c, d)),
        lambda a, b, c, d: a * b + c - d,
        [x, y, z, w],
        device,
    )


@BOTH
def test_expanded_inputs(device: str) -> None:
    x = random((16, 24), torch.float32, 0)
    check(
        lambda a, b, c: ops.add(ops.mul(a, b), c),
        lambda a, b, c: a * b + c,
        [x, x[:1].expand(16, 24), x[:, :1].expand(16, 24)],
        device,
    )


@BOTH
@pytest.mark.parametrize("shape", [(4, 8), (50, 36), (130, 1024), (3, 7), (1000, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_row_and_column_vectors(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    rows, cols = shape
    inputs = [random(s, dtype, k) for k, s in enumerate(((rows, cols), (cols,), (rows, 1)))]
    check(
        lambda x, b, s: back(ops.add(ops.mul(x, s), ops.broadcast(b, [True, False])), dtype),
        lambda x, b, s: x * s + b,
        inputs,
        device,
        scale=4,
    )


@BOTH
def test_middle_broadcast(device: str) -> None:
    inputs = [random((6, 5, 16), torch.float32, 0), random((6, 1, 16), torch.float32, 1)]
    check(lambda x, b: ops.sub(x, b), lambda x, b: x - b, inputs, device)


@BOTH
def test_extents_of_one_that_are_symbolic(device: str) -> None:
    for shape in ((1, 8), (8, 1), (1, 1)):
        inputs = [random(shape, torch.float32, seed) for seed in range(2)]
        check(lambda x, y: ops.add(x, y), lambda x, y: x + y, inputs, device, broadcast_ones=False)


@BOTH
def test_outputs_that_other_ops_read(device: str) -> None:
    def build(x: TensorView) -> list[TensorView]:
        y = ops.sin(x)
        z = ops.mul(y, 2.0)
        return [y, z, ops.add(y, z)]

    x = random((33, 64), torch.float32)
    check(build, lambda x: (x.sin(), 2 * x.sin(), 3 * x.sin()), [x], device)


@BOTH
def test_outputs_of_several_widths(device: str) -> None:
    x = random((33, 64), torch.bfloat16)
    check(
        lambda x: (ops.cast(x, D.Double), ops.cast(x, D.Float), ops.gt(x, 0.0), ops.neg(x)),
        lambda x: (x, x, x > 0, -x),
        [x],
        device,
    )


@BOTH
def test_views_inside_a_kernel(device: str) -> None:
    x = random((8, 6, 16), torch.float32, 0)
    y = random((8, 96), torch.float32, 1)
    check(
        lambda x, y: ops.mul(ops.sin(ops.reshape(x, [8, 96])), y),
        lambda x, y: x.reshape(8, 96).sin() * y,
        [x, y],
        device,
        is_static=True,
    )


@BOTH
def test_slice_pad_cat_and_permute(device: str) -> None:
    x = random((8, 12), torch.float32, 0)
    check(lambda x: ops.neg(ops.slice(x, [1, 2], [7, 10])), lambda x: -x[1:7, 2:10], [x], device)
    check(
        lambda x: ops.neg(ops.pad(x, [1, 2, 0, 3])),
        lambda x: -torch.nn.functional.pad(x, [1, 2, 0, 3]),
        [x],
        device,
    )
    y = random((5, 12), torch.float32, 1)
    check(
        lambda x, y: ops.neg(ops.cat([ops.sin(x), y], 0)),
        lambda x, y: -torch.cat([x.sin(), y]),
        [x, y],
        device,
    )
    check(
        lambda x, y: ops.add(ops.permute(x, [1, 0]), y),
        lambda x, y: x.t() + y,
        [x, random((12, 8), torch.float32, 2)],
        device,
    )


@BOTH
def test_rotated_halves(device: str) -> None:
    """Rotary embedding: an input is read directly and at shifted indices."""

    def build(x: TensorView, c: TensorView, s: TensorView) -> TensorView:
        left, right = ops.slice(x, [0, 0], [10, 8]), ops.slice(x, [0, 8], [10, 16])
        turned = ops.cat([ops.neg(right), left], 1)
        return ops.add(ops.mul(x, c), ops.mul(turned, s))

    def reference(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * c + torch.cat([-x[:, 8:], x[:, :8]], 1) * s

    check(build, reference, [random((10, 16), torch.float32, k) for k in range(3)], device)


# ------------------------------------------------------------------ reductions
MATRICES = [
    (1, 1),
    (1, 4096),
    (7, 1),
    (3, 64),
    (31, 37),
    (5, 770),
    (300, 8),
    (2, 20000),
    (1031, 24),
]


@BOTH
@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_sum_of_a_matrix(
    shape: tuple[int, int], axis: int, dtype: torch.dtype, device: str
) -> None:
    x = random(shape, dtype)
    check(
        lambda x: back(ops.sum(ops.mul(x, x), [axis]), dtype),
        lambda x: (x * x).sum(axis),
        [x],
        device,
        broadcast_ones=False,
        scale=100,
    )


@BOTH
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(5, 36, 20), (2, 3, 4), (130, 2, 64), (3, 200, 7)], ids=str)
def test_sums_of_three_axes(shape: tuple[int, ...], axes: tuple[int, ...], device: str) -> None:
    x = random(shape, torch.float32)
    check(lambda x: ops.sum(x, list(axes)), lambda x: x.sum(axes), [x], device, scale=20)


@BOTH
def test_sum_over_two_separate_axes_of_four(device: str) -> None:
    x = random((3, 8, 5, 16), torch.float32)
    for axes in ((0, 2), (1, 3), (0, 3), (1, 2)):
        check(
            lambda x, a=axes: ops.sum(x, list(a)), lambda x, a=axes: x.sum(a), [x], device, scale=20
        )


@BOTH
@pytest.mark.parametrize("name", ["max", "min", "prod"])
@pytest.mark.parametrize("axis", [0, 1])
def test_other_reductions(name: str, axis: int, device: str) -> None:
    x = random((37, 66), torch.float32) * 0.9 + 0.05
    torch_op = {"max": torch.amax, "min": torch.amin, "prod": torch.prod}[name]
    check(
        lambda x: getattr(ops, name)(x, [axis]),
        lambda x: torch_op(x, axis),
        [x],
        device,
        scale=0.01,
    )


@BOTH
def test_integer_sums(device: str) -> None:
    for axis in (0, 1):
        x = random((70, 44), torch.int64)
        check(lambda x, a=axis: ops.sum(x, [a]), lambda x, a=axis: x.sum(a), [x], device)


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_kept_dimension_and_epilogue(axis: int, device: str) -> None:
    x = random((40, 48), torch.float32)
    check(
        lambda x: ops.mul(ops.sqrt(ops.sum(ops.mul(x, x), [axis], keepdim=True)), 2.0),
        lambda x: 2 * (x * x).sum(axis, keepdim=True).sqrt(),
        [x],
        device,
        scale=4,
    )


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_epilogue_reads_another_input(axis: int, device: str) -> None:
    x = random((40, 48), torch.float32)
    s = random((48 if axis == 0 else 40,), torch.float32, 1)
    check(
        lambda x, s: ops.add(ops.sum(x, [axis]), s),
        lambda x, s: x.sum(axis) + s,
        [x, s],
        device,
        scale=4,
    )


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_two_reductions_of_one_input(axis: int, device: str) -> None:
    x = random((64, 72), torch.float32)

    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        return ops.sum(x, [axis]), ops.sum(ops.mul(x, x), [axis])

    check(build, lambda x: (x.sum(axis), (x * x).sum(axis)), [x], device, scale=20)


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_two_inputs_and_a_broadcast_before_the_reduction(axis: int, device: str) -> None:
    inputs = [random((33, 64), torch.bfloat16, 0), random((33, 64), torch.bfloat16, 1)]
    inputs.append(random((64,), torch.bfloat16, 2))
    check(
        lambda x, y, b: back(
            ops.sum(ops.mul(ops.add(x, ops.broadcast(b, [True, False])), y), [axis]), torch.bfloat16
        ),
        lambda x, y, b: ((x + b) * y).sum(axis),
        inputs,
        device,
        scale=40,
    )


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_strided_and_transposed_reduction_inputs(axis: int, device: str) -> None:
    for x in (
        random((48, 40), torch.float32).t(),
        random((80, 96), torch.float32)[::2, ::2],
        random((40, 64), torch.float32)[:, 3:51],
        random((1, 48), torch.float32).expand(40, 48),
    ):
        check(lambda x: ops.sum(x, [axis]), lambda x: x.sum(axis), [x], device, scale=20)


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_variance(axis: int, device: str) -> None:
    x = random((50, 60), torch.float32) + 3.0
    check(
        lambda x: ops.var_mean(x, [axis], 1, False),
        lambda x: (x.var(axis), x.mean(axis)),
        [x],
        device,
        scale=4,
    )


@BOTH
def test_a_full_reduction_over_the_grid(device: str) -> None:
    x = random((1 << 17,), torch.float32)
    params = check(lambda x: ops.sum(x, [0]), lambda x: x.sum(), [x], device, scale=400)
    if device == "h200":
        assert params.grid > 1  # pyright: ignore[reportAttributeAccessIssue]
    assert to_torch(D.Float) is torch.float32


# ------------------------------------------------------------------ less common forms
@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_an_output_before_the_reduction(axis: int, device: str) -> None:
    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        y = ops.mul(x, 2.0)
        return y, ops.sum(y, [axis])

    x = random((40, 72), torch.float32)
    check(build, lambda x: (2 * x, (2 * x).sum(axis)), [x], device, scale=20)


@BOTH
def test_an_outer_product(device: str) -> None:
    inputs = [random((24, 1), torch.float32, 0), random((1, 40), torch.float32, 1)]
    check(lambda x, y: ops.mul(x, y), lambda x, y: x * y, inputs, device)


@BOTH
def test_factories_need_no_input(device: str) -> None:
    shape = (6, 20)
    executor = make_executor(define(lambda: ops.full(list(shape), 2.5, D.Float)), device)
    (out,) = run(executor, [], [shape])
    assert torch.equal(out, torch.full(shape, 2.5))
    upper = define(lambda: ops.triu(ops.full(list(shape), 1.0, D.Float), 1))
    (out,) = run(make_executor(upper, device), [], [shape])
    assert torch.equal(out, torch.ones(shape).triu(1))


@BOTH
def test_an_expanded_output_is_written_in_full(device: str) -> None:
    x = random((8, 1), torch.float32)
    fusion = define(lambda x: ops.neg(ops.expand(x, [8, 20])), (None, 1))
    executor = make_executor(fusion, device)
    (out,) = run(executor, [x], [(8, 20)])
    assert torch.equal(out, -x.expand(8, 20))


@BOTH
def test_a_reduction_over_an_expanded_axis_counts_every_repetition(device: str) -> None:
    fusion = define(
        lambda x: ops.sum(ops.expand(ops.broadcast(x, [False, True]), [8, 20]), [1]), (8,)
    )
    executor = make_executor(fusion, device)
    x = random((8,), torch.float32)
    (out,) = run(executor, [x], [(8,)])
    torch.testing.assert_close(out, 20 * x)


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
def test_reduced_results_in_two_dtypes(axis: int, device: str) -> None:
    x = random((64, 48), torch.bfloat16)

    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        total = ops.sum(ops.cast(x, D.Float), [axis])
        return total, back(total, torch.bfloat16)

    check(build, lambda x: (x.sum(axis), x.sum(axis)), [x], device, scale=20)
