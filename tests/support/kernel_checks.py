"""Compares scheduled kernels with torch in float64, in each execution mode of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import from_torch
from fuser.ir.fusion import TensorView
from tests.support.small_fusions import Build, define, make_executor, run

BOTH = pytest.mark.parametrize("device", ["cpu", "h200"])


Reference = Callable[..., "torch.Tensor | Sequence[torch.Tensor]"]


TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1e-2),
}


def symbolic(shape: Sequence[int]) -> list[int | None]:
    return [1 if n == 1 else None for n in shape]


def check(
    build: Build,
    reference: Reference,
    inputs: Sequence[torch.Tensor],
    device: str,
    *,
    scale: float = 1.0,
    broadcast_ones: bool = True,
    is_static: bool = False,
) -> object:
    """Runs a kernel and compares its results; returns the parameters of the variant that ran."""
    shapes = [symbolic(t.shape) if broadcast_ones else [None] * t.dim() for t in inputs]
    if is_static:
        shapes = [list(t.shape) for t in inputs]
    fusion = define(build, *shapes, dtype=[from_torch(t.dtype) for t in inputs])
    executor = make_executor(fusion, device)
    wide = [t.double() if t.dtype.is_floating_point else t for t in inputs]
    expected = reference(*wide)
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    got = run(executor, inputs, [tuple(t.shape) for t in wanted])
    for out, want in zip(got, wanted, strict=True):
        rtol, atol = TOLERANCE.get(out.dtype, (0.0, 0.0))
        torch.testing.assert_close(
            out, want.to(out.dtype), rtol=rtol, atol=atol * scale, equal_nan=True
        )
    return executor.variants[-1].params


def back(x: TensorView, like: torch.dtype) -> TensorView:
    """Casts a result to the dtype of the inputs."""
    return ops.cast(x, from_torch(like))
