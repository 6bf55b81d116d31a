"""Patterns without reductions: activations, optimiser, rotary embedding, dropout, casts."""

from __future__ import annotations

from typing import Any

import torch

from fuser import DataType, FusionDefinition
from kernel_patterns.pattern import (
    BFLOAT16,
    DROPPED,
    FLOAT32,
    Dropout,
    Operand,
    Pattern,
    Result,
    as_float,
    full,
    rows_and_weights,
    wide,
)


# ------------------------------------------------------------------ activations
def gelu_tanh(fd: FusionDefinition, x: Any) -> Any:
    """Defines the tanh form of GELU, like torch's approximate="tanh"."""
    ops = fd.ops
    cube = ops.mul(ops.mul(x, x), x)
    inner = ops.mul(ops.add(x, ops.mul(cube, 0.044715)), 0.7978845608028654)
    return ops.mul(ops.mul(x, 0.5), ops.add(ops.tanh(inner), 1.0))


def torch_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns torch's GELU in its tanh form."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_mul_add(fd: FusionDefinition, x: Any, y: Any, z: Any) -> Any:
    """Defines gelu(x) * y + z."""
    return fd.ops.cast(fd.ops.add(fd.ops.mul(gelu_tanh(fd, x), y), z), x.dtype())


def bias_gelu(fd: FusionDefinition, x: Any, b: Any) -> Any:
    """Defines gelu(x + b)."""
    return fd.ops.cast(gelu_tanh(fd, fd.ops.add(x, b)), x.dtype())


def bias_residual(fd: FusionDefinition, x: Any, b: Any, r: Any) -> Any:
    """Defines x + b + r."""
    return fd.ops.cast(fd.ops.add(fd.ops.add(as_float(fd, x), b), r), x.dtype())


def silu_mul(fd: FusionDefinition, g: Any, u: Any) -> Any:
    """Defines SwiGLU: silu(g) * u."""
    wide_g = as_float(fd, g)
    return fd.ops.cast(fd.ops.mul(fd.ops.mul(wide_g, fd.ops.sigmoid(wide_g)), u), g.dtype())


def silu_mul_backward(fd: FusionDefinition, d: Any, g: Any, u: Any) -> Any:
    """Defines the gradients of SwiGLU."""
    ops, wide_d, wide_g = fd.ops, as_float(fd, d), as_float(fd, g)
    s = ops.sigmoid(wide_g)
    slope = ops.mul(s, ops.add(ops.mul(wide_g, ops.sub(1.0, s)), 1.0))
    dg = ops.mul(ops.mul(wide_d, as_float(fd, u)), slope)
    du = ops.mul(ops.mul(wide_d, wide_g), s)
    return ops.cast(dg, d.dtype()), ops.cast(du, d.dtype())


def _torch_silu_mul(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(wide(g)) * wide(u)).to(g.dtype)


def _torch_silu_mul_backward(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> Result:
    wide_d, wide_g = wide(d), wide(g)
    s = torch.sigmoid(wide_g)
    dg = wide_d * wide(u) * s * (1 + wide_g * (1 - s))
    return dg.to(d.dtype), (wide_d * wide_g * s).to(d.dtype)


# ------------------------------------------------------------------ casts
def _other(dtype: DataType) -> DataType:
    return DataType.BFloat16 if dtype is DataType.Float else DataType.Float


def _torch_cast(x: torch.Tensor) -> torch.Tensor:
    """Casts to the other of float32 and bfloat16; float64 is kept, as the reference of both."""
    if x.dtype is torch.float64:
        return x
    return x.to(BFLOAT16 if x.dtype is FLOAT32 else FLOAT32)


# ------------------------------------------------------------------ optimiser
RATE, BETA_1, BETA_2, TINY, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 10
UNBIAS_1, UNBIAS_2 = 1 / (1 - BETA_1**STEP), 1 / (1 - BETA_2**STEP) ** 0.5


def adamw(fd: FusionDefinition, p: Any, g: Any, m: Any, v: Any) -> Any:
    """Defines one step of AdamW: the parameter and both moments, each in its dtype."""
    ops, wide_g = fd.ops, as_float(fd, g)
    first = ops.add(ops.mul(as_float(fd, m), BETA_1), ops.mul(wide_g, 1 - BETA_1))
    square = ops.mul(ops.mul(wide_g, wide_g), 1 - BETA_2)
    second = ops.add(ops.mul(as_float(fd, v), BETA_2), square)
    scale = ops.add(ops.mul(ops.sqrt(second), UNBIAS_2), TINY)
    change = ops.div(ops.mul(first, RATE * UNBIAS_1), scale)
    stepped = ops.sub(ops.mul(as_float(fd, p), 1 - RATE * DECAY), change)
    return tuple(ops.cast(t, p.dtype()) for t in (stepped, first, second))


def _torch_adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Result:
    wide_g = wide(g)
    first = wide(m) * BETA_1 + wide_g * (1 - BETA_1)
    second = wide(v) * BETA_2 + wide_g * wide_g * (1 - BETA_2)
    change = first * (RATE * UNBIAS_1) / (second.sqrt() * UNBIAS_2 + TINY)
    stepped = wide(p) * (1 - RATE * DECAY) - change
    return stepped.to(p.dtype), first.to(p.dtype), second.to(p.dtype)


def _adamw_operands(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
    return *(Operand((m, n), dtype),) * 3, Operand((m, n), dtype, positive=True)


# ------------------------------------------------------------------ rotary embedding
HEAD = 128


def rope(fd: FusionDefinition, q: Any, k: Any, c: Any, s: Any) -> Any:
    """Defines rotary embedding: rotates halves of heads of queries, and of a quarter as many
    keys.
    """
    ops = fd.ops
    cos, sin = (ops.broadcast(as_float(fd, t), [True, True, False, False]) for t in (c, s))

    def half(t: Any, i: int) -> Any:
        sizes = [t.size(a) for a in range(3)]
        starts, ends = [0, 0, 0, i * HEAD // 2], [*sizes, (i + 1) * HEAD // 2]
        return ops.slice(t, starts, ends)

    def turned(t: Any) -> Any:
        x = as_float(fd, t)
        a, b = half(x, 0), half(x, 1)
        first = ops.sub(ops.mul(a, half(cos, 0)), ops.mul(b, half(sin, 0)))
        second = ops.add(ops.mul(b, half(cos, 1)), ops.mul(a, half(sin, 1)))
        return ops.cast(ops.cat([first, second], -1), t.dtype())

    return turned(q), turned(k)


def _torch_rope(q: torch.Tensor, k: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> Result:
    def turned(t: torch.Tensor) -> torch.Tensor:
        (a, b), (ca, cb), (sa, sb) = (wide(v).chunk(2, -1) for v in (t, c, s))
        return torch.cat((a * ca - b * sa, b * cb + a * sb), -1).to(t.dtype)

    return turned(q), turned(k)


def _rope_operands(m: int, n: int, dtype: torch.dtype) -> tuple[Operand, ...]:
    heads, keys = max(1, n // HEAD), max(1, n // (4 * HEAD))
    shapes = (1, heads, m, HEAD), (1, keys, m, HEAD), (m, HEAD), (m, HEAD)
    return tuple(Operand(s, dtype) for s in shapes)


# ------------------------------------------------------------------ dropout
def dropped_out(fd: FusionDefinition, x: Any) -> Any:
    """Defines dropout with scaling; its seed is a constant, so that a graph can contain it."""
    ops = fd.ops
    sizes = [x.size(i) for i in range(x.ndim)]
    drawn = ops.uniform(0.0, 1.0, sizes, rng_seed=20, rng_offset=0, dtype=DataType.Float)
    return ops.where(ops.lt(drawn, 1 - DROPPED), ops.mul(as_float(fd, x), 1 / (1 - DROPPED)), 0.0)


def dropout(fd: FusionDefinition, x: Any) -> Any:
    """Defines dropout."""
    return fd.ops.cast(dropped_out(fd, x), x.dtype())


def bias_dropout_add(fd: FusionDefinition, x: Any, b: Any, z: Any) -> Any:
    """Defines dropout(x + b) + z."""
    biased = fd.ops.add(as_float(fd, x), as_float(fd, b))
    return fd.ops.cast(fd.ops.add(dropped_out(fd, biased), as_float(fd, z)), x.dtype())


def dropout_backward(fd: FusionDefinition, dy: Any, mask: Any) -> Any:
    """Defines the gradient of dropout, given its mask."""
    scaled = fd.ops.mul(as_float(fd, dy), 1 / (1 - DROPPED))
    return fd.ops.cast(fd.ops.where(mask, scaled, 0.0), dy.dtype())


def _masked(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, wide(x) / (1 - DROPPED), 0.0).to(x.dtype)


def _torch_bias_dropout_add(x: torch.Tensor, b: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    kept = torch.nn.functional.dropout(wide(x) + wide(b), DROPPED, True)
    return (kept + wide(z)).to(x.dtype)


DROPOUT = Dropout(0, lambda x: (torch.zeros_like(x), x / (1 - DROPPED)), _masked)
BIAS_DROPOUT_ADD = Dropout(
    0,
    lambda x, b, z: (z, z + (x + b) / (1 - DROPPED)),
    lambda mask, x, b, z: _masked(mask, x + b) + z,
)

POINTWISE = {
    # The kernel that reads and writes a tensor once, with which other cells are compared.
    "negative": Pattern(lambda fd, x: fd.ops.cast(fd.ops.neg(x), x.dtype()), torch.neg, full(1)),
    "cast": Pattern(lambda fd, x: fd.ops.cast(x, _other(x.dtype())), _torch_cast, full(1)),
    "gelu_mul_add": Pattern(
        gelu_mul_add,
        lambda x, y, z: (torch_gelu(wide(x)) * wide(y) + wide(z)).to(x.dtype),
        full(3),
    ),
    "bias_gelu": Pattern(
        bias_gelu,
        lambda x, b: torch_gelu(wide(x) + wide(b)).to(x.dtype),
        rows_and_weights(1, 1),
    ),
    "bias_residual": Pattern(
        bias_residual,
        lambda x, b, r: (wide(x) + wide(b) + wide(r)).to(x.dtype),
        lambda m, n, dtype: (
            Operand((m, n), dtype),
            Operand((n,), dtype),
            Operand((m, n), dtype),
        ),
    ),
    "silu_mul": Pattern(silu_mul, _torch_silu_mul, full(2)),
    "silu_mul_backward": Pattern(silu_mul_backward, _torch_silu_mul_backward, full(3)),
    "adamw": Pattern(adamw, _torch_adamw, _adamw_operands),
    "rope": Pattern(rope, _torch_rope, _rope_operands),
    "dropout": Pattern(
        dropout,
        lambda x: torch.nn.functional.dropout(x, DROPPED, True),
        full(1),
        dropout=DROPOUT,
    ),
    "dropout_backward": Pattern(
        dropout_backward,
        lambda dy, mask: _masked(mask, dy),
        lambda m, n, dtype: (Operand((m, n), dtype), Operand((m, n), torch.bool)),
    ),
    "bias_dropout_add": Pattern(
        bias_dropout_add,
        _torch_bias_dropout_add,
        lambda m, n, dtype: (
            Operand((m, n), dtype),
            Operand((n,), dtype),
            Operand((m, n), dtype),
        ),
        dropout=BIAS_DROPOUT_ADD,
    ),
}
