"""Stream axes through `fd.execute`: right on every size, whichever stream is late."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice
from fuser.ir.op import walk
from fuser.kernels.executor import FusedKernelExecutor
from fuser.kernels.kernel_variant import Variant
from hostir.ir.parser import parse
from hostir.ir.program import equal

pytestmark = pytest.mark.from_text

LATE = ("all", "entry", "0", "1", "2")


def stream(tv: TensorView, axis: int, count: int | None = None) -> None:
    """Makes an axis a stream: as a whole, or in `count` blocks."""
    if count is not None:
        tv.outer_split(axis, count)
    tv.axis(axis).parallelize(ParallelType.stream)


Define = Callable[[FusionDefinition], None]
Meaning = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    define: Define
    meaning: Meaning
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


def tensors(fd: FusionDefinition, *ranks: int) -> list[TensorView]:
    return [fd.define_tensor([-1] * rank, contiguity=True) for rank in ranks]


def copy(axis: int, count: int | None = None) -> Case:
    def define(fd: FusionDefinition) -> None:
        (x,) = tensors(fd, 2)
        y = fd.ops.set(x)
        fd.add_output(y)
        stream(y, axis, count)

    return Case(define, lambda x: [x], (((8, 5),), ((1, 1),), ((3, 7),)))


def binary(axis: int, count: int | None = None) -> Case:
    def define(fd: FusionDefinition) -> None:
        x, z = tensors(fd, 2, 2)
        y = fd.ops.add(x, z)
        fd.add_output(y)
        stream(y, axis, count)

    return Case(define, lambda x, z: [x + z], (((8, 5),) * 2, ((2, 3),) * 2))


def reduction(count: int | None = None) -> Case:
    def define(fd: FusionDefinition) -> None:
        (x,) = tensors(fd, 3)
        y = fd.ops.sum(x, [2])
        fd.add_output(y)
        stream(y, 0, count)

    return Case(define, lambda x: [x.sum(2)], (((4, 8, 2),), ((5, 3, 70),)))


def matmul(axis: int, count: int | None = None) -> Case:
    def define(fd: FusionDefinition) -> None:
        a, b = tensors(fd, 2, 2)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
        stream(c, axis, count)

    return Case(define, lambda a, b: [a @ b], (((8, 5), (5, 6)), ((1, 3), (3, 2))))


def batched_matmul() -> Case:
    def define(fd: FusionDefinition) -> None:
        a, b = tensors(fd, 3, 3)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
        stream(c, 0)

    return Case(define, lambda a, b: [a @ b], (((3, 8, 5), (3, 5, 6)),))


def linear(axis: int, count: int | None = None) -> Case:
    def define(fd: FusionDefinition) -> None:
        x, w, b = tensors(fd, 2, 2, 1)
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        stream(y, axis, count)

    return Case(define, lambda x, w, b: [x @ w.t() + b], (((8, 5), (6, 5), (6,)),))


def matmul_relu(count: int) -> Case:
    def define(fd: FusionDefinition) -> None:
        a, b = tensors(fd, 2, 2)
        c = fd.ops.relu(fd.ops.matmul(a, b))
        fd.add_output(c)
        stream(c, 0, count)

    return Case(define, lambda a, b: [(a @ b).relu()], (((8, 5), (5, 6)), ((2, 5), (5, 6))))


def two_readers(count: int) -> Case:
    def define(fd: FusionDefinition) -> None:
        (x,) = tensors(fd, 2)
        y = fd.ops.add(x, 1.0)
        fd.add_output(fd.ops.sum(y, [1]))
        fd.add_output(fd.ops.relu(y))
        stream(x, 0, count)

    return Case(define, lambda x: [(x + 1).sum(1), (x + 1).relu()], (((8, 5),), ((7, 33),)))


def two_matmuls(first: int, second: int) -> Case:
    def define(fd: FusionDefinition) -> None:
        a, b, c = tensors(fd, 2, 2, 2)
        t = fd.ops.matmul(a, b)
        y = fd.ops.matmul(t, c)
        fd.add_output(y)
        stream(t, first, 3)
        stream(y, second, 3)

    return Case(define, lambda a, b, c: [a @ b @ c], (((8, 5), (5, 6), (6, 4)),))


def split_k() -> Case:
    def define(fd: FusionDefinition) -> None:
        a, b = tensors(fd, 2, 2)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
        c.outer_split(-1, 3)
        c.axis(-2).parallelize(ParallelType.stream)

    return Case(define, lambda a, b: [a @ b], (((8, 9), (9, 6)),))


def heads() -> Case:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([4, 6, 8], contiguity=True)
        y = fd.ops.relu(fd.ops.reshape(fd.ops.permute(x, [1, 0, 2]), [6, 32]))
        fd.add_output(y)
        stream(y, 0)

    return Case(define, lambda x: [x.permute(1, 0, 2).reshape(6, 32).relu()], (((4, 6, 8),),))


CASES = {
    "copy": copy(0),
    "copy of columns": copy(1),
    "copy in blocks": copy(0, 3),
    "add": binary(0),
    "add of columns": binary(1),
    "add in blocks of columns": binary(1, 2),
    "sum": reduction(),
    "sum in blocks": reduction(3),
    "matmul, rows": matmul(0),
    "matmul, columns": matmul(1),
    "matmul, blocks of rows": matmul(0, 3),
    "matmul, blocks of columns": matmul(1, 4),
    "matmul, more blocks than rows": matmul(0, 9),
    "batched matmul": batched_matmul(),
    "linear, rows": linear(0),
    "linear, columns": linear(1),
    "linear, blocks of rows": linear(0, 3),
    "linear, blocks of columns": linear(1, 4),
    "matmul and relu": matmul_relu(3),
    "two readers": two_readers(3),
    "two matmuls in one loop": two_matmuls(0, 0),
    "two matmuls in two loops": two_matmuls(1, 0),
    "k in blocks": split_k(),
    "permuted and merged": heads(),
}


@pytest.mark.parametrize("name", CASES)
def test_streams(name: str) -> None:
    case = CASES[name]
    with FusionDefinition() as fd:
        case.define(fd)
    generator = torch.Generator().manual_seed(0)
    for options in [[], [], *([f"late_stream({late})"] for late in LATE)]:
        for shapes in case.shapes:
            inputs = [torch.randn(s, generator=generator) for s in shapes]
            outputs = fd.execute(inputs, _enable_options=options)
            expected = case.meaning(*(x.double() for x in inputs))
            for got, want in zip(outputs, expected, strict=True):
                torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    assert "FOR " in str(program)


def test_what_only_steps_see_has_as_many_slots_as_streams() -> None:
    with FusionDefinition() as fd:
        (x, w) = tensors(fd, 2, 3)
        t = fd.ops.matmul(x, w)
        y = fd.ops.relu(t)
        fd.add_output(y)
        stream(y, 0)
    options = ["stream_slots"]
    for late in ((), *((f"late_stream({name})",) for name in LATE)):
        for batch in (9, 3, 1):
            a, b = torch.randn(4, 5), torch.randn(batch, 5, 6)
            (got,) = fd.execute([a, b], _enable_options=[*options, *late])
            want = (a.double() @ b.double()).relu()
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    text = str(fd.fec.host_program())
    assert re.search(r"T\d+_\w+\[iS\d+\{numberOfStreams\}, .*= ALLOCATE", text)
    assert "index = ( streamIdx % numberOfStreams ) )" in text


def rows_of_a_batch(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    return fd.ops.matmul(fd.ops.relu(x), w)


def rows_of_a_batch_that_are_read(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    return fd.ops.relu(fd.ops.matmul(fd.ops.relu(x), w))


def behind_a_border(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    return fd.ops.add(fd.ops.segment_set(fd.ops.relu(x)), w)


@pytest.mark.parametrize(
    ("define", "shapes"),
    [
        (rows_of_a_batch, ((3, 6, 5), (5, 4))),
        (rows_of_a_batch_that_are_read, ((3, 6, 5), (5, 4))),
        (behind_a_border, ((3, 6, 5), (3, 6, 5))),
    ],
)
def test_what_is_taken_from_the_whole_has_no_slots(
    define: Callable[[FusionDefinition, TensorView, TensorView], TensorView],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    with FusionDefinition() as fd:
        x, w = tensors(fd, *map(len, shapes))
        y = define(fd, x, w)
        fd.add_output(y)
        stream(y, 1)
    a, b = (torch.randn(shape) for shape in shapes)
    want = a.relu() + b if define is behind_a_border else a.relu() @ b
    want = want.relu() if define is rows_of_a_batch_that_are_read else want
    for late in ((), (), *((f"late_stream({name})",) for name in LATE)):
        (got,) = fd.execute([a, b], _enable_options=["stream_slots", *late])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_kernels_for_all_steps_are_compiled_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 4 floats in a buffer of 5 begin at every multiple of 4 bytes: not all
    allow vectors."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=[False, True])
        y = fd.ops.exp(x)
        fd.add_output(y)
        stream(y, 0)
    late: list[str] = []
    compiled = FusedKernelExecutor._compiled  # pyright: ignore[reportPrivateUsage]

    def watched(self: FusedKernelExecutor, variant: Variant, *args: Any) -> Any:
        if variant.compiled is None:
            late.append(variant.kernel.source.name)
        return compiled(self, variant, *args)

    monkeypatch.setattr(FusedKernelExecutor, "_compiled", watched)
    for rows, columns in ((9, 4), (9, 8), (40, 4), (40, 6)):
        a = torch.randn(rows, columns + 1)[:, :columns]
        (got,) = fd.execute([a], _enable_options=["schedules_for(h200)"])
        torch.testing.assert_close(got.double(), a.double().exp(), atol=1e-5, rtol=1e-5)
    assert late == []


def test_kernels_are_prepared_once_for_all_steps_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call over a long axis bound the kernel of every step twice."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.exp(x)
        fd.add_output(y)
        stream(y, 0)
    bound: list[str] = []
    bind = FusedKernelExecutor.bind

    def watched(self: FusedKernelExecutor, *args: Any, **named: Any) -> Any:
        bound.append(self.name)
        return bind(self, *args, **named)

    monkeypatch.setattr(FusedKernelExecutor, "bind", watched)
    for rows in (300, 200):
        a = torch.randn(rows, 3)
        (got,) = fd.execute([a])
        torch.testing.assert_close(got, a.exp())
    # Rows of 12 bytes begin at 4 places of a vector of 16, and the allocation is as aligned as any.
    assert len(bound) <= 3 * 4


def summed(fd: FusionDefinition, x: TensorView, w: TensorView) -> TensorView:
    return fd.ops.sum(fd.ops.relu(fd.ops.matmul(x, w)), 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [None, 2, 0])
def test_every_op_with_results_names_a_line_of_the_user(count: int | None, ranks: int) -> None:
    """Errors of what only the compiler knows, such as a slice, said "user code at unknown"."""

    def body() -> None:
        with FusionDefinition() as fd:
            x, w = tensors(fd, 2, 2)
            y = summed(fd, x, w)
            fd.add_output(y)
        if ranks > 1:
            for tv in (x, w, y):
                tv.set_device_mesh(multidevice.DeviceMesh(range(ranks)))
            x.outer_split(0, ranks)
            x.axis(0).parallelize(ParallelType.mesh_x)
        if count != 0:
            stream(y, 0, count)
        fd.execute([torch.randn(8 // ranks, 3), torch.randn(3, 4)])
        line = f"{__file__}:{summed.__code__.co_firstlineno + 1}"
        ops = list(walk(fd.fec.host_program().ops))
        assert [op for op in ops if op.outputs and op.where != line] == []

    with multidevice.simulate(ranks) as world:
        world.run(body)
