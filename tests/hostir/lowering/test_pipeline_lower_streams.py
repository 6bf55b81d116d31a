"""Tensor ops of a program by hand get their loops: the criteria of one device, and of a mesh."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError, VerifyError
from hostir import (
    Allocate,
    HirAliasSelect,
    HostIrContainer,
    HostIrEvaluator,
    equal,
    lower_streams,
    parse,
)
from hostir.ir.ops import ForLoop, GetCurrentStream
from multidevice import Communicator, DeviceMesh, simulate

Program = Callable[[HostIrContainer], TensorView]
STREAM, X = ParallelType.stream, ParallelType.mesh_x


def on_stream(tv: TensorView, axis: int) -> TensorView:
    tv.axis(axis).parallelize(STREAM)
    return tv


def two_sets(hic: HostIrContainer) -> TensorView:
    first = on_stream(ops.set(hic.input([-1, -1])), 0)
    second = on_stream(ops.set(first), 0)
    hic.append(second)
    hic.add_output(first)
    return second


def matmul(a: list[int], b: list[int], axis: int) -> Program:
    return lambda hic: on_stream(ops.matmul(hic.input(a), hic.input(b)), axis)


@dataclass(frozen=True)
class Case:
    """`slices`: how many views the steps take; `allocations` are the first ops."""

    define: Program
    meaning: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    slices: int
    allocations: int = 1


CASES = {
    "rows": Case(lambda hic: on_stream(ops.set(hic.input([-1, -1])), 0), torch.clone, ((4, 8),), 2),
    "columns": Case(
        lambda hic: on_stream(ops.set(hic.input([-1, -1])), 1), torch.clone, ((4, 8),), 2
    ),
    "add": Case(
        lambda hic: on_stream(ops.add(hic.input([-1, -1]), hic.input([-1, -1])), 1),
        torch.add,
        ((4, 8), (4, 8)),
        3,
    ),
    "two sets": Case(two_sets, torch.clone, ((4, 8),), 3, allocations=2),
    "reduction": Case(
        lambda hic: on_stream(ops.sum(hic.input([-1, -1, -1]), [2]), 0),
        lambda x: x.sum(2),
        ((4, 8, 2),),
        2,
    ),
    "M": Case(matmul([-1, -1], [-1, -1], 0), torch.matmul, ((4, 5), (5, 6)), 2),
    "N": Case(matmul([-1, -1], [-1, -1], 1), torch.matmul, ((4, 5), (5, 6)), 2),
    "batch": Case(matmul([-1, -1, -1], [-1, -1, -1], 0), torch.matmul, ((3, 4, 5), (3, 5, 6)), 3),
}


def built(define: Program) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        out = define(hic)
        if not any(tv is out for op in hic.ops for tv in op.outputs):
            hic.append(out)
        hic.add_output(out)
    return hic


@pytest.mark.parametrize("name", CASES)
def test_ops_on_stream_axes_get_two_loops(name: str) -> None:
    case = CASES[name]
    hic = built(case.define)
    with pytest.raises(VerifyError, match=r"has a stream axis, .*lower_streams\(program\)"):
        HostIrEvaluator(hic)
    program = lower_streams(hic)
    kinds = [Allocate] * case.allocations + [GetCurrentStream, ForLoop, ForLoop]
    assert [type(op) for op in program.ops] == kinds
    slices = [op for op in walk(program.ops) if isinstance(op, HirAliasSelect)]
    assert len(slices) == case.slices
    assert equal(parse(program.full_text()), program)
    generator = torch.Generator().manual_seed(0)
    for more in (0, 1):
        inputs = [torch.randn([n + more for n in s], generator=generator) for s in case.shapes]
        want = case.meaning(*(t.double() for t in inputs))
        for late in (None, "all"):
            for got in HostIrEvaluator(program, late_stream=late).run(inputs):
                torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_split", [False, True])
def test_stream_axes_of_splits_and_merges_are_refused(is_split: bool) -> None:
    def define(hic: HostIrContainer) -> TensorView:
        y = ops.set(hic.input([-1, -1]))
        assert isinstance(y, TensorView)
        y.outer_split(0, 2) if is_split else y.merge(0)
        return on_stream(y, 0)

    with pytest.raises(UnsupportedError, match="on a split/merge axis"):
        lower_streams(built(define))


def test_other_ops_are_named() -> None:
    def define(hic: HostIrContainer) -> TensorView:
        y = on_stream(ops.set(hic.input([-1, -1])), 0)
        hic.append(Allocate(y), y)
        return y

    with pytest.raises(
        UnsupportedError,
        match="lower_streams: expected a program of tensor ops only, found the op Allocate",
    ):
        lower_streams(built(define))


def test_an_allgather_in_steps() -> None:
    """MS-1: in [4, D] on devices along axis 1, out in steps along axis 0."""
    whole = torch.arange(8.0).view(4, 2)

    def define(hic: HostIrContainer) -> TensorView:
        mesh = DeviceMesh([0, 1])
        x = hic.input([4, 2], mesh=mesh)
        x.axis(1).parallelize(X)
        y = on_stream(ops.set(x), 0)
        y.set_device_mesh(mesh)
        return y

    program = lower_streams(built(define))
    assert [type(op) for op in program.ops] == [Allocate, GetCurrentStream, ForLoop, ForLoop]

    def body() -> None:
        rank = Communicator.instance().rank()
        (got,) = HostIrEvaluator(program).run([whole[:, rank : rank + 1].contiguous()])
        assert torch.equal(got, whole)

    with simulate(2) as world:
        world.run(body)
