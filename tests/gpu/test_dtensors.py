"""DTensors of GPUs, under mpirun with `--with-mpi` on two or four of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from multidevice import Communicator
from tests.frontend.test_dtensors import CHECKS


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, Callable[[str], None]]]:
    from tests.multidevice.programs import dtensors

    torch.cuda.set_device(Communicator.instance().local_rank())
    with dtensors.default_group("cuda"):
        yield dtensors.CHECKS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CHECKS)
def test_dtensors_of_gpus(
    name: str, comm: Communicator, checks: dict[str, Callable[[str], None]]
) -> None:
    checks[name]("cuda")
