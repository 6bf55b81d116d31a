"""Stream axes along which an operand is expanded: it has one element there, with stride 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice
from hostir.ir.ops import ForLoop

pytestmark = pytest.mark.from_text

STREAM, X = ParallelType.stream, ParallelType.mesh_x
linear = torch.nn.functional.linear


@dataclass(frozen=True)
class Case:
    """A program of which some operands are expanded along stream axes.

    Negative extents in `shapes` are expanded axes. The result's `axes` are merged and made a
    stream; if all of them have one element, there are no steps. On a mesh, the result is cut over
    two ranks along `cut`.
    """

    define: Callable[..., TensorView]
    meaning: Callable[..., torch.Tensor]
    shapes: Sequence[Sequence[int]]
    axes: Sequence[int]
    cut: int | None = None
    has_steps: bool = True


# Extents are mostly equal: an element of the wrong axis has the right shape.
CASES = {
    "columns of a linear": Case(lambda o, x, w: o.linear(x, w), linear, ((3, 3, 3), (-3, 3)), (2,)),
    "bias": Case(lambda o, x, w, b: o.linear(x, w, b), linear, ((3, 3), (3, 3), (-3,)), (1,)),
    "weight and bias": Case(
        lambda o, x, w, b: o.linear(x, w, b), linear, ((3, 3), (-3, 3), (-3,)), (1,)
    ),
    "rows of a linear": Case(lambda o, x, w: o.linear(x, w), linear, ((-3, 3, 3), (3, 3)), (0,)),
    "two axes of a linear, one expanded": Case(
        lambda o, x, w: o.linear(x, w), linear, ((3, -3, 3), (3, 3)), (0, 1)
    ),
    "two axes of a linear, both expanded": Case(
        lambda o, x, w: o.linear(x, w), linear, ((-3, -3, 3), (3, 3)), (1, 0), has_steps=False
    ),
    "rows and columns of a linear": Case(
        lambda o, x, w: o.linear(x, w), linear, ((3, -3, 3), (-3, 3)), (1, 2), has_steps=False
    ),
    "batch": Case(lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3), (-3, 3, 3)), (0,)),
    "batches": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3, 3), (3, -3, 3, 3)), (0, 1)
    ),
    "batches, one of them lacking": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3, 3), (-3, 3, 3)), (0, 1)
    ),
    "batches, one of them of one element": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3, 3), (1, -3, 3, 3)), (1, 0)
    ),
    "batch and rows": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3, 3), (3, -3, 3, 3)), (1, 2)
    ),
    "batch and rows of the same operand": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, -3, -3, 3), (3, 3, 3, 3)), (1, 2)
    ),
    "columns of a batch": Case(
        lambda o, a, b: o.matmul(a, b), torch.matmul, ((3, 3, 3), (3, 3, -3)), (2,)
    ),
    "what a kernel reads": Case(
        lambda o, x, y: o.relu(o.add(x, y)),
        lambda x, y: torch.relu(x + y),
        ((3, 3, 3), (-3, 3, 3)),
        (0, 1),
    ),
    "a slice of what one rank has of it": Case(
        lambda o, x, w: o.linear(x, w), linear, ((4, 4, 4), (-4, 4)), (2,), cut=0
    ),
    "a slice behind the expanded axis": Case(
        lambda o, x: o.set(x), lambda x: x, ((-4, 4, 4),), (0,), cut=1
    ),
    "a slice behind two axes": Case(
        lambda o, x: o.set(x), lambda x: x, ((4, -4, 4),), (0, 1), cut=2
    ),
    "a slice behind one element and another axis": Case(
        lambda o, x: o.set(x), lambda x: x, ((1, 4, 4),), (0, 1), cut=2
    ),
}


def tensor(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    dense = torch.randn([1 if n < 0 else n for n in shape], generator=generator)
    return dense.expand([abs(n) for n in shape])


def merge_on_stream(tv: TensorView, axes: Sequence[int]) -> None:
    handles = [tv.axis(a) for a in axes]
    at = axes[0]
    for handle in handles[1:]:
        other = tv.get_loop_domain().index(handle)
        tv.merge(at, other)
        at = min(at, other)
    tv.axis(at).parallelize(STREAM)


def definition(case: Case, *, is_symbolic: bool) -> FusionDefinition:
    with FusionDefinition() as fd:
        xs: list[Any] = [
            fd.define_tensor(
                [-1 if is_symbolic and n != 1 else abs(n) for n in s],
                contiguity=[None if n < 0 or n == 1 else True for n in s],
            )
            for s in case.shapes
        ]
        out = case.define(fd.ops, *xs)
        fd.add_output(out)
    if case.cut is not None:
        for tv in (*xs, out):
            tv.set_device_mesh(multidevice.DeviceMesh([0, 1]))
        out.outer_split(case.cut, 2)
        out.axis(case.cut).parallelize(X)
    # The split for the devices puts the device axis first, and the rest of the axis behind it.
    merge_on_stream(out, [a + (case.cut is not None and case.cut <= a) for a in case.axes])
    return fd


def expect_right(fd: FusionDefinition, case: Case, inputs: Sequence[torch.Tensor]) -> None:
    rank = 0 if case.cut is None else multidevice.Communicator.instance().rank()
    want = case.meaning(*(x.double() for x in inputs))
    if case.cut is not None:
        want = want.chunk(2, case.cut)[rank]
    for options in ((), (), ("late_stream(all)",)):
        (got,) = fd.execute(inputs, _enable_options=options)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    loops = [op for op in fd.fec.host_program().ops if isinstance(op, ForLoop)]
    assert bool(loops) is case.has_steps


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_steps_along_an_expanded_axis(name: str, is_symbolic: bool) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    inputs = [tensor(s, generator) for s in case.shapes]
    fd = definition(case, is_symbolic=is_symbolic)
    if case.cut is None:
        expect_right(fd, case, inputs)
        return
    with multidevice.simulate(2) as world:
        world.run(expect_right, fd, case, inputs)
