"""`repr(fd)` is a Python program that defines an equal fusion, with equal text, values and
strides."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from fuser import (
    DataType,
    DtypeError,
    FusionDefinition,
    MemoryType,
    ParallelType,
    UnsupportedError,
    multidevice,
    translate_fusion,
)
from fuser.frontend import python_printer
from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.scalar.evaluate import COMPUTE
from tests.support.definition_copies import again, assert_same, defined_by
from tests.support.op_calls import CALLS, calls_of
from tests.support.op_cases import CASES, SHAPES, OpCase
from tools.fuzz import sharded, single, streams
from tools.fuzz.ranks import local_inputs
from tools.fuzz.runner import Case, define

Define = Callable[[FusionDefinition], None]


def fusion_of(case: OpCase, rank: int) -> FusionDefinition:
    fd = FusionDefinition()
    fd._fusion = case.define(rank)
    return fd


def written(define: Define) -> FusionDefinition:
    with FusionDefinition() as fd:
        define(fd)
    return fd


# ------------------------------------------------------------------ every op, every node
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_op_is_defined_again(case: OpCase) -> None:
    for rank in (0, 1, 3):
        again(fusion_of(case, rank))


@pytest.mark.parametrize("case", CASES[::23], ids=lambda case: case.id)
def test_ops_compute_the_same(case: OpCase) -> None:
    for layout in ("contiguous", "transposed"):
        inputs = case.draw(SHAPES[-1], seed=3, layout=layout)
        fd = fusion_of(case, 3)
        assert_same(again(fd).execute(inputs), fd.execute(inputs))


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_defined_again_and_computes_the_same(name: str) -> None:
    calls = [*calls_of(name)]
    for drawn in calls:
        fd = FusionDefinition()
        fd._fusion = drawn.fusion
        again(fd)
    fd = FusionDefinition()
    fd._fusion = calls[-1].fusion
    results: list[list[torch.Tensor]] = []
    for one in (again(fd), fd):
        torch.manual_seed(0)
        results.append(one.execute(calls[-1].inputs))
    assert_same(*results)


@pytest.mark.parametrize("dtype", [DataType.Double, DataType.Float, DataType.Int, DataType.Bool])
def test_every_op_of_scalars_is_defined_again(dtype: DataType) -> None:
    count = 0
    for name, (kind, rule) in PUBLIC.items():
        with FusionDefinition() as fd:
            given = [fd.define_scalar(None, dtype) for _ in range(POINTWISE[kind].arity)]
            if rule == "select":
                given[0] = fd.define_scalar(None, DataType.Bool)
            try:
                made = getattr(fd.ops, name)(*given)
            except DtypeError:
                continue
            fd.add_output(fd.ops.full([2], made, made.dtype))
        again(fd)
        count += 1
    assert count > 25, count


def test_every_node_has_a_statement() -> None:
    """A new node class needs a row in `STATEMENTS`, unless only the compiler creates it."""
    kinds = [k for k in Op.REGISTRY.values() if issubclass(k, TensorOp)]
    of_ours = [k for k in kinds if k.__module__.startswith("fuser.")]
    leaves = {k for k in of_ours if k.fields_of("result") and not k.__subclasses__()}
    assert {*python_printer.STATEMENTS} | {*python_printer.COMPILED} == leaves


def test_every_scalar_op_has_a_statement() -> None:
    known = {*python_printer.SCALAR_CALLS, *python_printer.OPERATORS, "ceilDiv"}
    assert {*COMPUTE} <= known, {*COMPUTE} - known


# ------------------------------------------------------------------ random programs
@pytest.mark.parametrize("generator", [single, sharded, streams], ids=lambda m: m.__name__[11:])
@pytest.mark.parametrize("block", range(5))
def test_random_programs_are_defined_again(generator: ModuleType, block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        fd = define(generator.generate(seed))
        try:
            again(fd)
        except Exception as error:
            error.add_note(f"seed {seed} of {generator.__name__}")
            raise


@pytest.mark.parametrize("seed", [3, 14, 15, 92, 65, 35])
def test_random_programs_compute_the_same(seed: int) -> None:
    case = Case.of(single.generate(seed))
    fd = define(case.program)
    other = again(fd)
    for call in range(len(case.program.calls)):
        results: list[list[torch.Tensor]] = []
        for one in (fd, other):
            given = case.passed(call, "cpu")
            outs = one.execute(given)
            # Updated inputs count as results.
            results.append([*outs, *(t for t in given if isinstance(t, torch.Tensor))])
        assert_same(*results)


@pytest.mark.parametrize(("generator", "seed"), [(sharded, 11), (sharded, 23), (streams, 8)])
def test_random_programs_compute_the_same_on_ranks(generator: ModuleType, seed: int) -> None:
    case = Case.of(generator.generate(seed))
    fd = define(case.program)
    other = again(fd)

    def results(one: FusionDefinition) -> list[torch.Tensor]:
        rank = multidevice.Communicator.instance().rank()
        return one.execute(local_inputs(case, 0, rank, "cpu"))

    with multidevice.simulate(case.program.ranks) as world:
        for found, expected in zip(world.run(results, other), world.run(results, fd), strict=True):
            assert_same(found, expected)


# ------------------------------------------------------------------ nvFuser's text
def layer_norm(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, 64], contiguity=True, dtype=DataType.BFloat16)
    s = fd.define_scalar(None, dtype=DataType.Double)
    wide = fd.ops.cast(x, DataType.Float)
    var, mean = fd.ops.var_mean(wide, [1], 0, True)
    y = fd.ops.mul(fd.ops.sub(wide, mean), fd.ops.rsqrt(fd.ops.add(var, s)))
    fd.add_output(fd.ops.cast(fd.ops.permute(y, [1, 0]), DataType.BFloat16))


def test_the_text_is_that_of_nvfuser() -> None:
    assert (
        repr(written(layer_norm))
        == """\
def nvfuser_fusion(fd : FusionDefinition) -> None :
    tv0 = fd.define_tensor(shape=[-1, 64], contiguity=[True, True], dtype=DataType.BFloat16, \
is_cpu=False)
    c0 = fd.define_scalar(None, dtype=DataType.Double)
    tv1 = fd.ops.cast(tv0, dtype=DataType.Float)
    tv2, tv3, tv4 = fd.ops.welford(tv1, dims=[1])
    c1 = fd.define_scalar(0.0156250, dtype=DataType.Float)
    tv5 = fd.ops.mul(tv3, c1)
    tv6 = fd.ops.broadcast(tv5, is_broadcast_dim=[False, True])
    tv7 = fd.ops.broadcast(tv2, is_broadcast_dim=[False, True])
    tv8 = fd.ops.sub(tv1, tv7)
    tv9 = fd.ops.add(tv6, c0)
    tv10 = fd.ops.rsqrt(tv9)
    tv11 = fd.ops.mul(tv8, tv10)
    tv12 = fd.ops.permute(tv11, dims=[1, 0])
    tv13 = fd.ops.cast(tv12, dtype=DataType.BFloat16)
    fd.add_output(tv13)
"""
    )


# The calls of section "repr" of nvFuser's interface: a call, and its printed text.
SPELLED: list[tuple[Callable[..., Any], str]] = [
    (lambda fd, x: fd.ops.sum(x, 1), "fd.ops.sum(tv0, dims=[1], dtype=DataType.Float)"),
    (lambda fd, x: fd.ops.max(x, 0), "fd.ops.max(tv0, dims=[0])"),
    (lambda fd, x: fd.ops.set(x), "fd.ops.cast(tv0, dtype=DataType.Float)"),
    (lambda fd, x: fd.ops.segment_set(x), "fd.ops.segment_set(tv0)"),
    (lambda fd, x: fd.ops.permute(x, [1, -2]), "fd.ops.permute(tv0, dims=[1, 0])"),
    (lambda fd, x: fd.ops.stride_order(x, [0, 1]), "fd.ops.stride_order(tv0, stride_order=[0, 1])"),
    (
        lambda fd, x: fd.ops.broadcast(x, [False, True, False]),
        "fd.ops.broadcast(tv0, is_broadcast_dim=[False, True, False])",
    ),
    (
        lambda fd, x: fd.ops.squeeze(fd.ops.broadcast(x, [True, False, False]), [0]),
        "fd.ops.squeeze(tv1, dims=[0])",
    ),
    (
        lambda fd, x: fd.ops.squeeze(
            fd.ops.broadcast_in_dim(x, [3, 6, 8], [1, 2]), [0], squeeze_expanded=True
        ),
        "fd.ops.squeeze(tv2, dims=[0], squeeze_expanded=True)",
    ),
    (
        lambda fd, x: fd.ops.broadcast_in_dim(x, [3, 6, 8], [1, 2]),
        "fd.ops.expand(tv1, shape=[3, 6, 8])",
    ),
    (lambda fd, x: fd.ops.reshape(x, [2, -1]), "fd.ops.reshape(tv0, new_shape=[2, 24])"),
    (
        lambda fd, x: fd.ops.full([6, 8], 1, DataType.Half),
        "fd.ops.full(shape=[6, 8], fill_value=1.00000, dtype=DataType.Half)",
    ),
    (
        lambda fd, x: fd.ops.slice(x, [0, 1], [6, 3]),
        "fd.ops.slice(tv0, start_indices=[0, 1], end_indices=[6, 3], strides=[1, 1], "
        "manual_normalization=True)",
    ),
    (
        lambda fd, x: fd.ops.pad(x, [1, 2]),
        "fd.ops.pad(tv0, pad_widths=[1, 2, 0, 0], value=0.00000)",
    ),
    (
        lambda fd, x: fd.ops.cat([x, x], 1),
        "fd.ops.cat([tv1, tv2], dim=1, manual_padding=True)",
    ),
    (lambda fd, x: fd.ops.iota(4, 0, 2), "fd.ops.iota(4, step=2, dtype=DataType.Int)"),
    (lambda fd, x: fd.ops.rand_like(x), "fd.ops.rand_like(tv0)"),
    (
        lambda fd, x: fd.ops.normal(0, 0.5, [6, 8], rng_seed=3, rng_offset=4),
        "fd.ops.normal(0.00000, 0.500000, shape=[6, 8], rng_seed=3, rng_offset=4, dtype=DataType.Float)",  # noqa: E501
    ),
    (lambda fd, x: fd.ops.where(fd.ops.gt(x, 0), x, 1.5), "fd.ops.where(tv1, tv0, 1.50000)"),
    (lambda fd, x: fd.ops.linear(x, x, fd.ops.sum(x, 1)), "fd.ops.linear(tv0, tv0, bias=tv1)"),
    (lambda fd, x: fd.ops.matmul(x, fd.ops.permute(x, [1, 0])), "fd.ops.matmul(tv0, tv1)"),
]


@pytest.mark.parametrize(("op", "line"), SPELLED, ids=[line for _, line in SPELLED])
def test_every_statement_is_spelled_as_nvfuser_does(op: Callable[..., Any], line: str) -> None:
    fd = written(lambda fd: fd.add_output(op(fd, fd.define_tensor([6, 8], contiguity=True))))
    assert repr(fd).splitlines()[-2].partition(" = ")[2] == line
    again(fd)


def test_scalars_have_names_where_calls_take_no_numbers() -> None:
    def define(fd: FusionDefinition) -> None:
        x, i = fd.define_tensor([6, 8]), fd.define_tensor([2, 8], dtype=DataType.Int)
        one = fd.define_scalar(1, dtype=DataType.Int)
        fd.add_output(fd.ops.select(x, one, 0))
        half = fd.define_scalar(0.5, dtype=DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.scatter(x, i, half, 0), half))

    fd = written(define)
    assert "c0 = fd.define_scalar(1, dtype=DataType.Int)" in repr(fd)
    assert "fd.ops.select(tv0, index=c0, dim=0)" in repr(fd)
    assert "c1 = fd.define_scalar(0.500000, dtype=DataType.Double)" in repr(fd)
    assert "fd.ops.scatter(tv0, tv1, c1, dim=0)" in repr(fd)
    inputs = [torch.randn(6, 8), torch.randint(0, 6, (2, 8))]
    assert_same(again(fd).execute(inputs), fd.execute(inputs))


def sizes(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1, 12], contiguity=[None, True, True], stride_order=[1, 0, 2])
    i = fd.define_scalar(None, DataType.Int)
    n = fd.ops.mul(fd.ops.size(x, 0), fd.ops.size(x, 1))
    y = fd.ops.reshape(x, [n, 3, 4])
    z = fd.ops.slice(y, [0, 1, 0], [fd.ops.minimum(i, n), 3, 2])
    w = fd.ops.pad(z, [1, -1, 0, i], -0.5)
    fd.add_output(fd.ops.full([n // 2, i % 3, 2], float("inf"), DataType.Half))
    fd.add_output(fd.ops.add(w, fd.ops.sub(fd.ops.mul(n, 3), i)))
    fd.add_output(fd.ops.where(fd.ops.gt(x, float("nan")), 1e-45, float("-inf")))


def test_sizes_and_numbers_are_those_that_were_written() -> None:
    fd = written(sizes)
    inputs = [torch.randn(2, 3).unsqueeze(2).expand(2, 3, 12), 2]
    assert_same(again(fd).execute(inputs), fd.execute(inputs))


def test_a_clamped_slice_is_a_view_for_the_copy_too() -> None:
    """In the copy, sizes that were extents are Python numbers."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([1, -1, -1])
        y = fd.ops.slice(fd.ops.permute(x, [2, 0, 1]), [0, 0, 0], [1, 1, 4])
        fd.add_output(fd.ops.reshape(fd.ops.squeeze(y, [1]), [4]))

    fd, x = written(define), torch.arange(8.0).reshape(1, 4, 2)
    for one in (fd, again(fd)):
        (out,) = one.execute([x])
        assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert (out.stride(), out.data_ptr()) == ((2,), x.data_ptr())


@pytest.mark.parametrize("size", [-1, 5])
def test_bounds_of_slices_are_clamped_once(size: int) -> None:
    def define(fd: FusionDefinition) -> None:
        x, n = fd.define_tensor([size]), fd.define_scalar(None, dtype=DataType.Int)
        for start, end in ((n, fd.ops.add(n, 1)), (0, n), (n, 4), (1, 4)):
            fd.add_output(fd.ops.slice(x, [start], [end]))

    fd = written(define)
    given = torch.rand(5)
    for n in (0, 2, 5):
        assert_same(again(fd).execute([given, n]), fd.execute([given, n]))


def test_every_line_is_one_statement_of_python() -> None:
    (function,) = ast.parse(repr(written(sizes))).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.body) == len(repr(written(sizes)).splitlines()) - 1


# ------------------------------------------------------------------ numbers, updates and extents
def test_numbers_follow_from_the_structure() -> None:
    """Names do not depend on numbers that an earlier part of the definition used up."""

    def define(fd: FusionDefinition, names: int) -> None:
        x = fd.define_tensor([-1, -1])
        for _ in range(names):
            fd.fusion.new_extent(), fd.fusion.next_axis()  # pyright: ignore[reportUnusedExpression]
        fd.add_output(fd.ops.add(x, fd.define_tensor([-1, -1])))

    a, b = (written(lambda fd, n=n: define(fd, n)) for n in (0, 5))
    assert repr(a) == repr(b)
    assert a.fusion == b.fusion


def updates(fd: FusionDefinition) -> None:
    x, y = fd.define_tensor([-1]), fd.define_tensor([-1])
    a, b, c = fd.ops.neg(x), fd.ops.exp(y), fd.ops.add(x, y)
    fd.add_output(c)
    fd.add_output(a, x)
    fd.add_output(b, y)
    fd.add_output(c)
    fd.add_output(b)


def test_updates_are_hidden_or_not_as_they_were() -> None:
    fd = written(updates)
    assert repr(fd).splitlines()[-5:] == [
        "    fd.add_output(tv4)",
        "    fd.add_output(tv2, tv0)",
        "    fd.add_output(tv4)",
        "    fd.add_output(tv3, tv1)",
        "    fd.add_output(tv3)",
    ]
    inputs = [[torch.arange(4.0), torch.ones(4)] for _ in range(2)]
    assert_same(again(fd).execute(inputs[0]), fd.execute(inputs[1]))
    assert_same(*inputs)


def test_sizes_that_an_update_or_an_expand_makes_equal() -> None:
    """No op implies these equalities, but later ops rely on them."""

    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([-1, -1], contiguity=True), fd.define_tensor([4, 6])
        z = fd.define_tensor([-1, 1])
        fd.add_output(fd.ops.neg(x), y)
        fd.add_output(fd.ops.reshape(x, [2, 12]))
        same = fd.ops.expand(z, [fd.ops.size(y, 0), 1])
        fd.add_output(fd.ops.reshape(same, [2, 2]))

    fd = written(define)
    text = repr(fd)
    assert text.count("declare_extents") == 3, text
    other = again(fd)
    for bad in ([3, 6, 4], [4, 5, 4], [4, 6, 2]):
        inputs = [torch.ones(bad[0], bad[1]), torch.ones(4, 6), torch.ones(bad[2], 1)]
        for one in (fd, other):
            with pytest.raises(RuntimeError):
                one.execute(inputs)
    inputs = [torch.randn(4, 6), torch.ones(4, 6), torch.randn(4, 1)]
    assert_same(other.execute(inputs), fd.execute(inputs))


def sharded_linear(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    w = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.relu(fd.ops.linear(x, w))
    fd.add_output(y)
    mesh = multidevice.DeviceMesh([[0, 1], [2, 3]])
    for tensor in (x, w):
        tensor.set_device_mesh(mesh)
        tensor.outer_split(1, 2)
        tensor.axis(1).parallelize(ParallelType.mesh_x)
    y.set_device_mesh(range(4))
    y.axis(0).parallelize(ParallelType.stream)


def test_meshes_and_shardings_are_users_own_lines() -> None:
    fd = written(sharded_linear)
    assert repr(fd).splitlines()[6:] == [
        "    from fuser import ParallelType, multidevice",
        "    mesh0 = multidevice.DeviceMesh([[0, 1], [2, 3]])",
        "    tv0.set_device_mesh(mesh0)",
        "    tv0.outer_split(1, 2)",
        "    tv0.axis(1).parallelize(ParallelType.mesh_x)",
        "    tv1.set_device_mesh(mesh0)",
        "    tv1.outer_split(1, 2)",
        "    tv1.axis(1).parallelize(ParallelType.mesh_x)",
        "    mesh1 = multidevice.DeviceMesh(range(0, 4))",
        "    tv3.set_device_mesh(mesh1)",
        "    tv3.axis(0).parallelize(ParallelType.stream)",
    ]
    again(fd)


def test_a_mesh_that_an_op_copied_is_none_of_the_users() -> None:
    def define(fd: FusionDefinition, is_early: bool) -> None:
        x = fd.define_tensor([-1, -1])
        if is_early:
            x.set_device_mesh([0, 1])
        fd.add_output(fd.ops.exp(x))
        x.set_device_mesh([0, 1])

    early, late = (written(lambda fd, e=e: define(fd, e)) for e in (True, False))
    again(early)
    assert early.fusion == late.fusion


def scheduled(fd: FusionDefinition) -> None:
    """Applies every call that a user may make on a tensor's axes and memory."""
    x = fd.define_tensor([-1, 8, 6, 4], contiguity=True)
    n = fd.define_scalar(None, DataType.Int)
    y, z, w = fd.ops.exp(x), fd.ops.neg(x), fd.ops.stride_order(x, [0, 2, 3, 1])
    v = fd.ops.sum(x, 0)
    for tv in (y, z, w, v):
        fd.add_output(tv)
    y.split(1, 2).merge(2, 3).inner_split(0, n).reorder({0: 3})
    y.axis(1).parallelize(ParallelType.block_x)
    taken = z.axis(1)
    z.split(1, 4)
    taken.parallelize(ParallelType.unroll)
    inner = z.axis(2)
    z.merge(2, 3)
    z.set_allocation_domain([z.axis(1), inner, z.axis(0), *z.get_logical_domain()[2:]], True)
    w.set_allocation_domain([w.axis(k) for k in (1, 0, 3, 2)], [True, False, True, True])
    w.swizzle1d(0, ParallelType.mesh_x)
    v.set_memory_type(MemoryType.symmetric)
    x.set_allocation_domain([x.axis(k) for k in range(4)], False)


def test_loops_layouts_and_memories_are_those_that_were_set() -> None:
    again(written(scheduled))


def test_a_schedule_by_hand_runs_the_same() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, 32], contiguity=True)
        s = fd.ops.sum(fd.ops.exp(x), 1)
        y = fd.ops.neg(s)
        fd.add_output(y)
        copy = x.cache_after()
        y.axis(0).parallelize(ParallelType.grid_x)
        fd.sched.transform_like(y)
        fd.sched.parallelize_like(y)
        fd.sched.inline_most([copy])

    fd = written(define)
    x = torch.randn(5, 32)
    assert_same(again(fd).manual_execute([x]), fd.manual_execute([x]))


def copied(fd: FusionDefinition) -> None:
    """Copies that schedules insert have the memory order of their operand."""
    x = fd.define_tensor([-1, 32])
    w = fd.define_tensor([-1, 32], stride_order=[0, 1], contiguity=[True, False])
    y = fd.ops.mul(fd.ops.exp(x), w)
    fd.add_output(y)
    fd.add_output(fd.ops.sum(y, 0))
    x.cache_after()
    w.cache_after()
    w.cache_after()
    y.split(0, 4)
    y.cache_before()
    y.cache_fork()


def test_copies_of_a_schedule() -> None:
    again(written(copied))


# ------------------------------------------------------------------ at any time
def test_a_definition_prints_while_it_is_written_and_after_it_ran() -> None:
    fd = FusionDefinition()
    assert "not written" in repr(fd)
    with fd:
        assert repr(fd).endswith("    pass\n")
        x = fd.define_tensor([4])
        half = repr(fd)
        fd.add_output(fd.ops.rand_like(fd.ops.exp(x)))
        whole = repr(fd)
    assert defined_by(half).fusion.inputs and half in whole[: len(half)]
    fd.execute([torch.ones(4)])
    assert repr(fd) == whole == translate_fusion(fd.fusion)


def test_what_no_statement_makes_is_named() -> None:
    from fuser.ops.define import define_tensor

    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(define_tensor([4])))
    with pytest.raises(UnsupportedError, match="no Python statement can create T0_l_float"):
        repr(fd)


@pytest.mark.parametrize(
    "change",
    [
        lambda fd, x: fd.ops.mul(x, 0.1),
        lambda fd, x: fd.ops.mul(x, 0.10000001),
        lambda fd, x: fd.ops.mul(fd.ops.set(x), 0.1),
        lambda fd, x: fd.ops.mul(x, fd.define_scalar(0.1, DataType.Float)),
        lambda fd, x: fd.ops.stride_order(fd.ops.mul(x, 0.1), [0, 1]),
    ],
)
def test_other_programs_are_not_equal(change: Any) -> None:
    plain, other = FusionDefinition(), FusionDefinition()
    for fd, op in ((plain, lambda fd, x: fd.ops.mul(x, 0.5)), (other, change)):
        with fd:
            x = fd.define_tensor([-1, 4])
            fd.add_output(op(fd, x))
    assert plain.fusion != other.fusion
    assert repr(plain) != repr(other)
    again(other)


# ------------------------------------------------------------------ reductions in parts
def once(fd: FusionDefinition, y: Any) -> None:
    y.outer_split(1, 4)
    y.rfactor([2]).axis(1).parallelize(ParallelType.unroll)


def twice(fd: FusionDefinition, y: Any) -> None:
    y.outer_split(1, 4)
    y.outer_split(0, 3)
    first = y.rfactor([3])
    y.inner_split(2, 2)
    fd.add_output(y.rfactor([3]))
    first.reorder({0: 1})


def nested(fd: FusionDefinition, y: Any) -> None:
    y.outer_split(1, 4)
    first = y.rfactor([2])
    first.outer_split(2, 2)
    second = first.rfactor([3])
    second.set_device_mesh([0, 1])
    second.axis(1).parallelize(ParallelType.mesh_x)
    y.axis(0).parallelize(ParallelType.block_x)


def merged(fd: FusionDefinition, y: Any) -> None:
    y.merge(1, 2)
    y.inner_split(1, 8)
    y.rfactor([1])


def whole(fd: FusionDefinition, y: Any) -> None:
    y.rfactor([2])


# Contractions reduce one axis.
IN_PARTS = [(f, k) for f in (once, twice, nested) for k in ("sum", "max", "matmul", "linear")]
IN_PARTS += [(f, k) for f in (merged, whole) for k in ("sum", "max")]


@pytest.mark.parametrize(("factor", "kind"), IN_PARTS)
@pytest.mark.parametrize("is_read", [False, True])
def test_reductions_in_parts(factor: Callable[..., None], kind: str, is_read: bool) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 16, 4], contiguity=True)
        if kind in ("matmul", "linear"):
            y = fd.ops.matmul(fd.define_tensor([16]), fd.define_tensor([16, 6]))
            if kind == "linear":
                y = fd.ops.linear(fd.define_tensor([2, 16]), fd.define_tensor([6, 16]))
                y.merge(0, 1)
        elif factor in (merged, whole):
            y = getattr(fd.ops, kind)(x, [1, 2])
        else:
            y = getattr(fd.ops, kind)(fd.ops.exp(fd.ops.sum(x, 2)), 1)
        if is_read:
            fd.add_output(fd.ops.sum(fd.ops.neg(y), 0))
            fd.add_output(fd.ops.sum(y, 0))
        fd.add_output(y)
        factor(fd, y)
    assert "rfactor" in repr(fd) or factor is whole
    again(fd)


@pytest.mark.finding("float constants")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3.00000"),
        (0.5, "0.500000"),
        (-0.0, "-0.00000"),
        (1e-5, "1.00000e-05"),
        (65536.0, "65536.0"),
        (1e6, "1.00000e+06"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1 / 3, "0.3333333333333333"),
        (float("-inf"), 'float("-inf")'),
        (float("nan"), 'float("nan")'),
        (1 + 2j, "1.00000+2.00000j"),
        (0.1 - 2j, "0.100000-2.00000j"),
        (complex(-0.0, 1 / 3), "complex(-0.00000, 0.3333333333333333)"),
    ],
)
def test_floats_have_the_six_digits_of_nvfuser_where_these_give_them_back(
    value: complex, text: str
) -> None:
    with FusionDefinition() as fd:
        is_complex = isinstance(value, complex)
        x = fd.define_tensor([-1], dtype=torch.complex128 if is_complex else torch.float64)
        fd.add_output(fd.ops.mul(x, value))
    assert f"fd.ops.mul(tv0, {text})" in repr(fd)
    again(fd)
    assert repr(eval(text)) == repr(value)
