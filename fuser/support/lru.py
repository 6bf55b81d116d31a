"""A bounded dictionary that drops the least recently used entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from fuser.support.locks import make_lock

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V], Generic[K, V]):
    """A dictionary with at most `limit` entries. When full, it drops the least recently used half.

    The entries are in two plain dictionaries: recently used entries, and older entries, which are
    dropped when the first dictionary is full. `get` looks only for recently used entries, so a hit
    costs nothing extra. `recall` looks into both dictionaries. An entry that is used at least once
    per `limit // 2` new entries is never dropped. `on_drop` is called with the value of every
    dropped entry.
    """

    def __init__(self, limit: int, on_drop: Callable[[V], None] | None = None) -> None:
        super().__init__()
        self._half = max(limit // 2, 1)
        self._old: dict[K, V] = {}
        self._on_drop = on_drop
        self._lock = make_lock()

    def recall(self, key: K) -> V | None:
        """Returns the value of a key, or None if there is no such entry.

        An older entry becomes a recently used entry again, so that it is not dropped next.
        """
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
        """Drops all entries, and calls `on_drop` with their values."""
        with self._lock:
            dropped = [*self.values(), *self._old.values()]
            self.clear()
            self._old = {}
        for gone in dropped:
            if self._on_drop is not None:
                self._on_drop(gone)

    def size(self) -> int:
        """Returns the number of all entries: recently used ones, and older ones that are dropped
        next.
        """
        return len(self) + len(self._old)
