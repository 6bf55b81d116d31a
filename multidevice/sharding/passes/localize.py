"""Localization: rewrites a fusion of global tensors as the plain fusion of one device's shards.

    c [DIDx{2}, i0/2, i1] = add(a, b)   ->   c [ceilDiv(i0, 2), i1] = add(a, b)

Kernels and library ops are made from local fusions, so that no later stage handles devices. Sizes
remain expressions of the global symbols: a shard of `i0` rows has `ceilDiv(i0, 2)` rows.
"""

from __future__ import annotations

from dataclasses import replace

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.axis_path import transforms_between, with_exact_splits
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain, numbers
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.ops.nodes import BroadcastOp, ExpandOp, FullOp, ReductionOp, Reshard, SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES, IterType, ParallelType
from fuser.support.errors import ShardingError
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Block,
    axis_cuts,
    local_extent,
    path_to_root,
    stream_axis_of,
)
from multidevice.sharding.queries import has_mesh, has_streams, is_summed_in_parts, partial_sum_axes
from multidevice.sharding.streams import is_in_step

# A cache of local domains for tensors that several fusions have: key -> (domain of the whole
# tensor, local domain). The entry keeps the whole domain alive, because its id is in the key.
Known = dict[tuple[object, ...], tuple[TensorDomain, TensorDomain]]


def localize(
    fusion: Fusion, block: Block = "first", *, known: Known | None = None
) -> tuple[Fusion, dict[TensorView, TensorView]]:
    """Returns the fusion that one device computes on its shards, and a map to the tensors of that
    fusion.

    The map has the tensor of the local fusion for each tensor of `fusion`. The local fusion has no
    meshes and no device axes:

    - A logical axis that itself is a device axis has extent 1.
    - Loop domains are the logical axes (those that users see), all serial, so that schedulers can
      transform them. The user's own splits, merges and parallel types are used only by
      `manual_execute`.
    - Inputs lose the reduction axes of the ops that made them.

    If the fusion is local already, the fusion itself is returned. A stream loop, a loop on the
    host, computes one block of a tensor per step. A tensor that such a loop computes or reads block
    by block is reduced to one block, because kernels in loops run on slices. `block` selects the
    size of the block (see `streams.block_extents`). `known` is a cache that the parts of one fusion
    share, so that each tensor is localized once.

    Raises:
        ShardingError: an op of the fusion is a communication (a resharding).
    """
    has_steps = has_streams(fusion)
    if not (has_mesh(fusion) or has_steps or any(map(_has_loops, fusion.tensors()))):
        return fusion, {tv: tv for tv in fusion.tensors()}
    known = {} if known is None else known
    local, twins = fusion.copy()
    for op in fusion.exprs:
        if isinstance(op, Reshard):
            raise ShardingError(
                "internal error: the part of a definition that runs on one device without "
                "communication contains an op that moves data between devices. Please report the "
                f"definition and this op:\n{op}"
            )
    held = {*fusion.inputs, *fusion.outputs}
    for tv, twin in twins.items():
        part = block if has_steps and is_block(tv) else None
        is_held = tv in held
        key = id(tv.domain), tv.mesh, part, is_held, type(tv.definition())
        if key not in known:
            known[key] = tv.domain, _domain_of_twin(tv, part, is_held=is_held)
        twin.domain = known[key][1]
        twin.mesh, twin.mesh_is_user_set, twin.compute_at = None, False, 0
    ops: list[TensorOp] = []
    for op, twin in zip(fusion.exprs, local.exprs, strict=True):
        if not is_summed_in_parts(op.out_tensor):
            ops.append(_with_local_scalars(twin))
        else:
            ops += _partial_sum(local, op, twin, block)
    local.exprs = ops
    return local, twins


def _domain_of_twin(tv: TensorView, block: Block | None, *, is_held: bool) -> TensorDomain:
    domain = local_domain(tv, block)
    if domain.allocation and not is_held:
        domain = domain.in_logical_order()  # no memory holds it
    return domain.without_root() if tv.definition() is None else domain


def _has_loops(tv: TensorView) -> bool:
    domain = tv.domain
    is_logical = domain.loop_numbers == domain.logical_numbers and not tv.compute_at
    return not is_logical or any(a.ptype is not ParallelType.serial for a in domain.loop)


def is_block(tv: TensorView) -> bool:
    """Returns whether one step of a stream loop computes or reads only a block of the tensor `tv`.

    A stream loop is a loop on the host; each iteration is a step. For an input of the fusion, it is
    enough that one op reads only a block per step.
    """
    if tv.definition() is not None:
        return stream_axis_of(tv) is not None
    return any(
        is_in_step(op, index)
        for op in tv.uses()
        for index, operand in tensor_operands(op)
        if operand is tv
    )


# ------------------------------------------------------------------ domains
def local_domain(tv: TensorView, block: Block | None = None) -> TensorDomain:
    """Returns the axes (the domain) of a device's shard of `tv`: local extents, no device axes.

    The memory order is that of `tv`. If `block` is given, returns the domain of the part of the
    shard that one step of a stream loop computes; `block` selects the step.
    """
    domain = tv.domain
    sizes = _local_sizes(tv, block)
    partial = {domain.no_reductions[p].number for p in partial_sum_axes(tv)}

    def local(axis: IterDomain) -> IterDomain:
        kind = IterType.broadcast if axis.number in partial else axis.kind
        plain = axis.having(kind=kind, ptype=ParallelType.serial)
        size = sizes.get(axis.number)
        if size is None:
            return plain
        return plain.having(expanded=size) if axis.is_broadcast else plain.having(extent=size)

    # A partial sum over d devices has a broadcast axis in place of the device axis (see
    # `_partial_sum`).
    is_summed = is_summed_in_parts(tv)
    is_product = is_summed and not isinstance(tv.definition(), ReductionOp)
    kept = [a for a in domain.logical if not (is_product and a.is_reduction())]
    whole = domain.having(
        logical=numbers(kept),
        loop=numbers(kept),
        root=() if is_summed else domain.root_numbers,
        allocation=(),
        contiguity=(),
        transforms=() if is_summed else transforms_between(domain, domain.root, domain.logical),
    )
    made = with_exact_splits(whole.map_axes(local))
    return made.with_allocation(*_local_allocation(tv, made.logical))


def _local_sizes(tv: TensorView, block: Block | None) -> dict[int, Scalar]:
    """Returns the extent on one device of every axis that is divided over devices, by axis number.

    If a reshape made the axis, the axes from which the reshape made it are included. If `block` is
    given, returns the extents of the block that one step of a stream loop (a loop on the host)
    computes; `block` selects the step.
    """
    fusion = tv.fusion
    axes = tv.domain.axes
    sizes: dict[int, Scalar] = {}
    partial = {tv.domain.no_reductions[p].number for p in partial_sum_axes(tv)}
    ptypes = DEVICE_TYPES if block is None else SPREAD_TYPES
    for number, cuts in axis_cuts(tv, ptypes).items():
        splits = tuple(replace(c, whole=False) for c in cuts)
        for step in path_to_root(tv, axes[number]):
            size = sizes.get(step, fusion.canonical(axes[step].size))
            sizes[step] = local_extent(size, cuts if step == number else splits, block)
            split = tv.domain.splits.get(step)
            if number in partial and split is not None:
                sizes[split.inner] = sizes[step]  # what is left of the reduction
    return sizes


def _local_allocation(
    tv: TensorView, logical: tuple[IterDomain, ...]
) -> tuple[tuple[int, ...], tuple[bool | None, ...]]:
    """Returns the memory order of a device's shard of `tv` as (axes, contiguity).

    The axes are the numbers of the allocation axes: the axes in memory order. They are () if the
    memory order is that of `logical`, the logical axes of the shard. The second entry says for each
    axis whether it is contiguous; None for broadcasts and reductions.
    """
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
    """Returns the parameters of the op that slices one device's shard as `op` slices the global
    tensor.

    Only axes of which `op` keeps all elements can be divided over devices. Their ranges now end at
    the extent on one device.
    """
    root, logical = op.out.domain.maybe_root, op.out.domain.logical
    stops = tuple(
        r.size if r.number == axis.number else stop
        for r, axis, stop in zip(root, logical, op.stops, strict=True)
    )
    return {"ranges": SliceOp.ranges_of(op.starts, stops)}


def _with_local_scalars(op: TensorOp) -> TensorOp:
    """Returns `op` with the sizes on one device as operands, if the op has global sizes as
    operands.

    These ops are full, expand and slice, which take the shape of the result or the ranges of a
    slice. Any other op is returned unchanged. The caller has already given the result the sizes on
    one device.
    """
    match op:
        case FullOp() | ExpandOp():
            return op.replace(shape=_shape(op.out))
        case SliceOp():
            return op.replace(**_local_slice_bounds(op))
        case _:
            return op


def _partial_sum(local: Fusion, op: TensorOp, twin: TensorOp, block: Block) -> list[TensorOp]:
    """Returns the ops by which one device computes its part of a partial sum.

    A partial sum is a tensor with one part per device along an axis. On one device this axis has
    extent 1, so it becomes a broadcast axis:

    - a reduction gets the broadcast in its operand, so that the reduction remains the last op;
    - a contraction, such as a matmul, gets the broadcast in its result.

    `op` computes the partial sum in the global fusion; `twin` is its copy in the fusion `local`.
    """
    tv, out = op.out_tensor, twin.out_tensor
    parts = partial_sum_axes(tv)
    if isinstance(twin, ReductionOp):
        numbers = {tv.domain.no_reductions[p].number for p in parts}
        flags = tuple(a.number in numbers for a in tv.domain.logical)
        given = iter(twin.inp.domain.no_reductions)
        axes = [
            local.new_axis(sc.ONE, IterType.broadcast) if new else local.clone_axis(next(given))
            for new in flags
        ]
        spread = local.new_tensor(axes, twin.inp.dtype())
        broadcast = BroadcastOp(spread, twin.inp, flags=flags).replace(where=op.where)
        return [broadcast, twin.replace(inp=spread)]
    sizes = _local_sizes(tv, block)
    axes = [local.clone_axis(a, extent=sizes.get(a.number, a.extent)) for a in tv.domain.maybe_root]
    product = local.new_tensor(axes, out.dtype())
    flags = tuple(p in parts for p in range(tv.ndim))
    computed = twin.map_values(lambda v: product if v is out else v)
    return [computed, BroadcastOp(out, product, flags=flags).replace(where=op.where)]
