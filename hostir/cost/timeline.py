"""The timetable: when each piece of work of a class of ranks begins and ends.

Work waits for what its stream was given before, for what that stream waits for, and for those that
it meets; the host is taken to be ahead. Then it takes what is left of the resources that it needs,
in the order in which work became ready: multiprocessors, which kernels share, and a link out of
each rank and one into it. Of what becomes ready together, what computes comes first, but for what
is ready from the beginning: that follows the program. With a part of what it needs work is as much
slower. So matmuls that fill the machine take the sum of their times,
copies run beside kernels, and a collective of NCCL shares the device with a matmul: one that was
ready before takes its multiprocessors from the matmul, which goes on with the others; one that
becomes ready later goes on in what the matmul's last wave of tiles leaves idle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hostir.analysis.unrolled_program import UnrolledOp
from hostir.cost.op_costs import Cost

Resource = Literal["multiprocessors", "out", "in"]
_NEARLY_NOTHING = 1e-15


@dataclass(eq=False, slots=True)
class WorkItem:
    """A piece of work of one rank, or of several that meet; times are in seconds.

    `needs`: (class of ranks, resource) -> which part of it. `streams`: class -> the stream that
    it holds up. `cause`: what it waited for last; None where it is the first.
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
        for other in others:
            # Itself, where the ranks of a class wait for each other in a circle.
            if other not in self.before:
                self.before[other] = None
                other.after.append(self)

    @property
    def classes(self) -> set[int]:
        return {c for c, _ in self.needs} | set(self.streams)


class Simulator:
    """Runs work; then each has its `start`, `end` and `cause`, but for what waits for itself."""

    def __init__(self, work: Iterable[WorkItem]) -> None:
        self.work = list(work)
        self.waiting = {w: len(w.before) for w in self.work}
        # (time, count, work, version): a version of -1 says that it is ready.
        self.events: list[tuple[float, int, WorkItem, int]] = []
        self.count = 0
        self.active: dict[int, dict[WorkItem, None]] = {}
        self.last: WorkItem | None = None

    def run(self) -> None:
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
        """Give out the resources of these classes, and of those that work ties to them."""
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
    """Return the order in which active work takes resources."""
    return work.ready, work.is_transfer and work.ready > 0, work.order


def critical_path(work: Iterable[WorkItem]) -> list[tuple[WorkItem, float]]:
    """Return what the end of the last work waited for, last first, each with its seconds on the
    way."""
    path: list[tuple[WorkItem, float]] = []
    at = max(work, key=lambda w: (w.end, w.order), default=None)
    while at is not None:
        path.append((at, at.end - (at.cause.end if at.cause is not None else 0.0)))
        at = at.cause
    return path
