"""Quantisation, bit operations, scans, random numbers and statistics."""

from __future__ import annotations

import math

import torch

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

ROWS, COLUMNS = 16, 24


@program(
    lambda: [torch.randn(ROWS, COLUMNS) * 3],
    dtypes=[torch.int32, torch.float, torch.float],
    cuts={0: 0},
)
def quantise_rows(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    amax = fd.ops.max(fd.ops.abs(x), dims=[1], keepdim=True)
    scale = fd.ops.div(amax, 127.0)
    q = fd.ops.round(fd.ops.div(x, scale))
    q = fd.ops.clamp(q, -127.0, 127.0)
    q = fd.ops.cast(q, dtype=DataType.Int32)
    fd.add_output(q)
    fd.add_output(fd.ops.squeeze(scale, dims=[1]))
    fd.add_output(fd.ops.mul(fd.ops.cast(q, dtype=DataType.Float), scale))


@quantise_rows.expects
def _(x):
    scale = (x.float().abs().amax(1, keepdim=True) / 127.0).float()
    q = (x.float() / scale).round().clamp(-127, 127)
    return [q.int(), scale[:, 0], q * scale]


@program(
    lambda: [
        torch.randn(ROWS, COLUMNS).half(),
        torch.tensor(0.05),
        torch.tensor(7, dtype=torch.int32),
    ],
    dtypes=[torch.int32, torch.half],
    cuts={0: 1},
)
def quantise_with_zero_point(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], [True, True], DataType.Half)
    scale = fd.define_tensor([], [], DataType.Float, True)
    zero_point = fd.define_tensor([], [], DataType.Int32, is_cpu=True)
    q = fd.ops.add(fd.ops.cast(fd.ops.round(fd.ops.truediv(x, scale)), DataType.Int32), zero_point)
    low, high = (
        fd.define_scalar(0, dtype=DataType.Int32),
        fd.define_scalar(15, dtype=DataType.Int32),
    )
    q = fd.ops.clamp(q, low, high)
    back = fd.ops.mul(fd.ops.cast(fd.ops.sub(q, zero_point), DataType.Float), scale)
    fd.add_output(q)
    fd.add_output(fd.ops.cast(back, DataType.Half))


@quantise_with_zero_point.expects
def _(x, scale, zero_point):
    q = ((x.float() / scale.float()).round().int() + zero_point).clamp(0, 15)
    return [q, (q - zero_point) * scale]


@program(
    lambda: [torch.randint(-(2**31), 2**31 - 1, (ROWS, 6), dtype=torch.int32), torch.rand(ROWS, 1)],
    cuts={0: 0, 1: 0},
)
def unpack_int4(fd: FusionDefinition) -> None:
    packed = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Int32)
    scale = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float)
    n, m = fd.ops.size(packed, 0), fd.ops.size(packed, 1)
    shifts = fd.ops.iota(8, 0, 4, DataType.Int32)
    wide = fd.ops.broadcast(packed, [False, False, True])
    nibbles = fd.ops.bitwise_and(
        fd.ops.bitwise_right_shift(wide, fd.ops.broadcast(shifts, [True, True, False])), 15
    )
    signed = fd.ops.where(fd.ops.ge(nibbles, 8), fd.ops.sub(nibbles, 16), nibbles)
    flat = fd.ops.reshape(signed, [n, fd.ops.mul(m, 8)])
    fd.add_output(fd.ops.mul(fd.ops.cast(flat, DataType.Float), scale))


@unpack_int4.expects
def _(packed, scale):
    nibbles = (packed.long()[:, :, None] >> (4 * torch.arange(8))) & 15
    return [torch.where(nibbles >= 8, nibbles - 16, nibbles).flatten(1) * scale]


@program(
    lambda: [torch.randn(ROWS, COLUMNS), 42, 3],
    draws=1,
    dtypes=[torch.float, torch.int64],
    cuts={0: 0},
)
def stochastic_rounding(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    seed, offset = fd.define_vector(2)
    low, high = fd.define_scalar(0.0), fd.define_scalar(1.0)
    noise = fd.ops.uniform(low, high, fd.ops.shape(x), rng_seed=seed, rng_offset=offset)
    scaled = fd.ops.mul(x, 16.0)
    down = fd.ops.floor(scaled)
    up = fd.ops.lt(noise, fd.ops.sub(scaled, down))
    fd.add_output(noise)
    fd.add_output(fd.ops.cast(fd.ops.add(down, up), dtype=DataType.Int))


@stochastic_rounding.expects
def _(x, seed, offset, noise):
    scaled = x * 16
    return [noise, (scaled.floor() + (noise < scaled - scaled.floor())).long()]


@program(lambda: [torch.randint(1, 2**31 - 1, (ROWS, COLUMNS))], cuts={0: 0})
def integer_hash(fd: FusionDefinition) -> None:
    """A 64-bit hash by xorshift and multiplication; buckets are remainders."""
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Int)
    h = fd.ops.bitwise_xor(x, fd.ops.bitwise_left_shift(x, 13))
    h = fd.ops.bitwise_xor(h, fd.ops.logical_right_shift(h, 7))
    h = fd.ops.bitwise_xor(h, fd.ops.bitwise_left_shift(h, 17))
    h = fd.ops.bitwise_and(fd.ops.mul(h, 0x9E3779B1), 0x7FFFFFFFFFFFFFFF)
    fd.add_output(h)
    fd.add_output(fd.ops.mod(h, 97))
    fd.add_output(fd.ops.gcd(h, 360))
    fd.add_output(fd.ops.eq(fd.ops.bitwise_and(fd.ops.bitwise_not(h), 1), 0))


@integer_hash.expects
def _(x):
    h = x ^ (x << 13)
    h = h ^ ((h >> 7) & (2**57 - 1))
    h = h ^ (h << 17)
    h = (h * 0x9E3779B1) & 0x7FFFFFFFFFFFFFFF
    return [h, h % 97, torch.gcd(h, torch.tensor(360)), h % 2 == 1]


@program(lambda: [torch.rand(ROWS, COLUMNS) < 0.2, torch.randn(ROWS, COLUMNS)], cuts={0: 0, 1: 0})
def segment_ids(fd: FusionDefinition) -> None:
    """Document ids in packed rows, positions within documents, and pairs that may attend."""
    starts = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Bool)
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    ids = fd.ops.cumsum(fd.ops.cast(starts, DataType.Int), 1)
    places = fd.ops.broadcast_in_dim(fd.ops.iota(fd.ops.size(x, 1)), fd.ops.shape(x), [1])
    last_start = fd.ops.cummax(fd.ops.where(starts, places, 0), dim=1)
    fd.add_output(ids)
    fd.add_output(fd.ops.sub(places, last_start))
    same = fd.ops.eq(
        fd.ops.broadcast(ids, [False, False, True]), fd.ops.broadcast(ids, [False, True, False])
    )
    fd.add_output(
        fd.ops.sum(fd.ops.where(same, fd.ops.broadcast(x, [False, True, False]), 0.0), [2])
    )


@segment_ids.expects
def _(starts, x):
    ids = starts.long().cumsum(1)
    places = torch.arange(COLUMNS).expand(ROWS, COLUMNS)
    last = torch.where(starts, places, 0).cummax(1).values
    same = ids[:, :, None] == ids[:, None, :]
    return [ids, places - last, (same * x[:, None, :]).sum(2)]


@program(
    lambda: [torch.rand(4, COLUMNS, 8) * 0.5 + 0.5, torch.randn(4, COLUMNS, 8)],
    cuts={0: 2, 1: 2},
    tolerance=1e-4,
)
def linear_recurrence(fd: FusionDefinition) -> None:
    """h[t] = a[t] h[t-1] + b[t], computed by cumulative products and sums along t."""
    a = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True] * 3)
    b = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True] * 3)
    decay = fd.ops.cumprod(a, dim=1)
    h = fd.ops.mul(decay, fd.ops.cumsum(fd.ops.truediv(b, decay), dim=-2))
    fd.add_output(h)
    fd.add_output(decay)
    fd.add_output(fd.ops.cummin(b, 1))


@linear_recurrence.expects
def _(a, b):
    h, rows = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        rows.append(h)
    return [torch.stack(rows, 1), a.cumprod(1), b.cummin(1).values]


@program(lambda: [torch.randn(ROWS, COLUMNS)], tolerance=1e-3, cuts={0: 0})
def moments(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1])
    var, mean = fd.ops.var_mean(x, dims=[0, 1], correction=1, keepdim=False)
    rows = fd.ops.var(x, [1], 1, True)
    z = fd.ops.div(fd.ops.sub(x, mean), fd.ops.sqrt(var))
    n = fd.ops.mul(fd.ops.size(x, 0), fd.ops.size(x, 1))
    skew = fd.ops.div(fd.ops.sum(fd.ops.pow(z, 3)), n)
    kurtosis = fd.ops.sub(fd.ops.div(fd.ops.sum(fd.ops.pow(z, 4.0)), n), 3.0)
    for result in (mean, var, rows, skew, kurtosis, fd.ops.prod(fd.ops.sign(x), dims=[0])):
        fd.add_output(result)


@moments.expects
def _(x):
    z = (x - x.mean()) / x.std()
    rows = x.var(1, keepdim=True)
    return [x.mean(), x.var(), rows, (z**3).mean(), (z**4).mean() - 3, x.sign().prod(0)]


@program(lambda: [torch.rand(200) * 8], dtypes=[torch.int64, torch.float], cuts={0: 0})
def histogram(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float)
    edges = fd.ops.iota(8, fd.define_scalar(0.0), fd.define_scalar(1.0), DataType.Float)
    wide = fd.ops.broadcast(x, [False, True])
    low = fd.ops.broadcast(edges, [True, False])
    inside = fd.ops.logical_and(fd.ops.ge(wide, low), fd.ops.lt(wide, fd.ops.add(low, 1.0)))
    counts = fd.ops.sum(inside, dims=[0])
    fd.add_output(counts)
    fd.add_output(fd.ops.truediv(counts, fd.ops.sum(counts)))


@histogram.expects
def _(x):
    counts = torch.bincount(x.long(), minlength=8)
    return [counts, counts.double() / 200]


@program(
    lambda: [torch.randn(ROWS, COLUMNS), 0.5, -2, torch.tensor(3.0, dtype=torch.double), 1.25],
    cuts={0: 0},
)
def polynomial(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    a = fd.define_scalar()
    b = fd.define_scalar(DataType.Int)
    c = fd.define_tensor(shape=[], contiguity=[], dtype=DataType.Double, is_cpu=True)
    d = fd.define_scalar(dtype=DataType.Double)
    inner = fd.ops.add(fd.ops.mul(a, x), b)
    scalar = fd.ops.sub(fd.ops.mul(d, d), fd.ops.neg(a))
    y = fd.ops.add(fd.ops.mul(fd.ops.add(fd.ops.mul(inner, x), c), x), scalar)
    fd.add_output(y)
    fd.add_output(fd.ops.remainder(y, b))
    fd.add_output(fd.ops.fmod(y, d))


@polynomial.expects
def _(x, a, b, c, d):
    y = ((a * x + b) * x + c) * x + d * d + a
    return [y, torch.remainder(y, b), torch.fmod(y, d)]


def _boxes(count: int) -> torch.Tensor:
    corner = torch.rand(count, 2)
    return torch.cat([corner, corner + torch.rand(count, 2)], 1)


@program(lambda: [_boxes(12), _boxes(8)], cuts={0: 0})
def box_iou(fd: FusionDefinition) -> None:
    a = fd.define_tensor(shape=[-1, 4], contiguity=[True, True])
    b = fd.define_tensor(shape=[-1, 4], contiguity=[True, True])

    def corners(t, axis):
        parts = []
        for i in range(4):
            part = fd.ops.slice(t, [0, i], [fd.ops.size(t, 0), i + 1])
            part = fd.ops.squeeze(part, [1])
            parts.append(fd.ops.broadcast(part, [axis == 1, axis == 0]))
        return parts

    ax0, ay0, ax1, ay1 = corners(a, 0)
    bx0, by0, bx1, by1 = corners(b, 1)
    w = fd.ops.relu(fd.ops.sub(fd.ops.minimum(ax1, bx1), fd.ops.maximum(ax0, bx0)))
    h = fd.ops.clamp(fd.ops.sub(fd.ops.minimum(ay1, by1), fd.ops.maximum(ay0, by0)), 0.0, None)
    inter = fd.ops.mul(w, h)
    area_a = fd.ops.mul(fd.ops.sub(ax1, ax0), fd.ops.sub(ay1, ay0))
    area_b = fd.ops.mul(fd.ops.sub(bx1, bx0), fd.ops.sub(by1, by0))
    fd.add_output(fd.ops.div(inter, fd.ops.sub(fd.ops.add(area_a, area_b), inter)))


@box_iou.expects
def _(a, b):
    low = torch.maximum(a[:, None, :2], b[:, :2])
    high = torch.minimum(a[:, None, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    area = [(t[:, 2:] - t[:, :2]).prod(1) for t in (a, b)]
    return [inter / (area[0][:, None] + area[1] - inter)]


@program(lambda: [7, 2, [6, 8]], draws=2, dtypes=[torch.double, torch.bfloat16, torch.half])
def random_weights(fd: FusionDefinition) -> None:
    """Initial weights from no input tensor; the shape is a vector of scalars."""
    seed = fd.define_scalar(dtype=DataType.Int)
    offset = fd.define_scalar(dtype=DataType.Int)
    rows, columns = fd.define_vector(2)
    bound = 1 / math.sqrt(8)
    u = fd.ops.uniform(
        -bound, bound, [rows, columns], rng_seed=seed, rng_offset=offset, dtype=DataType.Double
    )
    z = fd.ops.normal(
        1.0,
        0.02,
        (rows, 16),
        rng_seed=seed,
        rng_offset=fd.ops.add(offset, 1),
        dtype=DataType.BFloat16,
    )
    fd.add_output(u)
    fd.add_output(z)
    fd.add_output(fd.ops.cast(fd.ops.mul(fd.ops.sub(z, 1.0), 50.0), DataType.Half))


@random_weights.expects
def _(seed, offset, shape, u, z):
    return [u, z, (z.double() - 1) * 50]
