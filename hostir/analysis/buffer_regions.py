"""The part of a buffer that a tensor refers to, as a box (a range along each axis) of the tensor
that owns the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, cast

from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Scalar
from hostir.analysis.clocks import Clock
from hostir.analysis.rank_values import least, np
from hostir.analysis.walker import InFlight
from hostir.ir.diagnostics import Site
from hostir.ir.effects import Part

# A number on one rank, or one per rank; the meaning of an axis of a name.
N = TypeVar("N")
A = TypeVar("A")
# (start, length) along each axis of the owner of a buffer.
Box = tuple[tuple[int, int], ...]
# The meaning of one axis of a tensor: for each buffer axis that the axis merges, outermost first,
# (buffer axis, elements per index, number of indices).
Owned = tuple[tuple[int, int, int], ...]
# The way in which a box was cut, part by part: the meaning of the axis, and how it was divided.
Grid = tuple[tuple[Owned, Hashable], ...]


def whole_box(shape: Iterable[int]) -> Box:
    """Returns the box that contains all elements of a buffer of this shape."""
    return tuple((0, n) for n in shape)


def whole_axes(shape: Iterable[int]) -> tuple[Owned, ...]:
    """Returns the meaning of the axes of a tensor that refers to a whole buffer: each axis counts
    the elements of one buffer axis.

    The meaning of an axis is a tuple of (buffer axis, elements per index, number of indices), with
    one entry per merged buffer axis.
    """
    return tuple(((k, 1, n),) for k, n in enumerate(shape))


def cut(box: Box, owned: Owned, start: int, length: int) -> tuple[Box, Owned] | None:
    """Restricts a box to the range `start` to `start + length` along one axis of a tensor. Returns
    the smaller box and the new meaning of that axis.

    `owned` is the meaning of the axis: (buffer axis, elements per index, number of indices) for
    each buffer axis that the axis merges. Returns None if the range is no box: such a range crosses
    from one index of an outer merged axis to the next.
    """
    kept: list[tuple[int, int, int]] = []
    inside = math.prod(count for _, _, count in owned)
    for owner, unit, count in owned:
        inside = inside // count if count else 0
        if inside and length and start % inside + length <= inside:
            at, n, start = start // inside, 1, start % inside
        elif inside and start % inside == 0 and length % inside == 0:
            at, n, start, length = start // inside, length // inside, 0, inside
        else:
            return None
        first, whole = box[owner]
        if n != count:
            if whole != unit * count:
                return None
            box = (*box[:owner], (first + at * unit, n * unit), *box[owner + 1 :])
        if n != 1:
            kept.append((owner, unit, n))
    return box, tuple(kept)


def reshaped(
    shape: Sequence[int], owned: Sequence[Owned | None], out: Sequence[int]
) -> list[Owned | None]:
    """Returns the meaning of each axis of a reshape's result, in terms of the axes of the buffer.

    `shape` and `owned` are the sizes and the meanings of the operand's axes, `out` the sizes of the
    result. The meaning of an axis is (buffer axis, elements per index, number of indices) for each
    merged buffer axis.
    """
    found: list[Owned | None] = [None] * len(out)
    i = j = 0
    while i < len(shape) and j < len(out):
        if (shape[i] == 1) != (out[j] == 1):
            if out[j] == 1:
                found[j] = ()
            i, j = i + (shape[i] == 1), j + (out[j] == 1)
            continue
        first, left, inside, outside = i, j, shape[i], out[j]
        while inside != outside:
            if inside < outside and i + 1 < len(shape):
                i += 1
                inside *= shape[i]
            elif inside > outside and j + 1 < len(out):
                j += 1
                outside *= out[j]
            else:
                return found
        i, j = i + 1, j + 1
        sources = owned[first:i]
        if None not in sources:
            steps = [step for source in sources for step in source or ()]
            found[left:j] = _dealt(steps, out[left:j])
    found[j:] = [() if n == 1 else None for n in out[j:]]
    return found


def _dealt(steps: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> list[Owned | None]:
    """Divides merged buffer axes over new axes with these `sizes`. Returns the meaning of each new
    axis; None if unknown.

    `steps` has (buffer axis, elements per index, number of indices) for each merged axis, outermost
    first.
    """
    rest = list(reversed(steps))
    found: list[Owned | None] = []
    for size in sizes:
        mine: list[tuple[int, int, int]] = []
        while size > 1 and rest:
            owner, unit, count = rest.pop()
            if size % count == 0:
                mine.append((owner, unit, count))
                size //= count
            elif count % size == 0:
                mine.append((owner, unit * (count // size), size))
                rest.append((owner, unit, count // size))
                size = 1
            else:
                return [*found, *[None] * (len(sizes) - len(found))]
        found.append(tuple(mine))
    return found


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes have an element in common."""
    return all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True))


def box_text(box: Box, whole: Iterable[int]) -> str:
    """Returns the text of a box, such as `[2:4, :]`. Returns "" if the box is the whole buffer of
    shape `whole`."""
    sizes = tuple(whole)
    if all(b == (0, n) for b, n in zip(box, sizes, strict=True)):
        return ""
    cuts = (
        ":" if (start, n) == (0, size) else str(start) if n == 1 else f"{start}:{start + n}"
        for (start, n), size in zip(box, sizes, strict=True)
    )
    return f"[{', '.join(cuts)}]"


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Returns the elements of a box that no box in `covers` contains, as boxes that do not
    overlap."""
    left = [box]
    for cover in covers:
        left = [piece for one in left for piece in _subtract(one, cover)]
        if not left:
            break
    return left


def _subtract(box: Box, cover: Box) -> list[Box]:
    """Returns the elements of a box that are not in `cover`, as boxes that do not overlap."""
    if not overlap(box, cover) or math.prod(n for _, n in box) == 0:
        return [box]
    pieces: list[Box] = []
    for axis, ((i, n), (j, m)) in enumerate(zip(box, cover, strict=True)):
        before, after = (i, j - i), (j + m, i + n - j - m)
        for piece in (before, after):
            if piece[1] > 0:
                pieces.append((*box[:axis], piece, *box[axis + 1 :]))
        start = max(i, j)
        kept = (start, min(i + n, j + m) - start)
        box = (*box[:axis], kept, *box[axis + 1 :])
    return pieces


# ----------------------------------------------------------------------
# The uses of buffers that later uses must be compared with.


@dataclass(eq=False, slots=True)
class Use:
    """A read or write of a part of a buffer.

    `began` is the stream on which the use began. `stream` and `tick` are the position at which the
    use ended; `stream` is None while a communication is in flight.
    """

    site: Site
    is_write: bool
    box: Box
    began: Hashable
    stream: Hashable | None
    tick: int
    communication: InFlight[Any] | None

    def is_before(self, clock: Clock) -> bool:
        """Whether the use ended before everything that is ordered after `clock`."""
        return self.stream is not None and clock.get(self.stream, 0) >= self.tick


@dataclass(eq=False, slots=True)
class Cell:
    """The last write of one box, and the reads since this write. Earlier uses are ordered before
    the last write or were reported."""

    write: Use | None = None
    reads: list[Use] = field(default_factory=list[Use])
    # Whether all of the box has been written; else the number of elements of each written part.
    is_written: bool = False
    parts: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, use: Use) -> None:
        """Records a use. A write replaces all earlier uses. A read replaces the earlier read of the
        same stream."""
        if use.is_write:
            self.write, self.reads = use, []
        else:
            # A use that is ordered after the later read of a stream is also after its earlier ones.
            self.reads = [r for r in self.reads if r.stream is None or r.stream != use.began]
            self.reads.append(use)


@dataclass(eq=False, slots=True)
class TrackedBuffer:
    """A buffer and its uses.

    `owner` is the tensor that owns the buffer. `home` is the stream that allocated the buffer.
    `made` is the allocation, or None if the caller passed the buffer.
    """

    owner: TensorView
    shape: tuple[int, ...]
    home: Hashable
    made: Use | None
    is_filled: bool
    cells: dict[Grid, dict[Box, Cell]] = field(default_factory=dict[Grid, dict[Box, Cell]])
    freed: Site | None = None

    @property
    def is_callers(self) -> bool:
        """Whether the caller owns the buffer."""
        return self.made is None

    def uses(self) -> Iterator[Use]:
        """Yields the uses with which later uses are compared."""
        for cells in self.cells.values():
            for cell in cells.values():
                if cell.write is not None:
                    yield cell.write
                yield from cell.reads

    def unwritten(self, box: Box) -> list[Box]:
        """Returns the parts of `box` that were never written, as boxes.

        Returns none if writes whose positions are unknown may cover all these parts.
        """
        cells = [(at, cell) for cells in self.cells.values() for at, cell in cells.items()]
        left = uncovered(box, (at for at, cell in cells if cell.is_written))
        somewhere = sum(n for _, cell in cells for n in cell.parts.values())
        return left if sum(math.prod(n for _, n in at) for at in left) > somewhere else []

    def text(self, box: Box) -> str:
        """Returns a box of the buffer as text, such as `T3[2:4, :]`."""
        return self.owner.label + box_text(box, self.shape)


# ----------------------------------------------------------------------
# The part of a buffer that a name refers to.


class NamedRegion(Generic[N, A]):
    """The part of a buffer that a tensor refers to.

    `BufferRegion` describes the part on one rank, and `ShardRegion`
    (`hostir.analysis.rank_regions`) the parts on all ranks. `shape` is the shape of the tensor, in
    numbers of one rank or in arrays over ranks. `axes` has for each axis of the tensor the elements
    of the buffer that the axis counts; None if unknown.
    """

    __slots__ = ()

    shape: tuple[N, ...]
    axes: tuple[A | None, ...]

    def having(self, shape: tuple[N, ...], axes: tuple[A | None, ...]) -> Self:
        """Returns a region with the same elements, but with another shape and other axes."""
        raise NotImplementedError

    def chunk(self, axis: int, start: N, length: N, among: Hashable) -> Self:
        """Returns the region of the range `start` to `start + length` along an axis. `among`
        identifies how the axis was divided, such as the number of chunks."""
        raise NotImplementedError

    def element(self, axis: int, index: N) -> Self:
        """Returns the region of element `index` along an axis. The result lacks this axis."""
        found, one = self.chunk(axis, index, cast("N", 1), 0), slice(axis, axis + 1)
        shape, axes = [*found.shape], [*found.axes]
        del shape[one], axes[one]
        return found.having(tuple(shape), tuple(axes))

    def part(
        self, part: Part, value: Callable[[Scalar], N], check: Callable[[Part, N, N], N]
    ) -> Self:
        """Returns the region of a `Part` of the tensor.

        `value` evaluates scalars. `check(part, index, limit)` reports an index that is not below
        `limit`, and returns the index to use.
        """
        size: Any = self.shape[part.axis]
        chunks: Any = None if part.chunks is None else value(part.chunks)
        index: Any = value(part.index)
        if chunks is None:
            # An axis of one element has the same element at each step.
            if isinstance(size, np.ndarray):
                index = np.where(size == 1, 0, index)
            elif size == 1:
                index = 0
            return self.element(part.axis, check(part, index, self.shape[part.axis]))
        index = check(part, index, chunks)
        step = -(-size // chunks)
        start = least(index * step, size)
        return self.chunk(part.axis, start, least(step, size - start), chunks)

    def viewed(self, kept: Mapping[int, int], sizes: Sequence[N]) -> Self:
        """Returns the region of a view op's result.

        `kept` maps each axis of the result that the view does not change to the axis of the
        operand. `sizes` is the result's shape.
        """
        shape = tuple(self.shape[kept[c]] if c in kept else n for c, n in enumerate(sizes))
        axes = tuple(self.axes[kept[c]] if c in kept else None for c in range(len(shape)))
        return self.having(shape, axes)


@dataclass(frozen=True, slots=True)
class BufferRegion(NamedRegion[int, Owned]):
    """The part of a buffer that a tensor refers to, on one rank.

    `shape` is the shape of the tensor. `axes` has for each axis the elements of the buffer that the
    axis counts; None if unknown. Two boxes with the same `grid` are equal or disjoint. If `parts`
    is not empty, the tensor refers to only some elements of the box, and `parts` identifies these
    elements.
    """

    buffer: TrackedBuffer
    box: Box
    shape: tuple[int, ...]
    axes: tuple[Owned | None, ...]
    grid: Grid = ()
    parts: tuple[Hashable, ...] = ()

    @staticmethod
    def whole(buffer: TrackedBuffer) -> BufferRegion:
        """Returns the region of the whole buffer."""
        return BufferRegion(buffer, whole_box(buffer.shape), buffer.shape, whole_axes(buffer.shape))

    @property
    def is_empty(self) -> bool:
        """Whether the region has no element."""
        # An axis of one element that is no axis of the buffer may be cut to zero elements.
        return 0 in self.shape or any(n == 0 for _, n in self.box)

    def having(self, shape: tuple[int, ...], axes: tuple[Owned | None, ...]) -> BufferRegion:
        """Returns a region with the same elements, but with another shape and other axes."""
        return BufferRegion(self.buffer, self.box, shape, axes, self.grid, self.parts)

    def chunk(self, axis: int, start: int, length: int, among: Hashable) -> BufferRegion:
        """Returns the region of the range `start` to `start + length` along an axis. `among`
        identifies how the axis was divided, and is added to the grid."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        owned = self.axes[axis]
        found = None if owned is None else cut(self.box, owned, start, length)
        box, left = found or (self.box, None)
        axes = (*self.axes[:axis], left, *self.axes[axis + 1 :])
        if found is None:
            parts = (*self.parts, (axis, start, length))
            return BufferRegion(self.buffer, box, shape, axes, self.grid, parts)
        return BufferRegion(
            self.buffer, box, shape, axes, (*self.grid, (owned or (), among)), self.parts
        )
