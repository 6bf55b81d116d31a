"""Ops that this version does not implement: calling one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fuser.arguments import show
from fuser.ops.building import unsupported


def not_implemented(name: str) -> Callable[..., NoReturn]:
    """Return the function of an op that is known by name only."""

    def function(*args: object, **kwargs: object) -> NoReturn:
        operands = ", ".join(map(show, (*args, *kwargs.values())))
        raise unsupported(name, f"not implemented yet, called with ({operands})")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raise `UnsupportedError`: `{name}` is not implemented yet."
    return function
