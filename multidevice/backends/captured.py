"""What a graph that repeats communications must know of their backend."""

from __future__ import annotations

from collections import Counter

from multidevice.waiting import Ledger


class Captured:
    """The part of a backend that graphs ask; by itself, nothing can be captured.

    `generation` counts how often communicators were given up: what was captured before is void.
    """

    _ledger: Ledger
    generation = 0

    def can_capture(self, what: str) -> bool:
        """Returns whether a stream alone carries out a communication of this name, once posted, so
        that a graph may repeat it."""
        del what
        return False

    def entered(self) -> Counter[str]:
        """Returns how many calls this rank has entered, per stream of calls."""
        return Counter(self._ledger.entered)

    def enter_again(self, calls: Counter[str], sign: int = 1) -> None:
        """Counts calls that a graph repeats; with sign -1, those that were not made after all."""
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
