"""Base classes of values and ops, with nvFuser's names: Statement, Val and Expr.

Users test `isinstance(x, fuser.Val)`; nothing in the compiler depends on these classes. The module
also stores the fusion that is being defined, because values of all kinds need this fusion.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import repeat
from operator import is_
from sys import maxsize
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from fuser.support.errors import NoOperandError, counted

T = TypeVar("T")


class Statement(metaclass=ABCMeta):  # noqa: B024 (it is for isinstance alone)
    """Base class of the values and ops of a fusion. `str(x)` is the text of `x` in the IR."""

    __slots__ = ()


class Val(Statement):
    """Base class of the values of a fusion: tensors, scalars, axes, and domains of tensors."""

    __slots__ = ()


class Expr(Statement):
    """Base class of ops: `input(i)` returns operand i, and `output(i)` returns result i."""

    __slots__ = ()

    # Every registered class has these two methods.
    if TYPE_CHECKING:

        def input(self, index: int) -> Any:
            """Returns operand `index`.

            Raises:
                NoOperandError: the op has no such operand.
            """
            ...

        def output(self, index: int) -> Any:
            """Returns result `index`.

            Raises:
                NoOperandError: the op has no such result.
            """
            ...


class Values(list[T]):
    """A list that can also be called, as in nvFuser: `fusion.inputs()`, `tv.shape()`.

    `tv in fusion.outputs` compares tensors by identity, because `==` would add an op to the
    definition.
    """

    def __call__(self) -> Values[T]:
        """Returns a copy of the list, so that `fusion.inputs()` works as in nvFuser."""
        return Values(self)

    def __contains__(self, value: object) -> bool:
        if any(map(is_, self, repeat(value))):  # in C: lists of a thousand outputs are asked often
            return True
        return not isinstance(value, Val) and any(v == value for v in self)

    def index(self, value: Any, start: SupportsIndex = 0, stop: SupportsIndex = maxsize) -> int:
        """Returns the position of a value in the slice [start, stop) of the list.

        Tensors are compared by identity, because `==` would add an op to the definition.

        Raises:
            ValueError: the list does not contain the value.
        """
        places = range(len(self))[slice(start, stop)]
        found = next((k for k in places if self[k] is value or self[k] == value), None)
        if found is None:
            raise ValueError(f"{value} is not in the list of {counted(len(self), 'value')}")
        return found


def numbered(what: str, expr: object, values: Sequence[T], index: int) -> T:
    """Returns element `index` of `values`, the operands or results of the op `expr`.

    `what` is "input" or "output", for the message.

    Raises:
        NoOperandError: the op has no such operand or result. The error is also an `IndexError`.
    """
    if not 0 <= index < len(values):
        text = " ".join(str(expr).split())
        raise NoOperandError(
            f"{what}({index}) does not exist: {text} has {counted(len(values), what)}"
        )
    return values[index]


# The fusion that is being defined, None outside of definitions; `fuser.ir.fusion_guard` sets it.
ACTIVE_FUSION: ContextVar[Any] = ContextVar("active_fusion", default=None)


def is_defining() -> bool:
    """Returns whether the user is writing a definition, in which comparisons create ops."""
    return ACTIVE_FUSION.get() is not None
