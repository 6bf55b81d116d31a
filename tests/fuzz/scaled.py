"""Floats of one byte with scales, in random programs: the generators' statements, and what they
mean to the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tests.fuzz.lookups import MakeInput
from tests.fuzz.program import Arg, Dt, Ref
from tests.fuzz.reductions import matmul
from tests.fuzz.values import (
    INF,
    InvalidProgram,
    Num,
    Val,
    cast,
    computed,
    corners,
    difference,
    stored,
)

if TYPE_CHECKING:
    from tests.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
_FACTORS = ("Float8_e4m3fn", "Float8_e5m2")
# Elements that share a scale, and the largest value of what they become.
_BLOCK = 32
_LARGEST = 448.0


# ------------------------------------------------------------------ the oracle
def scaled_mm(
    a: Val,
    b: Val,
    scale1: Val,
    scale2: Val,
    alpha: Val | None = None,
    bias: Val | None = None,
    beta: Val | None = None,
    dtype: str = "BFloat16",
) -> list[Val | Num]:
    """Multiply in Float, scale in any order, round once; the other two results are none."""
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
    none = Num(False, "Bool")
    return [stored(out.ref, out.bound, dtype), none, none]


def _multiplied(factors: list[Val], shape: torch.Size) -> Val:
    """Multiply in any order by factors of which some are one element, in any number of axes."""
    fitting = [v.view(lambda t: t.reshape(())) if v.ref.numel() == 1 else v for v in factors]
    ref, bound = corners(lambda *xs: math.prod(xs).expand(shape), fitting)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportArgumentType]
    return computed(ref, bound.expand(shape), "Float", 4, None)


def nv_block_quantize(v: Val, block_size: int = 16, dtype: str = "Float4_e2m1fn") -> list[Val]:
    """Return values, and for each 32 neighbours the least power of two that cuts off none."""
    assert (block_size, dtype) == (_BLOCK, "Float8_e4m3fn")
    if v.ref.shape[-1] % _BLOCK:
        raise InvalidProgram(f"blocks of {tuple(v.ref.shape)}")
    ref, bound = (t.unflatten(-1, (t.shape[-1] // _BLOCK, _BLOCK)) for t in (v.ref, v.bound))
    scale = _power(ref.abs().amax(-1))
    ends = [_power(x.amax(-1)) for x in ((ref.abs() - bound).clamp(min=0), ref.abs() + bound)]
    off = torch.maximum(*(difference(end, scale) for end in ends))
    off = torch.where(bound.isinf().any(-1), INF, off)
    by = scale.unsqueeze(-1)
    values = stored(ref / by, bound / by, "Float8_e4m3fn")
    known = torch.where((off > 0).unsqueeze(-1), INF, values.bound)
    return [
        Val(values.ref.flatten(-2), known.flatten(-2), "Float8_e4m3fn"),
        Val(scale, off, "Float8_e8m0fnu"),
    ]


def _power(largest: Tensor) -> Tensor:
    """Return the first power of two, of those there are, that is large enough; else the last."""
    powers = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
    is_small = largest.unsqueeze(-1) > _LARGEST * powers
    found = powers[is_small.sum(-1).clamp(max=len(powers) - 1)]
    return torch.where(largest.isnan(), largest, found)


MEANINGS: dict[str, Callable[..., list[Val] | list[Val | Num]]] = {
    "scaled_mm": scaled_mm,
    "nv_block_quantize": nv_block_quantize,
}


# ------------------------------------------------------------------ the generators
def multiply(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Append a product of a tensor with two axes, as a float of one byte, on either side."""
    rng = b.rng
    if any(d.expanded for d in b.dims[name]):
        return
    if b.dtype[name] not in _FACTORS:
        made = b.emit("cast", [Ref(name), Dt(rng.choice(_FACTORS))], b.dims[name])
        if not made:
            return
        (name,) = made
    mine, new = b.dims[name], extents()
    is_first = b.chance(0.7)
    m, k, n = (*mine, new) if is_first else (new, *mine)
    if not b.fits([m, n]) or not b.fits([k, new]):
        return
    other = make([k, n] if is_first else [m, k], rng.choice(_FACTORS))

    def one() -> Ref:
        return Ref(make([b.one] * rng.choice((0, 0, 1, 2)), "Float"))

    each = [m, b.one], [b.one, n]
    scales = [Ref(make(dims, "Float")) if b.chance(0.5) else one() for dims in each]
    named: dict[str, Arg] = {"alpha": one()} if b.chance(0.3) else {}
    if b.chance(0.5):
        dims = [m, n][0 if b.chance(0.4) else 1 :]
        kind = rng.choice(("Half", "BFloat16", "Float", "Double"))
        named["bias"] = Ref(make([d if b.chance(0.9) else b.one for d in dims], kind))
        named |= {"beta": one()} if b.chance(0.4) else {}
    if b.chance(0.85):
        results = ("BFloat16", "Half", "Float", "Float", "Double", *_FACTORS, "Float8_e8m0fnu")
        named["dtype"] = Dt(rng.choice(results))
    pair = [Ref(name), Ref(other)][:: 1 if is_first else -1]
    out = [type(d)(d.vec, d.static) for d in (m, n)]
    b.emit_many("scaled_mm", [*pair, *scales], [out], True, 2, **named)


def quantize(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Append blocks of a tensor where it has whole ones, else of a new one that has."""
    del extents
    dims, kind = b.dims[name], b.dtype[name]
    if kind not in ("Half", "BFloat16", "Float"):
        kind = b.rng.choice(("Half", "BFloat16", "Float"))
    if kind != b.dtype[name] or dims[-1].expanded or any(n % _BLOCK for n in dims[-1].vec):
        counts = [b.rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(b.ncalls)]
        last = type(dims[0])(tuple(_BLOCK * c for c in counts), False)
        if b.chance(0.5) and counts[0]:
            last = b.constant(_BLOCK * counts[0])
        dims = [*dims[:-1], last]
        if not b.fits(dims):
            return
        name = make(dims, kind)
    *outer, last = [type(d)(d.vec, d.static) for d in b.dims[name]]
    blocks = type(last)(tuple(n // _BLOCK for n in last.vec), last.static)
    shapes, dtype = [[*outer, last], [*outer, blocks]], Dt("Float8_e4m3fn")
    b.emit_many("nv_block_quantize", [Ref(name)], shapes, block_size=_BLOCK, dtype=dtype)
