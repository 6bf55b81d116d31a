"""Computes scalar ops on Python numbers, with C's rules for integers and IEEE 754 for floats.

Ops that occur only in user programs, such as `exp`, are computed by torch in float64. A division of
an integer by 0 raises `ZeroDivisionError`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from fuser.ir.pointwise_table import POINTWISE, TESTS
from fuser.ir.scalar.scalar_nodes import Number


def _c_div(a: Number, b: Number) -> Number:
    """Returns the quotient as in C: the quotient of two integers is rounded towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    if b:
        return a / b
    return a * math.copysign(math.inf, b) if a else math.nan


def _c_mod(a: Number, b: Number) -> Number:
    """Returns the remainder as in C, which has the sign of the dividend."""
    if isinstance(a, int) and isinstance(b, int):
        rest = abs(a) % abs(b)
        return -rest if a < 0 else rest
    return math.fmod(a, b) if b and math.isfinite(a) else math.nan


def _pow(a: Number, b: Number) -> Number:
    """Returns a ** b as in C. For integers, a negative b yields 0 unless a is 1 or -1."""
    if isinstance(a, int) and isinstance(b, int):
        if abs(a) > 1 and b * math.log2(abs(a)) > 64:
            raise OverflowError(f"{a} ** {b} needs more than 64 bits")
        return a**b if b >= 0 else 0 if abs(a) != 1 else a ** (b & 1)
    try:
        return math.pow(a, b)
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf
    except ValueError:
        # 0 to a negative power is infinite; a negative base has no fractional power.
        return math.copysign(math.inf, a if b % 2 == 1 else 1) if a == 0 else math.nan


def _floor_div(a: Number, b: Number) -> Number:
    return a // b


def _ceil_div(a: Number, b: Number) -> Number:
    return -(-int(a) // int(b))


def _and(a: Number, b: Number) -> Number:
    return bool(a) and bool(b)


def _or(a: Number, b: Number) -> Number:
    return bool(a) or bool(b)


def _bit_and(a: Number, b: Number) -> Number:
    return int(a) & int(b)


def _bit_or(a: Number, b: Number) -> Number:
    return int(a) | int(b)


def _bit_xor(a: Number, b: Number) -> Number:
    return int(a) ^ int(b)


def _bit_not(a: Number) -> Number:
    return ~int(a)


def _shift_left(a: Number, count: Number) -> Number:
    """Returns the low 64 bits of `a << count`, as a signed integer.

    For a count outside [0, 64), returns 0.
    """
    half = 1 << 63
    return ((int(a) << int(count)) + half) % (2 * half) - half if 0 <= count < 64 else 0


def _shift_right(a: Number, count: Number) -> Number:
    """Returns `a >> count`. For a count outside [0, 64), returns -1 if a is negative, else 0."""
    return int(a) >> (int(count) if 0 <= count < 64 else 63)


def _sqrt(a: Number) -> Number:
    return math.sqrt(a) if a >= 0 else math.nan


def _rsqrt(a: Number) -> Number:
    return _c_div(1.0, _sqrt(a))


def _exp(a: Number) -> Number:
    try:
        return math.exp(a)
    except OverflowError:
        return math.inf


def _log(a: Number) -> Number:
    return math.log(a) if a > 0 else -math.inf if a == 0 else math.nan


def _reciprocal(a: Number) -> Number:
    return _c_div(1.0, a)


def _minimum(a: Number, b: Number) -> Number:
    """Returns the smaller number, or NaN if one of the numbers is NaN, as in torch."""
    return a if a < b or a != a else b


def _maximum(a: Number, b: Number) -> Number:
    return a if a > b or a != a else b


def _where(cond: Number, a: Number, b: Number) -> Number:
    return a if cond else b


_ALGEBRA: dict[str, Callable[..., Number]] = {  # pyright: ignore[reportAssignmentType]
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _c_div,
    "%": _c_mod,
    "floorDiv": _floor_div,
    "floorMod": operator.mod,
    "ceilDiv": _ceil_div,
    "min": _minimum,
    "max": _maximum,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": _and,
    "||": _or,
    "!": operator.not_,
    "&": _bit_and,
    "|": _bit_or,
    "^": _bit_xor,
    "~": _bit_not,
    "<<": _shift_left,
    ">>": _shift_right,
    "neg": operator.neg,
    "abs": abs,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "exp": _exp,
    "log": _log,
    "reciprocal": _reciprocal,
    "pow": _pow,
    "where": _where,
}

# Ops that Python computes on complex numbers as torch does.
_AS_PYTHON = frozenset("+ - == != && || ! neg where".split())


def _or_complex(
    of_real: Callable[..., Number], of_any: Callable[..., Number]
) -> Callable[..., Any]:
    """Returns a function that calls `of_any` if some argument is complex, else `of_real`."""

    def compute(*values: Number) -> Number:
        is_complex = any(isinstance(v, complex) for v in values)
        return of_any(*values) if is_complex else of_real(*values)

    return compute


def _compute() -> dict[str, Callable[..., Number]]:
    of_tensors = {
        name: (fn, row.takes_complex)
        for row in POINTWISE.values()
        for name, fn in row.scalar_ops.items()
    }
    found: dict[str, Callable[..., Number]] = {name: fn for name, (fn, _) in of_tensors.items()}
    for name, fn in _ALGEBRA.items():
        by_torch, takes_complex = of_tensors.get(name, (fn, False))
        is_plain = not takes_complex or name in _AS_PYTHON
        found[name] = fn if is_plain else _or_complex(fn, by_torch)
    return found


COMPUTE: dict[str, Callable[..., Number]] = _compute()
ARITY = dict.fromkeys(_ALGEBRA, 2) | {
    op: row.arity for row in POINTWISE.values() for op in row.scalar_ops
}
# The ops that accept complex numbers, and those whose result has the dtype of the operand's parts.
COMPLEX_OPS = frozenset(row.scalar for row in POINTWISE.values() if row.takes_complex)
PART_OPS = frozenset(row.scalar for row in POINTWISE.values() if row.rule == "part")
# The ops whose result is Bool.
BOOL_OPS = frozenset(row.scalar for row in POINTWISE.values() if row.rule in TESTS)
