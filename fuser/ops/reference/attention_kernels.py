"""Torch's attention kernels, as functions of operands [N, H, L, E].

- `KERNELS`: each kernel says which calls it supports, and computes output, log_sumexp and
  gradients.
- `ORDERS`: the order in which kernels are tried, which depends on the call, its shape and the
  machine.
- A call that no kernel supports is computed step by step, by matrix products and a softmax.

The choice depends only on `AttentionCase`, which an op and its gradient share. The choice does not
depend on strides: operands whose strides a kernel does not support are copied.

All kernels compute the same log_sumexp, so the forward op and its gradient may use different
kernels. With dropout, both use the same kernel, so that both drop the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fuser.ops.reference.philox import random_numbers
from fuser.support.errors import InputError

Tensor = torch.Tensor
Operands = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)
CUDA_DEVICES = ("cuda",)
_AMPERE, _HOPPER, _BLACKWELL = (8, 0), (9, 0), (10, 0)
# The first version of cuDNN that supports lengths other than multiples of 128. From this version
# on, torch itself prefers cuDNN.
_CUDNN = 91501
# The largest size of a head: for all kernels; for cuDNN's gradient, in versions after
# _CUDNN_HEADS. There, heads of keys and values that both have 256 elements are supported, too.
_MAX_HEAD, _MAX_CUDNN_HEAD, _CUDNN_HEADS = 256, 128, 92200
# The largest number of batches, and of heads, of one kernel call.
_MAX_BATCH = 65535
# Below this number of operations, most of a forward call's time is the start of its kernel: half
# of the break-even that was measured on an H200 (benchmarks/notes.md).
_SMALL, _FEW_KEYS = 250e6, 256
# Memory-efficient attention: its gradient reads so many rows of log_sumexp at once.
_LSE_ROWS = 32
# A vector load of a thread, in bytes; and in elements of the bias.
_WORD, _ADDED = 16, 8
# cuDNN drops with probabilities that are multiples of this.
_CUDNN_DROPOUT = 1 / 16


@dataclass(frozen=True)
class Attention:
    """The scalar arguments of an attention call, and the op's `name` for error messages.

    - `dropout_p`: the probability with which a weight is dropped.
    - `is_causal`: whether query i attends only to the keys 0 to i.
    - `scale`: the factor of the scores (query @ key.T); None for 1/sqrt(E).
    - `heads_per_key`: the number of query heads that read each key head; None if not declared.
    """

    name: str
    dropout_p: float
    is_causal: bool
    scale: float | None
    heads_per_key: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dropout_p < 1:
            raise InputError(
                f"{self.name}: dropout_p must be at least 0 and below 1, got {self.dropout_p}"
            )

    def factor(self, query: Tensor) -> float:
        """Returns the factor by which the products of queries and keys are multiplied: `scale`, or
        by default 1/sqrt(E) for queries with E elements.
        """
        if self.scale is not None:
            return float(self.scale)
        return max(query.shape[-1], 1) ** -0.5


@dataclass(frozen=True)
class Given:
    """The operands of the forward computation of an attention, with axes [N, H, L, E].

    - `call`: the scalar arguments. `added` is added to the scores; None if nothing is added.
    - `reads_sums`: whether log_sumexp is needed. If not, log_sumexp may be undefined.
    - Keys and values may have fewer heads than queries. Consecutive query heads, in groups of equal
      size, then read the same head of keys and values.
    """

    call: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None = None
    reads_sums: bool = True

    @property
    def factor(self) -> float:
        """The factor by which the products of queries and keys are multiplied: the argument
        `scale`, or by default 1/sqrt(E).
        """
        return self.call.factor(self.query)


@dataclass(frozen=True)
class Forward:
    """The results of the forward computation of an attention. `seed` determines the weights that
    dropout drops; None without dropout.
    """

    out: Tensor
    log_sumexp: Tensor
    seed: Tensor | None = None


@dataclass(frozen=True)
class SavedResults:
    """The results of the forward computation of an attention that the computation of the gradient
    reads.

    `seed` and `offset` determine the weights that dropout has dropped.
    """

    out: Tensor
    log_sumexp: Tensor
    seed: Tensor
    offset: Tensor


# ------------------------------------------------------------------ facts
class DeviceKind(NamedTuple):
    """A kind of device, on which the choice of an attention kernel depends.

    `capability` is the CUDA compute capability, or (0, 0) for a device without CUDA. `cudnn` is the
    version of cuDNN, or 0 without cuDNN.
    """

    device_type: str
    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0

    @property
    def is_cuda(self) -> bool:
        """Whether torch has CUDA kernels for attention on this device (Ampere and later)."""
        return self.device_type in CUDA_DEVICES and self.capability >= _AMPERE

    @property
    def prefers_cudnn(self) -> bool:
        """Whether cuDNN has attention kernels for this device, which torch then prefers, too."""
        is_one = self.capability[0] in (_HOPPER[0], _BLACKWELL[0])
        return self.is_cuda and is_one and self.cudnn >= _CUDNN


@cache
def machine_of(device: torch.device) -> DeviceKind:
    """Returns the kind of `device`: its type, CUDA compute capability and version of cuDNN."""
    if device.type not in CUDA_DEVICES or not torch.backends.cuda.is_flash_attention_available():
        return DeviceKind(device.type)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return DeviceKind(device.type, torch.cuda.get_device_capability(device), cudnn or 0)


@dataclass(frozen=True)
class AttentionCase:
    """The properties of an attention call that decide which of torch's kernels runs the call.

    - `n`, `h`, `l`, `e`: the sizes of the queries [n, h, l, e].
    - `groups`, `s`, `v`: the sizes of the keys [n, groups, s, e] and values [n, groups, s, v].
    - `dtype`, `added`: the dtypes of the operands and of the bias; `added` is None without a bias.
    - `is_backward`: whether the call computes the gradient.
    """

    machine: DeviceKind
    n: int
    h: int
    groups: int
    l: int
    s: int
    e: int
    v: int
    dtype: torch.dtype
    added: torch.dtype | None
    dropout_p: float
    is_causal: bool
    is_backward: bool = False

    @staticmethod
    def of(given: Given, *, is_backward: bool = False) -> AttentionCase:
        """Returns the properties that decide which kernel runs the attention with the operands
        `given`.
        """
        query, key, added = given.query, given.key, given.added
        n, h, rows, e = query.shape
        return AttentionCase(
            machine_of(query.device),
            n,
            h,
            key.shape[1],
            rows,
            key.shape[2],
            e,
            given.value.shape[3],
            query.dtype,
            None if added is None else added.dtype,
            given.call.dropout_p,
            given.call.is_causal,
            is_backward,
        )

    @property
    def is_half(self) -> bool:
        """Whether the operands are float16 or bfloat16."""
        return self.dtype in HALF

    @property
    def adds_alike(self) -> bool:
        """Whether there is no bias, or the bias has the operands' dtype. A kernel then adds the
        bias without rounding it first.
        """
        return self.added in (None, self.dtype)

    @property
    def needs_gradient(self) -> bool:
        """Whether the attention kernel for this call must support the gradient, too.

        With dropout, this is also true for the forward call, because both calls must use the same
        kernel.
        """
        return self.is_backward or self.dropout_p > 0

    @property
    def flops(self) -> float:
        """The number of floating-point operations of the forward call."""
        whole = 2.0 * self.n * self.h * self.l * self.s * (self.e + self.v)
        return whole / 2 if self.is_causal else whole

    @property
    def is_small(self) -> bool:
        """Whether the call is so small that starting the kernel takes most of the time."""
        few = self.s <= _FEW_KEYS and self.flops < _SMALL
        return few and self.groups == self.h and not self.is_backward


# (query, key, value), and the bias if there is one -> (output, log_sumexp).
Plain = Callable[..., tuple[Tensor, Tensor]]
# (grad, query, key, value, out, log_sumexp) -> gradients of query, key and value.
PlainBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class AttentionKernel:
    """One of torch's attention kernels.

    - `takes`: whether the kernel supports a call.
    - `forward`, `backward`: compute the results, and the gradients, with copies where necessary.
    - `plain`: returns a function (query, key, value, bias) -> (output, log_sumexp) that calls torch
      once and copies nothing. Returns None if the operands would have to be copied.
    - `plain_backward`: like `plain`, for the gradients.
    """

    takes: Callable[[AttentionCase], bool]
    forward: Callable[[Given], Forward]
    backward: Callable[[Attention, Tensor, Operands, SavedResults], list[Tensor]]
    plain: Callable[[Given], Plain | None] = lambda given: None
    plain_backward: Callable[[Given, Tensor, SavedResults], PlainBackward | None] = lambda *given: (
        None
    )


def order_for(facts: AttentionCase) -> tuple[str, ...]:
    """Returns the names of torch's attention kernels in the order in which they are tried for a
    call like `facts`.
    """
    return next(names for _, holds, names in ORDERS if holds(facts))


def name_for(facts: AttentionCase) -> str | None:
    """Returns the name of torch's attention kernel for a call like `facts`.

    Returns None if no kernel supports the call. The call is then computed step by step, by matrix
    products and a softmax.
    """
    return next((name for name in order_for(facts) if KERNELS[name].takes(facts)), None)


def kernel_for(given: Given, *, is_backward: bool = False) -> AttentionKernel | None:
    """Returns torch's fused attention kernel for the operands `given`, or None if no kernel can be
    used.

    Returns None for empty operands, and if the scores (query @ key.T) are multiplied by a factor <=
    0. The kernels take the maximum before they multiply, so such a factor would give wrong results.
    `is_backward` says whether the gradient is computed.
    """
    if not all(t.numel() for t in (given.query, given.key, given.value)) or given.factor <= 0:
        # Kernels take the maximum before they multiply by the factor. A factor of 0 or below
        # changes which score is the largest, and makes NaN of -inf.
        return None
    name = name_for(AttentionCase.of(given, is_backward=is_backward))
    return None if name is None else KERNELS[name]


# ------------------------------------------------------------------ torch's calls
def _call(name: str) -> Callable[..., Any]:
    """Returns torch's function with this name: from `torch` if it is there, because calls of these
    functions take the least time on the host, else from `torch.ops.aten`.
    """
    found = getattr(torch, name, None)
    return found or getattr(torch.ops.aten, name)


class TorchAttention:
    """Torch's attention functions: for each of its kernels, one for the forward computation and one
    for the gradient.
    """

    cudnn = staticmethod(_call("_scaled_dot_product_cudnn_attention"))
    cudnn_backward = staticmethod(_call("_scaled_dot_product_cudnn_attention_backward"))
    flash = staticmethod(_call("_scaled_dot_product_flash_attention"))
    flash_backward = staticmethod(_call("_scaled_dot_product_flash_attention_backward"))
    efficient = staticmethod(_call("_scaled_dot_product_efficient_attention"))
    efficient_backward = staticmethod(_call("_scaled_dot_product_efficient_attention_backward"))
    cpu = staticmethod(_call("_scaled_dot_product_flash_attention_for_cpu"))
    cpu_backward = staticmethod(_call("_scaled_dot_product_flash_attention_for_cpu_backward"))


# ------------------------------------------------------------------ operands
def last_dense(t: Tensor) -> Tensor:
    """Returns `t` if its last axis has stride 1, else a contiguous copy."""
    return t if t.stride(-1) == 1 else t.contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which torch computes values of `dtype`: float32 for half floats."""
    return torch.float32 if dtype in HALF else dtype


def repeated_heads(t: Tensor, heads: int) -> Tensor:
    """Returns keys or values `t` with `heads` heads, as many as the queries have.

    Each head of `t` is repeated for the query heads that read it.
    """
    n, groups, *rest = t.shape
    if groups == heads:
        return t
    if groups == 1:
        return t.expand(n, heads, *rest)
    return t.unsqueeze(2).expand(n, groups, heads // groups, *rest).reshape(n, heads, *rest)


def summed_heads(grad: Tensor, groups: int) -> Tensor:
    """Returns the gradient of keys or values that have `groups` heads, fewer than the queries.

    `grad` has a gradient for each query head. The gradients of query heads that read the same head
    are added.
    """
    n, heads, *rest = grad.shape
    return grad if heads == groups else grad.view(n, groups, heads // groups, *rest).sum(2)


def _in_words(t: Tensor) -> Tensor:
    """Returns `t` with the last axis padded with zeros to a multiple of 16 bytes, as some of
    torch's attention kernels require.
    """
    missing = -t.shape[-1] % (_WORD // t.itemsize)
    return F.pad(t, (0, missing)) if missing else last_dense(t)


def _aligned(t: Tensor) -> bool:
    """Returns whether the last axis of `t` has stride 1 and begins at a multiple of 16 bytes for
    every index of the other axes.
    """
    unit = _WORD // t.itemsize
    steps = (step for n, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.stride(-1) == 1 and t.data_ptr() % _WORD == 0 and not any(s % unit for s in steps)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _by_words(t: Tensor) -> Tensor:
    """Returns `t` with a last axis that is padded to a multiple of 16 bytes and aligned to 16
    bytes, as some of torch's attention kernels require; copies if necessary.
    """
    t = _in_words(t)
    return t if _aligned(t) else _copy(t)


def _is_by_words(t: Tensor) -> bool:
    """Returns whether the length of the last axis of `t` is a multiple of 16 bytes and the axis is
    aligned, so that an attention kernel can read `t` without a copy.
    """
    return not t.shape[-1] * t.itemsize % _WORD and _aligned(t)


def _dense_like(t: Tensor, like: Tensor) -> Tensor:
    """Returns `t` without gaps in memory, with axes in the memory order of `like`, as some of
    torch's attention kernels require.

    Copies if necessary.
    """
    strides, step = [0] * t.dim(), 1
    for axis in sorted(range(t.dim()), key=lambda k: (like.stride(k), -k)):
        strides[axis], step = step, step * t.shape[axis]
    lies = all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True))
    if lies and t.data_ptr() % _WORD == 0:
        return t
    return t.new_empty_strided(t.shape, strides).copy_(t)


def _bias(added: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the bias `added` expanded to `rows` queries and `columns` keys, for a kernel that
    requires this.

    In memory, the last axis is padded and aligned to 16 bytes. Axes that have stride 0 in `added`
    keep stride 0.
    """
    added = added.expand(*added.shape[:2], rows, columns)
    # Only one element of an expanded axis is copied.
    once = added
    for axis, step in enumerate(added.stride()[:-1]):
        once = once.narrow(axis, 0, 1) if not step else once
    missing = -columns % _ADDED
    if missing:
        once = F.pad(once, (0, missing))[..., :columns]
    elif not _aligned(once):
        once = _copy(once)
    return once.expand(added.shape)


def _rows_seen(added: Tensor, *, is_causal: bool) -> Tensor:
    """Returns, for each query, whether it reads some key: whether some score is not -inf.

    `added` is the tensor that is added to the scores; it is -inf for a key that is masked. If
    `is_causal`, a query reads no key after its own position. Without a key, the softmax of the
    scores is not defined.
    """
    seen = added.isneginf().logical_not_()
    return (seen.tril_() if is_causal else seen).any(-1)


# ------------------------------------------------------------------ cuDNN's attention
def _cudnn_takes(f: AttentionCase) -> bool:
    if not (f.machine.prefers_cudnn and f.is_half and f.adds_alike):
        return False
    e, v = (-(-size // 8) * 8 for size in (f.e, f.v))
    fits = e <= _MAX_HEAD and v <= _MAX_HEAD and f.s > 1 and max(f.n, f.h) <= _MAX_BATCH
    if f.needs_gradient:
        is_deterministic = f.is_backward and torch.are_deterministic_algorithms_enabled()
        is_known = max(e, v) <= _MAX_CUDNN_HEAD or e == v == _MAX_HEAD
        fits = fits and (is_known or f.machine.cudnn <= _CUDNN_HEADS) and not is_deterministic
    if f.dropout_p:
        parts = f.dropout_p / _CUDNN_DROPOUT
        fits = fits and parts == int(parts) and f.l > 1
    return fits


def _cudnn(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    # With a bias, the kernel that also writes log_sumexp is faster.
    found = TorchAttention.cudnn(
        *map(_by_words, (query, given.key, value)),
        _cudnn_bias(given),
        given.reads_sums or given.added is not None or call.dropout_p > 0,
        call.dropout_p,
        call.is_causal,
        False,
        scale=given.factor,
    )
    out, sums, seed = found[0][..., : value.shape[-1]], found[1], None
    if call.dropout_p:
        seed = torch.stack((found[6].reshape(()), found[7].reshape(()))).view(torch.uint64)
    return Forward(out, sums.reshape(query.shape[:-1]) if given.reads_sums else sums, seed)


def _cudnn_bias(given: Given) -> Tensor | None:
    """Returns the bias in the form that cuDNN's kernel requires: expanded along the keys only.
    Returns None without a bias.

    The axes of batches, heads and queries may still have size 1.
    """
    added = given.added
    if added is None:
        return None
    if added.shape[-1] != given.key.shape[-2]:
        added = added.expand(*added.shape[:3], given.key.shape[-2])
    return added if _begins_dense(added) else _copy(added)


def _begins_dense(t: Tensor) -> bool:
    """Returns whether the address of `t` is a multiple of 16 bytes, and its last axis has stride 1,
    as cuDNN's attention kernel requires.
    """
    return t.stride(-1) == 1 and t.data_ptr() % _WORD == 0


def _cudnn_plain(given: Given) -> Plain | None:
    call, operands, added = given.call, (given.query, given.key, given.value), given.added
    if call.dropout_p or not all(map(_is_by_words, operands)) or _cudnn_bias(given) is not added:
        return None
    run, is_causal, factor = TorchAttention.cudnn, call.is_causal, given.factor
    sums = given.reads_sums or added is not None
    numbers = sums, 0.0, is_causal, False

    def forward(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        found = run(query, key, value, added, *numbers, scale=factor)
        return found[0], found[1]

    def forward_with_sums(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        found = run(query, key, value, added, *numbers, scale=factor)
        return found[0], found[1].view(query.shape[:-1])

    return forward_with_sums if given.reads_sums else forward


def _cudnn_backward(
    call: Attention, grad: Tensor, operands: Operands, kept: SavedResults
) -> list[Tensor]:
    query, key, value = map(_by_words, operands)
    # Torch caches one plan per strides of queries, keys and values. The plan assumes that output
    # and gradient have the strides of the forward's output.
    out, grad = (_dense_like(_in_words(t), query) for t in (kept.out, grad))
    seeds = kept.seed.view(torch.int64).unbind() if call.dropout_p else (kept.log_sumexp,) * 2
    found = TorchAttention.cudnn_backward(
        grad,
        query,
        key,
        value,
        out,
        kept.log_sumexp.contiguous().unsqueeze(-1),
        *seeds,
        None,
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        call.dropout_p,
        call.is_causal,
        scale=call.factor(operands[0]),
    )
    return [g[..., : t.shape[-1]] for g, t in zip(found[:3], operands, strict=True)]


def _cudnn_plain_backward(given: Given, grad: Tensor, kept: SavedResults) -> PlainBackward | None:
    call, operands = given.call, (given.query, given.key, given.value)
    lies = all(_dense_like(t, given.query) is t for t in (grad, kept.out))
    is_plain = all(map(_is_by_words, (*operands, grad, kept.out))) and lies
    if call.dropout_p or not is_plain or not kept.log_sumexp.is_contiguous():
        return None
    rows, columns = given.query.shape[-2], given.key.shape[-2]
    run, factor = TorchAttention.cudnn_backward, given.factor
    numbers = None, None, None, rows, columns, 0.0, call.is_causal

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
    ) -> Sequence[Tensor]:
        kept = sums.unsqueeze(-1)
        return run(grad, query, key, value, out, kept, sums, sums, *numbers, scale=factor)

    return backward


# ------------------------------------------------------------------ flash attention, on CUDA
def _flash_takes(f: AttentionCase) -> bool:
    if f.added is not None or not f.machine.is_cuda or not f.is_half:
        return False
    # The kernel aligns causal queries with the last key, not with the first.
    is_square = not f.is_causal or f.l == f.s
    return f.e == f.v <= _MAX_HEAD and is_square and max(f.n, f.h) <= _MAX_BATCH


def _flash(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    found = TorchAttention.flash(
        *map(_by_words, (query, given.key, value)),
        call.dropout_p,
        call.is_causal,
        scale=given.factor,
    )
    out, log_sumexp, seed = found[0], found[1], found[6]
    # Without dropout torch does not write the seed.
    kept = seed.view(torch.uint64) if call.dropout_p else None
    return Forward(out[..., : value.shape[-1]], log_sumexp[..., : query.shape[-2]], kept)


def _flash_plain(given: Given) -> Plain | None:
    call = given.call
    if call.dropout_p or not all(map(_is_by_words, (given.query, given.key, given.value))):
        return None
    run, is_causal, factor = TorchAttention.flash, call.is_causal, given.factor

    def forward(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        del added
        found = run(query, key, value, 0.0, is_causal, scale=factor)
        return found[0], found[1]

    return forward


def _flash_backward(
    call: Attention, grad: Tensor, operands: Operands, kept: SavedResults
) -> list[Tensor]:
    query, key, _ = operands
    found = TorchAttention.flash_backward(
        _by_words(grad),
        *map(_by_words, operands),
        _by_words(kept.out),
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
def _efficient_takes(f: AttentionCase) -> bool:
    # A bias is rounded to the operands' dtype, so only a bias of this dtype is supported.
    is_known = f.is_half or f.dtype is torch.float32
    is_small = max(f.n, f.h) <= _MAX_BATCH
    return f.machine.is_cuda and is_known and f.adds_alike and is_small and not f.dropout_p


def _efficient(given: Given) -> Forward:
    call, query, value = given.call, given.query, given.value
    rows, columns = query.shape[-2], given.key.shape[-2]
    bias = None if given.added is None else _bias(given.added, rows, columns)
    key, value = (repeated_heads(t, query.shape[1]) for t in (given.key, value))
    found = TorchAttention.efficient(
        *map(_by_words, (query, key, value)),
        None if bias is None else bias.expand(*query.shape[:2], -1, -1),
        given.reads_sums,
        0.0,
        call.is_causal,
        scale=given.factor,
    )
    out, log_sumexp = found[0][..., : value.shape[-1]], found[1][..., :rows]
    if bias is not None and given.reads_sums:
        # torch's log_sumexp of a row without scores is 0.
        seen = _rows_seen(bias, is_causal=call.is_causal)
        log_sumexp = log_sumexp.masked_fill(~seen, -torch.inf)
    return Forward(out, log_sumexp)


def _efficient_plain(given: Given) -> Plain | None:
    operands, added = (given.query, given.key, given.value), given.added
    n, heads, rows, _ = given.query.shape
    columns = given.key.shape[-2]
    if given.key.shape[1] != heads or not all(map(_is_by_words, operands)):
        return None
    if added is not None:
        is_taken = added.shape[-1] == columns and not columns % _ADDED and _aligned(added)
        if given.reads_sums or not is_taken:
            return None
    run, is_causal, factor = TorchAttention.efficient, given.call.is_causal, given.factor
    sums, whole = given.reads_sums, (n, heads, rows, columns)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        bias = None if added is None else added.expand(*whole)
        found = run(query, key, value, bias, sums, 0.0, is_causal, scale=factor)
        return found[0], found[1].narrow(2, 0, rows) if sums else found[1]

    if added is not None or n * heads > _MAX_BATCH or not all(t.is_contiguous() for t in operands):
        return forward
    # The kernel writes [N, L, H, E]. With one head per batch, the output has the query's strides.
    by_query, by_key, by_value = ((n * heads, 1, *t.shape[2:]) for t in operands)
    by_out = n, heads, rows, given.value.shape[-1]

    def forward_by_heads(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        del added
        # torch reads separate numbers in two thirds of the time that a tuple takes.
        found = run(
            query.view(*by_query),
            key.view(*by_key),
            value.view(*by_value),
            None,
            sums,
            0.0,
            is_causal,
            scale=factor,
        )
        if not sums:
            return found[0].view(*by_out), found[1]
        return found[0].view(*by_out), found[1].view(n, heads, -1).narrow(2, 0, rows)

    return forward_by_heads


def _efficient_backward(
    call: Attention, grad: Tensor, operands: Operands, kept: SavedResults
) -> list[Tensor]:
    query, key, value = operands
    heads, groups, rows = query.shape[1], key.shape[1], query.shape[-2]
    unused = torch.empty((), dtype=torch.int64, device=grad.device)
    # The kernel for half floats ignores the strides of the output, and assumes that it is
    # contiguous as [N, L, H, E].
    out = _by_words(kept.out).transpose(1, 2).contiguous().transpose(1, 2)
    found = TorchAttention.efficient_backward(
        _by_words(grad),
        _by_words(query),
        *(_by_words(repeated_heads(t, heads)) for t in (key, value)),
        None,
        out,
        F.pad(kept.log_sumexp, (0, -rows % _LSE_ROWS)).contiguous(),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        call.is_causal,
        scale=call.factor(query),
    )
    pairs = zip(found[:3], (heads, groups, groups), operands, strict=True)
    return [summed_heads(g, count)[..., : t.shape[-1]] for g, count, t in pairs]


# ------------------------------------------------------------------ torch's kernel of the CPU
def _cpu_takes(f: AttentionCase) -> bool:
    fits = f.machine.device_type == "cpu" and f.e == f.v
    # With a bias and a causal mask together, the kernel does not show which rows have no scores.
    return fits and not f.dropout_p and (f.added is None or not f.is_causal)


def _cpu(given: Given) -> Forward:
    query, added = given.query, given.added
    mask = None if added is None else added.to(wide(query.dtype))
    key, value = (repeated_heads(t, query.shape[1]) for t in (given.key, given.value))
    out, log_sumexp = TorchAttention.cpu(
        *map(last_dense, (query, key, value)),
        0.0,
        given.call.is_causal,
        attn_mask=mask,
        scale=given.factor,
    )
    if mask is not None and given.reads_sums:
        # torch's log_sumexp of a row without scores is 0.
        log_sumexp = log_sumexp.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return Forward(out, log_sumexp)


def _cpu_plain(given: Given) -> Plain | None:
    operands, added = (given.query, given.key, given.value), given.added
    heads = {t.shape[1] for t in operands}
    if len(heads) > 1 or any(t.stride(-1) != 1 for t in operands):
        return None
    if added is not None and added.dtype is not wide(given.query.dtype):
        return None
    # The kernel rounds log_sumexp of doubles to float32.
    if given.reads_sums and (added is not None or given.query.dtype is torch.float64):
        return None
    run, is_causal, factor = TorchAttention.cpu, given.call.is_causal, given.factor

    def forward(
        query: Tensor, key: Tensor, value: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        found = run(query, key, value, 0.0, is_causal, attn_mask=added, scale=factor)
        return found[0], found[1]

    return forward


def _cpu_backward(
    call: Attention, grad: Tensor, operands: Operands, kept: SavedResults
) -> list[Tensor]:
    query, heads, groups = operands[0], operands[0].shape[1], operands[1].shape[1]
    key, value = (repeated_heads(t, heads) for t in operands[1:])
    given = [last_dense(t) for t in (grad, query, key, value, kept.out)]
    found = TorchAttention.cpu_backward(
        *given, kept.log_sumexp.contiguous(), 0.0, call.is_causal, scale=call.factor(query)
    )
    return [summed_heads(g, c) for g, c in zip(found, (heads, groups, groups), strict=True)]


# ------------------------------------------------------------------ the table
KERNELS: dict[str, AttentionKernel] = {
    "cudnn": AttentionKernel(
        _cudnn_takes, _cudnn, _cudnn_backward, _cudnn_plain, _cudnn_plain_backward
    ),
    "flash": AttentionKernel(_flash_takes, _flash, _flash_backward, _flash_plain),
    "efficient": AttentionKernel(
        _efficient_takes, _efficient, _efficient_backward, _efficient_plain
    ),
    "cpu": AttentionKernel(_cpu_takes, _cpu, _cpu_backward, _cpu_plain),
}
# (description, test of a call, kernels in the order in which they are tried). The first table row
# whose test holds is used. Measured on an H200: benchmarks/notes.md.
ORDERS: Sequence[tuple[str, Callable[[AttentionCase], bool], tuple[str, ...]]] = (
    ("a CPU", lambda f: not f.machine.is_cuda, ("cpu",)),
    # The kernels take 5 us, 10 us and 10 us to start. Gradients of the first are less exact.
    (
        "Hopper and Blackwell, forward, few operations of few keys, as many heads of keys",
        lambda f: f.machine.prefers_cudnn and f.is_small,
        ("efficient", "cudnn", "flash"),
    ),
    (
        "Hopper and Blackwell",
        lambda f: f.machine.prefers_cudnn,
        ("cudnn", "flash", "efficient"),
    ),
    ("older GPUs", lambda f: True, ("flash", "efficient")),
)


# ----------------------------------------------------------------------
# Attention on operands [.., N, H, L, E]: by one of torch's kernels if it supports the call, else
# step by step. Both have the same results, except for which weights dropout drops.

# Which of output, log_sumexp, philox_seed and philox_offset are read: all.
ALL = (True, True, True, True)
# The tensor in place of a result that is never read.
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
    """Computes attention; returns output, log_sumexp, philox_seed and philox_offset (the two
    numbers that determine dropout).

    - `operands`: query, key and value, with axes [.., N, H, L, E].
    - `bias` is added to the scores. Scores where `mask` is False become -inf.
    - `is_oracle`: whether to compute step by step, without torch's attention kernels, as the
      reference for tests. Float64 operands are then computed in float64.
    - `reads`: which results are read. A result that is not read, other than the output, is empty.
    """
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
    """Returns a function that computes attention (output and log_sumexp) in one torch call and
    copies nothing. Repeated runs use it, because it takes the least time on the host.

    The function is valid for operands with these shapes and strides. Returns None if operands or
    results need a copy. The parameters are those of `forward`.
    """
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
    """Returns a function (query, key, value, bias) -> results of `forward` that calls torch once
    and copies nothing.

    Returns None if operands or results need a copy.
    """
    plain, device = plain_kernel(call, operands, bias, mask, reads=reads), operands[0].device
    if plain is None:
        return None
    if not any(reads[2:]):
        return lambda *given: (*plain(*given), _NOTHING, _NOTHING)
    # `plain_kernel` returns no kernel with dropout, so there is no seed.
    return lambda *given: (*plain(*given), *_seed(device, None, reads))


def _is_broadcast_to(bias: Tensor, given: Given) -> bool:
    batch = given.query.shape[:2]
    return all(n in (1, m) for n, m in zip(bias.shape, batch, strict=False))


def _check(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise InputError(
            f"{call.name}: query and key must have the same last size, and key and value the same "
            f"number of positions (the size before), but query has the shape {shapes[0]}, key "
            f"{shapes[1]} and value {shapes[2]}"
        )
    if call.heads_per_key is not None:
        for name, t in (("key", key), ("value", value)):
            if query.shape[-3] != call.heads_per_key * t.shape[-3]:
                raise InputError(
                    f"{call.name}: on this device query has {query.shape[-3]} heads and {name} "
                    f"{t.shape[-3]}, but each head of {name} belongs to {call.heads_per_key} heads "
                    f"of query: shard the heads of {name} evenly over the devices, or repeat them"
                )


def _met(call: Attention, operands: Operands) -> Operands:
    """Returns query, key and value of an attention, broadcast to equal batch sizes.

    They are also broadcast to equal numbers of heads. The exception is a call in which several
    query heads read the same head of keys and values: keys and values then keep fewer heads.
    """
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
    """Returns the operand `t` of an attention with four axes [N, H, L, E]: all axes before N are
    merged with N.
    """
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
    """Returns the tensor to add to the scores of an attention: the bias, and -inf where the mask is
    False.

    Without a bias and a mask, returns None. `query` has the dtype of the result if there is no
    bias. Axes that have stride 0 in the mask keep stride 0.
    """
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
    """Returns [philox_seed, philox_offset], which determine the weights that dropout drops, as
    UInt64 tensors on `device`.

    The offset is always 0. Without a `seed`, the seed is 0, too. A tensor that `reads` marks as not
    read is empty.
    """

    def zeros(shape: tuple[int, ...], *, is_read: bool) -> Tensor:
        if not is_read:
            return _NOTHING
        return torch.zeros(shape, dtype=torch.uint64, device=device)

    offset = zeros((), is_read=reads[3])
    return [zeros((2,), is_read=reads[2]) if seed is None else seed, offset]


def _draw(device: torch.device) -> Tensor:
    """Returns a new seed, drawn from torch's generator of the CPU, which determines the weights
    that dropout drops.
    """
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
    """Returns the gradients of query, key and value of an attention.

    - `grad_output`: the gradient of the output.
    - `results`: output, log_sumexp, philox_seed and philox_offset of `forward`.
    - `is_oracle`: whether to compute step by step, without torch's attention kernels, as the
      reference for tests. Float64 operands are then computed in float64.
    """
    _check(call, *operands)
    if grad_output.is_meta:
        return [torch.empty_like(t) for t in operands]
    out, log_sumexp, seed, offset = results
    given = _given(call, operands, None, None, reads_sums=True)
    folded = given.query, given.key, given.value
    grad = _folded(grad_output)
    kept = SavedResults(_folded(out), log_sumexp.reshape(grad.shape[:-1]), seed, offset)
    # The forward rounds log_sumexp of doubles to float32: too few digits for a kernel.
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
    """Returns a function that computes the gradients of an attention in one torch call and copies
    nothing.

    The function takes (grad_output, query, key, value, output, log_sumexp). It is valid for
    operands with these shapes and strides. Returns None if operands need a copy.
    """
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
    """Returns the softmax of the attention scores over the keys; 0 for a query without a score
    above -inf.

    `log_sumexp` is that of the scores of each query.
    """
    lse = log_sumexp.unsqueeze(-1)
    return torch.exp(scores - lse).masked_fill(lse.isneginf(), 0)


def _kept(call: Attention, weights: Tensor, seed: Tensor | None) -> Tensor | None:
    """Returns the factors by which dropout multiplies the attention weights.

    The factor is 0 for a dropped weight, else 1 / (1 - `call.dropout_p`). Returns None without
    dropout. `seed` selects the weights that are dropped.
    """
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
    # The forward rounds log_sumexp to float32.
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
