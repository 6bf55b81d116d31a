"""From a fusion of global tensors to the plain fusion of one device's shards.

    c [DIDx{2}, i0/2, i1] = add(a, b)   ->   c [ceilDiv(i0, 2), i1] = add(a, b)

Kernels and library ops are made from local fusions, so nothing behind this point knows of devices.
Sizes stay written over the global symbols: a shard of `i0` rows has `ceilDiv(i0, 2)`.
"""

from __future__ import annotations

from fuser.errors import ShardingError, UnsupportedError
from fuser.ir import scalar as sc
from fuser.ir.domain import IterDomain, TensorDomain, numbers
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import (
    BroadcastOp,
    ExpandOp,
    FullOp,
    ReductionOp,
    Reshard,
    SliceOp,
    TensorOp,
)
from fuser.ir.path import transforms_between, with_exact_splits
from fuser.ir.scalar import Scalar
from fuser.ir.storage import memory_order
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, IterType, ParallelType
from multidevice.placement import axis_cuts, local_extent, path_to_root
from multidevice.sharding import has_mesh, rfactor_device_axis


def localize(fusion: Fusion) -> tuple[Fusion, dict[TensorView, TensorView]]:
    """Return the fusion of local shards, and the map from the given tensors to its tensors.

    The result has no meshes and no device axes; a logical axis that is a device axis as a whole
    has extent 1. Loop domains are the logical ones: schedules start from here. Inputs lose the
    reduction axes of the ops that made them. Without meshes it is a plain copy.

    Raises:
        ShardingError: an op of the fusion is a resharding.
        UnsupportedError: a tensor has a stream axis.
    """
    local, twins = fusion.copy()
    if not has_mesh(fusion):
        return local, twins
    for op in fusion.exprs:
        if isinstance(op, Reshard):
            raise ShardingError(f"a local fusion cannot hold the resharding\n{op}")
    for tv, twin in twins.items():
        domain = local_domain(tv)
        twin.domain = domain.without_root() if tv.definition() is None else domain
        twin.mesh, twin.mesh_is_user_set, twin.compute_at = None, False, 0
    ops: list[TensorOp] = []
    for op, twin in zip(fusion.exprs, local.exprs, strict=True):
        if rfactor_device_axis(op.out_tensor) is None:
            ops.append(_with_local_scalars(twin))
        else:
            ops += _partial_sum(local, op, twin)
    local.exprs = ops
    return local, twins


# ------------------------------------------------------------------ domains
def local_domain(tv: TensorView) -> TensorDomain:
    """Return the domain of a shard of `tv`: local extents, no device axes, its memory order."""
    domain = tv.domain
    for axis in domain.loop:
        if axis.ptype is ParallelType.stream:
            raise UnsupportedError(f"stream axis {axis} of {tv} in a kernel is not supported yet")
    sizes = _local_sizes(tv)

    partial = {a.number for a in domain.no_reductions if a.rfactor and a.is_device}

    def local(axis: IterDomain) -> IterDomain:
        kind = IterType.broadcast if axis.number in partial else axis.kind
        plain = axis.having(kind=kind, ptype=ParallelType.serial)
        size = sizes.get(axis.number)
        if size is None:
            return plain
        return plain.having(expanded=size) if axis.is_broadcast else plain.having(extent=size)

    # A partial sum over d devices: a broadcast stands for the device axis (see `_partial_sum`).
    is_product = bool(partial) and not isinstance(tv.definition(), ReductionOp)
    kept = [a for a in domain.logical if not (is_product and a.is_reduction())]
    whole = domain.having(
        logical=numbers(kept),
        loop=numbers(kept),
        root=() if partial else domain.root_numbers,
        allocation=(),
        contiguity=(),
        transforms=() if partial else transforms_between(domain, domain.root, domain.logical),
    )
    made = with_exact_splits(whole.map_axes(local))
    return made.with_allocation(*_local_allocation(tv, made.logical))


def _local_sizes(tv: TensorView) -> dict[int, Scalar]:
    """Return the local size of every root and logical axis that devices cut, by axis number."""
    fusion = tv.fusion
    axes = tv.domain.axes
    sizes: dict[int, Scalar] = {}
    for number, cuts in axis_cuts(tv, DEVICE_TYPES).items():
        path = path_to_root(tv, axes[number])
        for step in path:
            size = sizes.get(step, fusion.canonical(axes[step].size))
            if step == number:
                sizes[step] = local_extent(size, cuts)
                continue
            for cut in cuts:
                size = sc.ceildiv(size, cut.count)
            sizes[step] = size
    return sizes


def _local_allocation(
    tv: TensorView, logical: tuple[IterDomain, ...]
) -> tuple[tuple[int, ...], tuple[bool | None, ...]]:
    """Return allocation (() when it is the logical order) and contiguity of a shard."""
    axes = [a for a in logical if not a.is_reduction()]
    order = memory_order(tv)
    flags = {axes[p].number: None if axes[p].is_broadcast else flag for p, flag in order}
    if [p for p, _ in order] == list(range(len(axes))):
        return (), tuple(flags.get(a.number) for a in logical)
    reductions = (a.number for a in logical if a.is_reduction())
    allocation = (*(axes[p].number for p, _ in order), *reductions)
    return allocation, tuple(map(flags.get, allocation))


# ------------------------------------------------------------------ ops
def _shape(tv: TensorView) -> tuple[Scalar, ...]:
    return tuple(a.size for a in tv.domain.no_reductions)


def _local_slice_bounds(op: SliceOp) -> dict[str, tuple[Scalar, ...]]:
    """Axes that are not resized keep their whole local range."""
    root, logical = op.out.domain.maybe_root, op.out.domain.logical
    stops = tuple(
        r.size if r.number == axis.number else stop
        for r, axis, stop in zip(root, logical, op.stops, strict=True)
    )
    return {"stops": stops}


def _with_local_scalars(op: TensorOp) -> TensorOp:
    """Rewrite the scalar operands that are sizes of the result."""
    match op:
        case FullOp() | ExpandOp():
            return op.replace(shape=_shape(op.out))
        case SliceOp():
            return op.replace(**_local_slice_bounds(op))
        case _:
            return op


def _partial_sum(local: Fusion, op: TensorOp, twin: TensorOp) -> list[TensorOp]:
    """Rewrite an op with result `[M, N, iDIDx{d}rf, r{K/d}rf]` with a broadcast for the device
    axis: of a reduction's operand, so that the reduction stays last; of a contraction's result.
    """
    tv, out = op.out_tensor, twin.out_tensor
    if isinstance(twin, ReductionOp):
        flags = tuple(a.rfactor and a.is_device for a in tv.domain.logical)
        given = iter(twin.inp.domain.no_reductions)
        axes = [
            local.new_axis(sc.ONE, IterType.broadcast) if new else local.clone_axis(next(given))
            for new in flags
        ]
        spread = local.new_tensor(axes, twin.inp.dtype())
        broadcast = BroadcastOp(spread, twin.inp, flags=flags).replace(where=op.where)
        return [broadcast, twin.replace(inp=spread)]
    sizes = _local_sizes(tv)
    axes = [local.clone_axis(a, extent=sizes.get(a.number, a.extent)) for a in tv.domain.maybe_root]
    product = local.new_tensor(axes, out.dtype())
    flags = tuple(a.rfactor and a.is_device for a in tv.domain.no_reductions)
    computed = twin.map_values(lambda v: product if v is out else v)
    return [computed, BroadcastOp(out, product, flags=flags).replace(where=op.where)]
