"""Sizes that share a prediction: what stands for sizes that are nearly equal.

Where every call has other sizes, few of them are predicted. What stands for a size depends on it
alone, so that all ranks take the same, whatever sizes they have seen before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fuser.ir.scalar.constructors import Symbol

# A size keeps so many of its leading bits: what stands for it is about 1/32 away at most. Round
# sizes, such as 7 * 4096, stand for themselves.
_BITS = 5


def near(size: int, multiple: int) -> int:
    """Return what stands for a size: a number of few bits times what the size has in common with
    `multiple`, so that no part of `multiple` divides only one of them."""
    part = math.gcd(size, multiple)
    count = abs(size) // part
    dropped = max(count.bit_length() - _BITS, 0)
    if not dropped:
        return size
    rounded = (count + (1 << dropped >> 1)) >> dropped << dropped
    while math.gcd(part * rounded, multiple) != part:
        rounded += 1
    return int(math.copysign(part * rounded, size))


def near_sizes(sizes: Mapping[Symbol, int], multiple: int) -> dict[Symbol, int]:
    """Return what stands for sizes; equal ones stay equal."""
    return {symbol: near(n, multiple) for symbol, n in sizes.items()}
