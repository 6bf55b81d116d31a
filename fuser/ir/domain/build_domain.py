"""DomainBuilder: makes transforms and the axes that they lead to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    Resize,
    Shift,
    SplitTransform,
    Swizzle1D,
    Transform,
    shifted_extent,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import IterType, ParallelType
from fuser.support.record import replace


def merged_extent(outer: IterDomain, inner: IterDomain, *, is_view: bool) -> Scalar:
    """Return the extent of a merge; see `DomainBuilder.merge`."""
    if is_view and not (outer.is_broadcast and inner.is_broadcast):
        return sc.mul(outer.size, inner.size)
    return sc.mul(outer.extent, inner.extent)


class AxisNumbers(Protocol):
    """Hands out the numbers of axes, each once: a fusion."""

    def next_axis(self) -> int:
        """Hand out an axis number."""
        ...

    def new_axis(
        self,
        extent: Scalar,
        kind: IterType = IterType.iteration,
        *,
        expanded: Scalar | None = None,
        rfactor: bool = False,
    ) -> IterDomain:
        """Return an axis under a new number."""
        ...


class DomainBuilder:
    """Grows axes by transforms; `axes` and `transforms` are what a domain needs in the end."""

    def __init__(self, fusion: AxisNumbers, axes: Iterable[IterDomain] = ()) -> None:
        self._fusion = fusion
        self.axes: dict[int, IterDomain] = {a.number: a for a in axes}
        self.transforms: list[Transform] = []

    def split(
        self, inp: IterDomain, factor: Scalar, *, inner_split: bool = True, rfactor: bool = False
    ) -> tuple[IterDomain, IterDomain]:
        """Split an axis into (outer, inner); kind and parallel type are inherited.

        An expanded broadcast keeps extent 1 on both sides and splits its expanded size.
        """

        def sizes(extent: Scalar) -> tuple[Scalar, Scalar]:
            rest = sc.ceildiv(extent, factor)
            return (rest, factor) if inner_split else (factor, rest)

        plain = (sc.ONE, sc.ONE) if inp.is_broadcast else sizes(inp.extent)
        expanded = sizes(inp.expanded) if inp.expanded is not None else (None, None)
        outer, inner = (
            self._derive(inp, extent=plain[k], expanded=expanded[k], rfactor=rfactor)
            for k in range(2)
        )
        self._lead(SplitTransform(inp.number, outer.number, inner.number, factor, inner_split), inp)
        return outer, inner

    def merge(self, outer: IterDomain, inner: IterDomain, *, rfactor: bool = False) -> IterDomain:
        """Merge two axes: extent outer * inner, outer's parallel type.

        Iteration wins over broadcast; reductions stay reductions. With a concrete axis, a view
        merges the apparent size of an expanded broadcast, a loop the one element that it is.
        """
        kinds = (outer.kind, inner.kind)
        kind = next((k for k in kinds if k is not IterType.broadcast), IterType.broadcast)
        extent, expanded = merged_extent(outer, inner, is_view=rfactor), None
        is_expanded = outer.expanded is not None or inner.expanded is not None
        if kind is IterType.broadcast and is_expanded:
            expanded = sc.mul(outer.size, inner.size)
        out = self._derive(outer, kind=kind, extent=extent, expanded=expanded, rfactor=rfactor)
        self._lead(MergeTransform(outer.number, inner.number, out.number), outer, inner)
        return out

    def resize(self, inp: IterDomain, left: Scalar, right: Scalar) -> IterDomain:
        """Resize an axis: a broadcast where its size is the constant 1, else an iteration.

        Else an expanded broadcast that is only cropped stays one.
        """
        extent = sc.add(sc.add(inp.size, left), right)
        is_one = sc.int_value(extent) == 1
        only_crops = all(sc.is_nonnegative(sc.mul(v, -1)) for v in (left, right))
        if inp.is_broadcast and inp.expanded is not None and only_crops and not is_one:
            out = self._fusion.new_axis(sc.ONE, IterType.broadcast, expanded=extent, rfactor=True)
        else:
            kind = IterType.broadcast if is_one else IterType.iteration
            out = self._fusion.new_axis(extent, kind, rfactor=True)
        self.axes[out.number] = out
        self._lead(Resize(inp.number, out.number, left, right), inp)
        return out

    def swizzle(self, inp: IterDomain, ptype: ParallelType) -> IterDomain:
        """Rotate an axis by this device's coordinate along a device type."""
        out = self._derive(inp)
        self._lead(Swizzle1D(inp.number, out.number, ptype), inp)
        return out

    def shift(
        self, rows: IterDomain, inp: IterDomain, width: Scalar
    ) -> tuple[IterDomain, IterDomain]:
        """Shift the elements of each row to where they lie in words of memory; see `Shift`."""
        same = self._derive(rows)
        out = self._derive(inp, extent=shifted_extent(inp.extent, width))
        self._lead(Shift(rows.number, inp.number, same.number, out.number, width), rows, inp)
        return same, out

    def restate(self, axis: IterDomain, state: IterDomain) -> IterDomain:
        """Give an axis that was made here another state, under another number too."""
        del self.axes[axis.number]
        self.axes[state.number] = state
        if state.number != axis.number:
            self.transforms = [
                t.renumbered(lambda n: state.number if n == axis.number else n)
                for t in self.transforms
            ]
        return state

    def _derive(self, inp: IterDomain, **changes: object) -> IterDomain:
        made = replace(inp, number=self._fusion.next_axis(), **changes)  # pyright: ignore[reportArgumentType]
        self.axes[made.number] = made
        return made

    def _lead(self, transform: Transform, *sources: IterDomain) -> None:
        self.transforms.append(transform)
        for axis in sources:
            self.axes.setdefault(axis.number, axis)
