"""The sizes and alignments of one class of inputs, from which schedulers choose parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from fuser.ir.binding import undetermined
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Scalar, Symbol


class Facts(NamedTuple):
    """The sizes and alignments of the inputs for which a kernel's parameters are chosen.

    `sizes` maps the symbols of extents to numbers. `alignments` maps a tensor's number to the
    largest power of two, at most 16, that divides its address and the strides of its axes that are
    not contiguous, in bytes. A tensor without an entry is aligned to 16 bytes.
    """

    sizes: Mapping[Symbol, int]
    alignments: Mapping[int, int] = MappingProxyType({})

    def value(self, fusion: Fusion, x: Scalar) -> int:
        """Returns the extent `x`, an expression of symbols, as a number for these sizes.

        Raises:
            InputError: the extent contains a symbol without a size.
        """
        known = sc.int_value(x)
        if known is not None:
            return known
        for form in (x, fusion.canonical(x)):
            try:
                return int(sc.evaluate(form, self.sizes))
            except KeyError:
                continue
        raise undetermined(x, [s.name for s in sc.symbols(x) if s not in self.sizes])

    def numel(self, fusion: Fusion, axes: Iterable[IterDomain]) -> int:
        """Returns the product of the extents of several axes; a broadcast axis has extent 1."""
        return prod(self.value(fusion, a.extent) for a in axes)

    def alignment(self, tensor_number: int) -> int:
        """Returns the alignment in bytes, at most 16, of the tensor with this number."""
        return self.alignments.get(tensor_number, 16)


class RunExtents:
    """Computes the numbers of elements of several groups of axes of one fusion, quickly for many
    inputs.

    Each group in `runs` becomes one loop of a kernel.
    """

    def __init__(self, fusion: Fusion, runs: Sequence[Sequence[IterDomain]]) -> None:
        self._fusion, self._runs = fusion, runs
        self._counts = Computed([sc.product(a.extent for a in run) for run in runs])

    def of(self, facts: Facts) -> list[int]:
        """Returns the number of elements of each group of axes, for the sizes in `facts`.

        Raises:
            InputError: a symbol has no size.
        """
        found = self._counts.at_once(facts.sizes)
        if found is None:  # a symbol's size is stored under an equal symbol, or is missing
            return [facts.numel(self._fusion, run) for run in self._runs]
        return list(map(int, found))
