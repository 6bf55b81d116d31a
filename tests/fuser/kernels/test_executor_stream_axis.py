"""Tests kernels with a stream axis: they take the step number as an argument, and write
one block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import ParallelType
from fuser.kernels.executor import FusedKernelExecutor
from fuser.ops.define import define_tensor
from fuser.support.errors import InputError

Build = Callable[[TensorView, TensorView], object]
CASES: dict[str, tuple[Build, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "add": (ops.add, torch.add),
    "chain": (lambda x, y: ops.mul(ops.sin(ops.add(x, y)), y), lambda x, y: (x + y).sin() * y),
    "sum": (lambda x, y: ops.sum(ops.mul(x, y), 1), lambda x, y: (x * y).sum(1)),
}


def streamed(build: Build, shape: list[int], count: int | None) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = (define_tensor(shape, True) for _ in range(2))
        fusion.add_input(x)
        fusion.add_input(y)
        out = build(x, y)
        assert isinstance(out, TensorView)
        fusion.add_output(out)
    if count is not None:
        out.outer_split(0, count)
    out.axis(0).parallelize(ParallelType.stream)
    return fusion


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("shape", "rows", "count"),
    [([-1, 4], 6, 3), ([-1, 4], 7, 3), ([7, 4], 7, 3), ([-1, 4], 5, 4), ([-1, -1], 3, None)],
)
def test_one_block_is_written_and_the_others_stay(
    name: str, shape: list[int], rows: int, count: int | None
) -> None:
    build, meaning = CASES[name]
    fusion = streamed(build, shape, count)
    executor = FusedKernelExecutor(fusion, scheduler="user", name="step", checked=True)
    x, y = torch.randn(rows, 4), torch.randn(rows, 4)
    sizes = {s: int(v) for s, v in bind_inputs(fusion, [x, y]).items()}
    want = meaning(x.double(), y.double()).float()
    steps = rows if count is None else count
    block = -(-rows // steps)
    found = torch.full_like(want, -7.0)
    for step in (*range(1, steps), 0):
        expected = found.clone()
        expected[step * block : (step + 1) * block] = want[step * block : (step + 1) * block]
        executor.run([x, y, step], [found], sizes=sizes)
        torch.testing.assert_close(found, expected)
    assert len(executor.variants) == 1


def test_a_step_that_the_stream_does_not_have_is_refused() -> None:
    fusion = streamed(ops.add, [6, 4], 3)
    executor = FusedKernelExecutor(fusion, scheduler="user", name="step", checked=True)
    x, out = torch.randn(6, 4), torch.zeros(6, 4)
    for given in ([x, x, 3], [x, x, -1], [x, x]):
        with pytest.raises(InputError, match="must be an int from 0 to 2"):
            executor.run(given, [out], sizes={})
