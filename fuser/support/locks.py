"""Locks that a forked child can use: what another thread held at the fork is free in the child."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> threading.Lock:
    """Return a lock; in a forked child it starts free, as the thread that held it is not there."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def make_reentrant_lock() -> threading.RLock:
    """Return a lock that its owner may take again; free in a forked child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library does with its own locks


os.register_at_fork(after_in_child=_free_all)
