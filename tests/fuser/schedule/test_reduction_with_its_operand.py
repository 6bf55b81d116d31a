"""Tests reduction kernels that also write tensors as large as their operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from tests.support.kernel_checks import BOTH, check
from tests.support.segmented_fusions import cut, kinds
from tests.support.small_fusions import define, make_executor, random, run

SHAPES = [(64, 256), (3, 7), (1, 5), (129, 64), (5, 1), (300, 65), (40, 1001), (2, 4100), (1000, 8)]


def _wide(x: TensorView) -> TensorView:
    return x if x.dtype() is DataType.Double else ops.cast(x, DataType.Float)


def _gradients(axis: int) -> tuple[Callable[..., object], Callable[..., object]]:
    """Returns a gradient and its sum along an axis, from the kernel and from torch."""

    def ours(dy: TensorView, x: TensorView) -> Sequence[TensorView]:
        dx = ops.mul(_wide(dy), ops.sub(1.0, ops.mul(_wide(x), _wide(x))))
        return ops.cast(dx, dy.dtype()), ops.sum(dx, [axis])

    def reference(dy: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor]:
        dx = dy * (1 - x * x)
        return dx, dx.sum(axis)

    return ours, reference


@BOTH
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_and_its_sum(
    shape: tuple[int, int], dtype: torch.dtype, axis: int, device: str
) -> None:
    ours, reference = _gradients(axis)
    inputs = [random(shape, dtype, seed) for seed in (0, 1)]
    check(ours, reference, inputs, device, scale=60, broadcast_ones=False)  # pyright: ignore[reportArgumentType]


def test_inputs_are_read_once_and_outputs_written_in_words() -> None:
    ours, reference = _gradients(0)
    fusion = define(ours, [None, None], [None, None])  # pyright: ignore[reportArgumentType]
    (rows, columns) = shape = (96, 256)
    executor = make_executor(fusion, "h200")
    inputs = [random(shape, torch.float32, seed) for seed in (0, 1)]
    outs = run(executor, inputs, [shape, (columns,)])
    for out, want in zip(outs, reference(*(t.double() for t in inputs)), strict=True):  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    counters = variant.compiled.counters
    assert counters.global_loads[16] == 2 * rows * columns // 4
    assert counters.global_stores[16] >= rows * columns // 4


@pytest.mark.parametrize("axis", [0, 1])
def test_a_pointwise_kernel_joins_a_sum_that_reads_the_same(axis: int) -> None:
    """Each of the two reads a tensor that the other does not."""

    def build(x: TensorView, y: TensorView, z: TensorView) -> Sequence[TensorView]:
        return ops.mul(x, y), ops.sum(ops.mul(x, z), [axis])

    assert kinds(cut(define(build, *([[None, None]] * 3)))) == ["reduction"]


def test_what_is_turned_stays_apart() -> None:
    def build(x: TensorView) -> Sequence[TensorView]:
        return ops.permute(ops.mul(x, 2.0), [1, 0]), ops.sum(x, [0])

    assert sorted(kinds(cut(define(build, [None, None])))) == ["reduction", "transpose"]


def test_what_is_smaller_stays_apart() -> None:
    def build(x: TensorView, y: TensorView) -> Sequence[TensorView]:
        return ops.mul(y, 2.0), ops.sum(ops.mul(x, ops.broadcast(y, [True, False])), [0])

    assert sorted(kinds(cut(define(build, [None, None], [None])))) == ["pointwise", "reduction"]
