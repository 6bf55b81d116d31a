"""The part of a buffer that a name refers to, as a box in the axes of the tensor that owns the
buffer."""

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
# The meaning of one axis of a tensor: for each of the axes that it merges, outermost first, (axis
# of the owner, elements of it per step, steps).
Owned = tuple[tuple[int, int, int], ...]
# The way in which a box was cut, part by part: the meaning of the axis, and how it was divided.
Grid = tuple[tuple[Owned, Hashable], ...]


def whole_box(shape: Iterable[int]) -> Box:
    """Returns the box of all elements of a buffer of this shape."""
    return tuple((0, n) for n in shape)


def whole_axes(shape: Iterable[int]) -> tuple[Owned, ...]:
    """Returns the axes of a name for the whole buffer: each counts the elements of one axis."""
    return tuple(((k, 1, n),) for k, n in enumerate(shape))


def cut(box: Box, owned: Owned, start: int, length: int) -> tuple[Box, Owned] | None:
    """Returns the part of a box that is a range along an axis, and the new meaning of that axis.

    None if the part is no box: a range over steps of an inner axis that spans several steps of an
    outer axis.
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
    """Returns the meaning of the axes of a reshape, in terms of the axes of its operand."""
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
    """Divides the elements that all steps count over axes of these sizes."""
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
    """Returns the text of a box, such as `[2:4, :]`; "" for the whole buffer of shape `whole`."""
    sizes = tuple(whole)
    if all(b == (0, n) for b, n in zip(box, sizes, strict=True)):
        return ""
    cuts = (
        ":" if (start, n) == (0, size) else str(start) if n == 1 else f"{start}:{start + n}"
        for (start, n), size in zip(box, sizes, strict=True)
    )
    return f"[{', '.join(cuts)}]"


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Returns the rest of a box without the covers, as boxes that do not overlap."""
    left = [box]
    for cover in covers:
        left = [piece for one in left for piece in _subtract(one, cover)]
        if not left:
            break
    return left


def _subtract(box: Box, cover: Box) -> list[Box]:
    """Returns the rest of a box without one cover, as boxes that do not overlap."""
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
    """A read or write of a part of a buffer. `stream` and `tick` are its end; None while it is in
    flight."""

    site: Site
    is_write: bool
    box: Box
    began: Hashable
    stream: Hashable | None
    tick: int
    communication: InFlight[Any] | None

    def is_before(self, clock: Clock) -> bool:
        """Whether the use ends before everything at this clock."""
        return self.stream is not None and clock.get(self.stream, 0) >= self.tick


@dataclass(eq=False, slots=True)
class Cell:
    """The last write of one box and the reads since. Earlier uses are ordered before these."""

    write: Use | None = None
    reads: list[Use] = field(default_factory=list[Use])
    # Whether all of the box has been written; else the number of elements of each written part.
    is_written: bool = False
    parts: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, use: Use) -> None:
        """Records a use. A later read of a stream replaces its earlier one."""
        if use.is_write:
            self.write, self.reads = use, []
        else:
            # A use that is ordered after the later read of a stream is also after its earlier ones.
            self.reads = [r for r in self.reads if r.stream is None or r.stream != use.began]
            self.reads.append(use)


@dataclass(eq=False, slots=True)
class TrackedBuffer:
    """A buffer: its owner, the stream that allocated it (None for the caller's), and its uses."""

    owner: TensorView
    shape: tuple[int, ...]
    home: Hashable
    made: Use | None
    is_filled: bool
    cells: dict[Grid, dict[Box, Cell]] = field(default_factory=dict[Grid, dict[Box, Cell]])
    freed: Site | None = None

    @property
    def is_callers(self) -> bool:
        """Whether the caller owns it."""
        return self.made is None

    def uses(self) -> Iterator[Use]:
        """Yields the uses that later uses are compared with."""
        for cells in self.cells.values():
            for cell in cells.values():
                if cell.write is not None:
                    yield cell.write
                yield from cell.reads

    def unwritten(self, box: Box) -> list[Box]:
        """Returns the boxes within `box` that are unwritten; none if parts written at unknown
        positions may cover them."""
        cells = [(at, cell) for cells in self.cells.values() for at, cell in cells.items()]
        left = uncovered(box, (at for at, cell in cells if cell.is_written))
        somewhere = sum(n for _, cell in cells for n in cell.parts.values())
        return left if sum(math.prod(n for _, n in at) for at in left) > somewhere else []

    def text(self, box: Box) -> str:
        """Returns a box of the buffer as text: `T3[2:4, :]`."""
        return self.owner.label + box_text(box, self.shape)


# ----------------------------------------------------------------------
# The part of a buffer that a name refers to.


class NamedRegion(Generic[N, A]):
    """The part of a buffer that a name refers to.

    `BufferRegion` is the part on one rank, `ShardRegion` (`hostir.analysis.rank_regions`) that on
    each of all ranks. `shape` is the shape of the name, in numbers of one rank or arrays over
    ranks. `axes` has for each axis of the name the elements of the buffer that it counts; None if
    unknown.
    """

    __slots__ = ()

    shape: tuple[N, ...]
    axes: tuple[A | None, ...]

    def having(self, shape: tuple[N, ...], axes: tuple[A | None, ...]) -> Self:
        """Returns a name for the same elements with other axes."""
        raise NotImplementedError

    def chunk(self, axis: int, start: N, length: N, among: Hashable) -> Self:
        """Returns a range along an axis. `among` identifies the way in which the axis
        was divided."""
        raise NotImplementedError

    def element(self, axis: int, index: N) -> Self:
        """Returns element `index` along an axis. The result lacks the axis."""
        found, one = self.chunk(axis, index, cast("N", 1), 0), slice(axis, axis + 1)
        shape, axes = [*found.shape], [*found.axes]
        del shape[one], axes[one]
        return found.having(tuple(shape), tuple(axes))

    def part(
        self, part: Part, value: Callable[[Scalar], N], check: Callable[[Part, N, N], N]
    ) -> Self:
        """Returns the part that an op names.

        `check(part, index, limit)` reports an index that is not below `limit`, and returns the
        index to use.
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
        """Returns the region of a view op's result. `kept` maps each unchanged axis of the result
        to the operand's."""
        shape = tuple(self.shape[kept[c]] if c in kept else n for c, n in enumerate(sizes))
        axes = tuple(self.axes[kept[c]] if c in kept else None for c in range(len(shape)))
        return self.having(shape, axes)


@dataclass(frozen=True, slots=True)
class BufferRegion(NamedRegion[int, Owned]):
    """The part of a buffer that a tensor names on one rank.

    `shape` is the tensor's. `axes` has for each axis the elements of the buffer that it counts;
    None if unknown. Two boxes with the same `grid` are equal or disjoint. With `parts`, the tensor
    names only some elements of the box, and `parts` identifies them.
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
        """Whether it has no element."""
        # An axis of one element that is no axis of the buffer may be cut to zero elements.
        return 0 in self.shape or any(n == 0 for _, n in self.box)

    def having(self, shape: tuple[int, ...], axes: tuple[Owned | None, ...]) -> BufferRegion:
        """Returns a name for the same elements with other axes."""
        return BufferRegion(self.buffer, self.box, shape, axes, self.grid, self.parts)

    def chunk(self, axis: int, start: int, length: int, among: Hashable) -> BufferRegion:
        """Returns a range along an axis. `among` identifies the way in which the axis
        was divided."""
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
