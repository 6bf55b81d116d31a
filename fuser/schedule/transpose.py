"""The transpose scheduler: pointwise fusions whose inputs and outputs have two memory orders.

*Direct* tensors are contiguous along the axis along which the kernel computes, *staged* tensors
along another axis. A CUDA block processes a tile of both axes. Staged tensors pass through shared
memory, so that all tensors are accessed along their own innermost axis in global memory.

Accesses to staged and to direct tensors have different loops, listed from outer to inner (BIDx:
blocks, UR: unrolled, TIDx: threads, V: vector):

    staged   [BIDx, UR, TIDx, V]   neighbouring threads are along the staged tensors' axis
    direct   [BIDx, UR, TIDx, V]   neighbouring threads are along the direct tensors' axis

Data flows from left to right. A tile is in shared memory, and `|` is a barrier of the block:

    staged input -> registers -> tile | -> registers -> direct output
    direct input -> registers ->      | tile -> registers -> staged output

All loads of a block are issued before its first barrier. If a tile does not pay for the actual
sizes and layouts, the parameters are those of the pointwise scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from math import prod

from fuser.ir.axis_graph import AxisGraph
from fuser.ir.domain.tensor_domain import DomainBuilder, IterDomain, contiguity_for
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.primitives import cache_after
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import MemoryType, ParallelType
from fuser.schedule import pointwise
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import Access, Space, VectorWidths, power_of_two_at_least
from fuser.schedule.loop_propagation import AxisMatcher, follow
from fuser.schedule.pointwise import PointwiseParams, space_of
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    cache_output,
    intermediates,
    loops_error,
    parallelize,
    vectorize_last,
)
from fuser.support.device import DeviceInfo
from fuser.support.errors import UnsupportedError
from fuser.support.record import record

PT = ParallelType


def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the transpose scheduler rejects the fusion; None if the fusion is
    accepted.

    The scheduler accepts a pointwise fusion whose inputs and outputs have two different innermost
    axes in memory, so that a tile in shared memory may help.
    """
    if not may_have_two_orders(fusion):
        return "all inputs and outputs have one memory order"
    rejected = pointwise.accepts(fusion)
    if rejected is not None:
        return rejected
    tile = find_tile(fusion, space_of(fusion))
    return tile if isinstance(tile, str) else None


def stays_coalesced(parts: Sequence[Fusion], union: Fusion) -> bool:
    """Returns whether one merged kernel accesses its tensors along their innermost axes in memory,
    at least as well as several kernels.

    `union` is a pointwise fusion that does the work of all `parts`. A tile in shared memory
    supports two different innermost axes. Returns True if `union` has at most two, or not more than
    some fusion in `parts` has alone.
    """
    most = _innermost_axes(union)
    return most <= 2 or most <= max(map(_innermost_axes, parts))


def _innermost_axes(fusion: Fusion) -> int:
    has_one = not may_have_two_orders(fusion) or pointwise.accepts(fusion) is not None
    return 1 if has_one else len(accesses_along(space_of(fusion)))


def apply(fusion: Fusion, params: TransposeParams | PointwiseParams) -> None:
    """Schedules the fusion in place with these parameters.

    Raises:
        UnsupportedError: the parameters ask for a tile in shared memory, but the fusion has no axes
            for a tile.
    """
    if isinstance(params, PointwiseParams):
        pointwise.apply(fusion, params)
        return
    space = space_of(fusion)
    axes = find_tile(fusion, space)
    if not isinstance(axes, TileAxes):
        raise UnsupportedError(f"the fusion cannot be scheduled with {params}: {axes}")
    _Tiled(fusion, space, axes, params).schedule()


class _Tiled:
    """Schedules one fusion: adds copies, then sets the loops of staged tensors and of all others.

    A staged tensor passes through a tile in shared memory, because its innermost axis in memory is
    not the one along which the kernel computes.
    """

    def __init__(
        self, fusion: Fusion, space: Space, axes: TileAxes, params: TransposeParams
    ) -> None:
        self.fusion, self.space, self.axes, self.params = fusion, space, axes, params
        # Tensors that get loops. The first of each list defines the loops of the others.
        self.staged: list[TensorView] = []
        self.direct: list[TensorView] = []
        # The tiles in shared memory, and whether each holds an output.
        self.tiles: dict[TensorView, bool] = {}
        # Vectorised accesses to global memory, and registers in which a vector is computed.
        self.vectors: list[TensorView] = []
        self.vector_registers: list[TensorView] = []

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
        for tv in self.vector_registers:
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
            self.vector_registers.append(registers)
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
            self.vector_registers.append(registers)
            self.vectors.append(out)
        else:
            self.direct.append(access.tv)

    def _moves_vectors(self, access: Access) -> bool:
        return self.params.vector > 1 and access.is_vector_candidate(self.axes.inner[-1])

    # ------------------------------------------------------------ loops
    def _give_loops(self, tensors: Sequence[TensorView], *, is_staged: bool) -> Loops:
        """Builds the loops of the first of `tensors`, copies them to the others, and returns them.
        Also sets the layout of each tile.

        A tile is the part of a tensor that a CUDA block holds in shared memory. With `is_staged`,
        threads run along the innermost axis of the staged tensors, which pass through tiles.
        Otherwise threads run along the innermost axis of the other (direct) tensors.
        """
        first, params = tensors[0], self.params
        inner, other = self._shape(first, is_staged=is_staged)
        loops, matcher = Loops(self.fusion, first), AxisMatcher(AxisGraph(self.fusion), first)
        history, rank = first.domain.transforms, len(first.domain.loop)
        for tv in tensors:
            if not loops.repeat(tv):
                raise loops_error(tv, first)
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
        """Gives a tensor the loops [BIDx, UR, TIDx, V]: CUDA blocks, an unrolled loop, threads, a
        vector.

        A CUDA block processes a tile of two axes: the innermost axis of the direct tensors, and
        that of the staged tensors, which pass through shared memory. Returns two lists of numbers
        (ids) of loop axes, one for each axis of the tile, in this order. A list has the axis over
        vectors and, if vectors have several elements, the axis over the elements of a vector.
        """
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
        """Returns three lists of positions of a tensor's logical axes, each of which becomes one
        axis.

        The first has the outer axes, including broadcast axes. The others have the axes that a tile
        divides: the innermost axes of the staged tensors, which pass through shared memory, and of
        the direct ones.
        """
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
    """Splits a loop axis into tiles of `edge` elements, and each tile into vectors of `width`
    elements.

    Returns the numbers (ids) of the new axes: (blocks, vectors, elements of a vector). If `width`
    is 1, the axis over the elements of a vector is not made.
    """
    if width > 1:
        tv.split(at, width)
    tv.split(at, edge // width)
    return [a.number for a in tv.domain.loop[at : at + (3 if width > 1 else 2)]]


def _lay_out(
    tv: TensorView, rows: Sequence[IterDomain], columns: Sequence[IterDomain], padding: Padding
) -> None:
    """Sets the layout of a tile in shared memory, and vectorises its writes if the layout allows.

    `rows` and `columns` are the tile's axes in each direction: (vectors, elements of a vector).
    `padding` says how many unused elements avoid bank conflicts.
    """
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


# ----------------------------------------------------------------------
# The heuristic of the transpose scheduler: the axes and the size of a tile, and when a tile pays.

# The bytes of a tile's row in global memory along both edges, for the widest element type, and the
# least number of tiles per multiprocessor. ROWS is for all kernels; ROWS_OF_COPIES is tried first
# for vectorised copies. Measured on an H200, copies, bfloat16 and float32, in us: 128 x 128 bytes
# 15.5 and 28.0 (8192 x 1536), 2.47 and 3.74 (2048 x 384); two cache lines along the staged edge
# 14.8 and 27.1, 2.24 and 3.48. With two inputs they take 12 % more.
ROWS = (((128, 128), 1), ((128, 64), 1), ((64, 64), 0))
ROWS_OF_COPIES = (((256, 256), 20), ((128, 256), 4), ((64, 256), 1))
# ROWS_OF_COPIES is for elements of these sizes, ROWS_OF_OTHER_COPIES for all others.
COPIED_BYTES = (2, 4)
ROWS_OF_OTHER_COPIES = (((256, 256), 32),)
SECTOR_BYTES = 32
THREADS = 128
MAX_THREADS = 512
MAX_EDGE = 1024
MIN_TILE = 256
# Bytes that a thread loads before the barrier; a block with more bytes has more threads. The second
# number is for vectorised copies, which took up to 7 % longer with 128.
BYTES_IN_FLIGHT, BYTES_OF_COPIES = 128, 32
# The shared memory of a multiprocessor must have room for at least this many blocks.
BLOCKS_PER_SM = 4
# Elements between the first and last use of a cache line for which it stays in the L1 cache. On an
# H200, rows of 32 and 64 elements (512 and 1024 here) took 1.3 times as long without a tile.
CACHED_ELEMENTS = 256


@record
class TransposeParams:
    """The parameters of a transpose kernel, whose CUDA blocks process tiles of two axes.

    - `edge`, `vector`: the tile's elements, and the elements of a vector, along the innermost axis
      of the direct tensors, which are not stored in shared memory.
    - `staged_edge`, `staged_vector`: the same for the staged tensors, which pass through shared
      memory.
    - `threads`: the number of threads of a CUDA block.
    """

    threads: int
    vector: int
    staged_vector: int
    edge: int
    staged_edge: int

    def is_near(self, other: object) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both take about the same
        time.
        """
        return (
            isinstance(other, TransposeParams)
            and self.vector == other.vector
            and self.staged_vector == other.staged_vector
        )

    def is_alike(self, other: object) -> bool:
        """Returns whether a compiled kernel with `other` can replace one with `self`, though
        perhaps slower.

        Both must have tiles of the same extents, because a larger tile may be mostly empty.
        """
        return (
            self.is_near(other)
            and isinstance(other, TransposeParams)
            and (self.edge, self.staged_edge) == (other.edge, other.staged_edge)
        )

    def __str__(self) -> str:
        return (
            f"transpose(tile {self.edge}x{self.staged_edge}, threads {self.threads}, "
            f"vectors {self.vector} and {self.staged_vector})"
        )


@record
class TileAxes:
    """The axes of a tile, as positions in the output whose loops all other tensors copy.

    - `inner`: the innermost axes of the `direct` tensors, contiguous in every tensor.
    - `other`: the innermost axes of the `staged` tensors, which pass through shared memory.
    - `outer`: all other axes.
    - `between`: the axes that follow `other` in the direct tensors' memory order, with those of
      `inner`.
    """

    outer: tuple[int, ...]
    other: tuple[int, ...]
    inner: tuple[int, ...]
    between: tuple[int, ...]
    staged: tuple[Access, ...]
    direct: tuple[Access, ...]


def tile_of(params: TransposeParams, nbytes: int, *, is_output: bool) -> Tile:
    """Returns the size and access pattern of the tile of one staged tensor in shared memory.

    A staged tensor is an input or output that passes through shared memory. `is_output` says which
    of the two it is. A tile of an input is written in the input's memory order, and read along the
    innermost axis of the direct tensors (those that are not staged). A tile of an output is written
    along that axis, and read in the output's memory order. `nbytes` is the size of an element.
    """
    direct, staged = (params.edge, params.vector), (params.staged_edge, params.staged_vector)
    source, target = (direct, staged) if is_output else (staged, direct)
    return Tile(target[0], source[0], nbytes, source[1], target[1])


# ------------------------------------------------------------------ the axes of a tile
def may_have_two_orders(fusion: Fusion) -> bool:
    """Returns whether inputs and outputs of the fusion may have different memory orders.

    They can if it has a permutation, or an input or output with a declared memory order.
    """
    ends = (v for v in (*fusion.inputs, *fusion.outputs) if isinstance(v, TensorView))
    return any(tv.domain.allocation for tv in ends) or any(
        isinstance(op, LoadStoreOp) and op.out.domain.root for op in fusion.exprs
    )


def find_tile(fusion: Fusion, space: Space) -> TileAxes | str:
    """Returns the axes of the tile that a CUDA block processes, or the reason why there is none.

    The inputs and outputs must have exactly two different innermost axes in memory. These are the
    tile's axes. The kernel computes along the one that is innermost for most bytes, so that fewer
    bytes pass through shared memory. If both have equally many bytes, outputs decide.
    """
    if fusion.aliases:
        return "an output is written into an input"
    along = accesses_along(space)
    if len(along) < 2:
        hidden = next((a.tv for a in space.accesses if a.order is None), None)
        but = (
            f", except {hidden}, which a view reads at other indices" if hidden is not None else ""
        )
        return f"all inputs and outputs have one memory order{but}"
    if len(along) > 2:
        firsts = ", ".join(str(group[0].tv) for group in along.values())
        return f"inputs and outputs have {len(along)} innermost axes: {firsts}"
    direct, staged = sorted(along.values(), key=_votes, reverse=True)
    order = max((a.order or () for a in direct), key=lambda o: _votes(_in_order(direct, o)))
    runs = space.runs(order)
    *rest, inner = runs
    last = staged[0].order[-1] if staged[0].order else -1
    at = next(k for k, run in enumerate(rest) if run[-1] == last)
    outer = (p for k, run in enumerate(rest) if k != at for p in run)
    between = (p for run in runs[at + 1 :] for p in run)
    return TileAxes(tuple(outer), rest[at], inner, tuple(between), tuple(staged), tuple(direct))


def accesses_along(space: Space) -> dict[int, list[Access]]:
    """Groups the inputs and outputs that have all axes by their innermost axis in memory.

    The keys are positions of axes. Tensors that are not contiguous along their innermost axis are
    left out.
    """
    along: dict[int, list[Access]] = {}
    for access in space.accesses:
        if space.is_full(access) and access.order and access.contiguous[-1]:
            along.setdefault(access.order[-1], []).append(access)
    return along


def _votes(accesses: list[Access]) -> tuple[int, int]:
    return sum(a.nbytes for a in accesses), sum(a.is_output for a in accesses)


def _in_order(accesses: list[Access], order: tuple[int, ...]) -> list[Access]:
    return [a for a in accesses if a.order == order]


# ------------------------------------------------------------------ parameters
def chooser(
    fusion: Fusion, device: DeviceInfo
) -> Callable[[Facts], TransposeParams | PointwiseParams]:
    """Returns a function that chooses a tile from the sizes and alignments of the inputs.

    A tile is the part of the work of one CUDA block. If no tile pays, the function returns the
    parameters of the pointwise scheduler.
    """
    without = pointwise.chooser(fusion, device)
    if device.kind == "cpu" or not may_have_two_orders(fusion):
        return without
    space = space_of(fusion)
    axes = find_tile(fusion, space)
    if isinstance(axes, str):
        return without
    logical = space.reference.domain.logical
    groups = (axes.inner, axes.other, axes.between, axes.outer)
    extents = RunExtents(fusion, [[logical[p] for p in group] for group in groups])
    tiles = _Tiles(space, axes, device)

    def choose(facts: Facts) -> TransposeParams | PointwiseParams:
        return tiles.choose(facts, *extents.of(facts)) or without(facts)

    return choose


class _Tiles:
    """Chooses the tiles of one fusion, for different sizes and alignments of the inputs.

    A tile is the part of a tensor that a CUDA block moves through shared memory.
    """

    def __init__(self, space: Space, axes: TileAxes, device: DeviceInfo) -> None:
        self._device, self._staged, self._direct = device, axes.staged, axes.direct
        self._widths = VectorWidths(axes.direct), VectorWidths(axes.staged)
        self._largest = max(a.nbytes for a in axes.direct), max(a.nbytes for a in axes.staged)
        self._is_copy = len(axes.staged) + len(axes.direct) <= 2
        self._is_measured = {*self._largest} <= {*COPIED_BYTES}
        self._staged_bytes = sum(a.nbytes for a in axes.staged)
        self._loaded = sum(a.nbytes for a in space.accesses if space.is_full(a) and not a.is_output)

    def choose(
        self, facts: Facts, inner: int, other: int, between: int, outer: int
    ) -> TransposeParams | None:
        """Returns the parameters of a tile, or None if a tile would cost more than it saves.

        `inner`, `other`, `between` and `outer` are numbers of elements: the products of the extents
        of the axes in the fields of `TileAxes` with these names.
        """
        extents = (inner, other)
        vectors = [w.of(facts, n) for w, n in zip(self._widths, extents, strict=True)]
        in_vectors = self._is_copy and min(vectors) > 1
        copies = ROWS_OF_COPIES if self._is_measured else ROWS_OF_OTHER_COPIES
        found: TransposeParams | None = None
        for rows, least in (copies if in_vectors else ()) + ROWS:
            made = self._without_conflicts([*vectors], extents, rows)
            if made is None:
                break
            edges = (made.edge, made.staged_edge)
            tiles = prod(-(-n // edge) for n, edge in zip(extents, edges, strict=True))
            fits = rows in dict(ROWS) or [made.vector, made.staged_vector] == vectors
            found = made
            if tiles * outer >= least * self._device.sm_count and fits:
                break
        if found is None:
            return None
        edges = (found.edge, found.staged_edge)
        tiles = prod(-(-n // edge) for n, edge in zip(extents, edges, strict=True))
        filled = inner * other / (tiles * prod(edges))
        total = self._staged_bytes + sum(a.nbytes for a in self._direct)
        if total / filled >= total + self._wasted(other, between):
            return None
        return found

    def _without_conflicts(
        self, vectors: list[int], extents: tuple[int, int], rows: tuple[int, int]
    ) -> TransposeParams | None:
        """Returns the parameters of a tile with these vector widths, or with narrower vectors.

        If the two widths differ and cause bank conflicts in shared memory, the larger width is
        halved until there are none. Returns None if there is no tile that holds at least one
        vector. `vectors` has the widths, `extents` the extents of the tile's two axes, and `rows`
        the wanted bytes of the tile along each.
        """
        while True:
            edges = self._edges(vectors, extents, rows)
            if edges is None:
                return None
            in_vectors = self._is_copy and self._is_measured and min(vectors) > 1
            most = BYTES_OF_COPIES if in_vectors else BYTES_IN_FLIGHT
            threads = self._threads(prod(edges), max(vectors), most)
            params = TransposeParams(threads, *vectors, *edges)
            tiles = {tile_of(params, a.nbytes, is_output=a.is_output) for a in self._staged}
            if vectors[0] == vectors[1] or not any(map(has_conflicts, tiles)):
                return params
            vectors[vectors.index(max(vectors))] //= 2

    def _edges(
        self, vectors: list[int], extents: tuple[int, int], rows: tuple[int, int]
    ) -> list[int] | None:
        """Returns the numbers of elements of the tile along its two axes, or None if there is no
        useful tile.

        `vectors` has the elements of a vector, `extents` the extents, and `rows` the wanted bytes,
        along each axis. If one axis is too short, the tile is longer along the other axis. A tile
        is not useful if shared memory has room only for so few elements that the wait at a barrier
        does not pay.
        """
        full = [
            max(min(row // n, WARP * v), v)
            for n, v, row in zip(self._largest, vectors, rows, strict=True)
        ]
        most = [max(power_of_two_at_least(n), v) for n, v in zip(extents, vectors, strict=True)]
        edges = [min(f, m) for f, m in zip(full, most, strict=True)]
        for k in (0, 1):
            missing = prod(full) // prod(edges)
            edges[k] = min(edges[k] * missing, most[k], MAX_EDGE)
        budget = self._device.max_smem_per_block // BLOCKS_PER_SM
        while prod(edges) * self._staged_bytes > budget:
            k = edges.index(max(edges))
            edges[k] //= 2
            if edges[k] < vectors[k]:
                return None
        return edges if prod(edges) >= MIN_TILE else None

    def _threads(self, elements: int, vector: int, most: int) -> int:
        threads = THREADS
        while threads < MAX_THREADS and self._loaded * elements // threads > most:
            threads *= 2
        return min(threads, elements // vector)

    def _wasted(self, other: int, between: int) -> int:
        """Returns the bytes per element that a kernel without a tile would read unnecessarily.

        Memory is read in sectors of 32 bytes. A kernel without a tile reads a sector again for each
        element of the sector, unless the sector is still in the cache. `other` and `between` are
        extents of axes (see `TileAxes`).
        """
        wasted = 0
        for access in self._staged:
            turns = min(SECTOR_BYTES // access.nbytes, other)
            if turns * between > CACHED_ELEMENTS:
                wasted += (turns - 1) * access.nbytes
        return wasted


# ----------------------------------------------------------------------
# Padding of tiles in shared memory, found by counting bank conflicts.
#
# A tile is written along its columns and read along its rows. `pad` unused elements follow each
# `group` rows, so element (r, c) is stored at
#
#     (r // group) * (group * columns + pad) + (r % group) * columns + c
#
# Source: the CUDA C++ Programming Guide. Shared memory has 32 banks of 4 bytes. Lanes of a warp
# that access different words of one bank wait for each other. Accesses of 8 bytes are served to
# half a warp at a time, those of 16 bytes to a quarter.

WARP = 32
WORD_BYTES = 4
# The access pattern of a tile repeats after a few warps.
_WARPS = 4


@record
class Tile:
    """The shape and access pattern of a tile in shared memory.

    `nbytes` is the size of an element. One thread writes `write` consecutive elements of a row, and
    the next thread writes the next elements. One thread reads `read` consecutive elements of a
    column, one at a time, and the next thread reads the next elements.
    """

    rows: int
    columns: int
    nbytes: int
    write: int
    read: int


@record
class Padding:
    """A layout of a tile in shared memory with `pad` unused elements after each `group` rows.

    The unused elements avoid bank conflicts. A thread writes `vector` elements at once.
    """

    group: int
    pad: int
    vector: int

    def place(self, tile: Tile, row: int, column: int) -> int:
        """Returns the position in shared memory, counted in elements, of an element of the tile."""
        block, rest = divmod(row, self.group)
        return block * (self.group * tile.columns + self.pad) + rest * tile.columns + column


@lru_cache(maxsize=1024)
def padding_for(tile: Tile) -> Padding:
    """Returns the padding of a tile in shared memory with the fewest bank conflicts.

    Of several such paddings, the one with the widest writes is chosen, then the one with the fewest
    unused elements.
    """
    return min(_candidates(tile), key=lambda p: (sum(_turns(tile, p)), -p.vector, p.pad / p.group))


def has_conflicts(tile: Tile) -> bool:
    """Returns whether a tile has bank conflicts in shared memory even with the best padding."""
    return _turns(tile, padding_for(tile)) != (1, 1)


def _candidates(tile: Tile) -> Iterable[Padding]:
    word = max(WORD_BYTES // tile.nbytes, 1)
    for vector in dict.fromkeys((tile.write, 1)):
        for group in dict.fromkeys((tile.read, 1)):
            for pad in dict.fromkeys((0, 1, word, tile.write)):
                if pad % vector == 0:
                    yield Padding(group, pad, vector)


def _turns(tile: Tile, padding: Padding) -> tuple[int, int]:
    """Returns how many words the busiest bank of shared memory must deliver for one write, and one
    read.

    A write or read is that of all threads of a warp. A number of 1 means no conflict.
    """
    across, down = tile.columns // tile.write, tile.rows // tile.read
    writes = reads = 1
    for first in range(0, _WARPS * WARP, WARP):
        lanes = range(first, first + WARP)
        written = [(q // across, q % across * tile.write) for q in lanes if q < across * tile.rows]
        read = [(q % down * tile.read, q // down) for q in lanes if q < down * tile.columns]
        places = [padding.place(tile, r, c) for r, c in written]
        writes = max(writes, turns(places, padding.vector * tile.nbytes, tile.nbytes))
        places = [padding.place(tile, r, c) for r, c in read]
        reads = max(reads, turns(places, tile.nbytes, tile.nbytes))
    return writes, reads


def turns(elements: Iterable[int], access: int, nbytes: int) -> int:
    """Returns how many different words the threads of a warp request from the busiest bank.

    A number of 1 means no bank conflict. Each thread moves `access` bytes, beginning with one
    element. `elements` are the positions of these first elements, counted in elements of `nbytes`
    bytes.
    """
    begins = [e * nbytes for e in elements]
    share = WARP if access <= WORD_BYTES else WARP * WORD_BYTES // access
    most = 1
    for k in range(0, len(begins), share):
        words = {
            w
            for begin in begins[k : k + share]
            for w in range(begin // WORD_BYTES, -(-(begin + access) // WORD_BYTES))
        }
        banks = [w % WARP for w in words]
        most = max([most, *map(banks.count, set(banks))])
    return most
