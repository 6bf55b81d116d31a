"""Matching of ranks: correct programs have no findings, and each broken one is reported."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from fuser.ir.dtypes import DataType
from fuser.ir.op import Op, walk
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support.errors import FuserError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    EndCoalescing,
    ForLoop,
    HirAliasSelect,
    HostIrContainer,
    IfThenElse,
    P2PCommunication,
    StartCoalescing,
    TeamOf,
    Wait,
    eq,
)
from hostir.analysis import collective_matching, deadlocks
from hostir.analysis.collective_matching import find_mismatches
from hostir.ir.diagnostics import Finding, line_numbers, report
from multidevice.job.shard_tensor import LocalDeviceMesh
from tests.support.stream_programs import (
    N_STREAMS,
    PROGRAMS,
    D,
    Edit,
    allocated,
    change,
    drop,
    edited,
    index_of,
    is_right,
    nth,
    ring,
    select,
    spread_over,
    team,
)

MANY = [name for name, case in PROGRAMS.items() if case.ranks > 1]


def mismatches(hic: HostIrContainer) -> list[Finding]:
    return find_mismatches(hic, {NUMBER_OF_STREAMS: N_STREAMS})


@pytest.mark.parametrize("name", MANY)
def test_correct_programs_match(name: str) -> None:
    hic = PROGRAMS[name].build()
    found = mismatches(hic)
    assert not found, report(hic, found)


# ------------------------------------------------------------------ mutants
@dataclass(frozen=True)
class Mutant:
    """A program with one edit: what is reported, about which ops, and whether a run shows it."""

    program: str
    edit: Edit
    kind: str
    names: tuple[tuple[type[Op], int], ...]
    says: str
    shows: bool = True


COLLECTIVE, P2P, PERMUTE = Communication, P2PCommunication, CollectivePermute


def step(hic: HostIrContainer) -> Scalar:
    """Returns the index of the main loop."""
    return nth(hic, ForLoop, 1).index


def field(kind: type[Op], index: int, name: str, value: Callable[[Scalar], object]) -> Edit:
    """Sets a field to a function of the main loop's index."""
    return lambda hic: {(op := nth(hic, kind, index)): (op.replace(**{name: value(step(hic))}),)}


def swap_peers(hic: HostIrContainer) -> dict[Op, Sequence[Op]]:
    a, b = nth(hic, P2P, 0), nth(hic, P2P, 1)
    return {a: (a.replace(peer=b.peer),), b: (b.replace(peer=a.peer),)}


def in_branch(kind: type[Op], condition: Scalar) -> Edit:
    """Lets only some ranks carry out an op, and its Wait."""

    def edit(hic: HostIrContainer) -> dict[Op, Sequence[Op]]:
        op, wait = nth(hic, kind), nth(hic, Wait)
        return {op: (IfThenElse(condition, then=(op, wait)),), wait: ()}

    return edit


def all_rotated(hic: HostIrContainer) -> dict[Op, Sequence[Op]]:
    """Lets each rank begin with the chunk of its own number: every slice, so that each fits."""
    slices = [op for op in walk(hic.ops) if isinstance(op, HirAliasSelect)]
    return {op: (op.replace(index=(op.index + RANK) % 5),) for op in slices}


def retyped(program: str, kind: str, says: str) -> Mutant:
    """Another type of collective, which does not fit the sizes."""
    edit = change(COLLECTIVE, 0, type=kind)
    return Mutant(program, edit, collective_matching.SIZES, ((COLLECTIVE, 0),), says)


MUTANTS: dict[str, Mutant] = {
    "one root for all steps": Mutant(
        "broadcast_linear",
        change(COLLECTIVE, 0, root=0),
        collective_matching.MISPLACED,
        ((COLLECTIVE, 0),),
        "Broadcast from root 0 brings T0_g_float[0, 0:2, 0:6] into T2_g_float[1, 0:2, 0:6]",
    ),
    "root of the next step": Mutant(
        "matmul_reduce",
        field(COLLECTIVE, 0, "root", lambda i: (i + 1) % D),
        collective_matching.MISPLACED,
        ((COLLECTIVE, 0),),
        "Reduce from root 1",
    ),
    "every rank is root": Mutant(
        "broadcast_linear",
        change(COLLECTIVE, 0, root=RANK),
        deadlocks.MISMATCH,
        ((COLLECTIVE, 0),),
        "differ in root, but must use the same: 0 on rank 0, 1 on rank 1",
    ),
    "root outside of the team": Mutant(
        "broadcast_linear",
        field(COLLECTIVE, 0, "root", lambda i: i + 1),
        collective_matching.OUT_OF_RANGE,
        ((COLLECTIVE, 0),),
        "root 4 is no position in a team of 4",
    ),
    "swapped peers": Mutant(
        "ring_linear",
        swap_peers,
        collective_matching.MISPLACED,
        ((P2P, 0), (P2P, 1)),
        "rank 0 sends T0_g_float[0, 0:2, 0:6], which arrives as T2_g_float[2, 0:2, 0:6] on rank 1",
    ),
    "swapped peers of a ring that forwards": Mutant(
        "forwarding_ring",
        swap_peers,
        collective_matching.MISPLACED,
        ((P2P, 0), (P2P, 1)),
        "arrives as",
    ),
    "one peer swapped": Mutant(
        "ring_linear",
        lambda hic: {(b := nth(hic, P2P, 1)): (b.replace(peer=nth(hic, P2P, 0).peer),)},
        deadlocks.DEADLOCK,
        ((P2P, 0),),
        "rank 0 receives from rank 1, but rank 1 sends to rank 2; each rank waits for the next",
    ),
    "receives from whom it sends to": Mutant(
        "forwarding_ring",
        lambda hic: {(b := nth(hic, P2P, 1)): (b.replace(peer=nth(hic, P2P, 0).peer),)},
        deadlocks.PARTNER,
        ((P2P, 0), (P2P, 1)),
        "rank 0 sends to rank 1, but rank 1 receives from rank 2",
    ),
    "no receive": Mutant(
        "forwarding_ring",
        drop(P2P, 1),
        deadlocks.PARTNER,
        ((P2P, 0),),
        "rank 0 sends to rank 1, which has no matching receive",
    ),
    "a peer beyond the last rank": Mutant(
        "forwarding_ring",
        change(P2P, 0, peer=RANK + 1),
        collective_matching.OUT_OF_RANGE,
        ((P2P, 0),),
        "= 4 is no rank of the program, on rank 3",
    ),
    "permute the other way round": Mutant(
        "permute_ring",
        lambda hic: {
            (op := nth(hic, PERMUTE)): (op.replace(send_peer=op.recv_peer, recv_peer=op.send_peer),)
        },
        collective_matching.MISPLACED,
        ((PERMUTE, 0),),
        "arrives as",
    ),
    "permute with one peer": Mutant(
        "permute_ring",
        lambda hic: {(op := nth(hic, PERMUTE)): (op.replace(send_peer=op.recv_peer),)},
        deadlocks.PARTNER,
        ((PERMUTE, 0),),
        "rank 0 sends to rank 1, which receives from rank 2",
    ),
    "allreduce to allgather": retyped(
        "matmul_allreduce", "Allgather", "T6_g_float must have 4 times as many elements as"
    ),
    "allgather to allreduce": retyped("allgather_linear", "Allreduce", "Allreduce of 4 ranks"),
    "reduce-scatter to allreduce": retyped("reduce_scatter_pipeline", "Allreduce", "24 elements"),
    "allgather to reduce-scatter": retyped(
        "allgather_linear", "ReduceScatter", "ReduceScatter of 4 ranks"
    ),
    "team of half the ranks": Mutant(
        "matmul_allreduce",
        change(COLLECTIVE, 0, team=TeamOf(LocalDeviceMesh([0, 1]), (ParallelType.mesh_x,))),
        collective_matching.TEAM,
        ((COLLECTIVE, 0),),
        "is on DeviceMesh{0 1}",
    ),
    "team along the other mesh axis": Mutant(
        "matmul_allreduce",
        change(
            COLLECTIVE, 0, team=TeamOf(LocalDeviceMesh([[0, 1], [2, 3]]), (ParallelType.mesh_y,))
        ),
        collective_matching.TEAM,
        ((COLLECTIVE, 0),),
        "is on DeviceMesh{{0 1}{2 3}}",
    ),
    "a rank stays away": Mutant(
        "allgather_linear",
        in_branch(COLLECTIVE, RANK < 3),
        deadlocks.PARTNER,
        ((COLLECTIVE, 0),),
        "rank 3 never enters a communication",
    ),
    "output of the next step": Mutant(
        "allgather_linear",
        index_of(1, lambda i: (i + 1) % 5),
        collective_matching.MISPLACED,
        ((COLLECTIVE, 0),),
        "into T3_g_float[1, 0:4, 0:2, 0:6]",
        shows=False,
    ),
    "a gather of another chunk on each rank": Mutant(
        "allgather_linear",
        all_rotated,
        collective_matching.MISPLACED,
        ((COLLECTIVE, 0),),
        "different parts of a tensor in one Allgather: T3_g_float[0, 0:4, 0:2, 0:6] on rank 0, "
        "[1, 0:4, 0:2, 0:6] on rank 1",
    ),
    "an allreduce of another chunk on each rank": Mutant(
        "matmul_allreduce",
        all_rotated,
        collective_matching.MISPLACED,
        ((COLLECTIVE, 0),),
        "different parts of a tensor in one Allreduce",
    ),
    "a ring that forgets its rank": Mutant(
        "ring_linear",
        lambda hic: {(op := nth(hic, HirAliasSelect, 0)): (op.replace(index=step(hic)),)},
        collective_matching.MISPLACED,
        ((P2P, 0), (P2P, 1)),
        "arrives as",
        shows=False,
    ),
}


def mutated(name: str) -> HostIrContainer:
    hic = PROGRAMS[MUTANTS[name].program].build()
    return edited(hic, MUTANTS[name].edit(hic))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    mutant, hic = MUTANTS[name], mutated(name)
    found = mismatches(hic)
    wanted = [nth(hic, kind, index) for kind, index in mutant.names]
    named = [f for f in found if f.kind == mutant.kind and all(o in f.ops for o in wanted)]
    assert named, report(hic, found) + str(hic)
    lines = line_numbers(hic)
    text = named[0].text(lines)
    assert mutant.says in text, text
    assert all(f"line {lines[id(op)]}" in text for op in wanted)


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.shows])
def test_mutants_are_wrong_in_a_run(name: str) -> None:
    """The other judge: on simulated ranks the result is wrong, or the run ends in an error."""
    case, hic = PROGRAMS[MUTANTS[name].program], mutated(name)
    try:
        right = is_right(case, hic, late="all")
    except FuserError:
        right = False
    assert not right


# ------------------------------------------------------------------ programs of their own
def _two_ranks(define: Callable[[HostIrContainer], None]) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        define(hic)
    return hic


def _sends_and_receives(backend: str) -> HostIrContainer:
    """Every rank sends to the next one, and then receives: uncoalesced."""

    def define(hic: HostIrContainer) -> None:
        x = spread_over(hic.input([D, 4]), ring(), 0)
        y = allocated(hic, D, 4, mesh=ring(), axis=0)
        hic.append(
            P2PCommunication(x, (RANK + 1) % D, number=1, type="send", backend=backend),
            P2PCommunication(y, (RANK + D - 1) % D, number=2, type="recv", backend=backend),
            Wait(1),
            Wait(2),
        )
        hic.add_output(y)

    return _two_ranks(define)


def test_uncoalesced_transfers_block_each_other_on_a_stream() -> None:
    (found,) = (f for f in mismatches(_sends_and_receives("NCCL")) if f.kind == deadlocks.DEADLOCK)
    assert [op.name for op in found.ops] == ["P2PCommunication 1 (send)"] * D
    rest = [f for f in mismatches(_sends_and_receives("CUDA")) if f.kind == deadlocks.DEADLOCK]
    assert not rest


def _exchange(
    first: str, *, sizes: tuple[int, int] = (4, 4), dtype: DataType = DataType.Float
) -> HostIrContainer:
    """Ranks 0 and 1 swap a tensor; rank 1 begins with `first`."""

    def define(hic: HostIrContainer) -> None:
        mesh = LocalDeviceMesh([0, 1])
        x = spread_over(hic.input([sizes[0]]), mesh)
        y = spread_over(hic.tensor([sizes[1]], dtype), mesh)
        hic.append(Allocate(y))

        def swap(peer: int, order: list[str]) -> None:
            for kind in order:
                number = len(list(walk(hic.ops))) + 1 + peer * 50 + (kind == "send")
                buffer = x if kind == "send" else y
                hic.append(
                    P2PCommunication(buffer, peer, number=number, type=kind, backend="MPI"),
                    Wait(number),
                )

        with hic.branch(eq(RANK, 0)):
            swap(1, ["send", "recv"])
        with hic.otherwise():
            swap(0, [first, "send" if first == "recv" else "recv"])
        hic.add_output(y)

    return _two_ranks(define)


def test_transfers_meet_across_branches() -> None:
    assert not mismatches(_exchange("recv"))


def test_two_ranks_that_send_first_wait_for_each_other() -> None:
    (found,) = mismatches(_exchange("send"))
    assert found.kind == deadlocks.DEADLOCK
    assert [op.name.split()[-1] for op in found.ops] == ["(send)", "(send)"]
    assert "rank 0: its send waits for rank 1" in found.text({})


def test_a_send_and_its_receive_agree_in_size_and_dtype() -> None:
    (found, *_) = mismatches(_exchange("recv", sizes=(4, 3)))
    assert (found.kind, "differ in size" in found.what) == (deadlocks.MISMATCH, True)
    (found, *_) = mismatches(_exchange("recv", dtype=DataType.Half))
    assert (found.kind, "differ in dtype" in found.what) == (deadlocks.MISMATCH, True)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"type": "Allgather"}, "type"),
        ({"red_op": "MAX"}, "reduction"),
        ({"type": "Reduce", "root": 1}, "type"),
    ],
)
def test_ranks_meet_in_different_collectives(fields: dict[str, Any], what: str) -> None:
    def define(hic: HostIrContainer) -> None:
        x = spread_over(hic.input([4, 6]), ring())
        y = allocated(hic, 4, 6, mesh=ring())
        one = Communication(x, y, number=1, type="Allreduce", team=team())
        with hic.branch(RANK < 2):
            hic.append(one, Wait(1))
        with hic.otherwise():
            hic.append(one.replace(number=2, **fields), Wait(2))
        hic.add_output(y)

    (found,) = (f for f in mismatches(_two_ranks(define)) if f.kind == deadlocks.MISMATCH)
    assert f"different {what}" in found.what
    assert len(found.ops) == 2


def test_collectives_in_another_order() -> None:
    def define(hic: HostIrContainer) -> None:
        x, z = spread_over(hic.input([4, 6]), ring()), spread_over(hic.input([5]), ring())
        y, w = allocated(hic, 4, 6, mesh=ring()), allocated(hic, 5, mesh=ring())
        ops = [
            Communication(a, b, number=n, type="Allreduce", team=team())
            for n, (a, b) in enumerate(((x, y), (z, w)))
        ]
        again = [op.replace(number=op.number + 2) for op in reversed(ops)]
        with hic.branch(eq(RANK, 2)):
            hic.append(*(x for op in ops for x in (op, Wait(op.number))))
        with hic.otherwise():
            hic.append(*(x for op in again for x in (op, Wait(op.number))))
        hic.add_output(y)
        hic.add_output(w)

    (found, *_) = mismatches(_two_ranks(define))
    assert found.kind == deadlocks.MISMATCH
    assert "different size of the input" in found.what


def test_teams_that_wait_in_a_circle() -> None:
    """Teams along x first on some ranks, along y first on others: nobody is at both."""

    def define(hic: HostIrContainer) -> None:
        mesh = LocalDeviceMesh([[0, 1], [2, 3]])
        x = spread_over(hic.input([4]), mesh)
        y, z = allocated(hic, 4, mesh=mesh), allocated(hic, 4, mesh=mesh)
        ops = [
            Communication(x, out, number=n, type="Allreduce", team=TeamOf(mesh, (p,)))
            for n, (out, p) in enumerate(((y, ParallelType.mesh_x), (z, ParallelType.mesh_y)))
        ]
        again = [op.replace(number=op.number + 2) for op in reversed(ops)]
        # 0 meets 1 along x first, 1 meets 3 along y first, 3 meets 2 along x, 2 meets 0 along y.
        with hic.branch(eq(RANK % 3, 0)):
            hic.append(*(x for op in ops for x in (op, Wait(op.number))))
        with hic.otherwise():
            hic.append(*(x for op in again for x in (op, Wait(op.number))))
        hic.add_output(y)
        hic.add_output(z)

    (found,) = mismatches(_two_ranks(define))
    assert found.kind == deadlocks.DEADLOCK
    assert len(found.ops) == 4


def test_an_allgather_along_a_mesh_axis_that_does_not_spread_its_input() -> None:
    def define(hic: HostIrContainer) -> None:
        mesh = LocalDeviceMesh([[0, 1], [2, 3]])
        x = spread_over(hic.input([2, 4]), mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y = allocated(hic, 2, 4, mesh=mesh)
        of = TeamOf(mesh, (ParallelType.mesh_y,))
        hic.append(Communication(x, y, number=1, type="Allgather", team=of), Wait(1))
        hic.add_output(y)

    found = mismatches(_two_ranks(define))
    assert collective_matching.TEAM in {f.kind for f in found}
    assert (
        "Allgather works along deviceIdx.y, but T0_g_float is sharded along deviceIdx.x"
        in found[0].what
    )


# ------------------------------------------------------------------ many ranks
def _many(
    ranks: int, define: Callable[[HostIrContainer, LocalDeviceMesh], None]
) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        define(hic, LocalDeviceMesh(list(range(ranks))))
    return hic


def _user_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def test_4096_ranks_are_quick() -> None:
    def define(hic: HostIrContainer, mesh: LocalDeviceMesh) -> None:
        n = mesh.size
        x = spread_over(hic.input([n, 8]), mesh, 0)
        t, y = allocated(hic, n, 8, mesh=mesh), allocated(hic, 8, 8, mesh=mesh)
        of = TeamOf(mesh, (ParallelType.mesh_x,))
        with hic.loop(8, name="i") as i:
            ti = select(hic, t, 0, (RANK + i + 1) % n)
            hic.append(
                StartCoalescing(),
                P2PCommunication(ti, (RANK + i + 1) % n, number=1, type="recv"),
                P2PCommunication(x, (n + RANK - i - 1) % n, number=2, type="send"),
                EndCoalescing(3),
                Wait(3),
            )
            yi = select(hic, y, 0, i)
            hic.append(
                Communication(ti, yi, number=4, type="Allreduce", team=of),
                Wait(4),
            )
        hic.add_output(y)

    hic = _many(4096, define)
    mismatches(hic)
    start = _user_s()
    found = mismatches(hic)
    assert _user_s() - start < 1.0
    assert not [f for f in found if f.kind != collective_matching.MISPLACED], report(hic, found)
    send = nth(hic, P2PCommunication, 1)
    hic = edited(hic, {send: (send.replace(peer=(RANK + 1) % 4096),)})
    start = _user_s()
    found = mismatches(hic)
    assert _user_s() - start < 2.0
    assert found


def _direct_ring(ranks: int) -> HostIrContainer:
    """In step i each rank receives the shard of the rank i after it: one step less than ranks."""

    def define(hic: HostIrContainer, mesh: LocalDeviceMesh) -> None:
        x = spread_over(hic.input([ranks, 4]), mesh, 0)
        y = allocated(hic, ranks, 4, mesh=mesh)
        with hic.loop(ranks, 1, name="i") as i:
            source, target = (RANK + i) % ranks, (RANK - i + ranks) % ranks
            hic.append(
                StartCoalescing(),
                P2PCommunication(select(hic, y, 0, source), source, number=1, type="recv"),
                P2PCommunication(x, target, number=2, type="send"),
                EndCoalescing(3),
                Wait(3),
            )
        hic.add_output(y)

    return _many(ranks, define)


@pytest.mark.parametrize(("ranks", "limit_s"), [(64, 0.02), (2048, 1.2)])
def test_a_ring_over_all_ranks_is_quick(ranks: int, limit_s: float) -> None:
    hic = _direct_ring(ranks)
    taken: list[float] = []
    for _ in range(3):
        start = _user_s()
        found = mismatches(hic)
        taken.append(_user_s() - start)
        assert not found, report(hic, found)
    assert min(taken) < limit_s


def test_ranks_are_named_as_ranges() -> None:
    def define(hic: HostIrContainer, mesh: LocalDeviceMesh) -> None:
        x, y = spread_over(hic.input([8]), mesh), allocated(hic, 8, mesh=mesh)
        of = TeamOf(mesh, (ParallelType.mesh_x,))
        hic.append(Communication(x, y, number=1, type="Allgather", team=of), Wait(1))
        hic.add_output(y)

    (found,) = mismatches(_many(1024, define))
    assert found.what.endswith("on ranks 0..1023")
