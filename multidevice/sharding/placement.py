"""Placements: which parallel types cut which logical axes of a tensor into blocks.

A parallel type is a mesh dimension (device type) or the loop of a stream (stream type). In the
fusion IR, a sharding is an outer split whose outer axis has such a type. This module represents a
sharding as *cuts*, for each logical axis in nesting order. The cuts `[(mesh_y, 2), (mesh_x, 4)]`
describe an axis of 2 blocks along mesh_y, each of 4 blocks along mesh_x. Propagation and
decomposition work on cuts and write the cuts back as splits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fuser.ir.domain.axis_path import Rules, path, replay
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import (
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
    """A cut of an axis into `count` blocks, which the parallel type `ptype` distributes.

    - `count`: the number of blocks, which is symbolic only for streams.
    - `whole`: True if the axis itself has the type and the extent `count`, without a split.
    - `swizzle`: a device type, or None. If set, the block numbers are rotated by the device's
      coordinate along this type, so that each device starts with its own block.
    """

    ptype: ParallelType
    count: int | Scalar
    whole: bool = False
    swizzle: ParallelType | None = None

    @property
    def devices(self) -> int:
        """The number of devices that share the axis.

        The number is 1 for a stream, because each device runs all steps of a stream.
        """
        assert isinstance(self.count, int) or self.ptype.is_stream
        return self.count if isinstance(self.count, int) and self.ptype.is_device else 1


Cuts = tuple[Cut, ...]
# One entry per logical axis without reductions.
Placement = tuple[Cuts, ...]


def is_plain_broadcast(axis: IterDomain) -> bool:
    """Returns whether an axis has one element that all devices share, so that the axis is never
    cut.
    """
    return axis.is_broadcast and axis.expanded is None


def cut_line(tv: TensorView, ptype: ParallelType) -> str:
    """Returns the user's source line, such as `file.py:12`, that cut a tensor along the type
    `ptype`.

    If the user did not cut the tensor, returns the line that defines the tensor; "" if unknown.
    """
    return tv.cut_lines.get(ptype) or tv.user_line()


# ------------------------------------------------------------------ reading
def spread_axes(tv: TensorView) -> tuple[IterDomain, ...]:
    """Returns the loop axes of a tensor that have a device or stream type, including reduction
    axes.
    """
    return tv.domain.spread


def sharded_axis(tv: TensorView, ptype: ParallelType) -> IterDomain | None:
    """Returns the loop axis of a tensor with the type `ptype`, other than a reduction; None if
    none.
    """
    return next((a for a in spread_axes(tv) if a.ptype is ptype and not a.is_reduction()), None)


def _count(tv: TensorView, axis: IterDomain) -> int | Scalar:
    """Returns the number of blocks of a loop axis with a device or stream type.

    The number is the size of the mesh dimension, or the extent of the stream axis.
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
    """Returns the logical axis that a loop axis cuts, and how deep the cut is nested.

    The result is (number of the logical axis, depth). Depth 0 means that the loop axis is the
    logical axis itself. Raises `UnsupportedError` if `axis` does not count blocks of consecutive
    elements. Such an axis is the inner output of a split, or part of a merge.
    """
    domain = tv.domain
    steps = path(domain, (axis,), domain.logical)
    depths = replay(steps, {axis.number: 0}, _BlockDepth(tv, axis))
    return next((n, depths[n]) for n in domain.logical_numbers if n in depths)


class _BlockDepth(Rules[int]):
    """Rules for a walk over the splits and merges of a tensor: count the splits around a block.

    The block consists of consecutive elements. `axis` is the loop axis that counts such blocks;
    error messages name it.
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
    """Returns how devices and streams cut the axes of a tensor: the cuts of every axis that is cut.

    The keys are numbers of logical axes. The values list the outermost cut first. Only cuts along
    the types `ptypes` count. Reduction axes are included.
    """
    spread, known = spread_axes(tv), tv.domain.known
    if not spread:
        return {}
    key = "cuts", tv.mesh, tuple(ptypes)
    if key in known:
        return dict(known[key])
    found: dict[int, list[tuple[int, Cut]]] = {}
    for axis in spread:
        if axis.ptype in ptypes:
            number, depth = cut_origin(tv, axis)
            swizzle = _swizzle_of(tv.domain, axis)
            cut = Cut(axis.ptype, _count(tv, axis), whole=depth == 0, swizzle=swizzle)
            found.setdefault(number, []).append((depth, cut))
    ordered = ((a.number, found[a.number]) for a in tv.domain.logical if a.number in found)
    made = {n: tuple(c for _, c in sorted(cuts, key=lambda x: x[0])) for n, cuts in ordered}
    # The count of a stream is an expression of extents, whose canonical form may change: not
    # cached.
    if not any(a.is_stream for a in spread):
        known[key] = dict(made)
    return made


def placement(tv: TensorView, ptypes: Collection[ParallelType] = SPREAD_TYPES) -> Placement:
    """Returns how devices and streams cut a tensor: a tuple of cuts for each logical axis.

    The tuple is () for an axis that is not cut. Reduction axes are left out. Only cuts along the
    types `ptypes` count.
    """
    cuts = axis_cuts(tv, ptypes)
    return tuple(cuts.get(a.number, ()) for a in tv.domain.no_reductions)


def reduction_cuts(tv: TensorView) -> dict[int, Cuts]:
    """Returns how devices and streams cut the reduction axes of a tensor, by number of the logical
    axis.

    Axes that are not cut are left out.
    """
    reductions = {a.number for a in tv.domain.logical if a.is_reduction()}
    return {n: c for n, c in axis_cuts(tv).items() if n in reductions}


# A block along a stream: one before the last, the last one with elements, or an empty one.
Block = Literal["first", "last", "empty"]


def local_extent(extent: Scalar, cuts: Cuts, block: Block | None = None) -> Scalar:
    """Returns the extent of an axis on one device, after the cuts `cuts` of an axis with `extent`.

    If `block` is given, returns the extent of one step's block of a stream loop; `block` selects
    the kind of step. If `block` is None, stream cuts are ignored.
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
    """Returns which logical axes of a tensor a stream loop computes block by block.

    Returns (number of the logical axis, cut) for each such axis. A stream axis that merges several
    logical axes has several entries. The outermost part of the step number is first.
    """
    cuts = ((n, c) for n, mine in axis_cuts(tv, STREAM_TYPES).items() for c in mine)
    return tuple(sorted(cuts, key=lambda x: STREAM_TYPES.index(x[1].ptype)))


def stream_axis_of(tv: TensorView) -> tuple[int, Cut] | None:
    """Returns (number of the logical axis, cut) of the first stream cut of a tensor; None if
    none.
    """
    return next(iter(stream_cuts(tv)), None)


def step_parts(tv: TensorView) -> tuple[ParallelType, ...]:
    """Returns the stream types of a tensor's axes; () if no stream loop computes the tensor.

    A stream axis that merges several logical axes has several types. Reduction axes are not
    counted.
    """
    summed = {a.number for a in tv.domain.logical if a.is_reduction()}
    return tuple(cut.ptype for number, cut in stream_cuts(tv) if number not in summed)


def outside_streams(cuts: Cuts) -> Cuts:
    """Returns those cuts of an axis that are outside its first stream cut; all cuts if there is
    none.

    A stream cut divides the axis into the steps of a loop. The cuts inside it are left out, because
    without the stream they would make other blocks.
    """
    position = next((k for k, c in enumerate(cuts) if c.ptype.is_stream), len(cuts))
    return cuts[:position]


def without_streams(cuts: Cuts) -> Cuts:
    """Returns the cuts of an axis without the innermost cut, if the innermost is a stream cut.

    A stream cut divides the axis into the steps of a loop. A stream cut around device cuts is not
    removed, because it determines which elements a device has.
    """
    last = bool(cuts) and cuts[-1].ptype.is_stream
    return cuts[:-1] if last else cuts


def only_devices(cuts: Iterable[Cut]) -> Cuts:
    """Returns those cuts of an axis that distribute it over devices, not over the steps of a
    stream.
    """
    return tuple(c for c in cuts if c.ptype.is_device)


def is_allocated_per_step(tv: TensorView) -> bool:
    """Returns whether each step of a stream loop allocates memory for its own block of the tensor.

    Otherwise the whole tensor is allocated before the loop. The pass `finalize_domains` decides
    between the two.
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
    """Returns the serial loop axis of a logical axis that remains inside all its cuts.

    This loop axis counts the elements of one block. `number` is the number of the logical axis.
    Returns None if there is no such loop axis.
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
    """Cuts a logical axis of a tensor once more, inside its present cuts.

    Returns False if that is not possible. A cut with `whole` gives the axis itself the parallel
    type. Any other cut makes an outer split.
    """
    rest = _remainder(tv, number)
    if rest is None:
        return False
    position = tv.domain.loop_numbers.index(rest.number)
    if not cut.whole:
        tv.split(position, cut.count, inner_split=False)
    if cut.swizzle is not None:
        tv.swizzle1d(position, cut.swizzle)
    tv.parallelize_axis(tv.domain.loop[position], cut.ptype)
    return True


def add_cuts(tv: TensorView, number: int, cuts: Cuts) -> None:
    """Cuts a logical axis of a tensor several times, outermost cut first; each cut must be
    possible.

    `number` is the number of the axis.
    """
    for cut in cuts:
        placed = add_cut(tv, number, cut)
        assert placed, f"axis {number} of {tv} does not take {cut}"


def unparallelize(tv: TensorView, drop: Callable[[IterDomain], bool]) -> None:
    """Removes the device and stream types of the axes that `drop` accepts, and splits without a
    use.

    A split has no use if its two outputs are serial axes of the loop domain and are not in the
    allocation domain.
    """
    domain = tv.domain.with_axes(
        *(replace(a, ptype=ParallelType.serial) for a in spread_axes(tv) if drop(a))
    )
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
    """Removes the types of the axes that `drop` accepts, and of all axes that cut the same axis
    further.

    The types are device and stream types. The inner cuts are removed because without the outer cut
    they would make other blocks.
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
    """Creates a tensor with the same logical axes as `source`, but with the given mesh and cuts.

    Reduction axes are left out. If `dtype` is None, the new tensor has the dtype of `source`.
    """
    fusion = source.fusion
    axes = tuple(fusion.clone_axis(a) for a in source.domain.no_reductions)
    out = fusion.new_tensor(axes, dtype or source.dtype(), mesh=mesh)
    for axis, mine in zip(axes, cuts, strict=True):
        add_cuts(out, axis.number, mine)
    return out


def clone_domain(fusion: Fusion, domain: TensorDomain) -> tuple[TensorDomain, dict[int, int]]:
    """Copies the axes of a tensor (its domain) with new axis numbers.

    Returns the copy and a map from old to new axis number.
    """
    made = {n: fusion.next_axis() for n in sorted(domain.axes)}
    return domain.map_axes(lambda a: replace(a, number=made[a.number])), made


# ------------------------------------------------------------------ through views (root <->
# logical)
def _is_unit(axis: IterDomain) -> bool:
    return sc.int_value(axis.size) == 1


class _Outermost(Rules[bool]):
    """Rules for a walk over the splits and merges of a tensor: find the axes with the same
    outermost blocks.

    An axis is selected if it is the outermost part of a selected axis, or the other way round. Axes
    of extent 1 and device axes do not count as outermost parts.
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
    """Rules for a walk from an axis back over splits and merges to the axes from which it derives.

    Of a merge, only the outer input is selected.
    """

    def unsplit(self, t: SplitTransform, outer: bool | None, inner: bool | None) -> bool:
        return True

    def unresize(self, t: Resize, out: bool) -> bool:
        return True


def outermost_logical(tv: TensorView, root: IterDomain) -> IterDomain | None:
    """Returns the logical axis that has the same outermost blocks as `root`, an axis before a
    reshape.

    One of the two axes is the outermost part of the other. Returns None after a resize. Also
    returns None if a merge has the root axis as its inner input.
    """
    domain = tv.domain
    steps = path(domain, domain.maybe_root, domain.logical)
    marked = replay(steps, {root.number: True}, _Outermost(tv))
    return next((a for a in domain.logical if a.number in marked), None)


def origin_root(tv: TensorView, logical: IterDomain) -> IterDomain | None:
    """Returns the root axis (before a reshape) with the same outermost blocks as a logical axis.

    Returns None if there is no such axis.
    """
    domain = tv.domain
    steps = path(domain, (logical,), domain.maybe_root)
    marked = replay(steps, {logical.number: True}, _Outermost(tv))
    return next((a for a in domain.maybe_root if a.number in marked), None)


def path_to_root(tv: TensorView, logical: IterDomain) -> tuple[int, ...]:
    """Returns the numbers of the axes on the way from a logical axis back over reshapes to its root
    axis.

    A root axis is one before a reshape. The numbers of both axes are included.
    """
    steps = path(tv.domain, (logical,), tv.domain.maybe_root)
    return tuple(replay(steps, {logical.number: True}, _TowardsRoot(tv)))
