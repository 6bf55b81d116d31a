"""Attention from matmuls and by sdpfa, with dropout, masks, rotary positions and key caches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

BATCH, HEADS, LENGTH, WIDTH = 4, 4, 16, 8
QUERY = (BATCH, HEADS, LENGTH, WIDTH)


def _qkv(dtype: torch.dtype = torch.float) -> list:
    return [torch.randn(QUERY).to(dtype) for _ in range(3)]


@program(lambda: _qkv(), cuts={0: 0, 1: 0, 2: 0}, tolerance=1e-4)
def causal_attention_by_triu(fd: FusionDefinition) -> None:
    q, k, v = (fd.define_tensor([-1, HEADS, LENGTH, WIDTH], [True] * 4) for _ in range(3))
    kt = fd.ops.permute(k, dims=[0, 1, 3, 2])
    scores = fd.ops.mul(fd.ops.matmul(q, kt), 1 / math.sqrt(WIDTH))
    full = fd.ops.full(
        [LENGTH, LENGTH], fd.define_scalar(float("-inf"), DataType.Float), DataType.Float
    )
    mask = fd.ops.triu(full, 1)
    keep = fd.ops.eq(mask, 0.0)
    bias = fd.ops.where(keep, 0.0, float("-inf"))
    bias = fd.ops.cast(bias, DataType.Float)
    scores = fd.ops.add(scores, fd.ops.broadcast_in_dim(bias, fd.ops.shape(scores), [2, 3]))
    top = fd.ops.max(scores, dims=[3], keepdim=True)
    e = fd.ops.exp(fd.ops.sub(scores, top))
    probs = fd.ops.truediv(e, fd.ops.sum(e, dims=[3], keepdim=True))
    fd.add_output(fd.ops.matmul(probs, v))


@causal_attention_by_triu.expects
def _(q, k, v):
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def _drop(fd, probs, noise, rate):
    keep = fd.ops.ge(noise, rate)
    return fd.ops.mul(fd.ops.mul(probs, fd.ops.cast(keep, DataType.Float)), 1.0 / (1.0 - rate))


def _attention_with(noise, rate, q, k, v):
    probs = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)
    return (probs * (noise >= rate).double() / (1 - rate)) @ v


@program(
    lambda: [*(t.bfloat16() for t in _qkv()), 1234, 0],
    dtypes=[torch.float, torch.bfloat16],
    draws=1,
    cuts={0: 0, 1: 0, 2: 0},
    tolerance=3e-2,
)
def attention_with_seeded_dropout(fd: FusionDefinition) -> None:
    q = fd.define_tensor(
        shape=[-1, HEADS, -1, WIDTH], contiguity=[True] * 4, dtype=DataType.BFloat16
    )
    k = fd.define_tensor(
        shape=[-1, HEADS, -1, WIDTH], contiguity=[True] * 4, dtype=DataType.BFloat16
    )
    v = fd.define_tensor(
        shape=[-1, HEADS, -1, WIDTH], contiguity=[True] * 4, dtype=DataType.BFloat16
    )
    seed = fd.define_scalar(None, dtype=DataType.Int)
    offset = fd.define_scalar(None, dtype=DataType.Int)
    scores = fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2]))
    scores = fd.ops.mul(fd.ops.cast(scores, DataType.Float), WIDTH**-0.5)
    e = fd.ops.exp(fd.ops.sub(scores, fd.ops.max(scores, [-1], keepdim=True)))
    probs = fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True))
    noise = fd.ops.uniform(
        0.0, 1.0, fd.ops.shape(probs), rng_seed=seed, rng_offset=offset, dtype=DataType.Float
    )
    dropped = fd.ops.cast(_drop(fd, probs, noise, 0.25), DataType.BFloat16)
    fd.add_output(noise)
    fd.add_output(fd.ops.matmul(dropped, v))


@attention_with_seeded_dropout.expects
def _(q, k, v, seed, offset, noise):
    return [noise, _attention_with(noise, 0.25, q, k, v)]


@program(lambda: _qkv(), draws=1, cuts={0: 1, 1: 1, 2: 1}, tolerance=1e-4)
def attention_with_dropout(fd: FusionDefinition) -> None:
    q, k, v = (fd.define_tensor(list(QUERY), [True] * 4) for _ in range(3))
    scores = fd.ops.truediv(fd.ops.matmul(q, fd.ops.permute(k, (0, 1, 3, 2))), math.sqrt(WIDTH))
    e = fd.ops.exp(fd.ops.sub(scores, fd.ops.max(scores, dim=-1, keepdim=True)))
    probs = fd.ops.truediv(e, fd.ops.sum(e, dim=-1, keepdim=True))
    noise = fd.ops.rand_like(probs)
    fd.add_output(noise)
    fd.add_output(fd.ops.matmul(_drop(fd, probs, noise, 0.1), v))


@attention_with_dropout.expects
def _(q, k, v, noise):
    return [noise, _attention_with(noise, 0.1, q, k, v)]


@program(
    lambda: _qkv(torch.half),
    dtypes=[torch.half, torch.float],
    cuts={0: 0, 1: 0, 2: 0},
    tolerance=5e-3,
)
def sdpfa_forward(fd: FusionDefinition) -> None:
    q, k, v = (
        fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True] * 4, dtype=DataType.Half)
        for _ in range(3)
    )
    dropout_p = fd.define_scalar(0.0, dtype=DataType.Double)
    is_causal = fd.define_scalar(True, dtype=DataType.Bool)
    out, logsumexp, _, _ = fd.ops.sdpfa_fwd(
        q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=None
    )
    fd.add_output(out)
    fd.add_output(logsumexp)


@sdpfa_forward.expects
def _(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    return [scores.softmax(-1) @ v, scores.logsumexp(-1)]


@program(
    lambda: [*_qkv(torch.bfloat16), torch.randn(QUERY).bfloat16()],
    dtypes=[torch.bfloat16] * 4,
    cuts={0: 1, 1: 1, 2: 1, 3: 1},
    tolerance=6e-2,
)
def sdpfa_forward_and_backward(fd: FusionDefinition) -> None:
    q, k, v, grad = (
        fd.define_tensor(
            shape=[BATCH, HEADS, LENGTH, WIDTH], contiguity=True, dtype=DataType.BFloat16
        )
        for _ in range(4)
    )
    dropout_p = fd.define_scalar(value=0.0, dtype=DataType.Double)
    is_causal = fd.define_scalar(value=False, dtype=DataType.Bool)
    scale = fd.define_scalar(value=0.3, dtype=DataType.Double)
    out, lse, seed, offset = fd.ops.sdpfa_fwd(q, k, v, None, None, dropout_p, is_causal, scale)
    dq, dk, dv = fd.ops.sdpfa_bwd(
        grad, q, k, v, out, lse, dropout_p, is_causal, seed, offset, scale
    )
    for result in (out, dq, dk, dv):
        fd.add_output(result)


@sdpfa_forward_and_backward.expects
def _(q, k, v, grad):
    for t in (q, k, v):
        t.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


@program(
    lambda: [torch.randn(QUERY), torch.randn(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH)],
    cuts={0: 0},
)
def rope_by_halves(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[BATCH, HEADS, LENGTH, WIDTH], contiguity=[True] * 4)
    cos = fd.define_tensor(shape=[LENGTH, WIDTH], contiguity=[True, True])
    sin = fd.define_tensor(shape=[LENGTH, WIDTH], contiguity=[True, True])
    first = fd.ops.slice(x, [0, 0, 0, 0], [BATCH, HEADS, LENGTH, WIDTH // 2], [1, 1, 1, 1], False)
    second = fd.ops.slice(
        x,
        start_indices=[0, 0, 0, WIDTH // 2],
        end_indices=[BATCH, HEADS, LENGTH, WIDTH],
        strides=[1, 1, 1, 1],
        manual_normalization=False,
    )
    rotated = fd.ops.cat([fd.ops.neg(second), first], dim=-1)
    c = fd.ops.broadcast_in_dim(cos, shape=list(QUERY), broadcast_dims=[2, 3])
    s = fd.ops.broadcast_in_dim(sin, shape=list(QUERY), broadcast_dims=[2, 3])
    fd.add_output(fd.ops.add(fd.ops.mul(x, c), fd.ops.mul(rotated, s)))


@rope_by_halves.expects
def _(x, cos, sin):
    rotated = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
    return [x * cos + rotated * sin]


@program(
    lambda: [
        torch.randn(BATCH, LENGTH, HEADS, WIDTH).bfloat16(),
        torch.randn(LENGTH, WIDTH // 2, 2),
    ],
    dtypes=[torch.bfloat16],
    cuts={0: 0},
    tolerance=2e-2,
)
def rope_by_pairs(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, -1, WIDTH], contiguity=[True] * 4, dtype=DataType.BFloat16)
    table = fd.define_tensor(shape=[-1, WIDTH // 2, 2], contiguity=[True] * 3)
    b, length, heads = (fd.ops.size(x, i) for i in range(3))
    pairs = fd.ops.reshape(fd.ops.cast(x, DataType.Float), [b, length, heads, WIDTH // 2, 2])
    zero, half, ends = [0] * 5, WIDTH // 2, [b, length, heads]
    re = fd.ops.slice(pairs, zero, [*ends, half, 1])
    im = fd.ops.slice(pairs, [0, 0, 0, 0, 1], [*ends, half, 2])
    wide = fd.ops.broadcast_in_dim(table, [b, length, heads, half, 2], [1, 3, 4])
    c = fd.ops.slice(wide, zero, [*ends, half, 1])
    s = fd.ops.slice(wide, [0, 0, 0, 0, 1], [*ends, half, 2])
    real = fd.ops.sub(fd.ops.mul(re, c), fd.ops.mul(im, s))
    imag = fd.ops.add(fd.ops.mul(im, c), fd.ops.mul(re, s))
    out = fd.ops.reshape(fd.ops.cat([real, imag], 4), [b, length, heads, WIDTH])
    fd.add_output(fd.ops.cast(out, DataType.BFloat16))


@rope_by_pairs.expects
def _(x, table):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2).contiguous())
    turned = pairs * torch.view_as_complex(table)[None, :, None, :]
    return [torch.view_as_real(turned).flatten(3)]


@program(lambda: [torch.randn(BATCH, HEADS, LENGTH, LENGTH), torch.rand(HEADS)], cuts={0: 1, 1: 0})
def alibi_bias(fd: FusionDefinition) -> None:
    scores = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True, True, True, True])
    slopes = fd.define_tensor(shape=[-1], contiguity=[True])
    b, h, t, s = fd.ops.shape(scores)
    rows = fd.ops.iota(
        t, fd.define_scalar(0, DataType.Int), fd.define_scalar(1, DataType.Int), DataType.Int
    )
    columns = fd.ops.iota(s)
    distance = fd.ops.sub(
        fd.ops.broadcast(columns, [True, False]), fd.ops.broadcast(rows, [False, True])
    )
    future = fd.ops.gt(distance, 0)
    bias = fd.ops.mul(
        fd.ops.broadcast_in_dim(slopes, [h, t, s], [0]),
        fd.ops.cast(fd.ops.broadcast(distance, [True, False, False]), DataType.Float),
    )
    biased = fd.ops.add(scores, fd.ops.broadcast(bias, [True, False, False, False]))
    fd.add_output(
        fd.ops.where(fd.ops.broadcast_in_dim(future, [b, h, t, s], [2, 3]), float("-inf"), biased)
    )


@alibi_bias.expects
def _(scores, slopes):
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    biased = scores + slopes[:, None, None] * (columns - rows)
    return [biased.masked_fill(columns > rows, float("-inf"))]


@program(
    lambda: [
        torch.randn(BATCH, 8, LENGTH, WIDTH),
        torch.randn(BATCH, 2, LENGTH, WIDTH),
        torch.randn(BATCH, 2, LENGTH, WIDTH),
    ],
    cuts={0: 0, 1: 0, 2: 0},
    tolerance=1e-4,
)
def grouped_query_attention(fd: FusionDefinition) -> None:
    q = fd.define_tensor(shape=[-1, 8, -1, WIDTH], contiguity=True)
    k = fd.define_tensor(shape=[-1, 2, -1, WIDTH], contiguity=True)
    v = fd.define_tensor(shape=[-1, 2, -1, WIDTH], contiguity=True)
    b, length = fd.ops.size(q, 0), fd.ops.size(q, 2)

    def repeat(t):
        t = fd.ops.broadcast_in_dim(t, [b, 2, 4, length, WIDTH], [0, 1, 3, 4])
        return fd.ops.reshape(t, [b, 8, length, WIDTH])

    scores = fd.ops.mul(fd.ops.matmul(q, fd.ops.permute(repeat(k), [0, 1, 3, 2])), WIDTH**-0.5)
    e = fd.ops.exp(fd.ops.sub(scores, fd.ops.max(scores, [3], True)))
    fd.add_output(fd.ops.matmul(fd.ops.div(e, fd.ops.sum(e, [3], True)), repeat(v)))


@grouped_query_attention.expects
def _(q, k, v):
    return [F.scaled_dot_product_attention(q, k, v, enable_gqa=True)]


@program(
    lambda: [
        torch.randn(BATCH, HEADS, LENGTH, WIDTH),
        torch.randn(BATCH, HEADS, 1, WIDTH),
        torch.tensor(5),
        torch.randn(BATCH, HEADS, 1, WIDTH),
    ],
    updates=(0,),
    cuts={0: 0, 1: 0, 3: 0},
    tolerance=1e-4,
)
def key_cache_step(fd: FusionDefinition) -> None:
    """One decoding step: the new key is written to its position in the cache, in place."""
    cache = fd.define_tensor(shape=[-1, HEADS, LENGTH, WIDTH], contiguity=[True] * 4)
    new = fd.define_tensor(shape=[-1, HEADS, 1, WIDTH], contiguity=[True, True, None, True])
    position = fd.define_tensor(shape=[], contiguity=[], dtype=DataType.Int, is_cpu=True)
    query = fd.define_tensor(shape=[-1, HEADS, 1, WIDTH], contiguity=[True, True, None, True])
    at = fd.ops.broadcast(
        fd.ops.eq(fd.ops.iota(LENGTH, dtype=DataType.Int), position), [True, True, False, True]
    )
    updated = fd.ops.where(at, new, cache)
    scores = fd.ops.matmul(query, fd.ops.permute(updated, [0, 1, 3, 2]))
    seen = fd.ops.le(fd.ops.iota(LENGTH), position)
    scores = fd.ops.where(fd.ops.broadcast(seen, [True, True, True, False]), scores, -1e4)
    fd.add_output(updated, cache)
    fd.add_output(scores)


@key_cache_step.expects
def _(cache, new, position, query):
    cache[:, :, int(position)] = new[:, :, 0]
    scores = query @ cache.transpose(-1, -2)
    scores[..., int(position) + 1 :] = -1e4
    return [scores, cache]


@program(
    lambda: [torch.randn(BATCH, LENGTH, 3 * HEADS * WIDTH).bfloat16(), torch.randn(8, 8)],
    dtypes=[torch.bfloat16] * 3,
    cuts={0: 0},
)
def split_heads_of_qkv(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, 96], contiguity=[True, True, True], dtype=DataType.BFloat16)
    fd.define_tensor(shape=[-1, -1], contiguity=[False, True])
    b, s = fd.ops.size(x, 0), fd.ops.size(x, 1)
    for i in range(3):
        part = fd.ops.slice(x, start_indices=[0, 0, 32 * i], end_indices=[b, s, 32 * (i + 1)])
        heads = fd.ops.reshape(part, new_shape=[b, s, HEADS, WIDTH])
        fd.add_output(fd.ops.permute(heads, dims=[0, 2, 1, 3]))


@split_heads_of_qkv.expects
def _(x, unused):
    b, s, _ = x.shape
    return [t.reshape(b, s, HEADS, WIDTH).transpose(1, 2) for t in x.chunk(3, -1)]
