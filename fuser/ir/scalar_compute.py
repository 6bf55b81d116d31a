"""What scalar ops compute on Python numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from fuser.ir.scalar_nodes import Number


def _c_div(a: Number, b: Number) -> Number:
    """C's division: integers truncate towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return a / b if b else math.copysign(math.inf, a) if a else math.nan


def _c_mod(a: Number, b: Number) -> Number:
    """C's remainder: the sign of the dividend."""
    rest = math.fmod(a, b)
    return int(rest) if isinstance(a, int) and isinstance(b, int) else rest


def _pow(a: Number, b: Number) -> Number:
    """a ** b; a negative base with a fractional exponent has no real value (ValueError)."""
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        return a**b
    return math.pow(a, b)


def _ceil_div(a: Number, b: Number) -> Number:
    return -(-int(a) // int(b))


def _and(a: Number, b: Number) -> Number:
    return bool(a) and bool(b)


def _or(a: Number, b: Number) -> Number:
    return bool(a) or bool(b)


def _rsqrt(a: Number) -> Number:
    return 1.0 / math.sqrt(a)


def _reciprocal(a: Number) -> Number:
    return _c_div(1.0, a)


def _where(cond: Number, a: Number, b: Number) -> Number:
    return a if cond else b


COMPUTE: dict[str, Callable[..., Number]] = {  # pyright: ignore[reportAssignmentType]
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _c_div,
    "%": _c_mod,
    "ceilDiv": _ceil_div,
    "min": min,
    "max": max,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": _and,
    "||": _or,
    "!": operator.not_,
    "neg": operator.neg,
    "abs": abs,
    "sqrt": math.sqrt,
    "rsqrt": _rsqrt,
    "exp": math.exp,
    "log": math.log,
    "reciprocal": _reciprocal,
    "pow": _pow,
    "where": _where,
}
