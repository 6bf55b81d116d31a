"""Fusions that the user schedules by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.support.errors import DefinitionError, UnsupportedError

pytestmark = pytest.mark.from_text


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
    """The last part of a split may be incomplete; its missing elements are never read."""
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
    """`execute` ignores the user's loops, which do not change values. `manual_execute` uses
    them."""
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


# ------------------------------------------------------------------ as nvFuser's users write them
@pytest.mark.finding("print_kernel symbolic block size")
@pytest.mark.parametrize("reduces", [False, True])
def test_axis_of_any_extent_gives_a_block_its_threads(reduces: bool) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.sum(x, 1) if reduces else fd.ops.add(x, 1.0)
        fd.add_output(y)
        y.axis(0).parallelize(ParallelType.grid_x)
        y.axis(1).parallelize(ParallelType.block_x)
    text = fd.fusion.print_kernel()
    assert "__launch_bounds__(1024)" in text and "threadIdx.x" in text
    for shape in ((5, 70), (3, 33), (2, 1000), (1, 1)):
        given = torch.randn(shape, dtype=torch.float64).float()
        (out,) = fd.manual_execute([given])
        expected = given.double().sum(1) if reduces else given.double() + 1
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(DefinitionError, match=r"2000 threads along x.* at most 1024"):
        fd.manual_execute([torch.randn(3, 2000)])


def _reshaped(shape: list[int]) -> tuple[FusionDefinition, list[TensorView]]:
    """Applies the transforms of a tensor below a reshape to those above it, and inlines them."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape, contiguity=True)
        y = fd.ops.add(x, 1.0)
        z = fd.ops.reshape(y, [8, 3, 4])
        w = fd.ops.mul(z, 2.0)
        fd.add_output(w)
        w.merge(1)
        w.split(1, 5)
        w.axis(0).parallelize(ParallelType.grid_x)
        w.axis(2).parallelize(ParallelType.block_x)
        fd.sched.transform_like(w)
        fd.sched.parallelize_like(w)
        fd.sched.inline_most()
    return fd, [y, z, w]


@pytest.mark.finding("transform_like through reshape")
def test_transforms_go_up_through_a_reshape() -> None:
    fd, tensors = _reshaped([8, 12])
    loops = [[(a.ptype, str(a.extent)) for a in tv.domain.loop] for tv in tensors]
    assert loops[0] == loops[1] == loops[2]
    assert loops[0][0][0] is ParallelType.grid_x and loops[0][2] == (ParallelType.block_x, "5")
    assert tensors[0].compute_at == 3
    x = torch.randn(8, 12)
    (out,) = fd.manual_execute([x])
    torch.testing.assert_close(out, ((x + 1) * 2).reshape(8, 3, 4))


@pytest.mark.finding("transform_like through reshape")
def test_transforms_go_up_through_several_reshapes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([24], contiguity=True)
        first = fd.ops.add(x, 1.0)
        middle = fd.ops.neg(fd.ops.reshape(first, [6, 4]))
        last = fd.ops.mul(fd.ops.reshape(middle, [3, 2, 4]), 2.0)
        fd.add_output(last)
        last.merge(0)
        last.merge(0)
        last.split(0, 8)
        fd.sched.transform_like(last)
        last.axis(0).parallelize(ParallelType.grid_x)
        last.axis(1).parallelize(ParallelType.block_x)
        fd.sched.parallelize_like(last)
        fd.sched.inline_most()
    for tv in (first, middle):
        found = [(a.ptype, str(a.extent)) for a in tv.domain.loop]
        assert found == [(ParallelType.grid_x, "3"), (ParallelType.block_x, "8")]
    x = torch.randn(24)
    (out,) = fd.manual_execute([x])
    torch.testing.assert_close(out, -(x + 1).reshape(3, 2, 4) * 2)


@pytest.mark.finding("transform_like through reshape")
def test_reshape_of_unknown_sizes_by_hand_is_refused_in_words() -> None:
    fd, _ = _reshaped([-1, -1])
    for run in (fd.fusion.print_kernel, lambda: fd.manual_execute([torch.randn(8, 12)])):
        with pytest.raises(
            UnsupportedError, match=r"depend on the sizes of .* in each call"
        ) as found:
            run()
        assert "test_manual_kernels.py" in str(found.value) and "constant sizes" in str(found.value)
