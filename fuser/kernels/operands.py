"""What a launch asks of its operands: their addresses, alignments and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from fuser.ir.domain.strided_layout import Laid
from fuser.ir.dtypes import DataType
from fuser.ir.layout_class import Layout
from fuser.support.device import VECTOR_BYTES, DeviceInfo, describe_device
from fuser.support.errors import InputError

# Blocks and unrolled steps run past the end of a tensor by less than this many elements.
_OVERRUN = 1 << 20
_INT32_LIMIT = (1 << 31) - 1 - _OVERRUN


def index_dtype(iterations: int, tensors: Sequence[torch.Tensor | Laid]) -> DataType:
    """Return Int32 where every offset and every iteration count fits, over-run included."""
    largest = max(iterations, *[t.span if isinstance(t, Laid) else span(t) for t in tensors])
    return DataType.Int32 if largest <= _INT32_LIMIT else DataType.Int


def total_nbytes(tensors: Sequence[torch.Tensor | Laid]) -> int:
    """Return the bytes of the elements of all."""
    return sum(t.numel() * t.element_size() for t in tensors)


def span(t: torch.Tensor) -> int:
    """Return how many elements lie from the first to past the last one."""
    if t.is_contiguous():
        return t.numel()
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def alignment(t: torch.Tensor | Laid, layout: Layout) -> int:
    """Return the largest power of two, at most 16, that divides the address and every stride, in
    bytes, of an axis that is not contiguous."""
    found = gcd(address(t), VECTOR_BYTES)
    order, flags = layout
    if all(flags):
        return found
    for k, flag in zip(order, flags, strict=True):
        if not flag and t.stride(k):
            found = gcd(found, t.stride(k) * t.element_size())
    return found


def is_plain(t: torch.Tensor | Laid) -> bool:
    """Whether a tensor with elements has no gaps, and begins where a vector of memory does."""
    return t.is_contiguous() and not address(t) % VECTOR_BYTES


def address(t: torch.Tensor | Laid) -> int:
    """Return the address of a tensor; of one without contents, where it begins in memory that will
    be as aligned as any."""
    if isinstance(t, Laid) or t.is_meta:
        return int(t.storage_offset()) * t.element_size()
    return t.data_ptr()


def describe(tensors: Sequence[torch.Tensor]) -> DeviceInfo:
    """Return the device of tensors. Raises `InputError` where there are none."""
    if not tensors:
        raise InputError("a kernel without tensors has no device")
    return describe_device(tensors[0].device)
