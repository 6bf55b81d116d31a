"""index_select, embedding_fwd, take_along_axis and gather as kernels, compared with torch in
float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from fuser.ir.fusion import TensorView
from fuser.support.errors import DefinitionError, DtypeError, FuserError, InputError
from tests.support.lookup_programs import (
    Build,
    define,
    draw,
    draw_index,
    gather,
    index_select,
    run,
    take_along,
)
from tests.support.op_cases import lay_out

pytestmark = pytest.mark.from_text

DEVICES = ((), ("checked",), ("checked", "schedules_for(h200)"))


# ------------------------------------------------------------------ each op on its own


def embedding() -> tuple[Build, Callable[..., torch.Tensor]]:
    return (
        lambda fd, t, i: fd.ops.embedding_fwd(i, t),
        lambda t, i: F.embedding(i.long(), t),
    )


CASES: dict[str, tuple[tuple[Build, Callable[..., torch.Tensor]], Any, Any, int]] = {
    "embedding": (embedding(), (37, 24), (3, 5), 37),
    "embedding of a scalar": (embedding(), (7, 24), (), 7),
    "embedding of odd rows": (embedding(), (7, 13), (11,), 7),
    "embedding of one column": (embedding(), (7, 1), (2, 3, 4), 7),
    "embedding of one row": (embedding(), (1, 16), (5, 3), 1),
    "embedding of nothing": (embedding(), (7, 16), (0, 3), 7),
    "embedding without columns": (embedding(), (7, 0), (5,), 7),
    "embedding of nothing in nothing": (embedding(), (0, 16), (0,), 0),
    "select rows": (index_select(0), (9, 32), (14,), 9),
    "select columns": (index_select(1), (6, 32), (14,), 32),
    "select the middle": (index_select(-2), (3, 9, 8), (5,), 9),
    "select of a vector": (index_select(0), (9,), (64,), 9),
    "select one": (index_select(1), (4, 9, 8), (1,), 9),
    "select by a scalar": (index_select(1), (4, 9, 8), (), 9),
    "select of one": (index_select(1), (4, 1, 8), (6,), 1),
    "select of rank four": (index_select(2), (2, 3, 5, 7), (4,), 5),
    "along rows": (take_along(1), (6, 33), (6, 8), 33),
    "along columns": (take_along(0), (6, 32), (16, 32), 6),
    "along the middle": (take_along(1), (3, 7, 8), (3, 4, 8), 7),
    "along a vector": (take_along(0), (5,), (40,), 5),
    "along, the index is repeated": (take_along(1), (6, 9), (1, 8), 9),
    "along, the table is repeated": (take_along(1), (1, 9), (6, 8), 9),
    "along nothing": (take_along(1), (6, 9), (6, 0), 9),
    "gather": (gather(1), (6, 33), (6, 8), 33),
    "gather less": (gather(1), (6, 33), (4, 8), 33),
    "gather less of each": (gather(0), (6, 7, 9), (3, 5, 8), 6),
    "gather one": (gather(1), (6, 7), (1, 1), 7),
    "gather from one": (gather(1), (1, 7), (1, 5), 7),
    "gather nothing": (gather(1), (6, 7), (0, 5), 7),
}


@pytest.mark.parametrize("on", DEVICES[1:], ids="+".join)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each(case: str, strided: bool, on: Sequence[str]) -> None:
    (build, reference), shape, index_shape, extent = CASES[case]
    if strided and 1 in (*shape, *index_shape) and ("repeated" in case or "one" in case):
        # A symbolic extent is no broadcast. gather accepts it; ops whose extents must match do not.
        strided = False
    table, index = draw(shape, torch.float32), draw_index(index_shape, extent)
    (out,) = run(build, table, index, on=on, strided=strided)
    expected = reference(table.double(), index)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("index_layout", ["contiguous", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("name", ["embedding", "select columns", "along columns", "gather less"])
def test_layouts(name: str, layout: str, index_layout: str) -> None:
    (build, reference), shape, index_shape, extent = CASES[name]
    table = lay_out(draw(shape, torch.float32), layout)
    index = lay_out(draw_index(index_shape, extent), index_layout)
    for on in DEVICES[1:]:
        (out,) = run(build, table, index, on=on)
        torch.testing.assert_close(out, reference(table, index), rtol=0, atol=0)


@pytest.mark.parametrize("on", DEVICES[1:], ids="+".join)
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_a_table_that_begins_anywhere(offset: int, on: Sequence[str]) -> None:
    (build, reference), *_ = CASES["embedding"]
    table = draw((37 * 24 + offset,), torch.float16)[offset:].view(37, 24)
    index = draw_index((64,), 37)[3:]
    (out,) = run(build, table, index, on=on)
    assert torch.equal(out, reference(table, index))


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    ],
)
def test_dtypes(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    for name in ("embedding", "select columns", "along rows", "gather less"):
        (build, reference), shape, index_shape, extent = CASES[name]
        table, index = draw(shape, dtype), draw_index(index_shape, extent, index_dtype)
        for on in DEVICES[1:]:
            (out,) = run(build, table, index, on=on)
            assert out.dtype is dtype
            assert torch.equal(out, reference(table, index))


def test_many_at_random() -> None:
    """Random ranks, extents and axes beyond the listed cases."""
    rng = random.Random(5)
    for seed in range(60):
        rank = rng.randint(1, 4)
        shape = [rng.choice([1, 2, 3, 5, 8, 16]) for _ in range(rank)]
        dim = rng.randrange(rank)
        kind = rng.choice(["select", "along", "gather"])
        if kind == "select":
            build, reference = index_select(dim)
            index_shape = [rng.choice([1, 4, 7, 32])]
        else:
            build, reference = (take_along if kind == "along" else gather)(dim)
            index_shape = [n if kind == "along" else rng.randint(1, n) for n in shape]
            index_shape[dim] = rng.choice([1, 3, 8, 33])
        table = lay_out(draw(shape, torch.float32, seed), rng.choice(["contiguous", "transposed"]))
        index = draw_index(index_shape, shape[dim], seed=seed)
        (out,) = run(build, table, index, on=rng.choice(DEVICES))
        assert torch.equal(out, reference(table, index)), (seed, kind, shape, index_shape, dim)


# ------------------------------------------------------------------ with ops around them
def layer_norm(fd: Any, x: TensorView) -> TensorView:
    var, mean = fd.ops.var_mean(x, [-1], 0, True)
    return fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))


def norm_of_sums(fd: Any, words: Any, places: Any, ids: Any, at: Any) -> TensorView:
    """Defines the first layer of an encoder."""
    x = fd.ops.add(fd.ops.embedding_fwd(ids, words), fd.ops.embedding_fwd(at, places))
    return fd.ops.cast(layer_norm(fd, x), DataType.BFloat16)


def cross_entropy(fd: Any, x: Any, target: Any) -> TensorView:
    wide = fd.ops.cast(x, DataType.Float)
    shifted = fd.ops.sub(wide, fd.ops.max(wide, [1], True))
    lse = fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), [1], True))
    own = fd.ops.take_along_axis(x, fd.ops.broadcast(target, [False, True]), 1)
    own = fd.ops.sub(fd.ops.cast(own, DataType.Float), fd.ops.max(wide, [1], True))
    return fd.ops.sum(fd.ops.sub(lse, own), [0, 1])


def cross_entropy_of_stored(fd: Any, x: Any, target: Any) -> TensorView:
    """Defines a lookup whose table is the result of another kernel."""
    wide = fd.ops.cast(x, DataType.Float)
    shifted = fd.ops.sub(wide, fd.ops.max(wide, [1], True))
    log_p = fd.ops.sub(shifted, fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), [1], True)))
    return fd.ops.neg(
        fd.ops.sum(fd.ops.gather(log_p, fd.ops.broadcast(target, [False, True]), 1), [0, 1])
    )


def along_of_stored(fd: Any, x: Any, target: Any) -> TensorView:
    """Defines the same for extents that are known to be equal. The indices are computed in the same
    kernel."""
    wide = fd.ops.cast(x, DataType.Float)
    shifted = fd.ops.sub(wide, fd.ops.max(wide, [1], True))
    log_p = fd.ops.sub(shifted, fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), [1], True)))
    own = fd.ops.take_along_axis(log_p, fd.ops.broadcast(target, [False, True]), 1)
    return fd.ops.neg(fd.ops.sum(own, [0, 1]))


def of_computed(fd: Any, x: Any, index: Any, row: Any, column: Any) -> tuple[TensorView, ...]:
    wide = fd.ops.cast(x, DataType.Double)
    moved = fd.ops.add(fd.ops.mul(wide, row), fd.ops.broadcast(column, [False, True]))
    doubled = fd.ops.mul(x, x)
    places = fd.ops.broadcast(index, [False, True])
    return (
        fd.ops.index_select(moved, index, 1),
        fd.ops.index_select(fd.ops.neg(moved), index, 0),
        fd.ops.take_along_axis(doubled, places, 1),
        fd.ops.embedding_fwd(places, fd.ops.cast(fd.ops.mul(doubled, 2.0), DataType.Half)),
    )


def rows_for_experts(fd: Any, x: Any, order: Any, scale: Any) -> tuple[TensorView, ...]:
    rows = fd.ops.index_select(x, order, 0)
    gate = fd.ops.broadcast(fd.ops.index_select(scale, order, 0), [False, True])
    scaled = fd.ops.mul(fd.ops.relu(rows), gate)
    return scaled, fd.ops.sum(scaled, [0])


def index_of_an_index(fd: Any, x: Any, first: Any, second: Any) -> TensorView:
    return fd.ops.neg(fd.ops.index_select(x, fd.ops.index_select(first, second, 0), 1))


def computed_index(fd: Any, x: Any, index: Any) -> TensorView:
    half = fd.ops.cast(fd.ops.truediv(fd.ops.mul(index, 1.0), 2.0), DataType.Int)
    return fd.ops.embedding_fwd(fd.ops.where(fd.ops.gt(half, 3), half, 0), fd.ops.mul(x, 2.0))


def counted(fd: Any, x: Any, index: Any) -> TensorView:
    places = fd.ops.iota(5, 3, 2, DataType.Int)
    return fd.ops.add(fd.ops.index_select(x, places, 1), fd.ops.broadcast(index, [False, True]))


def of_views(fd: Any, x: Any, index: Any) -> TensorView:
    turned = fd.ops.permute(fd.ops.reshape(x, [4, 6, 8]), [1, 0, 2])
    found = fd.ops.index_select(turned, index, 0)
    return fd.ops.permute(fd.ops.reshape(found, [-1, 32]), [1, 0])


def parts(fd: Any, x: Any, index: Any) -> TensorView:
    found = fd.ops.index_select(x, index, 1)
    wide = fd.ops.cat([found, fd.ops.pad(found, [1, 2])], 1)
    return fd.ops.mul(fd.ops.slice(wide, [1, 1], [5, 9]), 2.0)


def softmax_of_columns(fd: Any, x: Any, index: Any) -> TensorView:
    found = fd.ops.take_along_axis(x, index, 0)
    e = fd.ops.exp(fd.ops.sub(found, fd.ops.max(found, [0], True)))
    return fd.ops.div(e, fd.ops.sum(e, [0], True))


def turned(fd: Any, x: Any, index: Any, y: Any) -> TensorView:
    return fd.ops.add(fd.ops.permute(fd.ops.index_select(x, index, 0), [1, 0]), y)


def own_table(fd: Any, x: Any) -> TensorView:
    return fd.ops.index_select(x, x, 0)


def both(fd: Any, x: Any, index: Any) -> tuple[TensorView, ...]:
    found = fd.ops.index_select(x, index, 0)
    return fd.ops.add(x, 1.0), fd.ops.add(found, x), fd.ops.sum(x, [1])


BF = torch.bfloat16


def _long(*shape: int, below: int, seed: int = 1) -> torch.Tensor:
    return draw_index(shape, below, seed=seed)


def _table(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw(shape, dtype)


FUSED: dict[str, tuple[Build, tuple[torch.Tensor, ...], Callable[..., Any]]] = {
    "norm of sums": (
        norm_of_sums,
        (
            _table(50, 72, dtype=BF),
            _table(9, 72, dtype=BF),
            _long(4, 9, below=50),
            torch.arange(9).expand(4, 9),
        ),
        lambda w, p, i, a: F.layer_norm(w[i] + p[a], (72,)),
    ),
    "cross entropy": (
        cross_entropy,
        (_table(33, 70, dtype=BF), _long(33, below=70)),
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    ),
    "cross entropy of stored": (
        cross_entropy_of_stored,
        (_table(33, 70), _long(33, below=70)),
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    ),
    "along of stored": (
        along_of_stored,
        (_table(33, 70, dtype=BF), _long(33, below=70)),
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    ),
    "of computed": (
        of_computed,
        (_table(9, 12), _long(9, below=9), _table(1, 12), _table(9)),
        lambda x, i, r, c: (
            (x * r + c[:, None])[:, i],
            -(x * r + c[:, None])[i],
            (x * x).gather(1, i[:, None]),
            (2 * x * x)[i[:, None]],
        ),
    ),
    "rows for experts": (
        rows_for_experts,
        (_table(17, 40), torch.randperm(17, generator=torch.Generator()), _table(17)),
        lambda x, o, s: (
            x[o].relu() * s[o][:, None],
            (x[o].relu() * s[o][:, None]).sum(0),
        ),
    ),
    "index of an index": (
        index_of_an_index,
        (_table(5, 16), _long(9, below=16), _long(24, below=9, seed=2)),
        lambda x, a, b: -x[:, a[b]],
    ),
    "computed index": (
        computed_index,
        (_table(20, 16), _long(6, 5, below=40)),
        lambda x, i: (2 * x)[torch.where(i // 2 > 3, i // 2, 0)],
    ),
    "counted": (
        counted,
        (_table(6, 16), _long(6, below=9)),
        lambda x, i: x[:, 3:13:2] + i[:, None],
    ),
    "of views": (
        of_views,
        (_table(24, 8), _long(7, below=6)),
        lambda x, i: x.reshape(4, 6, 8).permute(1, 0, 2)[i].reshape(-1, 32).t(),
    ),
    "parts": (
        parts,
        (_table(6, 9), _long(8, below=9)),
        lambda x, i: 2 * torch.cat([x[:, i], F.pad(x[:, i], (1, 2))], 1)[1:5, 1:9],
    ),
    "softmax of columns": (
        softmax_of_columns,
        (_table(40, 24), _long(30, 24, below=40)),
        lambda x, i: x.gather(0, i).softmax(0),
    ),
    "turned": (
        turned,
        (_table(40, 24), _long(32, below=40), _table(24, 32)),
        lambda x, i, y: x[i].t() + y,
    ),
    "own table": (own_table, (_long(64, below=64),), lambda x: x[x]),
    "both": (
        both,
        (_table(16, 24), _long(16, below=16)),
        lambda x, i: (x + 1, x[i] + x, x.sum(1)),
    ),
}


@pytest.mark.parametrize("on", DEVICES, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, on: Sequence[str]) -> None:
    build, inputs, reference = FUSED[name]
    outs = run(build, *inputs, on=on)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = reference(*wide)
    for out, ref in zip(outs, expected if isinstance(expected, tuple) else [expected], strict=True):
        eps = torch.finfo(out.dtype).eps if out.is_floating_point() else 0
        torch.testing.assert_close(
            out.double(), ref.double(), rtol=8 * eps, atol=8 * eps * float(ref.abs().max())
        )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("norm of sums", 1),
        ("cross entropy", 2),  # the second adds up the rows
        ("cross entropy of stored", 2),
        ("along of stored", 2),
        ("index of an index", 1),
        ("computed index", 1),
        ("of views", 1),
        ("parts", 1),
        ("softmax of columns", 1),
        ("turned", 1),
    ],
)
def test_number_of_kernels(name: str, count: int) -> None:
    build, inputs, _ = FUSED[name]
    fd = define(build, inputs)
    fd.execute(list(inputs), _enable_options=["schedules_for(h200)"])
    assert fd.fec.statistics()["kernels"] == count


# ------------------------------------------------------------------ indices outside of the table
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("on", [(), ("schedules_for(h200)",)])
def test_an_index_outside_reads_nothing(dtype: torch.dtype, on: Sequence[str]) -> None:
    table = draw((8, 16), dtype)
    index = torch.tensor([3, -1, 8, 7, 2**32 + 1, -(2**63), 2**63 - 1, 0])
    (out,) = run(lambda fd, t, i: fd.ops.embedding_fwd(i, t), table, index, on=on)
    inside = (index >= 0) & (index < 8)
    expected = table[index.clamp(0, 7)]
    expected[~inside] = torch.nan if dtype.is_floating_point else 0
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_an_index_into_nothing() -> None:
    for dtype, missing in ((torch.float32, torch.nan), (torch.int64, 0)):
        table, index = torch.empty(0, 4, dtype=dtype), torch.zeros(3, dtype=torch.int64)
        (out,) = run(lambda fd, t, i: fd.ops.embedding_fwd(i, t), table, index)
        expected = torch.full((3, 4), missing, dtype=dtype)
        torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("on", DEVICES[1:], ids="+".join)
def test_the_checked_mode_tells(on: Sequence[str]) -> None:
    table, index = draw((8, 16), torch.float32), torch.tensor([3, 9, 0])
    with pytest.raises(FuserError, match="the index 9 is out of range for an axis of 8 elements"):
        run(lambda fd, t, i: fd.ops.embedding_fwd(i, t), table, index, on=on)


# ------------------------------------------------------------------ select and scatter
@pytest.mark.parametrize("on", DEVICES, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_select(dim: int, on: Sequence[str]) -> None:
    x = draw((6, 9, 5), torch.float32)
    for place in (0, 2, -1, -5):

        def build(fd: Any, tv: Any, place: int = place) -> TensorView:
            at = fd.define_scalar(place, DataType.Int)
            return fd.ops.add(fd.ops.select(tv, at, dim), 1.0)

        (out,) = run(build, x, on=on)
        assert torch.equal(out, x.select(dim, place) + 1)


def test_select_by_an_input() -> None:
    x = draw((6, 9, 5), torch.float32)
    with FusionDefinition() as fd:
        tv, at = fd.define_tensor([-1] * 3), fd.define_scalar(None, DataType.Int)
        fd.add_output(fd.ops.select(tv, at, 1))
    for place in (0, 3, -9, 8, -1):
        assert torch.equal(fd.execute([x, place])[0], x.select(1, place))
    for place in (9, -10, 2**40):
        assert fd.execute([x, place])[0].isnan().all()


def _one(fd: Any, dtype: torch.dtype) -> Any:
    kind = DataType.Double if dtype.is_floating_point else DataType.Int
    return fd.define_scalar(1, DataType.Bool if dtype is torch.bool else kind)


def _places(rows: int, below: int, count: int) -> torch.Tensor:
    """Returns indices such that no row has one twice."""
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, below, generator=generator).argsort(1)[:, :count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("strided", [False, True])
def test_scatter(dtype: torch.dtype, strided: bool) -> None:
    x, index, src = draw((6, 33), dtype), _places(4, 33, 7), draw((5, 9), dtype, 3)

    def build(fd: Any, x: Any, index: Any, src: Any) -> tuple[TensorView, ...]:
        found = fd.ops.scatter(x, index, src, -1)
        return found, fd.ops.where(fd.ops.ne(found, x), found, x)

    outs = run(build, x, index, src, strided=strided)
    expected = x.scatter(1, index, src)
    assert all(torch.equal(out, expected) for out in outs)
    (out,) = run(
        lambda fd, x, i: fd.ops.scatter(x, i, _one(fd, dtype), 0),
        x.t().contiguous(),
        index.t().contiguous().int(),
        strided=strided,
    )
    assert torch.equal(out, x.t().scatter(0, index.t(), 1))


def test_scatter_into_what_is_repeated_and_outside() -> None:
    x = draw((1, 9), torch.float32).expand(4, 9)
    index, src = torch.tensor([[3], [-1], [9], [0]]), draw((4, 1), torch.float32)
    (out,) = run(lambda fd, x, i, s: fd.ops.scatter(x, i, s, 1), x, index, src)
    expected = x.clone()
    expected[0, 3], expected[3, 0] = src[0, 0], src[3, 0]
    assert torch.equal(out, expected)
    nothing = torch.empty(4, 0, dtype=torch.int64)
    (out,) = run(lambda fd, x, i, s: fd.ops.scatter(x, i, s, 1), x, nothing, src)
    assert torch.equal(out, x)


# ------------------------------------------------------------------ rows of a largest norm
ORDERS = (None, 0.0, 1.0, 2.0, 3.0, 0.5, -1.0, math.inf, -math.inf)


@pytest.mark.finding("G8")
@pytest.mark.finding("embedding max_norm")
@pytest.mark.parametrize(
    ("order", "dtype"),
    [
        *((order, torch.float64) for order in ORDERS),
        (None, torch.float32),
        (None, torch.bfloat16),
    ],
)
def test_embedding_with_max_norm_equals_torch_and_leaves_the_table(
    order: float | None, dtype: torch.dtype
) -> None:
    def build(fd: Any, index: Any, table: Any) -> TensorView:
        given = None if order is None else fd.define_scalar(order)
        return fd.ops.embedding_fwd(index, table, None, fd.define_scalar(2.5), given)

    table, index = draw((12, 7), dtype), draw_index((2, 5), 12)
    table[3], table[4, 0] = 0.0, math.nan
    kept = table.clone()
    (out,) = run(build, index, table, on=DEVICES[2])
    # torch writes into its table, so it gets a copy.
    wide = table.double().clone()
    expected = F.embedding(index, wide, max_norm=2.5, norm_type=2.0 if order is None else order)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close, equal_nan=True)
    assert out.dtype is dtype and torch.equal(table.nan_to_num(7.0), kept.nan_to_num(7.0))


@pytest.mark.finding("G8")
@pytest.mark.finding("embedding max_norm")
def test_embedding_with_a_max_norm_of_each_call() -> None:
    with FusionDefinition() as fd:
        index, table = fd.define_tensor([-1], dtype=DataType.Int32), fd.define_tensor([-1, -1])
        bound, order = fd.define_scalar(None), fd.define_scalar(None)
        fd.add_output(fd.ops.embedding_fwd(index, table, None, bound, order))
    where, rows = draw_index((6,), 5, torch.int32), draw((5, 9), torch.float32)
    rows[1, 2], rows[2] = 0.0, 0.0
    ends = ((0.5, math.inf), (0.01, -math.inf))
    for most, p in ((1.0, 2.0), (100.0, 2.0), (0.5, 3.0), (0.5, 0.0), *ends):
        expected = F.embedding(where, rows.double(), max_norm=most, norm_type=p)
        torch.testing.assert_close(fd.execute([where, rows, most, p])[0], expected.float())


# ------------------------------------------------------------------ what is refused
def test_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        i1 = fd.define_tensor([-1], dtype=DataType.Int)
        i2 = fd.define_tensor([-1, -1], dtype=DataType.Int)
        scalar = fd.define_tensor([])
        for op in ("index_select", "gather", "take_along_axis"):
            function = getattr(fd.ops, op)
            index = i1 if op == "index_select" else i2
            no_index = fd.ops.eq(x, x) if op == "take_along_axis" else x
            with pytest.raises(DtypeError, match=f"{op}: Expected an index of dtype Int or Int32"):
                function(x, no_index, 0)
            with pytest.raises(DefinitionError, match="Tried to access out of boundary index 2"):
                function(x, index, 2)
            with pytest.raises(DefinitionError, match=r"the index must have|same number of axes"):
                function(x, i2 if op == "index_select" else i1, 0)
        with pytest.raises(DefinitionError, match="the operand needs at least 1 axis"):
            fd.ops.index_select(scalar, i1, 0)
        with pytest.raises(DefinitionError, match=r"weight must have 2 axes, but T.* has 1"):
            fd.ops.embedding_fwd(i1, i1)
        norm = fd.define_scalar(2.0)
        whole = fd.define_tensor([-1, -1], dtype=DataType.Int)
        with pytest.raises(DtypeError, match="a floating dtype for max_norm, but T"):
            fd.ops.embedding_fwd(i1, whole, max_norm=norm)
        with pytest.raises(FuserError, match="padding_idx"):
            fd.ops.embedding_fwd(i1, x, padding_idx="1")  # pyright: ignore[reportArgumentType]
        with pytest.raises(FuserError, match="index"):
            fd.ops.select(x, 1.5, 0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DtypeError, match="select: the index must be an integer"):
            fd.ops.select(x, norm, 0)
        with pytest.raises(DtypeError, match="scatter: arg and src must have the same dtype"):
            fd.ops.scatter(x, i2, i2, 0)
        with pytest.raises(DtypeError, match="scatter: src must be a number of the same category"):
            fd.ops.scatter(i2, i2, norm, 0)
        with pytest.raises(
            DefinitionError, match="must have the same number of axes, but have 2 and 1"
        ):
            fd.ops.scatter(x, i1, norm, 0)
        static = fd.define_tensor([4, 5])
        with pytest.raises(DefinitionError, match="select: index 5 is outside of axis 1"):
            fd.ops.select(static, fd.define_scalar(5, DataType.Int), 1)
        wide = fd.define_tensor([6, 5], dtype=DataType.Int)
        with pytest.raises(DefinitionError, match="to be no larger than"):
            fd.ops.gather(static, wide, 1)
        with pytest.raises(DefinitionError, match="Expected sizes to match"):
            fd.ops.take_along_axis(static, wide, 1)


def test_options_of_embedding_that_change_nothing() -> None:
    def build(fd: Any, table: Any, index: Any) -> TensorView:
        pad, norm = fd.define_scalar(3, DataType.Int), fd.define_scalar(2.0)
        no = fd.define_scalar(False, DataType.Bool)
        return fd.ops.embedding_fwd(index, table, pad, None, norm, no, no)

    table, index = draw((8, 16), torch.float32), draw_index((5,), 8)
    assert torch.equal(run(build, table, index)[0], F.embedding(index, table, padding_idx=3))


def test_sizes_that_do_not_fit() -> None:
    table, index = draw((4, 5), torch.float32), draw_index((6, 5), 4)
    build, _ = gather(1)
    fd = define(build, [table, index], strided=True)
    with pytest.raises(
        InputError, match="gather: Size does not match at dimension 0: expected index"
    ):
        fd.execute([table, index])
    assert fd.execute([table, index[:3]])[0].shape == (3, 5)
    with pytest.raises(
        InputError, match="gather: Size does not match at dimension 0: expected index"
    ):
        fd.execute([table, index])
    fd = define(take_along(1)[0], [table, index], strided=True)
    with pytest.raises(InputError, match="take_along_axis"):
        fd.execute([table, index])


@pytest.mark.parametrize("place", [0, 3, -4, -1])
def test_a_constant_place_is_one_of_the_axis(place: int) -> None:
    """A wrong constant index is an error of the call, as in torch, and does not become NaN."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.select(x, fd.define_scalar(place, DataType.Int), 1))
    given = draw((2, 4), torch.float32)
    assert torch.equal(fd.execute([given])[0], given[:, place])
    for extent in (3, 0):
        small = given[:, :extent].contiguous()
        if -extent <= place < extent:
            assert torch.equal(fd.execute([small])[0], small[:, place])
            continue
        with pytest.raises(
            InputError,
            match=rf"select: index {place} .* of T0.*, which has {extent} elem.*test_indexing",
        ):
            fd.execute([small])
