"""The shards of all GPUs as one tensor in mapped memory; ranks may share a GPU.

mpirun -np N python -m pytest --with-mpi tests/gpu/hostir/test_steps_symmetric_views.py
"""

from __future__ import annotations

import gc
import random

import pytest
import torch

import multidevice
from fuser.support.errors import UnsupportedError
from hostir import HostIrEvaluator
from multidevice import Communicator
from tests.support.rank_programs.dropped_programs import used_nbytes
from tests.support.rank_programs.symmetric_views import program_of, run_here

pytestmark = pytest.mark.mpi(min_size=2)
# Rows of 1 KB that make a shard of 2 MiB, the unit in which GPUs map memory.
ROWS = 2048


@pytest.fixture
def device(comm: Communicator) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("units", [1, 3, 16])
def test_every_rank_sees_all_shards(units: int, comm: Communicator, device: torch.device) -> None:
    run_here(program_of(comm.size(), units * ROWS), 8, device)


def test_ranks_out_of_step(comm: Communicator, device: torch.device) -> None:
    """A view has the values written before, and they stay until the slowest rank has read
    them.
    """
    program, chance = program_of(comm.size(), ROWS), random.Random(comm.rank())
    evaluator, x = HostIrEvaluator(program), program.inputs[0]
    wholes = [
        torch.randn(comm.size(), ROWS, 256, generator=torch.Generator().manual_seed(k))
        for k in range(4)
    ]
    shards = [multidevice.shard_tensor(whole, x).to(device) for whole in wholes]  # type: ignore[arg-type]
    wants = [4 * whole.to(device) for whole in wholes]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for k in range(200):
        if chance.random() < 0.3:
            torch.cuda._sleep(chance.randrange(3_000_000))
        (out,) = evaluator.run([shards[k % 4]])
        wrong += (out != wants[k % 4]).sum()
    assert wrong.item() == 0


def test_shards_that_are_no_units_are_refused(comm: Communicator, device: torch.device) -> None:
    for rows in (4, ROWS + 1):
        with pytest.raises(UnsupportedError, match="in units of 2097152 bytes") as error:
            run_here(program_of(comm.size(), rows), 1, device)
        assert f"has {rows * 1024} bytes" in str(error.value)
        assert "SymmetricContiguousView of T1_sym_float" in str(error.value)


def test_what_programs_have_shown_goes_with_them(comm: Communicator, device: torch.device) -> None:
    def used() -> int:
        for _ in range(3):
            gc.collect()
            run_here(program_of(comm.size(), ROWS), 2, device)
        return used_nbytes(comm)

    before = used()
    for k in range(20):
        run_here(program_of(comm.size(), (k + 1) * ROWS), 2, device)
        gc.collect()
    after = used()
    assert after - before <= comm.size() * (32 << 20), (before, after)
