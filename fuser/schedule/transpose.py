"""The transpose scheduler: pointwise fusions whose inputs and outputs lie in two orders.

*Direct* tensors have the innermost axis along which the kernel computes, *staged* ones another. A
block takes a tile of both axes; what is staged passes through shared memory, so that everyone reads
and writes global memory along its own innermost axis:

    staged   [BIDx, UR, TIDx, V]   threads go along the staged tensors' axis first
    direct   [BIDx, UR, TIDx, V]   threads go along the direct tensors' axis first

    staged input -> registers -> tile | barrier | -> registers -> direct output
    direct input -> registers ->      | barrier | tile -> registers -> staged output

All loads of a block are under way before its first barrier. Where sizes or the layouts that come
make a tile no better, parameters are those of the pointwise scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.build_domain import DomainBuilder
from fuser.ir.domain.tensor_domain import IterDomain, contiguity_for
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.primitives import cache_after
from fuser.ir.scalar import constructors as sc
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.schedule import pointwise
from fuser.schedule.banks import Padding, padding_for
from fuser.schedule.iteration_space import Access, Space
from fuser.schedule.loop_propagation import AxisMatcher, follow
from fuser.schedule.pointwise import PointwiseParams, space_of
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    cache_output,
    intermediates,
    parallelize,
    vectorize_last,
)
from fuser.schedule.transpose_params import (
    TileAxes,
    TransposeParams,
    accesses_along,
    find_tile,
    may_have_two_orders,
    tile_of,
)
from fuser.support.errors import UnsupportedError

PT = ParallelType


def accepts(fusion: Fusion) -> str | None:
    """Return why no tile would help the fusion, None when one may."""
    if not may_have_two_orders(fusion):
        return "all inputs and outputs lie in one order"
    rejected = pointwise.accepts(fusion)
    if rejected is not None:
        return rejected
    tile = find_tile(fusion, space_of(fusion))
    return tile if isinstance(tile, str) else None


def stays_coalesced(parts: Sequence[Fusion], union: Fusion) -> bool:
    """Whether a pointwise kernel that does the work of several moves all tensors along innermost
    axes where these kernels do: a tile has two."""
    most = _innermost_axes(union)
    return most <= 2 or most <= max(map(_innermost_axes, parts))


def _innermost_axes(fusion: Fusion) -> int:
    has_one = not may_have_two_orders(fusion) or pointwise.accepts(fusion) is not None
    return 1 if has_one else len(accesses_along(space_of(fusion)))


def apply(fusion: Fusion, params: TransposeParams | PointwiseParams) -> None:
    """Schedule the fusion in place. Raises `UnsupportedError` where a tile is asked for and there
    is none."""
    if isinstance(params, PointwiseParams):
        pointwise.apply(fusion, params)
        return
    space = space_of(fusion)
    axes = find_tile(fusion, space)
    if not isinstance(axes, TileAxes):
        raise UnsupportedError(f"{params}: {axes}")
    _Tiled(fusion, space, axes, params).schedule()


class _Tiled:
    """Schedules one fusion: caches, then the loops of staged tensors, then those of all others."""

    def __init__(
        self, fusion: Fusion, space: Space, axes: TileAxes, params: TransposeParams
    ) -> None:
        self.fusion, self.space, self.axes, self.params = fusion, space, axes, params
        # What has loops of its own; the first of each sets those of the others.
        self.staged: list[TensorView] = []
        self.direct: list[TensorView] = []
        # Shared memory: each tile, and whether it holds an output.
        self.tiles: dict[TensorView, bool] = {}
        # Global accesses in vectors, and registers that a vector is computed into.
        self.vectors: list[TensorView] = []
        self.words: list[TensorView] = []

    def schedule(self) -> None:
        for access in self.axes.staged:
            if access.is_output:
                self._stage_output(access.tv)
            else:
                self._stage_input(access.tv)
        for access in self.space.accesses:
            if access in self.axes.staged:
                continue
            if access.is_output:
                self._compute_output(access)
            elif self.space.is_full(access):
                self._load_input(access)
        self._give_loops(self.staged, is_staged=True)
        loops = self._give_loops(self.direct, is_staged=False)
        fixed = {*self.staged, *self.direct}
        for tv in intermediates(self.fusion, fixed):
            loops.repeat(tv)
            loops.inline_whole(tv)
        for tv in fixed.difference(self.fusion.outputs):
            tv.compute_at = 1
        for tv in self.words:
            tv.compute_at = len(tv.domain.loop) - 1
        for tv in self.vectors:
            vectorize_last(tv)

    # ------------------------------------------------------------ caches
    def _stage_input(self, tv: TensorView) -> None:
        registers = cache_input(tv)
        tile = self._tile_after(registers, is_output=False)
        self.staged += [registers, tile]
        if self.params.staged_vector > 1:
            self.vectors.append(registers)

    def _stage_output(self, tv: TensorView) -> None:
        value, out = cache_output(tv)
        tile = self._tile_after(value, *_definitions(out), is_output=True)
        self.direct.append(tile)
        if self.params.staged_vector > 1:
            registers = cache_after(tile, propagate_allocation_domain=False)
            self.staged.append(registers)
            self.words.append(registers)
            self.vectors.append(out)
        self.staged.append(out)

    def _tile_after(self, tv: TensorView, *uses: TensorOp, is_output: bool) -> TensorView:
        tile = cache_after(tv, propagate_allocation_domain=False, cached_uses=uses)
        tile.memory = MemoryType.shared
        self.tiles[tile] = is_output
        return tile

    def _load_input(self, access: Access) -> None:
        registers = cache_input(access.tv)
        self.direct.append(registers)
        if self._moves_vectors(access):
            self.vectors.append(registers)

    def _compute_output(self, access: Access) -> None:
        if self._moves_vectors(access):
            registers, out = cache_output(access.tv)
            self.direct += [registers, out]
            self.words.append(registers)
            self.vectors.append(out)
        else:
            self.direct.append(access.tv)

    def _moves_vectors(self, access: Access) -> bool:
        return self.params.vector > 1 and access.is_vector_candidate(self.axes.inner[-1])

    # ------------------------------------------------------------ loops
    def _give_loops(self, tensors: Sequence[TensorView], *, is_staged: bool) -> Loops:
        """Shape the first tensor, repeat its loops on the others, and lay out the tiles."""
        first, params = tensors[0], self.params
        inner, other = self._shape(first, is_staged=is_staged)
        loops, matcher = Loops(self.fusion, first), AxisMatcher(AxisGraph(self.fusion), first)
        history, rank = first.domain.transforms, len(first.domain.loop)
        for tv in tensors:
            if not loops.repeat(tv):
                raise AssertionError(f"{tv} does not follow {first}")
            if rank == 4 and len(tv.domain.loop) > rank:
                tv.reorder({3: -1})  # the vector stays innermost, inside of broadcast axes
            if tv not in self.tiles:
                continue
            twins = follow(history, tv.domain, matcher.matches(tv.domain))
            along, across = ([twins[n] for n in parts] for parts in (inner, other))
            if self.tiles[tv]:
                along, across = across, along
            tile = tile_of(params, nbytes_of(tv.dtype()), is_output=self.tiles[tv])
            _lay_out(tv, along, across, padding_for(tile))
        return loops

    def _shape(self, tv: TensorView, *, is_staged: bool) -> tuple[list[int], list[int]]:
        """Give a tensor the loops [BIDx, UR, TIDx, V]; return the numbers of the axes of the tile
        along the direct tensors' innermost axis, and along the staged ones': (vectors, V)."""
        params = self.params
        outer, other, inner = self._groups(tv)
        arrange(tv, [g for g in (outer, other, inner) if g])
        at = len(tv.domain.loop) - 2
        along = _cut(tv, at + 1, params.edge, params.vector)
        across = _cut(tv, at, params.staged_edge, params.staged_vector)
        blocks = [*(a.number for a in tv.domain.loop[:at]), across[0], along[0]]
        lanes, last = (along, across) if is_staged else (across, along)
        tile = [*lanes[1:], last[1]]
        places = {a.number: k for k, a in enumerate(tv.domain.loop)}
        tv.reorder({places[n]: k for k, n in enumerate([*blocks, *tile, *last[2:]])})
        for _ in blocks[1:]:
            tv.merge(0)
        for _ in tile[1:]:
            tv.merge(1)
        tv.split(1, params.threads)
        parallelize(tv, [PT.grid_x, PT.unroll, PT.block_x, *(PT.serial for _ in last[2:])])
        return along[1:], across[1:]

    def _groups(self, tv: TensorView) -> tuple[list[int], list[int], list[int]]:
        """Return where a tensor has the outer axes, its broadcast ones among them, and the runs
        that the tile is cut from."""
        matcher = AxisMatcher(AxisGraph(self.fusion), self.space.reference)
        mine = matcher.matches(tv.domain)
        logical = self.space.reference.domain.logical
        places = {a.number: k for k, a in enumerate(tv.domain.logical)}

        def at(positions: Iterable[int]) -> list[int]:
            return [places[mine[logical[p].number].number] for p in positions]

        outer, other, inner = at(self.axes.outer), at(self.axes.other), at(self.axes.inner)
        broadcast = [k for k in places.values() if k not in (*outer, *other, *inner)]
        return [*broadcast, *outer], other, inner


def _definitions(tv: TensorView) -> tuple[TensorOp, ...]:
    definition = tv.definition()
    return () if definition is None else (definition,)


def _cut(tv: TensorView, at: int, edge: int, width: int) -> list[int]:
    """Split an axis into tiles, and these into vectors; return the parts: (blocks, vectors, V)."""
    if width > 1:
        tv.split(at, width)
    tv.split(at, edge // width)
    return [a.number for a in tv.domain.loop[at : at + (3 if width > 1 else 2)]]


def _lay_out(
    tv: TensorView, rows: Sequence[IterDomain], columns: Sequence[IterDomain], padding: Padding
) -> None:
    """Give a tile its place in shared memory, and make its writes as wide as that allows. `rows`
    and `columns` are (vectors, V)."""
    built = DomainBuilder(tv.fusion)
    lead, tail = list(rows), list(columns)
    if padding.pad:
        if padding.group > 1:
            tail, lead = [*lead[1:], *tail], lead[:1]
        padded = reduce(built.merge, tail)
        tail = [built.resize(padded, sc.ZERO, sc.const(padding.pad))]
    order = [tv.domain.loop[0], *lead, *tail]
    tv.domain = tv.domain.having(
        allocation=(a.number for a in order),
        contiguity=contiguity_for(order),
        transforms=(*tv.domain.transforms, *built.transforms),
        axes=built.axes.values(),
    )
    if padding.vector > 1:
        vectorize_last(tv)
