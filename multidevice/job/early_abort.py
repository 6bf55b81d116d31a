"""Ends the job when a rank fails before it has connected to the others.

The others wait in MPI_Init then, where nothing but the launcher can reach them. Open MPI, torchrun
and Slurm end a job when one of its processes fails; MPICH's launcher does not before MPI_Init, but
its process manager takes an order to abort from any rank, over the descriptor `PMI_FD`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from multidevice.job.last_words import user_frames, wait_for_reader

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
