"""The walk through host programs: who comes where, by a plain Python program per rank."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar, Symbol, lt
from fuser.support.errors import InputError
from hostir import RANK, HostIrContainer, Stream, Wait, as_scalar
from hostir.analysis.clocks import Clocks
from hostir.analysis.rank_values import np
from hostir.analysis.walker import (
    AllRanks,
    EachOpOnce,
    EffectState,
    InFlight,
    OneRank,
    StreamNumbers,
    Walk,
)
from hostir.ir.effects import (
    CALLER,
    ENTRY,
    Captures,
    ClosesGroup,
    Enters,
    Joins,
    OpensGroup,
    Starts,
    Waits,
)
from hostir.ir.ops import ForLoop, IfThenElse

RANKS = (0, 1, 2, 3, 4)
# The number of a Wait, and the values of the loops around it.
Visit = tuple[int, tuple[int, ...]]


# ------------------------------------------------------------------ programs with a second meaning
@dataclass
class Term:
    """offset + by_rank * rank + by_outer * (the innermost index), at least 0, modulo 4."""

    offset: int
    by_rank: int
    by_outer: int

    def scalar(self, indices: Sequence[Scalar]) -> Scalar:
        outer = indices[-1] if indices else as_scalar(0)
        return (RANK * self.by_rank + outer * self.by_outer + self.offset) % 4

    def value(self, rank: int, indices: Sequence[int]) -> int:
        return (
            rank * self.by_rank + (indices[-1] if indices else 0) * self.by_outer + self.offset
        ) % 4


@dataclass
class Tree:
    """A Wait (no regions), a loop from `terms[0]` to `terms[1]`, or a branch on `terms[0] < 2`."""

    number: int = -1
    terms: tuple[Term, ...] = ()
    regions: tuple[list[Tree], ...] = ()

    def write(self, hic: HostIrContainer, indices: tuple[Scalar, ...]) -> None:
        values = [t.scalar(indices) for t in self.terms]
        if not self.regions:
            hic.append(Wait(number=self.number))
        elif len(self.regions) == 1:
            with hic.loop(values[1], values[0], self.number) as i:
                for tree in self.regions[0]:
                    tree.write(hic, (*indices, i))
        else:
            with hic.branch(lt(values[0], 2)):
                for tree in self.regions[0]:
                    tree.write(hic, indices)
            with hic.otherwise():
                for tree in self.regions[1]:
                    tree.write(hic, indices)

    def visits(self, rank: int, indices: tuple[int, ...]) -> list[Visit]:
        values = [t.value(rank, indices) for t in self.terms]
        if not self.regions:
            return [(self.number, indices)]
        if len(self.regions) == 1:
            steps = range(values[0], values[1], self.number)
            return [
                v for i in steps for t in self.regions[0] for v in t.visits(rank, (*indices, i))
            ]
        return [v for t in self.regions[values[0] >= 2] for v in t.visits(rank, indices)]


def random_trees(rng: random.Random, depth: int, numbers: list[int]) -> list[Tree]:
    trees: list[Tree] = []
    for _ in range(rng.randint(1, 3)):
        terms = tuple(Term(rng.randrange(4), rng.randrange(3), rng.randrange(3)) for _ in range(2))
        kind = rng.randrange(3) if depth else 0
        regions = tuple(random_trees(rng, depth - 1, numbers) for _ in range(kind))
        numbers[0] += 1
        number = rng.randint(1, 2) if kind == 1 else numbers[0]
        trees.append(Tree(number, terms, regions))
    return trees


class Noting(Walk[Any]):
    """Notes what each rank visits."""

    def __init__(self, domain: OneRank | AllRanks, ranks: Sequence[int]) -> None:
        super().__init__(domain)
        self.domain, self.ranks = domain, ranks
        self.visits: dict[int, list[Visit]] = {r: [] for r in ranks}
        self.skipped: list[int] = []
        self.regions: list[object] = []

    def on_op(self, op: Op) -> None:
        assert isinstance(op, Wait)
        mask = self.domain.mask if isinstance(self.domain, AllRanks) else [True]
        for rank, is_here in zip(self.ranks, mask, strict=True):
            if is_here:
                self.visits[rank].append((op.number, tuple(i for _, i in self.indices)))

    def on_skipped(self, ops: Sequence[Op]) -> None:
        self.skipped += [op.number for op in walk(ops) if isinstance(op, Wait)]

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        self.regions.append(type(op))

    def on_left(self, op: ForLoop) -> None:
        self.regions.append("left")


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_visits_what_it_would_alone(seed: int) -> None:
    trees = random_trees(random.Random(seed), 3, [0])
    hic = HostIrContainer()
    with hic:
        for tree in trees:
            tree.write(hic, ())
    expected = {r: [v for t in trees for v in t.visits(r, ())] for r in RANKS}
    every = Noting(AllRanks(RANKS, {}), RANKS)
    every.run(hic.ops)
    assert every.visits == expected
    assert isinstance(every.domain, AllRanks) and every.domain.mask.all()
    assert every.indices == ()
    for rank in RANKS:
        values = {RANK: rank}
        one = Noting(OneRank(values), [rank])
        one.run(hic.ops)
        assert one.visits == {rank: expected[rank]}
        assert values == {RANK: rank}, "indices of loops are unbound behind them"


def test_one_rank_hears_of_what_it_passes_over_and_of_regions() -> None:
    hic = HostIrContainer()
    with hic:
        with hic.branch(lt(RANK, 2)):
            hic.append(Wait(number=1))
        with hic.otherwise():
            hic.append(Wait(number=2))
        with hic.loop(0):
            hic.append(Wait(number=3))
        with hic.loop(2):
            hic.append(Wait(number=4))
    one = Noting(OneRank({RANK: 0}), [0])
    one.run(hic.ops)
    assert one.skipped == [2, 3]
    assert one.visits == {0: [(1, ()), (4, (0,)), (4, (1,))]}
    assert one.regions == [IfThenElse, ForLoop, "left", ForLoop, "left"]
    over = Noting(OneRank({RANK: 0}), [0])
    over.is_over = True
    over.run(hic.ops)
    assert over.visits == {0: []}


def test_each_op_is_visited_once_without_numbers() -> None:
    hic = HostIrContainer()
    with hic:
        for tree in random_trees(random.Random(1), 4, [0]):
            tree.write(hic, ())
    found: list[int] = []
    loops: list[int] = []

    class Once(Walk[None]):
        def on_op(self, op: Op) -> None:
            found.append(op.number)  # pyright: ignore[reportAttributeAccessIssue]
            loops.append(len(self.indices))

    Once(EachOpOnce()).run(hic.ops)
    assert found == [op.number for op in walk(hic.ops) if isinstance(op, Wait)]
    assert len(found) > 10
    assert max(loops) >= 2


def test_a_bound_that_nothing_binds_is_named() -> None:
    hic = HostIrContainer()
    with hic:
        n = hic.scalar()
        with hic.loop(n):
            hic.append(Wait(number=1))
    for domain in (OneRank({}), AllRanks((0,), {})):
        with pytest.raises(InputError, match="no input of the program determines"):
            Noting(domain, [0]).run(hic.ops)


# ------------------------------------------------------------------ streams and communications
def number_of(values: dict[Symbol, int]) -> Any:
    return OneRank(values).value


def test_streams_are_found_by_number_by_name_and_unnamed() -> None:
    streams = StreamNumbers(number_of({RANK: 3}))
    state = EffectState[None](streams)
    s0, other, default = Stream(name="S0"), Stream(name="S1"), Stream(name="Default")
    assert streams.current == streams.find(default) == CALLER
    state.apply(Enters(Stream(RANK + 1)))
    assert streams.current == 4
    state.apply(Captures(s0))
    state.apply(Enters(default))
    assert (streams.current, streams.find(s0)) == (CALLER, 4)
    assert [streams.find(other), streams.find(Stream(name="S2"))] == [CALLER - 1, CALLER - 2]
    assert streams.find(other) == CALLER - 1
    clocks = Clocks(number_of({}), default="Default")
    assert [clocks.find(s) for s in (s0, default)] == ["S0", "Default"]
    assert clocks.current == ENTRY


def test_ranks_that_are_not_here_keep_their_stream() -> None:
    domain = AllRanks(RANKS, {})
    streams = StreamNumbers(domain.value, domain.merge)
    domain.mask = np.asarray([True, False, True, False, False])
    streams.enter(Stream(RANK))
    assert streams.current.tolist() == [0, -1, 2, -1, -1]
    domain.mask = np.asarray([True, True, False, False, False])
    streams.capture(Stream(name="S0"))
    assert streams.find(Stream(name="S0")).tolist() == [0, -1, -1, -1, -1]


@dataclass
class Started:
    """The expected result of `EffectState`, without the clock."""

    number: int
    began: object
    touched: list[str] = field(default_factory=list[str])

    @staticmethod
    def of(communication: InFlight[str] | None) -> Started | None:
        if communication is None:
            return None
        return Started(communication.number, communication.began, list(communication.touched))


def test_a_flight_has_what_all_members_of_its_group_touch() -> None:
    clocks = Clocks(number_of({}))
    state = EffectState[str](clocks)
    assert Started.of(state.apply(Starts(1), ["a"])) == Started(1, ENTRY, ["a"])
    state.apply(Enters(Stream(0)))
    assert state.apply(OpensGroup()) is None
    assert state.apply(Starts(2), ["b", "c"]) is None
    assert state.apply(Starts(3), ["d"]) is None
    clocks.advance()
    assert Started.of(state.apply(ClosesGroup(4))) == Started(4, 0, ["b", "c", "d"])
    assert sorted(state.in_flight) == [1, 4]
    assert state.apply(Waits(2)) is None
    state.apply(Enters(Stream(1)))
    assert clocks.now.get(0) is None
    assert Started.of(state.apply(Waits(4))) == Started(4, 0, ["b", "c", "d"])
    assert clocks.now[0] == 1, "stream 1 comes after what stream 0 had been given"
    assert state.apply(Waits(4)) is None
    state.apply(Joins(Stream(2)))
    assert sorted(state.in_flight) == [1]
