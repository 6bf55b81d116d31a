"""Programs on ranks that share a GPU; if each rank has one, the same tests run over NCCL.

mpirun -np N python -m pytest --with-mpi tests/gpu/multidevice/test_communicator_shared_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from multidevice import Communicator
from tests.support.rank_programs import collectives

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.finding("G44")]


def test_a_rank_takes_the_gpu_of_its_local_rank_modulo_their_number(comm: Communicator) -> None:
    assert torch.cuda.current_device() == comm.local_rank() % torch.cuda.device_count()


@pytest.mark.filterwarnings("ignore:ranks .* share the GPU")
def test_collectives_equal_brute_force(comm: Communicator) -> None:
    collectives.check_all(torch.device("cuda", torch.cuda.current_device()))
    staged = any(comm.backend_for("cuda")._shared.values())  # pyright: ignore
    assert staged == (torch.cuda.device_count() < comm.local_size())


@pytest.mark.filterwarnings("ignore:ranks .* share the GPU")
def test_the_host_takes_what_the_stream_of_the_call_has_written(comm: Communicator) -> None:
    """The call waits for slow work on its stream, and another stream reads the result."""
    backend, world = comm.backend_for("cuda"), tuple(range(comm.size()))
    side, third = torch.cuda.Stream(), torch.cuda.Stream()
    x, out = torch.zeros(1 << 16, device="cuda"), torch.zeros(comm.size() << 16, device="cuda")
    torch.cuda.synchronize()
    for turn in range(3):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.fill_(10 * turn + comm.rank())
        work = backend.allgather(out, x, team=world, stream=side)
        with torch.cuda.stream(side):
            work.wait()
        third.wait_stream(side)
        with torch.cuda.stream(third):
            found = out.view(comm.size(), -1)[:, ::4096].clone()
        third.synchronize()
        assert found.tolist() == [[10.0 * turn + rank] * 16 for rank in world]
