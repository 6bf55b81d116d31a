"""The oracle: interprets a program with torch in float64 and says how far a result may be off.

Nothing of the code under test is used: dtype rules, shapes and meanings are written here again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fuzz.program import Arg, Dt, Program, Ref, ScalarInput, Size, Stmt, TensorArg
from tests.fuzz.table import DTYPES, HALF, ROWS, SHIFTS, Row
from tests.fuzz.tensors import make_tensor
from tests.fuzz.values import (
    INF,
    RANKS,
    Num,
    Val,
    accumulated,
    cast,
    computed,
    corners,
    exact,
    nonnan,
    overflow,
    stored,
    wide,
)

Tensor = torch.Tensor
Env = dict[str, Val | Num]


class InvalidProgram(Exception):
    """The program is not valid for these inputs: shapes or dtypes do not fit."""


# ------------------------------------------------------------------ dtypes
def category(dtype: str) -> str:
    return DTYPES[dtype].category


_ORDER = {"bool": 0, "int": 1, "float": 2}
_NAME = {f.torch: n for n, f in DTYPES.items()}


def _promote_pair(a: str, b: str) -> str:
    return _NAME[torch.promote_types(DTYPES[a].torch, DTYPES[b].torch)]


def common_dtype(operands: Sequence[Val | Num]) -> str:
    """Return the promoted dtype: tensors outrank 0-d tensors, which outrank scalars; a lower class
    counts only if its category is higher."""
    ranks: list[list[str]] = [[], [], []]
    for v in operands:
        ranks[2 if isinstance(v, Num) else int(v.ref.ndim == 0)].append(v.dtype)
    if len({d for r in ranks for d in r}) == 1:
        return operands[0].dtype
    result: str | None = None
    for members in reversed(ranks):
        if not members:
            continue
        own = members[0]
        for m in members[1:]:
            own = _promote_pair(own, m)
        if result is None:
            result = own
        elif _ORDER[category(own)] < _ORDER[category(result)]:
            result = _promote_pair(own, result)
        else:
            result = own
    assert result is not None
    return result


def typed(row: Row, operands: Sequence[Val | Num]) -> tuple[str, str]:
    """Return (dtype of the computation, dtype of the result)."""
    counted = operands[1:] if row.rule == "select" else operands
    first = operands[0].dtype
    if row.rule in ("keep", "test"):
        return ("Float" if first in HALF else first), ("Bool" if row.rule == "test" else first)
    if row.rule == "bool":
        return "Bool", "Bool"
    dtype = common_dtype(counted)
    if row.rule == "float" and category(dtype) != "float":
        dtype = "Float"
    compute = "Float" if dtype in HALF else dtype
    if row.rule == "comparison":
        return compute, "Bool"
    return compute, dtype if row.rule == "select" else compute


def operand_in(v: Val | Num, dtype: str) -> Val:
    """Return an operand as a computation in `dtype` sees it."""
    if isinstance(v, Val):
        return cast(v, dtype)
    if category(dtype) == "float":
        ref = torch.tensor(float(v.value), dtype=torch.float64)
        bound = (ref.to(DTYPES[dtype].torch).double() - ref).abs()
        return Val(ref, torch.nan_to_num(bound), dtype)
    if category(dtype) == "bool":
        return exact(torch.tensor(bool(v.value)), dtype)
    return exact(torch.tensor(int(v.value)), dtype)


# ------------------------------------------------------------------ elementwise
def pointwise(name: str, operands: Sequence[Val | Num]) -> Val:
    """Return one elementwise op of the table."""
    row = ROWS[name]
    compute, result = typed(row, operands)
    vals = [operand_in(v, compute) for v in operands]
    if row.rule == "select":
        vals[0] = operand_in(operands[0], "Bool")
        return _where(vals, result)
    if category(compute) != "float":
        return _integers(row, vals, compute, result)
    ref, bound = corners(row.fn, vals)
    if row.rule in ("test", "comparison", "bool"):
        if row.rule == "comparison":
            a, b = vals
            near = ((a.ref - b.ref).abs() <= a.bound + b.bound) & (a.bound + b.bound > 0)
            bound = torch.where(near, 1.0, bound)
        return _zero_signs(row, vals, Val(ref, bound, "Bool"))
    scale = None if row.scale is None else row.scale(*(v.ref for v in vals)).abs()
    out = computed(ref, bound, compute, row.ulps, scale)
    out = _zero_signs(row, vals, out)
    return stored(out.ref, out.bound, result) if result in HALF else out


def _zero_signs(row: Row, vals: Sequence[Val], out: Val) -> Val:
    """Forget results that depend on the sign of a zero."""
    if not row.zero_sign:
        return out
    at_zero = (vals[-1] if row.name not in ("atan2", "pow") else vals[0]).ref == 0
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
        other = nonnan((a.ref.double() - b.ref.double()).abs())
        both = other + torch.maximum(*torch.broadcast_tensors(a.bound, b.bound))
        bound = torch.where(cond.bound > 0, both, bound)
    return Val(ref, bound, dtype)


_INT_GROWING = ("add", "sub", "mul", "neg", "pow", "bitwise_left_shift")
_BOOL_FN: dict[str, Callable[..., Tensor]] = {
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
        fn = _BOOL_FN.get(row.name, fn)
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
    """Return an op of scalars. Integers divide with truncation, `mod` as C's `%`."""
    xs = [v.value for v in values]
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


# ------------------------------------------------------------------ reductions
def dims_of(dims: object, rank: int) -> list[int]:
    if dims is None:
        return list(range(rank))
    given = [dims] if isinstance(dims, int) else list(dims)  # pyright: ignore[reportArgumentType]
    return sorted(d % rank for d in given)


def _count(v: Val, dims: Sequence[int]) -> int:
    return math.prod(v.ref.shape[d] for d in dims)


def reduce(
    name: str, v: Val, dims: object = None, keepdim: bool = False, dtype: str | None = None
) -> Val:
    if dtype is not None:
        v = cast(v, dtype)
    elif name in ("sum", "prod") and category(v.dtype) != "float":
        v = cast(v, "Int")
    if v.ref.ndim == 0:
        return v
    where = dims_of(dims, v.ref.ndim)
    out = _REDUCE[name](v, where, keepdim)
    return stored(out.ref, out.bound, v.dtype) if v.dtype in HALF else out


def _sum(v: Val, dims: list[int], keepdim: bool) -> Val:
    ref = v.ref.sum(dims, keepdim)
    sizes = v.ref.double().abs().sum(dims, keepdim)
    bound = nonnan(v.bound.sum(dims, keepdim))
    if category(v.dtype) == "int":
        return overflow(Val(ref, torch.where(bound > 0, INF, bound), v.dtype))
    whole = (v.ref == v.ref.round()).all() and float(
        sizes.nan_to_num(INF).max() if sizes.numel() else 0
    ) < 2**24
    out = accumulated(ref, bound, sizes + bound, _count(v, dims), v.dtype)
    out = Val(ref, torch.where(torch.isfinite(ref) | (bound > 0), out.bound, 0.0), v.dtype)
    # The order of a sum decides what becomes of an overflow on the way.
    near = (
        sizes.nan_to_num(0, posinf=0) > DTYPES["Float" if v.dtype in HALF else v.dtype].largest / 8
    )
    out = Val(ref, torch.where(near, INF, out.bound), v.dtype)
    return exact(ref, v.dtype) if whole and v.is_exact else out


def _prod(v: Val, dims: list[int], keepdim: bool) -> Val:
    ref, bound, x = v.ref, v.bound, v.ref.double().abs()
    relative = torch.where(v.bound > 0, v.bound / x, 0.0)
    logs = torch.where(x > 0, x.log2().abs(), 0.0)
    for d in sorted(dims, reverse=True):
        ref = ref.prod(d, keepdim=keepdim)
    size, bound = logs.sum(dims, keepdim), torch.log1p(relative).sum(dims, keepdim)
    is_float = category(v.dtype) == "float"
    limit = math.log2(DTYPES["Float" if v.dtype in HALF else v.dtype].largest) - 4
    eps = DTYPES["Float" if v.dtype in HALF else v.dtype].eps if is_float else 0.0
    new = ref.double().abs() * (torch.expm1(bound) + _count(v, dims) * eps)
    if not is_float:
        new = torch.where(bound > 0, INF, 0.0).expand(ref.shape)
    unknown = (size > limit) | (relative.isinf().any() if relative.numel() else False)
    new = torch.where(torch.isfinite(ref.double()) | (bound > 0), nonnan(new), 0.0)
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


_REDUCE: dict[str, Callable[[Val, list[int], bool], Val]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extreme(True),
    "min": _extreme(False),
}


def welford(v: Val, dims: object) -> list[Val]:
    """Return mean, sum of squared deviations, count."""
    where = dims_of(dims, v.ref.ndim)
    n = _count(v, where)
    dtype = v.dtype
    facts = DTYPES["Float" if dtype in HALF else dtype]
    shape = v.ref.sum(where).shape
    count = exact(torch.full(shape, n), "Int")
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
    where = dims_of(dims, v.ref.ndim)
    mean, m2, _ = welford(v, dims)
    scale = _inverse(_count(v, where) - correction, v.dtype)
    variance = pointwise("mul", [m2, scale])
    if keepdim:
        for d in where:
            variance, mean = (x.view(lambda t, d=d: t.unsqueeze(d)) for x in (variance, mean))
    return [variance, mean]


def _inverse(free: int, dtype: str) -> Val:
    value = 1 / free if free > 0 else INF
    compute = "Double" if dtype == "Double" else "Float"
    one = torch.tensor(value, dtype=torch.float64)
    bound = one * DTYPES[compute].eps if free > 1 else torch.zeros_like(one)
    return Val(one, torch.nan_to_num(bound), compute)


def var(v: Val, dims: object, correction: int = 1, keepdim: bool = False) -> Val:
    where = dims_of(dims, v.ref.ndim)
    n = _count(v, where)
    mean = pointwise("div", [reduce("sum", v, where, True), Num(n, "Int")])
    delta = pointwise("sub", [v, mean])
    total = reduce("sum", pointwise("mul", [delta, delta]), where, keepdim)
    return pointwise("mul", [total, _inverse(n - correction, v.dtype)])


# ------------------------------------------------------------------ contractions
def matmul(a: Val, b: Val, bias: Val | None = None) -> Val:
    k = a.ref.shape[-1]
    ref = torch.matmul(a.ref, b.ref)
    sizes = torch.matmul(a.ref.abs(), b.ref.abs())
    bound = torch.matmul(a.ref.abs(), b.bound) + torch.matmul(a.bound, b.ref.abs() + b.bound)
    compute = "Float" if a.dtype in HALF else a.dtype
    whole = all(bool((v.ref == v.ref.round()).all()) and v.is_exact for v in (a, b))
    whole = whole and float(sizes.nan_to_num(INF).max() if sizes.numel() else 0) < 2**11
    out = accumulated(ref, bound, sizes, k, a.dtype) if not whole else exact(ref, compute)
    if bias is not None:
        ref, extra = out.ref + bias.ref, out.bound + bias.bound
        if a.dtype in HALF:
            extra = extra + DTYPES[a.dtype].eps * out.ref.abs()
        out = computed(ref, extra, compute, 1, sizes + bias.ref.abs())
    # A library may treat NaN and infinity times 0 in its own way.
    out = Val(out.ref, torch.where(torch.isfinite(out.ref), out.bound, INF), compute)
    return stored(out.ref, out.bound + DTYPES[a.dtype].eps * 0.5 * out.bound, a.dtype)


def linear(x: Val, weight: Val, bias: Val | None = None) -> Val:
    return matmul(x, weight.view(lambda t: t.transpose(0, 1)), bias)


# ------------------------------------------------------------------ shapes
def broadcast(v: Val, flags: list[bool]) -> Val:
    for i, new in enumerate(flags):
        if new:
            v = v.view(lambda t, i=i: t.unsqueeze(i))
    return v


def broadcast_in_dim(v: Val, shape: list[int], dims: list[int]) -> Val:
    flags = [i not in dims for i in range(len(shape))]
    return expand(broadcast(v, flags), shape)


def expand(v: Val, shape: list[int]) -> Val:
    return v.view(lambda t: t.expand(shape))


def squeeze(v: Val, dims: list[int], squeeze_expanded: bool = False) -> Val:
    for d in sorted((d % v.ref.ndim for d in dims), reverse=True):
        if v.ref.shape[d] != 1 and not squeeze_expanded:
            raise InvalidProgram(f"squeeze of {list(v.ref.shape)} at {d}")
        v = v.view(lambda t, d=d: t.select(d, 0))
    return v


def slice_(v: Val, starts: list[int], ends: list[int]) -> Val:
    index = tuple(
        slice(min(a, n), min(b, n)) for a, b, n in zip(starts, ends, v.ref.shape, strict=True)
    )
    return v.view(lambda t: t[index])


def pad(v: Val, widths: list[int], value: float | int | bool | Num = 0) -> Val:
    number = value.value if isinstance(value, Num) else value
    rounded = torch.tensor(number, dtype=DTYPES[v.dtype].torch).item()
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (v.ref.ndim - len(pairs)) + pairs

    def padded(t: Tensor, fill: float | int | bool) -> Tensor:
        for d, (left, right) in enumerate(pairs):
            n = t.shape[d] + left + right
            if n < 0:
                raise InvalidProgram(f"pad of {list(t.shape)} by {widths}")
            shape = [*t.shape[:d], n, *t.shape[d + 1 :]]
            out = torch.full(shape, fill, dtype=t.dtype)
            first, last = max(left, 0), min(left + t.shape[d], n)
            if last > first:
                out.narrow(d, first, last - first).copy_(t.narrow(d, first - left, last - first))
            t = out
        return t

    return Val(padded(v.ref, rounded), padded(v.bound, 0.0), v.dtype)


def cat(pieces: list[Val], dim: int = 0) -> Val:
    refs, bounds = [p.ref for p in pieces], [p.bound for p in pieces]
    return Val(torch.cat(refs, dim), torch.cat(bounds, dim), pieces[0].dtype)


def reshape(v: Val, shape: list[int]) -> Val:
    return v.view(lambda t: t.reshape(shape))


def full(shape: list[int], value: Num | float | int | bool, dtype: str) -> Val:
    number = value.value if isinstance(value, Num) else value
    ref = torch.full(shape, number, dtype=DTYPES[dtype].torch)
    return exact(wide(ref), dtype)


def _number(x: Any) -> Any:
    return x.value if isinstance(x, Num) else x


def iota(length: int, start: Any = 0, step: Any = 1, dtype: str = "Int") -> Val:
    counts = torch.arange(_number(length))
    first, by = (0 if _number(start) is None else _number(start)), _number(step)
    if category(dtype) == "int":
        return overflow(exact(counts * by + first, dtype))
    ref = counts.double() * by + first
    scale = (counts * by).abs().double() + abs(first)
    compute = "Float" if dtype in HALF else dtype
    out = computed(ref, torch.zeros_like(ref), compute, 2, scale)
    return stored(out.ref, out.bound, dtype)


def triu(v: Val, diagonal: Any = 0) -> Val:
    keep = torch.ones(v.ref.shape[-2:], dtype=torch.bool).triu(_number(diagonal))
    zero = torch.zeros((), dtype=v.ref.dtype)
    return Val(torch.where(keep, v.ref, zero), torch.where(keep, v.bound, 0.0), v.dtype)


def addcmul(a: Val | Num, b: Val | Num, c: Val | Num, value: Val | Num) -> Val:
    product = pointwise("mul", [pointwise("mul", [b, c]), value])
    return pointwise("add", [a, product])


def clamp(x: Val, low: Any, high: Any) -> Val:
    ends: list[Val | Num] = []
    for limit, sign in ((low, -1), (high, 1)):
        if limit is not None:
            ends.append(limit if isinstance(limit, Num) else _as_num(limit))
        elif category(x.dtype) == "float":
            ends.append(Num(sign * INF, "Double"))
        else:
            info = torch.iinfo(DTYPES[x.dtype].torch)
            ends.append(Num(info.max if sign > 0 else info.min, "Int"))
    return pointwise("clamp", [x, *ends])


def _as_num(value: int | float | bool) -> Num:
    if isinstance(value, bool):
        return Num(value, "Bool")
    return Num(value, "Int" if isinstance(value, int) else "Double")


_STRUCTURAL: dict[str, Callable[..., Any]] = {
    "cast": cast,
    **{n: (lambda *a, n=n, **k: reduce(n, *a, **k)) for n in _REDUCE},
    "welford": welford,
    "var_mean": var_mean,
    "var": var,
    "matmul": matmul,
    "linear": linear,
    "broadcast": broadcast,
    "broadcast_in_dim": broadcast_in_dim,
    "expand": expand,
    "squeeze": squeeze,
    "permute": lambda v, dims: v.view(lambda t: t.permute(dims)),
    "stride_order": lambda v, order: v,
    "set": lambda v: v,
    "segment_set": lambda v: v,
    "slice": slice_,
    "pad": pad,
    "cat": cat,
    "reshape": reshape,
    "full": full,
    "iota": iota,
    "triu": triu,
    "clamp": clamp,
}
# The arguments of these that are numbers stay Python numbers.
_ELEMENTWISE = {*ROWS, "addcmul"} - {"clamp"}
OPS = (*_STRUCTURAL, *(n for n in ROWS if n not in _STRUCTURAL), "addcmul")


# ------------------------------------------------------------------ interpretation
def _resolve(arg: Arg, env: Env, *, sizes: bool) -> Any:
    match arg:
        case Ref(name):
            value = env[name]
            return value.value if sizes and isinstance(value, Num) else value
        case Size(name, axis):
            tensor = env[name]
            assert isinstance(tensor, Val)
            n = tensor.ref.shape[axis]
            return n if sizes else Num(n, "Int")
        case Dt(name):
            return name
        case list() | tuple():
            return [_resolve(a, env, sizes=sizes) for a in arg]
        case _:
            return arg


def run_stmt(stmt: Stmt, env: Env) -> None:
    """Add the results of one statement to `env`; raises `InvalidProgram`."""
    is_pointwise = stmt.op in _ELEMENTWISE or stmt.op == "clamp"
    args = [_resolve(a, env, sizes=not is_pointwise) for a in stmt.args]
    kwargs = {k: _resolve(a, env, sizes=True) for k, a in stmt.kwargs}
    try:
        if stmt.op in _ELEMENTWISE:
            values = [v if isinstance(v, Val | Num) else _as_num(v) for v in args]
            if all(isinstance(v, Num) for v in values):
                results: Any = scalar_op(stmt.op, values)  # pyright: ignore[reportArgumentType]
            elif stmt.op == "addcmul":
                results = addcmul(*values)
            else:
                results = pointwise(stmt.op, values)
        else:
            results = _STRUCTURAL[stmt.op](*args, **kwargs)
    except (RuntimeError, IndexError, ZeroDivisionError, OverflowError, ValueError) as error:
        raise InvalidProgram(f"{stmt}: {error}") from error
    env.update(zip(stmt.outs, results if isinstance(results, list) else [results], strict=True))


def input_env(program: Program, call: int) -> tuple[Env, list[Any]]:
    """Return the values of the inputs, and what is passed: tensors and numbers."""
    env: Env = {}
    passed: list[Any] = []
    for declared, given in zip(program.inputs, program.calls[call], strict=True):
        if isinstance(declared, ScalarInput):
            assert not isinstance(given, TensorArg)
            env[declared.name] = Num(given, declared.dtype)
            passed.append(given)
            continue
        assert isinstance(given, TensorArg)
        for n, declared_n in zip(given.shape, declared.shape, strict=True):
            if declared_n not in (-1, n):
                raise InvalidProgram(f"{declared} does not take {given.shape}")
        t = make_tensor(
            given.shape,
            declared.layout.strides(given.shape),
            given.offset,
            DTYPES[declared.dtype].torch,
            given.fill,
            given.seed,
        )
        passed.append(t)
        env[declared.name] = exact(wide(t).clone(), declared.dtype)
    return env, passed


def evaluate(program: Program, call: int) -> tuple[Env, list[Any]]:
    """Return all values of one call, and its inputs."""
    RANKS.set(program.ranks)
    env, passed = input_env(program, call)
    for stmt in program.stmts:
        run_stmt(stmt, env)
    return env, passed
