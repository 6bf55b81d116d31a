"""Host programs built by hand, each with its meaning in torch float64.

Labels such as HI-7 and HO-1 in names of the examples only number them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hostir
from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import MemoryType, ParallelType
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    ShareMemHandles,
    StartCoalescing,
    Stream,
    SymmetricContiguousView,
    Synchronize,
    TeamOf,
    Wait,
)
from hostir.runtime.inputs import Argument
from multidevice import Communicator, DeviceMesh, simulate
from multidevice.job.shard_tensor import shard_for_rank
from tests.support.host_programs import CASES, Case
from tests.support.host_programs import build as compiled

Meaning = Callable[..., list[torch.Tensor]]
ENTRY = Stream(name="S0")
# One stream held back at a time, those of all numbers, the caller's, or all.
LATE: tuple[str | int | None, ...] = (None, "all", "entry", 0, 1, 2, 3)
REPETITIONS = 4


@dataclass(frozen=True)
class Example:
    """A program, the shapes (or numbers) of its global inputs, and its meaning in float64."""

    build: Callable[[], HostIrContainer]
    inputs: tuple[tuple[int, ...] | bool | int | float, ...]
    meaning: Meaning
    ranks: int = 1
    streams: int = 4
    atol: float = 1e-4
    # Inputs that are compared after the run instead of outputs.
    updates: tuple[int, ...] = field(default=())

    def arguments(self, repetition: int) -> list[Argument]:
        generator = torch.Generator().manual_seed(repetition)
        return [
            torch.randn(x, generator=generator) if isinstance(x, tuple) else x for x in self.inputs
        ]

    def expected(self, arguments: Sequence[Argument]) -> list[torch.Tensor]:
        doubled = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
        return self.meaning(*doubled)


Check = Callable[[HostIrEvaluator, list[Argument]], list[torch.Tensor]]


def run_here(
    example: Example,
    program: HostIrContainer,
    communicator: Communicator | None,
    *,
    late: str | int | None = None,
    device: str = "cpu",
    reference: bool = False,
) -> None:
    """Runs one evaluator several times on fresh data; compares this rank's outputs."""
    evaluator = HostIrEvaluator(
        program, communicator, late_stream=late, number_of_streams=example.streams
    )
    rank = communicator.rank() if communicator is not None else 0
    for repetition in range(REPETITIONS):
        arguments = example.arguments(repetition)
        wanted = example.expected(arguments)
        pairs = zip(program.inputs, arguments, strict=True)
        mine = [
            _shard(x, declared, rank).to(device) if isinstance(x, torch.Tensor) else x
            for declared, x in pairs
        ]
        got = (evaluator.evaluate if reference else evaluator.run)(mine)
        declared = list(program.outputs)
        if example.updates:
            got = [mine[i] for i in example.updates]
            declared = [program.inputs[i] for i in example.updates]
        assert len(got) == len(wanted)
        for tv, out, want in zip(declared, got, wanted, strict=True):
            assert isinstance(out, torch.Tensor) and isinstance(tv, TensorView)
            if tv.mesh is not None and not tv.mesh.has(rank):
                assert out.numel() == 0
                continue
            torch.testing.assert_close(
                out.cpu().double(), _shard(want, tv, rank), atol=example.atol, rtol=1e-4
            )


def _shard(x: torch.Tensor, declared: object, rank: int) -> torch.Tensor:
    if isinstance(declared, TensorView) and declared.mesh is not None:
        return shard_for_rank(x, declared, rank)
    return x


def run_simulated(example: Example, program: HostIrContainer, **options: Any) -> None:
    """Runs on simulated ranks, or without a communicator if there is one rank."""
    if example.ranks == 1:
        run_here(example, program, None, **options)
        return
    with simulate(example.ranks) as world:
        world.run(lambda: run_here(example, program, Communicator.instance(), **options))


# ------------------------------------------------------------------ parts of programs
def enter_streams(hic: HostIrContainer, count: Scalar | int) -> None:
    """Makes the first `count` streams wait for the caller's stream."""
    hic.append(GetCurrentStream(ENTRY))
    with hic.loop(count) as i:
        hic.append(SetCurrentStream(Stream(i)), Synchronize(ENTRY))


def leave_streams(hic: HostIrContainer, count: Scalar | int) -> None:
    """Makes the caller's stream wait for the first `count` streams."""
    hic.append(SetCurrentStream(ENTRY))
    with hic.loop(count) as i:
        hic.append(Synchronize(Stream(i)))


def switching(*after: Op) -> HostIrContainer:
    """Computes x + 1 on stream 2; the program stays on it unless `after` switches back."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.add(x, 1.0)
        hic.append(GetCurrentStream(ENTRY), SetCurrentStream(Stream(hostir.as_scalar(2))))
        hic.append(Synchronize(ENTRY), Allocate(y), y, *after)
        hic.add_output(y)
    hostir.verify(hic)
    return hic


def unit(define: Callable[..., object], *ranks: int) -> Fusion:
    """Returns a fusion of symbolic tensors with these numbers of axes."""
    fusion = Fusion()
    with FusionGuard(fusion):
        inputs = [define_tensor([-1] * n, contiguity=True) for n in ranks]
        for tv in inputs:
            fusion.add_input(tv)
        results = define(*inputs)
        for tv in results if isinstance(results, tuple) else (results,):
            fusion.add_output(tv)  # pyright: ignore[reportArgumentType]
    return fusion


# ------------------------------------------------------------------ HI: one rank
def single_unit() -> HostIrContainer:
    """A program that posts one unit."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 8, 32]), hic.tensor([8, 32])
        number = hic.unit(unit(lambda x: ops.sum(ops.add(x, x), [0]), 3))
        hic.append(PostOnStream((x,), (y,), unit=number))
        hic.add_output(y)
    return hic


def three_units() -> HostIrContainer:
    """Three units, of which one reads the results of the others."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, 8])
        a, b, c, d = (hic.tensor([x.size(0), 8]) for _ in range(4))
        first = hic.unit(unit(lambda x: (ops.exp(x), ops.neg(x)), 2))
        second = hic.unit(unit(lambda a: ops.add(a, 1.0), 2))
        third = hic.unit(unit(ops.mul, 2, 2))
        hic.append(
            PostOnStream((x,), (a, b), unit=first),
            PostOnStream((a,), (c,), unit=second),
            PostOnStream((b, c), (d,), unit=third),
        )
        hic.add_output(d)
    return hic


def units_on_streams(streams: int, steps: int) -> Callable[[], HostIrContainer]:
    """One unit per output, posted to the streams in turn, which are joined at the end."""

    def build() -> HostIrContainer:
        hic = HostIrContainer()
        with hic:
            x = hic.input([4, 8, 32])
            number = hic.unit(unit(lambda x: ops.sum(ops.add(x, x), [0]), 3))
            enter_streams(hic, streams)
            for step in range(steps):
                y = hic.tensor([8, 32])
                hic.append(
                    SetCurrentStream(Stream(hostir.as_scalar(step % streams))),
                    PostOnStream((x,), (y,), unit=number),
                )
                hic.add_output(y)
            leave_streams(hic, streams)
        return hic

    return build


def counting() -> HostIrContainer:
    """In-place additions in one or the other branch of a condition."""
    hic = HostIrContainer()
    with hic:
        is_twice, x = hic.scalar(DataType.Bool), hic.input([5])
        with hic.branch(is_twice):
            hic.append(
                nodes.BinaryOp(x, x, hostir.as_scalar(1.0), kind="add"),
                nodes.BinaryOp(x, x, hostir.as_scalar(1.0), kind="add"),
            )
        with hic.otherwise():
            hic.append(nodes.BinaryOp(x, x, hostir.as_scalar(1.0), kind="add"))
    return hic


def allocation_in_a_loop() -> HostIrContainer:
    """The last of four allocations in a loop is used after the loop."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([6])
        with hic.loop(4):
            y = ops.mul(x, 2.0)
            hic.append(Allocate(y), y)
        hic.add_output(y)
    return hic


def deallocation() -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4, 6])
        y = ops.add(x, 1.0)
        z = ops.mul(y, 2.0)
        hic.append(Allocate(y), y, Allocate(z), z, Deallocate(y))
        hic.add_output(z)
    return hic


def symmetric() -> HostIrContainer:
    """Symmetric memory, and a view of the shards of all ranks."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([8, 64])
        y = hic.tensor([8, 64], memory=MemoryType.symmetric)
        z = hic.tensor([8, 64], memory=MemoryType.symmetric)
        hic.append(Allocate(y, zero_init=True), nodes.LoadStoreOp(y, x))
        hic.append(SymmetricContiguousView(z, y))
        out = ops.add(z, 1.0)
        hic.append(Allocate(out), out)
        hic.add_output(out)
    return hic


def rows_on_streams() -> HostIrContainer:
    """A copy row by row, each on the next of the numbered streams."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, 6])
        y = hic.tensor([x.size(0), 6])
        hic.append(Allocate(y))
        enter_streams(hic, NUMBER_OF_STREAMS)
        with hic.loop(x.size(0)) as i:
            hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            row, out = hic.select(x, 0, i), hic.select(y, 0, i)
            hic.append(nodes.LoadStoreOp(out, row))
        leave_streams(hic, NUMBER_OF_STREAMS)
        hic.add_output(y)
    return hic


def chunks_on_streams() -> HostIrContainer:
    """A loop over 7 rows in three chunks of 3, 3 and 1."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([7, 6]), hic.tensor([7, 6])
        hic.append(Allocate(y))
        enter_streams(hic, 3)
        with hic.loop(3) as i:
            hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            parts: list[TensorView] = []
            for whole in (x, y):
                part = hic.tensor([7, 6])
                part.outer_split(0, 3)
                part.axis(0).parallelize(ParallelType.stream)
                hic.append(ShardByStream(part, whole, i))
                parts.append(part)
            hic.append(nodes.LoadStoreOp(parts[1], parts[0]))
        leave_streams(hic, 3)
        hic.add_output(y)
    return hic


# ------------------------------------------------------------------ HO: overlap
M, K, N, STEPS, STREAMS = 64, 32, 16, 8, 3


def _team(ranks: int) -> tuple[DeviceMesh, TeamOf]:
    mesh = DeviceMesh(list(range(ranks)))
    return mesh, TeamOf(mesh, (ParallelType.mesh_x,))


def _cut(tv: TensorView, axis: int) -> TensorView:
    """Cuts an axis of a tensor over a mesh."""
    assert tv.mesh is not None
    tv.outer_split(axis, tv.mesh.size)
    tv.axis(axis).parallelize(ParallelType.mesh_x)
    return tv


def pipelined_reduce_scatter(ranks: int) -> Callable[[], HostIrContainer]:
    """Reduce-scatters in steps, from a scratch buffer with one slot per stream."""

    def build() -> HostIrContainer:
        mesh, team = _team(ranks)
        rows = M // STEPS
        hic = HostIrContainer()
        with hic:
            a = hic.input([STEPS, ranks, rows, K // ranks], mesh=mesh)
            b = hic.input([ranks, K // ranks, N], mesh=mesh)
            c = _cut(hic.tensor([STEPS, rows, N], mesh=mesh), 1)
            scratch = hic.tensor([STREAMS, ranks, rows, N], mesh=mesh)
            for tv, axis in ((a, 1), (b, 0), (scratch, 1)):
                tv.axis(axis).parallelize(ParallelType.mesh_x)
            hic.append(Allocate(c), Allocate(scratch))
            enter_streams(hic, STREAMS)
            with hic.loop(STEPS) as j:
                hic.append(SetCurrentStream(Stream(j % STREAMS)))
                a_j, slot = hic.select(a, 0, j), hic.select(scratch, 0, j % STREAMS)
                c_j = _cut(hic.tensor([rows, N], mesh=mesh), 0)
                hic.select(c, 0, j, c_j)
                hic.append(
                    nodes.MatmulOp(slot, a_j, b),
                    Communication(slot, c_j, number=0, type="ReduceScatter", team=team),
                    Wait(0),
                )
            leave_streams(hic, STREAMS)
            hic.append(Deallocate(scratch))
            hic.add_output(c)
        return hic

    return build


def pipelined_allgather(ranks: int) -> Callable[[], HostIrContainer]:
    """Allgathers in steps, each followed by the product that reads it."""

    def build() -> HostIrContainer:
        mesh, team = _team(ranks)
        rows = M // STEPS // ranks
        hic = HostIrContainer()
        with hic:
            a = hic.input([STEPS, ranks, rows, K], mesh=mesh)
            a.axis(1).parallelize(ParallelType.mesh_x)
            b = hic.input([K, N], mesh=mesh)
            whole, c = (hic.tensor([STEPS, ranks, rows, n], mesh=mesh) for n in (K, N))
            hic.append(Allocate(whole), Allocate(c))
            enter_streams(hic, STREAMS)
            with hic.loop(STEPS) as j:
                hic.append(SetCurrentStream(Stream(j % STREAMS)))
                a_j, whole_j, c_j = (hic.select(tv, 0, j) for tv in (a, whole, c))
                hic.append(
                    Communication(a_j, whole_j, number=0, type="Allgather", team=team),
                    Wait(0),
                    nodes.MatmulOp(c_j, whole_j, b),
                )
            leave_streams(hic, STREAMS)
            hic.add_output(c)
        return hic

    return build


def ring(ranks: int) -> Callable[[], HostIrContainer]:
    """Each step sends on the chunk received in the step before, and multiplies it
    meanwhile.
    """

    def build() -> HostIrContainer:
        mesh, _ = _team(ranks)
        rows = M // ranks
        hic = HostIrContainer()
        with hic:
            a = hic.input([ranks, rows, K], mesh=mesh)
            a.axis(0).parallelize(ParallelType.mesh_x)
            b = hic.input([K, N], mesh=mesh)
            whole, c = (hic.tensor([ranks, rows, n], mesh=mesh) for n in (K, N))
            hic.append(Allocate(whole), Allocate(c), ShareMemHandles((whole,)))
            own = hic.tensor([rows, K], mesh=mesh)
            hic.select(whole, 0, RANK, own)
            hic.append(nodes.LoadStoreOp(own, hic.select(a, 0, RANK)))
            enter_streams(hic, STREAMS)
            with hic.loop(ranks) as j:
                hic.append(SetCurrentStream(Stream(j % STREAMS)))
                now = hic.select(whole, 0, (RANK - j + ranks) % ranks)
                then = hic.select(whole, 0, (RANK - j - 1 + ranks) % ranks)
                c_j = hic.select(c, 0, (RANK - j + ranks) % ranks)
                with hic.branch(hostir.ne(j, 0)):
                    hic.append(Wait(2))
                with hic.branch(hostir.ne(j, ranks - 1)):
                    hic.append(
                        StartCoalescing(),
                        P2PCommunication(now, (RANK + 1) % ranks, number=0, type="send"),
                        P2PCommunication(then, (RANK - 1 + ranks) % ranks, number=1, type="recv"),
                        EndCoalescing(2),
                    )
                hic.append(nodes.MatmulOp(c_j, now, b))
            leave_streams(hic, STREAMS)
            hic.add_output(c)
        return hic

    return build


def ring_of_copies(ranks: int) -> Callable[[], HostIrContainer]:
    """The ring with peer copies: each step receives on the stream of the next step."""

    def build() -> HostIrContainer:
        mesh, _ = _team(ranks)
        rows = M // ranks
        hic = HostIrContainer()
        with hic:
            a = hic.input([ranks, rows, K], mesh=mesh)
            a.axis(0).parallelize(ParallelType.mesh_x)
            b = hic.input([K, N], mesh=mesh)
            whole, c = (hic.tensor([ranks, rows, n], mesh=mesh) for n in (K, N))
            whole.set_memory_type(MemoryType.symmetric)
            hic.append(Allocate(whole), Allocate(c), ShareMemHandles((whole,)))
            own = hic.tensor([rows, K], mesh=mesh)
            hic.select(whole, 0, RANK, own)
            hic.append(nodes.LoadStoreOp(own, hic.select(a, 0, RANK)))
            enter_streams(hic, STREAMS)
            with hic.loop(ranks) as j:
                mine = Stream(j % STREAMS)
                hic.append(SetCurrentStream(mine))
                now = hic.select(whole, 0, (RANK - j + ranks) % ranks)
                then = hic.select(whole, 0, (RANK - j - 1 + ranks) % ranks)
                c_j = hic.select(c, 0, (RANK - j + ranks) % ranks)
                to, source = (RANK + 1) % ranks, (RANK - 1 + ranks) % ranks
                with hic.branch(hostir.ne(j, ranks - 1)):
                    hic.append(
                        P2PCommunication(now, to, number=0, type="send", backend="CUDA"),
                        SetCurrentStream(Stream((j + 1) % STREAMS)),
                        P2PCommunication(then, source, number=1, type="recv", backend="CUDA"),
                        Wait(1),
                        SetCurrentStream(mine),
                    )
                hic.append(nodes.MatmulOp(c_j, now, b))
                with hic.branch(hostir.ne(j, ranks - 1)):
                    hic.append(Wait(0))
            leave_streams(hic, STREAMS)
            hic.add_output(c)
        return hic

    return build


def copied(
    build: Callable[[int], Callable[[], HostIrContainer]],
) -> Callable[[int], Callable[[], HostIrContainer]]:
    """Returns the same program with its communications made by peer copies."""

    def by_copies(op: Op) -> Op:
        if hasattr(op, "backend"):
            return op.replace(backend="CUDA")
        regions = op.fields_of("region")
        return op.replace(**{r: tuple(map(by_copies, getattr(op, r))) for r in regions})

    def of(ranks: int) -> Callable[[], HostIrContainer]:
        def made() -> HostIrContainer:
            program = build(ranks)()
            program.ops = tuple(map(by_copies, program.ops))
            return program

        return made

    return of


def permutations(ranks: int) -> Callable[[], HostIrContainer]:
    """An allgather in steps: step i receives from the rank i places further on."""

    def build() -> HostIrContainer:
        mesh, team = _team(ranks)
        hic = HostIrContainer()
        with hic:
            a = hic.input([ranks, 6], mesh=mesh)
            a.axis(0).parallelize(ParallelType.mesh_x)
            whole = hic.tensor([ranks, 6], mesh=mesh)
            hic.append(Allocate(whole))
            enter_streams(hic, STREAMS)
            mine = hic.select(a, 0, RANK)
            with hic.loop(ranks) as i:
                hic.append(SetCurrentStream(Stream(i % STREAMS)))
                source = (RANK + i) % ranks
                hic.append(
                    CollectivePermute(
                        mine,
                        hic.select(whole, 0, source),
                        (RANK - i + ranks) % ranks,
                        source,
                        number=0,
                        team=team,
                    ),
                    Wait(0),
                )
            leave_streams(hic, STREAMS)
            hic.add_output(whole)
        return hic

    return build


def _compiled(name: str) -> Example:
    case: Case = CASES[name]
    return Example(
        lambda: compiled(case),
        case.shapes,
        lambda *inputs: evaluate_fusion(case.fusion(), list(inputs), dtype=torch.float64),
        case.ranks,
    )


def _overlapped(
    build: Callable[[int], Callable[[], HostIrContainer]], ranks: int, *, copies: bool = False
) -> Example:
    shapes: dict[object, tuple[tuple[int, ...], ...]] = {
        pipelined_reduce_scatter: (
            (STEPS, ranks, M // STEPS, K // ranks),
            (ranks, K // ranks, N),
        ),
        pipelined_allgather: ((STEPS, ranks, M // STEPS // ranks, K), (K, N)),
        ring: ((ranks, M // ranks, K), (K, N)),
        ring_of_copies: ((ranks, M // ranks, K), (K, N)),
        permutations: ((ranks, 6),),
    }

    def meaning(a: torch.Tensor, *b: torch.Tensor) -> list[torch.Tensor]:
        if build is pipelined_reduce_scatter:
            return [torch.einsum("srmk,rkn->smn", a, b[0])]
        return [a @ b[0]] if b else [a]

    make = copied(build) if copies else build
    return Example(make(ranks), shapes[build], meaning, ranks)


EXAMPLES: dict[str, Example] = {
    "HI-1 unit": Example(single_unit, ((4, 8, 32),), lambda x: [(x + x).sum(0)]),
    "HI-1 kernel": _compiled("linear_relu_sum"),
    "HI-2 units": Example(three_units, ((5, 8),), lambda x: [-x * (x.exp() + 1)]),
    **{
        f"HI-7 {streams} streams {steps} steps": Example(
            units_on_streams(streams, steps),
            ((4, 8, 32),),
            lambda x, n=steps: [(x + x).sum(0)] * n,
        )
        for streams in (1, 4)
        for steps in (1, 8)
    },
    "HI-10 then": Example(counting, (True, (5,)), lambda _, x: [x + 2], updates=(1,)),
    "HI-10 else": Example(counting, (False, (5,)), lambda _, x: [x + 1], updates=(1,)),
    "HI-11 loop": Example(allocation_in_a_loop, ((6,),), lambda x: [x * 2]),
    "HI-11 symmetric": Example(symmetric, ((8, 64),), lambda x: [x + 1]),
    "deallocation": Example(deallocation, ((4, 6),), lambda x: [(x + 1) * 2]),
    "rows": Example(rows_on_streams, ((9, 6),), lambda x: [x]),
    "no rows": Example(rows_on_streams, ((0, 6),), lambda x: [x]),
    "chunks": Example(chunks_on_streams, ((7, 6),), lambda x: [x]),
    "local slice": _compiled("slice2"),
    "column row": _compiled("mlp4"),
    **{
        f"{name} on {ranks}": _overlapped(build, ranks)
        for name, build in (
            ("HO-1", pipelined_reduce_scatter),
            ("HO-3", pipelined_allgather),
            ("HO-4", ring),
            ("HO-4 of copies", ring_of_copies),
            ("permutations", permutations),
        )
        for ranks in (2, 4)
    },
    **{
        f"{name} by copies on {ranks}": _overlapped(build, ranks, copies=True)
        for name, build in (
            ("HO-1", pipelined_reduce_scatter),
            ("HO-3", pipelined_allgather),
            ("HO-4", ring),
            ("permutations", permutations),
        )
        for ranks in (2, 4)
    },
}
