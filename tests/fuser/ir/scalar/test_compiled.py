"""Scalars compiled to Python functions have the values, types and errors of `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from fuser.ir.dtypes import DataType
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Scalar, Symbol, evaluate
from fuser.ir.scalar.evaluate import ARITY
from fuser.support.errors import DefinitionError, DivisionByZeroError

INTS = [*(Symbol(f"i{k}", DataType.Index, lo=0) for k in range(3)), Symbol("n", DataType.Int)]
FLOAT, BOOL = Symbol("f", DataType.Double), Symbol("b", DataType.Bool)
OPS = {
    "int": "+ - * / % floorDiv floorMod ceilDiv min max abs neg & | ^ << >> where cast".split(),
    "float": "+ - * / sqrt rsqrt exp log pow min max reciprocal where cast".split(),
    "bool": "< <= > >= == != && || !".split(),
}
DTYPES = {"int": DataType.Int, "float": DataType.Double, "bool": DataType.Bool}


def _scalar(rng: Random, depth: int, kind: str) -> Scalar:
    if depth == 0 or rng.random() < 0.15:
        if kind == "int":
            return rng.choice([*INTS, sc.const(rng.randint(-3, 9))])
        floats = [FLOAT, sc.const(rng.choice([0.5, -2.0, 0.0, math.inf]))]
        return rng.choice(floats if kind == "float" else [BOOL, sc.const(True)])
    op = rng.choice(OPS[kind])
    if op == "where":
        return sc.where(_scalar(rng, depth - 1, "bool"), *_two(rng, depth, kind))
    if op == "cast":
        other = rng.choice([k for k in OPS if k != kind])
        return sc.cast(_scalar(rng, depth - 1, other), DTYPES[kind])
    inner = kind if kind != "bool" or op in ("&&", "||", "!") else rng.choice(["int", "float"])
    return sc.apply(op, *(_scalar(rng, depth - 1, inner) for _ in range(ARITY[op])))


def _two(rng: Random, depth: int, kind: str) -> tuple[Scalar, Scalar]:
    return _scalar(rng, depth - 1, kind), _scalar(rng, depth - 1, kind)


def _found(ask: Callable[[], Sequence[Number]]) -> object:
    try:
        # repr() makes nan equal to itself, and distinguishes 1 from True and 0.0 from -0.0.
        return [repr(x) for x in ask()]
    except (ArithmeticError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(12))
def test_values_types_and_errors_are_those_of_evaluate(seed: int) -> None:
    rng = Random(seed)
    failures = 0
    for _ in range(80):
        try:
            scalars = [_scalar(rng, rng.randint(0, 5), rng.choice([*OPS])) for _ in range(3)]
        except (DefinitionError, ArithmeticError, ValueError):
            continue  # such as a division by the literal 0
        computed = Computed(scalars)
        for _ in range(3):
            values: dict[Symbol, Number] = {s: rng.randint(0, 12) for s in INTS}
            values[INTS[3]] = rng.randint(-9, 9)
            values[FLOAT] = rng.choice([1.5, -0.25, 0.0, math.inf, math.nan, 7.0])
            values[BOOL] = rng.random() < 0.5
            want = _found(lambda v=values, all_=scalars: [evaluate(x, v) for x in all_])
            assert _found(lambda v=values, c=computed: c(v)) == want, f"{scalars} {values}"
            failures += isinstance(want, tuple)
    assert failures, "no division by 0 was tried"


def test_only_the_chosen_branch_of_a_choice_has_to_have_a_value() -> None:
    i, n = INTS[0], INTS[1]
    safe = sc.where(sc.lt(sc.const(0), n), sc.floordiv(i, n), sc.const(-1))
    assert Computed([safe])({i: 6, n: 0}) == (-1,)
    assert Computed([safe])({i: 6, n: 2}) == (3,)
    with pytest.raises(DivisionByZeroError, match="divides 6 by 0"):
        Computed([sc.floordiv(i, n)])({i: 6, n: 0})


def test_conditions_are_looked_at_in_turn() -> None:
    """`hold` stops at the first false condition; the next one may have no value."""
    i, n = INTS[0], INTS[1]
    conditions = Computed([sc.lt(sc.const(0), n), sc.eq(sc.mod(i, n), 0)])
    assert not conditions.hold({i: 6, n: 0})
    assert conditions.hold({i: 6, n: 3})
    assert not conditions.hold({i: 7, n: 3})


def test_a_symbol_without_a_value_is_named() -> None:
    with pytest.raises(KeyError, match="i1"):
        Computed([sc.add(INTS[0], INTS[1])])({INTS[0]: 1})
