"""Tests kernels that iterate a row several times: the directions, and values computed only once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.support.device import H200
from tests.support.kernel_checks import check
from tests.support.row_programs import back_to, softmax, wide
from tests.support.small_fusions import Build, define, scheduled, sizes_of

BF16 = DataType.BFloat16
# A row of this many elements fits in no block.
LONG = 1 << 18


def kernel_text(build: Build, shape: tuple[int, int], outputs: Sequence[Sequence[int]]) -> str:
    """Returns the text of the kernel for bfloat16 rows with one target each."""
    fusion = define(build, [None, None], [None], dtype=[BF16, DataType.Int])
    executor = FusedKernelExecutor(fusion, scheduler="inner_persistent", name="rows", device=H200)
    x, t = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[0], dtype=torch.int64)
    types = {DataType.Float: torch.float32, BF16: torch.bfloat16}
    outs = [
        torch.empty(tuple(s), dtype=types[tv.dtype()])
        for tv, s in zip(fusion.outputs, outputs, strict=True)
    ]
    record = executor.bind([x, t], outs, sizes=sizes_of(fusion, shape, shape[:1]))
    assert record is not None
    return record[0].kernel.source.text


def loss_and_gradient(x: TensorView, t: TensorView) -> Sequence[TensorView]:
    places = ops.broadcast(ops.iota(x.size(1), dtype=DataType.Int), [True, False])
    is_target = ops.eq(places, ops.broadcast(t, [False, True]))
    logits = wide(x)
    top = ops.max(logits, -1, keepdim=True)
    lse = ops.add(ops.log(ops.sum(ops.exp(ops.sub(logits, top)), -1, keepdim=True)), top)
    picked = ops.sum(ops.where(is_target, logits, 0.0), -1)
    p = ops.exp(ops.sub(logits, lse))
    gradient = ops.where(is_target, ops.sub(p, 1.0), p)
    return ops.sub(ops.squeeze(lse, [1]), picked), back_to(x, gradient)


def directions(text: str) -> list[str]:
    """Returns the directions of the loops that are not unrolled."""
    lines = text.splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    loops = [now for before, now in pairs if "for (" in now and "FUSER_UNROLL" not in before]
    return [re.findall(r"(\+\+|--)\w+\)", loop)[0] for loop in loops]


@pytest.mark.parametrize("columns", [LONG, LONG + 1])
def test_every_second_loop_over_a_row_goes_backwards(columns: int) -> None:
    text = kernel_text(loss_and_gradient, (300, columns), [(300,), (300, columns)])
    assert directions(text) == ["++", "--", "++"]


@pytest.mark.parametrize("columns", [LONG, LONG + 1, 50257, 32001])
def test_what_a_row_has_once_is_computed_once(columns: int) -> None:
    """The loss and each element of the gradient need the logarithm of the sum."""
    text = kernel_text(loss_and_gradient, (300, columns), [(300,), (300, columns)])
    assert text.count("fm_log(") == 1

    def build(x: TensorView, t: TensorView) -> TensorView:
        shift = ops.broadcast(ops.cast(t, DataType.Float), [False, True])
        return back_to(x, softmax(ops.add(wide(x), shift)))

    text = kernel_text(build, (300, columns), [(300, columns)])
    assert text.count("fm_reciprocal(") == 1

    def norm(x: TensorView, t: TensorView) -> Sequence[TensorView]:
        var, _ = ops.var_mean(wide(x), [-1], correction=0)
        r = ops.rsqrt(ops.add(ops.add(var, 1e-5), ops.cast(t, DataType.Float)))
        return r, back_to(x, ops.mul(wide(x), ops.broadcast(r, [False, True])))

    text = kernel_text(norm, (300, columns), [(300,), (300, columns)])
    assert text.count("fm_rsqrt(") == 1


def test_narrow_rows_are_kept_where_nothing_is_written_along_them() -> None:
    def loss(x: TensorView, t: TensorView) -> TensorView:
        return loss_and_gradient(x, t)[0]

    shapes = [(2048, 50257), (2048,)]
    for build, expected in (
        (loss, "threads 512x1, vector 8, kept 104, resident 1024, shifted"),
        (loss_and_gradient, "threads 512x1, vector 8, looped, unroll 2, resident 0, shifted"),
    ):
        fusion = define(build, [None, None], [None], dtype=[BF16, DataType.Int])
        assert str(scheduled(fusion, H200, *shapes)[1]) == f"inner_persistent({expected})"
    # In rows of 50257, a last step of 4 vectors would be mostly empty; in rows of 65536 it is full.
    for build, columns, looped in (
        (loss_and_gradient, 50257, "threads 1024x1, vector 4, looped, unroll 2"),
        (loss_and_gradient, 65536, "threads 1024x1, vector 4, looped, unroll 4"),
        (loss, 50257, "threads 512x1, vector 4, looped, unroll 4"),
    ):
        fusion = define(build, [None, None], [None], dtype=[DataType.Float, DataType.Int])
        _, params = scheduled(fusion, H200, (2048, columns), (2048,))
        assert looped in str(params)


@pytest.mark.parametrize("columns", [LONG, LONG + 1])
def test_targets_of_looped_rows_are_compared_in_32_bits(columns: int) -> None:
    text = kernel_text(loss_and_gradient, (300, columns), [(300,), (300, columns)])
    compared = re.findall(r"fm_is_at\(\w+, fm_cast<int64_t>\((\w+)\), (.*?)\);", text)
    assert compared
    # The indices of unrolled loops add up to an int; the rest is one value per iteration.
    assert all(step.startswith("fm_cast<int>(") for _, step in compared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [131072, 131073, 163841])
def test_losses_and_gradients_of_long_rows(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    t = torch.tensor([0, columns - 1, columns // 3])

    def reference(x: torch.Tensor, t: torch.Tensor) -> Sequence[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(x, t.long(), reduction="none")
        hot = torch.nn.functional.one_hot(t.long(), columns)
        return loss.float(), torch.softmax(x, -1) - hot

    check(loss_and_gradient, reference, [x, t], "h200", broadcast_ones=False)
