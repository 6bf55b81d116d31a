"""Computes a quantity of derived axes from that of their source axes, or in the other direction.

    steps = path(domain, domain.loop, domain.logical)         undoes splits and merges
    values = replay(steps, {number: value, ...}, rules)       the value of every axis on the path

`Rules` define, per kind of transform and direction, how one quantity changes. This module has the
rules of indices, sizes and strides. Rules of shardings, new axes and torch views stand in the
modules that use them. Transforms are interpreted only through such rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    Resize,
    Shift,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
    shifted_extent,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import ParallelType
from fuser.support.record import replace

V = TypeVar("V")


class PathStep(NamedTuple):
    """One transform on a path, applied forward (inputs to outputs) or backward (outputs to
    inputs).
    """

    transform: Transform
    is_forward: bool


def forward(transforms: Iterable[Transform]) -> tuple[PathStep, ...]:
    """Returns the path steps that apply these transforms in order."""
    return tuple(PathStep(t, True) for t in transforms)


def backward(transforms: Sequence[Transform]) -> tuple[PathStep, ...]:
    """Returns the path steps that undo these transforms, the last transform first."""
    return tuple(PathStep(t, False) for t in reversed(transforms))


def transforms_between(
    domain: TensorDomain, sources: Iterable[IterDomain], targets: Iterable[IterDomain]
) -> tuple[Transform, ...]:
    """Returns the transforms that derive `targets` from `sources`, in the order of application."""
    return tuple(_producers(domain, {a.number for a in targets}, {a.number for a in sources}))


def _producers(domain: TensorDomain, wanted: set[int], stop: set[int]) -> list[Transform]:
    """Returns the transforms that derive the `wanted` axes from the `stop` axes, in order.

    Changes `wanted` in place: removes the `stop` axes and adds the axes on the way.
    """
    wanted -= stop
    picked: list[Transform] = []
    for t in reversed(domain.transforms):
        if not wanted.isdisjoint(t.outputs):
            picked.append(t)
            wanted.update(n for n in t.inputs if n not in stop)
    return picked[::-1]


def path(
    domain: TensorDomain, sources: Iterable[IterDomain], targets: Iterable[IterDomain]
) -> tuple[PathStep, ...]:
    """Returns the steps from `sources` to `targets`: backward steps first, then forward steps.

    A target that is an ancestor or a descendant of a source is always reached. Any other target is
    reached only if the sources determine its value (memory axes -> logical axes -> loop axes).
    """
    start = {a.number for a in sources}
    goal = {a.number for a in targets} - start
    above = domain.above(start)
    below, determined = set(start), set(start)
    for t in reversed(domain.transforms):
        if determined.issuperset(t.outputs):
            determined.update(t.inputs)
    for t in domain.transforms:
        if not below.isdisjoint(t.inputs):
            below.update(t.outputs)
        if determined.issuperset(t.inputs):
            determined.update(t.outputs)
    back_to = goal & above
    wanted = goal - above & (below | determined)
    ahead = _producers(domain, wanted, above)
    back_to.update(n for t in ahead for n in t.inputs if n in above)
    back: list[Transform] = []
    for t in domain.transforms:
        on_way = above.intersection(t.outputs)
        if on_way and not back_to.isdisjoint(t.inputs) and not start.issuperset(t.inputs):
            back.append(t)
            back_to |= on_way
    return (*backward(back), *forward(ahead))


# ------------------------------------------------------------------ rules
class Rules(Generic[V]):
    """The rules of one quantity: how each kind of transform changes it, forward and backward.

    Each method takes the values of the source axes and returns the values of the target axes. A
    value is None if it cannot be determined. The methods of this base class always return None. If
    `needs_all` is True, a step is applied only if all its sources have values. Otherwise one value
    is enough, and a missing second value is passed as None.
    """

    needs_all = True

    def split(self, t: SplitTransform, inp: V) -> tuple[V | None, V | None]:
        """Returns the values of (outer, inner)."""
        return None, None

    def merge(self, t: MergeTransform, outer: Any, inner: Any) -> V | None:
        """Returns the value of the merged axis."""
        return None

    def resize(self, t: Resize, inp: V) -> V | None:
        """Returns the value of the resized axis."""
        return None

    def swizzle(self, t: Swizzle1D, inp: V) -> V | None:
        """Returns the value of the rotated axis."""
        return None

    def shift(self, t: Shift, rows: Any, inp: Any) -> tuple[V | None, V | None]:
        """Returns the values of (same rows, shifted axis)."""
        return None, None

    def unsplit(self, t: SplitTransform, outer: Any, inner: Any) -> V | None:
        """Returns the value of the axis that was split."""
        return None

    def unmerge(self, t: MergeTransform, out: V) -> tuple[V | None, V | None]:
        """Returns the values of (outer, inner), the axes that were merged."""
        return None, None

    def unresize(self, t: Resize, out: V) -> V | None:
        """Returns the value of the axis that was resized."""
        return None

    def unswizzle(self, t: Swizzle1D, out: V) -> V | None:
        """Returns the value of the axis that was rotated."""
        return None

    def unshift(self, t: Shift, same: Any, out: Any) -> tuple[V | None, V | None]:
        """Returns the values of (rows, axis that was shifted)."""
        return None, None

    def apply(self, step: PathStep, values: Sequence[Any]) -> Sequence[V | None]:
        """Returns the values of the step's target axes, computed from those of its source axes."""
        t = step.transform
        if step.is_forward:
            match t:
                case SplitTransform():
                    return self.split(t, values[0])
                case MergeTransform():
                    return (self.merge(t, *values),)
                case Resize():
                    return (self.resize(t, values[0]),)
                case Swizzle1D():
                    return (self.swizzle(t, values[0]),)
                case Shift():
                    return self.shift(t, *values)
        match t:
            case SplitTransform():
                return (self.unsplit(t, *values),)
            case MergeTransform():
                return self.unmerge(t, values[0])
            case Resize():
                return (self.unresize(t, values[0]),)
            case Swizzle1D():
                return (self.unswizzle(t, values[0]),)
            case Shift():
                return self.unshift(t, *values)


def replay(steps: Iterable[PathStep], known: Mapping[int, V], rules: Rules[V]) -> dict[int, V]:
    """Returns `known`, extended by the values that the rules compute along the steps.

    Keys are axis numbers. A known value is never replaced. The result is ordered by the steps.
    """
    found = dict(known)
    enough = all if rules.needs_all else any
    for step in steps:
        t, is_forward = step
        sources, targets = (t.inputs, t.outputs) if is_forward else (t.outputs, t.inputs)
        if not enough(n in found for n in sources):
            continue
        values = rules.apply(step, [found.get(n) for n in sources])
        for number, value in zip(targets, values, strict=True):
            if value is not None:
                found.setdefault(number, value)
    return found


# ------------------------------------------------------------------ indices
class IndexRules(Rules[Scalar]):
    """Rules for indices: the index of a derived axis from the indices of its sources, and back.

    `coordinate` returns the executing device's coordinate along a device type. Only rotations need
    it.
    """

    def __init__(
        self, domain: TensorDomain, coordinate: Callable[[ParallelType], Scalar] | None = None
    ) -> None:
        self._axes = domain.axes
        self._coordinate = coordinate

    def _apart(self, inner: int, index: Scalar) -> tuple[Scalar, Scalar]:
        size = self._axes[inner].size
        if sc.int_value(size) == 0:
            # The axis is empty, so no index exists; any result is correct.
            return sc.ZERO, index
        return sc.floordiv(index, size), sc.mod(index, size)

    def _together(self, inner: int, outer_index: Scalar, inner_index: Scalar) -> Scalar:
        return sc.add(sc.mul(outer_index, self._axes[inner].size), inner_index)

    def _coordinate_along(self, ptype: ParallelType) -> Scalar:
        assert self._coordinate is not None, "Swizzle1D needs the mesh coordinate"
        return self._coordinate(ptype)

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (index / inner size, index % inner size)."""
        return self._apart(t.inner, inp)

    def unmerge(self, t: MergeTransform, out: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (index / inner size, index % inner size).

        If a broadcast axis was merged with a concrete axis in a loop, the index of the broadcast
        axis is 0.
        """
        if self._only_concrete(t):
            is_inner = self._axes[t.outer].is_broadcast
            return (sc.ZERO, out) if is_inner else (out, sc.ZERO)
        return self._apart(t.inner, out)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns outer index * inner size + inner index.

        If a broadcast axis is merged with a concrete axis in a loop, the result is the concrete
        axis's index.
        """
        if self._only_concrete(t):
            return inner if self._axes[t.outer].is_broadcast else outer
        return self._together(t.inner, outer, inner)

    def _only_concrete(self, t: MergeTransform) -> bool:
        """Returns whether a merge of a broadcast and a concrete axis iterates only the latter.

        This is so in loops, but not in views.
        """
        outer, inner, out = (self._axes[n] for n in (t.outer, t.inner, t.out))
        return outer.is_broadcast != inner.is_broadcast and not out.rfactor

    def unsplit(self, t: SplitTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns outer index * inner size + inner index."""
        return self._together(t.inner, outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the index plus the number of elements that were added on the left."""
        return sc.add(inp, t.left)

    def unresize(self, t: Resize, out: Scalar) -> Scalar:
        """Returns the index minus the number of elements that were added on the left."""
        return sc.sub(out, t.left)

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        """Returns (index - coordinate) % size."""
        size = self._axes[t.inp].size
        return sc.mod(sc.sub(sc.add(inp, size), self._coordinate_along(t.ptype)), size)

    def unswizzle(self, t: Swizzle1D, out: Scalar) -> Scalar:
        """Returns (index + coordinate) % size."""
        return sc.mod(sc.add(out, self._coordinate_along(t.ptype)), self._axes[t.inp].size)

    def _begin(self, t: Shift, row: Scalar) -> Scalar:
        """Returns the shift of a row: (row * size) % width.

        The result is written as a difference, so that the start address of the row cancels in index
        arithmetic.
        """
        begin = sc.mul(row, self._axes[t.inp].size)
        return sc.sub(begin, sc.mul(t.width, sc.floordiv(begin, t.width)))

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the row index, and the element index plus the shift of the row."""
        return rows, sc.add(inp, self._begin(t, rows))

    def unshift(self, t: Shift, same: Scalar, out: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the row index, and the element index minus the shift of the row."""
        return same, sc.sub(out, self._begin(t, same))


def indices_forward(
    domain: TensorDomain,
    indices: Mapping[int, Scalar],
    transforms: Sequence[Transform] | None = None,
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> dict[int, Scalar]:
    """Returns `indices`, and the indices of all axes that can be derived in the forward direction.

    Keys are axis numbers. `transforms` defaults to all transforms of the domain. A transform is
    skipped if the index of one of its inputs is unknown. `coordinate` is needed for rotations
    (`IndexRules`).
    """
    steps = forward(domain.transforms if transforms is None else transforms)
    return replay(steps, indices, IndexRules(domain, coordinate))


def indices_backward(
    domain: TensorDomain,
    indices: Mapping[int, Scalar],
    transforms: Sequence[Transform] | None = None,
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> dict[int, Scalar]:
    """Returns the indices of transform inputs, computed from the indices of transform outputs.

    Keys are axis numbers. The direction is loop -> logical -> root. `coordinate` is needed for
    rotations (`IndexRules`).
    """
    steps = backward(domain.transforms if transforms is None else transforms)
    return replay(steps, indices, IndexRules(domain, coordinate))


# ------------------------------------------------------------------ sizes and strides
class SizeRules(Rules[Scalar]):
    """Rules for the sizes of derived axes, in the forward direction only.

    `rewrite` is applied to the factors of splits and to the widths of resizes and shifts.
    """

    def __init__(self, rewrite: Callable[[Scalar], Scalar] = lambda x: x) -> None:
        self._rewrite = rewrite

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the sizes of (outer, inner): the factor, and ceil(size / factor).

        The factor is the inner size if `inner_split` is set, else the outer size.
        """
        factor = self._rewrite(t.factor)
        rest = sc.ceildiv(inp, factor)
        return (rest, factor) if t.inner_split else (factor, rest)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns the product of the two sizes."""
        return sc.mul(outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the size plus both added widths, which may be negative."""
        return sc.add(sc.add(inp, self._rewrite(t.left)), self._rewrite(t.right))

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        """Returns the size of the source axis, because a rotation does not change it."""
        return inp

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the number of rows, and the size plus width - 1 (see `Shift`)."""
        return rows, shifted_extent(inp, self._rewrite(t.width))


class StrideRules(Rules[Scalar]):
    """Rules for the strides of derived axes, in the forward direction only.

    `size` returns the size of the axis with a given number. A stride is None if the derived axis
    has no single stride, as after a rotation.
    """

    def __init__(self, size: Callable[[int], Scalar]) -> None:
        self._size = size

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (stride * inner size, stride)."""
        return sc.mul(inp, self._size(t.inner)), inp

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar | None:
        """Returns the stride of a merged axis, or None if its sources are not adjacent in
        memory.
        """
        if self._size(t.inner) == sc.ONE:
            return outer
        is_one = self._size(t.outer) == sc.ONE
        return inner if is_one or outer == sc.mul(inner, self._size(t.inner)) else None

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the stride of the source axis, because a resize does not change it."""
        return inp


def is_divisible(domain: TensorDomain, split: SplitTransform) -> bool:
    """Returns whether the split factor provably divides the size of the split axis."""
    return sc.int_value(sc.mod(domain.axes[split.inp].size, split.factor)) == 0


def partial_splits(domain: TensorDomain, transforms: Iterable[Transform]) -> list[SplitTransform]:
    """Returns the splits whose results may extend past the end of the split axis."""
    return [t for t in transforms if isinstance(t, SplitTransform) and not is_divisible(domain, t)]


def with_exact_splits(domain: TensorDomain) -> TensorDomain:
    """Returns the domain in which each split factor is the size of the inner (or outer) axis."""

    def exact(t: Transform) -> Transform:
        if not isinstance(t, SplitTransform):
            return t
        return replace(t, factor=domain.axes[t.inner if t.inner_split else t.outer].size)

    return domain.having(transforms=map(exact, domain.transforms))
