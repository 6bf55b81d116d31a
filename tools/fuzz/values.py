"""Values with error bounds: float64 values (exact integers and Bool), with a bound per element.

A bound of 0 means exact. A bound of inf means unknown: the element is not compared, and values
computed from it are unknown too. An elementwise function is evaluated at the corners of its
operands' intervals. This gives the exact bound where it is monotone in each operand, and shows
every jump.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tools.fuzz.table import DTYPES, FLOAT8, HALF, PARTS, Fn

Tensor = torch.Tensor
INF = float("inf")


class InvalidProgram(Exception):
    """Raised when a program is not valid for its inputs: shapes or dtypes do not fit."""


@dataclass(frozen=True)
class Val:
    """A tensor value: `ref` is float64, complex128, int64 or bool, `bound` is float64 of the same
    shape.

    The bound of a complex number is a distance in the plane.
    """

    ref: Tensor
    bound: Tensor
    dtype: str

    @property
    def is_exact(self) -> bool:
        """Whether all bounds are 0."""
        return not bool(self.bound.any())

    def view(self, fn: Fn) -> Val:
        """Rearranges the elements."""
        return Val(fn(self.ref), fn(self.bound), self.dtype)


@dataclass(frozen=True)
class Num:
    """A scalar value."""

    value: int | float | complex | bool
    dtype: str


def exact(ref: Tensor, dtype: str) -> Val:
    """Returns a value whose bounds are 0."""
    return Val(ref, torch.zeros(ref.shape, dtype=torch.float64), dtype)


def wide(x: Tensor) -> Tensor:
    """Returns the tensor as float64, complex128, int64 or bool."""
    if x.dtype is torch.bool:
        return x
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.dtype.is_floating_point else x.long()


def size_of(x: Tensor) -> Tensor:
    """Returns absolute values in float64."""
    return (x.double() if x.dtype is torch.bool else x.abs()).double()


def nonnan(bound: Tensor) -> Tensor:
    """Returns bounds with inf in place of NaN."""
    return torch.nan_to_num(bound, nan=INF, posinf=INF)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Returns |a - b|: 0 where both are NaN or the same infinity, inf where only one is."""
    if a.dtype is torch.bool:
        return (a != b).double()
    gap = (a - b).abs().double()
    same = (a == b) | ((a != a) & (b != b))
    return torch.where(same, torch.zeros_like(gap), nonnan(gap))


def corners(fn: Fn, vals: Sequence[Val]) -> tuple[Tensor, Tensor]:
    """Returns `fn` of the reference values, and its largest deviation within the operands'
    bounds.
    """
    xs = [v.ref for v in vals]
    out = fn(*xs)
    deviation = torch.zeros(out.shape, dtype=torch.float64)
    choices: list[list[Tensor]] = []
    for v in vals:
        if v.is_exact:
            choices.append([v.ref])
        elif v.ref.dtype is torch.bool:
            choices.append([v.ref, torch.where(v.bound > 0, ~v.ref, v.ref)])
        else:
            is_whole = not (v.ref.is_floating_point() or v.ref.is_complex())
            e = v.bound.clamp(max=2.0**40).long() if is_whole else v.bound
            choices.append([v.ref, v.ref - e, v.ref + e])
            if v.ref.is_complex():
                choices[-1] += [v.ref - 1j * e, v.ref + 1j * e]
    for combination in itertools.islice(itertools.product(*choices), 1, None):
        deviation = torch.maximum(deviation, difference(fn(*combination), out))
    for v in vals:
        if torch.isinf(v.bound).any():
            deviation = torch.where(torch.isinf(v.bound), INF, deviation)
    return out, nonnan(deviation)


# ------------------------------------------------------------------ rounding
# The number of ranks of the program: each may round its part of a sum to the result's dtype.
RANKS: ContextVar[int] = ContextVar("RANKS", default=1)


def round_to(x: Tensor, dtype: str) -> Tensor:
    """Rounds as the hardware does. NaN is kept, because torch's own conversion sets its sign."""
    return torch.where(torch.isnan(x), x, x.to(DTYPES[dtype].torch).to(x.dtype))


def stored(ref: Tensor, bound: Tensor, dtype: str) -> Val:
    """Rounds to a floating dtype: exact values exactly, others with half a unit of additional
    error.
    """
    if dtype in FLOAT8:
        return _of_few(ref, bound, dtype)
    facts = DTYPES[dtype]
    rounded = round_to(ref, dtype)
    loose = bound + facts.eps * (ref.abs() + bound) + facts.tiny * facts.eps
    limit = facts.largest * (1 - 4 * facts.eps)
    near = torch.isfinite(ref) & ((ref.abs() + loose) > limit)
    new = torch.where(bound == 0, torch.zeros_like(bound), nonnan(loose))
    new = torch.where(torch.isinf(ref) | torch.isnan(ref), bound, new)
    return Val(
        torch.where(bound == 0, rounded, ref), torch.where(near & (bound > 0), INF, new), dtype
    )


def _of_few(ref: Tensor, bound: Tensor, dtype: str) -> Val:
    """Rounds to a dtype with few values: the bound covers the rounded ends of the interval."""
    low, high = ref - bound, ref + bound
    if dtype == "Float8_e8m0fnu":
        # The dtype has no sign: the result is the power of two next to the absolute value.
        low, high = (ref.abs() - bound).clamp(min=0), ref.abs() + bound
    rounded, *ends = (round_to(x, dtype) for x in (ref, low, high))
    off = torch.maximum(*(difference(end, rounded) for end in ends))
    # An uncertain infinity may be any number.
    is_lost = torch.isinf(bound) | (torch.isinf(ref) & (bound > 0))
    return Val(rounded, torch.where(is_lost, INF, torch.where(bound == 0, 0.0, off)), dtype)


def computed(
    ref: Tensor,
    bound: Tensor,
    dtype: str,
    ulps: float,
    scale: Tensor | None,
    operands: Sequence[Tensor] = (),
) -> Val:
    """Adds the error of one floating operation in `dtype`, of `ulps` units in the last place.

    An operation with correct rounding (at most 2 units in this function) is exact if its operands
    are exact and its result is representable.
    """
    facts = DTYPES[dtype]
    if not ulps:
        return overflow(Val(ref, bound, dtype))
    size = ref.abs() if scale is None else torch.maximum(ref.abs(), scale.abs())
    unit = facts.eps * (size + bound) + facts.tiny * (facts.eps if ulps < 4 else 1)
    new = bound + ulps * unit
    if ulps <= 2:
        # A Double result is also rounded in float64. It counts as exact if it and its operands have
        # few digits.
        digits = {"Double": "Float", "ComplexDouble": "ComplexFloat"}.get(dtype, dtype)
        is_exact = bound == 0
        for x in (ref, *operands):
            is_exact = is_exact & (round_to(x, digits) == x)
        new = torch.where(is_exact, torch.zeros_like(new), new)
    new = torch.where(torch.isinf(ref) | torch.isnan(ref), bound, new)
    return overflow(Val(ref, nonnan(new), dtype))


def overflow(v: Val) -> Val:
    """Marks values as unknown that are finite in float64 but too large for the dtype."""
    facts = DTYPES[v.dtype]
    if facts.category == "bool":
        return v
    size = size_of(v.ref)
    beyond = torch.isfinite(size) & (size + v.bound > facts.largest * 0.999)
    return Val(v.ref, torch.where(beyond, INF, v.bound), v.dtype) if beyond.any() else v


def cast(v: Val, dtype: str) -> Val:
    """Converts as C does: to integers by truncation, to Bool by comparison with 0."""
    if v.dtype == dtype:
        return v
    src, dst = DTYPES[v.dtype].category, DTYPES[dtype].category
    if dst == "bool":
        out, dev = corners(lambda x: x != 0, [v])
        inside = (v.bound > 0) & (size_of(v.ref) <= v.bound)
        return Val(out, torch.where(inside, 1.0, dev), dtype)
    if dst == "complex":
        return stored(v.ref.to(torch.complex128), v.bound, dtype)
    if src == "complex":
        return cast(Val(v.ref.real.clone(), v.bound, PARTS[v.dtype]), dtype)
    if dst == "float":
        widened = Val(v.ref.double(), v.bound, dtype)
        return stored(widened.ref, widened.bound, dtype)
    if src == "float":
        safe = torch.nan_to_num(v.ref, nan=0.0, posinf=0.0, neginf=0.0)
        lost = ~torch.isfinite(v.ref) | (v.ref.abs() > 2.0**53)
        out, dev = corners(torch.trunc, [Val(torch.where(lost, 0.0, safe), v.bound, v.dtype)])
        return overflow(Val(out.long(), torch.where(lost, INF, dev), dtype))
    return overflow(Val(v.ref.long(), v.bound, dtype))


def accumulated(total: Tensor, bound: Tensor, sizes: Tensor, n: int, dtype: str) -> Val:
    """Adds the error of summing `n` numbers in any order; `sizes` is the sum of their absolute
    values.

    Rounding errors of a sum behave like random numbers: they grow with the root of the count.
    """
    facts = DTYPES["Float" if dtype in HALF else dtype]
    depth = min(n, 16 + 6 * n**0.5)
    if RANKS.get() > 1 and dtype in HALF:
        bound = bound + DTYPES[dtype].eps * sizes
    return overflow(
        Val(total, nonnan(bound + depth * facts.eps * sizes + facts.tiny * (sizes > 0)), dtype)
    )
