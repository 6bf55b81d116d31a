"""Python's operators on the tensors of a definition, compared with torch in float64."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    DtypeError,
    InputError,
    UnsupportedError,
)

pytestmark = pytest.mark.from_text

Build = Callable[..., Any]


def run(build: Build, *inputs: torch.Tensor, static: bool = False) -> torch.Tensor:
    with FusionDefinition() as fd:
        operands = [
            fd.define_tensor(
                [*x.shape] if static else [-1] * x.ndim, contiguity=True, dtype=x.dtype
            )
            for x in inputs
        ]
        fd.add_output(build(*operands))
    (out,) = fd.execute(inputs)
    return out


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ARITHMETIC: dict[str, Build] = {
    "x + y": lambda x, y: x + y,
    "x - 1.5": lambda x, y: x - 1.5,
    "1.5 - x": lambda x, y: 1.5 - x,
    "2 * x": lambda x, y: 2 * x,
    "x / y": lambda x, y: x / y,
    "1 / x": lambda x, y: 1 / x,
    "x % y": lambda x, y: x % y,
    "x ** 2": lambda x, y: x**2,
    "2.0 ** x": lambda x, y: 2.0**x,
    "-x, +x, abs": lambda x, y: -x + (+y) * abs(x),
    "x < y": lambda x, y: x < y,
    "x <= 0": lambda x, y: x <= 0,
    "0 < x": lambda x, y: 0 < x,  # noqa: SIM300
    "x >= y": lambda x, y: x >= y,
    "(x > 0) & ~(y > 0) | (x < y)": lambda x, y: (x > 0) & ~(y > 0) | (x < y),
    "(x > 0) ^ (y > 0)": lambda x, y: (x > 0) ^ (y > 0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    x, y = draw(5, 7), draw(5, 7, seed=1)
    expected = ARITHMETIC[name](x, y)
    got = run(ARITHMETIC[name], x, y)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


def test_integers() -> None:
    x = torch.tensor([-9, -4, 0, 5, 12])
    y = torch.tensor([2, 3, 1, 2, 3])
    cases: Iterable[Build] = (
        lambda x, y: x / y,
        lambda x, y: x % y,
        lambda x, y: (x << y) | (x >> 1),
        lambda x, y: (1 << y) ^ x,
        lambda x, y: x & 6,
    )
    for build in cases:
        expected = build(x, y)
        torch.testing.assert_close(run(build, x, y), expected)


# Quotients that round up to an integer or lose their fraction, and values without a quotient.
_DIVIDED = [1.0, -1.0, 7.0, -7.5, 0.3, 1e30, 3e-7, 0.0, -0.0, math.inf, -math.inf, math.nan, 6.0]
_DIVISORS = [0.1, -0.1, 2.0, -3.0, 0.3, 1e-3, 0.0, -0.0, math.inf, -math.inf, math.nan, 7.0]
QUOTIENTS: dict[str, Build] = {
    "tensors": lambda x, y: x // y,
    "a number": lambda x, y: x // 3,
    "a negative number": lambda x, y: x // -2,
    "a number before": lambda x, y: -7 // y,
    "a number of numpy before": lambda x, y: np.int64(5) // y,
    "in place": lambda x, y: operator.ifloordiv(x, y),
}


@pytest.mark.finding("G18")
@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_divided_downwards(dtype: torch.dtype, name: str) -> None:
    pairs = [(a, b) for a in _DIVIDED for b in _DIVISORS]
    x, y = (
        torch.tensor(column, dtype=torch.float64).to(dtype) for column in zip(*pairs, strict=True)
    )
    build = QUOTIENTS[name]
    # Arithmetic on half dtypes has the dtype Float.
    wide = torch.promote_types(dtype, torch.float32)
    a, b = x.to(wide), y.to(wide)
    expected = build(a.clone(), b) if name != "a number of numpy before" else 5 // b
    for static in (False, True):
        got = run(build, x, y, static=static)
        assert got.dtype is wide
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        zeros = expected == 0
        assert torch.equal(got[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.finding("G18")
@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_are_divided_downwards(dtype: torch.dtype, name: str) -> None:
    ends = torch.iinfo(dtype)
    column = [ends.min, ends.min + 1, -7, -6, -1, 0, 1, 5, 6, ends.max]
    pairs = [(a, b) for a in column for b in (-7, -3, -2, 1, 2, 3, ends.max, ends.min)]
    x, y = (torch.tensor(values, dtype=dtype) for values in zip(*pairs, strict=True))
    got = run(QUOTIENTS[name], x, y)
    rows = {
        "tensors": [a // b for a, b in pairs],
        "a number": [a // 3 for a, _ in pairs],
        "a negative number": [a // -2 for a, _ in pairs],
        "a number before": [-7 // b for _, b in pairs],
        "a number of numpy before": [5 // b for _, b in pairs],
        "in place": [a // b for a, b in pairs],
    }
    assert got.dtype is dtype and got.tolist() == rows[name]


@pytest.mark.finding("G18")
def test_quotients_of_two_dtypes_and_of_scalars() -> None:
    x = torch.tensor([-9, -4, 0, 5, 12])
    torch.testing.assert_close(run(lambda x: x // 2.5, x), x // 2.5)
    torch.testing.assert_close(run(lambda x: 7.5 // (x + 1), x), 7.5 // (x + 1))
    mask = x > 0
    torch.testing.assert_close(run(lambda m: m // 2, mask), mask // 2)
    pair = run(lambda x: divmod(x, 5)[0] * 100 + divmod(x, 5)[1], x)
    assert pair.tolist() == [a // 5 * 100 + a % 5 for a in x.tolist()]
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1], contiguity=True, dtype=DataType.Double)
        s, n = fd.define_scalar(dtype=DataType.Double), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(t // s)
        fd.add_output(s // t)
        fd.add_output(t // n + t.size(0) // 2)
    a = torch.tensor([-5.5, 3.0, 8.25], dtype=torch.float64)
    found = fd.execute([a, -1.5, 2])
    torch.testing.assert_close(found, [a // -1.5, -1.5 // a, a // 2 + 1])


@pytest.mark.finding("G18")
def test_quotients_that_torch_does_not_have() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3], dtype=DataType.Bool)
        z = fd.define_tensor([3], dtype=DataType.ComplexFloat)
        calls: list[tuple[Callable[..., object], type[Exception], str]] = [
            (lambda x, z: x // x, DtypeError, r"//: Bool cannot be divided.*test_operators\.py"),
            (
                lambda x, z: z // 2,
                DtypeError,
                r"//: the operands must be real, because complex numbers .*test_operators\.py",
            ),
            (lambda x, z: x // "a", ArgumentError, r"// of T0.*number, got 'a'"),
        ]
        for call, kind, words in calls:
            with pytest.raises(kind, match=words):
                call(x, z)
        fd.add_output(x)


@pytest.mark.finding("G18")
def test_scalars_have_the_operators_of_tensors() -> None:
    """Together with numbers of any library, and with tensors."""
    builds: dict[str, Callable[[Any, Any], Any]] = {
        "/": lambda s, n: s / 4 + 1 / s,
        "**": lambda s, n: s**2 + 2**n,
        "abs": lambda s, n: abs(-s) + abs(n - 7),
        "a zero that is negated": lambda s, n: 1 / -(s * 0.0),
        "bits": lambda s, n: ((n & 6) | 1) ^ (n << 2) ^ (1 << n) ^ (n >> 1),
        "numpy": lambda s, n: np.float32(2.5) * s + np.int64(3) - n + s * np.float64(2),
        "torch": lambda s, n: s * torch.tensor(2.0).item() + n,
        "divided downwards": lambda s, n: n // 3 * 10 + n % 3 + 20 // n,
    }
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1], contiguity=True, dtype=DataType.Double)
        s, n = fd.define_scalar(dtype=DataType.Double), fd.define_scalar(dtype=DataType.Int)
        for build in builds.values():
            fd.add_output(t * 0.0 + build(s, n))
        fd.add_output(t / s + s / t + s**t)
        assert divmod(n, 3) == (n // 3, n % 3) and divmod(20, n)[1] is 20 % n
    a = torch.tensor([1.0, 3.0], dtype=torch.float64)
    for s, n in ((2.5, 5), (0.75, 11)):
        *found, mixed = fd.execute([a, s, n])
        for build, got in zip(builds.values(), found, strict=True):
            by_torch = build(torch.tensor(s, dtype=torch.float64), torch.tensor(n))
            torch.testing.assert_close(got, torch.full_like(a, by_torch.item()))
        torch.testing.assert_close(mixed, a / s + s / a + s**a)


def test_scalars_stand_on_both_sides() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True, dtype=DataType.Double)
        s = fd.define_scalar(dtype=DataType.Double)
        fd.add_output((s - x) * (x + s) + x.size(0) * x)
    (out,) = fd.execute([a := draw(6), 2.5])
    torch.testing.assert_close(out, (2.5 - a) * (a + 2.5) + 6 * a)


def test_products() -> None:
    x, w = draw(4, 5), draw(5, 3, seed=1)
    torch.testing.assert_close(run(lambda x, w: x @ w, x, w), x @ w)


ITEMS: dict[str, Build] = {
    "one": lambda x: x[2],
    "last": lambda x: x[-1],
    "numbers": lambda x: x[1, 2, -3],
    "slice": lambda x: x[1:3],
    "from the end": lambda x: x[:, -2:],
    "without ends": lambda x: x[1:-1, 1:-1],
    "both": lambda x: x[1:, 2, :4],
    "dots": lambda x: x[..., 1],
    "dots between": lambda x: x[1, ..., 2:5],
    "new": lambda x: x[:, None, 1:3],
    "new at ends": lambda x: x[None, ..., None],
    "beyond": lambda x: x[2:100, -100:3],
    "nothing": lambda x: x[3:1],
    "all": lambda x: x[:],
    "none given": lambda x: x[()],
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ITEMS)
def test_parts(name: str, static: bool) -> None:
    x = draw(4, 5, 6)
    expected = ITEMS[name](x)
    torch.testing.assert_close(run(ITEMS[name], x, static=static), expected)


def test_a_number_of_the_call_chooses() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Double)
        k = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(x[k])
        fd.add_output(x[:, k:])
    a = draw(4, 5)
    for chosen in (1, 3):
        row, rest = fd.execute([a, chosen])
        torch.testing.assert_close(row, a[chosen])
        torch.testing.assert_close(rest, a[:, chosen:])


@pytest.mark.parametrize(("start", "end"), [(-3, 6), (2, -1), (-3, -1)])
def test_scalars_do_not_count_from_the_end(start: int, end: int) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True, dtype=DataType.Double)
        s, e = (fd.define_scalar(dtype=DataType.Int) for _ in range(2))
        fd.add_output(x[s:e] * 2.0)
    a = draw(6)
    for s, e in ((1, 4), (5, 2), (2, 9)):
        torch.testing.assert_close(fd.execute([a, s, e])[0], a[s:e] * 2)
    with pytest.raises(
        InputError, match="6 elements; a negative scalar does not count from the end"
    ):
        fd.execute([a, start, end])


def test_operators_may_stand_in_rows_of_ops() -> None:
    """A softmax, written as in torch."""

    x = draw(3, 8)
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Double)
        e = fd.ops.exp(t - fd.ops.max(t, 1)[:, None])
        fd.add_output(e / fd.ops.sum(e, 1)[:, None])
    (out,) = fd.execute([x])
    torch.testing.assert_close(out, torch.softmax(x, 1))


REFUSED: dict[str, tuple[Build, type[Exception], str]] = {
    "a step": (lambda x: x[::2], UnsupportedError, r"\[::2\]: only slices with step 1"),
    "too many": (lambda x: x[0, 0, 0], DefinitionError, "3 indices for 2 axes"),
    "two dots": (lambda x: x[..., ...], DefinitionError, "indices for 2 axes"),
    "a list": (lambda x: x[[0, 1]], ArgumentError, r"expected integers, slices"),
    "a bool": (lambda x: x[True], ArgumentError, "got True"),
    "an end": (lambda x: x[:1.5], ArgumentError, r"the ends of a slice must be integers, got 1\.5"),
    "if": (lambda x: 1 if x > 0 else 2, DefinitionError, "`if`, .* cannot test it"),
    "and": (lambda x: x > 0 and x < 1, DefinitionError, "Use the op `where` instead"),
    "if ==": (lambda x: 1 if x == 0 else 2, DefinitionError, "`a is b` tests whether two tensors"),
    "in": (lambda x: x in [x[0:], x[1:]], DefinitionError, r"any\(t is a for t in tensors\)"),
    "index": (lambda x: [x[0:], x].index(x), DefinitionError, "`a is b` tests"),
    "== a string": (lambda x: x == "a", ArgumentError, "eq of T0.*number, got 'a'"),
    "== a torch tensor": (lambda x: x == torch.ones(3), ArgumentError, "eq of T0.*it has data"),
    "bits of floats": (lambda x: x & 1, DtypeError, "bitwise_and"),
    "a string": (lambda x: x + "a", ArgumentError, "add of T0.*number, got 'a'"),
    "a product": (lambda x: x @ 2.0, ArgumentError, r"matmul of T0.*a tensor, got 2\.0"),
    "a torch tensor": (lambda x: x * torch.ones(3), ArgumentError, r"mul of T0.*got "),
    "an array before": (lambda x: np.ones(4) + x, ArgumentError, "add of T0.*: it has data"),
    "a torch tensor before": (lambda x: torch.ones(3) @ x, TypeError, "matmul"),
    "out of range": (lambda x: x[3], DefinitionError, "outside of axis 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    build, error, why = REFUSED[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 4], contiguity=True)
        with pytest.raises(error, match=why):
            build(x)
        fd.add_output(x)


NUMBERS: dict[str, Any] = {
    "a float of numpy": np.float32(1.5),
    "an integer of numpy": np.int64(2),
    "a tensor of rank 0": torch.tensor(0.5),
    "an array of rank 0": np.array(2.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_any_library_stand_on_either_side(name: str) -> None:
    x, n = draw(3, 4), NUMBERS[name]
    plain = n.item()
    torch.testing.assert_close(run(lambda x: x - n, x), x - plain)
    torch.testing.assert_close(run(lambda x: n - x, x), plain - x)
    torch.testing.assert_close(run(lambda x: x < n, x), x < plain)


EQUALITIES: dict[str, Build] = {
    "x == y": lambda x, y: x == y,
    "x != y": lambda x, y: x != y,
    "x == x": lambda x, y: x == x,
    "x == 0": lambda x, y: x == 0,
    "0 == x": lambda x, y: 0 == x,  # noqa: SIM300
    "2.0 != x": lambda x, y: 2.0 != x,  # noqa: SIM300
    "numpy": lambda x, y: x == np.float32(1),
    "numpy before": lambda x, y: np.float32(1) == x,
    "torch": lambda x, y: x == torch.tensor(1.0),
    "a mask": lambda x, y: x * (x == y),
    "a function of operator": lambda x, y: operator.ne(x, y),
    "rank 0": lambda x, y: x == y[0],
}


@pytest.mark.finding("G14")
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", EQUALITIES)
def test_equality_is_an_op(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3, 1]).to(dtype)
    y = torch.tensor([0, 2, 2, 1, 1]).to(dtype)
    expected = EQUALITIES[name](x, y)
    torch.testing.assert_close(run(EQUALITIES[name], x, y), expected)


@pytest.mark.finding("G14")
def test_a_scalar_is_compared_with_a_tensor_from_both_sides() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1], contiguity=True), fd.define_scalar()
        fd.add_output((x == s) | (s != x))
        fd.add_output(s == x)
    a = torch.tensor([1.0, 2.5])
    either, same = fd.execute([a, 2.5])
    assert either.tolist() == [True, True] and same.tolist() == [False, True]


@pytest.mark.finding("G14")
def test_equality_of_scalars_is_a_condition() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 5], contiguity=True, dtype=DataType.Double)
        s, n = fd.define_scalar(), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.where(s == 1.0, x, -x))
        fd.add_output(fd.ops.where(n != x.size(0), x, -x))
        # The values of constants are known.
        assert x.size(1) == 5 and x.size(1) == np.int64(5) and x.size(1) != 4
        with pytest.raises(ArgumentError, match=r"neither true nor false.*write a is b"):
            assert s == 1.0
        assert {s: 1, n: 2}[n] == 2 and s != None and s != "s"  # noqa: E711
    a = draw(2, 5)
    for s, n in ((1.0, 2), (0.5, 3)):
        by_float, by_int = fd.execute([a, s, n])
        assert torch.equal(by_float, a if s == 1.0 else -a)
        assert torch.equal(by_int, a if n != 2 else -a)
    sizes = x.shape()
    assert sizes[1] == 5 and sizes[0] != 5 and sizes == x.shape() and sizes[0] == x.size(0)


TRUTHS: dict[str, Callable[[Any, Any], object]] = {
    "if": lambda s, x: 1 if s else 2,
    "not": lambda s, x: not s,
    "and": lambda s, x: s and x,
    "or": lambda s, x: s or x,
    "any": lambda s, x: any([s]),
    "all": lambda s, x: all(v for v in [s]),
    "filter": lambda s, x: list(filter(None, [s])),
    "an extent": lambda s, x: bool(x.shape[0]),
    "a formula": lambda s, x: bool(x.shape[0] - 1),
    "an op": lambda s, x: bool(s // 2),
}


@pytest.mark.finding("G14")
@pytest.mark.parametrize(
    "dtype", [DataType.Int, DataType.Double, DataType.Bool, DataType.ComplexFloat]
)
@pytest.mark.parametrize("name", TRUTHS)
def test_truth_of_a_scalar_is_an_error(name: str, dtype: DataType) -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, 5], contiguity=True), fd.define_scalar(dtype=DataType.Int)
        if name in ("if", "not", "and", "or", "any", "all", "filter"):
            s = fd.define_scalar(dtype=dtype)
        with pytest.raises(ArgumentError, match=r"neither true nor false.*test_operators\.py:\d+"):
            TRUTHS[name](s, x)
        fd.add_output(x)
    with pytest.raises(ArgumentError, match="neither true nor false"):
        bool(x.shape[0])


@pytest.mark.finding("G14")
@pytest.mark.parametrize("value", [0, 1, -3, 0.0, -0.0, 2.5, math.nan, 0j, 1j, True, False])
def test_truth_of_a_constant_is_that_of_its_value(value: complex) -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([4, 5, 1]), fd.define_scalar(value)
        assert bool(s) is bool(value) and (not s) is (not value)
        assert x.shape[0] - 3 and not x.shape[0] - 4 and bool(x.size(2) - 1) is False
        # A zero is a number for the ops, not a missing argument.
        fd.add_output(fd.ops.full([2], s, DataType.ComplexDouble))
    (out,) = fd.execute([torch.zeros(4, 5, 1)])
    expected = torch.full((2,), value, dtype=torch.complex128)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_identity_is_asked_by_is_and_keeps_tables_of_tensors() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
        z = x + y
        assert {x: 1, y: 2}[y] == 2 and y in {x, y} and z not in {x, y}
        assert x in [x, y] and x != None  # noqa: E711
        kept = weakref.WeakKeyDictionary({x: 1, y: 2})
        assert kept[y] == 2 and z not in kept
        fd.add_output(z)
    assert len(fd.fusion.exprs) == 1  # no comparison was added
    # Outside of a definition, no op can be added.
    assert fd.fusion.outputs[0] == z and fd.fusion.inputs == [x, y] and x != y
