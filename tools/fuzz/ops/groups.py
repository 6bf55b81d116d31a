"""Products per group in random programs: the generators' statements, and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tools.fuzz.ops import scaled
from tools.fuzz.ops.lookups import MakeInput
from tools.fuzz.ops.reductions import matmul
from tools.fuzz.program import Arg, Dt, Ref
from tools.fuzz.table import FLOAT8
from tools.fuzz.values import InvalidProgram, Num, Val, round_to

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
# The largest number of groups: the oracle multiplies group by group.
_MOST_GROUPS = 32


# ------------------------------------------------------------------ the oracle
def grouped_mm(
    a: Val, b: Val, offsets: Val, *scales: Val, dtype: str = "BFloat16", **more: Val
) -> Val | list[Val | Num]:
    """Returns a product per group; with scales, also two empty results."""
    none = Num(False, "Bool")
    out = products(a, b, offsets, *scales, dtype=dtype if scales else a.dtype, **more)
    return [out, none, none] if scales else out


def products(a: Val, b: Val, offsets: Val, *scales: Val, dtype: str, **more: Val) -> Val:
    """Multiplies group by group, with scales as in `scaled_mm`; rows in no group are 0."""
    ragged = {(2, 2): "k", (3, 2): "n", (2, 3): "m"}[a.ref.ndim, b.ref.ndim]
    extent = {"k": a.ref.shape[-1], "n": b.ref.shape[-1], "m": a.ref.shape[0]}[ragged]
    ends = offsets.ref.tolist()
    rises = all(x <= y for x, y in pairwise([0, *ends, extent]))
    if a.ref.shape[-1] != b.ref.shape[-2] or not offsets.is_exact or not rises:
        raise InvalidProgram(f"an axis of extent {extent} has no groups that end at {ends}")
    if any(v.ref.ndim == 3 and len(v.ref) != len(ends) for v in (a, b)):
        raise InvalidProgram(
            f"shapes {tuple(a.ref.shape)}, {tuple(b.ref.shape)} do not have {len(ends)} groups"
        )
    shape = [len(ends)] * (ragged == "k") + [a.ref.shape[-2], b.ref.shape[-1]]
    bound = torch.zeros(shape, dtype=torch.float64)
    ref = round_to(bound, dtype)  # a dtype may have no 0
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        mine = slice(start, end)
        x, y, into = {
            "k": ((slice(None), mine), mine, g),
            "n": (g, (slice(None), mine), (slice(None), mine)),
            "m": (mine, g, mine),
        }[ragged]
        pair = _part(a, x), _part(b, y)
        if scales:
            places = g, *(mine if ragged == c else slice(None) for c in "mn")
            factors = [_scale(v, places) for v in scales]
            rest = {n: _scale(v, places if n == "bias" else (g,)) for n, v in more.items()}
            found = scaled.product(*pair, *factors, **rest, dtype=dtype)
        else:
            found = matmul(*pair)
        ref[into], bound[into] = found.ref, found.bound
    return Val(ref, bound, dtype)


def _part(v: Val, index: int | slice | tuple[slice, slice]) -> Val:
    return v.view(lambda t: t[index])


def _scale(v: Val, places: tuple[int | slice, ...]) -> Val:
    """Returns the part of a scale for one group.

    `places` has the group first, and the tensor's axes last. An axis with one element is shared.
    """

    def part(t: Tensor) -> Tensor:
        if t.numel() == 1:
            return t.reshape(())
        mine = places[len(places) - t.ndim :]
        only = [0 if isinstance(p, int) else slice(None) for p in mine]
        return t[tuple(q if n == 1 else p for p, q, n in zip(mine, only, t.shape, strict=True))]

    return v.view(part)


MEANINGS: dict[str, Callable[..., Val | list[Val | Num]]] = {"grouped_mm": grouped_mm}


# ------------------------------------------------------------------ the generators
def multiply(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Appends a product per group of a tensor with two or three axes.

    It is scaled for 8-bit floats, and sometimes for other dtypes cast to them. `extents` draws an
    axis.
    """
    is_scaled = b.dtype[name] in FLOAT8 or b.chance(0.3)
    if b.dims[name][-1].expanded:
        return
    if is_scaled and not (name := scaled.factor(b, name)):
        return
    *_, rows, k = dims = [type(d)(d.vec, d.static) for d in b.dims[name]]
    n = extents()
    if len(dims) == 3:
        count, ragged, other, out = dims[0], n, [k, n], [rows, n]
    else:
        count = b.constant(b.rng.choice((1, 2, 3, 5))) if b.chance(0.6) else extents()
        ragged, other, out = rows, [count, k, n], [rows, n]
        if b.chance(0.5):
            ragged, other, out = k, [k, n], [count, rows, n]
    if max(count.vec) > _MOST_GROUPS or not b.fits(other) or not b.fits(out):
        return
    second = make(other, b.rng.choice(scaled.FACTORS) if is_scaled else b.dtype[name])
    ends = [f"rising to {m}" for m in ragged.vec]
    offsets = make([count], "Int32" if b.chance(0.7) else "Int", ends)
    if b.dtype[offsets] == "Int":
        offsets = b.emit("cast", [Ref(offsets), Dt("Int32")], b.dims[offsets], False)[0]
    args: list[Arg] = [Ref(name), Ref(second), Ref(offsets)]
    if is_scaled and b.fits([count, rows, n]):
        scales, named = scaled.operands(b, rows, n, make, count)
        b.emit_many("grouped_mm", [*args, *scales], [out], True, 2, **named)
    elif not is_scaled:
        b.emit("grouped_mm", args, out)
