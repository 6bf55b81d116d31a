"""How torch computes attention: its kernels where they take the operands, else step by step.

Operands are [.., N, H, L, E]. All ways give the same results, but for which numbers are dropped.
"""

from __future__ import annotations

import torch

from fuser.errors import InputError
from fuser.ops.attention_kernels import Attention, Forward, Given, Kept, kernel_for, wide
from fuser.ops.philox import random_numbers

Tensor = torch.Tensor
# Of output, log_sumexp, philox_seed and philox_offset, which are read.
ALL = (True, True, True, True)


# ------------------------------------------------------------------ forward
@torch.no_grad()
def forward(
    call: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    is_oracle: bool = False,
    reads: tuple[bool, ...] = ALL,
) -> list[Tensor]:
    """Return output, log_sumexp, philox_seed and philox_offset; in float64 where the operands are
    and `is_oracle` says that nothing else will do. What nobody `reads`, but for the output, has no
    elements."""
    _check(call, *operands)
    leading = torch.broadcast_shapes(*(t.shape[:-2] for t in operands))
    query, key, value = (t.expand(*leading, *t.shape[-2:]) for t in operands)
    if query.is_meta:
        shape, where = query.shape[:-1], query.device
        out = query.new_empty((*shape, value.shape[-1]))
        return [out, query.new_empty(shape, dtype=torch.float32), *_seed(where, None, ALL)]
    folded = _folded(query), _folded(key), _folded(value)
    added = _added(bias, mask, query)
    added = None if added is None else _folded(added.expand(*leading, *added.shape[-2:]))
    given = Given(call, *folded, added, reads[1])
    kernel = None if is_oracle else kernel_for(given)
    if kernel is not None:
        found = kernel.forward(given)
    else:
        found = _step_by_step(call, *folded, added)
    shape = query.shape[:-1]
    out = found.out.reshape(*shape, value.shape[-1])
    log_sumexp = found.log_sumexp.reshape(shape) if reads[1] else query.new_empty(0)
    return [out, log_sumexp, *_seed(query.device, found.seed, reads)]


def _check(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise InputError(f"{call.name}: query, key and value do not fit together: {shapes}")


def _folded(t: Tensor) -> Tensor:
    """Return a tensor of four axes: those in front of N become a part of it."""
    return t if t.dim() == 4 else t.flatten(0, -4)


def _added(bias: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to scores for a bias and a mask."""
    if mask is None:
        return bias
    # 0 and -inf are exact in every dtype.
    start = query.new_zeros(()) if bias is None else bias
    return torch.where(mask, start, -torch.inf)


def _seed(device: torch.device, seed: Tensor | None, reads: tuple[bool, ...]) -> list[Tensor]:
    """Return seed and offset as a user gets them."""
    sizes = [
        shape if is_read else (0,) for shape, is_read in zip(((2,), ()), reads[2:], strict=True)
    ]
    made = [torch.zeros(size, dtype=torch.uint64, device=device) for size in sizes]
    return made if seed is None else [seed, made[1]]


def _draw(device: torch.device) -> Tensor:
    """Return a seed from torch's generator of the CPU."""
    number = int(torch.empty((), dtype=torch.int64).random_())
    return torch.tensor((number, 0), dtype=torch.int64, device=device).view(torch.uint64)


# ------------------------------------------------------------------ backward
@torch.no_grad()
def backward(
    call: Attention,
    grad_output: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    is_oracle: bool = False,
) -> list[Tensor]:
    """Return the gradients of the operands; `results` are those of `forward`."""
    _check(call, *operands)
    if grad_output.is_meta:
        return [torch.empty_like(t) for t in operands]
    out, log_sumexp, seed, offset = results
    folded = _folded(operands[0]), _folded(operands[1]), _folded(operands[2])
    grad, query = _folded(grad_output), folded[0]
    kept = Kept(_folded(out), log_sumexp.reshape(grad.shape[:-1]), seed, offset)
    # Of doubles, what forward gave is rounded to float32: too few digits for a kernel.
    has_digits = log_sumexp.dtype is wide(query.dtype) and not is_oracle
    kernel = kernel_for(Given(call, *folded)) if has_digits else None
    if kernel is not None:
        found = kernel.backward(call, grad, folded, kept)
    else:
        found = _step_by_step_backward(call, grad, *folded, kept.log_sumexp, seed)
    return [g.reshape(t.shape) for g, t in zip(found, operands, strict=True)]


# ------------------------------------------------------------------ step by step
def _scores(call: Attention, query: Tensor, key: Tensor, added: Tensor | None) -> Tensor:
    scores = torch.matmul(query, key.mT) * call.factor(query)
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if call.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _weights(scores: Tensor, log_sumexp: Tensor) -> Tensor:
    """Return the softmax of scores; 0 in rows without any."""
    lse = log_sumexp.unsqueeze(-1)
    return torch.exp(scores - lse).masked_fill(lse.isneginf(), 0)


def _kept(call: Attention, weights: Tensor, seed: Tensor | None) -> Tensor | None:
    """Return the factors of weights that are dropped, or are not; None where all are kept."""
    if not call.dropout_p or seed is None:
        return None
    places = torch.arange(weights.numel(), device=weights.device).view(weights.shape)
    first, offset = seed.view(torch.int64).tolist()
    drawn = random_numbers(
        "uniform", places, (0.0, 1.0), seed=first, offset=offset, dtype=torch.float32
    )
    return (drawn >= call.dropout_p).to(weights.dtype) / (1 - call.dropout_p)


def _step_by_step(
    call: Attention, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None
) -> Forward:
    query, key, value = (t.to(wide(t.dtype)) for t in (query, key, value))
    scores = _scores(call, query, key, added)
    log_sumexp = torch.logsumexp(scores, -1)
    weights = _weights(scores, log_sumexp)
    seed = _draw(query.device) if call.dropout_p else None
    kept = _kept(call, weights, seed)
    return Forward(
        torch.matmul(weights if kept is None else weights * kept, value), log_sumexp, seed
    )


def _step_by_step_backward(
    call: Attention,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_sumexp: Tensor,
    seed: Tensor,
) -> list[Tensor]:
    full = wide(query.dtype)
    grad, query, key, value = (t.to(full) for t in (grad, query, key, value))
    scores = _scores(call, query, key, None)
    # What forward gave is rounded to float32.
    lse = torch.logsumexp(scores, -1) if full is torch.float64 else log_sumexp
    weights = _weights(scores, lse)
    kept = _kept(call, weights, seed)
    grad_weights = torch.matmul(grad, value.mT)
    if kept is not None:
        grad_weights = grad_weights * kept
    mean = (grad_weights * weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - mean) * call.factor(query)
    return [
        torch.matmul(grad_scores, key),
        torch.matmul(grad_scores.mT, query),
        torch.matmul((weights if kept is None else weights * kept).mT, grad),
    ]
