"""Computes with torch the same random numbers as `codegen/rt_random.h` does, on any device.

Philox 4x32-10 computes four 32-bit words from the key `seed` and a counter. The words become 4
floats or 2 doubles, so the counter of the element at `index` is (offset, index // 4) for floats and
(offset, index // 2) for doubles. Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3
(2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
_WORD = (1 << 32) - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(seed: int, offset: int, block: Tensor) -> list[Tensor]:
    """Returns the four random words of each counter value, as four int64 tensors of numbers below
    2^32.

    The key is `seed`. A counter value consists of `offset` and an element of `block`, an int64
    tensor. Equal keys and counters give equal words.
    """
    keys = [seed & _WORD, seed >> 32 & _WORD]
    c = [
        torch.full_like(block, offset & _WORD),
        torch.full_like(block, offset >> 32 & _WORD),
        block & _WORD,
        block >> 32 & _WORD,
    ]
    for _ in range(ROUNDS):
        # The low 64 bits of a wrapped product are correct. A shift right copies the sign bit, so
        # the result is masked.
        p, q = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            q >> 32 & _WORD ^ c[1] ^ keys[0],
            q & _WORD,
            p >> 32 & _WORD ^ c[3] ^ keys[1],
            p & _WORD,
        ]
        keys = [key + step & _WORD for key, step in zip(keys, _WEYL, strict=True)]
    return c


def random_numbers(
    kind: str,
    index: Tensor,
    ends: Sequence[float],
    *,
    seed: int,
    offset: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the elements of a random tensor at the positions `index` (int64).

    Every element depends only on its position, `seed` and `offset`. `kind` is "uniform" or
    "normal". `ends` are the bounds of the uniform distribution, or the mean and the standard
    deviation of the normal distribution.
    """
    real = torch.float64 if dtype is torch.float64 else torch.float32
    a, b = (torch.tensor(x, dtype=real, device=index.device) for x in ends)
    lanes = 2 if real is torch.float64 else 4
    units = _units(philox(seed, offset, index // lanes), real)
    lane = index % lanes
    if kind == "normal":
        return _fma(_normal(units, lane), b, a).to(dtype)
    unit = units[0]
    for k in range(1, lanes):
        unit = torch.where(lane == k, units[k], unit)
    x = _fma(unit, b - a, a).to(dtype)
    return torch.where(x == b.to(dtype), a.to(dtype), x)


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Returns x * y + z, rounded once as by a fused multiply-add, so that results equal those of
    kernels.

    In float64, three parts whose sum is the exact result are added by ordinary additions, so the
    last digit may differ.
    """
    if x.dtype is torch.float64:
        p = x * y
        (x1, x2), (y1, y2) = _halves(x), _halves(y)
        total, rest = _sum(p, z)
        return total + (rest + (((x1 * y1 - p) + x1 * y2 + x2 * y1) + x2 * y2))
    # The product is exact in float64. An inexact sum is rounded to an odd last bit, so that the
    # second rounding, to float32, equals that of the exact sum.
    total, rest = _sum(x.double() * y.double(), z.double().expand_as(x))
    bits = total.view(torch.int64)
    is_even = (rest != 0) & (bits & 1 == 0)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    return (bits + torch.where(is_even, away, 0)).view(torch.float64).float()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two float64 tensors whose sum is `x`, each with half of the digits, so that their
    products are exact.
    """
    shifted = x * 134217729.0
    high = shifted - (shifted - x)
    return high, x - high


def _sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (x + y rounded, rounding error of this sum)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def _units(words: Sequence[Tensor], real: torch.dtype) -> list[Tensor]:
    """Returns the numbers in (0, 1] that four random words represent: 4 floats or 2 doubles.

    `real` is the dtype of the numbers, float32 or float64.
    """
    if real is torch.float32:
        return [(w.to(real) + 0.5) * 2.0**-32 for w in words]
    pairs = ((words[1] << 21 | words[0] >> 11), (words[3] << 21 | words[2] >> 11))
    return [(w.to(real) + 0.5) * 2.0**-53 for w in pairs]


def _normal(units: Sequence[Tensor], lane: Tensor) -> Tensor:
    """Returns normally distributed numbers, by the Box-Muller method.

    `units` are uniform numbers in (0, 1], made from the random words of one counter value. They
    give several results (4 floats or 2 doubles), of which `lane` selects one.
    """
    u, v = units[0], units[1]
    if len(units) == 4:
        u, v = (torch.where(lane >= 2, units[k + 2], units[k]) for k in (0, 1))
    angle = v * (2 * math.pi)
    length = torch.sqrt(-2.0 * torch.log(u))
    return length * torch.where(lane % 2 == 1, torch.sin(angle), torch.cos(angle))
