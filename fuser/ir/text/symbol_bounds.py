"""The lower bounds of the symbols of a program's text, which no line of it spells."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fuser.ir.text.tokens import AXIS, NAME

_EXTENT = re.compile(AXIS.pattern + r"(?:[^{}]* ex )?([A-Za-z_]\w*)\}")
_EQUAL = re.compile(r"^ +([A-Za-z_]\w*) = ", re.MULTILINE)
_INPUTS = re.compile(r"Inputs:(.*?)Outputs:|%HostIrContainer\s*\{\s*\((.*?)\)\s*->", re.DOTALL)


def definition_bounds(text: str) -> dict[str, int | None]:
    """Return the lower bounds of the symbols in a definition's text: its extents may be 0."""
    return _bounds(text, _scalar_inputs(text), extent=0)


def concretized_bounds(text: str) -> dict[str, int | None]:
    """Return the lower bounds of the symbols in a concretized program's text.

    No extent is 0 there, also where it is a scalar input; other scalar inputs are unbounded.
    """
    extents = {m[4] for m in _EXTENT.finditer(text)} | {m[1] for m in _EQUAL.finditer(text)}
    unbounded = [name for name in _scalar_inputs(text) if name not in extents]
    return _bounds(text, unbounded, extent=1)


def _bounds(text: str, unbounded: Iterable[str], *, extent: int) -> dict[str, int | None]:
    return {**dict.fromkeys(NAME.findall(text), extent), **dict.fromkeys(unbounded)}


def _scalar_inputs(text: str) -> list[str]:
    """Return the names among the inputs of a fusion or a host program that are no tensors."""
    found = _INPUTS.search(text)
    inputs = re.sub(r"\[[^\]]*\]", "", found[1] or found[2] or "") if found else ""
    return NAME.findall(inputs)
