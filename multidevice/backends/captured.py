"""What a graph that repeats communications must know of their backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Protocol
from weakref import WeakSet

from multidevice.waiting import Ledger


class Repeats(Protocol):
    """What keeps graphs."""

    def forget(self) -> None:
        """Drops them."""
        ...


class Captured:
    """The part of a backend that graphs ask; by itself, nothing can be captured.

    `generation` counts how often communicators were given up: what was captured before is void.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Notes who keeps graphs of this backend's communications."""
        self._repeats = self._repeats or WeakSet()
        self._repeats.add(repeats)

    def make_void(self) -> None:
        """Has all graphs dropped, before communicators go: NCCL's wait for graphs that hold them,
        for ever."""
        self.generation += 1
        for repeats in list(self._repeats or ()):
            repeats.forget()

    def can_capture(self, what: str) -> bool:
        """Returns whether a stream alone carries out a communication of this name, once posted, so
        that a graph may repeat it."""
        del what
        return False

    @contextmanager
    def noting(self) -> Generator[Counter[str]]:
        """A context that counts the calls that this thread enters in it, per stream of calls."""
        noted = self._ledger.noted[get_ident()] = Counter[str]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[str], sign: int = 1) -> None:
        """Counts calls that a graph repeats; with sign -1, those that were not made after all."""
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
