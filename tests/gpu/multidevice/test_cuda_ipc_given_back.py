"""Memory of dropped programs is unmapped and freed on all ranks, which may share a GPU.

mpirun -np N python -m pytest --with-mpi tests/gpu/multidevice/test_cuda_ipc_given_back.py
"""

from __future__ import annotations

import gc
from typing import cast

import pytest
import torch

from multidevice import Communicator
from multidevice.transports.memory.cuda_ipc import IpcPieces
from multidevice.transports.peer_copy_cuda import CudaPeerBackend
from tests.support.rank_programs.dropped_programs import MB, Exchange, used_nbytes

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def device(comm: Communicator) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def pieces_of(comm: Communicator, device: torch.device) -> IpcPieces:
    return cast("CudaPeerBackend", comm.peers_for(device))._memory._pieces


def nbytes_of_pieces(comm: Communicator, device: torch.device) -> int:
    pieces = pieces_of(comm, device)
    return sum(piece.nbytes for piece in (*pieces._pieces, *pieces._retired))


def settled_nbytes(comm: Communicator, device: torch.device) -> int:
    """Returns the GPU memory in use after all ranks have freed what they can."""
    gc.collect()
    comm.release_peers()
    for _ in range(4):
        comm.barrier()
        Exchange(2, device).run()
        gc.collect()
    return used_nbytes(comm)


def test_programs_made_and_dropped_in_turn(comm: Communicator, device: torch.device) -> None:
    """Each program needs more memory than the last; in total 20 times as much as may stay in
    use.
    """
    before = settled_nbytes(comm, device)
    # Of programs of other tests, which are still there.
    others = nbytes_of_pieces(comm, device)
    captured = range(0, 60, 10)
    for k in range(60):
        one = Exchange(3 * k + 1, device)
        # Some come to be captured.
        one.run(20 if k in captured else 2)
        del one
        gc.collect()
        nbytes = nbytes_of_pieces(comm, device) - others
        assert nbytes <= 6 * (3 * k + 10) * MB, f"program {k}: {nbytes >> 20} MB are kept"
    after = settled_nbytes(comm, device)
    # Ranks may share a GPU; kernels and graphs take some memory, too. What ops allocate in a graph
    # lies in a pool of the graphs, which is not given back.
    pool = sum(3 * k + 1 for k in captured)
    assert after - before <= comm.size() * (48 + pool) * MB, (before, after)


def test_one_rank_drops_what_its_peers_keep(comm: Communicator, device: torch.device) -> None:
    def run(times: int) -> None:
        for one in kept:
            one.run(times)

    kept = [Exchange(40, device), Exchange(3, device)]
    run(20)
    for _ in range(12):
        if comm.rank() == 0:
            kept.clear()
            gc.collect()
            kept += [Exchange(40, device), Exchange(3, device)]
        run(8)
        Exchange(2, device).run()
    before = settled_nbytes(comm, device)
    kept.clear()
    after = settled_nbytes(comm, device)
    assert after < before, "what the last programs had has gone, too"


def test_outputs_are_held_after_their_program(comm: Communicator, device: torch.device) -> None:
    """Results outlive their programs, and are dropped while the GPUs still work on them."""
    found: list[tuple[torch.Tensor, float]] = []
    for k in range(30):
        one = Exchange(1 + k, device)
        x = torch.full([1, one.rows, MB // 4], float(10 * k + one.rank), device=device)
        torch.cuda._sleep(3_000_000 * (1 + (k + comm.rank()) % 2))
        (out,) = one.evaluator.run([x])
        found.append((out, 2.0 * (10 * k + (one.rank + 1) % one.ranks)))
        del one, x, out
        gc.collect()
    for out, value in found:
        assert (out == value).all()
