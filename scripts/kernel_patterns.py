"""The kernels that `bench.py kernels` times: definition, torch's form, shapes, minimal bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser import DataType, FusionDefinition
from fuser.ir.dtypes import from_torch

Result = torch.Tensor | tuple[torch.Tensor, ...]


def gelu_tanh(fd: FusionDefinition, x: Any) -> Any:
    """The tanh form of GELU, as torch's approximate="tanh"."""
    ops = fd.ops
    cube = ops.mul(ops.mul(x, x), x)
    inner = ops.mul(ops.add(x, ops.mul(cube, 0.044715)), 0.7978845608028654)
    return ops.mul(ops.mul(x, 0.5), ops.add(ops.tanh(inner), 1.0))


def define(
    build: Callable[..., Any],
    *shapes: Sequence[int],
    dtype: DataType = DataType.BFloat16,
    known: int = 0,
) -> FusionDefinition:
    """Define a fusion with symbolic extents of these ranks; the first `known` are constants."""
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor([*s[:known], *[-1] * len(s[known:])], contiguity=True, dtype=dtype)
            for s in shapes
        ]
        made = build(fd, *tensors)
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


def _bf16(fd: FusionDefinition, x: Any) -> Any:
    return fd.ops.cast(x, DataType.BFloat16)


def gelu_mul_add(fd: FusionDefinition, x: Any, y: Any, z: Any) -> Any:
    return _bf16(fd, fd.ops.add(fd.ops.mul(gelu_tanh(fd, x), y), z))


def bias_gelu(fd: FusionDefinition, x: Any, b: Any) -> Any:
    return _bf16(fd, gelu_tanh(fd, fd.ops.add(x, b)))


def row_sum(fd: FusionDefinition, x: Any) -> Any:
    return fd.ops.sum(fd.ops.cast(x, DataType.Float), dim=1)


def column_sum(fd: FusionDefinition, x: Any) -> Any:
    return fd.ops.sum(fd.ops.cast(x, DataType.Float), dim=0)


def _torch_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Pattern:
    """Our definition, the peer's function, the input shapes, the minimal bytes; the first `known`
    extents are constants of the definition, `library` is torch's own op."""

    build: Callable[..., Any]
    peer: Callable[..., Result]
    inputs: Callable[[int, int], tuple[tuple[int, ...], ...]]
    nbytes: Callable[[int, int], int]
    dtype: torch.dtype = torch.bfloat16
    known: int = 0
    library: Callable[..., torch.Tensor] | None = None

    def define(self, m: int, n: int) -> FusionDefinition:
        return define(
            self.build, *self.inputs(m, n), dtype=from_torch(self.dtype), known=self.known
        )

    def random(self, m: int, n: int, count: int) -> list[tuple[torch.Tensor, ...]]:
        """Return sets of inputs."""
        return [
            tuple(torch.randn(*s, device="cuda").to(self.dtype) for s in self.inputs(m, n))
            for _ in range(count)
        ]


def few_rows(rows: int, dtype: torch.dtype = torch.bfloat16, *, known: int = 1) -> Pattern:
    """The sum of `rows` blocks of an m x n tensor, which ends a matmul beside a reduce-scatter."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)

    return Pattern(
        lambda fd, x: fd.ops.cast(fd.ops.sum(x, dim=0), from_torch(dtype)),
        total,
        lambda m, n: ((rows, m // rows, n),),
        lambda m, n: (rows + 1) * (m // rows) * n * dtype.itemsize,
        dtype,
        known,
        total,
    )


# ------------------------------------------------------------------ rows: softmax and norms
EPSILON = 1e-5


def _f32(fd: FusionDefinition, x: Any) -> Any:
    return fd.ops.cast(x, DataType.Float)


def softmax(fd: FusionDefinition, x: Any) -> Any:
    wide = _f32(fd, x)
    e = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, -1, keepdim=True)))
    return fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, -1, keepdim=True)), x.dtype())


def log_sum_exp(fd: FusionDefinition, x: Any) -> Any:
    """What the forward of a cross entropy reads whole rows for."""
    wide = _f32(fd, x)
    top = fd.ops.max(wide, -1, keepdim=True)
    total = fd.ops.sum(fd.ops.exp(fd.ops.sub(wide, top)), -1)
    return fd.ops.add(fd.ops.log(total), fd.ops.squeeze(top, [1]))


def softmax_backward(fd: FusionDefinition, dy: Any, y: Any) -> Any:
    ops, g, wide = fd.ops, _f32(fd, dy), _f32(fd, y)
    total = ops.sum(ops.mul(g, wide), -1, keepdim=True)
    return ops.cast(ops.mul(wide, ops.sub(g, total)), dy.dtype())


def layer_norm(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    ops, wide = fd.ops, _f32(fd, x)
    var, mean = ops.var_mean(wide, [1], correction=0, keepdim=True)
    y = ops.mul(ops.sub(wide, mean), ops.rsqrt(ops.add(var, EPSILON)))
    return ops.cast(ops.add(ops.mul(y, _f32(fd, w)), _f32(fd, b)), x.dtype())


def _rms(fd: FusionDefinition, wide: Any, w: Any) -> Any:
    ops = fd.ops
    mean = ops.div(ops.sum(ops.mul(wide, wide), -1, keepdim=True), wide.size(1))
    return ops.mul(ops.mul(wide, ops.rsqrt(ops.add(mean, EPSILON))), _f32(fd, w))


def rms_norm(fd: FusionDefinition, x: Any, w: Any) -> Any:
    return fd.ops.cast(_rms(fd, _f32(fd, x), w), x.dtype())


def residual_layer_norm(fd: FusionDefinition, x: Any, r: Any, w: Any, b: Any) -> Any:
    h = fd.ops.cast(fd.ops.add(_f32(fd, x), _f32(fd, r)), x.dtype())
    return layer_norm(fd, h, w, b), h


def residual_rms_norm(fd: FusionDefinition, x: Any, r: Any, w: Any) -> Any:
    h = fd.ops.cast(fd.ops.add(_f32(fd, x), _f32(fd, r)), x.dtype())
    return rms_norm(fd, h, w), h


def layer_norm_backward(fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any) -> Any:
    """The gradient of the input: what goes over rows."""
    ops, n = fd.ops, x.size(1)
    mean, rstd = (ops.broadcast(_f32(fd, v), [False, True]) for v in (m, r))
    x_hat = ops.mul(ops.sub(_f32(fd, x), mean), rstd)
    g = ops.mul(_f32(fd, dy), _f32(fd, w))
    first = ops.div(ops.sum(g, -1, keepdim=True), n)
    second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), n)
    return ops.cast(ops.mul(rstd, ops.sub(ops.sub(g, first), ops.mul(x_hat, second))), x.dtype())


def layer_norm_gradients(fd: FusionDefinition, dy: Any, x: Any, w: Any, m: Any, r: Any) -> Any:
    """The gradients of input, weight and bias: rows, and sums over them."""
    ops, wide = fd.ops, _f32(fd, dy)
    mean, rstd = (ops.broadcast(_f32(fd, v), [False, True]) for v in (m, r))
    x_hat = ops.mul(ops.sub(_f32(fd, x), mean), rstd)
    sums = ops.sum(ops.mul(wide, x_hat), 0), ops.sum(wide, 0)
    return layer_norm_backward(fd, dy, x, w, m, r), *(ops.cast(s, dy.dtype()) for s in sums)


def _torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(x.float(), x.shape[1:], w.float(), b.float(), EPSILON)
    return y.to(x.dtype)


def _torch_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    mean = (wide * wide).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + EPSILON) * w.float()).to(x.dtype)


def _torch_layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    m, r = m.float()[:, None], r.float()[:, None]
    x_hat, g = (x.float() - m) * r, dy.float() * w.float()
    second = (g * x_hat).mean(-1, keepdim=True)
    return (r * (g - g.mean(-1, keepdim=True) - x_hat * second)).to(x.dtype)


def _torch_layer_norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    x_hat = (x.float() - m.float()[:, None]) * r.float()[:, None]
    sums = (dy.float() * x_hat).sum(0), dy.float().sum(0)
    return _torch_layer_norm_backward(dy, x, w, m, r), *(s.to(dy.dtype) for s in sums)


def _torch_softmax_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    g, wide = dy.float(), y.float()
    return (wide * (g - (g * wide).sum(-1, keepdim=True))).to(dy.dtype)


def _added(norm: Callable[..., torch.Tensor]) -> Callable[..., Result]:
    def both(x: torch.Tensor, r: torch.Tensor, *rest: torch.Tensor) -> Result:
        h = (x.float() + r.float()).to(x.dtype)
        return norm(h, *rest), h

    return both


def _rows(
    build: Callable[..., Any], peer: Callable[..., Result], *, full: int, weights: int, out: int = 1
) -> Pattern:
    """A pattern of `full` inputs [m, n], `weights` [n], and `out` outputs [m, n]."""
    return Pattern(
        build,
        peer,
        lambda m, n: ((m, n),) * full + ((n,),) * weights,
        lambda m, n: 2 * ((full + out) * m * n + weights * n),
    )


ROW_PATTERNS = {
    "softmax": _rows(softmax, lambda x: torch.softmax(x, -1), full=1, weights=0),
    "log_sum_exp": Pattern(
        log_sum_exp,
        lambda x: torch.logsumexp(x.float(), -1),
        lambda m, n: ((m, n),),
        lambda m, n: 2 * m * n + 4 * m,
    ),
    "softmax_backward": _rows(softmax_backward, _torch_softmax_backward, full=2, weights=0),
    "layer_norm": _rows(layer_norm, _torch_layer_norm, full=1, weights=2),
    "rms_norm": _rows(rms_norm, _torch_rms_norm, full=1, weights=1),
    "residual_layer_norm": _rows(
        residual_layer_norm, _added(_torch_layer_norm), full=2, weights=2, out=2
    ),
    "residual_rms_norm": _rows(
        residual_rms_norm, _added(_torch_rms_norm), full=2, weights=1, out=2
    ),
    "layer_norm_backward": Pattern(
        layer_norm_backward,
        _torch_layer_norm_backward,
        lambda m, n: ((m, n), (m, n), (n,), (m,), (m,)),
        lambda m, n: 2 * (3 * m * n + n + 2 * m),
    ),
    "layer_norm_gradients": Pattern(
        layer_norm_gradients,
        _torch_layer_norm_gradients,
        lambda m, n: ((m, n), (m, n), (n,), (m,), (m,)),
        lambda m, n: 2 * (3 * m * n + 3 * n + 2 * m),
    ),
}

# ------------------------------------------------------------------ transposes
BATCH = 64


def _in_rows(fd: FusionDefinition, x: Any, rank: int = 2) -> Any:
    """Declare that a result lies in the order of its axes: else it follows its operand."""
    return fd.ops.stride_order(x, [*reversed(range(rank))])


def _turned(order: Sequence[int], *, dtype: torch.dtype = torch.bfloat16, rank: int = 2) -> Pattern:
    """A copy in another order of axes; of three, the first is a batch."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.permute(*order).contiguous()

    return Pattern(
        lambda fd, x: _in_rows(fd, fd.ops.permute(x, list(order)), rank),
        copy,
        lambda m, n: ((m, n) if rank == 2 else (BATCH, m // BATCH, n),),
        lambda m, n: 2 * m * n * dtype.itemsize,
        dtype,
        library=copy,
    )


def turned_bias_gelu(fd: FusionDefinition, x: Any, b: Any) -> Any:
    return _in_rows(fd, bias_gelu(fd, fd.ops.permute(x, [1, 0]), b))


def sum_and_turned(fd: FusionDefinition, x: Any, y: Any) -> Any:
    """Two inputs in two orders, and the sum in both."""
    total = _bf16(fd, fd.ops.add(_f32(fd, x), fd.ops.permute(_f32(fd, y), [1, 0])))
    return total, _in_rows(fd, fd.ops.permute(total, [1, 0]))


def _torch_sum_and_turned(x: torch.Tensor, y: torch.Tensor) -> Result:
    total = (x.float() + y.t().float()).to(x.dtype)
    return total, total.t().contiguous()


TRANSPOSES = {
    "transpose": _turned((1, 0)),
    "transpose_fp32": _turned((1, 0), dtype=torch.float32),
    "transpose_fp64": _turned((1, 0), dtype=torch.float64),
    "permute_021": _turned((0, 2, 1), rank=3),
    "permute_210": _turned((2, 1, 0), rank=3),
    "permute_120": _turned((1, 2, 0), rank=3),
    "turned_bias_gelu": Pattern(
        turned_bias_gelu,
        lambda x, b: _torch_gelu(x.t().float() + b.float()).to(x.dtype).contiguous(),
        lambda m, n: ((m, n), (m,)),
        lambda m, n: 4 * m * n + 2 * m,
    ),
    "sum_and_turned": Pattern(
        sum_and_turned,
        _torch_sum_and_turned,
        lambda m, n: ((m, n), (n, m)),
        lambda m, n: 8 * m * n,
    ),
}

PATTERNS = {
    "gelu_mul_add": Pattern(
        gelu_mul_add,
        lambda x, y, z: (_torch_gelu(x.float()) * y.float() + z.float()).to(x.dtype),
        lambda m, n: ((m, n),) * 3,
        lambda m, n: 8 * m * n,
    ),
    "bias_gelu": Pattern(
        bias_gelu,
        lambda x, b: _torch_gelu(x.float() + b.float()).to(x.dtype),
        lambda m, n: ((m, n), (n,)),
        lambda m, n: 4 * m * n + 2 * n,
    ),
    "row_sum": Pattern(
        row_sum, lambda x: x.float().sum(1), lambda m, n: ((m, n),), lambda m, n: 2 * m * n + 4 * m
    ),
    "column_sum": Pattern(
        column_sum,
        lambda x: x.float().sum(0),
        lambda m, n: ((m, n),),
        lambda m, n: 2 * m * n + 4 * n,
    ),
    "sum_of_2_rows": few_rows(2),
    "sum_of_4_rows": few_rows(4),
    "sum_of_8_rows": few_rows(8),
    "sum_of_4_rows_fp16": few_rows(4, torch.float16),
    "sum_of_4_rows_fp32": few_rows(4, torch.float32),
    # The number of rows is a symbol of the definition.
    "sum_of_4_rows_any": few_rows(4, known=0),
    **ROW_PATTERNS,
    **TRANSPOSES,
}
