"""Computes sizes and strides of a tensor's local shard: the part of the tensor that one rank
stores."""

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
    """Returns, for each logical axis of `tv`, into how many parts the devices of the mesh split it;
    1 for an axis that is not split. Reduction axes are left out.
    """
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(math.prod(cut.devices for cut in mine) for mine in cuts)


def allocated_elements(tv: TensorView, *, per_step: bool = False) -> Scalar:
    """Returns the number of elements that one rank allocates for its shard of `tv`, the part that
    it stores. An expanded axis, which repeats one element with stride 0, counts as one element.

    If `per_step` is True, a loop computes the shard block by block, and only one full block is
    counted.
    """
    return memory_layout.elements(tv, block_extents(tv) if per_step else local_extents(tv))


def held_nbytes(tv: TensorView, shape: Sequence[int]) -> int:
    """Returns the number of bytes in memory of a shard of `tv` (the part that a rank stores) that
    has this `shape`. An expanded axis, which repeats one element with stride 0, counts as one
    element.
    """
    expanded = memory_layout.expanded_positions(tv)
    kept = [n for k, n in enumerate(shape) if k not in expanded]
    return math.prod(kept) * nbytes_of(tv.dtype())


def allocated_strides(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a newly allocated shard of `tv`. A shard is the part of
    a tensor that a rank stores, and `sizes` is its shape.

    The strides are in the order of the shape, and follow the declared memory order. Expanded axes
    have stride 0.
    """
    return memory_layout.dense_strides_of(tv, [max(n, 1) for n in sizes])


def viewed_strides(
    tv: TensorView, sizes: Sequence[int], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the strides of a view that the program returns to the caller. `strides` are the
    strides that the view has in memory.

    Torch allows any stride for an axis with one element, so a view of an input may have an
    arbitrary stride there. If `tv` is contiguous, such a stride is replaced by the one that a newly
    allocated tensor of these `sizes` would have.
    """
    if 1 not in sizes or not memory_layout.is_contiguous(tv):
        return strides
    found = zip(sizes, allocated_strides(tv, sizes), strides, strict=True)
    return tuple(own if n == 1 else step for n, own, step in found)


def spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements in memory from the first to the last element of a tensor, gaps
    included.

    `strides` are in elements. The result is 0 if the tensor has no elements.
    """
    if 0 in shape:
        return 0
    last = 0
    for n, step in zip(shape, strides, strict=True):
        last += (n - 1) * step
    return 1 + last


def is_repeated(out: torch.Tensor) -> bool:
    """Whether several elements of `out` have the same memory address, because an axis is expanded
    (stride 0). Torch refuses to write into such a tensor."""
    if out.is_contiguous() and out.numel():
        return False
    return any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True))


def write(out: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into the memory of `out`, which may have expanded axes (stride 0). Only one
    element is written along an expanded axis, because torch refuses to write such an axis."""
    for axis, (n, step) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if n > 1 and not step:
            out, value = out.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    out.copy_(value)


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same torch storage.

    Meta tensors have no memory address. For meta tensors, the storage objects are compared instead.
    """
    one, other = a.untyped_storage(), b.untyped_storage()
    if a.is_meta:
        return one._cdata == other._cdata  # pyright: ignore[reportPrivateUsage]
    return one.data_ptr() == other.data_ptr()
