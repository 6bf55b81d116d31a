"""Random numbers in numpy, written from the definition and independent of the code under
test.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch

WORD = 2**32 - 1
Array = np.ndarray[Any, Any]


@lru_cache(256)
def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Returns the four words for one counter: ten rounds, in Python's integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & WORD, (a >> 32) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def units(count: int, seed: int, offset: int, *, is_double: bool, first: int = 0) -> list[float]:
    """Returns the uniform numbers in (0, 1] from element `first` on."""
    found: list[float] = []
    key = (seed & WORD, seed >> 32 & WORD)
    lanes = 2 if is_double else 4
    for i in range(first, first + count):
        block = i // lanes
        words = philox(key, (offset & WORD, offset >> 32 & WORD, block & WORD, block >> 32))
        if is_double:
            low, high = words[2 * (i % 2) : 2 * (i % 2) + 2]
            found.append((((high << 32 | low) >> 11) + 0.5) * 2.0**-53)
        else:
            half, scale = np.float32(0.5), np.float32(2.0**-32)
            found.append(float((np.float32(words[i % 4]) + half) * scale))
    return found


def numbers(
    kind: str,
    count: int,
    ends: tuple[float, float],
    *,
    seed: int,
    offset: int,
    dtype: torch.dtype,
    first: int = 0,
) -> torch.Tensor:
    """Returns elements `first` to `first + count` of a random tensor; normal ones in float64."""
    is_double = dtype is torch.float64
    real = np.float64 if is_double else np.float32
    a, b = (Fraction(float(real(x))) for x in ends)
    places = range(first, first + count)
    if kind == "normal":
        found = [
            float(a) + float(b) * _normal(i, seed, offset, is_double=is_double) for i in places
        ]
        return torch.tensor(found, dtype=torch.float64)
    width = Fraction(float(real(float(b)) - real(float(a))))
    drawn = units(count, seed, offset, is_double=is_double, first=first)
    exact = torch.tensor(
        [_rounded(a + Fraction(u) * width, real) for u in drawn], dtype=torch.float64
    )
    rounded = exact.to(torch.float64 if is_double else torch.float32).to(dtype)
    low, high = (torch.tensor(float(x), dtype=torch.float64).to(dtype) for x in (a, b))
    return torch.where(rounded == high, low, rounded)


def _normal(i: int, seed: int, offset: int, *, is_double: bool) -> float:
    """Returns normal numbers (Box-Muller): of two neighbours, one uses the cosine, one the
    sine.
    """
    u, v = units(2, seed, offset, is_double=is_double, first=i - i % 2)
    return math.sqrt(-2 * math.log(u)) * (math.sin if i % 2 else math.cos)(2 * math.pi * v)


def _rounded(x: Fraction, real: type) -> float:
    """Returns the nearest number of a dtype, ties to even."""
    if real is np.float64:
        return float(x)
    near = np.float32(float(x))
    choices = [near, np.nextafter(near, np.float32(-9e9)), np.nextafter(near, np.float32(9e9))]
    return float(
        min(choices, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.int32)) & 1))
    )
