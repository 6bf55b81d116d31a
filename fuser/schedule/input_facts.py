"""What heuristics know about one input class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.support.errors import InputError


class Facts(NamedTuple):
    """Sizes by symbol, and per tensor number the largest power of two, at most 16, that divides its
    address and its outer strides in bytes. A tensor without an entry counts as aligned to 16."""

    sizes: Mapping[Symbol, int]
    alignments: Mapping[int, int] = MappingProxyType({})

    def value(self, fusion: Fusion, x: Scalar) -> int:
        """Returns the value of an extent.

        Raises:
            InputError: a symbol of it has no size.
        """
        known = sc.int_value(x)
        if known is not None:
            return known
        for form in (x, fusion.canonical(x)):
            try:
                return int(sc.evaluate(form, self.sizes))
            except KeyError:
                continue
        missing = [s.name for s in sc.symbols(x) if s not in self.sizes]
        raise InputError(f"no size is known for {', '.join(missing)} in {x}")

    def numel(self, fusion: Fusion, axes: Iterable[IterDomain]) -> int:
        """Returns the number of iterations of several axes; a broadcast axis counts once."""
        return prod(self.value(fusion, a.extent) for a in axes)

    def alignment(self, tensor_number: int) -> int:
        return self.alignments.get(tensor_number, 16)


class RunExtents:
    """The iterations of groups of axes of one fusion, for the sizes of many input classes."""

    def __init__(self, fusion: Fusion, runs: Sequence[Sequence[IterDomain]]) -> None:
        self._fusion, self._runs = fusion, runs
        self._counts = Computed([sc.product(a.extent for a in run) for run in runs])

    def of(self, facts: Facts) -> list[int]:
        """Returns the iterations of each group. Raises `InputError` as `Facts.value` does."""
        found = self._counts.at_once(facts.sizes)
        if found is None:  # a symbol that has its size by another name, or none
            return [facts.numel(self._fusion, run) for run in self._runs]
        return list(map(int, found))
