"""Race detector: finds two accesses of a buffer that no wait between streams orders, before the
program runs.

The program is unrolled for one rank and one set of sizes: its loops are followed iteration by
iteration. The effects of each op say which tensors the op reads and writes. Each stream has a
vector clock, which counts how many ops of every stream have certainly ended
(`hostir.analysis.clocks`). An op is ordered after an earlier op if the vector clock of its stream
counts the earlier op. `Synchronize` and `Wait` join clocks. Making a stream current does not order
any work. A communication is a separate timeline: it begins after all earlier work of the stream
that starts the communication, and ends at its `Wait`.

The order in which the host issues ops does not count, except for memory. A buffer is new at its
allocation, and belongs to the stream that allocates the buffer. The memory is free after the
`Deallocate`, or when no tensor refers to the buffer any longer. Two streams may then reuse the
memory immediately: the stream that allocated the buffer, and the stream that frees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op, walk
from fuser.ir.ops.nodes import ReshapeOp, SliceOp
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.support.errors import VerifyError
from hostir.analysis.buffer_regions import (
    Box,
    BufferRegion,
    Cell,
    TrackedBuffer,
    Use,
    box_text,
    overlap,
    reshaped,
    whole_box,
)
from hostir.analysis.clocks import Clock, Clocks
from hostir.analysis.walker import EffectState, InFlight, OneRank, Walk
from hostir.ir.buffer_aliasing import Storage, buffer_sharing_of, pairs, words
from hostir.ir.diagnostics import Finding, Site
from hostir.ir.effects import (
    ENTRY,
    Captures,
    ClosesGroup,
    Effect,
    Enters,
    Frees,
    Joins,
    Makes,
    OpensGroup,
    Part,
    Reads,
    Shows,
    Starts,
    Waits,
    Writes,
    bounds,
    effects_of,
)
from hostir.ir.ops import (
    Communication,
    ForLoop,
    HostOp,
    IfThenElse,
    SetCurrentStream,
    StartsCommunication,
    stream_cut,
)
from hostir.ir.program import HostIrContainer
from hostir.ir.queries import has_streams, only_allocates
from hostir.ir.shape_rules import check_results
from multidevice.sharding.queries import local_sizes
from multidevice.sharding.reshard import position_map

# ----------------------------------------------------------------------
# The messages of the race check, and the waits that would repair each fault.

RACE = "race"
FREED = "use after Deallocate"
FREED_EARLY = "memory given back too early"
NOT_JOINED = "returned too early"
LEFT = "stream left"
UNWRITTEN = "uninitialised"
ABSENT = "tensor of other ranks"
MISFIT = "sizes do not fit"
OWN = "result over operand"
NOT_IN_FLIGHT = "wait for nothing"
NO_WAIT = "communication without wait"
OUT_OF_RANGE = "index out of range"


class Reports:
    """Collects the findings (faults) of the race check in `found`, and formulates their messages.
    Of several findings of one kind about the same ops, only the first is kept.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.found: dict[object, Finding] = {}

    def _note(self, kind: str, what: str, *sites: tuple[Site, str], fix: str = "") -> None:
        """Adds a finding (the report of a fault), unless there is already a finding of the same
        kind about the same ops.

        - `kind`: the heading of the finding, such as "race"; `what`: a description of the fault.
        - `sites`: the ops, each with a note; `fix`: the change that would repair the program.
        """
        key = (kind, *(id(site.op) for site, _ in sites))
        if key not in self.found:
            self.found[key] = Finding(kind, what, sites, fix)

    def _note_freed(self, tv: TensorView, at: Site, site: Site) -> None:
        self._note(
            FREED,
            f"{tv.label} is used after its Deallocate",
            (at, "deallocates it"),
            (site, f"on {self.clocks.name(self.clocks.current)}: uses {tv.label}"),
            fix="Move the Deallocate of {0} behind {1}",
        )

    def _note_absent(self, tv: TensorView, site: Site) -> None:
        self._note(
            ABSENT,
            f"{tv.label} is used on a rank that is not in the mesh of the tensor, {tv.mesh}",
            (site, f"on {self.clocks.name(self.clocks.current)}: uses {tv.label}"),
        )

    def _note_unentered(self, use: Use, buffer: TrackedBuffer) -> None:
        self._note(
            RACE,
            f"{buffer.owner.label} is used on a stream that never waited for the caller's stream",
            (use.site, self._doing(use, buffer)),
            fix=f"{self.clocks.name(use.began)} must wait for {self.clocks.name(ENTRY)} before "
            f"{{0}}: Synchronize({self.clocks.text(ENTRY)}) is missing",
        )

    def _race(self, earlier: Use, later: Use, buffer: TrackedBuffer) -> None:
        is_same = earlier.site.op is later.site.op and earlier.site.indices == later.site.indices
        if is_same and earlier.communication is later.communication:
            return  # `hostir.ir.buffer_aliasing` has the rules within one op
        label = buffer.owner.label
        if earlier is buffer.made:
            what = f"{label} is used on a stream that did not wait for the allocation of {label}"
        elif later.is_write and earlier.site.indices != later.site.indices:
            what = f"a part of {label} is overwritten while an earlier iteration may still use it"
        else:
            what = f"nothing orders two uses of {label}"
        fix = self._remedy(earlier, later.began, "before {1}")
        if later.communication is not None and earlier.communication is later.communication:
            fix = "Both transfers start together: move {1} behind Wait(Communication "
            fix += f"{later.communication.number}), into another group"
        self._note(
            RACE,
            what,
            (earlier.site, self._doing(earlier, buffer)),
            (later.site, self._doing(later, buffer)),
            fix=fix,
        )

    def _who(self, use: Use) -> str:
        if use.stream is None and use.communication is not None:
            return f"communication {use.communication.number}"
        return self.clocks.name(use.stream)

    def _doing(self, use: Use, buffer: TrackedBuffer) -> str:
        verb = "allocates" if use is buffer.made else "writes" if use.is_write else "reads"
        who = f"on {self.clocks.name(use.began)}"
        if use.communication is not None:
            who = f"communication {use.communication.number}, started {who}"
        return f"{who}: {verb} {buffer.text(use.box)}"

    def _elsewhere(self, to: Hashable) -> str:
        """Returns advice that is appended to the report of a missing wait, if the stream that must
        wait is not the current stream. The user must then switch to stream `to` for the wait, and
        back.

        Returns "" if `to` is the current stream.
        """
        current = self.clocks.current
        if to == current:
            return ""
        there, back = (f"SetCurrentStream({self.clocks.text(s)})" for s in (to, current))
        return (
            f", between {there} and {back}. Or Allocate the tensor before other streams are "
            "entered, because a result without an Allocate belongs to the stream of its op"
        )

    def _remedy(self, use: Use, waiter: Hashable, before: str) -> str:
        """Returns a sentence about the wait that is missing, such as "Stream 1 must wait for Stream
        0 before line 5: Synchronize(Stream 0) is missing".

        - `use`: the read or write to wait for; `waiter`: the stream that must wait.
        - `before`: the position of the wait in words, such as "before {1}". The text {1} is later
          replaced by the line of the second op of the finding.
        """
        who = self.clocks.name(waiter)
        if use.stream is None and use.communication is not None:
            wait = f"Wait(Communication {use.communication.number})"
            return f"{who} must wait for it {before}: {wait} is missing"
        missing = f"Synchronize({self.clocks.text(use.stream)})"
        return f"{who} must wait for {self.clocks.name(use.stream)} {before}: {missing} is missing"


# ----------------------------------------------------------------------
# The walk that finds races.

# A use before its end is known: its op, its region, and whether it writes.
_Planned = tuple[Site, BufferRegion, bool]


def find_races(
    program: HostIrContainer,
    values: Mapping[Symbol, Number],
    *,
    rank: int = 0,
    given: Iterable[TensorView] = (),
) -> list[Finding]:
    """Returns the races of a program on one rank: pairs of accesses of a buffer that no wait
    orders. Also returns related faults, such as a use after `Deallocate`. Each pair of ops is
    reported once.

    - `values` maps every symbol to a number: `rank`, `numberOfStreams`, and the extents of the
      inputs as whole tensors, not as the parts of one rank.
    - `given` are the results for which the caller passes buffers.
    """
    if not has_streams(program):
        return []
    races = RaceWalk(program, dict(values), rank, tuple(given))
    races.run(program.ops)
    races.finish()
    return list(races.found.values())


@dataclass(slots=True)
class _Facts:
    """The properties of an op that the race check computes once, because they are equal in every
    loop iteration.

    - `effects`: the op's effects (reads, writes, waits and others); `follow`: each effect with the
      method that applies it.
    - `starts`: the effect that starts a communication, or None.
    - `is_absent`: whether the op runs only on other ranks.
    - `shared`: pairs of an operand (or earlier result) and a result that share a buffer.
    """

    effects: tuple[Effect, ...]
    # Each effect with the method that applies it.
    follow: tuple[tuple[Callable[[RaceWalk, Any, Site], None], Effect], ...]
    starts: Starts | None
    is_absent: bool
    # The results, each with an operand or an earlier result in the same buffer.
    shared: tuple[tuple[Reads | Writes, Writes], ...]


class RaceWalk(Walk[Number], Reports):
    """Follows the program of one rank in the order in which the host issues the ops, iteration by
    iteration. Compares each access of a buffer with earlier accesses, and collects the races in
    `found`.

    `given` are the results for which the caller passes buffers.
    """

    def __init__(
        self,
        program: HostIrContainer,
        values: dict[Symbol, Number],
        rank: int,
        given: tuple[TensorView, ...],
    ) -> None:
        self.program, self.values, self.rank = program, values, rank
        self.storage = Storage.of(program).with_buffers(given)
        self.domain = OneRank(values)
        super().__init__(self.domain)
        Reports.__init__(self, Clocks(self._integer))
        self.places: dict[TensorView, BufferRegion] = {}
        self.freed: dict[TensorView, Site] = {}
        self.state = EffectState[_Planned](self.clocks)
        self.waited: dict[int, Site] = {}
        # The numbers of communications that only other ranks start.
        self.absent: set[int] = set()
        self.facts: dict[int, _Facts] = {}
        self.shapes: dict[TensorView, tuple[int, ...]] = {}
        self.maps: dict[int, dict[int, int]] = {}
        for tv in (*program.inputs, *given):
            if isinstance(tv, TensorView) and self._is_mine(tv):
                buffer = TrackedBuffer(tv, self._shape(tv), ENTRY, None, tv in program.inputs)
                self.places[tv] = BufferRegion.whole(buffer)

    # ------------------------------------------------------------ ops
    def on_skipped(self, ops: Sequence[Op]) -> None:
        """Handles ops that do not run on this rank: records which communications are therefore not
        started. A later `Wait` for such a communication does nothing, and is no fault.
        """
        if ops:
            numbers = {o.number for o in walk(ops) if isinstance(o, StartsCommunication)}
            self.absent |= numbers - self.state.in_flight.keys()

    def on_op(self, op: Op) -> None:
        """Handles an op in the current iteration: compares its reads and writes with earlier ones,
        and follows its effects on streams and buffers. Also checks the shapes of the op's tensors,
        once for each op.
        """
        facts = self.facts.get(id(op))
        if facts is None:
            facts = self.facts[id(op)] = self._facts(op)
            try:
                if isinstance(op, HostOp):
                    op.check_shapes(self.values)
                else:
                    check_results(op, self.values)
            except VerifyError as error:
                self._note(MISFIT, str(error), (self.site(op), ""))
        if facts.is_absent:
            return self.on_skipped((op,))
        site = Site(op, self.indices)
        self.clocks.advance()
        if facts.starts is not None:
            self._transfer(op, facts.starts, site, facts.effects)
        else:
            for apply, effect in facts.follow:
                apply(self, effect, site)
        for one, other in facts.shared:
            self._check_shared(one, other, site)
        return None

    def _facts(self, op: Op) -> _Facts:
        effects = effects_of(op, self.storage.buffered)
        tensors = tuple(v for v in (*op.outputs, *op.inputs) if isinstance(v, TensorView))
        is_absent = bool(tensors) and not any(map(self._is_mine, tensors))
        starts = next((e for e in effects if isinstance(e, Starts)), None)
        root = self.storage.root
        shared = tuple(p for p in pairs(effects) if root(p[0].tensor) is root(p[1].tensor))
        follow = () if starts is not None else tuple((APPLY[type(e)], e) for e in effects)
        return _Facts(effects, follow, starts, is_absent, shared)

    # ------------------------------------------------------------ numbers
    def _integer(self, x: Scalar) -> int:
        return int(self.domain.value(x))

    def _is_mine(self, tv: TensorView) -> bool:
        return tv.mesh is None or tv.mesh.has(self.rank)

    def _shape(self, tv: TensorView) -> tuple[int, ...]:
        """Returns the shape of a tensor's shard, the part that this rank stores. The declared
        sharding of the tensor determines it.
        """
        shape = self.shapes.get(tv)
        if shape is None:
            shape = local_sizes(tv, [self._integer(x) for x in tv.shape()])
            self.shapes[tv] = shape
        return shape

    # ------------------------------------------------------------ names and buffers
    def _place(self, tv: TensorView, site: Site) -> BufferRegion | None:
        """Returns the part of a buffer to which the tensor `tv` refers. If the buffer has been
        freed, reports the use at `site` as a fault, and returns None.
        """
        place = self.places.get(tv)
        if place is None:
            shown = self.storage.shown_by(tv)
            if tv in self.freed:
                self._note_freed(tv, self.freed[tv], site)
            elif shown is not None and tv not in self.storage.named:
                return self._place(shown, site)
        elif place.buffer.freed is not None:
            self._note_freed(tv, place.buffer.freed, site)
            place = None
        return place

    def _makes(self, effect: Makes, site: Site) -> None:
        tv = effect.tensor
        if tv in self.storage.named:
            if effect.is_filled:
                self._touch(Writes(tv), site)
            return  # a part of another buffer, or the caller's
        if (old := self.places.get(tv)) is not None:
            self._drop(old.buffer, site)
        shape = self._shape(tv)
        if effect.step is not None:
            axis, chunks = stream_cut(tv)
            index, count = self._integer(effect.step), self._integer(chunks)
            shape = (*shape[:axis], bounds(shape[axis], index, count)[1], *shape[axis + 1 :])
        made = self._new_use(site, whole_box(shape), True)
        buffer = TrackedBuffer(tv, shape, self.clocks.current, made, effect.is_filled)
        self.places[tv] = BufferRegion.whole(buffer)
        self.freed.pop(tv, None)

    def _shows(self, effect: Shows, site: Site) -> None:
        source = self._place(effect.source, site)
        if source is None:
            return
        if effect.part is not None:
            source = self._part(source, effect.part, site)
        elif isinstance(site.op, TensorOp):
            source = self._view(source, site.op)
        elif effect.out in self.storage.views:
            # It does not matter which rank owns which part: nobody writes while there is a view.
            shape = self._shape(effect.out)
            whole, unknown = whole_box(source.buffer.shape), (None,) * len(shape)
            source = BufferRegion(source.buffer, whole, shape, unknown)
        self.places[effect.out] = source
        self.freed.pop(effect.out, None)

    def _view(self, source: BufferRegion, op: TensorOp) -> BufferRegion:
        """Returns the part of a buffer to which the result of a view op, such as a reshape or a
        slice, refers. `source` is the part to which the op's operand refers.

        The returned part also says in which buffer axes each axis of the result is stored. This is
        unknown if a reshape does not split or merge the buffer axes evenly. A later slice along
        such an axis is then compared as if it could be anywhere in the part.
        """
        if isinstance(op, ReshapeOp):
            sizes = self._shape(op.out_tensor)
            return source.having(sizes, tuple(reshaped(source.shape, source.axes, sizes)))
        if isinstance(op, SliceOp):
            # Bounds are global; an axis that devices cut is taken whole.
            sizes = op.inp.shape()
            for axis, ends in enumerate(zip(op.starts, op.stops, sizes, strict=True)):
                start, stop, size = map(self._integer, ends)
                if stop - start != size:
                    source = source.chunk(axis, start, stop - start, (start, stop))
            return source
        moved = self.maps.get(id(op))
        if moved is None:
            moved = self.maps[id(op)] = {c: p for p, c in position_map(op).items()}
        return source.viewed(moved, self._shape(op.out_tensor))

    def _part(self, source: BufferRegion, part: Part, site: Site) -> BufferRegion:
        def check(part: Part, index: int, limit: int) -> int:
            if 0 <= index < limit:
                return index
            what = f"part {part.index} = {index} of axis {part.axis} of "
            what += f"{source.buffer.owner.label} does not exist: the axis has {limit} parts, "
            what += "counted from 0"
            self._note(OUT_OF_RANGE, what, (site, ""))
            return min(max(index, 0), max(limit - 1, 0))

        return source.part(part, self._integer, check)

    def _frees(self, effect: Frees, site: Site) -> None:
        tv = effect.tensor
        place = self.places.pop(tv, None)
        if place is None:
            if tv in self.freed:
                self._note_freed(tv, self.freed[tv], site)
            return
        self.freed[tv] = site
        buffer = place.buffer
        if tv in self.storage.views:
            # After this barrier, other ranks have read the shards, and all may write again.
            self._use((site, place, True))
        if buffer.owner is tv and not buffer.is_callers:
            for stream in dict.fromkeys((self.clocks.current, buffer.home)):
                self._given_back(buffer, site, stream)
            buffer.freed = site

    def _drop(self, buffer: TrackedBuffer, site: Site | None) -> None:
        """Frees a buffer to which no tensor refers any longer, and reports accesses that may still
        use the buffer. Its memory returns to the stream that allocated the buffer, so later work of
        this stream must wait for all accesses. `site` is the op after which no tensor refers to the
        buffer, or None at the end of the program."""
        if not buffer.is_callers and buffer.freed is None:
            self._given_back(buffer, site, buffer.home)

    def _given_back(self, buffer: TrackedBuffer, site: Site | None, to: Hashable) -> None:
        name = self.clocks.name(to)
        for use in buffer.uses():
            if not use.is_before(self.clocks.of[to]):
                self._note(
                    FREED_EARLY,
                    f"the memory of {buffer.owner.label} is given back to {name} while "
                    f"{self._who(use)} still uses the memory",
                    (use.site, self._doing(use, buffer)),
                    *([] if site is None else [(site, f"gives the memory back, to {name}")]),
                    fix=self._remedy(use, to, "before {1}" if site else "before the program ends")
                    + self._elsewhere(to),
                )

    # ------------------------------------------------------------ uses
    def _new_use(
        self, site: Site, box: Box, is_write: bool, communication: InFlight[_Planned] | None = None
    ) -> Use:
        current, tick = self.clocks.current, self.clocks.tick
        if communication is None:
            return Use(site, is_write, box, current, current, tick, None)
        use = Use(site, is_write, box, current, None, tick, communication)
        communication.note.append(use)
        return use

    def _touch(self, effect: Reads | Writes, site: Site) -> None:
        if not self._is_mine(effect.tensor):
            return self._note_absent(effect.tensor, site)
        place = self._place(effect.tensor, site)
        if place is not None and not place.is_empty:
            self._use((site, place, isinstance(effect, Writes)))
        return None

    def _use(self, planned: _Planned, communication: InFlight[_Planned] | None = None) -> None:
        """Compares a read or write of a part of a buffer with all earlier accesses that overlap,
        reports races, and records the access.

        `planned` has the op, the part of the buffer, and whether the op writes. `communication` is
        given if the access lasts until the `Wait` for a communication.
        """
        site, place, is_write = planned
        buffer, box, grid = place.buffer, place.box, place.grid
        use, clock = self._new_use(site, box, is_write, communication), self.clocks.now
        if buffer.made is not None and not buffer.made.is_before(clock):
            self._race(buffer.made, use, buffer)
        if buffer.made is None and ENTRY not in clock:
            self._note_unentered(use, buffer)
        mine: Cell | None = None
        for other, cells in buffer.cells.items():
            if other == grid:
                mine = cells.get(box)
                if mine is not None:
                    self._compare(mine, use, clock, buffer)
                continue
            for at, cell in cells.items():
                if overlap(at, box):
                    self._compare(cell, use, clock, buffer)
        if not is_write and not buffer.is_filled and (mine is None or not mine.is_written):
            self._check_written(place, site)
        if is_write and not grid and not place.parts:
            # Earlier uses are ordered before this one, or have been reported.
            buffer.cells.clear()
            buffer.is_filled = True
            mine = None
        if mine is None:
            mine = buffer.cells.setdefault(grid, {})[box] = Cell()
        mine.add(use)
        if is_write and place.parts:
            mine.parts[place.parts] = math.prod(place.shape)
        mine.is_written |= is_write and not place.parts

    def _compare(self, cell: Cell, use: Use, clock: Clock, buffer: TrackedBuffer) -> None:
        if cell.write is not None and not cell.write.is_before(clock):
            self._race(cell.write, use, buffer)
        if use.is_write:
            for read in cell.reads:
                if not read.is_before(clock):
                    self._race(read, use, buffer)

    def _check_shared(self, one: Reads | Writes, other: Writes, site: Site) -> None:
        """Reports an op whose result overwrites an operand or another result, although the op does
        not allow that they share memory.

        `one` is the op's effect on the operand or the other result, and `other` the effect on the
        result.
        """
        if not (self._takes_part(one) and self._takes_part(other)):
            return
        a, b = self._place(one.tensor, site), self._place(other.tensor, site)
        if a is None or b is None or a.buffer is not b.buffer or not overlap(a.box, b.box):
            return
        if isinstance(one, Reads) and self._may_share(a, b, site.op):
            return
        what = words(site.op, one.tensor, other.tensor, is_read=isinstance(one, Reads))
        verb = "reads" if isinstance(one, Reads) else "writes"
        parts = f"{verb} {a.buffer.text(a.box)} and writes {b.buffer.text(b.box)}"
        self._note(OWN, what, (site, f"on {self.clocks.name(self.clocks.current)}: {parts}"))

    def _may_share(self, a: BufferRegion, b: BufferRegion, op: Op) -> bool:
        how = buffer_sharing_of(op)
        if how == "slot" and isinstance(op, Communication):
            ranks = op.team.ranks(self.rank)
            return is_slot(a.box, b.box, ranks.index(self.rank), len(ranks))
        is_same = (a.box, a.shape, a.axes, a.parts) == (b.box, b.shape, b.axes, b.parts)
        return how == "freely" or (how == "same" and is_same)

    def _check_written(self, place: BufferRegion, site: Site) -> None:
        buffer = place.buffer
        left = buffer.unwritten(place.box)
        if left:
            reads = f"on {self.clocks.name(self.clocks.current)}: reads {buffer.text(place.box)}"
            what = f"{buffer.owner.label}{box_text(left[0], buffer.shape)}"
            self._note(UNWRITTEN, f"{what} is read before it is written", (site, reads))
        elif not place.grid:
            buffer.is_filled = True

    # ------------------------------------------------------------ communications
    def _transfer(self, op: Op, starts: Starts, site: Site, effects: tuple[Effect, ...]) -> None:
        touched = [e for e in effects if isinstance(e, Reads | Writes)]
        if any(e.by is not None and not e.by.team.mesh.has(self.rank) for e in touched):
            return self.on_skipped((op,))
        uses: list[_Planned] = []
        for effect in touched:
            if self._takes_part(effect):
                place = self._place(effect.tensor, site)
                if place is not None and not place.is_empty:
                    uses.append((site, place, isinstance(effect, Writes)))
        return self._start(starts, site, uses)

    def _takes_part(self, effect: Reads | Writes) -> bool:
        """Returns whether this rank performs the read or write. In a broadcast, for example, only
        the root reads the operand."""
        if not self._is_mine(effect.tensor):
            return False
        if effect.by is None:
            return True
        ranks = effect.by.team.ranks(self.rank)
        if effect.by.place is None:
            return bool(ranks)
        root = self._integer(effect.by.place)
        return 0 <= root < len(ranks) and ranks[root] == self.rank

    def _start(
        self, effect: Starts | ClosesGroup, site: Site, uses: Sequence[_Planned] = ()
    ) -> None:
        before = self.state.in_flight.get(effect.number)
        communication = self.state.apply(effect, uses)
        if communication is None:
            return  # it joins the open group
        communication.site, communication.note = site, []
        if before is not None and before.site is not None:
            is_step = before.site.op is site.op
            where = "behind {0}, in the same iteration" if is_step else "between {0} and {1}"
            self._note(
                NO_WAIT,
                f"communication {communication.number} is started again before its Wait",
                (before.site, f"on {self.clocks.name(before.began)}: starts it"),
                (site, f"on {self.clocks.name(communication.began)}: starts it again"),
                fix=f"Wait(Communication {communication.number}) is missing {where}",
            )
        self.absent.discard(communication.number)
        for planned in communication.touched:
            self._use(planned, communication)

    def _waits(self, effect: Waits, site: Site) -> None:
        communication = self.state.apply(effect)
        if communication is not None:
            self.waited[effect.number] = site
            uses: list[Use] = communication.note
            for use in uses:
                use.stream, use.tick = self.clocks.current, self.clocks.tick
        elif effect.number not in self.absent:
            first = self.waited.get(effect.number)
            self._note(
                NOT_IN_FLIGHT,
                f"communication {effect.number} is not in flight, so there is nothing to wait for",
                *([] if first is None else [(first, "has waited for it already")]),
                (site, f"on {self.clocks.name(self.clocks.current)}: waits"),
            )

    # ------------------------------------------------------------ streams
    def _follow(self, effect: Effect, site: Site) -> None:
        self.state.apply(effect)

    def _enters(self, effect: Enters, site: Site) -> None:
        self.state.apply(effect)
        if isinstance(self.clocks.current, int) and self.clocks.current < 0:
            number = f"{effect.stream} = {self.clocks.current}"
            self._note(OUT_OF_RANGE, f"Stream {number}: streams count from 0", (site, ""))

    def _joins(self, effect: Joins, site: Site) -> None:
        self.on_join(effect, site)

    def on_join(self, effect: Joins, site: Site) -> None:
        """Handles a `Synchronize` op: the current stream waits for another stream. The subclass
        `_ChainWalk` overrides this method to find needless waits.
        """
        self.state.apply(effect)

    # ------------------------------------------------------------ the end
    def finish(self) -> None:
        """Checks the state at the end of the program, and reports:

        - communications without a `Wait`;
        - a current stream that is not the caller's;
        - outputs that are not completely written;
        - reads and writes of memory that may still run when the memory is freed or returned to the
          caller.
        """
        for communication in self.state.in_flight.values():
            assert communication.site is not None
            self._note(
                NO_WAIT,
                f"communication {communication.number} is never waited for",
                (communication.site, f"on {self.clocks.name(communication.began)}: starts it"),
                fix=f"Wait(Communication {communication.number}) is missing behind {{0}}",
            )
        if self.clocks.current != ENTRY:
            last = [op for op in walk(self.program.ops) if isinstance(op, SetCurrentStream)][-1]
            self._note(
                LEFT,
                f"the program ends on {self.clocks.name(self.clocks.current)}, which the caller "
                "did not enter",
                (Site(last), "enters the stream that stays current"),
                fix=f"SetCurrentStream({self.clocks.text(ENTRY)}) is missing behind {{0}}",
            )
        returned = {tv: p for tv in self.program.outputs if (p := self._output(tv)) is not None}
        outputs = {id(p.buffer): p.buffer for p in returned.values()}
        others = {
            id(p.buffer): p.buffer for p in self.places.values() if id(p.buffer) not in outputs
        }
        for buffer in (*outputs.values(), *others.values()):
            if buffer.is_callers or id(buffer) in outputs:
                self._return(buffer)
            else:
                self._drop(buffer, None)
        for tv, place in returned.items():
            if (
                not place.is_empty
                and not place.buffer.is_filled
                and not only_allocates(self.program)
            ):
                self._check_output(tv, place)

    def _output(self, tv: TensorView) -> BufferRegion | None:
        if not self._is_mine(tv):
            return None
        return self.places.get(tv) or self.places.get(self.storage.root(tv))

    def _check_output(self, tv: TensorView, place: BufferRegion) -> None:
        buffer = place.buffer
        left = buffer.unwritten(place.box)
        if left:
            writers = [(u.site, f"writes {buffer.text(u.box)}") for u in buffer.uses()][-1:]
            if not writers and buffer.made is not None:
                writers = [(buffer.made.site, "allocates it")]
            part = f"{buffer.owner.label}{box_text(left[0], buffer.shape)}"
            self._note(UNWRITTEN, f"{part}, part of an output, is never written", *writers)

    def _return(self, buffer: TrackedBuffer) -> None:
        """Reports accesses of an output or of a buffer of the caller that may still run when the
        program ends. The caller's stream must wait for such accesses."""
        for use in buffer.uses():
            if (use.is_write or buffer.is_callers) and not use.is_before(self.clocks.now):
                self._note(
                    NOT_JOINED,
                    f"the caller gets {buffer.owner.label} back while {self._who(use)} still "
                    f"{'writes' if use.is_write else 'reads'} it",
                    (use.site, self._doing(use, buffer)),
                    fix=self._remedy(use, self.clocks.current, "before the program ends"),
                )


APPLY: dict[type, Callable[[RaceWalk, Any, Site], None]] = {
    Captures: RaceWalk._follow,  # pyright: ignore[reportPrivateUsage]
    ClosesGroup: RaceWalk._start,  # pyright: ignore[reportPrivateUsage]
    Enters: RaceWalk._enters,  # pyright: ignore[reportPrivateUsage]
    Frees: RaceWalk._frees,  # pyright: ignore[reportPrivateUsage]
    Joins: RaceWalk._joins,  # pyright: ignore[reportPrivateUsage]
    Makes: RaceWalk._makes,  # pyright: ignore[reportPrivateUsage]
    OpensGroup: RaceWalk._follow,  # pyright: ignore[reportPrivateUsage]
    Reads: RaceWalk._touch,  # pyright: ignore[reportPrivateUsage]
    Shows: RaceWalk._shows,  # pyright: ignore[reportPrivateUsage]
    Waits: RaceWalk._waits,  # pyright: ignore[reportPrivateUsage]
    Writes: RaceWalk._touch,  # pyright: ignore[reportPrivateUsage]
}


def is_slot(one: Box, other: Box, place: int, members: int) -> bool:
    """Returns whether one box is slot number `place` of the other, larger box. A member of a team
    may keep its operand in its own slot of a collective's result.

    A box is a range of indices along each axis of a buffer. The larger box consists of `members`
    equal slots along one axis, one for each member of the team. The boxes may be passed in either
    order.
    """
    small, large = sorted((one, other), key=lambda box: [n for _, n in box])
    cut = [k for k, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if len(cut) != 1:
        return False
    (at, n), (start, whole) = small[cut[0]], large[cut[0]]
    return n * members == whole and at == start + place * n


# ----------------------------------------------------------------------
# Waits that serialise the steps of a loop: the results are right, but no steps overlap.
#
#     FOR i: SetCurrentStream(Stream (i % n)), Synchronize(Stream S0), ..,
#            SetCurrentStream(Stream S0), Synchronize(Stream (i % n))
#
# S0 waits for step i, and step i + 1 waits for S0. If the program has no races with the first wait
# in a separate earlier loop, the steps need not wait for each other. A wait in a branch is intended
# for its step (`inter_stream_synchronization`).

CHAINED = "steps are chained"

# The limit of walks per program. Waits that need more walks are not reported.
MAX_WALKS = 16


def find_chains(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, rank: int = 0
) -> list[Finding]:
    """Returns the waits by which the iterations of a loop needlessly run one after another,
    although they are on different streams. The results are right, so such a wait is no race.

    A wait is needless if the program has no races when the wait runs in a separate loop before this
    one. The arguments are those of `find_races`.
    """
    if not has_streams(program):
        return []
    first = _ChainWalk(program, dict(values), rank, ())
    first.run(program.ops)
    found: list[Finding] = []
    # Bisection: all waits are moved at once, then halves. Fewer moved waits cannot cause a race.
    left = [tuple(first.chains)] if first.chains else []
    for _ in range(MAX_WALKS):
        if not left:
            break
        waits = left.pop()
        other = _ChainWalk(program, dict(values), rank, (), hoisted=frozenset(waits))
        other.run(program.ops)
        other.finish()
        half = len(waits) // 2
        if not other.found:
            found += [first.chains[op] for op in waits]
        elif half:
            left += [waits[half:], waits[:half]]
    return found


class _ChainWalk(RaceWalk):
    """Walks the program of one rank, and finds waits through which each iteration of a loop waits
    for the iteration before. `chains` maps each such wait to a finding.

    Waits in `hoisted` are treated as if they ran in a separate earlier loop. If the walk then finds
    no race, these waits are needless.
    """

    def __init__(self, *args: object, hoisted: frozenset[Op] = frozenset()) -> None:
        super().__init__(*args)  # pyright: ignore[reportArgumentType]
        self.hoisted = hoisted
        self.chains: dict[Op, Finding] = {}
        branches = (op for op in walk(self.program.ops) if isinstance(op, IfThenElse))
        self.conditional = {inner for op in branches for inner in walk((op,))}
        # The clocks at the beginning of each open loop. Their identity also identifies this walk of
        # the loop.
        self.at_entry: list[dict[Hashable, Clock]] = []
        # (waiting stream, stream that it waited for) -> the position on the latter stream, the op
        # that waited, and the walk of the loop around this op.
        self.joined: dict[tuple[Hashable, Hashable], tuple[int, Site, object]] = {}

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Handles the beginning of a loop: stores which work of each stream is ordered before the
        loop. A wait in `hoisted` is treated as if it waited only for this work.
        """
        if isinstance(op, ForLoop):
            self.at_entry.append({s: dict(c) for s, c in self.clocks.of.items()})

    def on_left(self, op: ForLoop) -> None:
        """Handles the end of a loop: discards the state that `on_region` has stored for it."""
        self.at_entry.pop()

    def on_join(self, effect: Joins, site: Site) -> None:
        """Handles a `Synchronize` op: the current stream waits for another stream. Records a
        finding if the wait makes an iteration wait for the iteration before. A wait in `hoisted`
        waits only for work before the loop.
        """
        me, other = self.clocks.current, self.clocks.find(effect.stream)
        if site.op in self.conditional:
            return super().on_join(effect, site)
        if site.op in self.hoisted and self.at_entry:
            self.clocks.learn(self.at_entry[-1].get(other, {}))
            return None
        here = self.at_entry[-1] if self.at_entry else None
        for (waiter, stream), (tick, at, during) in self.joined.items():
            is_ahead = waiter == other and stream != me and self.clocks.now.get(stream, 0) < tick
            is_earlier = here is not None and during is here and at.indices != site.indices
            if is_ahead and is_earlier and site.op not in self.chains:
                name = self.clocks.name
                self.chains[site.op] = Finding(
                    CHAINED,
                    f"every iteration on {name(me)} waits for the iteration before on "
                    f"{name(stream)}, so they do not overlap",
                    (
                        (at, f"{name(other)} waits for {name(stream)}"),
                        (site, f"{name(me)} waits for {name(other)}"),
                    ),
                    "Move {1} into a separate loop before this one",
                )
        super().on_join(effect, site)
        self.joined[me, other] = self.clocks.of.get(other, {}).get(other, 0), site, here
        return None
