"""Sharding propagation: from the few tensors that the user annotated to all other tensors.

A cut divides one axis into blocks, one per device of a mesh dimension or one per step of a stream
loop. Before: some tensors have a mesh that the user set, and cuts over that mesh. After: every
tensor that ops connect with these tensors has a mesh. It also has the cuts with which its op needs
no communication, as far as the operands agree.

Tensors that the user annotated keep their placement. Only their reduction axes may still be divided
over devices, because this says how a tensor is computed, not how it is stored. All other meshes are
removed first, such as one that an op copied from its operand when it was defined. So it does not
matter whether users annotate a tensor before or after they define the ops that read it.

In the examples, DIDx(N) is an axis N that is divided over the devices of mesh dimension DIDx, and
rK is an axis K over which an op sums. In the second example, each device computes a partial sum.
The pass `decompose` later inserts the communication that adds the partial sums.

    out = linear(x, w); w [DIDx(N), K]  ->  out [M, DIDx(N), rK]
    out = linear(x, w); x [M, DIDx(K)], w [N, DIDx(K)]  ->  out [M, N, rDIDx(K)]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import IotaOp, RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, STREAM_TYPES, ParallelType
from fuser.support.errors import ShardingError, user_code, warn
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Cut,
    Cuts,
    Placement,
    add_cut,
    axis_cuts,
    cut_line,
    is_plain_broadcast,
    only_devices,
    origin_root,
    outermost_logical,
    outside_streams,
    placement,
    sharded_axis,
    spread_axes,
    stream_cuts,
    without_streams,
)

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Fact:
    """The reason why propagation gave a tensor its mesh, or divided one of its axes.

    - `source`: the tensor from which the mesh or the division was propagated.
    - `direction`: "forward" if `source` is an operand of the op between the two tensors; "backward"
      if it is a result.
    - `cut`: the division into blocks; None if the mesh was propagated.
    - `axis`: the number of the logical axis that `cut` divides.
    """

    source: TensorView
    direction: Direction
    cut: Cut | None = None
    axis: int | None = None

    def __str__(self) -> str:
        what = "mesh" if self.cut is None else f"{self.cut.ptype.text} x {self.cut.count}"
        return f"{what} {self.direction} from {self.source.label}"


# (logical axis, its cuts) of the tensor that receives them
Transfers = tuple[tuple[IterDomain, Cuts], ...]


# ------------------------------------------------------------------ through one op
def forward_cuts(op: TensorOp, operand_index: int, out: TensorView) -> Transfers:
    """Returns the divisions over devices or loop steps that `out` can take over from an operand.

    Each entry is (axis of `out`, its cuts); reduction axes are included. A cut divides an axis into
    blocks, one per device or per step of a stream loop; the outermost cut is first. `out` cannot
    have these cuts of the operand:

    - cuts of axes that the op resizes, or that `out` does not have;
    - cuts that make other blocks after a reshape: cuts of the inner one of two merged axes, and
      cuts into more blocks than the outermost part of a split has.

    If an axis has several cuts, the result may have only the outer ones.
    """
    source = op.inputs[operand_index]
    axes, cuts = source.domain.no_reductions, axis_cuts(source)
    found: list[tuple[IterDomain, Cuts]] = []
    positions = op.cut_map(operand_index, out)
    for root, position in zip(out.domain.maybe_root, positions, strict=True):
        if position is None or axes[position].number not in cuts:
            continue
        mine = cuts[axes[position].number]
        # A broadcast has one element; there is nothing to cut.
        if is_plain_broadcast(root):
            continue
        target = outermost_logical(out, root)
        if target is None:
            continue
        if target.number != root.number:
            mine = _dividing(out, root, target, mine)
        if mine:
            found.append((target, _resize_cuts(out.fusion, mine, axes[position], target)))
    return tuple(found)


def backward_cuts(op: TensorOp, operand_index: int, out: TensorView) -> Transfers:
    """Returns the divisions over devices or loop steps that an operand can take over from `out`.

    Each entry is (axis of the operand, its cuts); cuts that come from reduction axes are first. A
    cut divides an axis into blocks, one per device or per step of a stream loop. Cuts of the inner
    part of a reshaped axis are left out, because the operand has no axis with the same blocks. The
    caller can slice the result instead.
    """
    source = op.inputs[operand_index]
    axes, cuts = source.domain.no_reductions, axis_cuts(out)
    position_of = {
        root.number: position
        for root, position in zip(
            out.domain.maybe_root, op.cut_map(operand_index, out), strict=True
        )
    }
    found: dict[int, Cuts] = {}
    for logical in sorted(out.domain.logical, key=lambda a: not _comes_from_reduction(out, a)):
        if logical.number not in cuts:
            continue
        root = origin_root(out, logical)
        if root is None:
            continue
        position = position_of[root.number]
        if position is None or is_plain_broadcast(axes[position]):
            continue
        target = axes[position]
        mine = _resize_cuts(out.fusion, cuts[logical.number], logical, target)
        if root is not logical and root.is_reduction():
            # A partial sum has a reduction axis on each device, even if its extent is 1.
            mine = tuple(replace(c, whole=False) for c in mine)
        # A partial sum may have several device axes from one root axis; they nest in their order.
        joined = (*found.get(target.number, ()), *mine)
        if not _is_one_cut(root, logical, joined) and not _divide(out, root, logical, joined):
            joined = outside_streams(joined)
            if not joined or not _divides(source, target, joined):
                continue
        found[target.number] = joined
    by_number = {a.number: a for a in axes}
    return tuple((by_number[n], mine) for n, mine in found.items())


def has_cut_origin(tv: TensorView, logical: IterDomain, cuts: Mapping[int, Cuts]) -> bool:
    """Returns whether the cuts of the result axis `logical` correspond to cuts of the op's
    operands.

    If so, the op needs no communication along this axis. A cut divides an axis into blocks, one per
    device or per step of a stream loop; `cuts` maps the axis numbers of the result `tv` to their
    cuts. After a reshape, the answer is True if the cuts make the same blocks of `logical` and of
    the axis before the reshape (the root axis).
    """
    root = origin_root(tv, logical)
    if root is None:
        return False
    mine = cuts.get(logical.number, ())
    return _is_one_cut(root, logical, mine) or _divide(tv, root, logical, mine)


def uncuttable_axes(
    op: TensorOp, ptypes: Collection[ParallelType], out: TensorView | None = None
) -> set[int]:
    """Returns the numbers of the result axes that the op can only compute whole, in every device
    and step.

    No division of the operands gives the blocks into which the axis is divided, for example along
    the axis of a concatenation. So devices and loop steps cannot compute one block each. Divisions
    along parallel types that are not in `ptypes` are ignored. If `out` is None, the first result of
    the op is used.
    """
    out = op.out_tensor if out is None else out
    if isinstance(op, RandomOp):
        return set()  # each number depends on its position in the whole (`hostir.lowering.slices`)
    logical, cuts = out.domain.logical, axis_cuts(out, ptypes)
    whole = {logical[k].number for k in op.whole_axes(out)}
    return whole | {a.number for a in logical if not has_cut_origin(out, a, cuts)}


def _is_one_cut(root: IterDomain, logical: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` make the same blocks of two axes even if the blocks have unequal
    sizes.

    `cuts` are divisions over devices or the steps of a stream loop. `root` is the axis before a
    reshape from which `logical` was made. The result is True in two cases: both are the same axis;
    or `logical` is an axis of partial sums, with one index per block of a divided reduction axis.
    """
    return root is logical or (bool(cuts) and root.is_reduction())


def _comes_from_reduction(tv: TensorView, logical: IterDomain) -> bool:
    root = origin_root(tv, logical)
    return logical.is_reduction() or (root is not None and root.is_reduction())


def _resize_cuts(fusion: Fusion, cuts: Cuts, source: IterDomain, target: IterDomain) -> Cuts:
    """Returns the divisions `cuts` of the axis `source` as divisions of `target` into as many
    blocks.

    The divisions are over devices or the steps of a stream loop. If the extents of the two axes
    differ, `Cut.whole` (each block is a single index) cannot be true for both, so it is False in
    the result.
    """
    if not any(c.whole for c in cuts):
        return cuts
    if fusion.canonical(source.size) == fusion.canonical(target.size):
        return cuts
    return tuple(replace(c, whole=False) for c in cuts)


def _divides(tv: TensorView, axis: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` divide the axis into blocks of equal size, as far as is known.

    `cuts` are divisions over devices or the iterations of a stream loop. For devices, a symbolic
    extent is accepted, because it is checked when its value is known. For streams, divisibility
    must be proved, because blocks of a stream may have unequal sizes.
    """
    extent, count = tv.fusion.canonical(axis.size), sc.product(c.count for c in cuts)
    if any(c.ptype.is_stream for c in cuts):
        return sc.int_value(sc.mod(extent, count)) == 0
    size, devices = sc.int_value(extent), sc.int_value(count)
    size = tv.fusion.even_parts.get(extent) if size is None else size
    return size is None or devices is None or size % devices == 0


def _divide(tv: TensorView, root: IterDomain, logical: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` make the same blocks of a logical axis and of its root axis.

    The root axis is the axis before a reshape from which the logical axis was made. The caller
    ensures that one of the two is the outermost part of the other. Their blocks are then the same
    if `cuts` divide both axes into blocks of equal size; blocks of unequal size would end at
    different elements.
    """
    return _divides(tv, root, cuts) and _divides(tv, logical, cuts)


def _dividing(tv: TensorView, root: IterDomain, axis: IterDomain, cuts: Cuts) -> Cuts:
    """Returns the longest prefix of `cuts` that makes the same blocks of `axis` as of its root
    axis.

    `cuts` are divisions over devices or the iterations of a stream loop, outermost first. The root
    axis `root` is the axis before a reshape from which `axis` was made. Returns () if already the
    first cut makes other blocks.
    """
    prefixes = (cuts[:k] for k in range(len(cuts), 0, -1))
    return next((p for p in prefixes if _divide(tv, root, axis, p)), ())


# ------------------------------------------------------------------ one tensor to another
def apply_transfers(
    target: TensorView, transfers: Transfers, ptypes: Collection[ParallelType]
) -> tuple[Cut, ...]:
    """Divides the axes of `target` over devices or the iterations of a stream loop, as far as
    possible.

    `transfers` lists axes and the cuts (divisions into blocks, outermost first) that they should
    have. A cut is added if three conditions are met:

    - The parallel type of the cut is in `ptypes`, and no other axis of the tensor has this type.
      One exception: a reduction axis and an axis that is not reduced may be on the same mesh
      dimension.
    - If the cut is over devices, the tensor's mesh has this mesh dimension, with as many devices as
      the cut has blocks.
    - The axis already has all cuts that come before the new cut in `transfers`, and no others.

    Returns the cuts that were added.
    """
    taken: list[Cut] = []
    for axis, cuts in transfers:
        for depth, cut in enumerate(cuts):
            have = axis_cuts(target).get(axis.number, ())
            if any(c.ptype is cut.ptype for c in have):
                continue
            if tuple(c.ptype for c in have) != tuple(c.ptype for c in cuts[:depth]):
                break
            if not _is_selectable(target, axis, cut, ptypes):
                continue
            if add_cut(target, axis.number, cut):
                taken.append(cut)
    return tuple(taken)


def apply_steps(
    target: TensorView,
    source: TensorView,
    transfers: Transfers,
    ptypes: Collection[ParallelType] = STREAM_TYPES,
) -> tuple[Cut, ...]:
    """Divides the axes of `target` as `transfers` says, with all steps of the loop that computes
    `source` or with none.

    `transfers` lists axes and their cuts: divisions into blocks, one per device or per step of a
    stream loop. A loop over several merged axes of `source` has one stream type for each of them.
    With only some of these types, `target` would be computed in another loop, so it then gets only
    divisions over devices. Otherwise the function is like `apply_transfers`. Returns the cuts that
    were added.
    """
    parts, before = {c.ptype for _, c in stream_cuts(source)}, target.domain
    taken = apply_transfers(target, transfers, ptypes)
    got = {c.ptype for c in taken if c.ptype.is_stream}
    is_sum = any(a.is_stream and a.is_reduction() for a in target.domain.loop)
    if not got or (got == parts and not (is_sum and len(parts) > 1)):
        return taken
    target.domain = before
    return apply_transfers(target, transfers, [p for p in ptypes if not p.is_stream])


def _is_selectable(
    target: TensorView, axis: IterDomain, cut: Cut, ptypes: Collection[ParallelType]
) -> bool:
    if cut.ptype not in ptypes:
        return False
    if cut.ptype.is_device:
        mesh = target.mesh
        if mesh is None or mesh.dim_of(cut.ptype) is None:
            return False
        if mesh.size_of(cut.ptype) != cut.count:
            return False
    present = [a for a in spread_axes(target) if a.ptype is cut.ptype]
    if cut.ptype.is_stream:
        return not present
    if axis.is_reduction():
        return not any(a.is_reduction() for a in present)
    return not any(not a.is_reduction() for a in present)


def fitting_placement(
    source: TensorView,
    transfers: Transfers,
    mesh: DeviceMesh | None,
    parts: Collection[ParallelType],
) -> Placement:
    """Returns how a copy of `source` on `mesh` can be divided, following `transfers` as far as
    possible.

    - `transfers`: the wanted cuts of each axis, that is, its divisions into blocks: one block per
      device, or one per iteration of a stream loop.
    - `parts`: the stream types of the op that reads the copy: one type for each axis along which
      the op's loop runs. A copy with only some of these types would be computed in another loop.
      So if the copy cannot have all of them, it has none.

    Divisions into steps are also left out if a step cannot copy its block from `source`.
    """
    taken: dict[int, list[Cut]] = {}
    used: set[ParallelType] = set()
    for axis, cuts in transfers:
        mine = taken.setdefault(axis.number, [])
        for depth, cut in enumerate(cuts):
            if cut.ptype in used:
                continue
            fits = not cut.ptype.is_device or (
                mesh is not None and mesh.dim_of(cut.ptype) is not None
            )
            if tuple(mine) != cuts[:depth] or not fits:
                break
            mine.append(cut)
            used.add(cut.ptype)
    wanted = tuple(tuple(taken.get(a.number, ())) for a in source.domain.no_reductions)
    fitting = tuple(
        cuts if _is_copied_in_steps(source, position, cuts, mesh) else outside_streams(cuts)
        for position, cuts in enumerate(wanted)
    )
    # With only some of the parts, the steps would be those of another loop.
    has_all = {c.ptype for cuts in fitting for c in cuts}.issuperset(parts)
    return fitting if has_all else tuple(map(outside_streams, fitting))


def _is_copied_in_steps(
    source: TensorView, position: int, cuts: Cuts, mesh: DeviceMesh | None
) -> bool:
    """Returns whether each step of a stream loop can copy its block of an axis from `source`.

    `cuts` says how the copy's axis at `position` is divided, over devices and into the steps of the
    loop, outermost first. The result is True in four cases:

    - the innermost division is not into steps;
    - `source` has the same divisions;
    - the copy and `source` are divided over devices in the same way, so a step slices local data;
    - each step needs the block of one device, and this device sends the block.
    """
    have = placement(source)[position]
    if not cuts or not cuts[-1].ptype.is_stream or have[: len(cuts)] == cuts:
        return True
    devices = only_devices(have)
    return devices == cuts[:-1] or is_from_devices(source, position, cuts, mesh)


def is_from_devices(source: TensorView, position: int, cuts: Cuts, mesh: DeviceMesh | None) -> bool:
    """Returns whether each step of a copy of `source` receives the block of exactly one device.

    `source` is divided over devices along its axis at `position`. The copy is on `mesh`; a stream
    loop computes the same axis of the copy block by block, as `cuts` says. Returns True if the
    blocks of the steps are the blocks of the devices, even if each device starts the loop with its
    own block.
    """
    have = placement(source, DEVICE_TYPES)[position]
    if len(have) != 1 or len(cuts) != 1 or source.mesh != mesh:
        return False
    if without_streams(placement(source)[position]) != have:
        return False  # a device has blocks of several steps
    (device,), (stream,) = have, cuts
    is_stream = stream.ptype.is_stream and stream.swizzle in (None, device.ptype)
    return is_stream and (device.count, device.whole) == (stream.count, stream.whole)


# ------------------------------------------------------------------ the pass
def propagate_shardings(fusion: Fusion) -> dict[TensorView, tuple[Fact, ...]]:
    """Propagates meshes, and divisions over devices and the iterations of a stream loop, from
    annotated to other tensors.

    Reaches all tensors that ops connect with annotated ones. Returns, for each tensor, the facts
    that explain its mesh and its divisions. Raises `ShardingError` if the user divided an axis over
    which an op sums, and no operand is divided.
    """
    for tv in fusion.tensors():
        if not tv.mesh_is_user_set and not any(a.is_device for a in spread_axes(tv)):
            tv.mesh = None
    pass_ = _Propagation(fusion)
    summed = _summed_cuts(fusion)
    pass_.forward(fusion.exprs)
    _check_summed(summed)
    pass_.backward(reversed(fusion.exprs))
    # The backward pass may have reached a tensor whose other consumers had no mesh before.
    pass_.forward(tuple(op for op in fusion.exprs if any(_is_bare(o) for o in op.outputs)))
    pass_.backward(
        op for op in reversed(fusion.exprs) if any(_is_bare(tv) for _, tv in tensor_operands(op))
    )
    return pass_.facts


def _is_bare(tv: TensorView) -> bool:
    return tv.mesh is None and not tv.is_cpu_scalar


def _rank_of(tv: TensorView) -> tuple[int, int]:
    """Returns a sort key that puts those tensors first whose sharding the result of an op takes
    over.

    Tensors with more divided axes are first; among equals, tensors with more mesh dimensions.
    """
    count = sum(not a.is_reduction() for a in spread_axes(tv))
    return (-count, -(tv.mesh.ndim if tv.mesh else 0))


def reference_operands(op: TensorOp) -> list[int]:
    """Returns the indices of an op's tensor operands in the order in which its result takes over
    their shardings.

    The result takes over the sharding of the first operand, then of the others as far as possible.
    The op class may prescribe these operands (`REFERENCES`). Otherwise the operands with the most
    divided axes are first.
    """
    indices = [i for i, _ in tensor_operands(op)]
    if op.REFERENCES:
        return [i for i in op.REFERENCES if i in indices]
    return sorted(indices, key=lambda i: _rank_of(op.inputs[i]))


def spread_reductions(fusion: Fusion) -> None:
    """Divides the reduction axes of results over devices like the operands' axes over which they
    sum.

    Changes nothing else. Used for fusions in which the user has placed every tensor: the user
    decides how results are stored, but not how sums are computed. Each device then sums its own
    part. Raises `ShardingError` if the user divided an axis over which an op sums, and no operand
    is divided.
    """
    summed = _summed_cuts(fusion)
    for op in fusion.exprs:
        for index in reference_operands(op):
            for out in op.outputs:
                apply_transfers(out, _reduction_only(op, index, out), DEVICE_TYPES)
    _check_summed(summed)


# The op, its result, a summed axis of that, and its cut over devices.
_Summed = tuple[TensorOp, TensorView, IterDomain, Cut]


def _summed_cuts(fusion: Fusion) -> list[_Summed]:
    """Returns the axes over which an op sums and that the user divided over more than one device.

    Each entry is (op, result, axis, division). `_check_summed` checks these annotations later.
    """
    return [
        (op, out, axis, cut)
        for op in fusion.exprs
        for out in op.outputs
        for axis in out.domain.logical
        if axis.is_reduction()
        for cut in axis_cuts(out, DEVICE_TYPES).get(axis.number, ())
        if cut.count != 1
    ]


def _check_summed(summed: Sequence[_Summed]) -> None:
    """Checks the axes over which an op sums and that the user divided over devices.

    Raises `ShardingError` if no operand is divided along the axis. Such an annotation would have no
    use: each device would slice its operands, and the result would be replicated. If an operand is
    divided, the annotation says how devices share the sum. Even then the user may have meant an
    axis of the result. Therefore the function warns, unless the user writes the partial sums
    (`rfactor`).
    """
    for op, out, axis, cut in summed:
        given = (c for i, _ in tensor_operands(op) for c in forward_cuts(op, i, out))
        if any(a.number == axis.number and c.ptype is cut.ptype for a, cuts in given for c in cuts):
            is_meant = any(_is_partial_sum(tv) for _, tv in tensor_operands(op))
            if sharded_axis(out, cut.ptype) is None and out.ndim and not is_meant:
                warn(
                    "harmless if you meant the summed axis: "
                    f"{cut.ptype.name} cuts axis {axis} of {out}, over which {op.name} sums. The "
                    "result is whole on each device, as without this cut. To cut the result: "
                    f"{_how_to_cut(out, cut)}{user_code(cut_line(out, cut.ptype))}"
                )
            continue
        operands = " and ".join(tv.label for _, tv in tensor_operands(op))
        raise ShardingError(
            f"{cut.ptype.name} cuts axis {axis} of {out}, over which {op.name} sums, but no axis "
            f"of {operands} is cut, so each device would have the whole result. To cut the result: "
            f"{_how_to_cut(out, cut)}. To share the sum, cut an "
            f"operand{user_code(cut_line(out, cut.ptype))}"
        )


def _is_partial_sum(tv: TensorView) -> bool:
    """Returns whether the user made a tensor by `rfactor`, which splits a reduction into two.

    The tensor then has the partial sums, over only some of the axes into which the summed axis was
    split.
    """
    return bool(tv.domain.root) and any(a.is_reduction() for a in tv.domain.logical)


def _how_to_cut(tv: TensorView, cut: Cut) -> str:
    """Returns advice for an error message: the calls that divide an axis of the result over which
    the op does not sum.

    `cut` is the division that the user made on a summed axis.
    """
    places = [k for k, a in enumerate(tv.domain.logical) if not a.is_reduction()]
    if not places:
        return f"{tv.label} has no other axis that could be cut"
    n, name = places[0], f"T{tv.number}"
    return (
        "split, axis and parallelize count summed axes, too: axis 0 of the result is number "
        f"{n}, as in {name}.outer_split({n}, {cut.count}) and "
        f"{name}.axis({n}).parallelize(ParallelType.{cut.ptype.name})"
    )


class _Propagation:
    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.frozen = {tv for tv in fusion.tensors() if tv.mesh_is_user_set}
        self.facts: dict[TensorView, tuple[Fact, ...]] = {}

    def forward(self, ops: Iterator[TensorOp] | tuple[TensorOp, ...]) -> None:
        for op in ops:
            for index in reference_operands(op):
                source = op.inputs[index]
                if source.mesh is None and not spread_axes(source):
                    continue
                for out in op.outputs:
                    self._forward_one(op, index, out)

    def _forward_one(self, op: TensorOp, index: int, out: TensorView) -> None:
        source = op.inputs[index]
        if out in self.frozen:
            # The user has placed this tensor; only its reduction axes may get device types.
            cuts = _reduction_only(op, index, out)
        else:
            self._take_mesh(out, source, "forward")
            cuts = forward_cuts(op, index, out)
        self._apply(out, source, "forward", cuts, SPREAD_TYPES)

    def backward(self, ops: Iterator[TensorOp]) -> None:
        inputs = set(self.fusion.inputs)
        for op in ops:
            out = min(op.outputs, key=_rank_of)
            if out.mesh is None and not spread_axes(out):
                continue
            for sibling in op.outputs:
                if sibling is not out and sibling not in self.frozen:
                    self._take_mesh(sibling, out, "backward")
                    self._apply(
                        sibling, out, "backward", sibling_cuts(op, out, sibling), SPREAD_TYPES
                    )
            for index, target in tensor_operands(op):
                is_input = target in inputs
                if target.is_cpu_scalar or (target in self.frozen and not is_input):
                    continue
                self._take_mesh(target, out, "backward")
                # The caller decides how a fusion input is sharded; a stream does not change that.
                ptypes = STREAM_TYPES if is_input else SPREAD_TYPES
                if isinstance(target.definition(), IotaOp):
                    ptypes = ()  # its values depend on the position along the axis
                self._apply(target, out, "backward", backward_cuts(op, index, out), ptypes)

    def _take_mesh(self, target: TensorView, source: TensorView, direction: Direction) -> None:
        if target.mesh is None and source.mesh is not None and not target.is_cpu_scalar:
            target.mesh = source.mesh
            self._record(target, Fact(source, direction))

    def _apply(
        self,
        target: TensorView,
        source: TensorView,
        direction: Direction,
        cuts: Transfers,
        ptypes: Collection[ParallelType],
    ) -> None:
        for cut in apply_steps(target, source, cuts, ptypes):
            axis = next(a.number for a, mine in cuts if any(c is cut for c in mine))
            self._record(target, Fact(source, direction, cut, axis))

    def _record(self, target: TensorView, fact: Fact) -> None:
        self.facts[target] = (*self.facts.get(target, ()), fact)


def sibling_cuts(op: TensorOp, out: TensorView, sibling: TensorView) -> Transfers:
    """Returns the divisions over devices or loop steps that `sibling` can take over from `out`.

    Both are results of `op`. Each entry is (axis of `sibling`, its cuts); a cut divides an axis
    into blocks, one per device or per step of a stream loop. Axes of `out` that the op cannot
    compute in parts are left out.
    """
    cuts = axis_cuts(out)
    for position in op.whole_axes(out):
        cuts.pop(out.domain.logical[position].number, None)
    mine, theirs = out.domain.logical, sibling.domain.logical
    pairs = ((mine[a], theirs[b]) for a, b in op.parallel_cuts(out, sibling))
    return tuple((b, cuts[a.number]) for a, b in pairs if a.number in cuts)


def _reduction_only(op: TensorOp, index: int, out: TensorView) -> Transfers:
    """Returns how devices share the reduction axes of the result `out`, if they share the
    corresponding axes of operand number `index`.

    Each entry is (reduction axis of `out`, its divisions). Used if the user has placed `out`,
    because then the other axes of `out` must not change.
    """
    if not any(a.is_reduction() for a in out.domain.logical):
        return ()
    return tuple(
        (axis, tuple(c for c in cuts if c.ptype in DEVICE_TYPES))
        for axis, cuts in forward_cuts(op, index, out)
        if axis.is_reduction()
    )
