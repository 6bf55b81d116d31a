"""Tests of the fixtures under mpirun: the ranks agree on size, order and seed."""

from __future__ import annotations

import pytest

from tests.support import mpi_abort


@pytest.mark.mpi
def test_ranks_agree_on_size_and_seed(seeded: int) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.size == mpi_abort.world_size() > 1
    assert world.allgather(world.rank) == list(range(world.size))
    assert world.allgather(seeded) == [seeded] * world.size


@pytest.mark.mpi(min_size=3)
def test_min_size_is_honoured() -> None:
    assert mpi_abort.world_size() >= 3
