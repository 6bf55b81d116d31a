"""What a rank holds of a tensor: the local size and the memory order of each axis.

A device cut divides a logical axis into equal blocks, and a rank holds one of them. Sizes are symbolic
here and get their values in `hostir.bind`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuser.ir import scalar as sc
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES
from multidevice.placement import local_extent, memory_order, placement


def parts(tv: TensorView) -> tuple[int, ...]:
    """Return into how many blocks each logical axis (reductions left out) is cut; 1: not sharded."""
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(math.prod(cut.count for cut in mine) for mine in cuts)


def local_shape(tv: TensorView) -> tuple[Scalar, ...]:
    """Return the extents of the local shard, per logical axis without reductions."""
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(local_extent(x, mine) for x, mine in zip(tv.shape(), cuts, strict=True))


def allocated_elements(tv: TensorView) -> Scalar:
    """Return how many elements a rank allocates: expanded broadcasts count once."""
    sizes = zip(tv.domain.no_reductions, local_shape(tv), strict=True)
    return sc.product(sc.ONE if a.is_broadcast else size for a, size in sizes)


def allocated_strides(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, per logical axis, of a dense local shard; 0 for expanded broadcasts."""
    axes = tv.domain.no_reductions
    strides = [0] * len(sizes)
    step = 1
    for i, _ in reversed(memory_order(tv)):
        if axes[i].is_broadcast and axes[i].expanded is not None:
            continue
        strides[i] = step
        step *= max(sizes[i], 1)
    return tuple(strides)


def partial_marks(tv: TensorView) -> tuple[int, ...]:
    """Return the positions of logical axes that only number the ranks of a partial result.

    A contraction over a sharded axis leaves one partial result per rank: `ideviceIdx.x7{2}rf`, of
    local size 1. Library ops compute the tensor without these axes.
    """
    return tuple(i for i, a in enumerate(tv.domain.no_reductions) if a.is_device and a.rfactor)
