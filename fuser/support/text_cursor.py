"""A position in a text that is parsed; its errors mark the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from fuser.support.errors import ParseError

T = TypeVar("T")
SPACE = re.compile(r"\s+")
# Spaces and comments; a line such as `// %kernel_math` is no comment, but closes a block.
_SKIPPED = re.compile(r"(?:\s+|//(?! %)[^\n]*)+")
_INT = re.compile(r"-?[0-9]+")
# What 64 bits hold: no extent, number or rank of a program is longer.
MAX_DIGITS = 19
# Names are numbered, and longest where a library's name stands in one.
MAX_NAME = 250


class Cursor:
    """A position in a text; every error it makes marks the line."""

    def __init__(self, text: str, pos: int = 0, end: int | None = None) -> None:
        self.text = text
        self.pos = pos
        self.end = len(text) if end is None else end
        # A position, and the lines before it: what does not fit is an error that is mostly dropped.
        self._counted = (0, 0)

    def fail(self, message: str, pos: int | None = None) -> ParseError:
        """Returns the error for a position (here by default), with the line and a caret under
        it."""
        at = self.pos if pos is None else pos
        start = self.text.rfind("\n", 0, at) + 1
        stop = self.text.find("\n", at)
        line = self.text[start : stop if stop >= 0 else len(self.text)]
        number = self._lines_before(at) + 1
        error = ParseError(
            f"line {number}, column {at - start + 1}: {message}\n  {line}\n  {' ' * (at - start)}^"
        )
        error.add_note(f"position {at}")
        return error

    def _lines_before(self, at: int) -> int:
        known, lines = self._counted
        if at >= known:
            lines += self.text.count("\n", known, at)
        else:
            lines -= self.text.count("\n", at, known)
        self._counted = (at, lines)
        return lines

    def skip(self) -> None:
        found = _SKIPPED.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()

    def at(self, word: str) -> bool:
        """Whether `word` comes next, after spaces."""
        self.skip()
        return self.text.startswith(word, self.pos) and self.pos + len(word) <= self.end

    def take_if(self, word: str) -> bool:
        if not self.at(word):
            return False
        self.pos += len(word)
        return True

    def take(self, word: str) -> None:
        if not self.take_if(word):
            raise self.fail(f"expected {word!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consumes what `pattern` matches next, after spaces; None leaves the position there."""
        self.skip()
        found = pattern.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()
        return found

    def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = self.match(pattern)
        if found is None:
            raise self.fail(f"expected {what}")
        return found

    def column(self, pos: int) -> int:
        """Returns how many characters stand before a position in its line."""
        return pos - (self.text.rfind("\n", 0, pos) + 1)

    def done(self) -> bool:
        self.skip()
        return self.pos >= self.end

    def integer(self) -> int:
        return self.number(self.expect(_INT, "an integer"))

    def name(self, pattern: re.Pattern[str], what: str) -> str:
        """Consumes a name of bounded length."""
        found = self.expect(pattern, what)
        if len(found[0]) > MAX_NAME:
            raise self.fail(f"a name of {len(found[0])} characters", found.start())
        return found[0]

    def number(self, found: re.Match[str], group: int | str = 0) -> int:
        """Returns the integer that a group of a match spells."""
        digits = found[group].removeprefix("-")
        if len(digits) > MAX_DIGITS:
            raise self.fail(f"an integer of {len(digits)} digits", found.start(group))
        return int(found[group])

    def items(self, close: str, item: Callable[[], T]) -> list[T]:
        """Reads comma separated items up to and including `close`."""
        items: list[T] = []
        if self.take_if(close):
            return items
        while True:
            items.append(item())
            if not self.take_if(","):
                self.take(close)
                return items
