"""Ops of torch.nn.functional: the generators' statements, and their meaning for the oracle.

The oracle computes each op in the steps of its documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tools.fuzz.ops.elementwise import category, pointwise
from tools.fuzz.ops.lookups import MakeInput
from tools.fuzz.ops.reductions import reduce, var_mean
from tools.fuzz.program import Arg, Dt, Ref
from tools.fuzz.table import DTYPES, FLOAT8, HALF
from tools.fuzz.values import INF, InvalidProgram, Num, Val, cast, exact, nonnan

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor


# ------------------------------------------------------------------ the oracle
def _wide(v: Val, dtype: str | None = None) -> Val:
    v = v if dtype is None else cast(v, dtype)
    if category(v.dtype) != "float":
        raise InvalidProgram(f"{v.dtype} is not a floating-point dtype")
    return cast(v, "Float") if v.dtype in (*HALF, *FLOAT8) else v


def _call(name: str, *operands: Val | Num | float) -> Val:
    numbers = (x if isinstance(x, Val | Num) else Num(x, "Double") for x in operands)
    return pointwise(name, list(numbers))


def _kept(v: Val, dim: int) -> Val:
    return v.view(lambda t: t.unsqueeze(dim)) if v.ref.ndim else v


def _shifted(x: Val, dim: int) -> Val:
    return _call("sub", x, reduce("max", x, dim, True))


def _log_total(shifted: Val, dim: int) -> Val:
    return _call("log", reduce("sum", _call("exp", shifted), dim, True))


def softmax(v: Val, dim: int, dtype: str | None = None) -> Val:
    """Returns softmax along `dim`."""
    e = _call("exp", _shifted(_wide(v, dtype), dim))
    return cast(_call("div", e, reduce("sum", e, dim, True)), dtype or v.dtype)


def log_softmax(v: Val, dim: int, dtype: str | None = None) -> Val:
    """Returns the logarithm of softmax along `dim`."""
    shifted = _shifted(_wide(v, dtype), dim)
    return cast(_call("sub", shifted, _log_total(shifted, dim)), dtype or v.dtype)


def mean(v: Val, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Val:
    """Returns the mean over axes."""
    v = v if dtype is None else cast(v, dtype)
    x = cast(v, "Float") if v.dtype in (*HALF, *FLOAT8) else v
    # An empty list means all axes, as in torch.
    dim = None if isinstance(dim, list | tuple) and not dim else dim
    axes = range(x.ref.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    count = math.prod(x.ref.shape[d] for d in axes) if x.ref.ndim else 1
    return cast(_call("div", reduce("sum", x, dim, keepdim), Num(count, "Int")), v.dtype)


def layer_norm(
    v: Val, shape: list[int], weight: Val | None = None, bias: Val | None = None, eps: float = 1e-5
) -> Val:
    """Returns a layer norm over the trailing axes `shape`."""
    x, axes = _wide(v), list(range(v.ref.ndim - len(shape), v.ref.ndim))
    variance, average = var_mean(x, axes, 0, True)
    inverse = _call("rsqrt", _call("add", variance, eps))
    out = _call("mul", _call("sub", x, average), inverse)
    out = out if weight is None else _call("mul", out, cast(weight, x.dtype))
    out = out if bias is None else _call("add", out, cast(bias, x.dtype))
    return cast(out, v.dtype)


def rms_norm(v: Val, shape: list[int], weight: Val | None = None, eps: float | None = None) -> Val:
    """Returns an RMS norm over the trailing axes `shape`."""
    x, axes = _wide(v), list(range(v.ref.ndim - len(shape), v.ref.ndim))
    eps = torch.finfo(DTYPES[x.dtype].torch).eps if eps is None else eps
    square = mean(_call("mul", x, x), axes, True)
    out = _call("mul", x, _call("rsqrt", _call("add", square, eps)))
    return cast(out if weight is None else _call("mul", out, cast(weight, x.dtype)), v.dtype)


def gelu(v: Val, approximate: str = "none") -> Val:
    """Returns gelu, by erf or by the tanh approximation."""
    x = _wide(v)
    if approximate == "none":
        inner = _call("erf", _call("mul", x, 2**-0.5))
    else:
        cube = _call("mul", _call("mul", x, x), x)
        inner = _call("add", x, _call("mul", cube, 0.044715))
        inner = _call("tanh", _call("mul", inner, (2 / math.pi) ** 0.5))
    return cast(_call("mul", _call("mul", x, 0.5), _call("add", inner, 1.0)), v.dtype)


def dropout(v: Val, p: float = 0.5, training: bool = True) -> Val:
    """Returns 0 with a bound that includes each kept value: any element may be dropped."""
    if not training or p == 0.0:
        return v
    x = _wide(v)
    if p == 1.0:
        return cast(_call("mul", x, 0.0), v.dtype)
    kept = cast(_call("div", x, 1.0 - p), v.dtype)
    reach = nonnan(kept.ref.abs() * (1 + 8 * DTYPES[v.dtype].eps) + 2 * kept.bound)
    known = torch.isfinite(kept.ref)
    return Val(torch.zeros_like(kept.ref), torch.where(known, reach, INF), v.dtype)


def cross_entropy(
    v: Val,
    target: Val,
    weight: Val | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Val:
    """Returns the cross entropy of scores `v` and classes, or class probabilities, `target`."""
    x, dim = _wide(v), min(v.ref.ndim - 1, 1)
    classes = x.ref.shape[dim]
    shape = [classes if k == dim else 1 for k in range(x.ref.ndim)]
    scale = exact(torch.ones(shape, dtype=torch.float64), x.dtype)
    if weight is not None:
        scale = cast(weight, x.dtype).view(lambda t: t.reshape(shape))
    shifted = _shifted(x, dim)
    losses = _call("mul", _call("sub", _log_total(shifted, dim), shifted), scale)
    result = v.dtype
    if category(target.dtype) == "int":
        if not target.is_exact:
            raise InvalidProgram("the oracle does not know the target classes exactly")
        is_kept = target.ref != ignore_index
        if bool((is_kept & ((target.ref < 0) | (target.ref >= classes))).any()):
            raise InvalidProgram(f"a target is not a class below {classes}")
        places = torch.where(is_kept, target.ref, 0).unsqueeze(dim)
        picked = losses.view(lambda t: t.gather(dim, places).squeeze(dim))
        counts = scale.view(lambda t: t.expand(x.ref.shape).gather(dim, places).squeeze(dim))
        if label_smoothing:
            spread = _call("mul", reduce("sum", losses, dim), label_smoothing / max(classes, 1))
            picked = _call("add", _call("mul", picked, 1.0 - label_smoothing), spread)
        out, counts = (y.view(lambda t: torch.where(is_kept, t, 0.0)) for y in (picked, counts))
        divisor: Val | Num = reduce("sum", counts)
    else:
        share = cast(target, x.dtype)
        if label_smoothing:
            spread = label_smoothing / max(classes, 1)
            share = _call("add", _call("mul", share, 1.0 - label_smoothing), spread)
        out = reduce("sum", _call("mul", share, losses), dim)
        divisor = Num(out.ref.numel(), "Int")
        both = torch.promote_types(*(DTYPES[y.dtype].torch for y in (v, target)))
        result = next(n for n, d in DTYPES.items() if d.torch is both and n != "Index")
    if reduction != "none":
        out = reduce("sum", out)
    return cast(_call("div", out, divisor) if reduction == "mean" else out, result)


MEANINGS: dict[str, Callable[..., Val]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "mean": mean,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu": gelu,
    "dropout": dropout,
    "cross_entropy": cross_entropy,
}


# ------------------------------------------------------------------ the generators
def composite(b: Builder, name: str, make: MakeInput, *, draws: bool) -> None:
    """Appends one of these ops to a floating tensor; `draws` allows ops with random numbers."""
    rng, dims = b.rng, b.dims[name]
    plain = [type(d)(d.vec, d.static) for d in dims]
    if not dims or b.chance(0.25):
        if b.chance(0.6):
            b.emit("gelu", [Ref(name)], dims, approximate=rng.choice(("none", "tanh")))
        else:
            p = rng.choice((0.0, 0.25, 0.5, 1.0) if draws else (0.0, 1.0))
            training = not b.chance(0.3)
            b.emit("dropout", [Ref(name), p], dims, training=training)
        return
    dim = rng.randrange(len(dims)) - (len(dims) if b.chance(0.4) else 0)
    match rng.choice(("softmax", "log_softmax", "mean", "norm", "norm", "cross_entropy")):
        case "mean":
            axes = sorted(rng.sample(range(len(dims)), rng.randint(1, len(dims))))
            keep = b.chance(0.4)
            out = [b.one if k in axes else d for k, d in enumerate(plain) if keep or k not in axes]
            b.emit("mean", [Ref(name), list(axes)], out, True, keepdim=keep)
        case "norm":
            _norm(b, name, make)
        case "cross_entropy":
            _loss(b, name, make)
        case op:
            named: dict[str, Arg] = {"dtype": Dt("Float")} if b.chance(0.2) else {}
            b.emit(op, [Ref(name), dim], plain, True, **named)


def _norm(b: Builder, name: str, make: MakeInput) -> None:
    dims = b.dims[name]
    count = 1 if b.chance(0.7) else b.rng.randint(1, len(dims))
    first = len(dims) - count
    last = [type(d)(d.vec, d.static) for d in dims[first:]]
    shape: list[Arg] = [b.size(name, k) for k in range(first, len(dims))]
    kind = "Float" if b.dtype[name] in (*HALF, *FLOAT8) and b.chance(0.3) else b.dtype[name]
    is_layer = b.chance(0.5)
    fields = ("weight", "bias") if is_layer else ("weight",)
    named: dict[str, Arg] = {}
    if len(b.inputs) < 6 and b.fits(last):
        named = {f: Ref(make(last, kind)) for f in fields if b.chance(0.6)}
    if is_layer or b.chance(0.6):
        named["eps"] = b.rng.choice((1e-5, 0.25))
    out = [type(d)(d.vec, d.static) for d in dims]
    b.emit("layer_norm" if is_layer else "rms_norm", [Ref(name), shape], out, True, **named)


def _loss(b: Builder, name: str, make: MakeInput) -> None:
    dims = [type(d)(d.vec, d.static) for d in b.dims[name]]
    at = min(len(dims) - 1, 1)
    if not all(dims[at].vec) or len(b.inputs) > 6:
        return
    short = [d for k, d in enumerate(dims) if k != at]
    named: dict[str, Arg] = {"reduction": b.rng.choice(("none", "none", "mean", "sum"))}
    if b.chance(0.7):
        below = [f"below {n}" for n in dims[at].vec]
        target = make(short, b.rng.choice(("Int", "Int", "Int32")), below)
        if b.chance(0.3):
            named["ignore_index"] = 0
    else:
        if not b.fits(dims):
            return
        target = name if b.chance(0.2) else make(dims, b.dtype[name])
    if b.chance(0.3):
        named["weight"] = Ref(make([dims[at]], b.dtype[name]))
    if b.chance(0.3):
        named["label_smoothing"] = 0.125
    out: list[Dim] = short if named["reduction"] == "none" else []
    b.emit("cross_entropy", [Ref(name), Ref(target)], out, True, **named)
