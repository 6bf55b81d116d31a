"""Patterns over the rows of a tensor: sums of columns and of blocks, of all, and batch norm."""

from __future__ import annotations

from typing import Any

import torch

from fuser import FusionDefinition
from kernel_patterns.pattern import (
    BFLOAT16,
    EPSILON,
    FLOAT16,
    FLOAT32,
    Operand,
    Pattern,
    Result,
    as_float,
    full,
    wide,
)


def column_sum(fd: FusionDefinition, x: Any) -> Any:
    """Defines the sum of each column."""
    return fd.ops.sum(as_float(fd, x), dim=0)


def column_var_mean(fd: FusionDefinition, x: Any) -> Any:
    """Defines the variance and mean of each column."""
    return fd.ops.var_mean(as_float(fd, x), [0], correction=1)


def sum_of_all(fd: FusionDefinition, x: Any) -> Any:
    """Defines the sum of all elements."""
    return fd.ops.sum(as_float(fd, x))


def few_rows(rows: int, *, known: int = 1) -> Pattern:
    """Returns the pattern of the sum of `rows` blocks of an m x n tensor.

    A matmul beside a reduce-scatter ends with this sum.
    """
    return Pattern(
        lambda fd, x: fd.ops.cast(fd.ops.sum(x, dim=0), x.dtype()),
        lambda x: x.sum(0),
        lambda m, n, dtype: (Operand((rows, m // rows, n), dtype),),
        dtypes=(BFLOAT16, FLOAT16, FLOAT32),
        known=known,
    )


# ------------------------------------------------------------------ batch norm, channels last
# Height and width of the images that a tensor of m rows holds.
SIDE = 8
PLACES = [0, 1, 2]


def batch_norm(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    """Defines batch norm in training, of [N, H, W, C]; with the statistics that the backward
    needs.
    """
    ops, x_wide = fd.ops, as_float(fd, x)
    var, mean = ops.var_mean(x_wide, PLACES, correction=0)
    r = ops.rsqrt(ops.add(var, EPSILON))
    wide_mean, wide_r = (ops.broadcast(v, [True, True, True, False]) for v in (mean, r))
    y = ops.mul(ops.sub(x_wide, wide_mean), wide_r)
    y = ops.add(ops.mul(y, as_float(fd, w)), as_float(fd, b))
    return ops.cast(y, x.dtype()), mean, r


def batch_norm_backward(fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any) -> Any:
    """Defines the gradients of input, weight and bias."""
    ops, dy_wide = fd.ops, as_float(fd, dy)
    x_hat = ops.mul(ops.sub(as_float(fd, x), m), r)
    db, dw = ops.sum(dy_wide, PLACES), ops.sum(ops.mul(dy_wide, x_hat), PLACES)
    count = ops.mul(ops.mul(x.size(0), x.size(1)), x.size(2))
    means = (ops.broadcast(ops.div(s, count), [True, True, True, False]) for s in (db, dw))
    first, second = means
    dx = ops.mul(ops.mul(w, r), ops.sub(ops.sub(dy_wide, first), ops.mul(x_hat, second)))
    return ops.cast(dx, x.dtype()), dw, db


def _torch_batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Result:
    x_wide = wide(x)
    var, mean = torch.var_mean(x_wide, PLACES, correction=0)
    r = torch.rsqrt(var + EPSILON)
    return ((x_wide - mean) * r * w + b).to(x.dtype), mean, r


def _own_batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    images = x.permute(0, 3, 1, 2)
    return torch.nn.functional.batch_norm(images, None, None, w, b, True, 0.1, EPSILON)


def _torch_batch_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> Result:
    g, x_hat = wide(dy), (wide(x) - m) * r
    db, dw = g.sum(PLACES), (g * x_hat).sum(PLACES)
    count = x.numel() // x.shape[-1]
    return (w * r * (g - db / count - x_hat * (dw / count))).to(x.dtype), dw, db


# ------------------------------------------------------------------ images, channels outside
GROUPS = 32
CHANNELS_OF_GROUPS, CHANNELS = 512, 256


def batch_norm_nchw(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    """Defines batch norm in training, of [N, C, places]."""
    ops, x_wide = fd.ops, as_float(fd, x)
    var, mean = ops.var_mean(x_wide, [0, 2], correction=0, keepdim=True)
    y = ops.mul(ops.sub(x_wide, mean), ops.rsqrt(ops.add(var, EPSILON)))
    wide_w, wide_b = (ops.broadcast(as_float(fd, v), [True, False, True]) for v in (w, b))
    return ops.cast(ops.add(ops.mul(y, wide_w), wide_b), x.dtype())


def group_norm(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    """Defines group norm of [N, C, places], with `GROUPS` groups of channels."""
    ops = fd.ops
    groups = ops.reshape(as_float(fd, x), [x.size(0), GROUPS, -1])
    var, mean = ops.var_mean(groups, [2], correction=0, keepdim=True)
    y = ops.mul(ops.sub(groups, mean), ops.rsqrt(ops.add(var, EPSILON)))
    y = ops.reshape(y, [x.size(0), x.size(1), x.size(2)])
    wide_w, wide_b = (ops.broadcast(as_float(fd, v), [True, False, True]) for v in (w, b))
    return ops.cast(ops.add(ops.mul(y, wide_w), wide_b), x.dtype())


def _torch_batch_norm_nchw(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.batch_norm(
        wide(x), None, None, wide(w), wide(b), training=True, eps=EPSILON
    )
    return y.to(x.dtype)


def _torch_group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.group_norm(wide(x), GROUPS, wide(w), wide(b), EPSILON)
    return y.to(x.dtype)


def _channels_outside(most: int) -> Any:
    """Returns operands: [N, C, n] with m rows, and two weights of C."""

    def operands(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
        channels = min(m, most)
        return Operand((m // channels, channels, n), dtype), *(Operand((channels,), dtype),) * 2

    return operands


def _images(count: int, weights: int) -> Any:
    return lambda m, n, dtype: (
        *(Operand((m // SIDE**2, SIDE, SIDE, n), dtype),) * count,
        *(Operand((n,), FLOAT32),) * weights,
    )


COLUMNS = {
    "column_sum": Pattern(
        column_sum,
        lambda x: wide(x).sum(0),
        full(1),
        lambda x: x.sum(0, dtype=FLOAT32),
    ),
    "column_var_mean": Pattern(
        column_var_mean, lambda x: torch.var_mean(wide(x), 0, correction=1), full(1)
    ),
    "sum_of_all": Pattern(
        sum_of_all, lambda x: wide(x).sum(), full(1), lambda x: x.sum(dtype=FLOAT32)
    ),
    "sum_of_2_rows": few_rows(2),
    "sum_of_4_rows": few_rows(4),
    "sum_of_8_rows": few_rows(8),
    # The number of rows is a symbol of the definition.
    "sum_of_4_rows_any": few_rows(4, known=0),
    "batch_norm": Pattern(batch_norm, _torch_batch_norm, _images(1, 2), _own_batch_norm),
    # 16384 x 3136: 64 images of 256 channels of 56 x 56, and 32 of 512.
    "batch_norm_nchw": Pattern(
        batch_norm_nchw,
        _torch_batch_norm_nchw,
        _channels_outside(CHANNELS),
        lambda x, w, b: torch.nn.functional.batch_norm(x, None, None, w, b, True, 0.1, EPSILON),
    ),
    "group_norm": Pattern(
        group_norm,
        _torch_group_norm,
        _channels_outside(CHANNELS_OF_GROUPS),
        lambda x, w, b: torch.nn.functional.group_norm(x, GROUPS, w, b, EPSILON),
        known=3,
    ),
    "batch_norm_backward": Pattern(batch_norm_backward, _torch_batch_norm_backward, _images(2, 3)),
}
