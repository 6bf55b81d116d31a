"""Vector widths: how many consecutive elements one access may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

from fuser.schedule.input_facts import Facts
from fuser.schedule.iteration_space import Access
from fuser.support.device import LOADED_WORDS, VECTOR_BYTES

# Rows of that many elements are shifted to words of memory, where these do not divide them.
SHIFTED_COLUMNS = 64


def _none(access: Access) -> bool:
    return False


class VectorWidths:
    """The widest power of two that suits all candidates, for the facts of many input classes.

    At most 16 bytes of the largest element; a divisor of the extent of the contiguous inner run
    (the last vector of a row is then a whole one); within every tensor's alignment in bytes. A wide
    weight does not narrow accesses to rows: what is `shared` by them is loaded in several words.
    """

    def __init__(
        self, candidates: Sequence[Access], *, shared: Callable[[Access], bool] = _none
    ) -> None:
        self._candidates = [(a, LOADED_WORDS if shared(a) else 1) for a in candidates]
        self._aligned = self._within(Facts({}))

    def of(self, facts: Facts, inner_extent: int) -> int:
        """Return the width where the inner run has this extent."""
        return gcd(self.within(facts), inner_extent) if inner_extent else 1

    def wider(self, facts: Facts, columns: int, width: int) -> int:
        """Return the width for rows that are shifted to words of memory (`ir.domain.Shift`), where
        it is larger than `width`; else 0."""
        shifted = self.within(facts) if columns >= SHIFTED_COLUMNS else 0
        return shifted if shifted > width else 0

    def within(self, facts: Facts) -> int:
        """Return the width where the inner run may have any extent."""
        return self._within(facts) if facts.alignments else self._aligned

    def _within(self, facts: Facts) -> int:
        width = VECTOR_BYTES if self._candidates else 1
        for access, words in self._candidates:
            aligned = facts.alignment(access.tv.number)
            most = VECTOR_BYTES * words if aligned >= VECTOR_BYTES else aligned
            width = min(width, max(most // access.nbytes, 1))
        return width


def power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_at_most(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
