"""The texts about uncaught exceptions of a rank."""

from __future__ import annotations

import sys

from fuser.support.errors import InputError, user_code, user_line
from multidevice.job.failure_guard import _error_text


def _text_of(message: str) -> tuple[str, int]:
    """Returns the text about an error with this message, and the line that raises it."""
    try:
        raise InputError(message or f"no rows{user_code(user_line())}")
    except InputError as error:
        trace = error.__traceback__
        assert trace is not None
        return _error_text(type(error), *sys.exc_info()[1:]), trace.tb_lineno  # pyright: ignore[reportArgumentType]


def test_the_line_of_an_uncaught_error_is_said_once() -> None:
    text, line = _text_of("")
    assert text == f"uncaught InputError: no rows (user code at {__file__}:{line})"
    text, line = _text_of("no rows")
    assert text == f"uncaught InputError: no rows (test_failure_guard.py:{line})"
    # Another line of the same file, such as that of the definition, of which this one is a prefix.
    other = f"no rows (user code at {__file__}:{line}0)"
    text, _ = _text_of(other)
    assert text == f"uncaught InputError: {other} (test_failure_guard.py:{line})"
