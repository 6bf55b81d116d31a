"""Tests random numbers in kernels: the schedule and the reader do not change them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, from_torch, to_torch
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Const
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from tests.fuser.ops.test_factories_random import close
from tests.support import random_reference as reference
from tests.support.small_fusions import define, make_executor, random, run, sizes_of

D = DataType
SEED, OFFSET = 2**40 + 11, 3
KEY: dict[str, Any] = {"rng_seed": Const(SEED, D.Int), "rng_offset": Const(OFFSET, D.Int)}


def whole(
    kind: str,
    shape: tuple[int, ...],
    ends: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns the random tensor of the definition, computed by torch."""
    count = int(torch.Size(shape).numel())
    given: dict[str, Any] = {"seed": SEED, "offset": OFFSET, "dtype": dtype}
    return reference.numbers(kind, count, ends, **given).reshape(shape)


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("dtype", [D.Float, D.Double, D.Half, D.BFloat16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_numbers(kind: str, dtype: DataType, device: str) -> None:
    def build(x: TensorView) -> TensorView:
        shape = [x.size(0), x.size(1)]
        return ops.add(x, getattr(ops, kind)(-0.25, 3.0, shape, dtype=dtype, **KEY))

    for shape in ((5, 13), (1, 7), (3, 1), (64, 32)):
        x = torch.zeros(shape)
        (got,) = run(make_executor(define(build, (None, None)), device), [x], [shape])
        want = whole(kind, shape, (-0.25, 3.0), to_torch(dtype))
        if kind == "uniform":
            assert torch.equal(got, want.to(got.dtype)), shape
        else:
            close(got.to(to_torch(dtype)), want)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_readers_of_all_kinds_see_the_same_numbers(device: str) -> None:
    """They are read transposed, partly, repeated, padded, summed, and twice in one kernel."""
    shape = (12, 40)
    u = whole("uniform", shape)
    cases: dict[str, tuple[Any, torch.Tensor]] = {
        "transposed": (lambda r: ops.permute(r, [1, 0]), u.T),
        "in part": (lambda r: ops.slice(r, [3, 5], [9, 39]), u[3:9, 5:39]),
        "padded": (
            lambda r: ops.pad(r, [1, 2], 0.0),
            torch.nn.functional.pad(u, [1, 2]),
        ),
        "reshaped": (lambda r: ops.reshape(r, [40, 12]), u.reshape(40, 12)),
        "twice": (lambda r: ops.sub(ops.mul(r, 2.0), r), u),
        "beside others": (
            lambda r: ops.cat([ops.slice(r, [6, 0], [12, 40]), r], 0),
            torch.cat([u[6:], u]),
        ),
    }
    for name, (read, want) in cases.items():
        fusion = define(
            lambda x, read=read: ops.add(read(ops.uniform(0, 1, list(shape), **KEY)), x),
            want.shape,
        )
        executor = make_executor(fusion, device)
        (got,) = run(executor, [torch.zeros(want.shape)], [want.shape])
        assert torch.equal(got, want), name


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_random_numbers(axis: int, device: str) -> None:
    shape = (24, 70)
    u = whole("uniform", shape)

    def build(x: TensorView) -> TensorView:
        return ops.sum(ops.mul(x, ops.uniform(0, 1, list(shape), **KEY)), [axis])

    executor = make_executor(define(build, shape), device)
    (got,) = run(executor, [torch.ones(shape)], [(shape[1 - axis],)])
    torch.testing.assert_close(got.double(), u.double().sum(axis), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_softmax_with_dropout(device: str) -> None:
    """A row's values, and their random numbers, are used twice."""
    shape = (9, 33)

    def build(x: TensorView) -> TensorView:
        e = ops.exp(ops.sub(x, ops.max(x, [1], keepdim=True)))
        p = ops.div(e, ops.sum(e, [1], keepdim=True))
        kept = ops.lt(ops.uniform(0, 1, list(shape), **KEY), 0.75)
        return ops.mul(ops.where(kept, p, 0.0), 1 / 0.75)

    x = torch.randn(shape, dtype=torch.float64)
    (got,) = run(make_executor(define(build, shape), device), [x.float()], [shape])
    want = torch.where(whole("uniform", shape) < 0.75, x.softmax(1) / 0.75, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_a_row_norm_of_dropout_makes_each_number_once() -> None:
    """Both sums and the result need the mask, which costs more to compute than a register."""
    shape = (9, 256)

    def build(x: TensorView) -> TensorView:
        kept = ops.lt(ops.uniform(0, 1, list(shape), **KEY), 0.75)
        y = ops.where(kept, x, 0.0)
        centred = ops.sub(y, ops.div(ops.sum(y, [1], keepdim=True), 256.0))
        squares = ops.sum(ops.mul(centred, centred), [1], keepdim=True)
        return ops.mul(centred, ops.rsqrt(squares))

    executor = make_executor(define(build, shape), "h200", checked=False)
    x = torch.randn(shape)
    (got,) = run(executor, [x], [shape])
    y = torch.where(whole("uniform", shape) < 0.75, x.double(), 0.0)
    y = y - y.mean(1, keepdim=True)
    torch.testing.assert_close(got.double(), y / y.norm(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert executor.variants[0].kernel.source.text.count("fm_uniform<") == 1


@pytest.mark.parametrize("columns", [1, 7, 64, 131, 768, 1000, 8192, 20001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_of_dropout_and_residual_keeps_their_sum(dtype: torch.dtype, columns: int) -> None:
    """The sum is also an output. Each number is drawn once, and each input is read once."""
    shape = (5, columns)

    def build(x: TensorView, r: TensorView) -> tuple[TensorView, TensorView]:
        kept = ops.lt(ops.uniform(0, 1, list(shape), **KEY), 0.75)
        h = ops.add(
            ops.where(kept, ops.mul(ops.cast(x, D.Float), 4 / 3), 0.0), ops.cast(r, D.Float)
        )
        centred = ops.sub(h, ops.div(ops.sum(h, [1], keepdim=True), columns))
        squares = ops.div(ops.sum(ops.mul(centred, centred), [1], keepdim=True), columns)
        y = ops.mul(centred, ops.rsqrt(ops.add(squares, 1e-5)))
        return ops.cast(y, x.dtype()), ops.cast(h, x.dtype())

    x, r = (random(shape, dtype, seed) for seed in (0, 1))
    executor = make_executor(define(build, shape, shape, dtype=from_torch(dtype)), "h200")
    y, h = run(executor, [x, r], [shape, shape])
    wide = torch.where(whole("uniform", shape) < 0.75, x.double() * 4 / 3, 0.0) + r.double()
    normed = torch.nn.functional.layer_norm(wide, (columns,))
    limit = 8e-3 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(h.double(), wide, rtol=limit, atol=limit)
    torch.testing.assert_close(y.double(), normed, rtol=limit, atol=limit)
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    if columns % 8 == 0:
        assert variant.compiled.counters.global_loads == {16: 2 * x.numel() * x.itemsize // 16}
        assert variant.kernel.source.text.count("fm_uniform<") == 1


def test_a_place_beyond_32_bits_takes_indices_of_64() -> None:
    """The last elements of a tensor that is too large for memory."""
    rows, width = 3 << 20, 1 << 10
    given: dict[str, Any] = {"seed": SEED, "offset": OFFSET, "dtype": torch.float32}
    want = reference.numbers("uniform", 8, (0.0, 1.0), first=rows * width - 8, **given)

    def build(x: TensorView) -> TensorView:
        part = ops.slice(
            ops.uniform(0, 1, [rows, width], **KEY), [rows - 1, width - 8], [rows, width]
        )
        return ops.add(part, x)

    executor = make_executor(define(build, (1, 8)))
    (got,) = run(executor, [torch.zeros(1, 8)], [(1, 8)])
    assert torch.equal(got[0], want)


def test_a_gpus_thread_keeps_the_words_of_its_neighbours() -> None:
    def build(x: TensorView) -> TensorView:
        return ops.add(x, ops.uniform(0, 1, [x.size(0), x.size(1)], **KEY))

    fusion = define(build, (None, None))
    executor = make_executor(fusion, "h200", checked=False)
    x = torch.zeros(64, 256)
    executor.run([x], [torch.empty_like(x)], sizes=sizes_of(fusion, x.shape))
    text = executor.variants[0].kernel.source.text
    # The index in the vector is a separate argument, so that reusing the generator's output needs
    # no test.
    assert re.search(r"fm_uniform<float>\(r1, .*, fm_cast<int64_t>\(k\d+\),", text)
    # Declared once, before the loop over the elements of a vector. The index is linear.
    assert text.index("FuserRandom r1;") < text.index("for (") < text.index("fm_uniform<float>(r1,")
    assert "/" not in text.partition("fm_uniform")[2].partition(";")[0]
