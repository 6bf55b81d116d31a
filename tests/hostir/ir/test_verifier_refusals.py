"""The first line of every refusal of the verifier is a sentence; the spelling of the IR is below.

Each `raise` of the verifier's rules has a broken program here, which a test counts.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hostir.ir.ops.base
import hostir.ir.ops.local
import hostir.ir.ops.transfers
import hostir.ir.shape_rules
import hostir.ir.verifier
from fuser import DataType, ParallelType, ops
from fuser.ir.fusion import Alias, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import as_scalar
from fuser.ir.types import MemoryType
from fuser.support.errors import VerifyError
from hostir import (
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    GetCurrentStream,
    HostIrContainer,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    StartCoalescing,
    Stream,
    SymmetricContiguousView,
    Synchronize,
    TeamOf,
    Wait,
    eq,
)
from hostir.ir.ops import ForLoop, HirAliasSelect, LaunchKernel, LocalSlice
from hostir.ir.verifier import verify
from multidevice import DeviceMesh
from tests.support.handmade_programs import EXAMPLES, unit
from tests.support.host_programs import CASES, build

pytestmark = pytest.mark.finding("G21")

X = ParallelType.mesh_x
MESH = DeviceMesh([0, 1])
TEAM = TeamOf(MESH, (X,))
HALF = DataType.Half

# An axis as the IR spells it, `iS8{4}` or `ideviceIdx.x3{2}`, and the text of an op.
AXIS, OP_TEXT = re.compile(r"\b[a-zA-Z?.]+\w*\d+\w*\{"), re.compile(r" = ")


def sentence(error: VerifyError) -> str:
    """Returns the first line of a message; it is one for readers who do not know the IR."""
    head, *below = str(error).splitlines()
    assert re.match(r"[A-Z][\w() ]+", head), head
    shown = re.sub(r"DeviceMesh\{[^}]*\}", "", head)
    assert not AXIS.search(shown) and not OP_TEXT.search(shown), head
    assert "[" not in shown, head
    assert any(re.match(r"(->|  ) +\d+ ", row) for row in below), below
    return head


def _add(y: TensorView, x: TensorView) -> Op:
    return nodes.BinaryOp(y, x, as_scalar(1.0), kind="add")


def _set(y: TensorView, x: TensorView) -> Op:
    return nodes.LoadStoreOp(y, x)


def _sum(y: TensorView, x: TensorView) -> Op:
    return nodes.ReductionOp(y, x, as_scalar(0.0), kind="add")


class Strange(Op):
    """An op of no kind that a host program has."""

    TEXT = "Strange()"

    def effects(self) -> tuple[()]:
        return ()


Program = HostIrContainer
# Functions that break a rule in a program of x [4, 8] and y [4, 8], or of shards of them.
Write = Callable[[Program, TensorView, TensorView], Any]


def _into_y(make: Callable[[TensorView, TensorView], Op]) -> Write:
    return lambda p, x, y: p.append(Allocate(y), make(y, x))


def _to(shape: tuple[int, ...], make: Any, dtype: DataType = DataType.Float) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        out = p.tensor(shape, dtype)
        p.append(Allocate(out), make(out, x))

    return write


def _cut(tv: TensorView, dim: int = 0, factor: int = 2) -> TensorView:
    tv.outer_split(dim, factor)
    tv.axis(dim).parallelize(X)
    return tv


def _looped(write: Write) -> Write:
    def inside(p: Program, x: TensorView, y: TensorView) -> None:
        p.append(Allocate(y))
        with p.loop(2, name="step"):
            write(p, x, y)

    return inside


def _no_symbol(p: Program, x: TensorView, y: TensorView) -> None:
    p.inputs.append(sc.add(p.scalar(), 1))


def _alias(break_it: Callable[[Program, TensorView, TensorView], Alias]) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        p.append(Allocate(y), _add(y, x))
        p.add_output(y)
        p.values.aliases.append(break_it(p, x, y))

    return write


def _alias_of_half(p: Program, x: TensorView, y: TensorView) -> Alias:
    return Alias(y, p.input([4, 8], HALF))


def _two_names(p: Program, x: TensorView, y: TensorView) -> None:
    z = p.tensor([8])
    p.select(x, 0, 0, z)
    p.select(y, 0, 0, z)


def _named_twice(p: Program, x: TensorView, y: TensorView) -> None:
    with p.loop(2, name="step"), p.loop(2, name="other"):
        pass
    (outer,) = (op for op in p.ops if isinstance(op, ForLoop))
    (inner,) = (op for op in outer.body if isinstance(op, ForLoop))
    p.ops = (outer.replace(body=(inner.replace(index=outer.index),)),)


def _group_in_a_branch(p: Program, x: TensorView, y: TensorView) -> None:
    with p.branch(eq(RANK, 0)):
        p.append(StartCoalescing())


def _view(p: Program, *, spread: bool = False) -> tuple[TensorView, TensorView, Op]:
    a = p.input([2, 8], mesh=MESH)
    s, v = (p.tensor([2, 8], mesh=MESH, memory=MemoryType.symmetric) for _ in range(2))
    for tv in (a, s, v) if spread else (a, s):
        tv.axis(0).parallelize(X)
    p.append(Allocate(s), _set(s, a), SymmetricContiguousView(v, s))
    return s, v, _set(s, a)


def _written_while_shown(p: Program, x: TensorView, y: TensorView) -> None:
    _, v, again = _view(p)
    p.append(again, Deallocate(v))


def _outer_view(p: Program, x: TensorView, y: TensorView) -> None:
    _, v, _ = _view(p)
    with p.branch(eq(RANK, 0)):
        p.append(Deallocate(v))


def _freed_in_a_loop(p: Program, x: TensorView, y: TensorView) -> None:
    p.append(Allocate(y))
    with p.loop(2):
        p.append(Deallocate(y))


def _freed(*tail: Callable[[TensorView, TensorView], Op]) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        z = p.tensor([4, 8])
        p.append(Allocate(y), _add(y, x), Allocate(z), Deallocate(y))
        p.append(*(make(z, y) for make in tail))

    return write


def _leak(p: Program, x: TensorView, y: TensorView) -> None:
    z = p.tensor([4, 8])
    p.append(Allocate(y), _add(y, x), Deallocate(y), Allocate(z), _add(z, x))


def _reduce(
    p: Program, x: TensorView, y: TensorView, **how: Any
) -> tuple[TensorView, Communication]:
    given: dict[str, Any] = {"number": 0, "type": "Allreduce", "team": TEAM, **how}
    a, b = p.input([4, 8], mesh=MESH), p.tensor([4, 8], mesh=MESH)
    p.append(Allocate(b), Communication(a, b, **given))
    return b, p.ops[-1]  # pyright: ignore[reportReturnType]


def _used_in_flight(wait: bool) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        b, _ = _reduce(p, x, y)
        p.append(ops.add(b, b))
        if wait:
            p.append(Wait(0))

    return write


def _sends(p: Program, *numbers: int, peer: float = 1, backend: str = "NCCL") -> None:
    a = p.input([4, 8], mesh=MESH)
    for n in numbers:
        p.append(P2PCommunication(a, as_scalar(peer), number=n, type="send", backend=backend))


def _mixed_group(p: Program, x: TensorView, y: TensorView) -> None:
    p.append(StartCoalescing())
    _sends(p, 0)
    _sends(p, 1, backend="CUDA")
    p.append(EndCoalescing(2), Wait(2))


def _launched(break_it: Callable[[LaunchKernel], LaunchKernel]) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> Program:
        program = build(CASES["mlp2"])
        (at, launch), *_ = (
            (k, op) for k, op in enumerate(program.ops) if isinstance(op, LaunchKernel)
        )
        return program.with_ops((*program.ops[:at], break_it(launch), *program.ops[at + 1 :]))

    return write


def _posted(x_dtype: DataType = DataType.Float, rank: int = 2, count: int = 1) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        number = p.unit(unit(lambda x: ops.add(x, 1.0), 2))
        given = p.input([4, 8, 2][:rank], x_dtype)
        p.append(Allocate(y), PostOnStream((given,) * count, (y,), unit=number))

    return write


def _posted_in_place(p: Program, x: TensorView, y: TensorView) -> None:
    number = p.unit(unit(lambda x: ops.add(x, 1.0), 2))
    fusion = p.units[number]
    p.append(Allocate(y), PostOnStream((x,), (y,), unit=number))
    fusion.aliases.append(Alias(fusion.outputs[0], fusion.inputs[0]))  # pyright: ignore[reportArgumentType]


def _permuted(dtype: DataType = DataType.Float, peer: float = 1, mesh: Any = MESH) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        a, b = p.input([4, 8], mesh=mesh), p.tensor([4, 8], dtype, mesh=mesh)
        p.append(
            Allocate(b),
            CollectivePermute(a, b, as_scalar(peer), sc.ONE, number=0, team=TEAM),
            Wait(0),
        )

    return write


def _sliced(
    axis: int,
    *,
    given: str = "",
    made: str = "y",
    dtype: Any = DataType.Float,
    shape: tuple[int, ...] = (2, 8),
) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        a, b = p.input([2, 8], mesh=MESH), p.tensor(shape, dtype, mesh=MESH)
        for tv, cut in ((a, given), (b, made)):
            if cut:
                tv.axis(0).parallelize(X)
        p.append(Allocate(b), LocalSlice(b, a, axis=axis, ptype=X))

    return write


def _streamed(index: int = 0, *, cut: bool = True, shape: tuple[int, ...] = (4, 8)) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        out = p.tensor(shape)
        if cut:
            out.outer_split(0, 2)
            out.axis(0).parallelize(ParallelType.stream)
        p.append(ShardByStream(out, x, as_scalar(index)))

    return write


def _select(
    shape: tuple[int, ...] = (8,), index: int = 0, axis: Any = None, dtype: Any = DataType.Float
) -> Write:
    def write(p: Program, x: TensorView, y: TensorView) -> None:
        along = x.domain.logical[0] if axis is None else axis(y)
        p.append(HirAliasSelect(p.tensor(shape, dtype), x, axis=along, index=as_scalar(index)))

    return write


def _on_other_ranks(p: Program, x: TensorView, y: TensorView) -> None:
    a, b = p.input([8], mesh=DeviceMesh([0])), p.tensor([8], mesh=MESH)
    p.append(Allocate(b), _add(b, a))


def _two_results(p: Program, x: TensorView, y: TensorView) -> None:
    z = p.tensor([4, 8])
    number = p.unit(unit(lambda x: (ops.exp(x), ops.neg(x)), 2))
    p.append(Allocate(z), PostOnStream((x,), (z, z), unit=number))


def _one_buffer(p: Program, x: TensorView, y: TensorView) -> None:
    q = p.input([2, 4, 5, 8])
    out, *_ = ops.sdpfa_fwd(q, q, q, is_causal=False)
    p.append(Allocate(out), out)


def _cut_otherwise(p: Program, x: TensorView, y: TensorView) -> None:
    a, b = p.input([2, 8], mesh=MESH), p.tensor([2, 8], mesh=MESH)
    a.axis(0).parallelize(X)
    p.append(Allocate(b), _set(b, a))


def _cut_scan(p: Program, x: TensorView, y: TensorView) -> None:
    a = p.input([2, 8], mesh=MESH)
    a.axis(0).parallelize(X)
    out = ops.cumsum(a, 0)
    out.axis(0).parallelize(X)
    p.append(out)


def _heads(p: Program, x: TensorView, y: TensorView) -> None:
    q, k = p.input([2, 4, 5, 8], mesh=MESH), p.input([2, 2, 5, 8], mesh=MESH)
    _cut(q, 1)
    out, *_ = ops.sdpfa_fwd(q, k, k, is_causal=False, enable_gqa=True)
    p.append(out)


REFUSED: dict[str, tuple[Write, str]] = {
    "no op of host programs": (
        lambda p, x, y: setattr(p, "ops", (Strange(),)),
        "cannot be in a host program",
    ),
    "a copy of another dtype": (
        _to((4, 8), _set, HALF),
        "T2_g___half must have one dtype, found float and __half",
    ),
    "other ranks": (_on_other_ranks, "only one of these tensors is on rank 1"),
    "over an operand": (
        lambda p, x, y: p.append(nodes.MatmulOp(x, x, p.input([8, 8]))),
        "the result of matmul needs a buffer that no operand uses",
    ),
    "no symbol of an input": (
        lambda p, x, y: p.select(x, 0, p.values.new_symbol(DataType.Int)),
        "no input of the program defines the symbol i1",
    ),
    "an index twice": (
        _named_twice,
        "The loop over step: the loop's index step has the name of an outer",
    ),
    "a group over steps": (
        _looped(lambda p, x, y: p.append(StartCoalescing())),
        "The loop over step: a group of transfers must begin and end in the same loop iteration",
    ),
    "a group over branches": (_group_in_a_branch, "The branch: a group of transfers"),
    "a view that stays": (lambda p, x, y: _view(p), "is missing"),
    "a group that stays open": (
        lambda p, x, y: p.append(StartCoalescing()),
        "A StartCoalescing has no EndCoalescing after it",
    ),
    "no wait": (
        lambda p, x, y: _reduce(p, x, y),
        "Communication 0, started at line .*, has no Wai",
    ),
    "an output without a buffer": (
        lambda p, x, y: p.add_output(y),
        "No op writes the output T1_g_float",
    ),
    "an output that is not written": (
        lambda p, x, y: (p.append(Allocate(y), _add(p.tensor([4, 8]), x)), p.add_output(y)),
        "No op writes the output T1_g_float",
    ),
    "an input that is no symbol": (
        _no_symbol,
        "The input .* is an expression, expected a tensor or a symbol",
    ),
    "an alias of no input": (
        _alias(lambda p, x, y: Alias(y, p.tensor([4, 8]))),
        "T2_g_float is not an input of the program",
    ),
    "an alias that is no output": (
        _alias(lambda p, x, y: Alias(x, x)),
        "is not an output of the program",
    ),
    "an alias of another dtype": (
        _alias(_alias_of_half),
        "must have one dtype, found float and __half",
    ),
    "an alias that is not written": (
        _alias(lambda p, x, y: Alias(y, x)),
        "No op writes input 0 .* T1_g_float has a separate buffer",
    ),
    "a leak": (_leak, "Memory leak detected in Host IR: .* no Deallocate of T2_g_float"),
    "used before its allocation": (
        lambda p, x, y: p.append(LocalSlice(x, y, axis=0, ptype=X)),
        "is used before it is allocated",
    ),
    "read before it is written": (
        lambda p, x, y: p.append(Allocate(y), ops.add(y, x)),
        "T1_g_float is read before it is written",
    ),
    "written before its allocation": (
        lambda p, x, y: p.append(_add(y, x), Allocate(y)),
        "T1_g_float is written before it is allocated",
    ),
    "two buffers": (
        lambda p, x, y: p.append(Allocate(y), Allocate(y)),
        "T1_g_float already has a buffer",
    ),
    "a name of nothing": (
        lambda p, x, y: (p.select(y, 0, 0), p.append(Allocate(y))),
        "is used before it is allocated",
    ),
    "a name of two": (_two_names, "T2_g_float is made a view of two different tensors|used before"),
    "a name of another dtype": (
        _select(dtype=HALF),
        "both must have one dtype, found __half and float",
    ),
    "deallocated without a buffer": (
        lambda p, x, y: p.append(Deallocate(y)),
        "Deallocate: T1_g_float is deallocated, but was never allocated",
    ),
    "deallocated twice": (
        lambda p, x, y: p.append(Allocate(y), Deallocate(y), Deallocate(y)),
        "is deallocated twice, first at line",
    ),
    "deallocated in a loop": (_freed_in_a_loop, "is deallocated in a loop"),
    "the caller's": (
        lambda p, x, y: p.append(Deallocate(x)),
        r"input 0 \(T0_g_float\) must not be deallocated, .* belongs to the caller",
    ),
    "a view of an outer region": (
        _outer_view,
        "T4_sym_float, .* must be deallocated in the loop or branch",
    ),
    "written while others read": (_written_while_shown, "shows it to other ranks"),
    "used after its deallocation": (
        _freed(_add),
        "T1_g_float is used after its Deallocate at line",
    ),
    "used in flight": (_used_in_flight(True), r"is used before Wait\(Communication 0\)"),
    "used in flight, without a wait": (_used_in_flight(False), "has no Wait"),
    "two communications": (
        lambda p, x, y: (_sends(p, 0, 0), p.append(Wait(0))),
        "another op also starts communication 0",
    ),
    "a group of a number that is taken": (
        lambda p, x, y: (
            _sends(p, 0),
            p.append(StartCoalescing()),
            _sends(p, 1),
            p.append(EndCoalescing(0), Wait(0)),
        ),
        "another op also starts communication 0",
    ),
    "a group in a group": (
        lambda p, x, y: p.append(StartCoalescing(), StartCoalescing()),
        "this group of transfers begins inside another one",
    ),
    "the end of no group": (
        lambda p, x, y: p.append(EndCoalescing(0)),
        "no StartCoalescing before",
    ),
    "a group of two libraries": (
        _mixed_group,
        "all transfers of a group have backend=CUDA, or none",
    ),
    "a wait for nothing": (
        lambda p, x, y: p.append(Wait(3)),
        "no earlier op starts communication 3",
    ),
    "a second wait": (
        lambda p, x, y: (_sends(p, 0), p.append(Wait(0), Wait(0))),
        "an earlier op already waits for communication 0",
    ),
    "a strange team": (
        lambda p, x, y: _reduce(p, x, y, team=TeamOf(DeviceMesh([0, 5]), (X,))),
        "contains rank 5, but the meshes of the program's tensors contain only ranks 0 1",
    ),
    "no such stream": (
        lambda p, x, y: p.append(
            GetCurrentStream(Stream(name="S0")),
            SetCurrentStream(Stream(sc.ZERO)),
            Synchronize(Stream(name="S1")),
        ),
        "Synchronize: the op waits for Stream S1, but the program has no GetCurrentStream",
    ),
    "no such group": (
        _launched(lambda op: op.replace(group=9)),
        "has no kernel group 9: its kernel groups are 1, 4",
    ),
    "operands of a launch": (
        _launched(lambda op: op.replace(ins=())),
        "The launch of kernel group 1: expected 1 input for kernel group 1, got 0",
    ),
    "an operand of a launch": (
        _launched(lambda op: op.replace(ins=(op.outs[0].fusion.inputs[4],))),
        "passes input 4 .* as input 0, but kernel group 1 expects .*: it has 1 axis, expected 2",
    ),
    "no such unit": (
        lambda p, x, y: p.append(Allocate(y), PostOnStream((x,), (y,), unit=2)),
        "has no HostUnit2: it has no host units",
    ),
    "operands of a unit": (
        _posted(count=2),
        "The launch of host unit 0: expected 1 input for HostUnit0, got 2",
    ),
    "a dtype of a unit": (_posted(HALF), "as input 0, .*: the dtype is __half, expected float"),
    "a rank of a unit": (_posted(rank=3), "as input 0, .*: it has 3 axes, expected 2"),
    "a unit that updates": (_posted_in_place, "HostUnit0 updates input 0 .* in place"),
    # ---- sizes and dtypes of results
    "results without buffers": (
        _one_buffer,
        "T4_g_float has no buffer, but other results of the op have a buffer",
    ),
    "two results in one buffer": (_two_results, "T2_g_float is given for two results of the op"),
    "extents": (
        _to((4, 7), _add),
        "axis 1 of input 0 .* and axis 1 of .* extent 8 and extent 7",
    ),
    "ranks": (_to((4,), _sum), "has 2 axes, which do not fit the 1 axis of the result"),
    "a dtype": (
        _to((4, 8), _add, HALF),
        "the result has the dtype float, but T2_g___half.* is declared with the dtype __half",
    ),
    "cut otherwise": (
        _cut_otherwise,
        "are split over different devices, but the op moves no data between ranks",
    ),
    "needed whole": (_cut_scan, "is split over devices, but each device needs the whole axis"),
    "heads": (_heads, "axis 1 of input .* and axis 1 of .* are split over different devices"),
    "a slice of a shard": (
        _sliced(0, given="x"),
        "axis 0 of T2_g_float is already split by deviceIdx.x",
    ),
    # ---- rules of single ops
    "local memory": (
        lambda p, x, y: (p.append(Allocate(y)), setattr(y, "memory", MemoryType.shared)),
        "is in shared memory, but a host program can allocate only",
    ),
    "a slice along nothing": (
        _sliced(0, made=""),
        "axis 0 of T3_g_float is not split by deviceIdx.x",
    ),
    "a slice without a mesh": (
        lambda p, x, y: p.append(Allocate(y), LocalSlice(y, x, axis=0, ptype=X)),
        "at least 2 devices along deviceIdx.x, found no mesh",
    ),
    "a slice of no axis": (_sliced(7), "there is no axis 7 in input 1 .*, which has 2 axes"),
    "a slice of fewer axes": (_sliced(0, shape=(2,)), "has 1 axis, expected 2"),
    "a slice of another dtype": (
        _sliced(0, dtype=HALF),
        "must have one dtype, found float and __half",
    ),
    "an axis of another": (
        _select(axis=lambda y: y.domain.logical[0]),
        "the selected axis is not an axis of input",
    ),
    "axes of a name": (_select((4, 8)), "has 2 axes, expected 1: the axes of input 0"),
    "an index outside": (
        _select(index=9),
        "index 9 of axis 0 of input 0 .* is out of range: .* < 4",
    ),
    "a chunk of another rank": (_streamed(shape=(4,)), "has 1 axis, expected 2, as many as"),
    "a chunk outside": (_streamed(5), "index 5 of axis 0 of T2_g_float is out of range: .* < 2"),
    "no stream axis": (_streamed(cut=False), "has no stream axis"),
    "a view of other memory": (
        lambda p, x, y: p.append(SymmetricContiguousView(y, x)),
        "is in global memory, expected symmetric memory",
    ),
    "a view that is spread": (
        lambda p, x, y: _view(p, spread=True),
        "must be replicated on .*, with an axis that devices split",
    ),
    "a numbered stream": (
        lambda p, x, y: p.append(GetCurrentStream(Stream(sc.ONE))),
        "expected a name for the current stream",
    ),
    "a step back": (
        lambda p, x, y: p.append(
            ForLoop(
                index=p.values.new_symbol(DataType.Index),
                stop=as_scalar(2),
                step=as_scalar(-1),
                body=(),
            )
        ),
        "the step of the loop is -1, expected at least 1",
    ),
    # ---- communications
    "a root that is not taken": (
        lambda p, x, y: _reduce(p, x, y, root=as_scalar(0)),
        "Allreduce takes no root, got root=0",
    ),
    "no root": (lambda p, x, y: _reduce(p, x, y, type="Broadcast"), "Broadcast needs a root"),
    "a reduction of none": (
        lambda p, x, y: _reduce(p, x, y, type="Broadcast", root=as_scalar(0), red_op="MAX"),
        "Broadcast does not reduce and takes no red_op, got red_op=MAX",
    ),
    "a root outside": (
        lambda p, x, y: _reduce(p, x, y, type="Broadcast", root=as_scalar(5)),
        "root=5 is not a position in a team of 2 ranks",
    ),
    "a root between members": (
        lambda p, x, y: _reduce(p, x, y, type="Broadcast", root=as_scalar(0.5)),
        r"\(Broadcast\): root=double\(0.5\) has the dtype Double, expected an integer",
    ),
    "a root that is true": (
        lambda p, x, y: _reduce(p, x, y, type="Broadcast", root=sc.eq(RANK, sc.ZERO)),
        r"root=\( rank == 0 \) has the dtype Bool, expected an integer",
    ),
    "one member": (
        lambda p, x, y: _reduce(p, x, y, team=TeamOf(DeviceMesh([0]), (X,))),
        "the team has 1 rank, expected at least 2 ranks",
    ),
    "no mesh": (
        lambda p, x, y: p.append(
            Allocate(y), Communication(x, y, number=0, type="Allreduce", team=TEAM), Wait(0)
        ),
        r"input 0 \(T0_g_float\) has no mesh",
    ),
    "dtypes of a communication": (
        lambda p, x, y: p.append(
            Allocate(b := p.tensor([4, 8], HALF, mesh=MESH)),
            Communication(p.input([4, 8], mesh=MESH), b, number=0, type="Allreduce", team=TEAM),
            Wait(0),
        ),
        "must have one dtype, found float and __half",
    ),
    "sent without a mesh": (
        lambda p, x, y: p.append(P2PCommunication(x, sc.ONE, number=0, type="send"), Wait(0)),
        "has no mesh",
    ),
    "a peer below 0": (
        lambda p, x, y: (_sends(p, 0, peer=-1), p.append(Wait(0))),
        "the peer of input 1 .* is -1, expected a rank of at least 0",
    ),
    "a peer between ranks": (
        lambda p, x, y: (_sends(p, 0, peer=1.5), p.append(Wait(0))),
        r"0 \(send\): peer=double\(1.5\) has the dtype Double, expected an integer",
    ),
    "a permuted peer between members": (
        _permuted(peer=0.5),
        r"CollectivePermute 0: send_peer=double\(0.5\) has the dtype Double, expected an integer",
    ),
    "permuted without a mesh": (_permuted(mesh=None), "has no mesh"),
    "permuted dtypes": (_permuted(HALF), "must have one dtype, found float and __half"),
    "a permuted peer": (_permuted(peer=4), "send_peer=4 is not a position in a team of 2 ranks"),
}


def _refusal(name: str) -> VerifyError:
    write, _ = REFUSED[name]
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 8]), hic.tensor([4, 8])
        made = write(hic, x, y)
        hic.values.exprs = ()
    with pytest.raises(VerifyError) as error:
        verify(made if isinstance(made, HostIrContainer) else hic)
    return error.value


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_begin_with_a_sentence(name: str) -> None:
    assert re.search(REFUSED[name][1], sentence(_refusal(name)))


# Rules that no program built by hand breaks: a parser or a constructor is in front of them.
_BEHIND_OTHERS = {
    "the axes of {tv} are ill-formed",
    "is not well-formed",
}


def _raises(module: ModuleType) -> dict[tuple[str, int], str]:
    """Returns the places where a module raises `VerifyError`, with their text."""
    path = Path(inspect.getsourcefile(module) or "")
    text = path.read_text()
    found = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Raise) and n.exc)
    calls = ((n, ast.get_source_segment(text, n) or "") for n in found)
    return {(path.name, n.lineno): code for n, code in calls if "VerifyError(" in code}


def test_every_rule_has_a_broken_program() -> None:
    reached: set[tuple[str, int]] = set()
    for name in REFUSED:
        error = _refusal(name).__context__
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            reached.add((Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
            trace = trace.tb_next
    modules = (
        hostir.ir.verifier,
        hostir.ir.shape_rules,
        hostir.ir.ops.base,
        hostir.ir.ops.local,
        hostir.ir.ops.transfers,
    )
    rules = {place: code for module in modules for place, code in _raises(module).items()}
    missing = {place: code for place, code in rules.items() if place not in reached}
    assert not [c for c in missing.items() if not any(b in c[1] for b in _BEHIND_OTHERS)]


def _mutants(program: HostIrContainer) -> list[HostIrContainer]:
    """Returns programs without an op, with one twice, and with two in another order."""
    found: list[HostIrContainer] = []
    for k, op in enumerate(program.ops):
        before, after = program.ops[:k], program.ops[k + 1 :]
        found.append(program.with_ops((*before, *after)))
        found.append(program.with_ops((*before, op, op, *after)))
        if after:
            found.append(program.with_ops((*before, after[0], op, *after[1:])))
            found.append(program.with_ops((*before, *after, op)))
    return found


@pytest.mark.parametrize("name", [*CASES, *EXAMPLES])
def test_refusals_of_mutated_programs_begin_with_a_sentence(name: str) -> None:
    program = build(CASES[name]) if name in CASES else EXAMPLES[name].build()
    refused = 0
    for mutant in _mutants(program):
        try:
            verify(mutant)
        except VerifyError as error:
            sentence(error)
            refused += 1
    assert refused or len(program.ops) == 1
