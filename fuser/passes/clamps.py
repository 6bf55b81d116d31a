"""Which argument a minimum or maximum of sizes is: what slices clamp to an extent.

    T1[iS2{min(64, i0)}] = slice( T0[iS0{i0}] )        sizes i0=128:  iS2{64}

For one class of inputs the answer is the same, so extents become the sums and products that
schedules can divide by a vector's width, constants among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuser.ir.dtypes import category
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Apply, Const, Number, Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import postorder


class Clamps:
    """The minima and maxima of integers in the extents of a fusion. Those in operands alone are
    values: runs whose sizes are equal may differ in them."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        seen: set[Scalar] = set()
        # Inner ones first.
        self._found = [
            y
            for x in _extents(fusion)
            for y in postorder(fusion.canonical(x), seen.__contains__)
            if seen.add(y) is None and _is_clamp(y)
        ]
        self._distances = Computed([sc.sub(*x.args) for x in self._found if isinstance(x, Apply)])

    def decide(self, values: Mapping[Symbol, Number]) -> tuple[int, ...]:
        """Return which argument each is; () where a size is not known. Of equal arguments it is a
        constant."""
        distances = self._distances.at_once(values) if self._found else None
        if distances is None:
            return ()
        return tuple(
            _choice(x, distance) for x, distance in zip(self._found, distances, strict=True)
        )

    def replacements(
        self, fusion: Fusion, choices: tuple[int, ...], known: Mapping[Scalar, Scalar]
    ) -> dict[Scalar, Scalar]:
        """Return `known`, which replaces scalars of `fusion` (a copy), with these choices added."""
        found = dict(known)
        for x, choice in zip(self._found, choices, strict=bool(choices)):
            assert isinstance(x, Apply)
            chosen = sc.substitute(fusion.canonical(x.args[choice]), found)
            # What equals the whole of it stands for it, but not within a sum.
            found.update((form, chosen) for form in (x, fusion.canonical(x)) if _is_clamp(form))
        return found


def _extents(fusion: Fusion) -> Iterator[Scalar]:
    for op in fusion.used_exprs():
        for out in op.outputs:
            yield from (x for a in out.domain.axes.values() for x in (a.extent, a.size))


def _is_clamp(x: Scalar) -> bool:
    return isinstance(x, Apply) and x.op in ("min", "max") and category(x.dtype) == "int"


def _choice(x: Scalar, distance: Number) -> int:
    assert isinstance(x, Apply)
    if distance == 0:
        return int(isinstance(x.args[1], Const))
    return int((distance > 0) == (x.op == "min"))
