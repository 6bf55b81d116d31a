"""Scans, argsort and topk compared with torch, in float64 if values are rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.ops.scan_ops import ScanOp
from fuser.support.errors import ArgumentError, DefinitionError, DtypeError, InputError
from tests.support.lookup_programs import Build, define, draw, run
from tests.support.op_cases import lay_out

pytestmark = pytest.mark.from_text

SCANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cumsum": lambda x, dim: x.cumsum(dim, dtype=x.dtype),
    "cumprod": lambda x, dim: x.cumprod(dim, dtype=x.dtype),
    "cummax": lambda x, dim: x.cummax(dim).values,
    "cummin": lambda x, dim: x.cummin(dim).values,
}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32]
SHAPES = [(1,), (7,), (0,), (5, 13), (3, 0), (1, 4), (2, 3, 11), (2, 1, 3, 5), (3, 130)]
LAYOUTS = ["contiguous", "strided", "transposed", "expanded"]


def scan(name: str, dim: int, init: float | None = None) -> Build:
    def build(fd: Any, tv: Any) -> Any:
        if init is None:
            return getattr(fd.ops, name)(tv, dim)
        kind = DataType.Double if tv.dtype().name in ("Float", "Half") else DataType.Int
        return getattr(fd.ops, name)(tv, dim, fd.define_scalar(init, kind))

    return build


def check(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares with a value in float64, rounded once."""
    assert out.dtype is dtype and out.shape == expected.shape
    torch.testing.assert_close(out, expected.to(dtype), equal_nan=True)


# ------------------------------------------------------------------ scans
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_every_axis_of_every_rank(name: str, strided: bool) -> None:
    for shape in SHAPES:
        x = draw(shape, torch.float32)
        for dim in range(-len(shape), len(shape)):
            (out,) = run(scan(name, dim), x, strided=strided)
            check(out, SCANS[name](x.double(), dim), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("name", SCANS)
def test_dtypes_stay(name: str, dtype: torch.dtype) -> None:
    for seed, shape in enumerate([(4, 200), (3, 7, 5)]):
        x = draw(shape, dtype, seed)
        wide = x.double() if dtype.is_floating_point else x
        (out,) = run(scan(name, 1), x)
        expected = SCANS[name](wide, 1)
        check(out, expected, dtype)


def test_halves_are_added_up_in_floats() -> None:
    """For 4000 ones, a sum in float16 would stop at 2048, and one in bfloat16 at 256."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(4000, dtype=dtype)
        (out,) = run(scan("cumsum", 0), x)
        assert torch.equal(out, torch.arange(1, 4001).to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCANS)
def test_layouts(name: str, layout: str) -> None:
    for shape, dim in itertools.product([(6, 9), (3, 4, 5)], (0, 1, -1)):
        x = lay_out(draw(shape, torch.float64), layout)
        (out,) = run(scan(name, dim), x)
        check(out, SCANS[name](x, dim), torch.float64)


def test_an_axis_that_is_repeated_counts_with_all_elements() -> None:
    def build(fd: Any, tv: Any) -> Any:
        wide = fd.ops.expand(fd.ops.broadcast(tv, [False, True]), [-1, 5])
        return fd.ops.cumsum(wide, 1), fd.ops.cumsum(wide, 0), fd.ops.argsort(wide, 1, stable=True)

    x = draw((4,), torch.float32)
    along, across, places = run(build, x)
    wide = x.double().unsqueeze(1).expand(4, 5)
    check(along, wide.cumsum(1), torch.float32)
    check(across, wide.cumsum(0), torch.float32)
    assert torch.equal(places, torch.arange(5).expand(4, 5))


@pytest.mark.parametrize("name", SCANS)
def test_one_element_is_a_copy(name: str) -> None:
    """As in nvFuser along a broadcast axis. `init` is still included."""
    for shape, dim in (((), 0), ((), -1), ((1, 4), 0), ((3, 1), -1)):
        x = draw(shape, torch.float32)
        fd = define(scan(name, dim), [x])
        assert not any(isinstance(op, ScanOp) for op in fd.fusion.exprs)
        assert torch.equal(fd.execute([x])[0], x)
        (out,) = run(scan(name, dim, 0.25), x)
        first = torch.full_like(x, 0.25).unsqueeze(0)
        assert torch.equal(out, SCANS[name](torch.cat([first, x.unsqueeze(0)]), 0)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("name", SCANS)
def test_what_a_scan_begins_with(name: str, dtype: torch.dtype) -> None:
    x = draw((4, 9), dtype)
    for init in (0.0, 1.0, -3.0, 2.0) if dtype.is_floating_point else (0, 1, -3, 2):
        (out,) = run(scan(name, 1, init), x)
        wide = x.double() if dtype.is_floating_point else x
        first = torch.full((4, 1), init, dtype=wide.dtype)
        check(out, SCANS[name](torch.cat([first, wide], 1), 1)[:, 1:], dtype)


def test_what_a_scan_begins_with_may_be_an_input() -> None:
    with FusionDefinition() as fd:
        tv, first = fd.define_tensor([-1, -1]), fd.define_scalar(None, DataType.Double)
        fd.add_output(fd.ops.cummax(tv, 1, first))
    x = draw((3, 8), torch.float32)
    for value in (0.5, -1.0, float("-inf"), float("nan"), float("inf")):
        expected = torch.maximum(x.cummax(1).values, torch.tensor(value))
        torch.testing.assert_close(fd.execute([x, value])[0], expected, equal_nan=True)


@pytest.mark.parametrize("name", SCANS)
def test_nan_and_infinity(name: str) -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in FLOATS:
        x = torch.tensor([[1.0, nan, 2.0, inf], [inf, 0.0, -inf, 1.0], [-inf, 3.0, 0.0, nan]])
        (out,) = run(scan(name, 1), x.to(dtype))
        check(out, SCANS[name](x.double(), 1), dtype)


def test_integers_wrap() -> None:
    x = torch.full((5,), 2**30, dtype=torch.int32)
    (out,) = run(scan("cumsum", 0), x)
    assert torch.equal(out, (torch.arange(1, 6) * 2**30).to(torch.int32))


# ------------------------------------------------------------------ argsort
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("descending", [False, True])
def test_argsort(descending: bool, strided: bool) -> None:
    for shape in SHAPES:
        x = draw(shape, torch.float32)
        for dim, stable in itertools.product(range(-len(shape), len(shape)), (False, True)):
            (out,) = run(
                lambda fd, tv, dim=dim, stable=stable: fd.ops.argsort(tv, dim, descending, stable),
                x,
                strided=strided,
            )
            assert out.dtype is torch.int64
            expected = x.sort(dim=dim, descending=descending).values
            assert torch.equal(x.gather(dim, out), expected)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_elements_keep_their_places(dtype: torch.dtype, layout: str) -> None:
    x = lay_out((draw((6, 200), torch.int64) % 4).to(dtype), layout)
    for dim, down in itertools.product((0, 1), (False, True)):
        (out,) = run(
            lambda fd, tv, dim=dim, down=down: fd.ops.argsort(
                tv, dim, descending=down, stable=True
            ),
            x,
        )
        rows = x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist()
        expected = [sorted(range(len(r)), key=lambda k, r=r: -r[k] if down else r[k]) for r in rows]
        assert out.movedim(dim, -1).reshape(len(rows), -1).tolist() == expected


def test_nan_is_above_all() -> None:
    x = torch.tensor([2.0, float("nan"), float("inf"), -1.0])
    (up,) = run(lambda fd, tv: fd.ops.argsort(tv, 0), x)
    assert up.tolist() == [3, 0, 2, 1]
    found, places = run(
        lambda fd, tv: fd.ops.topk(tv, fd.define_scalar(2, DataType.Int), sorted=True), x
    )
    assert places.tolist() == [1, 2] and found.isnan().tolist() == [True, False]


def test_argsort_of_one_element() -> None:
    (out,) = run(lambda fd, tv: fd.ops.argsort(tv, -1), torch.tensor(3.0))
    assert torch.equal(out, torch.tensor(0))


# ------------------------------------------------------------------ topk
def choose(k: int, dim: int, largest: bool, in_order: bool) -> Build:
    return lambda fd, tv: fd.ops.topk(tv, fd.define_scalar(k, DataType.Int), dim, largest, in_order)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("largest", [False, True])
def test_topk(largest: bool, strided: bool) -> None:
    for shape in SHAPES:
        x = draw(shape, torch.float32)
        for dim in range(-len(shape), len(shape)):
            n = shape[dim]
            for k in {0, min(1, n), n // 2, n}:
                outs = run(choose(k, dim, largest, True), x, strided=strided)
                expected = x.sort(dim=dim, descending=largest).values.narrow(dim, 0, k)
                assert torch.equal(outs[0], expected)
                assert outs[1].dtype is torch.int64 and torch.equal(
                    x.gather(dim, outs[1]), expected
                )


@pytest.mark.parametrize("largest", [False, True])
def test_topk_is_in_order_where_none_is_asked_for(largest: bool) -> None:
    x = draw((6, 40), torch.float32)
    values, _ = run(choose(17, 1, largest, False), x)
    assert torch.equal(values, x.sort(dim=1, descending=largest).values[:, :17])


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_topk_of_equal_elements(dtype: torch.dtype, layout: str) -> None:
    """Equal elements may be selected in any order, but each only once."""
    x = lay_out((draw((6, 50), torch.int64) % 7).to(dtype), layout)
    for dim, largest, k in itertools.product((0, 1), (False, True), (1, 4)):
        found, places = run(choose(k, dim, largest, False), x)
        assert found.dtype is dtype and torch.equal(x.gather(dim, places), found)
        expected = x.sort(dim=dim, descending=largest).values.narrow(dim, 0, k)
        assert torch.equal(found.sort(dim=dim, descending=largest).values, expected)
        ordered = places.sort(dim).values
        assert not bool((ordered.diff(dim=dim) == 0).any())


def test_how_many_may_be_an_input_or_computed() -> None:
    x = draw((4, 9), torch.float32)
    with FusionDefinition() as fd:
        tv, k = fd.define_tensor([-1, -1]), fd.define_scalar(None, DataType.Int)
        found, places = fd.ops.topk(tv, k, sorted=True)
        half, _ = fd.ops.topk(tv, fd.ops.div(fd.ops.size(tv, 1), 2), sorted=True)
        for out in (found, places, fd.ops.sum(fd.ops.exp(found), 1), half):
            fd.add_output(out)
    for n in (3, 1, 9, 0, 3):
        outs = fd.execute([x, n])
        expected = x.topk(n, sorted=True)
        assert torch.equal(outs[0], expected.values) and torch.equal(outs[1], expected.indices)
        torch.testing.assert_close(outs[2], expected.values.exp().sum(1))
        assert torch.equal(outs[3], x.topk(4).values)
    for n in (10, -1):
        text = f"topk: selected index k out of range: k = {n} of axis 1 of T0_g.*, which has 9 el"
        with pytest.raises(InputError, match=text):
            fd.execute([x, n])
    assert fd.execute([x, 2])[0].shape == (4, 2)


def test_what_is_found_is_read_by_kernels() -> None:
    """With one of the results, and with both, and with ops before and after."""

    def build(fd: Any, tv: Any) -> Any:
        found, places = fd.ops.topk(fd.ops.neg(tv), fd.define_scalar(3, DataType.Int), sorted=True)
        other = fd.ops.topk(tv, fd.define_scalar(2, DataType.Int), 0, sorted=True)[1]
        scores = fd.ops.take_along_axis(tv, places, 1)
        total = fd.ops.cumsum(fd.ops.exp(scores), 1)
        return fd.ops.add(found, scores), total, other

    x = draw((5, 12), torch.float32)
    fd = define(build, [x])
    for _ in range(3):
        zero, total, other = fd.execute([x])
        expected = (-x.double()).topk(3, dim=1)
        assert not zero.any()
        torch.testing.assert_close(total.double(), (-expected.values).exp().cumsum(1))
        assert torch.equal(other, x.topk(2, dim=0).indices)


# ------------------------------------------------------------------ what is refused
def test_refused() -> None:
    with FusionDefinition() as fd:
        x, flags = fd.define_tensor([-1, 4]), fd.define_tensor([-1], dtype=DataType.Bool)
        one, half = fd.define_scalar(1, DataType.Int), fd.define_scalar(0.5)
        for name in SCANS:
            function = getattr(fd.ops, name)
            with pytest.raises(
                DtypeError,
                match=f"{name}: the operand must have an integer, .*dtype, but T1_g_bool",
            ):
                function(flags, 0)
            with pytest.raises(DefinitionError, match=f"{name}: Tried to access out of boundary"):
                function(x, 2)
            with pytest.raises(
                DtypeError, match=f"{name}: init must be of the same category .* as T0"
            ):
                function(x, 1, one)
            with pytest.raises(ArgumentError, match="init: expected a scalar or a number"):
                function(x, 1, "0")
        counts = fd.define_tensor([-1], dtype=DataType.Int32)
        with pytest.raises(DefinitionError, match=r"cumsum: .*is out of the range of int"):
            fd.ops.cumsum(counts, 0, fd.define_scalar(2**40, DataType.Int))
        with pytest.raises(DefinitionError, match="argsort: Tried to access out of boundary"):
            fd.ops.argsort(x, -3)
        with pytest.raises(
            DtypeError, match="topk: the operand must have an integer, floating or complex dtype"
        ):
            fd.ops.topk(flags, one)
        with pytest.raises(TypeError, match="k: expected a scalar"):
            fd.ops.topk(x, 2.5)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DefinitionError, match=r"topk: size at index 0: 0\.5 is not an integer"):
            fd.ops.topk(x, half)
        with pytest.raises(DefinitionError, match=r"topk: .*k = 5 of axis 1 of T0.* 4 elements"):
            fd.ops.topk(x, fd.define_scalar(5, DataType.Int))
        with pytest.raises(DefinitionError, match=r"topk: .*k = -1 of axis 0 of T0"):
            fd.ops.topk(x, fd.define_scalar(-1, DataType.Int), 0)
        with pytest.raises(DefinitionError, match="the operand needs at least 1 axis"):
            fd.ops.topk(fd.define_tensor([]), one)


def test_texts() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 5])
        outs = [fd.ops.cumsum(x, 1), fd.ops.argsort(x, 0, stable=True)]
        outs += fd.ops.topk(x, fd.define_scalar(2, DataType.Int))
        for out in outs:
            fd.add_output(out)
    t0, t1, t2, t3, t4 = (str(v) for v in (x, *outs))
    assert [str(op) for op in fd.fusion.exprs] == [
        f"{t1}\n   = scan({t0},\n          dim=1,\n          op_type=add,\n"
        "          init=float(0))",
        f"{t2} = argsort( {t0}, dim = 0, descending = False, stable = True )",
        f"( {t3}, {t4} ) = topk( {t0}, 2, dim = 1, largest = True, sorted = False )",
    ]


def test_later_calls_write_memory_of_their_own() -> None:
    build: Sequence[Build] = (scan("cumsum", 1), choose(3, 1, True, True))
    for one in build:
        inputs = [draw((4, 6), torch.float32, seed) for seed in range(4)]
        fd = define(one, inputs[:1])
        outs = [fd.execute([x])[0] for x in inputs]
        again = [fd.execute([x])[0] for x in inputs]
        assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
        assert len({t.data_ptr() for t in outs + again}) == 8
