"""Tests the error of long sums, in units of the rounding error u of the terms.

The terms are positive. A running sum of n terms in their own type has an error of about sqrt(n) / 2
u. The worst of many results has twice that: 140 u for 20,000 rows.

Blocks of at most B terms, added exactly, have errors of sqrt(B) / 2 u each, which average out over
n / B blocks. The result is rounded once. The total is less than (1 + B / sqrt(n)) u: 2 u for 128
rows of 20,000, and for a million terms in lanes of 512 of 2048.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from tests.support.small_fusions import define, make_executor, run

# Twice the bound above.
UNITS = 4
ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LONG = {
    "outer": ((20_000, 40), [0]),
    "middle": ((3, 20_000, 17), [1]),
    "inner": ((3, 1_000_000), [1]),
    "full": ((1000, 1000), [0, 1]),
    "outer and inner": ((1500, 5, 100), [0, 2]),
    "two runs, the inner one short": ((8000, 2, 3, 17), [0, 2]),
}


def positive(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def results(
    x: torch.Tensor, dims: list[int], *, is_variance: bool, static: bool = False
) -> list[torch.Tensor]:
    def build(t: TensorView) -> list[TensorView]:
        if x.dtype not in ROUNDING:
            t = ops.cast(t, DataType.Float)
        return list(ops.var_mean(t, dims, correction=1)) if is_variance else [ops.sum(t, dims)]

    shape = list(x.shape) if static else [None] * x.dim()
    fusion = define(build, shape, dtype=from_torch(x.dtype))
    kept = [n for k, n in enumerate(x.shape) if k not in dims]
    return run(make_executor(fusion), [x], [kept] * (2 if is_variance else 1))


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest relative error in units of the result's rounding error."""
    error = (got.double() - exact).abs() / exact.abs()
    return error.max().item() / ROUNDING[got.dtype]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sums(name: str, dtype: torch.dtype) -> None:
    shape, dims = LONG[name]
    x = positive(shape, dtype)
    (got,) = results(x, dims, is_variance=False)
    assert worst(got, x.double().sum(dims)) < UNITS


@pytest.mark.parametrize("name", LONG)
def test_long_variances(name: str) -> None:
    shape, dims = LONG[name]
    x = positive(shape)
    for got, exact in zip(
        results(x, dims, is_variance=True),
        torch.var_mean(x.double(), dims, correction=1),
        strict=True,
    ):
        assert worst(got, exact) < UNITS


@pytest.mark.parametrize("shape", [(20_000, 300), (20_000, 3)], ids=str)
def test_long_columns_of_a_known_shape(shape: tuple[int, int]) -> None:
    x = positive(shape)
    (got,) = results(x, [0], is_variance=False, static=True)
    assert worst(got, x.double().sum(0)) < UNITS


def test_long_columns_in_double() -> None:
    """Blocks of 128 rows and a sum of 157 blocks: about sqrt(128 + 157) / 2 units, not 140."""
    x = positive((20_000, 40), torch.float64)
    (got,) = results(x, [0], is_variance=False)
    exact = torch.tensor([math.fsum(column) for column in x.T.tolist()], dtype=torch.float64)
    assert worst(got, exact) < 2 * math.sqrt(128 + 157) / 2


@pytest.mark.parametrize("rows", [127, 128, 129, 256, 257])
def test_around_a_block(rows: int) -> None:
    """No row is lost or added twice, and NaN and infinities are kept."""
    x = torch.arange(rows * 5).reshape(rows, 5).float() % 7
    (got,) = results(x, [0], is_variance=False)
    assert got.tolist() == x.sum(0).tolist()
    x[0, 0], x[rows - 1, 1], x[rows // 2, 2] = math.inf, -math.inf, math.nan
    (got,) = results(x, [0], is_variance=False)
    assert got[:2].tolist() == [math.inf, -math.inf] and got[2].isnan() and got[3:].isfinite().all()
