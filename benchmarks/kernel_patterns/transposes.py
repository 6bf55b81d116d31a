"""Patterns that change the order of axes in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import FusionDefinition
from kernel_patterns.pattern import (
    BFLOAT16,
    FLOAT32,
    Operand,
    Pattern,
    Result,
    as_float,
    wide,
)
from kernel_patterns.pointwise import bias_gelu, gelu_tanh, torch_gelu

BATCH = 64
HEADS, HEAD = 4, 128


def _in_rows(fd: FusionDefinition, x: Any, rank: int = 2) -> Any:
    """Declares a row-major result; otherwise it has the memory order of its operand."""
    return fd.ops.stride_order(x, [*reversed(range(rank))])


def _turned(
    order: Sequence[int], shape: Callable[[int, int], tuple[int, ...]] = lambda m, n: (m, n)
) -> Pattern:
    """Returns the pattern of a copy in another order of axes."""
    return Pattern(
        lambda fd, x: _in_rows(fd, fd.ops.permute(x, list(order)), len(order)),
        lambda x: x.permute(*order).contiguous(),
        lambda m, n, dtype: (Operand(shape(m, n), dtype),),
        dtypes=(BFLOAT16, FLOAT32, torch.float64),
    )


def _batches(m: int, n: int) -> tuple[int, ...]:
    return BATCH, m // BATCH, n


def _heads(m: int, n: int) -> tuple[int, ...]:
    return HEADS, m // HEADS, n // HEAD, HEAD


def turned_bias_gelu(fd: FusionDefinition, x: Any, b: Any) -> Any:
    """Defines gelu(x.T + b), row-major."""
    return _in_rows(fd, bias_gelu(fd, fd.ops.permute(x, [1, 0]), b))


def add_turned_gelu(fd: FusionDefinition, x: Any, y: Any) -> Any:
    """Defines gelu(x.T + y), row-major: operands in two memory orders."""
    total = fd.ops.add(as_float(fd, y), fd.ops.permute(as_float(fd, x), [1, 0]))
    return _in_rows(fd, fd.ops.cast(gelu_tanh(fd, total), x.dtype()))


def sum_and_turned(fd: FusionDefinition, x: Any, y: Any) -> Any:
    """Defines x + y.T, and its transpose: two inputs and two outputs in two memory orders."""
    total = fd.ops.add(as_float(fd, x), fd.ops.permute(as_float(fd, y), [1, 0]))
    total = fd.ops.cast(total, x.dtype())
    return total, _in_rows(fd, fd.ops.permute(total, [1, 0]))


def _torch_sum_and_turned(x: torch.Tensor, y: torch.Tensor) -> Result:
    total = (wide(x) + wide(y.t())).to(x.dtype)
    return total, total.t().contiguous()


def _two_orders(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
    return Operand((m, n), dtype), Operand((n, m), dtype)


TRANSPOSES = {
    "transpose": _turned((1, 0)),
    "permute_021": _turned((0, 2, 1), _batches),
    "permute_210": _turned((2, 1, 0), _batches),
    "permute_120": _turned((1, 2, 0), _batches),
    "permute_0213": _turned((0, 2, 1, 3), _heads),
    "turned_bias_gelu": Pattern(
        turned_bias_gelu,
        lambda x, b: torch_gelu(wide(x.t()) + wide(b)).to(x.dtype).contiguous(),
        lambda m, n, dtype: (Operand((m, n), dtype), Operand((m,), dtype)),
    ),
    "add_turned_gelu": Pattern(
        add_turned_gelu,
        lambda x, y: torch_gelu(wide(x.t()) + wide(y)).to(x.dtype).contiguous(),
        _two_orders,
    ),
    "sum_and_turned": Pattern(sum_and_turned, _torch_sum_and_turned, _two_orders),
}
