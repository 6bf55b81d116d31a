"""What a process prints before it has its launcher end the job."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
import time
from typing import TextIO

# A launcher that is told to end the job drops what it has not read of its processes' last words:
# how long it gets to read them, and then to pass them on.
_READ_LIMIT_S = 1.5
_PASS_ON_S = 0.2


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
