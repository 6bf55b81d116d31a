"""Axes of a tensor (iteration domains), and the transforms that derive axes from other axes.

A `TensorDomain` maps the number of each axis to the current properties of the axis. It lists axis
numbers in four orders, which are called domains:

- root: the axes that the op itself computes.
- logical: the axes that users see.
- allocation: the axes in memory order.
- loop: the axes that become loops, threads and devices.

Transforms (`SplitTransform`, `MergeTransform`, `Resize`, `Swizzle1D`, `Shift`) derive the axes of
one domain from those of another. All classes are frozen: scheduling creates a new `TensorDomain`
and assigns it to the tensor. `fuser.ir.domain.axis_path` computes sizes, indices and strides along
transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import Any, Protocol

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, Symbol
from fuser.ir.statement import Val
from fuser.ir.types import IterType, ParallelType
from fuser.support.errors import UnsupportedError, counted
from fuser.support.record import record, remembered, replace


@record
class IterDomain:
    """One axis of one tensor: its number, and its current properties.

    - `number` identifies the axis in its fusion.
    - `extent` is the number of iterations. A broadcast axis has extent 1.
    - `ptype`, the parallel type, says who executes the axis: a serial loop, threads, blocks,
      devices or CUDA streams.
    - `expanded` is the size that users see of a broadcast axis that is expanded. It is None for
      other axes.
    - `rfactor` marks an axis that the op derives from other axes of the tensor, by a reshape or by
      splitting a reduction (`TensorView.rfactor`).
    """

    number: int
    kind: IterType
    extent: Scalar
    ptype: ParallelType = ParallelType.serial
    expanded: Scalar | None = None
    rfactor: bool = False

    @property
    def is_broadcast(self) -> bool:
        """Whether this is a broadcast axis, expanded or not."""
        return self.kind is IterType.broadcast

    @property
    def is_device(self) -> bool:
        """Whether the axis is split over the devices of a mesh dimension, one position for each."""
        return self.ptype.is_device

    @property
    def is_stream(self) -> bool:
        """Whether each position along the axis is one iteration of a loop over CUDA streams."""
        return self.ptype.is_stream

    @property
    def size(self) -> Scalar:
        """The size that users see: that of an expanded broadcast axis, or else the extent."""
        return self.extent if self.expanded is None else self.expanded

    def is_reduction(self) -> bool:
        """Returns whether the op that computes the tensor reduces over this axis."""
        return self.kind is IterType.reduction

    def numbered(self, number: int) -> IterDomain:
        """Returns a copy of the axis with another number."""
        return IterDomain(number, self.kind, self.extent, self.ptype, self.expanded, self.rfactor)

    def having(self, **state: Any) -> IterDomain:
        """Returns a copy of the axis in which the fields `state` have other values.

        Returns `self` if all fields have these values already.
        """
        if all(getattr(self, name) is value for name, value in state.items()):
            return self
        return replace(self, **state)

    def __str__(self) -> str:
        ex = f" ex {self.expanded}" if self.expanded is not None else ""
        rf = "rf" if self.rfactor else ""
        return f"{self.kind.value}{self.ptype.text}{self.number}{{{self.extent}{ex}}}{rf}"


# ------------------------------------------------------------------ transforms
Renumber = Callable[[int], int]
Rewrite = Callable[[Scalar], Scalar]


@record
class SplitTransform:
    """The split of an axis into two axes: inp -> outer, inner.

    `factor` is the extent of `inner` if `inner_split` is True, else the extent of `outer`.
    """

    inp: int
    outer: int
    inner: int
    factor: Scalar
    inner_split: bool = True

    @property
    def inputs(self) -> tuple[int, ...]:
        """The number of the axis that is split, as a tuple."""
        return (self.inp,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the two derived axes: (outer, inner)."""
        return (self.outer, self.inner)

    @property
    def form(self) -> tuple[object, ...]:
        """The parameters that two splits must share to be alike, whatever their axes are.

        These are the factor, and whether the factor is the extent of the inner axis.
        """
        return (self.factor, self.inner_split)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalar parameters of the split: (factor,)."""
        return (self.factor,)

    def renumbered(self, fn: Renumber) -> SplitTransform:
        """Returns the same split with each axis number n replaced by `fn(n)`."""
        inp, outer, inner = fn(self.inp), fn(self.outer), fn(self.inner)
        return SplitTransform(inp, outer, inner, self.factor, self.inner_split)

    def rewritten(self, fn: Rewrite) -> SplitTransform:
        """Returns the same split with `fn` applied to its factor."""
        return replace(self, factor=fn(self.factor))


@record
class MergeTransform:
    """The merge of two axes into one: outer, inner -> out, with extent outer * inner."""

    outer: int
    inner: int
    out: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the two axes that are merged: (outer, inner)."""
        return (self.outer, self.inner)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The number of the merged axis, as a tuple."""
        return (self.out,)

    @property
    def form(self) -> tuple[object, ...]:
        """The parameters that two merges must share to be alike: (), because a merge has only
        axes.
        """
        return ()

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalar parameters of the merge: (), because a merge has none."""
        return ()

    def renumbered(self, fn: Renumber) -> MergeTransform:
        """Returns the same merge with each axis number n replaced by `fn(n)`."""
        return MergeTransform(fn(self.outer), fn(self.inner), fn(self.out))

    def rewritten(self, fn: Rewrite) -> MergeTransform:
        """Returns the merge with `fn` applied to its scalars: `self`, because a merge has none."""
        return self


@record
class Resize:
    """The padding or cropping of an axis: inp -> out, with extent inp + left + right.

    The index of out is the index of inp plus `left`. `left` and `right` are negative if elements
    are removed, as in a slice.
    """

    inp: int
    out: int
    left: Scalar
    right: Scalar

    @property
    def inputs(self) -> tuple[int, ...]:
        """The number of the axis that is resized, as a tuple."""
        return (self.inp,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The number of the resized axis, as a tuple."""
        return (self.out,)

    @property
    def form(self) -> tuple[object, ...]:
        """The parameters that two resizes must share to be alike, whatever their axes are.

        These are the numbers of elements that are added at the start and at the end of an axis.
        """
        return (self.left, self.right)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalar parameters of the resize: the elements added on the left and on the right."""
        return (self.left, self.right)

    def renumbered(self, fn: Renumber) -> Resize:
        """Returns the same resize with each axis number n replaced by `fn(n)`."""
        return replace(self, inp=fn(self.inp), out=fn(self.out))

    def rewritten(self, fn: Rewrite) -> Resize:
        """Returns the same resize with `fn` applied to `left` and `right`."""
        return replace(self, left=fn(self.left), right=fn(self.right))


@record
class Swizzle1D:
    """The rotation of an axis: inp -> out, where index of inp = (index of out + c) % extent.

    c is the coordinate of the executing device along the mesh dimension `ptype`, such as `mesh_x`.
    Each device thus begins a loop with the block that it stores itself, as ring schedules need.
    """

    inp: int
    out: int
    ptype: ParallelType

    @property
    def inputs(self) -> tuple[int, ...]:
        """The number of the axis that is rotated, as a tuple."""
        return (self.inp,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The number of the rotated axis, as a tuple."""
        return (self.out,)

    @property
    def form(self) -> tuple[object, ...]:
        """The parameters that two rotations must share to be alike, whatever their axes are.

        This is the mesh dimension whose coordinate says by how much an axis is rotated.
        """
        return (self.ptype,)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalar parameters of the rotation: (), because it has none."""
        return ()

    def renumbered(self, fn: Renumber) -> Swizzle1D:
        """Returns the same rotation with each axis number n replaced by `fn(n)`."""
        return replace(self, inp=fn(self.inp), out=fn(self.out))

    def rewritten(self, fn: Rewrite) -> Swizzle1D:
        """Returns the rotation with `fn` applied to its scalars: `self`, because it has none."""
        return self


@record
class Shift:
    """Moves each row along a loop axis so that vector accesses are aligned: rows, inp -> same, out.

    Index of out = index of inp + (row * extent of inp) % width. `rows` is the axis that numbers the
    rows, `inp` the axis within a row, and `same` a copy of `rows`.

    If the length of a row is not a multiple of the vector width, most rows begin at an unaligned
    address. After the shift, a vector whose index along `out` is a multiple of `width` is aligned
    in memory. This requires that each row begins in memory where the row before ends. `out` has
    width - 1 iterations more than `inp`. Iterations before the first and after the last element of
    a row are skipped.
    """

    rows: int
    inp: int
    same: int
    out: int
    width: Scalar

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the source axes: (axis of rows, axis within a row)."""
        return (self.rows, self.inp)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the derived axes: (copy of the axis of rows, shifted axis)."""
        return (self.same, self.out)

    @property
    def form(self) -> tuple[object, ...]:
        """The parameters that two shifts must share to be alike, whatever their axes are.

        This is the vector width in elements, which determines by how much each row is moved.
        """
        return (self.width,)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalar parameters of the shift: the vector width, in elements."""
        return (self.width,)

    def renumbered(self, fn: Renumber) -> Shift:
        """Returns the same shift with each axis number n replaced by `fn(n)`."""
        return Shift(fn(self.rows), fn(self.inp), fn(self.same), fn(self.out), self.width)

    def rewritten(self, fn: Rewrite) -> Shift:
        """Returns the same shift with `fn` applied to its width."""
        return replace(self, width=fn(self.width))


def shifted_extent(extent: Scalar, width: Scalar) -> Scalar:
    """Returns the extent of an axis after a `Shift`, which aligns rows to vectors.

    This is extent + width - 1, because a row moves by at most width - 1 positions.
    """
    return sc.sub(sc.add(extent, width), 1)


# Each has `inputs` and `outputs` (axis numbers), `form` (its parameters) and `scalars` (the scalar
# parameters), and makes copies with other numbers (`renumbered`) or scalars (`rewritten`).
Transform = SplitTransform | MergeTransform | Resize | Swizzle1D | Shift


def same_form(a: Transform, b: Transform) -> bool:
    """Returns whether two transforms, such as splits, have the same type and equal parameters.

    An example of a parameter is the split factor. The axes of the transforms may differ.
    """
    return type(a) is type(b) and a.form == b.form


def shifts_of(transforms: Iterable[Transform]) -> list[Shift]:
    """Returns the shifts, which align rows to vectors, among `transforms`."""
    return [t for t in transforms if isinstance(t, Shift)]


def splits_of(transforms: Iterable[Transform]) -> dict[int, SplitTransform]:
    """Returns the splits among `transforms`, by the number of the axis that is split."""
    return {t.inp: t for t in transforms if isinstance(t, SplitTransform)}


# ------------------------------------------------------------------ tensor domain
_state_of = attrgetter("kind", "extent", "ptype", "expanded", "rfactor")


class Structure:
    """A tensor domain without its axis numbers, as a hashable key for comparisons.

    Tensors of equal layers of a model have equal structures. `places` maps each axis number to its
    position among the sorted numbers. The hash is computed once, so that comparisons are fast.
    """

    __slots__ = ("_hash", "_key", "places")

    def __init__(self, key: Hashable, places: Mapping[int, int]) -> None:
        self._key, self._hash, self.places = key, hash(key), places

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


@Val.register
@record
class TensorDomain:
    """The axes of one tensor, with their numbers in four orders.

    - `axes` maps axis numbers to axes. It has exactly the axes of the orders below and of the
      transforms.
    - `logical_numbers`: the axes that users see, and the reduction axes.
    - `loop_numbers`: the axes that become loops, threads and devices.
    - `root_numbers`: the axes that the op itself computes, before it splits or merges them. () if
      these are the logical axes.
    - `allocation_numbers`: the axes in memory order. () if this is the logical order.
    - `contiguity` has one flag per allocation axis (or logical axis, if there are no allocation
      axes). The flag is None exactly for broadcast and reduction axes. True means that the axis has
      no gaps: its stride is the stride * extent of the next inner axis in memory, or 1 for the
      innermost axis.
    - `transforms` derive the logical axes from the root axes, and the loop and allocation axes from
      the logical axes, in order.
    """

    axes: Mapping[int, IterDomain] = field(hash=False)
    logical_numbers: tuple[int, ...]
    loop_numbers: tuple[int, ...]
    root_numbers: tuple[int, ...] = ()
    allocation_numbers: tuple[int, ...] = ()
    contiguity: tuple[bool | None, ...] = ()
    transforms: tuple[Transform, ...] = ()

    # nvFuser's `Val` queries.
    def is_tensor(self) -> bool:
        """Returns False, as nvFuser's `Val.isTensor` does for domains."""
        return False

    def is_symbolic(self) -> bool:
        """Returns whether the size of some axis is not a constant."""
        return any(not isinstance(a.size, Const) for a in self.axes.values())

    @staticmethod
    def of(
        logical: Sequence[IterDomain],
        loop: Sequence[IterDomain] | None = None,
        *,
        root: Sequence[IterDomain] = (),
        allocation: Sequence[IterDomain] = (),
        contiguity: Sequence[bool | None] | None = None,
        transforms: Sequence[Transform] = (),
        between: Iterable[IterDomain] = (),
    ) -> TensorDomain:
        """Returns the domain with these axes.

        By default, the loop axes are the logical axes (those that users see), and the tensor has no
        gaps in memory. `between` are axes of which only `transforms` have the numbers: intermediate
        results, such as an axis that one split derives and that another split divides.
        """
        axes: dict[int, IterDomain] = {}
        for axis in (*between, *root, *allocation, *(loop or ()), *logical):
            held = axes.setdefault(axis.number, axis)
            assert held is axis or held == axis, f"two states of one axis: {held} and {axis}"
        if contiguity is None:
            contiguity = contiguity_for(allocation or logical)
        return _pruned(
            axes,
            numbers(logical),
            numbers(logical if loop is None else loop),
            numbers(root),
            numbers(allocation),
            tuple(contiguity),
            tuple(transforms),
        )

    def __call__(self) -> TensorDomain:
        """Returns `self`, so that `tv.domain()` works. In nvFuser, `domain` is a method."""
        return self

    # ------------------------------------------------------------ views
    def states(self, group: Iterable[int]) -> tuple[IterDomain, ...]:
        """Returns the axes whose numbers (ids) are in `group`, in the order of `group`."""
        return tuple(map(self.axes.__getitem__, group))

    @remembered
    def root(self) -> tuple[IterDomain, ...]:
        """The axes that the op itself computes, before it splits or merges them.

        () if these are the logical axes.
        """
        return self.states(self.root_numbers)

    @remembered
    def logical(self) -> tuple[IterDomain, ...]:
        """The axes that users see, and the reduction axes."""
        return self.states(self.logical_numbers)

    @remembered
    def allocation(self) -> tuple[IterDomain, ...]:
        """The axes in memory order, outermost first, or () if users see them in this order."""
        return self.states(self.allocation_numbers)

    @remembered
    def loop(self) -> tuple[IterDomain, ...]:
        """The axes that become loops, threads and devices, outermost first."""
        return self.states(self.loop_numbers)

    @property
    def maybe_root(self) -> tuple[IterDomain, ...]:
        """The axes that the op itself computes: root axes if there are any, else logical axes."""
        return self.root or self.logical

    @property
    def maybe_allocation(self) -> tuple[IterDomain, ...]:
        """The axes in memory order: the allocation axes if there are any, else the logical axes."""
        return self.allocation or self.logical

    @remembered
    def no_reductions(self) -> tuple[IterDomain, ...]:
        """The axes that users and later ops see: the logical axes that are not reduced."""
        return tuple(i for i in self.logical if i.kind is not IterType.reduction)

    @remembered
    def is_undecided(self) -> bool:
        """Whether the tensor is the result of a reshape whose splits and merges are not decided
        yet.

        The sizes of a call's inputs decide them. Before that, no split or merge connects the axes
        of the operand with the axes of the result.
        """
        root = self.root_numbers
        if not root or any(n in root for n in self.logical_numbers):
            return False
        return not any(n in root for t in self.transforms for n in t.inputs)

    @remembered
    def has_devices(self) -> bool:
        """Whether some axis of the tensor is split over devices."""
        return any(a.is_device for a in self.axes.values())

    @remembered
    def memory_order(self) -> tuple[tuple[int, bool | None], ...]:
        """Pairs (position, contiguity flag) of the axes that users see, outermost in memory first.

        The flag is True if there is no gap between neighbours along the axis, and None for a
        broadcast axis. `fuser.ir.memory_layout.memory_order` returns this cached value.

        Raises:
            UnsupportedError: the declared memory order is not an order of the axes that users see,
                or of the parts of them that one device stores.
        """
        axes = self.no_reductions
        positions = {a.number: p for p, a in enumerate(axes)}
        outers = {t: self.rotated(t.outer) for t in self.splits.values()}
        cuts = {t: outer for t, outer in outers.items() if outer.is_device or outer.is_stream}
        split_of = {t.inner: t.inp for t in cuts}
        folded = {outer.number for outer in cuts.values()} - positions.keys()
        order: list[tuple[int, bool | None]] = []
        for axis, flag in zip(self.maybe_allocation, self.contiguity, strict=True):
            if axis.is_reduction() or axis.number in folded:
                continue
            number = axis.number
            while number not in positions and number in split_of:
                number = split_of[number]
            if number not in positions:
                raise UnsupportedError(
                    f"axis {axis} of the allocation domain is neither a logical axis nor a shard "
                    "of a logical axis: pass other axes to set_allocation_domain"
                )
            order.append((positions[number], flag))
        if sorted(p for p, _ in order) != list(range(len(axes))):
            given, wanted = (", ".join(map(str, group)) for group in (self.maybe_allocation, axes))
            raise UnsupportedError(
                f"the allocation domain ({given}) does not have each logical axis ({wanted}) once: "
                "pass all axes of the tensor to set_allocation_domain"
            )
        return tuple(order)

    @remembered
    def dense_rule(self) -> tuple[tuple[int, bool, bool], ...]:
        """The facts about each axis from which the strides of a tensor without gaps are computed.

        There is one entry per axis that users see, innermost in memory first. An entry is (position
        of the axis, whether the axis is expanded, whether memory holds all elements along it).
        Memory holds one element along a broadcast axis.
        """
        axes = [(p, self.no_reductions[p]) for p, _ in reversed(self.memory_order)]
        return tuple((p, a.expanded is not None, not a.is_broadcast) for p, a in axes)

    @remembered
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols in the extents of the axes, then in the transforms, each once."""
        found: dict[Symbol, None] = {}
        for axis in self.axes.values():
            found.update(dict.fromkeys(sc.symbols(axis.extent)))
            if axis.expanded is not None:
                found.update(dict.fromkeys(sc.symbols(axis.expanded)))
        for t in self.transforms:
            for value in t.scalars:
                found.update(dict.fromkeys(sc.symbols(value)))
        return tuple(found)

    @remembered
    def splits(self) -> Mapping[int, SplitTransform]:
        """The split transforms, by the number of the axis that is split."""
        return splits_of(self.transforms)

    def rotated(self, number: int) -> IterDomain:
        """Returns the axis with this number, or the axis into which rotations turn it.

        A rotation (`Swizzle1D`) lets each device begin a loop at its own position.
        """
        for t in self.transforms:
            if isinstance(t, Swizzle1D) and t.inp == number:
                number = t.out
        return self.axes[number]

    def above(self, group: Iterable[int]) -> set[int]:
        """Returns the axis numbers `group`, and those of all axes from which these are derived."""
        found = set(group)
        for t in reversed(self.transforms):
            if not found.isdisjoint(t.outputs):
                found.update(t.inputs)
        return found

    # ------------------------------------------------------------ changes
    def having(
        self,
        *,
        logical: Iterable[int] | None = None,
        loop: Iterable[int] | None = None,
        root: Iterable[int] | None = None,
        allocation: Iterable[int] | None = None,
        contiguity: Iterable[bool | None] | None = None,
        transforms: Iterable[Transform] | None = None,
        axes: Iterable[IterDomain] = (),
    ) -> TensorDomain:
        """Returns a copy of the domain with some of its fields replaced.

        The parameters are the fields with the same names, but `logical`, `loop`, `root` and
        `allocation` have axis numbers. None keeps a field. `axes` are new axes, or axes with
        changed properties. Axes that no field and no transform contains any more are dropped.
        """

        def group(new: Iterable[int] | None, old: tuple[int, ...]) -> tuple[int, ...]:
            return old if new is None else tuple(new)

        return _pruned(
            {**self.axes, **{a.number: a for a in axes}},
            group(logical, self.logical_numbers),
            group(loop, self.loop_numbers),
            group(root, self.root_numbers),
            group(allocation, self.allocation_numbers),
            self.contiguity if contiguity is None else tuple(contiguity),
            self.transforms if transforms is None else tuple(transforms),
        )

    def with_loop(
        self, loop: Iterable[int], *transforms: Transform, axes: Iterable[IterDomain] = ()
    ) -> TensorDomain:
        """Returns a copy of the domain with the loop axes `loop`.

        `transforms`, which derive these axes, are added to the transforms of the domain. `axes` are
        the new axes that `transforms` derive.
        """
        return TensorDomain(
            {**self.axes, **{a.number: a for a in axes}},
            self.logical_numbers,
            tuple(loop),
            self.root_numbers,
            self.allocation_numbers,
            self.contiguity,
            (*self.transforms, *transforms),
        )

    def with_allocation(
        self, allocation: Iterable[int], contiguity: Iterable[bool | None]
    ) -> TensorDomain:
        """Returns a copy of the domain with another memory order and other contiguity flags.

        `allocation` has axis numbers, outermost first. If it is empty, memory has the order that
        users see. A flag is True if there is no gap between neighbours along the axis.
        """
        return self.having(allocation=allocation, contiguity=contiguity)

    def with_axes(self, *states: IterDomain) -> TensorDomain:
        """Returns a copy of the domain in which `states` replace the axes with the same numbers."""
        return self._having_axes({**self.axes, **{a.number: a for a in states}})

    def _having_axes(self, axes: Mapping[int, IterDomain]) -> TensorDomain:
        return TensorDomain(
            axes,
            self.logical_numbers,
            self.loop_numbers,
            self.root_numbers,
            self.allocation_numbers,
            self.contiguity,
            self.transforms,
        )

    def in_logical_order(self) -> TensorDomain:
        """Returns a copy of the domain for a row-major tensor: memory has no gaps, and its order
        is that of the axes that users see.
        """
        return self.having(allocation=(), contiguity=contiguity_for(self.logical))

    def map_axes(self, fn: Callable[[IterDomain], IterDomain]) -> TensorDomain:
        """Returns a copy of the domain with `fn` applied to every axis. Axis numbers may change."""
        made = {n: fn(a) for n, a in self.axes.items()}
        if all(made[n] is a for n, a in self.axes.items()):
            return self

        def new(number: int) -> int:
            return made[number].number

        if all(a.number == n for n, a in made.items()):
            return self._having_axes(made)
        return TensorDomain(
            {a.number: a for a in made.values()},
            tuple(map(new, self.logical_numbers)),
            tuple(map(new, self.loop_numbers)),
            tuple(map(new, self.root_numbers)),
            tuple(map(new, self.allocation_numbers)),
            self.contiguity,
            tuple(t.renumbered(new) for t in self.transforms),
        )

    def without_root(self) -> TensorDomain:
        """Returns the domain for a copy of the tensor, which has only the axes that users see.

        Reduction axes are dropped, and also the axes from which the op derived the others (root
        axes). The loop and allocation axes that are derived from the remaining axes stay.
        """
        derived = {a.number for a in self.no_reductions}
        kept: list[Transform] = []
        for t in self.transforms:
            if derived.issuperset(t.inputs) and derived.isdisjoint(t.outputs):
                kept.append(t)
                derived.update(t.outputs)
        order = self.allocation_numbers or self.logical_numbers
        flags = [(n, f) for n, f in zip(order, self.contiguity, strict=True) if n in derived]
        return self.having(
            root=(),
            logical=(a.number for a in self.no_reductions),
            loop=(n for n in self.loop_numbers if n in derived),
            allocation=(n for n, _ in flags) if self.allocation_numbers else (),
            contiguity=(f for _, f in flags),
            transforms=kept,
        )

    @remembered
    def known(self) -> dict[Hashable, Any]:
        """A cache of results that analyses computed for this domain, under their own keys."""
        return {}

    @remembered
    def structure(self) -> Structure:
        """A hashable key of the domain, in which positions replace the axis numbers.

        Two domains that differ only in axis numbers have equal keys.
        """
        places = {number: place for place, number in enumerate(sorted(self.axes))}

        def group(found: Iterable[int]) -> tuple[int, ...]:
            return tuple(map(places.__getitem__, found))

        key = (
            tuple(_state_of(self.axes[number]) for number in places),
            group(self.logical_numbers),
            group(self.loop_numbers),
            group(self.root_numbers),
            group(self.allocation_numbers),
            self.contiguity,
            tuple((type(t), group(t.inputs), group(t.outputs), t.form) for t in self.transforms),
        )
        return Structure(key, places)

    @remembered
    def spread(self) -> tuple[IterDomain, ...]:
        """The loop axes that are split over devices or streams, reduction axes included.

        A broadcast axis that is not expanded is omitted, because every device has its only element.
        """
        return tuple(
            a
            for a in self.loop
            if (a.is_device or a.is_stream) and (not a.is_broadcast or a.expanded is not None)
        )

    @remembered
    def _text(self) -> str:
        return "[" + ", ".join(map(str, self.loop)) + "]"

    def __str__(self) -> str:
        return self._text

    @remembered
    def problem(self) -> str | None:
        """The error text for the first rule that this domain violates, or None. It is cached."""
        return domain_problem(self)


def _pruned(
    axes: Mapping[int, IterDomain],
    logical: tuple[int, ...],
    loop: tuple[int, ...],
    root: tuple[int, ...],
    allocation: tuple[int, ...],
    contiguity: tuple[bool | None, ...],
    transforms: tuple[Transform, ...],
) -> TensorDomain:
    """Returns the domain with these fields, after dropping axes that nothing refers to.

    An axis of `axes` is kept if a transform or one of the tuples of axis numbers contains its
    number. The remaining axes are sorted by number.
    """
    used = {*root, *logical, *allocation, *loop}
    for t in transforms:
        used.update(t.inputs)
        used.update(t.outputs)
    named = {n: axes[n] for n in sorted(used)}
    return TensorDomain(named, logical, loop, root, allocation, contiguity, transforms)


def numbers(axes: Iterable[IterDomain]) -> tuple[int, ...]:
    """Returns the axis numbers of `axes`, in the same order."""
    return tuple(a.number for a in axes)


def contiguity_for(axes: Iterable[IterDomain], flag: bool = True) -> tuple[bool | None, ...]:
    """Returns one contiguity flag per axis: None for broadcast and reduction axes, else `flag`.

    True means that there is no gap in memory between neighbours along the axis.
    """
    none = (IterType.broadcast, IterType.reduction)
    return tuple(None if a.kind in none else flag for a in axes)


# ---------------------------------------------------------------- text and invariants
def transform_text(t: Transform, domain: TensorDomain) -> str:
    """Returns a transform as text, such as `Merge: iS0{i0} and iS1{4} -> iS2{( i0 * 4 )}`."""
    ins, outs = domain.states(t.inputs), ", ".join(map(str, domain.states(t.outputs)))
    match t:
        case SplitTransform():
            title = "Split" if t.inner_split else "Outer split"
            return f"{title}: {ins[0]} by factor {t.factor} -> {outs}"
        case MergeTransform():
            return f"Merge: {ins[0]} and {ins[1]} -> {outs}"
        case Resize():
            return f"Resize: {ins[0]} by {t.left} and {t.right} -> {outs}"
        case Swizzle1D():
            return f"{outs} = Swizzle1D({ins[0]}, parallelType={t.ptype.text})"
        case Shift():
            return f"Shift: {ins[1]} by {ins[0]} to words of {t.width} -> {outs}"


_UNDERIVED = "a logical axis is not derived from the root domain"


def domain_problem(domain: TensorDomain) -> str | None:
    """Returns an error text for the first rule that a domain violates, or None if it is correct.

    The rules:

    - Each axis in memory has a correct contiguity flag.
    - Each axis is derived by exactly one transform.
    - No two loop axes are split over the same mesh dimension.
    - No two loop axes have the same stream type: `stream`, `stream_y` or `stream_z`. The iterations
      of an axis with such a type run on CUDA streams.
    """
    axes = domain.maybe_allocation
    if len(domain.contiguity) != len(axes):
        flags = counted(len(domain.contiguity), "flag")
        return f"contiguity has {flags} for {counted(len(axes), 'axis')} in memory"
    for axis, flag in zip(axes, domain.contiguity, strict=True):
        skipped = axis.kind in (IterType.broadcast, IterType.reduction)
        if skipped != (flag is None):
            return f"axis {axis} has contiguity {flag}, expected {'None' if skipped else 'a bool'}"
    problem = _UNDERIVED if domain.is_undecided else derivation_problem(domain)
    if problem:
        return problem
    seen: dict[ParallelType, str] = {}
    for axis in domain.loop:
        if axis.is_reduction() or not (axis.is_device or axis.is_stream):
            continue
        if axis.ptype in seen:
            return (
                "Found multiple loop IterDomains with the same parallel type: "
                f"{seen[axis.ptype]} and {axis}"
            )
        seen[axis.ptype] = str(axis)
    return None


def derivation_problem(domain: TensorDomain) -> str | None:
    """Returns an error text for an axis that no transform derives, or that two derive, else None.

    Transforms must derive the logical axes (those that users see) from the root axes (those that
    the op itself computes). They must derive the loop and allocation axes from the logical axes.
    The exception is a reshape whose transforms are not decided yet: its logical axes need no
    transform.
    """
    roots = domain.root_numbers or domain.logical_numbers
    if domain.is_undecided and all(a.rfactor for a in domain.logical):
        roots = (*roots, *domain.logical_numbers)
    made = set(roots)
    if len(made) != len(roots):
        return "its root or logical domain contains an axis twice"
    for t in domain.transforms:
        for axis in domain.states(t.inputs):
            if axis.number not in made:
                return f"{transform_text(t, domain)} reads {axis}, which does not exist yet"
        for axis in domain.states(t.outputs):
            if axis.number in made:
                return f"{transform_text(t, domain)} makes {axis}, which exists already"
            made.add(axis.number)
    derived = set(domain.logical_numbers)
    if not derived <= made:
        return _UNDERIVED
    for t in domain.transforms:
        if derived.issuperset(t.inputs):
            derived.update(t.outputs)
    for title, group in (("loop", domain.loop), ("allocation", domain.allocation)):
        for axis in group:
            if axis.number not in derived:
                return f"{title} axis {axis} is not derived from the logical domain"
    return None


# ----------------------------------------------------------------------
# DomainBuilder: creates transforms and the axes that they derive.


def merged_extent(outer: IterDomain, inner: IterDomain, *, is_view: bool) -> Scalar:
    """Returns the extent of the merge of two axes, of which one may be an expanded broadcast axis.

    With `is_view`, the merge belongs to a view, such as a reshape, and the expanded size is a
    factor of the extent. Otherwise, the merge creates a loop. The factor is then 1, because the
    loop need not repeat the only element along the broadcast axis.
    """
    if is_view and not (outer.is_broadcast and inner.is_broadcast):
        return sc.mul(outer.size, inner.size)
    return sc.mul(outer.extent, inner.extent)


class AxisNumbers(Protocol):
    """Protocol of an object that creates axes with unused numbers. A fusion is such an object."""

    def next_axis(self) -> int:
        """Returns an unused axis number."""
        ...

    def new_axis(
        self,
        extent: Scalar,
        kind: IterType = IterType.iteration,
        *,
        expanded: Scalar | None = None,
        rfactor: bool = False,
    ) -> IterDomain:
        """Returns a new axis with an unused number."""
        ...


class DomainBuilder:
    """Derives new axes by transforms, such as splits, and collects both for a new `TensorDomain`.

    `fusion` numbers the new axes. `axes` are the existing axes. Afterwards, the attributes `axes`
    and `transforms` contain everything that was derived.
    """

    def __init__(self, fusion: AxisNumbers, axes: Iterable[IterDomain] = ()) -> None:
        self._fusion = fusion
        self.axes: dict[int, IterDomain] = {a.number: a for a in axes}
        self.transforms: list[Transform] = []

    def split(
        self, inp: IterDomain, factor: Scalar, *, inner_split: bool = True, rfactor: bool = False
    ) -> tuple[IterDomain, IterDomain]:
        """Splits the axis `inp` into two axes and returns (outer, inner).

        `factor` is the extent of the inner axis, or of the outer axis if `inner_split` is False.
        `rfactor` says whether the axes are marked as derived by the op itself. Both axes inherit
        the kind and the parallel type. If `inp` is an expanded broadcast axis, its expanded size is
        split, and both results have extent 1.
        """

        def sizes(extent: Scalar) -> tuple[Scalar, Scalar]:
            rest = sc.ceildiv(extent, factor)
            return (rest, factor) if inner_split else (factor, rest)

        plain = (sc.ONE, sc.ONE) if inp.is_broadcast else sizes(inp.extent)
        expanded = sizes(inp.expanded) if inp.expanded is not None else (None, None)
        outer, inner = (
            self._derive(inp, extent=plain[k], expanded=expanded[k], rfactor=rfactor)
            for k in range(2)
        )
        self._lead(SplitTransform(inp.number, outer.number, inner.number, factor, inner_split), inp)
        return outer, inner

    def merge(self, outer: IterDomain, inner: IterDomain, *, rfactor: bool = False) -> IterDomain:
        """Merges two axes and returns the new axis of extent outer * inner.

        The new axis has the parallel type of `outer`. Its kind follows from the kinds of both axes:

        - The merge of an iteration axis and a broadcast axis is an iteration axis.
        - The merge with a reduction axis is a reduction axis.

        If one axis is an expanded broadcast axis and the other is not a broadcast axis, `rfactor`
        decides about the extent. In a view such as a reshape (`rfactor=True`), the expanded size is
        a factor of the extent. In a loop (`rfactor=False`), the expanded size is not a factor,
        because the loop need not repeat the only element.
        """
        kinds = (outer.kind, inner.kind)
        kind = next((k for k in kinds if k is not IterType.broadcast), IterType.broadcast)
        extent, expanded = merged_extent(outer, inner, is_view=rfactor), None
        is_expanded = outer.expanded is not None or inner.expanded is not None
        if kind is IterType.broadcast and is_expanded:
            expanded = sc.mul(outer.size, inner.size)
        out = self._derive(outer, kind=kind, extent=extent, expanded=expanded, rfactor=rfactor)
        self._lead(MergeTransform(outer.number, inner.number, out.number), outer, inner)
        return out

    def resize(self, inp: IterDomain, left: Scalar, right: Scalar) -> IterDomain:
        """Resizes an axis by `left` elements at its start and `right` elements at its end.

        Negative numbers remove elements. Returns the new axis:

        - If the new size is the constant 1, it is a broadcast axis.
        - If an expanded broadcast axis loses elements and gains none, it is an expanded broadcast
          axis.
        - In all other cases, it is an iteration axis.
        """
        extent = sc.add(sc.add(inp.size, left), right)
        is_one = sc.int_value(extent) == 1
        only_crops = all(sc.is_nonnegative(sc.mul(v, -1)) for v in (left, right))
        if inp.is_broadcast and inp.expanded is not None and only_crops and not is_one:
            out = self._fusion.new_axis(sc.ONE, IterType.broadcast, expanded=extent, rfactor=True)
        else:
            kind = IterType.broadcast if is_one else IterType.iteration
            out = self._fusion.new_axis(extent, kind, rfactor=True)
        self.axes[out.number] = out
        self._lead(Resize(inp.number, out.number, left, right), inp)
        return out

    def swizzle(self, inp: IterDomain, ptype: ParallelType) -> IterDomain:
        """Rotates an axis by the executing device's coordinate along the mesh dimension `ptype`.

        Returns the new axis. In a loop over this axis, each device begins with the block that it
        stores itself (`Swizzle1D`).
        """
        out = self._derive(inp)
        self._lead(Swizzle1D(inp.number, out.number, ptype), inp)
        return out

    def shift(
        self, rows: IterDomain, inp: IterDomain, width: Scalar
    ) -> tuple[IterDomain, IterDomain]:
        """Moves each row along a loop axis so that vector accesses of `width` elements are aligned.

        `rows` is the axis that numbers the rows, and `inp` the axis within a row. Returns (copy of
        `rows`, shifted axis). `Shift` describes the transform.
        """
        same = self._derive(rows)
        out = self._derive(inp, extent=shifted_extent(inp.extent, width))
        self._lead(Shift(rows.number, inp.number, same.number, out.number, width), rows, inp)
        return same, out

    def restate(self, axis: IterDomain, state: IterDomain) -> IterDomain:
        """Replaces an axis that this builder created by `state`, and returns `state`.

        `state` has other properties. If it also has another number, the builder's transforms then
        use the new number.
        """
        del self.axes[axis.number]
        self.axes[state.number] = state
        if state.number != axis.number:
            self.transforms = [
                t.renumbered(lambda n: state.number if n == axis.number else n)
                for t in self.transforms
            ]
        return state

    def _derive(self, inp: IterDomain, **changes: object) -> IterDomain:
        fresh = inp.numbered(self._fusion.next_axis())
        made = replace(fresh, **changes) if changes else fresh  # pyright: ignore[reportArgumentType]
        self.axes[made.number] = made
        return made

    def _lead(self, transform: Transform, *sources: IterDomain) -> None:
        self.transforms.append(transform)
        for axis in sources:
            self.axes.setdefault(axis.number, axis)
