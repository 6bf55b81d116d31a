"""The oracle's reductions and contractions, with bounds that hold for any order of summation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tools.fuzz.ops.elementwise import category, is_inexact, pointwise
from tools.fuzz.table import DTYPES, HALF
from tools.fuzz.values import (
    INF,
    Num,
    Tensor,
    Val,
    accumulated,
    cast,
    computed,
    exact,
    nonnan,
    overflow,
    size_of,
    stored,
)


def dims_of(dims: object, rank: int) -> list[int]:
    """Returns the reduced axes as sorted, non-negative numbers; None means all axes."""
    if dims is None:
        return list(range(rank))
    given = [dims] if isinstance(dims, int) else list(dims)  # pyright: ignore[reportArgumentType]
    return sorted(d % rank for d in given)


def _count(v: Val, dims: Sequence[int]) -> int:
    return math.prod(v.ref.shape[d] for d in dims)


def reduce(
    name: str, v: Val, dims: object = None, keepdim: bool = False, dtype: str | None = None
) -> Val:
    """Returns the sum, product, maximum or minimum over axes."""
    if dtype is not None:
        v = cast(v, dtype)
    elif name in ("sum", "prod") and not is_inexact(v.dtype):
        v = cast(v, "Int")
    if v.ref.ndim == 0:
        return v
    where = dims_of(dims, v.ref.ndim)
    out = REDUCTIONS[name](v, where, keepdim)
    return stored(out.ref, out.bound, v.dtype) if v.dtype in HALF else out


def is_whole(x: torch.Tensor) -> bool:
    """Whether all elements are integers, including the parts of complex numbers."""
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return bool((real == real.round()).all())


def _sum(v: Val, dims: list[int], keepdim: bool) -> Val:
    ref = v.ref.sum(dims, keepdim)
    sizes = size_of(v.ref).sum(dims, keepdim)
    bound = nonnan(v.bound.sum(dims, keepdim))
    if category(v.dtype) == "int":
        return overflow(Val(ref, torch.where(bound > 0, INF, bound), v.dtype))
    is_exact = is_whole(v.ref) and v.is_exact
    return summed(ref, bound, sizes, _count(v, dims), v.dtype, is_exact=is_exact)


def summed(ref: Tensor, bound: Tensor, sizes: Tensor, n: int, dtype: str, *, is_exact: bool) -> Val:
    """Returns sums of `n` floating numbers in any order; `sizes` has the sums of absolute values.

    `is_exact` is true for integers without error, whose small sums are exact.
    """
    out = accumulated(ref, bound, sizes + bound, n, dtype)
    # One part of a complex sum may be rounded while the other is infinite; its error is unknown.
    not_finite = INF if ref.is_complex() else 0.0
    out = Val(ref, torch.where(torch.isfinite(ref) | (bound > 0), out.bound, not_finite), dtype)
    # The effect of an intermediate overflow depends on the order of the sum.
    near = sizes.nan_to_num(0, posinf=0) > DTYPES["Float" if dtype in HALF else dtype].largest / 8
    out = Val(ref, torch.where(near, INF, out.bound), dtype)
    is_small = float(sizes.nan_to_num(INF).max() if sizes.numel() else 0) < 2**24
    return exact(ref, dtype) if is_exact and is_small else out


def _prod(v: Val, dims: list[int], keepdim: bool) -> Val:
    ref, bound, x = v.ref, v.bound, size_of(v.ref)
    relative = torch.where(v.bound > 0, v.bound / x, 0.0)
    logs = torch.where(x > 0, x.log2().abs(), 0.0)
    for d in sorted(dims, reverse=True):
        ref = ref.prod(d, keepdim=keepdim)
    size, bound = logs.sum(dims, keepdim), torch.log1p(relative).sum(dims, keepdim)
    is_float = is_inexact(v.dtype)
    limit = math.log2(DTYPES["Float" if v.dtype in HALF else v.dtype].largest) - 4
    eps = DTYPES["Float" if v.dtype in HALF else v.dtype].eps if is_float else 0.0
    eps *= 4 if ref.is_complex() else 1
    new = size_of(ref) * (torch.expm1(bound) + _count(v, dims) * eps)
    if not is_float:
        new = torch.where(bound > 0, INF, 0.0).expand(ref.shape)
    unknown = (size > limit) | (relative.isinf().any() if relative.numel() else False)
    unknown = unknown | (~torch.isfinite(ref) & ref.is_complex())
    new = torch.where(torch.isfinite(size_of(ref)) | (bound > 0), nonnan(new), 0.0)
    # 0 * inf and overflow on the way depend on the order.
    return Val(ref, torch.where(unknown | bound.isinf(), INF, new), v.dtype)


def _extreme(largest: bool) -> Callable[[Val, list[int], bool], Val]:
    def reduce_(v: Val, dims: list[int], keepdim: bool) -> Val:
        if _count(v, dims) == 0:
            shape = list(v.ref.sum(dims, keepdim).shape)
            if category(v.dtype) == "float":
                return exact(
                    torch.full(shape, -INF if largest else INF, dtype=torch.float64), v.dtype
                )
            if v.dtype == "Bool":
                return exact(torch.full(shape, not largest), v.dtype)
            info = torch.iinfo(DTYPES[v.dtype].torch)
            return exact(torch.full(shape, info.min if largest else info.max), v.dtype)
        ref = (torch.amax if largest else torch.amin)(v.ref, dims, keepdim)
        return Val(ref, v.bound.amax(dims, keepdim), v.dtype)

    return reduce_


REDUCTIONS: dict[str, Callable[[Val, list[int], bool], Val]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extreme(True),
    "min": _extreme(False),
}


def welford(v: Val, dims: object) -> list[Val]:
    """Returns mean, sum of squared deviations, and count."""
    where = dims_of(dims, v.ref.ndim)
    n = _count(v, where)
    dtype = v.dtype
    facts = DTYPES["Float" if dtype in HALF else dtype]
    shape = v.ref.sum(where).shape
    count = exact(torch.full(shape, n), "Index")
    if n == 0:
        nan = torch.full(shape, math.nan, dtype=torch.float64)
        return [exact(nan, dtype), exact(torch.zeros_like(nan), dtype), count]
    mean = v.ref.mean(where, keepdim=True)
    depth = min(n, 16 + 6 * n**0.5) + 8
    size = v.ref.abs().mean(where, keepdim=True)
    mean_bound = v.bound.mean(where, keepdim=True) + depth * facts.eps * size + facts.tiny
    delta = v.ref - mean
    m2, total = delta.square().sum(where), v.ref.square().sum(where)
    off = v.bound + mean_bound
    m2_bound = (2 * delta.abs() * off + off.square()).sum(where)
    m2_bound = m2_bound + depth * facts.eps * (m2 + 2 * (m2 * total).sqrt()) + facts.tiny
    m2_bound = m2_bound + n * (facts.eps * v.ref.abs().amax(where)) ** 2 * depth
    known = torch.isfinite(m2)
    bounds = [torch.where(known, nonnan(b), INF) for b in (mean_bound.sum(where), m2_bound)]
    nan_ok = v.ref.isnan().any() if v.ref.numel() else False
    del nan_ok
    outs = [overflow(Val(r, b, dtype)) for r, b in zip((mean.sum(where), m2), bounds, strict=True)]
    if dtype in HALF:
        outs = [stored(o.ref, o.bound, dtype) for o in outs]
    return [*outs, count]


def var_mean(v: Val, dims: object, correction: int = 1, keepdim: bool = False) -> list[Val]:
    """Returns the variance and the mean over axes."""
    where = dims_of(dims, v.ref.ndim)
    if v.ref.is_complex():
        parts = [pointwise(p, [v]) for p in ("real", "imag")]
        (a, x), (b, y) = (var_mean(p, dims, correction, keepdim) for p in parts)
        return [pointwise("add", [a, b]), pointwise("complex", [x, y])]
    mean, m2, _ = welford(v, dims)
    scale = _inverse(_count(v, where) - correction, v.dtype)
    variance = pointwise("mul", [m2, scale])
    if keepdim:
        for d in where:
            variance, mean = (x.view(lambda t, d=d: t.unsqueeze(d)) for x in (variance, mean))
    return [variance, mean]


def _inverse(free: int, dtype: str) -> Val:
    value = 1 / free if free > 0 else INF
    compute = "Double" if dtype in ("Double", "ComplexDouble") else "Float"
    one = torch.tensor(value, dtype=torch.float64)
    bound = one * DTYPES[compute].eps if free > 1 else torch.zeros_like(one)
    return Val(one, torch.nan_to_num(bound), compute)


def var(v: Val, dims: object, correction: int = 1, keepdim: bool = False) -> Val:
    """Returns the variance over axes."""
    where = dims_of(dims, v.ref.ndim)
    n = _count(v, where)
    wide = Val(v.ref, v.bound, "Float") if v.dtype in HALF else v
    mean = pointwise("div", [reduce("sum", wide, where, True), Num(n, "Int")])
    delta = pointwise("sub", [v, mean])
    if v.ref.is_complex():
        parts = [pointwise(p, [delta]) for p in ("real", "imag")]
        total = pointwise("add", [_squared_deviations(p, where, keepdim, n) for p in parts])
    else:
        total = _squared_deviations(delta, where, keepdim, n)
    return pointwise("mul", [total, _inverse(n - correction, v.dtype)])


def _squared_deviations(delta: Val, where: list[int], keepdim: bool, n: int) -> Val:
    """Returns the sum of squared distances from the exact mean, from distances to the rounded
    mean.
    """
    total = reduce("sum", pointwise("mul", [delta, delta]), where, keepdim)
    rest = reduce("sum", delta, where, keepdim)
    share = pointwise("mul", [rest, pointwise("div", [rest, Num(n, "Int")])])
    return pointwise("maximum", [pointwise("sub", [total, share]), Num(0.0, "Float")])


# ------------------------------------------------------------------ contractions
def matmul(a: Val, b: Val, bias: Val | None = None) -> Val:
    """Returns a @ b, plus `bias` if there is one."""
    k = a.ref.shape[-1]
    ref = torch.matmul(a.ref, b.ref)
    sizes = torch.matmul(a.ref.abs(), b.ref.abs())
    bound = torch.matmul(a.ref.abs(), b.bound) + torch.matmul(a.bound, b.ref.abs() + b.bound)
    compute = "Float" if a.dtype in HALF else a.dtype
    whole = all(is_whole(v.ref) and v.is_exact for v in (a, b))
    whole = whole and float(sizes.nan_to_num(INF).max() if sizes.numel() else 0) < 2**11
    out = accumulated(ref, bound, sizes, k, a.dtype) if not whole else exact(ref, compute)
    if bias is not None:
        ref, extra = out.ref + bias.ref, out.bound + bias.bound
        if a.dtype in HALF:
            extra = extra + DTYPES[a.dtype].eps * out.ref.abs()
        out = computed(ref, extra, compute, 1, sizes + bias.ref.abs())
    # Libraries differ in NaN and infinity times 0.
    out = Val(out.ref, torch.where(torch.isfinite(out.ref), out.bound, INF), compute)
    return stored(out.ref, out.bound + DTYPES[a.dtype].eps * 0.5 * out.bound, a.dtype)


def linear(x: Val, weight: Val, bias: Val | None = None) -> Val:
    """Returns x @ weight.T, plus `bias` if there is one; weight and bias may have batch axes."""
    *batch, n, k = weight.ref.shape
    rows = x.ref.shape[:-1]
    flat = x.view(lambda t: t.reshape(math.prod(rows), k))
    beside = None if bias is None else bias.view(lambda t: t.unsqueeze(-2))
    made = matmul(flat, weight.view(lambda t: t.transpose(-2, -1)), beside)
    return made.view(lambda t: t.reshape(*batch, *rows, n))
