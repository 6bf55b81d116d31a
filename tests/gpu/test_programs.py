"""Whole sharded programs on 4 GPUs, under mpirun."""

from __future__ import annotations

import pytest
import torch

from multidevice import Communicator
from tests.multidevice.programs import mlp


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("case", mlp.CASES, ids=lambda c: c.name)
def test_mlp_on_four_gpus(case: mlp.Case, comm: Communicator) -> None:
    device = f"cuda:{comm.local_rank()}"
    torch.cuda.set_device(device)
    mlp.check(case, device)
