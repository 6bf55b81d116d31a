"""The kernels that torch has for attention, as functions of operands [N, H, L, E].

Each of `KERNELS` says which calls it takes, computes output and log_sumexp, and their gradients. A
call that none takes is computed step by step (`attention_calls`). Whether numbers are dropped
decides for an op and its gradient alike, so that both drop the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from fuser.errors import InputError

Tensor = torch.Tensor
Operands = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
CUDA_DEVICES = ("cuda",)
_AMPERE = (8, 0)
# Flash attention: heads of at most so many elements.
_MAX_HEAD = 256
# Memory-efficient attention: rows of log_sumexp that its gradient reads at once; and what it calls
# the order of keys, counted from the first.
_LSE_ROWS, _ANY_ORDER, _CAUSAL = 32, 0, 1
# What its threads load at once: bytes, and elements of what is added.
_WORD, _ADDED = 16, 8


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


@dataclass(frozen=True)
class Given:
    """What forward reads: `added` is added to scores, None for nothing. Where nobody reads
    log_sumexp (`reads_sums`), it may be undefined."""

    call: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None = None
    reads_sums: bool = True

    @property
    def factor(self) -> float:
        return self.call.factor(self.query)


@dataclass(frozen=True)
class Forward:
    """Output, log_sumexp, and the seed of what was dropped; None where nothing is."""

    out: Tensor
    log_sumexp: Tensor
    seed: Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """What a gradient reads beside operands: results of forward."""

    out: Tensor
    log_sumexp: Tensor
    seed: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Kernel:
    """A kernel, and which calls it takes."""

    takes: Callable[[Given], bool]
    forward: Callable[[Given], Forward]
    backward: Callable[[Attention, Tensor, Operands, Kept], list[Tensor]]


def kernel_for(given: Given) -> Kernel | None:
    """Return the first kernel that takes a call; None for what is computed step by step."""
    if not all(t.numel() for t in (given.query, given.key, given.value)) or given.factor <= 0:
        # Of scores times a factor that is not above 0, the largest are others than those of
        # products; and -inf becomes NaN.
        return None
    return next((k for k in KERNELS if k.takes(given)), None)


# ------------------------------------------------------------------ operands
def last_dense(t: Tensor) -> Tensor:
    """Return a tensor whose elements along the last axis lie one behind the other."""
    return t if t.stride(-1) == 1 else t.contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


@cache
def _is_new_enough(device: torch.device) -> bool:
    """Whether torch has its kernels for this GPU."""
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(device) >= _AMPERE


def _in_words(t: Tensor) -> Tensor:
    """Return a tensor with whole words per head."""
    missing = -t.shape[-1] % (_WORD // t.itemsize)
    return F.pad(t, (0, missing)) if missing else last_dense(t)


def _aligned(t: Tensor) -> bool:
    """Whether every row begins at a word."""
    unit = _WORD // t.itemsize
    steps = (step for n, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.stride(-1) == 1 and t.data_ptr() % _WORD == 0 and not any(s % unit for s in steps)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ flash attention, on CUDA
def _flash_takes(given: Given) -> bool:
    call, query, key, value = given.call, given.query, given.key, given.value
    if given.added is not None or query.device.type not in CUDA_DEVICES or query.dtype not in HALF:
        return False
    # It counts the place of a causal query from the last key.
    is_square = not call.is_causal or query.shape[-2] == key.shape[-2]
    fits = query.shape[-1] == value.shape[-1] <= _MAX_HEAD and is_square
    return fits and _is_new_enough(query.device)


def _flash(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    found = aten._scaled_dot_product_flash_attention(
        *map(_in_words, (query, given.key, value)),
        call.dropout_p,
        call.is_causal,
        scale=given.factor,
    )
    out, log_sumexp, seed = found[0], found[1], found[6]
    # Without dropout torch leaves the seed as it finds it.
    kept = seed.view(torch.uint64) if call.dropout_p else None
    return Forward(out[..., : value.shape[-1]], log_sumexp[..., : query.shape[-2]], kept)


def _flash_backward(call: Attention, grad: Tensor, operands: Operands, kept: Kept) -> list[Tensor]:
    query, key, _ = operands
    found = aten._scaled_dot_product_flash_attention_backward(
        _in_words(grad),
        *map(_in_words, operands),
        _in_words(kept.out),
        kept.log_sumexp.contiguous(),
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        call.dropout_p,
        call.is_causal,
        kept.seed,
        kept.offset,
        scale=call.factor(query),
    )
    return [g[..., : t.shape[-1]] for g, t in zip(found, operands, strict=True)]


# ------------------------------------------------------------------ memory-efficient, on CUDA
def _efficient_takes(given: Given) -> bool:
    query, added = given.query, given.added
    if query.device.type not in CUDA_DEVICES or query.dtype not in (*HALF, torch.float32):
        return False
    # What is added is rounded to the operands' dtype: only one of that is taken.
    is_known = added is None or added.dtype is query.dtype
    return is_known and not given.call.dropout_p and _is_new_enough(query.device)


def _by_rows(t: Tensor) -> Tensor:
    """Return [N, L, H, E], as these kernels take it."""
    t = _in_words(t).transpose(1, 2)
    return t if _aligned(t) else _copy(t)


def _bias(added: Tensor, rows: int, columns: int) -> Tensor:
    """Return scores to be added, for all of rows and columns; their rows begin at words, and have
    whole ones in memory."""
    added = added.expand(*added.shape[:2], rows, columns)
    # What is repeated stays so: one element of it is copied.
    once = added
    for axis, step in enumerate(added.stride()[:-1]):
        once = once.narrow(axis, 0, 1) if not step else once
    missing = -columns % _ADDED
    if missing:
        once = F.pad(once, (0, missing))[..., :columns]
    elif not _aligned(once):
        once = _copy(once)
    return once.expand(added.shape)


def _efficient(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    rows, columns = query.shape[-2], given.key.shape[-2]
    bias = None if given.added is None else _bias(given.added, rows, columns)
    found = aten._efficient_attention_forward(
        *map(_by_rows, (query, given.key, value)),
        bias,
        None,
        None,
        None,
        None,
        0.0,
        _CAUSAL if call.is_causal else _ANY_ORDER,
        given.reads_sums,
        scale=given.factor,
    )
    out, log_sumexp = found[0].transpose(1, 2)[..., : value.shape[-1]], found[1][..., :rows]
    if bias is not None and given.reads_sums:
        # Of a row without scores torch gives 0.
        seen = bias.isneginf().logical_not_()
        seen = seen.tril_() if call.is_causal else seen
        log_sumexp = log_sumexp.masked_fill(~seen.any(-1), -torch.inf)
    return Forward(out, log_sumexp)


def _efficient_backward(
    call: Attention, grad: Tensor, operands: Operands, kept: Kept
) -> list[Tensor]:
    rows = operands[0].shape[-2]
    unused = torch.empty((), dtype=torch.int64, device=grad.device)
    found = aten._efficient_attention_backward(
        _by_rows(grad),
        *map(_by_rows, operands),
        None,
        # The kernel for half floats looks for rows of it where they are in a contiguous one: it
        # knows no stride of them.
        _by_rows(kept.out).contiguous(),
        None,
        None,
        rows,
        operands[1].shape[-2],
        F.pad(kept.log_sumexp, (0, -rows % _LSE_ROWS)).contiguous(),
        0.0,
        unused,
        unused,
        _CAUSAL if call.is_causal else _ANY_ORDER,
        False,
        scale=call.factor(operands[0]),
    )
    pairs = zip(found[:3], operands, strict=True)
    return [g.transpose(1, 2)[..., : t.shape[-1]] for g, t in pairs]


# ------------------------------------------------------------------ torch's kernel of the CPU
def _cpu_takes(given: Given) -> bool:
    call, query = given.call, given.query
    fits = query.device.type == "cpu" and query.shape[-1] == given.value.shape[-1]
    # Which rows a bias and the order of keys leave without any is not told.
    return fits and not call.dropout_p and (given.added is None or not call.is_causal)


def _cpu(given: Given) -> Forward:
    query, added = given.query, given.added
    mask = None if added is None else added.to(wide(query.dtype))
    out, log_sumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *map(last_dense, (query, given.key, given.value)),
        0.0,
        given.call.is_causal,
        attn_mask=mask,
        scale=given.factor,
    )
    if mask is not None and given.reads_sums:
        # Of a row without scores torch gives 0.
        log_sumexp = log_sumexp.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return Forward(out, log_sumexp)


def _cpu_backward(call: Attention, grad: Tensor, operands: Operands, kept: Kept) -> list[Tensor]:
    query, key, value = operands
    given = [last_dense(t) for t in (grad, query, key, value, kept.out)]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, kept.log_sumexp.contiguous(), 0.0, call.is_causal, scale=call.factor(query)
    )
    return [*found]


KERNELS = (
    Kernel(_flash_takes, _flash, _flash_backward),
    Kernel(_efficient_takes, _efficient, _efficient_backward),
    Kernel(_cpu_takes, _cpu, _cpu_backward),
)
