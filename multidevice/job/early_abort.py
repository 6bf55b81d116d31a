"""Ends the job if a rank fails before it has connected to the other ranks.

The other ranks then wait in MPI_Init, where only the launcher can end them. Open MPI, torchrun and
Slurm end a job when one of its processes fails. MPICH's launcher does not do so before MPI_Init.
However, the process manager of MPICH accepts an abort command from any rank, through the open file
whose number is in the variable `PMI_FD`.
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
# The process that has the hook: a forked child is not a rank. Cleared when the ranks are connected,
# because `failure_guard` then handles errors.
_armed: list[int] = []
# The hook of this module, and the one before it.
_hooks: list[Callable[..., object]] = []


def install() -> None:
    """Replaces Python's hook for uncaught exceptions, if MPICH's launcher has started this process.

    The new hook ends the job; the previous hook is still called.
    """
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
    """Returns Python's current hook for uncaught exceptions. If `install` has set the current hook,
    returns the hook that `install` has replaced.
    """
    return _hooks[1] if _hooks and sys.excepthook is _hooks[0] else sys.excepthook


def disarm() -> None:
    """Deactivates the hook of this module: `failure_guard` handles the failures of a connected
    rank.
    """
    _armed.clear()


# ----------------------------------------------------------------------
# The last output of a process before its launcher ends the job.

# A launcher that ends the job drops the output of its processes that it has not read yet. It gets
# this much time to read the output, and then to print it.
_READ_LIMIT_S = 1.5
_PASS_ON_S = 0.2


def user_frames(error: BaseException, trace: TracebackType | None) -> str | None:
    """Returns the user's part of a traceback as text, or None if the whole traceback must be
    printed.

    The user's part is enough for an error of this project, because its message explains the
    problem. The whole traceback is needed for two kinds of errors:

    - errors that this project does not define, and errors caused by these;
    - errors to which a script that reproduces them is attached (as a note of the exception).
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
    """Waits, with a time limit, until the launcher has read and printed the output in the pipes
    `streams`.

    Without this wait, a launcher that ends the job would drop the output that is still in the
    pipes.
    """
    stop = time.monotonic() + _READ_LIMIT_S
    while any(map(_is_unread, streams)) and time.monotonic() < stop:
        time.sleep(0.01)
    time.sleep(_PASS_ON_S)


def _is_unread(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe that still contains data."""
    waiting = bytearray(4)
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return False
        fcntl.ioctl(stream.fileno(), termios.FIONREAD, waiting)
    except (OSError, ValueError):  # no file of the system
        return False
    return any(waiting)
