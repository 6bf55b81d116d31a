"""One version (variant) of a kernel, lowered for certain layouts, and the arguments of its
launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from math import gcd
from time import perf_counter as now
from typing import Any, NamedTuple

import torch

from fuser.codegen.cuda_text import print_kernel
from fuser.ir.binding import Argument, Binder
from fuser.ir.canonical_form import CanonicalForm, form_of
from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.dtypes import DataType, category, misfit, nbytes_of
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import Layout, expanded_positions
from fuser.ir.op import op_text
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed, PythonText
from fuser.ir.scalar.constructors import Const, Number, Scalar, Symbol
from fuser.lower.kernel_ir import (
    Arg,
    ScalarArg,
    StrideArg,
    TensorArg,
    Workspace,
    WorkspaceArg,
    stride_symbol,
)
from fuser.lower.pipeline import lower_kernel
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support.device import VECTOR_BYTES, DeviceInfo, describe_device
from fuser.support.errors import InputError, KernelError, counted, user_code
from fuser.support.kernel_source import KernelSource
from fuser.support.record import record

_INT64_END = 1 << 63


@dataclass
class Variant:
    """One version of a kernel, lowered for certain memory layouts and schedule parameters, and
    compiled on first use.

    Two mappings have the numbers of the fusion's input and output tensors as keys. `twins` maps to
    the tensors of the kernel's own copy of the fusion. `places` maps to the positions among the
    inputs and outputs of a launch.
    """

    kernel: Kernel
    params: object
    twins: Mapping[int, TensorView]
    places: Mapping[int, int]
    nbytes: int = 0
    compiled: CompiledKernel | None = None
    # The fusion's symbol for each symbol of the kernel, if the kernel was lowered for another
    # fusion.
    symbols: Mapping[Symbol, Symbol] | None = None
    # Seconds taken to make the kernel: its share of the time for all that were compiled together.
    made_s: float = 0.0

    @cached_property
    def needs(self) -> Needs:
        """The scalars that a launch must evaluate (conditions, arguments, numbers of blocks and
        threads), sorted by their use.
        """
        return Needs.of(self)

    def fits_grid(self, values: Mapping[Symbol, Number]) -> bool:
        """Whether the device accepts the numbers of CUDA blocks and threads of a launch.

        `values` has the values of the fusion's symbols.
        """
        return not self.kernel.limits or self._limits.hold(self.own(values))

    def shape(self, values: Mapping[Symbol, Number]) -> tuple[list[int], list[int]]:
        """Returns the number of CUDA blocks of a launch, and the number of threads per block, each
        along x, y and z.

        `values` has the values of the fusion's symbols.
        """
        known, kernel = self.own(values), self.kernel
        grid, block = ([int(sc.evaluate(n, known)) for n in s] for s in (kernel.grid, kernel.block))
        return grid, block

    @cached_property
    def _limits(self) -> Computed:
        return Computed(self.kernel.limits)

    def own(self, values: Mapping[Symbol, Number]) -> Mapping[Symbol, Number]:
        """Returns `values` with the kernel's own symbols as keys, instead of the fusion's symbols.

        The symbols differ if the kernel was lowered for another fusion that is equal except for
        names.
        """
        if self.symbols is None:
            return values
        return {mine: values[its] for mine, its in self.symbols.items() if its in values}

    def blame(self, fusion: Fusion, tensors: Sequence[TensorView], error: KernelError) -> str:
        """Returns text that names the part of the user's program in which an error of the kernel
        arose: an op and its source line.

        If `error` names a tensor, the op is the one that computes this tensor. If no op computes
        the tensor, the text has the ops that read the tensor. If `error` names no tensor, the text
        has all ops. `tensors` are the fusion's inputs and outputs.
        """
        named = re.search(r"\bT(\d+)\b", str(error))
        number = int(named[1]) if named else None
        tv = next((t for t in tensors if self.twins[t.number].number == number), None)
        if tv is None:
            what, ops = "this kernel computes", fusion.exprs
        else:
            definition = fusion.definition(tv)
            what = f"T{tv.number} belongs to"
            ops = fusion.uses(tv) if definition is None else (definition,)
        return "\n".join(f"{what} {op_text(e)} (user code at {e.where or 'unknown'})" for e in ops)

    def blame_number(self, fusion: Fusion, scalar: Scalar, problem: str) -> str:
        """Returns the error message for a number whose value the kernel cannot use because of
        `problem`.

        The message names the op that reads the number, and the user's source line. `scalar` is the
        number as an expression of the kernel's symbols.
        """
        if self.symbols is not None:
            scalar = sc.substitute(scalar, {mine: its for mine, its in self.symbols.items()})  # noqa: C416
        names = {*sc.symbols(scalar)}
        reads = [
            (e, [x for x in (*e.inputs, *e.scalars) if isinstance(x, Scalar)]) for e in fusion.exprs
        ]
        exact = (e for e, xs in reads if any(x is scalar for x in xs))
        alike = (e for e, xs in reads if any(names <= {*sc.symbols(x)} for x in xs))
        op = next(chain(exact, alike), None)
        text = f"the number {scalar}: {problem}: compute it in Double, or pass smaller numbers"
        if op is None:
            return text
        return f"{op.name}: {text}{user_code(op.where) if op.where else ''}\n{op_text(op)}"

    def renamed(
        self,
        numbers: Mapping[int, int],
        symbols: Mapping[Symbol, Symbol],
        places: Mapping[int, int],
    ) -> Variant:
        """Returns this version of the kernel for another fusion that differs from the original one
        only in the names of tensors and symbols.

        `numbers` and `symbols` map the tensor numbers and symbols of the original fusion to those
        of the other fusion. `places` has the positions of the other fusion's tensors among its
        inputs and outputs.
        """
        twins = {numbers[number]: twin for number, twin in self.twins.items()}
        made = Variant(self.kernel, self.params, twins, places, symbols=symbols)
        aligned = tuple([(numbers[number], nbytes) for number, nbytes in self.needs.alignments])
        made.needs = replace(self.needs, alignments=aligned)
        return made


def take_compiled(
    variants: Sequence[Variant], compiled: Sequence[CompiledKernel], began: float
) -> None:
    """Stores the compiled kernels in `variants`, and for each an equal share of the time that the
    compilation took.

    The compilation of all kernels started at the time `began`, as returned by `now`.
    """
    for variant, kernel in zip(variants, compiled, strict=True):
        variant.compiled = kernel
        variant.made_s = (now() - began) / len(variants)


@dataclass(frozen=True)
class Needs:
    """The scalars that a launch of a kernel must evaluate: conditions, arguments, numbers of CUDA
    blocks and threads, and bytes of memory.

    All are evaluated in one call. The fields denote a tensor by its place: its position among the
    inputs, then the outputs, of the fusion.
    """

    guards: Computed
    # Each parameter (0 for one that is no scalar), grid, block, bytes of shared memory and of
    # workspaces. They may have no value if a guard fails.
    scalars: Computed
    # A compiled function of the symbols' values that returns arguments, grid, block, bytes of
    # shared memory and of workspaces; False if a guard fails.
    at_once: Callable[[Mapping[Symbol, Number]], tuple[Any, ...] | bool]
    # (number of a tensor in the fusion, bytes that divide its address and outer strides)
    alignments: tuple[tuple[int, int], ...]
    # (place, axis, symbol) of each stride that occurs in a scalar.
    strides: tuple[tuple[int, int, Symbol], ...]
    # The number of parameters, and the scalars of those that are evaluated.
    parameters: int
    evaluated: dict[int, Scalar]
    # (parameter, place), and (parameter, place, axis).
    pointers: tuple[tuple[int, int], ...]
    stride_arguments: tuple[tuple[int, int, int], ...]
    # The parameters that are workspaces.
    workspaces: tuple[int, ...]

    @staticmethod
    def of(variant: Variant) -> Needs:
        """Collects the scalars that a launch of `variant` must evaluate, sorted by their use."""
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
    tensors: Sequence[torch.Tensor | StridedLayout],
    values: Mapping[Symbol, Number],
    alignments: Mapping[int, int],
    scalars: Sequence[Symbol],
    refuse: Callable[[Scalar, str], KernelError],
    *,
    checked: bool = False,
) -> BoundLaunch | None:
    """Evaluates the arguments and the numbers of CUDA blocks and threads of a launch. Returns None
    if these tensors violate a condition or an alignment on which `variant`, a version of the
    kernel, relies.

    - `tensors` are the inputs, then the outputs.
    - `values` are the values of the fusion's symbols.
    - `alignments` are the tensors' alignments in bytes, by tensor number of the fusion.
    - `scalars` are the scalar inputs, whose values may change in each call.
    - `refuse` creates the error for a number that its dtype cannot hold, from the scalar and the
      reason.
    - `checked`: whether the kernel has run-time checks. Such a launch packs its arguments each
      time.
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
        # Evaluation one by one may succeed where the compiled function fails, or raise a clear
        # error.
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
                value_of = _ScalarArgument(scalar, known, tuple(scalars), refuse)
                value_of.check(args[param])
                numbers.append((param, value_of))
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


class _ScalarArgument(NamedTuple):
    """A kernel argument whose value depends on the scalar inputs of a call. The object is a
    function: it takes the values of the scalar inputs, and returns the argument.

    `scalar` is the argument as an expression, and `scalars` are the symbols of the scalar inputs.
    `known` has the values of all other symbols, which are fixed for a launch. `refuse` creates the
    error for a value that is too large.
    """

    scalar: Scalar
    known: Mapping[Symbol, Number]
    scalars: Sequence[Symbol]
    refuse: Callable[[Scalar, str], KernelError]

    def __call__(self, numbers: Sequence[Number]) -> Number:
        # An integer may be passed for a complex number, whose real and imaginary parts are then
        # used.
        given = {s: Const(x, s.dtype).value for s, x in zip(self.scalars, numbers, strict=True)}
        value = sc.evaluate(self.scalar, {**self.known, **given})
        if type(value) is int and not -_INT64_END <= value < _INT64_END:
            self.check(value)
        return value

    def check(self, value: Number) -> None:
        """Checks that the value of a 64-bit integer argument fits in 64 bits. Narrower integers
        wrap around in the kernel and need no check.

        Raises:
            KernelError: the value needs more than 64 bits.
        """
        dtype = self.scalar.dtype
        if isinstance(value, int) and category(dtype) == "int" and nbytes_of(dtype) == 8:
            problem = misfit(value, dtype)
            if problem:
                raise self.refuse(self.scalar, problem)


# ----------------------------------------------------------------------
# The sizes of a launch: the values of the kernel's symbols, and its number of iterations. Tensors
# that do not fit the fusion are rejected.

Sizes = Mapping[Symbol, int]


class KernelSizes(NamedTuple):
    """The values of a kernel's symbols (sizes and scalar inputs) for a launch.

    - `values`: the values of all symbols.
    - `sizes`: the integer values only.
    - `iterations`: the largest number of elements over which the kernel loops, for the choice of
      the index type.
    """

    values: Mapping[Symbol, Number]
    sizes: Sizes
    iterations: int

    def with_numbers(self, numbers: Iterable[tuple[Symbol, Number]]) -> KernelSizes:
        """Returns a copy to which the values of scalar inputs are added, which are passed as pairs
        (symbol, value).
        """
        values = {**self.values, **{s: Const(x, s.dtype).value for s, x in numbers}}
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        return KernelSizes(values, sizes, self.iterations)


class KernelExtents:
    """Checks the tensors of a call against one fusion, and determines from them the values of the
    fusion's symbols.

    `tensors` are the fusion's tensor inputs, then its outputs. `symbols` are the symbols that occur
    in the extents of all tensors of the fusion.
    """

    def __init__(self, fusion: Fusion, tensors: Sequence[TensorView], name: str) -> None:
        self._fusion, self._tensors, self._name = fusion, tensors, name
        self._binder = Binder(fusion, [*fusion.inputs, *fusion.outputs])
        self._expanded = [
            (k, axis)
            for k, tv in enumerate(tensors)
            for axis in expanded_positions(tv)
            if k >= len(tensors) - len(fusion.outputs)
        ]
        # For example the number of rows of an empty block, which occurs in no input or output.
        everything = fusion.tensors()
        axes = [a for tv in everything for a in tv.domain.logical]
        self._is_empty = any(sc.int_value(a.extent) == 0 for a in axes)
        self.symbols = tuple(dict.fromkeys(s for a in axes for s in sc.symbols(a.extent)))
        spaces = {tuple(fusion.canonical(a.size) for a in tv.domain.logical) for tv in everything}
        # The position of a random number is counted in the whole tensor, not in the shard.
        places = [op.shape for op in fusion.exprs if isinstance(op, RandomOp)]
        spaces.update(tuple(map(fusion.canonical, shape)) for shape in places)
        spaces = [sc.product(space) for space in spaces]
        self._iterations = Computed(spaces)
        # Evaluated in one call: the extents of all tensors, symbols, both sides of equalities,
        # iterations.
        shapes = [[fusion.canonical(x) for x in tv.shape()] for tv in tensors]
        self._extents = shapes
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + len(shape))
        self._shapes = list(pairwise(ends))
        equal = fusion.equal_extents()
        sides = [*(x for x, _ in equal), *(y for _, y in equal)]
        self._parts = ends[-1] + len(self.symbols), len(equal)
        self._all = Computed([*chain(*shapes), *self.symbols, *sides, *spaces])
        self._equal, self._spaces = equal, spaces
        self._count: Callable[[Sizes], int | None] | None = None
        self._has_scalars = any(isinstance(v, Scalar) for v in fusion.inputs)

    def bind(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        sizes: Sizes,
    ) -> KernelSizes | None:
        """Returns the values of the fusion's symbols for these tensors. Returns None if an extent
        is 0.

        `tensors` are the tensors among `inputs`, then `outputs`. `sizes` are values that the caller
        already knows.

        Raises:
            InputError: the kernel does not accept the tensors, or their sizes contradict `sizes` or
                each other.
        """
        if not self._has_scalars and len(tensors) == len(inputs) + len(outputs):
            found = self.at_once(tensors, sizes)
            if found is not None:
                return found
        self._check(inputs, tensors)
        values = self.values(inputs, outputs, sizes)
        if (
            self._is_empty
            or any(t.numel() == 0 for t in tensors)
            or any(values.get(s) == 0 for s in self.symbols)
        ):
            return None
        known = {s: v for s, v in values.items() if isinstance(v, int)}
        return KernelSizes(
            values, known, max((int(n) for n in self._iterations(values)), default=0)
        )

    def values(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], sizes: Sizes
    ) -> Mapping[Symbol, Number]:
        """Returns the values of all symbols of the fusion.

        They are determined from the shapes of inputs and outputs, from the scalar inputs, and from
        `sizes`: values that the caller already knows.
        """
        return self._binder.bind([*inputs, *outputs], sizes)

    def fit(self, shapes: Sequence[Sequence[Scalar]]) -> bool:
        """Whether the kernel accepts tensors of these symbolic shapes, for all values of the
        symbols and for all strides. Shapes then need no check in later calls.
        """
        canonical = self._fusion.canonical
        fits = self._extents == [[canonical(x) for x in shape] for shape in shapes]
        return fits and not self._expanded and not self._is_empty

    def iterations(self, sizes: Sizes) -> int | None:
        """Returns the largest number of elements over which the kernel loops, for tensors of shapes
        that `fit` has accepted.

        The caller ensures that all extents of the tensors are at least 1. Returns None if the
        number cannot be computed from `sizes`; `bind` must then be called.
        """
        run = self._count
        if run is None:
            run = self._count = self._compiled_count()
        try:
            return run(sizes)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None

    def _compiled_count(self) -> Callable[[Sizes], int | None]:
        text, known = PythonText(), {x for shape in self._extents for x in shape}
        for symbol in self.symbols:
            if symbol not in known:
                text.lines.append(f"if {text.name(symbol)} == 0: return None")
        for x, y in self._equal:
            text.lines.append(f"if {text.name(x)} != {text.name(y)}: return None")
        counts = dict.fromkeys(text.name(x) for x in self._spaces)
        return text.function("values", f"max(({''.join(f'{n}, ' for n in counts)}), default=0)")

    def at_once(
        self, tensors: Sequence[torch.Tensor | StridedLayout], sizes: Sizes
    ) -> KernelSizes | None:
        """Returns the values of the fusion's symbols for these tensors, like `bind`, but faster,
        and only for fusions without scalar inputs.

        Returns None if `sizes` lacks a symbol or a check fails; `bind` must then be called.
        """
        if len(tensors) != len(self._shapes):
            return None
        extents, pairs = self._parts
        found = self._all.at_once(sizes)
        if found is None:
            return None
        for (begin, end), t in zip(self._shapes, tensors, strict=True):
            if t.shape != found[begin:end]:
                return None
        for k, axis in self._expanded:
            if tensors[k].size(axis) > 1 and tensors[k].stride(axis):
                return None
        middle, end = extents + pairs, extents + 2 * pairs
        if self._is_empty or 0 in found[:extents] or found[extents:middle] != found[middle:end]:
            return None
        return KernelSizes(sizes, sizes, max(map(int, found[end:]), default=0))

    def _check(self, inputs: Sequence[Argument], tensors: Sequence[torch.Tensor]) -> None:
        fusion, name = self._fusion, self._name
        outputs = len(tensors) - sum(isinstance(v, torch.Tensor) for v in inputs)
        if len(inputs) != len(fusion.inputs) or len(tensors) != len(self._tensors):
            raise InputError(
                f"kernel {name} takes {counted(len(fusion.inputs), 'input')} and "
                f"{counted(len(fusion.outputs), 'output')}, but it was called with "
                f"{counted(len(inputs), 'input')} and {counted(outputs, 'output')}"
            )
        for tv, t in zip(self._tensors, tensors, strict=True):
            if t.dim() != tv.ndim:
                raise InputError(
                    f"kernel {name}: {tv} has {counted(tv.ndim, 'dimension')}, but the tensor that "
                    f"was passed has the shape {tuple(t.shape)}"
                )
        for k, axis in self._expanded:
            tv, t = self._tensors[k], tensors[k]
            if t.size(axis) > 1 and t.stride(axis):
                raise InputError(
                    f"kernel {name}: axis {axis} of {tv} is expanded, so all its positions are one "
                    f"element (stride 0), but its buffer of shape {tuple(t.shape)} has strides "
                    f"{t.stride()}"
                )


def free_symbols(fusion: Fusion, scalars: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """Returns the symbols of a fusion that neither the sizes of its input tensors nor its scalar
    inputs (`scalars`) determine. The caller must pass their values.
    """
    bound = {
        a.size for v in fusion.inputs if isinstance(v, TensorView) for a in v.domain.no_reductions
    }
    used: dict[Symbol, None] = {}
    for tv in fusion.tensors():
        for axis in tv.domain.axes.values():
            used.update(dict.fromkeys(sc.symbols(axis.size)))
    for op in fusion.exprs:
        for value in op.inputs:
            if isinstance(value, Scalar):
                used.update(dict.fromkeys(sc.symbols(value)))
    return tuple(s for s in used if s not in bound and s not in scalars)


# ----------------------------------------------------------------------
# The operands of a launch: their addresses, alignments and sizes in bytes.

# Blocks and unrolled steps may compute indices past the end of a tensor, by fewer elements than
# this.
_OVERRUN = 1 << 20
_INT32_LIMIT = (1 << 31) - 1 - _OVERRUN


def index_dtype(iterations: int, tensors: Sequence[torch.Tensor | StridedLayout]) -> DataType:
    """Returns the integer type for a kernel's indices: Int32 if all indices fit in 32 bits, else
    Int (64 bits).

    `iterations` is the largest number of elements over which the kernel loops. Indices past the end
    of a tensor, which incomplete blocks compute, must fit, too.
    """
    largest = max(
        iterations, *[t.span if isinstance(t, StridedLayout) else span(t) for t in tensors]
    )
    return DataType.Int32 if largest <= _INT32_LIMIT else DataType.Int


def total_nbytes(tensors: Sequence[torch.Tensor | StridedLayout]) -> int:
    """Returns the sum of the sizes of all tensors in bytes, without gaps between elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def span(t: torch.Tensor) -> int:
    """Returns the number of element positions from the first to the last element in memory, gaps
    included."""
    if t.is_contiguous():
        return t.numel()
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def alignment(t: torch.Tensor | StridedLayout, layout: Layout) -> int:
    """Returns the alignment of a tensor in bytes: the largest power of two, at most 16, that
    divides its address and its strides. Vectors of this size can then be loaded from every row.

    Axes that are contiguous in `layout` are left out, because their strides follow from the others.
    """
    found = gcd(address(t), VECTOR_BYTES)
    order, flags = layout
    if all(flags):
        return found
    for k, flag in zip(order, flags, strict=True):
        if not flag and t.stride(k):
            found = gcd(found, t.stride(k) * t.element_size())
    return found


def is_plain(t: torch.Tensor | StridedLayout) -> bool:
    """Whether a tensor is contiguous, and its address is a multiple of the vector size (16
    bytes)."""
    return t.is_contiguous() and not address(t) % VECTOR_BYTES


def address(t: torch.Tensor | StridedLayout) -> int:
    """Returns the address of a tensor's first element.

    For a layout or a meta tensor, which has no memory yet, returns the offset in bytes. Its buffer
    will be aligned.
    """
    if isinstance(t, StridedLayout) or t.is_meta:
        return int(t.storage_offset()) * t.element_size()
    return t.data_ptr()


def describe(tensors: Sequence[torch.Tensor]) -> DeviceInfo:
    """Returns the description (number of multiprocessors, limits, ..) of the device on which the
    tensors are.

    Raises:
        InputError: there are no tensors.
    """
    if not tensors:
        raise InputError(
            "a kernel without tensors has no device to run on: give it a tensor as input or output"
        )
    return describe_device(tensors[0].device)


# ----------------------------------------------------------------------
# Kernels of one program that differ only in names. Only the first of these kernels is lowered.
#
#     kernel 0: T4[i0, i2] = tanh(T3)        kernel 1: T9[i5, i7] = tanh(T8)
#
# Both use the text of the first. The launch of the second maps its own symbols to those of the
# first.


class Lowered:
    """The kernels that the executors of one program have lowered. Executors of fusions that differ
    only in names share these kernels.
    """

    def __init__(self) -> None:
        # Keyed by the types of a fusion's ops, and by everything else that determines a kernel.
        self._variants: dict[object, list[tuple[Fusion, Variant]]] = {}
        # Keyed by identity, because equal fusions have different names in their forms.
        self._forms: dict[int, tuple[Fusion, CanonicalForm]] = {}

    def find_or_lower(
        self,
        fusion: Fusion,
        what: Hashable,
        places: Mapping[int, int],
        lower: Callable[[], Variant],
    ) -> Variant:
        """Returns the version of the kernel that `lower` creates. If a fusion that is equal except
        for names was lowered before, returns its version, renamed, without a call of `lower`.

        `what` is everything besides the fusion that determines the kernel. `places` has the
        positions of the fusion's tensors among its inputs and outputs.
        """
        kinds = tuple([type(op) for op in fusion.exprs])
        similar = self._variants.setdefault((kinds, what), [])
        # Forms are only computed if there is a similar kernel, because one takes longer than half
        # of lowering a small kernel.
        for other, its in similar:
            form, mine = self._form(other), self._form(fusion)
            if form.key == mine.key:
                numbers = dict(zip(form.tensors, mine.tensors, strict=True))
                symbols = dict(zip(form.symbols, mine.symbols, strict=True))
                return its.renamed(numbers, symbols, places)
        made = lower()
        similar.append((fusion, made))
        return made

    def _form(self, fusion: Fusion) -> CanonicalForm:
        if id(fusion) not in self._forms:
            self._forms[id(fusion)] = fusion, form_of(fusion)
        return self._forms[id(fusion)][1]


# ----------------------------------------------------------------------
# A kernel as data: its text and the facts for its launch, made by lowering and printing.


@record
class Kernel:
    """The source text of a kernel, its arguments in order, the numbers of CUDA blocks and threads
    of a launch, and the conditions of a launch.

    `guards` and `limits` are conditions on sizes and strides. `alignments` has pairs (tensor, n):
    the tensor's address must be a multiple of n bytes.
    """

    source: KernelSource
    args: tuple[Arg, ...]
    grid: tuple[Scalar, Scalar, Scalar]
    block: tuple[Scalar, Scalar, Scalar]
    smem_bytes: Scalar
    workspaces: tuple[Workspace, ...]
    guards: tuple[Scalar, ...]
    limits: tuple[Scalar, ...]
    alignments: tuple[tuple[TensorView, int], ...]
    ir_text: str = field(compare=False)


def make_kernel(
    fusion: Fusion,
    *,
    name: str,
    index_dtype: DataType,
    device: DeviceInfo,
    folded: bool = False,
) -> Kernel:
    """Lowers a scheduled fusion, and returns the kernel: its CUDA source text with its arguments,
    numbers of blocks and threads, and launch conditions.

    `index_dtype` is the type of index arithmetic. With `folded`, each launched CUDA block may do
    the work of several, so that any number of blocks is accepted.

    Raises:
        UnsupportedError, DefinitionError: the schedule cannot be carried out, or it contradicts
            itself or the device's limits.
    """
    lowered = lower_kernel(fusion, name=name, index_dtype=index_dtype, device=device, folded=folded)
    source, ir_text = print_kernel(lowered)
    return Kernel(
        source,
        lowered.args,
        lowered.grid,
        lowered.block,
        lowered.smem_bytes,
        lowered.workspaces,
        lowered.guards,
        lowered.limits,
        lowered.alignments,
        ir_text,
    )
