"""Open files of another process of this host, taken by their numbers."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

# Of the system call, on every machine that numbers such calls alike.
_PIDFD_GETFD = 438
_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def let_files_be_taken() -> None:
    """Lets other processes of this user take files of this one, also where the system lets only a
    process's ancestors."""
    # Fails where the system has no such rule.
    _libc().prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)


def take_file(pid: int, fd: int) -> int:
    """Returns a number, for this process, of a file that another one has open.

    Raises `OSError` where the process is gone, or the system does not allow it.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "this system has no pidfd_open")
    process = os.pidfd_open(pid)
    try:
        taken = _libc().syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if taken < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
    return taken


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
