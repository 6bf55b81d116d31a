"""The base of host ops, and the check of their fields: a value of another kind is refused when an
op is made.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Scalar, Symbol, as_scalar
from fuser.support.arguments import show
from fuser.support.errors import ArgumentError
from hostir.ir.effects import (
    Effect,
)

# What every run binds: this rank, and how many streams the evaluator has.
RANK = Symbol("rank", DataType.Index, lo=0)
NUMBER_OF_STREAMS = Symbol("numberOfStreams", DataType.Index, lo=1)


class HostOp(Op):
    """Base of the ops of host programs."""

    # Spellings of earlier versions, which the parser still reads.
    OLDER: ClassVar[tuple[str, ...]] = ()
    # Whether the op makes those of its results that have no buffer.
    MAKES_RESULTS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        complete_fields(self)

    def effects(self) -> tuple[Effect, ...]:
        """Return what the op does, in order; regions speak for themselves."""
        raise NotImplementedError(f"{type(self).__name__} declares no effects")


# ------------------------------------------------------------------ fields
# How messages call a type; others go by their name.
_WORDS: dict[object, str] = {
    TensorView: "a tensor",
    Scalar: "a scalar or a number",
    type(None): "None",
}


def complete_fields(op: Op) -> None:
    """Put constants for Python numbers among the operands, and tuples for lists.

    Raises `ArgumentError` naming op and field for a value of a wrong kind.
    """
    for name, kind, hint, known in _fields(type(op)):
        given: Any = getattr(op, name)
        if type(given) in known:
            continue
        value = _completed(given, kind, hint)
        if not _fits(value, hint):
            words = _words(hint)
            raise ArgumentError(
                f"{type(op).__name__}.{name}: expected {words}, {_got(given, hint)}"
            )
        if value is not given:
            object.__setattr__(op, name, value)
        elif get_origin(hint) not in (tuple, Literal):
            known.add(cast("type[object]", type(given)))


def _completed(given: Any, kind: str, hint: Any) -> Any:
    if kind == "operand" and _is_number(given):
        return as_scalar(given)
    if get_origin(hint) is tuple and type(given) in (tuple, list):
        return tuple(as_scalar(v) if _is_number(v) else v for v in given)
    return given


@cache
def _fields(cls: type[Op]) -> tuple[tuple[str, str, Any, set[type[object]]], ...]:
    """Return (name, kind, type, classes that were found to fit) of every field of an op class."""
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Return what an annotation means; `get_type_hints` takes a millisecond per class."""
    return eval(text, vars(sys.modules[module]))


def _is_number(value: object) -> bool:
    # A comparison by `==` is a bool by accident.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: object, hint: Any) -> bool:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is tuple:
        return f"a tuple, each {_words(get_args(hint)[0])}"
    return _WORDS.get(hint) or str(hint.__name__)


def _got(given: object, hint: Any) -> str:
    """Return what was given instead; a tensor by name, its type below."""
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; a comparison of tensors has one answer per element: compare scalars"
    return ""
