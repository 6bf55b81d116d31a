"""Losses and distances at the end of a model, forward and backward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition
from tests.support.user_programs.table import program

TOKENS, VOCABULARY, HIDDEN = 16, 40, 12


@program(
    lambda: [torch.randn(TOKENS, VOCABULARY), torch.randint(VOCABULARY, (TOKENS,))],
    cuts={0: 0, 1: 0},
)
def cross_entropy(fd: FusionDefinition) -> None:
    logits = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    labels = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Int)
    top = fd.ops.max(logits, dims=[1], keepdim=True)
    shifted = fd.ops.sub(logits, top)
    lse = fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), dims=[1], keepdim=True))
    log_probs = fd.ops.sub(shifted, lse)
    index = fd.ops.broadcast(labels, is_broadcast_dim=[False, True])
    picked = fd.ops.take_along_axis(log_probs, index, dim=1)
    nll = fd.ops.neg(fd.ops.squeeze(picked, dims=[1]))
    count = fd.ops.size(logits, dim=0)
    fd.add_output(fd.ops.truediv(fd.ops.sum(nll, dims=[0]), count))


@cross_entropy.expects
def _(logits, labels):
    return [F.cross_entropy(logits, labels)]


def _labels_with_holes() -> torch.Tensor:
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::5] = -100
    return labels


@program(
    lambda: [torch.randn(TOKENS, VOCABULARY), _labels_with_holes()],
    cuts={0: 0, 1: 0},
)
def cross_entropy_with_ignored_labels(fd: FusionDefinition) -> None:
    """Cross entropy as Lightning Thunder writes it: a `where` with a float zero makes labels
    floats.
    """
    logits = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    target = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Int)
    zero = fd.define_scalar(0, dtype=DataType.Float)
    valid = fd.ops.ne(target, fd.define_scalar(-100, DataType.Int))
    rows = target.shape()[-1]
    labels = fd.ops.where(valid, target, zero)
    labels = fd.ops.broadcast_in_dim(labels, shape=[rows, 1], broadcast_dims=[0])
    picked = fd.ops.reshape(fd.ops.take_along_axis(logits, labels, dim=1), new_shape=[rows])
    top = fd.ops.max(logits, 1)
    wide = fd.ops.broadcast_in_dim(top, shape=[rows, 1], broadcast_dims=[0])
    log = fd.ops.log(fd.ops.sum(fd.ops.exp(fd.ops.sub(logits, wide)), 1))
    loss = fd.ops.where(valid, fd.ops.neg(fd.ops.sub(fd.ops.sub(picked, top), log)), zero)
    count = fd.ops.cast(fd.ops.sum(valid), dtype=DataType.Float)
    fd.add_output(fd.ops.div(fd.ops.sum(loss), count))
    fd.add_output(count)


@cross_entropy_with_ignored_labels.expects
def _(logits, labels):
    return [F.cross_entropy(logits, labels), (labels != -100).sum().double()]


@program(
    lambda: [torch.randn(TOKENS, VOCABULARY).bfloat16(), _labels_with_holes(), torch.randn(())],
    dtypes=[torch.bfloat16],
    cuts={0: 0, 1: 0},
    tolerance=2e-2,
)
def cross_entropy_backward(fd: FusionDefinition) -> None:
    logits = fd.define_tensor([-1, VOCABULARY], [True, True], DataType.BFloat16)
    labels = fd.define_tensor([-1], [True], DataType.Int)
    grad = fd.define_tensor([], [], DataType.Float)
    x = fd.ops.cast(logits, DataType.Float)
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], True)))
    probs = fd.ops.truediv(e, fd.ops.sum(e, [1], True))
    classes = fd.ops.iota(VOCABULARY, 0, 1, DataType.Int)
    shape = [fd.ops.size(logits, 0), VOCABULARY]
    classes = fd.ops.broadcast_in_dim(classes, shape, [1])
    wide = fd.ops.broadcast_in_dim(labels, shape, [0])
    one_hot = fd.ops.where(fd.ops.eq(classes, wide), 1.0, 0.0)
    valid = fd.ops.ne(labels, -100)
    count = fd.ops.sum(fd.ops.cast(valid, DataType.Float), [0])
    scale = fd.ops.where(valid, fd.ops.div(grad, count), 0.0)
    dx = fd.ops.mul(fd.ops.sub(probs, one_hot), fd.ops.broadcast(scale, [False, True]))
    fd.add_output(fd.ops.cast(dx, DataType.BFloat16))


@cross_entropy_backward.expects
def _(logits, labels, grad):
    logits.requires_grad_()
    F.cross_entropy(logits, labels, ignore_index=-100).backward(grad)
    return [logits.grad]


@program(
    lambda: [torch.randn(TOKENS, VOCABULARY), torch.randint(VOCABULARY, (TOKENS, 1))],
    cuts={0: 0, 1: 0},
)
def nll_by_gather(fd: FusionDefinition) -> None:
    log_probs = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    target = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Int)
    picked = fd.ops.gather(log_probs, target, 1)
    fd.add_output(fd.ops.neg(fd.ops.sum(picked)))
    fd.add_output(fd.ops.neg(picked))


@nll_by_gather.expects
def _(log_probs, target):
    picked = log_probs.gather(1, target)
    return [-picked.sum(), -picked]


@program(
    lambda: [
        torch.randint(VOCABULARY, (4, TOKENS)),
        torch.randn(VOCABULARY, HIDDEN),
        torch.randn(VOCABULARY, HIDDEN),
        torch.randint(VOCABULARY, (4, TOKENS)),
    ],
    cuts={0: 0, 3: 0},
    tolerance=1e-4,
)
def embedding_linear_cross_entropy(fd: FusionDefinition) -> None:
    tokens = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Int)
    table = fd.define_tensor(shape=[VOCABULARY, HIDDEN], contiguity=[True, True])
    head = fd.define_tensor(shape=[VOCABULARY, HIDDEN], contiguity=[True, True])
    targets = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Int)
    hidden = fd.ops.embedding_fwd(tokens, table)
    logits = fd.ops.linear(hidden, head)
    b, s = fd.ops.size(tokens, 0), fd.ops.size(tokens, 1)
    flat = fd.ops.reshape(logits, [fd.ops.mul(b, s), VOCABULARY])
    labels = fd.ops.reshape(targets, [fd.ops.mul(b, s), 1])
    top = fd.ops.max(flat, dim=1, keepdim=True)
    lse = fd.ops.add(
        fd.ops.log(fd.ops.sum(fd.ops.exp(fd.ops.sub(flat, top)), dim=1, keepdim=True)), top
    )
    loss = fd.ops.sub(lse, fd.ops.take_along_axis(flat, labels, 1))
    fd.add_output(fd.ops.truediv(fd.ops.sum(loss, [0, 1]), fd.ops.mul(b, s)))


@embedding_linear_cross_entropy.expects
def _(tokens, table, head, targets):
    logits = F.embedding(tokens, table) @ head.T
    return [F.cross_entropy(logits.flatten(0, 1), targets.flatten())]


@program(
    lambda: [torch.randn(TOKENS, HIDDEN) * 2, torch.randn(TOKENS, HIDDEN), 1.0], cuts={0: 0, 1: 0}
)
def huber_loss(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.define_tensor([-1, -1], contiguity=True)
    delta = fd.define_scalar(dtype=DataType.Double)
    d = fd.ops.sub(x, y)
    a = fd.ops.abs(d)
    small = fd.ops.mul(0.5, fd.ops.mul(d, d))
    large = fd.ops.mul(delta, fd.ops.sub(a, fd.ops.mul(delta, 0.5)))
    loss = fd.ops.where(fd.ops.le(a, delta), small, large)
    fd.add_output(loss)
    fd.add_output(fd.ops.sum(loss))


@huber_loss.expects
def _(x, y, delta):
    loss = F.huber_loss(x, y, reduction="none", delta=delta)
    return [loss, loss.sum()]


@program(
    lambda: [torch.randn(TOKENS, HIDDEN), torch.randint(2, (TOKENS, HIDDEN)).bool()],
    cuts={0: 0, 1: 0},
)
def focal_loss(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], [True, True], DataType.Float)
    label = fd.define_tensor([-1, -1], [True, True], DataType.Bool)
    p = fd.ops.sigmoid(x)
    t = fd.ops.cast(label, DataType.Float)
    ce = fd.ops.add(
        fd.ops.sub(fd.ops.relu(x), fd.ops.mul(x, t)),
        fd.ops.log1p(fd.ops.exp(fd.ops.neg(fd.ops.abs(x)))),
    )
    pt = fd.ops.where(label, p, fd.ops.sub(1.0, p))
    alpha = fd.ops.where(
        label, fd.define_scalar(0.25, DataType.Float), fd.define_scalar(0.75, DataType.Float)
    )
    loss = fd.ops.mul(fd.ops.mul(alpha, fd.ops.pow(fd.ops.sub(1.0, pt), 2.0)), ce)
    fd.add_output(fd.ops.sum(loss, [1]))


@focal_loss.expects
def _(x, label):
    t = label.double()
    ce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    pt = torch.where(label, x.sigmoid(), 1 - x.sigmoid())
    return [(torch.where(label, 0.25, 0.75).double() * (1 - pt) ** 2 * ce).sum(1)]


@program(
    lambda: [torch.randn(TOKENS, HIDDEN).log_softmax(1), torch.randn(TOKENS, HIDDEN).softmax(1)],
    cuts={0: 0, 1: 0},
)
def kl_divergence(fd: FusionDefinition) -> None:
    log_q = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    p = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float)
    zero = fd.define_scalar(0.0, dtype=DataType.Double)
    log_p = fd.ops.where(fd.ops.gt(p, zero), fd.ops.log(p), zero)
    pointwise = fd.ops.mul(p, fd.ops.sub(log_p, log_q))
    fd.add_output(fd.ops.div(fd.ops.sum(pointwise, dims=[0, 1]), fd.ops.size(p, 0)))


@kl_divergence.expects
def _(log_q, p):
    return [F.kl_div(log_q, p, reduction="batchmean")]


@program(lambda: [torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)], cuts={0: 0, 1: 0})
def cosine_similarity(fd: FusionDefinition) -> None:
    a = fd.define_tensor(shape=[-1, -1], contiguity=True)
    b = fd.define_tensor(shape=[-1, -1], contiguity=True)
    dot = fd.ops.sum(fd.ops.mul(a, b), dims=[-1])
    na = fd.ops.sqrt(fd.ops.sum(fd.ops.mul(a, a), dims=[-1]))
    nb = fd.ops.sqrt(fd.ops.sum(fd.ops.mul(b, b), dims=[-1]))
    fd.add_output(
        fd.ops.truediv(dot, fd.ops.mul(fd.ops.maximum(na, 1e-8), fd.ops.maximum(nb, 1e-8)))
    )


@cosine_similarity.expects
def _(a, b):
    return [F.cosine_similarity(a, b)]


@program(lambda: [torch.randn(12, HIDDEN), torch.randn(20, HIDDEN)], cuts={0: 0}, tolerance=1e-4)
def pairwise_distances(fd: FusionDefinition) -> None:
    a = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    b = fd.define_tensor(shape=[-1, -1], contiguity=[True, True])
    direct = fd.ops.sub(
        fd.ops.broadcast(a, [False, True, False]), fd.ops.broadcast(b, [True, False, False])
    )
    direct = fd.ops.sqrt(fd.ops.sum(fd.ops.mul(direct, direct), dim=2))
    squares = fd.ops.add(
        fd.ops.sum(fd.ops.mul(a, a), dims=[1], keepdim=True),
        fd.ops.broadcast(fd.ops.sum(fd.ops.mul(b, b), dims=[1]), [True, False]),
    )
    inner = fd.ops.matmul(a, fd.ops.permute(b, [1, 0]))
    fd.add_output(direct)
    fd.add_output(fd.ops.sub(squares, fd.ops.mul(2.0, inner)))


@pairwise_distances.expects
def _(a, b):
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return [distance, distance**2]


@program(lambda: [torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, HIDDEN) + 0.1], cuts={0: 0, 1: 0})
def gaussian_log_likelihood(fd: FusionDefinition) -> None:
    x = fd.from_pytorch(torch.empty(TOKENS, HIDDEN))
    sigma = fd.from_pytorch(torch.empty(TOKENS, HIDDEN), static_sizes=True)
    z = fd.ops.div(x, sigma)
    half_log_tau = fd.define_scalar(0.5 * math.log(2 * math.pi))
    log_p = fd.ops.sub(
        fd.ops.mul(-0.5, fd.ops.mul(z, z)), fd.ops.add(fd.ops.log(sigma), half_log_tau)
    )
    cdf = fd.ops.mul(0.5, fd.ops.erfc(fd.ops.mul(z, -math.sqrt(0.5))))
    fd.add_output(log_p)
    fd.add_output(cdf)


@gaussian_log_likelihood.expects
def _(x, sigma):
    normal = torch.distributions.Normal(torch.zeros_like(x), sigma)
    return [normal.log_prob(x), normal.cdf(x)]
