"""Ops that are not elementwise, called in programs on a GPU, compared with torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.dtypes import to_torch
from tests.support.moved_inputs import passed
from tests.support.op_calls import CALLS, Drawn, assert_near, calls_of, expected_of
from tests.support.op_cases import widened

# Dtypes and shapes take turns: of so many calls one is made.
EACH = 6
HALF = (DataType.Half, DataType.BFloat16)


def run(drawn: Drawn, device: str) -> list[torch.Tensor]:
    fd = FusionDefinition()
    fd._fusion = drawn.fusion
    return fd.execute(passed(drawn.fusion, drawn.inputs, device), device=device)


def bounds_of(name: str, drawn: Drawn) -> tuple[torch.Tensor | None, ...]:
    """Returns the error bound of each result, if the call gives bounds."""
    off = CALLS[name].off
    if off is None or drawn.dtype not in HALF:
        return (None,) * len(drawn.fusion.outputs)
    # Twice what rounding to the nearest may be off: for sums, exponentials, and tiny weights.
    return off(*map(widened, drawn.inputs), torch.finfo(to_torch(drawn.dtype)).eps)


def check(name: str, drawn: Drawn, got: list[torch.Tensor]) -> None:
    what = f"{name} of {[tuple(x.shape) for x in drawn.inputs]}, {drawn.dtype}"
    expected = expected_of(name, drawn.inputs, is_wide=True)
    outputs = drawn.fusion.outputs
    bounds = bounds_of(name, drawn)
    for mine, want, tv, off in zip(got, expected, outputs, bounds, strict=True):
        assert mine.dtype is to_torch(tv.dtype()), what
        if off is None:
            assert_near(mine.cpu(), want, drawn.dtype or tv.dtype(), what)
        else:
            assert mine.shape == want.shape, what
            error = (mine.cpu().double() - want).abs()
            assert bool((error <= off).all()), (
                what,
                float(error.max()),
                float((error / off).max()),
            )


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.is_random])
def test_a_call_gives_what_torch_gives(name: str) -> None:
    start = sum(map(ord, name)) % EACH
    calls = [*calls_of(name)]
    for drawn in itertools.islice(calls, start if start < len(calls) else 0, None, EACH):
        if not drawn.fusion.outputs:
            continue  # the shape of a tensor without axes
        got = run(drawn, "cuda")
        assert all(out.is_cuda for out in got), name
        check(name, drawn, got)
