"""Regression tests: programs with streams that random tests found wrong, made small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    ForLoop,
    HostIrEvaluator,
    equal,
    parse,
)
from hostir.analysis.races import find_races

pytestmark = pytest.mark.from_text

X = ParallelType.mesh_x
LATE = ("all", "entry", "0", "1")
Shapes = Sequence[Sequence[int]]
Meaning = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A program, its torch meaning, and the ranks of its mesh, if any.

    `define` returns annotated inputs and the result.
    """

    define: Callable[[FusionDefinition], tuple[list[TensorView], TensorView]]
    meaning: Meaning
    shapes: Shapes
    ranks: Sequence[int] = ()


def stream(tv: TensorView, axis: int, count: int | None = None) -> None:
    if count is not None:
        tv.outer_split(axis, count)
    tv.axis(axis).parallelize(ParallelType.stream)


def cut(mesh: multidevice.DeviceMesh, tv: TensorView, axis: int) -> None:
    tv.outer_split(axis, mesh.size)
    tv.axis(axis).parallelize(X)


def on_mesh(ranks: Sequence[int], *tensors: TensorView) -> multidevice.DeviceMesh:
    mesh = multidevice.DeviceMesh(list(ranks))
    for tv in tensors:
        tv.set_device_mesh(mesh)
    return mesh


def views_of_empty_blocks(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([3, 2, 8], contiguity=True)
    w = fd.define_tensor([8, 8], contiguity=True)
    y = fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [3, 2, 2, 4]), [0, 2, 1, 3])
    out = fd.ops.relu(y)
    stream(out, 0, 5)
    return [x, w], out


def rotated_on_a_reversed_mesh(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([4, 6], contiguity=True)
    y = fd.ops.relu(x)
    on_mesh([1, 0], x, y)
    y.outer_split(0, 2)
    y.swizzle1d(0, X)
    y.axis(0).parallelize(ParallelType.stream)
    return [x], y


def gathered_expanded_weight(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([2, 2], contiguity=True)
    w = fd.define_tensor([2, 2], contiguity=[False, None])
    y = fd.ops.linear(x, w)
    mesh = on_mesh([0, 1], x, w, y)
    cut(mesh, w, 0)
    return [x, w], y


def batched_matmul(a: Sequence[int], b: Sequence[int], axis: int):
    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor(list(a), contiguity=True)
        y = fd.define_tensor(list(b), contiguity=True)
        out = fd.ops.matmul(x, fd.ops.relu(y))
        stream(out, axis)
        return [x, y], out

    return Case(define, lambda x, y: x @ y.relu(), (a, b))


def gathered_in_rotated_steps(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([8, 4, 8], contiguity=True)
    w = fd.define_tensor([6, 8], contiguity=True)
    y = fd.ops.linear(x, w)
    mesh = on_mesh([0, 1], x, w, y)
    cut(mesh, x, 1)
    y.outer_split(0, 2)
    y.swizzle1d(0, X)
    y.axis(0).parallelize(ParallelType.stream)
    return [x, w], y


def summed_in_rotated_steps(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([8, 4], contiguity=True)
    y = fd.ops.sum(x, [1])
    mesh = on_mesh([0, 1], x, y)
    cut(mesh, x, 1)
    y.outer_split(0, 2)
    y.swizzle1d(0, X)
    y.axis(0).parallelize(ParallelType.stream)
    return [x], y


def gathered_inside_of_steps(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([12], contiguity=True)
    y = fd.ops.relu(x)
    mesh = on_mesh([0, 1], x, y)
    stream(x, 0, 3)
    cut(mesh, x, 1)
    return [x], y


def other_steps_of_what_lies_inside(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([8, 3], contiguity=True)
    y = fd.ops.relu(x)
    mesh = on_mesh([0, 1], x, y)
    stream(x, 0, 2)
    cut(mesh, x, 1)
    stream(y, 0)
    return [x], y


def written_in_steps_and_read_by_heads(
    fd: FusionDefinition,
) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([5, 3, 8], contiguity=True)
    w = fd.define_tensor([8, 8], contiguity=True)
    y = fd.ops.reshape(fd.ops.linear(x, w), [5, 3, 4, 2])
    out = fd.ops.permute(y, [0, 2, 1, 3])
    stream(out, 1)
    return [x, w], out


def reshaped_inside_of_devices_blocks(
    fd: FusionDefinition,
) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([2, 3, 8], contiguity=True)
    w = fd.define_tensor([8, 8], contiguity=True)
    y = fd.ops.reshape(fd.ops.linear(x, w), [2, 3, 4, 2])
    out = fd.ops.relu(fd.ops.permute(y, [0, 2, 1, 3]))
    mesh = on_mesh([0, 1], x, w, out)
    cut(mesh, w, 0)
    stream(w, 1, 2)
    cut(mesh, out, 1)
    return [x, w], out


def sum_of_repeated_rows(
    rows: int, count: int, *, ranks: Sequence[int] = (), is_rotated: bool = False
) -> Case:
    """A kernel in a loop sums rows of a constant tensor, whose number depends on the step alone.

    No operand or result has the extent of the block, which is shorter or empty in the last steps.
    """

    def define(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
        x = fd.define_tensor([rows, 5], contiguity=True)
        b = fd.define_tensor([5], contiguity=True)
        ones = fd.ops.mul(fd.ops.full([rows, 5], 1.5, DataType.Float), b)
        out = fd.ops.mul(x, fd.ops.sum(ones, [0], keepdim=True))
        at = 0
        if ranks:
            mesh = on_mesh(ranks, x, b, ones, out)
            if not is_rotated:
                cut(mesh, ones, 0)
                at = 1
        ones.outer_split(at, count)
        if is_rotated:
            ones.swizzle1d(at, X)
        ones.axis(at).parallelize(ParallelType.stream)
        return [x, b], out

    return Case(define, lambda x, b: x * b * 1.5 * rows, ((rows, 5), (5,)), ranks)


def sum_of_repeated_columns(fd: FusionDefinition) -> tuple[list[TensorView], TensorView]:
    x = fd.define_tensor([1, 3], contiguity=True)
    ones = fd.ops.exp(fd.ops.full([1, 3], 0.0, DataType.Float))
    out = fd.ops.mul(x, fd.ops.sum(ones, [0, 1]))
    stream(ones, 1, 4)
    return [x], out


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


CASES = {
    "views of empty blocks": Case(
        views_of_empty_blocks,
        lambda x, w: linear(x, w).reshape(3, 2, 2, 4).permute(0, 2, 1, 3).relu(),
        ((3, 2, 8), (8, 8)),
    ),
    "blocks rotated on a reversed mesh": Case(
        rotated_on_a_reversed_mesh, torch.relu, ((4, 6),), ranks=(1, 0)
    ),
    "an expanded tensor is gathered while streams are late": Case(
        gathered_expanded_weight, linear, ((2, 2), (2, 1)), ranks=(0, 1)
    ),
    "devices' blocks inside of steps are gathered": Case(
        gathered_inside_of_steps, torch.relu, ((12,),), ranks=(0, 1)
    ),
    "devices' blocks inside of steps are gathered for other steps": Case(
        other_steps_of_what_lies_inside, torch.relu, ((8, 3),), ranks=(0, 1)
    ),
    "columns written in steps and read by heads": Case(
        written_in_steps_and_read_by_heads,
        lambda x, w: linear(x, w).reshape(5, 3, 4, 2).permute(0, 2, 1, 3),
        ((5, 3, 8), (8, 8)),
    ),
    "blocks of devices' blocks are reshaped": Case(
        reshaped_inside_of_devices_blocks,
        lambda x, w: linear(x, w).reshape(2, 3, 4, 2).permute(0, 2, 1, 3).relu(),
        ((2, 3, 8), (8, 8)),
        ranks=(0, 1),
    ),
    "rows of matrices in a batch": batched_matmul((2, 3, 4, 5), (2, 3, 5, 6), 2),
    "columns of matrices in a batch": batched_matmul((2, 3, 4, 5), (2, 3, 5, 6), 3),
    "rows of a batch of more axes": batched_matmul((3, 3, 4, 5), (3, 5, 6), 2),
    "columns of a batch of fewer axes": batched_matmul((4, 5), (3, 5, 6), 2),
    "devices that start with their own block gather first": Case(
        gathered_in_rotated_steps, linear, ((8, 4, 8), (6, 8)), ranks=(0, 1)
    ),
    "devices that start with their own block sum first": Case(
        summed_in_rotated_steps, lambda x: x.sum(1), ((8, 4),), ranks=(0, 1)
    ),
    "repeated rows in a shorter block": sum_of_repeated_rows(3, 2),
    "repeated rows in no block": sum_of_repeated_rows(3, 5),
    "repeated columns in no block": Case(sum_of_repeated_columns, lambda x: 3 * x, ((1, 3),)),
    "repeated rows in blocks of devices": sum_of_repeated_rows(6, 2, ranks=(0, 1)),
    "repeated rows in rotated blocks": sum_of_repeated_rows(3, 2, ranks=(1, 0), is_rotated=True),
}


@pytest.mark.parametrize("name", CASES)
def test_streamed_programs_are_right(name: str) -> None:
    case = CASES[name]
    with FusionDefinition() as fd:
        inputs, out = case.define(fd)
        fd.add_output(out)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s, generator=generator) for s in case.shapes]
    declared = [[int(str(n)) for n in tv.shape()] for tv in inputs]
    whole = [t.expand(s) for t, s in zip(whole, declared, strict=True)]
    want = case.meaning(*(t.double() for t in whole))
    body = partial(_check, fd, whole, want)
    if not case.ranks:
        body()
        return
    with multidevice.simulate(len(case.ranks)) as world:
        world.run(body)


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)])
@pytest.mark.parametrize(("shape", "count"), [([-1, -1], 3), ([0, 4], 3), ([0, 4], None)])
def test_no_rows_in_steps(shape: list[int], count: int | None, late: Sequence[str]) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape, contiguity=True)
        y = fd.ops.sum(fd.ops.relu(x), 1, keepdim=True)
        fd.add_output(y)
        stream(y, 0, count)
    for rows in (0, 8, 0) if shape[0] else (0,):
        t = torch.linspace(-2, 2, rows * 4).reshape(rows, 4)
        (got,) = fd.execute([t], _enable_options=late)
        torch.testing.assert_close(got.double(), t.double().relu().sum(1, keepdim=True))


@pytest.mark.parametrize("count", [3, None])
def test_no_elements_in_steps_through_a_reshape(count: int | None) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([0, 4], contiguity=True)
        y = fd.ops.reshape(fd.ops.relu(x), [0])
        fd.add_output(y)
        stream(y, 0, count)
    (got,) = fd.execute([torch.ones(0, 4)])
    assert got.shape == (0,)


def test_rows_that_a_pad_made_longer_are_joined_in_steps() -> None:
    """Blocks of the reshaped tensor are blocks of padded rows, whose symbolic length is n +
    4.
    """
    with FusionDefinition() as fd:
        x = fd.define_tensor([16, -1], contiguity=True)
        padded = fd.ops.pad(x, [0, 4])
        y = fd.ops.reshape(padded, [fd.ops.mul(16, fd.ops.size(padded, 1))])
        fd.add_output(y)
        stream(y, 0, 2)
    for columns in (8, 3):
        t = torch.linspace(-2, 2, 16 * columns).reshape(16, columns)
        (got,) = fd.execute([t], _enable_options=("late_stream(all)",))
        assert torch.equal(got, torch.nn.functional.pad(t, (0, 4)).reshape(-1))


def test_a_slice_of_what_steps_wrote_leaves_the_devices_axis_whole() -> None:
    """Bounds of slices are global, but the check before a run sees a rank's part of the axis."""
    whole = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 8, 4], contiguity=True)
            y = fd.ops.relu(x)
            z = fd.ops.matmul(fd.ops.slice(y, [0, 4, 0], [4, 8, 4]), fd.ops.permute(y, [0, 2, 1]))
            fd.add_output(z)
        mesh = on_mesh([0, 1], x, y, z)
        stream(y, 1, 2)
        for tv in (x, z):
            cut(mesh, tv, 0)
        cut(mesh, y, 0)
        (got,) = fd.execute([multidevice.shard_tensor(whole, x)])
        r = whole.double().relu()
        want = multidevice.shard_tensor(r[:, 4:] @ r.transpose(1, 2), z)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)

    with multidevice.simulate(2) as world:
        world.run(body)


@pytest.mark.parametrize("is_input", [True, False])
@pytest.mark.parametrize("count", [2, 3, None])
def test_one_kernel_reads_a_tensor_in_steps_and_as_a_whole(
    is_input: bool, count: int | None
) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 1, 2], contiguity=True)
        t = x if is_input else fd.ops.neg(x)
        y = fd.ops.sub(t, fd.ops.reshape(t, [2, 2]))
        fd.add_output(y)
        stream(y, 1, count)
    given = torch.randn(2, 1, 2, generator=torch.Generator().manual_seed(0))
    want = given if is_input else -given
    (got,) = fd.execute([given])
    assert torch.equal(got, want - want.reshape(2, 2))


def test_steps_around_devices_are_gathered_and_used_in_one_loop() -> None:
    """Rows cut by [steps, devices] are gathered step by step, without a copy of the whole
    tensor.
    """
    whole, weight = torch.randn(16, 12), torch.randn(8, 12)

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            w = fd.define_tensor([-1, -1], contiguity=True)
            y = fd.ops.linear(x, w)
            fd.add_output(y)
        mesh = on_mesh([0, 1], x, w, y)
        stream(x, 0, 4)
        cut(mesh, x, 1)
        stream(y, 0, 4)
        (got,) = fd.execute([multidevice.shard_tensor(whole, x), weight])
        want = whole.double() @ weight.double().t()
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        kinds = [type(op).__name__ for op in fd.fec.host_program().ops]
        assert kinds == ["Allocate", "GetCurrentStream", "ForLoop", "SetCurrentStream", "ForLoop"]

    with multidevice.simulate(2) as world:
        world.run(body)


@pytest.mark.parametrize("late", [(), ("late_stream(all)",)])
@pytest.mark.parametrize("known", ["x", "w"])
@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_one_contracted_element_of_one_operand_meets_none_in_an_empty_block(
    op: str, known: str, late: Sequence[str]
) -> None:
    """Only one operand is known to have one contracted element; the other has an empty block."""
    sizes = {"x": [-1, -1], "w": [-1, -1]}
    at = {"x": 1, "w": 1 if op == "linear" else 0}
    sizes[known][at[known]] = 1
    with FusionDefinition() as fd:
        x = fd.define_tensor(sizes["x"], contiguity=True)
        w = fd.define_tensor(sizes["w"], contiguity=True)
        fd.add_output(getattr(fd.ops, op)(x, w))
        stream(*((w, at["w"]) if known == "x" else (x, 1)), 2)
    a, b = torch.randn(3, 1), torch.randn(5, 1)
    for _ in range(2):
        (got,) = fd.execute([a, b if op == "linear" else b.t().contiguous()], _enable_options=late)
        torch.testing.assert_close(got, a @ b.t())


@pytest.mark.parametrize("is_read", [False, True])
def test_both_parts_of_a_reshaped_axis_divide_it(is_read: bool) -> None:
    """8 n elements are reshaped to 256 rows of n / 32: a block of rows is a block of
    elements.
    """
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        n = fd.ops.size(x, 0)
        flat = fd.ops.reshape(fd.ops.relu(x), [fd.ops.mul(n, 8)])
        y = fd.ops.reshape(flat, [256, fd.ops.div(n, 32)])
        y = fd.ops.neg(y) if is_read else y
        fd.add_output(y)
        stream(y, 0, 2)
    for rows in (64, 32, 64):
        t = torch.linspace(-2, 3, rows * 8).reshape(rows, 8)
        (got,) = fd.execute([t], _enable_options=("late_stream(all)",))
        want = t.relu().reshape(256, rows // 32)
        assert torch.equal(got, -want if is_read else want)
    # A tensor that was computed before the loop would be copied in each step.
    assert "= Set(" not in str(fd.fec.host_program())


@pytest.mark.parametrize("parts", [2, 3])
def test_a_reshape_whose_blocks_nobody_proves_is_computed_first(parts: int) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 8, -1], contiguity=True)
        n = fd.ops.size(x, 2)
        y = fd.ops.reshape(fd.ops.relu(x), [3, 8 * parts, fd.ops.div(n, parts)])
        fd.add_output(y)
        stream(y, 1, 2)
    for columns in (12, 6, 0):
        t = torch.linspace(-2, 3, 24 * columns).reshape(3, 8, columns)
        (got,) = fd.execute([t], _enable_options=("late_stream(all)",))
        assert torch.equal(got, t.relu().reshape(3, 8 * parts, columns // parts))


def test_cuts_behind_a_reshape_that_only_others_prove() -> None:
    """That mesh_x divides the flat axis follows from the cut by mesh_y inside of it."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        eighths = fd.ops.div(fd.ops.size(x, 0), 8)
        rows = fd.ops.reshape(fd.ops.relu(x), [fd.ops.mul(eighths, 4), 2])
        y = fd.ops.neg(rows)
        fd.add_output(y)
    mesh = multidevice.DeviceMesh(torch.arange(4).reshape(2, 2))
    for tv in (x, y):
        tv.set_device_mesh(mesh)
    for axis, kind in enumerate((X, ParallelType.mesh_y)):
        y.outer_split(axis, 2)
        y.axis(axis).parallelize(kind)
    whole = torch.linspace(-2, 3, 16)

    def body() -> None:
        (got,) = fd.execute([whole])
        want = -whole.relu().reshape(8, 2)
        assert torch.equal(got, multidevice.shard_tensor(want, y))

    with multidevice.simulate(4) as world:
        world.run(body)


@pytest.mark.parametrize("is_read", [False, True])
def test_an_axis_that_a_reshape_made_is_a_stream(is_read: bool) -> None:
    """The split that a reshape makes was once taken for a split by the user, and refused."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([24], contiguity=True)
        y = fd.ops.reshape(x, [6, 4])
        fd.add_output(fd.ops.relu(y) if is_read else y)
        stream(y, 0)
    t = torch.linspace(-2, 3, 24)
    (got,) = fd.execute([t], _enable_options=("late_stream(all)",))
    assert torch.equal(got, t.reshape(6, 4).relu() if is_read else t.reshape(6, 4))
    assert any(isinstance(op, ForLoop) for op in fd.fec.host_program().ops)


def test_a_gather_for_all_steps_lays_out_what_steps_gather_further() -> None:
    """An axis is cut by two mesh dimensions: one is gathered before the loop, the other in
    steps.
    """
    generator = torch.Generator().manual_seed(0)
    x1 = torch.randn(4, 16, 1, generator=generator).expand(4, 16, 8)
    weights = [torch.randn(8, 8, generator=generator) for _ in range(2)]
    bias = torch.randn(8, generator=generator)

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1, 8], contiguity=[False, False, None])
            w, v = (fd.define_tensor([8, 8], contiguity=True) for _ in weights)
            b = fd.define_tensor([8], contiguity=True)
            y = fd.ops.add(fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w)), v, b), x)
            norm = fd.ops.rsqrt(fd.ops.add(fd.ops.sum(fd.ops.mul(y, y), [2], keepdim=True), 1.0))
            z = fd.ops.mul(y, norm)
            fd.add_output(z)
        mesh = multidevice.DeviceMesh([[0, 1], [2, 3]])
        for tv in (w, v, b, norm):
            tv.set_device_mesh(mesh)
        v.outer_split(1, 2)
        v.axis(1).parallelize(X)
        for tv, first in ((b, 0), (norm, 1)):
            for axis, ptype in ((first, X), (first + 1, ParallelType.mesh_y)):
                tv.outer_split(axis, 2)
                tv.axis(axis).parallelize(ptype)
        stream(y, 0)
        sharded = (multidevice.shard_tensor(t, tv) for t, tv in ((weights[1], v), (bias, b)))
        shards = [x1, weights[0], *sharded]
        (got,) = fd.execute(shards)
        a, c, d = (t.double() for t in (x1, *weights))
        r = (a @ c.t()).relu() @ d.t() + bias.double() + a
        want = r * ((r * r).sum(2, keepdim=True) + 1).rsqrt()
        want = _shard(want, fd.fec.host_program().outputs[0])
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)

    with multidevice.simulate(4) as world:
        world.run(body)


def _check(fd: FusionDefinition, whole: Sequence[torch.Tensor], want: torch.Tensor) -> None:
    fusion = fd.fusion
    shards = [_shard(t, tv) for t, tv in zip(whole, fusion.inputs, strict=True)]
    expected = _shard(want, fusion.outputs[0])
    for late in [(), (), *((f"late_stream({name})",) for name in LATE)]:
        (got,) = fd.execute(shards, _enable_options=late)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    program = fd.fec.host_program()
    again = parse(program.full_text())
    assert equal(again, program)
    (got,) = HostIrEvaluator(again).run(shards)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    rank = 0 if not program.devices() else multidevice.Communicator.instance().rank()
    values = HostIrEvaluator(program).check(shards)
    assert not find_races(program, {**values, RANK: rank, NUMBER_OF_STREAMS: 4}, rank=rank)


def _shard(whole: torch.Tensor, tv: object) -> torch.Tensor:
    assert isinstance(tv, TensorView)
    if tv.mesh is None:
        return whole
    part = multidevice.shard_tensor(whole, tv)
    # A shard of an expanded tensor is expanded, too.
    repeated = [k for k in range(whole.ndim) if whole.stride(k) == 0 and whole.size(k) > 1]
    for k in repeated:
        part = part.narrow(k, 0, 1).contiguous().expand(part.shape)
    return part
