"""A variant of a kernel, and its binding to tensors: what a launch needs, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from fuser.ir import scalar as sc
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.scalar_python import Computed
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
    def needs(self) -> Needs:
        """What a launch has to evaluate."""
        return Needs.of(self)


@dataclass(frozen=True)
class Needs:
    """What a launch of a variant evaluates: all of its scalars in one go.

    Tensors are named by the numbers that they have in the fusion.
    """

    guards: Computed
    # Arguments, bytes of workspaces, grid, block, bytes of shared memory: where a guard fails, they
    # may have no value.
    scalars: Computed
    # (number of a tensor, bytes that divide its address and outer strides)
    alignments: tuple[tuple[int, int], ...]
    # (number of a tensor, axis, symbol) of each stride that a scalar names.
    strides: tuple[tuple[int, int, Symbol], ...]
    # What the values of a call are for: (parameter, scalar).
    arguments: tuple[tuple[int, Scalar], ...]
    # (parameter, number of a tensor), and (parameter, number of a tensor, axis).
    pointers: tuple[tuple[int, int], ...]
    stride_arguments: tuple[tuple[int, int, int], ...]
    # (parameter, whether zeroed)
    workspaces: tuple[tuple[int, bool], ...]
    parameters: int

    @staticmethod
    def of(variant: Variant) -> Needs:
        """Sort the arguments of a kernel by what they are."""
        kernel = variant.kernel
        number_of = {twin.number: number for number, twin in variant.twins.items()}
        strides = {
            stride_symbol(twin, k): (number, k)
            for number, twin in variant.twins.items()
            for k in range(twin.ndim)
        }
        args = list(enumerate(kernel.args))
        arguments = tuple((i, a.scalar) for i, a in args if isinstance(a, ScalarArg))
        spaces = [(i, kernel.workspaces[a.index]) for i, a in args if isinstance(a, WorkspaceArg)]
        scalars = (
            *(scalar for _, scalar in arguments),
            *(space.nbytes for _, space in spaces),
            *kernel.grid,
            *kernel.block,
            kernel.smem_bytes,
        )
        named = dict.fromkeys(
            s for x in (*kernel.guards, *scalars) for s in sc.symbols(x) if s in strides
        )
        return Needs(
            Computed(kernel.guards),
            Computed(scalars),
            tuple((number_of[tv.number], nbytes) for tv, nbytes in kernel.alignments),
            tuple((*strides[s], s) for s in named),
            arguments,
            tuple((i, number_of[a.tv.number]) for i, a in args if isinstance(a, TensorArg)),
            tuple((i, number_of[a.tv.number], a.axis) for i, a in args if isinstance(a, StrideArg)),
            tuple((i, space.zeroed) for i, space in spaces),
            len(args),
        )


def launch_of(
    variant: Variant,
    places: Mapping[int, int],
    tensors: Sequence[torch.Tensor],
    values: Mapping[Symbol, Number],
    alignments: Mapping[int, int],
    scalars: Sequence[Symbol],
    *,
    checked: bool = False,
) -> BoundLaunch | None:
    """Evaluate a kernel's arguments and shape; None where it relies on something that fails.

    `places` has the place among `tensors`, the inputs, then the outputs, of each by its number in
    the fusion; `scalars` are the scalar inputs, whose values each call gives anew.
    """
    needs = variant.needs
    for number, nbytes in needs.alignments:
        if alignments[number] % nbytes:
            return None
    known = values
    if needs.strides:
        known = {**values, **{s: tensors[places[n]].stride(k) for n, k, s in needs.strides}}
    if not needs.guards.hold(known):
        return None
    found = needs.scalars(known)
    args: list[Any] = [0] * needs.parameters
    dynamic = set(scalars)
    numbers: list[tuple[int, Callable[[Sequence[Number]], Number]]] = []
    for (param, scalar), value in zip(needs.arguments, found, strict=False):
        args[param] = value
        if dynamic and any(s in dynamic for s in sc.symbols(scalar)):
            numbers.append((param, partial(_value, scalar, dict(known), tuple(scalars))))
    for param, number, axis in needs.stride_arguments:
        args[param] = tensors[places[number]].stride(axis)
    shape = [int(x) for x in found[len(needs.arguments) :]]
    spaces = len(needs.workspaces)
    gx, gy, gz, bx, by, bz, smem_bytes = shape[spaces:]
    return BoundLaunch(
        args,
        (gx, gy, gz),
        (bx, by, bz),
        smem_bytes,
        tuple((param, places[number]) for param, number in needs.pointers),
        tuple(numbers),
        tuple((p, n, z) for (p, z), n in zip(needs.workspaces, shape[:spaces], strict=True)),
        is_repeatable=not checked,
    )


def _value(
    scalar: Scalar,
    known: Mapping[Symbol, Number],
    scalars: Sequence[Symbol],
    numbers: Sequence[Number],
) -> Number:
    return sc.evaluate(scalar, {**known, **dict(zip(scalars, numbers, strict=True))})
