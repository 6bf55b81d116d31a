"""Fusions for the sharding tests, with their torch meaning.

Each builder defines a fusion of global tensors and returns its inputs by name. The tests add the
annotations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fuser import ops
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ops.define import define_tensor
from tests.support.rank_by_rank import X, shard_axis

F = torch.nn.functional


@dataclass
class Model:
    """A fusion, its inputs and named results, and a way to make inputs."""

    fusion: Fusion
    tensors: dict[str, TensorView]
    shapes: dict[str, list[int]]

    def random_inputs(self, seed: int, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns float64 inputs; the sizes `b`, `s` replace each -1 in a shape, in order."""
        print("seed", seed)
        gen = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            symbolic = iter(sizes.values())
            concrete = [next(symbolic) if n == -1 else n for n in shape]
            made[name] = torch.randn(concrete, generator=gen, dtype=torch.float64)
        return made


def inputs(
    shapes: dict[str, list[int]], dtype: DataType = DataType.Double
) -> dict[str, TensorView]:
    """Defines contiguous inputs in the active fusion."""
    from fuser.ir.fusion_guard import active_fusion

    made = {name: define_tensor(shape, True, dtype) for name, shape in shapes.items()}
    for tv in made.values():
        active_fusion().add_input(tv)
    return made


def tensor(value: object) -> TensorView:
    """Returns the result of an op function as a tensor."""
    assert isinstance(value, TensorView)
    return value


def set_mesh(mesh: DeviceMesh, *tensors: TensorView) -> None:
    for tv in tensors:
        tv.set_device_mesh(mesh)


# ------------------------------------------------------------------ MLP
def mlp(hidden: int = 8, wide: int = 16, *, bias: bool = True) -> Model:
    """An MLP of x [b, s, hidden]: down(gelu(up(x)))."""
    shapes = {"x": [-1, -1, hidden], "w1": [wide, hidden], "w2": [hidden, wide]}
    if bias:
        shapes |= {"b1": [wide], "b2": [hidden]}
    fusion = Fusion()
    with FusionGuard(fusion):
        t = inputs(shapes)
        up = ops.linear(t["x"], t["w1"], t.get("b1"))
        act = gelu(up)
        out = ops.linear(act, t["w2"], t.get("b2"))
        fusion.add_output(out)
    return Model(fusion, {**t, "up": up, "act": act, "out": out}, shapes)


def mlp_reference(t: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(t["x"], t["w1"], t.get("b1"))), t["w2"], t.get("b2"))


def gelu(x: TensorView) -> TensorView:
    """Returns x * 0.5 * (1 + erf(x / sqrt 2)), built from elementwise ops."""
    inner = ops.erf(ops.mul(x, 1 / math.sqrt(2)))
    return ops.mul(ops.mul(x, 0.5), ops.add(inner, 1.0))


# ------------------------------------------------------------------ encoder layer
def encoder_layer(hidden: int = 24, heads: int = 6, wide: int = 48) -> Model:
    """A post-LayerNorm encoder layer of x [b, s, hidden] with a mask [b, s]."""
    shapes: dict[str, list[int]] = {"x": [-1, -1, hidden], "mask": [-1, -1]}
    for name in "qkvo":
        shapes |= {f"w{name}": [hidden, hidden], f"b{name}": [hidden]}
    shapes |= {"w1": [wide, hidden], "b1": [wide], "w2": [hidden, wide], "b2": [hidden]}
    shapes |= {f"{n}{k}": [hidden] for k in (1, 2) for n in ("gamma", "beta")}
    fusion = Fusion()
    with FusionGuard(fusion):
        t = inputs(shapes)
        x = t["x"]
        size = hidden // heads

        def split_heads(name: str) -> TensorView:
            y = ops.linear(x, t[f"w{name}"], t[f"b{name}"])
            y = ops.reshape(y, [x.size(0), x.size(1), heads, size])
            return ops.permute(y, [0, 2, 1, 3])

        q, k, v = (split_heads(n) for n in "qkv")
        scores = ops.mul(ops.matmul(q, ops.permute(k, [0, 1, 3, 2])), 1 / math.sqrt(size))
        allowed = ops.broadcast(t["mask"], [False, True, True, False])
        scores = ops.add(scores, ops.mul(ops.sub(1.0, allowed), -1e4))
        context = ops.matmul(softmax(scores), v)
        context = ops.permute(context, [0, 2, 1, 3])
        context = ops.reshape(context, [x.size(0), x.size(1), hidden])
        attended = ops.linear(context, t["wo"], t["bo"])
        y = layer_norm(ops.add(x, attended), t["gamma1"], t["beta1"])
        up = gelu(ops.linear(y, t["w1"], t["b1"]))
        down = ops.linear(up, t["w2"], t["b2"])
        out = layer_norm(ops.add(y, down), t["gamma2"], t["beta2"])
        fusion.add_output(out)
    return Model(fusion, {**t, "out": out}, shapes)


def softmax(x: TensorView) -> TensorView:
    last = x.ndim - 1
    e = ops.exp(ops.sub(x, ops.max(x, last, True)))
    return ops.div(e, ops.sum(e, last, True))


def layer_norm(x: TensorView, gamma: TensorView, beta: TensorView) -> TensorView:
    var, mean = ops.var_mean(x, [x.ndim - 1], 0, True)
    y = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))
    return ops.add(ops.mul(y, gamma), beta)


def encoder_reference(t: dict[str, torch.Tensor], heads: int = 6) -> torch.Tensor:
    x = t["x"]
    b, s, h = x.shape

    def split_heads(name: str) -> torch.Tensor:
        return F.linear(x, t[f"w{name}"], t[f"b{name}"]).view(b, s, heads, -1).transpose(1, 2)

    q, k, v = (split_heads(n) for n in "qkv")
    scores = q @ k.transpose(-1, -2) / math.sqrt(h // heads)
    scores = scores + (1 - t["mask"])[:, None, None, :] * -1e4
    context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, h)
    y = x + F.linear(context, t["wo"], t["bo"])
    y = F.layer_norm(y, [h], t["gamma1"], t["beta1"])
    z = y + F.linear(F.gelu(F.linear(y, t["w1"], t["b1"])), t["w2"], t["b2"])
    return F.layer_norm(z, [h], t["gamma2"], t["beta2"])


def shard_encoder(model: Model, mesh: DeviceMesh) -> None:
    """Cuts columns of qkv and up, and rows of out and down, along mesh_x, as users do."""
    count = mesh.size_of(X)
    set_mesh(mesh, *(model.tensors[n] for n in model.shapes))
    for name in ("wq", "wk", "wv", "w1", "bq", "bk", "bv", "b1"):
        shard_axis(model.tensors[name], 0, count)
    for name in ("wo", "w2"):
        shard_axis(model.tensors[name], 1, count)
