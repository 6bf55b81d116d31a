"""Waits with a deadline, and the facts that a rank knows about other ranks while it waits.

Every wait on another rank uses `poll_until`. That function yields the processor, checks the
announcements of the other ranks, and ends at a deadline. A `Ledger` counts the calls that a rank
has entered. A rank that leaves the job announces these counts. If it entered a collective before it
left, the other ranks can still complete that collective, and raise no error.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal, NamedTuple

from fuser.support import options
from fuser.support.errors import CommunicationTimeout, PeerError

# Global ranks that communicate with one another, in order.
Team = tuple[int, ...]

# A short wait spins (a small collective takes tens of microseconds). A longer one yields the
# processor. One that has lasted SLEEP_AFTER_S sleeps, so that ranks that still compute get the
# core.
SPINS = 20
SLEEP_AFTER_S = 0.02
SLEEP_S = 0.0002
LOOK_EVERY_S = 0.02


# The kinds of calls for point-to-point transfers. Each transfer counts as SEND on one rank and as
# RECV on the other.
SEND, RECV = "send", "recv"


class Calls(NamedTuple):
    """The key under which ranks count calls: the kind of call, and the team of ranks that make it.

    All calls with one key form a sequence. Each rank counts its calls of each sequence in its
    ledger, so that calls of different ranks can be matched by their numbers. For point-to-point
    transfers, `ends` is (source rank, target rank), otherwise ().
    """

    kind: str
    team: Team
    ends: tuple[int, ...] = ()

    def __str__(self) -> str:
        ends = f"{'->'.join(map(str, self.ends))} " if self.ends else ""
        return f"{self.kind} {ends}{team_text(self.team)}"

    @staticmethod
    def from_row(row: Sequence[Any]) -> Calls:
        """Creates a `Calls` from a list [kind, team, ends], which JSON has read."""
        kind, team, ends = row
        return Calls(kind, tuple(team), tuple(ends))


def rows_of(counts: Mapping[Calls, int]) -> list[tuple[Calls, int]]:
    """Converts counts of calls to a list that JSON can write; `counts_from` is the inverse
    function.
    """
    return [*counts.items()]


def counts_from(rows: Iterable[Sequence[Any]]) -> dict[Calls, int]:
    """Converts the list that `rows_of` returned back to counts of calls, after JSON has read it."""
    return {Calls.from_row(key): count for key, count in rows}


@dataclass(frozen=True)
class Need:
    """A condition for the end of a wait: rank `rank` must have entered at least `count` calls of
    the sequence `key`.
    """

    rank: int
    key: Calls
    count: int


@dataclass(frozen=True)
class Event:
    """An announcement of a rank to all other ranks: the rank has failed, or leaves the job.

    `text` is the error or the reason. `entered` has the calls that the rank had entered before.
    """

    rank: int
    kind: Literal["failed", "left"]
    text: str
    entered: dict[Calls, int] = field(default_factory=dict[Calls, int])

    def encode(self) -> bytes:
        """Returns the announcement as JSON in bytes, with at most 2000 characters of its text."""
        row = self.rank, self.kind, self.text[:2000], rows_of(self.entered)
        return json.dumps(row).encode()

    @staticmethod
    def decode(data: bytes) -> Event:
        """Creates an announcement from the bytes that `encode` returned."""
        rank, kind, text, entered = json.loads(data)
        return Event(rank, kind, text, counts_from(entered))


class Ledger:
    """Counts the calls that this rank has entered (begun), for each sequence of calls (`Calls`).

    Ranks match their calls by these counts, and find out by them which rank is missing in a call.
    """

    def __init__(self) -> None:
        self.entered: dict[Calls, int] = {}
        # Thread number -> the calls that this thread has entered since it began to record them.
        self.noted: dict[int, Counter[Calls]] = {}

    def enter(self, key: Calls) -> int:
        """Counts one more call of the sequence `key` as entered; returns its number, which starts
        at 0.
        """
        number = self.entered.get(key, 0)
        self.entered[key] = number + 1
        if self.noted and (noted := self.noted.get(get_ident())) is not None:
            noted[key] += 1
        return number

    def leave(self, key: Calls, number: int) -> None:
        """Stops counting call `number` of the sequence `key` as entered, because it could not be
        started.

        Does nothing if later calls of the sequence have been numbered already.
        """
        if self.entered.get(key) != number + 1:
            return
        self.entered[key] = number
        if self.noted and (noted := self.noted.get(get_ident())) is not None:
            noted[key] -= 1


class Peers:
    """The announcements of other ranks (failures and departures) that this rank has received."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: dict[int, Event] = {}

    def record(self, event: Event) -> None:
        """Stores an announcement of another rank.

        An announcement of a failure is never replaced, because the failed rank also announces that
        it leaves.
        """
        old = self.events.get(event.rank)
        if old is None or old.kind == "left":
            self.events[event.rank] = event

    def check(self, what: str, needs: Iterable[Need]) -> None:
        """Raises an error if another rank has failed, or has left before it entered a call in
        `needs`.

        `what` describes the call in which this rank waits.

        Raises:
            PeerError: names the other rank, its announcement, and the call in which this rank
                waits.
        """
        if not self.events:
            return
        for rank in sorted(self.events):
            event = self.events[rank]
            if event.kind == "failed":
                error = PeerError(
                    f"rank {rank} failed: {event.text} (rank {self.rank} was in {what})"
                )
                error.ranks = (rank,)
                raise error
        for need in needs:
            event = self.events.get(need.rank)
            if event is not None and event.entered.get(need.key, 0) < need.count:
                raise PeerError(
                    f"rank {need.rank} left early ({event.text}) without entering {what}, "
                    f"where rank {self.rank} waits for it: every rank must make the same calls"
                )


def poll_until(
    done: Callable[[], bool],
    *,
    what: Callable[[], str],
    look: Callable[[float], None],
    rank: int,
    why: Callable[[], str] = lambda: "",
) -> None:
    """Waits until `done()` is True, with the deadline `FUSER_TIMEOUT_S`.

    - `look(waited_s)`: called every few milliseconds of a longer wait; raises an error if the wait
      can no longer end.
    - `what()`, `why()`, `rank`: the description of the wait, the cause of the delay, and this rank,
      for the error at the deadline.

    Raises:
        CommunicationTimeout: `done()` stayed False for `FUSER_TIMEOUT_S`; the message contains
            `what()` and `why()`.
        PeerError: from `look()`.
    """
    for _ in range(SPINS):
        if done():
            return
    limit_s = options.timeout_s()
    start = time.monotonic()
    next_look = start + LOOK_EVERY_S / 4
    while not done():
        now = time.monotonic()
        if now >= next_look:
            look(now - start)
            next_look = now + LOOK_EVERY_S
            if now - start > limit_s:
                cause = why()
                raise CommunicationTimeout(
                    f"rank {rank}: {what()} did not complete within {limit_s:g} s (FUSER_TIMEOUT_S)"
                    + (f": {cause}" if cause else "")
                )
        if now - start < SLEEP_AFTER_S:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S)


def team_text(team: Iterable[int]) -> str:
    """Returns the ranks of a team as text: `(0 1 3)`."""
    return "(" + " ".join(str(rank) for rank in team) + ")"
