"""Placements: which logical axes of a tensor are cut into blocks along which parallel types.

A loop domain records a sharding as outer splits whose outer axis has a device (or stream) type.
Here it is read as, per logical axis, the *cuts* in nesting order: `[(mesh_y, 2), (mesh_x, 4)]` is
an axis of 2 blocks along mesh_y, each of 4 blocks along mesh_x. Propagation and decomposition
think in cuts and write them back as splits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from fuser.errors import ShardingError, UnsupportedError
from fuser.ir import scalar as sc
from fuser.ir.domain import (
    IterDomain,
    Merge,
    Resize,
    Split,
    Swizzle1D,
    TensorDomain,
    Transform,
)
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.mesh import DeviceMesh
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, ParallelType

SPREAD_TYPES = (*DEVICE_TYPES, ParallelType.stream)


@dataclass(frozen=True)
class Cut:
    """An axis cut into `count` blocks along `ptype`.

    `whole`: the axis itself carries the type (its extent is `count`), there is no split.
    """

    ptype: ParallelType
    count: int
    whole: bool = False


Cuts = tuple[Cut, ...]
# One entry per logical axis without reductions.
Placement = tuple[Cuts, ...]


def is_plain_broadcast(axis: IterDomain) -> bool:
    """Whether every device sees the same single element: such an axis is never sharded."""
    return axis.is_broadcast and axis.expanded is None


# ------------------------------------------------------------------ reading
def spread_axes(tv: TensorView) -> tuple[IterDomain, ...]:
    """Return the loop axes with a device or stream type, reductions included."""
    return tuple(a for a in tv.domain.loop if a.ptype in SPREAD_TYPES and not is_plain_broadcast(a))


def sharded_axis(tv: TensorView, ptype: ParallelType) -> IterDomain | None:
    """Return the non-reduction loop axis with a device or stream type, None when there is none."""
    return next((a for a in spread_axes(tv) if a.ptype is ptype and not a.is_reduction()), None)


def _count(tv: TensorView, axis: IterDomain) -> int:
    """Return into how many blocks a spread axis cuts: the mesh's size, or a stream's extent."""
    if axis.ptype.is_device:
        if tv.mesh is None:
            raise ShardingError(f"{axis} of {tv} is device-parallel, but the tensor has no mesh")
        return tv.mesh.size_of(axis.ptype)
    count = sc.int_value(axis.size)
    if count is None:
        raise UnsupportedError(f"stream axis {axis} of {tv} needs a constant extent")
    return count


def cut_origin(tv: TensorView, axis: IterDomain) -> tuple[int, int]:
    """Return (number of the logical axis that a spread loop axis cuts, nesting depth).

    Depth 0: the logical axis itself. Raises `UnsupportedError` when the axis is not a block of
    consecutive elements: the inner output of a split, or part of a merge.
    """
    logical = {a.number for a in tv.domain.logical}
    number, depth = axis.number, 0
    while number not in logical:
        t = next(t for t in tv.domain.transforms if any(o.number == number for o in t.outputs))
        depth += 1
        match t:
            case Split() if t.outer.number == number or t.outer.ptype in SPREAD_TYPES:
                number = t.inp.number
            case Swizzle1D():
                number = t.inp.number
            case _:
                raise UnsupportedError(
                    f"Currently, we don't support DID on inner splits: {axis} of {tv}, from {t}"
                )
    return number, depth


def axis_cuts(tv: TensorView, ptypes: Collection[ParallelType] = SPREAD_TYPES) -> dict[int, Cuts]:
    """Return the cuts of every cut logical axis (by number), reductions included, outermost
    first.
    """
    found: dict[int, list[tuple[int, Cut]]] = {}
    for axis in spread_axes(tv):
        if axis.ptype in ptypes:
            number, depth = cut_origin(tv, axis)
            cut = Cut(axis.ptype, _count(tv, axis), whole=depth == 0)
            found.setdefault(number, []).append((depth, cut))
    ordered = ((a.number, found[a.number]) for a in tv.domain.logical if a.number in found)
    return {n: tuple(c for _, c in sorted(cuts, key=lambda x: x[0])) for n, cuts in ordered}


def placement(tv: TensorView, ptypes: Collection[ParallelType] = SPREAD_TYPES) -> Placement:
    """Return the cuts per logical axis without reductions."""
    cuts = axis_cuts(tv, ptypes)
    return tuple(cuts.get(a.number, ()) for a in tv.domain.no_reductions)


def reduction_cuts(tv: TensorView) -> dict[int, Cuts]:
    """Return the device cuts of reduction axes, by logical axis number."""
    reductions = {a.number for a in tv.domain.logical if a.is_reduction()}
    return {n: c for n, c in axis_cuts(tv, DEVICE_TYPES).items() if n in reductions}


def local_extent(extent: Scalar, cuts: Cuts) -> Scalar:
    """Return what remains of an extent on one device; streams do not cut what a device holds."""
    for cut in cuts:
        if cut.ptype.is_device:
            extent = sc.ONE if cut.whole else sc.ceildiv(extent, cut.count)
    return extent


# ------------------------------------------------------------------ writing
def _remainder(tv: TensorView, number: int) -> IterDomain | None:
    """Return the loop axis that holds the rest of a logical axis below its cuts."""
    while True:
        axis = next((a for a in tv.domain.loop if a.number == number), None)
        if axis is not None:
            return axis if axis.ptype is ParallelType.serial else None
        split = next(
            (t for t in tv.domain.transforms if isinstance(t, Split) and t.inp.number == number),
            None,
        )
        if split is None or split.outer.ptype not in SPREAD_TYPES:
            return None
        number = split.inner.number


def add_cut(tv: TensorView, number: int, cut: Cut) -> bool:
    """Cut a logical axis further, inside its present cuts; False when its loop axes do not allow
    it.

    A `whole` cut parallelizes the axis itself; any other makes an outer split.
    """
    rest = _remainder(tv, number)
    if rest is None:
        return False
    position = tv.domain.loop.index(rest)
    if not cut.whole:
        tv.split(position, cut.count, inner_split=False)
    tv.parallelize_axis(tv.domain.loop[position], cut.ptype)
    return True


def add_cuts(tv: TensorView, number: int, cuts: Cuts) -> None:
    """Cut a logical axis of a tensor whose loop axes allow it, outermost cut first."""
    for cut in cuts:
        placed = add_cut(tv, number, cut)
        assert placed, f"axis {number} of {tv} does not take {cut}"


def unparallelize(tv: TensorView, drop: Callable[[IterDomain], bool]) -> None:
    """Make the spread loop axes that `drop` accepts serial, and undo splits that this leaves idle.

    An idle split has two serial outputs in the loop domain and none in the allocation domain.
    """
    domain = tv.domain
    for axis in spread_axes(tv):
        if drop(axis):
            domain = domain.replace_axis(replace(axis, ptype=ParallelType.serial))
    kept_by = {a.number for a in (*domain.logical, *domain.allocation)}
    for t in reversed(domain.transforms):
        outputs = {o.number for o in t.outputs}
        in_loop = [a for a in domain.loop if a.number in outputs]
        is_idle = len(in_loop) == len(outputs) and all(
            a.ptype is ParallelType.serial for a in in_loop
        )
        if is_idle and isinstance(t, Split | Swizzle1D) and not outputs & kept_by:
            last = t.outputs[-1].number
            loop = tuple(
                t.inputs[0] if a.number == last else a
                for a in domain.loop
                if a.number == last or a.number not in outputs
            )
            transforms = tuple(u for u in domain.transforms if u is not t)
            domain = replace(domain, loop=loop, transforms=transforms)
    tv.domain = domain


def copy_like(
    source: TensorView, mesh: DeviceMesh | None, cuts: Placement, *, dtype: DataType | None = None
) -> TensorView:
    """Create a tensor with the logical axes of `source` (no reductions), placed on `mesh`."""
    fusion = source.fusion
    axes = tuple(fusion.clone_axis(a) for a in source.domain.no_reductions)
    out = fusion.new_tensor(axes, dtype or source.dtype(), mesh=mesh)
    for axis, mine in zip(axes, cuts, strict=True):
        add_cuts(out, axis.number, mine)
    return out


def clone_domain(fusion: Fusion, domain: TensorDomain) -> tuple[TensorDomain, dict[int, int]]:
    """Return the domain under fresh axis numbers, and the map from old to new numbers."""
    numbers = {a.number: fusion.next_axis() for a in domain.all_axes()}
    return (
        domain.map_axes(lambda a: replace(a, number=numbers[a.number], owner=None)),
        numbers,
    )


def without_root(domain: TensorDomain) -> TensorDomain:
    """Return the domain as that of a copy: no root axes, no reductions."""
    logical = domain.no_reductions
    derived = {a.number for a in logical}
    kept: list[Transform] = []
    for t in domain.transforms:
        if all(i.number in derived for i in t.inputs) and not any(
            o.number in derived for o in t.outputs
        ):
            kept.append(t)
            derived.update(o.number for o in t.outputs)
    flags = zip(domain.maybe_allocation, domain.contiguity, strict=True)
    contiguity = [(a, f) for a, f in flags if a.number in derived]
    return TensorDomain(
        logical=logical,
        loop=tuple(a for a in domain.loop if a.number in derived),
        allocation=tuple(a for a, _ in contiguity) if domain.allocation else (),
        contiguity=tuple(f for _, f in contiguity),
        transforms=tuple(kept),
    )


# ------------------------------------------------------------------ through views (root <->
# logical)
def _is_unit(axis: IterDomain) -> bool:
    return sc.int_value(axis.size) == 1


def _split_ahead(t: Split, number: int) -> bool:
    """Whether `number` is the outermost part of the split input, beside a unit or a device axis."""
    if t.outer.number == number:
        return True
    return _is_unit(t.outer) or t.outer.ptype.is_device


def outermost_logical(tv: TensorView, root: IterDomain) -> IterDomain | None:
    """Return the outermost logical axis derived from a root axis; None behind a resize.

    Raises `ShardingError` when a merge puts the axis on its inner side.
    """
    number = root.number
    for t in tv.domain.transforms:
        if not any(i.number == number for i in t.inputs):
            continue
        if any(a.number == number for a in tv.domain.logical):
            break
        match t:
            case Split():
                number = (t.inner if _is_unit(t.outer) else t.outer).number
            case Merge():
                if t.outer.number != number and not _is_unit(t.outer):
                    raise ShardingError(
                        "Expected the sharding to be on the outer reshaped id. "
                        f"{t.inner} is the inner input of {t} in {tv}"
                    )
                number = t.out.number
            case Resize() | Swizzle1D():
                return None
    return next((a for a in tv.domain.logical if a.number == number), None)


def origin_root(tv: TensorView, logical: IterDomain) -> IterDomain | None:
    """Return the root axis whose outermost part a logical axis is; None when there is none."""
    roots = {a.number: a for a in tv.domain.maybe_root}
    number = logical.number
    while number not in roots:
        t = next(
            (t for t in tv.domain.transforms if any(o.number == number for o in t.outputs)),
            None,
        )
        match t:
            case Split() if _split_ahead(t, number):
                number = t.inp.number
            case Merge():
                number = (t.inner if _is_unit(t.outer) else t.outer).number
            case _:
                return None
    return roots[number]


def path_to_root(tv: TensorView, logical: IterDomain) -> tuple[int, ...]:
    """Return the numbers of the axes from a logical axis to its root axis, both included."""
    roots = {a.number for a in tv.domain.maybe_root}
    numbers = [logical.number]
    while numbers[-1] not in roots:
        t = next(t for t in tv.domain.transforms if any(o.number == numbers[-1] for o in t.outputs))
        match t:
            case Merge():
                numbers.append((t.inner if _is_unit(t.outer) else t.outer).number)
            case _:
                numbers.append(t.inputs[0].number)
    return tuple(numbers)


# ------------------------------------------------------------------ memory order
def memory_order(tv: TensorView) -> tuple[tuple[int, bool | None], ...]:
    """Return (logical position without reductions, contiguity), outermost in memory first.

    Device and stream axes in the allocation domain are folded into the axis that they cut.
    Raises `UnsupportedError` for an allocation domain that is no permutation of the logical axes.
    """
    axes = tv.domain.no_reductions
    positions = {a.number: p for p, a in enumerate(axes)}
    cut_splits = [
        t for t in tv.domain.transforms if isinstance(t, Split) and t.outer.ptype in SPREAD_TYPES
    ]
    split_of = {t.inner.number: t.inp.number for t in cut_splits}
    folded = {t.outer.number for t in cut_splits} - positions.keys()
    order: list[tuple[int, bool | None]] = []
    for axis, flag in zip(tv.domain.maybe_allocation, tv.domain.contiguity, strict=True):
        if axis.is_reduction() or axis.number in folded:
            continue
        number = axis.number
        while number not in positions and number in split_of:
            number = split_of[number]
        if number not in positions:
            raise UnsupportedError(
                f"{tv}: allocation axis {axis} is no logical axis and no cut of one"
            )
        order.append((positions[number], flag))
    if sorted(p for p, _ in order) != list(range(len(axes))):
        raise UnsupportedError(f"{tv}: the allocation domain is no permutation of the logical axes")
    return tuple(order)


def set_memory_order(tv: TensorView, order: Sequence[int]) -> None:
    """Declare a contiguous memory order of the logical axes (positions, outermost first)."""
    axes = [tv.domain.no_reductions[p] for p in order]
    reductions = [a for a in tv.domain.logical if a.is_reduction()]
    tv.set_allocation_domain([*axes, *reductions], True)


def is_contiguous(tv: TensorView) -> bool:
    return all(flag is not False for flag in tv.domain.contiguity)
