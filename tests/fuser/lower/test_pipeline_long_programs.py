"""Tests programs of many ops: their kernels are lowered without deep recursion, in linear size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.kernels import executor

Texts = Callable[..., list[str]]


class Stopped(Exception):
    """Raised when a run is about to compile, to stop it."""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Returns a function that runs a definition until it compiles, and returns the kernel texts."""
    made: list[str] = []

    def stop(sources: Iterable[Any], *_: Any, **__: Any) -> None:
        made.extend(source.text for source in sources)
        raise Stopped

    def run(fd: FusionDefinition, *inputs: torch.Tensor) -> list[str]:
        with pytest.raises(Stopped):
            fd.execute(inputs, _enable_options=["schedules_for(h200)"])
        return made

    monkeypatch.setattr(executor, "compile_kernels", stop)
    return run


def test_a_chain_longer_than_the_recursion_limit(texts: Texts) -> None:
    count = 3 * sys.getrecursionlimit()
    with FusionDefinition() as fd:
        x = value = fd.define_tensor([-1, -1], contiguity=True)
        for _ in range(count):
            value = fd.ops.add(value, x)
        fd.add_output(value)
    (text,) = texts(fd, torch.empty(8, 8))
    # The ops occur once for threads whose elements all exist, and once for others.
    assert text.count(" + ") >= count


@pytest.mark.parametrize("count", [20, 40])
def test_stacked_diamonds_grow_as_their_number(count: int, texts: Texts) -> None:
    """Each value is read twice. Lowering each of them twice would take 2**40 steps."""
    with FusionDefinition() as fd:
        value = fd.define_tensor([-1, -1], contiguity=True)
        for _ in range(count):
            value = fd.ops.add(fd.ops.tanh(value), fd.ops.sin(value))
        fd.add_output(value)
    (text,) = texts(fd, torch.empty(8, 8))
    assert text.count("tanh") == text.count("sin") == count


def test_more_values_than_one_reduction_may_hold(texts: Texts) -> None:
    """Sums of one tensor share kernels, each with a limited number of operands."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        for i in range(300):
            fd.add_output(fd.ops.sum(fd.ops.mul(x, i + 0.5), dim=1))
    assert len(texts(fd, torch.empty(8, 8))) == 2
