"""Attention on a GPU: torch's fused kernel, cases it does not support, dropout, and CUDA
graphs.
"""

# Ops are called with what they refuse, and with options that are put together.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import DataType, FusionDefinition
from hostir.runtime.cuda_graphs import RUNS_BEFORE
from tests.support.attention_reference import attend, check, define, draw, gradients

pytestmark = pytest.mark.gpu
D = DataType
# (n, h, l, s, e, v): what the fused kernel takes, pads, and leaves to single steps.
SIZES = {
    "plain": (2, 3, 64, 64, 64, 64),
    "more keys": (1, 2, 33, 130, 32, 32),
    "more queries": (1, 2, 130, 33, 32, 32),
    "padded heads": (2, 2, 17, 17, 20, 20),
    "largest heads": (1, 1, 40, 40, 256, 256),
    "larger heads": (1, 1, 40, 40, 264, 264),
    "other values": (2, 2, 16, 24, 32, 16),
    "padded heads, other values": (2, 3, 5, 7, 4, 6),
    "padded heads, other values, longer": (1, 2, 130, 33, 12, 20),
    "no keys": (2, 2, 4, 0, 8, 8),
    "no queries": (2, 2, 0, 4, 8, 8),
}


def given_for(sizes: tuple[int, ...], dtype: DataType) -> list[torch.Tensor]:
    n, h, rows, columns, e, v = sizes
    shapes = [(n, h, rows, e), (n, h, columns, e), (n, h, columns, v), (n, h, rows, v)]
    # As small as projections of normalised rows are: sums of 256 products stay near 1.
    return [t / 2 for t in draw(shapes, dtype)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [D.Half, D.BFloat16, D.Float, D.Double], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_forward_and_backward(name: str, dtype: DataType, is_causal: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    *operands, grad = given = given_for(SIZES[name], dtype)
    wide = [t.double() for t in operands]
    expected = *attend(wide, is_causal=is_causal), *gradients(wide, grad, is_causal=is_causal)
    fd, on_gpu = define(dtype=dtype, is_causal=is_causal), [t.cuda() for t in given]
    for _ in range(RUNS_BEFORE + 4):
        outs = fd.execute(on_gpu)
        check([t.cpu() for t in outs], expected, dtype)
        del outs


@pytest.mark.parametrize("dtype", [D.BFloat16, D.Float], ids=str)
def test_bias_and_mask(dtype: DataType) -> None:
    *operands, _ = given_for(SIZES["plain"], dtype)
    wide = [t.double() for t in operands]
    (bias,) = draw([(2, 1, 64, 64)], dtype, seed=3)
    mask = draw([(2, 1, 1, 64)], dtype, seed=4)[0] > 0
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4, dtype=dtype) for _ in range(3)]
        added = fd.define_tensor([-1, 1, -1, -1], dtype=dtype)
        seen = fd.define_tensor([-1, 1, 1, -1], dtype=D.Bool)
        for out in fd.ops.sdpfa_fwd(*tensors, added, seen):
            fd.add_output(out)
    given = [t.cuda() for t in (*operands, bias, mask)]
    for _ in range(RUNS_BEFORE + 4):
        outs = [t.cpu() for t in fd.execute(given)]
        check(outs, attend(wide, added=bias, mask=mask), dtype)


@pytest.mark.parametrize("size", [5, 16, 56, 130])
@pytest.mark.parametrize("dtype", [D.Half, D.BFloat16, D.Float], ids=str)
def test_rows_without_scores(dtype: DataType, size: int) -> None:
    """Masks and biases of -inf that hide all keys from some queries, and from a whole batch
    entry.
    """
    sizes = (3, 2, size, size, 32, 32)
    *operands, _ = given_for(sizes, dtype)
    wide = [t.double() for t in operands]
    mask = draw([(3, 1, size, size)], dtype, seed=4)[0] > 0
    mask[0, :, 2], mask[1] = False, False
    added = torch.where(mask, 0.0, -torch.inf).to(operands[0].dtype)
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor([-1] * 4, dtype=dtype) for _ in range(3)]
        bias = fd.define_tensor([-1, 1, -1, -1], dtype=dtype)
        seen = fd.define_tensor([-1, 1, -1, -1], dtype=D.Bool)
        for results in (fd.ops.sdpfa_fwd(*tensors, bias), fd.ops.sdpfa_fwd(*tensors, None, seen)):
            for out in results:
                fd.add_output(out)
    expected = attend(wide, mask=mask)
    outs = [t.cpu() for t in fd.execute([t.cuda() for t in (*operands, added, mask)])]
    check(outs[:4], expected, dtype)
    check(outs[4:], expected, dtype)


@pytest.mark.parametrize("dtype", [D.BFloat16, D.Float], ids=str)
def test_dropout(dtype: DataType) -> None:
    """The backward pass drops the same weights as the forward pass; each run draws a new
    seed.
    """
    p = 0.25
    fd = define(dtype=dtype, dropout_p=p)
    # Values that show the weights: output = weights @ I.
    eye = torch.eye(64).expand(1, 2, 64, 64).contiguous()
    *operands, _, grad = draw([(1, 2, 64, 64)] * 4, dtype)
    operands = [t / 2 for t in operands]
    given = [*operands, eye.to(grad.dtype), grad]
    wide = [t.double() for t in given[:3]]
    tolerance = 3e-2 if dtype is D.BFloat16 else 1e-4
    seen: list[torch.Tensor] = []
    for seed in (1, 1, 2, None, None, None):
        if seed is not None:
            torch.manual_seed(seed)
        out, log_sumexp, key, _, *grads = (t.cpu() for t in fd.execute([t.cuda() for t in given]))
        kept = (out != 0).double() / (1 - p)
        expected, lse = attend(wide, kept=kept)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(log_sumexp.double(), lse, rtol=1e-3, atol=1e-3)
        for one, want in zip(grads, gradients(wide, grad, kept=kept), strict=True):
            torch.testing.assert_close(one.double(), want, rtol=tolerance, atol=tolerance)
        assert abs(float((out == 0).double().mean()) - p) < 0.05
        assert key.view(torch.int64).any()
        seen.append(out)
    assert torch.equal(seen[0], seen[1])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen[1:]))
    assert any("generator" in line for line in fd.cuda_graphs()), fd.cuda_graphs()


@pytest.mark.parametrize("dtype", [D.BFloat16, D.Float], ids=str)
def test_graphs_repeat_attention(dtype: DataType) -> None:
    """Attention with other kernels around it: two calls alone would gain nothing from a
    graph.
    """
    *operands, grad = given_for(SIZES["plain"], dtype)
    wide = [t.double() for t in operands]
    expected = *attend(wide, is_causal=True), *gradients(wide, grad, is_causal=True)
    with FusionDefinition() as fd:
        q, k, v, g = (fd.define_tensor([-1] * 4, dtype=dtype) for _ in range(4))
        q, k, v = (fd.ops.cast(fd.ops.neg(t), dtype) for t in (q, k, v))
        results = fd.ops.sdpfa_fwd(q, k, v, is_causal=True)
        numbers = 0.0, True
        grads = fd.ops.sdpfa_bwd(g, q, k, v, *results[:2], *numbers, *results[2:], None)
        for out in (*results, *grads):
            fd.add_output(out)
    on_gpu = [*(-t.cuda() for t in operands), grad.cuda()]
    for _ in range(40):
        outs = fd.execute(on_gpu)
        check([t.cpu() for t in outs], expected, dtype)
        del outs
    assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()


# ------------------------------------------------------------------ kernels of a Hopper
# Enough operations that no call counts as small: n, h, heads of keys, l, s, e, v.
LARGER = {
    "plain": (2, 8, 8, 256, 256, 64, 64),
    "odd lengths": (2, 16, 16, 257, 301, 64, 64),
    "grouped": (2, 8, 2, 300, 300, 64, 64),
    "one head of keys": (2, 8, 1, 256, 257, 64, 64),
    "one query": (8, 8, 4, 1, 2048, 128, 128),
    "other values": (2, 8, 8, 257, 256, 64, 32),
    "padded heads": (2, 8, 8, 256, 256, 60, 60),
    "largest heads": (1, 4, 4, 256, 256, 256, 256),
}


def grouped_expected(
    given: list[torch.Tensor], *, is_causal: bool, **added: torch.Tensor
) -> list[torch.Tensor]:
    q, k, v, grad = (t.double() for t in given)
    times = q.shape[1] // k.shape[1]
    read = [q, *(t.repeat_interleave(times, 1) for t in (k, v))]
    how = {"is_causal": is_causal, **added}
    dq, *others = gradients(read, grad, **how)
    sums = (g.unflatten(1, (-1, times)).sum(2) for g in others)
    return [*attend(read, **how), dq, *sums]  # pyright: ignore[reportArgumentType]


def grouped_definition(dtype: DataType, *, is_causal: bool) -> FusionDefinition:
    with FusionDefinition() as fd:
        q, k, v, grad = (
            fd.define_tensor([-1] * 4, contiguity=False, dtype=dtype) for _ in range(4)
        )
        results = fd.ops.sdpfa_fwd(q, k, v, is_causal=is_causal, enable_gqa=True)
        numbers = 0.0, is_causal, *results[2:], None
        grads = fd.ops.sdpfa_bwd(grad, q, k, v, *results[:2], *numbers, enable_gqa=True)
        for out in (*results, *grads):
            fd.add_output(out)
    return fd


def beside(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def larger(name: str, dtype: DataType) -> list[torch.Tensor]:
    n, h, groups, rows, keys, e, v = LARGER[name]
    shapes = [(n, h, rows, e), (n, groups, keys, e), (n, groups, keys, v), (n, h, rows, v)]
    return [t / 2 for t in draw(shapes, dtype)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [D.Half, D.BFloat16], ids=str)
@pytest.mark.parametrize("name", LARGER)
def test_larger_calls(name: str, dtype: DataType, is_causal: bool) -> None:
    """Calls on operands and gradients with different strides in turn.

    torch caches one cuDNN plan for gradients with different strides.
    """
    given = larger(name, dtype)
    expected = grouped_expected(given, is_causal=is_causal)
    fd = grouped_definition(dtype, is_causal=is_causal)
    ways = itertools.product((lambda t: t, beside), repeat=2)
    for lay, lay_grad in [*ways, (lambda t: t, lambda t: t)]:
        read = [*(lay(t.cuda()) for t in given[:3]), lay_grad(given[3].cuda())]
        outs = fd.execute(read)
        check([t.cpu() for t in outs], expected, dtype)
        for out, like in zip((outs[0], *outs[4:]), (read[0], *read[:3]), strict=True):
            if out.shape == like.shape and 1 not in out.shape:
                assert out.stride() == like.stride()


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, -1, -2), (2, 1, 1, -2), (1, 8, -1, -2), (2, 8, -1, 1)])
@pytest.mark.parametrize("name", ["plain", "odd lengths", "grouped", "largest heads"])
def test_larger_calls_with_biases_and_masks(
    name: str, shape: tuple[int, ...], expands: bool
) -> None:
    given = larger(name, D.BFloat16)
    n, h, _, rows, keys, *_ = LARGER[name]
    sizes = [{-1: rows, -2: keys, 2: n, 8: h}.get(size, size) for size in shape]
    (bias,) = draw([sizes], D.BFloat16, seed=3)
    mask = draw([sizes], seed=4)[0] > -0.5
    mask[0, 0, 0] = False
    with FusionDefinition() as fd:
        read = [fd.define_tensor([-1] * 4, dtype=D.BFloat16) for _ in range(3)]
        declared = [1 if size == 1 and not expands else -1 for size in sizes]
        added, seen = (fd.define_tensor(declared, dtype=dtype) for dtype in (D.BFloat16, D.Bool))
        ways = {"bias": added}, {"mask": seen}, {"bias": added, "mask": seen}
        for named in ways:
            for out in fd.ops.sdpfa_fwd(*read, **named, enable_gqa=True)[:2]:
                fd.add_output(out)
    whole = (n, h, rows, keys)
    lay = (lambda t: t.expand(whole)) if expands else (lambda t: t)
    outs = fd.execute([t.cuda() for t in given[:3]] + [lay(bias.cuda()), lay(mask.cuda())])
    for i, how in enumerate(({"added": bias}, {"mask": mask}, {"added": bias, "mask": mask})):
        expected = grouped_expected(given, is_causal=False, **how)
        out, sums = (t.cpu().double() for t in outs[2 * i : 2 * i + 2])
        torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(sums, expected[1], rtol=1e-3, atol=1e-3)


def test_a_result_stays_where_torch_puts_it() -> None:
    """No copy follows the attention kernel, also in a graph that the caller captures."""
    given = [t.cuda() for t in larger("plain", D.BFloat16)[:3]]
    with FusionDefinition() as fd:
        read = [fd.define_tensor([-1] * 4, dtype=D.BFloat16) for _ in range(3)]
        fd.add_output(fd.ops.sdpfa_fwd(*read)[0])
    for _ in range(4):
        fd.execute(given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fd.execute(given)
        torch.cuda.synchronize()
    kernels = [
        e.name for e in profile.events() or () if "memcpy" in e.name.lower() or "copy" in e.name
    ]
    assert not kernels, kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = fd.execute(given)
    graph.replay()
    expected, _ = attend([t.double().cpu() for t in given])
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("p", [0.25, 0.1])
def test_dropout_in_two_definitions(p: float) -> None:
    """A gradient in another definition drops the same weights, given only seed and offset.

    cuDNN is used for probabilities that are multiples of 1/16, flash attention for others.
    """
    dtype = D.BFloat16
    with FusionDefinition() as first:
        q, k, v = (first.define_tensor([-1] * 4, dtype=dtype) for _ in range(3))
        for out in first.ops.sdpfa_fwd(q, k, v, dropout_p=p):
            first.add_output(out)
    with FusionDefinition() as second:
        grad, q, k, v, out = (second.define_tensor([-1] * 4, dtype=dtype) for _ in range(5))
        sums = second.define_tensor([-1] * 3)
        seed = second.define_tensor([2], dtype=D.UInt64)
        offset = second.define_tensor([], dtype=D.UInt64)
        kept = out, sums, p, False, seed, offset, None
        for made in second.ops.sdpfa_bwd(grad, q, k, v, *kept):
            second.add_output(made)
    query, key, grads = draw([(2, 8, 256, 64), (2, 8, 64, 64), (2, 8, 256, 64)], dtype)
    # Values that show the weights: output = weights @ I.
    eye = torch.eye(64, dtype=query.dtype).expand(2, 8, 64, 64).contiguous()
    given = [query / 2, key / 2, eye]
    on_gpu = [t.cuda() for t in given]
    for _ in range(4):
        results = first.execute(on_gpu)
        kept_ones = (results[0].cpu() != 0).double() / (1 - p)
        expected = gradients([t.double() for t in given], grads, kept=kept_ones)
        found = second.execute([grads.cuda(), *on_gpu, *results])
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.cpu().double(), want, rtol=3e-2, atol=3e-2)
        assert abs(float((results[0] == 0).double().mean()) - p) < 0.02
