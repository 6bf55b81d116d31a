"""Ends the job when a rank fails before it has connected to the others.

The others wait in MPI_Init then, where nothing but the launcher can reach them. Open MPI, torchrun
and Slurm end a job when one of its processes fails; MPICH's launcher does not before MPI_Init, but
its process manager takes an order to abort from any rank, over the descriptor `PMI_FD`.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from fuser.support.errors import FuserError, is_users

_PMI_ABORT = b"cmd=abort exitcode=1\n"
# The process that has the hook; a forked child is no rank. Cleared when the ranks are connected,
# since their own guard then speaks to the peers.
_armed: list[int] = []
# The hook of this module, and the one before it.
_hooks: list[Callable[..., object]] = []


def install() -> None:
    """Sets the hook, in a rank that MPICH's launcher has started; the previous one still runs."""
    if "PMI_FD" not in os.environ or int(os.environ.get("PMI_SIZE", "1")) < 2:
        return
    previous = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        is_rank = _armed == [os.getpid()]
        frames = user_frames(error, trace) if previous is sys.__excepthook__ and is_rank else None
        if frames is None:
            previous(kind, error, trace)
        if is_rank:
            sys.stdout.flush()
            sys.stderr.write(
                f"[fuser] rank {os.environ.get('PMI_RANK')}: uncaught {kind.__name__}: {error}, "
                f"before it had connected to the others; ending the job\n{frames or ''}"
            )
            sys.stderr.flush()
            wait_for_reader(sys.stdout, sys.stderr)
            with suppress(OSError, ValueError):
                os.write(int(os.environ["PMI_FD"]), _PMI_ABORT)

    sys.excepthook = uncaught
    _hooks[:] = uncaught, previous
    _armed.append(os.getpid())


def hook_before() -> Callable[..., object]:
    """Returns the hook of uncaught exceptions that is set now, but for the one of this module."""
    return _hooks[1] if _hooks and sys.excepthook is _hooks[0] else sys.excepthook


def disarm() -> None:
    """Leaves failures to the guard of a connected rank."""
    _armed.clear()


# ----------------------------------------------------------------------
# What a process prints before it has its launcher end the job.

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
