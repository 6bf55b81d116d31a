"""Patterns of norms over rows: with residuals and dropout, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser import FusionDefinition
from kernel_patterns.pattern import (
    DROPPED,
    EPSILON,
    FLOAT32,
    Dropout,
    Operand,
    Pattern,
    Result,
    as_float,
    rows_and_weights,
    wide,
)
from kernel_patterns.pointwise import dropped_out

aten = torch.ops.aten


# ------------------------------------------------------------------ forward
def _layer_norm(fd: FusionDefinition, x_wide: Any, w: Any, b: Any) -> tuple[Any, Any, Any]:
    """Defines the norm, and the mean and reciprocal deviation of each row, as [m, 1]."""
    ops = fd.ops
    var, mean = ops.var_mean(x_wide, [1], correction=0, keepdim=True)
    r = ops.rsqrt(ops.add(var, EPSILON))
    y = ops.mul(ops.sub(x_wide, mean), r)
    return ops.add(ops.mul(y, as_float(fd, w)), as_float(fd, b)), mean, r


def _rms_norm(fd: FusionDefinition, x_wide: Any, w: Any) -> tuple[Any, Any]:
    ops = fd.ops
    mean = ops.div(ops.sum(ops.mul(x_wide, x_wide), -1, keepdim=True), x_wide.size(1))
    r = ops.rsqrt(ops.add(mean, EPSILON))
    return ops.mul(ops.mul(x_wide, r), as_float(fd, w)), r


def layer_norm(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    """Defines a layer norm."""
    return fd.ops.cast(_layer_norm(fd, as_float(fd, x), w, b)[0], x.dtype())


def layer_norm_kept(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    """Defines a layer norm with the statistics that the backward needs, as in a training
    step.
    """
    y, mean, r = _layer_norm(fd, as_float(fd, x), w, b)
    return fd.ops.cast(y, x.dtype()), fd.ops.squeeze(mean, [1]), fd.ops.squeeze(r, [1])


def rms_norm(fd: FusionDefinition, x: Any, w: Any) -> Any:
    """Defines an RMS norm."""
    return fd.ops.cast(_rms_norm(fd, as_float(fd, x), w)[0], x.dtype())


def rms_norm_kept(fd: FusionDefinition, x: Any, w: Any) -> Any:
    """Defines an RMS norm with the statistics that the backward needs."""
    y, r = _rms_norm(fd, as_float(fd, x), w)
    return fd.ops.cast(y, x.dtype()), fd.ops.squeeze(r, [1])


def residual_layer_norm(fd: FusionDefinition, x: Any, r: Any, w: Any, b: Any) -> Any:
    """Defines the layer norm of a sum with a residual, and the sum."""
    h = fd.ops.cast(fd.ops.add(as_float(fd, x), as_float(fd, r)), x.dtype())
    return layer_norm(fd, h, w, b), h


def residual_rms_norm(fd: FusionDefinition, x: Any, r: Any, w: Any) -> Any:
    """Defines the RMS norm of a sum with a residual, and the sum."""
    h = fd.ops.cast(fd.ops.add(as_float(fd, x), as_float(fd, r)), x.dtype())
    return rms_norm(fd, h, w), h


def residual_rms_norm_wide(fd: FusionDefinition, x: Any, r: Any, w: Any) -> Any:
    """Defines the RMS norm of the unrounded sum with a residual, and the rounded sum."""
    h = fd.ops.add(as_float(fd, x), as_float(fd, r))
    return fd.ops.cast(_rms_norm(fd, h, w)[0], x.dtype()), fd.ops.cast(h, x.dtype())


def dropout_residual_layer_norm(fd: FusionDefinition, x: Any, r: Any, w: Any, b: Any) -> Any:
    """Defines the layer norm of a residual plus dropout of a tensor, and the sum."""
    h = fd.ops.add(dropped_out(fd, x), as_float(fd, r))
    return fd.ops.cast(_layer_norm(fd, h, w, b)[0], x.dtype()), fd.ops.cast(h, x.dtype())


def _torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(wide(x), x.shape[1:], wide(w), wide(b), EPSILON)
    return y.to(x.dtype)


def _torch_layer_norm_kept(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Result:
    x_wide = wide(x)
    var, mean = torch.var_mean(x_wide, -1, correction=0, keepdim=True)
    r = torch.rsqrt(var + EPSILON)
    return ((x_wide - mean) * r * w + b).to(x.dtype), mean[:, 0], r[:, 0]


def _torch_rms_norm_kept(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_wide = wide(x)
    r = torch.rsqrt((x_wide * x_wide).mean(-1, keepdim=True) + EPSILON)
    return (x_wide * r * wide(w)).to(x.dtype), r[:, 0]


def _torch_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _torch_rms_norm_kept(x, w)[0]


def _added(norm: Callable[..., torch.Tensor]) -> Callable[..., Result]:
    def both(x: torch.Tensor, r: torch.Tensor, *rest: torch.Tensor) -> Result:
        h = (wide(x) + wide(r)).to(x.dtype)
        return norm(h, *rest), h

    return both


def _torch_residual_rms_norm_wide(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Result:
    h = wide(x) + wide(r)
    return _torch_rms_norm(h, w).to(x.dtype), h.to(x.dtype)


def _torch_dropout_residual_layer_norm(
    x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> Result:
    h = torch.nn.functional.dropout(wide(x), DROPPED, True) + wide(r)
    y = torch.nn.functional.layer_norm(h, x.shape[1:], wide(w), wide(b), EPSILON)
    return y.to(x.dtype), h.to(x.dtype)


def _masked_residual_layer_norm(
    mask: torch.Tensor, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> Result:
    h = torch.where(mask, x / (1 - DROPPED), 0.0) + r
    return torch.nn.functional.layer_norm(h, x.shape[1:], w, b, EPSILON), h


# ------------------------------------------------------------------ backward
def layer_norm_backward(fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any) -> Any:
    """Defines the gradient of a layer norm's input, which needs only sums along rows."""
    return fd.ops.cast(_layer_norm_backward(fd, dy, x, w, m, r)[0], x.dtype())


def _layer_norm_backward(
    fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any
) -> tuple[Any, Any]:
    """Defines the gradient of the input and the normalised input, in float32."""
    ops, n = fd.ops, x.size(1)
    mean, rstd = (ops.broadcast(as_float(fd, v), [False, True]) for v in (m, r))
    x_hat = ops.mul(ops.sub(as_float(fd, x), mean), rstd)
    g = ops.mul(as_float(fd, dy), as_float(fd, w))
    first = ops.div(ops.sum(g, -1, keepdim=True), n)
    second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), n)
    return ops.mul(rstd, ops.sub(ops.sub(g, first), ops.mul(x_hat, second))), x_hat


def layer_norm_gradients(fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any) -> Any:
    """Defines the gradients of input, weight and bias: the last two are sums over the rows."""
    ops, dy_wide = fd.ops, as_float(fd, dy)
    dx, x_hat = _layer_norm_backward(fd, dy, x, w, m, r)
    sums = ops.sum(ops.mul(dy_wide, x_hat), 0), ops.sum(dy_wide, 0)
    return ops.cast(dx, x.dtype()), *(ops.cast(s, w.dtype()) for s in sums)


def residual_layer_norm_gradients(
    fd: FusionDefinition, dy: Any, dh: Any, x: Any, w: Any, m: Any, r: Any
) -> Any:
    """Defines `layer_norm_gradients` plus the gradient of the residual."""
    ops, dy_wide = fd.ops, as_float(fd, dy)
    dx, x_hat = _layer_norm_backward(fd, dy, x, w, m, r)
    sums = ops.sum(ops.mul(dy_wide, x_hat), 0), ops.sum(dy_wide, 0)
    total = ops.add(dx, as_float(fd, dh))
    return ops.cast(total, x.dtype()), *(ops.cast(s, w.dtype()) for s in sums)


def _rms_norm_backward(fd: FusionDefinition, dy: Any, x: Any, w: Any, r: Any) -> tuple[Any, Any]:
    ops = fd.ops
    rstd = ops.broadcast(as_float(fd, r), [False, True])
    x_hat = ops.mul(as_float(fd, x), rstd)
    g = ops.mul(as_float(fd, dy), as_float(fd, w))
    second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), x.size(1))
    return ops.mul(rstd, ops.sub(g, ops.mul(x_hat, second))), x_hat


def rms_norm_gradients(fd: FusionDefinition, dy: Any, x: Any, w: Any, r: Any) -> Any:
    """Defines the gradients of input and weight."""
    ops = fd.ops
    dx, x_hat = _rms_norm_backward(fd, dy, x, w, r)
    dw = ops.sum(ops.mul(as_float(fd, dy), x_hat), 0)
    return ops.cast(dx, x.dtype()), ops.cast(dw, w.dtype())


def residual_rms_norm_gradients(
    fd: FusionDefinition, dy: Any, dh: Any, x: Any, w: Any, r: Any
) -> Any:
    """Defines `rms_norm_gradients` plus the gradient of the residual."""
    ops = fd.ops
    dx, x_hat = _rms_norm_backward(fd, dy, x, w, r)
    dw = ops.sum(ops.mul(as_float(fd, dy), x_hat), 0)
    return ops.cast(ops.add(dx, as_float(fd, dh)), x.dtype()), ops.cast(dw, w.dtype())


def _torch_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor | None, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of the input, and x_hat: of a layer norm, or of an RMS norm
    without `m`.
    """
    r = wide(r)[:, None]
    x_hat = (wide(x) - (0 if m is None else wide(m)[:, None])) * r
    g = wide(dy) * wide(w)
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    return r * (dx if m is None else dx - g.mean(-1, keepdim=True)), x_hat


def _torch_layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    return _torch_gradients(dy, x, w, m, r)[0].to(x.dtype)


def _torch_layer_norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> Result:
    dx, x_hat = _torch_gradients(dy, x, w, m, r)
    sums = (wide(dy) * x_hat).sum(0), wide(dy).sum(0)
    return dx.to(x.dtype), *(s.to(w.dtype) for s in sums)


def _torch_rms_norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor
) -> Result:
    dx, x_hat = _torch_gradients(dy, x, w, None, r)
    return dx.to(x.dtype), (wide(dy) * x_hat).sum(0).to(w.dtype)


def _torch_residual_layer_norm_gradients(
    dy: torch.Tensor,
    dh: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    m: torch.Tensor,
    r: torch.Tensor,
) -> Result:
    dx, x_hat = _torch_gradients(dy, x, w, m, r)
    sums = (wide(dy) * x_hat).sum(0), wide(dy).sum(0)
    return (dx + wide(dh)).to(x.dtype), *(s.to(w.dtype) for s in sums)


def _torch_residual_rms_norm_gradients(
    dy: torch.Tensor, dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor
) -> Result:
    dx, x_hat = _torch_gradients(dy, x, w, None, r)
    return (dx + wide(dh)).to(x.dtype), (wide(dy) * x_hat).sum(0).to(w.dtype)


def _native_layer_norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> Any:
    own = w.to(x.dtype)
    size, kept = [x.shape[1]], (m[:, None], r[:, None])
    return aten.native_layer_norm_backward(dy, x, size, *kept, own, own, [True, True, True])


def _gradients(full: int, statistics: int) -> Callable[..., tuple[Operand, ...]]:
    """Returns operands: `full` tensors, a weight, and statistics of each row; the last two in
    float32.
    """
    return lambda m, n, dtype: (
        *(Operand((m, n), dtype),) * full,
        Operand((n,), FLOAT32),
        *(Operand((m,), FLOAT32),) * statistics,
    )


NORMS = {
    "layer_norm": Pattern(
        layer_norm,
        _torch_layer_norm,
        rows_and_weights(1, 2),
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[1:], w, b, EPSILON),
    ),
    "layer_norm_kept": Pattern(
        layer_norm_kept,
        _torch_layer_norm_kept,
        rows_and_weights(1, 2, dtype_of_weights=FLOAT32),
        lambda x, w, b: aten.native_layer_norm(
            x, [x.shape[1]], w.to(x.dtype), b.to(x.dtype), EPSILON
        ),
    ),
    "rms_norm": Pattern(
        rms_norm,
        _torch_rms_norm,
        rows_and_weights(1, 1),
        lambda x, w: torch.nn.functional.rms_norm(x, x.shape[1:], w, EPSILON),
    ),
    "rms_norm_kept": Pattern(
        rms_norm_kept, _torch_rms_norm_kept, rows_and_weights(1, 1, dtype_of_weights=FLOAT32)
    ),
    "residual_layer_norm": Pattern(
        residual_layer_norm, _added(_torch_layer_norm), rows_and_weights(2, 2)
    ),
    "residual_rms_norm": Pattern(
        residual_rms_norm, _added(_torch_rms_norm), rows_and_weights(2, 1)
    ),
    "residual_rms_norm_wide": Pattern(
        residual_rms_norm_wide,
        _torch_residual_rms_norm_wide,
        rows_and_weights(2, 1, dtype_of_weights=FLOAT32),
    ),
    "dropout_residual_layer_norm": Pattern(
        dropout_residual_layer_norm,
        _torch_dropout_residual_layer_norm,
        rows_and_weights(2, 2, dtype_of_weights=FLOAT32),
        dropout=Dropout(
            1, lambda x, r, w, b: (r, r + x / (1 - DROPPED)), _masked_residual_layer_norm
        ),
    ),
    "layer_norm_backward": Pattern(
        layer_norm_backward, _torch_layer_norm_backward, _gradients(2, 2)
    ),
    "layer_norm_gradients": Pattern(
        layer_norm_gradients,
        _torch_layer_norm_gradients,
        _gradients(2, 2),
        _native_layer_norm_gradients,
    ),
    "residual_layer_norm_gradients": Pattern(
        residual_layer_norm_gradients, _torch_residual_layer_norm_gradients, _gradients(3, 2)
    ),
    "rms_norm_gradients": Pattern(rms_norm_gradients, _torch_rms_norm_gradients, _gradients(2, 1)),
    "residual_rms_norm_gradients": Pattern(
        residual_rms_norm_gradients, _torch_residual_rms_norm_gradients, _gradients(3, 1)
    ),
}
