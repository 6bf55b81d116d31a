"""Iteration domains and the transforms between the four views of a tensor.

A `TensorDomain` holds root, logical, allocation and loop axes, and the transforms (`Split`,
`Merge`, `Resize`, `Swizzle1D`) that derive one view from another. Everything here is frozen:
scheduling makes a new `TensorDomain` and the tensor rebinds it. An `IterDomain` is identified by
its number, which is unique in a fusion; its other fields may differ between two states of the same
axis (a parallelised axis keeps its number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fuser.errors import DefinitionError
from fuser.ir import scalar as sc
from fuser.ir.scalar import Scalar
from fuser.ir.types import IterType, ParallelType

if TYPE_CHECKING:
    from fuser.ir.tensor import TensorView


@dataclass(frozen=True)
class IterDomain:
    """One axis of one tensor.

    `extent` is the number of iterations (1 for a broadcast); `expanded` is the apparent size of an
    expanded broadcast. `rfactor` marks an axis made by a view-like op or rfactor.
    """

    number: int
    kind: IterType
    extent: Scalar
    ptype: ParallelType = ParallelType.serial
    expanded: Scalar | None = None
    rfactor: bool = False
    # The tensor whose domain holds this state of the axis; set when a tensor binds its domain.
    owner: TensorView | None = field(default=None, compare=False, repr=False)

    @property
    def is_broadcast(self) -> bool:
        return self.kind is IterType.broadcast

    @property
    def is_device(self) -> bool:
        return self.ptype.is_device

    @property
    def is_stream(self) -> bool:
        return self.ptype is ParallelType.stream

    @property
    def size(self) -> Scalar:
        """The apparent size: the expanded extent of an expanded broadcast, else the extent."""
        return self.extent if self.expanded is None else self.expanded

    def is_reduction(self) -> bool:
        return self.kind is IterType.reduction

    def parallelize(self, parallel_type: ParallelType) -> None:
        """Give the axis a parallel type in its tensor (device and stream types fit any axis).

        Raises `DefinitionError` when unroll, vectorize or group meet a symbolic extent.
        """
        if self.owner is None:
            raise DefinitionError(f"{self} belongs to no tensor, so it cannot be parallelized")
        self.owner.parallelize_axis(self, parallel_type)

    def __str__(self) -> str:
        ex = f" ex {self.expanded}" if self.expanded is not None else ""
        rf = "rf" if self.rfactor else ""
        return f"{self.kind.value}{self.ptype.text}{self.number}{{{self.extent}{ex}}}{rf}"


# ------------------------------------------------------------------ transforms
@dataclass(frozen=True)
class Split:
    """inp -> outer, inner.

    An inner split gives inner the extent `factor`, an outer split gives it to outer.
    """

    inp: IterDomain
    outer: IterDomain
    inner: IterDomain
    factor: Scalar
    inner_split: bool = True

    @property
    def inputs(self) -> tuple[IterDomain, ...]:
        return (self.inp,)

    @property
    def outputs(self) -> tuple[IterDomain, ...]:
        return (self.outer, self.inner)

    @property
    def is_divisible(self) -> bool:
        """Whether the factor provably divides the input extent."""
        return sc.int_value(sc.mod(self.inp.size, self.factor)) == 0

    def __str__(self) -> str:
        head = "Split" if self.inner_split else "Outer split"
        return f"{head}: {self.inp} by factor {self.factor} -> {self.outer}, {self.inner}"


@dataclass(frozen=True)
class Merge:
    """outer, inner -> out, with extent outer * inner."""

    outer: IterDomain
    inner: IterDomain
    out: IterDomain

    @property
    def inputs(self) -> tuple[IterDomain, ...]:
        return (self.outer, self.inner)

    @property
    def outputs(self) -> tuple[IterDomain, ...]:
        return (self.out,)

    def __str__(self) -> str:
        return f"Merge: {self.outer} and {self.inner} -> {self.out}"


@dataclass(frozen=True)
class Resize:
    """inp -> out, with extent inp + left + right (either sign): index out = index in + left."""

    inp: IterDomain
    out: IterDomain
    left: Scalar
    right: Scalar

    @property
    def inputs(self) -> tuple[IterDomain, ...]:
        return (self.inp,)

    @property
    def outputs(self) -> tuple[IterDomain, ...]:
        return (self.out,)

    def __str__(self) -> str:
        return f"Resize: {self.inp} by {self.left} and {self.right} -> {self.out}"


@dataclass(frozen=True)
class Swizzle1D:
    """inp -> out, a rotation by my mesh coordinate c: index in = (index out + c) % extent."""

    inp: IterDomain
    out: IterDomain
    ptype: ParallelType

    @property
    def inputs(self) -> tuple[IterDomain, ...]:
        return (self.inp,)

    @property
    def outputs(self) -> tuple[IterDomain, ...]:
        return (self.out,)

    def __str__(self) -> str:
        return f"{self.out} = Swizzle1D({self.inp}, parallelType={self.ptype.text})"


Transform = Split | Merge | Resize | Swizzle1D


# ------------------------------------------------------------------ tensor domain
@dataclass(frozen=True)
class TensorDomain:
    """The views of one tensor.

    `root` is () when it equals logical; `allocation` is () when memory order is logical order.
    `contiguity` runs parallel to allocation (or logical): None exactly at broadcast and reduction
    axes, True where stride == next inner non-broadcast stride * extent (innermost: stride 1).
    `transforms` derive logical from root and loop/allocation from logical, in order.
    """

    logical: tuple[IterDomain, ...]
    loop: tuple[IterDomain, ...]
    root: tuple[IterDomain, ...] = ()
    allocation: tuple[IterDomain, ...] = ()
    contiguity: tuple[bool | None, ...] = ()
    transforms: tuple[Transform, ...] = ()

    @property
    def maybe_root(self) -> tuple[IterDomain, ...]:
        return self.root or self.logical

    @property
    def maybe_allocation(self) -> tuple[IterDomain, ...]:
        return self.allocation or self.logical

    @property
    def no_reductions(self) -> tuple[IterDomain, ...]:
        """The logical axes that consumers and users see."""
        return tuple(i for i in self.logical if i.kind is not IterType.reduction)

    def producer_of(self, axis: IterDomain) -> Transform | None:
        """Return the transform that made `axis`, None for a root (or untransformed) axis."""
        return next(
            (t for t in self.transforms if any(o.number == axis.number for o in t.outputs)), None
        )

    def all_axes(self) -> tuple[IterDomain, ...]:
        """Return every axis once, by number: root, logical, transform outputs, with the state of
        the loop, allocation or logical list where the axis is in one."""
        seen: dict[int, IterDomain] = {}
        for t in self.transforms:
            for axis in (*t.inputs, *t.outputs):
                seen[axis.number] = axis
        for axis in (*self.maybe_root, *self.allocation, *self.logical, *self.loop):
            seen[axis.number] = axis
        return tuple(seen[n] for n in sorted(seen))

    def map_axes(self, fn: Callable[[IterDomain], IterDomain]) -> TensorDomain:
        """Return the domain with `fn` applied to every axis, inside transforms too."""

        def seq(axes: tuple[IterDomain, ...]) -> tuple[IterDomain, ...]:
            return tuple(fn(a) for a in axes)

        return replace(
            self,
            logical=seq(self.logical),
            loop=seq(self.loop),
            root=seq(self.root),
            allocation=seq(self.allocation),
            transforms=tuple(map_transform(t, fn) for t in self.transforms),
        )

    def replace_axis(self, new: IterDomain) -> TensorDomain:
        """Return the domain in which the axis numbered `new.number` has the state `new`."""
        return self.map_axes(lambda a: new if a.number == new.number else a)

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.loop)) + "]"


def map_transform(t: Transform, fn: Callable[[IterDomain], IterDomain]) -> Transform:
    """Return the transform between other axes, with the same factors."""
    match t:
        case Split():
            return replace(t, inp=fn(t.inp), outer=fn(t.outer), inner=fn(t.inner))
        case Merge():
            return replace(t, outer=fn(t.outer), inner=fn(t.inner), out=fn(t.out))
        case Resize() | Swizzle1D():
            return replace(t, inp=fn(t.inp), out=fn(t.out))


def contiguity_for(axes: Iterable[IterDomain], flag: bool = True) -> tuple[bool | None, ...]:
    """Return `flag` for every axis, None at broadcast and reduction axes."""
    none = (IterType.broadcast, IterType.reduction)
    return tuple(None if a.kind in none else flag for a in axes)


# ------------------------------------------------------------------ the index engine
Indices = dict[int, Scalar]


def indices_forward(
    transforms: Sequence[Transform],
    indices: Mapping[int, Scalar],
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> Indices:
    """Push indices (axis number -> index) from inputs to outputs of the transforms.

    A transform whose inputs are not all known is skipped. `coordinate` gives this device's mesh
    coordinate, for Swizzle1D.
    """
    known: Indices = dict(indices)
    for t in transforms:
        if not all(i.number in known for i in t.inputs):
            continue
        match t:
            case Split():
                idx, inner_extent = known[t.inp.number], t.inner.size
                known.setdefault(t.outer.number, sc.floordiv(idx, inner_extent))
                known.setdefault(t.inner.number, sc.mod(idx, inner_extent))
            case Merge():
                idx = sc.add(sc.mul(known[t.outer.number], t.inner.size), known[t.inner.number])
                known.setdefault(t.out.number, idx)
            case Resize():
                known.setdefault(t.out.number, sc.add(known[t.inp.number], t.left))
            case Swizzle1D():
                assert coordinate is not None, "Swizzle1D needs the mesh coordinate"
                shifted = sc.sub(sc.add(known[t.inp.number], t.inp.size), coordinate(t.ptype))
                known.setdefault(t.out.number, sc.mod(shifted, t.inp.size))
    return known


def indices_backward(
    transforms: Sequence[Transform],
    indices: Mapping[int, Scalar],
    *,
    coordinate: Callable[[ParallelType], Scalar] | None = None,
) -> Indices:
    """Pull indices from outputs to inputs of the transforms (loop -> logical -> root)."""
    known: Indices = dict(indices)
    for t in reversed(transforms):
        if not all(o.number in known for o in t.outputs):
            continue
        match t:
            case Split():
                idx = sc.add(sc.mul(known[t.outer.number], t.inner.size), known[t.inner.number])
                known.setdefault(t.inp.number, idx)
            case Merge():
                idx, inner_extent = known[t.out.number], t.inner.size
                known.setdefault(t.outer.number, sc.floordiv(idx, inner_extent))
                known.setdefault(t.inner.number, sc.mod(idx, inner_extent))
            case Resize():
                known.setdefault(t.inp.number, sc.sub(known[t.out.number], t.left))
            case Swizzle1D():
                assert coordinate is not None, "Swizzle1D needs the mesh coordinate"
                shifted = sc.add(known[t.out.number], coordinate(t.ptype))
                known.setdefault(t.inp.number, sc.mod(shifted, t.inp.size))
    return known


def transforms_between(
    domain: TensorDomain, sources: Iterable[IterDomain], targets: Iterable[IterDomain]
) -> tuple[Transform, ...]:
    """Return the transforms on the way from `sources` to `targets`, in order."""
    wanted = {a.number for a in targets}
    start = {a.number for a in sources}
    picked: list[Transform] = []
    for t in reversed(domain.transforms):
        if any(o.number in wanted and o.number not in start for o in t.outputs):
            picked.append(t)
            wanted.update(i.number for i in t.inputs)
    return tuple(reversed(picked))


def ancestors(
    domain: TensorDomain, axis: IterDomain, among: Iterable[IterDomain]
) -> tuple[int, ...]:
    """Return the numbers of the axes in `among` that `axis` is derived from."""
    stop = {a.number for a in among}
    found: dict[int, None] = {}

    def visit(number: int) -> None:
        if number in stop:
            found[number] = None
            return
        for t in domain.transforms:
            if any(o.number == number for o in t.outputs):
                for i in t.inputs:
                    visit(i.number)

    visit(axis.number)
    return tuple(found)
