"""Transfers between two meshes: every rank gets its blocks, and no rank sends more than it must."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, Replicate, Shard
from fuser import shard as annotate
from fuser.ir.dtypes import from_torch
from fuser.ir.fusion import TensorView
from hostir import Communication, P2PCommunication
from hostir.ir.parser import parse
from hostir.tools.run_text import run_simulated
from multidevice import Communicator, DeviceMesh, shard_tensor, simulate
from multidevice.sharding.mesh_transfer import Delivery, MeshTransfer, transfer_between
from multidevice.sharding.placement import Cut, Placement
from multidevice.sharding.redistribution import plan_arrival
from tests.support.host_programs import build_for

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
# For each axis, the mesh dimensions that divide it, outermost first.
Names = tuple[tuple[ParallelType, ...], ...]
Place = tuple[DeviceMesh, Names]
SHAPE = (12, 24)

MESHES = [
    DeviceMesh(ranks)
    for ranks in (
        [0],
        [3],
        [0, 1],
        [1, 0],
        [2, 3],
        [1, 2],
        [0, 1, 2],
        [0, 1, 2, 3],
        [2, 0, 3, 1],
        [[0, 1], [2, 3]],
        [[3, 1], [0, 2]],
    )
]


def placements(mesh: DeviceMesh) -> list[Names]:
    """Returns all ways to divide two axes by a subset of the mesh dimensions with many ranks."""
    types = [p for p in (X, Y) if mesh.size_of(p) > 1]
    found: set[Names] = set()
    for places in itertools.product(range(-1, 2), repeat=len(types)):
        on_axes = [[p for p, at in zip(types, places, strict=True) if at == k] for k in range(2)]
        found.update(itertools.product(*(itertools.permutations(mine) for mine in on_axes)))
    return sorted(found, key=str)


PLACES: list[Place] = [(mesh, names) for mesh in MESHES for names in placements(mesh)]


def as_cuts(place: Place) -> Placement:
    mesh, names = place
    return tuple(tuple(Cut(p, mesh.size_of(p)) for p in mine) for mine in names)


def shard(whole: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
    mesh, names = place
    for axis, mine in enumerate(names):
        for ptype in mine:
            whole = whole.chunk(mesh.size_of(ptype), axis)[mesh.coordinate(rank, ptype)]
    return whole


def transfer(source: Place, target: Place) -> MeshTransfer:
    return transfer_between((source[0], as_cuts(source)), (target[0], as_cuts(target)))


# ------------------------------------------------------------------ deliveries
def delivered(found: MeshTransfer, source: Place, target: Place) -> dict[int, torch.Tensor]:
    """Carries out the deliveries on slices of one tensor."""
    whole = torch.arange(math.prod(SHAPE)).reshape(SHAPE)
    size = [n // count for n, count in zip(SHAPE, found.pieces, strict=True)]
    outs = {r: torch.full_like(shard(whole, target, r), -1) for r in target[0].devices}

    def piece(block: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
        for axis, (k, n) in enumerate(zip(at, size, strict=True)):
            block = block.narrow(axis, k * n, n)
        return block

    for d in found.deliveries:
        assert source[0].has(d.source)
        sent = piece(shard(whole, source, d.source), d.sent)
        piece(outs[d.target], d.received).copy_(sent)
    return outs


def test_deliveries_bring_every_block() -> None:
    whole = torch.arange(math.prod(SHAPE)).reshape(SHAPE)
    for source, target in itertools.product(PLACES, repeat=2):
        outs = delivered(transfer(source, target), source, target)
        for rank, out in outs.items():
            assert torch.equal(out, shard(whole, target, rank)), (source, target, rank)


def test_nothing_is_sent_that_a_rank_has_and_the_work_is_shared() -> None:
    whole = torch.arange(math.prod(SHAPE)).reshape(SHAPE)
    for source, target in itertools.product(PLACES, repeat=2):
        found = transfer(source, target)
        here, there = source[0].devices, target[0].devices
        had = {r: set(shard(whole, source, r).flatten().tolist()) for r in here}
        lacks = [set(shard(whole, target, r).flatten().tolist()) - had.get(r, set()) for r in there]
        least = Fraction(sum(map(len, lacks)), len(here) * whole.numel())
        if not found.teams:
            sent = Counter(d.source for d in found.deliveries if not d.is_local)
            total = Fraction(sum(sent.values()), math.prod(found.pieces))
            assert total == Fraction(sum(map(len, lacks)), whole.numel()), (source, target)
            assert found.sent >= least
            owners = {frozenset(elements): 0 for elements in had.values()}
            for rank, elements in had.items():
                owners[frozenset(elements)] = max(owners[frozenset(elements)], sent[rank])
            # Ranks with equal blocks send equally much, up to one piece.
            for rank, elements in had.items():
                assert owners[frozenset(elements)] - sent[rank] <= 1, (source, target)


def test_one_sender_of_many_broadcasts() -> None:
    whole, many = ((), ()), DeviceMesh([1, 2, 3])
    found = transfer((DeviceMesh([0]), whole), (many, whole))
    assert (found.teams, found.sent) == (((0, 1, 2, 3),), 1)
    # Two ranks have the tensor already, so they do not take part: each sends to one rank.
    found = transfer((DeviceMesh([0, 1]), whole), (DeviceMesh(range(4)), whole))
    assert found.deliveries[2:] == (Delivery(0, (0, 0), 2, (0, 0)), Delivery(1, (0, 0), 3, (0, 0)))
    assert not found.teams


# ------------------------------------------------------------------ plans
def test_a_tensor_arrives_cut_where_an_allgather_follows() -> None:
    wide, old = DeviceMesh([[2, 3], [4, 5]]), (DeviceMesh([0, 1]), ((X,), ()))
    at = plan_arrival((old[0], as_cuts(old)), (wide, ((), ())))
    assert [[c.ptype for c in cuts] for cuts in at] == [[X], []]
    same = plan_arrival((old[0], as_cuts(old)), (DeviceMesh([2, 3]), ((), ())))
    assert same == ((), ())


def test_an_extent_is_divided_only_as_the_source_shows() -> None:
    wide, old = DeviceMesh([2, 3, 4]), (DeviceMesh([0, 1]), ((X,), ()))
    assert plan_arrival((old[0], as_cuts(old)), (wide, ((), ()))) == ((), ())


# ------------------------------------------------------------------ programs
def cut(tv: TensorView, place: Place) -> None:
    mesh, names = place
    tv.set_device_mesh(mesh)
    for axis in reversed(range(len(names))):
        for k, ptype in enumerate(names[axis]):
            tv.outer_split(axis + k, mesh.size_of(ptype))
            tv.axis(axis + k).parallelize(ptype)


def copies(source: Place, targets: list[Place], sizes: tuple[int, ...]) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([*sizes], contiguity=True)
        cut(x, source)
        for target in targets:
            y = fd.ops.set(x)
            cut(y, target)
            fd.add_output(y)
    return fd


def check_copies(source: Place, targets: list[Place], sizes: tuple[int, ...]) -> None:
    """Checks a program that copies one tensor to many places: values, and the program's text."""
    whole = torch.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    program = build_for(copies(source, targets, sizes).fusion, [whole])
    text = program.full_text()
    assert parse(text).full_text() == text
    for rank, outs in enumerate(run_simulated(program, [whole], ranks=4)):
        for target, out in zip(targets, outs, strict=True):
            if target[0].has(rank):
                assert torch.equal(out, shard(whole, target, rank)), (source, target, rank)
            else:
                assert out.shape == (0,), (source, target, rank)


def others(source: Place) -> list[Place]:
    return [place for place in PLACES if place[0] != source[0]]


@pytest.mark.slow
@pytest.mark.parametrize("source", range(len(PLACES)))
def test_copies_to_every_place(source: int) -> None:
    check_copies(PLACES[source], others(PLACES[source]), SHAPE)


@pytest.mark.parametrize("sizes", [SHAPE, (-1, -1)])
@pytest.mark.parametrize("source", range(2, len(PLACES), 9))
def test_copies_to_some_places(source: int, sizes: tuple[int, ...]) -> None:
    here = PLACES[source]
    check_copies(here, random.Random(source).sample(others(here), 6), sizes)


def uneven_block(whole: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
    """Returns the shard of a rank as torch's DTensor cuts it: the last blocks may be shorter."""
    mesh, names = place
    for axis, mine in enumerate(names):
        for ptype in mine:
            size = -(-whole.size(axis) // mesh.size_of(ptype))
            start = min(mesh.coordinate(rank, ptype) * size, whole.size(axis))
            whole = whole.narrow(axis, start, min(size, whole.size(axis) - start))
    return whole


def check_uneven(source: Place, targets: list[Place], shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(math.prod(shape))).reshape(shape)

    def body() -> list[torch.Tensor]:
        rank = Communicator.instance().rank()
        given = uneven_block(whole, source, rank if source[0].has(rank) else source[0].devices[0])
        return list(copies(source, targets, shape).execute([given.contiguous()]))

    with simulate(4) as world:
        for rank, outs in enumerate(world.run(body)):
            for target, out in zip(targets, outs, strict=True):
                want = uneven_block(whole, target, rank) if target[0].has(rank) else torch.empty(0)
                assert torch.equal(out, want), (source, target, rank)


@pytest.mark.parametrize("shape", [(7, 10), (5, 9), (12, 7)])
def test_uneven_shards(shape: tuple[int, ...]) -> None:
    drawn = random.Random(11)
    places = [place for place in PLACES if all(len(mine) < 2 for mine in place[1])]
    for source in drawn.sample(places, 5):
        others = [place for place in places if place[0] != source[0]]
        check_uneven(source, drawn.sample(others, 3), shape)


def test_shards_that_are_even_on_one_mesh_only() -> None:
    pair: Place = (DeviceMesh([[0, 1], [2, 3]]), ((), (Y,)))
    four: Place = (DeviceMesh([2, 0, 3, 1]), ((), (X,)))
    check_uneven(pair, [four], (7, 10))  # 5 and 5 columns, then 3, 3, 3 and 1
    check_uneven(four, [pair], (7, 10))


def test_ops_follow_the_mesh_of_their_result() -> None:
    """Sums, products and elementwise ops read operands of another mesh."""
    a, b = (DeviceMesh([0, 1]), ((X,), ())), (DeviceMesh([3, 2]), ((), (X,)))
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([12, 12], contiguity=True) for _ in range(2))
        y = fd.ops.matmul(fd.ops.neg(x), w)
        total = fd.ops.add(fd.ops.sum(x, [0]), fd.ops.max(y, [0]))
        for tv, place in ((x, a), (w, b), (y, b), (total, (b[0], ((),)))):
            cut(tv, place)
        fd.add_output(y)
        fd.add_output(total)
    values = [torch.randint(-5, 5, (12, 12)).float() for _ in range(2)]
    product = -values[0] @ values[1]
    sums = values[0].sum(0) + product.amax(0)
    for rank, outs in enumerate(run_simulated(build_for(fd.fusion, values), values, ranks=4)):
        if rank in (2, 3):
            assert torch.equal(outs[0], shard(product, b, rank))
            assert torch.equal(outs[1], sums)


GRID = DeviceMesh([[[0], [1]], [[2], [3]]])
PAIR, LATER = DeviceMesh([0, 1]), DeviceMesh([2, 3])
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (torch.tensor(3.0), (DeviceMesh([0]), [WHOLE]), (DeviceMesh([1, 2, 3]), [WHOLE])),
        (torch.zeros(0, 8), (PAIR, [ROWS]), (LATER, [COLUMNS])),
        (torch.arange(32).reshape(8, 4).bfloat16(), (PAIR, [ROWS]), (LATER, [COLUMNS])),
        (torch.arange(32).reshape(8, 4) % 3 == 0, (PAIR, [ROWS]), (LATER, [COLUMNS])),
        (torch.arange(32).reshape(8, 4) * (1 + 2j), (PAIR, [ROWS]), (LATER, [WHOLE])),
        (torch.arange(32.0).reshape(4, 8).T, (PAIR, [COLUMNS]), (LATER, [ROWS])),
        (
            torch.arange(192.0).reshape(8, 4, 6),
            (GRID, [ROWS, COLUMNS, WHOLE]),
            (DeviceMesh([3, 2, 1, 0]), [ROWS]),
        ),
    ],
)
def test_tensors_of_any_dtype_order_and_number_of_axes_return(
    value: torch.Tensor, source: tuple[DeviceMesh, list[Any]], target: tuple[DeviceMesh, list[Any]]
) -> None:
    def body() -> None:
        rank = Communicator.instance().rank()
        is_transposed = value.ndim == 2 and value.stride(0) == 1
        order = [0, 1] if is_transposed else [*reversed(range(value.ndim))]
        with FusionDefinition() as fd:
            shape, dtype = [*value.shape], from_torch(value.dtype)
            x = fd.define_tensor(shape, contiguity=True, dtype=dtype, stride_order=order)
            annotate(x, *source)
            y = fd.ops.set(x)
            annotate(y, *target)
            z = fd.ops.set(y)
            annotate(z, *source)
            fd.add_output(y)
            fd.add_output(z)
        outs = fd.execute([shard_tensor(value, x)])
        for mesh, tv, out in ((target[0], y, outs[0]), (source[0], z, outs[1])):
            want = shard_tensor(value, tv) if mesh.has(rank) else torch.empty(0, dtype=value.dtype)
            assert torch.equal(out, want), rank

    with simulate(4) as world:
        world.run(body)


@pytest.mark.parametrize("ranks", [[1, 0], [0, 2], [2, 3]])
@pytest.mark.parametrize(("source", "target"), [(ROWS, WHOLE), (WHOLE, ROWS), (ROWS, COLUMNS)])
def test_a_divided_broadcast_axis(ranks: list[int], source: Any, target: Any) -> None:
    value, mesh = torch.arange(4.0).reshape(1, 4), DeviceMesh(ranks)
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 4], contiguity=[None, True], mesh=PAIR, placements=[WHOLE])
        y = fd.ops.expand(x, [8, 4])
        annotate(y, PAIR, [source])
        z = fd.ops.set(y)
        annotate(z, mesh, [target])
        fd.add_output(z)
    place: Place = (mesh, {ROWS: ((X,), ()), COLUMNS: ((), (X,)), WHOLE: ((), ())}[target])
    program = build_for(fd.fusion, [value])
    for rank, (out,) in enumerate(run_simulated(program, [value], ranks=4)):
        if mesh.has(rank):
            assert torch.equal(out, shard(value.expand(8, 4), place, rank))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("options", [[], ["peer_copies"]])
def test_copies_between_meshes_on_ranks(options: list[str]) -> None:
    rank = Communicator.instance().rank()
    whole = torch.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    drawn = random.Random(5)
    for source in drawn.sample(PLACES, 10):
        targets = drawn.sample(others(source), 8)
        fd = copies(source, targets, SHAPE)
        given = shard(whole, source, rank).contiguous()
        outs = fd.execute([given], _enable_options=options)
        for target, out in zip(targets, outs, strict=True):
            want = shard(whole, target, rank) if target[0].has(rank) else torch.empty(0)
            assert torch.equal(out, want), (source, target)


# ------------------------------------------------------------------ which communications
def test_a_sum_over_devices_is_made_before_it_leaves() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([*SHAPE], contiguity=True)
        y = fd.ops.sum(x, [0])
        for tv, place in ((x, (DeviceMesh([0, 1]), ((X,), ()))), (y, (DeviceMesh([2, 3]), ((),)))):
            cut(tv, place)
        fd.add_output(y)
    started = build_for(fd.fusion, [torch.zeros(SHAPE)]).started()
    (total,) = (op for op in started if isinstance(op, Communication))
    assert (total.type, str(total.team)) == ("Allreduce", "(0 1)")
    assert [op.buffer.ndim for op in started if isinstance(op, P2PCommunication)] == [1, 1]


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        ((DeviceMesh([1, 0]), ((X,), ())), ["send", "recv"]),
        ((DeviceMesh([2, 3]), ((X,), ())), ["send", "recv"]),
        ((DeviceMesh([2]), ((), ())), ["send", "recv", "recv"]),
        ((DeviceMesh([0, 1, 2, 3]), ((X,), ())), ["send", "send", "recv"]),
    ],
)
def test_blocks_are_sent_once(target: Place, kinds: list[str]) -> None:
    source: Place = (DeviceMesh([0, 1]), ((X,), ()))
    started = build_for(copies(source, [target], SHAPE).fusion, [torch.zeros(SHAPE)]).started()
    assert [op.type for op in started if isinstance(op, P2PCommunication)] == kinds
    assert not any(isinstance(op, Communication) for op in started)
