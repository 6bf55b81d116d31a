"""Comparison of the text that a page shows with the text that programs printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate


def missing_lines(shown: str, printed: str) -> list[str]:
    """Returns the lines of a shown text that were not printed, in order; none if all were.

    The width of spaces does not count. A page may wrap lines: the text may also be, as a whole,
    some consecutive printed lines. `..` is any text: a line that ends in ` ..` may end early.
    """
    lines = [line for line in map(_words, printed.splitlines()) if line]
    if _is_some_lines(_words(shown), lines):
        return []
    return [line for line in filter(str.strip, shown.splitlines()) if not _is_among(line, lines)]


def _words(text: str) -> str:
    return " ".join(text.split())


def _is_some_lines(text: str, lines: Sequence[str]) -> bool:
    """Returns whether a text is consecutive lines, joined by spaces."""
    whole = " ".join(lines)
    begins = {0, *accumulate(len(line) + 1 for line in lines)}
    found = (match.start() for match in re.finditer(f"(?={re.escape(text)})", whole))
    return any(at in begins and at + len(text) + 1 in begins for at in found)


def _is_among(shown: str, lines: Sequence[str]) -> bool:
    text = _words(shown)
    pattern = ".*".join(map(re.escape, re.split(r" \.\.$|\.\.", text)))
    return text in lines or any(re.fullmatch(pattern, line) for line in lines)
