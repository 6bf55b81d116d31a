"""Which elements of whole tensors ranks have, on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fuser.ir.tensor import TensorView
from hostir.analysis.rank_values import Array, PerRank, at, everywhere, np, pick

_MAX_PIECES = 4


class Extent(NamedTuple):
    """Which elements of a whole axis a part has: `start` + i0 * stride0 + i1 * stride1 + ..., each
    i below its count. `levels` has (count, stride), the fastest last: a device cut inside of a
    stream's leaves a piece of every block.
    """

    start: PerRank
    levels: tuple[tuple[PerRank, int], ...]

    @property
    def size(self) -> PerRank:
        return math.prod(n for n, _ in self.levels)

    def cut(self, start: PerRank, length: PerRank) -> Extent | None:
        """Return elements `start` to `start + length` of these; None where that is no extent."""
        (_, stride), *rest = self.levels
        if not rest:
            return Extent(self.start + start * stride, ((length, stride),))
        inner = math.prod(n for n, _ in rest) or 1
        block = Extent(self.start + start // inner * stride, tuple(rest))
        if everywhere(start % inner + length <= inner):
            return block.cut(start % inner, length)
        if everywhere((start % inner == 0) & (length % inner == 0)):
            return Extent(block.start, ((length // inner, stride), *rest))
        return None

    def is_same(self, other: Extent) -> PerRank:
        """Return on which ranks both are the same elements."""
        if len(self.levels) != len(other.levels):
            return False
        same = self.start == other.start
        for (n, step), (m, other_step) in zip(self.levels, other.levels, strict=True):
            same = same & (n == m)
            same = same if step == other_step else same & (n == 1)
        return same

    def on(self, places: PerRank) -> Extent:
        """Return the extents that the ranks at these places have."""
        levels = tuple((pick(n, places), step) for n, step in self.levels)
        return Extent(pick(self.start, places), levels)

    def text(self, i: int) -> str:
        """Return `8:10`, or `{2:4, 6:8}`, on the rank at this place."""
        starts, (count, stride) = [int(str(at(self.start, i)))], self.levels[-1]
        for outer, step in self.levels[:-1]:
            starts = [s + k * step for s in starts for k in range(int(str(at(outer, i))))]
        n = int(str(at(count, i)))
        if stride != 1 and n > 1:
            starts, n = [s + k * stride for s in starts for k in range(n)], 1
        pieces = [str(s) if n == 1 else f"{s}:{s + n}" for s in starts[:_MAX_PIECES]]
        pieces += ["..."] if len(starts) > _MAX_PIECES else []
        return pieces[0] if len(starts) == 1 else "{" + ", ".join(pieces) + "}"


@dataclass(frozen=True)
class Region:
    """Which elements of a whole tensor a name is on each rank; `order`: its axes in memory."""

    # By rank, where ranks name different tensors.
    owners: tuple[tuple[Array | None, TensorView], ...]
    whole: tuple[int, ...]
    extents: tuple[Extent, ...]
    order: tuple[int, ...]
    # Whether ranks take other parts of what they have, shards aside.
    by_rank: bool

    def label(self, i: int) -> str:
        return next(tv.label for ranks, tv in self.owners if ranks is None or ranks[i])

    def text(self, i: int) -> str:
        """Return `T1[0, 4:8]`, on the rank at this place."""
        return f"{self.label(i)}[{', '.join(e.text(i) for e in self.extents)}]"

    @property
    def starts(self) -> list[PerRank]:
        return [e.start for e in self.extents]

    @property
    def is_alike(self) -> bool:
        """Whether it starts at the same place on all ranks."""
        return not any(isinstance(x, np.ndarray) for x in self.starts)

    def having(self, extents: Sequence[Extent]) -> Region:
        return replace(self, extents=tuple(extents))

    def on(self, places: PerRank) -> Region:
        """Return the regions that the ranks at these places have, under the names there."""
        owners = tuple((ranks if ranks is None else ranks[places], tv) for ranks, tv in self.owners)
        extents = tuple(e.on(places) for e in self.extents)
        return replace(self, owners=owners, extents=extents)

    def piece(self, count: int, place: PerRank) -> Region | None:
        """Return piece `place` of `count` equal ones of its memory; None where that is no part."""
        extents = list(self.extents)
        for axis in self.order:
            n = extents[axis].size
            if count == 1:
                break
            if not isinstance(n, int) or (count % n if n and n <= count else n % count):
                return None
            inside = max(count // n, 1) if n else 1
            part = extents[axis].cut(place // inside * max(n // count, 1), max(n // count, 1))
            if part is None:
                return None
            extents[axis], count, place = part, inside, place % inside
        return self.having(extents) if count == 1 else None

    def is_same(self, other: Region) -> PerRank:
        """Return on which ranks both are the same elements in the same order."""
        if self._filled() != other._filled():
            return False
        same: PerRank = True
        for a, b in zip(self.extents, other.extents, strict=True):
            same = same & a.is_same(b)
        return same

    def _filled(self) -> list[int]:
        """Return the axes of more than one element, as memory has them."""
        sizes = [e.size for e in self.extents]
        return [a for a in self.order if not isinstance(sizes[a], int) or sizes[a] > 1]


def joined(parts: Sequence[tuple[Array, Region | None]]) -> Region | None:
    """Return what ranks name that come in different ops; None where it is not comparable."""
    first = parts[0][1]
    every = [(ranks, r) for ranks, r in parts if r is not None]
    if first is None or len(every) < len(parts):
        return None
    if any((r.whole, r.order) != (first.whole, first.order) for _, r in every):
        return None
    extents: list[Extent] = []
    for axis, model in enumerate(first.extents):
        mine = [(ranks, r.extents[axis]) for ranks, r in every]
        strides = [step for _, step in model.levels]
        if any([step for _, step in e.levels] != strides for _, e in mine):
            return None
        levels = [
            (merged([(ranks, e.levels[k][0]) for ranks, e in mine]), step)
            for k, step in enumerate(strides)
        ]
        starts = merged([(ranks, e.start) for ranks, e in mine])
        extents.append(Extent(starts, tuple(levels)))
    owners = tuple((ranks, tv) for ranks, r in every for _, tv in r.owners)
    by_rank = any(r.by_rank for _, r in every)
    return Region(owners, first.whole, tuple(extents), first.order, by_rank)


def merged(parts: Sequence[tuple[Array, PerRank]]) -> PerRank:
    """Return the value that each rank has in its own op."""
    first = parts[0][1]
    if not any(isinstance(x, np.ndarray) or (x is not first and x != first) for _, x in parts):
        return first
    found = np.zeros(len(parts[0][0]), dtype=np.asarray(first).dtype)
    for ranks, x in parts:
        found = np.where(ranks, x, found)
    return found
