"""The evaluator does what a plain interpreter of host programs does: at once, recorded, replayed,
with other sizes, with streams held back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hostir
from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import MemoryType, ParallelType
from fuser.ops.define import define_tensor
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    HostIrContainer,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    StartCoalescing,
    Stream,
    SymmetricContiguousView,
    TeamOf,
    Wait,
)
from hostir.ir.ops import LocalSlice
from hostir.tools.run_text import shards_of
from multidevice import DeviceMesh
from tests.reference.comparison import WAYS, check_run
from tests.support import handmade_programs, host_programs, stream_programs
from tests.support.handmade_programs import enter_streams, leave_streams, unit

CALLS = 3
Calls = list[list[list[Any]]]


def calls_of(
    program: HostIrContainer, ranks: int, inputs: Callable[[int], list[Any]], count: int = CALLS
) -> Calls:
    """Returns the shards by rank for each of several calls."""
    return [
        [shards_of(program, given, rank) for rank in range(ranks)]
        for given in map(inputs, range(count))
    ]


def random(shapes: tuple[Any, ...], seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x, generator=generator) if isinstance(x, tuple) else x for x in shapes]


# ------------------------------------------------------------------ programs of other tests
@pytest.mark.parametrize(("way", "late"), WAYS)
@pytest.mark.parametrize("name", handmade_programs.EXAMPLES)
def test_programs_by_hand(name: str, way: str, late: str | int | None) -> None:
    example = handmade_programs.EXAMPLES[name]
    program = example.build()
    calls = calls_of(program, example.ranks, example.arguments)
    check_run(program, calls, streams=example.streams, way=way, late=late)


@pytest.mark.parametrize(("way", "late"), WAYS[:3])
@pytest.mark.parametrize("name", stream_programs.PROGRAMS)
def test_programs_with_streams(name: str, way: str, late: str | int | None) -> None:
    case = stream_programs.PROGRAMS[name]
    program = case.build()
    calls = calls_of(program, case.ranks, lambda seed: random(case.shapes, seed))
    check_run(program, calls, streams=stream_programs.N_STREAMS, way=way, late=late)


@pytest.mark.parametrize(("way", "late"), WAYS[:3])
@pytest.mark.parametrize("name", host_programs.CASES)
def test_compiled_programs(name: str, way: str, late: str | int | None) -> None:
    case = host_programs.CASES[name]
    program = host_programs.build(case)
    calls = calls_of(program, case.ranks, lambda seed: random(case.shapes, seed))
    check_run(program, calls, way=way, late=late)


@pytest.mark.parametrize(("way", "late"), WAYS[:3])
def test_numbers_of_kernels(way: str, late: str | int | None) -> None:
    """A kernel reads a number that changes between calls, and one that is computed from it."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t, by = define_tensor([-1, -1], contiguity=True), fusion.new_symbol(DataType.Float)
        fusion.inputs = [t, by]
        fusion.add_output(ops.add(ops.mul(t, by), by * by))  # pyright: ignore[reportArgumentType]
    program = host_programs.build_for(fusion, random(((4, 3), 1.0), 0))
    given = (((4, 3), 2.0), ((4, 3), -0.5), ((4, 3), 2.0), ((7, 3), 3.0), ((7, 3), 4.0))
    check_run(program, calls_of(program, 1, lambda k: random(given[k], k), 5), way=way, late=late)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(("way", "late"), WAYS[:3])
def test_inputs_that_kernels_update(way: str, late: str | int | None, is_read: bool) -> None:
    """A kernel writes directly into an input, or into memory that is copied to the input later."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = (define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fusion.inputs = [x, y]
        total = ops.add(x, y)
        fusion.add_output(total, x)  # pyright: ignore[reportArgumentType]
        fusion.add_output(ops.mul(total if is_read else y, 2.0))  # pyright: ignore[reportArgumentType]
    shapes = ((4, 3), (4, 3))
    program = host_programs.build_for(fusion, random(shapes, 0))
    given = (shapes, shapes, ((6, 3), (6, 3)), shapes)
    check_run(program, calls_of(program, 1, lambda k: random(given[k], k), 4), way=way, late=late)


@pytest.mark.parametrize("name", host_programs.CASES)
def test_compiled_programs_of_other_sizes(name: str) -> None:
    """Uses new, repeated and returning sizes of the free axes."""
    case = host_programs.CASES[name]
    program = host_programs.build(case)
    free = [
        {k for k, n in enumerate(tv.shape()) if isinstance(n, Symbol)}
        for tv in program.inputs
        if isinstance(tv, TensorView)
    ]
    rows = [
        tuple(
            tuple(n * by if k in axes else n for k, n in enumerate(shape))
            for axes, shape in zip(free, case.shapes, strict=True)
        )
        for by in (1, 1, 2, 2, 3, 1)
    ]
    if name.startswith("encoder"):
        rows = rows[:2]  # its heads are sizes of one another
    calls = calls_of(program, case.ranks, lambda k: random(rows[k], k), len(rows))
    check_run(program, calls)


# ------------------------------------------------------------------ programs of this file
@dataclass(frozen=True)
class Case:
    """A program with the global inputs of each call; `exact`: results are equal in every bit."""

    define: Callable[[HostIrContainer], None]
    calls: tuple[tuple[Any, ...], ...]
    ranks: int = 1
    streams: int = 3
    exact: bool = False


def allocated(hic: HostIrContainer, tv: TensorView, *, zero: bool = False) -> TensorView:
    hic.append(Allocate(tv, zero_init=zero))
    return tv


def copy(hic: HostIrContainer, out: TensorView, inp: TensorView) -> None:
    hic.append(nodes.LoadStoreOp(out, inp))


def accumulate(hic: HostIrContainer, out: TensorView, inp: TensorView) -> None:
    hic.append(nodes.BinaryOp(out, out, inp, kind="add"))


def chunk(hic: HostIrContainer, whole: TensorView, count: int, index: Scalar) -> TensorView:
    part = hic.tensor(list(whole.shape()))
    part.outer_split(0, count)
    part.axis(0).parallelize(ParallelType.stream)
    hic.append(ShardByStream(part, whole, index))
    return part


def numbers_decide(hic: HostIrContainer) -> None:
    """Inputs decide the range of a loop and the branch."""
    x, start, stop = hic.input([-1, 4]), hic.scalar(DataType.Int), hic.scalar(DataType.Int)
    flag = hic.scalar(DataType.Bool)
    total = allocated(hic, hic.tensor([4]), zero=True)
    with hic.loop(stop, start, 2) as i:
        with hic.branch(flag):
            accumulate(hic, total, hic.select(x, 0, i))
        with hic.otherwise(), hic.loop(i + 1, i) as j:
            accumulate(hic, total, hic.select(x, 0, j))
            accumulate(hic, total, hic.select(x, 0, 0))
    hic.add_output(total)


def an_input_is_updated(hic: HostIrContainer) -> None:
    """Updates rows of an input in place, and reads them afterwards."""
    x, scale = hic.input([-1, 5]), hic.scalar(DataType.Float)
    seen = allocated(hic, hic.tensor([x.size(0), 5]), zero=True)
    with hic.loop(x.size(0) - 1) as i:
        row, after = hic.select(x, 0, i), hic.select(x, 0, i + 1)
        hic.append(nodes.BinaryOp(after, row, scale, kind="mul"))
        copy(hic, hic.select(seen, 0, i), after)
    hic.add_output(seen)


def step_buffers(hic: HostIrContainer) -> None:
    """Computes blocks on streams, each with its own buffer; the last ones are short or empty."""
    x = hic.input([-1, 4])
    y = allocated(hic, hic.tensor([x.size(0), 4]))
    enter_streams(hic, NUMBER_OF_STREAMS)
    with hic.loop(4) as i:
        hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
        held = hic.tensor([x.size(0), 4])
        held.outer_split(0, 4)
        held.axis(0).parallelize(ParallelType.stream)
        hic.append(Allocate(held, stream_index=i))
        copy(hic, held, chunk(hic, x, 4, i))
        copy(hic, chunk(hic, y, 4, i), held)
        hic.append(Deallocate(held))
    leave_streams(hic, NUMBER_OF_STREAMS)
    hic.add_output(y)


def columns(hic: HostIrContainer) -> None:
    """Selects elements along an inner and then an outer axis; ranks exchange the results."""
    x = hic.input([3, -1, 2])
    y = allocated(hic, hic.tensor([3, x.size(1), 2]))
    with hic.loop(x.size(1)) as j:
        inner, outer = hic.select(x, 1, j), hic.select(y, 1, x.size(1) - 1 - j)
        with hic.loop(3) as i:
            copy(hic, hic.select(outer, 0, 2 - i), hic.select(inner, 0, i))
    hic.add_output(y)


def results_of_their_own(hic: HostIrContainer) -> None:
    """Has results without buffers in a loop, views of them, and their sum."""
    x = hic.input([-1, 6])
    y, total = (allocated(hic, hic.tensor([n, 3]), zero=True) for n in (x.size(0), 2))
    with hic.loop(x.size(0)) as i:
        doubled = ops.mul(hic.select(x, 0, i), 2.0)
        hic.append(doubled)
        pairs = ops.reshape(doubled, [3, 2])
        hic.append(pairs)
        copy(hic, hic.select(y, 0, i), hic.select(pairs, 1, 1))
        accumulate(hic, hic.select(total, 0, i % 2), hic.select(pairs, 1, 0))
    hic.add_output(y)
    turned = ops.permute(y, [1, 0])
    hic.append(turned)
    hic.add_output(turned)
    hic.add_output(y)
    hic.add_output(total)


def units_in_a_loop(hic: HostIrContainer) -> None:
    """Runs a host unit per block, the last of another size, and one on the whole tensor."""
    x = hic.input([-1, 4])
    y, z = (allocated(hic, hic.tensor([x.size(0), 4])) for _ in range(2))
    number = hic.unit(unit(lambda x: (ops.mul(x, 3.0), ops.neg(x)), 2))
    with hic.loop(3) as i:
        outs = chunk(hic, y, 3, i), chunk(hic, z, 3, i)
        hic.append(PostOnStream((chunk(hic, x, 3, i),), outs, unit=number))
    outs = hic.tensor([x.size(0), 4]), hic.tensor([x.size(0), 4])
    hic.append(PostOnStream((y,), outs, unit=number))
    for tv in (y, z, *outs):
        hic.add_output(tv)


def a_number_of_a_unit(hic: HostIrContainer) -> None:
    """Passes a unit an input number and a computed number."""
    x, scale = hic.input([-1, 3]), hic.scalar(DataType.Float)
    fusion = Fusion()
    with FusionGuard(fusion):
        t, by = define_tensor([-1, -1], contiguity=True), fusion.new_symbol(DataType.Float)
        fusion.inputs = [t, by]
        fusion.add_output(ops.mul(t, by))  # pyright: ignore[reportArgumentType]
    number = hic.unit(fusion)
    y, z = (allocated(hic, hic.tensor([x.size(0), 3])) for _ in range(2))
    hic.append(PostOnStream((x, scale), (y,), unit=number))
    hic.append(PostOnStream((y, scale * scale), (z,), unit=number))
    hic.add_output(y)
    hic.add_output(z)


def _mesh(ranks: int) -> tuple[DeviceMesh, TeamOf]:
    mesh = DeviceMesh(list(range(ranks)))
    return mesh, TeamOf(mesh, (ParallelType.mesh_x,))


def spread(tv: TensorView, axis: int = 0) -> TensorView:
    tv.axis(axis).parallelize(ParallelType.mesh_x)
    return tv


def every_root(hic: HostIrContainer) -> None:
    """Each rank in turn broadcasts, gathers, reduces and scatters."""
    mesh, team = _mesh(3)
    x = spread(hic.input([3, 4], mesh=mesh))
    sent = allocated(hic, hic.tensor([3, 4], mesh=mesh))
    gathered = allocated(hic, hic.tensor([3, 4], mesh=mesh), zero=True)
    most = allocated(hic, hic.tensor([4], mesh=mesh), zero=True)
    own = allocated(hic, spread(hic.tensor([3, 3, 4], mesh=mesh), 1))
    with hic.loop(3) as root:
        hic.append(
            Communication(
                x, hic.select(sent, 0, root), number=0, type="Broadcast", team=team, root=root
            ),
            Wait(0),
        )
        whole = allocated(hic, hic.tensor([3, 4], mesh=mesh), zero=True)
        hic.append(Communication(x, whole, number=1, type="Gather", team=team, root=root), Wait(1))
        best = allocated(hic, hic.tensor([4], mesh=mesh), zero=True)
        hic.append(
            Communication(x, best, number=2, type="Reduce", team=team, root=root, red_op="MAX"),
            Wait(2),
        )
        with hic.branch(hostir.eq(RANK, root)):
            copy(hic, gathered, whole)
            copy(hic, most, best)
        given = hic.select(own, 0, root)
        spread(given)
        hic.append(
            Communication(gathered, given, number=3, type="Scatter", team=team, root=root), Wait(3)
        )
        hic.append(Deallocate(whole), Deallocate(best))
    for tv in (sent, gathered, most, own):
        hic.add_output(tv)


def exchanges(hic: HostIrContainer) -> None:
    """Does an all-to-all, and the same by grouped sends and receives in reverse order."""
    mesh, team = _mesh(3)
    x = spread(hic.input([3, 3, 4], mesh=mesh))
    y, z = (allocated(hic, spread(hic.tensor([3, 3, 4], mesh=mesh), 1)) for _ in range(2))
    hic.append(Communication(x, y, number=0, type="AllToAll", team=team), StartCoalescing())
    for i in (2, 1):
        source, to = (RANK + i) % 3, (RANK + 3 - i) % 3
        mine, theirs = (
            hic.select(hic.select(x, 0, 0), 0, to),
            hic.select(hic.select(z, 1, 0), 0, source),
        )
        hic.append(
            P2PCommunication(theirs, source, number=2 * i, type="recv"),
            P2PCommunication(mine, to, number=2 * i + 1, type="send"),
        )
    hic.append(EndCoalescing(1))
    copy(hic, hic.select(hic.select(z, 1, 0), 0, RANK), hic.select(hic.select(x, 0, 0), 0, RANK))
    hic.append(Wait(1), Wait(0))
    hic.add_output(y)
    hic.add_output(z)


def two_in_flight(hic: HostIrContainer) -> None:
    """Has two permutations in flight at once, and waits for them in reverse order."""
    mesh, team = _mesh(3)
    x = spread(hic.input([3, -1], mesh=mesh))
    n = x.size(1)
    first, second = (allocated(hic, spread(hic.tensor([3, n], mesh=mesh))) for _ in range(2))
    total = allocated(hic, spread(hic.tensor([3, n], mesh=mesh)))
    for number, (out, by) in enumerate(((first, 1), (second, 2))):
        to, source = (RANK + by) % 3, (RANK + 3 - by) % 3
        hic.append(CollectivePermute(x, out, to, source, number=number, team=team))
    hic.append(Wait(1))
    copy(hic, total, second)
    hic.append(Wait(0))
    accumulate(hic, total, first)
    accumulate(hic, total, total)
    for tv in (first, second, total):
        hic.add_output(tv)


def parts_of_ranks(hic: HostIrContainer) -> None:
    """Takes each rank's part of a replicated tensor along both axes of a mesh."""
    mesh = DeviceMesh([[0, 1], [2, 3]])
    x = hic.input([-1, 6], mesh=mesh)
    for axis, ptype in ((0, ParallelType.mesh_y), (1, ParallelType.mesh_x)):
        part = hic.tensor([x.size(0), 6], mesh=mesh)
        part.outer_split(axis, 2)
        part.axis(axis).parallelize(ptype)
        allocated(hic, part)
        hic.append(LocalSlice(part, x, axis=axis, ptype=ptype))
        hic.add_output(part)


def ranks_take_branches(hic: HostIrContainer) -> None:
    """The branch and the length of a loop depend on the rank."""
    mesh, team = _mesh(4)
    x = spread(hic.input([4, 3], mesh=mesh))
    y = allocated(hic, spread(hic.tensor([4, 3], mesh=mesh)), zero=True)
    with hic.loop(RANK + 1):
        with hic.branch(hostir.eq(RANK % 2, 0)):
            accumulate(hic, y, x)
        with hic.otherwise():
            hic.append(nodes.BinaryOp(y, y, x, kind="sub"))
    z = allocated(hic, hic.tensor([3], mesh=mesh))
    hic.append(Communication(y, z, number=0, type="Allreduce", team=team), Wait(0))
    hic.add_output(z)


def shards_seen_whole(hic: HostIrContainer) -> None:
    """In every step, reads all shards as one tensor, and writes them again afterwards."""
    mesh, _ = _mesh(2)
    x = spread(hic.input([2, 1024], mesh=mesh))
    shard = spread(hic.tensor([2, 1024], mesh=mesh, memory=MemoryType.symmetric))
    y = allocated(hic, hic.tensor([3, 2, 1024], mesh=mesh))
    hic.append(Allocate(shard))
    copy(hic, shard, x)
    with hic.loop(3) as i:
        whole = hic.tensor([2, 1024], mesh=mesh)
        hic.append(SymmetricContiguousView(whole, shard))
        copy(hic, hic.select(y, 0, i), whole)
        hic.append(Deallocate(whole))
        accumulate(hic, shard, x)
    hic.append(Deallocate(shard))
    hic.add_output(y)


CASES = {
    "numbers decide": Case(
        numbers_decide,
        (((5, 4), 0, 5, True), ((5, 4), 1, 5, False), ((5, 4), 0, 5, True), ((5, 4), 2, 2, True)),
    ),
    "an input is updated": Case(
        an_input_is_updated, (((4, 5), 2.0), ((4, 5), 2.0), ((4, 5), 0.5), ((1, 5), 2.0))
    ),
    "step buffers": Case(
        step_buffers, (((8, 4),), ((8, 4),), ((5, 4),), ((9, 4),), ((2, 4),), ((8, 4),)), exact=True
    ),
    "columns": Case(columns, (((3, 4, 2),), ((3, 4, 2),), ((3, 1, 2),), ((3, 0, 2),)), exact=True),
    "results of their own": Case(
        results_of_their_own, (((4, 6),), ((4, 6),), ((7, 6),), ((1, 6),))
    ),
    "units in a loop": Case(units_in_a_loop, (((8, 4),), ((8, 4),), ((3, 4),), ((7, 4),))),
    "every root": Case(every_root, (((3, 4),),) * 3, 3, exact=True),
    "exchanges": Case(exchanges, (((3, 3, 4),),) * 3, 3, exact=True),
    "two in flight": Case(two_in_flight, (((3, 5),), ((3, 5),), ((3, 8),), ((3, 1),)), 3),
    "parts of ranks": Case(
        parts_of_ranks, (((4, 6),), ((4, 6),), ((8, 6),), ((2, 6),)), 4, exact=True
    ),
    "a number of a unit": Case(
        a_number_of_a_unit, (((4, 3), 2.0), ((4, 3), 2.0), ((4, 3), -0.5), ((6, 3), 3.0))
    ),
    "ranks take branches": Case(ranks_take_branches, (((4, 3),),) * 3, 4),
    "shards seen whole": Case(shards_seen_whole, (((2, 1024),),) * 3, 2),
}


@pytest.mark.parametrize(("way", "late"), WAYS[:3])
@pytest.mark.parametrize("name", CASES)
def test_ops_do_what_they_mean(name: str, way: str, late: str | int | None) -> None:
    case = CASES[name]
    program = HostIrContainer()
    with program:
        case.define(program)
    inputs = [random(given, seed) for seed, given in enumerate(case.calls)]
    # The calls, then all again: by then each kind of call has been recorded.
    calls = calls_of(program, case.ranks, lambda k: inputs[k % len(inputs)], 2 * len(inputs))
    check_run(program, calls, streams=case.streams, way=way, late=late, exact=case.exact)
