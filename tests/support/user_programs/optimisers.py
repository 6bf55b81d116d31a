"""Steps of optimisers and filters, which update their inputs in place."""

from __future__ import annotations

import torch

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

SHAPE = (16, 12)


def _state(*kinds: str) -> list:
    made = {"any": torch.randn, "positive": torch.rand}
    return [made[kind](SHAPE) for kind in kinds]


@program(
    lambda: [*_state("any", "any", "any", "positive"), torch.tensor(3.0), 1e-2],
    updates=(0, 2, 3),
    cuts={0: 0, 1: 0, 2: 0, 3: 0},
)
def adam(fd: FusionDefinition) -> None:
    param, grad, m, v = (
        fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
        for _ in range(4)
    )
    step = fd.define_tensor(shape=[], contiguity=[], dtype=DataType.Float, is_cpu=True)
    lr = fd.define_scalar(dtype=DataType.Double)
    beta1, beta2 = 0.9, 0.999
    new_m = fd.ops.lerp(m, grad, 1 - beta1)
    new_v = fd.ops.add(fd.ops.mul(v, beta2), fd.ops.mul(fd.ops.mul(grad, grad), 1 - beta2))
    bias1 = fd.ops.sub(1.0, fd.ops.pow(beta1, step))
    bias2 = fd.ops.sub(1.0, fd.ops.pow(beta2, step))
    denominator = fd.ops.add(fd.ops.div(fd.ops.sqrt(new_v), fd.ops.sqrt(bias2)), 1e-8)
    update = fd.ops.mul(lr, fd.ops.div(fd.ops.div(new_m, bias1), denominator))
    fd.add_output(fd.ops.sub(param, update), param)
    fd.add_output(new_m, m)
    fd.add_output(new_v, v)


@adam.expects
def _(param, grad, m, v, step, lr):
    m = 0.9 * m + 0.1 * grad
    v = 0.999 * v + 0.001 * grad**2
    hat_m, hat_v = m / (1 - 0.9**step), v / (1 - 0.999**step)
    return [param - lr * hat_m / (hat_v.sqrt() + 1e-8), m, v]


@program(
    lambda: [
        torch.randn(SHAPE).bfloat16(),
        torch.randn(SHAPE).bfloat16(),
        *_state("any", "any", "positive"),
        5,
    ],
    updates=(0, 2, 3, 4),
    cuts={0: 0, 1: 0, 2: 0, 3: 0, 4: 0},
)
def adamw_with_master_weights(fd: FusionDefinition) -> None:
    half = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16)
    grad = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16)
    master, m, v = (fd.define_tensor(shape=[-1, -1], contiguity=[True, True]) for _ in range(3))
    step = fd.define_scalar(dtype=DataType.Int)
    g = fd.ops.cast(grad, DataType.Float)
    new_m = fd.ops.add(fd.ops.mul(0.9, m), fd.ops.mul(0.1, g))
    new_v = fd.ops.add(fd.ops.mul(0.99, v), fd.ops.mul(0.01, fd.ops.mul(g, g)))
    correct1 = fd.ops.reciprocal(fd.ops.sub(1.0, fd.ops.pow(0.9, step)))
    correct2 = fd.ops.reciprocal(fd.ops.sub(1.0, fd.ops.pow(0.99, step)))
    decayed = fd.ops.mul(master, 1 - 1e-3 * 0.1)
    hat = fd.ops.div(
        fd.ops.mul(new_m, correct1), fd.ops.add(fd.ops.sqrt(fd.ops.mul(new_v, correct2)), 1e-6)
    )
    updated = fd.ops.sub(decayed, fd.ops.mul(1e-3, hat))
    fd.add_output(updated, alias_input=master)
    fd.add_output(new_m, alias_input=m)
    fd.add_output(new_v, alias_input=v)
    fd.add_output(fd.ops.cast(updated, DataType.BFloat16), alias_input=half)


@adamw_with_master_weights.expects
def _(half, grad, master, m, v, step):
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
    hat = m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-6)
    master = master * (1 - 1e-4) - 1e-3 * hat
    return [master, master, m, v]


@program(lambda: [*_state("any", "any", "any"), 0.1, 0.9], updates=(0, 2), cuts={0: 1, 1: 1, 2: 1})
def sgd_with_nesterov_momentum(fd: FusionDefinition) -> None:
    param, grad, buffer = (fd.define_tensor(list(SHAPE), [True, True]) for _ in range(3))
    lr = fd.define_scalar(None, DataType.Float)
    momentum = fd.define_scalar(None, dtype=DataType.Float)
    new_buffer = fd.ops.add(fd.ops.mul(momentum, buffer), grad)
    direction = fd.ops.add(grad, fd.ops.mul(momentum, new_buffer))
    new_param = fd.ops.sub(param, fd.ops.mul(lr, direction))
    fd.add_output(new_buffer, buffer)
    fd.add_output(new_param, param)
    fd.add_output(new_param)


@sgd_with_nesterov_momentum.expects
def _(param, grad, buffer, lr, momentum):
    buffer = momentum * buffer + grad
    param = param - lr * (grad + momentum * buffer)
    return [param, param, buffer]


@program(
    lambda: [torch.randn(16, 12), torch.randn(20), torch.randn(4, 3, 2), 1.5],
    updates=(0, 1, 2),
    cuts={0: 0, 1: 0, 2: 0},
)
def clip_by_global_norm(fd: FusionDefinition) -> None:
    grads = [
        fd.define_tensor(shape=[-1] * rank, contiguity=[True] * rank, dtype=DataType.Float)
        for rank in (2, 1, 3)
    ]
    limit = fd.define_scalar(dtype=DataType.Double)
    squares = [fd.ops.sum(fd.ops.mul(g, g), dims=list(range(g.ndim))) for g in grads]
    total = squares[0]
    for square in squares[1:]:
        total = fd.ops.add(total, square)
    norm = fd.ops.sqrt(total)
    scale = fd.ops.minimum(fd.ops.div(limit, fd.ops.add(norm, 1e-6)), 1.0)
    for grad in grads:
        fd.add_output(fd.ops.mul(grad, scale), grad)
    fd.add_output(norm)


@clip_by_global_norm.expects
def _(a, b, c, limit):
    norm = torch.cat([t.flatten() for t in (a, b, c)]).norm()
    scale = (limit / (norm + 1e-6)).clamp(max=1)
    return [norm, a * scale, b * scale, c * scale]


@program(lambda: [*_state("any", "any"), 0.99], updates=(0,), cuts={0: 0, 1: 0})
def moving_average(fd: FusionDefinition) -> None:
    average = fd.define_tensor([-1, -1], [True, True])
    value = fd.define_tensor([-1, -1], [True, True])
    decay = fd.define_scalar(DataType.Double)
    new = fd.ops.lerp(value, average, decay)
    fd.add_output(new, average)
    fd.add_output(fd.ops.sum(fd.ops.abs(fd.ops.sub(new, value)), [0, 1]))


@moving_average.expects
def _(average, value, decay):
    new = decay * average + (1 - decay) * value
    return [(new - value).abs().sum(), new]


@program(
    lambda: [*_state("any", "any"), torch.rand(16), torch.rand(12)],
    updates=(0, 2, 3),
    tolerance=1e-4,
)
def factored_second_moments(fd: FusionDefinition) -> None:
    """Adafactor: the second moment is an outer product of row and column averages."""
    param, grad = (fd.define_tensor(shape=[16, 12], contiguity=[True, True]) for _ in range(2))
    row = fd.define_tensor(shape=[16], contiguity=[True])
    column = fd.define_tensor(shape=[12], contiguity=[True])
    square = fd.ops.add(fd.ops.mul(grad, grad), 1e-30)
    new_row = fd.ops.add(
        fd.ops.mul(row, 0.9), fd.ops.mul(fd.ops.div(fd.ops.sum(square, [1]), 12.0), 0.1)
    )
    new_column = fd.ops.add(
        fd.ops.mul(column, 0.9), fd.ops.mul(fd.ops.div(fd.ops.sum(square, [0]), 16.0), 0.1)
    )
    mean = fd.ops.div(fd.ops.sum(new_row, [0]), 16.0)
    outer = fd.ops.mul(
        fd.ops.broadcast(new_row, [False, True]), fd.ops.broadcast(new_column, [True, False])
    )
    update = fd.ops.mul(grad, fd.ops.rsqrt(fd.ops.div(outer, mean)))
    rms = fd.ops.sqrt(fd.ops.div(fd.ops.sum(fd.ops.mul(update, update), [0, 1]), 192.0))
    update = fd.ops.div(update, fd.ops.maximum(rms, 1.0))
    fd.add_output(fd.ops.sub(param, fd.ops.mul(update, 0.01)), param)
    fd.add_output(new_row, row)
    fd.add_output(new_column, column)


@factored_second_moments.expects
def _(param, grad, row, column):
    row = 0.9 * row + 0.1 * (grad**2).mean(1)
    column = 0.9 * column + 0.1 * (grad**2).mean(0)
    update = grad / (row[:, None] * column / row.mean()).sqrt()
    update = update / (update**2).mean().sqrt().clamp(min=1)
    return [param - 0.01 * update, row, column]


@program(
    lambda: [
        torch.randn(8, 4, 1),
        torch.eye(4).expand(8, 4, 4).clone() + 0.1,
        torch.randn(4, 4) * 0.3,
        torch.randn(8, 4),
        torch.rand(4) + 0.5,
    ],
    cuts={0: 0, 1: 0, 3: 0},
    tolerance=1e-4,
)
def kalman_step(fd: FusionDefinition) -> None:
    """A Kalman filter step: predict by a matrix, then correct each coordinate by its own
    gain.
    """
    x = fd.define_tensor(shape=[-1, 4, 1], contiguity=[True, True, None])
    p = fd.define_tensor(shape=[-1, 4, 4], contiguity=[True, True, True])
    f = fd.define_tensor(shape=[4, 4], contiguity=[True, True])
    z = fd.define_tensor(shape=[-1, 4], contiguity=[True, True])
    noise = fd.define_tensor(shape=[4], contiguity=[True])
    predicted = fd.ops.matmul(f, x)
    covariance = fd.ops.matmul(fd.ops.matmul(f, p), fd.ops.permute(f, [1, 0]))
    i = fd.ops.iota(4)
    on_diagonal = fd.ops.eq(fd.ops.broadcast(i, [False, True]), fd.ops.broadcast(i, [True, False]))
    diagonal = fd.ops.sum(fd.ops.where(on_diagonal, covariance, 0.0), [2])
    gain = fd.ops.truediv(diagonal, fd.ops.add(diagonal, noise))
    state = fd.ops.squeeze(predicted, dims=[2])
    fd.add_output(fd.ops.add(state, fd.ops.mul(gain, fd.ops.sub(z, state))))
    fd.add_output(gain)


@kalman_step.expects
def _(x, p, f, z, noise):
    state = (f @ x)[..., 0]
    diagonal = (f @ p @ f.T).diagonal(dim1=1, dim2=2)
    gain = diagonal / (diagonal + noise)
    return [state + gain * (z - state), gain]
