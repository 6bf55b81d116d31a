"""Placements: how devices and stream loops divide the axes of a tensor into blocks.

A parallel type says who gets the blocks of an axis: the devices along a mesh dimension (such as
mesh_x), or the steps of a stream loop. A stream loop is a loop on the host; each iteration, called
a step, computes one block of a tensor. In the fusion IR, an axis is divided by a split, and the
outer axis of the split has the parallel type.

This module represents such splits as *cuts*. A cut divides one axis into blocks, one per device or
one per step. The cuts of an axis are listed outermost first: `[(mesh_y, 2), (mesh_x, 4)]` is an
axis of 2 blocks along mesh_y, and each of these has 4 blocks along mesh_x. Propagation and
decomposition work on cuts and write the cuts back as splits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fuser.ir.domain.axis_path import Rules, path, path_up, replay
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import (
    DomainBuilder,
    IterDomain,
    MergeTransform,
    Resize,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
    transform_text,
)
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES, STREAM_TYPES, ParallelType
from fuser.support.errors import ShardingError, UnsupportedError, user_code

SPREAD_TYPES = (*DEVICE_TYPES, *STREAM_TYPES)


@dataclass(frozen=True)
class Cut:
    """The division of an axis into `count` blocks, one per device of a mesh dimension or one per
    step.

    A step is an iteration of a stream loop, a loop on the host that computes a tensor block by
    block.

    - `ptype`: the parallel type that gets the blocks: a mesh dimension such as mesh_x, or a stream.
    - `count`: the number of blocks; a symbolic expression is possible only for streams.
    - `whole`: True if each block is a single index. Then the axis has the extent `count`, and has
      the parallel type itself; otherwise, the outer part of a split of the axis has the type.
    - `swizzle`: a mesh dimension, or None. If set, the block numbers are rotated by the device's
      coordinate along this dimension, so that each device starts with its own block.
    """

    ptype: ParallelType
    count: int | Scalar
    whole: bool = False
    swizzle: ParallelType | None = None

    @property
    def devices(self) -> int:
        """The number of devices among which this cut divides the axis.

        The number is 1 for a cut over the steps of a stream, because each device runs all steps.
        """
        assert isinstance(self.count, int) or self.ptype.is_stream
        return self.count if isinstance(self.count, int) and self.ptype.is_device else 1


Cuts = tuple[Cut, ...]
# One entry per logical axis without reductions.
Placement = tuple[Cuts, ...]


def is_plain_broadcast(axis: IterDomain) -> bool:
    """Returns whether an axis is a broadcast axis of extent 1, so that devices cannot divide it.

    Returns False for a broadcast axis that was expanded to a larger extent.
    """
    return axis.is_broadcast and axis.expanded is None


def cut_line(tv: TensorView, ptype: ParallelType) -> str:
    """Returns the user's source line, such as `file.py:12`, that divided a tensor along `ptype`.

    `ptype` is a mesh dimension, or a stream type (the mark of an axis along which a loop on the
    host computes the tensor). If the user did not divide the tensor, returns the line that defines
    the tensor; "" if unknown. Used in error messages.
    """
    return tv.cut_lines.get(ptype) or tv.user_line()


# ------------------------------------------------------------------ reading
def spread_axes(tv: TensorView) -> tuple[IterDomain, ...]:
    """Returns the axes of a tensor whose parallel type is a mesh dimension or a stream.

    Searches the loop axes: the axes after all splits and merges, including reduction axes.
    """
    return tv.domain.spread


def sharded_axis(tv: TensorView, ptype: ParallelType) -> IterDomain | None:
    """Returns the loop axis of a tensor that has the parallel type `ptype`; None if there is none.

    Loop axes are the axes after all splits and merges. Reduction axes are ignored.
    """
    return next((a for a in spread_axes(tv) if a.ptype is ptype and not a.is_reduction()), None)


def _count(tv: TensorView, axis: IterDomain) -> int | Scalar:
    """Returns the number of blocks into which the loop axis `axis` divides its tensor.

    A loop axis is an axis after all splits. The number is the size of its mesh dimension, or the
    extent of a stream axis.
    """
    if axis.ptype.is_device:
        if tv.mesh is None:
            raise ShardingError(
                f"{axis_words(tv, axis)} has a device type, but the tensor has no mesh: "
                f"call set_device_mesh{user_code(cut_line(tv, axis.ptype))}{in_ir(axis, tv)}"
            )
        return tv.mesh.size_of(axis.ptype)
    size = tv.fusion.canonical(axis.size)
    count = sc.int_value(size)
    return size if count is None else count


def cut_origin(tv: TensorView, axis: IterDomain) -> tuple[int, int]:
    """Returns the logical axis that the loop axis `axis` divides into blocks, and the depth of the
    blocks.

    A loop axis is an axis after splits and merges; a logical axis is one that the user sees. The
    result is (number of the logical axis, depth). Depth 0 means that the loop axis is the logical
    axis itself. If several loop axes divide one logical axis, the blocks of a larger depth are
    inside the blocks of smaller depths.

    Raises `UnsupportedError` if `axis` does not number blocks of consecutive elements, because it
    is the inner part of a split, or part of a merge.
    """
    domain = tv.domain
    if axis.number in domain.logical_numbers:
        return axis.number, 0
    steps = path_up(domain, axis, domain.logical_numbers)
    depths = replay(steps, {axis.number: 0}, _BlockDepth(tv, axis))
    return next((n, depths[n]) for n in domain.logical_numbers if n in depths)


class _BlockDepth(Rules[int]):
    """Rules for the walk from a loop axis through splits to the logical axis that the loop axis
    divides into blocks. They compute how deep these blocks are nested.

    Each index of `axis`, the loop axis, selects one block. The depth is 0 if `axis` is the logical
    axis itself; a block is then one index. Each split on the way adds to the depth. For example, i0
    is split into DIDx and x, and x into stream and y: the blocks of DIDx have depth 1, and those of
    stream, which are inside them, depth 3. The rules raise `UnsupportedError`, which names `axis`,
    if a block would not consist of consecutive elements.
    """

    needs_all = False

    def __init__(self, tv: TensorView, axis: IterDomain) -> None:
        self._tv, self._axis = tv, axis

    def unsplit(self, t: SplitTransform, outer: int | None, inner: int | None) -> int:
        if outer is not None:
            return outer + 1
        if inner is None or not _is_cut(self._tv.domain, t):
            raise self._refusal(t)
        return inner + 2  # deeper than the outer part

    def unswizzle(self, t: Swizzle1D, out: int) -> int:
        return out

    def unmerge(self, t: MergeTransform, out: int) -> tuple[int | None, int | None]:
        raise self._refusal(t)

    def unresize(self, t: Resize, out: int) -> int:
        raise self._refusal(t)

    def _refusal(self, t: Transform) -> UnsupportedError:
        axis, tv = self._axis, self._tv
        kind = "DID on inner splits"
        advice = "make the axis by outer_split, and give the outer axis a device type"
        if axis.is_stream:
            kind = "streams on inner splits"
            advice = "make the stream axis by outer_split(axis, number of steps), or by merge"
        elif isinstance(t, SplitTransform):
            advice += " or stream"
        return UnsupportedError(
            f"Currently, we don't support {kind}: {axis_words(tv, axis)}; {advice}"
            f"{user_code(cut_line(tv, axis.ptype))}{in_ir(axis, tv)}, from "
            f"{transform_text(t, tv.domain)}"
        )


def axis_cuts(tv: TensorView, ptypes: Collection[ParallelType] = SPREAD_TYPES) -> dict[int, Cuts]:
    """Returns how devices and stream loops divide the axes of a tensor: the cuts of every divided
    axis.

    A cut divides one axis into blocks, one per device or one per step (iteration) of a stream loop.
    The keys are the numbers (ids) of logical axes, including reduction axes; the values list the
    outermost cut first. Cuts along parallel types that are not in `ptypes` are left out.
    """
    spread = tv.domain.spread
    if not spread:
        return {}
    cuts = _known_cuts(tv.domain).get(tv.mesh)
    if cuts is None:
        wanted = [a for a in spread if a.ptype in ptypes]
        # The count of a stream is an expression of extents, whose canonical form may change.
        if not wanted or any(a.is_stream for a in spread):
            return _derive_cuts(tv, wanted)
        cuts = _known_cuts(tv.domain)[tv.mesh] = _derive_cuts(tv, spread)
    if ptypes is SPREAD_TYPES or ptypes is DEVICE_TYPES:
        return dict(cuts)
    kept = {n: tuple(c for c in mine if c.ptype in ptypes) for n, mine in cuts.items()}
    return {n: mine for n, mine in kept.items() if mine}


def _derive_cuts(tv: TensorView, axes: Iterable[IterDomain]) -> dict[int, Cuts]:
    """Returns the cuts of a tensor that its loop axes `axes` make, found from its transforms."""
    found: dict[int, list[tuple[int, Cut]]] = {}
    for axis in axes:
        number, depth = cut_origin(tv, axis)
        swizzle = _swizzle_of(tv.domain, axis)
        cut = Cut(axis.ptype, _count(tv, axis), whole=depth == 0, swizzle=swizzle)
        found.setdefault(number, []).append((depth, cut))
    ordered = ((a.number, found[a.number]) for a in tv.domain.logical if a.number in found)
    return {n: tuple(c for _, c in sorted(cuts, key=lambda x: x[0])) for n, cuts in ordered}


def keep_cuts(before: TensorDomain, after: TensorDomain) -> TensorDomain:
    """Returns `after`, a domain whose axes are divided like those of `before`, so that the known
    cuts of `before` are also its own.

    The two may differ in the order of axes in memory or in loops.
    """
    _known_cuts(after).update(_known_cuts(before))
    return after


def _known_cuts(domain: TensorDomain) -> dict[DeviceMesh | None, Mapping[int, Cuts]]:
    """Returns the cached cuts of a tensor with the axes `domain` and without streams. The keys are
    meshes, because the number of blocks depends on the mesh.
    """
    return domain.known.setdefault("cuts", {})


def placement(tv: TensorView, ptypes: Collection[ParallelType] = SPREAD_TYPES) -> Placement:
    """Returns how devices and stream loops divide a tensor: a tuple of cuts for each logical axis.

    A cut divides one axis into blocks, one per device or one per step of a stream loop. The tuple
    is () for an axis that is not divided. Reduction axes have no entry. Cuts along parallel types
    that are not in `ptypes` are left out.
    """
    cuts = axis_cuts(tv, ptypes)
    return tuple(cuts.get(a.number, ()) for a in tv.domain.no_reductions)


def reduction_cuts(tv: TensorView) -> dict[int, Cuts]:
    """Returns how devices and stream loops share the reduction axes of a tensor.

    Maps the number of each reduction axis that is divided into blocks to its cuts (`Cut`),
    outermost first.
    """
    reductions = {a.number for a in tv.domain.logical if a.is_reduction()}
    return {n: c for n, c in axis_cuts(tv).items() if n in reductions}


# A block along a stream: one before the last, the last one with elements, or an empty one.
Block = Literal["first", "last", "empty"]


def local_extent(extent: Scalar, cuts: Cuts, block: Block | None = None) -> Scalar:
    """Returns the extent that one device has of an axis of extent `extent` after it is divided by
    `cuts`.

    With `block`, returns the extent that one step of a stream loop computes on the device. The
    blocks of steps may differ in size, so `block` selects a step:

    - "last": the last step that has elements; its block may be shorter than earlier blocks;
    - "first": any step before the last one with elements;
    - "empty": any step after the last one with elements.

    If `block` is None, divisions into steps are ignored.
    """
    for cut in cuts:
        if cut.ptype.is_device or block is not None:
            size = sc.ONE if cut.whole else sc.ceildiv(extent, cut.count)
            if not (cut.whole or cut.ptype.is_device or sc.int_value(size) == 0):
                full = sc.sub(sc.ceildiv(extent, size), sc.ONE)
                rest = {"last": sc.sub(extent, sc.mul(size, full)), "empty": sc.ZERO}
                size = rest.get(block or "first", size)
            extent = size
    return extent


def stream_cuts(tv: TensorView) -> tuple[tuple[int, Cut], ...]:
    """Returns which logical axes of a tensor a stream loop computes block by block, and in which
    blocks.

    Each entry is (number of the logical axis, cut); the cut says into how many blocks the axis is
    divided. If the loop runs over several axes merged into one, there is an entry for each. The
    axis whose index changes slowest from step to step is first.
    """
    cuts = ((n, c) for n, mine in axis_cuts(tv, STREAM_TYPES).items() for c in mine)
    return tuple(sorted(cuts, key=lambda x: STREAM_TYPES.index(x[1].ptype)))


def stream_axis_of(tv: TensorView) -> tuple[int, Cut] | None:
    """Returns (number of the logical axis, cut) of the first axis that a stream loop computes in
    blocks.

    The cut says into how many blocks, one per step of the loop, the axis is divided. Returns None
    if no stream loop computes the tensor.
    """
    return next(iter(stream_cuts(tv)), None)


def step_parts(tv: TensorView) -> tuple[ParallelType, ...]:
    """Returns the stream types of a tensor's axes; () if no stream loop computes the tensor.

    A stream loop computes one block of the tensor in each step, and a stream type marks an axis
    along which it runs. If it runs over several axes merged into one, each of these axes has a
    stream type of its own. Reduction axes are ignored.
    """
    summed = {a.number for a in tv.domain.logical if a.is_reduction()}
    return tuple(cut.ptype for number, cut in stream_cuts(tv) if number not in summed)


def outside_streams(cuts: Cuts) -> Cuts:
    """Returns the cuts of an axis that come before its first cut into steps of a stream loop.

    A cut divides an axis into blocks, over devices or over steps; each cut divides the blocks of
    the cuts before it. The result is used when the division into steps is removed: the cuts inside
    it must then be removed, too, because they would make other blocks. Returns all cuts if there is
    no division into steps.
    """
    position = next((k for k, c in enumerate(cuts) if c.ptype.is_stream), len(cuts))
    return cuts[:position]


def without_streams(cuts: Cuts) -> Cuts:
    """Returns `cuts` without the innermost cut, if that cut is over the steps of a stream loop.

    A cut divides an axis into blocks, over devices or over steps. The innermost cut is last. A cut
    over steps that has a cut over devices inside it is kept, because it determines which elements a
    device has.
    """
    last = bool(cuts) and cuts[-1].ptype.is_stream
    return cuts[:-1] if last else cuts


def only_devices(cuts: Iterable[Cut]) -> Cuts:
    """Returns those of the divisions `cuts` that are over devices, not over the steps of a stream
    loop.
    """
    return tuple(c for c in cuts if c.ptype.is_device)


def is_allocated_per_step(tv: TensorView) -> bool:
    """Returns whether each step of a stream loop allocates memory for the block that it computes.

    Otherwise the memory of the whole tensor `tv` is allocated before the loop. The pass
    `finalize_domains` decides between the two.
    """
    logical = set(tv.domain.logical_numbers)
    return any(a.is_stream and a.number not in logical for a in tv.domain.allocation)


def _is_cut(domain: TensorDomain, split: SplitTransform) -> bool:
    return domain.rotated(split.outer).ptype in SPREAD_TYPES


def _swizzle_of(domain: TensorDomain, axis: IterDomain) -> ParallelType | None:
    made = (t for t in domain.transforms if isinstance(t, Swizzle1D) and t.out == axis.number)
    return next((t.ptype for t in made), None)


# ------------------------------------------------------------------ writing
def _remainder(tv: TensorView, number: int) -> IterDomain | None:
    """Returns the loop axis over the elements inside one block of a logical axis.

    Loop axes are the axes after all splits. `number` identifies the logical axis. The axis may
    already be divided into blocks, over devices or over the iterations of a stream loop, and each
    block into smaller blocks. A block is one of the smallest. Returns None if a block has no axis
    that can be divided further, for example because it is a single element.
    """
    while True:
        if number in tv.domain.loop_numbers:
            axis = tv.domain.axes[number]
            return axis if axis.ptype is ParallelType.serial else None
        split = tv.domain.splits.get(number)
        if split is None or not _is_cut(tv.domain, split):
            return None
        number = split.inner


def add_cut(tv: TensorView, number: int, cut: Cut) -> bool:
    """Divides a logical axis over devices or the iterations of a stream loop once more, inside the
    blocks that it has.

    `number` is the id of the axis (`IterDomain.number`). If `cut.whole` is set, each block is one
    index, so the axis itself gets the parallel type. Otherwise the axis is split, and the outer
    part gets the type. Returns False, and changes nothing, if the axis cannot be divided further.
    """
    rest = _remainder(tv, number)
    if rest is None:
        return False
    before, built = tv.domain, DomainBuilder(tv.fusion)
    outer, inner = rest, list[IterDomain]()
    if not cut.whole:
        outer, *inner = built.split(rest, sc.as_scalar(cut.count), inner_split=False)
    if cut.swizzle is not None:
        outer = built.swizzle(outer, cut.swizzle)
    axes = (*built.axes.values(), outer.having(ptype=cut.ptype))
    position = before.loop_numbers.index(rest.number)
    loop = list(before.loop_numbers)
    loop[position : position + 1] = [outer.number, *(a.number for a in inner)]
    tv.domain = before.with_loop(loop, *built.transforms, axes=axes)
    if cut.whole and rest.number != number:
        cut = replace(cut, whole=False)
    _remember_cut(tv, before, number, cut)
    return True


def _remember_cut(tv: TensorView, before: TensorDomain, number: int, cut: Cut) -> None:
    """Stores the cuts of a tensor after `add_cut`, so that `axis_cuts` need not derive them again.

    `before` is the domain without `cut`, which divides the logical axis `number` inside its other
    cuts. Nothing is stored for streams, or if the cuts of `before` are unknown.
    """
    none: Mapping[int, Cuts] = {}
    known = _known_cuts(before).get(tv.mesh) if before.spread else none
    if known is None or tv.mesh is None or not cut.ptype.is_device:
        return
    if tv.mesh.size_of(cut.ptype) != cut.count:
        return
    if not is_plain_broadcast(tv.domain.axes[number]):
        divided = {**known, number: (*known.get(number, ()), cut)}
        known = {n: divided[n] for n in tv.domain.logical_numbers if n in divided}
    _known_cuts(tv.domain)[tv.mesh] = known


def add_cuts(tv: TensorView, number: int, cuts: Cuts) -> None:
    """Divides a logical axis of a tensor several times over devices or the iterations of a stream
    loop.

    `number` is the id of the axis (`IterDomain.number`). `cuts` lists the divisions, outermost
    first. The caller ensures that the axis can be divided so often, otherwise an assertion fails:
    an axis of which each block is a single index cannot be divided further.
    """
    for cut in cuts:
        placed = add_cut(tv, number, cut)
        assert placed, f"axis {number} of {tv} does not take {cut}"


def unparallelize(tv: TensorView, drop: Callable[[IterDomain], bool]) -> None:
    """Removes the mesh dimension or stream type from each axis that `drop` accepts. The axis is
    then no longer divided over devices, or over the steps of a loop on the host.

    Splits that have become useless are removed, too. A split is useless if both of its results are
    serial loop axes and neither is in the allocation domain, which describes the memory layout.
    """
    dropped = [a.having(ptype=ParallelType.serial) for a in spread_axes(tv) if drop(a)]
    domain = tv.domain.with_axes(*dropped) if dropped else tv.domain
    kept_by = {*domain.logical_numbers, *domain.allocation_numbers}
    for t in reversed(domain.transforms):
        in_loop = [a for a in domain.loop if a.number in t.outputs]
        is_idle = len(in_loop) == len(t.outputs) and all(
            a.ptype is ParallelType.serial for a in in_loop
        )
        if is_idle and len(t.inputs) == 1 and kept_by.isdisjoint(t.outputs):
            last = t.outputs[-1]
            domain = domain.having(
                loop=[
                    t.inputs[0] if n == last else n
                    for n in domain.loop_numbers
                    if n == last or n not in t.outputs
                ],
                transforms=[u for u in domain.transforms if u is not t],
            )
    tv.domain = domain


def unparallelize_inward(tv: TensorView, drop: Callable[[IterDomain], bool]) -> None:
    """Removes the parallel types of the axes that `drop` accepts, and of the divisions inside them.

    The types are mesh dimensions, which divide an axis into one block per device, and stream types,
    which divide it into one block per step of a loop on the host. If the same axis is divided again
    inside such a block, the inner division is removed because it would otherwise make other blocks.
    """
    places = {a.number: cut_origin(tv, a) for a in spread_axes(tv)}
    dropped = [places[a.number] for a in spread_axes(tv) if drop(a)]

    def is_inside(axis: IterDomain) -> bool:
        number, depth = places[axis.number]
        return any(n == number and d <= depth for n, d in dropped)

    unparallelize(tv, is_inside)


def copy_like(
    source: TensorView, mesh: DeviceMesh | None, cuts: Placement, *, dtype: DataType | None = None
) -> TensorView:
    """Creates a tensor with the logical axes of `source`, placed on `mesh` and divided as `cuts`
    says.

    `cuts` lists, for each axis, the mesh dimensions and the stream loop that divide it into blocks:
    one block per device, or one per iteration of the loop. Reduction axes of `source` are left out.
    If `dtype` is None, the new tensor has the dtype of `source`. No op is created.
    """
    fusion = source.fusion
    axes = tuple(fusion.clone_axis(a) for a in source.domain.no_reductions)
    out = fusion.new_tensor(axes, dtype or source.dtype(), mesh=mesh)
    for axis, mine in zip(axes, cuts, strict=True):
        add_cuts(out, axis.number, mine)
    return out


def clone_domain(fusion: Fusion, domain: TensorDomain) -> tuple[TensorDomain, dict[int, int]]:
    """Copies the axes of a tensor (its domain), because each axis may belong to one tensor only.

    Returns the copy, whose axes have new numbers, and a map from old to new axis number.
    """
    made = {n: fusion.next_axis() for n in sorted(domain.axes)}
    return domain.map_axes(lambda a: replace(a, number=made[a.number])), made


# ------------------------------------------------------------------ through views (root <->
# logical)
def _is_unit(axis: IterDomain) -> bool:
    return sc.int_value(axis.size) == 1


class _Outermost(Rules[bool]):
    """Rules for a walk over splits and merges, which find the axes that have the same blocks as a
    given axis.

    Blocks come from a division of an axis into n equal parts. The outer result of a split has the
    same blocks as the split axis, and a merged axis has the same blocks as its outer operand. The
    walk therefore follows outer axes only, or the inner axis if the outer one has extent 1. It
    follows a split in the other direction, too: from the outer result to the split axis. If devices
    or loop steps share the outer result, it also goes from the inner result to the split axis.
    """

    needs_all = False

    def __init__(self, tv: TensorView) -> None:
        self._tv, self._axes = tv, tv.domain.axes

    def split(self, t: SplitTransform, inp: bool) -> tuple[bool | None, bool | None]:
        return (None, True) if _is_unit(self._axes[t.outer]) else (True, None)

    def merge(self, t: MergeTransform, outer: bool | None, inner: bool | None) -> bool | None:
        return True if outer or _is_unit(self._axes[t.outer]) else None

    def swizzle(self, t: Swizzle1D, inp: bool) -> bool:
        return True

    def unswizzle(self, t: Swizzle1D, out: bool) -> bool:
        return True

    def unsplit(self, t: SplitTransform, outer: bool | None, inner: bool | None) -> bool | None:
        beside = self._axes[t.outer]
        return True if outer or _is_unit(beside) or _is_cut(self._tv.domain, t) else None

    def unmerge(self, t: MergeTransform, out: bool) -> tuple[bool | None, bool | None]:
        return (None, True) if _is_unit(self._axes[t.outer]) else (True, None)


class _TowardsRoot(_Outermost):
    """Rules for a walk from a logical axis back to the root axes from which a reshape made it.

    Root axes are the axes before the reshape's splits and merges. Where axes were merged, the walk
    follows only the outer one. `path_to_root` uses the rules.
    """

    def unsplit(self, t: SplitTransform, outer: bool | None, inner: bool | None) -> bool:
        return True

    def unresize(self, t: Resize, out: bool) -> bool:
        return True


def outermost_logical(tv: TensorView, root: IterDomain) -> IterDomain | None:
    """Returns the logical axis that a division of the root axis `root` into blocks would divide,
    too.

    A root axis is an axis before a reshape's splits and merges; a logical axis is one after them.
    The two axes have the same blocks, because one is the outermost part of the other. Returns None
    if there is no such axis: after a resize, or if `root` is the inner one of two merged axes.
    """
    domain = tv.domain
    if root.number in domain.logical_numbers:
        return root
    steps = path(domain, domain.maybe_root, domain.logical)
    marked = replay(steps, {root.number: True}, _Outermost(tv))
    return next((a for a in domain.logical if a.number in marked), None)


def origin_root(tv: TensorView, logical: IterDomain) -> IterDomain | None:
    """Returns the root axis that a division of the axis `logical` into blocks would divide, too.

    A root axis is an axis before a reshape's splits and merges; a logical axis is one after them.
    The two axes have the same blocks, because one is the outermost part of the other. Returns None
    if there is no such axis.
    """
    domain = tv.domain
    if logical.number in (domain.root_numbers or domain.logical_numbers):
        return logical
    steps = path(domain, (logical,), domain.maybe_root)
    marked = replay(steps, {logical.number: True}, _Outermost(tv))
    return next((a for a in domain.maybe_root if a.number in marked), None)


def path_to_root(tv: TensorView, logical: IterDomain) -> tuple[int, ...]:
    """Returns the numbers of the axes from which a reshape made the logical axis `logical`.

    The result begins with `logical` itself, and ends with the root axes: the axes before the splits
    and merges of the reshape. If devices divide the logical axis, the extents of all these axes
    change on a device.
    """
    domain = tv.domain
    if logical.number in (domain.root_numbers or domain.logical_numbers):
        return (logical.number,)
    steps = path(domain, (logical,), domain.maybe_root)
    return tuple(replay(steps, {logical.number: True}, _TowardsRoot(tv)))
