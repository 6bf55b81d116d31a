"""Steps that all automatic schedules share: caches, loop arrangement, loops of the other tensors.

A schedule builds the loops of one tensor, the reference tensor. Every tensor with the same axes
gets the same loops. Every other tensor is fully inlined: its consumer computes it at an index
derived from the consumer's own index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.tensor_domain import DomainBuilder, IterDomain
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.schedule.iteration_space import Access, direct_uses
from fuser.schedule.loop_propagation import AxisMatcher, LoopReplay, set_parallel_types

PT = ParallelType


def cache_input(tv: TensorView) -> TensorView:
    """Inserts a copy of an input into registers, and returns the copy.

    The copy has no declared memory order. Lookups that use the input as a table still read memory.
    """
    uses = direct_uses(tv)
    return primitives.cache_after(tv, propagate_allocation_domain=False, cached_uses=uses)


def cache_output(tv: TensorView) -> tuple[TensorView, TensorView]:
    """Inserts a copy before an output, so that the output's value is computed in registers.

    Returns the tensor in registers, and the output.
    """
    if tv.fusion.uses(tv):
        return tv, primitives.cache_fork(tv)
    return primitives.cache_before(tv), tv


def arrange(tv: TensorView, groups: Sequence[Sequence[int]]) -> None:
    """Reorders the loop axes of a tensor and merges each group of them into one axis.

    Each group in `groups` lists positions of logical axes. With the groups ((2,), (0, 1)):

        tv [a, b, c]   ->   [c, a*b]
    """
    numbers = [tv.domain.logical[p].number for group in groups for p in group]
    places = {a.number: k for k, a in enumerate(tv.domain.loop)}
    tv.reorder({places[n]: k for k, n in enumerate(numbers)})
    for k, group in enumerate(groups):
        for _ in range(len(group) - 1):
            tv.merge(k)


def shift_rows(tv: TensorView, rows: int, axis: int, width: int) -> None:
    """Shifts the loop along each row of a tensor to start at the aligned address before the row.

    Vectors are then aligned even if their number of elements, `width`, does not divide a row of
    dense memory; see `Shift`. `rows` and `axis` are the positions of the loop axes over the rows
    and along a row.
    """
    built, loop = DomainBuilder(tv.fusion), list(tv.domain.loop)
    loop[rows], loop[axis] = built.shift(loop[rows], loop[axis], sc.const(width))
    tv.domain = tv.domain.with_loop(
        [a.number for a in loop], *built.transforms, axes=built.axes.values()
    )


def split_tile(
    tv: TensorView, axis: int, factors: Sequence[tuple[int, ParallelType]]
) -> list[ParallelType]:
    """Splits loop axis `axis` into tiles of constant size, and the tile by `factors`.

    `factors` are pairs (factor, parallel type) from outer to inner. Factors of 1 are left out.
    Returns the parallel types of the tile's axes.

    Only the last tile may be incomplete, so one bounds check per iteration is enough. With the
    factors ((2, UR), (128, TIDx)):

        [n]   ->   [ceilDiv(n, 256), UR 2, TIDx 128]
    """
    kept = [(f, t) for f, t in factors if f > 1]
    if not kept:
        return []
    tv.split(axis, prod(f for f, _ in kept))
    for factor, _ in reversed(kept[1:]):
        tv.split(axis + 1, factor)
    return [t for _, t in kept]


def parallelize(tv: TensorView, types: Sequence[ParallelType]) -> None:
    """Sets which CUDA blocks, threads or loops execute each loop axis of a tensor.

    `types` has a parallel type for each axis, in order. An axis whose type in `types` is serial
    keeps its own type.
    """
    set_parallel_types(
        tv,
        {a.number: t for a, t in zip(tv.domain.loop, types, strict=True) if t is not PT.serial},
    )


def loops_error(tv: TensorView, reference: TensorView) -> AssertionError:
    """Returns the error for a tensor that cannot have the loops of the reference tensor
    `reference`.

    It is an internal error, because the scheduler must not accept a fusion with such a tensor.
    """
    return AssertionError(
        f"internal error: the automatic schedule splits the axes of {reference} into loops, but "
        f"{tv} has no axes for these loops. Please report this definition, and use "
        "manual_execute with a schedule that you write"
    )


class Loops:
    """Copies the loops of one tensor, the reference tensor, to other tensors."""

    def __init__(self, fusion: Fusion, reference: TensorView) -> None:
        self.fusion = fusion
        self.reference = reference
        self._matcher = AxisMatcher(AxisGraph(fusion), reference)
        types = {
            a.number: PT.serial if a.ptype is PT.vectorize else a.ptype
            for a in reference.domain.loop
        }
        self._replay = LoopReplay(reference.domain, types)
        self._concrete = {a.number for a in reference.domain.logical if not a.is_broadcast}

    def repeat(self, tv: TensorView, *, only: frozenset[int] | None = None) -> bool:
        """Copies the reference tensor's loops to `tv`, and returns whether this was possible.

        Without `only`, `tv` must have all axes of the reference tensor and no others; broadcast
        axes are ignored. With `only` (ids of logical axes of the reference tensor), `tv` must have
        exactly these axes. Otherwise `tv` is unchanged. A vector axis of the reference tensor
        becomes serial.
        """
        if tv is self.reference:
            return True
        matches = self._matcher.matches(tv.domain)
        wanted = self._concrete if only is None else only
        have = {n for n, a in matches.items() if not a.is_broadcast or n not in self._concrete}
        mine = {a.number for a in tv.domain.logical if not a.is_broadcast}
        matched = {matches[n].number for n in wanted if n in matches}
        if not wanted <= have or not mine <= matched:
            return False
        usable = {n: a for n, a in matches.items() if n in wanted or not a.is_broadcast}
        self._replay.apply(tv, usable if only is None else _only(matches, only))
        return True

    def repeat_along(self, tv: TensorView, axes: frozenset[int]) -> None:
        """Copies the loops over some axes of the reference tensor (the tensor whose loops all
        others copy) to the tensor `tv`.

        `axes` are the numbers (ids) of these logical axes. The other axes of `tv` become loops
        inside of the copied loops.
        """
        self._replay.apply(tv, _only(self._matcher.matches(tv.domain), axes))

    def inline_whole(self, tv: TensorView) -> None:
        """Inlines a tensor completely, so that its consumers compute its elements where they read
        them.
        """
        tv.compute_at = len(tv.domain.loop)


def _only(matches: Mapping[int, IterDomain], only: frozenset[int]) -> dict[int, IterDomain]:
    return {n: a for n, a in matches.items() if n in only}


def vectorize_last(tv: TensorView) -> None:
    """Makes the innermost loop of a tensor one vector access."""
    tv.parallelize_axis(tv.domain.loop[-1], PT.vectorize)


def is_direct_input(access: Access) -> bool:
    """Returns whether an input is read at the index of its consumers, so that it can be loaded
    early.

    Returns False for outputs, for inputs that are read through views, and for inputs that are read
    at indices which are data.
    """
    return not access.is_output and bool(access.order)


def intermediates(fusion: Fusion, fixed: Iterable[TensorView]) -> list[TensorView]:
    """Returns the tensors that are neither inputs nor outputs, without those in `fixed`."""
    skip = {*fusion.inputs, *fusion.outputs, *fixed}
    return [tv for tv in fusion.tensors() if tv not in skip]
