"""Describes which elements of a whole tensor each rank stores (its shard), for all ranks at once.

The check of communications uses this description to find elements that arrive at a wrong position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.memory_layout import expanded_positions, memory_order
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES, ParallelType
from hostir.analysis.buffer_regions import NamedRegion
from hostir.analysis.rank_values import (
    Array,
    PerRank,
    RankValues,
    at,
    everywhere,
    least,
    most,
    np,
    pick,
)
from hostir.ir.effects import Part, Shows
from hostir.ir.ops import stream_cut
from multidevice.sharding.placement import Cuts, is_allocated_per_step, placement
from multidevice.sharding.queries import local_sizes
from multidevice.sharding.reshard import position_map

_MAX_PIECES = 4


class Extent(NamedTuple):
    """The indices of a whole tensor that each rank has along one axis.

    The indices are `start` + i0 * stride0 + i1 * stride1 + ..., where each ik runs from 0 to its
    count (exclusive). `levels` has (count, stride) for each ik; the last one varies fastest.
    Usually there is one level. There are several if the iterations of a loop divide the axis into
    blocks, and devices then divide each block: a rank has a piece of every block.
    """

    start: PerRank
    levels: tuple[tuple[PerRank, int], ...]

    @property
    def size(self) -> PerRank:
        """The number of indices that each rank has along the axis."""
        return math.prod(n for n, _ in self.levels)

    def cut(self, start: PerRank, length: PerRank) -> Extent | None:
        """Selects a part of these indices by position: from the index at position `start` to the
        index at position `start + length` (exclusive). Returns the selected indices as a new
        extent. Returns None if the selected indices are no extent: if no `start` and no nested
        levels of (count, stride) describe them.
        """
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
        """Returns on which ranks both extents have the same indices, as an array of bools over
        ranks (or one bool for all).
        """
        if len(self.levels) != len(other.levels):
            return False
        same = self.start == other.start
        for (n, step), (m, other_step) in zip(self.levels, other.levels, strict=True):
            same = same & (n == m)
            same = same if step == other_step else same & (n == 1)
        return same

    def on(self, places: PerRank) -> Extent:
        """Returns the indices of some ranks: entry k of the result belongs to the rank `places[k]`,
        an index in the list of ranks.
        """
        levels = tuple((pick(n, places), step) for n, step in self.levels)
        return Extent(pick(self.start, places), levels)

    def text(self, i: int) -> str:
        """Returns the indices of one rank as text for messages, such as `8:10` or `{2:4, 6:8}`. `i`
        is the index of the rank in the list of ranks.
        """
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
    """The elements of a whole tensor that take part in a communication, on each rank.

    - `owners`: pairs of an array of bools over ranks and the tensor that these ranks communicate;
      None instead of an array stands for all ranks. There are several pairs if ranks communicate in
      different ops.
    - `whole`: the shape of the whole tensor; `extents`: the indices along each axis.
    - `order`: the axes in memory order, outermost first.
    - `by_rank`: whether the program selected the part by an index that depends on the rank.
    """

    # The tensor of each rank, if ranks name different tensors.
    owners: tuple[tuple[Array | None, TensorView], ...]
    whole: tuple[int, ...]
    extents: tuple[Extent, ...]
    order: tuple[int, ...]
    # Whether an index that depends on the rank selected the part.
    by_rank: bool

    def label(self, i: int) -> str:
        """Returns the name of the tensor on one rank, such as `T1`. `i` is the index of the rank in
        the list of ranks."""
        return next(tv.label for ranks, tv in self.owners if ranks is None or ranks[i])

    def text(self, i: int) -> str:
        """Returns the elements of one rank as text for messages, such as `T1[0, 4:8]`. `i` is the
        index of the rank in the list of ranks.
        """
        return f"{self.label(i)}[{', '.join(e.text(i) for e in self.extents)}]"

    @property
    def starts(self) -> list[PerRank]:
        """The first index along each axis, as a number or an array over ranks."""
        return [e.start for e in self.extents]

    @property
    def is_alike(self) -> bool:
        """Whether the elements of all ranks begin at the same position of the tensor."""
        return not any(isinstance(x, np.ndarray) for x in self.starts)

    def having(self, extents: Sequence[Extent]) -> Region:
        """Returns a region of the same tensor with other indices along its axes."""
        return replace(self, extents=tuple(extents))

    def on(self, places: PerRank) -> Region:
        """Returns the elements of some ranks: entry k of the result belongs to the rank
        `places[k]`, an index in the list of ranks.
        """
        owners = tuple((ranks if ranks is None else ranks[places], tv) for ranks, tv in self.owners)
        extents = tuple(e.on(places) for e in self.extents)
        return replace(self, owners=owners, extents=extents)

    def piece(self, count: int, place: PerRank) -> Region | None:
        """Divides the memory of these elements into `count` contiguous pieces of equal size.
        Returns the piece with index `place`, such as the data that a scatter sends to one member.

        Returns None if the piece is not a range along each axis.
        """
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
        """Returns on which ranks both regions have the same elements in the same memory order, as
        an array of bools over ranks (or one bool for all).
        """
        if self._filled() != other._filled():
            return False
        same: PerRank = True
        for a, b in zip(self.extents, other.extents, strict=True):
            same = same & a.is_same(b)
        return same

    def _filled(self) -> list[int]:
        """Returns the axes along which some rank has more than one element, in memory order. All
        other axes have no effect on the order of the elements in memory.
        """
        sizes = [e.size for e in self.extents]
        return [a for a in self.order if not isinstance(sizes[a], int) or sizes[a] > 1]


def joined(parts: Sequence[tuple[Array, Region | None]]) -> Region | None:
    """Returns one `Region` over all ranks, for a collective that ranks enter in different ops.

    `parts` has a pair for each op: an array of bools over ranks, True for those that enter in this
    op, and the elements that they send or receive. Returns None if some elements are unknown, or if
    shapes, memory orders or strides differ.
    """
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
    """Returns one value over all ranks, for a collective that ranks enter in different ops. The
    result is a number if the values of all ranks are equal, and otherwise an array over ranks.

    `parts` has a pair for each op: an array of bools over ranks, True for those that enter in this
    op, and the value on these ranks.
    """
    first = parts[0][1]
    if not any(isinstance(x, np.ndarray) or (x is not first and x != first) for _, x in parts):
        return first
    found = np.zeros(len(parts[0][0]), dtype=np.asarray(first).dtype)
    for ranks, x in parts:
        found = np.where(ranks, x, found)
    return found


# ----------------------------------------------------------------------
# The region that a name refers to, on all ranks at once, in local and in global elements.


@dataclass(frozen=True, slots=True)
class ShardRegion(NamedRegion[PerRank, int]):
    """The part of a shard to which a slice or other view refers, on all ranks at once. A shard is
    the part of a tensor that one rank stores.

    - `owner`: the tensor of which it is a view, whose shard holds the elements.
    - `extents`: for each axis of the owner, the indices of the whole tensor; None if unknown.
    - `axes`: for each axis of the view, the same axis of the owner; None if a view op created the
      axis.
    - `shape`: the shape of the view.
    - `by_rank`: whether the program selected the part by an index that depends on the rank.
    """

    owner: TensorView
    extents: tuple[Extent | None, ...]
    axes: tuple[int | None, ...]
    shape: tuple[PerRank, ...]
    by_rank: bool = False

    def elements(self, expanded: Sequence[int] = ()) -> PerRank:
        """Returns the number of elements that the part has in memory, on each rank. An axis in
        `expanded` has stride 0, so it counts as one element.
        """
        return math.prod(least(n, 1) if a in expanded else n for a, n in enumerate(self.shape))

    def having(self, shape: tuple[PerRank, ...], axes: tuple[int | None, ...]) -> ShardRegion:
        """Returns a description of the same elements of `owner` for a tensor with another `shape`
        and other `axes`, such as after a transpose.
        """
        return ShardRegion(self.owner, self.extents, axes, shape, self.by_rank)

    def chunk(self, axis: int, start: PerRank, length: PerRank, among: Hashable) -> ShardRegion:
        """Returns the part of this region that has the indices from `start` to `start + length`,
        exclusive, along `axis`. The elements become unknown if a view op created the axis. `among`
        is ignored, because regions on all ranks are compared by their indices.
        """
        owner = self.axes[axis]
        extents: list[Extent | None] = list(self.extents)
        if owner is None:
            extents = [None] * len(extents)  # a part of what a reshape made is not known
        elif (extent := extents[owner]) is not None:
            extents[owner] = extent.cut(start, length)
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        by_rank = self.by_rank or isinstance(start, np.ndarray)
        return ShardRegion(self.owner, tuple(extents), self.axes, shape, by_rank)


class Shapes:
    """The shapes of a program's tensors: of each whole tensor, and of its shard, the part that a
    rank stores. Also says which elements of the whole tensor the shard of each rank has.

    A `Shapes` belongs to one check of a program with given sizes, and caches its results.
    """

    def __init__(self, values: RankValues) -> None:
        self._values = values
        self._local: dict[TensorView, tuple[int, ...]] = {}
        self._whole: dict[TensorView, tuple[int, ...]] = {}
        self._shard_regions: dict[TensorView, ShardRegion] = {}
        self._cuts: dict[TensorView, tuple[frozenset[ParallelType], ...]] = {}
        self._frames: dict[object, tuple[tuple[int, ...], ...]] = {}

    def whole(self, tv: TensorView) -> tuple[int, ...]:
        """Returns the global shape of a tensor: the shape before the tensor is divided among
        ranks."""
        if tv not in self._whole:
            self._whole[tv] = tuple(int(self._values.of(x)) for x in tv.shape())
        return self._whole[tv]

    def local(self, tv: TensorView) -> tuple[int, ...]:
        """Returns the shape of a tensor's shard, the part that one rank stores. All ranks have
        shards of the same shape.
        """
        if tv not in self._local:
            self._local[tv] = local_sizes(tv, self.whole(tv))
        return self._local[tv]

    def device_cuts(self, tv: TensorView) -> tuple[frozenset[ParallelType], ...]:
        """Returns, for each axis of a tensor, the mesh dimensions that divide this axis among
        ranks."""
        if tv not in self._cuts:
            cuts = placement(tv, DEVICE_TYPES)
            self._cuts[tv] = tuple(frozenset(c.ptype for c in mine) for mine in cuts)
        return self._cuts[tv]

    def shard_region(self, tv: TensorView) -> ShardRegion:
        """Returns all elements of a tensor's shard, the part that a rank stores, on each rank."""
        if tv not in self._shard_regions:
            shape = self.local(tv)
            every = zip(placement(tv), self.whole(tv), strict=True)
            extents = tuple(self._extent(tv, cuts, size) for cuts, size in every)
            self._shard_regions[tv] = ShardRegion(tv, extents, tuple(range(len(shape))), shape)
        return self._shard_regions[tv]

    def step(self, tv: TensorView, index: Scalar) -> ShardRegion:
        """Returns the elements of a tensor that its buffer holds in the loop iteration `index`, on
        each rank. A loop computes the tensor in equal blocks, one per iteration, and the buffer
        holds one block.
        """
        axis, chunks = stream_cut(tv)
        return self.shard_region(tv).part(Part(axis, index, chunks), self._values.of, _unchecked)

    def _extent(self, tv: TensorView, cuts: Cuts, size: int) -> Extent:
        """Returns the indices that each rank has along one axis of `tv`. The axis has `size`
        elements in the whole tensor. `cuts` says how the axis is divided over devices and over the
        iterations of a loop, one division after another.

        If devices divide the blocks of a loop, a rank has a piece of every block.
        """
        start: PerRank = 0
        levels: list[tuple[PerRank, int]] = []
        last = max((k for k, c in enumerate(cuts) if c.ptype.is_device), default=-1)
        for cut in cuts[: last + 1]:
            count = cut.count
            assert isinstance(count, int), (
                f"{cut} of {tv} has no constant count, though devices divide its blocks"
            )
            size //= count
            if cut.ptype.is_device:
                start = start + self._coordinates(tv, cut.ptype) * size
            elif count > 1:
                levels.append((count, size))
        if levels and levels[-1][1] == size:  # one device: nothing between them
            count, _ = levels.pop()
            size *= count
        return Extent(start, (*levels, (size, 1)))

    def _coordinates(self, tv: TensorView, ptype: ParallelType) -> PerRank:
        mesh = tv.mesh
        assert mesh is not None, f"{tv} is cut without a mesh"
        return self._values.along(mesh, ptype)

    def region(self, shard: ShardRegion, *, without: int | None = None) -> Region | None:
        """Returns the elements of the whole tensor that a part of a shard stores in memory, on each
        rank. Returns None if some elements are unknown.

        An expanded axis is left out, because it has one element in memory. The axis number
        `without`, if given, is left out too. Such an axis numbers the partial sums of the ranks,
        one per rank. The result of the allreduce that adds them does not have the axis.
        """
        whole, keep, order = self._frame(shard.owner, without)
        extents = tuple(e for a in keep if (e := shard.extents[a]) is not None)
        owners = ((None, shard.owner),)
        known = len(extents) == len(keep)
        return Region(owners, whole, extents, order, shard.by_rank) if known else None

    def _frame(self, tv: TensorView, without: int | None) -> tuple[tuple[int, ...], ...]:
        """Returns facts about a tensor's axes that every slice of the tensor needs, so that they
        are computed once. They are three tuples: the sizes of the axes before the tensor is divided
        among ranks, the numbers of these axes, and their memory order.

        Expanded axes and the axis number `without` are left out. The memory order has positions in
        the tuple of the remaining axes, outermost first.
        """
        if (tv, without) not in self._frames:
            gone = {without, *expanded_positions(tv)}
            keep = tuple(a for a in range(tv.ndim) if a not in gone)
            order = tuple(keep.index(a) for a, _ in memory_order(tv) if a not in gone)
            self._frames[tv, without] = tuple(self.whole(tv)[a] for a in keep), keep, order
        return self._frames[tv, without]

    def partial_axis(self, shard: ShardRegion, ptypes: Sequence[ParallelType]) -> int | None:
        """Returns the axis of `shard.owner` along which each rank has one partial sum, to be added
        by a reduction over ranks. Returns None if the tensor has no such axis.

        `ptypes` are the mesh dimensions along which the team of ranks is formed.
        """
        sizes, cuts = self.local(shard.owner), self.device_cuts(shard.owner)
        return next((k for k, c in enumerate(cuts) if c & set(ptypes) and sizes[k] == 1), None)

    # ------------------------------------------------------------ names
    def named(
        self,
        shard: ShardRegion,
        effect: Shows,
        op: Op,
        check: Callable[[Part, PerRank, PerRank], PerRank],
    ) -> ShardRegion:
        """Returns the elements to which a view refers, on each rank. `shard` has the elements of
        the tensor of which it is a view, and `effect.out` is the view.

        The view is a slice if `effect.part` is given, and otherwise the result of the view op `op`.
        `check` reports an index that is out of range, as in `NamedRegion.part`.
        """
        if effect.part is not None:
            return shard.part(effect.part, self._values.of, check)
        return self._view(shard, op) if isinstance(op, TensorOp) else shard

    def _view(self, shard: ShardRegion, op: TensorOp) -> ShardRegion:
        kept = {c: p for p, c in position_map(op).items()}
        found = shard.viewed(kept, self.local(op.out_tensor))
        if not is_allocated_per_step(op.out_tensor):
            return found
        axis, _ = stream_cut(op.out_tensor)
        if axis in kept:
            return found
        # The axis was made by a reshape, of as many elements.
        rest = math.prod(n for c, n in enumerate(found.shape) if c != axis)
        size = math.prod(shard.shape) // most(rest, 1)
        return found.having((*found.shape[:axis], size, *found.shape[axis + 1 :]), found.axes)


def _unchecked(part: Part, index: PerRank, limit: PerRank) -> PerRank:
    """Returns `index` unchanged. Stands in for the `check` function of `NamedRegion.part`, which
    reports an index out of range, for callers whose index is always in range.
    """
    return index
