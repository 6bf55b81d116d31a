"""Questions about shardings: how a tensor is cut, its global and local sizes, and which ops
reshard.

A cut divides an axis into blocks, one per device of a mesh dimension or one per step (iteration) of
a stream loop. An op reshards if its operand and result are cut differently over devices, so that
devices must communicate, or drop data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod

from fuser.ir.axis_graph import alike_axes, mapped_axes, tensor_operands
from fuser.ir.domain.axis_path import SizeRules, forward, indices_forward, replay
from fuser.ir.domain.device_mesh import DeviceMesh, ranks_of
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import axis_words, in_ir, misfit_of_mesh, tensor_words
from fuser.ir.op import Op
from fuser.ir.ops.attention_ops import AttentionOp, SdpaBwdOp
from fuser.ir.ops.nodes import LoadStoreOp, Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import postorder
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.passes.concretize import check_device_axis
from fuser.support.errors import ShardingError, UnsupportedError, counted, padding_words, user_code
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Cut,
    Cuts,
    Placement,
    axis_cuts,
    cut_line,
    is_allocated_per_step,
    is_plain_broadcast,
    local_extent,
    origin_root,
    placement,
    sharded_axis,
    spread_axes,
)


# ------------------------------------------------------------------ one tensor
def sharded_logical_axis(tv: TensorView, ptype: ParallelType) -> int:
    """Returns the position of the axis of `tv` that is divided along `ptype`; -1 if there is none.

    `ptype` is a mesh dimension, or a stream type (the mark of an axis along which a loop on the
    host computes the tensor). Reduction axes are not counted. Raises `UnsupportedError` if the axis
    with this type was not made as the outer part of a split.
    """
    for position, cuts in enumerate(placement(tv)):
        if any(c.ptype is ptype for c in cuts):
            return position
    return -1


@dataclass(frozen=True)
class UnevenAxis:
    """An axis of `extent` elements that `devices` devices along the mesh dimension `ptype` divide
    into blocks of unequal sizes.

    The blocks have ceil(extent / devices) elements. The last blocks are shorter, or empty.
    """

    extent: int
    devices: int
    ptype: ParallelType

    @property
    def block(self) -> int:
        """The number of elements of a full block."""
        return -(-self.extent // self.devices)

    @property
    def padded(self) -> int:
        """The extent of the axis if all blocks were full."""
        return self.block * self.devices

    def block_at(self, coordinate: int) -> tuple[int, int]:
        """Returns (first index, size) of the block of the device at `coordinate` along the mesh
        dimension. The size may be 0.
        """
        start = min(coordinate * self.block, self.extent)
        return start, min(self.block, self.extent - start)


def uneven_axes(tv: TensorView) -> dict[int, UnevenAxis]:
    """Returns the axes of a tensor that devices divide into blocks of unequal sizes.

    Maps the numbers of logical axes to how they are divided. Reduction axes are included. Axes of
    symbolic extent are left out, and tensors that a stream loop computes, too. Raises
    `ShardingError` if two mesh dimensions divide an axis, and the blocks would be unequal, or if
    the axis has one element.
    """
    found: dict[int, UnevenAxis] = {}
    if any(axis.is_stream for axis in spread_axes(tv)):
        return found
    for number, cuts in axis_cuts(tv, DEVICE_TYPES).items():
        extent = sc.int_value(tv.fusion.canonical(tv.domain.axes[number].size))
        devices = prod(cut.devices for cut in cuts)
        if extent is None or extent % devices == 0 or any(cut.whole for cut in cuts):
            continue
        axis = tv.domain.axes[number]
        if extent == 1:
            raise ShardingError(
                f"{axis_words(tv, axis)} has one element, which ops repeat, so {devices} devices "
                f"of {tv.mesh} cannot divide it: use Replicate()"
                f"{user_code(cut_line(tv, cuts[-1].ptype))}{in_ir(axis, tv)}"
            )
        if len(cuts) > 1:
            raise ShardingError(
                f"{axis_words(tv, axis)} has {extent} elements, which {devices} devices along "
                f"{len(cuts)} dimensions of {tv.mesh} cannot divide into equal shards"
                f"{padding_words(extent, devices)}, or divide the axis along one mesh dimension"
                f"{user_code(cut_line(tv, cuts[-1].ptype))}{in_ir(axis, tv)}"
            )
        found[number] = UnevenAxis(extent, devices, next(cut.ptype for cut in cuts))
    return found


def uneven_positions(tv: TensorView) -> dict[int, UnevenAxis]:
    """Returns the axes of a tensor that devices divide into blocks of unequal sizes, by position.

    Reduction axes are not counted.
    """
    found = uneven_axes(tv)
    return {p: found[a.number] for p, a in enumerate(tv.domain.no_reductions) if a.number in found}


@dataclass(frozen=True)
class Sharding:
    """The sharding of a tensor: which of its axes are divided, along which mesh dimension or stream
    loop.

    - `axes`: maps each mesh dimension or stream type to the position of the axis that it divides.
    - `cuts`: for each axis, its divisions into blocks (`Cut`), outermost first.
    - `uneven`: has the axes that devices divide into blocks of unequal sizes: from the position of
      the axis to the description of its blocks.

    Reduction axes are not counted.
    """

    mesh: DeviceMesh
    axes: Mapping[ParallelType, int]
    cuts: Placement = field(default=(), repr=False, compare=False)
    uneven: Mapping[int, UnevenAxis] = field(
        default_factory=dict[int, UnevenAxis], repr=False, compare=False
    )

    def axis_sharded_on(self, parallel_type: ParallelType) -> int:
        """Returns the position of the axis that is divided along the mesh dimension
        `parallel_type`.

        Returns -1 if no axis is: the tensor is then replicated along that mesh dimension.
        """
        return self.axes.get(parallel_type, -1)


def sharding_of(tv: TensorView) -> Sharding | None:
    """Returns how devices and stream loops divide the axes of a tensor; None if the tensor has no
    mesh.
    """
    if tv.mesh is None:
        return None
    found = {p: sharded_logical_axis(tv, p) for p in SPREAD_TYPES}
    axes = {p: axis for p, axis in found.items() if axis >= 0}
    return Sharding(tv.mesh, axes, placement(tv), uneven_positions(tv))


def partial_sum_axes(tv: TensorView) -> tuple[int, ...]:
    """Returns the positions of the axes along which a partial sum has one element per device or
    step.

    If a reduced axis is divided over devices or over the steps of a stream loop, each of them first
    computes a partial sum. For example, `[M, N, iDIDx{d}rf, r{K/d}]` is the partial sum over an
    axis of K elements, of which each of d devices has K/d. The axis at position 2 has one element
    per device, so the local shape is [M, N, 1]. Tensors computed from partial sums may have such an
    axis, too.
    """
    made = {n for t in tv.domain.transforms for n in t.outputs}
    return tuple(
        position
        for position, axis in enumerate(tv.domain.no_reductions)
        if axis.rfactor and axis.ptype in SPREAD_TYPES
        # A reshape derives such an axis from others, if each device has one index of it.
        if axis.number not in made or _is_part_of_reduction(tv, axis)
    )


def is_summed_in_parts(tv: TensorView) -> bool:
    """Returns whether the op that computes `tv` sums over an axis of which each device or step has
    a part.

    Returns False for an op that only reads such partial sums, and computes others from them.
    """
    axes = tv.domain.no_reductions
    return any(_is_part_of_reduction(tv, axes[p]) for p in partial_sum_axes(tv))


def _is_part_of_reduction(tv: TensorView, axis: IterDomain) -> bool:
    root = origin_root(tv, axis)
    return root is not None and root.is_reduction()


# ------------------------------------------------------------------ sizes
def local_extents(tv: TensorView) -> tuple[Scalar, ...]:
    """Returns the symbolic shape of the part (shard) of the tensor `tv` that one device stores.

    Reduction axes have no entry. For example, an axis of extent i0 that is divided over two devices
    has the local extent `ceilDiv(i0, 2)`.
    """
    fusion = tv.fusion
    return tuple(
        local_extent(fusion.canonical(axis.size), cuts)
        for axis, cuts in zip(tv.domain.no_reductions, placement(tv), strict=True)
    )


def whole_axis_sizes(tensors: Iterable[TensorView]) -> dict[Scalar, int]:
    """Returns the sizes that axes must have because each device gets exactly one index of the axis.

    Such an axis has a mesh dimension as its parallel type itself, without a split. Maps the
    symbolic extent of the axis to the number of devices. Sizes that a user leaves open are taken
    from this result.
    """
    return {
        tv.fusion.canonical(tv.domain.axes[number].size): cut.devices
        for tv in tensors
        for number, cuts in axis_cuts(tv, DEVICE_TYPES).items()
        for cut in cuts
        if cut.whole
    }


def unsharded_sizes(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the global shape of a tensor of which each device stores a shard of shape `sizes`.

    If each step of a stream loop allocates its own block of the tensor, `sizes` is the shape of
    such a block. If devices divide an axis into unequal blocks, `sizes` has the first block. Raises
    `ShardingError` if `sizes` has the wrong length.
    """
    _check_rank(tv, sizes)
    out: list[int] = []
    is_block, uneven = is_allocated_per_step(tv), uneven_positions(tv)
    for position, (size, cuts) in enumerate(zip(sizes, placement(tv), strict=True)):
        for cut in cuts:
            steps = cut.count if is_block and not cut.ptype.is_device else 1
            size *= cut.devices * (steps if isinstance(steps, int) else 1)
        out.append(uneven[position].extent if position in uneven else size)
    return tuple(out)


def local_sizes(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the shard that each device stores of a tensor with the global shape
    `sizes`.

    A stream loop that computes the tensor block by block does not change the shape, because the
    shard contains the blocks of all steps. Raises `ShardingError` if the number of devices does not
    divide an extent; the message names tensor, extent and mesh.
    """
    _check_rank(tv, sizes)
    if not tv.domain.has_devices:
        return tuple(sizes)
    axes = zip(tv.domain.no_reductions, sizes, placement(tv), strict=True)
    return tuple(_local_size(tv, axis, size, cuts) for axis, size, cuts in axes)


def _local_size(tv: TensorView, axis: IterDomain, extent: int, cuts: Cuts) -> int:
    """Returns the extent that one device stores of an axis. `extent` is that of the whole axis.

    `cuts` lists the divisions of the axis over devices and over the steps of a stream loop,
    outermost first. Raises `ShardingError` if the number of devices does not divide the extent. The
    last block of a stream may be shorter than the other blocks, unless devices share each block.
    """
    last = max((k for k, c in enumerate(cuts) if c.ptype.is_device), default=-1)
    rest, streams = extent, 1
    for cut in cuts[: last + 1]:
        if not cut.ptype.is_device:
            assert isinstance(cut.count, int), f"{cut} of {tv} lies around a device cut"
            streams = cut.count
            continue
        if cut.whole:
            check_device_axis(tv, axis, rest)
        if rest % (cut.devices * streams) != 0:
            check_heads_of_keys(tv, axis, extent, cut)
            beside = "" if streams == 1 else f" in each of {streams} steps"
            multiple = extent // rest * cut.devices * streams if rest else cut.devices
            raise ShardingError(
                f"the extent {extent} of {axis_words(tv, axis)} is not divisible by the "
                f"{cut.devices} devices of {tv.mesh} along {cut.ptype.name}{beside}"
                f"{padding_words(extent, multiple)}"
                f"{user_code(cut_line(tv, cut.ptype))}{in_ir(axis, tv)}"
            )
        rest //= cut.devices
    return rest


def check_heads_of_keys(tv: TensorView, axis: IterDomain, extent: int, cut: Cut) -> None:
    """Raises `ShardingError` if the axis `axis` of `tv` has the heads of the keys or values of an
    attention op. The division `cut` does not divide its extent `extent` evenly.
    """
    if found := _heads_of_keys(tv, axis):
        raise _heads_are_not_shared(*found, tv, extent, cut)


def _heads_of_keys(tv: TensorView, axis: IterDomain) -> tuple[AttentionOp, str] | None:
    """Returns (attention op, name of its operand) if `axis` has the heads of the op's keys or
    values.

    The op reads `tv`, or a tensor that other ops compute from `tv` and that keeps the axis. Returns
    None if there is no such op. Used for the error about an extent that devices cannot divide,
    because the error has better advice for heads of keys or values.
    """
    position = tv.domain.no_reductions.index(axis)
    seen, left = {tv}, [(tv, position)]
    while left:
        reached, at = left.pop()
        for op in reached.uses():
            if isinstance(op, AttentionOp):
                named = (name for name, operand in op.tensors() if operand is reached)
                name = next((n for n in named if op.letters(n)[at] == "g"), "")
                if name:
                    return op, name
                continue
            for index, operand in tensor_operands(op):
                out = op.out_tensor
                kept = op.axis_map(index)
                if operand is not reached or out in seen or at not in kept or out.domain.root:
                    continue
                seen.add(out)
                left.append((out, kept.index(at)))
    return None


def _heads_are_not_shared(
    op: AttentionOp, name: str, tv: TensorView, heads: int, cut: Cut
) -> ShardingError:
    """Returns the error for an attention op whose key or value heads cannot be divided over the
    devices.

    - `name`: the operand of `op` that has `heads` heads.
    - `tv`: the tensor whose heads would be divided over the devices that share the queries, as the
      division `cut` says.
    """
    queries = next(tensor for field, tensor in op.tensors() if field == "query")
    given, asked = tensor_words(_before_copies(tv)), tensor_words(_before_copies(queries))
    count = sc.int_value(queries.domain.no_reductions[op.letters("query").index("h")].size)
    shared = gcd(heads, cut.devices)
    fewer = (
        f"cut heads over {shared} devices, and batches over the others"
        if shared > 1
        else "cut batches instead of heads"
    )
    times = cut.devices // shared
    return ShardingError(
        f"{op.name}: {heads} heads of its {name}, {given}, cannot be shared by the "
        f"{cut.devices} devices of {tv.mesh} along {cut.ptype.name} that share the "
        f"{'' if count is None else f'{count} '}heads of its query, {asked}: a "
        f"device reads whole heads of its own. Either {fewer}; or repeat each head of keys and "
        f"values {times} times before the op, to have {heads * times} (by fd.ops.broadcast with a "
        f"new axis after the heads, then expand and reshape){user_code(op.where)}"
        f"{in_ir(tv)}"
    )


def _before_copies(tv: TensorView) -> TensorView:
    """Returns the tensor of which `tv` is a copy with another division over devices, or `tv`."""
    while isinstance(made_by := tv.definition(), (Reshard, LoadStoreOp)):
        tv = made_by.inp
    return tv


def _check_rank(tv: TensorView, sizes: Sequence[int]) -> None:
    if len(sizes) != tv.ndim:
        raise ShardingError(
            f"{tensor_words(tv)} has {counted(tv.ndim, 'axis')}, but the shape {tuple(sizes)} has "
            f"{counted(len(sizes), 'size')}{in_ir(tv)}"
        )


# ------------------------------------------------------------------ whole fusions
def has_mesh(fusion: Fusion) -> bool:
    """Returns whether any tensor of the fusion has a device mesh."""
    return any(tv.mesh is not None for tv in fusion.tensors())


def requested_devices(fusion: Fusion) -> tuple[int, ...]:
    """Returns the sorted ranks that appear in any mesh of the fusion; () if there is no mesh."""
    return ranks_of(tv.mesh for tv in fusion.tensors() if tv.mesh is not None)


def requested_number_of_devices(fusion: Fusion) -> int:
    """Returns the number of ranks that a job needs to run the fusion.

    This is one more than the largest rank in any mesh; 1 if no tensor has a mesh.
    """
    return 1 + max(requested_devices(fusion), default=0)


def check_world(fusion: Fusion, size: int) -> None:
    """Checks that a job of `size` ranks has all ranks that the meshes of the fusion contain.

    Raises `ShardingError` otherwise.
    """
    for tv in fusion.tensors():
        if tv.mesh is not None and max(tv.mesh.devices, default=0) >= size:
            raise ShardingError(
                f"{tv.mesh} of {tv.label} names rank {max(tv.mesh.devices)}, but the job has "
                f"{counted(size, 'rank')}; start it with at least "
                f"{requested_number_of_devices(fusion)} ranks{user_code(tv.user_line())}"
            )


def has_streams(fusion: Fusion) -> bool:
    """Returns whether any tensor of the fusion is computed block by block, by a loop on the host.

    Such a tensor has a stream axis: an axis with a stream type, which says that the loop runs along
    it.
    """
    return any(a.is_stream for tv in fusion.tensors() for a in spread_axes(tv))


def check_annotations(fusion: Fusion) -> None:
    """Checks the parallel types that the user set on axes: mesh dimensions, and stream types (marks
    of axes along which a loop on the host computes a tensor).

    Raises:
        ShardingError: a tensor has an axis on a mesh dimension, but no mesh, no such dimension, or
            one of another size; or two axes of one tensor have the same type.
        UnsupportedError: a stream axis was not made as the outer part of a split.
    """
    check_types(fusion)
    for tv in fusion.tensors():
        _check_stream(tv)
        for axis in tv.domain.loop:
            if not axis.is_device or is_plain_broadcast(axis):
                continue
            where = user_code(cut_line(tv, axis.ptype))
            if tv.mesh is None:
                raise ShardingError(
                    f"{axis_words(tv, axis)} has a device type, but the tensor has no mesh: "
                    f"call set_device_mesh{where}{in_ir(axis, tv)}"
                )
            extent, count = sc.int_value(fusion.canonical(axis.size)), tv.mesh.size_of(axis.ptype)
            if tv.mesh.dim_of(axis.ptype) is None or extent not in (None, count):
                text = misfit_of_mesh(tv, axis, count if extent is None else extent)
                raise ShardingError(f"{text}{where}{in_ir(axis, tv)}")
        axis_cuts(tv)


def check_dropout(ops: Iterable[Op]) -> None:
    """Raises `UnsupportedError` if an attention op with dropout has a tensor on several ranks.

    The dropped elements would be wrong. The reason is that torch draws random numbers for each
    shard as if the shard were the whole tensor, and each rank from its own generator.
    """
    for op in ops:
        if not isinstance(op, AttentionOp) or not op.draws:
            continue
        shared = [tv for _, tv in op.tensors() if tv.mesh is not None and tv.mesh.size > 1]
        if shared:
            raise UnsupportedError(
                f"{op.name} with dropout_p = {op.dropout_text} of {tensor_words(shared[0])}: the "
                "dropped elements would depend on how ranks share the tensors. On a mesh of "
                "several ranks, dropout_p must be the constant "
                f"0{user_code(op.where)}{in_ir(shared[0])}"
            )


def check_shared_keys(ops: Iterable[Op]) -> None:
    """Raises `UnsupportedError` for an attention gradient in which several ranks share one key
    head.

    Each rank has some of the query heads. The gradient of the key head is a sum over all query
    heads, of which each rank would compute only a part.
    """
    for op in ops:
        if not isinstance(op, SdpaBwdOp) or not op.enable_gqa:
            continue
        heads, groups = (
            tv.domain.logical[op.letters(field).index(letter)]
            for field, tv, letter in (
                ("grad_query", op.grad_query, "h"),
                ("grad_key", op.grad_key, "g"),
            )
        )
        if groups.is_broadcast and heads.number in axis_cuts(op.grad_query, DEVICE_TYPES):
            raise UnsupportedError(
                f"{op.name}: {op.grad_key} has one head, and queries on several ranks read it, so "
                "each rank would have only a part of its gradient. Repeat the head of key and "
                f"value (expand), or give each rank whole heads{user_code(op.where)}"
            )


def check_types(fusion: Fusion) -> None:
    """Checks that no two axes of one tensor have the same parallel type, such as mesh_x or stream.

    Raises `ShardingError` otherwise, because a mesh dimension, or a stream, can divide only one
    axis of a tensor. Reduction axes are ignored.
    """
    for tv in fusion.tensors():
        spread = [a for a in tv.domain.loop if a.is_device or a.is_stream]
        for axis in spread:
            same = [a for a in spread if a.ptype is axis.ptype and not a.is_reduction()]
            if len(same) > 1:
                raise ShardingError(
                    f"{tensor_words(tv)} has {len(same)} axes on {axis.ptype.name}, but only one "
                    "axis of a tensor may have this type (Found multiple loop IterDomains with the "
                    f"same parallel type){user_code(cut_line(tv, axis.ptype))}"
                    f"{in_ir(' and '.join(map(str, same)), tv)}"
                )


def check_swizzles(fusion: Fusion) -> None:
    """Raises `ShardingError` if `swizzle1d` names a mesh dimension that the tensor's mesh lacks.

    `swizzle1d` rotates the block numbers of an axis by the device's coordinate along that
    dimension. The caller ensures that every tensor has its final mesh. Tensors that the user
    annotated are checked first, so that the error names the user's line.
    """
    for tv in sorted(fusion.tensors(), key=lambda tv: not tv.cut_lines):
        for cut in (c for cuts in axis_cuts(tv).values() for c in cuts):
            if cut.swizzle is None or (tv.mesh and tv.mesh.dim_of(cut.swizzle) is not None):
                continue
            name = cut.swizzle.name
            lack = "the tensor has no mesh, so call set_device_mesh"
            lack = lack if tv.mesh is None else f"{tv.mesh} has no dimension {name}"
            raise ShardingError(
                f"swizzle1d by {name} of {tv.label} is not possible: "
                f"{lack}{user_code(cut_line(tv, cut.ptype))}"
                f"{in_ir(tv)}"
            )


def _check_stream(tv: TensorView) -> None:
    streams = [a for a in spread_axes(tv) if a.is_stream]
    where = user_code(cut_line(tv, ParallelType.stream))
    for split in tv.domain.splits.values():
        is_view = tv.domain.axes[split.outer].rfactor  # a reshape's, not the user's
        if split.inner_split and not is_view and tv.domain.rotated(split.outer) in streams:
            raise UnsupportedError(
                f"{axis_words(tv, streams[0])} counts blocks of {split.factor} elements, which is "
                "not supported for a stream axis: make the stream axis by outer_split(axis, "
                f"number of steps){where}{in_ir(streams[0], tv)}"
            )


def check_divisible(fusion: Fusion, sizes: Mapping[Symbol, int]) -> None:
    """Raises `ShardingError` if the devices that share an axis do not divide its extent evenly.

    `sizes` maps the symbols of the extents of whole tensors to their values. The message names
    tensor, extent and mesh. Tensors that the user annotated are checked first.
    """
    check_cuts(cut_axes(fusion), sizes)


def cut_axes(fusion: Fusion) -> tuple[CutAxis, ...]:
    """Returns every axis of the fusion that is divided over devices or over the steps of a stream
    loop.

    Each entry is (tensor, axis, extent, its divisions). Tensors that the user annotated are first,
    so that error messages of `check_cuts` name the user's tensors.
    """
    return tuple(
        (tv, axis, fusion.canonical(axis.size), cuts)
        for tv in sorted(fusion.tensors(), key=lambda tv: not tv.cut_lines)
        for number, cuts in axis_cuts(tv).items()
        for axis in tv.domain.logical
        if axis.number == number
    )


def check_cuts(axes: Iterable[CutAxis], sizes: Mapping[Symbol, int]) -> None:
    """Raises `ShardingError` if devices do not divide one of the extents in `axes` evenly.

    `axes` is the result of `cut_axes`. `sizes` maps the symbols of the extents of whole tensors to
    their values.
    """
    for tv, axis, extent, cuts in axes:
        _local_size(tv, axis, int(sc.evaluate(extent, sizes)), cuts)


# A cut axis: its tensor, the axis, the expression of its extent, its cuts.
CutAxis = tuple[TensorView, IterDomain, Scalar, Cuts]


# ------------------------------------------------------------------ same sharding?
def have_different_shardings(
    op: TensorOp,
    operand_index: int,
    ptypes: Collection[ParallelType] = DEVICE_TYPES,
    *,
    out: TensorView | None = None,
) -> bool:
    """Returns whether an operand and a result of `op` are divided differently over devices or
    steps.

    - `operand_index`: the index of the operand.
    - `ptypes`: the parallel types to compare: mesh dimensions, stream types, or both.
    - `out`: the result; if None, the first result of the op.

    For each parallel type, both tensors have an axis index, which is written as an expression over
    the logical axes (the axes that users see) that both tensors have. The shardings are equal if
    the two expressions simplify to the same expression. A divided axis that only one of the tensors
    has is ignored, unless it is an axis of the operand that the op needs as a whole.

    If the function cannot prove that the shardings are equal, it returns True. It assumes that
    meshes divide the extents evenly; this is checked when sizes are known.
    """
    producer = op.inputs[operand_index]
    consumer = out if out is not None else op.out_tensor
    assert isinstance(producer, TensorView)
    if producer.is_cpu_scalar or consumer.is_cpu_scalar:
        return False
    device = [p for p in ptypes if p.is_device]
    if producer.mesh != consumer.mesh and device:
        meshes = [m for m in (producer.mesh, consumer.mesh) if m is not None]
        if any(m.dim_of(p) is not None for m in meshes for p in device):
            return True
    wanted = [p for p in ptypes if sharded_axis(producer, p) or sharded_axis(consumer, p)]
    if not wanted:
        return False
    cuts = placement(producer, wanted)
    if any(cuts[position] for position in op.whole_operand_axes(operand_index)):
        return True
    # The proof is cached for all ops of equal structure, such as the layers of a model.
    structures = producer.domain.structure, consumer.domain.structure
    pairs = mapped_axes(op, operand_index, consumer)
    mapped = tuple(
        (structures[0].places[p.number], structures[1].places[c.number]) for p, c in pairs
    )
    key = *structures, mapped, producer.mesh, consumer.mesh, *wanted
    proved = consumer.fusion.extents.proved
    if key not in proved:
        proved[key] = Comparison(op, operand_index, consumer).differs(wanted)
        if proved[key] and any(
            _first_quotient(a.size) is not None
            for t in (producer, consumer)
            for a in t.domain.no_reductions
        ):
            named = Comparison(op, operand_index, consumer, names_quotients=True)
            proved[key] = named.differs(wanted)
    return proved[key]


def is_resharding(op: TensorOp) -> bool:
    """Returns whether an operand and a result of the op are divided differently over devices.

    Devices must then exchange data, or drop data that they do not need.
    """
    return any(
        have_different_shardings(op, index, out=out)
        for out in op.outputs
        for index, _ in tensor_operands(op)
    )


# ----------------------------------------------------------------------
# Whether two tensors have equal shardings: a proof over the indices of their shared logical axes.


class Comparison:
    """Compares how an operand (producer) and a result (consumer) of an op are divided over devices.

    For both tensors, the index along each mesh dimension or stream is written as an expression over
    the logical axes that both have. The tensors are divided in the same way if the expressions are
    equal.

    - `names_quotients`: if True, an extent that is a quotient (such as the size of an attention
      head) is replaced by a new symbol. The proof then knows that devices divide the extent, but no
      longer knows its value.

    In the example, a reshape merges an axis of extent q = i1 / 4, which two devices divide, with an
    axis of extent 4. The symbol q' is q / 2, and x0 is the index along the axis of extent q. Both
    tensors then have the same device index, x0 / q':

        x [DIDx{2}(i1 / 4), 4] -> y [DIDx{2}(i1)]
    """

    def __init__(
        self,
        op: TensorOp,
        operand_index: int,
        consumer: TensorView,
        *,
        names_quotients: bool = False,
    ) -> None:
        producer = op.inputs[operand_index]
        self._fusion = consumer.fusion
        pairs = [
            (p, c)
            for p, c in alike_axes(op, operand_index, consumer)
            if not is_plain_broadcast(p) and not is_plain_broadcast(c)
        ]
        self._sums: dict[Scalar, Scalar] = {}
        self._divisible: dict[Scalar, Scalar] = {}
        self._quotients: dict[Scalar, Scalar] | None = None
        self._collect_divisible(consumer)
        self._collect_divisible(producer)
        if names_quotients:
            # Second pass: quotients of the extents that the first pass has found.
            self._quotients = {}
            self._collect_divisible(consumer)
            self._collect_divisible(producer)
        shared = {c.number: self.index(f"x{k}", c.size) for k, (_, c) in enumerate(pairs)}
        sizes = {a.number: self.rewrite(a.size) for a in consumer.domain.maybe_root}
        domain = self._domain(consumer, sizes)
        self.consumer = _View(consumer, consumer.domain.maybe_root, shared, domain, self)
        # Mapped axes have one size, however the two tensors write it.
        sizes = {a.number: self.rewrite(a.size) for a in producer.domain.no_reductions}
        sizes |= {p.number: self.rewrite(c.size) for p, c in pairs}
        domain = self._domain(producer, sizes)
        shared = {p.number: shared[c.number] for p, c in pairs}
        self.producer = _View(producer, producer.domain.no_reductions, shared, domain, self)

    def differs(self, ptypes: Collection[ParallelType]) -> bool:
        """Returns whether producer and consumer are divided differently along one of the types
        `ptypes`.

        The types are mesh dimensions or stream types.
        """
        for ptype in ptypes:
            p, c = self.producer.index_of(ptype), self.consumer.index_of(ptype)
            if p == c:
                continue
            if p is None or c is None or _as_digits(p) != _as_digits(c):
                return True
        return False

    def rewrite(self, x: Scalar) -> Scalar:
        """Returns the extent `x` in a form that is the same for equal extents, and that shows known
        factors.

        Symbols are replaced by canonical symbols, and by products if their factors are known. A sum
        (the extent after a pad or a cat) is replaced by one new symbol. Otherwise a multiple of the
        sum would be written as a sum, in which the factor is not visible.
        """
        x = self._fusion.canonical(x)
        if isinstance(x, sc.Poly) and len(x.terms) > 1:
            x = self._sums.setdefault(x, sc.name_for(f"s{len(self._sums)}", x))
        while True:
            found: dict[Scalar, Scalar] = {
                s: self._divisible[s] for s in sc.symbols(x) if s in self._divisible
            }
            found = found or self._named_quotients(x)
            if not found:
                return x
            x = sc.substitute(x, found)

    def _named_quotients(self, x: Scalar) -> dict[Scalar, Scalar]:
        """Returns {quotient: new symbol} for the first quotient in the extent `x`.

        `rewrite` then replaces the quotient by the symbol. The same quotient always gets the same
        symbol. Returns {} if `x` has no quotient, or if `names_quotients` was not set.
        """
        if self._quotients is None:
            return {}
        quotient = _first_quotient(x)
        if quotient is None:
            return {}
        name = f"q{len(self._quotients)}"
        return {quotient: self._quotients.setdefault(quotient, sc.name_for(name, quotient))}

    def index(self, name: str, extent: Scalar) -> Scalar:
        """Returns a symbol, named `name`, for the index of an axis; returns 0 if the axis has
        extent 1.

        `extent` is the extent of the axis, so that simplification knows the range of the index.
        """
        extent = self.rewrite(extent)
        if sc.int_value(extent) == 1:
            return sc.ZERO
        return sc.index(name, extent)

    def _domain(self, tv: TensorView, sizes: dict[int, Scalar]) -> TensorDomain:
        """Returns the axes of the tensor `tv` (its domain) with extents in the form of `rewrite`.

        `sizes` has the rewritten extents of the axes from which all other axes derive, by axis
        number.
        """
        sizes = replay(forward(tv.domain.transforms), sizes, SizeRules(self.rewrite))

        def rewritten(a: IterDomain) -> IterDomain:
            size = sizes.get(a.number)
            size = self.rewrite(a.size) if size is None else size
            if a.expanded is not None:
                return replace(a, extent=sc.ONE, expanded=size)
            return replace(a, extent=sc.ONE if a.is_broadcast else size)

        return tv.domain.map_axes(rewritten)

    def _collect_divisible(self, tv: TensorView) -> None:
        """Learns factors of the extents of `tv` from splits without a remainder, for `rewrite` to
        use.

        The factors are kept as equations. A split of an extent s into two parts with symbols of
        their own gives `s = outer * inner`. Any other split gives `s = part * s'` with a new symbol
        s'. Only splits over devices and splits of reshapes are used, because splits into steps of a
        stream loop may have a remainder.
        """
        for t in tv.domain.splits.values():
            outer = tv.domain.rotated(t.outer)
            if not (outer.is_device or (outer.rfactor and not outer.is_stream)):
                continue
            extent, *parts = (self.rewrite(tv.domain.axes[n].size) for n in (t.inp, *t.outputs))
            if isinstance(extent, Symbol) and extent not in sc.symbols(sc.product(parts)):
                self._divisible[extent] = sc.product(parts)
                continue
            for part in t.outputs:
                sizes = (tv.domain.axes[n].size for n in (t.inp, part))
                self._learn(*map(self.rewrite, sizes))

    def _learn(self, extent: Scalar, factor: Scalar) -> None:
        atoms = sc.symbols(extent)
        if len(atoms) != 1 or atoms[0] in sc.symbols(factor):
            return
        (symbol,) = atoms
        part = sc.name_for(f"{symbol.name}'", symbol, symbol.dtype)
        if extent == symbol:
            self._divisible[symbol] = sc.mul(factor, part)
            return
        # d divides c * s, so d / gcd(c, d) divides s.
        d = sc.int_value(factor)
        c = sc.int_value(sc.floordiv(extent, symbol))
        if d is None or c is None or extent != sc.mul(c, symbol):
            return
        rest = d
        while (common := math.gcd(c, rest)) > 1:
            rest, c = rest // common, c // common
        if rest > 1:
            self._divisible[symbol] = sc.mul(rest, part)


def _first_quotient(x: Scalar) -> Scalar | None:
    """Returns the first rounded-down quotient in an extent; None if there is none.

    The innermost quotient is first, because it is evaluated first.
    """
    seen: set[Scalar] = set()
    for y in postorder(x, seen.__contains__):
        seen.add(y)
        if isinstance(y, sc.Apply) and y.op in ("/", "floorDiv"):
            return y
    return None


def _as_digits(x: Scalar) -> Scalar:
    """Rewrites each quotient of a remainder in `x` as the remainder of a quotient.

        (i % 4) / 2  ->  (i / 2) % 2

    Two equal shardings may have different expressions, which are equal after this. An axis divided
    twice has the first form before a reshape, and the second form after it.
    """
    done: dict[Scalar, Scalar] = {}
    for y in postorder(x, done.__contains__):
        done[y] = _digit(sc.substitute(y, done))
    return done[x]


def _digit(x: Scalar) -> Scalar:
    """Rewrites (i % n) / d as (i / d) % (n / d), if d divides n and no operand is negative.

    Returns any other expression unchanged.
    """
    if not isinstance(x, sc.Apply) or x.op not in ("/", "floorDiv"):
        return x
    inner, d = x.args
    if not isinstance(inner, sc.Apply) or inner.op not in ("%", "floorMod"):
        return x
    i, n = inner.args
    if not all(map(sc.is_nonnegative, (i, n, d))) or sc.int_value(sc.mod(n, d)) != 0:
        return x
    return sc.mod(sc.floordiv(i, d), sc.floordiv(n, d))


class _View:
    """The index expressions of all loop axes of one tensor, for a `Comparison` of two tensors.

    Loop axes are the axes after all splits. Their expressions are computed from the indices of
    `sources`, the axes before the splits. `shared` has the index symbol of each source axis that
    both tensors have; each other source axis gets a new symbol.
    """

    def __init__(
        self,
        tv: TensorView,
        sources: Collection[IterDomain],
        shared: Mapping[int, Scalar],
        domain: TensorDomain,
        comparison: Comparison,
    ) -> None:
        self._tv = tv
        self._sources = sources
        self._shared = shared
        indices = dict(shared)
        for axis in sources:
            if axis.number not in indices:
                indices[axis.number] = comparison.index(f"u{axis.number}", axis.size)

        def coordinate(ptype: ParallelType) -> Scalar:
            count = sc.const(tv.mesh.size_of(ptype) if tv.mesh else 1)
            return sc.index(f"coordinate of {ptype.text}", count)

        self._indices = indices_forward(domain, indices, coordinate=coordinate)

    def index_of(self, ptype: ParallelType) -> Scalar | None:
        """Returns the index expression of the loop axis with the parallel type `ptype`.

        Loop axes are the axes after all splits. Returns None if the axis does not matter in the
        comparison of two tensors. There are three such cases: no axis has this type; the axis
        depends on no axis that both tensors have; or the mesh dimension has only one device.
        """
        axis = sharded_axis(self._tv, ptype)
        if axis is None:
            return None
        origins = self._tv.domain.above({axis.number})
        if not any(a.number in origins and a.number in self._shared for a in self._sources):
            return None
        if axis.number not in self._indices:
            raise UnsupportedError(
                f"the device or stream axis {axis} of {self._tv} cannot be computed from its "
                "logical "
                "axes: create the axis by splits and merges of logical axes"
            )
        index = self._indices[axis.number]
        # On a mesh dimension of one device the index is always 0.
        is_single = axis.is_device and self._tv.mesh and self._tv.mesh.size_of(ptype) == 1
        return None if is_single else index
