"""Calls of the ops that are not elementwise, as programs on a GPU, beside torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import FusionDefinition
from fuser.ir.dtypes import to_torch
from tests.ops.op_calls import CALLS, calls_of, expected_of
from tests.ops.op_cases import TOLERANCE

# Dtypes and shapes take turns: of so many calls one is made.
EACH = 6


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.is_random])
def test_a_call_gives_what_torch_gives(name: str) -> None:
    start = sum(map(ord, name)) % EACH
    calls = [*calls_of(name)]
    for drawn in itertools.islice(calls, start if start < len(calls) else 0, None, EACH):
        if not drawn.fusion.outputs:
            continue  # the shape of a tensor without axes
        fd = FusionDefinition()
        fd._fusion = drawn.fusion
        inputs = [x.cuda() for x in drawn.inputs]
        got = fd.execute(inputs, device="cuda")
        what = f"{name} of {[tuple(x.shape) for x in inputs]}, {drawn.dtype}"
        expected = expected_of(name, drawn.inputs, is_wide=True)
        for mine, want, tv in zip(got, expected, drawn.fusion.outputs, strict=True):
            want = want if isinstance(want, torch.Tensor) else torch.tensor(want)
            assert mine.is_cuda and mine.shape == want.shape, what
            assert mine.dtype is to_torch(tv.dtype()), what
            rtol, atol = TOLERANCE.get(drawn.dtype or tv.dtype(), (0, 0))
            torch.testing.assert_close(
                mine.cpu().double(),
                want.double(),
                rtol=4 * rtol,
                atol=4 * atol,
                equal_nan=True,
                msg=what,
            )
