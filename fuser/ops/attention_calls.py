"""How torch computes attention: its fused kernels where they take the operands, else step by step.

Operands are [.., N, H, L, E]. All ways give the same results, but for which numbers are dropped:
`_is_flash` decides that alike for an op and its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from fuser.errors import InputError
from fuser.ops.philox import random_numbers

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
# What torch's kernels take on CUDA: head sizes up to this one, in multiples of that.
FLASH_DEVICES = ("cuda",)
_MAX_HEAD, _HEAD_UNIT = 256, 8
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Attention:
    """The numbers of a call; `name` is the op's, for errors. No scale: 1/sqrt(E)."""

    name: str
    dropout_p: float
    is_causal: bool
    scale: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.dropout_p < 1:
            raise InputError(f"{self.name}: dropout_p is from 0 to below 1, not {self.dropout_p}")

    def factor(self, query: Tensor) -> float:
        """Return what scores are multiplied by."""
        if self.scale is not None:
            return float(self.scale)
        return max(query.shape[-1], 1) ** -0.5


# ------------------------------------------------------------------ forward
@torch.no_grad()
def forward(
    call: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    is_oracle: bool = False,
) -> list[Tensor]:
    """Return output, log_sumexp, philox_seed and philox_offset; in float64 where the operands are
    and `is_oracle` says that nothing else will do."""
    _check(call, *operands)
    leading = torch.broadcast_shapes(*(t.shape[:-2] for t in operands))
    query, key, value = (t.expand(*leading, *t.shape[-2:]) for t in operands)
    if query.is_meta:
        shape, where = query.shape[:-1], query.device
        out = query.new_empty((*shape, value.shape[-1]))
        return [out, query.new_empty(shape, dtype=torch.float32), *_seed(where, (0, 0))]
    folded = _folded(query), _folded(key), _folded(value)
    added = _added(bias, mask, query)
    added = None if added is None else _folded(added.expand(*leading, *added.shape[-2:]))
    if not is_oracle and added is None and _is_flash(call, *folded):
        out, log_sumexp, *seed = _flash(call, *folded)
    elif not is_oracle and _is_cpu_flash(call, *folded, added):
        out, log_sumexp = _cpu_flash(call, *folded, added)
        seed = _seed(query.device, (0, 0))
    else:
        key_of_numbers = (_draw(), 0) if call.dropout_p else (0, 0)
        out, log_sumexp = _step_by_step(call, *folded, added, key_of_numbers)
        seed = _seed(query.device, key_of_numbers)
    shape = query.shape[:-1]
    return [out.reshape(*shape, value.shape[-1]), log_sumexp.reshape(shape), *seed]


def _check(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise InputError(f"{call.name}: query, key and value do not fit together: {shapes}")


def _folded(t: Tensor) -> Tensor:
    """Return a tensor of four axes: those in front of N become a part of it."""
    return t if t.dim() == 4 else t.reshape(-1, *t.shape[-3:])


def _added(bias: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to scores for a bias and a mask."""
    if mask is None:
        return bias
    dtype = query.dtype if query.dtype is torch.float64 else torch.float32
    start = torch.zeros((), dtype=dtype, device=query.device) if bias is None else bias
    return torch.where(mask, start, -torch.inf)


def _seed(device: torch.device, numbers: tuple[int, int]) -> list[Tensor]:
    """Return seed and offset as a user gets them."""
    unused = torch.zeros((), dtype=torch.uint64, device=device)
    if not any(numbers):  # a graph can repeat it
        return [torch.zeros(2, dtype=torch.uint64, device=device), unused]
    seed = torch.tensor(numbers, dtype=torch.int64, device=device)
    return [seed.view(torch.uint64), unused]


def _draw() -> int:
    """Return a seed from torch's generator of the CPU."""
    return int(torch.empty((), dtype=torch.int64).random_())


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
    query, key, value = folded
    grad, attended, wide = _folded(grad_output), _folded(out), _wide(query.dtype)
    lse = log_sumexp.reshape(grad.shape[:-1]).contiguous()
    if not is_oracle and _is_flash(call, query, key, value):
        found = _flash_backward(call, grad, folded, (attended, lse, seed, offset))
    elif not is_oracle and _is_cpu_flash(call, query, key, value, None) and lse.dtype is wide:
        given = [_last_dense(t) for t in (grad, query, key, value, attended)]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse, 0.0, call.is_causal, scale=call.factor(query)
        )
    else:
        found = _step_by_step_backward(call, grad, query, key, value, lse, seed)
    return [g.reshape(t.shape) for g, t in zip(found, operands, strict=True)]


# ------------------------------------------------------------------ torch's kernels
def _last_dense(t: Tensor) -> Tensor:
    """Return a tensor whose elements along the last axis lie one behind the other."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _has_elements(*tensors: Tensor) -> bool:
    return all(t.numel() for t in tensors)


def _is_flash(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's CUDA kernel takes these operands, without a bias."""
    if query.device.type not in FLASH_DEVICES or query.dtype not in _HALF:
        return False
    # It counts the place of a causal query from the last key.
    is_square = not call.is_causal or query.shape[-2] == key.shape[-2]
    fits = query.shape[-1] == value.shape[-1] <= _MAX_HEAD and is_square
    # Of scores times a factor that is not above 0, the largest are others than those of products.
    fits = fits and call.factor(query) > 0
    return fits and _has_elements(query, key, value) and _is_new_enough(query.device)


@cache
def _is_new_enough(device: torch.device) -> bool:
    """Whether torch has its kernel for this GPU."""
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(device) >= _AMPERE


def _padded(t: Tensor) -> Tensor:
    """Return a tensor with as many elements per head as the CUDA kernel takes."""
    missing = -t.shape[-1] % _HEAD_UNIT
    return F.pad(t, (0, missing)) if missing else _last_dense(t)


def _flash(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    found = aten._scaled_dot_product_flash_attention(
        _padded(query),
        _padded(key),
        _padded(value),
        call.dropout_p,
        call.is_causal,
        scale=call.factor(query),
    )
    out, log_sumexp, seed = found[0], found[1], found[6]
    # Without dropout torch leaves the seed as it finds it.
    numbers = _seed(query.device, (0, 0))
    numbers[0] = seed.view(torch.uint64) if call.dropout_p else numbers[0]
    rows = query.shape[-2]
    return [out[..., : value.shape[-1]], log_sumexp[..., :rows], *numbers]


def _flash_backward(
    call: Attention,
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> list[Tensor]:
    query, key, _ = operands
    attended, log_sumexp, seed, offset = results
    found = aten._scaled_dot_product_flash_attention_backward(
        _padded(grad),
        *map(_padded, operands),
        _padded(attended),
        log_sumexp,
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        call.dropout_p,
        call.is_causal,
        seed,
        offset,
        scale=call.factor(query),
    )
    return [g[..., : t.shape[-1]] for g, t in zip(found, operands, strict=True)]


def _is_cpu_flash(
    call: Attention, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None
) -> bool:
    """Whether torch's CPU kernel takes these operands."""
    fits = query.device.type == "cpu" and not call.dropout_p and query.shape[-1] == value.shape[-1]
    fits = fits and call.factor(query) > 0  # else -inf becomes NaN, or the largest
    # Which rows a bias and the order of keys leave without any is not told.
    is_known = added is None or not call.is_causal
    return fits and is_known and _has_elements(query, key, value)


def _cpu_flash(
    call: Attention, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    mask = None if added is None else added.to(_wide(query.dtype))
    out, log_sumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_last_dense, (query, key, value)),
        0.0,
        call.is_causal,
        attn_mask=mask,
        scale=call.factor(query),
    )
    if mask is not None:
        # Of a row without scores torch gives 0.
        log_sumexp = log_sumexp.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return out, log_sumexp


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


def _kept(call: Attention, weights: Tensor, numbers: tuple[int, int]) -> Tensor | None:
    """Return the factors of weights that are dropped, or are not; None where all are kept."""
    if not call.dropout_p:
        return None
    places = torch.arange(weights.numel(), device=weights.device).view(weights.shape)
    seed, offset = numbers
    drawn = random_numbers(
        "uniform", places, (0.0, 1.0), seed=seed, offset=offset, dtype=torch.float32
    )
    return (drawn >= call.dropout_p).to(weights.dtype) / (1 - call.dropout_p)


def _step_by_step(
    call: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    numbers: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    query, key, value = (t.to(_wide(t.dtype)) for t in (query, key, value))
    scores = _scores(call, query, key, added)
    log_sumexp = torch.logsumexp(scores, -1)
    weights = _weights(scores, log_sumexp)
    kept = _kept(call, weights, numbers)
    return torch.matmul(weights if kept is None else weights * kept, value), log_sumexp


def _step_by_step_backward(
    call: Attention,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_sumexp: Tensor,
    seed: Tensor,
) -> list[Tensor]:
    wide = _wide(query.dtype)
    grad, query, key, value = (t.to(wide) for t in (grad, query, key, value))
    scores = _scores(call, query, key, None)
    # What forward gave is rounded to float32.
    lse = torch.logsumexp(scores, -1) if wide is torch.float64 else log_sumexp
    weights = _weights(scores, lse)
    numbers = tuple(seed.view(torch.int64).tolist()) if call.dropout_p else (0, 0)
    kept = _kept(call, weights, numbers)
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
