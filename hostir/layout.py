"""What a rank allocates for a tensor: its local shard, dense in allocation order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuser.ir import scalar as sc
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES
from multidevice.placement import memory_order, placement
from multidevice.sharding import local_extents


def parts(tv: TensorView) -> tuple[int, ...]:
    """Return into how many blocks each logical axis (reductions left out) is cut."""
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(math.prod(cut.count for cut in mine) for mine in cuts)


def allocated_elements(tv: TensorView) -> Scalar:
    """Return how many elements a rank allocates: expanded broadcasts count once."""
    sizes = zip(tv.domain.no_reductions, local_extents(tv), strict=True)
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
