"""CPU scalars: tensors without axes on the host. A call reads the value that they have at its
start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multidevice
from fuser import DataType, FusionDefinition, ParallelType
from fuser.support.errors import FuserError
from multidevice import DeviceMesh
from tests.support.definition_copies import again

pytestmark = pytest.mark.from_text

MESH = DeviceMesh([0, 1])


def scaled(dtype: DataType = DataType.Float, *, is_sharded: bool = False) -> FusionDefinition:
    """Defines s * x and s + x, cast to the scalar's dtype. The CPU scalar s is the first input."""
    with FusionDefinition() as fd:
        s = fd.define_tensor([], dtype=dtype, is_cpu=True)
        x = fd.define_tensor([-1, 3], dtype=dtype)
        op = fd.ops.logical_or if dtype is DataType.Bool else fd.ops.mul
        fd.add_output(fd.ops.cast(op(x, s), dtype))
        fd.add_output(fd.ops.broadcast_in_dim(s, [2, 2], []))
        if is_sharded:
            x.set_device_mesh(MESH)
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


VALUES: dict[DataType, tuple[torch.dtype, list[Any]]] = {
    DataType.Float: (torch.float32, [0.1, -0.0, float("nan"), float("inf"), 3.0e-39]),
    DataType.Double: (torch.float64, [0.1, -0.0, 1e300, 5e-324]),
    DataType.Half: (torch.float16, [0.1, -65504.0, 6e-8]),
    DataType.BFloat16: (torch.bfloat16, [0.1, 3e38]),
    DataType.Int: (torch.int64, [2**62 + 1, -(2**63), 0]),
    DataType.Int32: (torch.int32, [2**31 - 1, -5]),
    DataType.Bool: (torch.bool, [True, False]),
}


@pytest.mark.parametrize("dtype", VALUES, ids=lambda d: d.name)
def test_every_value_of_every_dtype(dtype: DataType) -> None:
    own, values = VALUES[dtype]
    fd = scaled(dtype)
    x = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(own)
    for value in [*values, *values]:
        s = torch.tensor(value, dtype=own)
        product, filled = fd.execute([s, x])
        wanted = (x | s) if dtype is DataType.Bool else x * s
        torch.testing.assert_close(product, wanted, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(filled, s.expand(2, 2), equal_nan=True, rtol=0, atol=0)


def test_a_call_takes_the_value_of_its_time() -> None:
    """Repeated calls on the fast path read the current value, too. Earlier results do not
    change."""
    fd, s, x = scaled(), torch.tensor(1.0), torch.randn(4, 3)
    kept: list[tuple[float, torch.Tensor]] = []
    for k in range(40):
        s.fill_(float(k // 3))
        kept.append((float(s), fd.execute([s, x])[0]))
    for value, found in kept:
        assert torch.equal(found, x * value)


def test_on_ranks() -> None:
    whole = torch.randn(4, 3)

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        fd = scaled(is_sharded=True)
        mine = whole[2 * rank : 2 * rank + 2]
        for value in (2.0, 3.0, -1.0):
            product, filled = fd.execute([torch.tensor(value), mine])
            assert torch.equal(product, mine * value)
            assert filled.tolist() == [[value] * 2] * 2

    with multidevice.simulate(2) as world:
        world.run(body)


def test_the_text_of_a_definition_keeps_it() -> None:
    twin = again(scaled())
    x = torch.randn(2, 3)
    assert torch.equal(twin.execute([torch.tensor(2.0), x])[0], 2.0 * x)


def test_kernels_of_the_users_schedule() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 3]), fd.define_tensor([], dtype=DataType.Int, is_cpu=True)
        y = fd.ops.mul(fd.ops.add(x, s), s)
        fd.add_output(y)
        y.merge(0, 1)
        y.split(0, 4)
        y.axis(0).parallelize(ParallelType.grid_x)
        assert "__global__" in fd.fusion.print_kernel()
    x = torch.randn(4, 3)
    for value in (2, -3):
        assert torch.equal(fd.manual_execute([x, torch.tensor(value)])[0], (x + value) * value)


REFUSED: dict[str, tuple[list[object], str]] = {
    "a vector": ([torch.ones(1)], "Expected input 0, T0.* to be bound to a tensor of rank 0"),
    "another dtype": ([torch.tensor(1)], "tensor of dtype float, but got a tensor of dtype int64"),
    "a number": ([1.0], "to be an at::Tensor but got scalar 1.0"),
    "no contents": ([torch.tensor(1.0, device="meta")], "plain tensor, but it is on device meta"),
    "nothing": ([], "contains less argument"),
    "more": ([torch.tensor(1.0)] * 3, "Expected 2 inputs, got 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_cpu_scalar_is_refused(case: str) -> None:
    given, words = REFUSED[case]
    fd, x = scaled(), torch.randn(2, 3)
    assert torch.equal(fd.execute([torch.tensor(2.0), x])[0], 2.0 * x)
    with pytest.raises(FuserError, match=words):
        fd.execute([*given, x])


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.finding("CPU scalar in and out")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_scalar_that_is_an_output_is_the_callers_own(dtype: torch.dtype) -> None:
    with FusionDefinition() as fd:
        s = fd.define_tensor([], dtype=dtype, is_cpu=True)
        x = fd.define_tensor([-1, 3], contiguity=True)
        fd.add_output(s)
        fd.add_output(fd.ops.neg(x))
        fd.add_output(s)
    a, b = torch.tensor(1).to(dtype), torch.randn(2, 3)
    for one in (fd, again(fd)):
        for _ in range(3):
            first, negative, last = one.execute([a, b])
            assert first is a and last is a
            torch.testing.assert_close(negative, -b)


@pytest.mark.finding("CPU scalar in and out")
def test_a_cpu_scalar_alone_goes_through() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.define_tensor([], is_cpu=True))
    a = torch.tensor(2.5)
    assert fd.execute([a])[0] is a and a == 2.5


@pytest.mark.finding("CPU scalar in and out")
@pytest.mark.parametrize("shown", ["hidden", "shown", "the input"])
def test_a_cpu_scalar_is_updated_after_the_run(shown: str) -> None:
    with FusionDefinition() as fd:
        s = fd.define_tensor([], is_cpu=True)
        x = fd.define_tensor([-1], contiguity=True)
        total = fd.ops.add(s, fd.ops.sum(x))
        if shown == "the input":
            fd.add_output(s)
        fd.add_output(total, s)
        if shown == "shown":
            fd.add_output(total)
        fd.add_output(fd.ops.mul(x, s))
    count, x = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    for step in range(4):
        before = 1.0 + 3.0 * step
        outputs = fd.execute([count, x])
        # The program reads the value from the start of the call.
        torch.testing.assert_close(outputs[-1], x * before)
        assert count.item() == before + 3.0
        assert len(outputs) == 1 + (shown != "hidden")
        if shown == "shown":
            assert outputs[0].item() == before + 3.0 and outputs[0] is not count
        elif shown == "the input":
            assert outputs[0] is count


@pytest.mark.finding("CPU scalar in and out")
def test_cpu_scalars_go_in_and_out_on_ranks() -> None:
    with FusionDefinition() as fd:
        s = fd.define_tensor([], is_cpu=True)
        x = fd.define_tensor([-1, 3], contiguity=True)
        x.set_device_mesh(MESH)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(s)
        fd.add_output(fd.ops.mul(x, s))
        fd.add_output(fd.ops.add(s, 1.0), s)

    def run() -> tuple[float, torch.Tensor]:
        a = torch.tensor(2.0)
        given, doubled = fd.execute([a, torch.ones(1, 3)])
        assert given is a
        return a.item(), doubled

    with multidevice.simulate(2) as world:
        for value, doubled in world.run(run):
            assert value == 3.0
            torch.testing.assert_close(doubled, torch.full((1, 3), 2.0))


def test_only_a_scalar_lies_on_the_host() -> None:
    for given in (([3], True), ([-1], False)):
        with (
            FusionDefinition() as fd,
            pytest.raises(FuserError, match="CPU non-scalar tensor is not supported!"),
        ):
            fd.define_tensor(*given, is_cpu=True)
