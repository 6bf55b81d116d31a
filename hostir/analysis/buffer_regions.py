"""Describes which elements of a buffer a tensor refers to, so that two accesses can be compared.

The elements form a box: a range of indices along each axis of the tensor that owns the buffer.
"""

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
    """Returns the box that contains all elements of a buffer of this `shape`. Along each axis, its
    range begins at 0 and has the size of the axis."""
    return tuple((0, n) for n in shape)


def whole_axes(shape: Iterable[int]) -> tuple[Owned, ...]:
    """Returns, for a tensor that refers to a whole buffer, the buffer axis in which each tensor
    axis is stored: tensor axis k is buffer axis k.

    Each entry is a tuple with one triple: (buffer axis, buffer elements per index of the tensor
    axis, number of indices). Only a reshape that merges buffer axes into one tensor axis makes
    entries with several triples.
    """
    return tuple(((k, 1, n),) for k, n in enumerate(shape))


def cut(box: Box, owned: Owned, start: int, length: int) -> tuple[Box, Owned] | None:
    """Selects the indices from `start` to `start + length` (exclusive) of one tensor axis, and
    computes which elements of the buffer remain.

    - `box`: the range of elements along each buffer axis to which the tensor refers.
    - `owned`: the buffer axes in which the tensor axis is stored, outermost first, each as a triple
      (buffer axis, buffer elements per index, number of indices). There are several if the tensor
      axis merges buffer axes.

    Returns the smaller box and the triples of the shortened axis. Returns None if the remaining
    elements do not form a box. For example, elements 0 to 3 of a merged [2, 3] axis are one row and
    the first element of the next row.
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
    """Returns, for each axis of a reshape's result, the buffer axes in which the axis is stored.
    The result has the same buffer as the operand.

    `shape` has the sizes of the operand's axes, `owned` the buffer axes of each of these axes, and
    `out` the sizes of the result's axes. The buffer axes of one axis are triples (buffer axis,
    buffer elements per index, number of indices), outermost first. For an axis whose buffer axes
    are unknown, `owned` and the result have None.
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
    """Splits a merged axis into the axes of a reshape's result, and returns the buffer axes in
    which each of these axes is stored.

    - `steps`: the buffer axes in which the merged axis is stored, outermost first, each as a triple
      (buffer axis, buffer elements per index, number of indices).
    - `sizes`: the sizes of the result's axes.

    The result has such triples for each axis. Each axis takes its indices from the outermost buffer
    axis that is not used up. If the remaining indices of this buffer axis cannot be divided evenly,
    the axis and all later axes are None (unknown).
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
    """Returns whether the boxes `a` and `b` of one buffer have an element in common. A box is a
    range of indices along each axis.
    """
    return all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True))


def box_text(box: Box, whole: Iterable[int]) -> str:
    """Returns a box, a range of indices along each axis of a buffer, as text for messages, such as
    `[2:4, :]`. Returns "" if the box is the whole buffer, whose shape is `whole`.
    """
    sizes = tuple(whole)
    if all(b == (0, n) for b, n in zip(box, sizes, strict=True)):
        return ""
    cuts = (
        ":" if (start, n) == (0, size) else str(start) if n == 1 else f"{start}:{start + n}"
        for (start, n), size in zip(box, sizes, strict=True)
    )
    return f"[{', '.join(cuts)}]"


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Returns the elements of `box` that no box in `covers` contains, as a list of boxes that do
    not overlap. A box is a range of indices along each axis of a buffer. An empty list means that
    `covers` contains every element.
    """
    left = [box]
    for cover in covers:
        left = [piece for one in left for piece in _subtract(one, cover)]
        if not left:
            break
    return left


def _subtract(box: Box, cover: Box) -> list[Box]:
    """Returns the elements of `box` that are not in the box `cover`, as a list of boxes that do not
    overlap. A box is a range of indices along each axis of a buffer.
    """
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
    """One read or write of a part of a buffer, which the race check compares with later reads and
    writes.

    - `site`: the op and the iteration of its loops; `is_write`: whether the op writes; `box`: the
      elements, as a range along each axis.
    - `began`: the stream on which the access began.
    - `stream`, `tick`: the stream on which the access ended, and how many ops the program had put
      on that stream by then. `stream` is None while the access has not ended, because it belongs to
      a communication that has not ended.
    - `communication`: the communication that reads or writes the buffer, or None for any other op.
    """

    site: Site
    is_write: bool
    box: Box
    began: Hashable
    stream: Hashable | None
    tick: int
    communication: InFlight[Any] | None

    def is_before(self, clock: Clock) -> bool:
        """Returns whether this read or write has certainly ended before the next op of a stream
        begins. `clock` is the vector clock of the stream: how many ops of every stream have ended
        by then. Returns False while the access belongs to a communication that has not ended.
        """
        return self.stream is not None and clock.get(self.stream, 0) >= self.tick


@dataclass(eq=False, slots=True)
class Cell:
    """The accesses of one part of a buffer with which the race check compares a later access: the
    last write, and the reads after that write.

    Accesses before the last write are not kept, because they were ordered before the write or were
    reported as a race.
    """

    write: Use | None = None
    reads: list[Use] = field(default_factory=list[Use])
    # Whether all of the box has been written; else the number of elements of each written part.
    is_written: bool = False
    parts: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, use: Use) -> None:
        """Records an access of this part of the buffer. A write replaces all earlier accesses. A
        read replaces an earlier read on the same stream, because an op that runs after the later
        read also runs after the earlier read.
        """
        if use.is_write:
            self.write, self.reads = use, []
        else:
            # A use that is ordered after the later read of a stream is also after its earlier ones.
            self.reads = [r for r in self.reads if r.stream is None or r.stream != use.began]
            self.reads.append(use)


@dataclass(eq=False, slots=True)
class TrackedBuffer:
    """A buffer, together with the reads and writes that the race check has seen so far.

    - `owner`: the tensor for which the buffer was allocated; `shape`: the shape of the buffer.
    - `home`: the stream that allocated the buffer.
    - `made`: the allocation, as a write; None if the caller passed the buffer.
    - `is_filled`: whether all elements are known to be written.
    - `cells`: for each part of the buffer, the accesses of this part. Parts that come from the same
      division of the buffer, such as its 4 chunks along axis 0, are in one group: they do not
      overlap.
    - `freed`: the op that freed the buffer; None while the buffer is allocated.
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
        """Whether the caller of the program passed the buffer. Otherwise the program allocated the
        buffer."""
        return self.made is None

    def uses(self) -> Iterator[Use]:
        """Yields the reads and writes of the buffer that the race check still compares with a new
        access."""
        for cells in self.cells.values():
            for cell in cells.values():
                if cell.write is not None:
                    yield cell.write
                yield from cell.reads

    def unwritten(self, box: Box) -> list[Box]:
        """Returns the elements of `box` (a range of indices along each axis) that no op has
        written, as a list of boxes.

        For some writes, only the number of written elements is known, because their positions do
        not form a box. If these writes are so many that they may have filled all other gaps, the
        result is an empty list.
        """
        cells = [(at, cell) for cells in self.cells.values() for at, cell in cells.items()]
        left = uncovered(box, (at for at, cell in cells if cell.is_written))
        somewhere = sum(n for _, cell in cells for n in cell.parts.values())
        return left if sum(math.prod(n for _, n in at) for at in left) > somewhere else []

    def text(self, box: Box) -> str:
        """Returns a part of the buffer as text for messages, such as `T3[2:4, :]`, where `T3` is
        the tensor that owns the buffer. `box` is the range of indices along each axis.
        """
        return self.owner.label + box_text(box, self.shape)


# ----------------------------------------------------------------------
# The part of a buffer that a name refers to.


class NamedRegion(Generic[N, A]):
    """The part of a buffer that a tensor refers to, and the buffer axes in which each axis of the
    tensor is stored.

    This base class has the methods that work on one rank as well as on all ranks. `BufferRegion`
    describes the part on one rank. `ShardRegion` (`hostir.analysis.rank_regions`) describes the
    parts on all ranks at once.

    - `shape`: the shape of the tensor, as numbers of one rank or as arrays over ranks.
    - `axes`: for each axis of the tensor, the buffer axes in which the axis is stored; None if they
      are unknown.
    """

    __slots__ = ()

    shape: tuple[N, ...]
    axes: tuple[A | None, ...]

    def having(self, shape: tuple[N, ...], axes: tuple[A | None, ...]) -> Self:
        """Returns a region that has the same elements of the buffer, but belongs to a tensor with
        another `shape` and other `axes`, such as a transposed tensor. `axes` has the buffer axes in
        which each tensor axis is stored. Each subclass defines this method, because each has
        further fields."""
        raise NotImplementedError

    def chunk(self, axis: int, start: N, length: N, among: Hashable) -> Self:
        """Returns the part of this region that has the indices from `start` to `start + length`,
        exclusive, along `axis`.

        `among` identifies how the axis was divided, such as the number of chunks. Parts that were
        divided in the same way are equal or disjoint, so they need no comparison. Each subclass
        defines this method.
        """
        raise NotImplementedError

    def element(self, axis: int, index: N) -> Self:
        """Returns the part of this region (part of a buffer) that has the index `index` along
        `axis`. The result has one axis less, like `tensor.select(axis, index)` in torch.
        """
        found, one = self.chunk(axis, index, cast("N", 1), 0), slice(axis, axis + 1)
        shape, axes = [*found.shape], [*found.axes]
        del shape[one], axes[one]
        return found.having(tuple(shape), tuple(axes))

    def part(
        self, part: Part, value: Callable[[Scalar], N], check: Callable[[Part, N, N], N]
    ) -> Self:
        """Returns the part of this region (part of a buffer) that `part` describes: one element or
        one chunk along an axis.

        `value` evaluates a scalar, such as the index of the chunk. `check(part, index, limit)`
        receives the evaluated index and the number of elements or chunks. `check` reports an index
        that is out of range, and returns the index to use instead.
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
        """Returns the part of the buffer to which the result of a view op, such as a transpose,
        refers. This region is the part to which the op's operand refers.

        `kept` maps each axis of the result that the view does not change to the same axis of the
        operand. `sizes` is the shape of the result. The buffer axes of a changed axis are unknown.
        """
        shape = tuple(self.shape[kept[c]] if c in kept else n for c, n in enumerate(sizes))
        axes = tuple(self.axes[kept[c]] if c in kept else None for c in range(len(shape)))
        return self.having(shape, axes)


@dataclass(frozen=True, slots=True)
class BufferRegion(NamedRegion[int, Owned]):
    """The part of a buffer that a tensor refers to, on one rank.

    - `box`: the elements of the buffer, as a range of indices along each axis; `shape`: the shape
      of the tensor.
    - `axes`: for each axis of the tensor, triples of (buffer axis, buffer elements per index,
      number of indices); None if unknown.
    - `grid`: the divisions that led from the whole buffer to the box, one after another. Each has
      the divided axis and, for example, the number of chunks. Two boxes with the same grid are
      equal or disjoint, because the chunks of a division do not overlap.
    - `parts`: the selections that could not be expressed as a box. If `parts` is not empty, the
      tensor refers to only some elements of the box.
    """

    buffer: TrackedBuffer
    box: Box
    shape: tuple[int, ...]
    axes: tuple[Owned | None, ...]
    grid: Grid = ()
    parts: tuple[Hashable, ...] = ()

    @staticmethod
    def whole(buffer: TrackedBuffer) -> BufferRegion:
        """Returns the description of a tensor that refers to all elements of `buffer`."""
        return BufferRegion(buffer, whole_box(buffer.shape), buffer.shape, whole_axes(buffer.shape))

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has no elements, so that reading or writing the tensor cannot cause a
        race."""
        # An axis of one element that is no axis of the buffer may be cut to zero elements.
        return 0 in self.shape or any(n == 0 for _, n in self.box)

    def having(self, shape: tuple[int, ...], axes: tuple[Owned | None, ...]) -> BufferRegion:
        """Returns a description of the same elements of the buffer for a tensor with another
        `shape` and other `axes`, such as after a reshape.
        """
        return BufferRegion(self.buffer, self.box, shape, axes, self.grid, self.parts)

    def chunk(self, axis: int, start: int, length: int, among: Hashable) -> BufferRegion:
        """Returns the part of this region that has the indices from `start` to `start + length`,
        exclusive, along `axis`.

        `among` identifies how the axis was divided, such as the number of chunks. It is recorded,
        because two parts of one division are known to be equal or disjoint. The selected elements
        may not form a box, a range along each axis of the buffer. The result then has the box of
        this region, and notes the selection in `parts`.
        """
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
