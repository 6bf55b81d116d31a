"""Partial sums that go into another placement: the cheapest communications, and right results."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, ops
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ops.define import define_tensor
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.queries import local_extents
from multidevice.sharding.reshard import communication_type, team_of
from tests.support.placement_pairs import (
    MESHES,
    SIZES,
    Names,
    X,
    Y,
    Z,
    cut,
    placements,
    shard,
)
from tests.support.rank_by_rank import run

Sizes = dict[ParallelType, int]
THREE = DeviceMesh(torch.arange(8).reshape(2, 2, 2))
GRIDS: dict[str, tuple[DeviceMesh, Sizes]] = {
    "4": (MESHES[1], SIZES[1]),
    "2x2": (MESHES[2], SIZES[2]),
    "2x2x2": (THREE, {X: 2, Y: 2, Z: 2}),
}
EXTENTS = (8, 16, 24, 8)


def pairs(axes: int, mesh: str) -> list[tuple[Names, Names]]:
    """Returns the placements of an operand [.., K] with those of its sum over K."""
    ndim = GRIDS[mesh][0].ndim
    return list(itertools.product(placements(axes + 1, ndim), placements(axes, ndim)))


def program(
    source: Names, target: Names, mesh: str, *, is_symbolic: bool = False
) -> FusionDefinition:
    devices, sizes = GRIDS[mesh]
    shape = EXTENTS[: len(source)]
    with FusionDefinition() as fd:
        extents = [-1] * len(shape) if is_symbolic else [*shape]
        x = fd.define_tensor(extents, contiguity=True, dtype=DataType.Float)
        y = fd.ops.sum(x, [len(shape) - 1])
        fd.add_output(y)
        for tv, names in ((x, source), (y, target)):
            tv.set_device_mesh(devices)
            cut(tv, names, sizes)
    return fd


# ------------------------------------------------------------------ brute force
# A placement of the sum, and the mesh dimensions along which devices have parts of it.
State = tuple[Names, frozenset[ParallelType]]


def least_sent(source: Names, target: Names, sizes: Sizes, longest: int = 3) -> Fraction:
    """Returns the least fraction of the result that a device sends, over all sequences of up to
    `longest` communications, with local slices between them.
    """
    start: State = source[:-1], frozenset(source[-1])
    ends = source[:-1], target
    reached: dict[State, Fraction] = {}
    level = {start: Fraction(0)}
    for _ in range(longest + 1):
        for state, sent in with_slices(level, ends, sizes).items():
            reached[state] = min(sent, reached.get(state, sent))
        following: dict[State, Fraction] = {}
        for state, sent in reached.items():
            for more, other in communications(state, ends, sizes):
                following[other] = min(sent + more, following.get(other, sent + more))
        level = following
    return reached[target, frozenset()]


def with_slices(
    level: dict[State, Fraction], ends: tuple[Names, Names], sizes: Sizes
) -> dict[State, Fraction]:
    found = dict(level)
    for _ in sizes:
        for (names, parts), sent in list(found.items()):
            free = set(sizes) - parts - {p for mine in names for p in mine}
            for p, k in itertools.product(free, range(len(names))):
                other = put(names, k, (*names[k], p)), parts
                if extents_allow(other[0], ends, sizes):
                    found[other] = min(sent, found.get(other, sent))
    return found


def communications(
    state: State, ends: tuple[Names, Names], sizes: Sizes
) -> Iterator[tuple[Fraction, State]]:
    """Yields (fraction of the result that a device sends, result) for each communication."""
    names, parts = state
    have = Fraction(1, math.prod(sizes[p] for mine in names for p in mine))
    axes = range(len(names))
    for p in parts:
        kept, moved = parts - {p}, have * Fraction(sizes[p] - 1, sizes[p])
        yield 2 * moved, (names, kept)
        for k in axes:
            if extents_allow(other := put(names, k, (*names[k], p)), ends, sizes):
                yield moved, (other, kept)
    for k in axes:
        if not names[k]:
            continue
        p, less = names[k][-1], put(names, k, names[k][:-1])
        yield have * (sizes[p] - 1), (less, parts)
        for j in axes:
            other = put(less, j, (*less[j], p))
            if j != k and extents_allow(other, ends, sizes):
                yield have * Fraction(sizes[p] - 1, sizes[p]), (other, parts)


def put(names: Names, axis: int, mine: tuple[ParallelType, ...]) -> Names:
    return (*names[:axis], mine, *names[axis + 1 :])


def extents_allow(names: Names, ends: tuple[Names, Names], sizes: Sizes) -> bool:
    """Whether the placements `ends` show that each axis is divisible by its number of blocks."""

    def blocks(mine: tuple[ParallelType, ...]) -> int:
        return math.prod(sizes[p] for p in mine)

    return all(
        set(mine) <= {*ends[0][k], *ends[1][k]}
        and any(blocks(end[k]) % blocks(mine) == 0 for end in ends)
        for k, mine in enumerate(names)
    )


def sent_by(fusion: Fusion, result_elements: int) -> Fraction:
    """Returns the number of elements that each device sends, as a fraction of the result."""
    total = Fraction(0)
    for op in fusion.exprs:
        if not isinstance(op, Reshard):
            continue
        sizes = [sc.int_value(n) for n in local_extents(op.inp)]
        own, n = math.prod(size for size in sizes if size is not None), team_of(op).size
        total += {
            "LocalSlice": Fraction(0),
            "Allgather": Fraction(own * (n - 1)),
            "Allreduce": Fraction(2 * own * (n - 1), n),
            "ReduceScatter": Fraction(own * (n - 1), n),
            "AllToAll": Fraction(own * (n - 1), n),
        }[communication_type(op)]
    return total / result_elements


def worse_than_brute_force(
    found: list[tuple[Names, Names]], mesh: str
) -> list[tuple[Names, Names, Fraction, Fraction]]:
    worse: list[tuple[Names, Names, Fraction, Fraction]] = []
    for source, target in found:
        fusion = program(source, target, mesh).fusion
        shard_fusion(fusion)
        sent = sent_by(fusion, math.prod(EXTENTS[: len(target)]))
        least = least_sent(source, target, GRIDS[mesh][1])
        if sent > least:
            worse.append((source, target, sent, least))
    return worse


@pytest.mark.parametrize(("axes", "mesh"), [(2, "4"), (3, "4"), (2, "2x2"), (3, "2x2")])
def test_no_sequence_sends_less(axes: int, mesh: str) -> None:
    partial = [(source, target) for source, target in pairs(axes, mesh) if source[-1]]
    assert worse_than_brute_force(partial, mesh) == []


def test_no_sequence_sends_less_on_three_mesh_dimensions() -> None:
    partial = [(source, target) for source, target in pairs(2, "2x2x2") if source[-1]]
    assert worse_than_brute_force(random.Random(3).sample(partial, 60), "2x2x2") == []


def test_parts_along_two_dimensions_are_scattered_before_they_are_added_along_the_other() -> None:
    fusion = program(((), (), (X, Y)), ((X,), ()), "2x2").fusion
    shard_fusion(fusion)
    found = [communication_type(op) for op in fusion.exprs if isinstance(op, Reshard)]
    assert found == ["ReduceScatter", "Allreduce"]


# ------------------------------------------------------------------ results
def check(source: Names, target: Names, mesh: str, *, is_symbolic: bool, ranks: list[int]) -> None:
    """Runs a sum on this rank, or on simulated ranks, and compares it with torch in float64."""
    devices = GRIDS[mesh][0]
    seed = torch.Generator().manual_seed(1)
    whole = torch.randint(-50, 50, EXTENTS[: len(source)], generator=seed).float()
    fd = program(source, target, mesh, is_symbolic=is_symbolic)

    def body() -> torch.Tensor:
        return fd.execute([shard(whole, source, devices, Communicator.instance().rank())])[0]

    if len(ranks) == 1:
        results = [body()]
    else:
        with simulate(len(ranks)) as world:
            results = world.run(body)
    for rank, out in zip(ranks, results, strict=True):
        want = shard(whole.double().sum(-1).float(), target, devices, rank)
        assert torch.equal(out, want), (source, target, rank)


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_matrices_on_simulated_ranks(mesh: str) -> None:
    for source, target in pairs(2, mesh):
        if source[-1]:
            check(source, target, mesh, is_symbolic=False, ranks=list(range(4)))


@pytest.mark.parametrize(
    ("axes", "mesh", "is_symbolic", "count"),
    [(2, "2x2", True, 16), (3, "2x2", False, 16), (3, "2x2", True, 8), (2, "2x2x2", False, 12)],
)
def test_a_sample_on_simulated_ranks(
    axes: int, mesh: str, count: int, *, is_symbolic: bool
) -> None:
    partial = [(source, target) for source, target in pairs(axes, mesh) if source[-1]]
    ranks = list(range(GRIDS[mesh][0].size))
    for source, target in random.Random(5).sample(partial, count):
        check(source, target, mesh, is_symbolic=is_symbolic, ranks=ranks)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("axes", "mesh", "count"), [(2, "4", 3), (2, "2x2", 88), (3, "2x2", 40)])
def test_placements_on_ranks(axes: int, mesh: str, count: int) -> None:
    partial = [(source, target) for source, target in pairs(axes, mesh) if source[-1]]
    for source, target in random.Random(5).sample(partial, count):
        rank = Communicator.instance().rank()
        check(source, target, mesh, is_symbolic=False, ranks=[rank])


@pytest.mark.parametrize("target", [((X,), (Y,)), ((Y, X), ()), ((X, Y), ()), ((), (X, Y))])
def test_a_product_over_parts_is_scattered_once(target: Names) -> None:
    devices, sizes = GRIDS["2x2"]
    fusion = Fusion()
    with FusionGuard(fusion):
        x, w = (define_tensor([8, 16], True, DataType.Double) for _ in range(2))
        fusion.add_input(x)
        fusion.add_input(w)
        y = ops.linear(x, w)
        fusion.add_output(y)
    for tv, names in ((x, ((), (X,))), (w, ((), (X,))), (y, target)):
        tv.set_device_mesh(devices)
        cut(tv, names, sizes)
    whole = [torch.randint(-9, 9, (8, 16)).double() for _ in range(2)]
    done = run(fusion, whole)
    assert [kind for kind, _ in done.collectives] == ["ReduceScatter"]
    assert torch.equal(done.outputs[0], whole[0] @ whole[1].T)
