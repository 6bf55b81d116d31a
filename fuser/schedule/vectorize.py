"""Vector widths: how many consecutive elements one access may move."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from fuser.schedule.space import Access

VECTOR_BYTES = 16


def vector_width(candidates: Iterable[Access], alignments: Iterable[int], inner_extent: int) -> int:
    """Return the widest power of two that suits all candidates.

    At most 16 bytes of the largest element; a divisor of the extent of the contiguous inner run
    (the last vector of a row is then a whole one); within every tensor's alignment in bytes.
    """
    width = VECTOR_BYTES
    seen = False
    for access, alignment in zip(candidates, alignments, strict=True):
        seen = True
        width = min(width, VECTOR_BYTES // access.nbytes, max(alignment // access.nbytes, 1))
    if not seen:
        return 1
    return gcd(width, inner_extent) if inner_extent else 1


def power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_at_most(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
