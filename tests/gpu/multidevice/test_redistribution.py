"""Changes of placement on ranks that share a GPU; if each rank has one, they run over NCCL.

mpirun -np 4 python -m pytest --with-mpi tests/gpu/multidevice/test_redistribution.py
"""

from __future__ import annotations

import random

import pytest

from multidevice import Communicator
from tests.support.placement_pairs import check_pairs_of_this_rank, pairs

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore:ranks .* share the GPU"),
]


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("options", [[], ["peer_copies"]])
def test_results_of_pairs(ndim: int, options: list[str], comm: Communicator) -> None:
    every = pairs("set", ndim)
    some = random.Random(3).sample(every, min(24, len(every)))
    check_pairs_of_this_rank(some, ndim, comm.rank(), "cuda", options)
