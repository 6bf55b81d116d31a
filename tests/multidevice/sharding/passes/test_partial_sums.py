"""A cut of an axis that is summed makes partial sums, and is never taken for a cut of the
result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.multidevice import Communicator, MultiDeviceExecutor, simulate
from fuser.support.errors import ShardingError

pytestmark = pytest.mark.from_text

X = ParallelType.mesh_x
D = 2


def cut(tv: TensorView, axis: int) -> None:
    tv.outer_split(axis, D)
    tv.axis(axis).parallelize(X)


def total(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([-1, 8], contiguity=True)
    return [x], fd.ops.sum(fd.ops.exp(x), dim=0)


def full(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([-1], contiguity=True)
    return [x], fd.ops.sum(x, dim=0)


def linear(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x, w = fd.define_tensor([-1, 8], contiguity=True), fd.define_tensor([6, 8], contiguity=True)
    return [x, w], fd.ops.linear(x, w)


def maximum(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([4, -1], contiguity=True)
    return [x], fd.ops.max(x, [1])


def defined(
    build: Callable[[FusionDefinition], tuple[list[TensorView], TensorView]],
) -> tuple[FusionDefinition, list[TensorView], TensorView]:
    with FusionDefinition() as fd:
        inputs, out = build(fd)
        fd.add_output(out)
    for tv in (*inputs, out):
        tv.set_device_mesh(range(D))
    return fd, inputs, out


SUMS = {
    "rows": (total, [(4, 8)], 0, "sum", r"T2\.outer_split\(1, 2\) and T2\.axis\(1\)\.parallelize"),
    "all": (full, [(4,)], 0, "sum", "T1_l_float|T1_g_float has no other axis"),
    "linear": (linear, [(4, 8), (6, 8)], 2, "linear", r"T2\.outer_split\(0, 2\)"),
    "maximum": (maximum, [(4, 8)], 1, "", r"\.outer_split\(0, 2\)"),
}


@pytest.mark.finding("G13")
@pytest.mark.parametrize("name", SUMS)
def test_a_cut_of_a_summed_axis_of_whole_operands_is_refused(name: str) -> None:
    build, shapes, axis, op, advice = SUMS[name]

    def run() -> None:
        fd, _, out = defined(build)
        cut(out, axis)
        with pytest.raises(ShardingError, match=f"over which {op}.* sums.*(?:{advice})") as raised:
            fd.execute([torch.ones(shape) for shape in shapes])
        assert "test_partial_sums.py" in str(raised.value)

    with simulate(D) as world:
        world.run(run)


@pytest.mark.finding("G13")
def test_a_cut_of_a_summed_axis_of_whole_operands_is_refused_by_the_executor() -> None:
    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([D, 8], contiguity=True)
            y = fd.ops.sum(x, dim=0)
            fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(range(D))
        y.axis(0).parallelize(X)
        with pytest.raises(ShardingError, match=r"mesh_x cuts axis .* over which sum sums"):
            MultiDeviceExecutor(fd.fusion).run([torch.ones(D, 8)])

    with simulate(D) as world:
        world.run(run)


@pytest.mark.finding("G13")
@pytest.mark.parametrize(("axis", "is_warned"), [(0, True), (1, False)])
def test_users_are_warned_of_a_result_that_stays_whole(axis: int, is_warned: bool) -> None:
    whole = torch.randn(4, 8, dtype=torch.float64)

    def run() -> None:
        fd, (x,), y = defined(total)
        cut(x, 0)
        cut(y, axis)
        rank = Communicator.instance().rank()
        (got,) = fd.execute([whole.float().chunk(D)[rank]])
        want = whole.float().double().exp().sum(0)
        want = want if axis == 0 else want.chunk(D)[rank]
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)

    with warnings.catch_warnings(record=True) as seen, simulate(D) as world:
        warnings.simplefilter("always")
        world.run(run)
    texts = [str(w.message) for w in seen if "over which sum sums" in str(w.message)]
    assert len(texts) == is_warned
    assert all("The result is whole on each device" in text for text in texts)
    assert all(text.startswith("harmless if you meant the summed axis: ") for text in texts)


@pytest.mark.finding("G13")
def test_a_sum_in_parts_that_is_written_by_rfactor_is_not_warned_of() -> None:
    whole = torch.randn(4, 8, dtype=torch.float64)

    def run() -> None:
        fd, (x,), y = defined(total)
        cut(x, 0)
        cut(y, 0)
        y.rfactor([1])
        rank = Communicator.instance().rank()
        (got,) = fd.execute([whole.float().chunk(D)[rank]])
        torch.testing.assert_close(got.double(), whole.exp().sum(0), atol=1e-5, rtol=1e-5)

    with warnings.catch_warnings(), simulate(D) as world:
        warnings.simplefilter("error")
        world.run(run)
