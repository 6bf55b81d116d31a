"""Computes the memory that a rank allocates for a tensor: the dense local shard."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuser.ir import memory_layout
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES
from multidevice.sharding.placement import placement
from multidevice.sharding.queries import local_extents
from multidevice.sharding.streams import block_extents


def parts(tv: TensorView) -> tuple[int, ...]:
    """Returns the number of shards along each logical axis. Reductions are left out."""
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(math.prod(cut.devices for cut in mine) for mine in cuts)


def allocated_elements(tv: TensorView, *, per_step: bool = False) -> Scalar:
    """Returns the number of elements that a rank allocates. An expanded broadcast counts as one
    element.

    If `per_step`, counts only the block of one iteration of a stream loop.
    """
    return memory_layout.elements(tv, block_extents(tv) if per_step else local_extents(tv))


def held_nbytes(tv: TensorView, shape: Sequence[int]) -> int:
    """Returns the number of bytes of a tensor of this shape in memory. An expanded axis counts as
    one element."""
    expanded = memory_layout.expanded_positions(tv)
    kept = [n for k, n in enumerate(shape) if k not in expanded]
    return math.prod(kept) * nbytes_of(tv.dtype())


def allocated_strides(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the stride of each logical axis in a dense local shard of these sizes. Expanded
    broadcasts have stride 0."""
    return memory_layout.dense_strides_of(tv, [max(n, 1) for n in sizes])


def viewed_strides(
    tv: TensorView, sizes: Sequence[int], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the strides to report for a view that is returned to the caller.

    In an input, the stride of an axis with one element is arbitrary. In a dense result, this stride
    is computed from the memory order, as in an allocated tensor.
    """
    if 1 not in sizes or not memory_layout.is_contiguous(tv):
        return strides
    found = zip(sizes, allocated_strides(tv, sizes), strides, strict=True)
    return tuple(own if n == 1 else step for n, own, step in found)


def spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last element of a tensor in memory, gaps
    included.

    `strides` are in elements.
    """
    if 0 in shape:
        return 0
    last = 0
    for n, step in zip(shape, strides, strict=True):
        last += (n - 1) * step
    return 1 + last


def is_repeated(out: torch.Tensor) -> bool:
    """Whether `out` has an expanded axis, that is, several elements with stride 0. Torch refuses to
    write such a tensor."""
    if out.is_contiguous() and out.numel():
        return False
    return any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True))


def write(out: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into the memory of `out`. Along an expanded axis, only one element is
    written."""
    for axis, (n, step) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if n > 1 and not step:
            out, value = out.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    out.copy_(value)


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory. For meta tensors, whether they would share memory if they
    had any."""
    one, other = a.untyped_storage(), b.untyped_storage()
    if a.is_meta:
        return one._cdata == other._cdata  # pyright: ignore[reportPrivateUsage]
    return one.data_ptr() == other.data_ptr()
