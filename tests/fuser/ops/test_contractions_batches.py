"""linear with a batch of weights: x [*i, k], weight [*w, n, k], bias [*w, n] -> [*w, *i, n]."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, TensorView, multidevice
from fuser.ir.dtypes import to_torch
from fuser.ir.op import walk
from fuser.ir.ops.nodes import LinearOp
from fuser.multidevice import Communicator, DeviceMesh
from fuser.ops.reference.meaning import evaluate_into
from hostir import equal, parse
from hostir.ir.ops import Communication
from tests.support.definition_copies import again
from tests.support.op_calls import linear
from tests.support.overlap_programs import cut

D = DataType
X, Y, STREAM = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.stream
TOLERANCE = {
    D.Float: 1e-5,
    D.Double: 1e-12,
    D.Half: 2e-3,
    D.BFloat16: 2e-2,
    D.ComplexFloat: 1e-5,
    D.ComplexDouble: 1e-12,
}
ROWS = ((5,), (3, 5), (2, 3, 5))
WEIGHTS = ((4, 5), (2, 4, 5), (3, 2, 4, 5))
Shape = tuple[int, ...]


def operands(x: Shape, weight: Shape, *, bias: bool, dtype: DataType = D.Float):
    shapes = (x, weight, *([weight[:-1]] if bias else []))
    return [torch.randn(s, dtype=to_torch(dtype)) for s in shapes]


def meaning(given: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.complex128 if given[0].is_complex() else torch.float64
    return linear(*(t.to(wide) for t in given))


def definition(given: Sequence[torch.Tensor], dtype: DataType = D.Float, *, static: bool = False):
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor(list(t.shape), list(t.stride()), dtype=dtype, static_sizes=static)
            for t in given
        ]
        fd.add_output(fd.ops.linear(*tensors))
    return fd


def check(got: torch.Tensor, given: Sequence[torch.Tensor], dtype: DataType = D.Float) -> None:
    want, tolerance = meaning(given), TOLERANCE[dtype]
    assert got.shape == want.shape
    assert got.dtype == to_torch(dtype)
    torch.testing.assert_close(got.to(want.dtype), want, atol=tolerance, rtol=tolerance)


# ------------------------------------------------------------------ one device
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values(dtype: DataType, static: bool, bias: bool) -> None:
    for x, weight in itertools.product(ROWS, WEIGHTS):
        given = operands(x, weight, bias=bias, dtype=dtype)
        fd = definition(given, dtype, static=static)
        for _ in range(3):  # recorded, then repeated
            (got,) = fd.execute(given)
            check(got, given, dtype)
        program = fd.fec.host_program()
        assert equal(parse(program.full_text()), program)
        assert sum(isinstance(op, LinearOp) for op in walk(program.ops)) == 1
        check(again(fd).execute(given)[0], given, dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_other_sizes_of_one_definition(bias: bool) -> None:
    """The recorded plan of the first run serves the other sizes."""
    fd = definition(operands((2, 3, 5), (3, 4, 5), bias=bias))
    for b, s, d, n, k in ((2, 3, 3, 4, 5), (4, 7, 2, 6, 3), (3, 2, 5, 2, 8), (2, 2, 2, 2, 2)):
        for _ in range(3):
            given = operands((b, s, k), (d, n, k), bias=bias)
            check(fd.execute(given)[0], given)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_extents_of_0_and_1(bias: bool, static: bool) -> None:
    for d, m, n, k in itertools.product((0, 1, 3), repeat=4):
        given = operands((m, k), (d, n, k), bias=bias)
        check(definition(given, static=static).execute(given)[0], given)


# torch sums small products by other code than large ones.
@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize(("dtype", "odd"), [(D.BFloat16, 257), (D.Half, 2049)])
def test_the_sum_with_the_bias_is_rounded_once(dtype: DataType, odd: int, size: int) -> None:
    """The product alone is odd, and the dtype cannot hold it. With the bias, 1, it can."""
    x = torch.ones(size, 2, dtype=to_torch(dtype))
    weight = torch.ones(3, size, 2, dtype=x.dtype)
    weight[..., 0] = odd - 1
    given = [x, weight, torch.ones(3, size, dtype=x.dtype)]
    fd = definition(given, dtype)
    for _ in range(3):
        (got,) = fd.execute(given)
        assert (got == odd + 1).all()


LAYOUTS = {
    "weights behind one another in rows": lambda x, w, b: (x, w.mT.contiguous().mT, b),
    "weights side by side": lambda x, w, b: (x, w.transpose(0, 1).contiguous().transpose(0, 1), b),
    "rows apart": lambda x, w, b: (x.transpose(0, 1).contiguous().transpose(0, 1), w, b),
    "biases side by side": lambda x, w, b: (x, w, b.mT.contiguous().mT),
    "one weight for all": lambda x, w, b: (x, w[:1].expand(w.shape), b),
    "one weight and bias for all": lambda x, w, b: (
        x,
        w[:1].expand(w.shape),
        b[:1].expand(b.shape),
    ),
    "one row for all": lambda x, w, b: (x[:1].expand(x.shape), w, b),
    "one element along k": lambda x, w, b: (x[..., :1].expand(x.shape), w, b),
    "gaps": lambda x, w, b: (x[:, ::2], w[:, ::2], b[:, ::2]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    given = LAYOUTS[name](*operands((4, 6, 5), (3, 8, 5), bias=True))
    for some in (given, given[:2]):
        fd = definition(some)
        for _ in range(3):
            check(fd.execute(list(some))[0].contiguous(), some)


@pytest.mark.parametrize("bias", [False, True])
def test_results_that_lie_in_another_order(bias: bool) -> None:
    given = operands((2, 3, 5), (4, 6, 5), bias=bias)
    for order in itertools.permutations(range(4)):
        with FusionDefinition() as fd:
            tensors = [fd.define_tensor(list(t.shape), list(t.stride())) for t in given]
            out = fd.ops.linear(*tensors)
            fd.add_output(out)
            axes = out.get_logical_domain()
            out.set_allocation_domain([*(axes[p] for p in order), *axes[4:]], True)
        for _ in range(3):
            (got,) = fd.execute(given)
            check(got, given)
            assert got.permute(order).is_contiguous()


@pytest.mark.parametrize("bias", [False, True])
def test_results_are_written_where_they_are_asked_for(bias: bool) -> None:
    given = operands((2, 3, 5), (4, 6, 5), bias=bias)
    (op,) = definition(given).fusion.exprs
    assert isinstance(op, LinearOp)
    for out in (torch.empty(4, 2, 3, 6), torch.empty(8, 2, 6, 6)[::2, :, ::2]):
        address = out.data_ptr()
        evaluate_into(op, given, out)
        assert out.data_ptr() == address
        check(out, given)


def test_rfactor_of_the_contracted_axis() -> None:
    given = operands((3, 8), (2, 4, 8), bias=False)
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor(list(t.shape), contiguity=True) for t in given)
        out = fd.ops.linear(x, w)
        fd.add_output(out)
        out.outer_split(-1, 2)
        out.axis(-2).parallelize(STREAM)
    again(fd)
    check(fd.execute(given)[0], given)


# ------------------------------------------------------------------ ranks
# The sharded axis of each tensor (-1: none), and the types of communication of weights, rows and
# results.
W, I, N, K = {"w": 0, "b": 0}, {"x": 0}, {"w": 1, "b": 1}, {"x": 1, "w": 2}
CUTS: dict[str, tuple[Mapping[str, int], list[str]]] = {
    "batch": (W, []),
    "batch, and the result": ({**W, "y": 0}, []),
    "batch of weights alone": ({"w": 0, "y": 0}, []),
    "batch of biases alone": ({"b": 0, "y": 0}, []),
    "rows": (I, []),
    "rows, and the result": ({**I, "y": 1}, []),
    "columns": (N, []),
    "columns, and the result": ({**N, "y": 2}, []),
    "sum": (K, ["Allreduce"]),
    "sum, batch of the result": ({**K, "y": 0}, ["ReduceScatter"]),
    "sum, rows of the result": ({**K, "y": 1}, ["ReduceScatter"]),
    "sum, columns of the result": ({**K, "y": 2}, ["ReduceScatter"]),
    "sum, rows of biases": ({**K, "b": 0, "y": 0}, ["ReduceScatter"]),
    "batch, rows of the result": ({**W, "y": 1}, ["Allgather"]),
    "rows, batch of the result": ({**I, "w": 0, "b": 0, "y": 0}, ["Allgather"]),
    "columns, batch of the result": ({**N, "y": 0}, ["AllToAll"]),
    "batch gathered": ({**W, "y": -1}, ["Allgather"]),
}


MOVES_BIASES = ("batch, rows of the result", "columns, batch of the result", "batch gathered")


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_cuts(name: str, d: int, bias: bool) -> None:
    cuts, moved = CUTS[name]
    if bias and name in MOVES_BIASES:
        moved = [*moved, *moved]
    given = operands((8, 16), (4, 12, 16), bias=bias)
    want = meaning(given)

    def body() -> list[str]:
        fd, tensors = cut_definition(given, cuts, d, static=d == 4)
        shards = [multidevice.shard_tensor(t, tv) for t, tv in zip(given, tensors, strict=True)]
        for _ in range(2):
            (got,) = fd.execute(shards)
            (sharding,) = fd.fec.get_output_shardings()
            axis = sharding.axis_sharded_on(X)
            assert axis == cuts.get("y", axis)
            part = want if axis < 0 else want.chunk(d, axis)[Communicator.instance().rank()]
            torch.testing.assert_close(got.double(), part, atol=1e-4, rtol=1e-4)
        again(fd)
        program = fd.fec.host_program()
        assert equal(parse(program.full_text()), program)
        return [op.type for op in walk(program.ops) if isinstance(op, Communication)]

    with multidevice.simulate(d) as world:
        assert world.run(body)[0] == moved


def cut_definition(
    given: Sequence[torch.Tensor], cuts: Mapping[str, int], d: int, *, static: bool
) -> tuple[FusionDefinition, list[TensorView]]:
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor(list(t.shape) if static else [-1] * t.ndim, contiguity=True)
            for t in given
        ]
        out = fd.ops.linear(*tensors)
        fd.add_output(out)
        named = dict(zip("xwb", tensors, strict=False)) | ({"y": out} if "y" in cuts else {})
        for name, tv in named.items():
            tv.set_device_mesh(range(d))
            if cuts.get(name, -1) >= 0:
                cut(tv, cuts[name], d)
    return fd, tensors


@pytest.mark.parametrize("dtype", [D.Float, D.BFloat16])
@pytest.mark.parametrize("lead", [(), (6,), (2, 3)])
@pytest.mark.parametrize("result", [None, 0, 1])
def test_a_batch_and_the_sum_over_two_mesh_axes(
    dtype: DataType, lead: Shape, result: int | None
) -> None:
    """x [*i, k on x], weight [w on y, v, n, k on x]: partial sums, and the bias is added once."""
    given = operands((*lead, 16), (4, 2, 8, 16), bias=True, dtype=dtype)
    want = meaning(given)

    def body() -> list[str]:
        with FusionDefinition() as fd:
            x, w, bias = (
                fd.define_tensor([-1] * t.ndim, contiguity=True, dtype=dtype) for t in given
            )
            out = fd.ops.linear(x, w, bias)
            fd.add_output(out)
            for tv in (x, w, bias, out):
                tv.set_device_mesh(DeviceMesh(torch.arange(4).reshape(2, 2)))
            cut(x, len(lead), 2)
            cut(w, 3, 2)
            cut(w, 0, 2, Y)
            cut(out, 0, 2, Y)
            if result is not None:
                # Within the blocks of the batch, or of the second axis of weights.
                cut(out, result + 1, 2)
        tensors = (x, w, bias)
        shards = [multidevice.shard_tensor(t, tv) for t, tv in zip(given, tensors, strict=True)]
        for _ in range(2):
            (got,) = fd.execute(shards)
            part = multidevice.shard_tensor(want, out)
            tolerance = 0.1 if dtype is D.BFloat16 else 1e-5
            torch.testing.assert_close(got.double(), part, atol=tolerance, rtol=tolerance)
        ops = walk(fd.fec.host_program().ops)
        return [op.type for op in ops if isinstance(op, Communication)]

    with multidevice.simulate(4) as world:
        assert world.run(body)[0] == ["Allreduce" if result is None else "ReduceScatter"]
