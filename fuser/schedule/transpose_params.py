"""The heuristic of the transpose scheduler: which axes a tile has, how large it is, and when it
pays."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fuser.ir.fusion import Fusion
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.tensor import TensorView
from fuser.schedule import pointwise
from fuser.schedule.banks import WARP, Tile, has_conflicts
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import Access, Space
from fuser.schedule.pointwise import PointwiseParams, space_of
from fuser.schedule.vectorize import VectorWidths, power_of_two_at_least
from fuser.support.device import DeviceInfo
from fuser.support.record import record

# Bytes of a tile's row in global memory, of the widest tensor, along both edges, and how many tiles
# each multiprocessor has at least: in general, and before that of a copy in words. Measured on an
# H200, copies, bfloat16 and float32 in us: 128 x 128 bytes 15.5 and 28.0 (8192 x 1536), 2.47 and
# 3.74 (2048 x 384); two lines of the cache along the staged edge 14.8 and 27.1, 2.24 and 3.48. Of
# two inputs they take 12 % more.
ROWS = (((128, 128), 1), ((128, 64), 1), ((64, 64), 0))
ROWS_OF_COPIES = (((256, 256), 20), ((128, 256), 4), ((64, 256), 1))
# Of elements of these sizes; and of all others.
COPIED_BYTES = (2, 4)
ROWS_OF_OTHER_COPIES = (((256, 256), 32),)
SECTOR_BYTES = 32
THREADS = 128
MAX_THREADS = 512
MAX_EDGE = 1024
MIN_TILE = 256
# Bytes that a thread loads before the barrier; with more, the block has more threads. The second
# is of copies in words: with 128 they took up to 7 % longer.
BYTES_IN_FLIGHT, BYTES_OF_COPIES = 128, 32
# Blocks that the shared memory of a multiprocessor holds at least.
BLOCKS_PER_SM = 4
# Elements between whose first and last use a line stays in the cache of one multiprocessor: on an
# H200 rows of 32 and 64 elements, 512 and 1024 here, took 1.3 times as long without a tile.
CACHED_ELEMENTS = 256


@record
class TransposeParams:
    """What the transpose scheduler decides: a tile of `edge` elements along the direct tensors'
    innermost axis and of `staged_edge` along the staged ones', and the vectors along each."""

    threads: int
    vector: int
    staged_vector: int
    edge: int
    staged_edge: int

    def is_near(self, other: object) -> bool:
        """Whether kernels of both differ in nothing that a small input would notice."""
        return (
            isinstance(other, TransposeParams)
            and self.vector == other.vector
            and self.staged_vector == other.staged_vector
        )

    def is_alike(self, other: object) -> bool:
        """Whether a kernel of the other is as fast: tiles of other extents may be mostly empty."""
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
    """The axes of a tile, as runs of the reference's logical positions: `inner` that of the direct
    tensors, `other` that of the `staged` ones, which pass through shared memory; `outer` are all
    other axes. `between` are the runs inside of `other` in the direct tensors' order."""

    outer: tuple[int, ...]
    other: tuple[int, ...]
    inner: tuple[int, ...]
    between: tuple[int, ...]
    staged: tuple[Access, ...]
    direct: tuple[Access, ...]


def tile_of(params: TransposeParams, nbytes: int, *, is_output: bool) -> Tile:
    """Return how threads go over the tile of a staged tensor: it is written as its source lies."""
    direct, staged = (params.edge, params.vector), (params.staged_edge, params.staged_vector)
    source, target = (direct, staged) if is_output else (staged, direct)
    return Tile(target[0], source[0], nbytes, source[1], target[1])


# ------------------------------------------------------------------ what a tile is made of
def may_have_two_orders(fusion: Fusion) -> bool:
    """Whether a permutation or a declared memory order stands between inputs and outputs."""
    ends = (v for v in (*fusion.inputs, *fusion.outputs) if isinstance(v, TensorView))
    return any(tv.domain.allocation for tv in ends) or any(
        isinstance(op, LoadStoreOp) and op.out.domain.root for op in fusion.exprs
    )


def find_tile(fusion: Fusion, space: Space) -> TileAxes | str:
    """Return the axes of the tile, or why there is none. The kernel computes along the axis of
    most bytes, outputs before inputs: the fewer bytes pass through shared memory."""
    if fusion.aliases:
        return "an output is written into an input"
    along = accesses_along(space)
    if len(along) < 2:
        hidden = next((a.tv for a in space.accesses if a.order is None), None)
        but = f", but {hidden}, which a view reads at other indices" if hidden is not None else ""
        return f"all inputs and outputs lie in one order{but}"
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
    """Return the tensors that have all axes, by the innermost one in memory."""
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
    """Return what chooses a tile for an input class, or else what the pointwise scheduler would."""
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
    """Chooses tiles for the input classes of one fusion."""

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
        """Return the tile for these extents, None where it would cost more than it saves."""
        extents = (inner, other)
        vectors = [w.of(facts, n) for w, n in zip(self._widths, extents, strict=True)]
        in_words = self._is_copy and min(vectors) > 1
        copies = ROWS_OF_COPIES if self._is_measured else ROWS_OF_OTHER_COPIES
        found: TransposeParams | None = None
        for rows, least in (copies if in_words else ()) + ROWS:
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
        """Return the tile of these vectors, or of narrower ones where vectors of two widths would
        meet in the banks of shared memory."""
        while True:
            edges = self._edges(vectors, extents, rows)
            if edges is None:
                return None
            in_words = self._is_copy and self._is_measured and min(vectors) > 1
            most = BYTES_OF_COPIES if in_words else BYTES_IN_FLIGHT
            threads = self._threads(prod(edges), max(vectors), most)
            params = TransposeParams(threads, *vectors, *edges)
            tiles = {tile_of(params, a.nbytes, is_output=a.is_output) for a in self._staged}
            if vectors[0] == vectors[1] or not any(map(has_conflicts, tiles)):
                return params
            vectors[vectors.index(max(vectors))] //= 2

    def _edges(
        self, vectors: list[int], extents: tuple[int, int], rows: tuple[int, int]
    ) -> list[int] | None:
        """Return the extents of the tile, for rows of so many bytes. What an axis is too short for,
        the other one gets; None where shared memory holds no tile worth its barrier."""
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
        """Return the bytes, per element, that sectors of staged tensors cost beyond their contents
        in loops along the direct tensors: each is moved again for every element of it, unless it is
        still in the cache."""
        wasted = 0
        for access in self._staged:
            turns = min(SECTOR_BYTES // access.nbytes, other)
            if turns * between > CACHED_ELEMENTS:
                wasted += (turns - 1) * access.nbytes
        return wasted
