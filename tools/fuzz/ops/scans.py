"""Scans and sorts in random programs: the generators' statements, and their meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tools.fuzz.ops.reductions import REDUCTIONS
from tools.fuzz.program import Arg, Ref
from tools.fuzz.table import DTYPES, HALF
from tools.fuzz.values import INF, InvalidProgram, Val, exact, stored

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
_REDUCED = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}
# The longest scanned axis: the oracle reduces each prefix separately.
_LONGEST = 64


# ------------------------------------------------------------------ the oracle
def scan(name: str, v: Val, dim: int, init: float | int | None = None) -> Val:
    """Returns, for each element, the reduction of all elements up to it."""
    count, dim = v.ref.shape[dim], dim % v.ref.ndim
    ref, bound, first = v.ref, v.bound, 0
    if init is not None:
        shape = [n if k != dim else 1 for k, n in enumerate(ref.shape)]
        ref = torch.cat([ref.new_full(shape, init), ref], dim)
        bound = torch.cat([bound.new_zeros(shape), bound], dim)
        first = 1
    if not ref.numel() or not count:
        return v
    parts: list[Val] = []
    for n in range(1 + first, count + first + 1):
        part = Val(ref.narrow(dim, 0, n), bound.narrow(dim, 0, n), v.dtype)
        found = REDUCTIONS[_REDUCED[name]](part, [dim], True)
        parts.append(stored(found.ref, found.bound, v.dtype) if v.dtype in HALF else found)
    refs, bounds = [p.ref for p in parts], [p.bound for p in parts]
    return Val(torch.cat(refs, dim), torch.cat(bounds, dim), v.dtype)


def argsort(v: Val, dim: int, descending: bool = False, stable: bool = False) -> Val:
    """Returns the positions in sorted order; unknown where the sort is not stable or the values
    uncertain.
    """
    places = v.ref.argsort(dim=dim, descending=descending, stable=True)
    is_known = stable and v.is_exact
    return exact(places, "Int") if is_known else Val(places, _unknown(places), "Int")


def topk(v: Val, k: int, dim: int = -1, largest: bool = True, sorted: bool = False) -> list[Val]:
    """Returns the `k` largest or smallest elements, and their positions.

    Sorting moves an element by at most the largest bound.
    """
    if not sorted or not 0 <= k <= v.ref.shape[dim]:
        raise InvalidProgram(
            f"topk cannot take {k} elements of {tuple(v.ref.shape)} along axis {dim}"
        )
    found, places = v.ref.sort(dim=dim, descending=largest, stable=True)
    most = v.bound.amax(dim, keepdim=True) if v.ref.shape[dim] else v.bound
    equal = found.diff(dim=dim) == 0 if v.ref.shape[dim] else found
    is_known = v.is_exact and not bool(equal.any()) and not bool((found != found).any())
    places, found = places.narrow(dim, 0, k), found.narrow(dim, 0, k)
    return [
        Val(found, most.expand(found.shape).clone() if v.ref.shape[dim] else found, v.dtype),
        exact(places, "Int") if is_known else Val(places, _unknown(places), "Int"),
    ]


def _unknown(places: Tensor) -> Tensor:
    return torch.full(places.shape, INF, dtype=torch.float64)


MEANINGS = {
    **{name: (lambda *a, name=name, **k: scan(name, *a, **k)) for name in _REDUCED},
    "argsort": argsort,
    "topk": topk,
}


# ------------------------------------------------------------------ the generators
_OPS = (*_REDUCED, "cumsum", "argsort", "topk", "topk")


def scan_or_sort(b: Builder, name: str) -> None:
    """Appends a scan, a sort or a top-k along an axis of a tensor that has axes."""
    dims, rng = b.dims[name], b.rng
    at, op = rng.randrange(len(dims)), rng.choice(_OPS)
    if b.is_a(name, "c") and op not in ("cumsum", "cumprod"):
        return
    is_bool = DTYPES[b.dtype[name]].category == "bool"
    if is_bool and op != "argsort":
        return
    dim: Arg = at - len(dims) if b.chance(0.3) else at
    out = [type(d)(d.vec, d.static) for d in dims]
    if op == "argsort":
        b.emit(op, [Ref(name), dim, b.chance(0.5), True], out)
    elif op == "topk":
        _choose(b, name, at, dim, out)
    elif max(dims[at].vec) <= _LONGEST:
        kind = {"f": "Double", "c": "ComplexDouble"}.get(b.category(name), "Int")
        named: dict[str, Arg] = {}
        if b.chance(0.3):
            named["init"] = Ref(b.add_scalar(kind, [rng.randint(-2, 2) for _ in dims[at].vec]))
        b.emit(op, [Ref(name), dim], dims if dims[at].is_broadcast else out, True, **named)


def _choose(b: Builder, name: str, at: int, dim: Arg, out: list[Dim]) -> None:
    counts = [b.rng.randint(0 if b.chance(0.1) else min(n, 1), n) for n in out[at].vec]
    out[at] = type(out[at])(tuple(counts), False)
    k = Ref(b.add_scalar("Int", counts))
    b.emit_many("topk", [Ref(name), k, dim, b.chance(0.6), True], [out, out])
