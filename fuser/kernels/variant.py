"""A variant of a kernel, and its binding to tensors: what a launch needs, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from fuser.ir import scalar as sc
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.kernels.kernel import Kernel
from fuser.lower.kernel import ScalarArg, StrideArg, TensorArg, WorkspaceArg, stride_symbol
from fuser.runtime.kernel import CompiledKernel
from fuser.runtime.launch import BoundLaunch


@dataclass
class Variant:
    """One kernel of a fusion: lowered, and compiled on first use."""

    kernel: Kernel
    params: object
    twins: Mapping[int, TensorView]
    nbytes: int = 0
    compiled: CompiledKernel | None = None

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The number of an input or output in the kernel -> that in the fusion."""
        return {twin.number: number for number, twin in self.twins.items()}

    @cached_property
    def strides(self) -> dict[int, tuple[Symbol, ...]]:
        """The number of an input or output in the fusion -> the symbols of its strides."""
        return {
            number: tuple(stride_symbol(twin, k) for k in range(twin.ndim))
            for number, twin in self.twins.items()
        }


def launch_of(
    variant: Variant,
    tvs: Sequence[TensorView],
    tensors: Sequence[torch.Tensor],
    values: Mapping[Symbol, Number],
    alignments: Mapping[int, int],
    scalars: Sequence[Symbol],
    *,
    checked: bool = False,
) -> BoundLaunch | None:
    """Evaluate a kernel's arguments and shape; None where it relies on something that fails.

    `tvs` and `tensors` are the inputs, then the outputs; `scalars` the scalar inputs, whose values
    each call gives anew.
    """
    kernel = variant.kernel
    positions = {variant.twins[tv.number].number: k for k, tv in enumerate(tvs)}
    known: dict[Symbol, Number] = dict(values)
    for tv, t in zip(tvs, tensors, strict=True):
        known.update(zip(variant.strides[tv.number], t.stride(), strict=True))
    for tv, nbytes in kernel.alignments:
        if alignments[variant.numbers[tv.number]] % nbytes:
            return None
    if not all(sc.evaluate(guard, known) for guard in kernel.guards):
        return None
    dynamic = set(scalars)
    args: list[Any] = []
    pointers: list[tuple[int, int]] = []
    numbers: list[tuple[int, Callable[[Sequence[Number]], Number]]] = []
    workspaces: list[tuple[int, int, bool]] = []
    for param, arg in enumerate(kernel.args):
        match arg:
            case TensorArg():
                pointers.append((param, positions[arg.tv.number]))
                args.append(0)
            case ScalarArg():
                if dynamic and any(s in dynamic for s in sc.symbols(arg.scalar)):
                    numbers.append((param, partial(_value, arg.scalar, known, tuple(scalars))))
                args.append(sc.evaluate(arg.scalar, known))
            case StrideArg():
                args.append(tensors[positions[arg.tv.number]].stride(arg.axis))
            case WorkspaceArg():
                space = kernel.workspaces[arg.index]
                workspaces.append((param, int(sc.evaluate(space.nbytes, known)), space.zeroed))
                args.append(0)
    grid, block = (
        (int(sc.evaluate(x, known)), int(sc.evaluate(y, known)), int(sc.evaluate(z, known)))
        for x, y, z in (kernel.grid, kernel.block)
    )
    return BoundLaunch(
        args,
        grid,
        block,
        int(sc.evaluate(kernel.smem_bytes, known)),
        tuple(pointers),
        tuple(numbers),
        tuple(workspaces),
        is_repeatable=not checked,
    )


def _value(
    scalar: Scalar,
    known: Mapping[Symbol, Number],
    scalars: Sequence[Symbol],
    numbers: Sequence[Number],
) -> Number:
    return sc.evaluate(scalar, {**known, **dict(zip(scalars, numbers, strict=True))})
