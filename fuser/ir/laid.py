"""How a tensor lies in memory, without memory: what a kernel's launch asks of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, overload

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
        """Return how a tensor lies."""
        shape, strides, is_contiguous = t.shape, t.stride(), t.is_contiguous()
        span = t.numel() if is_contiguous else _span(shape, strides)
        return Laid(shape, strides, t.element_size(), span, is_contiguous, skipped)

    @staticmethod
    def with_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Laid:
        """Return how elements lie with these strides."""
        is_contiguous, dense = True, 1
        for n, step in zip(reversed(shape), reversed(strides), strict=True):
            is_contiguous = is_contiguous and (n == 1 or step == dense)
            dense *= n
        return Laid(shape, strides, itemsize, _span(shape, strides), is_contiguous)

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
        """Return all strides, or the one of an axis, in elements."""
        return self._strides if axis is None else self._strides[axis]

    def is_contiguous(self) -> bool:
        return self._is_contiguous

    def element_size(self) -> int:
        return self._itemsize

    def nbytes(self) -> int:
        """Return the bytes from the first element to past the last one."""
        return self.span * self._itemsize

    def storage_offset(self) -> int:
        return self._skipped

    def view(self, shape: Sequence[int]) -> Laid:
        """Say that there is a view of another shape: this returns no such view.

        Raises `RuntimeError`, as torch does, where one cannot tell.
        """
        del shape
        if not self._is_contiguous:
            raise RuntimeError("only what is contiguous can be seen with any shape")
        return self


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
