"""Ranks that repeat runs by graphs all together or not at all, on a stand-in for CUDA graphs;
tests/gpu/hostir/test_cuda_graphs_peer_copies.py has them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hostir.runtime import cuda_graphs
from multidevice import Communicator
from multidevice.transports.base.protocol import Captured, Vote
from tests.support.peer_graph_cases import CASES, ROWS, Case, K, N, numbers
from tests.support.stand_in_graphs import CpuGraph, CpuGraphs, stand_in

pytestmark = pytest.mark.mpi(min_size=2)
CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    monkeypatch.setattr(Captured, "can_capture", lambda self, what: True)
    return stand_in(monkeypatch)


def replays(made: list[CpuGraphs]) -> int:
    """Returns the number of launches, without the first of each graph, which captures it."""
    return sum(graph.launches - 1 for maker in made for graph in maker.made)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_repeat_a_run(name: str, comm: Communicator, made: list[CpuGraphs]) -> None:
    case = Case(name, comm, CPU)
    case.repeat(30, [case.inputs(0)], lambda run: 0)
    assert replays(made) > 10, case.lines()
    assert len(set(comm.exchange(str(replays(made)).encode()))) == 1


@pytest.mark.parametrize("name", CASES)
def test_ranks_whose_tensors_lie_elsewhere(
    name: str, comm: Communicator, made: list[CpuGraphs]
) -> None:
    """Each rank alternates between two sets of tensors, after 1, 2 or 3 runs."""
    case, rank = Case(name, comm, CPU), comm.rank()
    case.repeat(120, [case.inputs(0), case.inputs(0)], lambda run: run // (rank + 1) % 2)
    assert len(set(comm.exchange(str(replays(made)).encode()))) == 1
    assert replays(made) > 20, case.lines()


def test_what_is_dropped_is_dropped_on_all_ranks(
    comm: Communicator, made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank uses many different tensors, the others few."""
    monkeypatch.setattr(cuda_graphs, "MAX_KEYS", 32)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 8)
    case, rank = Case("gather", comm, CPU), comm.rank()
    sets = [case.inputs(0) for _ in range(6 if rank else 1)]
    case.repeat(200, sets, lambda run: run // 7 % len(sets))
    assert len(set(comm.exchange(str(replays(made)).encode()))) == 1
    assert replays(made) > 5, case.lines()


def test_one_rank_that_cannot_capture(
    comm: Communicator, made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, is_last = Case("gather in steps", comm, CPU), comm.rank() == comm.size() - 1

    understand = cuda_graphs.Replays._classify_slots

    def refuse(self: cuda_graphs.Replays, *given: Any) -> None:
        if is_last:
            raise cuda_graphs._Refused("this rank has no memory for it")
        understand(self, *given)

    monkeypatch.setattr(cuda_graphs.Replays, "_classify_slots", refuse)
    case.repeat(20, [case.inputs(0)], lambda run: 0)
    why = "this rank has no memory for it" if is_last else "another rank could not capture it"
    assert case.lines() == [f"not captured: {why}"]
    assert replays(made) <= 0


def test_one_rank_with_another_thread(
    comm: Communicator, made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No capture is started that would have to be dropped again in every third run."""
    began: list[Vote] = []
    monkeypatch.setattr(Vote, "start_over", began.append)
    case, is_last = Case("gather in steps", comm, CPU), comm.rank() == comm.size() - 1
    has_begun, may_end = threading.Event(), threading.Event()

    def serve() -> None:
        cuda_graphs.USERS.enter()
        has_begun.set()
        may_end.wait()

    server = threading.Thread(target=serve, name="a server")
    if is_last:
        server.start()
        has_begun.wait()
    try:
        case.repeat(20, [case.inputs(0)], lambda run: 0)
    finally:
        may_end.set()
    assert not began and not any(maker.made for maker in made)
    why = "the threads a server run programs, too" if is_last else "it has not run often enough"
    assert case.lines() == [f"not captured: {why}"]
    if is_last:
        server.join()
    comm.barrier()
    case.repeat(20, [case.inputs(0)], lambda run: 0)
    assert replays(made) > 5, case.lines()


@pytest.mark.parametrize("who", ["the last rank", "all ranks"])
def test_a_rank_that_could_not_launch_its_graph(
    who: str, comm: Communicator, made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of the others wait for it: were it to launch the next one, they would take its data
    for that of the run before."""
    d, rank, fails = comm.size(), comm.rank(), [False]
    is_failing, is_alone = who == "all ranks" or rank == d - 1, who == "the last rank"
    launch = CpuGraph.launch

    def fail(self: CpuGraph, stream: int) -> None:
        if not fails[0]:
            launch(self, stream)
        elif is_failing:
            raise RuntimeError("no memory to launch it")

    monkeypatch.setattr(CpuGraph, "launch", fail)
    fd, mine, w = CASES["gather in steps"](d), torch.empty(ROWS, K), numbers((N, K), 1)
    y: torch.Tensor | None = None
    for run in range(30):
        x = numbers((ROWS * d, K), run)
        mine.copy_(x.chunk(d, 0)[rank])
        y = None  # so that the next run finds this place again
        fails[0] = run == 10
        try:
            (y,) = fd.execute([mine, w], _enable_options=["peer_copies"])
        except RuntimeError as error:
            is_mine = "no memory to launch it" in str(error)
            assert (run, is_mine) == (10, is_failing) or (run == 11 and is_alone), (
                f"run {run}: {error}"
            )
            assert run == 10 or "were out of step after an earlier error" in str(error)
            continue
        assert run != 11 or not is_alone, "a graph that nobody else repeats was repeated"
        assert run == 10 or torch.equal(y.double(), x.double() @ w.double().T), f"run {run}"
    assert sum(len(maker.made) for maker in made) >= 1 + is_alone, "nothing was captured anew"
