"""Tests the signs of zeros, and NaN, of ops that return one of their operands, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import FusionDefinition
from fuser.ops.reference.meaning import evaluate_fusion

pytestmark = pytest.mark.from_text

SPECIAL = (-0.0, 0.0, math.nan, -1.0, 2.0, 7.0, -math.inf, math.inf)
BOUNDS = ((0.0, 1.0), (-0.0, 1.0), (-1.0, 0.0), (-1.0, -0.0), (0.0, 6.0), (2.0, 1.0))
Ours = Callable[..., Any]
Torch = Callable[..., torch.Tensor]

UNARY: dict[str, tuple[Ours, Torch]] = {
    "relu": (lambda fd, x: fd.ops.relu(x), torch.relu),
    "leaky_relu": (
        lambda fd, x: fd.ops.where(fd.ops.gt(x, 0.0), x, fd.ops.mul(x, 0.25)),
        lambda x: F.leaky_relu(x, 0.25),
    ),
    "relu6": (lambda fd, x: fd.ops.clamp(x, 0.0, 6.0), F.relu6),
    "threshold": (lambda fd, x: fd.ops.threshold(x, 0.0, 0.0), lambda x: F.threshold(x, 0.0, 0.0)),
    **{
        f"clamp {low} {high}": (
            lambda fd, x, low=low, high=high: fd.ops.clamp(x, low, high),
            lambda x, low=low, high=high: torch.clamp(x, low, high),
        )
        for low, high in BOUNDS
    },
    **{
        name: (lambda fd, x, name=name: getattr(fd.ops, name)(x), getattr(torch, name))
        for name in ("abs", "neg", "ceil", "floor", "round", "trunc", "frac")
    },
}
BINARY = ("maximum", "minimum", "mul", "add", "sub", "fmod", "remainder")


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Returns whether two tensors are equal, including the signs of zeros; NaN has no sign."""
    both = ours.isnan() & theirs.isnan()
    return bool((both | ((ours == theirs) & (ours.signbit() == theirs.signbit()))).all())


def check(ours: Ours, theirs: Torch, inputs: Sequence[torch.Tensor]) -> None:
    with FusionDefinition() as fd:
        fd.add_output(ours(fd, *(fd.from_pytorch(x) for x in inputs)))
    expected = theirs(*inputs)
    for options in ([], ["checked"], ["schedules_for(h200)"]):
        (out,) = fd.execute(list(inputs), _enable_options=options)
        assert same(out, expected), (options, out, expected)
    assert same(evaluate_fusion(fd.fusion, inputs)[0], expected)


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)


@pytest.mark.finding("G12")
@DTYPES
@pytest.mark.parametrize("name", UNARY)
def test_unary_ops_on_zeros_and_nan_equal_torch(name: str, dtype: torch.dtype) -> None:
    # Longer than a vector, with a remainder, because loops are vectorised.
    x = torch.tensor(SPECIAL * 9 + SPECIAL[:5], dtype=dtype)
    check(*UNARY[name], [x])


@pytest.mark.finding("G12")
@DTYPES
@pytest.mark.parametrize("name", BINARY)
def test_binary_ops_on_zeros_and_nan_equal_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=dtype)
    a, b = x.repeat_interleave(len(x)), x.repeat(len(x))
    check(lambda fd, a, b: getattr(fd.ops, name)(a, b), getattr(torch, name), [a, b])


@pytest.mark.finding("G12")
def test_clamp_with_a_bound_that_is_nan_equals_torch() -> None:
    for low, high in ((math.nan, 1.0), (0.0, math.nan)):
        x = torch.tensor(SPECIAL)
        check(
            lambda fd, x, low=low, high=high: fd.ops.clamp(x, low, high),
            lambda x, low=low, high=high: torch.clamp(x, torch.tensor(low), torch.tensor(high)),
            [x],
        )
