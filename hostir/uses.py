"""The uses of buffers that later uses must be compared with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from fuser.ir.tensor import TensorView
from hostir.boxes import Box, Grid, Owned, box_text, whole_box
from hostir.clocks import Clock
from hostir.findings import Site


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

    def add(self, use: Use) -> None:
        if use.is_write:
            self.write, self.reads = use, []
        else:
            # What comes after the later read of a stream comes after its earlier ones.
            self.reads = [r for r in self.reads if r.stream is None or r.stream != use.began]
            self.reads.append(use)


@dataclass(eq=False, slots=True)
class Buffer:
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

    def written(self) -> Iterator[Box]:
        for cells in self.cells.values():
            for box, cell in cells.items():
                if cell.write is not None:
                    yield box

    def text(self, box: Box) -> str:
        return self.owner.label + box_text(box, self.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a buffer that a tensor names.

    `axes` has what each axis of the tensor owns, None for one that a view made: a part along that
    counts as all of the box. `shape` is the tensor's. Boxes of one buffer and one grid
    are equal or apart.
    """

    buffer: Buffer
    box: Box
    shape: tuple[int, ...]
    axes: tuple[Owned | None, ...]
    grid: Grid = ()

    @staticmethod
    def whole(buffer: Buffer) -> Place:
        axes = tuple((k, Fraction(1)) for k in range(len(buffer.shape)))
        return Place(buffer, whole_box(buffer.shape), buffer.shape, axes)

    @property
    def is_empty(self) -> bool:
        return any(n == 0 for _, n in self.box)

    def element(self, axis: int, index: int) -> Place:
        """Return element `index` along an axis, which the result lacks."""
        cut = self.chunk(axis, index, 1, 0)
        shape = cut.shape[:axis] + cut.shape[axis + 1 :]
        axes = cut.axes[:axis] + cut.axes[axis + 1 :]
        return Place(cut.buffer, cut.box, shape, axes, cut.grid)

    def chunk(self, axis: int, start: int, length: int, chunks: int) -> Place:
        """Return one of so many chunks along an axis."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        owned = self.axes[axis]
        if owned is None:
            return Place(self.buffer, self.box, shape, self.axes, self.grid)
        owner, unit = owned
        at, n = start * unit, length * unit
        if at.denominator > 1 or n.denominator > 1:
            return Place(self.buffer, self.box, shape, self.axes, self.grid)
        first, _ = self.box[owner]
        box = (*self.box[:owner], (first + int(at), int(n)), *self.box[owner + 1 :])
        return Place(self.buffer, box, shape, self.axes, (*self.grid, (owner, chunks, unit)))
