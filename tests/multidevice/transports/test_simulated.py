"""Simulated ranks: collectives against plain torch, deterministic order, deadlocks, errors."""

from __future__ import annotations

import weakref

import pytest
import torch

import multidevice
from fuser.support.errors import CommunicationError, DeadlockError, PeerError
from multidevice import Communicator
from tests.support.rank_programs import collectives

CPU = torch.device("cpu")


def _backend():
    return Communicator.instance().backend_for(CPU)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_collectives_and_agreed_errors(size: int) -> None:
    with multidevice.simulate(size) as world:
        world.run(collectives.check_all, CPU)


def test_results_come_back_by_rank_and_arguments_go_in() -> None:
    def double(x: int, *, plus: int) -> tuple[int, int, int, int]:
        comm = Communicator.instance()
        return comm.rank() * 2 + x + plus, comm.size(), comm.local_rank(), comm.local_size()

    with multidevice.simulate(3) as world:
        assert world.run(double, 10, plus=1) == [(11, 3, 0, 3), (13, 3, 1, 3), (15, 3, 2, 3)]
        # A second run starts afresh.
        assert world.run(double, 0, plus=0)[2] == (4, 3, 2, 3)
    with pytest.raises(CommunicationError, match="is closed"):
        world.run(double, 0, plus=0)


def test_work_of_a_collective_keeps_no_tensor_of_another_rank_alive() -> None:
    """Rank 1 drops its tensors while rank 0 still has its own work of the same collective."""

    def gather() -> list[bool]:
        x, out = torch.ones(4), torch.empty(8)
        alive = [weakref.ref(x), weakref.ref(out)]
        work = _backend().allgather(out, x, team=(0, 1))
        work.wait()
        assert torch.equal(out, torch.ones(8))
        if Communicator.instance().rank() == 0:
            return []
        del work, x, out
        return [ref() is None for ref in alive]

    with multidevice.simulate(2) as world:
        assert world.run(gather) == [[], [True, True]]


def test_outside_of_a_run_the_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with multidevice.simulate(2) as world:
        inside = world.run(lambda: Communicator.instance().size())
        assert inside == [2, 2]
        assert Communicator.instance().size() != 2 or Communicator.instance().is_available()


def test_ranks_switch_only_where_they_wait_and_always_in_the_same_order() -> None:
    def trace(log: list[tuple[int, str]]) -> None:
        comm = Communicator.instance()
        x = torch.ones(2)
        log.append((comm.rank(), "start"))
        work = _backend().allreduce(x, x, op="SUM", team=(0, 1, 2))
        log.append((comm.rank(), "posted"))
        work.wait()
        log.append((comm.rank(), "done"))

    logs: list[list[tuple[int, str]]] = []
    for _ in range(3):
        logs.append([])
        with multidevice.simulate(3) as world:
            world.run(trace, logs[-1])
    assert logs[0] == logs[1] == logs[2]
    # The last rank to arrive completes the collective and goes on; the others follow in order.
    posts = [(r, what) for r in range(3) for what in ("start", "posted")]
    assert logs[0] == [*posts, (2, "done"), (0, "done"), (1, "done")]


def test_deadlock_names_the_position_of_every_rank() -> None:
    def crossed() -> None:
        comm = Communicator.instance()
        backend, x = _backend(), torch.ones(3)
        if comm.rank() == 0:
            backend.allreduce(x, x, op="MAX", team=(0, 1)).wait()
        elif comm.rank() == 1:
            backend.recv(x, peer=2, team=(1, 2)).wait()

    with multidevice.simulate(3) as world, pytest.raises(DeadlockError) as caught:
        world.run(crossed)
    assert str(caught.value).splitlines() == [
        "deadlock: no simulated rank can run",
        "  rank 0: waits in allreduce(MAX) of float32[3] over team (0 1), sequence number 0",
        "  rank 1: waits in recv from rank 2 of float32[3], sequence number 0 in team (1 2)",
        "  rank 2: finished",
    ]


def test_every_rank_sees_the_deadlock() -> None:
    def stuck() -> str:
        team = (0, 1) if Communicator.instance().rank() == 0 else (1, 0)
        try:
            _backend().barrier(team=team)
        except DeadlockError as error:
            return str(error)
        return "no error"

    with multidevice.simulate(2) as world:
        first, second = world.run(stuck)
    assert first == second
    assert "rank 0: waits in barrier over team (0 1)" in first
    assert "rank 1: waits in barrier over team (1 0)" in first


def test_different_operations_show_both_sides() -> None:
    def disagree() -> None:
        x = torch.ones(4)
        op = "SUM" if Communicator.instance().rank() == 0 else "MAX"
        _backend().allreduce(x, x, op=op, team=(0, 1)).wait()

    with multidevice.simulate(2) as world, pytest.raises(CommunicationError) as caught:
        world.run(disagree)
    text = str(caught.value)
    assert "rank 0 calls allreduce(SUM)" in text
    assert "rank 1 calls allreduce(MAX)" in text


def test_a_transfer_of_different_sizes_shows_both_sides() -> None:
    def disagree() -> None:
        if Communicator.instance().rank() == 0:
            _backend().send(torch.ones(4), peer=1, team=(0, 1)).wait()
        else:
            _backend().recv(torch.ones(5), peer=0, team=(0, 1)).wait()

    message = r"rank 0 sends float32\[4\] to rank 1, which receives float32\[5\]"
    with multidevice.simulate(2) as world, pytest.raises(CommunicationError, match=message):
        world.run(disagree)


def test_the_first_real_error_is_raised_and_the_others_get_peer_errors() -> None:
    seen: dict[int, str] = {}

    def fail() -> None:
        rank = Communicator.instance().rank()
        if rank == 1:
            raise KeyError("planted")
        try:
            Communicator.instance().barrier()
        except PeerError as error:
            seen[rank] = str(error)
            raise

    with multidevice.simulate(3) as world, pytest.raises(KeyError, match="planted"):
        world.run(fail)
    assert sorted(seen) == [0, 2]
    assert all("rank 1 failed: KeyError: 'planted'" in text for text in seen.values())


def test_different_control_operations_are_an_error_on_every_rank() -> None:
    def disagree() -> str:
        comm = Communicator.instance()
        try:
            if comm.rank() == 0:
                comm.agree(None)
            else:
                comm.exchange(b"x")
        except CommunicationError as error:
            return str(error)
        return "no error"

    with multidevice.simulate(3) as world:
        texts = world.run(disagree)
    assert len(set(texts)) == 1
    assert "ranks (0) are in a barrier or an agreement, ranks (1 2) are in the check" in texts[0]


def test_a_failed_check_leaves_the_data_channel_in_step() -> None:
    def recover() -> float:
        comm = Communicator.instance()
        x = torch.full((3,), float(comm.rank() + 1))
        error: Exception | None = None
        try:
            wrong = torch.ones(2) if comm.rank() == 1 else torch.ones(3)
            if wrong.numel() != 3:
                raise ValueError("two instead of three")
        except ValueError as caught:
            error = caught
        with pytest.raises(ValueError if comm.rank() == 1 else PeerError, match="two instead"):
            comm.agree(error)
        _backend().allreduce(x, x, op="SUM", team=(0, 1)).wait()
        return x[0].item()

    with multidevice.simulate(2) as world:
        assert world.run(recover) == [3.0, 3.0]


def test_work_overlaps_and_may_be_waited_in_any_order() -> None:
    def overlap() -> tuple[float, float]:
        backend, rank = _backend(), Communicator.instance().rank()
        a, b = torch.full((2,), float(rank)), torch.full((2,), 10.0 * rank)
        first = backend.allreduce(a, a, op="SUM", team=(0, 1))
        second = backend.allreduce(b, b, op="SUM", team=(0, 1))
        for work in (second, first) if rank else (first, second):
            work.wait()
        return a[0].item(), b[0].item()

    with multidevice.simulate(2) as world:
        assert world.run(overlap) == [(1.0, 10.0), (1.0, 10.0)]


def test_grad_mode_is_the_callers() -> None:
    with multidevice.simulate(2) as world, torch.no_grad():
        assert world.run(torch.is_grad_enabled) == [False, False]


def test_half_precision_sums_are_rounded_once() -> None:
    """256 + 1 + 1 is 258 in bfloat16; rounding after each addition would give 256."""

    def total() -> float:
        rank = Communicator.instance().rank()
        x = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
        _backend().allreduce(x, x, op="SUM", team=(0, 1, 2)).wait()
        return x.item()

    with multidevice.simulate(3) as world:
        assert world.run(total) == [258.0] * 3
