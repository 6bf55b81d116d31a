"""Pointwise, transpose and reduction kernels on a GPU, compared with torch in float64."""

from __future__ import annotations

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule import find_scheduler
from tests.support.small_fusions import Build, define, random, sizes_of

BF16 = DataType.BFloat16


def on_gpu(build: Build, inputs: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    fusion = define(build, *[(None,) * t.dim() for t in inputs], dtype=BF16)
    scheduler = find_scheduler(fusion)
    assert scheduler is not None
    executor = FusedKernelExecutor(fusion, scheduler=scheduler, name="gpu")
    out = torch.full(shape, 77, dtype=to_torch(BF16), device="cuda")
    tensors = [t.cuda() for t in inputs]
    sizes = sizes_of(fusion, *(t.shape for t in inputs))
    # Twice: workspaces of grid reductions must be left as they were found.
    for _ in range(2):
        out.fill_(77)
        executor.run(tensors, [out], sizes=sizes)
    return out.cpu().double()


def close(got: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    torch.testing.assert_close(got, expected.bfloat16().double(), rtol=1e-2, atol=1e-2 * scale)


@pytest.mark.parametrize("shape", [(7, 96), (1000, 770), (4096, 1536), (33, 1), (3, 37)], ids=str)
def test_pointwise(shape: tuple[int, int]) -> None:
    inputs = [random(shape, torch.bfloat16, k) for k in range(2)] + [
        random(shape[1:], torch.bfloat16, 2)
    ]

    def build(x: TensorView, y: TensorView, b: TensorView) -> TensorView:
        total = ops.add(ops.mul(ops.tanh(x), y), ops.broadcast(b, [True, False]))
        return ops.cast(total, BF16)

    x, y, b = (t.double() for t in inputs)
    close(on_gpu(build, inputs, shape), x.tanh() * y + b, 1)


@pytest.mark.parametrize(
    ("order", "shape"),
    [
        ((1, 0), (4096, 1536)),
        ((1, 0), (1000, 777)),
        ((1, 0), (1 << 18, 3)),
        ((0, 2, 1), (16, 300, 770)),
        ((2, 1, 0), (64, 48, 200)),
        ((0, 3, 1, 2), (16, 56, 56, 64)),
    ],
    ids=str,
)
def test_transposes(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x, y = random(shape, torch.bfloat16), random(shape, torch.bfloat16, 1).permute(order)
    want = x.double().permute(order) * y.double()

    def build(x: TensorView, y: TensorView) -> TensorView:
        return ops.cast(ops.mul(ops.permute(x, list(order)), y), BF16)

    close(on_gpu(build, [x, y.contiguous()], tuple(want.shape)), want, 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "shape", [(16, 65536), (4096, 1024), (1000, 770), (65536, 24), (2, 100000), (5, 3)], ids=str
)
def test_reductions(shape: tuple[int, int], axis: int) -> None:
    x = random(shape, torch.bfloat16)
    got = on_gpu(lambda x: ops.cast(ops.sum(x, [axis]), BF16), [x], (shape[1 - axis],))
    close(got, x.double().sum(axis), 10)


def test_a_full_reduction() -> None:
    x = random((1 << 22,), torch.bfloat16)
    got = on_gpu(lambda x: ops.cast(ops.sum(ops.mul(x, x), [0]), BF16), [x], ())
    close(got, (x.double() ** 2).sum(), 10)


@pytest.mark.parametrize(
    "shape",
    # Odd sizes, of which a thread takes several columns, in the last but one.
    [(2, 512, 1024), (4, 64, 770), (8, 33, 37), (11, 4096), (3, 2999, 999), (4, 5000, 300)],
    ids=str,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_few_rows(shape: tuple[int, ...], axis: int) -> None:
    x = random(shape, torch.bfloat16).transpose(0, axis).contiguous()
    rest = x.shape[:axis] + x.shape[axis + 1 :]
    got = on_gpu(lambda x: ops.cast(ops.sum(x, [axis]), BF16), [x], tuple(rest))
    close(got, x.double().sum(axis), 10)
