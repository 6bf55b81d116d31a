"""The elementwise ops in torch's terms, for the oracle and the generator.

Written from the documentation of the ops, not from the product's table, so that an error there is
not repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Fn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class DtypeFacts:
    """The facts of a dtype.

    These are: torch's dtype, category, distance from 1 to the next value, largest value, smallest
    normal value.
    """

    torch: torch.dtype
    category: str
    eps: float = 0.0
    largest: float = math.inf
    tiny: float = 0.0


def _inexact(dtype: torch.dtype, category: str = "float") -> DtypeFacts:
    info = torch.finfo(dtype)
    return DtypeFacts(dtype, category, info.eps, info.max, info.tiny)


DTYPES: dict[str, DtypeFacts] = {
    "Double": _inexact(torch.float64),
    "Float": _inexact(torch.float32),
    "Half": _inexact(torch.float16),
    "BFloat16": _inexact(torch.bfloat16),
    "Float8_e4m3fn": _inexact(torch.float8_e4m3fn),
    "Float8_e5m2": _inexact(torch.float8_e5m2),
    "Float8_e8m0fnu": _inexact(torch.float8_e8m0fnu),
    "Int32": DtypeFacts(torch.int32, "int", largest=2.0**31 - 1),
    # The dtype of welford's count: stored like Int, but a different dtype to `cat`.
    "Index": DtypeFacts(torch.int64, "int", largest=2.0**62),
    "Int": DtypeFacts(torch.int64, "int", largest=2.0**62),
    "Bool": DtypeFacts(torch.bool, "bool"),
    "ComplexFloat": _inexact(torch.complex64, "complex"),
    "ComplexDouble": _inexact(torch.complex128, "complex"),
    # Seeds: stored, but not computed with.
    "UInt64": DtypeFacts(torch.uint64, "int", largest=2.0**63),
}
FLOAT8 = ("Float8_e4m3fn", "Float8_e5m2", "Float8_e8m0fnu")
# Computed in Float.
HALF = ("Half", "BFloat16", *FLOAT8)
PARTS = {"ComplexFloat": "Float", "ComplexDouble": "Double"}


@dataclass(frozen=True)
class Row:
    """One elementwise op.

    - `rule`: the dtype rule (see `ops.elementwise.typed`).
    - `dtypes`: the dtypes that the generator draws: any of "f" (floating), "w" (only Float and
      Double), "i", "b", "c" (complex).
    - `ulps`: the error of the operation itself, in units of the last place of the result.
    - `scale`: a larger value whose units count where the result is small beside it.
    - `zero_sign`: the result depends on the sign of a zero operand.
    - `int_fn`: the function for integers, if it differs.
    """

    name: str
    arity: int
    rule: str
    fn: Fn
    dtypes: str = "f"
    ulps: float = 0.0
    scale: Fn | None = None
    zero_sign: bool = False
    int_fn: Fn | None = None


def _trunc_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    return -torch.special.ndtri(x / 2) / math.sqrt(2)


def _frac(x: torch.Tensor) -> torch.Tensor:
    return x - torch.trunc(x)


def _sign(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _logical_shift(a: torch.Tensor, n: torch.Tensor, width: int) -> torch.Tensor:
    low = a & (2**32 - 1) if width == 32 else a
    shifted = torch.where(n == 0, low, (low >> 1) & (2**63 - 1))
    out = torch.where(n == 0, low, shifted >> (n - 1).clamp(min=0))
    if width == 32:
        out = torch.where(out >= 2**31, out - 2**32, out)
    return out


def _largest(*xs: torch.Tensor) -> torch.Tensor:
    out = xs[0].abs()
    for x in xs[1:]:
        out = torch.maximum(*torch.broadcast_tensors(out, x.abs()))
    return out


def _one(*xs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(xs[0])


_LOSSY = """
    acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log1p
    log2 reciprocal rsqrt sqrt sigmoid
"""


def _rows() -> list[Row]:
    rows = [
        Row(n, 1, "float", getattr(torch, n), "fic", 16, None, n in ("reciprocal", "rsqrt"))
        for n in _LOSSY.split()
    ]
    rows += [Row(n, 1, "float", getattr(torch, n), "fi", 16) for n in ("erf", "erfc", "erfinv")]
    rows += [
        Row("erfcinv", 1, "float", _erfcinv, "f", 16, _one),
        Row("lgamma", 1, "float", torch.lgamma, "fi", 16, lambda x: x.abs() + 1),
        Row("neg", 1, "default", torch.neg, "fic"),
        Row("abs", 1, "part", torch.abs, "fic", 1),
        *(
            Row(n, 1, "keep", getattr(torch, n), "fi")
            for n in ("ceil", "floor", "round", "trunc", "relu")
        ),
        Row("frac", 1, "keep", _frac, "f", 1),
        Row("sign", 1, "keep", _sign, "fi"),
        Row("silu", 1, "keep", torch.nn.functional.silu, "fc", 24),
        Row("real", 1, "part", lambda x: x.real.clone() if x.is_complex() else x, "fibc"),
        Row("imag", 1, "part", lambda x: x.imag.clone(), "c"),
        Row("complex", 2, "parts", torch.complex, "w"),
        *(
            Row(n, 1, "test", getattr(torch, n), "fibc")
            for n in ("isfinite", "isinf", "isnan", "isreal")
        ),
        *(Row(n, 1, "test", getattr(torch, n), "fib") for n in ("isneginf", "isposinf")),
        Row("signbit", 1, "test", torch.signbit, "fi", zero_sign=True),
        Row("logical_not", 1, "bool", torch.logical_not, "fibc"),
        Row("bitwise_not", 1, "int", torch.bitwise_not, "ib"),
        Row("add", 2, "default", torch.add, "fibc", 1),
        Row("sub", 2, "default", torch.sub, "fic", 1),
        Row("mul", 2, "default", torch.mul, "fibc", 1),
        Row("div", 2, "default", torch.div, "fic", 2, None, True, _trunc_div),
        Row("truediv", 2, "float", torch.div, "fic", 2, None, True),
        Row("atan2", 2, "float", torch.atan2, "fi", 16, None, True),
        Row("mod", 2, "default", torch.fmod, "fi", 2, lambda a, b: b),
        Row("fmod", 2, "default", torch.fmod, "fi", 2, lambda a, b: b),
        Row("remainder", 2, "default", torch.remainder, "fi", 2, lambda a, b: b),
        Row("pow", 2, "default", torch.pow, "fic", 32, None, True),
        Row("maximum", 2, "default", torch.maximum, "fib"),
        Row("minimum", 2, "default", torch.minimum, "fib"),
        *(Row(n, 2, "comparison", getattr(torch, n), "fib") for n in ("lt", "le", "gt", "ge")),
        *(Row(n, 2, "comparison", getattr(torch, n), "fibc") for n in ("eq", "ne")),
        *(Row(n, 2, "bool", getattr(torch, n), "fibc") for n in ("logical_and", "logical_or")),
        *(
            Row(n, 2, "int", getattr(torch, n), "ib")
            for n in ("bitwise_and", "bitwise_or", "bitwise_xor")
        ),
        Row("bitwise_left_shift", 2, "int", torch.bitwise_left_shift, "i"),
        Row("bitwise_right_shift", 2, "int", torch.bitwise_right_shift, "i"),
        Row("logical_right_shift", 2, "int", _logical_shift, "i"),
        Row("gcd", 2, "int", torch.gcd, "i"),
        Row("nextafter", 2, "float", torch.nextafter, "f", 2),
        Row("where", 3, "select", torch.where, "fibc"),
        Row("lerp", 3, "default", _lerp, "fc", 4, _lerp_scale),
        Row("clamp", 3, "limits", _clamp, "fi"),
        Row("threshold", 3, "fitting", lambda x, t, v: torch.where(x <= t, v, x), "fi"),
    ]
    return rows


def _lerp(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.lerp(*torch.broadcast_tensors(a, b, w))


def _lerp_scale(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a.abs() + (a.abs() + b.abs()) * (1 + w.abs())


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "logical_right_shift")
