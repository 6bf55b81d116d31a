"""What a graph that repeats communications must know of their backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Protocol
from weakref import WeakSet

from multidevice.coordination.bounded_wait import Calls, Ledger, Team
from multidevice.transports.base.protocol import PeerMemory

# What ranks say of a run that graphs repeat on all of them or on none (`Captured.vote`): "step by
# step", and "I have not captured it". What they have captured has numbers from FIRST_GRAPH on;
# between lies what `multidevice/coordination/words.py` keeps for itself.
STEP_BY_STEP, NOT_CAPTURED, FIRST_GRAPH = 0, 2, 3


@dataclass(frozen=True)
class Vote:
    """How the ranks of a team agree on how each run of a program is carried out."""

    voters: Callable[[], PeerMemory]
    team: Team

    def ask(self, kind: int) -> tuple[int, ...] | None:
        """See `Captured.vote`; collective over the team."""
        voters = self.voters()
        voters.connect(self.team)
        return voters.vote(self.team, kind)

    def start_over(self) -> None:
        """See `Captured.start_over`; collective over the team."""
        self.voters().start_over(self.team)

    def take_back(self) -> None:
        """See `Captured.take_back`."""
        self.voters().take_back(self.team)


class Repeats(Protocol):
    """What keeps graphs."""

    def forget(self) -> None:
        """Drops them."""
        ...


class Captured:
    """The part of a backend that graphs ask; by itself, nothing can be captured.

    `generation` counts how often communicators were given up: what was captured before is void.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Notes who keeps graphs of this backend's communications."""
        self._repeats = self._repeats or WeakSet()
        self._repeats.add(repeats)

    def make_void(self) -> None:
        """Has all graphs dropped, before communicators go: NCCL's wait for graphs that hold them,
        for ever."""
        self.generation += 1
        for repeats in list(self._repeats or ()):
            repeats.forget()

    def can_capture(self, what: str) -> bool:
        """Returns whether a stream alone carries out a communication of this name, once posted, so
        that a graph may repeat it."""
        del what
        return False

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Tells the members of a team what this rank would do in a run; returns what each one
        would, in team order. None where each may go its own way: where a graph of one rank goes
        together with the steps of another."""
        del team, kind
        return None

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures a run that `stream` will repeat; it has
        what has to be kept for as long as the graph."""
        del stream
        return nullcontext([])

    def flush(self) -> None:
        """Enqueues what was put off in a capture, to go together with what might have followed."""

    def start_over(self, team: Team) -> None:
        """Makes up for a capture that members of a team have begun and not ended; collective."""
        del team

    def take_back(self, team: Team) -> None:
        """Has the ranks of a team find, when they next exchange claims, that this one has not
        repeated what the others did: what they captured together is void."""
        del team

    @contextmanager
    def noting(self) -> Generator[Counter[Calls]]:
        """A context that counts the calls that this thread enters in it, per stream of calls."""
        noted = self._ledger.noted[get_ident()] = Counter[Calls]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Counts calls that a graph repeats; with sign -1, those that were not made after all."""
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
