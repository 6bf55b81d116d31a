"""Patterns along rows: sums, softmax and cross entropy, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from fuser import DataType, FusionDefinition
from kernel_patterns.pattern import (
    FLOAT32,
    Operand,
    Pattern,
    Result,
    as_float,
    full,
    wide,
)

aten = torch.ops.aten


# ------------------------------------------------------------------ sums
def row_sum(fd: FusionDefinition, x: Any) -> Any:
    """Defines the sum of each row."""
    return fd.ops.sum(as_float(fd, x), dim=1)


def row_var_mean(fd: FusionDefinition, x: Any) -> Any:
    """Defines the variance and mean of each row."""
    return fd.ops.var_mean(as_float(fd, x), [1], correction=1)


# ------------------------------------------------------------------ softmax
def softmax(fd: FusionDefinition, x: Any) -> Any:
    """Defines softmax along rows."""
    x_wide = as_float(fd, x)
    e = fd.ops.exp(fd.ops.sub(x_wide, fd.ops.max(x_wide, -1, keepdim=True)))
    return fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, -1, keepdim=True)), x.dtype())


def _log_sum_exp(fd: FusionDefinition, x_wide: Any) -> Any:
    ops, top = fd.ops, fd.ops.max(x_wide, -1, keepdim=True)
    return ops.add(ops.log(ops.sum(ops.exp(ops.sub(x_wide, top)), -1, keepdim=True)), top)


def log_sum_exp(fd: FusionDefinition, x: Any) -> Any:
    """Defines the logarithm of the sum of exponentials of each row."""
    return fd.ops.squeeze(_log_sum_exp(fd, as_float(fd, x)), [1])


def log_softmax(fd: FusionDefinition, x: Any) -> Any:
    """Defines log_softmax along rows."""
    x_wide = as_float(fd, x)
    return fd.ops.cast(fd.ops.sub(x_wide, _log_sum_exp(fd, x_wide)), x.dtype())


def softmax_backward(fd: FusionDefinition, dy: Any, y: Any) -> Any:
    """Defines the gradient of softmax from its result."""
    ops, g, y_wide = fd.ops, as_float(fd, dy), as_float(fd, y)
    total = ops.sum(ops.mul(g, y_wide), -1, keepdim=True)
    return ops.cast(ops.mul(y_wide, ops.sub(g, total)), dy.dtype())


def log_softmax_backward(fd: FusionDefinition, dy: Any, y: Any) -> Any:
    """Defines the gradient of log_softmax from its result."""
    ops, g = fd.ops, as_float(fd, dy)
    total = ops.sum(g, -1, keepdim=True)
    return ops.cast(ops.sub(g, ops.mul(ops.exp(as_float(fd, y)), total)), dy.dtype())


def _torch_softmax_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    g, y_wide = wide(dy), wide(y)
    return (y_wide * (g - (g * y_wide).sum(-1, keepdim=True))).to(dy.dtype)


def _torch_log_softmax_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    g = wide(dy)
    return (g - torch.exp(wide(y)) * g.sum(-1, keepdim=True)).to(dy.dtype)


# ------------------------------------------------------------------ cross entropy
def _is_target(fd: FusionDefinition, x: Any, t: Any) -> Any:
    ops = fd.ops
    columns = ops.broadcast(ops.iota(x.size(1), dtype=DataType.Int), [True, False])
    return ops.eq(columns, ops.broadcast(t, [False, True]))


def _loss(fd: FusionDefinition, x_wide: Any, lse: Any, is_target: Any) -> Any:
    picked = fd.ops.sum(fd.ops.where(is_target, x_wide, 0.0), -1)
    return fd.ops.sub(fd.ops.squeeze(lse, [1]), picked)


def _probability_less_target(fd: FusionDefinition, x_wide: Any, lse: Any, is_target: Any) -> Any:
    p = fd.ops.exp(fd.ops.sub(x_wide, lse))
    return fd.ops.where(is_target, fd.ops.sub(p, 1.0), p)


def cross_entropy(fd: FusionDefinition, x: Any, t: Any) -> Any:
    """Defines the loss of each row."""
    x_wide = as_float(fd, x)
    return _loss(fd, x_wide, _log_sum_exp(fd, x_wide), _is_target(fd, x, t))


def cross_entropy_and_gradient(fd: FusionDefinition, x: Any, t: Any) -> Any:
    """Defines the loss of each row, and its gradient with respect to the logits."""
    x_wide, is_target = as_float(fd, x), _is_target(fd, x, t)
    lse = _log_sum_exp(fd, x_wide)
    gradient = _probability_less_target(fd, x_wide, lse, is_target)
    return _loss(fd, x_wide, lse, is_target), fd.ops.cast(gradient, x.dtype())


def cross_entropy_backward(fd: FusionDefinition, dy: Any, x: Any, t: Any, lse: Any) -> Any:
    """Defines the gradient with respect to the logits, given the log-sum-exp of the forward."""
    g, kept = (fd.ops.broadcast(v, [False, True]) for v in (dy, lse))
    less = _probability_less_target(fd, as_float(fd, x), kept, _is_target(fd, x, t))
    return fd.ops.cast(fd.ops.mul(g, less), x.dtype())


def _torch_less_target(x_wide: torch.Tensor, t: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    p = torch.exp(x_wide - lse[:, None])
    is_target = torch.arange(p.shape[1], device=p.device)[None, :] == t[:, None]
    return torch.where(is_target, p - 1, p)


def _torch_cross_entropy_and_gradient(x: torch.Tensor, t: torch.Tensor) -> Result:
    x_wide = wide(x)
    lse = torch.logsumexp(x_wide, -1)
    loss = lse - x_wide.gather(1, t[:, None])[:, 0]
    return loss, _torch_less_target(x_wide, t, lse).to(x.dtype)


def _torch_cross_entropy_backward(
    dy: torch.Tensor, x: torch.Tensor, t: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    return (dy[:, None] * _torch_less_target(wide(x), t, lse)).to(x.dtype)


def take_along_rows(fd: FusionDefinition, x: Any, places: Any) -> Any:
    """Defines a gather along rows, at the positions in a tensor of the same shape."""
    return fd.ops.take_along_axis(x, places, 1)


def _rows_and_places(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
    return Operand((m, n), dtype), Operand((m, n), torch.int64, below=n)


def _logits_and_targets(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
    return Operand((m, n), dtype), Operand((m,), torch.int64, below=n)


ROWS = {
    "take_along_rows": Pattern(
        take_along_rows, lambda x, places: torch.gather(x, 1, places), _rows_and_places
    ),
    "row_sum": Pattern(
        row_sum,
        lambda x: wide(x).sum(1),
        full(1),
        lambda x: x.sum(1, dtype=FLOAT32),
    ),
    "row_var_mean": Pattern(
        row_var_mean, lambda x: torch.var_mean(wide(x), 1, correction=1), full(1)
    ),
    "softmax": Pattern(softmax, lambda x: torch.softmax(x, -1), full(1)),
    "softmax_backward": Pattern(
        softmax_backward,
        _torch_softmax_backward,
        full(2),
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, dy.dtype),
    ),
    "log_softmax": Pattern(log_softmax, lambda x: torch.log_softmax(x, -1), full(1)),
    "log_softmax_backward": Pattern(
        log_softmax_backward,
        _torch_log_softmax_backward,
        full(2),
        lambda dy, y: aten._log_softmax_backward_data(dy, y, -1, dy.dtype),
    ),
    # The part of a cross entropy's forward that reads whole rows.
    "log_sum_exp": Pattern(log_sum_exp, lambda x: torch.logsumexp(wide(x), -1), full(1)),
    "cross_entropy": Pattern(
        cross_entropy,
        lambda x, t: torch.nn.functional.cross_entropy(wide(x), t, reduction="none"),
        _logits_and_targets,
    ),
    "cross_entropy_and_gradient": Pattern(
        cross_entropy_and_gradient, _torch_cross_entropy_and_gradient, _logits_and_targets
    ),
    "cross_entropy_backward": Pattern(
        cross_entropy_backward,
        _torch_cross_entropy_backward,
        lambda m, n, dtype: (
            Operand((m,), FLOAT32),
            *_logits_and_targets(m, n, dtype),
            Operand((m,), FLOAT32),
        ),
    ),
}
