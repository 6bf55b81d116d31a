"""Normalisations written by variance and mean, by Welford and by sums, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

ROWS, HIDDEN = 8, 48
BATCH, CHANNELS, HEIGHT, WIDTH = 4, 8, 6, 10


@program(
    lambda: [
        torch.randn(ROWS, HIDDEN).half(),
        torch.randn(HIDDEN).half(),
        torch.randn(HIDDEN).half(),
    ],
    dtypes=[torch.half, torch.float, torch.float],
    cuts={0: 0},
)
def layer_norm_by_var_mean(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, HIDDEN], contiguity=[True, True], dtype=DataType.Half)
    weight = fd.define_tensor(shape=[HIDDEN], contiguity=[True], dtype=DataType.Half)
    bias = fd.define_tensor(shape=[HIDDEN], contiguity=[True], dtype=DataType.Half)
    x32 = fd.ops.cast(x, dtype=DataType.Float)
    var, mean = fd.ops.var_mean(x32, dims=[1], correction=0, keepdim=True)
    eps = fd.define_scalar(1e-5, dtype=DataType.Double)
    rstd = fd.ops.rsqrt(fd.ops.add(var, eps))
    centred = fd.ops.sub(
        x32, fd.ops.broadcast_in_dim(mean, shape=[fd.ops.size(x, 0), HIDDEN], broadcast_dims=[0, 1])
    )
    normed = fd.ops.mul(centred, rstd)
    shape = fd.ops.shape(x)
    w = fd.ops.cast(
        fd.ops.broadcast_in_dim(weight, shape=shape, broadcast_dims=[1]), dtype=DataType.Float
    )
    b = fd.ops.cast(
        fd.ops.broadcast_in_dim(bias, shape=shape, broadcast_dims=[1]), dtype=DataType.Float
    )
    y = fd.ops.add(fd.ops.mul(normed, w), b)
    fd.add_output(fd.ops.cast(y, dtype=DataType.Half))
    fd.add_output(mean)
    fd.add_output(rstd)


@layer_norm_by_var_mean.expects
def _(x, weight, bias):
    mean = x.mean(1, keepdim=True)
    rstd = (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return [F.layer_norm(x, (HIDDEN,), weight, bias), mean, rstd]


@program(lambda: [torch.randn(ROWS, HIDDEN)], cuts={0: 0})
def layer_norm_by_welford(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], True)
    avg, m2, n = fd.ops.welford(x, [1])
    var = fd.ops.div(m2, n)
    flags = [False, True]
    avg = fd.ops.broadcast(avg, flags)
    var = fd.ops.broadcast(var, is_broadcast_dim=flags)
    y = fd.ops.truediv(fd.ops.sub(x, avg), fd.ops.sqrt(fd.ops.add(var, 1e-6)))
    fd.add_output(y)


@layer_norm_by_welford.expects
def _(x):
    return [F.layer_norm(x, (x.shape[1],), eps=1e-6)]


@program(lambda: [torch.randn(ROWS, 3, HIDDEN)], cuts={0: 0})
def layer_norm_by_sums(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=(-1, -1, -1), contiguity=(True, True, True), dtype=DataType.Float)
    n = fd.ops.size(x, dim=-1)
    total = fd.ops.sum(x, dim=-1, keepdim=True)
    mean = fd.ops.div(total, n)
    square = fd.ops.sum(fd.ops.mul(x, x), dims=(-1,), keepdim=True, dtype=DataType.Null)
    var = fd.ops.sub(fd.ops.div(square, n), fd.ops.mul(mean, mean))
    rstd = fd.ops.reciprocal(fd.ops.sqrt(fd.ops.add(var, fd.define_scalar(1e-5))))
    fd.add_output(fd.ops.mul(fd.ops.sub(x, mean), rstd))


@layer_norm_by_sums.expects
def _(x):
    return [F.layer_norm(x, (x.shape[-1],))]


def _layer_norm_inputs() -> list:
    x, weight, grad = torch.randn(ROWS, HIDDEN), torch.randn(HIDDEN), torch.randn(ROWS, HIDDEN)
    mean = x.mean(1, keepdim=True)
    rstd = (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return [grad, x, mean, rstd, weight]


@program(_layer_norm_inputs, cuts={0: 0, 1: 0, 2: 0, 3: 0}, tolerance=1e-4)
def layer_norm_backward(fd: FusionDefinition) -> None:
    grad = fd.define_tensor(
        shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float, is_cpu=False
    )
    x = fd.define_tensor(
        shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float, is_cpu=False
    )
    mean = fd.define_tensor(
        shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False
    )
    rstd = fd.define_tensor(
        shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float, is_cpu=False
    )
    weight = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float, is_cpu=False)
    shape = [fd.ops.size(x, dim=0), fd.ops.size(x, dim=1)]
    wide = fd.ops.broadcast_in_dim(weight, shape, [1])
    normed = fd.ops.mul(
        fd.ops.sub(x, fd.ops.broadcast_in_dim(mean, shape, [0, 1])),
        fd.ops.broadcast_in_dim(rstd, shape, [0, 1]),
    )
    inner = fd.ops.mul(grad, wide)
    a = fd.ops.sum(inner, dims=[1], keepdim=True)
    b = fd.ops.sum(fd.ops.mul(inner, normed), dims=[1], keepdim=True)
    n = fd.ops.cast(fd.ops.size(x, dim=1), dtype=DataType.Double)
    scaled = fd.ops.mul(fd.ops.reciprocal(n), rstd)
    dx = fd.ops.mul(
        fd.ops.sub(fd.ops.sub(fd.ops.mul(n, inner), a), fd.ops.mul(normed, b)),
        scaled,
    )
    fd.add_output(dx)
    fd.add_output(fd.ops.sum(fd.ops.mul(grad, normed), dims=[0]))
    fd.add_output(fd.ops.sum(grad, dims=[0]))


@layer_norm_backward.expects
def _(grad, x, mean, rstd, weight):
    x.requires_grad_()
    weight.requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    F.layer_norm(x, (HIDDEN,), weight, bias).backward(grad)
    return [x.grad, weight.grad, bias.grad]


@program(
    lambda: [torch.randn(2, ROWS, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()],
    dtypes=[torch.bfloat16],
    cuts={0: 1},
)
def rms_norm(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[2, -1, HIDDEN], contiguity=True, dtype=DataType.BFloat16)
    weight = fd.define_tensor([HIDDEN], [True], DataType.BFloat16)
    up = fd.ops.cast(x, DataType.Float)
    mean_square = fd.ops.mul(fd.ops.sum(fd.ops.pow(up, 2), [2], True), 1.0 / HIDDEN)
    y = fd.ops.mul(up, fd.ops.rsqrt(fd.ops.add(mean_square, 1e-6)))
    y = fd.ops.mul(fd.ops.cast(y, DataType.BFloat16), weight)
    fd.add_output(fd.ops.cast(y, DataType.BFloat16))


@rms_norm.expects
def _(x, weight):
    return [F.rms_norm(x, (HIDDEN,), weight, eps=1e-6)]


@program(
    lambda: [torch.randn(ROWS, HIDDEN), torch.randn(HIDDEN), torch.randn(ROWS, HIDDEN)],
    cuts={0: 0, 2: 0},
    tolerance=1e-4,
)
def rms_norm_backward(fd: FusionDefinition) -> None:
    x = fd.define_tensor([ROWS, HIDDEN], [True, True])
    weight = fd.define_tensor([HIDDEN], [True])
    grad = fd.define_tensor([ROWS, HIDDEN], [True, True])
    ms = fd.ops.truediv(fd.ops.sum(fd.ops.mul(x, x), dims=[1]), HIDDEN)
    inv = fd.ops.broadcast_in_dim(fd.ops.rsqrt(fd.ops.add(ms, 1e-6)), [ROWS, 1], [0])
    xhat = fd.ops.mul(x, inv)
    gw = fd.ops.mul(grad, fd.ops.broadcast(weight, [True, False]))
    dot = fd.ops.sum(fd.ops.mul(gw, xhat), dim=1, keepdim=True)
    dx = fd.ops.mul(inv, fd.ops.sub(gw, fd.ops.mul(xhat, fd.ops.div(dot, float(HIDDEN)))))
    fd.add_output(dx)
    fd.add_output(fd.ops.sum(fd.ops.mul(grad, xhat), 0))


@rms_norm_backward.expects
def _(x, weight, grad):
    x.requires_grad_()
    weight.requires_grad_()
    F.rms_norm(x, (HIDDEN,), weight, eps=1e-6).backward(grad)
    return [x.grad, weight.grad]


@program(
    lambda: [
        torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH),
        torch.randn(CHANNELS),
        torch.randn(CHANNELS),
        torch.randn(CHANNELS),
        torch.rand(CHANNELS) + 0.5,
    ],
    updates=(3, 4),
    cuts={0: 0},
)
def batch_norm_train(fd: FusionDefinition) -> None:
    x = fd.define_tensor(shape=[-1, CHANNELS, -1, -1], contiguity=[True] * 4, dtype=DataType.Float)
    weight, bias, running_mean, running_var = (
        fd.define_tensor(shape=[CHANNELS], contiguity=[True], dtype=DataType.Float)
        for _ in range(4)
    )
    momentum = 0.1
    reduced = [0, 2, 3]
    var, mean = fd.ops.var_mean(x, reduced, correction=0)
    n = fd.ops.mul(fd.ops.mul(fd.ops.size(x, 0), fd.ops.size(x, 2)), fd.ops.size(x, 3))
    unbiased = fd.ops.mul(var, fd.ops.truediv(n, fd.ops.sub(n, 1)))
    new_mean = fd.ops.add(fd.ops.mul(mean, momentum), fd.ops.mul(running_mean, 1 - momentum))
    new_var = fd.ops.add(fd.ops.mul(unbiased, momentum), fd.ops.mul(running_var, 1 - momentum))
    fd.add_output(new_mean, running_mean)
    fd.add_output(new_var, alias_input=running_var)
    mask = [True, False, True, True]
    invstd = fd.ops.rsqrt(fd.ops.add(var, 1e-5))
    y = fd.ops.mul(fd.ops.sub(x, fd.ops.broadcast(mean, mask)), fd.ops.broadcast(invstd, mask))
    y = fd.ops.add(fd.ops.mul(y, fd.ops.broadcast(weight, mask)), fd.ops.broadcast(bias, mask))
    fd.add_output(y)
    fd.add_output(mean)
    fd.add_output(invstd)


@batch_norm_train.expects
def _(x, weight, bias, running_mean, running_var):
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training=True)
    return [y, mean, invstd, running_mean, running_var]


@program(
    lambda: [
        torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH).to(memory_format=torch.channels_last),
        *(torch.rand(CHANNELS) + 0.5 for _ in range(4)),
    ],
    cuts={0: 0},
)
def batch_norm_eval(fd: FusionDefinition) -> None:
    x = fd.define_tensor(
        shape=[-1, -1, -1, -1],
        contiguity=[True, True, True, True],
        dtype=DataType.Float,
        stride_order=[3, 0, 2, 1],
    )
    params = [fd.define_tensor([-1], [True], DataType.Float) for _ in range(4)]
    shape = fd.ops.shape(x)
    mean, var, weight, bias = (
        fd.ops.broadcast_in_dim(p, shape=shape, broadcast_dims=[1]) for p in params
    )
    scale = fd.ops.mul(weight, fd.ops.rsqrt(fd.ops.add(var, 1e-5)))
    fd.add_output(fd.ops.add(fd.ops.mul(fd.ops.sub(x, mean), scale), bias))


@batch_norm_eval.expects
def _(x, mean, var, weight, bias):
    return [F.batch_norm(x, mean, var, weight, bias)]


@program(
    lambda: [
        torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH),
        torch.randn(CHANNELS),
        torch.randn(CHANNELS),
    ],
    cuts={0: 0},
)
def group_norm(fd: FusionDefinition) -> None:
    groups = 4
    x = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True] * 4)
    weight = fd.define_tensor(shape=[-1], contiguity=[True])
    bias = fd.define_tensor(shape=[-1], contiguity=[True])
    n, c, h, w = fd.ops.shape(x)
    per_group = fd.ops.div(c, groups)
    grouped = fd.ops.reshape(x, [n, groups, per_group, h, w])
    var, mean = fd.ops.var_mean(grouped, [2, 3, 4], 0, True)
    y = fd.ops.mul(fd.ops.sub(grouped, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))
    y = fd.ops.reshape(y, [n, c, h, w])
    w_ = fd.ops.broadcast_in_dim(weight, [n, c, h, w], [1])
    b_ = fd.ops.broadcast_in_dim(bias, [n, c, h, w], [1])
    fd.add_output(fd.ops.add(fd.ops.mul(y, w_), b_))


@group_norm.expects
def _(x, weight, bias):
    return [F.group_norm(x, 4, weight, bias)]


@program(lambda: [torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH)], cuts={0: 1})
def instance_norm(fd: FusionDefinition) -> None:
    x = fd.define_tensor([BATCH, CHANNELS, HEIGHT, WIDTH], [480, 60, 10, 1], DataType.Float, True)
    count = HEIGHT * WIDTH
    mean = fd.ops.mul(fd.ops.sum(x, [2, 3], keepdim=True), 1 / count)
    xc = fd.ops.sub(x, mean)
    var = fd.ops.var(x, [2, 3], correction=0, keepdim=True)
    fd.add_output(fd.ops.div(xc, fd.ops.sqrt(fd.ops.add(var, 1e-5))))


@instance_norm.expects
def _(x):
    return [F.instance_norm(x)]


@program(lambda: [torch.randn(BATCH, ROWS, HIDDEN)], cuts={0: 0})
def softmax_of_last(fd: FusionDefinition) -> None:
    x = fd.define_tensor(
        shape=[-1, -1, -1], contiguity=[True, True, True], dtype=DataType.Float, is_cpu=False
    )
    top = fd.ops.max(x, dims=[2], keepdim=False, dtype=DataType.Null)
    top = fd.ops.broadcast(top, is_broadcast_dim=[False, False, True])
    top = fd.ops.expand(top, shape=[fd.ops.size(x, 0), fd.ops.size(x, 1), fd.ops.size(x, 2)])
    e = fd.ops.exp(fd.ops.sub(x, top))
    total = fd.ops.sum(e, dims=[2], keepdim=True, dtype=DataType.Null)
    fd.add_output(fd.ops.mul(e, fd.ops.reciprocal(total)))


@softmax_of_last.expects
def _(x):
    return [x.softmax(2)]


@program(lambda: [torch.randn(BATCH, HIDDEN, ROWS)], cuts={0: 0})
def log_softmax_of_middle(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1, -1], contiguity=True)
    top = fd.ops.max(x, 1, keepdim=True)
    shifted = fd.ops.sub(x, top)
    lse = fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), dim=1, keepdim=True))
    fd.add_output(fd.ops.sub(shifted, lse))
    fd.add_output(fd.ops.squeeze(fd.ops.add(top, lse), [1]))


@log_softmax_of_middle.expects
def _(x):
    return [x.log_softmax(1), x.logsumexp(1)]


@program(
    lambda: [torch.randn(BATCH, 16, 16).bfloat16(), torch.randn(BATCH, 16, 16).bfloat16()],
    dtypes=[torch.bfloat16],
    cuts={0: 0, 1: 0},
    tolerance=2e-2,
)
def softmax_backward(fd: FusionDefinition) -> None:
    grad = fd.define_tensor(shape=[-1, 16, 16], contiguity=[True] * 3, dtype=DataType.BFloat16)
    y = fd.define_tensor(shape=[-1, 16, 16], contiguity=[True] * 3, dtype=DataType.BFloat16)
    g32, y32 = fd.ops.cast(grad, DataType.Float), fd.ops.cast(y, DataType.Float)
    gy = fd.ops.mul(g32, y32)
    dot = fd.ops.broadcast_in_dim(fd.ops.sum(gy, [-1]), [fd.ops.size(y, 0), 16, 1], [0, 1])
    fd.add_output(fd.ops.cast(fd.ops.sub(gy, fd.ops.mul(y32, dot)), DataType.BFloat16))


@softmax_backward.expects
def _(grad, y):
    return [grad * y - y * (grad * y).sum(-1, keepdim=True)]


@program(lambda: [torch.rand(ROWS, HIDDEN)], cuts={0: 0})
def several_values_of_a_row(fd: FusionDefinition) -> None:
    """A row is read together with a reduction of it, and with a value computed from that."""
    x = fd.define_tensor([-1, -1], True)
    total = fd.ops.sqrt(fd.ops.sum(x, [1]))
    turned = fd.ops.sin(total)
    wide, more = (fd.ops.broadcast(value, [False, True]) for value in (total, turned))
    fd.add_output(fd.ops.add(fd.ops.mul(x, wide), fd.ops.mul(x, more)))
    fd.add_output(fd.ops.mul(x, fd.ops.broadcast(fd.ops.cos(turned), [False, True])))


@several_values_of_a_row.expects
def _(x):
    total = x.sum(1, keepdim=True).sqrt()
    return [x * total + x * total.sin(), x * total.sin().cos()]
