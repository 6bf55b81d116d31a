"""What the fields of host ops take: a value of another kind is refused when an op is made."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fuser.errors import ArgumentError
from fuser.ir.core import Op
from fuser.ir.scalar import Scalar, as_scalar
from fuser.ir.tensor import TensorView

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
    for name, kind, hint in _fields(type(op)):
        given: Any = getattr(op, name)
        value = _completed(given, kind, hint)
        if not _fits(value, hint):
            raise ArgumentError(
                f"{type(op).__name__}.{name}: expected {_words(hint)}, got {given!r}"
                + _advice(given, hint)
            )
        if value is not given:
            object.__setattr__(op, name, value)


def _completed(given: Any, kind: str, hint: Any) -> Any:
    if kind == "operand" and _is_number(given):
        return as_scalar(given)
    if get_origin(hint) is tuple and type(given) in (tuple, list):
        return tuple(as_scalar(v) if _is_number(v) else v for v in given)
    return given


@cache
def _fields(cls: type[Op]) -> tuple[tuple[str, str, Any], ...]:
    """Return (name, kind, type) of every field of an op class."""
    hints = get_type_hints(cls)
    return tuple(
        (f.name, f.metadata["kind"], hints[f.name])
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if "kind" in f.metadata
    )


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


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    return ""
