"""What the sizes of tensors say about a kernel: the values of its symbols, and how much there is to
iterate. Tensors that do not fit the fusion are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch

from fuser.ir.binding import Argument, Binder
from fuser.ir.domain.strided_layout import Laid
from fuser.ir.fusion import Fusion
from fuser.ir.memory_layout import expanded_positions
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed, PythonText
from fuser.ir.scalar.constructors import Const, Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.support.errors import InputError

Sizes = Mapping[Symbol, int]


class KernelSizes(NamedTuple):
    """The values of symbols, and the iterations of the largest space of some tensor."""

    values: Mapping[Symbol, Number]
    sizes: Sizes
    iterations: int

    def with_numbers(self, numbers: Iterable[tuple[Symbol, Number]]) -> KernelSizes:
        """Return the same with the values of scalar inputs."""
        values = {**self.values, **{s: Const(x, s.dtype).value for s, x in numbers}}
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        return KernelSizes(values, sizes, self.iterations)


class KernelExtents:
    """Binds the sizes of one fusion. `tensors` are its inputs of this kind, then its outputs.

    `symbols` are those of all extents.
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
        # Such as the rows of an empty block, which nothing else may have.
        everything = fusion.tensors()
        axes = [a for tv in everything for a in tv.domain.logical]
        self._is_empty = any(sc.int_value(a.extent) == 0 for a in axes)
        self.symbols = tuple(dict.fromkeys(s for a in axes for s in sc.symbols(a.extent)))
        spaces = {tuple(fusion.canonical(a.size) for a in tv.domain.logical) for tv in everything}
        # A random number's place is one in the whole tensor.
        places = [op.shape for op in fusion.exprs if isinstance(op, RandomOp)]
        spaces.update(tuple(map(fusion.canonical, shape)) for shape in places)
        spaces = [sc.product(space) for space in spaces]
        self._iterations = Computed(spaces)
        # All at once: the extents of all tensors, symbols, sides of equalities, iterations.
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
        """Return the values for these tensors; None where an extent is 0.

        Raises `InputError` for tensors that the kernel does not take, or whose sizes contradict
        `sizes` or each other.
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
        """Return the values of all symbols; see `Binder.bind`."""
        return self._binder.bind([*inputs, *outputs], sizes)

    def fit(self, shapes: Sequence[Sequence[Scalar]]) -> bool:
        """Whether any tensors of these shapes are taken, whatever the sizes and strides."""
        canonical = self._fusion.canonical
        fits = self._extents == [[canonical(x) for x in shape] for shape in shapes]
        return fits and not self._expanded and not self._is_empty

    def iterations(self, sizes: Sizes) -> int | None:
        """Return the iterations of what `at_once` finds, for tensors that `fit` and have elements;
        None where it finds none."""
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

    def at_once(self, tensors: Sequence[torch.Tensor | Laid], sizes: Sizes) -> KernelSizes | None:
        """Return what `bind` finds where `sizes` has every symbol and all is as it should be, else
        None. It knows of no scalar inputs."""
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
        if len(inputs) != len(fusion.inputs) or len(tensors) != len(self._tensors):
            raise InputError(
                f"kernel {name} takes {len(fusion.inputs)} inputs and {len(fusion.outputs)} "
                f"outputs, got {len(inputs)} and "
                f"{len(tensors) - sum(isinstance(v, torch.Tensor) for v in inputs)}"
            )
        for tv, t in zip(self._tensors, tensors, strict=True):
            if t.dim() != tv.ndim:
                raise InputError(f"kernel {name}: {tv} is {tv.ndim}-D, got {tuple(t.shape)}")
        for k, axis in self._expanded:
            tv, t = self._tensors[k], tensors[k]
            if t.size(axis) > 1 and t.stride(axis):
                raise InputError(
                    f"kernel {name}: axis {axis} of {tv} is expanded, one element that is "
                    f"written once, but its buffer of shape {tuple(t.shape)} has strides "
                    f"{t.stride()}"
                )


def free_symbols(fusion: Fusion, scalars: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """Return the symbols that neither an input's axes nor a scalar input binds."""
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
