"""Extents 0, 1 and n in ops that change shapes, in one definition and with static sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import FusionDefinition, ParallelType, multidevice
from tests.support.op_calls import linear

pytestmark = pytest.mark.from_text

Tensors = list[torch.Tensor]
Shape = tuple[int, ...]
# name -> (ranks of the inputs, with axes of sizes a, b, c; definition; torch function)
Row = tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]


def sizes(x: Any) -> list[Any]:
    return [x.size(i) for i in range(x.ndim)]


def variance(fd: Any, x: Any) -> list[Any]:
    return list(fd.ops.var_mean(x, [1], 0, True))


def torch_variance(x: torch.Tensor) -> Tensors:
    return list(torch.var_mean(x, [1], correction=0, keepdim=True))


def reshaped(fd: Any, x: Any) -> Any:
    a, b = sizes(x)
    return fd.ops.reshape(x, [b, a])


ROWS: dict[str, Row] = {
    "pad": (
        ("ab",),
        lambda fd, x: fd.ops.pad(x, [1, 2], 2.5),
        lambda x: F.pad(x, [1, 2], value=2.5),
    ),
    "pad_both": (
        ("ab",),
        lambda fd, x: fd.ops.pad(x, [1, 2, 0, 3]),
        lambda x: F.pad(x, [1, 2, 0, 3]),
    ),
    "slice": (("ab",), lambda fd, x: fd.ops.slice(x, [0, 0], [2, 1]), lambda x: x[:2, :1]),
    "slice_pad": (
        ("ab",),
        lambda fd, x: fd.ops.pad(fd.ops.slice(x, [0, 0], [2, 1]), [1, 1, 1, 0]),
        lambda x: F.pad(x[:2, :1], [1, 1, 1, 0]),
    ),
    "cat": (
        ("ab", "cb"),
        lambda fd, x, y: fd.ops.cat([x, y], 0),
        lambda x, y: torch.cat([x, y], 0),
    ),
    "cat_of_computed": (
        ("ab", "cb"),
        lambda fd, x, y: fd.ops.neg(fd.ops.cat([fd.ops.exp(x), y, y], 0)),
        lambda x, y: -torch.cat([x.exp(), y, y], 0),
    ),
    "sum": (("ab",), lambda fd, x: fd.ops.sum(x, [0, 1]), lambda x: x.sum()),
    "sum_rows": (("ab",), lambda fd, x: fd.ops.sum(x, [1]), lambda x: x.sum(1)),
    "prod": (("ab",), lambda fd, x: fd.ops.prod(x, [0]), lambda x: x.prod(0)),
    "mean_of": (
        ("ab",),
        lambda fd, x: fd.ops.sub(x, fd.ops.broadcast_in_dim(fd.ops.sum(x, [1]), sizes(x), [0])),
        lambda x: x - x.sum(1, keepdim=True),
    ),
    "var_mean": (("ab",), variance, torch_variance),
    "matmul": (("ab", "bc"), lambda fd, x, y: fd.ops.matmul(x, y), torch.matmul),
    "matmul_add": (
        ("ab", "bc"),
        lambda fd, x, y: fd.ops.add(fd.ops.matmul(fd.ops.neg(x), y), 1.0),
        lambda x, y: (-x) @ y + 1.0,
    ),
    "vector": (("b", "bc"), lambda fd, x, y: fd.ops.matmul(x, y), torch.matmul),
    "dot": (("b", "b"), lambda fd, x, y: fd.ops.matmul(x, y), torch.matmul),
    "linear": (("ab", "cb", "c"), lambda fd, x, w, v: fd.ops.linear(x, w, v), linear),
    "linear of a batch": (
        ("ab", "acb", "ac"),
        lambda fd, x, w, v: [fd.ops.linear(x, w), fd.ops.linear(x, w, v)],
        lambda x, w, v: [linear(x, w), linear(x, w, v)],
    ),
    "permute": (
        ("abc",),
        lambda fd, x: fd.ops.neg(fd.ops.permute(x, [2, 0, 1])),
        lambda x: -x.permute(2, 0, 1),
    ),
    "reshape": (("ab",), reshaped, lambda x: x.reshape(x.size(1), x.size(0))),
    "broadcast": (
        ("ab",),
        lambda fd, x: fd.ops.add(fd.ops.broadcast(x, [False, True, False]), 1.0),
        lambda x: x.unsqueeze(1) + 1.0,
    ),
    "where": (
        ("ab", "ab"),
        lambda fd, x, y: fd.ops.where(fd.ops.gt(x, y), x, fd.ops.neg(y)),
        lambda x, y: torch.where(x > y, x, -y),
    ),
}
EXTENTS = [dict(zip("abc", e, strict=True)) for e in itertools.product((0, 1, 3), repeat=3)]


def run(fd: FusionDefinition, row: Row, shapes: list[Shape]) -> None:
    inputs = [torch.randn(s) for s in shapes]
    want = row[2](*(x.double() for x in inputs))
    got = fd.execute(list(inputs))
    for a, b in zip(got, want if isinstance(want, list) else [want], strict=True):
        assert a.shape == b.shape, shapes
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4, equal_nan=True)


def define(row: Row, shapes: list[Shape]) -> FusionDefinition:
    with FusionDefinition() as fd:
        inputs = [
            fd.define_tensor(list(s), contiguity=[None if n == 1 else True for n in s])
            for s in shapes
        ]
        made = row[1](fd, *inputs)
        for out in made if isinstance(made, list) else [made]:
            fd.add_output(out)
    return fd


def different(row: Row) -> list[list[Shape]]:
    """Returns the shapes of the inputs for all extents, each once."""
    found = {tuple(tuple(e[letter] for letter in axes) for axes in row[0]): None for e in EXTENTS}
    return [list(shapes) for shapes in found]


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("name", ROWS)
def test_extents_come_and_go(name: str) -> None:
    """One definition runs with n, then 0, then 1, and back."""
    row = ROWS[name]
    fd = define(row, [(-1,) * len(axes) for axes in row[0]])
    cases = different(row)
    for shapes in (*reversed(cases), *cases):
        run(fd, row, shapes)


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("name", ROWS)
def test_static_zero_extents(name: str) -> None:
    row = ROWS[name]
    for shapes in different(row):
        if any(0 in s for s in shapes):
            run(define(row, shapes), row, shapes)


EMPTY_EXPANDED = [((17, 0), (0, 0)), ((17, 0), (1, 0)), ((0, 5), (0, 1)), ((3, 2), (1, 0))]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("dims", [[0, 1], [0], [1]])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "var_mean"])
def test_reductions_of_expanded_axes_without_elements(name: str, dims: list[int]) -> None:
    """An expanded axis is squeezed before it is reduced; an empty one has no element to keep."""
    for shape, strides in EMPTY_EXPANDED:
        t = torch.arange(1.0, 18.0).as_strided(shape, strides)
        with FusionDefinition() as fd:
            flags = [None if step == 0 else False for step in strides]
            x = fd.define_tensor([-1, -1], contiguity=flags)
            made = (
                fd.ops.var_mean(x, dims, 0)
                if name == "var_mean"
                else getattr(fd.ops, name)(x, dims)
            )
            for out in made if isinstance(made, tuple) else [made]:
                fd.add_output(out)
        kept = [n for i, n in enumerate(shape) if i not in dims]
        is_empty = any(shape[d] == 0 for d in dims)
        wide = t.double()
        if name == "var_mean":
            var = wide.var(dims, correction=0)
            want = [var, torch.full_like(var, torch.nan) if is_empty else wide.mean(dims)]
        elif is_empty:
            identity = {"sum": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}[name]
            want = [torch.full(kept, identity, dtype=torch.float64)]
        else:
            fold = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
            want = [
                fold[name](wide, dims) if name in fold else wide.prod(1) if dims == [1] else None
            ]
            if want[0] is None:
                want = [wide.prod(0) if dims == [0] else wide.prod()]
        for got, expected in zip(fd.execute([t]), want, strict=True):
            torch.testing.assert_close(got.double(), expected, equal_nan=True)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("is_static", [False, True])
def test_an_update_in_place_of_empty_shards(axis: int, is_static: bool) -> None:
    shape = (4, 0) if axis else (0, 4)

    def run() -> list[Shape]:
        with FusionDefinition() as fd:
            x, y = (fd.define_tensor(shape if is_static else (-1, -1)) for _ in range(2))
            fd.add_output(fd.ops.add(fd.ops.neg(y), x), x)
            fd.add_output(fd.ops.sum(x, [axis]))
            x.set_device_mesh(multidevice.DeviceMesh(range(2)))
            x.outer_split(axis, 2)
            x.axis(axis).parallelize(ParallelType.mesh_x)
        empty = torch.zeros(shape)
        (sums,) = fd.execute([empty.clone(), empty])
        assert torch.equal(sums, torch.zeros(4))
        return [tuple(sums.shape)]

    with multidevice.simulate(2) as world:
        assert world.run(run) == [[(4,)], [(4,)]]
