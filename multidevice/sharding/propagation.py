"""Sharding propagation: from the few tensors that the user annotated to all other tensors.

Before: some tensors have a mesh that the user set, and cuts over that mesh. After: every tensor
that ops connect with these tensors has a mesh. It also has the cuts with which its op needs no
communication, as far as the operands agree.

Tensors that the user annotated keep their placement. Only their reduction axes may still get device
types, because these say how a tensor is computed, not how it is stored. A mesh that an op copied
from an operand is dropped first. So annotations before and after the definition of ops give the
same program.

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
    """The reason why a tensor has its mesh or one of its cuts: propagation from the tensor
    `source`.

    `cut` is None if the mesh was propagated. Otherwise `axis` is the number of the logical axis
    that `cut` cuts. `direction` says whether `source` is an operand (forward) or a result
    (backward).
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
    """Translates the cuts of an operand (over devices or stream steps) to cuts of the result `out`.

    Returns (logical axis of `out`, its cuts), including reduction axes. Two kinds of cuts are left
    out:

    - cuts of axes that the op resizes, or that `out` does not have;
    - cuts that a reshape does not preserve: cuts of the inner input of a merge, and cuts into more
      blocks than the outermost part of a split has.

    If an axis has several cuts, only the outer cuts may be translated.
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
    """Translates the cuts of the result `out` (over devices or stream steps) to cuts of an operand.

    Returns (logical axis of the operand, its cuts); cuts of reduction axes are first. Cuts of the
    inner part of a reshaped axis are left out, because the operand has no corresponding axis. A
    local slice after the reshape has the same effect.
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
    """Returns whether the cuts of a result's logical axis can also be cuts of the op's operands.

    The condition is that these cuts divide the root axis (before the reshape of `tv`) into the same
    blocks. `cuts` maps axis numbers to cuts.
    """
    root = origin_root(tv, logical)
    if root is None:
        return False
    mine = cuts.get(logical.number, ())
    return _is_one_cut(root, logical, mine) or _divide(tv, root, logical, mine)


def uncuttable_axes(
    op: TensorOp, ptypes: Collection[ParallelType], out: TensorView | None = None
) -> set[int]:
    """Returns the axes along which a result is cut although the op cannot compute its blocks
    separately.

    No operand of the op can be cut in the same way. Returns the numbers of these logical axes. Only
    cuts along `ptypes` count. If `out` is None, the first result of the op is used.
    """
    out = op.out_tensor if out is None else out
    if isinstance(op, RandomOp):
        return set()  # each number depends on its position in the whole (`hostir.lowering.slices`)
    logical, cuts = out.domain.logical, axis_cuts(out, ptypes)
    whole = {logical[k].number for k in op.whole_axes(out)}
    return whole | {a.number for a in logical if not has_cut_origin(out, a, cuts)}


def _is_one_cut(root: IterDomain, logical: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` cut a logical axis and its root axis into the same blocks, for any
    extent.

    A root axis is one before a reshape. The result is True in two cases: both are the same axis, or
    the logical axis counts the blocks into which a stream cuts a reduction axis.
    """
    is_stream = any(c.ptype.is_stream for c in cuts)
    return root is logical or (is_stream and root.is_reduction())


def _comes_from_reduction(tv: TensorView, logical: IterDomain) -> bool:
    root = origin_root(tv, logical)
    return logical.is_reduction() or (root is not None and root.is_reduction())


def _resize_cuts(fusion: Fusion, cuts: Cuts, source: IterDomain, target: IterDomain) -> Cuts:
    """Returns the cuts of the axis `source` for the axis `target`, which may have another extent.

    If the extents differ, a cut of `source` without a split becomes a split of `target`.
    """
    if fusion.canonical(source.size) == fusion.canonical(target.size):
        return cuts
    return tuple(replace(c, whole=False) for c in cuts)


def _divides(tv: TensorView, axis: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` divide the axis into blocks of equal size, as far as is known.

    For device cuts, a symbolic extent is accepted, because it is checked when its value is known.
    For stream cuts, divisibility must be proved, because blocks of a stream may have unequal sizes.
    """
    extent, count = tv.fusion.canonical(axis.size), sc.product(c.count for c in cuts)
    if any(c.ptype.is_stream for c in cuts):
        return sc.int_value(sc.mod(extent, count)) == 0
    size, devices = sc.int_value(extent), sc.int_value(count)
    size = tv.fusion.even_parts.get(extent) if size is None else size
    return size is None or devices is None or size % devices == 0


def _divide(tv: TensorView, root: IterDomain, logical: IterDomain, cuts: Cuts) -> bool:
    """Returns whether `cuts` divide both a logical axis and its root axis into blocks of equal
    size.

    A root axis is one before a reshape. One of the two axes is the outermost part of the other.
    Blocks of unequal size would end at different elements of the two axes.
    """
    return _divides(tv, root, cuts) and _divides(tv, logical, cuts)


def _dividing(tv: TensorView, root: IterDomain, axis: IterDomain, cuts: Cuts) -> Cuts:
    """Returns as many of the outermost cuts as make the same blocks of `axis` as of its root axis
    `root`.

    A root axis is one before a reshape.
    """
    prefixes = (cuts[:k] for k in range(len(cuts), 0, -1))
    return next((p for p in prefixes if _divide(tv, root, axis, p)), ())


# ------------------------------------------------------------------ one tensor to another
def apply_transfers(
    target: TensorView, transfers: Transfers, ptypes: Collection[ParallelType]
) -> tuple[Cut, ...]:
    """Adds cuts to a tensor as far as possible; returns the cuts that were added.

    `transfers` has the axes and their wanted cuts. Only cuts along `ptypes` are added, under two
    conditions. The tensor's mesh has this dimension in the same size. The axis already has exactly
    the cuts that must surround the new cut.
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
    """Adds cuts as `apply_transfers` does, but adds either all stream cuts of `source` or none.

    With only some parts of a merged stream axis, the steps would belong to another loop.
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
    """Returns the placement that the cuts `transfers` give to a copy of the tensor `source` on
    `mesh`.

    `parts` are the stream types of the op that reads the copy. Stream cuts in which the copy cannot
    be computed are left out.
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
    """Returns whether the steps of a stream loop can copy `source` to a tensor with the cuts
    `cuts`.

    `cuts` are the cuts of the axis at `position` of the copy. There are three cases in which this
    is possible:

    - the source has the same steps;
    - the device cuts stay unchanged;
    - each step needs the block of one device.
    """
    have = placement(source)[position]
    if not cuts or not cuts[-1].ptype.is_stream or have[: len(cuts)] == cuts:
        return True
    devices = only_devices(have)
    return devices == cuts[:-1] or is_from_devices(source, position, cuts, mesh)


def is_from_devices(source: TensorView, position: int, cuts: Cuts, mesh: DeviceMesh | None) -> bool:
    """Returns whether a copy of `source` turns one block per device into one block per step of a
    stream.

    The copy is on `mesh`; `cuts` are the cuts of its axis at `position`. If the steps are rotated,
    each device starts with its own block.
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
    """Propagates meshes and cuts from annotated tensors to all tensors that ops connect with them.

    Returns the facts that explain the mesh and the cuts of each tensor. Raises `ShardingError` if
    the user cut a summed axis of a result and no operand is cut.
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
    """Returns a sort key for tensors, because the sharding of the first tensor takes precedence.

    Tensors with more cut axes are first, then tensors with more mesh dimensions.
    """
    count = sum(not a.is_reduction() for a in spread_axes(tv))
    return (-count, -(tv.mesh.ndim if tv.mesh else 0))


def reference_operands(op: TensorOp) -> list[int]:
    """Returns the indices of an op's tensor operands, in the order of precedence of their
    shardings.
    """
    indices = [i for i, _ in tensor_operands(op)]
    if op.REFERENCES:
        return [i for i in op.REFERENCES if i in indices]
    return sorted(indices, key=lambda i: _rank_of(op.inputs[i]))


def spread_reductions(fusion: Fusion) -> None:
    """Cuts the reduction axes of results as the operands are cut, and changes nothing else.

    Used for fusions in which the user has cut every tensor. The user decides how results are
    stored, but not how sums are computed: each device sums its own part. Raises `ShardingError` if
    the user cut a summed axis of a result and no operand is cut.
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
    """Returns the user's cuts, over more than one device, of axes over which an op sums."""
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
    """Raises `ShardingError` if the user cut a summed axis of a result, but no operand is cut along
    it.

    Such a cut would have no use: each device would slice its operands, and the result would be
    replicated. If an operand is cut, the cut says how devices share the sum. Even then the user may
    have meant an axis of the result. Therefore the function warns, unless the user writes the
    partial sums (`rfactor`).
    """
    for op, out, axis, cut in summed:
        given = (c for i, _ in tensor_operands(op) for c in forward_cuts(op, i, out))
        if any(a.number == axis.number and c.ptype is cut.ptype for a, cuts in given for c in cuts):
            is_meant = any(_is_partial_sum(tv) for _, tv in tensor_operands(op))
            if sharded_axis(out, cut.ptype) is None and out.ndim and not is_meant:
                warn(
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
    """Returns whether the method `rfactor` made a tensor, by splitting a reduction in two.

    Such a tensor sums over only some of the axes that its transforms made.
    """
    return bool(tv.domain.root) and any(a.is_reduction() for a in tv.domain.logical)


def _how_to_cut(tv: TensorView, cut: Cut) -> str:
    """Returns the calls that cut another axis of the result, one that is not summed, for error
    messages.
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
    """Translates the cuts of the result `out` of an op to cuts of `sibling`, another result of the
    op.

    The cuts are over devices or over the steps of a stream loop.
    """
    cuts = axis_cuts(out)
    for position in op.whole_axes(out):
        cuts.pop(out.domain.logical[position].number, None)
    mine, theirs = out.domain.logical, sibling.domain.logical
    pairs = ((mine[a], theirs[b]) for a, b in op.parallel_cuts(out, sibling))
    return tuple((b, cuts[a.number]) for a, b in pairs if a.number in cuts)


def _reduction_only(op: TensorOp, index: int, out: TensorView) -> Transfers:
    """Returns the operand's device cuts that apply to reduction axes of the result `out`.

    Used if the user has placed `out`, because then the other axes of `out` must not change.
    """
    if not any(a.is_reduction() for a in out.domain.logical):
        return ()
    return tuple(
        (axis, tuple(c for c in cuts if c.ptype in DEVICE_TYPES))
        for axis, cuts in forward_cuts(op, index, out)
        if axis.is_reduction()
    )
