"""Memory layout: the elements of a tensor that memory holds, their order and their strides.

Memory holds no reduction axes, and one element along a broadcast axis. An expanded axis has stride
0: its element is written once and read at every index. Allocation, kernels, communication, views
and checks of inputs all use this module. Functions take extents as an argument, because the extents
of the whole tensor and of the part that one device stores differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain, numbers
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

MemoryOrder = tuple[tuple[int, bool | None], ...]
"""(logical position without reductions, contiguity), outermost in memory first."""


def is_stored(axis: IterDomain) -> bool:
    """Returns whether memory holds all elements along an axis.

    Memory holds one element along a broadcast axis, and has no reduction axes.
    """
    return not (axis.is_broadcast or axis.is_reduction())


def expanded_positions(tv: TensorView) -> tuple[int, ...]:
    """Returns the positions of the axes that are expanded: broadcast axes that are read repeatedly.

    Reduction axes are not counted.
    """
    axes = enumerate(tv.domain.no_reductions)
    return tuple(p for p, a in axes if a.is_broadcast and a.expanded is not None)


def memory_order(tv: TensorView) -> MemoryOrder:
    """Returns pairs (position, contiguity flag) of a tensor's axes, outermost in memory first.

    There is one pair per axis that users see, even if the axis is split over devices or streams.
    Reduction axes are not counted. The flag is True if there is no gap between neighbours along the
    axis, and None for a broadcast axis.

    Raises:
        UnsupportedError: the declared memory order is not an order of the axes that users see.
    """
    try:
        return tv.domain.memory_order
    except UnsupportedError as error:
        raise UnsupportedError(f"{tv}: {error}") from None


def set_memory_order(tv: TensorView, order: Sequence[int]) -> None:
    """Declares the order of a tensor's axes in memory, without gaps.

    `order` has positions of axes, outermost first. Reduction axes are not counted.
    """
    axes = [tv.domain.no_reductions[p] for p in order]
    reductions = [a for a in tv.domain.logical if a.is_reduction()]
    tv.set_allocation_domain([*axes, *reductions], True)


def copy_memory_order(source: TensorView, tv: TensorView) -> None:
    """Gives `tv` the order of axes in memory, and the gaps, that `source` declares.

    Both tensors have the same axes.
    """
    if source.domain.allocation or not is_contiguous(source):
        order = memory_order(source)
        axes = numbers(tv.domain.no_reductions[p] for p, _ in order)
        tv.domain = tv.domain.with_allocation(axes, [flag for _, flag in order])


def is_contiguous(tv: TensorView) -> bool:
    """Returns whether the tensor is declared without gaps in memory, in any order of its axes."""
    return all(flag is not False for flag in tv.domain.contiguity)


def elements(tv: TensorView, extents: Iterable[Scalar] | None = None) -> Scalar:
    """Returns the number of elements of a tensor that memory holds.

    `extents` has one entry per axis that is not reduced, such as the extents of the part that one
    device stores. By default, the extents are those of the whole tensor.
    """
    axes = tv.domain.no_reductions
    sizes = (a.size for a in axes) if extents is None else extents
    return sc.product(n for a, n in zip(axes, sizes, strict=True) if is_stored(a))


def dense_strides(tv: TensorView, extents: Sequence[Scalar]) -> tuple[Scalar, ...]:
    """Returns the strides of a tensor with these extents, without gaps.

    The axes have the order in memory that `tv` declares. `extents` and the result have one entry
    per axis that is not reduced. The stride of an expanded axis is 0.
    """
    axes = tv.domain.no_reductions
    sizes = {a.number: n for a, n in zip(axes, extents, strict=True)}
    order = [(axes[p], True) for p, _ in memory_order(tv)]
    strides = _strides(order, lambda a: sizes[a.number], _no_gaps)
    return tuple(sc.ZERO if a.expanded is not None else strides[a.number] for a in axes)


def known_strides(tv: TensorView, extents: Sequence[Scalar]) -> tuple[Scalar, ...]:
    """Returns the strides of a tensor with these extents, with symbols for unknown strides.

    The stride of an axis is unknown if the tensor is declared with possible gaps between neighbours
    along this axis. `extents` and the result have one entry per axis that is not reduced.
    """
    axes = tv.domain.no_reductions
    sizes = {a.number: n for a, n in zip(axes, extents, strict=True)}
    order = [(axes[p], flag) for p, flag in memory_order(tv)]

    def gap(axis: IterDomain) -> Scalar:
        return sc.Symbol(f"stride{tv.number}_{axis.number}", sc.ONE.dtype, lo=0)

    strides = _strides(order, lambda a: sizes[a.number], gap)
    return tuple(sc.ZERO if a.expanded is not None else strides[a.number] for a in axes)


def dense_strides_of(tv: TensorView, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor with these sizes, without gaps.

    The axes have the order in memory that `tv` declares. `dense_strides` does the same for symbolic
    sizes. This function is faster.
    """
    strides, step = [0] * len(sizes), 1
    try:
        rule = tv.domain.dense_rule
    except UnsupportedError as error:
        raise UnsupportedError(f"{tv}: {error}") from None
    for p, is_expanded, is_kept in rule:
        strides[p] = 0 if is_expanded else step
        if is_kept:
            step *= sizes[p]
    return tuple(strides)


def lies_in_order(tv: TensorView) -> bool:
    """Returns whether memory holds all elements of the tensor in the order of its axes (row-major).

    If such a tensor has no gaps, it is contiguous in torch's sense, for any sizes.
    """
    try:
        rule = tv.domain.dense_rule
    except UnsupportedError:
        return False
    return tuple(rule) == tuple((p, False, True) for p in reversed(range(tv.ndim)))


def memory_strides(
    tv: TensorView, size: Callable[[IterDomain], Scalar], gap: Callable[[IterDomain], Scalar]
) -> tuple[tuple[IterDomain, Scalar], ...]:
    """Returns (axis, stride in elements) of the axes that memory holds, outermost first.

    `size` returns the size of an axis. `gap` returns the stride of an axis with gaps between
    neighbours. The stride of any other axis is the stride of the next inner axis times the size of
    that axis.
    """
    domain = tv.domain
    order = list(zip(domain.maybe_allocation, domain.contiguity, strict=True))
    strides = _strides(order, size, gap)
    return tuple((a, strides[a.number]) for a, _ in order if is_stored(a))


def _strides(
    order: Sequence[tuple[IterDomain, bool | None]],
    size: Callable[[IterDomain], Scalar],
    gap: Callable[[IterDomain], Scalar],
) -> dict[int, Scalar]:
    """Returns the stride of every axis, by axis number.

    `order` has (axis, contiguity flag), outermost in memory first. If the flag is False, `gap`
    returns the stride of the axis. `size` returns the size of an axis. Memory does not hold a
    broadcast or reduction axis. Such an axis gets the stride that torch gives an axis of size 1.
    """
    strides: dict[int, Scalar] = {}
    step: Scalar = sc.ONE
    for axis, is_contiguous in reversed(order):
        if not is_stored(axis):
            strides[axis.number] = step
            continue
        strides[axis.number] = gap(axis) if is_contiguous is False else step
        step = sc.mul(strides[axis.number], size(axis))
    return strides


def _no_gaps(axis: IterDomain) -> Scalar:
    """Raises `AssertionError`: a placeholder for the argument `gap` of `_strides`.

    `gap` returns the stride of an axis with gaps. For a tensor without gaps, this function is
    passed. It is never called, unless there is an error in this project.
    """
    raise AssertionError(
        f"internal error: axis {axis} is declared non-contiguous, but its tensor has no gaps in "
        "memory. Please report this definition"
    )


# ----------------------------------------------------------------------
# Layout classes: the strides of actual tensors, in the terms of a tensor domain.
#
# A kernel is compiled for one class: a memory order of the axes, and which of them are contiguous.
# The strides of the actual tensors decide, not the user's declaration. One definition therefore
# accepts every layout.

Layout = tuple[tuple[int, ...], tuple[bool, ...]]
"""Axes that are no reductions: (order, outermost in memory first; contiguity in that order)."""


def layout_of(
    declared: Sequence[int], skipped: Sequence[bool], shape: Sequence[int], strides: Sequence[int]
) -> Layout:
    """Returns the layout class of a tensor with these sizes and strides, without reduction axes.

    A kernel is compiled for one layout class: an order of the axes in memory, and one flag per axis
    that says whether there are no gaps along it. `declared` is the memory order that the user
    declared. The class has this order unless the strides contradict it. Strides of axes of size 1
    are arbitrary and therefore ignored: they must not lead to new classes. `skipped` marks
    broadcast axes. Their flag, and that of axes of size 1, is True.
    """
    real = [k for k in declared if shape[k] != 1 and not skipped[k]]
    order = list(declared)
    steps = [strides[k] for k in real]
    # An axis of stride 0 is outermost; axes of equal strides keep their order.
    if any(a < b for a, b in pairwise(steps)) or 0 in steps:
        moved = iter(sorted(real, key=lambda k: -strides[k] if strides[k] else -(1 << 62)))
        places = set(real)
        order = [next(moved) if k in places else k for k in declared]
    flags: dict[int, bool] = {}
    dense = 1
    for k in reversed(order):
        if skipped[k] or shape[k] == 1:
            flags[k] = True
            continue
        flags[k] = strides[k] == dense
        dense = strides[k] * shape[k]
    return tuple(order), tuple(flags[k] for k in order)


def declared_order(tv: TensorView) -> tuple[int, ...] | None:
    """Returns the positions of a tensor's axes in the declared memory order, outermost first.

    Reduction axes are not counted. Returns None if the declared order has axes that users do not
    see, such as parts of a split axis.
    """
    try:
        return tuple(p for p, _ in memory_order(tv))
    except UnsupportedError:
        return None


class LayoutClasses:
    """Computes the layout classes of the tensors that calls pass for the input `tv`.

    A layout class is an order of axes in memory and one flag per axis that says whether there are
    no gaps along it. Each class needs its own kernel.
    """

    def __init__(self, tv: TensorView) -> None:
        # None if the class is always the same, because the allocation domain fixes it.
        self.order = declared_order(tv)
        self._skipped = [a.is_broadcast for a in tv.domain.no_reductions]
        is_plain = self.order == tuple(range(tv.ndim)) and not any(self._skipped)
        # The class of contiguous tensors, None if it depends on their sizes.
        self.dense: Layout | None = (self.order or (), (True,) * tv.ndim) if is_plain else None

    def layout_of(self, t: torch.Tensor | StridedLayout) -> Layout:
        """Returns the layout class of a tensor that a call passes, for which a kernel is compiled.

        The class depends on the strides of the tensor. The exception is an input whose declared
        memory order has axes that users do not see, such as parts of a split axis. All tensors that
        are passed for such an input have the same class.
        """
        if self.dense is not None and t.is_contiguous() and t.numel():
            return self.dense
        return (
            ((), ())
            if self.order is None
            else layout_of(self.order, self._skipped, t.shape, t.stride())
        )

    def repeated(self, t: torch.Tensor) -> tuple[int, ...]:
        """Returns the positions of the axes along which the elements of tensor `t` are repeated.

        These axes have stride 0, because the caller expanded the tensor in torch, and memory holds
        one element along them. Axes that the definition declares as broadcast axes are not
        included.
        """
        if t.is_contiguous():
            return ()
        known = enumerate(zip(self._skipped, t.shape, t.stride(), strict=True))
        return tuple(k for k, (skipped, n, step) in known if n > 1 and not step and not skipped)


def stored_part(tv: TensorView, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of `tensor` in which no element is repeated: one view element per element of
    memory.

    Along an axis that `tv`, the declaration of the tensor, expands, the view has one element.
    """
    for axis in expanded_positions(tv):
        tensor = tensor.narrow(axis, 0, min(tensor.size(axis), 1))
    return tensor


def with_layout(domain: TensorDomain, layout: Layout) -> TensorDomain:
    """Returns a copy of the domain with the order of axes in memory and the gaps of `layout`."""
    axes = domain.no_reductions
    order, flags = layout
    by_number = {
        axes[k].number: None if axes[k].is_broadcast else flag
        for k, flag in zip(order, flags, strict=True)
    }
    if order == tuple(range(len(axes))):
        contiguity = tuple(by_number.get(a.number) for a in domain.logical)
        return domain.with_allocation((), contiguity)
    reduced = (a.number for a in domain.logical if a.is_reduction())
    allocation = (*reduced, *(axes[k].number for k in order))
    return domain.with_allocation(allocation, map(by_number.get, allocation))
