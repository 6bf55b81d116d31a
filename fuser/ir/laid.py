"""How a tensor lies in memory, without memory: what a kernel's launch asks of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import overload


class Laid:
    """Stands for a tensor where only its sizes, strides and alignment count, as one on torch's meta
    device would, which takes ten times as long to make.

    `skipped` counts elements from a multiple of VECTOR_BYTES to the first one.
    """

    __slots__ = ("_is_contiguous", "_itemsize", "_numel", "_skipped", "_strides", "shape")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, skipped: int = 0
    ) -> None:
        self.shape = shape
        self._strides, self._itemsize, self._skipped = strides, itemsize, skipped
        self._numel = prod(shape)
        dense, self._is_contiguous = 1, True
        for n, step in zip(reversed(shape), reversed(strides), strict=False):
            if n != 1 and step != dense:
                self._is_contiguous = self._numel == 0
                break
            dense *= n

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self._numel

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
