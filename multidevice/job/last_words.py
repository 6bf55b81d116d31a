"""What a process prints before it has its launcher end the job."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
import time
import traceback
from types import TracebackType
from typing import TextIO

from fuser.support.errors import FuserError, is_users

# A launcher that is told to end the job drops what it has not read of its processes' last words:
# how long it gets to read them, and then to pass them on.
_READ_LIMIT_S = 1.5
_PASS_ON_S = 0.2


def user_frames(error: BaseException, trace: TracebackType | None) -> str | None:
    """Returns the user's part of the traceback of an error whose sentence says what is wrong.

    None for all others, of which the whole traceback is wanted: errors that are not ours, that have
    such a cause, or that come with a script to show them again.
    """
    is_ours = isinstance(error, FuserError) and not getattr(error, "__notes__", None)
    causes = (error.__cause__, None if error.__suppress_context__ else error.__context__)
    if not is_ours or any(c is not None and not isinstance(c, FuserError) for c in causes):
        return None
    walked = list(traceback.walk_tb(trace))
    kept = [frame for frame, _ in walked if is_users(frame)]
    frames = traceback.StackSummary.extract((f, n) for f, n in walked if f in kept)
    return "".join(frames.format())


def wait_for_reader(*streams: TextIO) -> None:
    """Waits until what was written to pipes has been read, and passed on, within limits."""
    stop = time.monotonic() + _READ_LIMIT_S
    while any(map(_is_unread, streams)) and time.monotonic() < stop:
        time.sleep(0.01)
    time.sleep(_PASS_ON_S)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe that holds something."""
    waiting = bytearray(4)
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return False
        fcntl.ioctl(stream.fileno(), termios.FIONREAD, waiting)
    except (OSError, ValueError):  # nothing that the system knows
        return False
    return any(waiting)
