"""Layout classes: what the strides of actual tensors say, in the terms of a tensor domain.

A kernel is made for a class: the memory order of the axes and which of them are contiguous. Strides
of actual tensors decide, not the user's declaration, so one definition serves every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fuser.ir.domain.strided_layout import Laid
from fuser.ir.domain.tensor_domain import TensorDomain
from fuser.ir.memory_layout import expanded_positions, memory_order
from fuser.ir.tensor import TensorView
from fuser.support.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Layout = tuple[tuple[int, ...], tuple[bool, ...]]
"""Axes that are no reductions: (order, outermost in memory first; contiguity in that order)."""


def layout_of(
    declared: Sequence[int], skipped: Sequence[bool], shape: Sequence[int], strides: Sequence[int]
) -> Layout:
    """Return the layout class of a tensor.

    `declared` is the memory order of the definition; it is kept where the strides allow it, so that
    axes of extent 1 do not make new classes. `skipped` marks broadcast axes, whose flag is True.
    """
    real = [k for k in declared if shape[k] != 1 and not skipped[k]]
    order = list(declared)
    steps = [strides[k] for k in real]
    # A repeated axis (stride 0) is outside of everything; equal strides keep their order.
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
    """Return the axes of a tensor, reductions left out, in declared memory order; None where the
    allocation domain holds other axes than logical ones."""
    try:
        return tuple(p for p, _ in memory_order(tv))
    except UnsupportedError:
        return None


class LayoutClasses:
    """The layout classes of the tensors that one declaration stands for."""

    def __init__(self, tv: TensorView) -> None:
        # None where the class is always the same: the user declared how it lies.
        self.order = declared_order(tv)
        self._skipped = [a.is_broadcast for a in tv.domain.no_reductions]
        is_plain = self.order == tuple(range(tv.ndim)) and not any(self._skipped)
        # That of contiguous tensors, None where it follows from their sizes.
        self.dense: Layout | None = (self.order or (), (True,) * tv.ndim) if is_plain else None

    def layout_of(self, t: torch.Tensor | Laid) -> Layout:
        """Return the layout class of a tensor."""
        if self.dense is not None and t.is_contiguous() and t.numel():
            return self.dense
        return (
            ((), ())
            if self.order is None
            else layout_of(self.order, self._skipped, t.shape, t.stride())
        )

    def repeated(self, t: torch.Tensor) -> tuple[int, ...]:
        """Return the axes along which a tensor is one element, though the definition does not say
        so."""
        if t.is_contiguous():
            return ()
        known = enumerate(zip(self._skipped, t.shape, t.stride(), strict=True))
        return tuple(k for k, (skipped, n, step) in known if n > 1 and not step and not skipped)


def stored_part(tv: TensorView, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor that memory holds: one element along expanded axes."""
    for axis in expanded_positions(tv):
        tensor = tensor.narrow(axis, 0, min(tensor.size(axis), 1))
    return tensor


def with_layout(domain: TensorDomain, layout: Layout) -> TensorDomain:
    """Return the domain with the allocation order and contiguity of a layout class."""
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
