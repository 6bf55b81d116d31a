"""Tests of the wait-for graph of a host's ranks: deadlocks and ended processes are found."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import pytest

from fuser.support.errors import PeerError
from multidevice.coordination import deadlock_detector
from multidevice.coordination.bounded_wait import Calls, Need
from multidevice.coordination.deadlock_detector import WaitForGraph
from multidevice.coordination.shared_page import LINE_NBYTES

A, B = Calls("A", (0, 1)), Calls("B", (0, 1))


def make(size: int) -> list[WaitForGraph]:
    """Makes the wait-for graphs of `size` ranks, all of this process."""
    page = mmap.mmap(-1, deadlock_detector.nbytes_of(size) + LINE_NBYTES)
    return [WaitForGraph(page, rank, size) for rank in range(size)]


def test_two_ranks_that_wait_for_each_other_both_hear_it() -> None:
    first, second = make(2)
    entered = [{A: 4, B: 2}, {A: 3, B: 3}]
    assert first.watch("call A3", [Need(1, A, 4)], entered[0]) is None
    found = second.watch("call B2", [Need(0, B, 3)], entered[1])
    assert found is not None
    assert found.text().splitlines()[1:] == [
        "  rank 0: waits in call A3",
        "  rank 1: waits in call B2",
    ]
    # The second has raised and waits no more; the first still learns of it.
    second.clear()
    assert first.watch("call A3", [Need(1, A, 4)], entered[0]) == found
    # That deadlock is reported once: later waits are not part of it.
    assert first.watch("call A4", [Need(1, A, 5)], {A: 5, B: 3}) is None


def test_a_circle_of_three() -> None:
    ranks = make(3)
    # Rank r has entered A(r) alone and waits there for rank r + 1.
    keys = [Calls(f"A{r}", (0, 1, 2)) for r in range(3)]
    needs = [[Need((r + 1) % 3, keys[r], 1)] for r in range(3)]
    found = None
    for _ in range(3):
        for r, rank in enumerate(ranks):
            found = found or rank.watch(f"A{r}", needs[r], {keys[r]: 1})
    assert found is not None
    assert {w.rank for w in found.waits} == {0, 1, 2}


def test_a_rank_that_has_come_is_not_waited_for_in_vain() -> None:
    """The first rank has not yet seen that the second entered A and is in B now: no deadlock."""
    first, second = make(2)
    for _ in range(2):
        assert first.watch("A", [Need(1, A, 1)], {A: 1}) is None
        assert second.watch("B", [Need(0, B, 1)], {A: 1, B: 1}) is None


def test_ranks_in_the_end_of_the_job_hold_nobody_up() -> None:
    """Ranks that wait for the end of the job still count for the calls they entered before."""
    ranks = make(4)
    team = Calls("A", (0, 1, 2, 3))
    for _ in range(2):
        ranks[2].stay("the end of the job", [0, 1, 3], {team: 1})
        ranks[3].stay("the end of the job", [0, 1, 2], {team: 1})
        assert ranks[0].watch("A", [Need(r, team, 1) for r in (1, 2, 3)], {team: 1}) is None
    assert ranks[0].news() == []
    assert ranks[0].suspects([Need(3, A, 1)]) == "rank 3 waits in the end of the job"


def test_who_has_not_come() -> None:
    first, second, _ = make(3)
    second.watch("call B", [Need(2, B, 1)], {B: 1})
    text = first.suspects([Need(1, A, 1), Need(2, A, 1)])
    assert (
        text
        == f"rank 1 waits in call B; rank 2 has not entered it (process {os.getpid()} is running)"
    )


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def with_process(child: subprocess.Popen[bytes]) -> WaitForGraph:
    """Rank 0's view of a wait-for graph in which rank 1 is a child process."""
    first, second = make(2)
    second._line(1)[0] = child.pid
    first.connect()
    return first


def test_a_stopped_process_is_seen(child: subprocess.Popen[bytes]) -> None:
    wait_graph = with_process(child)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert wait_graph.is_stopped(1)
    assert wait_graph.state(1) == f"process {child.pid} is stopped"
    child.kill()
    child.wait()


def test_a_killed_process_is_named(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock_detector, "_GRACE_S", -1.0)
    wait_graph = with_process(child)
    assert wait_graph.watch("allreduce, for model.py:7", [Need(1, A, 1)], {}) is None
    child.kill()
    child.wait()
    expected = (
        f"rank 1 has ended: process {child.pid} ended without a message while rank 0 waits for it"
    )
    with pytest.raises(PeerError, match=expected) as error:
        wait_graph.watch("allreduce, for model.py:7", [Need(1, A, 1)], {})
    assert "model.py:7" in str(error.value)
