"""Small fusions for the scheduler tests, and comparison of their kernels with torch in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser.ir.domain.tensor_domain import TensorDomain, contiguity_for
from fuser.ir.dtypes import DataType, from_torch, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar.constructors import Symbol
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule import find_scheduler, rejections
from fuser.schedule.input_facts import Facts
from fuser.support.device import CPU, H200, DeviceInfo

Build = Callable[..., "TensorView | Sequence[TensorView]"]
DEVICES = {"cpu": CPU, "h200": H200}


def new_input(
    fusion: Fusion, shape: Sequence[int | None], dtype: DataType, *, contiguous: bool = True
) -> TensorView:
    """Adds an input; an extent of 1 is a broadcast axis, None is symbolic."""
    from fuser.ir.scalar import constructors as sc
    from fuser.ir.types import IterType

    axes = [
        fusion.new_axis(sc.ONE, IterType.broadcast)
        if n == 1
        else fusion.new_axis(fusion.new_extent(lo=1) if n is None else sc.const(n))
        for n in shape
    ]
    domain = TensorDomain.of(axes, contiguity=contiguity_for(axes, contiguous))
    tv = fusion.new_tensor(domain, dtype)
    fusion.add_input(tv)
    return tv


def define(
    build: Build,
    *shapes: Sequence[int | None],
    dtype: DataType | Sequence[DataType] = DataType.Float,
) -> Fusion:
    """Returns the fusion of `build(*inputs)`, whose results become the outputs.

    All inputs have one dtype, or each its own.
    """
    fusion = Fusion()
    dtypes = [dtype] * len(shapes) if isinstance(dtype, DataType) else dtype
    with FusionGuard(fusion):
        pairs = zip(shapes, dtypes, strict=True)
        results = build(*(new_input(fusion, s, d) for s, d in pairs))
        for out in (results,) if isinstance(results, TensorView) else results:
            fusion.add_output(out)
    return fusion


def sizes_of(fusion: Fusion, *shapes: Sequence[int]) -> dict[Symbol, int]:
    """Returns the values of the symbols in the inputs' extents."""
    tensors = [v for v in fusion.inputs if isinstance(v, TensorView)]
    return {
        axis.extent: n
        for tv, shape in zip(tensors, shapes, strict=True)
        for axis, n in zip(tv.domain.logical, shape, strict=True)
        if isinstance(axis.extent, Symbol)
    }


def scheduled(fusion: Fusion, device: DeviceInfo, *shapes: Sequence[int]) -> tuple[Fusion, object]:
    """Returns a scheduled copy of a fusion and the chosen parameters."""
    from fuser.schedule import scheduler

    copy, _ = fusion.copy()
    name = find_scheduler(copy)
    assert name is not None, rejections(copy)
    row = scheduler(name)
    params = row.heuristics(copy, Facts(sizes_of(copy, *shapes)), device)
    row.apply(copy, params)
    return copy, params


def domains(fusion: Fusion) -> dict[str, str]:
    """Returns the loop domain of each tensor, with its compute-at position if it has one."""
    return {f"T{tv.number}": str(tv).split("[", 1)[1] for tv in fusion.tensors()}


def make_executor(
    fusion: Fusion, device: str = "cpu", *, checked: bool | None = None
) -> FusedKernelExecutor:
    """Returns an executor on CPU tensors with the schedules of `device`."""
    name = find_scheduler(fusion)
    assert name is not None, rejections(fusion)
    check = device != "cpu" if checked is None else checked
    return FusedKernelExecutor(
        fusion, scheduler=name, name=f"test_{name}", device=DEVICES[device], checked=check
    )


def run(
    executor: FusedKernelExecutor, inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Runs a kernel on inputs and returns dense outputs.

    Expanded axes have one element. Outputs are first filled with a pattern that no result has.
    """
    fusion = executor.fusion
    outputs: list[torch.Tensor] = []
    for tv, shape in zip(fusion.outputs, shapes, strict=True):
        axes = zip(tv.domain.no_reductions, shape, strict=True)
        held = [1 if a.is_broadcast else n for a, n in axes]
        outputs.append(torch.full(held, 77, dtype=to_torch(tv.dtype())).expand(tuple(shape)))
    executor.run(list(inputs), outputs, sizes=sizes_of(fusion, *(t.shape for t in inputs)))
    return outputs


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns small integers or normal numbers that every dtype can hold exactly enough."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


__all__ = [
    "DEVICES",
    "define",
    "domains",
    "from_torch",
    "make_executor",
    "new_input",
    "random",
    "run",
    "scheduled",
    "sizes_of",
]
