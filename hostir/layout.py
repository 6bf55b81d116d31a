"""What a rank allocates for a tensor: its local shard, dense in allocation order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuser.ir import scalar as sc
from fuser.ir import storage
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES
from multidevice.placement import placement
from multidevice.sharding import local_extents


def parts(tv: TensorView) -> tuple[int, ...]:
    """Return into how many blocks each logical axis (reductions left out) is cut."""
    cuts = placement(tv, DEVICE_TYPES)
    return tuple(math.prod(cut.count for cut in mine) for mine in cuts)


def allocated_elements(tv: TensorView) -> Scalar:
    """Return how many elements a rank allocates: expanded broadcasts count once."""
    return storage.elements(tv, local_extents(tv))


def allocated_strides(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, per logical axis, of a dense local shard; 0 for expanded broadcasts."""
    strides = storage.dense_strides(tv, [sc.const(max(n, 1)) for n in sizes])
    return tuple(int(sc.evaluate(s, {})) for s in strides)
