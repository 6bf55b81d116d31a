"""Automatic overlap between GPUs, compared with torch.

mpirun -np N python -m pytest --with-mpi tests/gpu/fuser/test_executor_cache_overlap.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fuser.frontend.executor_cache
from fuser.frontend.program_cache import PROGRAMS
from hostir.cost import overlap_search
from hostir.cost.machine_model import Machine
from multidevice import Communicator
from tests.support.overlap_gradient_programs import GRADIENTS
from tests.support.overlap_programs import FORMS, SLOW, has_loops, run

ALL = {**FORMS, **GRADIENTS}
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=[True, False], ids=["peer copies", "sends"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, comm: Communicator
) -> Iterator[torch.device]:
    """This rank's GPU, with a cost model for which overlap pays, for each of two transports."""
    PROGRAMS.clear()

    def find(name: str, device: torch.device | None = None) -> Machine:
        del name, device
        return SLOW

    monkeypatch.setattr(fuser.frontend.executor_cache, "find_machine", find)
    # Take the first candidate with overlap, if there is one, whatever its cost.
    monkeypatch.setattr(overlap_search, "pick", lambda found, *_: found[min(1, len(found) - 1)])
    if not request.param:
        monkeypatch.setattr(Communicator, "have_access", lambda *_: False)
    yield torch.device("cuda", torch.cuda.current_device())
    PROGRAMS.clear()


@pytest.mark.parametrize("name", ALL)
def test_steps_equal_torch(name: str, device: torch.device, comm: Communicator) -> None:
    """Fresh data in each run, with ranks at different places in the program."""
    program = run(ALL[name], comm.size(), [], device=device, seeds=range(40))
    assert has_loops(program)
