"""Sharded MLPs on GPUs, under mpirun with 4 ranks, which may share a GPU."""

from __future__ import annotations

import pytest
import torch

from multidevice import Communicator
from tests.support.rank_programs import mlp


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("case", mlp.CASES, ids=lambda c: c.name)
def test_mlp_on_four_ranks(case: mlp.Case, comm: Communicator) -> None:
    mlp.check(case, f"cuda:{torch.cuda.current_device()}")
