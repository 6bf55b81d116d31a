"""The layout of a tensor in memory (shape, strides and alignment), without a torch tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, overload

from fuser.support.device import VECTOR_BYTES

if TYPE_CHECKING:
    import torch


class StridedLayout:
    """Shape, strides and alignment of a tensor, with the query methods of `torch.Tensor`.

    Objects of this class replace tensors on torch's meta device, whose creation takes ten times as
    long. Alignment is measured against VECTOR_BYTES, the size of the widest vector access.

    - `itemsize`: the bytes of one element.
    - `skipped`: the distance in elements from the last address that is a multiple of VECTOR_BYTES
      to the first element. It is 0 if the first element is aligned.
    - `span`: the number of elements of memory from the first to the last element, both included.
    - `is_plain`: whether the tensor is contiguous and its first element is at a multiple of
      VECTOR_BYTES.
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
    def of(t: torch.Tensor, skipped: int) -> StridedLayout:
        """Returns the layout of a torch tensor.

        `skipped` is the distance in elements from the last aligned address to the first element. An
        aligned address is a multiple of VECTOR_BYTES, the size of the widest vector access.
        """
        shape, strides, is_contiguous = t.shape, t.stride(), t.is_contiguous()
        span = t.numel() if is_contiguous else _span(shape, strides)
        return StridedLayout(shape, strides, t.element_size(), span, is_contiguous, skipped)

    @staticmethod
    def with_strides(
        shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, skipped: int = 0
    ) -> StridedLayout:
        """Returns the layout of a tensor with this shape and these strides, in elements.

        `itemsize` is the number of bytes of one element. `skipped` is the distance in elements from
        the last aligned address to the first element. An aligned address is a multiple of
        VECTOR_BYTES, the size of the widest vector access.
        """
        is_contiguous, dense = True, 1
        for n, step in zip(reversed(shape), reversed(strides), strict=True):
            is_contiguous = is_contiguous and (n == 1 or step == dense)
            dense *= n
        return StridedLayout(
            shape, strides, itemsize, _span(shape, strides), is_contiguous, skipped
        )

    def viewed(self, shape: tuple[int, ...], strides: tuple[int, ...], shift: int) -> StridedLayout:
        """Returns the layout of a view of this tensor with another shape and other strides.

        The view begins `shift` elements after the first element of this tensor.
        """
        skipped = (self._skipped + shift) % (VECTOR_BYTES // self._itemsize)
        return StridedLayout.with_strides(shape, strides, self._itemsize, skipped)

    @property
    def ndim(self) -> int:
        """The number of axes of the tensor."""
        return len(self.shape)

    def dim(self) -> int:
        """Returns the number of axes of the tensor, as `torch.Tensor.dim` does."""
        return len(self.shape)

    def numel(self) -> int:
        """Returns the number of elements of the tensor."""
        return self.span if self._is_contiguous else prod(self.shape)

    def size(self, axis: int) -> int:
        """Returns the number of elements along an axis."""
        return self.shape[axis]

    @overload
    def stride(self) -> tuple[int, ...]:
        """Returns the strides of all axes, in elements."""

    @overload
    def stride(self, axis: int) -> int:
        """Returns the stride of axis `axis`, in elements."""

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """Returns the stride of axis `axis`, or all strides if it is None, in elements."""
        return self._strides if axis is None else self._strides[axis]

    def is_contiguous(self) -> bool:
        """Returns whether the elements are row-major and without gaps."""
        return self._is_contiguous

    def element_size(self) -> int:
        """Returns the size of one element in bytes."""
        return self._itemsize

    def nbytes(self) -> int:
        """Returns the bytes of memory from the first to the last element, both included."""
        return self.span * self._itemsize

    def storage_offset(self) -> int:
        """Returns the distance in elements from the last aligned address to the first element.

        An aligned address is a multiple of VECTOR_BYTES, the size of the widest vector access.
        """
        return self._skipped

    def view(self, shape: Sequence[int]) -> StridedLayout:
        """Checks that the tensor can be viewed with another shape, in which one size may be -1.

        Returns this layout and not the layout of the view, because callers only check that the view
        exists.

        Raises:
            RuntimeError: the view does not exist. torch raises the same error.
        """
        if self._is_contiguous:
            return self
        if -1 in shape:
            rest = -prod(shape)
            shape = [self.numel() // rest if n == -1 else n for n in shape]
        if viewed_strides(self.shape, self._strides, shape) is None:
            raise RuntimeError(
                f"a tensor of shape {self.shape} and strides {self._strides} cannot be viewed with "
                f"shape {tuple(shape)}"
            )
        return self

    def squeeze(self, axis: int) -> StridedLayout:
        """Returns the layout of a view without axis `axis`, which must have one element."""
        shape, strides = list(self.shape), list(self._strides)
        assert shape.pop(axis) == 1, f"axis {axis} has more than one element"
        del strides[axis]
        return self.viewed(tuple(shape), tuple(strides), 0)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor of this shape without gaps, in elements."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def viewed_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the strides with which the memory of a tensor can be viewed with shape `wanted`.

    `shape` and `strides` describe the tensor. Returns None if no strides express the view; then
    `torch.Tensor.view` fails, too. The strides of axes with one element are arbitrary.
    """
    if prod(shape) != prod(wanted):
        return None
    if tuple(strides) == dense_strides(shape):
        return dense_strides(wanted)
    # (number, distance) of elements at equal distances, innermost first; adjacent axes are joined.
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
