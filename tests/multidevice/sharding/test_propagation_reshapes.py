"""Reshapes that cannot keep the cuts of their operand gather it, as other ops do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor, simulate

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


@dataclass(frozen=True)
class Case:
    """A reshape on a mesh, its cuts, and the collectives that the program must have.

    Cuts are {axis: device types}, the outermost first. Symbolic extents must give the same
    collectives.
    """

    shape: tuple[int, ...]
    new: tuple[int, ...]
    mesh: tuple[int, ...]
    cuts: dict[int, Sequence[ParallelType]]
    result: dict[int, Sequence[ParallelType]] | None = None
    sent: tuple[str, ...] = ("Allgather",)
    kept: dict[ParallelType, int] | None = None


CASES = {
    "an inner axis is merged": Case((3, 4, 5), (12, 5), (2,), {1: [X]}),
    "the innermost of three": Case((3, 2, 4), (24,), (2,), {2: [X]}),
    "the outer axis is merged": Case((4, 3, 5), (12, 5), (2,), {0: [X]}, sent=(), kept={X: 0}),
    "a unit is outside": Case((1, 4, 5), (4, 5), (2,), {1: [X]}, sent=(), kept={X: 0}),
    "a split has too few outside": Case((6, 5), (3, 2, 5), (2,), {0: [X]}),
    "a split has enough outside": Case((8, 5), (4, 2, 5), (2,), {0: [X]}, sent=(), kept={X: 0}),
    "merged and split again": Case((3, 4), (6, 2), (2,), {1: [X]}),
    "of two dimensions one is kept": Case((2, 4, 5), (8, 5), (2, 2), {0: [Y], 1: [X]}, kept={Y: 0}),
    "both on the inner axis": Case(
        (3, 4, 5), (12, 5), (2, 2), {1: [Y, X]}, sent=("Allgather",) * 2
    ),
    "the outer of two cuts is kept": Case((8, 5), (2, 4, 5), (2, 2), {0: [Y, X]}, kept={Y: 0}),
    "the user cuts both sides": Case(
        (2, 4, 5), (8, 5), (2,), {1: [X]}, {0: [X]}, sent=("AllToAll",)
    ),
    "the result alone is cut": Case((2, 4, 5), (8, 5), (2,), {}, {0: [X]}, sent=()),
    "the result is cut otherwise": Case((3, 4, 5), (12, 5), (2,), {}, {0: [X]}, sent=()),
    "an inner piece of the result is cut": Case((12, 5), (3, 4, 5), (2,), {}, {1: [X]}, sent=()),
    "an inner piece, from a cut": Case((12, 5), (3, 4, 5), (2,), {0: [X]}, {1: [X]}),
    "cuts change sides": Case(
        (4, 4, 5), (16, 5), (2, 2), {0: [X], 1: [Y]}, {0: [Y]}, ("Allgather", "AllToAll")
    ),
}


def cut(tv: TensorView, mesh: DeviceMesh, cuts: dict[int, Sequence[ParallelType]]) -> None:
    tv.set_device_mesh(mesh)
    for axis in sorted(cuts, reverse=True):
        for k, ptype in enumerate(cuts[axis]):
            tv.outer_split(axis + k, mesh.size_of(ptype))
            tv.axis(axis + k).parallelize(ptype)


def run(case: Case, *, is_symbolic: bool) -> None:
    mesh = DeviceMesh(torch.arange(4)[: 2 ** len(case.mesh)].reshape(case.mesh))
    whole = torch.arange(1.0, 1.0 + math.prod(case.shape)).reshape(case.shape)
    with FusionDefinition() as fd:
        sizes = [-1 if is_symbolic and n > 1 else n for n in case.shape]
        x = fd.define_tensor(sizes, contiguity=True)
        numbers = [*case.new] if is_symbolic else []
        new = [fd.define_scalar(dtype=DataType.Int) for _ in numbers] or [*case.new]
        y = fd.ops.reshape(fd.ops.neg(x), new)
        out = fd.ops.sqrt(fd.ops.neg(y))
        fd.add_output(out)
        if case.result is not None:
            cut(y, mesh, case.result)
        cut(x, mesh, case.cuts)
    if not mesh.has(Communicator.instance().rank()):
        return
    (got,) = fd.execute([shard_tensor(whole, x), *numbers])
    (sharding,) = fd.fec.get_output_shardings()
    expected = whole.double().sqrt().reshape(case.new)
    for ptype, axis in sharding.axes.items():
        at = mesh.coordinate(Communicator.instance().rank(), ptype)
        expected = expected.chunk(mesh.size_of(ptype), axis)[at]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    kept = case.kept or {}
    if case.result is not None:
        kept = {ptype: axis for axis, types in case.result.items() for ptype in types}
    assert sharding.axes == kept
    program = fd.fec.host_program()
    assert tuple(c.type for c in program.communications()) == case.sent


@pytest.mark.finding("G15")
@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_reshape_gathers_what_it_does_not_keep(name: str, is_symbolic: bool) -> None:
    with simulate(2 ** len(CASES[name].mesh)) as world:
        world.run(run, CASES[name], is_symbolic=is_symbolic)


@pytest.mark.mpi(min_size=2)
@pytest.mark.finding("G15")
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case.mesh) == 1])
def test_a_reshape_gathers_under_mpirun(name: str, comm: Communicator) -> None:
    run(CASES[name], is_symbolic=False)


@pytest.mark.mpi(min_size=4)
@pytest.mark.finding("G15")
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case.mesh) == 2])
def test_a_reshape_gathers_on_a_square_under_mpirun(name: str, comm: Communicator) -> None:
    run(CASES[name], is_symbolic=False)


# ------------------------------------------------------------------ sizes that are quotients
def split_into_heads(heads: str, devices: int) -> None:
    """Features cut over devices are reshaped to heads of 4 and back, for several sizes."""
    mesh = DeviceMesh(range(devices))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        scale = fd.define_tensor([-1], contiguity=True)
        size = scale.size(0) if heads == "of a symbolic size" else 4
        shape = [x.size(0), -1 if heads == "inferred" else x.shape[-1] // size, size]
        y = fd.ops.mul(fd.ops.reshape(fd.ops.neg(x), shape), scale)
        out = fd.ops.reshape(y, [x.size(0), x.size(1)])
        fd.add_output(out)
        for tv in (x, scale):
            tv.set_device_mesh(mesh)
        cut(x, mesh, {1: [X]})
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for count in (devices, 2 * devices, 6, 5 * devices):
        whole = torch.arange(3.0 * 4 * count).reshape(3, 4 * count)
        (got,) = fd.execute([shard_tensor(whole, x), factors])
        expected = (whole.double().neg().reshape(3, count, 4) * factors.double()).flatten(1)
        torch.testing.assert_close(got.double(), shard_tensor(expected, x))
        assert not fd.fec.host_program().communications()


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("heads", ["of a number", "inferred", "of a symbolic size"])
def test_heads_are_local_where_the_devices_divide_their_number(heads: str, devices: int) -> None:
    with simulate(devices) as world:
        world.run(split_into_heads, heads, devices)


def gather_heads() -> None:
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.neg(fd.ops.reshape(fd.ops.neg(x), [x.size(0), x.shape[-1] // 4, 4]))
        fd.add_output(y)
        cut(x, mesh, {1: [X]})
    for count, sent in ((4, ()), (3, ("Allgather",)), (2, ())):
        whole = torch.arange(3.0 * 4 * count).reshape(3, 4 * count)
        (got,) = fd.execute([shard_tensor(whole, x)])
        at = Communicator.instance().rank()
        expected = whole.double().reshape(3, count, 4)
        expected = expected if sent else expected.chunk(2, 1)[at]
        torch.testing.assert_close(got.double(), expected)
        assert tuple(c.type for c in fd.fec.host_program().communications()) == sent


def test_heads_that_the_devices_do_not_divide_are_gathered() -> None:
    with simulate(2) as world:
        world.run(gather_heads)
