"""What a rank holds of a tensor: the local size and the memory order of each axis.

A device-parallel loop axis cuts the logical axis that it comes from (through outer splits) into as many
equal parts as it has iterations; a rank holds one part. Everything is symbolic here: `local_shape`
gives the extents, and `hostir.bind` evaluates them.
"""

from __future__ import annotations

from fuser.errors import UnsupportedError
from fuser.ir import scalar as sc
from fuser.ir.domain import IterDomain, Merge, Split, TensorDomain
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType


def sharded_axes(tv: TensorView) -> dict[int, tuple[IterDomain, ...]]:
    """Return, per position of a sharded logical axis (reductions left out), its device loop axes.

    Raises `UnsupportedError` for a device axis that is the inner output of a split.
    """
    positions = {a.number: i for i, a in enumerate(tv.domain.no_reductions)}
    found: dict[int, tuple[IterDomain, ...]] = {}
    for axis in tv.domain.loop:
        if axis.is_device and not axis.is_reduction():
            position = positions.get(_logical_source(tv, axis))
            if position is not None:
                found[position] = (*found.get(position, ()), axis)
    return found


def _logical_source(tv: TensorView, axis: IterDomain) -> int:
    """Return the number of the logical axis whose outermost part `axis` iterates."""
    logical = {a.number for a in tv.domain.logical}
    number = axis.number
    while number not in logical:
        made = tv.domain.producer_of(axis)
        if made is None:
            return number
        if isinstance(made, Split) and made.inner.number == number:
            raise UnsupportedError(f"{tv}: {axis} shards the inner part of {made.inp}")
        axis = made.outer if isinstance(made, Merge) else made.inputs[0]
        number = axis.number
    return number


def parts(tv: TensorView) -> tuple[int, ...]:
    """Return into how many parts each logical axis (reductions left out) is cut; 1: not sharded."""
    counts = [1] * tv.ndim
    for position, axes in sharded_axes(tv).items():
        for axis in axes:
            size = sc.int_value(axis.extent)
            if size is None:
                raise UnsupportedError(f"{tv}: device axis {axis} has no constant extent")
            counts[position] *= size
    return tuple(counts)


def local_shape(tv: TensorView) -> tuple[Scalar, ...]:
    """Return the extents of the local shard, per logical axis without reductions."""
    return tuple(
        extent if n == 1 else sc.ceildiv(extent, n)
        for extent, n in zip(tv.shape(), parts(tv), strict=True)
    )


def allocated_elements(tv: TensorView) -> Scalar:
    """Return how many elements a rank allocates: expanded broadcasts count once."""
    axes = tv.domain.no_reductions
    sizes = zip(axes, local_shape(tv), strict=True)
    return sc.product(sc.ONE if a.is_broadcast else size for a, size in sizes)


def memory_order(domain: TensorDomain) -> tuple[int, ...]:
    """Return the positions of the logical axes (reductions left out), outermost in memory first.

    Raises `UnsupportedError` when the parts of one logical axis are not adjacent in memory.
    """
    axes = domain.no_reductions
    position = {a.number: i for i, a in enumerate(axes)}
    order: list[int] = []
    for axis in domain.maybe_allocation:
        # A device axis and a reduction take no memory of their own.
        if axis.kind is IterType.reduction or axis.is_device:
            continue
        source = axis
        while source.number not in position:
            made = domain.producer_of(source)
            if not isinstance(made, Split):
                raise UnsupportedError(f"allocation axis {axis} is not a part of one logical axis")
            source = made.inp
        at = position[source.number]
        if at in order and order[-1] != at:
            raise UnsupportedError(f"the parts of {source} are not adjacent in memory")
        if at not in order:
            order.append(at)
    order += [i for i in range(len(axes)) if i not in order]
    return tuple(order)


def local_strides(
    tv: TensorView, sizes: tuple[int, ...], order: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the strides, per logical axis, of a dense local shard; 0 for expanded broadcasts."""
    axes = tv.domain.no_reductions
    strides = [0] * len(sizes)
    step = 1
    for i in reversed(memory_order(tv.domain) if order is None else order):
        if axes[i].is_broadcast and axes[i].expanded is not None:
            continue
        strides[i] = step
        step *= max(sizes[i], 1)
    return tuple(strides)


def device_marks(tv: TensorView) -> tuple[int, ...]:
    """Return the positions of logical axes that only count the ranks of a partial result.

    A contraction over a sharded axis leaves one partial result per rank: `ideviceIdx.x7{2}rf` of
    local size 1. Library ops compute the tensor without these axes.
    """
    return tuple(
        i for i, a in enumerate(tv.domain.no_reductions) if a.is_device and a.rfactor
    )
