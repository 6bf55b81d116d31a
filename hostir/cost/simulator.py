"""Simulates a program on a machine description, and computes when each op begins and ends on each
rank.

Ranks that take the same time form a class, and only one rank of each class is simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fuser.ir.op import Op
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.types import MemoryType
from hostir.analysis.deadlocks import DEADLOCK, MISPLACED
from hostir.analysis.rank_values import Array, PerRank, at, np
from hostir.analysis.unrolled_program import UnrolledOp, Unroller
from hostir.cost.machine_model import Machine
from hostir.cost.op_costs import (
    NOTHING,
    Cost,
    Found,
    collective_cost,
    cost_of,
    found_in_tables,
    staging_cost,
    transfer_cost,
    under_load,
)
from hostir.ir.diagnostics import Finding, refuse
from hostir.ir.ops import PEER_COPIES, LaunchKernel, Movement
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import held_nbytes
from multidevice.transports.base.collectives import Collective

# ----------------------------------------------------------------------
# The simulation of work on shared resources.
#
# Work becomes ready when the earlier work of its stream has ended, all that the stream waits for,
# and all partners are ready. The host is assumed to be ahead of the device. A rank has three
# resources: multiprocessors, which kernels share, an outgoing link and an incoming link. Work takes
# its part of them in the order in which it became ready. Of work that becomes ready together,
# computation is first; at the beginning, the order of the program decides. Work that gets a
# fraction of its need is slower by that factor. Therefore:
#
# - Matmuls that fill the machine take the sum of their times.
# - Copies run beside kernels.
# - An NCCL collective that is ready before a matmul keeps its multiprocessors, and the matmul uses
#   the others.
# - A collective that becomes ready later uses those that the last wave of tiles leaves idle.

Resource = Literal["multiprocessors", "out", "in"]
_NEARLY_NOTHING = 1e-15


@dataclass(eq=False, slots=True)
class WorkItem:
    """One piece of work in the simulation: an op of one class of ranks, or a communication between
    classes. A class consists of ranks that take the same time. Times are in seconds.

    - `item`: the op in its loop iteration; `cost`: its cost if nothing else runs.
    - `needs`: (class, resource) -> the fraction of the resource that the work uses at full speed. A
      resource is the multiprocessors of a GPU or one direction of its link.
    - `streams`: class -> the stream that the work occupies.
    - `before`: the work that must end first; `after`: the work that waits for this work.
    - `cause`: of all work that this work waited for, the work that ended last; None if this work
      waited for nothing.
    - `ready`, `start`, `end`: the simulated times; -1 before the time is known.
    - `left`: the remaining seconds at full speed; `rate`: the current speed, at most 1.
    - `since`: the time at which `left` was computed; `version`: the number of changes of the rate
      so far.
    """

    item: UnrolledOp
    cost: Cost
    is_transfer: bool
    needs: dict[tuple[int, Resource], float]
    order: int
    streams: dict[int, int] = field(default_factory=dict[int, int])
    before: dict[WorkItem, None] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    after: list[WorkItem] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    cause: WorkItem | None = None
    ready: float = -1.0
    start: float = -1.0
    end: float = -1.0
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0

    def comes_after(self, others: Iterable[WorkItem]) -> None:
        """Makes this piece of work wait for the end of all `others`."""
        for other in others:
            # `other` is the work itself if the ranks of one class wait for each other in a cycle.
            if other not in self.before:
                self.before[other] = None
                other.after.append(self)

    @property
    def classes(self) -> set[int]:
        """The numbers of the classes of equal ranks that take part in the work: it occupies one of
        their streams, or uses one of their resources.
        """
        return {c for c, _ in self.needs} | set(self.streams)


class Simulator:
    """Computes when each piece of work begins and ends, if ops share the multiprocessors and the
    links of a GPU.

    After `run`, each `WorkItem` has its `start`, `end` and `cause`. If pieces of work wait for each
    other in a cycle, their `end` stays -1.
    """

    def __init__(self, work: Iterable[WorkItem]) -> None:
        self.work = list(work)
        self.waiting = {w: len(w.before) for w in self.work}
        # (time, count, work, version); version -1: the work becomes ready.
        self.events: list[tuple[float, int, WorkItem, int]] = []
        self.count = 0
        self.active: dict[int, dict[WorkItem, None]] = {}
        self.last: WorkItem | None = None

    def run(self) -> None:
        """Simulates all work, from one begin or end of work to the next."""
        for work in self.work:
            work.left = work.cost.seconds
            if not work.before:
                self._push(0.0, work, -1)
        while self.events:
            now, changed = self.events[0][0], set[int]()
            while self.events and self.events[0][0] <= now:
                _, _, work, version = heapq.heappop(self.events)
                if version == -1:
                    self._begin(work, now, changed)
                elif version == work.version and work.end < 0:
                    self._end(work, now, changed)
            self._share(now, changed)

    def _push(self, time: float, work: WorkItem, version: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, work, version))

    def _begin(self, work: WorkItem, now: float, changed: set[int]) -> None:
        work.ready = work.since = now
        classes = work.classes
        changed |= classes
        for c in classes:
            self.active.setdefault(c, {})[work] = None

    def _end(self, work: WorkItem, now: float, changed: set[int]) -> None:
        work.end, self.last = now, work
        classes = work.classes
        changed |= classes
        for c in classes:
            del self.active[c][work]
        for other in work.after:
            self.waiting[other] -= 1
            if not self.waiting[other]:
                other.cause = work
                self._push(now, other, -1)

    def _share(self, now: float, changed: set[int]) -> None:
        """Divides the multiprocessors and links among the work that is now ready, at the simulated
        time `now`. `changed` has the classes (ranks that take the same time) whose work has begun
        or ended, so that speeds change.

        Classes that communicate with them are included, because a communication is as slow as its
        slowest rank.
        """
        found: dict[WorkItem, None] = {}
        todo, seen = list(changed), set(changed)
        while todo:
            for work in self.active.get(todo.pop(), ()):
                if work not in found:
                    found[work] = None
                    new = work.classes - seen
                    seen |= new
                    todo += new
        taken: dict[tuple[int, Resource], float] = {}
        for work in sorted(found, key=_precedence):
            rate = 1.0
            for key, need in work.needs.items():
                if need > 0:
                    rate = min(rate, max(0.0, 1.0 - taken.get(key, 0.0)) / need)
            rate = rate if rate > 1e-9 else 0.0
            for key, need in work.needs.items():
                taken[key] = taken.get(key, 0.0) + need * rate
            self._set_rate(work, rate, now)

    def _set_rate(self, work: WorkItem, rate: float, now: float) -> None:
        if rate > 0 and work.start < 0:
            work.start = now
            if now > work.ready:
                work.cause = self.last
        elif abs(rate - work.rate) < 1e-12:
            return
        work.left = max(0.0, work.left - work.rate * (now - work.since))
        work.rate, work.since = rate, now
        work.version += 1
        if work.left <= _NEARLY_NOTHING:
            self._push(now, work, work.version)
        elif rate > 0:
            self._push(now + work.left / rate, work, work.version)


def _precedence(work: WorkItem) -> tuple[float, bool, int]:
    """Returns the sort key of the order in which pieces of work get multiprocessors and links. Work
    that became ready earlier is first, then computation before transfers, then program order.
    """
    return work.ready, work.is_transfer and work.ready > 0, work.order


def critical_path(work: Iterable[WorkItem]) -> list[tuple[WorkItem, float]]:
    """Returns the chain of work that determines the total time, last work first. Each piece of work
    began when the next one in the list ended.

    Each entry is paired with the seconds by which the work extended the chain.
    """
    path: list[tuple[WorkItem, float]] = []
    at = max(work, key=lambda w: (w.end, w.order), default=None)
    while at is not None:
        path.append((at, at.end - (at.cause.end if at.cause is not None else 0.0)))
        at = at.cause
    return path


# ----------------------------------------------------------------------
# The schedule: work for the unrolled program, of one rank per class.


@dataclass
class SimulatedSchedule:
    """The times at which the ops of a program begin and end, according to the simulation. Ranks
    that take the same time form a class, and one rank of each class is simulated.

    - `unrolled`: the ops in each loop iteration; `work`: the pieces of work with their times.
    - `classes`: the class number of each rank; `firsts`: for each class, the index of its first
      rank, which was simulated.
    - `host`: for each class, the seconds in which the host issues the work to the GPU.
    - `machine`: the machine description.
    """

    unrolled: Unroller
    classes: Array
    firsts: list[int]
    work: list[WorkItem]
    host: list[float]
    machine: Machine

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the program, in the order of the rank indices."""
        return self.unrolled.ranks

    def of_class(self, number: int) -> list[WorkItem]:
        """Returns the work that occupies a stream on the ranks of class `number`. A class consists
        of ranks that take the same time."""
        return [w for w in self.work if number in w.streams]


def simulated_schedule(
    program: HostIrContainer,
    values: Mapping[Symbol, Number],
    machine: Machine,
    *,
    ranks: Sequence[int] = (),
) -> SimulatedSchedule:
    """Simulates a program, and returns the times at which its ops begin and end. The program is not
    run.

    - `values`: a number for each symbol of the inputs and for `numberOfStreams`.
    - `ranks`: by default, the ranks of the program's meshes.

    Raises `VerifyError` if the communications of the ranks do not match, and `UnsupportedError` for
    an op without a known cost.
    """
    unrolled = Unroller(program, tuple(ranks or program.devices() or (0,)), values)
    unrolled.run(program.ops)
    unrolled.finish()
    wrong = [f for f in unrolled.found.values() if f.kind != MISPLACED]
    refuse(program, wrong, what="the time of this program cannot be predicted")
    classes = rank_classes(unrolled.items, len(unrolled.ranks))
    firsts: list[int] = np.unique(classes, return_index=True)[1].tolist()
    shared = _Shared(classes, machine, program, values)
    host: list[float] = []
    for number, place in enumerate(firsts):
        builder = _ScheduleBuilder(shared, number, place)
        builder.run(unrolled.items)
        host.append(builder.host)
    Simulator(shared.work).run()
    _check_all_ran(program, shared.work, machine)
    return SimulatedSchedule(unrolled, classes, firsts, shared.work, host, machine)


def _check_all_ran(program: HostIrContainer, work: Sequence[WorkItem], machine: Machine) -> None:
    """Raises `VerifyError` if some work never ran, because pieces of work wait for each other in a
    cycle. This can happen even if all communications match, because a communication occupies its
    stream."""
    stuck = [w for w in work if w.end < 0]
    if stuck:
        what = "these ops wait for each other, because a communication occupies its stream"
        sites = dict.fromkeys(w.item.site for w in stuck)
        found = Finding(DEADLOCK, what, tuple((site, "") for site in list(sites)[:4]))
        refuse(
            program, [found], what=f"the time of this program cannot be predicted on {machine.name}"
        )


@dataclass
class _Shared:
    """The pieces of work of all classes of ranks, in the order of creation, and the tables that the
    builders (`_ScheduleBuilder`) of all classes share. A class consists of ranks that take the same
    time.

    - `classes`: the class number of each rank.
    - `by_key`: the communications so far. All classes that take part compute the same key, so only
      the first of them creates the piece of work.
    - `members`: for each team, one rank of each class in the team.
    """

    classes: Array
    machine: Machine
    program: HostIrContainer
    values: Mapping[Symbol, Number]
    work: list[WorkItem] = field(default_factory=list[WorkItem])
    by_key: dict[object, WorkItem] = field(default_factory=dict[object, WorkItem])
    members: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    # The bytes that kernels read of their lookup tables.
    in_tables: dict[Op, Found] = field(default_factory=dict[Op, Found])

    def found(self, op: Op) -> Found:
        """Returns how many bytes a kernel launch reads of each of its lookup tables, tensors that
        the kernel reads at indices. Returns an empty result for any other op.
        """
        if not isinstance(op, LaunchKernel):
            return NOTHING
        if op not in self.in_tables:
            group = self.program.groups.get(op.group)
            known = found_in_tables(op, group.fusion, self.values) if group else NOTHING
            self.in_tables[op] = known
        return self.in_tables[op]

    def add(self, item: UnrolledOp, cost: Cost, *, is_transfer: bool) -> WorkItem:
        """Creates a piece of work for the simulation from an op in one iteration and its cost, and
        returns the work. `is_transfer` says whether the work is a communication.
        """
        work = WorkItem(item, cost, is_transfer, {}, len(self.work))
        self.work.append(work)
        return work


class _ScheduleBuilder:
    """Creates the pieces of work of one class of ranks (ranks that take the same time), in program
    order. Each piece waits for the work before it on its stream.

    `number` is the class, and `place` the index of the rank that stands for the class. `last` has
    the last work of each stream.
    """

    def __init__(self, shared: _Shared, number: int, place: int) -> None:
        self.shared, self.machine = shared, shared.machine
        self.number, self.place = number, place
        # The seconds in which the host issues work.
        self.host = shared.machine.host_run_s
        self.last: dict[int, tuple[WorkItem, ...]] = {}
        self.in_flight: dict[int, tuple[WorkItem, ...]] = {}
        # Communications of one team run one after another, on any streams.
        self.calls: dict[object, tuple[WorkItem, ...]] = {}

    def run(self, items: Sequence[UnrolledOp]) -> None:
        """Creates the pieces of work of this class of equal ranks for the ops in `items`. Ops that
        the rank which stands for the class does not run are left out.
        """
        mine = [item for item in items if item.mask[self.place]]
        products = [self._cost(item) for item in mine if isinstance(item.site.op, LibraryOp)]
        self.machine = under_load(self.machine, sum(c.flops for c in products if c is not None))
        for item in mine:
            self._item(item)

    def _cost(self, item: UnrolledOp) -> Cost | None:
        sizes, op = item.sizes(self.place), item.site.op
        return cost_of(op, lambda tv: sizes[tv], self.machine, self.shared.found(op))

    def _item(self, item: UnrolledOp) -> None:
        movement, stream = item.movement, self._stream(item)
        if item.joins is not None:
            self._wait(stream, self.last.get(int(at(item.joins, self.place)), ()))  # pyright: ignore[reportArgumentType]
        elif item.waits is not None:
            self._wait(stream, self.in_flight.pop(item.waits, ()))
        elif movement is not None and movement.collective is not None:
            self._collective(item, movement, movement.collective, stream)
        elif item.starts is not None:
            self._transfers(item, item.starts, stream)
        elif (cost := self._cost(item)) is not None:
            self._compute(item, cost, stream)

    def _stream(self, item: UnrolledOp) -> int:
        return int(at(item.stream, self.place))  # pyright: ignore[reportArgumentType]

    def _wait(self, stream: int, others: tuple[WorkItem, ...]) -> None:
        self.last[stream] = tuple(dict.fromkeys((*self.last.get(stream, ()), *others)))

    def _need(self, work: WorkItem, resource: Resource, share: float) -> None:
        work.needs[self.number, resource] = work.needs.get((self.number, resource), 0.0) + share

    def _issue(self, work: WorkItem, stream: int, *, holds: bool = True) -> None:
        """Makes a piece of work wait for all earlier work of a stream. If `holds` is True, the work
        also occupies the stream until the work ends. `holds` is False for a copy that another rank
        makes out of this rank's memory, because this rank's stream does not run the copy.
        """
        work.comes_after(self.last.get(stream, ()))
        if holds:
            work.streams[self.number] = stream

    def _compute(self, item: UnrolledOp, cost: Cost, stream: int) -> None:
        self.host += cost.host_s
        far_s = self._far_seconds(item)
        cost = replace(cost, seconds=cost.seconds + far_s) if far_s else cost
        work = self.shared.add(item, cost, is_transfer=False)
        self._need(work, "multiprocessors", cost.share)
        for link in ("out", "in") if far_s else ():
            self._need(work, link, far_s / cost.seconds)
        self._issue(work, stream)
        self.last[stream] = (work,)

    def _far_seconds(self, item: UnrolledOp) -> float:
        """Returns the seconds that a kernel needs for operands in other ranks' memory. Such an
        operand is a view of the parts (shards) of a tensor that several ranks store.
        """
        sizes = item.sizes(self.place) if item.far else {}
        parts = (held_nbytes(tv, sizes[tv]) * (n - 1) / n for tv, (_, n) in item.far.items())
        return sum(parts) / self.machine.pull_bandwidth

    # ------------------------------------------------------------ collectives
    def _collective(
        self, item: UnrolledOp, movement: Movement, row: Collective, stream: int
    ) -> None:
        teams, number, source = item.teams, item.starts, movement.both[0]
        assert teams is not None and number is not None, f"a {row} needs a team and a number"
        sizes = item.sizes(self.place)
        inp, out = (held_nbytes(tv, sizes[tv]) for tv in movement.both)
        cost = collective_cost(
            row,
            teams.members.shape[1],
            max(inp, out),
            movement.backend,
            self.machine,
            dtype=source.dtype(),
            reduce=movement.red_op,
            staged=inp if movement.is_copied and source.memory is MemoryType.global_ else 0,
        )
        self.host += cost.host_s
        items = item.together or (item,)
        team = int(teams.team[self.place])
        known = (id(teams), team)
        if known not in self.shared.members:
            _, first = np.unique(self.shared.classes[teams.members[team]], return_index=True)
            self.shared.members[known] = teams.members[team][first].tolist()
        met = frozenset(
            (int(self.shared.classes[m]), next(id(r) for r in items if r.mask[m]))
            for m in self.shared.members[known]
        )
        work = self.shared.by_key.get(met)
        if work is None:
            work = self.shared.by_key[met] = self.shared.add(item, cost, is_transfer=True)
        for resource in ("out", "in"):
            self._need(work, resource, 1.0)
        self._need(work, "multiprocessors", cost.share)
        self._issue(work, stream)
        work.comes_after(self.calls.get(movement.team, ()))
        self.calls[movement.team] = self.last[stream] = self.in_flight[number] = (work,)

    # ------------------------------------------------------------ transfers
    def _transfers(self, item: UnrolledOp, number: int, stream: int) -> None:
        """Creates the work of sends and receives that start together, as the communication
        `number`. Later work of the stream waits for their end.

        The stream does not wait for copies that other ranks make out of this rank's memory.
        """
        self.host += self.machine.host_post_s
        holding: list[WorkItem] = []
        flying: list[WorkItem] = []
        is_nccl = False
        for half in item.group if item.group is not None else [item]:
            if not half.mask[self.place]:
                continue
            movement = half.movement
            assert movement is not None, f"{half.site.op.name} moves nothing"
            is_nccl |= not movement.is_copied
            ends = self._pair if movement.team is None else self._permute
            for work, is_send in ends(half, movement):
                is_theirs = is_send and movement.is_copied
                if is_theirs:
                    self._stage(half, movement, stream)
                self._issue(work, stream, holds=not is_theirs)
                flying.append(work)
                holding += [] if is_theirs else [work]
        if is_nccl:
            calls = tuple(w for w in holding if w.is_transfer)
            for work in calls:
                work.comes_after(w for w in self.calls.get(None, ()) if w not in calls)
            self.calls[None] = calls or self.calls.get(None, ())
        if holding:
            self.last[stream] = tuple(dict.fromkeys(holding))
        self.in_flight[number] = tuple(dict.fromkeys(flying))

    def _stage(self, item: UnrolledOp, movement: Movement, stream: int) -> None:
        """Creates the work of a local copy before a send in which the receiver copies out of this
        rank's memory. The copy is needed if the sent tensor is in memory that other ranks cannot
        map.
        """
        tv = movement.sent
        if tv is not None and tv.memory is MemoryType.global_:
            nbytes = held_nbytes(tv, item.sizes(self.place)[tv])
            self._compute(item, staging_cost(nbytes, self.machine), stream)

    def _pair(self, half: UnrolledOp, movement: Movement) -> list[tuple[WorkItem, bool]]:
        is_send, tv = movement.sent is not None, movement.buffer
        nbytes = held_nbytes(tv, half.sizes(self.place)[tv])
        for other, places, partners in half.pairs:
            for k in np.nonzero(places == self.place)[0].tolist():
                ends = (half, other) if is_send else (other, half)
                peer = int(partners[k])
                work = self._transfer(ends, peer, nbytes, movement.backend, is_send=is_send)
                return [(work, is_send)]
        raise AssertionError(
            f"internal error: no rank takes the other part in {half.site.op.name} of {tv}, but the "
            "check of sends and receives has not reported it. Please report this program"
        )

    def _transfer(
        self,
        ends: tuple[UnrolledOp, UnrolledOp],
        peer: int,
        nbytes: int,
        backend: str,
        *,
        is_send: bool,
    ) -> WorkItem:
        """Returns one piece of work for a send together with its receive, and adds the
        multiprocessors and links that this rank's end uses. The method is called for both ranks,
        and returns the same work.

        - `ends`: the ops of the send and of the receive.
        - `peer`: the index of the other rank; `is_send`: whether this rank sends.
        - `backend`: the library that makes the transfer.
        """
        theirs = int(self.shared.classes[peer])
        pair = (self.number, theirs) if is_send else (theirs, self.number)
        key = (id(ends[0]), id(ends[1]), *pair)
        work = self.shared.by_key.get(key)
        if work is None:
            cost = transfer_cost(nbytes, backend, self.machine)
            item = ends[1] if backend == PEER_COPIES else ends[0]
            work = self.shared.by_key[key] = self.shared.add(item, cost, is_transfer=True)
        self._need(work, "out" if is_send else "in", 1.0)
        # A send and a receive are one library call. A peer copy is work of the receiver alone.
        part = float(not is_send) if backend == PEER_COPIES else 0.5
        self._need(work, "multiprocessors", work.cost.share * part)
        return work

    def _permute(self, item: UnrolledOp, movement: Movement) -> list[tuple[WorkItem, bool]]:
        teams, (inp, out) = item.teams, movement.both
        assert teams is not None and item.peers is not None, (
            "the communications of the members were not matched"
        )
        members = teams.members[int(teams.team[self.place])]
        to, source = (int(members[int(at(p, self.place))]) for p in item.peers)  # pyright: ignore[reportArgumentType]
        sizes = item.sizes(self.place)
        if to == self.place:
            cost = staging_cost(held_nbytes(inp, sizes[inp]), self.machine)
            work = self.shared.add(item, cost, is_transfer=False)
            self._need(work, "multiprocessors", cost.share)
            return [(work, False)]
        ends = (item, item)
        found: list[tuple[WorkItem, bool]] = []
        for peer, tv, is_send in ((to, inp, True), (source, out, False)):
            nbytes = held_nbytes(tv, sizes[tv])
            work = self._transfer(ends, peer, nbytes, movement.backend, is_send=is_send)
            found.append((work, is_send))
        return found


# ----------------------------------------------------------------------
# Classes of ranks that take the same time: equal ops, and partners of equal classes.
#
# Ranks are first divided by their ops, sizes and streams, then repeatedly by the classes of their
# partners, until nothing changes. The numbers of peers and roots do not count: a ring is one class.

_MIX, _ADD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def rank_classes(items: Sequence[UnrolledOp], count: int) -> Array:
    """Divides `count` ranks into classes that take the same time, and returns the class number of
    each rank. Ranks of one class run the same ops on the same sizes, and the ranks with which they
    communicate are in equal classes, too.

    `items` are the ops of all ranks. Classes are numbered in the order of their first ranks.
    """
    marks: Array = np.zeros(count, dtype=np.uint64)
    every = _each(items)
    names = _StreamNames(count)
    differs = any(isinstance(s, np.ndarray) for r in every for s in (r.stream, r.joins))
    numbers = {id(r): i for i, r in enumerate(every)}
    for item in every:
        columns: list[PerRank] = [] if item.mask.all() else [item.mask]
        for stream in (item.stream, item.joins):
            if differs and stream is not None:
                columns.append(names.of(stream, item.mask))
        columns += [n for shape in item.shapes.values() for n in shape]
        if len(item.pairs) > 1:
            partner = np.zeros(count, dtype=np.int64)
            for other, places, _ in item.pairs:
                partner[places] = numbers[id(other)]
            columns.append(partner)
        for column in columns:
            if isinstance(column, np.ndarray):
                marks = _mix(marks, np.where(item.mask, column, -1))
    classes, found = _numbered(marks)
    while found > 1:
        marks = classes.astype(np.uint64)
        done: set[int] = set()
        for item in every:
            marks = _partners(item, classes, marks, done)
        before = found
        classes, found = _numbered(marks)
        if found == before:
            break
    return classes


def _partners(item: UnrolledOp, classes: Array, marks: Array, done: set[int]) -> Array:
    """Returns new hash values of all ranks, which also depend on the classes of the ranks with
    which a rank communicates in `item`. Ranks whose partners are in different classes thus get
    different values.

    `marks` has the hash values so far. `done` has the ids of the teams that are already part of
    these values, because each division into teams counts only once.
    """
    teams = item.teams
    if teams is not None and id(teams) not in done:
        done.add(id(teams))
        every = _mix(np.zeros(teams.members.shape, dtype=np.uint64), classes[teams.members])
        together = every.sum(axis=1)
        marks = _mix(marks, np.where(teams.team < 0, 0, together[teams.team]))
    if teams is not None and item.peers is not None:
        for peer in item.peers:
            met = classes[teams.members[teams.team, np.where(item.mask, peer, 0)]]
            marks = _mix(marks, np.where(item.mask, met, -1))
    for _, places, partners in item.pairs:
        met = np.full(len(classes), -1)
        met[places] = classes[partners]
        marks = _mix(marks, met)
    return marks


def _each(items: Sequence[UnrolledOp]) -> list[UnrolledOp]:
    """Returns all ops of `items`. Each end of a group of transfers (`EndCoalescing`) is followed by
    the sends and receives of its group.
    """
    return [r for item in items for r in (item, *(item.group or ()))]


def _mix(marks: Array, column: Array) -> Array:
    value = column.astype(np.uint64) + np.uint64(_ADD)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(_MIX)
    mixed = (marks ^ value) * np.uint64(_MIX)
    return mixed ^ (mixed >> np.uint64(31))


def _numbered(marks: Array) -> tuple[Array, int]:
    """Returns a class number for each rank and the number of classes. Ranks with equal hash values
    in `marks` are in one class, and classes are numbered in the order of their first ranks.
    """
    _, first, inverse = np.unique(marks, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse.reshape(-1)], len(first)


class _StreamNames:
    """Numbers the streams of each rank in the order of first use. Stream numbers do not affect the
    time, so two ranks that run equal ops on differently numbered streams should count as equal.
    """

    def __init__(self, count: int) -> None:
        self._seen: dict[int, Array] = {}
        self._next: Array = np.zeros(count, dtype=np.int64)

    def of(self, stream: PerRank, mask: Array) -> Array:
        """Returns the new number of a stream for each rank in `mask`, and 0 for other ranks.
        `stream` is the stream's own number on each rank."""
        numbers = np.broadcast_to(np.asarray(stream), self._next.shape)
        found = np.zeros(len(numbers), dtype=np.int64)
        for number in np.unique(numbers[mask]).tolist():
            names = self._seen.setdefault(number, np.full(len(numbers), -1))
            here = mask & (numbers == number)
            new = here & (names < 0)
            names[new] = self._next[new]
            self._next[new] += 1
            found[here] = names[here]
        return found
