"""What heuristics know about one input class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from fuser.errors import InputError
from fuser.ir import scalar as sc
from fuser.ir.domain import IterDomain
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Scalar, Symbol


@dataclass(frozen=True)
class Facts:
    """Sizes by symbol, and per tensor number the largest power of two, at most 16, that divides its
    address and its outer strides in bytes. A tensor without an entry counts as aligned to 16."""

    sizes: Mapping[Symbol, int]
    alignments: Mapping[int, int] = field(default_factory=dict)

    def value(self, fusion: Fusion, x: Scalar) -> int:
        """Return the value of an extent.

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
        """Return the number of iterations of several axes; a broadcast axis counts once."""
        return prod(self.value(fusion, a.extent) for a in axes)

    def alignment(self, tensor_number: int) -> int:
        return self.alignments.get(tensor_number, 16)
