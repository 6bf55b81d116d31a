"""Waits with a deadline, and the facts that a rank knows about its peers while it waits.

Every wait on another rank uses `poll_until`. It yields the processor, checks what the peers
announced, and ends at a deadline. A `Ledger` counts the calls that this rank has entered. A rank
that leaves announces its counts: a peer that left after it entered a collective is no error.
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
    """The key of a sequence of calls in a ledger: the kind of call and the team that makes them.

    Point-to-point transfers also have `ends`: (source rank, target rank).
    """

    kind: str
    team: Team
    ends: tuple[int, ...] = ()

    def __str__(self) -> str:
        ends = f"{'->'.join(map(str, self.ends))} " if self.ends else ""
        return f"{self.kind} {ends}{team_text(self.team)}"

    @staticmethod
    def from_row(row: Sequence[Any]) -> Calls:
        """Reads the list that JSON makes of a `Calls`."""
        kind, team, ends = row
        return Calls(kind, tuple(team), tuple(ends))


def rows_of(counts: Mapping[Calls, int]) -> list[tuple[Calls, int]]:
    """Returns counts of calls as rows that JSON can write; `counts_from` reads them."""
    return [*counts.items()]


def counts_from(rows: Iterable[Sequence[Any]]) -> dict[Calls, int]:
    """Reads the counts of calls that `rows_of` returned, after JSON."""
    return {Calls.from_row(key): count for key, count in rows}


@dataclass(frozen=True)
class Need:
    """A condition of a wait: `rank` has entered at least `count` calls of the sequence `key`."""

    rank: int
    key: Calls
    count: int


@dataclass(frozen=True)
class Event:
    """An announcement of a rank: that it failed, or that it left after the calls in `entered`."""

    rank: int
    kind: Literal["failed", "left"]
    text: str
    entered: dict[Calls, int] = field(default_factory=dict[Calls, int])

    def encode(self) -> bytes:
        """Returns the event as JSON in bytes."""
        row = self.rank, self.kind, self.text[:2000], rows_of(self.entered)
        return json.dumps(row).encode()

    @staticmethod
    def decode(data: bytes) -> Event:
        """Reads what `encode` wrote."""
        rank, kind, text, entered = json.loads(data)
        return Event(rank, kind, text, counts_from(entered))


class Ledger:
    """The number of calls that this rank has entered, per sequence of calls."""

    def __init__(self) -> None:
        self.entered: dict[Calls, int] = {}
        # Thread number -> the calls that this thread has entered since it began to record them.
        self.noted: dict[int, Counter[Calls]] = {}

    def enter(self, key: Calls) -> int:
        """Counts one more call and returns its sequence number, from 0."""
        number = self.entered.get(key, 0)
        self.entered[key] = number + 1
        if self.noted and (noted := self.noted.get(get_ident())) is not None:
            noted[key] += 1
        return number

    def leave(self, key: Calls, number: int) -> None:
        """Uncounts the call with this number, the latest one, because it could not be started."""
        if self.entered.get(key) != number + 1:
            return
        self.entered[key] = number
        if self.noted and (noted := self.noted.get(get_ident())) is not None:
            noted[key] -= 1


class Peers:
    """The events that the other ranks have announced, as far as this rank has received them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: dict[int, Event] = {}

    def record(self, event: Event) -> None:
        """Stores an event. A failure is never replaced by the announcement of leaving that follows
        it.
        """
        old = self.events.get(event.rank)
        if old is None or old.kind == "left":
            self.events[event.rank] = event

    def check(self, what: str, needs: Iterable[Need]) -> None:
        """Raises an error when a peer failed, or left before it entered a call that this wait
        needs.

        Raises:
            PeerError: names the peer, its announcement, and the call in which this rank waits.
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
                    f"where rank {self.rank} waits for it"
                )


def poll_until(
    done: Callable[[], bool],
    *,
    what: Callable[[], str],
    look: Callable[[float], None],
    rank: int,
    why: Callable[[], str] = lambda: "",
) -> None:
    """Returns when `done()` is true.

    `look(waited_s)` runs every few milliseconds of a longer wait. It raises an error when the wait
    can no longer end. `what()` describes the wait and `why()` its cause, for the error at the
    deadline.

    Raises:
        CommunicationTimeout: `done()` stayed false for `FUSER_TIMEOUT_S`; the message contains
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
    """Returns a team as text: `(0 1 3)`."""
    return "(" + " ".join(str(rank) for rank in team) + ")"
