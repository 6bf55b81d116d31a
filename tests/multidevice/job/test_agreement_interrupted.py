"""Tests that a call which fails on some ranks leaves all ranks able to make the next call.

Signal handlers may raise anywhere; these tests raise at chosen places.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser.support.errors import FuserError
from hostir.runtime.plan import Plan
from multidevice import Communicator, simulate
from multidevice.coordination.bounded_wait import RECV, SEND, Calls, Need, counts_from, rows_of
from multidevice.coordination.control_channel import Control
from multidevice.coordination.deadlock_detector import BlockedRank, Deadlock
from multidevice.job.agreement import counts_of, realign
from multidevice.transports.base.protocol import Transfer
from multidevice.transports.mpi import MpiBackend
from multidevice.transports.peer_copy import SLOTS, PeerBackend
from tests.multidevice.job.test_agreement_bad_inputs import row_parallel
from tests.support.peer_graph_cases import CASES, ROWS, K, N, numbers


class Interrupt(Exception):
    """The exception that a signal handler raises in these tests."""


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (FuserError, Interrupt, KeyboardInterrupt, RuntimeError) as error:
        return type(error).__name__
    return "right"


def parted(comm: Communicator) -> list[str]:
    """Returns the transfers whose numbers of sends and receives differ between two ranks."""
    entered = comm._control.ledger.entered
    mine = {k: n for k, n in entered.items() if k.ends}
    told = comm.exchange(json.dumps(rows_of(mine)).encode())
    counts = [counts_from(json.loads(text)) for text in told]
    sends = sorted({key._replace(kind=SEND) for count in counts for key in count})
    return [
        str(s)
        for s in sends
        if counts[s.ends[0]].get(s, 0) != counts[s.ends[1]].get(s._replace(kind=RECV), 0)
    ]


# ------------------------------------------------------------------ inside of runs
LIBRARIES = {
    "peer copies": (PeerBackend, "_start_batch", "gather in steps", ["peer_copies"]),
    "messages": (MpiBackend, "_start_batch", "gather in steps", []),
    "a collective of peers": (PeerBackend, "_start", "gather", ["peer_copies"]),
    "a collective": (MpiBackend, "_start", "gather", []),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("is_posted", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("who", ["the last rank", "all ranks"])
def test_runs_that_fail_again_and_again(
    who: str, is_posted: bool, name: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More runs fail than there are slots for transfers without a partner.

    With `is_posted`, the communication has already been started when the error is raised.
    """
    backend, method, case, options = LIBRARIES[name]
    rank, d = comm.rank(), comm.size()
    start, fails = getattr(backend, method), [False]

    def failing(self: Any, *call: Any) -> Any:
        is_now, fails[0] = fails[0], False
        if is_now and not is_posted:
            raise Interrupt
        work = start(self, *call)
        if is_now:
            raise Interrupt
        return work

    monkeypatch.setattr(backend, method, failing)
    fd, w = CASES[case](d), numbers((N, K), 1)
    is_failing = who == "all ranks" or rank == d - 1
    found: list[str] = []
    for run in range(2 * SLOTS + 9 if name == "peer copies" else 9):
        x = numbers((ROWS * d, K), run)
        fails[0] = run % 2 == 1 and is_failing

        def call(x: torch.Tensor = x, run: int = run) -> None:
            (y,) = fd.execute([x.chunk(d, 0)[rank].clone(), w], _enable_options=options)
            assert torch.equal(y.double(), x.double() @ w.double().T), f"run {run}"

        found.append(outcome(call))
        fails[0] = False
    failed = found[1::2]
    assert not is_failing or (found[0] == "right" and "right" not in failed)
    told = [text.decode().split() for text in comm.exchange(" ".join(found).encode())]
    for run in range(2, len(found), 2):
        # Where a run of others went through, they hear of it in the next one, all at once.
        ends = {one[run] for one in told}
        was_heard = all(one[run - 1] != "right" for one in told)
        assert ends == {"right"} if was_heard else ends <= {"CommunicationError"}, (run, told)
    assert parted(comm) == []


@pytest.mark.mpi(min_size=2)
def test_a_deadlock_that_a_rank_hears_of_late(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that other ranks have given up are counted before the ranks compare, not after."""
    call, rank, last, run = values(comm), comm.rank(), comm.size() - 1, Plan.run
    control = comm._control
    sends, receives = (Calls(kind, control.world, (last, 0)) for kind in (SEND, RECV))
    wait_graph: Any = control.wait_graph
    mine = {0: receives, last: sends}.get(rank, Calls("", ()))
    before = control.ledger.entered.get(mine, 0)
    if rank == 0:
        ended = BlockedRank(0, "a transfer", (Need(last, sends, before + 5),))
        wait_graph._end(Deadlock((ended,)))
    # Not a barrier of the control channel, in which ranks hear of deadlocks.
    comm.backend_for("cpu").barrier(team=control.world)
    monkeypatch.setattr(Plan, "run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    assert outcome(lambda: call(30)) != "right"
    monkeypatch.setattr(Plan, "run", run)
    call(31)
    assert parted(comm) == []
    assert not mine.kind or control.ledger.entered[mine] == before + 5


# ------------------------------------------------------------------ outside of runs
def values(comm: Communicator) -> Callable[[int], float]:
    """Returns a function that runs a program and checks that all ranks ran the same call.

    Call number n adds 4 n of each rank.
    """
    fd, weights = row_parallel(ranks=comm.size()), torch.ones(5, 4)

    def call(value: int) -> float:
        (out,) = fd.execute([torch.full((3, 4), float(value)), weights])
        found = out[0, 0].item()
        assert found == 4 * comm.size() * value, f"call {value} was paired with another one"
        return found

    for value in range(4):
        call(value)
    return call


class Interrupted:
    """Makes the next `times` waits raise whose description contains a text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comm: Communicator) -> None:
        self.what, self.times = "", 0
        control: Any = comm._control
        poll = control.poll_until

        def poll_until(done: Any, *, what: Callable[[], str], needs: Any) -> None:
            if self.times and self.what in what():
                self.times -= 1
                raise KeyboardInterrupt
            poll(done, what=what, needs=needs)

        monkeypatch.setattr(control, "poll_until", poll_until)

    def next(self, what: str, times: int = 1) -> None:
        self.what, self.times = what, times


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_wait_for_the_others_that_is_interrupted(
    times: int, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's wait for the others is interrupted in several calls: these calls fail on all
    ranks.
    """
    monkeypatch.setattr("multidevice.coordination.control_channel._SPINS", 0)
    call, interrupted = values(comm), Interrupted(monkeypatch, comm)
    is_mine = comm.rank() == comm.size() - 1
    if is_mine:
        interrupted.next("of the programs of team", times)
    found = [outcome(lambda value=value: call(value)) for value in range(10, 18)]
    # Who still waits in a call hears of it by a deadlock, who enters it by the exchange.
    expected = {"KeyboardInterrupt"} if is_mine else {"PeerError", "DeadlockError"}
    assert {*found[:times]} <= expected and found[times:] == ["right"] * (8 - times), found


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_wait_after_a_failed_run(
    times: int, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank gives up further calls while the others are still in the run in which it failed."""
    monkeypatch.setattr("multidevice.coordination.control_channel._SPINS", 0)
    call, interrupted = values(comm), Interrupted(monkeypatch, comm)
    is_mine, run, fails = comm.rank() == comm.size() - 1, Plan.run, [comm.rank()]

    def failing(plan: Plan, inputs: Sequence[Any]) -> list[torch.Tensor]:
        if is_mine and fails:
            fails.clear()
            interrupted.next("of the programs of team", times)
            raise torch.OutOfMemoryError("no memory on this rank")
        return run(plan, inputs)

    monkeypatch.setattr(Plan, "run", failing)
    found = [outcome(lambda value=value: call(value)) for value in range(10, 18)]
    # One that has not yet seen this rank come hears that it has gone.
    first = {"OutOfMemoryError", "ExecutionError"} if is_mine else {"DeadlockError", "PeerError"}
    assert found[0] in first
    assert found[1 : times + 1] == ["KeyboardInterrupt" if is_mine else "PeerError"] * times
    assert found[times + 1 :] == ["right"] * (7 - times)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_sent", [False, True], ids=["before", "after"])
def test_an_exchange_of_signatures_that_is_interrupted(
    is_sent: bool, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, is_mine, left = values(comm), comm.rank() == comm.size() - 1, [1]
    exchange = Control.exchange

    def failing(self: Control, payload: bytes, **more: Any) -> list[bytes]:
        if not is_mine or more.get("stream") != "signatures" or not left:
            return exchange(self, payload, **more)
        left.clear()
        if is_sent:
            exchange(self, payload, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Control, "exchange", failing)
    # One that has never been agreed on.
    scale = 3.0 + is_sent
    other = row_parallel(scale, ranks=comm.size())
    inputs = [torch.ones(3, 4), torch.ones(5, 4)]
    first = outcome(lambda: other.execute(inputs))
    assert first == ("KeyboardInterrupt" if is_mine else "DeadlockError")
    for value in range(20, 24):
        call(value)
    assert other.execute(inputs)[0][0, 0].item() == 4 * scale * comm.size()


# ------------------------------------------------------------------ the pieces
def test_letters_of_a_failed_run_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All simulated ranks fail, one of them after its send: no later call receives that
    message.
    """
    run, failing = Plan.run, set[int]()

    def fails(plan: Plan, given: Sequence[Any]) -> list[torch.Tensor]:
        comm = Communicator.instance()
        if comm.rank() not in failing:
            return run(plan, given)
        failing.discard(comm.rank())
        if comm.rank() == 0:
            sent = Transfer("send", torch.tensor([1.0]), 1)
            comm.backend_for("cpu").batch([sent], team=(0, 1))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Plan, "run", fails)

    def act() -> list[float]:
        comm = Communicator.instance()
        backend, rank, fd = comm.backend_for("cpu"), comm.rank(), row_parallel()
        inputs = [torch.ones(3, 4), torch.ones(5, 4)]
        fd.execute(inputs)
        failing.add(rank)
        assert outcome(lambda: fd.execute(inputs)) == "OutOfMemoryError"
        assert fd.execute(inputs)[0][0, 0].item() == 8
        mine = torch.tensor([2.0]) if rank == 0 else torch.zeros(1)
        kind = "send" if rank == 0 else "recv"
        backend.batch([Transfer(kind, mine, 1 - rank)], team=(0, 1)).wait()
        return mine.tolist()

    with simulate(2) as world:
        assert world.run(act) == [[2.0], [2.0]]


def test_halves_of_transfers_are_counted_together() -> None:
    """Sends and receives are compared only after a failed call, and only within the team."""

    sends, receives = (Calls(kind, (0, 1), (0, 1)) for kind in (SEND, RECV))
    nccl, outside = Calls("nccl", (0, 1)), Calls(SEND, (0, 1, 2), (1, 2))

    def act() -> tuple[str, str, dict[Calls, int], dict[Any, int], list[Calls]]:
        control: Any = Communicator.instance()._control
        rank, lost = control.rank, list[Calls]()
        control.on_lost.append(lost.append)
        entered = control.ledger.entered
        entered |= {sends: 5, nccl: 3} if rank == 0 else {}
        entered |= {receives: 4, nccl: 3, outside: 7} if rank else {}
        control.runs = {(0, 1): 8} if rank else {}
        counts = [
            {sends: 5, nccl: 3},
            {receives: 4, nccl: 3, outside: 7, Calls("run", (0, 1)): 8},
        ]
        assert counts_of(control).items() >= counts[rank].items()
        before = realign(control, (0, 1), counts, has_failed=False)
        after = realign(control, (0, 1), counts, has_failed=True)
        kept = {k: n for k, n in entered.items() if k.ends or k == nccl}
        return before, after, kept, dict(control.runs), lost

    with simulate(2) as world:
        first, second = world.run(act)
    for found in (first, second):
        assert found[0] == "" and found[1].startswith("rank 0 has entered 5 of send 0->1 (0 1), ")
        assert found[3] == {(0, 1): 8} and found[4] == [sends]
    assert first[2] == {sends: 5, nccl: 3}
    assert second[2] == {receives: 5, nccl: 3, outside: 7}


@pytest.mark.mpi(min_size=2)
def test_votes_begin_anew_with_each_page(comm: Communicator) -> None:
    """Zeros in a new mailbox are not taken for votes of a rank that is far ahead."""
    team = tuple(range(comm.size()))
    peers: Any = comm.peers_for("cpu")
    peers.connect(team)
    mailbox = peers.mailbox(team)
    comm._control.ledger.entered[mailbox.votes] = 40_000
    peers.start_over(team)
    for number in range(4):
        assert peers.vote(team, 7 + number) == (7 + number,) * len(team)
