"""Programs of table lookups: definitions, tables and indices to try, and comparison with
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import FusionDefinition
from fuser.ir.fusion import TensorView

Build = Callable[..., TensorView | tuple[TensorView, ...]]


def define(build: Build, inputs: Sequence[torch.Tensor], *, strided: bool = False) -> Any:
    """Returns a definition on symbolic tensors with any strides, or with the layout of the
    inputs.
    """
    with FusionDefinition() as fd:
        if strided:
            tvs = [fd.define_tensor([-1] * x.ndim, contiguity=False, dtype=x.dtype) for x in inputs]
        else:
            tvs = [fd.from_pytorch(x) for x in inputs]
        made = build(fd, *tvs)
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


def run(
    build: Build, *inputs: torch.Tensor, on: Sequence[str] = (), strided: bool = False
) -> list[torch.Tensor]:
    fd = define(build, inputs, strided=strided)
    return fd.execute(list(inputs), _enable_options=list(on))


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-99, 99, tuple(shape), generator=generator).to(dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def draw_index(
    shape: Sequence[int], extent: int, dtype: torch.dtype = torch.int64, seed: int = 1
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(extent, 1), tuple(shape), generator=generator).to(dtype)


def index_select(dim: int) -> tuple[Build, Callable[..., torch.Tensor]]:
    return (
        lambda fd, t, i: fd.ops.index_select(t, i, dim),
        lambda t, i: t.index_select(dim, i.long()),
    )


def take_along(dim: int) -> tuple[Build, Callable[..., torch.Tensor]]:
    return (
        lambda fd, t, i: fd.ops.take_along_axis(t, i, dim),
        lambda t, i: torch.take_along_dim(t, i.long(), dim),
    )


def gather(dim: int) -> tuple[Build, Callable[..., torch.Tensor]]:
    return lambda fd, t, i: fd.ops.gather(t, i, dim), lambda t, i: t.gather(dim, i.long())
