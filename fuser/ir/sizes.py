"""Sizes: the extents of a tensor, compared as torch compares shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import Any, SupportsIndex, cast, overload

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.ir.statement import Values
from fuser.support.arguments import python_number, show
from fuser.support.errors import ArgumentError, user_code, user_line


class Sizes(Values[Scalar]):
    """The extents of a tensor; users also call it (`Values`).

    `x.shape == (4, 5)` and `4 in x.shape` compare values, with tuples and lists of numbers and of
    extents. They raise `ArgumentError` where the answer is known only while a program runs.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType] (as of every list)

    def __call__(self, *dims: object) -> Sizes:
        if dims:
            raise ArgumentError(
                f"shape() takes no axis, got {show(dims[0])}: write x.shape[{show(dims[0])}], or "
                f"x.size({show(dims[0])}){user_code(user_line())}"
            )
        return Sizes(self)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Scalar: ...
    @overload
    def __getitem__(self, key: slice) -> Sizes: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Scalar | Sizes:
        if isinstance(key, slice):
            return Sizes(super().__getitem__(key))
        return super().__getitem__(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple):
            return NotImplemented
        others = [*cast("Sequence[object]", other)]
        if len(self) != len(others):
            return False
        found = [_is_same(a, b) for a, b in zip(self, others, strict=True)]
        if None in found and False not in found:
            raise _unknown(self, f"equal to {show(others)}")
        return False not in found

    def __ne__(self, other: object) -> bool:
        found = self.__eq__(other)
        return found if found is NotImplemented else not found

    def __contains__(self, value: object) -> bool:
        found = [_is_same(a, value) for a in self]
        if None in found and True not in found:
            raise _unknown(self, f"without or with {show(value)}")
        return True in found

    def count(self, value: Any) -> int:
        found = [_is_same(a, value) for a in self]
        if None in found:
            raise _unknown(self, f"without or with {show(value)}")
        return found.count(True)

    def index(self, value: Any, start: SupportsIndex = 0, stop: SupportsIndex = maxsize) -> int:
        for k in range(len(self))[slice(start, stop)]:
            is_same = _is_same(self[k], value)
            if is_same is None:
                raise _unknown(self, f"without or with {show(value)}")
            if is_same:
                return k
        raise ValueError(f"{value} is not in the list")


def _is_same(size: Scalar, other: object) -> bool | None:
    """Return whether an extent is equal to a value, None where only a run knows it."""
    if size is other:
        return True
    value = other if isinstance(other, Scalar) else python_number(other)
    if value is None or (isinstance(value, int) and value < 0):
        return False
    condition = sc.eq(size, value)
    return bool(condition.value) if isinstance(condition, Const) else None


def _unknown(sizes: Iterable[Scalar], what: str) -> ArgumentError:
    return ArgumentError(
        f"the shape {show(list(sizes))} is neither {what} nor not while a program is defined (at "
        f"{user_line()}): the extents of inputs are known when it runs; give define_tensor "
        "constant extents (fd.from_pytorch(x, static_sizes=True)), compare len(x.shape) or x.ndim, "
        "or read single sizes in the program: where(x.shape[0] == n, a, b)"
    )
