"""A variant of a kernel, and its binding to tensors: what a launch needs, evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter as now
from typing import Any

import torch

from fuser.ir.domain.strided_layout import Laid
from fuser.ir.fusion import Fusion
from fuser.ir.op import op_text
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed, PythonText
from fuser.ir.scalar.constructors import Const, Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.kernels.kernel import Kernel
from fuser.lower.kernel_ir import ScalarArg, StrideArg, TensorArg, WorkspaceArg, stride_symbol
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support.errors import KernelError


@dataclass
class Variant:
    """One kernel of a fusion: lowered, and compiled on first use.

    `twins` and `places` have the kernel's inputs and outputs, and their places among the tensors of
    a launch, by the numbers that they have in the fusion.
    """

    kernel: Kernel
    params: object
    twins: Mapping[int, TensorView]
    places: Mapping[int, int]
    nbytes: int = 0
    compiled: CompiledKernel | None = None
    # What the kernel's symbols are in the fusion, where it was lowered for another one.
    symbols: Mapping[Symbol, Symbol] | None = None
    # Seconds to make it: its share of those that were compiled together.
    made_s: float = 0.0

    @cached_property
    def needs(self) -> Needs:
        """What a launch has to evaluate."""
        return Needs.of(self)

    def fits_grid(self, values: Mapping[Symbol, Number]) -> bool:
        """Whether the device takes so many blocks and threads, for the values of the fusion's
        symbols."""
        return not self.kernel.limits or self._limits.hold(self.own(values))

    def shape(self, values: Mapping[Symbol, Number]) -> tuple[list[int], list[int]]:
        """Return the blocks of a launch and the threads of a block along x, y and z."""
        known, kernel = self.own(values), self.kernel
        grid, block = ([int(sc.evaluate(n, known)) for n in s] for s in (kernel.grid, kernel.block))
        return grid, block

    @cached_property
    def _limits(self) -> Computed:
        return Computed(self.kernel.limits)

    def own(self, values: Mapping[Symbol, Number]) -> Mapping[Symbol, Number]:
        """Return values by the names that the symbols have in the kernel."""
        if self.symbols is None:
            return values
        return {mine: values[its] for mine, its in self.symbols.items() if its in values}

    def blame(self, fusion: Fusion, tensors: Sequence[TensorView], error: KernelError) -> str:
        """Return the op and the user's line of the tensor that an error names (else all ops);
        `tensors` are the inputs and outputs of the fusion."""
        named = re.search(r"\bT(\d+)\b", str(error))
        number = int(named[1]) if named else None
        tv = next((t for t in tensors if self.twins[t.number].number == number), None)
        if tv is None:
            what, ops = "this kernel computes", fusion.exprs
        else:
            definition = fusion.definition(tv)
            what = f"T{tv.number} is of"
            ops = fusion.uses(tv) if definition is None else (definition,)
        return "\n".join(f"{what} {op_text(e)} (user code at {e.where or 'unknown'})" for e in ops)

    def renamed(
        self,
        numbers: Mapping[int, int],
        symbols: Mapping[Symbol, Symbol],
        places: Mapping[int, int],
    ) -> Variant:
        """Return the kernel as one of a fusion with other names for tensors and symbols."""
        twins = {numbers[number]: twin for number, twin in self.twins.items()}
        made = Variant(self.kernel, self.params, twins, places, symbols=symbols)
        aligned = tuple([(numbers[number], nbytes) for number, nbytes in self.needs.alignments])
        made.needs = replace(self.needs, alignments=aligned)
        return made


def take_compiled(
    variants: Sequence[Variant], compiled: Sequence[CompiledKernel], began: float
) -> None:
    """Give variants their kernels, which were made together since `began` (`now`)."""
    for variant, kernel in zip(variants, compiled, strict=True):
        variant.compiled = kernel
        variant.made_s = (now() - began) / len(variants)


@dataclass(frozen=True)
class Needs:
    """What a launch of a variant evaluates: all of its scalars in one go.

    Tensors are named by their places among the inputs, then the outputs.
    """

    guards: Computed
    # Each parameter (0 where it is no scalar), grid, block, bytes of shared memory and of
    # workspaces: where a guard fails, they may have no value.
    scalars: Computed
    # What gives at once for the values of symbols: arguments, grid, block, bytes of shared memory
    # and of workspaces; False where a guard fails.
    at_once: Callable[[Mapping[Symbol, Number]], tuple[Any, ...] | bool]
    # (number of a tensor in the fusion, bytes that divide its address and outer strides)
    alignments: tuple[tuple[int, int], ...]
    # (place, axis, symbol) of each stride that a scalar names.
    strides: tuple[tuple[int, int, Symbol], ...]
    # How many parameters there are, and the scalars of those that are evaluated.
    parameters: int
    evaluated: dict[int, Scalar]
    # (parameter, place), and (parameter, place, axis).
    pointers: tuple[tuple[int, int], ...]
    stride_arguments: tuple[tuple[int, int, int], ...]
    # The parameters that are workspaces.
    workspaces: tuple[int, ...]

    @staticmethod
    def of(variant: Variant) -> Needs:
        """Sort the arguments of a kernel by what they are."""
        kernel = variant.kernel
        twins = variant.twins.items()
        number_of = {twin.number: number for number, twin in twins}
        place = {twin.number: variant.places[number] for number, twin in twins}
        strides = {
            stride_symbol(twin, k): (variant.places[number], k)
            for number, twin in twins
            for k in range(twin.ndim)
        }
        args = list(enumerate(kernel.args))
        evaluated = {i: a.scalar for i, a in args if isinstance(a, ScalarArg)}
        spaces = [(i, kernel.workspaces[a.index]) for i, a in args if isinstance(a, WorkspaceArg)]
        scalars = (
            *(evaluated.get(i, sc.ZERO) for i, _ in args),
            *kernel.grid,
            *kernel.block,
            kernel.smem_bytes,
            *(space.nbytes for _, space in spaces),
        )
        named = dict.fromkeys(
            s for x in (*kernel.guards, *scalars) for s in sc.symbols(x) if s in strides
        )
        return Needs(
            Computed(kernel.guards),
            Computed(scalars),
            _shaped_at_once(kernel.guards, scalars, len(args)),
            tuple((number_of[tv.number], nbytes) for tv, nbytes in kernel.alignments),
            tuple((*strides[s], s) for s in named),
            len(args),
            evaluated,
            tuple((i, place[a.tv.number]) for i, a in args if isinstance(a, TensorArg)),
            tuple((i, place[a.tv.number], a.axis) for i, a in args if isinstance(a, StrideArg)),
            tuple(i for i, _ in spaces),
        )


def _shaped_at_once(
    guards: Sequence[Scalar], scalars: Sequence[Scalar], parameters: int
) -> Callable[[Mapping[Symbol, Number]], tuple[Any, ...] | bool]:
    text = PythonText()
    for guard in guards:
        text.lines.append(f"if not {text.name(guard)}: return False")
    args = ", ".join(text.name(x) for x in scalars[:parameters])
    shape = [text.name(x) if sc.is_int(x) else f"int({text.name(x)})" for x in scalars[parameters:]]
    dims = [", ".join(shape[i : i + 3]) for i in (0, 3)]
    spaces = "".join(f"{n}, " for n in shape[7:])
    return text.function("values", f"[{args}], ({dims[0]}), ({dims[1]}), {shape[6]}, ({spaces})")


def launch_of(
    variant: Variant,
    tensors: Sequence[torch.Tensor | Laid],
    values: Mapping[Symbol, Number],
    alignments: Mapping[int, int],
    scalars: Sequence[Symbol],
    *,
    checked: bool = False,
) -> BoundLaunch | None:
    """Evaluate a kernel's arguments and shape; None where it relies on something that fails.

    `tensors` are the inputs, then the outputs; `alignments` are by their numbers in the fusion;
    `scalars` are the scalar inputs, whose values each call gives anew.
    """
    needs = variant.needs
    for number, nbytes in needs.alignments:
        if alignments[number] % nbytes:
            return None
    if (symbols := variant.symbols) is not None:
        values = variant.own(values)
        mine_of = {its: mine for mine, its in symbols.items()}
        scalars = [mine_of.get(s, s) for s in scalars]
    known = values
    if needs.strides:
        known = {**values, **{s: tensors[k].stride(axis) for k, axis, s in needs.strides}}
    try:
        found: Any = needs.at_once(known)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        # One by one may do, or has an error to tell.
        if not needs.guards.hold(known):
            return None
        each = needs.scalars(known)
        shape = tuple(map(int, each[needs.parameters :]))
        found = list(each[: needs.parameters]), shape[:3], shape[3:6], shape[6], shape[7:]
    if found is False:
        return None
    args, grid, block, smem_bytes, spaces = found
    for param, k, axis in needs.stride_arguments:
        args[param] = tensors[k].stride(axis)
    numbers: list[tuple[int, Callable[[Sequence[Number]], Number]]] = []
    if scalars:
        known, dynamic = dict(known), frozenset(scalars)
        for param, scalar in needs.evaluated.items():
            if not dynamic.isdisjoint(sc.symbols(scalar)):
                numbers.append((param, partial(_value, scalar, known, tuple(scalars))))
    return BoundLaunch(
        args,
        grid,
        block,
        smem_bytes,
        needs.pointers,
        tuple(numbers),
        tuple(zip(needs.workspaces, spaces, strict=True)),
        is_repeatable=not checked,
    )


def _value(
    scalar: Scalar,
    known: Mapping[Symbol, Number],
    scalars: Sequence[Symbol],
    numbers: Sequence[Number],
) -> Number:
    # A whole number may stand for a complex one, as whose its parts are asked for.
    given = {s: Const(x, s.dtype).value for s, x in zip(scalars, numbers, strict=True)}
    return sc.evaluate(scalar, {**known, **given})
