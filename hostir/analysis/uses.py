"""The uses of buffers that later uses must be compared with."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from fuser.ir.tensor import TensorView
from hostir.analysis.buffer_regions import (
    Box,
    Grid,
    Owned,
    box_text,
    cut,
    uncovered,
    whole_axes,
    whole_box,
)
from hostir.analysis.clocks import Clock
from hostir.ir.diagnostics import Site


@dataclass(eq=False, slots=True)
class Use:
    """A use of a part of a buffer; `stream` and `tick` say where it ends, None: not yet."""

    site: Site
    is_write: bool
    box: Box
    began: Hashable
    stream: Hashable | None
    tick: int
    flight: Flight | None

    def is_before(self, clock: Clock) -> bool:
        return self.stream is not None and clock.get(self.stream, 0) >= self.tick


@dataclass(eq=False, slots=True)
class Flight:
    """A communication between its start, whose clock it has, and its Wait."""

    site: Site
    number: int
    began: Hashable
    clock: Clock
    uses: list[Use] = field(default_factory=list[Use])

    def ends(self, stream: Hashable, tick: int) -> None:
        for use in self.uses:
            use.stream, use.tick = stream, tick


@dataclass(eq=False, slots=True)
class Cell:
    """The last write of one box, and the reads since: earlier uses are ordered before these."""

    write: Use | None = None
    reads: list[Use] = field(default_factory=list[Use])
    # Whether all of the box has been written; else how many elements of which parts.
    is_written: bool = False
    parts: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, use: Use) -> None:
        if use.is_write:
            self.write, self.reads = use, []
        else:
            # What comes after the later read of a stream comes after its earlier ones.
            self.reads = [r for r in self.reads if r.stream is None or r.stream != use.began]
            self.reads.append(use)


@dataclass(eq=False, slots=True)
class TrackedBuffer:
    """A buffer: whose, on which stream allocated (None: by the caller), and how it was used."""

    owner: TensorView
    shape: tuple[int, ...]
    home: Hashable
    made: Use | None
    is_filled: bool
    cells: dict[Grid, dict[Box, Cell]] = field(default_factory=dict[Grid, dict[Box, Cell]])
    freed: Site | None = None

    @property
    def is_callers(self) -> bool:
        return self.made is None

    def uses(self) -> Iterator[Use]:
        for cells in self.cells.values():
            for cell in cells.values():
                if cell.write is not None:
                    yield cell.write
                yield from cell.reads

    def unwritten(self, box: Box) -> list[Box]:
        """Return what may not have contents; parts that are no boxes may lie anywhere."""
        cells = [(at, cell) for cells in self.cells.values() for at, cell in cells.items()]
        left = uncovered(box, (at for at, cell in cells if cell.is_written))
        somewhere = sum(n for _, cell in cells for n in cell.parts.values())
        return left if sum(math.prod(n for _, n in at) for at in left) > somewhere else []

    def text(self, box: Box) -> str:
        return self.owner.label + box_text(box, self.shape)


@dataclass(frozen=True, slots=True)
class BufferRegion:
    """The part of a buffer that a tensor names.

    `axes` has what each axis of the tensor counts, None where that is unknown. `shape` is the
    tensor's. Boxes of one buffer and one grid are equal or apart. With `parts`, which tell it from
    others, the tensor names only some elements of the box.
    """

    buffer: TrackedBuffer
    box: Box
    shape: tuple[int, ...]
    axes: tuple[Owned | None, ...]
    grid: Grid = ()
    parts: tuple[Hashable, ...] = ()

    @staticmethod
    def whole(buffer: TrackedBuffer) -> BufferRegion:
        return BufferRegion(buffer, whole_box(buffer.shape), buffer.shape, whole_axes(buffer.shape))

    @property
    def is_empty(self) -> bool:
        # An axis of one element that no axis of the buffer counts may be cut to none.
        return 0 in self.shape or any(n == 0 for _, n in self.box)

    def element(self, axis: int, index: int) -> BufferRegion:
        """Return element `index` along an axis, which the result lacks."""
        found = self.chunk(axis, index, 1, 0)
        shape = found.shape[:axis] + found.shape[axis + 1 :]
        axes = found.axes[:axis] + found.axes[axis + 1 :]
        return BufferRegion(found.buffer, found.box, shape, axes, found.grid, found.parts)

    def chunk(self, axis: int, start: int, length: int, among: Hashable) -> BufferRegion:
        """Return a range along an axis; `among` tells in which way the axis was divided."""
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
