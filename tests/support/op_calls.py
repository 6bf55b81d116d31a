"""Calls of each op that is not in the table of elementwise ops, and torch's results for them.

Dtypes, ranks and values of the operands are those of the op's sample class. The torch functions are
written here from the documentation of the ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.attention_ops import SdpaFwdOp, TensorOp
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    FullOp,
    IotaOp,
    LoadStoreOp,
    ReshapeOp,
    SliceOp,
)
from fuser.ir.scalar.constructors import Scalar
from fuser.ops.define import define_scalar
from fuser.ops.rows import ROWS
from tests.support.op_cases import CASES, LAYOUTS, TOLERANCE, draw_operand, lay_out, widened
from tests.support.op_samples import sample_of

D = DataType
Tensor = torch.Tensor
Shape = tuple[int, ...]
DTYPES = {
    "w": (D.Float, D.Double),
    "f": (D.Float, D.Double, D.Half, D.BFloat16),
    "i": (D.Int, D.Int32),
    "b": (D.Bool,),
    "c": (D.ComplexFloat, D.ComplexDouble),
}
# Extents 0, 1, primes.
SHAPES: tuple[Shape, ...] = (
    (),
    (0,),
    (1,),
    (7,),
    (3, 0),
    (5, 13),
    (1, 4),
    (2, 3, 11),
    (2, 1, 3, 5),
)


@dataclass(frozen=True)
class OpCall:
    """How to call an op on operands, and the torch function to compare with.

    Without a torch function (None), only shape and dtype of the results are checked. `shapes` are
    the shapes of the operands; by default one operand of each rank of the sample class.
    """

    build: Callable[..., Any]
    torch: Callable[..., Any]
    shapes: Sequence[tuple[Shape, ...]] | None = None
    is_random: bool = False
    # Classes of other nodes that the call may add to the fusion.
    beside: tuple[type[TensorOp], ...] = ()
    # The error allowed for each result, in units of the operands' dtype, where a library's kernel
    # rounds intermediate values; None: the error allowed for any result of its dtype.
    off: Callable[..., tuple[Tensor, ...]] | None = None


def _total(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=_total(x))


def _prod(x: Tensor) -> Tensor:
    return x.prod(-1, dtype=_total(x))


def _extreme(fn: Callable[..., Tensor], empty: float) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        if x.shape[-1]:
            return fn(x, -1)
        least = fn is torch.amax
        if x.dtype is torch.bool:
            value: float | bool = not least
        elif x.is_floating_point():
            value = empty
        else:
            value = torch.iinfo(x.dtype).min if least else torch.iinfo(x.dtype).max
        return torch.full(x.shape[:-1], value, dtype=x.dtype)

    return reduce


def _variance(x: Tensor) -> Tensor:
    n = x.shape[-1]
    deviation = ((x - x.mean(-1, keepdim=True)).abs() ** 2).sum(-1)
    return deviation / max(n - 1, 0) if n > 1 else deviation / torch.zeros(())


def _welford(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1)
    deviation = ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1)
    return mean, deviation, torch.full(mean.shape, x.shape[-1], dtype=torch.int64)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def _attend(q: TensorView, k: TensorView, v: TensorView) -> TensorView:
    return ops.sdpfa_fwd(q, k, v, None, None, 0.0, False, None)[0]


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    read = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(_attention(*read), read, g)


def _gradients_off(q: Tensor, k: Tensor, v: Tensor, g: Tensor, unit: float) -> tuple[Tensor, ...]:
    """Returns error bounds for attention kernels that round intermediate values.

    Rounded by up to `unit` of themselves are: weights, the output that the gradient reads, the
    difference in the softmax gradient, gradients of scores, and results. Sums are taken as exact.
    """
    factor = q.shape[-1] ** -0.5
    weights = torch.softmax(q @ k.mT * factor, -1)
    out, by_value = weights @ v, g @ v.mT
    mean = (g * out).sum(-1, keepdim=True)
    mean_off = unit * (g.abs() * (out.abs() + weights @ v.abs())).sum(-1, keepdim=True)
    difference = by_value - mean
    scores_off = weights * (mean_off + 3 * unit * difference.abs()) * factor
    results = _gradients(q, k, v, g)
    summed = scores_off @ k.abs(), scores_off.mT @ q.abs(), unit * (weights.mT @ g.abs())
    return tuple(a + unit * b.abs() for a, b in zip(summed, results, strict=True))


def _attend_back(q: TensorView, k: TensorView, v: TensorView, g: TensorView) -> Any:
    out, sums, seed, offset = ops.sdpfa_fwd(q, k, v, None, None, 0.0, False, None)
    return ops.sdpfa_bwd(g, q, k, v, out, sums, 0.0, False, seed, offset, None)


def _lerp(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return a + w * (b - a)


def _threes() -> list[tuple[Shape, ...]]:
    return [(s,) * 3 for s in SHAPES]


_MATRICES: list[tuple[Shape, ...]] = [
    ((4,), (4,)),
    ((3, 5), (5,)),
    ((3, 5), (5, 2)),
    ((2, 3, 5), (5, 7)),
    ((2, 3, 5), (2, 5, 4)),
    ((3, 0), (0, 2)),
    ((3, 1), (1, 2)),
]
_HEADS: list[tuple[Shape, ...]] = [((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))]


def _as_case(name: str) -> OpCall:
    """Returns the call of an elementwise op that takes scalars too, from its row in
    `op_cases.CASES`.

    The case of integers is used if there is one.
    """
    cases = [c for c in CASES if c.name == name]
    case = next((c for c in cases if c.dtypes[0] is D.Int), cases[0])
    function = getattr(ops, name)
    return OpCall(
        lambda *xs: function(*xs, *case.scalars),
        lambda *xs: case.torch(*xs, *case.scalars),
        [(s,) * len(case.dtypes) for s in SHAPES],
    )


_ELEMENTWISE = "addcmul clamp complex imag logical_right_shift real segment_set set sign threshold"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns torch's linear; for a batch of weights, one result for each, stacked."""
    if weight.ndim == 2:
        return functional.linear(x, weight, bias)
    if not len(weight):
        return x.new_zeros(*weight.shape[:-2], *x.shape[:-1], weight.shape[-2])
    biases = [None] * len(weight) if bias is None else bias
    return torch.stack([linear(x, w, b) for w, b in zip(weight, biases, strict=True)])


CALLS: dict[str, OpCall] = {
    **{name: _as_case(name) for name in _ELEMENTWISE.split()},
    "broadcast": OpCall(
        lambda x: ops.broadcast(x, [True] + [False] * x.ndim), lambda x: x.unsqueeze(0)
    ),
    "broadcast_in_dim": OpCall(
        lambda x: ops.broadcast_in_dim(x, [*x.shape(), 4], list(range(x.ndim))),
        lambda x: x.unsqueeze(-1).expand(*x.shape, 4),
    ),
    "cast": OpCall(
        lambda x: ops.cast(x, D.Float),
        lambda x: (x.real if x.is_complex() else x).to(torch.float32),
    ),
    "cat": OpCall(
        lambda a, b: ops.cat([a, b], -1),
        lambda a, b: torch.cat([a, b], -1),
        [((3,), (4,)), ((0,), (2,)), ((2, 1), (2, 5)), ((3, 0), (3, 0))],
    ),
    "expand": OpCall(lambda x: ops.expand(x, [3, *x.shape()]), lambda x: x.expand(3, *x.shape)),
    "full": OpCall(
        lambda: ops.full([2, 3], 1.5, D.Double),
        lambda: torch.full([2, 3], 1.5, dtype=torch.float64),
        [()],
    ),
    "iota": OpCall(
        lambda: ops.iota(5, 2, 3, D.Int32), lambda: 2 + 3 * torch.arange(5, dtype=torch.int32), [()]
    ),
    "lerp": OpCall(ops.lerp, _lerp, _threes()),
    "linear": OpCall(
        ops.linear,
        linear,
        [
            ((5,), (3, 5)),
            ((2, 5), (3, 5)),
            ((2, 4, 5), (3, 5), (3,)),
            ((2, 0), (3, 0)),
            ((5,), (2, 3, 5)),
            ((4, 5), (2, 6, 3, 5), (2, 6, 3)),
            ((2, 4, 5), (1, 3, 5), (1, 3)),
            ((2, 0), (2, 3, 0), (2, 3)),
        ],
    ),
    "matmul": OpCall(ops.matmul, torch.matmul, _MATRICES),
    "max": OpCall(lambda x: ops.max(x, -1), _extreme(torch.amax, -math.inf)),
    "min": OpCall(lambda x: ops.min(x, -1), _extreme(torch.amin, math.inf)),
    "normal": OpCall(
        lambda: ops.normal(0.0, 1.0, [2, 3], dtype=D.Float, rng_seed=1, rng_offset=2),
        lambda: torch.empty(2, 3),
        [()],
        is_random=True,
    ),
    "pad": OpCall(lambda x: ops.pad(x, [1, 2]), lambda x: functional.pad(x, [1, 2])),
    "permute": OpCall(
        lambda x: ops.permute(x, list(reversed(range(x.ndim)))),
        lambda x: x.permute(*reversed(range(x.ndim))),
    ),
    "prod": OpCall(lambda x: ops.prod(x, -1), _prod),
    "rand_like": OpCall(ops.rand_like, torch.empty_like, is_random=True),
    "randn_like": OpCall(ops.randn_like, torch.empty_like, is_random=True),
    "reshape": OpCall(lambda x: ops.reshape(x, [-1]), lambda x: x.reshape(-1)),
    "sdpfa_bwd": OpCall(
        _attend_back,
        _gradients,
        [(*s, (2, 3, 5, 6)) for s in _HEADS],
        beside=(SdpaFwdOp,),
        off=_gradients_off,
    ),
    "sdpfa_fwd": OpCall(_attend, _attention, _HEADS),
    "shape": OpCall(ops.shape, lambda x: list(x.shape), beside=(FullOp,)),
    "size": OpCall(lambda x: ops.size(x, -1), lambda x: x.shape[-1], beside=(FullOp,)),
    "slice": OpCall(
        lambda x: ops.slice(x, [0] * x.ndim, [2] * x.ndim), lambda x: x[(slice(2),) * x.ndim]
    ),
    "squeeze": OpCall(
        lambda x: ops.squeeze(x, [-1]), lambda x: x.squeeze(-1), [((1,),), ((3, 1),), ((0, 2, 1),)]
    ),
    "stride_order": OpCall(lambda x: ops.stride_order(x, list(range(x.ndim))), lambda x: x),
    "sum": OpCall(lambda x: ops.sum(x, -1), _sum),
    "triu": OpCall(lambda x: ops.triu(x, 1), lambda x: x.triu(1)),
    "uniform": OpCall(
        lambda: ops.uniform(0.0, 1.0, [2, 3], dtype=D.Double, rng_seed=1, rng_offset=2),
        lambda: torch.empty(2, 3, dtype=torch.float64),
        [()],
        is_random=True,
    ),
    "var": OpCall(lambda x: ops.var(x, [-1]), _variance),
    "var_mean": OpCall(lambda x: ops.var_mean(x, [-1]), lambda x: (_variance(x), x.mean(-1))),
    "welford": OpCall(lambda x: ops.welford(x, [-1]), _welford),
}


def _places(rank: int, count: int, *, backward: bool = False) -> TensorView:
    """Returns indices 0, 1, .. along the last axis; all other extents are 1."""
    places = ops.iota(count, count - 1, -1) if backward else ops.iota(count)
    return ops.reshape(places, [1] * (rank - 1) + [count])


def _first_rows(x: TensorView) -> tuple[list[int], list[Any]]:
    return [0] * x.ndim, [2, *x.shape()[1:]]


def _first_again(x: Tensor) -> Tensor:
    """Returns x with its first two rows added to row 0."""
    return torch.cat([x[:1] + x[:1] + x[1:2], x[1:]])


_PLACES = (IotaOp, BroadcastOp, ReshapeOp, LoadStoreOp)
_READ: list[tuple[Shape, ...]] = [((5,),), ((2, 7),), ((3, 1, 4),), ((2, 1, 3, 5),), ((0, 3),)]
_WRITTEN: list[tuple[Shape, ...]] = [((5,),), ((1, 7),), ((1, 1, 4),)]
CALLS |= {
    "embedding_fwd": OpCall(
        lambda x: ops.embedding_fwd(ops.iota(2), x),
        lambda x: x[:2],
        [((2, 3),), ((5, 0),), ((7, 13),)],
        beside=_PLACES,
    ),
    "gather": OpCall(
        lambda x: ops.gather(x, _places(x.ndim, 3), -1),
        lambda x: x[(slice(1),) * (x.ndim - 1)][..., :3],
        [s for s in _READ if s != ((0, 3),)],
        beside=_PLACES,
    ),
    "index_select": OpCall(
        lambda x: ops.index_select(x, ops.iota(3), -1),
        lambda x: x[..., :3],
        _READ,
        beside=_PLACES,
    ),
    "index_put_accumulate": OpCall(
        lambda x: ops.index_put_accumulate(
            x, ops.full([2], 0, D.Int), ops.slice(x, *_first_rows(x))
        ),
        _first_again,
        [((5,),), ((2, 7),), ((3, 1, 4),), ((2, 1, 3, 5),), ((3, 0),)],
        beside=(FullOp, SliceOp, LoadStoreOp),
    ),
    "scatter": OpCall(
        lambda x: ops.scatter(x, _places(x.ndim, 3, backward=True), x, -1),
        lambda x: torch.cat([x[..., :3].flip(-1), x[..., 3:]], -1),
        _WRITTEN,
        beside=_PLACES,
    ),
    "select": OpCall(
        lambda x: ops.select(x, define_scalar(-2, D.Int), -1), lambda x: x[..., -2], _READ
    ),
    "take_along_axis": OpCall(
        lambda x: ops.take_along_axis(x, _places(x.ndim, 3), -1),
        lambda x: x[..., :3],
        _READ,
        beside=_PLACES,
    ),
}


def _losses(x: TensorView) -> list[TensorView]:
    """Returns cross entropies: with labels 0, with label smoothing, with probabilities."""
    others = [n for i, n in enumerate(x.shape()) if i != min(x.ndim - 1, 1)]
    target = ops.full(others, 0, D.Int)
    return [
        ops.cross_entropy(x, target, reduction="none"),
        ops.cross_entropy(x, target, label_smoothing=0.25),
        ops.cross_entropy(x, x, reduction="sum"),
    ]


def _losses_of_torch(x: Tensor) -> list[Tensor]:
    dim = min(x.ndim - 1, 1)
    target = torch.zeros([n for i, n in enumerate(x.shape) if i != dim], dtype=torch.int64)
    return [
        functional.cross_entropy(x, target, reduction="none"),
        functional.cross_entropy(x, target, label_smoothing=0.25),
        functional.cross_entropy(x, x, reduction="sum"),
    ]


_NORMED: list[tuple[Shape, ...]] = [((s), (s[-1],), (s[-1],)) for s in SHAPES if s]
CALLS |= {
    "softmax": OpCall(lambda x: ops.softmax(x, -1), lambda x: functional.softmax(x, -1)),
    "log_softmax": OpCall(lambda x: ops.log_softmax(x, 0), lambda x: functional.log_softmax(x, 0)),
    "mean": OpCall(
        lambda x: [ops.mean(x, 0), ops.mean(x, keepdim=True)],
        lambda x: [x.mean(0), x.mean(keepdim=True, dim=list(range(x.ndim)))],
    ),
    "gelu": OpCall(
        lambda x: [ops.gelu(x), ops.gelu(x, "tanh")],
        lambda x: [functional.gelu(x), functional.gelu(x, approximate="tanh")],
    ),
    "dropout": OpCall(ops.dropout, torch.empty_like, is_random=True),
    "layer_norm": OpCall(
        lambda x, w, b: ops.layer_norm(x, [x.size(-1)], w, b),
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b),
        _NORMED,
    ),
    "rms_norm": OpCall(
        lambda x, w, _: [
            ops.rms_norm(x, [x.size(-1)], w, 1e-6),
            ops.rms_norm(x, x.shape(), eps=0.5),
        ],
        lambda x, w, _: [
            functional.rms_norm(x, x.shape[-1:], w, 1e-6),
            functional.rms_norm(x, x.shape, eps=0.5),
        ],
        _NORMED,
    ),
    "cross_entropy": OpCall(
        _losses,
        _losses_of_torch,
        [((5,),), ((3, 7),), ((0, 3),), ((2, 1),), ((2, 3, 11),), ((2, 4, 3, 5),)],
        beside=(FullOp,),
    ),
}


def _scanned(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Returns the result of a scan in the dtype of its operand; rows may be empty."""

    def scan(x: Tensor) -> Tensor:
        parts = [fn(x[..., :n], -1).to(x.dtype) for n in range(1, x.shape[-1] + 1)]
        return torch.stack(parts, -1) if parts else x

    return scan


def _grouped(a: Tensor, b: Tensor, alpha: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Returns the products of two groups, which end at 2 and at 5, each times a factor."""
    if a.ndim == b.ndim:
        return torch.stack([alpha[0] * a[:, :2] @ b[:2], alpha[1] * a[:, 2:] @ b[2:]])
    if a.ndim == 3:
        return torch.cat([alpha[0] * a[0] @ b[:, :2], alpha[1] * a[1] @ b[:, 2:]], 1)
    return torch.cat([alpha[0] * a[:2] @ b[0], alpha[1] * a[2:] @ b[1]])


def _grouped_and_scaled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    few = a.to(torch.float8_e4m3fn).double(), b.to(torch.float8_e5m2).double()
    return _grouped(a, b), _grouped(*few, alpha=(1.5, 3.0))


def _group(a: TensorView, b: TensorView) -> tuple[TensorView, TensorView]:
    ends, few = (
        ops.iota(2, 2, 3, D.Int32),
        (ops.cast(a, D.Float8_e4m3fn), ops.cast(b, D.Float8_e5m2)),
    )
    scales = ops.full([], 0.5, D.Float), ops.full([1, 1], 3.0, D.Float)
    alpha = ops.iota(2, 1.0, 1.0, D.Float)
    out, _, _ = ops.grouped_mm(*few, ends, *scales, alpha, dtype=D.Double)
    return ops.grouped_mm(a, b, ends), out


def _scaled(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x.real if x.is_complex() else x for x in (a, b))
    return 1.5 * (a.to(torch.float8_e4m3fn).double() @ b.to(torch.float8_e5m2).double())


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (x.real if x.is_complex() else x).double().unflatten(-1, (-1, 32))
    # 2**-127 is the least scale.
    exponents = torch.log2(blocks.abs().amax(-1) / 448).ceil().clamp(min=-127)
    values = (blocks / 2 ** exponents.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return values.flatten(-2), (2**exponents).float().to(torch.float8_e8m0fnu)


def _in_tiles(x: Tensor, count: int) -> Tensor:
    """Returns the scales of a matrix in the tiled order of block-scaled products, element by
    element.
    """
    # The least value of a dtype without 0 has no bits.
    nothing = 2.0**-127 if x.dtype is torch.float8_e8m0fnu else 0.0
    columns = -(-x.shape[1] // 4)
    out = torch.full((count * columns * 512,), nothing, dtype=widened(x).dtype).to(x.dtype)
    for r, c in itertools.product(*map(range, x.shape)):
        tile = r // 128 * columns + c // 4
        out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = x[r, c]
    return out.view(count * 128, columns * 4)


def _quantize(x: TensorView) -> list[TensorView]:
    """Returns quantized values and their scales; for a matrix also the scales in tiled order."""
    x = ops.cast(x, D.Float)
    found = list(ops.nv_block_quantize(x, block_size=32, dtype=D.Float8_e4m3fn))
    if x.ndim == 2:
        found.append(ops.nv_block_quantize(x, None, True, 32, D.Float8_e4m3fn)[1])
    return found


def _quantized_tiled(x: Tensor) -> list[Tensor]:
    values, scales = _quantized(x)
    if x.ndim != 2:
        return [values, scales]
    return [values, scales, _in_tiles(scales, -(-len(x) // 128))]


def _halves(m: Any) -> tuple[TensorView, TensorView]:
    """Returns the offsets at which the two halves of m rows begin, in rows and in tiles."""
    half = ops.div(ops.add(m, 1), 2)
    return ops.cast(ops.mul(ops.iota(2), half), D.Int32), ops.iota(2, 0, 128, D.Int32)


def _in_halves(x: Tensor) -> Tensor:
    half = (len(x) + 1) // 2
    return torch.cat([_in_tiles(x[:half], 1), _in_tiles(x[half:], (len(x) + 254) // 128 - 1)])


def _quantized_in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = _quantized(x)
    return values, _in_halves(scales)


_HALVED = (IotaOp, BinaryOp, CastOp)
_CHOSEN: list[tuple[Shape, ...]] = [((5,),), ((2, 7),), ((3, 1, 4),), ((0, 3),)]
CALLS |= {
    "argsort": OpCall(
        lambda x: ops.argsort(x, -1, stable=True),
        lambda x: torch.sort(x, dim=-1, stable=True).indices,
    ),
    "cummax": OpCall(lambda x: ops.cummax(x, -1), _scanned(torch.amax)),
    "cummin": OpCall(lambda x: ops.cummin(x, -1), _scanned(torch.amin)),
    "cumprod": OpCall(lambda x: ops.cumprod(x, -1), _scanned(torch.prod)),
    "cumsum": OpCall(lambda x: ops.cumsum(x, -1), _scanned(torch.sum)),
    "grouped_mm": OpCall(
        _group,
        _grouped_and_scaled,
        [((4, 5), (5, 3)), ((2, 4, 3), (3, 5)), ((5, 4), (2, 4, 3)), ((5, 0), (2, 0, 3))],
        beside=(IotaOp, FullOp),
    ),
    "nv_block_quantize": OpCall(
        _quantize,
        _quantized_tiled,
        [((32,),), ((3, 64),), ((0, 32),), ((2, 1, 96),), ((130, 160),), ((1, 32),), ((2, 0),)],
    ),
    "nv_grouped_block_quantize": OpCall(
        lambda x: ops.nv_grouped_block_quantize(
            ops.cast(x, D.Float), *_halves(x.size(0)), None, 32, D.Float8_e4m3fn
        ),
        _quantized_in_halves,
        [((5, 64),), ((1, 32),), ((0, 32),), ((130, 96),), ((3, 0),)],
        beside=_HALVED,
    ),
    "preprocess_grouped_matmul_input_sf": OpCall(
        lambda x: ops.preprocess_grouped_matmul_input_sf(x, *_halves(x.size(0))),
        _in_halves,
        [((5, 3),), ((1, 1),), ((0, 4),), ((130, 6),), ((3, 0),)],
        beside=_HALVED,
    ),
    "scaled_mm": OpCall(
        lambda a, b: ops.scaled_mm(
            ops.cast(a, D.Float8_e4m3fn),
            ops.cast(b, D.Float8_e5m2),
            ops.full([], 0.5, D.Float),
            ops.full([1, 1], 3.0, D.Float),
            dtype=D.Double,
        )[0],
        _scaled,
        [((4, 5), (5, 3)), ((3, 1), (1, 2)), ((2, 0), (0, 3))],
        beside=(FullOp,),
    ),
    "topk": OpCall(
        # Which of equal elements are taken is not said: the values say.
        lambda x: ops.topk(x, define_scalar(2, D.Int), sorted=True)[0],
        lambda x: x.sort(-1, descending=True).values[..., :2],
        _CHOSEN,
    ),
}


@dataclass(frozen=True)
class Drawn:
    """One call of an op: the definition, its inputs, and the op's results; sizes are outputs
    too.
    """

    fusion: Fusion
    inputs: list[Tensor]
    results: list[TensorView | Scalar]
    dtype: DataType | None


def calls_of(name: str) -> Iterator[Drawn]:
    """Yields calls of an op for each dtype and shape of its sample class; layouts take turns."""
    call, sample = CALLS[name], sample_of(ROWS[name])
    low, high = sample.ranks
    shapes = call.shapes or [(s,) for s in SHAPES if low <= len(s) <= high]
    dtypes = [d for c in sample.takes for d in DTYPES[c]] or [None]
    generator = torch.Generator().manual_seed(0)
    for seed, (dtype, operands) in enumerate(itertools.product(dtypes, shapes)):
        domains = itertools.cycle(sample.domains)
        layout = LAYOUTS[seed % len(LAYOUTS)]
        inputs = [
            lay_out(draw_operand(next(domains), dtype or D.Float, s, generator), layout)
            for s in operands
        ]
        with FusionDefinition() as fd:
            made = call.build(*map(fd.from_pytorch, inputs))
            results = list(made) if isinstance(made, list | tuple) else [made]
            for r in results:
                fd.add_output(r if isinstance(r, TensorView) else fd.ops.full([], r, D.Int))
        yield Drawn(fd.fusion, inputs, results, dtype)


def expected_of(name: str, inputs: Sequence[Tensor], *, is_wide: bool) -> list[Any]:
    """Returns torch's results; if `is_wide`, floating operands are in float64."""
    given = [widened(x) if is_wide else x for x in inputs]
    found = CALLS[name].torch(*given)
    return list(found) if isinstance(found, list | tuple) else [found]


def assert_near(mine: Tensor, want: Any, dtype: DataType, what: str) -> None:
    """Compares with torch's result, within the tolerance of `dtype`; complex parts
    separately.
    """
    rtol, atol = TOLERANCE.get(dtype, (0, 0))
    want = torch.as_tensor(want)
    assert mine.shape == want.shape, what
    wide = torch.complex128 if mine.is_complex() else torch.float64
    torch.testing.assert_close(
        mine.to(wide),
        want.to(wide),
        rtol=4 * rtol,
        atol=4 * atol,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )
