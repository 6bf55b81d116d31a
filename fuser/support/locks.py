"""Locks that a forked child can use: what another thread held at the fork is free in the child.

Behind them: a pause of Python's garbage collection that threads share.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> threading.Lock:
    """Returns a lock; in a forked child it starts free, as the thread that held it is not there."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def make_reentrant_lock() -> threading.RLock:
    """Returns a lock that its owner may take again; free in a forked child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library does with its own locks


os.register_at_fork(after_in_child=_free_all)


# ----------------------------------------------------------------------
# A context without Python's collector of cyclic garbage.


class _Uncollected:
    """A context in which Python collects no garbage: a capture may lose nothing that it would free.
    A compilation makes nothing that it could free, and it would look again and again at that and at
    the 200,000 objects of torch.

    The last thread that leaves it lets collections come again.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = make_lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


uncollected = _Uncollected()
