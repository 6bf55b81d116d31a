"""Computes an index, size or stride of derived axes from that of their source axes, or the reverse.

    steps = path(domain, domain.loop, domain.logical)         undoes splits and merges
    values = replay(steps, {number: value, ...}, rules)       the value of every axis on the path

An axis has a *value*, such as its index or its size. `Rules` define how each kind of transform,
such as a split, changes the value. This module has the rules of indices, sizes and strides. Rules
of shardings, new axes and torch views are defined in the modules that use them. Transforms are
interpreted only through such rules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
    """One transform of axes, such as a split, and the direction in which it is applied.

    Forward computes the values of the derived axes from those of the source axes, and backward the
    reverse.
    """

    transform: Transform
    is_forward: bool


def forward(transforms: Iterable[Transform]) -> tuple[PathStep, ...]:
    """Returns the path steps (transform, direction) that apply these transforms in order."""
    return tuple(PathStep(t, True) for t in transforms)


def backward(transforms: Sequence[Transform]) -> tuple[PathStep, ...]:
    """Returns the path steps (transform, direction) that undo these transforms, last one first."""
    return tuple(PathStep(t, False) for t in reversed(transforms))


def transforms_between(
    domain: TensorDomain, sources: Iterable[IterDomain], targets: Iterable[IterDomain]
) -> tuple[Transform, ...]:
    """Returns the transforms, such as splits, that derive `targets` from `sources`, in order."""
    return tuple(_producers(domain, {a.number for a in targets}, {a.number for a in sources}))


def _producers(domain: TensorDomain, wanted: set[int], stop: set[int]) -> list[Transform]:
    """Returns the transforms that derive the axes `wanted` from the axes `stop`, in order.

    Both sets have axis numbers. The set `wanted` is changed in place. The axes of `stop` are
    removed from it, and the source axes of the returned transforms are added, except those in
    `stop`.
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
    """Returns the transforms, with directions, that lead from axes `sources` to axes `targets`.

    `replay` computes values, such as indices, along the result. Backward steps come first, then
    forward steps. The path leads to every target that is derived from a source, or from which a
    source is derived. It also leads to a target that is derived from axes whose values the sources
    determine. For example, memory axes determine the axes that users see, which determine the loop
    axes.
    """
    start = {a.number for a in sources}
    goal = {a.number for a in targets} - start
    if not goal or not domain.transforms:
        return ()
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


def path_up(domain: TensorDomain, axis: IterDomain, targets: Container[int]) -> Iterator[PathStep]:
    """Yields the steps that lead from `axis` back to the axes `targets`, from which it is derived.

    Each step undoes a transform. `targets` has axis numbers. `path` finds such steps for several
    axes, and steps in the other direction, too.
    """
    numbers = [axis.number]
    for t in reversed(domain.transforms):
        outputs = t.outputs
        if any(n in outputs for n in numbers):
            yield PathStep(t, False)
            numbers += (n for n in t.inputs if n not in targets)


# ------------------------------------------------------------------ rules
class Rules(Generic[V]):
    """Base of the rules for one quantity of axes, such as the index: how each transform changes it.

    Methods such as `split` compute the values of derived axes from those of the source axes.
    Methods such as `unsplit` compute the reverse. A result is None if it cannot be determined. The
    methods of this base class always return None.

    If `needs_all` is True, a transform is applied only if the values of all axes that it starts
    from are known. Otherwise one value is enough, and an unknown one is passed as None.
    """

    needs_all = True

    def split(self, t: SplitTransform, inp: V) -> tuple[V | None, V | None]:
        """Returns the values of the (outer, inner) axes from the value of the axis that `t` splits.

        A value is, for example, the index or the size of an axis.
        """
        return None, None

    def merge(self, t: MergeTransform, outer: Any, inner: Any) -> V | None:
        """Returns the value of the merged axis from the values of its two source axes.

        A value is, for example, the index or the size of an axis.
        """
        return None

    def resize(self, t: Resize, inp: V) -> V | None:
        """Returns the value of the resized axis from the value of its source axis.

        A value is, for example, the index or the size of an axis. A resize pads or crops an axis.
        """
        return None

    def swizzle(self, t: Swizzle1D, inp: V) -> V | None:
        """Returns the value of the rotated axis from the value of its source axis.

        A value is, for example, the index or the size of an axis. A rotation lets each device begin
        a loop at its own position.
        """
        return None

    def shift(self, t: Shift, rows: Any, inp: Any) -> tuple[V | None, V | None]:
        """Returns the values of (axis of rows, shifted axis) from those of the two source axes.

        A value is, for example, the index or the size of an axis. A `Shift` moves each row of a
        tensor by some elements, so that vector accesses are aligned. `rows` and `inp` are the
        values of the axis that numbers the rows and of the axis within a row.
        """
        return None, None

    def unsplit(self, t: SplitTransform, outer: Any, inner: Any) -> V | None:
        """Returns the value of the axis before a split from the values of (outer, inner).

        A value is, for example, the index or the size of an axis.
        """
        return None

    def unmerge(self, t: MergeTransform, out: V) -> tuple[V | None, V | None]:
        """Returns the values of the two axes (outer, inner) from the value of the merged axis.

        A value is, for example, the index or the size of an axis.
        """
        return None, None

    def unresize(self, t: Resize, out: V) -> V | None:
        """Returns the value of the axis before a resize from the value of the resized axis.

        A value is, for example, the index or the size of an axis. A resize pads or crops an axis.
        """
        return None

    def unswizzle(self, t: Swizzle1D, out: V) -> V | None:
        """Returns the value of the axis before a rotation from the value of the rotated axis.

        A value is, for example, the index or the size of an axis. A rotation lets each device begin
        a loop at its own position.
        """
        return None

    def unshift(self, t: Shift, same: Any, out: Any) -> tuple[V | None, V | None]:
        """Returns the values of (axis of rows, axis within a row) before a shift from those after.

        A value is, for example, the index or the size of an axis. A `Shift` moves each row of a
        tensor by some elements, so that vector accesses are aligned. `same` and `out` are the
        values of the axis of rows and of the shifted axis.
        """
        return None, None

    def apply(self, step: PathStep, values: Sequence[Any]) -> Sequence[V | None]:
        """Applies the transform of `step` by calling the method for its kind and direction.

        `values` has the values of the axes from which the step starts. Returns the values of the
        axes to which it leads.
        """
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
    """Applies `rules` along a path of transforms, and returns the values of all axes on it.

    Keys are axis numbers. The result begins with the values in `known`, which are never replaced.
    The computed values follow in the order of the steps. Axes whose value cannot be computed are
    missing.
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
    """Rules for indices: computes the index of a derived axis from its source axes, or the reverse.

    `coordinate` returns the executing device's coordinate along a mesh dimension. Only rotations
    (`Swizzle1D`, by which each device begins at its own position) need it.
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
        """Returns the indices of (outer, inner) after a split.

        They are (index / inner size, index % inner size).
        """
        return self._apart(t.inner, inp)

    def unmerge(self, t: MergeTransform, out: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the indices of the merged axes: (index / inner size, index % inner size).

        The exception is a loop for which a broadcast axis was merged with another axis. The loop
        runs only over the other axis, and the index of the broadcast axis is 0.
        """
        if self._only_concrete(t):
            is_inner = self._axes[t.outer].is_broadcast
            return (sc.ZERO, out) if is_inner else (out, sc.ZERO)
        return self._apart(t.inner, out)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns the index of the merged axis: outer index * inner size + inner index.

        The exception is a loop for which a broadcast axis is merged with another axis. The loop
        runs only over the other axis, and the result is the index of that axis.
        """
        if self._only_concrete(t):
            return inner if self._axes[t.outer].is_broadcast else outer
        return self._together(t.inner, outer, inner)

    def _only_concrete(self, t: MergeTransform) -> bool:
        """Returns whether a loop over the merged axis of `t` runs over only one source axis.

        This holds if the other source axis is a broadcast axis, because a loop need not repeat its
        only element. It does not hold for a merge of a reshape: the reshaped tensor has these
        repetitions as elements.
        """
        outer, inner, out = (self._axes[n] for n in (t.outer, t.inner, t.out))
        return outer.is_broadcast != inner.is_broadcast and not out.rfactor

    def unsplit(self, t: SplitTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns the index of the axis that was split: outer index * inner size + inner index."""
        return self._together(t.inner, outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the index in the resized axis: index + number of elements added at the start."""
        return sc.add(inp, t.left)

    def unresize(self, t: Resize, out: Scalar) -> Scalar:
        """Returns the index before the resize: index - number of elements added at the start."""
        return sc.sub(out, t.left)

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        """Returns the index of the rotated axis: (index - coordinate) % size.

        `coordinate` is that of the executing device along a mesh dimension.
        """
        size = self._axes[t.inp].size
        return sc.mod(sc.sub(sc.add(inp, size), self._coordinate_along(t.ptype)), size)

    def unswizzle(self, t: Swizzle1D, out: Scalar) -> Scalar:
        """Returns the index before the rotation: (index + coordinate) % size.

        `coordinate` is that of the executing device along a mesh dimension.
        """
        return sc.mod(sc.add(out, self._coordinate_along(t.ptype)), self._axes[t.inp].size)

    def _begin(self, t: Shift, row: Scalar) -> Scalar:
        """Returns the number of positions by which a `Shift` moves the row with index `row`.

        This is begin % width, where width is the vector width. begin = row * (length of a row) is
        the position of the row's first element in memory. The result is written as begin - width *
        (begin // width). An address is begin + shifted index - result, so begin cancels there.
        """
        begin = sc.mul(row, self._axes[t.inp].size)
        return sc.sub(begin, sc.mul(t.width, sc.floordiv(begin, t.width)))

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (index of the row, index of the element in the shifted row).

        `rows` and `inp` are the indices before the shift, which moves each row by its own offset so
        that vector accesses are aligned. The second result is `inp` plus this offset.
        """
        return rows, sc.add(inp, self._begin(t, rows))

    def unshift(self, t: Shift, same: Scalar, out: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (index of the row, index of the element in the row): undoes `shift`.

        `same` and `out` are the indices after the shift, which moved each row by an offset so that
        vector accesses are aligned.
        """
        return same, sc.sub(out, self._begin(t, same))


def indices_forward(
    domain: TensorDomain,
    indices: Mapping[int, Scalar],
    transforms: Sequence[Transform] | None = None,
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> dict[int, Scalar]:
    """Returns `indices`, extended by the indices of all axes that are derived from these axes.

    Keys are axis numbers. `transforms` defaults to all transforms of the domain, such as its
    splits. A transform is skipped if the index of one of its source axes is unknown. `coordinate`
    returns the device's coordinate along a mesh dimension, which only rotations need
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
    """Returns `indices`, extended by the indices of all axes from which these axes are derived.

    Keys are axis numbers. `transforms` defaults to all transforms of the domain, such as its
    splits. For example, the indices of the axes that users see are computed from those of the
    loops. `coordinate` returns the device's coordinate along a mesh dimension, which only rotations
    need (`IndexRules`).
    """
    steps = backward(domain.transforms if transforms is None else transforms)
    return replay(steps, indices, IndexRules(domain, coordinate))


# ------------------------------------------------------------------ sizes and strides
class SizeRules(Rules[Scalar]):
    """Rules that compute the sizes of derived axes from those of the source axes (forward only).

    `rewrite` is applied to the parameters of transforms, such as split factors. For example, it
    replaces symbols by values.
    """

    def __init__(self, rewrite: Callable[[Scalar], Scalar] = lambda x: x) -> None:
        self._rewrite = rewrite

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the sizes of (outer, inner), one of which is the factor.

        The factor is the inner size if `inner_split` is True, else the outer size. The other size
        is ceil(size / factor).
        """
        factor = self._rewrite(t.factor)
        rest = sc.ceildiv(inp, factor)
        return (rest, factor) if t.inner_split else (factor, rest)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        """Returns the size of the merged axis: the product of the two sizes."""
        return sc.mul(outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the size of the resized axis: size + elements added at the start and at the end.

        These numbers are negative if elements are removed.
        """
        return sc.add(sc.add(inp, self._rewrite(t.left)), self._rewrite(t.right))

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        """Returns the size of the rotated axis: that of its source axis."""
        return inp

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns (number of rows, size of the shifted axis): the second is size + width - 1.

        The shift moves each row by up to width - 1 positions, inclusive, to align vector accesses.
        """
        return rows, shifted_extent(inp, self._rewrite(t.width))


class StrideRules(Rules[Scalar]):
    """Rules that compute the strides of derived axes from those of the source axes (forward only).

    `size` returns the size of the axis with a given number. The stride of a derived axis is None if
    its elements are not at equal distances in memory, as after a rotation.
    """

    def __init__(self, size: Callable[[int], Scalar]) -> None:
        self._size = size

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the strides of (outer, inner): (stride * inner size, stride)."""
        return sc.mul(inp, self._size(t.inner)), inp

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar | None:
        """Returns the stride of the merged axis, or None if neighbours have different distances.

        A stride exists if one source axis has size 1, or if the outer stride is inner stride *
        inner size.
        """
        if self._size(t.inner) == sc.ONE:
            return outer
        is_one = self._size(t.outer) == sc.ONE
        return inner if is_one or outer == sc.mul(inner, self._size(t.inner)) else None

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        """Returns the stride of the resized axis: that of its source axis."""
        return inp


def is_divisible(domain: TensorDomain, split: SplitTransform) -> bool:
    """Returns whether the factor of `split` certainly divides the size of the axis evenly."""
    return sc.int_value(sc.mod(domain.axes[split.inp].size, split.factor)) == 0


def partial_splits(domain: TensorDomain, transforms: Iterable[Transform]) -> list[SplitTransform]:
    """Returns those splits in `transforms` that may not divide their axis evenly.

    Loops over the derived axes may run past the end of the split axis, so kernels must check bounds
    there.
    """
    return [t for t in transforms if isinstance(t, SplitTransform) and not is_divisible(domain, t)]


def with_exact_splits(domain: TensorDomain) -> TensorDomain:
    """Returns a copy of `domain` in which the factor of each split is correct again.

    The factor is the size of the inner axis, or of the outer axis if `inner_split` is False. The
    function is called after the sizes of all axes were replaced by the sizes on one device. At that
    point, the factors are still those of the whole tensor.
    """

    def exact(t: Transform) -> Transform:
        if not isinstance(t, SplitTransform):
            return t
        return replace(t, factor=domain.axes[t.inner if t.inner_split else t.outer].size)

    return domain.having(transforms=map(exact, domain.transforms))
