"""The warning about definitions that are compiled repeatedly with other numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fuser import FusionDefinition

X = torch.arange(6.0).reshape(2, 3)


def step(rate: Any, *, decay: float = 0.5) -> list[torch.Tensor]:
    with FusionDefinition() as fd:
        w = fd.define_tensor([-1, 3], contiguity=True)
        given = fd.define_scalar() if rate is None else rate
        fd.add_output(fd.ops.sub(w, fd.ops.mul(fd.ops.mul(w, given), decay)))
    return fd.execute([X, *([0.125] if rate is None else [])])


def told(*rates: float | None, decay: float = 0.5) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rate in rates:
            (out,) = step(rate, decay=decay)
            torch.testing.assert_close(out, X - X * (0.125 if rate is None else rate) * decay)
    return [str(w.message) for w in found if "programs were compiled" in str(w.message)]


@pytest.mark.finding("G28")
def test_numbers_that_change_from_call_to_call_are_told_once_with_op_line_and_remedy() -> None:
    assert told(0.1, 0.2, 0.3, decay=0.75) == []
    assert told(0.1, 0.2, decay=0.75) == []  # known programs
    (text,) = told(0.4, 0.5, 0.6, decay=0.75)
    assert "4 programs were compiled that differ in numbers alone" in text
    assert "mul at " in text and "test_executor_cache_constants.py:" in text
    assert "has 0.1, 0.2, 0.3, 0.4." in text and "0.75" not in text
    assert "fd.define_scalar()" in text
    assert told(0.7, decay=0.75) == []


@pytest.mark.finding("G28")
def test_a_scalar_input_and_other_programs_are_not_told() -> None:
    assert told(*[None] * 6) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 6):
            with FusionDefinition() as fd:
                x = fd.define_tensor([-1, 3], contiguity=True)
                for _ in range(n):
                    x = fd.ops.mul(x, 0.3 + n)
                fd.add_output(x)
            fd.execute([X])
