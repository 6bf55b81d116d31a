"""Input tensors of random programs. The text of this file is part of every standalone script."""

from __future__ import annotations

import torch

_SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 1.0)


def make_tensor(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    fill: str,
    seed: int,
) -> torch.Tensor:
    """Returns a view with these strides, `offset` elements into a buffer of random values.

    `fill` names the distribution of the values.
    """
    span = (
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    )
    values = _values(span + offset, dtype, fill, torch.Generator().manual_seed(seed))
    made = values.as_strided(shape, strides, offset)
    if fill.startswith("these "):
        # For a tensor of one axis. If it has more elements than numbers, the last number is
        # repeated.
        given = fill.split()[1:]
        for i in range(len(made)):
            made[i] = int(given[min(i, len(given) - 1)])
    return made


def _values(n: int, dtype: torch.dtype, fill: str, gen: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=gen).bool()
    if dtype.is_complex:
        parts = [_values(n, torch.float64, fill, gen) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    if not dtype.is_floating_point:
        if fill.startswith("below "):
            return torch.randint(0, int(fill[6:]), (n,), generator=gen).to(dtype)
        if fill.startswith("around "):
            return torch.randint(-2, int(fill[7:]) + 2, (n,), generator=gen).to(dtype)
        if fill.startswith("rising to "):
            ends = torch.randint(0, int(fill[10:]) + 1, (n,), generator=gen)
            return ends.sort().values.to(dtype)
        high = 3 if fill == "small" else 9
        return torch.randint(-high, high + 1, (n,), generator=gen).to(dtype)
    normal = torch.randn(n, generator=gen, dtype=torch.float64)
    if fill == "wide":
        normal = normal * 10 ** (torch.rand(n, generator=gen, dtype=torch.float64) * 6 - 3)
    elif fill == "small":
        normal = torch.randint(-4, 5, (n,), generator=gen).double()
    elif fill == "special":
        pick = torch.randint(0, 5 * len(_SPECIAL), (n,), generator=gen)
        for i, value in enumerate(_SPECIAL):
            normal = torch.where(pick == i, torch.tensor(value, dtype=torch.float64), normal)
    return normal.to(dtype)
