"""Locks that a forked child process can use, and a pause of Python's garbage collection.

If another thread held a lock at the time of the fork, the lock is free in the child process. The
pause of the garbage collection may be requested by several threads at once.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> threading.Lock:
    """Returns a lock that is free in a forked child process.

    The child process does not have the thread that may have held the lock.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def make_reentrant_lock() -> threading.RLock:
    """Returns a lock that its holder may acquire again.

    The lock is free in a forked child process.
    """
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
    """A context in which Python's cyclic garbage collector does not run.

    There are two uses. During the capture of a CUDA graph, the collector must free no tensors.
    During a compilation, the collector would repeatedly search the 200,000 objects of torch and
    find nothing to free. The last thread that leaves the context turns the collector on again.
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
