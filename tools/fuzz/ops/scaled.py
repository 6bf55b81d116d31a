"""Scaled products of 8-bit floats: the generators' statements, and their meaning for the
oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tools.fuzz.ops.lookups import MakeInput
from tools.fuzz.ops.reductions import matmul
from tools.fuzz.program import Arg, Dt, Ref
from tools.fuzz.values import (
    Num,
    Val,
    cast,
    computed,
    corners,
    stored,
)

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
FACTORS = ("Float8_e4m3fn", "Float8_e5m2")


# ------------------------------------------------------------------ the oracle
def scaled_mm(
    a: Val, b: Val, scale1: Val, scale2: Val, dtype: str = "BFloat16", **more: Val
) -> list[Val | Num]:
    """Returns a product with scales, and two empty results."""
    none = Num(False, "Bool")
    return [product(a, b, scale1, scale2, dtype=dtype, **more), none, none]


def product(
    a: Val,
    b: Val,
    scale1: Val,
    scale2: Val,
    alpha: Val | None = None,
    bias: Val | None = None,
    beta: Val | None = None,
    *,
    dtype: str,
) -> Val:
    """Multiplies in Float, applies the scales in any order, and rounds once."""
    product = matmul(*(replace(v, dtype="Float") for v in (a, b)))
    if not product.is_exact and all(n % 16 == 0 for n in b.ref.shape):
        # Tensor cores, which take such extents, keep fewer digits of partial sums.
        sizes = torch.matmul(a.ref.abs(), b.ref.abs())
        product = replace(product, bound=product.bound + 2.0**-12 * sizes)
    scales = [v for v in (scale1, scale2, alpha) if v is not None]
    out = _multiplied([product, *scales], product.ref.shape)
    if bias is not None:
        added = _multiplied(
            [cast(bias, "Float"), *([] if beta is None else [beta])], bias.ref.shape
        )
        ref, bound = out.ref + added.ref, out.bound + added.bound
        out = computed(ref, bound, "Float", 4, out.ref.abs() + added.ref.abs())
    return stored(out.ref, out.bound, dtype)


def _multiplied(factors: list[Val], shape: torch.Size) -> Val:
    """Multiplies factors in any order; a factor of one element may have any number of axes."""
    fitting = [v.view(lambda t: t.reshape(())) if v.ref.numel() == 1 else v for v in factors]
    ref, bound = corners(lambda *xs: math.prod(xs).expand(shape), fitting)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportArgumentType]
    return computed(ref, bound.expand(shape), "Float", 4, None)


MEANINGS: dict[str, Callable[..., list[Val | Num]]] = {
    "scaled_mm": scaled_mm,
}


# ------------------------------------------------------------------ the generators
def factor(b: Builder, name: str) -> str:
    """Returns a tensor as an 8-bit float; "" if its cast was rejected."""
    if b.dtype[name] in FACTORS:
        return name
    return next(iter(b.emit("cast", [Ref(name), Dt(b.rng.choice(FACTORS))], b.dims[name])), "")


def operands(
    b: Builder, m: Dim, n: Dim, make: MakeInput, count: Dim | None = None
) -> tuple[list[Arg], dict[str, Arg]]:
    """Returns the scales of a product [m, n], and its keyword arguments; each may have `count`
    groups.
    """
    rng = b.rng

    def of_groups(dims: list[Dim]) -> list[Dim]:
        return [count, *dims] if count is not None and b.chance(0.5) else dims

    def one() -> Ref:
        return Ref(make([b.one] * rng.choice((0, 0, 1, 2)), "Float"))

    def number() -> Ref:
        dims = of_groups([])
        return Ref(make(dims, "Float")) if dims else one()

    each = [m, b.one], [b.one, n]
    scales: list[Arg] = [
        Ref(make(of_groups([d if b.chance(0.9) else b.one for d in dims]), "Float"))
        if b.chance(0.5)
        else one()
        for dims in each
    ]
    named: dict[str, Arg] = {"alpha": number()} if b.chance(0.3) else {}
    if b.chance(0.5):
        dims = [m, n][0 if b.chance(0.4) else 1 :]
        kind = rng.choice(("Half", "BFloat16", "Float", "Double"))
        dims = [d if b.chance(0.9) else b.one for d in dims]
        named["bias"] = Ref(make(of_groups(dims) if len(dims) == 2 else dims, kind))
        named |= {"beta": number()} if b.chance(0.4) else {}
    if b.chance(0.85):
        results = ("BFloat16", "Half", "Float", "Float", "Double", *FACTORS, "Float8_e8m0fnu")
        named["dtype"] = Dt(rng.choice(results))
    return scales, named


def multiply(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Appends a scaled product of a tensor with two axes, on either side, as an 8-bit float."""
    if any(d.expanded for d in b.dims[name]) or not (name := factor(b, name)):
        return
    mine, new = b.dims[name], extents()
    is_first = b.chance(0.7)
    m, k, n = (*mine, new) if is_first else (new, *mine)
    if not b.fits([m, n]) or not b.fits([k, new]):
        return
    other = make([k, n] if is_first else [m, k], b.rng.choice(FACTORS))
    pair = [Ref(name), Ref(other)][:: 1 if is_first else -1]
    scales, named = operands(b, m, n, make)
    out = [type(d)(d.vec, d.static) for d in (m, n)]
    b.emit_many("scaled_mm", [*pair, *scales], [out], True, 2, **named)
