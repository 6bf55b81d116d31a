"""DeviceMesh: its shape, text and teams, and the shard of each rank by its mesh coordinates."""

from __future__ import annotations

import math

import pytest
import torch

from fuser.ir.types import ParallelType
from fuser.support.errors import ShardingError
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.job.shard_tensor import shard_along

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z


def test_text_shape_and_size() -> None:
    assert str(DeviceMesh(range(3))) == "DeviceMesh{0 1 2}"
    mesh = DeviceMesh(torch.tensor([[0, 1], [2, 3]]))
    assert str(mesh) == "DeviceMesh{{0 1}{2 3}}"
    assert (mesh.shape, mesh.size) == ((2, 2), 4)


@pytest.mark.parametrize("bad", [[0, 1, 0], [-1], [[[[0]]]], [[0, 1], [2]]])
def test_impossible_meshes(bad: object) -> None:
    with pytest.raises(ShardingError):
        DeviceMesh(bad)


def test_teams_sweep_one_dimension() -> None:
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
    assert mesh.team(4, (X,)) == (3, 4, 5)
    assert mesh.team(4, (Y,)) == (1, 4)
    assert mesh.team(4, (X, Y)) == (0, 1, 2, 3, 4, 5)
    assert (mesh.size_of(X), mesh.size_of(Y), mesh.size_of(Z)) == (3, 2, 1)
    assert (mesh.coordinate(5, X), mesh.coordinate(5, Y), mesh.coordinate(9, X)) == (2, 1, 0)


def test_shard_along_takes_the_block_at_the_ranks_place() -> None:
    mesh = DeviceMesh([3, 1])
    whole = torch.arange(12).view(3, 4)
    assert shard_along(whole, 1, mesh, 3).tolist() == whole[:, :2].tolist()
    assert shard_along(whole, -1, mesh, 1).tolist() == whole[:, 2:].tolist()
    outside = shard_along(whole, 1, mesh, 0)
    assert outside.tolist() == whole[:, :2].tolist()
    assert outside.is_contiguous()


def test_uneven_extents_and_missing_axes_are_refused() -> None:
    with pytest.raises(ShardingError, match="Sharded axis must be evenly divisble by mesh"):
        shard_along(torch.zeros(3, 4), 0, DeviceMesh([0, 1]), 0)
    with pytest.raises(ShardingError, match="cannot cut axis 2"):
        shard_along(torch.zeros(3, 4), 2, DeviceMesh([0, 1]), 0)


def test_shard_tensor_uses_this_rank() -> None:
    def body() -> list[int]:
        assert Communicator.instance().size() == 3
        return DeviceMesh([0, 1, 2]).shard_tensor(torch.arange(6), 0).tolist()

    with simulate(3) as world:
        assert world.run(body) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("shape", [(6,), (2, 3), (4, 1, 1), (2, 1, 3), (1, 4)])
def test_coordinates_and_teams_are_those_of_the_array(shape: tuple[int, ...]) -> None:
    """Compares with the indices of an array of ranks in random order."""
    ranks = torch.randperm(3 * math.prod(shape), generator=torch.Generator().manual_seed(1))
    grid = ranks[: math.prod(shape)].reshape(shape)
    mesh = DeviceMesh(grid)
    types = (X, Y, Z)[: len(shape)]
    assert mesh.ranks == tuple(sorted(grid.flatten().tolist()))
    for rank in mesh.devices:
        place = (grid == rank).nonzero()[0].tolist()
        for k, ptype in enumerate(types):
            dim = len(shape) - 1 - k
            assert mesh.coordinates(ptype)[mesh.devices.index(rank)] == place[dim]
            row = (*place[:dim], slice(None), *place[dim + 1 :])
            assert mesh.team(rank, (ptype,)) == tuple(grid[row].tolist())
        assert mesh.team(rank, types) == mesh.devices
    assert mesh.coordinates(Z if len(shape) < 3 else X) == tuple(
        mesh.coordinate(rank, Z if len(shape) < 3 else X) for rank in mesh.devices
    )
