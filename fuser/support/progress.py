"""A line on a terminal that shows the progress of a long compilation.

    compiling: segment 120 of 300, 4 s

The line appears after `AFTER_S` seconds, is updated during the compilation, and is erased at the
end of the compilation. Only rank 0 of a job draws the line, and only if its standard error is a
terminal. `FUSER_DISABLE=progress` turns the line off.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import TextIO

from fuser.support import options

# A shorter compilation has no line.
AFTER_S = 2.0
EVERY_S = 0.5
# A compilation that begins so soon after another one continues its line.
TOGETHER_S = 0.2
_ERASE = "\r\x1b[K"


class ProgressLine:
    """The progress line of one compilation, which a separate thread draws on `stream`.

    `began` is the time at which the compilation began, as returned by `monotonic`.
    """

    def __init__(self, stream: TextIO, began: float) -> None:
        self._stream, self.began = stream, began
        self._stage = ""
        self._is_over = threading.Event()
        self._is_drawn = False
        self._thread = threading.Thread(target=self._draw, name="fuser progress", daemon=True)
        self._thread.start()

    def stage(self, name: str, number: int, count: int) -> None:
        """Sets the stage that the line shows: item `number` of `count` items.

        If both are 0, only the name is shown.
        """
        self._stage = f"{name} {number} of {count}" if count else name

    def end(self) -> None:
        """Ends the thread that draws the progress line, and erases the line."""
        self._is_over.set()
        self._thread.join()
        if self._is_drawn:
            self._write(_ERASE)

    def _draw(self) -> None:
        wait = self.began + AFTER_S - monotonic()
        while not self._is_over.wait(max(wait, 0.0)):
            stage, seconds = self._stage, int(monotonic() - self.began)
            text = f"compiling: {stage}, {seconds} s" if stage else f"compiling: {seconds} s"
            self._is_drawn = True
            self._write(_ERASE + text[: _columns(self._stream) - 1])
            wait = EVERY_S

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self._is_over.set()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class _ThreadProgress(threading.local):
    """The state of a thread: the progress line of its current compilation, and the times at which
    its previous compilation began and ended.
    """

    def __init__(self) -> None:
        self.line: ProgressLine | None = None
        self.before = (0.0, 0.0)


_here = _ThreadProgress()
# A context that does nothing. It is shared, because each new size of a program uses one.
_NOTHING = nullcontext()


def shown(rank: int) -> AbstractContextManager[None]:
    """Returns a context within which a compilation shows its progress on the terminal of rank 0.

    Within another such context, the returned context does nothing, because the outermost context
    has the line.
    """
    stream = sys.stderr if rank == 0 and _here.line is None else None
    if stream is None or not _is_terminal(stream) or options.disabled("progress"):
        return _NOTHING
    return _line_on(stream)


@contextmanager
def _line_on(stream: TextIO) -> Generator[None]:
    """Returns a context that draws the progress line of this thread's compilation.

    The line is erased when the `with` block ends.
    """
    now, (began, ended) = monotonic(), _here.before
    line = _here.line = ProgressLine(stream, began if now - ended < TOGETHER_S else now)
    try:
        yield
    finally:
        _here.line, _here.before = None, (line.began, monotonic())
        line.end()


def stage(name: str, number: int = 0, count: int = 0) -> None:
    """Sets the stage that this thread's progress line shows, for example ("segment", 120, 300)."""
    if _here.line is not None:
        _here.line.stage(name, number, count)


def _is_terminal(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal on which a line can be erased."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, ValueError):  # a replaced or closed stream
        return False
