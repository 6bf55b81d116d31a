"""Tests of the sends and receives of each collective, without ranks: one thread moves all data."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from multidevice.coordination.bounded_wait import Calls
from multidevice.transports.base.checked_backend import CollectiveCall
from multidevice.transports.base.collectives import COLLECTIVES, Collective
from multidevice.transports.base.p2p_collectives import SPLIT_NBYTES, Steps, steps_of
from multidevice.transports.base.protocol import Transfer
from tests.support.collective_meanings import MEANINGS

# Elements of 8 bytes per part: below and above the size from which buffers are split.
COUNTS = (3, SPLIT_NBYTES // 4 + 1)


def memory(tensor: torch.Tensor) -> range:
    assert tensor.is_contiguous()
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    one, two = memory(first), memory(second)
    return max(one.start, two.start) < min(one.stop, two.stop)


def check_list(what: str, transfers: Sequence[Transfer]) -> None:
    """The transfers of one list run at the same time: none may write to the memory of another."""
    for i, transfer in enumerate(transfers):
        for other in transfers[i + 1 :]:
            if "recv" in (transfer.kind, other.kind) and overlap(transfer.tensor, other.tensor):
                raise AssertionError(
                    f"{what}: one list of transfers has a {transfer.kind} and a {other.kind} in "
                    "the same memory; receive into another buffer, and copy it later"
                )


class Driver:
    """Runs the steps of all members of a team; a send meets the first unmatched receive."""

    def __init__(self, what: str, team: tuple[int, ...], steps: Sequence[Steps]) -> None:
        self.what = what
        self.members = dict(zip(team, steps, strict=True))
        self.pending: dict[int, list[Transfer]] = {rank: [] for rank in team}

    def run(self) -> None:
        while self.members:
            moved = self.move()
            ready = [rank for rank in self.members if not self.pending[rank]]
            for rank in ready:
                self.go_on(rank)
            assert moved or ready, f"{self.what}: no rank can run\n{self.waits()}"
        assert not any(self.pending.values()), f"{self.what}: without a partner\n{self.waits()}"

    def go_on(self, rank: int) -> None:
        transfers = next(self.members[rank], None)
        if transfers is None:
            del self.members[rank]
            return
        check_list(f"{self.what}, rank {rank}", transfers)
        self.pending[rank] = list(transfers)

    def move(self) -> bool:
        """Moves the data of all pairs of a send and its receive; returns whether there was one."""
        moved = False
        for rank, transfers in self.pending.items():
            for send in [t for t in transfers if t.kind == "send"]:
                takers = self.pending.get(send.peer, [])
                recv = next((t for t in takers if t.kind == "recv" and t.peer == rank), None)
                if recv is None:
                    continue
                assert send.tensor.numel() == recv.tensor.numel(), (
                    f"{self.what}: rank {rank} sends {send.tensor.numel()} elements to rank "
                    f"{send.peer}, which receives {recv.tensor.numel()}"
                )
                recv.tensor.view(-1).copy_(send.tensor.view(-1))
                self.pending[rank] = [t for t in self.pending[rank] if t is not send]
                self.pending[send.peer] = [t for t in self.pending[send.peer] if t is not recv]
                moved = True
        return moved

    def waits(self) -> str:
        return "\n".join(
            f"rank {rank}: {t.kind} {'to' if t.kind == 'send' else 'from'} rank {t.peer}"
            for rank, transfers in self.pending.items()
            for t in transfers
        )


def check(row: Collective, team: tuple[int, ...], count: int, root: int, *, in_place: bool) -> None:
    """Compares the results of the steps with the meaning of the collective; `root` is a position
    in the team.
    """
    n = len(team)
    generator = torch.Generator().manual_seed(n)
    shape = (count * row.inp.parts(n),)
    operands = [torch.randint(-9, 9, shape, generator=generator) for _ in team]
    wanted = MEANINGS[row.name].results([x.clone() for x in operands], root)
    calls: list[CollectiveCall] = []
    for index, result in enumerate(wanted):
        inp = operands[index].clone()
        out = None if result is None else torch.zeros_like(result)
        if in_place and out is not None:
            out = inp
        given = None if row.inp.at_root and index != root else inp
        if row.has_one_buffer:
            assert out is not None
            given = out.copy_(inp) if index == root else out
        reduce = "SUM" if row.reduces else None
        at = team[root] if row.is_rooted else None
        key = Calls("steps", team)
        calls.append(CollectiveCall(row, team, index, out, given, reduce, at, None, key, 0))
    what = f"{row} of {count} elements per part{', in place' if in_place else ''}, team {team}"
    Driver(what, team, [steps_of(call) for call in calls]).run()
    for call, result, operand in zip(calls, wanted, operands, strict=True):
        if result is not None:
            assert call.out is not None
            assert torch.equal(call.out, result), f"{what}: wrong result of member {call.index}"
        if not (in_place or row.has_one_buffer or call.inp is None):
            assert torch.equal(call.inp, operand), f"{what}: changed operand of {call.index}"


@pytest.mark.parametrize("team", [(0, 1), (2, 0, 1), (0, 3, 5, 4)], ids=len)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_steps_do_what_the_collective_means(name: str, team: tuple[int, ...]) -> None:
    row = COLLECTIVES[name]
    for root in range(len(team)) if row.is_rooted else (0,):
        for count in COUNTS:
            for in_place in (False, True) if row.sharing == "same" else (False,):
                check(row, team, count, root, in_place=in_place)
