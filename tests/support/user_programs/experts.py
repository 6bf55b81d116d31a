"""Feed-forward layers and mixtures of experts: gating, routing, grouped products."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

TOKENS, HIDDEN, INNER, EXPERTS = 16, 8, 24, 4


@program(
    lambda: [
        torch.randn(4, TOKENS, HIDDEN).bfloat16(),
        *(
            torch.randn(s).bfloat16() * 0.3
            for s in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        ),
    ],
    dtypes=[torch.bfloat16],
    cuts={0: 0},
    tolerance=5e-2,
)
def swiglu_mlp(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, HIDDEN], contiguity=[True] * 3, dtype=DataType.BFloat16)
    gate_w = fd.define_tensor(
        shape=[INNER, HIDDEN], contiguity=[True, True], dtype=DataType.BFloat16
    )
    up_w = fd.define_tensor(shape=[INNER, HIDDEN], contiguity=[True, True], dtype=DataType.BFloat16)
    down_w = fd.define_tensor(
        shape=[HIDDEN, INNER], contiguity=[True, True], dtype=DataType.BFloat16
    )
    gate = fd.ops.cast(fd.ops.linear(x, gate_w), DataType.Float)
    up = fd.ops.cast(fd.ops.linear(x, up_w), DataType.Float)
    swish = fd.ops.mul(gate, fd.ops.reciprocal(fd.ops.add(1.0, fd.ops.exp(fd.ops.neg(gate)))))
    inner = fd.ops.cast(fd.ops.mul(swish, up), DataType.BFloat16)
    fd.add_output(fd.ops.linear(inner, down_w))


@swiglu_mlp.expects
def _(x, gate, up, down):
    return [(F.silu(x @ gate.T) * (x @ up.T)) @ down.T]


@program(
    lambda: [torch.randn(TOKENS, HIDDEN), torch.randn(INNER, HIDDEN), torch.randn(INNER)],
    cuts={1: 0, 2: 0},
)
def linear_gelu_tanh(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], [True, True], DataType.Float)
    w = fd.define_tensor([-1, -1], [True, True], DataType.Float)
    b = fd.define_tensor([-1], [True], DataType.Float)
    h = fd.ops.linear(x, w, b)
    cube = fd.ops.pow(h, 3.0)
    inner = fd.ops.mul(math.sqrt(2 / math.pi), fd.ops.add(h, fd.ops.mul(0.044715, cube)))
    fd.add_output(fd.ops.mul(fd.ops.mul(0.5, h), fd.ops.add(1.0, fd.ops.tanh(inner))))


@linear_gelu_tanh.expects
def _(x, w, b):
    return [F.gelu(F.linear(x, w, b), approximate="tanh")]


@program(
    lambda: [
        torch.randn(TOKENS, HIDDEN).half(),
        torch.randn(TOKENS, HIDDEN).half(),
        torch.randn(HIDDEN).half(),
    ],
    dtypes=[torch.half, torch.half, torch.float],
    cuts={0: 0, 1: 0},
    tolerance=5e-3,
)
def bias_gelu_backward(fd: FusionDefinition) -> None:
    grad, x = (fd.define_tensor([-1, -1], [True, True], DataType.Half) for _ in range(2))
    bias = fd.define_tensor([-1], [True], DataType.Half)
    h = fd.ops.add(x, bias)  # promoted to Float
    cdf = fd.ops.mul(0.5, fd.ops.add(1.0, fd.ops.erf(fd.ops.mul(h, 1 / math.sqrt(2)))))
    pdf = fd.ops.mul(fd.ops.exp(fd.ops.mul(-0.5, fd.ops.mul(h, h))), 1 / math.sqrt(2 * math.pi))
    dh = fd.ops.mul(grad, fd.ops.add(cdf, fd.ops.mul(h, pdf)))
    fd.add_output(fd.ops.cast(fd.ops.mul(h, cdf), DataType.Half))
    fd.add_output(fd.ops.cast(dh, DataType.Half))
    fd.add_output(fd.ops.sum(dh, 0))


@bias_gelu_backward.expects
def _(grad, x, bias):
    x.requires_grad_()
    bias.requires_grad_()
    y = F.gelu(x + bias)
    y.backward(grad)
    return [y.detach(), x.grad, bias.grad]


@program(
    lambda: [torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN)],
    dtypes=[torch.float, torch.int64, torch.float],
    cuts={0: 0},
)
def moe_gating(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    router = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    logits = fd.ops.linear(x, router)
    e = fd.ops.exp(fd.ops.sub(logits, fd.ops.max(logits, dims=[1], keepdim=True)))
    probs = fd.ops.div(e, fd.ops.sum(e, dims=[1], keepdim=True))
    k = fd.define_scalar(2, dtype=DataType.Int)
    weights, experts = fd.ops.topk(probs, k, dim=1, largest=True, sorted=True)
    weights = fd.ops.div(weights, fd.ops.sum(weights, dims=[1], keepdim=True))
    # The load of each expert: how many of its slots chose it.
    ids = fd.ops.iota(fd.ops.size(router, 0), dtype=DataType.Int)
    chosen = fd.ops.eq(
        fd.ops.broadcast(experts, [False, False, True]), fd.ops.broadcast(ids, [True, True, False])
    )
    load = fd.ops.sum(fd.ops.cast(chosen, DataType.Float), dims=[0, 1])
    aux = fd.ops.mul(load, fd.ops.sum(probs, dims=[0]))
    fd.add_output(weights)
    fd.add_output(experts)
    fd.add_output(aux)


@moe_gating.expects
def _(x, router):
    probs = (x @ router.T).softmax(1)
    weights, experts = probs.topk(2, 1)
    load = F.one_hot(experts, EXPERTS).sum((0, 1)).double()
    return [weights / weights.sum(1, keepdim=True), experts, load * probs.sum(0)]


def _routed() -> list:
    experts = torch.randint(EXPERTS, (TOKENS,))
    return [
        torch.randn(TOKENS, HIDDEN).bfloat16(),
        experts,
        torch.randn(EXPERTS, HIDDEN, INNER).bfloat16(),
        torch.rand(TOKENS),
    ]


@program(_routed, dtypes=[torch.bfloat16], tolerance=5e-2)
def moe_by_grouped_mm(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, HIDDEN], [True, True], DataType.BFloat16)
    experts = fd.define_tensor([-1], [True], DataType.Int)
    w = fd.define_tensor([EXPERTS, HIDDEN, INNER], [True, True, True], DataType.BFloat16)
    scale = fd.define_tensor([-1], [True], DataType.Float)
    order = fd.ops.argsort(experts, dim=0, descending=False, stable=True)
    back = fd.ops.argsort(order, 0, stable=True)
    grouped = fd.ops.index_select(x, order, dim=0)
    ids = fd.ops.iota(EXPERTS, dtype=DataType.Int)
    one_hot = fd.ops.eq(
        fd.ops.broadcast(experts, [False, True]), fd.ops.broadcast(ids, [True, False])
    )
    counts = fd.ops.sum(fd.ops.cast(one_hot, DataType.Int32), dims=[0], dtype=DataType.Int32)
    offsets = fd.ops.cumsum(counts, dim=0)
    out = fd.ops.grouped_mm(grouped, w, offsets)
    out = fd.ops.index_select(out, back, 0)
    out = fd.ops.mul(out, fd.ops.broadcast(scale, [False, True]))
    fd.add_output(fd.ops.cast(out, DataType.BFloat16))


@moe_by_grouped_mm.expects
def _(x, experts, w, scale):
    return [torch.einsum("th,thi->ti", x, w[experts]) * scale[:, None]]


@program(
    lambda: [
        torch.rand(TOKENS, 2),
        torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)]),
    ],
    cuts={0: 0, 1: 0},
)
def routing_map_by_scatter(fd: FusionDefinition) -> None:
    weights = fd.define_tensor(shape=[-1, 2], contiguity=[True, True], dtype=DataType.Float)
    index = fd.define_tensor(shape=[-1, 2], contiguity=[True, True], dtype=DataType.Int)
    zeros = fd.ops.full([fd.ops.size(weights, 0), EXPERTS], fd.define_scalar(0.0), DataType.Float)
    fd.add_output(fd.ops.scatter(zeros, index, weights, 1))
    ones = fd.ops.scatter(zeros, index, src=fd.define_scalar(1.0, DataType.Float), dim=1)
    fd.add_output(fd.ops.gt(ones, 0.5))


@routing_map_by_scatter.expects
def _(weights, index):
    zeros = torch.zeros(TOKENS, EXPERTS, dtype=torch.double)
    return [zeros.scatter(1, index, weights), zeros.scatter(1, index, 1.0) > 0.5]


@program(
    lambda: [torch.randn(TOKENS, 12), torch.tensor(4), 3],
    dtypes=[torch.float, torch.int64, torch.float],
)
def top_k_filter(fd: FusionDefinition) -> None:
    """Sets logits below the k-th largest to -inf, for sampling; a temperature divides them."""
    logits = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    temperature = fd.define_tensor(shape=[], dtype=DataType.Int, is_cpu=True)
    k = fd.define_scalar(DataType.Int)
    scaled = fd.ops.truediv(logits, temperature)
    values, indices = fd.ops.topk(scaled, k, -1, True, True)
    least = fd.ops.min(values, [1], keepdim=True)
    fd.add_output(fd.ops.where(fd.ops.lt(scaled, least), -float("inf"), scaled))
    fd.add_output(indices)
    fd.add_output(values)


@top_k_filter.expects
def _(logits, temperature, k):
    scaled = logits / temperature
    values, indices = scaled.topk(k)
    return [scaled.masked_fill(scaled < values[:, -1:], -float("inf")), indices, values]


@program(lambda: [torch.randn(TOKENS, 12).softmax(1)])
def nucleus_filter(fd: FusionDefinition) -> None:
    """Keeps the fewest likeliest tokens whose probabilities add up to 0.9, renormalised."""
    p = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    order = fd.ops.argsort(p, dim=1, descending=True, stable=True)
    ranked = fd.ops.take_along_axis(p, order, dim=1)
    before = fd.ops.sub(fd.ops.cumsum(ranked, 1), ranked)
    kept = fd.ops.where(fd.ops.lt(before, 0.9), ranked, 0.0)
    kept = fd.ops.truediv(kept, fd.ops.sum(kept, dim=1, keepdim=True))
    back = fd.ops.argsort(order, 1)
    fd.add_output(fd.ops.take_along_axis(kept, back, 1))


@nucleus_filter.expects
def _(p):
    ranked, order = p.sort(dim=1, descending=True, stable=True)
    kept = torch.where(ranked.cumsum(1) - ranked < 0.9, ranked, 0.0)
    kept = kept / kept.sum(1, keepdim=True)
    return [torch.zeros_like(p).scatter(1, order, kept)]


@program(
    lambda: [
        torch.randn(TOKENS, HIDDEN),
        torch.randint(EXPERTS, (TOKENS,)),
        torch.randn(EXPERTS, HIDDEN),
    ],
    cuts={0: 0, 1: 0},
)
def expert_bias_by_index(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    expert = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Int)
    bias = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    picked = fd.ops.index_select(bias, expert, 0)
    first = fd.ops.select(bias, fd.define_scalar(0, dtype=DataType.Int), 0)
    fd.add_output(fd.ops.addcmul(x, picked, fd.ops.broadcast(first, [True, False]), 0.5))


@expert_bias_by_index.expects
def _(x, expert, bias):
    return [x + 0.5 * bias[expert] * bias[0]]
