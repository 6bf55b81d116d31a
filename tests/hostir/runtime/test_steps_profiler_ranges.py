"""Tests that torch.profiler has a range per op of a run, with its name and the user's line."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuser import FusionDefinition
from hostir.runtime import cuda_graphs
from hostir.runtime.steps import _at  # pyright: ignore[reportPrivateUsage]
from tests.support.repeated_calls import runs, steady
from tests.support.stand_in_graphs import stand_in

pytestmark = pytest.mark.finding("G27")
FILE = __file__


def layered() -> tuple[FusionDefinition, list[int]]:
    """Defines relu, a matmul and a softmax; returns the lines of the ops."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.relu(x)
        y = fd.ops.matmul(y, x)
        y = fd.ops.softmax(y, -1)
        fd.add_output(y)
    lines = [int(op.where.rpartition(":")[2]) for op in fd.fusion.exprs]
    return fd, list(dict.fromkeys(lines))


def ranges(fd: FusionDefinition, inputs: list[torch.Tensor]) -> list[str]:
    """Returns the ranges of one call, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        fd.execute(inputs)
    events = sorted(prof.events() or (), key=lambda e: e.time_range.start)
    return [e.name for e in events if FILE in e.name]


def expected(lines: list[int]) -> list[str]:
    relu, product, softmax = (f"{FILE}:{n}" for n in lines)
    return [
        f"kernel relu at {relu}",
        f"matmul at {product}",
        f"kernel max, sub, exp, sum, div at {softmax}",
    ]


def test_one_kernel_is_one_range_in_its_first_run_and_later() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
    (op,) = fd.fusion.exprs
    for _ in range(3):
        assert ranges(fd, [torch.ones(4)]) == [f"kernel neg at {op.where}"]


def test_each_op_is_a_range_in_the_first_run_in_later_ones_and_after_the_compiled_runner() -> None:
    fd, lines = layered()
    inputs = [torch.randn(8, 8)]
    for _ in range(3):
        assert ranges(fd, inputs) == expected(lines)
    steady(fd, inputs)
    before = runs(fd)
    assert ranges(fd, inputs) == expected(lines) and runs(fd) == before
    fd.execute(inputs)
    assert runs(fd) == before + 1, "the runner goes on where no profiler runs"


def test_a_walk_op_by_op_has_the_same_ranges() -> None:
    """If streams hold work back, the program is walked in each run."""
    fd, lines = layered()
    inputs = [torch.randn(8, 8)]
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        fd.execute(inputs, _enable_options=["late_stream(all)"])
    names = [e.name for e in prof.events() or () if e.name.startswith(("kernel ", "matmul at"))]
    assert names == expected(lines)


def test_a_graph_is_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    stand_in(monkeypatch)
    fd, lines = layered()
    inputs = [torch.randn(8, 8)]
    for _ in range(40):
        fd.execute(inputs)
    assert fd.cuda_graphs()[0].startswith("captured: ")
    (name,) = ranges(fd, inputs)
    first, second, third = lines
    assert name == f"CUDA graph of 3 steps at {FILE}:{first}, :{second}, :{third}"


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("hostir.runtime.steps.range_named", refuse)
    fd, _ = layered()
    for _ in range(20):
        fd.execute([torch.randn(8, 8)])


def test_an_error_within_a_range_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, lines = layered()
    inputs = [torch.randn(8, 8)]
    for _ in range(3):
        fd.execute(inputs)
    (call,) = fd.fec._by_signature.values()
    (plan,) = call.known.plans.values()
    (bound,) = plan.arenas.bound(plan)

    def fail(slots: object) -> None:
        raise RuntimeError("a broken library")

    object.__setattr__(bound, "closures", (bound.closures[0], fail, bound.closures[2]))
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(Exception, match=rf"matmul failed .*:{lines[1]}\)"),
    ):
        fd.execute(inputs)


def test_lines_of_one_file_are_told_by_their_numbers() -> None:
    assert _at(["a.py:3", "a.py:3", "a.py:5", "", "b.py:1"]) == " at a.py:3, :5, b.py:1"
    assert _at([""]) == ""
