"""A position in a text that is being parsed. Its errors mark the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from fuser.support.errors import ParseError

T = TypeVar("T")
SPACE = re.compile(r"\s+")
# Spaces and comments. A line such as `// %kernel_math` is no comment: it ends a block.
_SKIPPED = re.compile(r"(?:\s+|//(?! %)[^\n]*)+")
_INT = re.compile(r"-?[0-9]+")
# The digits of a 64-bit integer: no extent, number or rank of a program has more.
MAX_DIGITS = 19
# The longest name. Names that contain the name of a library are the longest.
MAX_NAME = 250


class Cursor:
    """A position in a text. Its methods raise `ParseError`, which marks the line."""

    def __init__(self, text: str, pos: int = 0, end: int | None = None) -> None:
        self.text = text
        self.pos = pos
        self.end = len(text) if end is None else end
        # A position and the number of lines before it. Parsers try alternatives and drop most
        # errors, so line numbers must be cheap.
        self._counted = (0, 0)

    def fail(self, message: str, pos: int | None = None) -> ParseError:
        """Returns the error for a position, by default the current one, with the line and a
        caret."""
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
        """Skips spaces and comments."""
        found = _SKIPPED.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()

    def at(self, word: str) -> bool:
        """Whether `word` is next, after spaces."""
        self.skip()
        return self.text.startswith(word, self.pos) and self.pos + len(word) <= self.end

    def take_if(self, word: str) -> bool:
        """Consumes `word` if it is next; returns whether it was."""
        if not self.at(word):
            return False
        self.pos += len(word)
        return True

    def take(self, word: str) -> None:
        """Consumes `word`; raises `ParseError` if it is not next."""
        if not self.take_if(word):
            raise self.fail(f"expected {word!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consumes the next match of `pattern`, after spaces. Without a match, returns None and
        stays."""
        self.skip()
        found = pattern.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()
        return found

    def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Consumes the next match of `pattern`; raises `ParseError`, which names `what`, if there
        is none."""
        found = self.match(pattern)
        if found is None:
            raise self.fail(f"expected {what}")
        return found

    def column(self, pos: int) -> int:
        """Returns the number of characters before a position in its line."""
        return pos - (self.text.rfind("\n", 0, pos) + 1)

    def done(self) -> bool:
        """Whether only spaces and comments are left."""
        self.skip()
        return self.pos >= self.end

    def integer(self) -> int:
        """Consumes an integer and returns it."""
        return self.number(self.expect(_INT, "an integer"))

    def name(self, pattern: re.Pattern[str], what: str) -> str:
        """Consumes a name. Raises `ParseError` if there is none, or if it is too long."""
        found = self.expect(pattern, what)
        if len(found[0]) > MAX_NAME:
            raise self.fail(
                f"a name of {len(found[0])} characters is too long (at most {MAX_NAME})",
                found.start(),
            )
        return found[0]

    def number(self, found: re.Match[str], group: int | str = 0) -> int:
        """Returns the integer in a group of a match. Raises `ParseError` if it has too many
        digits."""
        digits = found[group].removeprefix("-")
        if len(digits) > MAX_DIGITS:
            raise self.fail(
                f"an integer of {len(digits)} digits is too long (at most {MAX_DIGITS})",
                found.start(group),
            )
        return int(found[group])

    def items(self, close: str, item: Callable[[], T]) -> list[T]:
        """Reads comma-separated items up to and including `close`."""
        items: list[T] = []
        if self.take_if(close):
            return items
        while True:
            items.append(item())
            if not self.take_if(","):
                self.take(close)
                return items
