"""All values of the one-byte float dtypes, and runs of small programs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import DataType, FusionDefinition

D = DataType


Tensor = torch.Tensor


FLOAT8 = {
    D.Float8_e4m3fn: torch.float8_e4m3fn,
    D.Float8_e5m2: torch.float8_e5m2,
    D.Float8_e8m0fnu: torch.float8_e8m0fnu,
}


OTHERS = {
    D.Double: torch.float64,
    D.Float: torch.float32,
    D.Half: torch.float16,
    D.BFloat16: torch.bfloat16,
    D.Int: torch.int64,
    D.Int32: torch.int32,
    D.Bool: torch.bool,
}


def run(
    build: Callable[..., Any], *inputs: Tensor, options: Sequence[str] = ("checked",)
) -> list[Tensor]:
    """Runs a program, and its copy from its own text; returns the copy's results."""
    with FusionDefinition() as fd:
        made = build(*map(fd.from_pytorch, inputs))
        for tv in made if isinstance(made, list | tuple) else [made]:
            fd.add_output(tv)
    again: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), again)
    with FusionDefinition() as copy:
        again["nvfuser_fusion"](copy)
    assert copy.fusion == fd.fusion
    return copy.execute(inputs, _enable_options=options)


def codes(dtype: DataType) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8[dtype])


def check(out: Tensor, expected: Tensor) -> None:
    """Compares every element as a number; NaN equals NaN."""
    assert out.dtype is expected.dtype and out.shape == expected.shape
    if out.dtype.is_floating_point:
        out, expected = out.double(), expected.double()
        same = (out == expected) & (out.signbit() == expected.signbit())
        same = same | (out.isnan() & expected.isnan())
    else:
        same = out == expected
    assert bool(same.all()), (out[~same][:5], expected[~same][:5])


def check_bytes(out: Tensor, expected: Tensor) -> None:
    assert out.dtype is expected.dtype
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
