"""Pooling, convolutions and layout changes by slices, pads, reshapes and permutations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

BATCH, CHANNELS, HEIGHT, WIDTH = 4, 4, 8, 12
IMAGE = (BATCH, CHANNELS, HEIGHT, WIDTH)


@program(lambda: [torch.randn(IMAGE)], cuts={0: 0})
def max_pool_by_reshape(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=list(IMAGE), contiguity=[True] * 4)
    windows = fd.ops.reshape(x, [BATCH, CHANNELS, HEIGHT // 2, 2, WIDTH // 2, 2])
    fd.add_output(fd.ops.max(windows, dims=[3, 5]))


@max_pool_by_reshape.expects
def _(x):
    return [F.max_pool2d(x, 2)]


@program(lambda: [torch.randn(IMAGE)], cuts={0: 1})
def max_pool_by_slices(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, HEIGHT, WIDTH], contiguity=[True] * 4)
    n, c = fd.ops.size(x, 0), fd.ops.size(x, 1)
    padded = fd.ops.pad(x, [1, 1, 1, 1], fd.define_scalar(float("-inf"), dtype=DataType.Float))
    best = x
    for i in range(3):
        for j in range(3):
            part = fd.ops.slice(padded, [0, 0, i, j], [n, c, i + HEIGHT, j + WIDTH])
            best = fd.ops.maximum(best, part)
    fd.add_output(best)


@max_pool_by_slices.expects
def _(x):
    return [F.max_pool2d(x, 3, stride=1, padding=1)]


@program(lambda: [torch.randn(IMAGE).half()], dtypes=[torch.half], cuts={0: 0})
def average_pool_by_pads(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True] * 4, dtype=DataType.Half)
    x32 = fd.ops.cast(x, DataType.Float)
    n, c, h, w = fd.ops.shape(x)
    total = x32
    for pads, start in (((0, 1), 1), ((1, 0), 0)):
        shifted = fd.ops.pad(x32, pad_widths=list(pads))
        begin, end = [0, 0, 0, start], [n, c, h, fd.ops.add(w, start)]
        total = fd.ops.add(total, fd.ops.slice(shifted, begin, end))
    fd.add_output(fd.ops.cast(fd.ops.div(total, 3.0), DataType.Half))


@average_pool_by_pads.expects
def _(x):
    return [F.avg_pool1d(x.flatten(0, 1), 3, stride=1, padding=1).reshape(x.shape)]


@program(lambda: [torch.randn(BATCH, 20, 6), torch.randn(6, 4)], cuts={0: 0})
def causal_depthwise_convolution(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, 20, 6], contiguity=[True] * 3)
    w = fd.define_tensor(shape=[6, 4], contiguity=[True, True])
    b = fd.ops.size(x, 0)
    padded = fd.ops.pad(x, [0, 0, 3, 0])
    total = fd.define_scalar(0.0, DataType.Float)
    for tap in range(4):
        part = fd.ops.slice(padded, [0, tap, 0], [b, tap + 20, 6])
        column = fd.ops.select(w, fd.define_scalar(tap, dtype=DataType.Int), dim=1)
        total = fd.ops.add(
            total, fd.ops.mul(part, fd.ops.broadcast_in_dim(column, [b, 20, 6], [2]))
        )
    fd.add_output(fd.ops.silu(total))


@causal_depthwise_convolution.expects
def _(x, w):
    y = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w[:, None], groups=6)
    return [F.silu(y).transpose(1, 2)]


@program(
    lambda: [torch.randn(BATCH, 3, 6, 8), torch.randn(4, 3, 3, 3)], cuts={0: 0}, tolerance=1e-4
)
def convolution_by_matmuls(fd: FusionDefinition) -> None:
    """A 3x3 convolution: one product per tap, of channels-last slices."""
    x = fd.define_tensor(shape=[-1, 3, 6, 8], contiguity=[True] * 4)
    w = fd.define_tensor(shape=[4, 3, 3, 3], contiguity=[True] * 4)
    n = fd.ops.size(x, 0)
    last = fd.ops.permute(x, [0, 2, 3, 1])
    padded = fd.ops.pad(last, [0, 0, 1, 1, 1, 1], 0.0)
    products = []
    for i in range(3):
        for j in range(3):
            part = fd.ops.slice(padded, [0, i, j, 0], [n, i + 6, j + 8, 3])
            tap = fd.ops.slice(w, [0, 0, i, j], [4, 3, i + 1, j + 1])
            tap = fd.ops.squeeze(tap, [2, 3])
            products.append(fd.ops.linear(part, tap))
    total = products[0]
    for product in products[1:]:
        total = fd.ops.add(total, product)
    fd.add_output(fd.ops.permute(total, [0, 3, 1, 2]))


@convolution_by_matmuls.expects
def _(x, w):
    return [F.conv2d(x, w, padding=1)]


@program(lambda: [torch.randn(IMAGE)], cuts={0: 0})
def upsample_nearest(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True] * 4)
    n, c, h, w = fd.ops.shape(x)
    wide = fd.ops.broadcast(x, [False, False, False, True, False, True])
    wide = fd.ops.expand(wide, [n, c, h, 2, w, 2])
    fd.add_output(fd.ops.reshape(wide, [n, c, fd.ops.mul(h, 2), fd.ops.mul(w, 2)]))


@upsample_nearest.expects
def _(x):
    return [F.interpolate(x, scale_factor=2)]


@program(lambda: [torch.randn(BATCH, 8, 3, 5)], cuts={0: 0})
def pixel_shuffle(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, 8, 3, 5], contiguity=[True] * 4)
    blocks = fd.ops.reshape(x, [-1, 2, 2, 2, 3, 5])
    moved = fd.ops.permute(blocks, [0, 1, 4, 2, 5, 3])
    shuffled = fd.ops.reshape(moved, [-1, 2, 6, 10])
    fd.add_output(shuffled)
    fd.add_output(fd.ops.stride_order(shuffled, [3, 0, 2, 1]))


@pixel_shuffle.expects
def _(x):
    y = F.pixel_shuffle(x, 2)
    return [y, y]


@program(lambda: [torch.randn(BATCH, 6, 4, 5)], cuts={0: 0})
def transposes_there_and_back(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True] * 4)
    a = fd.ops.permute(x, [1, 0, 3, 2])
    b = fd.ops.relu(a)
    c = fd.ops.permute(b, (-1, -2, -3, -4))
    d = fd.ops.add(c, 1.0)
    e = fd.ops.permute(d, [0, 1, 2, 3])
    fd.add_output(a)
    fd.add_output(fd.ops.set(e))
    fd.add_output(fd.ops.permute(fd.ops.segment_set(e), [3, 2, 1, 0]))


@transposes_there_and_back.expects
def _(x):
    a = x.permute(1, 0, 3, 2)
    e = a.relu().permute(3, 2, 1, 0) + 1
    return [a, e, e.permute(3, 2, 1, 0)]


@program(lambda: [torch.randn(6, 8, 10), [4, 12, 10]])
def reshape_by_vector(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True, True, True], dtype=DataType.Float)
    shape = fd.define_vector(3)
    y = fd.ops.reshape(x, new_shape=shape)
    z = fd.ops.reshape(fd.ops.sin(y), [-1])
    halves = fd.ops.reshape(z, [fd.ops.div(fd.ops.size(z, 0), 2), 2])
    fd.add_output(y)
    fd.add_output(fd.ops.sum(halves, dim=1))


@reshape_by_vector.expects
def _(x, shape):
    return [x.reshape(shape), x.flatten().sin().reshape(-1, 2).sum(1)]


@program(lambda: [torch.randn(BATCH, 16, 12)], cuts={0: 0})
def sinusoidal_positions(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, -1, 12], contiguity=[True] * 3)
    b, s = fd.ops.size(x, 0), fd.ops.size(x, 1)
    place = fd.ops.cast(fd.ops.iota(s, 0, 1, DataType.Int32), DataType.Float)
    power = fd.ops.iota(6, fd.define_scalar(0.0), fd.define_scalar(2.0), dtype=DataType.Float)
    inverse = fd.ops.exp(fd.ops.mul(power, -9.210340371976184 / 12))
    angle = fd.ops.mul(
        fd.ops.broadcast(place, [False, True]), fd.ops.broadcast(inverse, [True, False])
    )
    table = fd.ops.cat([fd.ops.sin(angle), fd.ops.cos(angle)], 1)
    fd.add_output(fd.ops.add(x, fd.ops.broadcast_in_dim(table, [b, s, 12], [1, 2])))


@sinusoidal_positions.expects
def _(x):
    power = torch.arange(0, 12, 2).double()
    angle = torch.arange(16).double()[:, None] * 10000.0 ** (-power / 12)
    return [x + torch.cat([angle.sin(), angle.cos()], 1)]


@program(
    lambda: [torch.randn(BATCH, 3, 8, 8).bfloat16(), torch.randn(16, 48).bfloat16()],
    dtypes=[torch.bfloat16],
    cuts={0: 0},
    tolerance=5e-2,
)
def patch_embedding(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, 3, 8, 8], contiguity=[True] * 4, dtype=DataType.BFloat16)
    w = fd.define_tensor(shape=[16, 48], contiguity=[True, True], dtype=DataType.BFloat16)
    n = fd.ops.size(x, 0)
    patches = fd.ops.reshape(x, [n, 3, 2, 4, 2, 4])
    patches = fd.ops.permute(patches, [0, 2, 4, 1, 3, 5])
    tokens = fd.ops.reshape(patches, [n, 4, 48])
    fd.add_output(fd.ops.linear(tokens, w))


@patch_embedding.expects
def _(x, w):
    return [F.conv2d(x, w.reshape(16, 3, 4, 4), stride=4).flatten(2).transpose(1, 2)]


@program(lambda: [torch.randn(6, 8), torch.randn(6, 4), torch.randn(2, 12)], cuts=None)
def cat_of_pads_and_shifts(fd: FusionDefinition) -> None:
    a = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    b = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    c = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    wide = fd.ops.cat([a, b], 1)
    tall = fd.ops.cat(tensors=[wide, c, wide], dim=0)
    h, w = fd.ops.shape(tall)
    rolled = fd.ops.cat(
        [fd.ops.slice(tall, (0, 3), (h, w), (1, 1)), fd.ops.slice(tall, (0, 0), (h, 3), (1, 1))], -1
    )
    cropped = fd.ops.pad(tall, [-2, 1, -1, -1], 7.0)
    fd.add_output(rolled)
    fd.add_output(cropped)
    fd.add_output(fd.ops.triu(rolled, -1))


@cat_of_pads_and_shifts.expects
def _(a, b, c):
    wide = torch.cat([a, b], 1)
    tall = torch.cat([wide, c, wide])
    rolled = tall.roll(-3, 1)
    return [rolled, F.pad(tall, (-2, 1, -1, -1), value=7.0), rolled.triu(-1)]


@program(
    lambda: [
        torch.randn(8, 12).t(),
        torch.randn(3, 8).expand(12, 3, 8)[:, 1],
        torch.randn(1, 8).expand(12, 8),
    ]
)
def strided_and_expanded_inputs(fd: FusionDefinition) -> None:
    a = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[0, 1])
    b = fd.define_tensor(sizes=[12, 8], strides=[0, 1], dtype=DataType.Float)
    c = fd.define_tensor(shape=[-1, -1], contiguity=[None, True], dtype=DataType.Float)
    fd.add_output(fd.ops.add(fd.ops.mul(a, b), c))
    fd.add_output(fd.ops.sum(b, dim=0))
    fd.add_output(fd.ops.max(c, [0]))


@strided_and_expanded_inputs.expects
def _(a, b, c):
    return [a * b + c, b.sum(0), c.amax(0)]
