"""Meshes, and mesh dimensions, of one device behave like those of several."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor, simulate

pytestmark = pytest.mark.from_text

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
SHAPES = ((1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    count = int(torch.tensor(shape).prod())
    return DeviceMesh(torch.arange(count).reshape(shape))


def cut(tv: TensorView, mesh: DeviceMesh, axis: int, order: tuple[int, ...] = ()) -> None:
    """Cuts an axis by all dimensions of the mesh and lists the parts in the allocation domain.

    `order` has the logical axes in their order in memory, outermost first.
    """
    places = {k: [tv.axis(k)] for k in range(tv.ndim)}
    tv.set_device_mesh(mesh)
    parts = []
    for k, ptype in enumerate((Y, X)[-mesh.ndim :]):
        tv.outer_split(axis + k, mesh.size_of(ptype))
        tv.axis(axis + k).parallelize(ptype)
        parts.append(tv.axis(axis + k))
    places[axis] = [*parts, tv.axis(axis + mesh.ndim)]
    tv.set_allocation_domain([a for k in order for a in places[k]], True)


@pytest.mark.finding("G35")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_allocation_domain_names_the_parts_of_a_unit_axis(
    shape: tuple[int, ...], order: tuple[int, int]
) -> None:
    mesh = mesh_of(shape)
    a, b = torch.randn(4, 8), torch.randn(12, 8)

    def run() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 8], contiguity=True)
            w = fd.define_tensor([12, 8], contiguity=True)
            y = fd.ops.relu(fd.ops.linear(x, w))
            fd.add_output(y)
        x.set_device_mesh(mesh)
        cut(w, mesh, 0, (0, 1))
        cut(y, mesh, 1, order)
        (got,) = fd.execute([shard_tensor(a, x), shard_tensor(b, w)])
        whole = torch.relu(a.double() @ b.double().T)
        torch.testing.assert_close(got.double(), shard_tensor(whole, y), atol=1e-5, rtol=1e-5)
        outer, inner = (got.stride(k) for k in order)
        assert (outer, inner) == (got.shape[order[1]], 1)
        (sharding,) = fd.fec.get_output_shardings()
        assert sharding.axes == dict.fromkeys((X, Y)[: mesh.ndim], 1)

    with simulate(mesh.size) as world:
        world.run(run)


@pytest.mark.finding("G35")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_a_whole_axis_of_devices_in_the_allocation_domain(
    shape: tuple[int, ...], is_symbolic: bool
) -> None:
    mesh = mesh_of(shape)
    whole = torch.randn(mesh.size_of(X), 3, 4)

    def run() -> None:
        with FusionDefinition() as fd:
            sizes = [-1, -1, -1] if is_symbolic else whole.shape
            x = fd.define_tensor(sizes, contiguity=True)
            y = fd.ops.exp(x)
            total = fd.ops.sum(y, dim=0)
            fd.add_output(y)
            fd.add_output(total)
        x.set_device_mesh(mesh)
        x.axis(0).parallelize(X)
        x.set_allocation_domain([x.axis(0), x.axis(1), x.axis(2)], True)
        got, summed = fd.execute([shard_tensor(whole, x)])
        rank = Communicator.instance().rank()
        expected = whole.double().exp()
        mine = expected[mesh.coordinate(rank, X)][None]
        torch.testing.assert_close(got.double(), mine, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(summed.double(), expected.sum(0), atol=1e-5, rtol=1e-5)

    with simulate(mesh.size) as world:
        world.run(run)
