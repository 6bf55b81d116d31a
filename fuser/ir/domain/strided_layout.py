"""How a tensor lies in memory, without memory: what a kernel's launch asks of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, overload

from fuser.support.device import VECTOR_BYTES

if TYPE_CHECKING:
    import torch


class Laid:
    """Stands for a tensor with elements where only its sizes, strides and alignment count, as one
    on torch's meta device would, which takes ten times as long to make.

    `skipped` counts elements from a multiple of VECTOR_BYTES to the first one, `span` those from
    the first to past the last one in memory. What has no gaps and skips nothing is *plain*.
    """

    __slots__ = ("_is_contiguous", "_itemsize", "_skipped", "_strides", "is_plain", "shape", "span")

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        span: int,
        is_contiguous: bool,
        skipped: int = 0,
    ) -> None:
        self.shape, self._strides, self._itemsize = shape, strides, itemsize
        self.span, self._is_contiguous, self._skipped = span, is_contiguous, skipped
        self.is_plain = is_contiguous and not skipped

    @staticmethod
    def of(t: torch.Tensor, skipped: int) -> Laid:
        """Returns how a tensor lies."""
        shape, strides, is_contiguous = t.shape, t.stride(), t.is_contiguous()
        span = t.numel() if is_contiguous else _span(shape, strides)
        return Laid(shape, strides, t.element_size(), span, is_contiguous, skipped)

    @staticmethod
    def with_strides(
        shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, skipped: int = 0
    ) -> Laid:
        """Returns how elements lie with these strides."""
        is_contiguous, dense = True, 1
        for n, step in zip(reversed(shape), reversed(strides), strict=True):
            is_contiguous = is_contiguous and (n == 1 or step == dense)
            dense *= n
        return Laid(shape, strides, itemsize, _span(shape, strides), is_contiguous, skipped)

    def seen(self, shape: tuple[int, ...], strides: tuple[int, ...], shift: int) -> Laid:
        """Returns how a view lies that begins so many elements behind this."""
        skipped = (self._skipped + shift) % (VECTOR_BYTES // self._itemsize)
        return Laid.with_strides(shape, strides, self._itemsize, skipped)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.span if self._is_contiguous else prod(self.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    @overload
    def stride(self) -> tuple[int, ...]: ...

    @overload
    def stride(self, axis: int) -> int: ...

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """Returns all strides, or the one of an axis, in elements."""
        return self._strides if axis is None else self._strides[axis]

    def is_contiguous(self) -> bool:
        return self._is_contiguous

    def element_size(self) -> int:
        return self._itemsize

    def nbytes(self) -> int:
        """Returns the bytes from the first element to past the last one."""
        return self.span * self._itemsize

    def storage_offset(self) -> int:
        return self._skipped

    def view(self, shape: Sequence[int]) -> Laid:
        """Says that there is a view of another shape, of which one axis may be -1: this returns no
        such view.

        Raises `RuntimeError`, as torch does, where there is none.
        """
        if self._is_contiguous:
            return self
        if -1 in shape:
            rest = -prod(shape)
            shape = [self.numel() // rest if n == -1 else n for n in shape]
        if viewed_strides(self.shape, self._strides, shape) is None:
            raise RuntimeError(f"no view of {self.shape} has the shape {tuple(shape)}")
        return self

    def squeeze(self, axis: int) -> Laid:
        """Returns the view without an axis of one element."""
        shape, strides = list(self.shape), list(self._strides)
        assert shape.pop(axis) == 1, f"axis {axis} has more than one element"
        del strides[axis]
        return self.seen(tuple(shape), tuple(strides), 0)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of elements that lie one behind the other, the last axis innermost."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def viewed_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the strides of a view of another shape, those of axes of one element as may be; None
    where there is no such view."""
    if prod(shape) != prod(wanted):
        return None
    if tuple(strides) == dense_strides(shape):
        return dense_strides(wanted)
    # Elements at one distance from one another: how many, and the distance; innermost first.
    runs: list[tuple[int, int]] = []
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and runs and step == runs[-1][0] * runs[-1][1]:
            runs[-1] = runs[-1][0] * n, runs[-1][1]
        elif n > 1:
            runs.append((n, step))
    made: list[int] = []
    left = step = 1
    for n in reversed(wanted):
        if left == 1 and n > 1:
            left, step = runs.pop(0)
        if left % n:
            return None
        made.append(step)
        left, step = left // n, step * n
    return tuple(reversed(made))


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
