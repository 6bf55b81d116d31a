"""Simplification does not change values: exhaustive over small ranges."""

from __future__ import annotations

import itertools
import random

import pytest

from fuser.ir.dtypes import DataType
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar, Symbol
from fuser.support.errors import DefinitionError

INDEX = DataType.Index


def symbol(name: str, extent: int | Scalar | None = None) -> Symbol:
    return Symbol(name, INDEX, lo=1) if extent is None else sc.index(name, extent)


i0, i1 = symbol("i0"), symbol("i1")


def test_flat_index_of_a_merged_axis_has_no_division() -> None:
    m = symbol("m", sc.mul(i0, i1))
    row, column = sc.floordiv(m, i1), sc.mod(m, i1)
    assert str(row) == "( m / i1 )"
    assert sc.add(sc.mul(row, i1), column) == m


def test_split_round_trip_is_cancelled() -> None:
    outer, inner = symbol("o", sc.ceildiv(i0, 128)), symbol("t", 128)
    whole = sc.add(sc.mul(outer, 128), inner)
    assert sc.floordiv(whole, 128) == outer
    assert sc.mod(whole, 128) == inner
    assert str(sc.lt(whole, i0)) == "( ( ( o * 128 ) + t ) < i0 )"
    assert sc.lt(inner, 128) == sc.const(True)


def test_symbolic_factor_round_trip() -> None:
    a, b = symbol("a", i0), symbol("b", i1)
    flat = sc.add(sc.mul(a, i1), b)
    assert (sc.floordiv(flat, i1), sc.mod(flat, i1)) == (a, b)
    assert sc.lt(flat, sc.mul(i0, i1)) == sc.const(True)


def test_nested_divisions_collapse() -> None:
    x = symbol("x", 1000)
    assert sc.floordiv(sc.floordiv(x, 4), 8) == sc.floordiv(x, 32)
    assert sc.mod(sc.mod(x, 32), 8) == sc.mod(x, 8)


def test_a_difference_may_be_negative_so_its_division_stays() -> None:
    x = symbol("x", 10)
    shifted = sc.sub(x, 3)
    assert not sc.is_nonnegative(shifted)
    assert isinstance(sc.floordiv(shifted, 2), Apply)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (sc.const(8), "8"),
        (sc.const(0.5, DataType.Float), "float(0.5)"),
        (sc.const(3.0), "double(3)"),
        (sc.const(True), "true"),
        (sc.mul(i0, i1), "( i0 * i1 )"),
        (sc.ceildiv(sc.mul(i0, i1), 128), "( ceilDiv(( i0 * i1 ), 128) )"),
        (sc.ceildiv(sc.mul(i0, 128), 128), "i0"),
        (sc.ceildiv(7, 2), "4"),
    ],
)
def test_text(value: Scalar, text: str) -> None:
    assert str(value) == text


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(DefinitionError, match="zero"):
        sc.floordiv(i0, 0)


Tree = tuple[str, "Tree", "Tree"] | Scalar
OPS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
    "<": lambda a, b: a < b,
}
BUILD = {
    "+": sc.add,
    "-": sc.sub,
    "*": sc.mul,
    "/": sc.floordiv,
    "%": sc.mod,
    "min": sc.minimum,
    "max": sc.maximum,
}


def test_random_expressions_keep_their_values() -> None:
    """Evaluates 2000 random trees over three small indices, for every assignment."""
    rng = random.Random(0)
    for case in range(2000):
        extents = [rng.randint(1, 6) for _ in range(3)]
        leaves = [symbol(f"k{j}_{e}", e) for j, e in enumerate(extents)]

        def tree(depth: int, leaves: list[Symbol] = leaves) -> Tree:
            if depth == 0:
                return rng.choice([*leaves, sc.const(rng.randint(0, 5))])
            op = rng.choice(["+", "+", "*", "/", "%", "min", "max"])
            left = tree(depth - 1)
            right = sc.const(rng.randint(1, 9)) if op in "/%" else tree(depth - 1)
            return (op, left, right)

        def build(t: Tree) -> Scalar:
            return t if isinstance(t, Scalar) else BUILD[t[0]](build(t[1]), build(t[2]))

        def value(t: Tree, env: dict[Symbol, int]) -> int:
            if isinstance(t, Scalar):
                return int(sc.evaluate(t, env))
            return OPS[t[0]](value(t[1], env), value(t[2], env))

        t = tree(3)
        simplified = build(t)
        for point in itertools.product(*(range(e) for e in extents)):
            env = dict(zip(leaves, point, strict=True))
            assert value(t, env) == sc.evaluate(simplified, env), (case, t, simplified, env)


def test_symbolic_extents_keep_values() -> None:
    """Evaluates index expressions over symbolic extents, for every pair of small extents."""
    a, b = symbol("a", i0), symbol("b", i1)
    flat = sc.add(sc.mul(a, i1), b)
    cases = [
        sc.floordiv(flat, 4),
        sc.mod(flat, 4),
        sc.mod(sc.add(flat, 3), i1),
        sc.floordiv(sc.mul(flat, 6), 4),
        sc.mod(sc.mul(flat, 6), 4),
        sc.add(sc.mul(sc.floordiv(flat, 3), 3), sc.mod(flat, 3)),
    ]
    plain = [
        lambda f, n: f // 4,
        lambda f, n: f % 4,
        lambda f, n: (f + 3) % n,
        lambda f, n: (f * 6) // 4,
        lambda f, n: (f * 6) % 4,
        lambda f, n: f,
    ]
    for e0, e1 in itertools.product(range(1, 5), repeat=2):
        for va, vb in itertools.product(range(e0), range(e1)):
            env = {i0: e0, i1: e1, a: va, b: vb}
            for expression, expected in zip(cases, plain, strict=True):
                assert sc.evaluate(expression, env) == expected(va * e1 + vb, e1)


def test_flat_index_of_three_merged_axes_has_no_division() -> None:
    i2 = symbol("i2")
    k = symbol("k", sc.mul(sc.mul(i0, i1), i2))
    rows = sc.floordiv(k, i2)
    index = sc.add(
        sc.mul(sc.add(sc.mul(sc.floordiv(rows, i1), i1), sc.mod(rows, i1)), i2), sc.mod(k, i2)
    )
    assert index == k
    spelled_out = sc.add(
        sc.add(
            sc.mul(sc.floordiv(k, sc.mul(i1, i2)), sc.mul(i1, i2)),
            sc.mul(sc.mod(sc.floordiv(k, i2), i1), i2),
        ),
        sc.mod(k, i2),
    )
    assert spelled_out == k


@pytest.mark.parametrize(
    "op", ["+", "*", "min", "max", "/", "%", "floorDiv", "floorMod", "ceilDiv"]
)
@pytest.mark.parametrize("dtype", [DataType.Index, DataType.Int])
@pytest.mark.parametrize("is_first", [False, True])
def test_scalars_of_one_text_are_one_scalar(op: str, dtype: DataType, is_first: bool) -> None:
    """Literals of Int and of Index have the same text."""
    x = sc.Symbol("i0", dtype)
    made = [
        sc.apply(op, *((c, x) if is_first else (x, c)))
        for c in (sc.Const(7, DataType.Int), sc.Const(7, DataType.Index))
    ]
    assert made[0] is made[1]
    assert made[0].dtype is dtype
    chosen = [sc.where(sc.lt(x, 3), x, sc.Const(7, d)) for d in (DataType.Int, DataType.Index)]
    assert chosen[0] is chosen[1]
