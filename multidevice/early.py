"""Ends the job when a rank fails before it has connected to the others.

The others wait in MPI_Init then, where nothing but the launcher can reach them. Open MPI, torchrun
and Slurm end a job when one of its processes fails; MPICH's launcher does not before MPI_Init, but
its process manager takes an order to abort from any rank, over the descriptor `PMI_FD`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType

from multidevice.last_words import wait_for_reader

_PMI_ABORT = b"cmd=abort exitcode=1\n"
# The process that has the hook; a forked child is no rank. Cleared when the ranks are connected,
# since their own guard then speaks to the peers.
_armed: list[int] = []


def install() -> None:
    """Sets the hook, in a rank that MPICH's launcher has started; the previous one still runs."""
    if "PMI_FD" not in os.environ or int(os.environ.get("PMI_SIZE", "1")) < 2:
        return
    previous = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if _armed == [os.getpid()]:
            sys.stdout.flush()
            sys.stderr.write(
                f"[fuser] rank {os.environ.get('PMI_RANK')}: uncaught {kind.__name__}: {error}, "
                "before it had connected to the others; ending the job\n"
            )
            sys.stderr.flush()
            wait_for_reader(sys.stdout, sys.stderr)
            with suppress(OSError, ValueError):
                os.write(int(os.environ["PMI_FD"]), _PMI_ABORT)

    sys.excepthook = uncaught
    _armed.append(os.getpid())


def disarm() -> None:
    """Leaves failures to the guard of a connected rank."""
    _armed.clear()
