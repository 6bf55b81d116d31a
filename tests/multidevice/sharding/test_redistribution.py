"""Changes of placement: plans are the cheapest sequences of steps, and results are right."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from functools import cache

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from hostir import Communication
from multidevice import Communicator, simulate
from multidevice.sharding.placement import Cut, Placement
from multidevice.sharding.redistribution import (
    PlanCost,
    SumStage,
    cheapest_detour,
    plan_steps,
    step_cost,
)
from tests.support.placement_pairs import (
    MESHES,
    SHAPE,
    SIZES,
    Names,
    X,
    check_pairs_of_this_rank,
    expected,
    pairs,
    placements,
    program,
    shard,
    whole_tensor,
)


def as_cuts(names: Names, sizes: dict[ParallelType, int]) -> Placement:
    return tuple(tuple(Cut(p, sizes[p]) for p in mine) for mine in names)


# ------------------------------------------------------------------ brute force
def share(names: Names, sizes: dict[ParallelType, int]) -> Fraction:
    return Fraction(1, math.prod(sizes[p] for mine in names for p in mine))


def extents_allow(names: Names, ends: tuple[Names, Names], sizes: dict[ParallelType, int]) -> bool:
    """Whether each axis is divided into a number of blocks that one of `ends` shows to be valid."""

    def blocks(mine: tuple[ParallelType, ...]) -> int:
        return math.prod(sizes[p] for p in mine)

    return all(
        any(set(mine) <= set(end[k]) | {*ends[0][k], *ends[1][k]} for end in ends)
        and any(blocks(end[k]) % blocks(mine) == 0 for end in ends)
        for k, mine in enumerate(names)
    )


@cache
def single_steps(names: Names, ndim: int) -> list[tuple[Fraction, Names]]:
    """Returns (elements sent by a device, result) for each single communication or local slice."""
    sizes = SIZES[ndim]
    have = share(names, sizes)
    found: list[tuple[Fraction, Names]] = []
    for other in placements(len(names), ndim):
        changed = [k for k, (a, b) in enumerate(zip(names, other, strict=True)) if a != b]
        if len(changed) == 1:
            old, new = names[changed[0]], other[changed[0]]
            if old[:-1] == new and old:
                found.append((have * (sizes[old[-1]] - 1), other))
            if new[:-1] == old and new and new[-1] not in {p for mine in names for p in mine}:
                found.append((Fraction(0), other))
        if len(changed) == 2:
            for a, b in (changed, changed[::-1]):
                is_moved = names[a] and other[b] and names[a][-1] is other[b][-1]
                if is_moved and names[a][:-1] == other[a] and other[b][:-1] == names[b]:
                    n = sizes[names[a][-1]]
                    found.append((have * Fraction(n - 1, n), other))
    return found


def least_sent(
    source: Names, target: Names, ndim: int, *, without_direct: bool = False
) -> Fraction | None:
    """Returns the least number of elements that a device sends, over all sequences of steps, or
    over those with several; None if there are none."""
    reached, changed = {source: Fraction(0)}, {source}
    while changed:
        now, changed = changed, set[Names]()
        for names in now:
            for more, other in single_steps(names, ndim):
                if without_direct and (names, other) == (source, target):
                    continue
                sent = reached[names] + more
                if sent < reached.get(other, sent + 1) and extents_allow(
                    other, (source, target), SIZES[ndim]
                ):
                    reached[other] = sent
                    changed.add(other)
    return reached.get(target)


def sent_by_plan(source: Names, target: Names, ndim: int) -> Fraction:
    sizes = SIZES[ndim]
    steps = plan_steps(as_cuts(source, sizes), as_cuts(target, sizes))
    through = [source, *(tuple(tuple(c.ptype for c in m) for m in cuts) for cuts in steps), target]
    total = Fraction(0)
    for here, there in itertools.pairwise(through):
        if here != there:
            total += next(s for s, other in single_steps(here, ndim) if other == there)
    return total


@pytest.mark.parametrize(("ndim", "count"), [(1, 16), (2, 361), (3, 250)])
def test_no_sequence_sends_less(ndim: int, count: int) -> None:
    """All pairs of the meshes of one and two dimensions, and a sample of three."""
    worse = [
        (source, target)
        for source, target in random.Random(5).sample(pairs("set", ndim), count)
        if sent_by_plan(source, target, ndim) != least_sent(source, target, ndim)
    ]
    assert worse == []


@pytest.mark.parametrize(("ndim", "count"), [(1, 16), (2, 361), (3, 150)])
def test_no_other_sequence_of_several_steps_sends_less(ndim: int, count: int) -> None:
    """The next best plan of each change that is one step."""
    sizes, seen = SIZES[ndim], 0
    for source, target in random.Random(6).sample(pairs("set", ndim), count):
        single = next((sent for sent, other in single_steps(source, ndim) if other == target), None)
        before, after = (SumStage(as_cuts(names, sizes)) for names in (source, target))
        cost = step_cost(before, after)
        assert (None if cost is None else cost.sent) == single
        detour = cheapest_detour(before, after.placement)
        least = least_sent(source, target, ndim, without_direct=True)
        if source != target:
            assert (None if detour is None else detour[0].sent) == least, (source, target)
            seen += single is not None and detour is not None
    assert seen > 5


def test_the_next_best_plans_of_sums() -> None:
    """Of 4 devices, each with parts of all elements."""
    parts, rows, whole = (Cut(X, 4),), ((Cut(X, 4),), ()), ((), ())
    scattered = cheapest_detour(SumStage(whole, parts), rows)
    assert scattered is not None
    cost, stages = scattered
    assert cost.sent == Fraction(6, 4) and stages == (SumStage(whole),)
    assert step_cost(SumStage(whole, parts), SumStage(rows)) == PlanCost(Fraction(3, 4), 1)
    assert cheapest_detour(SumStage(whole, parts), whole) is None
    assert step_cost(SumStage(whole, parts), SumStage(whole)) == PlanCost(Fraction(6, 4), 1)


def test_a_division_that_moves_is_sent_once() -> None:
    assert sent_by_plan(((X,), ()), ((), (X,)), 1) == Fraction(3, 16)
    assert sent_by_plan(((X,), ()), ((), ()), 1) == Fraction(3, 4)


# ------------------------------------------------------------------ results
SAMPLE = [("set", 1, 16), ("set", 2, 20), ("sum", 1, 8), ("sum", 2, 12)]


@pytest.mark.parametrize(("op", "ndim", "count"), SAMPLE)
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_results_on_simulated_ranks(op: str, ndim: int, count: int, *, is_symbolic: bool) -> None:
    found = pairs(op, ndim)
    whole = whole_tensor()
    for source, target in random.Random(7).sample(found, min(count, len(found))):
        fd = program(op, source, target, ndim, SHAPE, is_symbolic=is_symbolic)
        mesh = MESHES[ndim]

        def body(fd: FusionDefinition = fd, source: Names = source) -> torch.Tensor:
            rank = Communicator.instance().rank()
            return fd.execute([shard(whole, source, MESHES[ndim], rank)])[0]

        with simulate(4) as world:
            for rank, out in enumerate(world.run(body)):
                want = shard(expected(op, whole), target, mesh, rank)
                assert torch.equal(out, want), (source, target, rank)


def types_sent(fd: FusionDefinition, inputs: list[torch.Tensor]) -> list[str]:
    sent = fd._executor_cache().program_for(inputs).started()
    return [op.type for op in sent if isinstance(op, Communication)]


@pytest.mark.parametrize("target", [1, 2])
def test_a_moved_division_is_one_all_to_all(target: int) -> None:
    names: Names = ((), (X,), ()) if target == 1 else ((), (), (X,))
    fd = program("set", ((X,), (), ()), names, 1, SHAPE, is_symbolic=True)
    assert types_sent(fd, [torch.zeros(2, 12, 4)]) == ["AllToAll"]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("options", [[], ["peer_copies"]])
def test_all_pairs_of_one_mesh_on_ranks(options: list[str]) -> None:
    rank = Communicator.instance().rank()
    check_pairs_of_this_rank(pairs("set", 1), 1, rank, "cpu", options)
