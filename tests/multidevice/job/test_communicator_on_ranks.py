"""The communicator of the job that runs this test: `mpirun -np N python -m pytest --with-mpi`."""

from __future__ import annotations

import pytest
import torch

from multidevice import Communicator
from tests.support import mpi_abort
from tests.support.rank_programs import collectives


@pytest.mark.mpi
def test_the_launchers_ranks(comm: Communicator) -> None:
    assert comm.is_available()
    assert comm.size() == mpi_abort.world_size()
    assert comm.size() >= comm.local_size() > comm.local_rank() >= 0
    ranks = comm.exchange(str(comm.rank()).encode())
    assert ranks == [str(rank).encode() for rank in range(comm.size())]


@pytest.mark.mpi
def test_all_collectives_and_agreed_errors(comm: Communicator) -> None:
    collectives.check_all(torch.device("cpu"))
    assert comm.backend_for("cpu").name in ("mpi", "gloo")


@pytest.mark.mpi
def test_dropped_work_keeps_its_buffers(comm: Communicator) -> None:
    """A collective whose Work and tensors have been dropped does not write to freed memory."""
    backend = comm.backend_for("cpu")
    world = tuple(range(comm.size()))
    for _ in range(200):
        x = torch.ones(1000)
        backend.allreduce(x, x, op="SUM", team=world)
        del x
    y = torch.ones(3)
    backend.allreduce(y, y, op="SUM", team=world).wait()
    assert y.tolist() == [float(comm.size())] * 3
