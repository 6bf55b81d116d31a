"""Programs that reduce rows, such as softmax and norms, in the dtypes in which kernels
compute.
"""

from __future__ import annotations

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView

F = DataType.Float


def wide(x: TensorView) -> TensorView:
    return x if x.dtype() is DataType.Double else ops.cast(x, F)


def softmax(x: TensorView, dim: int = -1) -> TensorView:
    x = wide(x)
    e = ops.exp(ops.sub(x, ops.max(x, dim, keepdim=True)))
    return ops.div(e, ops.sum(e, dim, keepdim=True))


def normalized(x: TensorView) -> tuple[TensorView, TensorView, TensorView]:
    x = wide(x)
    var, mean = ops.var_mean(x, [-1], correction=0, keepdim=True)
    rstd = ops.rsqrt(ops.add(var, 1e-5))
    return ops.mul(ops.sub(x, mean), rstd), mean, rstd


def layer_norm(x: TensorView, w: TensorView, b: TensorView) -> TensorView:
    y, _, _ = normalized(x)
    return back_to(x, ops.add(ops.mul(y, wide(w)), wide(b)))


def back_to(x: TensorView, y: TensorView) -> TensorView:
    return ops.cast(y, x.dtype())
