"""Stream axes that are merges of axes, in whole programs: a step has one element of each
axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice
from fuser.ir.memory_layout import is_contiguous
from fuser.ir.op import walk
from fuser.support.errors import DefinitionError, FuserError, UnsupportedError
from hostir import NUMBER_OF_STREAMS, RANK, HostIrContainer, equal, parse
from hostir.analysis.races import find_races
from hostir.ir.ops import Communication, ForLoop, HirAliasSelect
from tests.support.op_calls import linear

GOLDEN = Path(__file__).parent / "golden"
STREAM, X = ParallelType.stream, ParallelType.mesh_x
LATE = ("all", "entry", "0", "1")
Shapes = Sequence[Sequence[int]]


def merge(tv: TensorView, *axes: int) -> int:
    """Merges loop axes, listed outermost first; returns the position of the merged axis."""
    handles = [tv.axis(a) for a in axes]
    at = axes[0]
    for handle in handles[1:]:
        other = tv.get_loop_domain().index(handle)
        tv.merge(at, other)
        at = min(at, other)
    return at


def stream(tv: TensorView, *axes: int, split: int | None = None) -> TensorView:
    """Makes the merge of axes, or `split` blocks of it, a stream axis."""
    at = merge(tv, *axes)
    if split is not None:
        tv.outer_split(at, split)
    tv.axis(at).parallelize(STREAM)
    return tv


@dataclass(frozen=True)
class Case:
    """A program with symbolic extents, or constant ones if `constant`, and its torch meaning."""

    define: Callable[..., TensorView | list[TensorView]]
    meaning: Callable[..., Any]
    shapes: Shapes
    constant: bool = False


def definition(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        xs = [
            fd.define_tensor(list(s) if case.constant else [-1] * len(s), contiguity=True)
            for s in case.shapes
        ]
        made = case.define(fd.ops, *xs)
        for out in made if isinstance(made, list) else [made]:
            fd.add_output(out)
    return fd


def centred(ops: Any, x: TensorView, g: TensorView, b: TensorView) -> TensorView:
    h = ops.add(ops.mul(x, g), b)
    return stream(ops.sub(h, ops.max(h, [2], True)), 0, 1)


def of_centred(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = x * g + b
    return h - h.amax(2, keepdim=True)


def rows_of_blocks(ops: Any, x: TensorView, axis: int, *, first: bool) -> TensorView:
    """Merges blocks of one axis with the elements of another."""
    y = ops.exp(x)
    y.outer_split(axis, 3)
    other = 1 - axis + (axis == 0)
    stream(y, *((axis, other) if first else (other, axis)))
    return y


def of_two(ops: Any, x: TensorView, first: Sequence[int], second: Sequence[int]) -> TensorView:
    t = stream(ops.exp(x), *first)
    return stream(ops.relu(t), *second)


def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(2, 3)).softmax(3)


def attention(ops: Any, q: TensorView, k: TensorView) -> TensorView:
    s = ops.matmul(q, ops.permute(k, [0, 1, 3, 2]))
    e = ops.exp(ops.sub(s, ops.max(s, [3], True)))
    return stream(ops.div(e, ops.sum(e, [3], True)), 0, 1)


X3 = ((3, 4, 5),)
LINEARS = [(axes, None) for axes in ((0,), (1,), (2,), (3,), (0, 1), (0, 3), (3, 0), (0, 2, 3))]
LINEARS += [((axis,), 2) for axis in range(4)]
CASES = {
    "set": Case(lambda o, x: stream(o.set(x), 0, 1), lambda x: x, X3),
    "inner axis first": Case(lambda o, x: stream(o.set(x), 1, 0), lambda x: x, X3),
    "axes apart": Case(lambda o, x: stream(o.relu(x), 2, 0), lambda x: x.relu(), X3),
    "three axes": Case(
        lambda o, x: stream(o.relu(x), 0, 1, 2), lambda x: x.relu(), ((3, 4, 2, 5),)
    ),
    "all axes, in any order": Case(
        lambda o, x: stream(o.relu(x), 2, 0, 1), lambda x: x.relu(), ((3, 4, 2),)
    ),
    "bias": Case(lambda o, x, b: stream(o.add(x, b), 0, 1), torch.add, (*X3, (5,))),
    "what lacks the outer axis": Case(
        lambda o, x, b: stream(o.add(x, b), 0, 1), torch.add, (*X3, (4, 5))
    ),
    "what lacks the inner axis": Case(
        lambda o, x, b: stream(o.add(x, o.broadcast(b, [False, True, True])), 0, 1),
        lambda x, b: x + b[:, None, None],
        (*X3, (3,)),
    ),
    "what lacks either, computed": Case(
        lambda o, a, b: stream(
            o.mul(o.broadcast(o.exp(a), [False, True]), o.broadcast(o.exp(b), [True, False])), 0, 1
        ),
        lambda a, b: a.exp()[:, None] * b.exp(),
        ((3,), (4,)),
    ),
    "reduction of each step": Case(centred, of_centred, (*X3, (4, 5), (5,))),
    "sum of another axis": Case(lambda o, x: stream(o.sum(x, [2]), 0, 1), lambda x: x.sum(2), X3),
    "batch": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 1), torch.matmul, ((3, 4, 5, 6), (3, 4, 6, 7))
    ),
    "batch that one operand lacks": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 1), torch.matmul, ((3, 4, 5, 6), (4, 6, 7))
    ),
    "batch that is repeated": Case(
        lambda o, a, b: stream(o.matmul(a, o.broadcast(b, [True, False, False, False])), 0, 1),
        torch.matmul,
        ((3, 4, 5, 6), (4, 6, 7)),
    ),
    "rows, of a batch that is repeated": Case(
        lambda o, a, b: stream(o.matmul(a, o.broadcast(b, [True, False, False, False])), 0, 2),
        torch.matmul,
        ((3, 4, 5, 6), (4, 6, 7)),
    ),
    "batch and rows": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 1), torch.matmul, ((3, 5, 6), (3, 6, 7))
    ),
    "inner batch and rows": Case(
        lambda o, a, b: stream(o.matmul(a, b), 1, 2), torch.matmul, ((3, 2, 5, 6), (3, 2, 6, 7))
    ),
    "outer batch and columns, which one operand lacks": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 3), torch.matmul, ((3, 2, 5, 6), (2, 6, 7))
    ),
    "rows and columns": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 1), torch.matmul, ((5, 6), (6, 7))
    ),
    "batch, rows and columns": Case(
        lambda o, a, b: stream(o.matmul(a, b), 0, 1, 2), torch.matmul, ((3, 5, 6), (3, 6, 7))
    ),
    "linear": Case(
        lambda o, x, w, b: stream(o.linear(x, w, b), 0, 1),
        torch.nn.functional.linear,
        (*X3, (7, 5), (7,)),
    ),
    "linear, rows and columns": Case(
        lambda o, x, w, b: stream(o.linear(x, w, b), 1, 2),
        torch.nn.functional.linear,
        (*X3, (7, 5), (7,)),
    ),
    **{
        f"linear of a batch, axes {axes}, {split} blocks": Case(
            lambda o, x, w, b, axes=axes, split=split: stream(
                o.linear(x, w, b), *axes, split=split
            ),
            linear,
            ((3, 4, 5), (2, 7, 5), (2, 7)),
        )
        # The result's axes: the weights', two of rows, columns.
        for axes, split in LINEARS
    },
    "two linears in one loop": Case(
        lambda o, x, w, v: stream(o.linear(o.relu(o.linear(x, w)), v), 0, 1),
        lambda x, w, v: (x @ w.t()).relu() @ v.t(),
        (*X3, (7, 5), (6, 7)),
    ),
    "heads": Case(attention, attend, ((2, 3, 4, 5), (2, 3, 6, 5))),
    "an input": Case(
        lambda o, x: [o.relu(stream(x, 0, 1)), o.sum(x, [1])], lambda x: [x.relu(), x.sum(1)], X3
    ),
    "other axes behind": Case(
        lambda o, x: of_two(o, x, (0, 1), (1, 2)), lambda x: x.exp().relu(), X3
    ),
    "another order behind": Case(
        lambda o, x: of_two(o, x, (0, 1), (1, 0)), lambda x: x.exp().relu(), X3
    ),
    "merged behind one axis": Case(
        lambda o, x: of_two(o, x, (0,), (0, 1)), lambda x: x.exp().relu(), X3
    ),
    "merged behind its inner axis": Case(
        lambda o, x: of_two(o, x, (1,), (0, 1)), lambda x: x.exp().relu(), X3
    ),
    "one axis behind merged": Case(
        lambda o, x: of_two(o, x, (0, 1), (0,)), lambda x: x.exp().relu(), X3
    ),
    "what is computed in steps of one axis": Case(
        lambda o, x, b: stream(
            o.add(x, o.broadcast(stream(o.exp(b), 0), [False, True, True])), 0, 1
        ),
        lambda x, b: x + b.exp()[:, None, None],
        (*X3, (3,)),
    ),
    "permuted": Case(
        lambda o, x: stream(o.permute(o.exp(x), [2, 0, 1]), 0, 1),
        lambda x: x.exp().permute(2, 0, 1),
        X3,
    ),
    "cat of another axis": Case(
        lambda o, x, z: stream(o.cat([x, z], 2), 0, 1),
        lambda x, z: torch.cat([x, z], 2),
        (*X3, (3, 4, 6)),
    ),
    # Of a merge by a view, the merged axis is the one that is cut.
    "blocks of what a view has merged": Case(
        lambda o, x: stream(o.reshape(x, [35, 3]), 0, split=7),
        lambda x: x.reshape(-1, x.shape[2]),
        ((7, 5, 3),),
        constant=True,
    ),
    "blocks, then elements": Case(
        lambda o, x: rows_of_blocks(o, x, 0, first=True), torch.exp, ((7, 4, 5),)
    ),
    "elements, then blocks": Case(
        lambda o, x: rows_of_blocks(o, x, 1, first=False), torch.exp, ((3, 7, 5),)
    ),
    "blocks of rows": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=3), torch.exp, ((6, 4, 5),), constant=True
    ),
    "ragged blocks of rows": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=4), torch.exp, ((7, 2, 5),), constant=True
    ),
    "blocks of a row": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=12), torch.exp, ((3, 8, 5),), constant=True
    ),
    "blocks of a row, and empty ones": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=5), torch.exp, ((2, 4, 3),), constant=True
    ),
    "more blocks than elements": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=9), torch.exp, ((3, 2, 3),), constant=True
    ),
    "a row per block": Case(
        lambda o, x: stream(o.exp(x), 0, 1, split=3), torch.exp, ((3, 8, 5),), constant=True
    ),
    "blocks of the third axis": Case(
        lambda o, x: stream(o.exp(x), 0, 1, 2, split=12), torch.exp, ((2, 3, 4),), constant=True
    ),
}


def sizes(case: Case) -> list[list[list[int]]]:
    """Returns the shapes to run on: the given ones, larger ones, and ones with extents of 1
    and 0.
    """
    if case.constant:
        return [[list(s) for s in case.shapes]]
    first = case.shapes[0]
    rows, columns = first[0], first[1] if len(first) > 1 else case.shapes[1][0]
    changes = [{}, {n: n + 1 for s in case.shapes for n in s}]
    changes += [{rows: 1}, {columns: 1}, {rows: 1, columns: 1}, {rows: 0}, {columns: 0}]
    return [[[c.get(n, n) for n in s] for s in case.shapes] for c in changes]


def races(program: HostIrContainer, inputs: Sequence[torch.Tensor]) -> list[Any]:
    values: dict[Any, Any] = {RANK: 0, NUMBER_OF_STREAMS: 4}
    for tv, given in zip(program.values.inputs, inputs, strict=True):
        assert isinstance(tv, TensorView)
        values |= {a.extent: n for a, n in zip(tv.domain.logical, given.shape, strict=True)}
    return find_races(program, values)


@pytest.mark.parametrize("name", CASES)
def test_merged_streams(name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    fd = definition(case)
    for number, shapes in enumerate(sizes(case)):
        late = LATE if number == 0 else LATE[:1]
        inputs = [torch.randn(s, generator=generator) for s in shapes]
        for options in [[], [], *([f"late_stream({which})"] for which in late)]:
            outputs = fd.execute(inputs, _enable_options=options)
            want = case.meaning(*(x.double() for x in inputs))
            for got, expected in zip(
                outputs, want if isinstance(want, list) else [want], strict=True
            ):
                torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
        program = fd.fec.host_program()
        assert equal(parse(program.full_text()), program)
        assert races(program, inputs) == []
        if number == 0:
            assert any(isinstance(op, ForLoop) for op in walk(program.ops))


@pytest.mark.parametrize("order", ["pm", "mp", "mn", "nmp", "pmn"])
def test_slices_of_one_operand_are_those_of_their_own_loop(order: str) -> None:
    """Two loops slice an operand that lacks the other axis; equal-looking slices are not
    shared.
    """
    made: dict[str, Callable[[Any, TensorView, TensorView], TensorView]] = {
        "p": lambda o, x, b: stream(o.add(x, b), 0),
        "m": lambda o, x, b: stream(o.mul(x, b), 0, 1),
        "n": lambda o, x, b: stream(o.sub(x, b), 0, 2),
    }
    meaning = {"p": torch.add, "m": torch.mul, "n": torch.sub}

    def define(o: Any, x: TensorView, b: TensorView) -> list[TensorView]:
        rows = o.broadcast(o.exp(b), [False, True, True])
        return [made[c](o, x, rows) for c in order]

    fd = definition(Case(define, torch.add, (*X3, (3,))))
    x, b = torch.randn(3, 4, 5), torch.randn(3)
    for late in ((), ("late_stream(all)",)):
        for got, c in zip(fd.execute([x, b], _enable_options=late), order, strict=True):
            want = meaning[c](x.double(), b.double().exp()[:, None, None])
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def steps(program: HostIrContainer) -> list[str]:
    loops = [op for op in program.ops if isinstance(op, ForLoop)]
    return [str(loop.stop) for loop in loops]


def test_the_program_of_a_merged_axis_prints_as_the_golden_text() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        b = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.add(fd.ops.linear(x, w), b)
        fd.add_output(y)
        stream(y, 0, 1)
    fd.execute([torch.randn(3, 4, 5), torch.randn(6, 5), torch.randn(4, 6)])
    program = fd.fec.host_program()
    assert str(program) == (GOLDEN / "merged_linear.txt").read_text()
    assert steps(program) == ["( i0 * i1 )"] * 2
    again = parse(program.full_text())
    assert equal(again, program)


def test_a_step_has_one_part_of_its_number_for_each_merged_axis() -> None:
    fd = definition(Case(lambda o, x: stream(o.exp(x), 2, 0, 1), torch.exp, ((2, 3, 4, 5),)))
    fd.execute([torch.randn(2, 3, 4, 5)])
    slices = [op for op in walk(fd.fec.host_program().ops) if isinstance(op, HirAliasSelect)]
    assert [str(op.index) for op in slices[:3]] == [
        "( streamIdx / ( i0 * i1 ) )",
        "( ( streamIdx / i1 ) % i0 )",
        "( streamIdx % i1 )",
    ]


def test_the_order_of_a_merge_makes_another_program() -> None:
    """The cache of programs distinguishes definitions that differ in their loop axes alone."""
    texts: list[str] = []
    for axes in ((0, 1), (1, 0)):
        fd = definition(Case(lambda o, x, a=axes: stream(o.set(x), *a), lambda x: x, X3))
        fd.execute([torch.randn(3, 4, 5)])
        texts.append(str(fd.fec.host_program()))
    assert texts[0] != texts[1]


@pytest.mark.parametrize("gone", ["Synchronize(Stream S0)", "Synchronize(Stream ( streamIdx"])
def test_a_wait_that_is_gone_is_found(gone: str) -> None:
    case = CASES["what lacks either, computed"]  # on the caller's stream, before the steps
    fd, inputs = definition(case), [torch.randn(s) for s in case.shapes]
    fd.execute(inputs)
    text = fd.fec.host_program().full_text()
    line = next(one for one in text.splitlines(keepends=True) if gone in one)
    assert races(parse(text), inputs) == []
    assert races(parse(text.replace(line, "", 1)), inputs)


def test_steps_that_write_one_row_are_found() -> None:
    fd = definition(CASES["set"])
    inputs = [torch.randn(3, 4, 5)]
    fd.execute(inputs)
    text = fd.fec.host_program().full_text()
    wrong = text.replace("index = ( streamIdx / i1 )", "index = 0")
    assert wrong != text and races(parse(wrong), inputs)


# ------------------------------------------------------------------ refused, in words
def split_in_three(ops: Any, x: TensorView) -> TensorView:
    return stream(ops.exp(x), 0, 1, split=3)


def rotated(ops: Any, x: TensorView) -> TensorView:
    y = ops.exp(x)
    y.set_device_mesh([0])
    y.merge(0)
    y.swizzle1d(0, X)
    y.axis(0).parallelize(STREAM)
    return y


def of_two_splits(ops: Any, x: TensorView) -> TensorView:
    y = ops.exp(x)
    y.outer_split(0, 2)
    y.outer_split(2, 2)
    return stream(y, 0, 2)


def both_parts(ops: Any, x: TensorView) -> TensorView:
    y = ops.exp(x)
    y.outer_split(0, 2)
    return stream(y, 0, 1)


REFUSED: dict[str, tuple[Case, str]] = {
    "blocks that are no boxes": (
        Case(split_in_three, torch.exp, ((5, 4, 5),), constant=True),
        r"merged stream axis of the result of exp \(T1.*made by exp.*blocks of 7 of 20 elements"
        r".*merged axes iS\d+\{5\} and iS\d+\{4\}",
    ),
    "blocks that may be none": (
        Case(split_in_three, torch.exp, ((6, 4, 5),)),
        r"blocks of \( ceilDiv\(\( i0 \* i1 \), 3\) \).*not known of these blocks",
    ),
    "four axes": (
        Case(lambda o, x: stream(o.exp(x), 0, 1, 2, 3), torch.exp, ((2, 3, 4, 5),)),
        r"merged stream axis of the result of exp \(T1.*merges 4 axes; at most 3",
    ),
    "rotated": (Case(rotated, torch.exp, X3), r"merged stream axis.*is rotated by swizzle1d"),
    "blocks of two axes": (
        Case(of_two_splits, torch.exp, X3),
        r"merges blocks of several axes; at most one",
    ),
    "two parts of one axis": (
        Case(both_parts, torch.exp, X3),
        r"merges several parts of iS\d+\{i0\}",
    ),
    "a sum": (
        Case(lambda o, x: stream(o.sum(x, [0, 1]), 0, 1), lambda x: x.sum((0, 1)), X3),
        r"merges rS\d+\{i0\}, a reduction axis, which cannot be streamed",
    ),
    "a cat of a merged axis": (
        Case(lambda o, x: stream(o.cat([x, x], 1), 0, 1), lambda x: torch.cat([x, x], 1), X3),
        r"cat cannot be computed in steps along the part on stream_\w+ of axis 1 of ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_step_is_refused(name: str) -> None:
    case, message = REFUSED[name]
    fd = definition(case)
    with pytest.raises(UnsupportedError, match=message) as found:
        fd.execute([torch.randn(s) for s in case.shapes])
    assert __file__ in str(found.value)


def test_users_have_one_stream_type() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4])
        with pytest.raises(DefinitionError, match=r"stream_y.*ParallelType\.stream.*merge"):
            x.axis(0).parallelize(ParallelType.stream_y)


# ------------------------------------------------------------------ on a mesh
def shard(t: torch.Tensor, axis: int | None, rank: int) -> torch.Tensor:
    return t if axis is None else t.chunk(2, axis)[rank].contiguous()


@dataclass(frozen=True)
class OnMesh:
    """A program on two ranks.

    `cuts` lists the axis along which each input, and last the result, is cut. `merged` lists the
    logical axes that are merged, the last one in `blocks` if given. `moves` lists the
    communications in the loop.
    """

    define: Callable[..., TensorView]
    meaning: Callable[..., torch.Tensor]
    shapes: Shapes
    cuts: Sequence[int | None]
    merged: Sequence[int] = (0, 1)
    moves: Sequence[str] = ()
    blocks: int | None = None


MESHES = {
    "beside": OnMesh(lambda o, x: o.exp(x), torch.exp, ((3, 4, 6),), (2, 2)),
    "devices' part of an axis": OnMesh(lambda o, x: o.exp(x), torch.exp, ((6, 4, 5),), (0, 0)),
    "devices' part of the inner axis": OnMesh(
        lambda o, x: o.exp(x), torch.exp, ((3, 4, 5),), (1, 1)
    ),
    "allgather per step": OnMesh(
        lambda o, x: o.set(x), lambda x: x, ((3, 4, 6),), (2, None), moves=("Allgather",)
    ),
    "allgather per step, axes apart": OnMesh(
        lambda o, x: o.set(x), lambda x: x, ((3, 6, 5),), (1, None), (0, 2), moves=("Allgather",)
    ),
    "allreduce per step": OnMesh(
        lambda o, x, w: o.linear(x, w),
        torch.nn.functional.linear,
        ((3, 4, 6), (5, 6)),
        (2, 1, None),
        moves=("Allreduce",),
    ),
    "allgather of what steps compute": OnMesh(
        lambda o, x: o.exp(x), torch.exp, ((3, 4, 6),), (2, None), moves=("Allgather",)
    ),
    "blocks beside": OnMesh(lambda o, x: o.exp(x), torch.exp, ((3, 5, 6),), (2, 2), blocks=3),
    # Rows of a block are apart in memory of the whole.
    "blocks of which each is gathered": OnMesh(
        lambda o, x: o.exp(x), torch.exp, ((3, 6, 8),), (2, None), blocks=3
    ),
    "gathered at once for a linear": OnMesh(
        lambda o, x, w: o.linear(x, w),
        torch.nn.functional.linear,
        ((4, 3, 5), (6, 5)),
        (0, None, None),
    ),
    "gathered at once": OnMesh(lambda o, x: o.relu(x), torch.relu, ((4, 3, 5),), (0, None)),
    "scattered": OnMesh(lambda o, x: o.relu(x), torch.relu, ((3, 4, 6),), (None, 2)),
    "columns of a linear": OnMesh(
        lambda o, x, w: o.linear(x, w),
        torch.nn.functional.linear,
        ((3, 4, 6), (8, 6)),
        (None, 0, 2),
    ),
}


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)], ids=["in time", "late"])
@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_merged_streams_on_a_mesh(name: str, is_symbolic: bool, late: tuple[str]) -> None:
    case = MESHES[name]
    mesh = multidevice.DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        xs = [
            fd.define_tensor([-1] * len(s) if is_symbolic else list(s), contiguity=True)
            for s in case.shapes
        ]
        y = case.define(fd.ops, *xs)
        fd.add_output(y)
    for tv, axis in zip((*xs, y), case.cuts, strict=True):
        tv.set_device_mesh(mesh)
        if axis is not None:
            tv.outer_split(axis, 2)
            tv.axis(axis).parallelize(X)
    cut = case.cuts[-1]
    # The split for the devices puts the device axis first, and the rest of the axis behind it.
    merged = [a + (cut is not None and cut <= a) for a in case.merged]
    if case.blocks is not None:
        y.outer_split(merged[-1], case.blocks)
    stream(y, *merged)
    wholes = [torch.randn(s, dtype=torch.float32) for s in case.shapes]

    def body() -> HostIrContainer:
        rank = multidevice.Communicator.instance().rank()
        given = [shard(t, axis, rank) for t, axis in zip(wholes, case.cuts, strict=False)]
        for _ in range(2):
            (got,) = fd.execute(given, _enable_options=late)
            want = shard(case.meaning(*(t.double() for t in wholes)), cut, rank)
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        return fd.fec.host_program()

    with multidevice.simulate(2) as world:
        program = world.run(body)[0]
    assert equal(parse(program.full_text()), program)
    loops = [op for op in program.ops if isinstance(op, ForLoop)]
    inside = [op for loop in loops for op in walk(loop.body) if isinstance(op, Communication)]
    assert [op.type for op in inside] == list(case.moves)
    # The tensors that are sent are dense, whichever axes are merged.
    assert all(is_contiguous(tv) for op in inside for tv in (op.inp, op.out))


def test_a_refusal_names_the_part_that_devices_share() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 4, 5], contiguity=True)
        y = fd.ops.exp(x)
        fd.add_output(y)
    for tv in (x, y):
        tv.set_device_mesh(multidevice.DeviceMesh([0, 1]))
    y.outer_split(0, 2)
    y.outer_split(1, 2)
    y.axis(1).parallelize(X)
    stream(y, 0, 3)

    def body() -> str:
        with pytest.raises(
            FuserError, match=r"merges blocks of iS\d+\{8\}, each of which is split over"
        ) as e:
            fd.execute([torch.randn(8, 4, 5)])
        return str(e.value)

    with multidevice.simulate(2) as world:
        assert all(
            re.search(r"test_merged_streams_in_programs\.py:\d+", text) for text in world.run(body)
        )
