"""Products per group in random programs: the generators' statements, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tests.fuzz.lookups import MakeInput
from tests.fuzz.program import Dt, Ref
from tests.fuzz.reductions import matmul
from tests.fuzz.table import FLOAT8
from tests.fuzz.values import InvalidProgram, Val

if TYPE_CHECKING:
    from tests.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
# The oracle multiplies group by group.
_MOST_GROUPS = 32


# ------------------------------------------------------------------ the oracle
def grouped_mm(a: Val, b: Val, offsets: Val) -> Val:
    """Multiply group by group; what is in none is 0."""
    ragged = {(2, 2): "k", (3, 2): "n", (2, 3): "m"}[a.ref.ndim, b.ref.ndim]
    extent = {"k": a.ref.shape[-1], "n": b.ref.shape[-1], "m": a.ref.shape[0]}[ragged]
    ends = offsets.ref.tolist()
    rises = all(x <= y for x, y in pairwise([0, *ends, extent]))
    if a.ref.shape[-1] != b.ref.shape[-2] or not offsets.is_exact or not rises:
        raise InvalidProgram(f"groups of {extent} that end at {ends}")
    if any(v.ref.ndim == 3 and len(v.ref) != len(ends) for v in (a, b)):
        raise InvalidProgram(f"{len(ends)} groups of {tuple(a.ref.shape)}, {tuple(b.ref.shape)}")
    shape = [len(ends)] * (ragged == "k") + [a.ref.shape[-2], b.ref.shape[-1]]
    ref, bound = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        mine = slice(start, end)
        x, y, into = {
            "k": ((slice(None), mine), mine, g),
            "n": (g, (slice(None), mine), (slice(None), mine)),
            "m": (mine, g, mine),
        }[ragged]
        found = matmul(_part(a, x), _part(b, y))
        ref[into], bound[into] = found.ref, found.bound
    return Val(ref, bound, a.dtype)


def _part(v: Val, index: int | slice | tuple[slice, slice]) -> Val:
    return v.view(lambda t: t[index])


MEANINGS: dict[str, Callable[..., Val]] = {"grouped_mm": grouped_mm}


# ------------------------------------------------------------------ the generators
def multiply(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Append a product per group of a tensor with two or three axes; `extents` draws an axis."""
    *_, rows, k = dims = [type(d)(d.vec, d.static) for d in b.dims[name]]
    dtype = b.dtype[name]
    if dtype in FLOAT8 or b.dims[name][-1].expanded:
        return
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
    second = make(other, dtype)
    ends = [f"rising to {m}" for m in ragged.vec]
    offsets = make([count], "Int32" if b.chance(0.7) else "Int", ends)
    if b.dtype[offsets] == "Int":
        offsets = b.emit("cast", [Ref(offsets), Dt("Int32")], b.dims[offsets], False)[0]
    b.emit("grouped_mm", [Ref(name), Ref(second), Ref(offsets)], out)
