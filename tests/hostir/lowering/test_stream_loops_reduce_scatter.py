"""Matmul + reduce-scatter with the shard outermost: a step computes what one device gets.

Every step reduces its block to its device; or, where every device begins with its own block, steps
exchange blocks, and each device sums those that it received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.op import walk
from fuser.multidevice import Communicator, DeviceMesh, simulate
from fuser.support.errors import UnsupportedError
from hostir.analysis.collective_matching import find_mismatches
from hostir.analysis.races import UNWRITTEN, find_races
from hostir.ir.diagnostics import Finding, report
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    RANK,
    Communication,
    P2PCommunication,
    StartsCommunication,
)
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer, equal
from hostir.lowering.input_class import symbol_values
from hostir.lowering.params import DEFAULT, LowerParams
from tests.fuser.nvfuser.test_multi_device_executor import matmul_reduce_scatter

X, STREAM = ParallelType.mesh_x, ParallelType.stream
LATE = ("all", "entry", "0", "1")
Shapes = tuple[tuple[int, ...], ...]
Built = tuple[FusionDefinition, list[TensorView], TensorView]


@dataclass(frozen=True)
class Form:
    """How a reduce-scatter is defined for d ranks; `rotated`: every device begins with its own."""

    define: Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]
    meaning: Callable[..., torch.Tensor]
    shapes: Callable[[int], Sequence[Shapes]]
    rotated: bool = False
    params: LowerParams = DEFAULT
    dtype: DataType = DataType.Float


def swizzled_exchange(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """The executor's ring, with the rotation in the definition."""
    a = fd.define_tensor([d, d, -1, -1], contiguity=True)
    b = fd.define_tensor([d, 1, -1, -1], contiguity=True)
    c = fd.ops.matmul(a, b)
    parts = fd.ops.set(c)
    y = fd.ops.sum(parts, [0])
    fd.add_output(y)
    for tv in (a, b, c, parts, y):
        tv.set_device_mesh(DeviceMesh(range(d)))
    for tv in (a, b, c):
        tv.axis(0).parallelize(X)
    c.swizzle1d(1, X)
    c.axis(1).parallelize(STREAM)
    parts.axis(0).parallelize(STREAM)
    parts.axis(1).parallelize(X)
    y.axis(1).parallelize(X)
    return [a, b], y


def row_parallel(*, swizzled: bool, columns: bool = False, bias: bool = False):
    """linear(x [M, K], w [N, K]) with K cut over devices, and the rows, or columns, of the result,
    whose operand is read in as many steps."""

    def define(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        inputs = [fd.define_tensor([-1, -1], contiguity=True) for _ in range(2)]
        if bias:
            inputs.append(fd.define_tensor([-1], contiguity=True))
        y = fd.ops.linear(*inputs)
        fd.add_output(y)
        place(d, inputs[:2], y, swizzled=swizzled, columns=columns)
        return inputs, y

    return define


def half_rows(*, swizzled: bool):
    def define(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, w = (
            fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16) for _ in range(2)
        )
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        place(d, [x, w], y, swizzled=swizzled)
        return [x, w], y

    return define


def place(
    d: int,
    operands: list[TensorView],
    y: TensorView,
    *,
    swizzled: bool,
    columns: bool = False,
    mesh: DeviceMesh | None = None,
    along: ParallelType = X,
) -> None:
    mesh = mesh or DeviceMesh(range(d))
    for tv in (*operands, y):
        tv.set_device_mesh(mesh)
    for tv in operands:
        tv.outer_split(1, d)
        tv.axis(1).parallelize(along)
    y.outer_split(int(columns), d)
    y.axis(int(columns)).parallelize(along)
    stepping = operands[int(columns)]
    stepping.outer_split(0, d)
    if swizzled:
        stepping.swizzle1d(0, along)
    stepping.axis(0).parallelize(STREAM)


def explicit(
    fd: FusionDefinition, d: int, *, swizzled: bool
) -> tuple[list[TensorView], TensorView]:
    """The partial sums by hand, with an op between: relu(a [d, M, K/d] @ b) summed over d."""
    a, b = (fd.define_tensor([d, -1, -1], contiguity=True) for _ in range(2))
    c = fd.ops.relu(fd.ops.matmul(a, b))
    y = fd.ops.sum(c, [0])
    fd.add_output(y)
    for tv in (a, b, c, y):
        tv.set_device_mesh(DeviceMesh(range(d)))
    for tv in (a, b, c):
        tv.axis(0).parallelize(X)
    c.outer_split(1, d)
    if swizzled:
        c.swizzle1d(1, X)
    c.axis(1).parallelize(STREAM)
    y.outer_split(1, d)
    y.axis(1).parallelize(X)
    return [a, b], y


def executor_form(exchanged: bool, extents: tuple[int, ...], shape: tuple[int, ...]) -> Form:
    m, k, n = shape
    return Form(
        lambda fd, d: matmul_reduce_scatter(d, exchanged=exchanged, extents=extents)(fd),
        lambda a, b: (a @ b).sum(0),
        lambda d: [((d, d, m, k), (d, 1, k, n))],
        rotated=exchanged,
        params=LowerParams(propagate=False, standalone=True, offset_by_rank=exchanged),
    )


def linear(x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    return sum(bias, x @ w.t())


def rows(d: int) -> list[Shapes]:
    return [((4 * d, 3 * d), (5, 3 * d)), ((d, 5 * d), (7, 5 * d)), ((3 * d, d), (1, d))]


def with_bias(d: int) -> list[Shapes]:
    return [((4 * d, 3 * d), (5, 3 * d), (5,))]


def columns(d: int) -> list[Shapes]:
    return [((5, 3 * d), (4 * d, 3 * d)), ((3, d), (d, d))]


FORMS: dict[str, Form] = {}
for _is_ring, _name in ((False, "reduce"), (True, "ring")):
    FORMS |= {
        f"{_name}, rows": Form(row_parallel(swizzled=_is_ring), linear, rows, _is_ring),
        f"{_name}, columns": Form(
            row_parallel(swizzled=_is_ring, columns=True), linear, columns, _is_ring
        ),
        f"{_name}, bias": Form(
            row_parallel(swizzled=_is_ring, bias=True), linear, with_bias, _is_ring
        ),
        f"{_name}, bfloat16": Form(
            half_rows(swizzled=_is_ring), linear, rows, _is_ring, dtype=DataType.BFloat16
        ),
        f"{_name}, relu": Form(
            lambda fd, d, swizzled=_is_ring: explicit(fd, d, swizzled=swizzled),
            lambda a, b: (a @ b).relu().sum(0),
            lambda d: [((d, 3 * d, 5), (d, 5, 7))],
            _is_ring,
        ),
        f"{_name}, executor": executor_form(_is_ring, (3, 5, 7), (3, 5, 7)),
        f"{_name}, executor, symbolic": executor_form(_is_ring, (-1, -1, -1), (1, 3, 2)),
    }
# The executor's definitions, through `execute`.
FORMS["reduce, executor, executed"] = replace(FORMS["reduce, executor"], params=DEFAULT)
FORMS["ring, executor, executed"] = replace(
    FORMS["ring, executor"], define=swizzled_exchange, params=DEFAULT
)


def run(form: Form, d: int, options: Sequence[Sequence[str]]) -> HostIrContainer:
    """Runs on random inputs, and compare with float64; returns the program."""
    with FusionDefinition() as fd:
        inputs, out = form.define(fd, d)
    cache = FusionExecutorCache(fd.fusion, params=form.params)
    is_half = form.dtype is DataType.BFloat16
    generator = torch.Generator().manual_seed(0)
    for shapes in form.shapes(d):
        for enabled in options:
            xs = [torch.randn(shape, generator=generator) for shape in shapes]
            if is_half:
                xs = [x.bfloat16() for x in xs]
            mine = [local(x, tv) for x, tv in zip(xs, inputs, strict=True)]
            (got,) = cache.execute(mine, _enable_options=enabled)
            want = multidevice.shard_tensor(form.meaning(*(x.double() for x in xs)), out)
            tolerance = 0.1 if is_half else 1e-5
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    return cache.host_program()


def local(x: torch.Tensor, tv: TensorView) -> torch.Tensor:
    return x if tv.mesh is None else multidevice.shard_tensor(x, tv)


def races(program: HostIrContainer) -> list[list[Finding]]:
    values = {**symbol_values(program, {}), NUMBER_OF_STREAMS: 3}
    return [find_races(program, {**values, RANK: rank}, rank=rank) for rank in program.devices()]


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_each_step_computes_what_one_device_gets(name: str, d: int) -> None:
    form = FORMS[name]
    options = [[], *([f"late_stream({late})"] for late in LATE)]
    with simulate(d) as world:
        program, *others = world.run(lambda: run(form, d, options))
    assert len({str(p) for p in (program, *others)}) == 1
    assert equal(parse(program.full_text()), program)
    sent = [op for op in walk(program.ops) if isinstance(op, Communication | P2PCommunication)]
    assert [op.type for op in sent] == (["recv", "send"] if form.rotated else ["Reduce"])
    values = {**symbol_values(program, {}), NUMBER_OF_STREAMS: 3}
    for found in (*races(program), find_mismatches(program, values)):
        assert not found, report(program, found)


@pytest.mark.parametrize("rotated", [False, True])
def test_the_teams_of_a_mesh_of_two_dimensions(rotated: bool) -> None:
    def body() -> str:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            y = fd.ops.linear(x, w)
            fd.add_output(y)
            mesh = DeviceMesh(torch.tensor([[0, 1], [2, 3]]))
            place(2, [x, w], y, swizzled=rotated, mesh=mesh, along=ParallelType.mesh_y)
            w.outer_split(0, 2)
            w.axis(0).parallelize(X)
            y.outer_split(2, 2)
            y.axis(2).parallelize(X)
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            xs = [torch.randn(shape, generator=generator) for shape in ((6, 8), (10, 8))]
            mine = [multidevice.shard_tensor(v, tv) for v, tv in zip(xs, (x, w), strict=True)]
            (got,) = fd.execute(mine)
            want = multidevice.shard_tensor(linear(*(v.double() for v in xs)), y)
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        return str(fd.fec.host_program())

    with simulate(4) as world:
        text = world.run(body)[0]
    assert ("P2PCommunication" if rotated else "type=Reduce,") in text


def test_a_loop_cannot_both_rotate_its_steps_and_reduce_them() -> None:
    """x is brought in a ring, and the same steps' partial sums are to be reduced together."""

    def body(params: LowerParams) -> None:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            brought = fd.ops.set(x)
            y = fd.ops.linear(brought, w)
            fd.add_output(y)
            for tv in (x, w, brought, y):
                tv.set_device_mesh(DeviceMesh(range(2)))
            x.outer_split(0, 2)
            x.axis(0).parallelize(X)
            w.outer_split(1, 2)
            w.axis(1).parallelize(X)
            for tv in (brought, y):
                tv.outer_split(0, 2)
                tv.axis(0).parallelize(STREAM)
        xs = [torch.ones(6, 8), torch.ones(5, 8)]
        mine = [multidevice.shard_tensor(v, tv) for v, tv in zip(xs, (x, w), strict=True)]
        (got,) = FusionExecutorCache(fd.fusion, params=params).execute(mine)
        torch.testing.assert_close(got, torch.full((6, 5), 8.0))

    with simulate(2) as world:
        world.run(lambda: body(DEFAULT))
        with pytest.raises(
            UnsupportedError, match=r"Allreduce of T.*_by_rank.*leave.*test_stream_loops_reduce_"
        ):
            world.run(lambda: body(LowerParams(offset_by_rank=True)))


@pytest.mark.parametrize("name", [n for n in FORMS if "executor" not in n])
def test_one_rank_has_nothing_to_send(name: str) -> None:
    with simulate(1) as world:
        (program,) = world.run(lambda: run(FORMS[name], 1, [[], ["late_stream(all)"]]))
    assert not [op for op in walk(program.ops) if isinstance(op, StartsCommunication)]


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("rotated", [False, True])
def test_an_allreduce_of_two_loops(d: int, rotated: bool) -> None:
    """A reduce-scatter and an allgather, each with a step per device."""

    def body() -> HostIrContainer:
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
            y = fd.ops.linear(x, w)
            z = fd.ops.set(y)
            fd.add_output(z)
            place(d, [x, w], y, swizzled=rotated)
            z.set_device_mesh(DeviceMesh(range(d)))
            z.outer_split(0, d)
            if rotated:
                z.swizzle1d(0, X)
            z.axis(0).parallelize(STREAM)
        generator = torch.Generator().manual_seed(0)
        for enabled in [[], *([f"late_stream({late})"] for late in LATE)]:
            xs = [torch.randn(shape, generator=generator) for shape in ((3 * d, 2 * d), (5, 2 * d))]
            mine = [multidevice.shard_tensor(v, tv) for v, tv in zip(xs, (x, w), strict=True)]
            (got,) = fd.execute(mine, _enable_options=enabled)
            want = linear(*(v.double() for v in xs))
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        return fd.fec.host_program()

    with simulate(d) as world:
        program = world.run(body)[0]
    sent = [op for op in walk(program.ops) if isinstance(op, StartsCommunication)]
    kinds = [getattr(op, "type", type(op).__name__) for op in sent]
    ring = ["recv", "send", "EndCoalescing", "CollectivePermute"]
    assert kinds == (ring if rotated else ["Reduce", "Broadcast"])
    assert races(program) == [[]] * d


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name", ["reduce, rows", "ring, rows", "reduce, executor", "ring, executor"]
)
def test_steps_under_mpirun(name: str, comm: Communicator) -> None:
    run(FORMS[name], comm.size(), [[]] * 4)


def test_a_step_that_reduces_to_another_device_is_found() -> None:
    """The result of a reduction is written on its root alone."""
    with simulate(2) as world:
        program = world.run(lambda: run(FORMS["reduce, executor"], 2, [[]]))[0]
    text = program.full_text()
    wrong = parse(text.replace("root=streamIdx", "root=0"))
    first, second = races(wrong)
    assert [f.kind for f in second] == [UNWRITTEN]
    assert [f.kind for f in first] == ["race"]
