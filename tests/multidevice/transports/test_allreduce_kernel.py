"""Which transport executes small allreduces, and the order of kernel launches.

mpirun -np N python -m pytest --with-mpi tests/multidevice/transports/test_allreduce_kernel.py

Tests of the launch order need no ranks. On the CPU a launch returns when the allreduce is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from fuser.support.errors import CommunicationTimeout
from multidevice import Communicator
from multidevice.coordination.bounded_wait import Calls, Team
from multidevice.transports.allreduce_kernel import AllreduceKernels
from multidevice.transports.base.checked_backend import CollectiveCall
from multidevice.transports.base.collectives import ALLGATHER, ALLREDUCE
from multidevice.transports.base.launch_order import LaunchOrder
from multidevice.transports.base.protocol import RED_OPS, RedOp
from multidevice.transports.memory.host_shared import SharedMemory
from tests.support.rank_programs import collectives

CPU = torch.device("cpu")
needs_ranks = pytest.mark.mpi(min_size=2)


class Addresses(SharedMemory):
    """Shared memory that gives addresses to kernels, instead of tensors."""

    def mapped(self, name: tuple[int, ...], peer: int) -> int:  # type: ignore[override]
        return super().mapped(name, peer).data_ptr()


class AtOnce:
    """A launch order for kernels that have finished when their launch returns."""

    def before(self, stream: int) -> bool:
        return False

    def after(self, stream: int, is_captured: bool) -> None:
        pass

    def is_capturing(self, stream: int) -> bool:
        return False

    def is_done(self, stream: int) -> bool:
        return True


@pytest.fixture
def kernels(comm: Communicator) -> Iterator[AllreduceKernels]:
    made = AllreduceKernels(comm._control, CPU, 1 << 20, Addresses, AtOnce)
    yield made
    comm.barrier()
    made.close()
    # Not all come to each of these calls: later ones would take that for a loss.
    entered = comm._control.ledger.entered
    for key in [key for key in entered if key.kind == "kernels"]:
        del entered[key]


def call_of(comm: Communicator, inp: torch.Tensor, op: RedOp, team: Team) -> CollectiveCall:
    out, index = torch.zeros_like(inp), team.index(comm.rank())
    key = Calls("kernels", team)
    seq = comm._control.ledger.enter(key)
    return CollectiveCall(
        ALLREDUCE, team, index, out, inp, op, None, None, key, seq, where="model.py:3"
    )


@needs_ranks
def test_processes_reduce_in_each_others_memory(
    comm: Communicator, kernels: AllreduceKernels
) -> None:
    world = tuple(range(comm.size()))
    for team in (world, world[::-1]):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op in RED_OPS:
                if op == "AVG" and not dtype.is_floating_point:
                    continue
                inps = [collectives.values(r, 1000, dtype) for r in world]
                call = call_of(comm, inps[comm.rank()], op, team)
                work = kernels.start(call, 0)
                assert work is not None and call.out is not None
                work.wait()
                work.synchronize()
                expected = collectives.reduced([inps[r] for r in team], op)
                ulps = 1.0 if dtype.itemsize == 2 else 4.0
                collectives.same(call.out, expected, f"{op} {dtype}", ulps=ulps)


@needs_ranks
def test_a_bound_call_starts_on_any_tensors(comm: Communicator, kernels: AllreduceKernels) -> None:
    world = tuple(range(comm.size()))
    call = call_of(comm, torch.ones(100), "SUM", world)
    assert kernels.bind(call) is None, "the team is not connected yet"
    assert kernels.start(call, 0) is not None
    post = kernels.bind(replace(call, seq=-1))
    assert post is not None
    before = comm._control.ledger.entered[call.key]
    for k in range(50):
        inp, out = torch.full((100,), float(k + comm.rank())), torch.zeros(100)
        post(out.data_ptr(), inp.data_ptr(), 0).wait()
        assert (out == sum(k + r for r in world)).all()
    assert comm._control.ledger.entered[call.key] == before + 50


@needs_ranks
def test_what_is_left_to_the_backend(comm: Communicator, kernels: AllreduceKernels) -> None:
    world = tuple(range(comm.size()))
    inps: list[tuple[torch.Tensor, RedOp]] = [
        (torch.ones((1 << 18) + 1), "SUM"),  # larger than the kernels take
        (torch.ones(0), "SUM"),
        (torch.ones(5, dtype=torch.uint8), "MAX"),
    ]
    for inp, op in inps:
        call = call_of(comm, inp, op, world)
        assert not kernels.takes(call)
        assert kernels.start(call, 0) is None
    gather = replace(call_of(comm, torch.ones(4), "SUM", world), row=ALLGATHER, reduce=None)
    assert kernels.start(gather, 0) is None


@needs_ranks
def test_one_rank_turns_them_off_for_its_team(
    comm: Communicator, kernels: AllreduceKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank() == 1:
        monkeypatch.setenv("FUSER_DISABLE", "allreduce_kernel")
    world = tuple(range(comm.size()))
    call = call_of(comm, torch.ones(100), "SUM", world)
    assert kernels.takes(call)
    assert kernels.start(call, 0) is None
    assert kernels.why_not == {world: "rank 1: FUSER_DISABLE=allreduce_kernel"}
    assert not kernels.takes(call), "it is asked for once"
    assert not kernels.is_used


@needs_ranks
def test_a_rank_that_does_not_come_is_named(
    comm: Communicator, kernels: AllreduceKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tuple(range(comm.size()))
    call = call_of(comm, torch.ones(100), "SUM", world)
    assert kernels.start(call, 0) is not None
    comm.barrier()
    if comm.rank() == comm.size() - 1:
        return
    # The others begin together: who is late by itself would be named, too.
    monkeypatch.setenv("FUSER_TIMEOUT_S", "2")
    comm.backend_for("cpu").barrier(team=world[:-1])
    found: list[str] = []

    def watch() -> None:
        """Waits for a failure report, as the thread that watches a job does, and marks it as
        read.
        """
        while not (text := kernels.failure()):
            time.sleep(0.01)
        found.append(text)
        area = kernels._areas[world]
        assert area is not None
        area.mark_read()

    watcher = threading.Thread(target=watch)
    watcher.start()
    # Another size: its limit is the new one.
    late = kernels.start(call_of(comm, torch.ones(200), "MAX", world), 0)
    watcher.join()
    assert late is not None
    text = (
        f"rank {comm.rank()}: allreduce(MAX) of float32[200] over team "
        f"({' '.join(map(str, world))}), for model.py:3 did not complete within 2 s "
        f"(FUSER_TIMEOUT_S): rank {comm.size() - 1} has not started the kernel of this "
        "allreduce, number 2"
    )
    assert text in found[0]
    with pytest.raises(CommunicationTimeout, match="has not started"):
        late.synchronize()
    with pytest.raises(CommunicationTimeout, match="has not started"):
        kernels.start(call, 0)
    assert kernels.failure() == "", "it was read"


# ------------------------------------------------------------ the order of launches
@dataclass
class Driver:
    """A stand-in for the driver that records its calls."""

    captures: dict[int, int] = field(default_factory=dict[int, int])
    log: list[str] = field(default_factory=list[str])
    tips: list[int] = field(default_factory=list[int])
    events: int = 0

    def make_event(self) -> int:
        self.events += 1
        return self.events

    def record(self, event: int, stream: int) -> None:
        self.log.append(f"record {event} on {stream}")

    def wait(self, event: int, stream: int) -> None:
        self.log.append(f"{stream} waits for {event}")

    def wait_node(self, event: int, stream: int) -> None:
        self.log.append(f"{stream} has a node that waits for {event}")

    def is_capturing(self, stream: int) -> bool:
        return stream in self.captures

    def capture(self, stream: int) -> tuple[int, int, list[int]]:
        return self.captures[stream], 100 * self.captures[stream], list(self.tips)

    def record_node(self, event: int, graph: int, behind: Sequence[int]) -> int:
        self.log.append(f"graph {graph} records {event} behind {list(behind)}")
        return 77

    def move_node(self, node: int, graph: int, was: Sequence[int], now: Sequence[int]) -> None:
        self.log.append(f"graph {graph} moves {node} from {list(was)} to {list(now)}")

    def is_done(self, stream: int) -> bool:
        return True


def launch(order: LaunchOrder, driver: Driver, stream: int, node: int = 0) -> list[str]:
    """Returns the driver calls around a launch; during a capture the launch becomes a node."""
    driver.log.clear()
    is_captured = order.before(stream)
    driver.log.append("launch")
    driver.tips = [node]
    order.after(stream, is_captured)
    return list(driver.log)


def test_launches_on_one_stream_need_no_wait() -> None:
    order = LaunchOrder(driver := Driver())
    assert launch(order, driver, 5) == ["5 waits for 1", "launch", "record 1 on 5"]
    assert launch(order, driver, 5) == ["launch", "record 1 on 5"]


def test_a_launch_on_another_stream_waits_for_the_last_one() -> None:
    order = LaunchOrder(driver := Driver())
    launch(order, driver, 5)
    assert launch(order, driver, 6) == ["6 waits for 1", "launch", "record 1 on 6"]
    assert launch(order, driver, 5) == ["5 waits for 1", "launch", "record 1 on 5"]


def test_a_graph_waits_before_its_first_launch_and_records_behind_its_last() -> None:
    order = LaunchOrder(driver := Driver(captures={5: 9, 6: 9}))
    assert launch(order, driver, 5, 31) == [
        "5 has a node that waits for 1",
        "launch",
        "graph 900 records 1 behind [31]",
        "record 2 on 5",
    ]
    assert launch(order, driver, 5, 32) == [
        "launch",
        "graph 900 moves 77 from [31] to [32]",
        "record 2 on 5",
    ]
    # A branch of the same graph comes after what was captured before.
    assert launch(order, driver, 6, 33) == [
        "6 waits for 2",
        "launch",
        "graph 900 moves 77 from [32] to [33]",
        "record 2 on 6",
    ]


def test_graphs_and_launches_between_them_follow_one_another() -> None:
    order = LaunchOrder(driver := Driver(captures={5: 9}))
    launch(order, driver, 7)
    launch(order, driver, 5, 31)
    driver.captures[5] = 10
    assert launch(order, driver, 5, 41)[0] == "5 has a node that waits for 1"
    driver.captures.clear()
    # On the stream of the last launch, too: the graphs may be under way on any.
    for _ in range(2):
        assert launch(order, driver, 7) == ["7 waits for 1", "launch", "record 1 on 7"]
