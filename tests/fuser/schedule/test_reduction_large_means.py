"""Tests variances of values with a mean much larger than their deviations, in all forms
of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ops.reference.meaning import evaluate_fusion

# The deviations around the mean are about 1. Torch in float32 is right within 1e-7.
ALLOWED = 1e-6
# Shape, reduced axes, mean. Inner, outer and several axes, short and long rows, and rows that are
# not aligned to vectors; in blocks, in clusters and over several blocks.
CASES = [
    ((200_000, 3), [0], 1e6),
    ((64, 4096), [1], -1e6),
    ((8, 50257), [1], 1e6),
    ((2, 140_001), [1], 1e6),
    ((300_000,), [0], 1e6),
    ((40, 2000), [0], 1e6),
    ((50, 7), [1], 1e6),
    ((7, 64, 33), [0], 1e6),
    ((12, 256), [0], 1e6),
]


def _var_mean(fd: FusionDefinition, x: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    return fd.ops.var_mean(x, list(dims), 0)


def _var(fd: FusionDefinition, x: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    return (fd.ops.var(x, list(dims), 0),)


def _welford(fd: FusionDefinition, x: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    mean, squares, count = fd.ops.welford(x, list(dims))
    return fd.ops.div(squares, count), mean


def _norm(fd: FusionDefinition, x: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    """Defines an op that depends on the variance, so that a persistent kernel is used if
    rows fit."""
    var, mean = fd.ops.var_mean(x, list(dims), 0, True)
    fd.add_output(fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(var)))
    flat = [fd.ops.squeeze(v, list(dims)) for v in (var, mean)]
    return tuple(flat)


FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "var_mean": _var_mean,
    "var": _var,
    "welford": _welford,
    "norm": _norm,
}


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().flatten(), expected.flatten()
    return float(((found - expected) / expected).abs().max())


def _data(shape: Sequence[int], mean: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def _run(
    form: str, x: torch.Tensor, dims: Sequence[int], schedules: Sequence[str], *, fixed: bool
) -> list[torch.Tensor]:
    with FusionDefinition() as fd:
        shape = list(x.shape) if fixed else [-1] * x.ndim
        wide = given = fd.define_tensor(shape, contiguity=True, dtype=_DTYPES[x.dtype])
        if x.dtype in (torch.float16, torch.bfloat16):
            wide = fd.ops.cast(given, DataType.Float)
        for out in FORMS[form](fd, wide, dims):
            fd.add_output(out)
    # The first output of a norm is the normalised tensor.
    return fd.execute([x], _enable_options=schedules)[form == "norm" :]


_DTYPES = {
    torch.float64: DataType.Double,
    torch.float32: DataType.Float,
    torch.float16: DataType.Half,
    torch.bfloat16: DataType.BFloat16,
}


@pytest.mark.finding("G9")
@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)], ids=["loops", "threads"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "dims", "mean"), CASES)
def test_variance_with_a_large_mean_is_as_right_as_torchs(
    form: str, shape: Sequence[int], dims: list[int], mean: float, schedules: Sequence[str]
) -> None:
    x = _data(shape, mean, torch.float32)
    var, *means = _run(form, x, dims, schedules, fixed=len(shape) == 2)
    assert _worst(var, x.double().var(dims, correction=0)) < ALLOWED
    for found in means:
        assert _worst(found, x.double().mean(dims)) < ALLOWED


@pytest.mark.finding("G9")
@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)], ids=["loops", "threads"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.float16, 3e4), (torch.bfloat16, 1e4), (torch.float64, 1e12)]
)
@pytest.mark.parametrize("dims", [[0], [1]])
def test_variance_with_a_large_mean_in_other_dtypes_is_right(
    form: str, dtype: torch.dtype, mean: float, dims: list[int], schedules: Sequence[str]
) -> None:
    x = mean + 64 * torch.randn(70, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    var, *_ = _run(form, x, dims, schedules, fixed=False)
    exact = (x.double() - mean).var(dims, correction=0)
    # `var` adds 70 squares in Float, one after another.
    assert _worst(var, exact) < (2 * ALLOWED if form == "var" else ALLOWED)


@pytest.mark.finding("G9")
@pytest.mark.parametrize("form", FORMS)
def test_variance_of_halves_whose_sum_is_no_half_is_right(form: str) -> None:
    x = ((torch.arange(140).view(2, 70) % 3) + 1000).to(torch.float16)
    var, *_ = _run(form, x, [1], (), fixed=False)
    assert _worst(var, x.double().var(1, correction=0)) < 2e-7


@pytest.mark.finding("G9")
@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)], ids=["loops", "threads"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [[0], [1]])
def test_variance_beside_a_first_value_far_away_is_right(
    form: str, dims: list[int], schedules: Sequence[str]
) -> None:
    """The row begins with padding, so its first value is far from the others."""
    x = _data((40, 3000), 1e4, torch.float32)
    x[0, :] = x[:, 0] = 0.0
    var, *_ = _run(form, x, dims, schedules, fixed=False)
    expected = x.double().var(dims, correction=0)
    found = var.flatten().double()
    assert float(((found - expected).abs() / expected.clamp_min(1e-30))[1:].max()) < 10 * ALLOWED
    assert found[0] == 0


@pytest.mark.finding("G9")
@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)], ids=["loops", "threads"])
@pytest.mark.parametrize("form", FORMS)
def test_variance_of_equal_values_is_near_zero_and_never_negative(
    form: str, schedules: Sequence[str]
) -> None:
    x = torch.full((6, 1000), 1e6 + 1 / 3)
    var, *_ = _run(form, x, [1], schedules, fixed=False)
    assert (var >= 0).all()
    assert var.max() < 1e-3


@pytest.mark.finding("G9")
@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)], ids=["loops", "threads"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_variance_of_values_that_are_no_numbers_is_nan(
    value: float, schedules: Sequence[str]
) -> None:
    x = torch.randn(6, 1000)
    x[2, 0] = x[3, 7] = value
    var, _ = _run("var_mean", x, [1], schedules, fixed=False)
    expected = x.var(1, correction=0)
    torch.testing.assert_close(var.flatten(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.finding("G9")
@pytest.mark.parametrize("form", ["var_mean", "var", "welford"])
@pytest.mark.parametrize(("shape", "dims", "mean"), [((3, 4096), [1], 1e6), ((5000, 3), [0], -1e5)])
def test_torch_meaning_of_a_variance_with_a_large_mean_is_right(
    form: str, shape: Sequence[int], dims: list[int], mean: float
) -> None:
    """Tests the torch reference in the dtype of the tensors, which is used to validate results."""
    x = _data(shape, mean, torch.float32)
    with FusionDefinition() as fd:
        for out in FORMS[form](fd, fd.from_pytorch(x), dims):
            fd.add_output(out)
    var, *_ = evaluate_fusion(fd.fusion, [x])
    assert _worst(var, x.double().var(dims, correction=0)) < ALLOWED
