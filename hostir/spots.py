"""Which part of which tensor a name means, on all ranks at once, in local and in global terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, ParallelType
from hostir.effects import Part, Shows
from hostir.ops import stream_cut
from hostir.rank_values import PerRank, RankValues, least, np
from multidevice.communication import position_map
from multidevice.placement import placement
from multidevice.sharding import local_sizes


@dataclass(frozen=True)
class Spot:
    """A part of the local shard of `owner`: per axis of the owner where it starts and how long it
    is; `axes` has the owner's axis of each axis of the name, None for one that a view made."""

    owner: TensorView
    starts: tuple[PerRank, ...]
    lengths: tuple[PerRank, ...]
    axes: tuple[int | None, ...]
    shape: tuple[PerRank, ...]

    def elements(self, expanded: Sequence[int] = ()) -> PerRank:
        """Return how many elements memory holds: one along expanded axes."""
        return math.prod(least(n, 1) if a in expanded else n for a, n in enumerate(self.shape))

    def cut(self, axis: int, start: PerRank, length: PerRank, *, drop: bool) -> Spot:
        owner = self.axes[axis]
        starts, lengths = list(self.starts), list(self.lengths)
        if owner is not None:
            starts[owner], lengths[owner] = starts[owner] + start, length
        keep = slice(axis + 1 if drop else axis, None)
        shape = (*self.shape[:axis], *(() if drop else (length,)), *self.shape[axis + 1 :])
        axes = (*self.axes[:axis], *self.axes[keep])
        return Spot(self.owner, tuple(starts), tuple(lengths), axes, shape)


class Shapes:
    """Local and global shapes of tensors, and where a rank's shard lies in the whole."""

    def __init__(self, values: RankValues) -> None:
        self._values = values
        self._local: dict[TensorView, tuple[int, ...]] = {}
        self._whole: dict[TensorView, tuple[int, ...]] = {}
        self._offsets: dict[TensorView, tuple[PerRank, ...]] = {}

    def whole(self, tv: TensorView) -> tuple[int, ...]:
        if tv not in self._whole:
            self._whole[tv] = tuple(int(self._values.of(x)) for x in tv.shape())
        return self._whole[tv]

    def local(self, tv: TensorView) -> tuple[int, ...]:
        if tv not in self._local:
            self._local[tv] = local_sizes(tv, self.whole(tv))
        return self._local[tv]

    def spot(self, tv: TensorView) -> Spot:
        shape = self.local(tv)
        return Spot(tv, (0,) * len(shape), shape, tuple(range(len(shape))), shape)

    def step(self, tv: TensorView, index: Scalar) -> Spot:
        """Return the part of a tensor that a buffer for the block of one step holds."""
        axis, chunks = stream_cut(tv)
        return self._part(self.spot(tv), Part(axis, index, chunks), _ignored)

    def offsets(self, tv: TensorView) -> tuple[PerRank, ...]:
        """Return where, along each axis, the shards of the ranks begin."""
        if tv not in self._offsets:
            self._offsets[tv] = tuple(self._axis_offsets(tv))
        return self._offsets[tv]

    def _axis_offsets(self, tv: TensorView) -> list[PerRank]:
        found: list[PerRank] = []
        for cuts, size in zip(placement(tv, DEVICE_TYPES), self.local(tv), strict=True):
            block: PerRank = 0
            for cut in cuts:
                block = block * cut.count + self._coordinates(tv, cut.ptype)
            found.append(block * size)
        return found

    def _coordinates(self, tv: TensorView, ptype: ParallelType) -> PerRank:
        mesh = tv.mesh
        assert mesh is not None, f"{tv} is cut without a mesh"
        return np.asarray([mesh.coordinate(int(r), ptype) for r in self._values.ranks])

    # ------------------------------------------------------------ names
    def named(
        self, spot: Spot, effect: Shows, op: Op, out_of_range: Callable[[Part, PerRank, int], None]
    ) -> Spot:
        """Return what `effect.out` names."""
        if effect.part is not None:
            return self._part(spot, effect.part, out_of_range)
        return self._view(spot, op) if isinstance(op, TensorOp) else spot

    def _part(
        self, spot: Spot, part: Part, out_of_range: Callable[[Part, PerRank, int], None]
    ) -> Spot:
        size, index = spot.shape[part.axis], self._values.of(part.index)
        if part.chunks is None:
            index = np.where(size == 1, 0, index) if isinstance(size, np.ndarray) else index
            index = 0 if isinstance(size, int) and size == 1 else index
            out_of_range(part, index, size)
            return spot.cut(part.axis, index, 1, drop=True)
        chunks = int(self._values.of(part.chunks))
        out_of_range(part, index, chunks)
        step = -(-size // chunks)
        start = least(index * step, size)
        return spot.cut(part.axis, start, least(step, size - start), drop=False)

    def _view(self, spot: Spot, op: TensorOp) -> Spot:
        kept = {c: p for p, c in position_map(op).items()}
        axes: list[int | None] = []
        shape: list[PerRank] = []
        for c, size in enumerate(self.local(op.out_tensor)):
            p = kept.get(c)
            axes.append(None if p is None else spot.axes[p])
            shape.append(size if p is None else spot.shape[p])
        return Spot(spot.owner, spot.starts, spot.lengths, tuple(axes), tuple(shape))


def device_cuts(tv: TensorView) -> tuple[frozenset[ParallelType], ...]:
    """Return the device types that cut each axis of a tensor."""
    return tuple(frozenset(c.ptype for c in cuts) for cuts in placement(tv, DEVICE_TYPES))


def _ignored(part: Part, index: PerRank, limit: int) -> None:
    """An allocation is no slice that could be out of range."""
