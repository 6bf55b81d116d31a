"""Outputs that nobody writes are refused; what a program takes and returns needs no op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import ZERO
from fuser.support.errors import VerifyError
from hostir import (
    Allocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    SetCurrentStream,
    Stream,
    Synchronize,
    parse,
    verify,
)


def _only_allocated(p: HostIrContainer) -> TensorView:
    x = p.input([-1, 8])
    y = p.tensor([x.size(0), 8])
    p.append(Allocate(y))
    return y


def _nothing_at_all(p: HostIrContainer) -> TensorView:
    x = p.input([-1, 8])
    return p.tensor([x.size(0), 8])


def _only_streams(p: HostIrContainer) -> TensorView:
    y, s = _only_allocated(p), Stream(name="S0")
    p.append(
        GetCurrentStream(s), SetCurrentStream(Stream(ZERO)), Synchronize(s), SetCurrentStream(s)
    )
    return y


def _something_else(p: HostIrContainer) -> TensorView:
    y = _only_allocated(p)
    x = p.values.inputs[0]
    assert isinstance(x, TensorView)
    p.append(ops.relu(x))
    return y


@pytest.mark.parametrize("make", [_only_allocated, _nothing_at_all, _only_streams, _something_else])
def test_an_output_that_nobody_writes_is_refused(
    make: Callable[[HostIrContainer], TensorView],
) -> None:
    hic = HostIrContainer()
    with hic:
        hic.add_output(make(hic))
    for program in (hic, parse(hic.full_text())):
        with pytest.raises(VerifyError, match=r"^No op writes the output T1_g_float"):
            verify(program)


def test_an_input_that_is_returned_needs_no_op() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1])
        hic.add_output(x)
    verify(hic)
    given = torch.ones(3)
    (got,) = HostIrEvaluator(hic).run([given])
    assert got.tolist() == [1.0] * 3
