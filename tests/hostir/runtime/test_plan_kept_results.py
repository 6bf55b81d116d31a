"""Tests that results which torch allocates replace buffers, which are then not allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ops.reference import attention_kernels
from hostir.runtime import cuda_graphs
from hostir.runtime.plan import BoundPlan, Plan
from hostir.runtime.torch_ops import writing
from tests.support.attention_reference import attend, define, draw
from tests.support.stand_in_graphs import CpuGraphs, stand_in

Tensor = torch.Tensor


def beside(t: Tensor) -> Tensor:
    """Stores heads next to each other, as torch's CPU kernel writes its output."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the addresses to which torch's CPU kernel writes its outputs."""
    places: list[int] = []
    kernel: Callable[..., Any] = attention_kernels.TorchAttention.cpu

    def note(*given: Any, **named: Any) -> Any:
        found = kernel(*given, **named)
        places.append(found[0].data_ptr())
        return found

    monkeypatch.setattr(attention_kernels.TorchAttention, "cpu", staticmethod(note))
    return places


def test_an_output_is_what_torch_made(written: list[int]) -> None:
    """Holds from the second run on; each run has its own output."""
    fd, held = define(backward=False), list[tuple[Tensor, Tensor]]()
    for seed in range(5):
        given = [beside(t) for t in draw([(2, 3, 5, 8)] * 3, seed=seed)]
        out = fd.execute(given)[0]
        assert not seed or out.data_ptr() == written[-1]
        held.append((out, attend([t.double() for t in given])[0]))
    assert len({out.data_ptr() for out, _ in held}) == len(held)
    for out, expected in held:
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.finding("G1")
@pytest.mark.parametrize("is_dense", [True, False])
def test_a_steady_call_of_attention_adds_few_python_functions_to_torch(*, is_dense: bool) -> None:
    """Counts functions: the step, its call, the kernel's call, keeping or copying the result."""
    with FusionDefinition() as fd:
        q, k, v = (fd.define_tensor([-1] * 4, contiguity=False) for _ in range(3))
        fd.add_output(fd.ops.sdpfa_fwd(q, k, v)[0])
    given = draw([(2, 3, 5, 8)] * 3)
    given = given if is_dense else [beside(t) for t in given]
    for _ in range(3):
        fd.execute(given)
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith((writing.__module__, f"{ops.__name__}.")):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        out = fd.execute(given)[0]
    finally:
        sys.setprofile(None)
    assert len(seen) <= 4, seen
    expected, _ = attend([t.double() for t in given])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_lies_otherwise_is_copied() -> None:
    fd, given = define(backward=False), draw([(2, 3, 5, 8)] * 3)
    expected, _ = attend([t.double() for t in given])
    for _ in range(4):
        out = fd.execute(given)[0]
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def _scaled() -> FusionDefinition:
    """Defines attention between two kernels."""
    with FusionDefinition() as fd:
        q, k, v = (fd.ops.neg(fd.define_tensor([-1] * 4, contiguity=False)) for _ in range(3))
        out = fd.ops.sdpfa_fwd(q, k, v)[0]
        fd.add_output(fd.ops.mul(out, 2.0))
        fd.add_output(fd.ops.sum(out, [3]))
    return fd


def _expected(given: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, _ = attend([-t.double() for t in given])
    return out * 2, out.sum(3)


def test_an_intermediate_has_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for all sizes, also for those that use the steps of the first one."""
    bound: dict[Plan, list[tuple[int, ...]]] = {}
    bind = Plan.bind

    def noting(plan: Plan, *given: Any) -> BoundPlan:
        bound[plan] = [block.shape for block in plan.blocks]
        return bind(plan, *given)

    monkeypatch.setattr(Plan, "bind", noting)
    fd = _scaled()
    for rows in (5, 5, 5, 7, 9, 7, 5):
        given = [beside(t) for t in draw([(2, 3, rows, 8)] * 3, seed=rows)]
        for got, want in zip(fd.execute(given), _expected(given), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # Three negatives, and no fourth of that shape.
    for rows in (5, 7, 9):
        shape = 2, 3, rows, 8
        assert {shapes.count(shape) for shapes in bound.values() if shape in shapes} == {3}


def test_a_graph_writes_into_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a graph replays a run, its outputs are allocated before it."""
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    made: list[CpuGraphs] = stand_in(monkeypatch)
    fd, given = define(backward=False), [beside(t) for t in draw([(2, 3, 5, 8)] * 3)]
    expected, _ = attend([t.double() for t in given])
    held: list[Tensor] = []
    for _ in range(30):
        out = fd.execute(given)[0]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        held = [*held[-2:], out]
        assert out.data_ptr() not in [other.data_ptr() for other in held[:-1]]
    assert made and any(line.startswith("captured: ") for line in fd.cuda_graphs())
