"""Handwritten host programs with streams and their torch meaning, and functions that edit
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op, walk
from fuser.ir.ops import nodes
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
    GetCurrentStream,
    HirAliasSelect,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    SetCurrentStream,
    ShardByStream,
    StartCoalescing,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
    eq,
    ne,
)
from hostir.passes.deallocation import insert_deallocate
from hostir.tools.run_text import shards_of
from multidevice.job.communicator import Communicator
from multidevice.job.shard_tensor import LocalDeviceMesh, unshard
from multidevice.job.simulation import simulate

MAIN = Stream(name="S0")
D, N_STREAMS = 4, 3


@dataclass(frozen=True)
class Program:
    """A program for one device or D ranks, its global inputs, and torch's results."""

    define: Callable[[HostIrContainer], None]
    shapes: tuple[tuple[int, ...], ...]
    meaning: Callable[..., tuple[torch.Tensor, ...]]
    ranks: int = 1

    def build(self) -> HostIrContainer:
        hic = HostIrContainer()
        with hic:
            self.define(hic)
        return insert_deallocate(hic)

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def expected(self) -> tuple[torch.Tensor, ...]:
        return self.meaning(*(x.double() for x in self.inputs()))


def outputs_of(
    case: Program, hic: HostIrContainer, late: str | int | None = None
) -> list[torch.Tensor]:
    """Returns the global outputs of a run on simulated ranks; `late` streams are delayed."""
    inputs = case.inputs()

    def body() -> list[torch.Tensor]:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(
            hic, communicator, number_of_streams=N_STREAMS, late_stream=late
        )
        return evaluator.run(shards_of(hic, inputs, communicator.rank()))

    with simulate(case.ranks) as world:
        by_rank = world.run(body)
    wholes: list[torch.Tensor] = []
    for i, tv in enumerate(hic.outputs):
        shards = [outputs[i] for outputs in by_rank]
        wholes.append(unshard(shards, tv) if tv.mesh is not None else shards[0])
    return wholes


def is_right(case: Program, hic: HostIrContainer, late: str | int | None = None) -> bool:
    found = outputs_of(case, hic, late)
    return all(
        torch.allclose(a.double(), b, atol=1e-4, rtol=1e-4)
        for a, b in zip(found, case.expected(), strict=True)
    )


# ------------------------------------------------------------------ parts of programs
def worker(i: Scalar) -> Stream:
    return Stream(i % NUMBER_OF_STREAMS)


def head(hic: HostIrContainer, steps: int) -> None:
    """Makes every worker stream wait for the earlier work."""
    hic.append(GetCurrentStream(MAIN))
    with hic.loop(steps, name="h") as i:
        hic.append(SetCurrentStream(worker(i)), Synchronize(MAIN))


def tail(hic: HostIrContainer, i: Scalar) -> None:
    """Makes the program's stream wait for the stream of a step."""
    hic.append(SetCurrentStream(MAIN), Synchronize(worker(i)))


def select(
    hic: HostIrContainer, tv: TensorView, axis: int, index: Any, device: int | None = None
) -> TensorView:
    """Adds a slice; `device` is the axis of the slice that is spread over the mesh."""
    sizes = [sc.int_value(x) or 0 for x in tv.shape()]
    out = hic.tensor([n for k, n in enumerate(sizes) if k != axis])
    if tv.mesh is not None:
        out.set_device_mesh(tv.mesh)
    if device is not None:
        out.axis(device).parallelize(ParallelType.mesh_x)
    hic.append(HirAliasSelect(out, tv, axis=tv.domain.no_reductions[axis], index=index))
    return out


def chunk(hic: HostIrContainer, tv: TensorView, axis: int, count: int, index: Scalar) -> TensorView:
    out = hic.tensor([sc.int_value(x) or 0 for x in tv.shape()])
    stream_axis(out, axis, count)
    hic.append(ShardByStream(out, tv, stream_index=index))
    return out


def stream_axis(tv: TensorView, axis: int, count: int) -> None:
    tv.outer_split(axis, count)
    tv.axis(axis).parallelize(ParallelType.stream)


def allocated(hic: HostIrContainer, *shape: int, **spread: Any) -> TensorView:
    tv = spread_over(hic.tensor(list(shape)), **spread)
    hic.append(Allocate(tv))
    return tv


def spread_over(
    tv: TensorView,
    mesh: LocalDeviceMesh | None = None,
    axis: int | None = None,
    split: bool = False,
) -> TensorView:
    """Puts a tensor on a mesh; `axis` is a device axis or, with `split`, one that the mesh
    splits.
    """
    if mesh is not None:
        tv.set_device_mesh(mesh)
    if axis is not None and mesh is not None:
        if split:
            tv.outer_split(axis, mesh.size)
        tv.axis(axis).parallelize(ParallelType.mesh_x)
    return tv


def ring() -> LocalDeviceMesh:
    return LocalDeviceMesh(list(range(D)))


def team() -> TeamOf:
    return TeamOf(ring(), (ParallelType.mesh_x,))


def double(out: TensorView, inp: TensorView) -> Op:
    return nodes.BinaryOp(out, inp, inp, kind="add")


# ------------------------------------------------------------------ one device
def single_set(hic: HostIrContainer) -> None:
    x = hic.input([5, 8])
    y = allocated(hic, 5, 8)
    head(hic, 5)
    with hic.loop(5, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        a, b = select(hic, x, 0, i), select(hic, y, 0, i)
        hic.append(nodes.LoadStoreOp(b, a))
        tail(hic, i)
    hic.add_output(y)


def two_sets(hic: HostIrContainer) -> None:
    x = hic.input([5, 8])
    t, y = allocated(hic, 5, 8), allocated(hic, 5, 8)
    head(hic, 5)
    with hic.loop(5, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        a, b, c = (select(hic, v, 0, i) for v in (x, t, y))
        hic.append(double(b, a), double(c, b))
        tail(hic, i)
    hic.add_output(y)


def disjoint_loops(hic: HostIrContainer) -> None:
    """Two stream loops with an op on the program's own stream between them."""
    x = hic.input([5, 8])
    t = allocated(hic, 5, 8)
    head(hic, 5)
    with hic.loop(5, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        a, b = select(hic, x, 0, i), select(hic, t, 0, i)
        hic.append(double(b, a))
        tail(hic, i)
    u = allocated(hic, 5, 8)
    hic.append(double(u, t))
    y = allocated(hic, 5, 8)
    head(hic, 5)
    with hic.loop(5, name="j") as j:
        hic.append(SetCurrentStream(worker(j)))
        a, b = select(hic, u, 0, j), select(hic, y, 0, j)
        hic.append(double(b, a))
        tail(hic, j)
    hic.add_output(y)


def matmul_chunks(hic: HostIrContainer) -> None:
    """Columns of the weight in 3 chunks, the last one short; a second loop joins the streams."""
    a, b = hic.input([5, 6]), hic.input([6, 7])
    y = allocated(hic, 5, 7)
    hic.append(GetCurrentStream(MAIN))
    with hic.loop(3, name="i") as i:
        hic.append(SetCurrentStream(Stream(i)), Synchronize(MAIN))
        bi, yi = chunk(hic, b, 1, 3, i), chunk(hic, y, 1, 3, i)
        hic.append(nodes.MatmulOp(yi, a, bi))
    hic.append(SetCurrentStream(MAIN))
    with hic.loop(3, name="j") as j:
        hic.append(Synchronize(Stream(j)))
    hic.add_output(y)


def step_buffers(hic: HostIrContainer) -> None:
    """Two matmuls in one loop; the buffer between them is used within one step."""
    x, w, v = hic.input([7, 6]), hic.input([6, 5]), hic.input([5, 4])
    y = allocated(hic, 7, 4)
    hic.append(GetCurrentStream(MAIN))
    with hic.loop(3, name="i") as i:
        hic.append(SetCurrentStream(Stream(i)), Synchronize(MAIN))
        xi = chunk(hic, x, 0, 3, i)
        t = hic.tensor([7, 5])
        stream_axis(t, 0, 3)
        hic.append(Allocate(t, stream_index=i), nodes.MatmulOp(t, xi, w))
        yi = chunk(hic, y, 0, 3, i)
        hic.append(nodes.MatmulOp(yi, t, v))
    hic.append(SetCurrentStream(MAIN))
    with hic.loop(3, name="j") as j:
        hic.append(Synchronize(Stream(j)))
    hic.add_output(y)


def slots(hic: HostIrContainer) -> None:
    """A buffer with one slot per stream: step i uses slot i % n on stream i % n."""
    x = hic.input([7, 8])
    t, y = allocated(hic, N_STREAMS, 8), allocated(hic, 7, 8)
    head(hic, 7)
    with hic.loop(7, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        a, b, c = select(hic, x, 0, i), select(hic, t, 0, i % N_STREAMS), select(hic, y, 0, i)
        hic.append(double(b, a), double(c, b))
        tail(hic, i)
    hic.add_output(y)


# ------------------------------------------------------------------ ranks
def allgather_linear(hic: HostIrContainer) -> None:
    """An allgather and a linear per chunk; the stream axis is outermost."""
    x, w, b = hic.input([5, D, 2, 6]), hic.input([3, 6]), hic.input([3])
    for tv in (w, b):
        spread_over(tv, ring())
    spread_over(x, ring(), 1)
    t, y = allocated(hic, 5, D, 2, 6, mesh=ring()), allocated(hic, 5, D, 2, 3, mesh=ring())
    head(hic, 5)
    with hic.loop(5, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        xi, ti = select(hic, x, 0, i, device=0), select(hic, t, 0, i)
        hic.append(Communication(xi, ti, number=1, type="Allgather", team=team()), Wait(1))
        yi = select(hic, y, 0, i)
        hic.append(nodes.LinearOp(yi, ti, w, b))
        tail(hic, i)
    hic.add_output(y)


def shard_outermost(hic: HostIrContainer, *weight: int) -> list[TensorView]:
    """Returns x (a chunk per rank), a weight, and buffers for all chunks and the result."""
    x, w = spread_over(hic.input([D, 2, 6]), ring(), 0), spread_over(hic.input(weight), ring())
    return [x, w, *(allocated(hic, D, 2, n, mesh=ring()) for n in (6, 3))]


def ring_linear(hic: HostIrContainer) -> None:
    """A linear per shard: the rank's own first, then one sent directly from each other rank."""
    x, w, t, y = shard_outermost(hic, 3, 6)
    head(hic, D)
    with hic.loop(D, name="i") as i:
        source, target = (RANK + i) % D, (D + RANK - i) % D
        hic.append(SetCurrentStream(worker(i)))
        ti = select(hic, t, 0, source)
        with hic.branch(eq(target, RANK)):
            hic.append(nodes.LoadStoreOp(ti, select(hic, x, 0, 0)))
        with hic.otherwise():
            hic.append(
                StartCoalescing(),
                P2PCommunication(ti, source, number=1, type="recv"),
                P2PCommunication(x, target, number=2, type="send"),
                EndCoalescing(3),
                Wait(3),
            )
        hic.append(nodes.LinearOp(select(hic, y, 0, source), ti, w, None))
        tail(hic, i)
    hic.add_output(y)


def broadcast_linear(hic: HostIrContainer) -> None:
    """A linear per shard, which its owner broadcasts in that step."""
    x, w, t, y = shard_outermost(hic, 3, 6)
    head(hic, D)
    with hic.loop(D, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        ti = select(hic, t, 0, i)
        hic.append(Communication(x, ti, number=1, type="Broadcast", team=team(), root=i), Wait(1))
        hic.append(nodes.LinearOp(select(hic, y, 0, i), ti, w, None))
        tail(hic, i)
    hic.add_output(y)


def matmul_allreduce(hic: HostIrContainer) -> None:
    a, b = hic.input([5, D, 2, 6]), hic.input([D, 6, 3])
    spread_over(a, ring(), 1)
    spread_over(b, ring(), 0)
    part = allocated(hic, 5, D, 2, 3, mesh=ring(), axis=1)
    y = allocated(hic, 5, 2, 3, mesh=ring())
    head(hic, 5)
    with hic.loop(5, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        ai, pi = select(hic, a, 0, i, device=0), select(hic, part, 0, i, device=0)
        yi = select(hic, y, 0, i)
        hic.append(
            nodes.MatmulOp(pi, ai, b),
            Communication(pi, yi, number=1, type="Allreduce", team=team()),
            Wait(1),
        )
        tail(hic, i)
    hic.add_output(y)


def matmul_reduce(hic: HostIrContainer) -> None:
    """Each step reduces one chunk of the product to the rank that owns it."""
    a, b = hic.input([D, D, 2, 6]), hic.input([D, 6, 3])
    spread_over(a, ring(), 0)
    spread_over(b, ring(), 0)
    part = allocated(hic, D, D, 2, 3, mesh=ring(), axis=0)
    y = allocated(hic, D, 2, 3, mesh=ring(), axis=0)
    head(hic, D)
    with hic.loop(D, name="i") as i:
        hic.append(SetCurrentStream(worker(i)))
        ai, pi = select(hic, a, 1, i, device=0), select(hic, part, 1, i, device=0)
        yi = select(hic, y, 0, i)
        hic.append(
            nodes.MatmulOp(pi, ai, b),
            Communication(pi, yi, number=1, type="Reduce", team=team(), root=i),
            Wait(1),
        )
        tail(hic, i)
    hic.add_output(y)


def reduce_scatter_pipeline(hic: HostIrContainer) -> None:
    """Step j multiplies into slot j % 3 of a scratch buffer and reduce-scatters from it."""
    a, b = hic.input([7, D, 8, 6]), hic.input([D, 6, 3])
    spread_over(a, ring(), 1)
    spread_over(b, ring(), 0)
    scratch = allocated(hic, N_STREAMS, D, 8, 3, mesh=ring(), axis=1)
    c = allocated(hic, 7, 8, 3, mesh=ring(), axis=1, split=True)
    head(hic, N_STREAMS)
    with hic.loop(7, name="j") as j:
        hic.append(SetCurrentStream(Stream(j % N_STREAMS)))
        aj, s = select(hic, a, 0, j, device=0), select(hic, scratch, 0, j % N_STREAMS, device=0)
        cj = select(hic, c, 0, j)
        spread_over(cj, ring(), 0, split=True)
        hic.append(
            nodes.MatmulOp(s, aj, b),
            Communication(s, cj, number=1, type="ReduceScatter", team=team()),
            Wait(1),
        )
    hic.append(SetCurrentStream(MAIN))
    with hic.loop(N_STREAMS, name="k") as k:
        hic.append(Synchronize(Stream(k)))
    hic.add_output(c)


def forwarding_ring(hic: HostIrContainer) -> None:
    """Step j multiplies a chunk while the chunk is sent on to the next rank."""
    x, w, t, y = shard_outermost(hic, 6, 3)
    own = select(hic, t, 0, RANK)
    hic.append(nodes.LoadStoreOp(own, select(hic, x, 0, 0)))
    head(hic, D)
    with hic.loop(D, name="j") as j:
        hic.append(SetCurrentStream(worker(j)))
        with hic.branch(ne(j, 0)):
            hic.append(Wait(3))
        here, following = (RANK - j + D) % D, (RANK - j - 1 + D) % D
        mine = select(hic, t, 0, here)
        with hic.branch(ne(j, D - 1)):
            nxt = select(hic, t, 0, following)
            hic.append(
                StartCoalescing(),
                P2PCommunication(mine, (RANK + 1) % D, number=1, type="send"),
                P2PCommunication(nxt, (RANK + D - 1) % D, number=2, type="recv"),
                EndCoalescing(3),
            )
        hic.append(nodes.MatmulOp(select(hic, y, 0, here), mine, w))
    hic.append(SetCurrentStream(MAIN))
    with hic.loop(N_STREAMS, name="k") as k:
        hic.append(Synchronize(Stream(k)))
    hic.add_output(y)


def permute_ring(hic: HostIrContainer) -> None:
    x, w, t, y = shard_outermost(hic, 3, 6)
    head(hic, D)
    with hic.loop(D, name="i") as i:
        source, target = (RANK + i) % D, (D + RANK - i) % D
        hic.append(SetCurrentStream(worker(i)))
        ti, own = select(hic, t, 0, source), select(hic, x, 0, 0)
        hic.append(CollectivePermute(own, ti, target, source, number=1, team=team()), Wait(1))
        hic.append(nodes.LinearOp(select(hic, y, 0, source), ti, w, None))
        tail(hic, i)
    hic.add_output(y)


_linear = torch.nn.functional.linear
PROGRAMS: dict[str, Program] = {
    "single_set": Program(single_set, ((5, 8),), lambda x: (x,)),
    "two_sets": Program(two_sets, ((5, 8),), lambda x: (4 * x,)),
    "disjoint_loops": Program(disjoint_loops, ((5, 8),), lambda x: (8 * x,)),
    "matmul_chunks": Program(matmul_chunks, ((5, 6), (6, 7)), lambda a, b: (a @ b,)),
    "step_buffers": Program(step_buffers, ((7, 6), (6, 5), (5, 4)), lambda x, w, v: (x @ w @ v,)),
    "slots": Program(slots, ((7, 8),), lambda x: (4 * x,)),
    "allgather_linear": Program(
        allgather_linear, ((5, D, 2, 6), (3, 6), (3,)), lambda x, w, b: (_linear(x, w, b),), D
    ),
    "ring_linear": Program(ring_linear, ((D, 2, 6), (3, 6)), lambda x, w: (_linear(x, w),), D),
    "broadcast_linear": Program(
        broadcast_linear, ((D, 2, 6), (3, 6)), lambda x, w: (_linear(x, w),), D
    ),
    "matmul_allreduce": Program(
        matmul_allreduce, ((5, D, 2, 6), (D, 6, 3)), lambda a, b: ((a @ b).sum(1),), D
    ),
    "matmul_reduce": Program(
        matmul_reduce,
        ((D, D, 2, 6), (D, 6, 3)),
        lambda a, b: ((a @ b[:, None]).sum(0),),
        D,
    ),
    "reduce_scatter_pipeline": Program(
        reduce_scatter_pipeline, ((7, D, 8, 6), (D, 6, 3)), lambda a, b: ((a @ b).sum(1),), D
    ),
    "forwarding_ring": Program(forwarding_ring, ((D, 2, 6), (6, 3)), lambda x, w: (x @ w,), D),
    "permute_ring": Program(permute_ring, ((D, 2, 6), (3, 6)), lambda x, w: (_linear(x, w),), D),
}


# ------------------------------------------------------------------ edits
# Program -> op -> what stands in its place.
Edit = Callable[[HostIrContainer], dict[Op, Sequence[Op]]]


def edited(hic: HostIrContainer, edits: dict[Op, Sequence[Op]]) -> HostIrContainer:
    """Returns the program with ops, at any depth, replaced by others."""
    assert set(edits) <= set(walk(hic.ops))
    return hic.with_ops(_edited(hic.ops, edits))


def _edited(ops: Sequence[Op], edits: dict[Op, Sequence[Op]]) -> tuple[Op, ...]:
    made: list[Op] = []
    for op in ops:
        if op in edits:
            made += edits[op]
            continue
        regions = {n: _edited(getattr(op, n), edits) for n in op.fields_of("region")}
        changed = any(regions[n] != getattr(op, n) for n in regions)
        made.append(op.replace(**regions) if changed else op)
    return tuple(made)


def nth(hic: HostIrContainer, kind: type[Op], index: int = 0) -> Any:
    """Returns the n-th op of a class in the program's text."""
    return [op for op in walk(hic.ops) if type(op) is kind][index]


def drop(kind: type[Op], index: int = 0) -> Edit:
    return lambda hic: {nth(hic, kind, index): ()}


def twice(kind: type[Op], index: int = 0) -> Edit:
    return lambda hic: {(op := nth(hic, kind, index)): (op, op)}


def change(kind: type[Op], index: int, **fields: object) -> Edit:
    return lambda hic: {(op := nth(hic, kind, index)): (op.replace(**fields),)}


def move(kind: type[Op], index: int, to: type[Op], place: int, *, before: bool = False) -> Edit:
    """Moves an op behind (or before) another one."""

    def edit(hic: HostIrContainer) -> dict[Op, Sequence[Op]]:
        op, other = nth(hic, kind, index), nth(hic, to, place)
        return {op: (), other: (op, other) if before else (other, op)}

    return edit


def index_of(select: int, change: Callable[[object], object]) -> Edit:
    """Changes the index of a slice."""

    def edit(hic: HostIrContainer) -> dict[Op, Sequence[Op]]:
        op = nth(hic, HirAliasSelect, select)
        return {op: (op.replace(index=change(op.index)),)}

    return edit
