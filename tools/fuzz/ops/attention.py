"""The oracle's attention: its value in float64, with error bounds.

The error of a result follows from the error of each score. Weights are exponentials of scores, so
an error of d changes a weight by a factor of at most exp(2d).
"""

from __future__ import annotations

import math

import torch

from tools.fuzz.table import DTYPES, HALF
from tools.fuzz.values import INF, Num, Tensor, Val, exact, nonnan, overflow, stored


def _depth(n: int) -> float:
    return min(n, 16 + 6 * n**0.5) + 4


class _Weights:
    """The weights of rows, their logarithmic sums, and the error bounds of both."""

    def __init__(
        self,
        query: Val,
        key: Val,
        bias: Val | None,
        mask: Val | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        self.dtype = query.dtype
        self.eps = DTYPES["Float" if query.dtype in HALF else query.dtype].eps
        # Torch rounds weights, and some of their sums, to the dtype of the operands.
        self.half_eps = DTYPES[query.dtype].eps if query.dtype in HALF else 0.0
        e = query.ref.shape[-1]
        self.scale = 1 / math.sqrt(max(e, 1)) if scale is None else scale
        scores = query.ref @ key.ref.mT * self.scale
        sizes = query.ref.abs() @ key.ref.abs().mT * abs(self.scale)
        bound = query.ref.abs() @ key.bound.mT + query.bound @ (key.ref.abs() + key.bound).mT
        bound = nonnan(bound) * abs(self.scale) + _depth(e) * self.eps * sizes
        if bias is not None:
            scores = scores + bias.ref
            bound = bound + bias.bound + 2 * self.eps * (scores.abs() + bias.ref.abs())
        if mask is not None:
            scores = torch.where(mask.ref, scores, -INF)
            bound = torch.where(mask.bound > 0, INF, bound)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -INF)
        # A masked score has no error.
        bound = torch.where(scores == -INF, bound * 0, bound)
        off = nonnan(bound).amax(-1) if scores.shape[-1] else bound.sum(-1)
        self.log_sums = scores.logsumexp(-1)
        count = _depth(scores.shape[-1]) * self.eps
        largest = torch.where(scores == -INF, 0.0, scores.abs()).sum(-1)
        largest = torch.minimum(largest, self.log_sums.abs().nan_to_num(0, 0, 0) + 80)
        self.log_bound = off + count + self.half_eps + DTYPES["Float"].eps * 4 * (largest + 1)
        lse = self.log_sums.unsqueeze(-1)
        self.ref = (scores - lse).exp().masked_fill(lse == -INF, 0)
        # The relative error of a weight.
        self.off = torch.expm1(2 * self.log_bound).unsqueeze(-1) + count + self.half_eps
        self.off = nonnan(self.off)

        # Weights that are too small become 0.
        facts, wide = DTYPES[self.dtype], DTYPES["Float" if self.dtype in HALF else self.dtype]
        self.least = torch.where(scores == -INF, 0.0, facts.tiny * facts.eps + wide.tiny)

    @property
    def bound(self) -> Tensor:
        return nonnan(self.ref * self.off + self.least)


def _times(a: Tensor, a_bound: Tensor, b: Tensor, b_bound: Tensor, eps: float) -> Tensor:
    """Returns the error bound of a @ b; `eps` is the relative error of one term."""
    off = a.abs() @ b_bound + a_bound @ (b.abs() + b_bound)
    return nonnan(off + _depth(a.shape[-1]) * eps * (a.abs() @ b.abs()))


def _result(ref: Tensor, bound: Tensor, dtype: str) -> Val:
    known = torch.where(torch.isfinite(ref), nonnan(bound) + DTYPES[dtype].tiny, INF)
    # No result counts as exact: libraries round intermediate values.
    out = overflow(Val(ref, known, "Float" if dtype in HALF else dtype))
    return stored(out.ref, out.bound, dtype) if dtype in HALF else out


def _seeds() -> list[Val]:
    return [exact(torch.zeros(s, dtype=torch.int64), "UInt64") for s in ((2,), ())]


def forward(
    query: Val,
    key: Val,
    value: Val,
    bias: Val | None = None,
    mask: Val | None = None,
    is_causal: bool = False,
    scale: float | Num | None = None,
) -> list[Val]:
    """Returns output, log_sumexp, and the seed and offset of a run without dropout."""
    w = _Weights(query, key, bias, mask, is_causal, _number(scale))
    out = w.ref @ value.ref
    bound = _times(w.ref, w.bound, value.ref, value.bound, w.eps)
    sums = torch.where(torch.isnan(w.log_sums) | (w.log_sums == INF), INF, nonnan(w.log_bound))
    # The sum of a row without scores is known.
    sums = torch.where((w.log_sums == -INF) & (w.log_bound < 1), 0.0, sums)
    log_sums = Val(w.log_sums, sums, "Float")
    return [_result(out, bound, query.dtype), log_sums, *_seeds()]


def backward(
    grad: Val,
    query: Val,
    key: Val,
    value: Val,
    output: Val,
    log_sumexp: Val,
    dropout_p: None,
    is_causal: bool,
    seed: Val,
    offset: Val,
    scale: float | Num | None,
) -> list[Val]:
    """Returns the gradients of query, key and value."""
    del dropout_p, seed, offset, log_sumexp
    w = _Weights(query, key, None, None, is_causal, _number(scale))
    eps = w.eps + w.half_eps
    by_value = grad.ref @ value.ref.mT
    by_value_bound = _times(grad.ref, grad.bound, value.ref.mT, value.bound.mT, eps)
    mean = (grad.ref * output.ref).sum(-1, keepdim=True)
    mean_bound = (
        grad.ref.abs() * output.bound
        + grad.bound * (output.ref.abs() + output.bound)
        + _depth(grad.ref.shape[-1]) * eps * (grad.ref * output.ref).abs()
    ).sum(-1, keepdim=True)
    difference = by_value - mean
    scores = w.ref * difference
    sizes = by_value.abs() + mean.abs()
    bound = w.ref * (1 + w.off) * (by_value_bound + mean_bound + 2 * eps * sizes)
    bound = nonnan(bound + w.bound * sizes) * abs(w.scale)
    if sizes.numel():
        # Torch stores these in the dtype of the operands: an overflow there spoils every sum that
        # uses it.
        largest = sizes.nan_to_num(INF).amax((-2, -1), keepdim=True)
        bound = torch.where(largest > DTYPES[w.dtype].largest / 8, INF, bound)
    scores = scores * w.scale
    key_bound = _times(scores.mT, bound.mT, query.ref, query.bound, eps)
    return [
        _result(scores @ key.ref, _times(scores, bound, key.ref, key.bound, eps), query.dtype),
        _result(scores.mT @ query.ref, key_bound, query.dtype),
        _result(
            w.ref.mT @ grad.ref,
            _times(w.ref.mT, w.bound.mT, grad.ref, grad.bound, eps),
            query.dtype,
        ),
    ]


def _number(value: float | Num | None) -> float | None:
    if not isinstance(value, Num):
        return value
    assert not isinstance(value.value, complex)
    return float(value.value)
