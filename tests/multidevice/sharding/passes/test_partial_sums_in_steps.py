"""Reductions in the steps of a loop: partial sums of each block, added after the loop.

Blocks may be shorter than others, or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType

pytestmark = pytest.mark.from_text

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "prod": lambda x: x.prod(1),
}


def stream_reduction(tv: Any, count: int | None) -> None:
    axis = len(tv.get_loop_domain()) - 1
    if count is not None:
        tv.outer_split(axis, count)
    tv.axis(axis).parallelize(ParallelType.stream)


@pytest.mark.parametrize("name", REDUCTIONS)
# Blocks of 2, 2, 1 and none; of 2, 2, 1; of one each; of all.
@pytest.mark.parametrize("count", [4, 3, None, 1])
@pytest.mark.parametrize("shape", [[3, 5], [-1, -1]])
def test_a_reduction(name: str, count: int | None, shape: list[int]) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape, contiguity=True)
        out = getattr(fd.ops, name)(fd.ops.sin(x), 1)
        fd.add_output(out)
        stream_reduction(out, count)
    given = torch.randn(3, 5)
    (got,) = fd.execute([given])
    torch.testing.assert_close(got, REDUCTIONS[name](given.double().sin()).float())


@pytest.mark.parametrize("count", [4, 3, None])
@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_a_contraction(op: str, count: int | None) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        out = getattr(fd.ops, op)(x, w)
        fd.add_output(out)
        stream_reduction(out, count)
    x_value, w_value = torch.randn(3, 5), torch.randn(5, 7)
    (got,) = fd.execute([x_value, w_value if op == "matmul" else w_value.t().contiguous()])
    torch.testing.assert_close(got, (x_value.double() @ w_value.double()).float())


def test_half_precision_is_summed_in_float() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([64, 64], dtype=torch.bfloat16, contiguity=True)
        w = fd.define_tensor([64, 64], dtype=torch.bfloat16, contiguity=True)
        out = fd.ops.matmul(x, w)
        fd.add_output(out)
        stream_reduction(out, 4)
    x_value, w_value = (torch.randn(64, 64).bfloat16() for _ in range(2))
    (got,) = fd.execute([x_value, w_value])
    assert got.dtype == torch.bfloat16
    want = x_value.double() @ w_value.double()
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=0.15)
