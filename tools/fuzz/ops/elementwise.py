"""The oracle's elementwise ops: dtype rules, values, bounds.

It uses nothing of the code under test: dtype rules and meanings are written again in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.fuzz.table import DTYPES, FLOAT8, HALF, PARTS, ROWS, SHIFTS, Row
from tools.fuzz.values import (
    INF,
    Num,
    Val,
    cast,
    computed,
    corners,
    exact,
    nonnan,
    overflow,
    size_of,
    stored,
)

Tensor = torch.Tensor


# ------------------------------------------------------------------ dtypes
def category(dtype: str) -> str:
    """Returns the category of a dtype: bool, int, float or complex."""
    return DTYPES[dtype].category


def is_inexact(dtype: str) -> bool:
    """Whether a dtype is floating or complex."""
    return category(dtype) in ("float", "complex")


_COMPLEX = {part: dtype for dtype, part in PARTS.items()}
_ORDER = {"bool": 0, "int": 1, "float": 2, "complex": 3}
_NAME = {f.torch: n for n, f in DTYPES.items()}
# The dtype that torch gives a Python number without a tensor of its category.
_OF_NUMBER = {
    name: _NAME[torch.result_type(torch.empty((), dtype=torch.bool), number)]
    for name, number in {"Double": 0.5, "Float": 0.5, "ComplexDouble": 2j}.items()
}


def _promote_pair(a: str, b: str) -> str:
    if "complex" in (category(a), category(b)):
        a, b = ("Float" if x in FLOAT8 else x for x in (a, b))
    elif a != b and (a in FLOAT8 or b in FLOAT8):
        # torch has no promotion here: with another float it is that, at least Float.
        floats = [d for d in (a, b) if category(d) == "float"]
        return floats[0] if len(floats) == 1 else "Double" if "Double" in floats else "Float"
    return _NAME[torch.promote_types(DTYPES[a].torch, DTYPES[b].torch)]


def common_dtype(operands: Sequence[Val | Num]) -> str:
    """Returns the promoted dtype of operands.

    Tensors take precedence over 0-d tensors, which take precedence over scalars. A lower class
    counts only if its category is higher.
    """
    ranks: list[list[str]] = [[], [], []]
    for v in operands:
        if isinstance(v, Num):
            ranks[2].append(_OF_NUMBER.get(v.dtype, v.dtype))
        else:
            ranks[int(v.ref.ndim == 0)].append(v.dtype)
    found = {d for r in ranks for d in r}
    if len(found) == 1:
        return found.pop()
    result: str | None = None
    for members in reversed(ranks):
        if not members:
            continue
        own = members[0]
        for m in members[1:]:
            own = _promote_pair(own, m)
        if result is None:
            result = own
        elif category(result) == "complex" and category(own) == "float":
            result = _COMPLEX.get(own, "ComplexFloat")
        elif _ORDER[category(own)] < _ORDER[category(result)]:
            result = _promote_pair(own, result)
        else:
            result = own
    assert result is not None
    return result


def typed(row: Row, operands: Sequence[Val | Num]) -> tuple[str, str]:
    """Returns (dtype of the computation, dtype of the result)."""
    counted = operands[1:] if row.rule == "select" else operands
    first = operands[0].dtype
    if row.rule == "limits":
        promoted = common_dtype(operands)
        dtype = promoted if _ORDER[category(promoted)] > _ORDER[category(first)] else first
        return ("Float" if dtype in HALF else dtype), dtype
    if row.rule in ("keep", "fitting", "test"):
        return ("Float" if first in HALF else first), ("Bool" if row.rule == "test" else first)
    if row.rule == "part":
        return ("Float" if first in HALF else first), PARTS.get(first, first)
    if row.rule == "parts":
        return first, _COMPLEX[first]
    if row.rule == "bool":
        return "Bool", "Bool"
    dtype = common_dtype(counted)
    if row.rule == "float" and not is_inexact(dtype):
        dtype = "Float"
    compute = "Float" if dtype in HALF else dtype
    if row.rule == "comparison":
        return compute, "Bool"
    return compute, dtype if row.rule == "select" else compute


def operand_in(v: Val | Num, dtype: str) -> Val:
    """Returns the value of an operand in a computation in `dtype`."""
    if isinstance(v, Val):
        return cast(v, dtype)
    if is_inexact(dtype):
        is_complex = category(dtype) == "complex"
        real = v.value if is_complex or not isinstance(v.value, complex) else v.value.real
        ref = torch.tensor(real, dtype=torch.complex128 if is_complex else torch.float64)
        bound = (ref.to(DTYPES[dtype].torch).to(ref.dtype) - ref).abs()
        return Val(ref, torch.nan_to_num(bound), dtype)
    if category(dtype) == "bool":
        return exact(torch.tensor(bool(v.value)), dtype)
    assert not isinstance(v.value, complex)
    return exact(torch.tensor(int(v.value)), dtype)


# ------------------------------------------------------------------ elementwise
def pointwise(name: str, operands: Sequence[Val | Num]) -> Val:
    """Returns the result of one elementwise op of the table."""
    row = ROWS[name]
    compute, result = typed(row, operands)
    vals = [operand_in(v, compute) for v in operands]
    if row.rule == "select":
        vals[0] = operand_in(operands[0], "Bool")
        return _where(vals, result)
    if not is_inexact(compute):
        return _integers(row, vals, compute, result)
    if "complex" in (category(compute), category(result)):
        return _complex(row, vals, compute, result)
    ref, bound = corners(row.fn, vals)
    if row.rule in ("test", "comparison", "bool"):
        if row.rule == "comparison":
            a, b = vals
            near = ((a.ref - b.ref).abs() <= a.bound + b.bound) & (a.bound + b.bound > 0)
            bound = torch.where(near, 1.0, bound)
        return _zero_signs(row, vals, Val(ref, bound, "Bool"))
    bound = torch.where(_turns(name, vals), INF, bound)
    scale = None if row.scale is None else row.scale(*(v.ref for v in vals)).abs()
    factors = [v.ref for v in vals]
    if row.name in ("div", "truediv"):
        # A kernel may compute the reciprocal of a common divisor once, and multiply by it.
        factors.append(vals[1].ref.reciprocal())
    out = computed(ref, bound, compute, row.ulps, scale, factors)
    out = _zero_signs(row, vals, out)
    return stored(out.ref, out.bound, result) if result in HALF else out


# Errors of complex ops, in units of the last place: products of rounded parts, and functions whose
# reference has no more digits than the values it checks.
_COMPLEX_ULPS = {"add": 1, "sub": 1, "abs": 4, "mul": 8, "div": 16, "truediv": 16, "lerp": 32}
_COMPLEX_ULPS |= dict.fromkeys(("neg", "real", "imag", "complex"), 0)
_COMPLEX_ULPS |= dict.fromkeys(("pow", "sigmoid", "silu"), 4096)
# Points where a complex function is infinite or jumps: for a divisor, or a base.
_POLES: dict[str, tuple[complex, ...]] = {
    **dict.fromkeys("div truediv reciprocal rsqrt pow log log2 log10".split(), (0.0,)),
    "log1p": (-1.0,),
    "atan": (1j, -1j),
    "atanh": (1.0, -1.0),
}
_CUT = "sqrt rsqrt log log2 log10 log1p asin acos asinh acosh atan atanh pow".split()


def _complex(row: Row, vals: list[Val], compute: str, result: str) -> Val:
    """Returns the result of an op on complex numbers, or on the parts of one."""
    ref, bound = corners(row.fn, vals)
    if row.rule == "comparison":
        a, b = vals
        near = ((a.ref - b.ref).abs() <= a.bound + b.bound) & (a.bound + b.bound > 0)
        return Val(ref, torch.where(near, 1.0, bound), "Bool")
    if row.rule == "test":
        (v,) = vals
        is_near = (v.bound > 0) & (v.ref.imag.abs() <= v.bound) & (row.name == "isreal")
        return Val(ref, torch.where(is_near, 1.0, bound), "Bool")
    odd = torch.zeros(ref.shape, dtype=torch.bool)
    for v in vals:
        if row.rule not in ("part", "parts"):
            # torch multiplies a summand by 1 + 0i, and has its own order of parts.
            odd = odd | ~torch.isfinite(v.ref)
        if row.rule == "float" or row.name in ("pow", "div"):
            # The derivative may be anything between the corners.
            odd = odd | (v.bound > 1e-2)
        if row.name in _CUT:
            # It is undefined on which side of a branch cut a zero is.
            odd = odd | (v.ref.real == 0) | (v.ref.imag == 0)
    at = vals[0] if row.name == "pow" else vals[-1]
    for pole in _POLES.get(row.name, ()):
        odd = odd | (size_of(at.ref - pole) <= at.bound)
    scale = None if row.scale is None else row.scale(*(v.ref for v in vals)).abs()
    ulps = _COMPLEX_ULPS.get(row.name, 64)
    slack = 2.0 if row.rule == "float" else 1.0
    out = computed(ref, slack * bound, result, ulps, scale, [v.ref for v in vals])
    if row.rule not in ("part", "parts"):
        odd = odd | ~torch.isfinite(ref)
    return overflow(Val(out.ref, torch.where(odd, INF, out.bound), result))


def _turns(name: str, vals: Sequence[Val]) -> Tensor:
    """Whether a function jumps or turns within its operands' bounds, where its corners give no
    bound.
    """
    turns = torch.zeros((), dtype=torch.bool)
    for side in _SIDES.get(name, ()):
        turns = turns | (corners(side, vals)[1] > 0)
    if name in ("sin", "cos", "tan", "lgamma"):
        turns = turns | (vals[0].bound > 0.25)
    return turns


def _divisor(*xs: Tensor) -> Tensor:
    return xs[-1].sign()


# Functions that return the side of a jump or pole. A divisor that may be 0 can produce any value,
# also NaN, however large the reference quotient is. The same holds for a number that is 0 in its
# own dtype but not in float64.
_SIDES: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "frac": (torch.trunc,),
    "tan": (lambda x: x.cos().sign(),),
    "lgamma": (lambda x: x.clamp(max=0.5).floor(),),
    "reciprocal": (_divisor,),
    "div": (_divisor,),
    "truediv": (_divisor,),
    "mod": (_divisor, lambda a, b: torch.trunc(a / b)),
    "fmod": (_divisor, lambda a, b: torch.trunc(a / b)),
    "remainder": (_divisor, lambda a, b: torch.floor(a / b)),
    "atan2": (lambda a, b: torch.where(b < 0, a.sign(), 0.0),),
    "pow": (lambda a, b: torch.where(b <= 0, a.sign(), 0.0),),
    "threshold": (lambda x, t, v: (x <= t).double(),),
}


def _zero_signs(row: Row, vals: Sequence[Val], out: Val) -> Val:
    """Marks results as unknown that depend on the sign of a zero or a NaN, which no op
    defines.
    """
    if not row.zero_sign:
        return out
    x = (vals[-1] if row.name not in ("atan2", "pow") else vals[0]).ref
    at_zero = (x == 0) | x.isnan()
    if row.name == "atan2":
        at_zero = at_zero | (vals[1].ref == 0)
    at_zero = at_zero.expand(out.ref.shape)
    return Val(out.ref, torch.where(at_zero, INF, out.bound), out.dtype)


def _where(vals: Sequence[Val], dtype: str) -> Val:
    cond, a, b = vals
    if dtype in HALF:
        a, b = (stored(v.ref, v.bound, dtype) for v in (a, b))
    ref = torch.where(cond.ref, a.ref, b.ref)
    bound = torch.where(cond.ref, a.bound, b.bound)
    if not cond.is_exact:
        other = nonnan(size_of(_number(a.ref) - _number(b.ref)))
        both = other + torch.maximum(*torch.broadcast_tensors(a.bound, b.bound))
        bound = torch.where(cond.bound > 0, both, bound)
    return Val(ref, bound, dtype)


def _number(x: Tensor) -> Tensor:
    return x if x.is_complex() else x.double()


_INT_GROWING = ("add", "sub", "mul", "neg", "pow", "bitwise_left_shift")
BOOL_FN: dict[str, Callable[..., Tensor]] = {
    "add": torch.logical_or,
    "mul": torch.logical_and,
    "maximum": torch.logical_or,
    "minimum": torch.logical_and,
    "bitwise_not": torch.logical_not,
    "bitwise_and": torch.logical_and,
    "bitwise_or": torch.logical_or,
    "bitwise_xor": torch.logical_xor,
    "real": lambda x: x,
}


def _integers(row: Row, vals: list[Val], compute: str, result: str) -> Val:
    fn = row.int_fn or row.fn
    known = torch.ones((), dtype=torch.bool)
    if compute == "Bool":
        fn = BOOL_FN.get(row.name, fn)
    elif row.name in ("div", "mod", "fmod", "remainder"):
        known = vals[1].ref != 0
        vals[1] = Val(torch.where(known, vals[1].ref, 1), vals[1].bound, compute)
    elif row.name == "pow":
        known = (vals[1].ref >= 0) & (vals[1].ref < 64)
        vals[1] = Val(torch.where(known, vals[1].ref, 1), vals[1].bound, compute)
    elif row.name in SHIFTS:
        width = 32 if compute == "Int32" else 64
        known = (vals[1].ref >= 0) & (vals[1].ref < width)
        vals[1] = Val(torch.where(known, vals[1].ref, 0), vals[1].bound, compute)
        if row.name == "logical_right_shift":
            fn = lambda a, n: row.fn(a, n, width)  # noqa: E731
    ref, bound = corners(fn, vals)
    for v in vals:
        bound = torch.where(v.bound > 0, INF, bound) if result != "Bool" else bound
    if row.rule in ("comparison", "test", "bool"):
        if row.rule == "comparison" and compute != "Bool":
            a, b = vals
            near = ((a.ref - b.ref).abs() <= a.bound + b.bound) & (a.bound + b.bound > 0)
            bound = torch.where(near, 1.0, bound)
        return Val(ref, bound, "Bool")
    if row.name in _INT_GROWING and compute != "Bool":
        bound = torch.where(_estimate(row.name, vals) > DTYPES[compute].largest, INF, bound)
    bound = torch.where(known, bound, INF)
    return Val(ref if compute == "Bool" else ref.long(), bound, result)


def _estimate(name: str, vals: Sequence[Val]) -> Tensor:
    xs = [v.ref.double() for v in vals]
    if name == "bitwise_left_shift":
        return xs[0].abs() * torch.exp2(xs[1])
    return nonnan(ROWS[name].fn(*xs).abs())


# ------------------------------------------------------------------ scalars
def scalar_op(name: str, values: Sequence[Num]) -> Num:
    """Returns the result of an op on scalars: integers divide with truncation, `mod` is C's
    `%`.
    """
    xs: list[Any] = [v.value for v in values]
    is_float = any(v.dtype in ("Double", "Float") for v in values)
    if name == "div" and not is_float:
        q = abs(int(xs[0])) // abs(int(xs[1]))
        return Num(q if (xs[0] >= 0) == (xs[1] >= 0) else -q, "Int")
    if name == "mod" and not is_float:
        return Num(int(math.fmod(xs[0], xs[1])), "Int")
    table: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "mod": math.fmod,
        "neg": lambda a: -a,
        "abs": abs,
        "maximum": max,
        "minimum": min,
    }
    value = table[name](*xs)
    return Num(float(value), "Double") if is_float else Num(int(value), "Int")


SCALAR_OPS = ("add", "sub", "mul", "div", "mod", "neg", "abs", "maximum", "minimum")


def addcmul(a: Val | Num, b: Val | Num, c: Val | Num, value: Val | Num) -> Val:
    """Returns a + b * c * value."""
    product = pointwise("mul", [pointwise("mul", [b, c]), value])
    return pointwise("add", [a, product])


def clamp(x: Val, low: Any, high: Any) -> Val:
    """Returns x limited to the range from `low` to `high`, each of which may be None."""
    ends: list[Val | Num] = []
    for limit, sign in ((low, -1), (high, 1)):
        if limit is not None:
            ends.append(limit if isinstance(limit, Num) else as_num(limit))
        elif category(x.dtype) == "float":
            ends.append(Num(sign * INF, "Double"))
        else:
            info = torch.iinfo(DTYPES[x.dtype].torch)
            ends.append(Num(info.max if sign > 0 else info.min, "Int"))
    return pointwise("clamp", [x, *ends])


def as_num(value: int | float | complex | bool) -> Num:
    """Returns a Python number as a scalar value."""
    if isinstance(value, bool):
        return Num(value, "Bool")
    if isinstance(value, complex):
        return Num(value, "ComplexDouble")
    return Num(value, "Int" if isinstance(value, int) else "Double")
