"""Tests variances whose values a thread adds in batches, on the SIMT shim against float64."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.lower.buffers import INDEX_CTYPE
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBatch,
    Body,
    Declare,
    Element,
    For,
    If,
    ScalarValue,
    Statement,
    walk,
)
from fuser.lower.passes.batched_welford import batch_welfords
from fuser.schedule import reduction

H200 = ["schedules_for(h200)", "checked"]


def moments(x: torch.Tensor, dims: list[int], *, count: int = 3) -> list[torch.Tensor]:
    """Returns the variance, the mean, and the largest value, which is another reduction."""
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1] * x.ndim, contiguity=True, dtype=from_torch(x.dtype))
        wide = ops.cast(t, DataType.Float) if x.dtype is torch.bfloat16 else t
        for out in (*ops.var_mean(wide, dims, 0), ops.max(wide, dims))[:count]:
            fd.add_output(out)
    return fd.execute([x], _enable_options=H200)


def check(x: torch.Tensor, dims: list[int]) -> None:
    var, mean, largest = moments(x, dims)
    wide = x.double()
    want, about = torch.var_mean(wide, dims, correction=0)
    # Sums are exact to a few units in the last place, which are large for a mean far from zero.
    unit = torch.finfo(torch.float32 if x.dtype is torch.bfloat16 else x.dtype).eps
    assert ((var - want).abs() <= 400 * unit * want + 16 * unit * about.abs() * want.sqrt()).all()
    assert ((mean - about).abs() <= 16 * unit * (about.abs() + want.sqrt())).all()
    assert torch.equal(largest.double(), wide.amax(dims))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 300, 1043])
@pytest.mark.parametrize("columns", [1, 8, 37, 132])
def test_columns_of_any_extent(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    check((torch.randn(rows, columns, generator=generator) + 1.0).to(dtype), [0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1043, 8), (2048, 37), (517, 132)], ids=str)
def test_threads_of_several_batches(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are too few blocks for one batch per thread to be enough, as with tensors of more than
    20 MB."""
    monkeypatch.setattr(reduction, "THREADS_PER_SM", 1)
    generator = torch.Generator().manual_seed(shape[0])
    drift = torch.arange(shape[0])[:, None] / 100.0
    check((torch.randn(shape, generator=generator) + drift).to(dtype), [0])


@pytest.mark.parametrize("dims", [[0, 1], [1], [1, 2], [0, 2], [0]], ids=str)
def test_reduced_axes_in_any_place(dims: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(dims))
    check(torch.randn(37, 19, 68, generator=generator), dims)


@pytest.mark.parametrize("shift", [1e3, 1e5, -1e4])
def test_a_mean_much_larger_than_the_deviation(shift: float) -> None:
    """Sums of squares would lose all digits, and so would sums of distances from an outlier."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 20, generator=generator) + shift
    x[0] = 0.0 if shift == 1e5 else x[0]
    check(x, [0])


def test_values_that_are_not_finite_stay_in_their_columns() -> None:
    x = torch.randn(300, 12, generator=torch.Generator().manual_seed(4))
    x[7, 2], x[280, 5] = float("nan"), float("inf")
    var, mean, _ = moments(x, [0])
    good = [k for k in range(12) if k not in (2, 5)]
    want = torch.var_mean(x.double(), 0, correction=0)
    for got, wanted in zip((var, mean), want, strict=True):
        torch.testing.assert_close(got[good].double(), wanted[good], rtol=2e-5, atol=1e-7)
        assert not got[[2, 5]].isfinite().any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_axes_of_no_elements(shape: tuple[int, int]) -> None:
    x = torch.empty(shape)
    want = torch.var_mean(x, 0, correction=0)
    for got, wanted in zip(moments(x, [0], count=2), want, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


# ------------------------------------------------------------------ the pass alone
I, J, ROWS, COLUMNS = (Symbol(name, DataType.Index, lo=0) for name in ("i", "j", "m", "n"))


def updates(cond: Scalar, *, extent: int = 4) -> list[Statement]:
    """Returns `for i < extent { for j < 2 { if (cond) { welford_add(r[j], 1); } } }`, unrolled."""
    value = ScalarValue(sc.const(1), DataType.Float)
    target = Element("r", J, DataType.Float)
    update = Accumulate(target, value, "welford", "WelfordOp<float>")
    inner = For(J, sc.const(2), Body([If(cond, Body([update]))]), unroll=True)
    return [For(I, sc.const(extent), Body([inner]), unroll=True)]


def batched(*nests: list[Statement]) -> list[Statement]:
    body = Body([s for nest in nests for s in nest])
    batch_welfords(body)
    return [s for s in walk(body) if isinstance(s, Accumulate | AccumulateBatch | Declare)]


def test_columns_share_the_count_of_the_first() -> None:
    held, mask, array, update = batched(updates(sc.lt(I, ROWS)))
    assert isinstance(held, Declare) and isinstance(mask, Declare) and isinstance(array, Declare)
    assert held.init == Element("r", sc.ZERO, DataType.Int, member="n")
    assert isinstance(update, AccumulateBatch) and update.mask == mask.name and array.size == 4


def test_columns_that_may_hold_different_numbers_of_values_count_for_themselves() -> None:
    """Single columns receive some values one by one; other values are still added in batches."""
    found = batched(updates(sc.lt(J, COLUMNS)), updates(sc.lt(I, ROWS)))
    assert isinstance(found[0], Accumulate) and isinstance(found[-1], AccumulateBatch)
    held = next(s for s in found if isinstance(s, Declare) and s.ctype == INDEX_CTYPE)
    assert held.init == Element("r", J, DataType.Int, member="n")


@pytest.mark.parametrize(("extent", "is_batch"), [(1, False), (2, True), (32, True), (33, False)])
def test_a_batch_is_as_large_as_a_mask(extent: int, is_batch: bool) -> None:
    found = batched(updates(sc.lt(I, ROWS), extent=extent))
    assert any(isinstance(s, AccumulateBatch) for s in found) == is_batch
