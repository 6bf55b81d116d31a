"""A cursor for parsers: a position in a text. Error messages show the line of the position."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    """A position in a text that is being parsed, with methods that read the text after it.

    The methods raise `ParseError`, whose message shows the line. `end` is the position at which
    parsing ends; None means the end of the text.
    """

    def __init__(self, text: str, pos: int = 0, end: int | None = None) -> None:
        self.text = text
        self.pos = pos
        self.end = len(text) if end is None else end
        # A position and the number of lines before it. Parsers try alternatives and drop most
        # errors, so line numbers must be cheap.
        self._counted = (0, 0)

    def fail(self, message: str, pos: int | None = None) -> ParseError:
        """Returns the error for a position, whose message shows the line of the text and a caret.

        If `pos` is None, the position is the current one.
        """
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
        """Moves the position past spaces and comments."""
        found = _SKIPPED.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()

    def at(self, word: str) -> bool:
        """Returns whether the text continues with `word`, after spaces and comments."""
        self.skip()
        return self.text.startswith(word, self.pos) and self.pos + len(word) <= self.end

    def take_if(self, word: str) -> bool:
        """Moves past `word` if the text continues with `word`, and returns whether it does."""
        if not self.at(word):
            return False
        self.pos += len(word)
        return True

    def take(self, word: str) -> None:
        """Moves past `word`.

        Raises:
            ParseError: the text does not continue with `word`.
        """
        if not self.take_if(word):
            raise self.fail(f"expected {word!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Moves past spaces and past a match of `pattern`, and returns the match.

        Without a match, returns None.
        """
        self.skip()
        found = pattern.match(self.text, self.pos, self.end)
        if found:
            self.pos = found.end()
        return found

    def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Moves past a match of `pattern`, and returns the match.

        `what` describes the pattern in the message.

        Raises:
            ParseError: there is no match.
        """
        found = self.match(pattern)
        if found is None:
            raise self.fail(f"expected {what}")
        return found

    def unknown(self, what: str, word: str, names: Iterable[str], at: int) -> ParseError:
        """Returns the error for `word` at the position `at`, which is none of the allowed names.

        `what` says what the names are, such as "dtype".
        """
        return self.fail(f"unknown {what} {word!r}: expected one of {', '.join(names)}", at)

    def column(self, pos: int) -> int:
        """Returns the number of characters between the start of the line and the position `pos`."""
        return pos - (self.text.rfind("\n", 0, pos) + 1)

    def done(self) -> bool:
        """Returns whether the rest of the text has only spaces and comments."""
        self.skip()
        return self.pos >= self.end

    def integer(self) -> int:
        """Moves past an integer and returns it.

        Raises:
            ParseError: there is no integer, or it has too many digits.
        """
        return self.number(self.expect(_INT, "an integer"))

    def name(self, pattern: re.Pattern[str], what: str) -> str:
        """Moves past a name that matches `pattern`, and returns the name.

        `what` describes the name in messages.

        Raises:
            ParseError: there is no name, or it is too long.
        """
        found = self.expect(pattern, what)
        if len(found[0]) > MAX_NAME:
            raise self.fail(
                f"a name of {len(found[0])} characters is too long (at most {MAX_NAME})",
                found.start(),
            )
        return found[0]

    def number(self, found: re.Match[str], group: int | str = 0) -> int:
        """Returns the integer in a group of a regular expression's match.

        Raises:
            ParseError: the integer has too many digits.
        """
        digits = found[group].removeprefix("-")
        if len(digits) > MAX_DIGITS:
            raise self.fail(
                f"an integer of {len(digits)} digits is too long (at most {MAX_DIGITS})",
                found.start(group),
            )
        return int(found[group])

    def items(self, close: str, item: Callable[[], T]) -> list[T]:
        """Reads comma-separated items until the text `close`, and moves past `close`.

        Each item is read by a call of `item`. Returns the items.
        """
        items: list[T] = []
        if self.take_if(close):
            return items
        while True:
            items.append(item())
            if not self.take_if(","):
                self.take(close)
                return items
