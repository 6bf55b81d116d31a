"""A bounded dictionary that forgets what was not used lately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from fuser.support.locks import make_lock

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V], Generic[K, V]):
    """At most `limit` entries, of which those used least lately go first, half of them at a time.

    `get` is the plain one of a dictionary, so that a hit in the steady state costs nothing more:
    entries lie in two generations, and `recall` looks into the older one, which is dropped when the
    younger one is full. What is used at least once per `limit // 2` new entries stays. `on_drop`
    is called with every value that goes.
    """

    def __init__(self, limit: int, on_drop: Callable[[V], None] | None = None) -> None:
        super().__init__()
        self._half = max(limit // 2, 1)
        self._old: dict[K, V] = {}
        self._on_drop = on_drop
        self._lock = make_lock()

    def recall(self, key: K) -> V | None:
        """Returns an entry of either generation, and count it as used; None for none."""
        found = self.get(key)
        if found is None and key in self._old:
            with self._lock:
                found = self._old.pop(key, None)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self._old.pop(key, None)
            if len(self) <= self._half:
                return
            dropped, self._old = self._old, dict(self)
            self.clear()
            super().__setitem__(key, self._old.pop(key))
        for gone in dropped.values():
            if self._on_drop is not None:
                self._on_drop(gone)

    def forget(self) -> None:
        """Drops all entries."""
        with self._lock:
            dropped = [*self.values(), *self._old.values()]
            self.clear()
            self._old = {}
        for gone in dropped:
            if self._on_drop is not None:
                self._on_drop(gone)

    def size(self) -> int:
        """Returns the number of entries of both generations."""
        return len(self) + len(self._old)
