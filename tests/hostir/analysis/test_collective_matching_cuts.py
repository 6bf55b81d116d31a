"""Matching of ranks in special cases: axes that are cut twice, memory that is not cut like the
tensors, and members of a team that communicate in different ops."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    EndCoalescing,
    HostIrContainer,
    P2PCommunication,
    ShardByStream,
    StartCoalescing,
    TeamOf,
    Wait,
    eq,
)
from hostir.analysis import collective_matching, deadlocks
from hostir.analysis.collective_matching import find_mismatches
from hostir.ir.diagnostics import report
from multidevice.job.shard_tensor import LocalDeviceMesh
from tests.support.stream_programs import allocated, select, spread_over

X = ParallelType.mesh_x
PAIR = LocalDeviceMesh([0, 1])
TEAM = TeamOf(PAIR, (X,))


def filled(hic: HostIrContainer, *shape: int, axis: int | None = None, split: bool = False):
    return spread_over(hic.input(list(shape)), PAIR, axis, split)


def call(
    kind: str, inp: TensorView, out: TensorView, number: int = 0, **fields: object
) -> list[Op]:
    fields = {"team": TEAM, **fields}
    op = Communication(inp, out, number=number, type=kind, **fields)
    return [op, Wait(number)]


def permute(inp: TensorView, out: TensorView, peer: Scalar | int, number: int) -> list[Op]:
    peer = sc.as_scalar(peer)
    return [CollectivePermute(inp, out, peer, peer, number=number, team=TEAM), Wait(number)]


def send(tv: TensorView, peer: Scalar | int, number: int) -> list[Op]:
    op = P2PCommunication(tv, sc.as_scalar(peer), number=number, type="send", backend="MPI")
    return [op, Wait(number)]


def receive(tv: TensorView, peer: Scalar | int, number: int) -> list[Op]:
    op = P2PCommunication(tv, sc.as_scalar(peer), number=number, type="recv", backend="MPI")
    return [op, Wait(number)]


def by_rank(hic: HostIrContainer, first: list[Op], second: list[Op]) -> None:
    """Rank 0 carries out some ops, rank 1 others."""
    with hic.branch(eq(RANK, 0)):
        hic.append(*first)
    with hic.otherwise():
        hic.append(*second)


# ------------------------------------------------------------------ cut twice
def blocks(tv: TensorView, *, devices: bool) -> TensorView:
    """Cuts rows [steps, rest], or [steps, devices, rest]."""
    tv.set_device_mesh(PAIR)
    tv.outer_split(0, 4)
    if devices:
        tv.outer_split(1, 2)
        tv.axis(1).parallelize(X)
    tv.axis(0).parallelize(ParallelType.stream)
    return tv


def gather_blocks(hic: HostIrContainer, right: bool) -> None:
    """Every step gathers one block of rows, which the devices share."""
    x = blocks(hic.input([16, 3]), devices=True)
    y = allocated(hic, 16, 3, mesh=PAIR)
    with hic.loop(4) as i:
        mine, whole = (
            blocks(hic.tensor([16, 3]), devices=True),
            blocks(hic.tensor([16, 3]), devices=False),
        )
        hic.append(ShardByStream(mine, x, stream_index=i))
        hic.append(ShardByStream(whole, y, stream_index=i if right else (i + 1) % 4))
        hic.append(*call("Allgather", mine, whole))
    hic.add_output(y)


def scatter_blocks(hic: HostIrContainer, right: bool) -> None:
    """Every step scatters one block of rows; wrong: all of it at once, into rows that lie in
    pieces."""
    x, y = filled(hic, 16, 3), blocks(hic.tensor([16, 3]), devices=True)
    hic.append(Allocate(y))
    if not right:
        hic.append(*call("Scatter", x, y, root=sc.as_scalar(0)))
    else:
        with hic.loop(4) as i:
            whole, mine = (
                blocks(hic.tensor([16, 3]), devices=False),
                blocks(hic.tensor([16, 3]), devices=True),
            )
            hic.append(
                ShardByStream(whole, x, stream_index=i), ShardByStream(mine, y, stream_index=i)
            )
            hic.append(*call("Scatter", whole, mine, root=sc.as_scalar(0)))
    hic.add_output(y)


# ------------------------------------------------------------------ memory
def gather_columns(hic: HostIrContainer, right: bool) -> None:
    axis = 0 if right else 1
    x, y = filled(hic, 4, 4, axis=axis, split=True), allocated(hic, 4, 4, mesh=PAIR)
    hic.append(*call("Allgather", x, y))
    hic.add_output(y)


def gather_columns_of_one_row(hic: HostIrContainer, right: bool) -> None:
    """Columns are consecutive in memory where there is one row."""
    x, y = filled(hic, 3, 2, 4, axis=2, split=True), allocated(hic, 3, 2, 4, mesh=PAIR)
    with hic.loop(3) as i:
        a, b = (hic.select(tv, 0, i) for tv in (x, y))
        if right:
            with hic.loop(2) as j:
                hic.append(*call("Allgather", hic.select(a, 0, j), hic.select(b, 0, j)))
        else:
            hic.append(*call("Allgather", a, b))
    hic.add_output(y)


def gather_transposed(hic: HostIrContainer, right: bool) -> None:
    """Columns are consecutive in memory that has them outermost."""
    x, y = filled(hic, 4, 4, axis=1, split=True), hic.tensor([4, 4], mesh=PAIR)
    for tv in (x, y) if right else (y,):
        loop = tv.domain.loop
        axes = (*loop[1:], loop[0]) if tv is x else (loop[1], loop[0])
        tv.set_allocation_domain(list(axes), True)
    hic.append(Allocate(y), *call("Allgather", x, y))
    hic.add_output(y)


def reduce_scatter_columns(hic: HostIrContainer, right: bool) -> None:
    axis = 0 if right else 1
    x, y = filled(hic, 4, 4), allocated(hic, 4, 4, mesh=PAIR, axis=axis, split=True)
    hic.append(*call("ReduceScatter", x, y))
    hic.add_output(y)


def scatter_columns(hic: HostIrContainer, right: bool) -> None:
    axis = 0 if right else 1
    x, y = filled(hic, 4, 4), allocated(hic, 4, 4, mesh=PAIR, axis=axis, split=True)
    hic.append(*call("Scatter", x, y, root=sc.as_scalar(1)))
    hic.add_output(y)


def gather_reversed(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 2, 4, axis=0), allocated(hic, 2, 4, mesh=PAIR)
    team = TEAM if right else TeamOf(LocalDeviceMesh([1, 0]), (X,))
    hic.append(*call("Gather", x, y, root=sc.as_scalar(0), team=team))
    hic.add_output(y)


def all_to_all(hic: HostIrContainer, right: bool) -> None:
    """Rows to columns: each rank's rows are contiguous only if it has one."""
    rows = 2 if right else 4
    x = filled(hic, rows, 4, axis=0, split=True)
    y = allocated(hic, rows, 4, mesh=PAIR, axis=1, split=True)
    hic.append(*call("AllToAll", x, y))
    hic.add_output(y)


# ------------------------------------------------------------------ different ops
def permutes_of_two(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    by_rank(hic, permute(x, y, 1, 0), permute(x, y, 0 if right else 1, 1))
    hic.add_output(y)


def permutes_of_sizes(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    z, w = (filled(hic, 4), y) if right else (filled(hic, 2), allocated(hic, 2, mesh=PAIR))
    by_rank(hic, permute(x, y, 1, 0), permute(z, w, 0, 1))
    hic.add_output(y)


def gathers_of_sizes(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4, axis=0, split=True), allocated(hic, 4 if right else 6, mesh=PAIR)
    by_rank(hic, call("Allgather", x, y), call("Allgather", x, y, 1))
    hic.add_output(y)


def roots_outside(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    with hic.loop(2 if right else 3) as i:
        by_rank(hic, call("Broadcast", x, y, root=i), call("Broadcast", x, y, 1, root=i))
    hic.add_output(y)


def broadcasts_of_parts(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 2, 4), allocated(hic, 2, 4, mesh=PAIR)
    a, b = (
        (select(hic, x, 0, 0), select(hic, y, 0, 0)),
        (select(hic, x, 0, 1), select(hic, y, 0, 1)),
    )
    root = sc.as_scalar(0)
    by_rank(
        hic, call("Broadcast", *a, root=root), call("Broadcast", *(a if right else b), 1, root=root)
    )
    hic.add_output(y)


def broadcasts_from_roots(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 2, 4, axis=0), allocated(hic, 2, 4, mesh=PAIR)
    with hic.loop(2) as i:
        row, root = select(hic, y, 0, i), i if right else 1 - i
        by_rank(hic, call("Broadcast", x, row, root=root), call("Broadcast", x, row, 1, root=root))
    hic.add_output(y)


def order_of_sums(hic: HostIrContainer, right: bool) -> None:
    """Two allreduces of one size, which the other rank has in another order."""
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    z, w = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    one, two = ([*call("Allreduce", x, y, n), *call("Allreduce", z, w, n + 1)] for n in (0, 2))
    by_rank(hic, one, two if right else two[2:] + two[:2])
    hic.add_output(y)
    hic.add_output(w)


def sums_of_two_buffers(hic: HostIrContainer, right: bool) -> None:
    """Each rank has its part in a buffer of its own; wrong: of another half on rank 1."""
    x, z, y = filled(hic, 2, 4), filled(hic, 2, 4), allocated(hic, 2, 4, mesh=PAIR)
    row = select(hic, y, 0, 0)
    a, b = select(hic, x, 0, 0), select(hic, z, 0, 0 if right else 1)
    by_rank(hic, call("Allreduce", a, row), call("Allreduce", b, row, 1))
    hic.add_output(y)


def slots_of_transfers(hic: HostIrContainer, right: bool) -> None:
    """Neighbours swap rows of their own, one after the other."""
    x, y = filled(hic, 2, 4, axis=0), allocated(hic, 2, 4, mesh=PAIR)
    a, b = select(hic, x, 0, 0), select(hic, y, 0, 1 - RANK if right else RANK)
    by_rank(hic, [*send(a, 1, 0), *receive(b, 1, 1)], [*receive(b, 0, 2), *send(a, 0, 3)])
    hic.add_output(y)


def order_of_transfers(hic: HostIrContainer, right: bool) -> None:
    """Rank 0 sends two rows of its shard, which rank 1 takes in turn."""
    x, y = filled(hic, 2, 2, 4, axis=0), allocated(hic, 2, 2, 4, mesh=PAIR)
    mine, theirs = select(hic, x, 0, 0), select(hic, y, 0, 0)
    a, b = (select(hic, mine, 0, n) for n in (0, 1))
    where = [select(hic, theirs, 0, n if right else 1 - n) for n in (0, 1)]
    by_rank(
        hic,
        [*send(a, 1, 0), *send(b, 1, 1)],
        [*receive(where[0], 0, 2), *receive(where[1], 0, 3)],
    )
    hic.add_output(y)


# ------------------------------------------------------------------ peers
def peer_divides_by_zero(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    quotient = sc.floordiv(sc.as_scalar(1), RANK)
    # A division that is not taken on rank 0 does no harm.
    peer = sc.where(eq(RANK, 0), sc.as_scalar(1), quotient - 1) if right else quotient
    hic.append(StartCoalescing(), send(x, peer, 0)[0], receive(y, peer, 1)[0])
    hic.append(EndCoalescing(2), Wait(2))
    hic.add_output(y)


def root_divides_by_zero(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    root = sc.mod(sc.as_scalar(1), sc.as_scalar(1) if right else RANK)
    hic.append(*call("Broadcast", x, y, root=root))
    hic.add_output(y)


def index_divides_by_zero(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 2, 4, mesh=PAIR)
    index = sc.floordiv(sc.as_scalar(1), RANK + right)
    hic.append(*call("Allreduce", x, select(hic, y, 0, index - right + RANK * right)))
    hic.add_output(y)


def sends_to_itself(hic: HostIrContainer, right: bool) -> None:
    x, y = filled(hic, 4), allocated(hic, 4, mesh=PAIR)
    peer = (RANK + 1) % 2 if right else RANK
    ops = [send(x, peer, 0)[0], *([receive(y, peer, 1)[0]] if right else ())]
    hic.append(StartCoalescing(), *ops, EndCoalescing(2), Wait(2))
    hic.add_output(y)


def exchange_of_shards(hic: HostIrContainer, right: bool) -> None:
    """Shards that go round as they are: right; wrong: of other sizes."""
    x = filled(hic, 2, 4, axis=0)
    y = allocated(hic, 2, 4 if right else 3, mesh=PAIR, axis=0)
    by_rank(hic, [*send(x, 1, 0), *receive(y, 1, 1)], [*receive(y, 0, 2), *send(x, 0, 3)])
    hic.add_output(y)


@dataclass(frozen=True)
class Case:
    define: Callable[[HostIrContainer, bool], None]
    kind: str
    says: str


LOST, BEYOND = collective_matching.MISPLACED, collective_matching.OUT_OF_RANGE
CASES = (
    Case(gather_blocks, LOST, "Allgather brings T0_g_float[0:2, 0:3] into T1_g_float[4:8, 0:3]"),
    Case(scatter_blocks, LOST, "into T1_g_float[{0:2, 4:6, 8:10, 12:14}, 0:3]"),
    Case(gather_columns, LOST, "in memory, T1_g_float[0:2, 0:4] is the piece of position 0"),
    Case(gather_columns_of_one_row, LOST, "T1_g_float[0, 0, 0:4] is the piece of position 0"),
    Case(gather_transposed, LOST, "Allgather brings T0_g_float[0:4, 0:2]"),
    Case(reduce_scatter_columns, LOST, "T0_g_float[0:2, 0:4] is the piece for position 0"),
    Case(scatter_columns, LOST, "Scatter from root 1 brings T0_g_float[0:4, 0:4]"),
    Case(gather_reversed, LOST, "T1_g_float[1, 0:4] is the piece of position 1"),
    Case(all_to_all, LOST, "AllToAll brings T0_g_float[0, 0:4] into T1_g_float[0:2, 0:2]"),
    Case(permutes_of_two, deadlocks.PARTNER, "rank 0 sends to rank 1, which receives from itself"),
    Case(
        permutes_of_sizes,
        collective_matching.SIZES,
        "rank 1 sends 2 elements, but rank 0 receives 4",
    ),
    Case(
        gathers_of_sizes,
        collective_matching.SIZES,
        "T0_g_float has 2 elements and T1_g_float has 6",
    ),
    Case(
        roots_outside,
        BEYOND,
        "root 2 is no position in a team of 2 ranks, counted from 0, on rank 0",
    ),
    Case(broadcasts_of_parts, LOST, "brings T0_g_float[0, 0:4] into T1_g_float[1, 0:4], on rank 1"),
    Case(
        broadcasts_from_roots, LOST, "from root 1 brings T0_g_float[1, 0:4] into T1_g_float[0, 0:4]"
    ),
    Case(
        order_of_sums,
        LOST,
        "rank 0 uses T2_g_float in a collective where rank 1 uses T0_g_float, and",
    ),
    Case(sums_of_two_buffers, LOST, "T1_g_float[1, 0:4] into T2_g_float[0, 0:4], on rank 1"),
    Case(slots_of_transfers, LOST, "sends T0_g_float[0, 0:4], which arrives as T1_g_float[1, 0:4]"),
    Case(
        order_of_transfers, LOST, "sends T0_g_float[0, 0, 0:4], which arrives as T1_g_float[0, 1,"
    ),
    Case(peer_divides_by_zero, collective_matching.UNDEFINED, "divides by 0 on rank 0"),
    Case(root_divides_by_zero, collective_matching.UNDEFINED, "divides by 0 on rank 0"),
    Case(index_divides_by_zero, collective_matching.UNDEFINED, "divides by 0 on rank 0"),
    Case(sends_to_itself, deadlocks.PARTNER, "rank 0 sends to itself, but has no matching receive"),
    Case(exchange_of_shards, deadlocks.MISMATCH, "differ in size"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.define.__name__)
def test_broken_programs_are_reported_and_right_ones_are_not(case: Case) -> None:
    for right in (False, True):
        hic = HostIrContainer()
        with hic:
            case.define(hic, right)
        found = find_mismatches(hic, {NUMBER_OF_STREAMS: 4})
        text = report(hic, found)
        assert bool(found) != right, text
        assert right or (case.kind in text and case.says in text), text


@pytest.mark.parametrize("ranks", [2, 100, 8192])
def test_an_all_to_all_that_misplaces_data_is_found_in_teams_of_any_size(ranks: int) -> None:
    """Only some pairs of a large team are compared; rows are contiguous if each rank has one."""
    mesh = LocalDeviceMesh(list(range(ranks)))
    for rows, count in ((ranks, 0), (2 * ranks, 1)):
        hic = HostIrContainer()
        with hic:
            x = spread_over(hic.input([rows, 2 * ranks]), mesh, 0, split=True)
            y = allocated(hic, rows, 2 * ranks, mesh=mesh, axis=1, split=True)
            hic.append(*call("AllToAll", x, y, team=TeamOf(mesh, (X,))))
            hic.add_output(y)
        assert len(find_mismatches(hic, {})) == count


def test_fewer_partners_are_compared_on_larger_meshes() -> None:
    compared = {n: list(collective_matching._shifts(n, n)) for n in (1, 4, 64, 4096, 16384)}
    assert compared[1] == [0]
    assert compared[4] == [0, 1, 2, 3]
    assert compared[64] == list(range(64))
    assert sorted(compared[4096]) == [0, 1, *range(512, 4096, 512)]
    assert sorted(compared[16384]) == [0, 1, 4096, 8192, 12288]
