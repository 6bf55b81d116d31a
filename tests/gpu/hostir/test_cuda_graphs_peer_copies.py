"""Programs with peer copies that CUDA graphs replay; ranks may share a GPU.

mpirun -np N python -m pytest --with-mpi tests/gpu/hostir/test_cuda_graphs_peer_copies.py
"""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

from fuser.runtime.captured_graphs import CudaGraphs
from fuser.support.errors import UnsupportedError
from hostir.runtime import cuda_graphs
from multidevice import Communicator
from multidevice.transports.peer_copy_cuda import CudaPeerBackend
from tests.support.peer_graph_cases import CASES, Case

pytestmark = pytest.mark.mpi(min_size=2)
KEPT: list[torch.cuda.MemPool | None] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_repeat_a_run(name: str, comm: Communicator, device: torch.device) -> None:
    case = Case(name, comm, device)
    case.repeat(60, [case.inputs(0)], lambda run: 0)
    assert case.lines()[0].startswith("captured: "), case.lines()


@pytest.mark.parametrize("name", CASES)
def test_ranks_whose_tensors_lie_elsewhere(
    name: str, comm: Communicator, device: torch.device
) -> None:
    """Each rank changes its tensors in its own rhythm, with delays on host and device."""
    case, rank = Case(name, comm, device), comm.rank()
    chance = random.Random(rank)

    def which(run: int) -> int:
        if chance.random() < 0.1:
            torch.cuda._sleep(chance.randrange(1_000_000))
        return run // (rank + 1) % 2

    case.repeat(200, [case.inputs(0), case.inputs(0)], which)
    assert case.lines()[0].startswith("captured: "), case.lines()


@pytest.mark.parametrize("name", CASES)
def test_runs_that_are_not_waited_for(name: str, comm: Communicator, device: torch.device) -> None:
    """The host is many runs ahead of the device; results of earlier runs are not overwritten."""
    case, chance = Case(name, comm, device), random.Random(comm.rank())
    values = [case.inputs(seed) for seed in range(40)]
    inputs = case.inputs(0)
    found: list[torch.Tensor] = []
    for mine in values * 3:
        for tensor, one in zip(inputs, mine, strict=True):
            tensor.copy_(one)
        found += case.evaluator.run(inputs)
        if chance.random() < 0.1:
            torch.cuda._sleep(chance.randrange(3_000_000))
    for k, one in enumerate(found):
        case.check(k % 40, one)


def test_memory_that_is_new_to_peers(comm: Communicator, device: torch.device) -> None:
    """A capture allocates memory that peers have not mapped yet."""
    case = Case("gather", comm, device)
    inputs = case.inputs(0)
    case.evaluator.run(inputs)
    memory = cast(CudaPeerBackend, comm.peers_for(device))._memory
    # As long as this rank lives: peers have mapped what lies there.
    KEPT.append(memory._pool)
    memory._pool = torch.cuda.MemPool()
    case.repeat(20, [inputs], lambda run: 0)
    assert case.lines()[0].startswith("captured: "), case.lines()


def test_one_rank_that_cannot_capture(
    comm: Communicator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank fails during a capture; the others do not wait forever for its messages."""
    case, is_last = Case("gather in steps", comm, device), comm.rank() == comm.size() - 1
    made = CudaGraphs.capture

    def fail(self: CudaGraphs, actions: list[object], slots: list[object]) -> object:
        def refuse(slots: list[object]) -> None:
            raise RuntimeError("no memory for it")

        some = [*actions[: len(actions) // 2], refuse] if is_last else actions
        return made(self, some, slots)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(CudaGraphs, "capture", fail)
    case.repeat(20, [case.inputs(0)], lambda run: 0)
    lines = case.lines()
    assert lines[0].startswith("not captured: "), lines
    assert ("no memory for it" if is_last else "could not capture it") in lines[0]
    monkeypatch.undo()
    again = Case("scatter", comm, device)
    again.repeat(20, [again.inputs(0)], lambda run: 0)
    assert again.lines()[0].startswith("captured: "), again.lines()


def test_a_graph_of_the_caller_has_no_peer_copies(comm: Communicator, device: torch.device) -> None:
    case = Case("gather", comm, device)
    inputs = case.inputs(0)
    case.evaluator.run(inputs)
    torch.cuda.synchronize()
    refused = pytest.raises(UnsupportedError, match="the caller cannot capture peer copies")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        case.evaluator.run(inputs)
    torch.cuda.synchronize()
    case.check(0, case.evaluator.run(inputs)[0])
