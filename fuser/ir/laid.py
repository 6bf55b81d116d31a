"""How a tensor lies in memory, without memory: what a kernel's launch asks of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import torch


class Laid:
    """Stands for a tensor where only its sizes, strides and alignment count, as one on torch's meta
    device would, which takes ten times as long to make.

    `skipped` counts elements from a multiple of VECTOR_BYTES to the first one.
    """

    __slots__ = ("_is_contiguous", "_itemsize", "_numel", "_skipped", "_strides", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        *,
        numel: int,
        is_contiguous: bool,
        skipped: int = 0,
    ) -> None:
        self.shape, self._strides, self._itemsize = shape, strides, itemsize
        self._numel, self._is_contiguous, self._skipped = numel, is_contiguous, skipped

    @staticmethod
    def of(t: torch.Tensor, skipped: int) -> Laid:
        """Return how a tensor lies."""
        numel, is_contiguous = t.numel(), t.is_contiguous()
        return Laid(
            t.shape,
            t.stride(),
            t.element_size(),
            numel=numel,
            is_contiguous=is_contiguous,
            skipped=skipped,
        )

    @staticmethod
    def dense(shape: tuple[int, ...], itemsize: int) -> Laid:
        """Return how elements lie one behind the other, the last axis innermost."""
        strides, step = [0] * len(shape), 1
        for axis in range(len(shape) - 1, -1, -1):
            strides[axis] = step
            step *= shape[axis]
        return Laid(shape, tuple(strides), itemsize, numel=step, is_contiguous=True)

    @staticmethod
    def with_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Laid:
        """Return how elements lie with these strides."""
        like = Laid.dense(shape, itemsize)
        steps = zip(shape, strides, like._strides, strict=True)
        is_contiguous = all(n == 1 or step == dense for n, step, dense in steps)
        return Laid(shape, strides, itemsize, numel=like._numel, is_contiguous=is_contiguous)

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

    def nbytes(self) -> int:
        """Return the bytes from the first element to past the last one."""
        if self._is_contiguous:
            return self._numel * self._itemsize
        last = sum((n - 1) * step for n, step in zip(self.shape, self._strides, strict=True))
        return (last + 1) * self._itemsize

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
