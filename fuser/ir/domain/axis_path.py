"""The engine over domains: what transforms do to a quantity of axes, from some axes to others.

    steps = path(domain, domain.loop, domain.logical)         splits and merges, to be undone
    found = replay(steps, {number: value, ...}, rules)        the value of every axis on the way

`Rules` say, per kind of transform and direction, what becomes of one quantity: sizes, indices,
strides (here), cuts, new axes, views of a torch tensor (by those who need them). Nothing else
decodes transforms.
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
    """One transform, taken from inputs to outputs or back."""

    transform: Transform
    is_forward: bool


def forward(transforms: Iterable[Transform]) -> tuple[PathStep, ...]:
    return tuple(PathStep(t, True) for t in transforms)


def backward(transforms: Sequence[Transform]) -> tuple[PathStep, ...]:
    return tuple(PathStep(t, False) for t in reversed(transforms))


def transforms_between(
    domain: TensorDomain, sources: Iterable[IterDomain], targets: Iterable[IterDomain]
) -> tuple[Transform, ...]:
    """Returns the transforms that derive `targets` from `sources`, in order."""
    return tuple(_producers(domain, {a.number for a in targets}, {a.number for a in sources}))


def _producers(domain: TensorDomain, wanted: set[int], stop: set[int]) -> list[Transform]:
    """Returns the transforms that make the `wanted` axes, and what these are made of, from `stop`
    on; adds the axes on the way to `wanted`."""
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
    """Returns the steps from `sources` to `targets`: first back, then ahead.

    A target that the sources come from, or that comes from one of them, is reached straight; any
    other one only where the sources determine it (memory axes -> logical axes -> loop axes).
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
    """What transforms do to one quantity. A rule returns None where nothing is known.

    `needs_all`: a step is taken when all its sources have a value; else when one has, and the
    other one of a merge, a shift or of their undoing is None (hence `Any` there: V or None).
    """

    needs_all = True

    def split(self, t: SplitTransform, inp: V) -> tuple[V | None, V | None]:
        return None, None

    def merge(self, t: MergeTransform, outer: Any, inner: Any) -> V | None:
        return None

    def resize(self, t: Resize, inp: V) -> V | None:
        return None

    def swizzle(self, t: Swizzle1D, inp: V) -> V | None:
        return None

    def shift(self, t: Shift, rows: Any, inp: Any) -> tuple[V | None, V | None]:
        return None, None

    def unsplit(self, t: SplitTransform, outer: Any, inner: Any) -> V | None:
        return None

    def unmerge(self, t: MergeTransform, out: V) -> tuple[V | None, V | None]:
        return None, None

    def unresize(self, t: Resize, out: V) -> V | None:
        return None

    def unswizzle(self, t: Swizzle1D, out: V) -> V | None:
        return None

    def unshift(self, t: Shift, same: Any, out: Any) -> tuple[V | None, V | None]:
        return None, None

    def apply(self, step: PathStep, values: Sequence[Any]) -> Sequence[V | None]:
        """Returns the values of the step's targets, given those of its sources."""
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
    """Returns the known values by axis number, and those that the rules give along the steps.

    A value that is there stays. The order is that in which values were found.
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
    """Indices; `coordinate` gives this device's mesh coordinate, for rotations."""

    def __init__(
        self, domain: TensorDomain, coordinate: Callable[[ParallelType], Scalar] | None = None
    ) -> None:
        self._axes = domain.axes
        self._coordinate = coordinate

    def _apart(self, inner: int, index: Scalar) -> tuple[Scalar, Scalar]:
        size = self._axes[inner].size
        if sc.int_value(size) == 0:
            # Of no elements: no index comes, and each of them is as good.
            return sc.ZERO, index
        return sc.floordiv(index, size), sc.mod(index, size)

    def _together(self, inner: int, outer_index: Scalar, inner_index: Scalar) -> Scalar:
        return sc.add(sc.mul(outer_index, self._axes[inner].size), inner_index)

    def _coordinate_along(self, ptype: ParallelType) -> Scalar:
        assert self._coordinate is not None, "Swizzle1D needs the mesh coordinate"
        return self._coordinate(ptype)

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        return self._apart(t.inner, inp)

    def unmerge(self, t: MergeTransform, out: Scalar) -> tuple[Scalar, Scalar]:
        if self._only_concrete(t):
            is_inner = self._axes[t.outer].is_broadcast
            return (sc.ZERO, out) if is_inner else (out, sc.ZERO)
        return self._apart(t.inner, out)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        if self._only_concrete(t):
            return inner if self._axes[t.outer].is_broadcast else outer
        return self._together(t.inner, outer, inner)

    def _only_concrete(self, t: MergeTransform) -> bool:
        """Whether a loop over a broadcast and a concrete axis runs over the concrete one alone."""
        outer, inner, out = (self._axes[n] for n in (t.outer, t.inner, t.out))
        return outer.is_broadcast != inner.is_broadcast and not out.rfactor

    def unsplit(self, t: SplitTransform, outer: Scalar, inner: Scalar) -> Scalar:
        return self._together(t.inner, outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        return sc.add(inp, t.left)

    def unresize(self, t: Resize, out: Scalar) -> Scalar:
        return sc.sub(out, t.left)

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        size = self._axes[t.inp].size
        return sc.mod(sc.sub(sc.add(inp, size), self._coordinate_along(t.ptype)), size)

    def unswizzle(self, t: Swizzle1D, out: Scalar) -> Scalar:
        return sc.mod(sc.add(out, self._coordinate_along(t.ptype)), self._axes[t.inp].size)

    def _begin(self, t: Shift, row: Scalar) -> Scalar:
        """Returns by how much a row is shifted, so written that its own begin cancels."""
        begin = sc.mul(row, self._axes[t.inp].size)
        return sc.sub(begin, sc.mul(t.width, sc.floordiv(begin, t.width)))

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        return rows, sc.add(inp, self._begin(t, rows))

    def unshift(self, t: Shift, same: Scalar, out: Scalar) -> tuple[Scalar, Scalar]:
        return same, sc.sub(out, self._begin(t, same))


def indices_forward(
    domain: TensorDomain,
    indices: Mapping[int, Scalar],
    transforms: Sequence[Transform] | None = None,
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> dict[int, Scalar]:
    """Pushes indices (axis number -> index) along the transforms (default: all of the domain).

    A transform whose inputs are not all known is skipped.
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
    """Pulls indices from outputs to inputs of the transforms (loop -> logical -> root)."""
    steps = backward(domain.transforms if transforms is None else transforms)
    return replay(steps, indices, IndexRules(domain, coordinate))


# ------------------------------------------------------------------ sizes and strides
class SizeRules(Rules[Scalar]):
    """Sizes of derived axes from those that they are derived from; `rewrite` acts on scalars."""

    def __init__(self, rewrite: Callable[[Scalar], Scalar] = lambda x: x) -> None:
        self._rewrite = rewrite

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        factor = self._rewrite(t.factor)
        rest = sc.ceildiv(inp, factor)
        return (rest, factor) if t.inner_split else (factor, rest)

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar:
        return sc.mul(outer, inner)

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        return sc.add(sc.add(inp, self._rewrite(t.left)), self._rewrite(t.right))

    def swizzle(self, t: Swizzle1D, inp: Scalar) -> Scalar:
        return inp

    def shift(self, t: Shift, rows: Scalar, inp: Scalar) -> tuple[Scalar, Scalar]:
        return rows, shifted_extent(inp, self._rewrite(t.width))


class StrideRules(Rules[Scalar]):
    """Strides of derived axes; `size` gives an axis's size. None: not one stride, or a rotation."""

    def __init__(self, size: Callable[[int], Scalar]) -> None:
        self._size = size

    def split(self, t: SplitTransform, inp: Scalar) -> tuple[Scalar, Scalar]:
        return sc.mul(inp, self._size(t.inner)), inp

    def merge(self, t: MergeTransform, outer: Scalar, inner: Scalar) -> Scalar | None:
        if self._size(t.inner) == sc.ONE:
            return outer
        is_one = self._size(t.outer) == sc.ONE
        return inner if is_one or outer == sc.mul(inner, self._size(t.inner)) else None

    def resize(self, t: Resize, inp: Scalar) -> Scalar:
        return inp


def is_divisible(domain: TensorDomain, split: SplitTransform) -> bool:
    """Whether the factor provably divides the size of the split axis."""
    return sc.int_value(sc.mod(domain.axes[split.inp].size, split.factor)) == 0


def partial_splits(domain: TensorDomain, transforms: Iterable[Transform]) -> list[SplitTransform]:
    """Returns the splits whose parts may run past the end of the split axis."""
    return [t for t in transforms if isinstance(t, SplitTransform) and not is_divisible(domain, t)]


def with_exact_splits(domain: TensorDomain) -> TensorDomain:
    """Returns the domain whose split factors are the sizes of the axes that the splits made."""

    def exact(t: Transform) -> Transform:
        if not isinstance(t, SplitTransform):
            return t
        return replace(t, factor=domain.axes[t.inner if t.inner_split else t.outer].size)

    return domain.having(transforms=map(exact, domain.transforms))
