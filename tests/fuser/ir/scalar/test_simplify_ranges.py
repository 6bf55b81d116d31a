"""Every simplification of integer scalars against brute force, negative values included.

Random trees over symbols with all kinds of ranges are built twice: by the simplifying constructors,
and as Python functions of the symbols' values. Both must agree for every value in the ranges,
unless a division by 0 occurs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

import pytest

from fuser.ir.dtypes import DataType
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.text.parser import parse_scalar
from fuser.support.errors import DefinitionError, DivisionByZeroError, InputError

INDEX, INT = DataType.Index, DataType.Int
Values = Mapping[Symbol, int]
Meaning = Callable[[Values], int]
# A simplified scalar, and the same expression as a Python function.
Pair = tuple[Scalar, Meaning]


# ------------------------------------------------------------------ symbols and their values
N, M = Symbol("n", INT), Symbol("m", INDEX)
SIZE, EXTENT, OTHER = (
    Symbol("i0", INDEX, lo=0),
    Symbol("i1", INDEX, lo=1),
    Symbol("i2", INDEX, lo=1),
)
BELOW = Symbol("b", INDEX, lo=-3, hi=2)
K, OVER_SIZE = sc.index("k", 5), sc.index("s", SIZE)
OVER_EXTENT, OVER_OTHER = sc.index("x", EXTENT), sc.index("y", OTHER)
OVER_SUM = sc.index("z", sc.add(EXTENT, OTHER))
LEAVES = [N, M, SIZE, EXTENT, OTHER, BELOW, K, OVER_SIZE, OVER_EXTENT, OVER_OTHER, OVER_SUM]


def bindings(names: tuple[Symbol, ...]) -> Iterator[dict[Symbol, int]]:
    """Yields all values of the symbols in their ranges; unbounded ends are limited."""
    needed = dict.fromkeys(s for n in names if n.hi is not None for s in sc.symbols(n.hi))
    needed.update(dict.fromkeys(names))

    def extend(done: dict[Symbol, int], left: list[Symbol]) -> Iterator[dict[Symbol, int]]:
        if not left:
            yield dict(done)
            return
        symbol, *rest = left
        low = -5 if symbol.lo is None else symbol.lo
        high = 4 if symbol.hi is None else int(sc.evaluate(symbol.hi, done))
        for value in range(low, high + 1):
            yield from extend({**done, symbol: value}, rest)

    yield from extend({}, sorted(needed, key=lambda s: s.is_index))


# ------------------------------------------------------------------ what each op means
def trunc(a: int, b: int) -> int:
    return math.trunc(Fraction(a, b))


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": trunc,
    "%": lambda a, b: a - b * trunc(a, b),
    "floorDiv": lambda a, b: math.floor(Fraction(a, b)),
    "floorMod": lambda a, b: a - b * math.floor(Fraction(a, b)),
    "ceilDiv": lambda a, b: math.ceil(Fraction(a, b)),
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
}
UNARY: dict[str, Callable[[int], int]] = {"abs": abs, "neg": lambda a: -a}
TESTS: dict[str, tuple[Callable[..., Scalar], Callable[[int, int], bool]]] = {
    "<": (sc.lt, lambda a, b: a < b),
    "<=": (sc.le, lambda a, b: a <= b),
    "==": (sc.eq, lambda a, b: a == b),
    ">": (lambda a, b: sc.apply(">", a, b), lambda a, b: a > b),
    "!=": (lambda a, b: sc.apply("!=", a, b), lambda a, b: a != b),
}
DIVISIONS = ("/", "%", "floorDiv", "floorMod", "ceilDiv")


def meaning_of(op: str, *parts: Pair) -> Meaning:
    meanings = [p[1] for p in parts]
    table = {**UNARY, **BINARY}
    return lambda v: table[op](*(m(v) for m in meanings))


class Trees:
    """A generator of random trees; the same seed creates the same trees."""

    def __init__(self, seed: int, leaves: list[Symbol]) -> None:
        self.rng = random.Random(seed)
        self.leaves = leaves

    def leaf(self) -> Pair:
        if self.rng.random() < 0.7:
            symbol = self.rng.choice(self.leaves)
            return symbol, lambda v: v[symbol]
        number = self.rng.randint(-4, 6)
        return sc.const(number), lambda v: number

    def tree(self, depth: int) -> Pair:
        if depth == 0 or self.rng.random() < 0.1:
            return self.leaf()
        kind = self.rng.choices(["binary", "unary", "where", "cast"], [20, 2, 2, 1])[0]
        if kind == "where":
            return self.choice(depth)
        a = self.tree(depth - 1)
        if kind == "cast":
            return sc.cast(a[0], self.rng.choice([INT, INDEX])), a[1]
        if kind == "unary":
            op = self.rng.choice(list(UNARY))
            return sc.apply(op, a[0]), meaning_of(op, a)
        op = self.rng.choice([*BINARY, "+", "+", "*"])
        b = self.leaf() if op in DIVISIONS and self.rng.random() < 0.7 else self.tree(depth - 1)
        if op in DIVISIONS and sc.int_value(b[0]) == 0:
            b = (sc.const(3), lambda v: 3)
        return sc.apply(op, a[0], b[0]), meaning_of(op, a, b)

    def choice(self, depth: int) -> Pair:
        a, b, x, y = (self.tree(depth - 1) for _ in range(4))
        build, holds = TESTS[self.rng.choice(list(TESTS))]
        made = sc.where(build(a[0], b[0]), x[0], y[0])
        return made, lambda v: x[1](v) if holds(a[1](v), b[1](v)) else y[1](v)


def compare(seed: int, scalar: Scalar, meaning: Meaning, leaves: list[Symbol]) -> int:
    """Compares value, bounds and proofs on up to 150 bindings; returns how many had a value."""
    found = 0
    low, high = sc.interval(scalar)
    nonnegative = sc.is_nonnegative(scalar)
    points = list(bindings(tuple(leaves)))
    random.Random(seed).shuffle(points)
    for values in points[:150]:
        try:
            expected = meaning(values)
        except ZeroDivisionError:
            continue
        found += 1
        got = sc.evaluate(scalar, values)
        where = f"seed {seed}: {scalar} for {values}"
        assert got == expected, where
        assert low <= expected <= high, f"{where}: outside [{low}, {high}]"
        assert expected >= 0 or not nonnegative, where
    return found


@pytest.mark.parametrize("part", range(4))
def test_every_simplification_keeps_the_value(part: int) -> None:
    """Compares 150 trees per part, each over four symbols."""
    compared = 0
    for seed in range(150 * part, 150 * (part + 1)):
        leaves = random.Random(seed).sample(LEAVES, 4)
        trees = Trees(seed, leaves)
        try:
            scalar, meaning = trees.tree(trees.rng.randint(1, 4))
        except DefinitionError:
            continue  # a divisor that simplified to the constant 0
        compared += compare(seed, scalar, meaning, leaves)
    assert compared > 5_000


def test_proofs_of_order_hold() -> None:
    for seed in range(600):
        leaves = random.Random(seed).sample(LEAVES, 3)
        trees = Trees(seed, leaves)
        try:
            a, b = trees.tree(2), trees.tree(2)
        except DefinitionError:
            continue
        if not sc.is_less(a[0], b[0]):
            continue
        for values in itertools.islice(bindings(tuple(leaves)), 300):
            try:
                assert a[1](values) < b[1](values), f"seed {seed}: {a[0]} < {b[0]} for {values}"
            except ZeroDivisionError:
                continue


def test_substitution_and_text_keep_the_value() -> None:
    """A tree keeps its value after a substitution, and after reading its text without ranges."""
    for seed in range(400):
        leaves = random.Random(seed).sample([M, EXTENT, K, BELOW], 3)
        trees = Trees(seed, leaves)
        try:
            scalar, meaning = trees.tree(3)
            loose: dict[Scalar, Scalar] = {s: Symbol(s.name, s.dtype) for s in leaves}
            unbounded = sc.substitute(scalar, loose)
        except DefinitionError:
            continue
        text = parse_scalar(str(scalar))
        assert str(text) == str(scalar), f"seed {seed}"
        for values in itertools.islice(bindings(tuple(leaves)), 200):
            try:
                expected = meaning(values)
            except ZeroDivisionError:
                continue
            by_name = {s.name: v for s, v in values.items()}
            for other in (unbounded, text):
                bound = {s: by_name[s.name] for s in sc.symbols(other)}
                assert sc.evaluate(other, bound) == expected, f"seed {seed}: {other} for {values}"


# ------------------------------------------------------------------ what must (not) simplify
def test_a_users_integer_has_no_sign() -> None:
    assert str(sc.maximum(N, 0)) == "( max(n, 0) )"
    assert str(sc.minimum(N, 1)) == "( min(n, 1) )"
    four = sc.add(sc.mul(N, 4), 1)
    assert [sc.evaluate(sc.truncdiv(four, 4), {N: n}) for n in (-5, -1, 0, 5)] == [-4, 0, 0, 5]
    assert [sc.evaluate(sc.truncmod(four, 4), {N: n}) for n in (-5, -1, 0, 5)] == [-3, -3, 1, 1]
    assert sc.floordiv(four, 4) == N
    assert sc.int_value(sc.mod(four, 4)) == 1


def test_extents_and_refined_extents() -> None:
    assert sc.maximum(SIZE, 0) == SIZE
    assert str(sc.maximum(SIZE, 1)) == "( max(i0, 1) )"
    assert sc.maximum(EXTENT, 1) == EXTENT
    assert SIZE.with_range(lo=1) != SIZE
    refined = sc.substitute(sc.maximum(SIZE, 1), {SIZE: SIZE.with_range(lo=1)})
    assert refined == SIZE.with_range(lo=1)
    # x / x is simplified to 1, because it has no value for 0.
    assert sc.floordiv(sc.mul(SIZE, EXTENT), SIZE) == EXTENT


def test_the_two_divisions_are_one_where_nothing_is_negative() -> None:
    assert sc.floordiv(EXTENT, 4) == sc.truncdiv(EXTENT, 4)
    assert sc.mod(K, EXTENT) == sc.truncmod(K, EXTENT)
    assert sc.floordiv(N, 4) != sc.truncdiv(N, 4)
    assert str(sc.floordiv(N, 4)) == "( floorDiv(n, 4) )"
    assert sc.add(sc.mul(sc.truncdiv(N, 4), 4), sc.truncmod(N, 4)) == N
    assert sc.add(sc.mul(sc.floordiv(N, 4), 4), sc.mod(N, 4)) == N


def test_equal_scalars_are_one_object() -> None:
    assert sc.add(N, 1) is sc.add(1, N)
    assert sc.const(1) is not sc.const(True)
    assert sc.const(0.0) is not sc.const(-0.0)
    assert sc.const(math.nan) is sc.const(math.nan)
    assert Symbol("n", INT) is N
    assert Symbol("n", INT, lo=0) is not N


# ------------------------------------------------------------------ values outside an op's domain
def test_division_by_a_scalar_of_zero_is_an_error_with_names() -> None:
    for op, build in (("/", sc.truncdiv), ("%", sc.truncmod), ("ceilDiv", sc.ceildiv)):
        with pytest.raises(DivisionByZeroError, match=r"divides 7 by 0: n = 0") as error:
            sc.evaluate(build(7, N), {N: 0})
        assert op in str(error.value)
        with pytest.raises(DefinitionError, match="zero"):
            build(N, 0)


def test_floats_follow_ieee_754() -> None:
    d = Symbol("d0", DataType.Double)

    def value(op: str, x: float, *rest: float) -> float:
        return float(sc.evaluate(sc.apply(op, d, *rest), {d: x}))

    assert value("/", -1.0, -0.0) == math.inf
    assert math.isnan(value("/", math.nan, 0.0))
    assert value("log", 0.0) == -math.inf
    assert math.isnan(value("log", -1.0))
    assert math.isnan(value("sqrt", -1.0))
    assert value("rsqrt", 0.0) == math.inf
    assert value("exp", 1e4) == math.inf
    assert math.isnan(value("%", 3.0, 0.0))
    assert math.isnan(value("max", math.nan, 1.0))
    assert math.isnan(value("min", 1.0, math.nan))
    assert value("pow", 0.0, -1.0) == math.inf
    assert math.isnan(value("pow", -2.0, 0.5))
    assert value("pow", -10.0, 1001.0) == -math.inf


def test_an_infinity_has_no_integer() -> None:
    d = Symbol("d0", DataType.Double)
    for value in (math.inf, math.nan):
        with pytest.raises(InputError, match="has no result for the operand values"):
            sc.evaluate(sc.cast(d, INT), {d: value})
    with pytest.raises(InputError, match="has no result for the operand values"):
        sc.evaluate(sc.cast(sc.const(math.inf), INT), {})


def test_large_integers_keep_every_digit() -> None:
    big = 2**62 + 3
    assert sc.evaluate(sc.truncmod(N, 1000), {N: -big}) == -(big % 1000)


# ------------------------------------------------------------------ long chains
def test_five_thousand_chained_ops() -> None:
    """Building, printing, evaluating, substituting and ordering do not recurse."""
    x: Scalar = N
    for i in range(2500):
        x = sc.add(sc.maximum(x, -i), 3)
        x = x if i % 2 else sc.minimum(x, sc.mul(M, i + 1))
    value, m = 5, 2
    for i in range(2500):
        value = max(value, -i) + 3
        value = value if i % 2 else min(value, m * (i + 1))
    assert sc.evaluate(x, {N: 5, M: m}) == value
    assert set(sc.symbols(x)) == {N, M}
    assert len(str(x)) > 20_000
    assert sc.evaluate(sc.substitute(x, {M: sc.const(m)}), {N: 5}) == value
    assert sc.evaluate(sc.add(sc.mul(x, x), x), {N: 5, M: m}) == value * value + value
    floats: Scalar = Symbol("d0", DataType.Double)
    for _ in range(5000):
        floats = sc.apply("neg", floats)
    assert sc.evaluate(floats, dict.fromkeys(sc.symbols(floats), 1.5)) == 1.5


@pytest.mark.parametrize(("divide", "rest"), [("/", "%"), ("floorDiv", "floorMod")])
def test_two_parts_of_a_division_are_the_third(divide: str, rest: str) -> None:
    """Any two of x / b * b, x % b and x yield the third, with factors and between other terms."""
    dividends = (N, OVER_EXTENT, sc.mul(N, OVER_EXTENT), sc.mul(-1, OVER_EXTENT), sc.mul(2, BELOW))
    divisors = (sc.const(4), EXTENT, sc.mul(2, EXTENT), N)
    for x, b, c in itertools.product(dividends, divisors, (1, -3)):
        if x == b:
            continue
        whole, part = sc.mul(sc.apply(divide, x, b), b), sc.apply(rest, x, b)
        for made, wanted in (
            (sc.sub(whole, x), sc.mul(-1, part)),
            (sc.sub(x, part), whole),
            (sc.add(whole, part), x),
        ):
            found = sc.add(sc.mul(c, made), sc.mul(8, BELOW))
            assert found == sc.add(sc.mul(c, wanted), sc.mul(8, BELOW))
            for values in bindings((*sc.symbols(x), *sc.symbols(b), BELOW)):
                n, m = (sc.evaluate(y, values) for y in (x, b))
                if m == 0:
                    continue
                quotient = BINARY[divide](int(n), int(m))
                meant = {whole: quotient * m, part: n - quotient * m, x: n}
                value = -meant[part] if made == sc.mul(-1, part) else meant[wanted]
                assert sc.evaluate(found, values) == c * value + 8 * values[BELOW]
