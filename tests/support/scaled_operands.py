"""Operands of one-byte floats with scales, and their product in float64."""

from __future__ import annotations

import torch

from fuser import DataType

D = DataType


Tensor = torch.Tensor


E4, E5, E8 = D.Float8_e4m3fn, D.Float8_e5m2, D.Float8_e8m0fnu


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def factors(m: int, k: int, n: int, second: torch.dtype = torch.float8_e5m2) -> list[Tensor]:
    return [draw(m, k, dtype=torch.float8_e4m3fn), draw(k, n, dtype=second, seed=1)]


def wanted(a: Tensor, b: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    return (a.double() @ b.double()) * s1.double() * s2.double()
