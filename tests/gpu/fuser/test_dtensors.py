"""DTensors on GPUs: needs mpirun with two or four GPUs, and `--with-mpi`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from multidevice import Communicator
from tests.fuser.frontend.test_dtensors import CHECKS
from tests.support.moved_inputs import needs_a_gpu_per_rank


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, Callable[[str], None]]]:
    from tests.support.rank_programs import dtensors

    # Torch's own process group is NCCL's. The communicator chooses this rank's GPU.
    needs_a_gpu_per_rank(Communicator.instance())
    with dtensors.default_group("cuda"):
        yield dtensors.CHECKS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CHECKS)
def test_dtensors_of_gpus(
    name: str, comm: Communicator, checks: dict[str, Callable[[str], None]]
) -> None:
    checks[name]("cuda")
