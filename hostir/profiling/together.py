"""The ranks that run one program, at something that all of them do: errors, talk, and clocks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hostir.profiling.timers import clock
from multidevice.coordination.bounded_wait import Team

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator

T = TypeVar("T")
# Barriers that bound how far the clocks of ranks are apart.
_BARRIERS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Together:
    """The ranks of the program, seen from one; a rank outside of them is alone."""

    def __init__(self, communicator: Communicator | None, team: Team) -> None:
        self._communicator = communicator
        self._team = tuple(sorted(team))
        self.rank = 0 if communicator is None else communicator.rank()
        self._is_alone = communicator is None or len(team) < 2 or self.rank not in team
        self.is_first = self.rank == self._team[0]

    def together(self, work: Callable[[], T]) -> T:
        """Return what this rank's work does, once that of all has been done without an error.

        Raises this rank's error, or `PeerError` naming another's; `work` does not communicate.
        """
        try:
            result = work()
        except Exception as error:
            self.barrier(error)
            raise
        self.barrier()
        return result

    def barrier(self, error: Exception | None = None) -> None:
        if self._communicator is not None and not self._is_alone:
            self._communicator.agree(error, team=self._team)

    def tell(self, what: T) -> list[T]:
        """Return what each rank tells, in the order of the ranks: lists, texts and numbers."""
        if self._communicator is None or self._is_alone:
            return [json.loads(json.dumps(what))]
        told = self._communicator.exchange(json.dumps(what).encode(), team=self._team)
        return [json.loads(one) for one in told]

    def begin_run(self) -> None:
        """Count a run, as every rank does."""
        if self._communicator is not None:
            self._communicator.begin_run(self._team)


def aligned(ranks: Together) -> tuple[float, str]:
    """Return what to add to this rank's clock to have that of the first, and how sure that is.

    A barrier ends, on each rank, after it has begun on all: that bounds the distance.
    """
    marks: list[tuple[float, float]] = []
    for _ in range(_BARRIERS):
        begin = clock()
        ranks.barrier()
        marks.append((begin, clock()))
    told: list[tuple[str, list[tuple[float, float]], int]]
    told = ranks.tell((_host_name(), marks, ranks.rank))
    (host, first, _), *others = told
    if not others:
        return 0.0, "one"
    shift, widest, same = 0.0, 0.0, True
    for theirs, mine, rank in others:
        low = max(a - b for (a, _), (_, b) in zip(first, mine, strict=True))
        high = min(b - a for (_, b), (a, _) in zip(first, mine, strict=True))
        is_one = theirs == host and low <= 0.0 <= high
        found = 0.0 if is_one else (low + high) / 2
        widest, same = max(widest, (high - low) / 2), same and is_one
        shift = found if rank == ranks.rank else shift
    kept = f"barriers bound their distance to {widest * 1e6:.1f} us"
    if same:
        return shift, f"the ranks share that of their host; {kept}"
    return shift, f"of several hosts, set by the middle of what barriers allow; {kept}"


def _host_name() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
