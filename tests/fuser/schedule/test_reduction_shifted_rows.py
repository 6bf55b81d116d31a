"""Tests reductions of rows of any length: they are read in aligned vectors, except at
their ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from tests.support.kernel_checks import check
from tests.support.small_fusions import define, make_executor, random, run


def _statistics(x: TensorView, y: TensorView) -> Sequence[TensorView]:
    wide = x.dtype() is DataType.Double
    a, b = (v if wide else ops.cast(v, DataType.Float) for v in (x, y))
    s = ops.add(a, b)
    var, _ = ops.var_mean(s, [-1], correction=0)
    return ops.sum(s, [-1]), ops.max(s, [-1]), var


def _expected(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    s = x + y
    return s.sum(-1), s.amax(-1), s.var(-1, correction=0)


SHAPES = [(9, 333), (300, 65), (133, 127), (1, 2049), (2, 20001), (3, 50257), (40, 1001), (5, 71)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = (random(shape, dtype, seed) for seed in (0, 1))
    check(_statistics, _expected, [x, y], "h200", scale=60, broadcast_ones=False)


def test_rows_of_several_axes() -> None:
    x = random((3, 5, 11, 13), torch.bfloat16)
    check(
        lambda x: ops.sum(ops.cast(x, DataType.Float), [2, 3]),
        lambda x: x.sum((2, 3)),
        [x],
        "h200",
        scale=20,
    )


@pytest.mark.parametrize("shape", [(9, 333), (300, 65), (2, 20001)], ids=str)
def test_a_sum_loads_whole_words(shape: tuple[int, int]) -> None:
    rows, columns = shape
    fusion = define(
        lambda x: ops.sum(ops.cast(x, DataType.Float), [1]), [None, None], dtype=DataType.BFloat16
    )
    executor = make_executor(fusion, "h200")
    x = random(shape, torch.bfloat16)
    (out,) = run(executor, [x], [(rows,)])
    torch.testing.assert_close(out.double(), x.double().sum(-1), rtol=1e-5, atol=1e-3)
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    begins = [row * columns for row in range(rows)]
    words = sum((b + columns - 1) // 8 - b // 8 + 1 for b in begins)
    last = x.numel() % 8
    expected = {2: last, 16: words - 1} if last else {16: words}
    # Blocks exchange partial sums in packets of eight bytes, and tickets of four.
    loads = {n: c for n, c in variant.compiled.counters.global_loads.items() if n not in (4, 8)}
    assert loads == expected


def test_rows_with_gaps_are_not_shifted() -> None:
    x = random((9, 400), torch.bfloat16)[:, :333]
    fusion = define(
        lambda x: ops.sum(ops.cast(x, DataType.Float), [1]), [None, None], dtype=DataType.BFloat16
    )
    executor = make_executor(fusion, "h200")
    (out,) = run(executor, [x], [(9,)])
    torch.testing.assert_close(out.double(), x.double().sum(-1), rtol=1e-5, atol=1e-3)
    assert "shifted" not in str(executor.variants[0].params)
