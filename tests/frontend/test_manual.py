"""Fusions that the user schedules by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView


def bias_relu() -> tuple[FusionDefinition, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        b = fd.define_tensor([-1], contiguity=True)
        out = fd.ops.relu(fd.ops.add(x, b))
        fd.add_output(out)
        out.merge(0)
        out.split(0, 32)
        fd.sched.transform_like(out)
        out.axis(0).parallelize(ParallelType.grid_x)
        out.axis(1).parallelize(ParallelType.block_x)
        fd.sched.parallelize_like(out)
        fd.sched.inline_most()
    return fd, out


def test_a_schedule_by_hand_runs_as_given() -> None:
    fd, _ = bias_relu()
    for shape in ((4, 8), (7, 13), (1, 1)):
        x, b = torch.randn(shape), torch.randn(shape[1])
        (out,) = fd.manual_execute([x, b])
        torch.testing.assert_close(out, torch.relu(x + b))
    text = fd.ke.kernel_text()
    assert "threadIdx.x" in text and "blockIdx.x" in text and "__launch_bounds__(32)" in text


def test_execute_and_manual_execute_exclude_each_other() -> None:
    inputs = [torch.ones(2, 2), torch.ones(2)]
    fd, _ = bias_relu()
    fd.manual_execute(inputs)
    with pytest.raises(AssertionError, match="KernelExecutor already exists"):
        fd.execute(inputs)
    with FusionDefinition() as other:
        x = other.define_tensor([-1], contiguity=True)
        other.add_output(other.ops.neg(x))
    other.execute([torch.ones(2)])
    with pytest.raises(AssertionError, match="FusionExecutorCache already exists"):
        other.manual_execute([torch.ones(2)])


@pytest.mark.parametrize("inner", [True, False], ids=["inner", "outer"])
@pytest.mark.parametrize("n", [7, 10, 12, 130])
def test_an_rfactored_split_need_not_divide(n: int, inner: bool) -> None:
    """What the last part lacks is read by nobody."""
    with FusionDefinition() as fd:
        total = fd.ops.sum(fd.define_tensor([-1, -1], contiguity=True), dim=1)
        fd.add_output(total)
        total.split(1, 4, inner_split=inner)
        part = total.rfactor([1 if inner else 2])
        for tv in (total, part):
            tv.axis(0).parallelize(ParallelType.grid_x)
        part.axis(2 if inner else 1).parallelize(ParallelType.block_x)
        total.axis(1).parallelize(ParallelType.block_x)
        fd.sched.inline_most()
    x = torch.randn(3, n)
    (out,) = fd.manual_execute([x])
    torch.testing.assert_close(out.double(), x.double().sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 24, 30, 100])
def test_an_rfactored_sum_is_rfactored_again(n: int) -> None:
    with FusionDefinition() as fd:
        total = fd.ops.sum(fd.define_tensor([-1, -1], contiguity=True), dim=1)
        fd.add_output(total)
        total.split(1, 4)
        first = total.rfactor([1])
        first.split(1, 3)
        second = first.rfactor([1])
        for tv in (total, first, second):
            tv.axis(0).parallelize(ParallelType.grid_x)
        fd.sched.inline_most()
    x = torch.randn(3, n)
    (out,) = fd.manual_execute([x])
    torch.testing.assert_close(out.double(), x.double().sum(1), rtol=1e-5, atol=1e-5)


HANDS: dict[str, Callable[[TensorView], object]] = {
    "split": lambda tv: tv.split(0, 2),
    "merge": lambda tv: tv.split(0, 2).merge(0),
    "split of a reduction": lambda tv: tv.split(-1, 2),
    "threads": lambda tv: tv.split(0, 32).axis(1).parallelize(ParallelType.block_x),
    "an axis on threads": lambda tv: tv.axis(1).parallelize(ParallelType.block_x),
    "order": lambda tv: tv.reorder({0: 1}),
}


@pytest.mark.parametrize("hand", HANDS.values(), ids=HANDS)
@pytest.mark.parametrize("of_sum", [False, True], ids=["pointwise", "sum"])
def test_execute_schedules_by_itself(hand: Callable[[TensorView], object], of_sum: bool) -> None:
    """Loops by hand say nothing about values, and are `manual_execute`'s."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        out = fd.ops.sum(fd.ops.exp(x), dim=1) if of_sum else fd.ops.exp(x)
        fd.add_output(out)
        hand(out)
    before = str(out)
    for shape in ((3, 4), (40, 130)):
        given = torch.randn(shape)
        (found,) = fd.execute([given], _enable_options=["schedules_for(h200)"] if of_sum else [])
        wanted = given.double().exp()
        wanted = wanted.sum(1) if of_sum else wanted
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert str(out) == before  # the definition keeps what the user wrote
