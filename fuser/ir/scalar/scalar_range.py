"""Constant bounds of integer scalars, from the ranges of their symbols alone.

A division by 0 has no value, so a divisor that cannot be negative counts as at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fuser.ir.dtypes import DataType, category
from fuser.ir.scalar.scalar_nodes import Apply, Const, Interval, Poly, Scalar, Symbol, postorder

End = int | float
_ANY: Interval = (-math.inf, math.inf)
_INT32: Interval = (-(2**31), 2**31 - 1)


def interval(x: Scalar) -> Interval:
    """Return bounds of `x` over all values of its symbols; (-inf, inf) when nothing is known."""
    if x.interval is None:
        for y in postorder(x, lambda s: s.interval is not None):
            y.interval = _interval(y)
    return x.interval or _ANY


def _interval(x: Scalar) -> Interval:
    kind = category(x.dtype)
    if kind == "bool":
        return (0, 1)
    if kind != "int":
        return _ANY
    match x:
        case Const():
            return (int(x.value), int(x.value))
        case Symbol():
            low = -math.inf if x.lo is None else x.lo
            return (low, math.inf if x.hi is None else interval(x.hi)[1])
        case Poly():
            return _sum_interval(x)
        case Apply():
            op = "cast" if x.op.startswith("cast:") else x.op
            rule = _RULES.get(op)
            return rule(x.dtype, [interval(a) for a in x.args]) if rule else _ANY
        case _:
            return _ANY


def _times(a: End, b: End) -> End:
    if a == 0 or b == 0:
        return 0
    if isinstance(a, float) or isinstance(b, float):
        return math.inf if (a > 0) == (b > 0) else -math.inf
    return a * b


def _plus(a: End, b: End) -> End:
    """Add two lower or two upper ends, of which an infinite one decides."""
    return next((x for x in (a, b) if isinstance(x, float)), a + b)


def _sum_interval(x: Poly) -> Interval:
    low: End = 0
    high: End = 0
    for mono, coef in x.terms:
        ends: Interval = (coef, coef)
        for atom in mono:
            corners = [_times(a, b) for a in ends for b in interval(atom)]
            ends = (min(corners), max(corners))
        low, high = _plus(low, ends[0]), _plus(high, ends[1])
    return (low, high)


def _largest(ends: Interval) -> End:
    return max(abs(ends[0]), abs(ends[1]))


# ---------------------------------------------------------------- one rule per op
Rule = Callable[[DataType, Sequence[Interval]], Interval]


def _quotient(divide: Callable[[int, int], int], beyond: Callable[[int], int]) -> Rule:
    """Return the rule of a division; `beyond` gives its value for an endless divisor."""

    def corner(a: End, b: End) -> End:
        if isinstance(a, float):
            return a
        return beyond(a) if isinstance(b, float) else divide(a, b)

    def rule(_: DataType, args: Sequence[Interval]) -> Interval:
        a, (low, high) = args
        if low < 0:
            return (-_largest(a), _largest(a))
        divisors = (max(low, 1), max(high, 1))
        corners = [corner(x, d) for x in a for d in divisors]
        return (min(corners), max(corners))

    return rule


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(_: DataType, args: Sequence[Interval]) -> Interval:
    """Return bounds of C's remainder: at most the dividend, less than the divisor, sign as a."""
    (low, high), b = args
    limit = max(_plus(_largest(b), -1), 0)
    return (0 if low >= 0 else max(low, -limit), 0 if high <= 0 else min(high, limit))


def _floor_remainder(_: DataType, args: Sequence[Interval]) -> Interval:
    (low, high), b = args
    limit = max(_plus(_largest(b), -1), 0)
    if b[0] < 0:
        return (-limit, limit)
    return (0, min(high, limit) if low >= 0 else limit)


def _absolute(_: DataType, args: Sequence[Interval]) -> Interval:
    ((low, high),) = args
    return (max(low, -high, 0), max(-low, high))


def _cast(dtype: DataType, args: Sequence[Interval]) -> Interval:
    (ends,) = args
    if dtype is DataType.Int32 and not (_INT32[0] <= ends[0] and ends[1] <= _INT32[1]):
        return _INT32
    return ends


_RULES: dict[str, Rule] = {
    "/": _quotient(_truncated, lambda a: 0),
    "floorDiv": _quotient(lambda a, b: a // b, lambda a: -(a < 0)),
    "ceilDiv": _quotient(lambda a, b: -(-a // b), lambda a: int(a > 0)),
    "%": _remainder,
    "floorMod": _floor_remainder,
    "min": lambda _, args: (min(a[0] for a in args), min(a[1] for a in args)),
    "max": lambda _, args: (max(a[0] for a in args), max(a[1] for a in args)),
    "where": lambda _, args: (min(a[0] for a in args[1:]), max(a[1] for a in args[1:])),
    "abs": _absolute,
    "cast": _cast,
}
