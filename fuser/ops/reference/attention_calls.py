"""How torch computes attention: its kernels where they take the operands, else step by step.

Operands are [.., N, H, L, E]. All ways give the same results, but for which numbers are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser.ops.reference.attention_kernels import (
    Attention,
    Forward,
    Given,
    Operands,
    Plain,
    PlainBackward,
    SavedResults,
    Tensor,
    kernel_for,
    repeated_heads,
    summed_heads,
    wide,
)
from fuser.ops.reference.philox import random_numbers
from fuser.support.errors import InputError

# Of output, log_sumexp, philox_seed and philox_offset, which are read.
ALL = (True, True, True, True)
# Stands for what nobody reads.
_NOTHING = torch.empty(0)


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
    query, key, value = _met(call, operands)
    shape = query.shape[:-1]
    if query.is_meta:
        out = query.new_empty((*shape, value.shape[-1]))
        log_sumexp = query.new_empty(shape, dtype=torch.float32)
        return [out, log_sumexp, *_seed(query.device, None, ALL)]
    given = _given(call, (query, key, value), bias, mask, reads_sums=reads[1])
    kernel = None if is_oracle else kernel_for(given)
    found = _step_by_step(given) if kernel is None else kernel.forward(given)
    out = found.out.reshape(*shape, value.shape[-1])
    log_sumexp = found.log_sumexp.reshape(shape) if reads[1] else _NOTHING
    return [out, log_sumexp, *_seed(query.device, found.seed, reads)]


def plain_kernel(
    call: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    reads: tuple[bool, ...],
) -> Plain | None:
    """Return what computes output and log_sumexp in one call of torch's, of operands that lie like
    these; None where operands or results have to be made otherwise."""
    if mask is not None or operands[0].dim() != 4 or operands[0].is_meta:
        return None
    _check(call, *operands)
    met = _met(call, operands)
    if any(a is not b for a, b in zip(met, operands, strict=True)):
        return None
    given = Given(call, *operands, bias, reads_sums=reads[1])
    if bias is not None and not _is_broadcast_to(bias, given):
        return None
    kernel = kernel_for(given)
    return None if kernel is None else kernel.plain(given)


def plain_forward(
    call: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    reads: tuple[bool, ...],
) -> Callable[..., Sequence[Tensor]] | None:
    """Return what computes the results of `forward` as `plain_kernel` does, of (query, key, value,
    bias); None where that does not."""
    plain, device = plain_kernel(call, operands, bias, mask, reads=reads), operands[0].device
    if plain is None:
        return None
    if not any(reads[2:]):
        return lambda *given: (*plain(*given), _NOTHING, _NOTHING)
    # Kernels that may drop numbers are not plain.
    return lambda *given: (*plain(*given), *_seed(device, None, reads))


def _is_broadcast_to(bias: Tensor, given: Given) -> bool:
    batch = given.query.shape[:2]
    return all(n in (1, m) for n, m in zip(bias.shape, batch, strict=False))


def _check(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise InputError(f"{call.name}: query, key and value do not fit together: {shapes}")
    if call.heads_per_key is not None:
        for name, t in (("key", key), ("value", value)):
            if query.shape[-3] != call.heads_per_key * t.shape[-3]:
                raise InputError(
                    f"{call.name}: query has {query.shape[-3]} heads and {name} {t.shape[-3]} on "
                    f"this device, where {call.heads_per_key} heads read each of {name}'s; over "
                    f"devices the heads of {name} have to divide evenly, else repeat them"
                )


def _met(call: Attention, operands: Operands) -> Operands:
    """Return the operands with equal batches; heads of keys that several heads of queries read stay
    as few as they are."""
    shapes = [t.shape[:-3] for t in operands]
    heads = [t.shape[-3] for t in operands]
    few = call.heads_per_key is not None or heads[1] == heads[2] == 1
    met = [heads[0], *heads[1:]] if few else [max(heads)] * 3
    if 0 in heads and not few:
        met = [0] * 3
    leading = shapes[0]
    if not shapes[0] == shapes[1] == shapes[2]:
        leading = torch.broadcast_shapes(*shapes)
    elif met == heads:
        return operands
    query, key, value = (
        t.expand(*leading, h, *t.shape[-2:]) for t, h in zip(operands, met, strict=True)
    )
    return query, key, value


def _folded(t: Tensor) -> Tensor:
    """Return a tensor of four axes: those in front of N become a part of it."""
    return t if t.dim() == 4 else t.flatten(0, -4)


def _given(
    call: Attention,
    operands: Operands,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    reads_sums: bool,
) -> Given:
    query, key, value = map(_folded, operands)
    added = _added(bias, mask, query)
    if added is not None and added.dim() > 4:
        added = _folded(added.expand(*operands[0].shape[:-3], *added.shape[-3:]))
    return Given(call, query, key, value, added, reads_sums)


def _added(bias: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to scores for a bias and a mask; of what a mask repeats one element is
    made."""
    if mask is None:
        return bias
    # 0 and -inf are exact in every dtype.
    if bias is not None:
        return torch.where(mask, bias, -torch.inf)
    once = mask
    for axis, (n, step) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        once = once.narrow(axis, 0, 1) if n > 1 and not step else once
    return torch.where(once, query.new_zeros(()), -torch.inf).expand(mask.shape)


def _seed(device: torch.device, seed: Tensor | None, reads: tuple[bool, ...]) -> list[Tensor]:
    """Return seed and offset as a user gets them."""

    def zeros(shape: tuple[int, ...], *, is_read: bool) -> Tensor:
        if not is_read:
            return _NOTHING
        return torch.zeros(shape, dtype=torch.uint64, device=device)

    offset = zeros((), is_read=reads[3])
    return [zeros((2,), is_read=reads[2]) if seed is None else seed, offset]


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
    given = _given(call, operands, None, None, reads_sums=True)
    folded = given.query, given.key, given.value
    grad = _folded(grad_output)
    kept = SavedResults(_folded(out), log_sumexp.reshape(grad.shape[:-1]), seed, offset)
    # Of doubles, what forward gave is rounded to float32: too few digits for a kernel.
    has_digits = log_sumexp.dtype is wide(given.query.dtype) and not is_oracle
    kernel = kernel_for(given, is_backward=True) if has_digits else None
    if kernel is not None:
        found = kernel.backward(call, grad, folded, kept)
    else:
        found = _step_by_step_backward(call, grad, folded, kept.log_sumexp, seed)
    return [g.reshape(t.shape) for g, t in zip(found, operands, strict=True)]


def plain_backward(
    call: Attention,
    grad_output: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> PlainBackward | None:
    """Return what computes `backward` in one call of torch's, of (grad_output, query, key, value,
    output, log_sumexp) that lie like these; None where operands have to be made otherwise."""
    if grad_output.dim() != 4 or grad_output.is_meta or results[1].dtype is not torch.float32:
        return None
    _check(call, *operands)
    given, kept = Given(call, *operands), SavedResults(*results)
    kernel = kernel_for(given, is_backward=True)
    return None if kernel is None else kernel.plain_backward(given, grad_output, kept)


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


def _step_by_step(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    key, value = (repeated_heads(t, query.shape[1]) for t in (given.key, value))
    query, key, value = (t.to(wide(t.dtype)) for t in (query, key, value))
    scores = _scores(call, query, key, given.added)
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
    operands: Operands,
    log_sumexp: Tensor,
    seed: Tensor,
) -> list[Tensor]:
    heads, groups = operands[0].shape[1], operands[1].shape[1]
    full = wide(operands[0].dtype)
    grad, query, key, value = (t.to(full) for t in (grad, *operands))
    key, value = (repeated_heads(t, heads) for t in (key, value))
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
        summed_heads(torch.matmul(grad_scores.mT, query), groups),
        summed_heads(torch.matmul((weights if kept is None else weights * kept).mT, grad), groups),
    ]
