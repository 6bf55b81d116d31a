"""The oracle's ops that move, repeat or create elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support import random_reference
from tools.fuzz.ops.elementwise import category
from tools.fuzz.table import DTYPES, HALF
from tools.fuzz.values import (
    InvalidProgram,
    Num,
    Val,
    computed,
    exact,
    overflow,
    round_to,
    stored,
    wide,
)

Tensor = torch.Tensor


def broadcast(v: Val, flags: list[bool]) -> Val:
    """Returns a tensor with new axes of extent 1 where `flags` is true."""
    for i, new in enumerate(flags):
        if new:
            v = v.view(lambda t, i=i: t.unsqueeze(i))
    return v


def broadcast_in_dim(v: Val, shape: list[int], dims: list[int]) -> Val:
    """Returns a tensor of shape `shape`, whose axes `dims` are those of the operand."""
    flags = [i not in dims for i in range(len(shape))]
    return expand(broadcast(v, flags), shape)


def expand(v: Val, shape: list[int]) -> Val:
    """Returns a tensor with axes of extent 1 expanded."""
    return v.view(lambda t: t.expand(shape))


def squeeze(v: Val, dims: list[int], squeeze_expanded: bool = False) -> Val:
    """Returns a tensor without the axes `dims`."""
    for d in sorted((d % v.ref.ndim for d in dims), reverse=True):
        if v.ref.shape[d] != 1 and not squeeze_expanded:
            raise InvalidProgram(
                f"squeeze: axis {d} of shape {list(v.ref.shape)} does not have extent 1"
            )
        v = v.view(lambda t, d=d: t.select(d, 0))
    return v


def slice_(v: Val, starts: list[int], ends: list[int]) -> Val:
    """Returns the part from `starts` to `ends`, limited to the extents."""
    index = tuple(
        slice(min(a, n), min(b, n)) for a, b, n in zip(starts, ends, v.ref.shape, strict=True)
    )
    return v.view(lambda t: t[index])


def pad(v: Val, widths: list[int], value: float | int | bool | Num = 0) -> Val:
    """Returns a tensor padded by `widths` (last axis first); negative widths crop."""
    number = value.value if isinstance(value, Num) else value
    rounded = torch.tensor(number, dtype=DTYPES[v.dtype].torch).item()
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (v.ref.ndim - len(pairs)) + pairs

    def padded(t: Tensor, fill: float | int | bool) -> Tensor:
        for d, (left, right) in enumerate(pairs):
            n = t.shape[d] + left + right
            if n < 0:
                raise InvalidProgram(
                    f"pad of shape {list(t.shape)} by {widths} gives a negative extent"
                )
            shape = [*t.shape[:d], n, *t.shape[d + 1 :]]
            out = torch.full(shape, fill, dtype=t.dtype)
            first, last = max(left, 0), min(left + t.shape[d], n)
            if last > first:
                out.narrow(d, first, last - first).copy_(t.narrow(d, first - left, last - first))
            t = out
        return t

    return Val(padded(v.ref, rounded), padded(v.bound, 0.0), v.dtype)


def cat(pieces: list[Val], dim: int = 0) -> Val:
    """Returns the tensors joined along `dim`."""
    refs, bounds = [p.ref for p in pieces], [p.bound for p in pieces]
    return Val(torch.cat(refs, dim), torch.cat(bounds, dim), pieces[0].dtype)


def reshape(v: Val, shape: list[int]) -> Val:
    """Returns a tensor with another shape."""
    return v.view(lambda t: t.reshape(shape))


def full(shape: list[int], value: Num | float | int | bool, dtype: str) -> Val:
    """Returns a constant tensor."""
    number = value.value if isinstance(value, Num) else value
    ref = torch.full(shape, number, dtype=DTYPES[dtype].torch)
    return exact(wide(ref), dtype)


def _number(x: Any) -> Any:
    return x.value if isinstance(x, Num) else x


def iota(length: int, start: Any = 0, step: Any = 1, dtype: str = "Int") -> Val:
    """Returns `start + i * step` for i below `length`."""
    counts = torch.arange(_number(length))
    first, by = (0 if _number(start) is None else _number(start)), _number(step)
    if category(dtype) == "int":
        return overflow(exact(counts * by + first, dtype))
    ref = counts.double() * by + first
    scale = (counts * by).abs().double() + abs(first)
    compute = "Float" if dtype in HALF else dtype
    out = computed(ref, torch.zeros_like(ref), compute, 2, scale)
    return stored(out.ref, out.bound, dtype)


def random(
    kind: str,
    a: float,
    b: float,
    shape: list[int],
    *,
    rng_seed: int,
    rng_offset: int,
    dtype: str = "Float",
) -> Val:
    """Returns the random numbers of the definition: uniform ones exactly, normal ones with a bound.

    The bound covers the errors of log, sin and cos.
    """
    stored_as = DTYPES[dtype].torch
    found = random_reference.numbers(
        kind, math.prod(shape), (a, b), seed=rng_seed, offset=rng_offset, dtype=stored_as
    ).reshape(shape)
    if kind == "uniform":
        return exact(wide(found), dtype)
    compute = "Float" if dtype in HALF else dtype
    # No number is more than 7 deviations away, and errors are relative to that.
    scale = torch.full_like(found, abs(a) + 7 * abs(b))
    out = computed(found, torch.zeros_like(found), compute, 8, scale)
    return stored(out.ref, out.bound, dtype)


def random_like(kind: str, v: Val) -> Val:
    """Returns the middle of the range of the random numbers, with a bound that covers the
    range.
    """
    middle, reach = (0.5, 0.5) if kind == "uniform" else (0.0, 9.0)
    ref = torch.full(v.ref.shape, middle, dtype=torch.float64)
    return Val(ref, torch.full_like(ref, reach), v.dtype)


def size(v: Val, dim: int) -> Num:
    """Returns one extent as a scalar."""
    return Num(v.ref.shape[dim], "Int")


def shape(v: Val) -> list[Num]:
    """Returns all extents as scalars."""
    return [size(v, dim) for dim in range(v.ref.ndim)]


def triu(v: Val, diagonal: Any = 0) -> Val:
    """Returns the upper triangle of matrices, with 0 elsewhere."""
    keep = torch.ones(v.ref.shape[-2:], dtype=torch.bool).triu(_number(diagonal))
    # One dtype has no 0.
    zero = round_to(torch.zeros((), dtype=v.ref.dtype), v.dtype)
    return Val(torch.where(keep, v.ref, zero), torch.where(keep, v.bound, 0.0), v.dtype)
