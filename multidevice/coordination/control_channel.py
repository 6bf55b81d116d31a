"""The control channel: small messages between the ranks of a job, separate from tensor data.

The channel carries errors, digests, program texts, and the announcements of ranks that fail or
leave. All ranks of a team must take part in each operation. If an operation ends in an error, every
rank has made the same calls, so that the channel and the data communicators stay usable.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fuser.support import options
from fuser.support.errors import (
    CommunicationError,
    CommunicationTimeout,
    DeadlockError,
    PeerError,
    ProgramMismatchError,
)
from multidevice.coordination import shared_page
from multidevice.coordination.bounded_wait import (
    Calls,
    Event,
    Ledger,
    Need,
    Peers,
    Team,
    poll_until,
    team_text,
)
from multidevice.coordination.deadlock_detector import Deadlock, WaitForGraph, nbytes_of
from multidevice.coordination.shared_page import LINE_WORDS

# kind, status (1: this rank has an error), size of the text that follows, digest
_RECORD = struct.Struct("<BBxxI16s")
RECORD_NBYTES = _RECORD.size
_KINDS = ("agree", "exchange", shared_page.OFFER, shared_page.OPENING)
# The words for these operations in error messages: the user's call that makes them.
_WORDS = {
    "agree": "a barrier or an agreement",
    "exchange": "the check that all ranks are about to run the same program",
    shared_page.OFFER: "fd.execute or another run, in the setup before the first run of a team",
    shared_page.OPENING: "fd.execute or another run, in the setup before the first run of a team",
}
_NO_DIGEST = bytes(16)
# How often a rank that has finished checks the processes of the ranks that have not.
LEAVERS_EVERY_S = 0.2
# A wait that has lasted this long is posted in the wait-for graph, and checked for deadlocks.
WATCH_AFTER_S = 0.1
# How long the communications of a failed call continue to serve its peers.
LEFT_AFTER_S = 0.5
# The kinds under which ledgers count these operations: operations inside calls of programs,
# operations that users ask for, and exchanges of run signatures.
WITHIN_CALLS, OF_USERS, SIGNATURES = "control", "talk", "signatures"


@dataclass(frozen=True)
class ControlCall:
    """One operation of the control channel, as one rank sees it.

    - `kind`: the name of the operation, such as "agree".
    - `team`: the ranks that take part; `rank`: this rank.
    - `key`, `seq`: the key under which the ranks count such operations, and the number of this
      operation in their count.
    """

    kind: str
    team: Team
    rank: int
    key: Calls
    seq: int

    def describe(self) -> str:
        """Returns the operation, its team and its number as text, for error messages."""
        inside = f"control {self.kind} over team {team_text(self.team)}"
        return f"{_WORDS[self.kind]} ({inside}, sequence number {self.seq})"

    def needs(self) -> list[Need]:
        """Returns the calls that each other rank must enter before this operation can complete."""
        return [Need(rank, self.key, self.seq + 1) for rank in self.team if rank != self.rank]


class Progressing(Protocol):
    """The interface of a started communication that makes progress during every wait of its
    rank.
    """

    def done(self) -> bool:
        """Makes as much progress as possible without waiting; returns whether the communication has
        ended.
        """
        ...


class Control(ABC):
    """The control channel of one rank, over which all ranks of a team exchange bytes.

    Each way to start a job (MPI, torchrun, simulation) has a subclass, which implements `_gather`,
    `_gather_varied` and `page`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.ledger = Ledger()
        self.peers = Peers(rank)
        self.world: Team = tuple(range(size))
        # Which rank waits for which; None unless all ranks share a host.
        self.wait_graph: WaitForGraph | None = None
        # The calls, by stream and count, that ended in a deadlock.
        self._ended: set[tuple[Calls, int]] = set()
        # The error of an earlier call on this rank, for the messages of ranks that wait for this
        # one.
        self.trouble = ""
        # The team of the run that this rank is in, and how many runs it has begun.
        self.run: tuple[Team, int] = (), 0
        self.runs: dict[Team, int] = {}
        # Communications that were started and not waited for: they make progress in every wait.
        self.works: set[Progressing] = set()
        # Called with the key of a sequence of calls that the members of its team count differently.
        self.on_lost: list[Callable[[Calls], None]] = []
        # Called on all members of a team when a call has failed on any of them.
        self.on_mended: list[Callable[[Team], None]] = []

    @abstractmethod
    def _gather(self, record: bytes, step: ControlCall) -> list[bytes]:
        """Sends this rank's `record` to all ranks of the team; returns all records, in team order.

        All records have the same size. `step` identifies the operation for which the records are
        exchanged: its kind, such as "agree", its team and its number.
        """

    @abstractmethod
    def _gather_varied(
        self, payload: bytes, sizes: Sequence[int], step: ControlCall
    ) -> list[bytes]:
        """Sends this rank's `payload` to all ranks of the team; returns all payloads, in team
        order.

        `sizes` are the sizes of the ranks' payloads in bytes. `step` identifies the operation for
        which the payloads are exchanged: its kind, such as "agree", its team and its number.
        """

    @abstractmethod
    def page(self, nbytes: int, team: Team) -> memoryview | None:
        """Allocates zeroed memory that the ranks of the team share; returns it as a view of 8-byte
        words.

        All ranks of the team must make the call. Returns None if the team cannot share memory, for
        example because its ranks are on several hosts.
        """

    def wake(self, team: Team) -> None:
        """Tells the ranks of a team that shared memory has changed.

        This base class does nothing, because ranks that are processes read shared memory while they
        wait. The subclass for simulated ranks, which are threads, makes waiting threads check
        again.
        """
        return

    def listen(self) -> None:
        """Records the announcements of other ranks (failures and departures) that have arrived so
        far.

        This base class does nothing. A subclass for several processes overrides the method.
        """
        return

    def poll_until(
        self,
        done: Callable[[], bool],
        *,
        what: Callable[[], str],
        needs: Callable[[], Iterable[Need]],
    ) -> None:
        """Waits until `done()` is True, with a deadline, and meanwhile checks the ranks that the
        wait needs.

        The communications that this rank has started make progress meanwhile. `what()` returns the
        description of the wait, for error messages. `needs()` returns the calls that other ranks
        must enter.

        Raises:
            DeadlockError: ranks wait for each other; all of these ranks raise it.
            PeerError: another rank failed, left early, or its process has ended.
            CommunicationTimeout: the deadline passed; the message names the wait, and the ranks
                that have not entered it.
        """
        wait_graph = self.wait_graph
        works = [work for work in self.works if work.done != done]

        def done_here() -> bool:
            if done():
                return True
            for work in works:
                work.done()
            return False

        def look(waited_s: float) -> None:
            self.listen()
            if self.peers.events and not done():
                self.peers.check(what(), needs())
            if wait_graph is None or waited_s < WATCH_AFTER_S or done():
                return
            is_patient = waited_s < LEFT_AFTER_S
            deadlock = wait_graph.watch(
                what() + self.trouble, needs(), self.ledger.entered, is_patient=is_patient
            )
            if deadlock is not None:
                self._count_as_entered(deadlock)
                raise _deadlocked(deadlock)

        def why() -> str:
            return wait_graph.suspects(needs()) if wait_graph is not None else ""

        try:
            ended = done_here if works else done
            poll_until(ended, what=what, look=look, rank=self.rank, why=why)
        finally:
            if wait_graph is not None:
                wait_graph.clear()

    def check_ended(self, what: Callable[[], str], needs: Iterable[Need]) -> None:
        """Raises `DeadlockError` if another rank has found that this rank's wait is part of a
        deadlock.

        `what()` returns the description of the wait, and `needs` are the calls that the wait needs.
        """
        if self.wait_graph is None:
            return
        deadlock = self.wait_graph.watch(what() + self.trouble, needs, self.ledger.entered)
        self.wait_graph.clear()
        if deadlock is not None:
            self._count_as_entered(deadlock)
            raise _deadlocked(deadlock)

    def _count_as_entered(self, deadlock: Deadlock) -> None:
        """Marks as entered all calls for which the ranks of a deadlock wait.

        Some ranks never enter these calls. Without the marks, the ranks would count their calls
        differently, and later calls would not match.
        """
        for need in (need for wait in deadlock.waits for need in wait.needs):
            entered = self.ledger.entered
            if need.rank == self.rank:
                entered[need.key] = max(entered.get(need.key, 0), need.count)
            if (need.key, need.count) not in self._ended:
                self._ended.add((need.key, need.count))
                self.lose(need.key)

    def hear_of_deadlocks(self) -> None:
        """Reads the deadlocks that other ranks have found, and counts the calls in these deadlocks
        as entered.

        This rank may not have found these deadlocks itself, because another error ended its wait.
        """
        for deadlock in self.wait_graph.news() if self.wait_graph is not None else ():
            self._count_as_entered(deadlock)

    def lose(self, key: Calls) -> None:
        """Drops the transport resources (such as communicators) that a sequence of calls uses.

        Called after ranks have counted different numbers of these calls, so that messages of
        unfinished calls may remain in the resources. `key` names the sequence. The next call
        creates new resources.
        """
        for forget in self.on_lost:
            forget(key)

    def mend(self, team: Team) -> None:
        """Drops the transport resources (such as communicators) of a team and of its subsets.

        Called after a failed call of the team, which may have left messages in these resources.
        """
        for give_up in self.on_mended:
            give_up(team)

    def begin_run(self, team: Team) -> None:
        """Counts one more run of a host program that the ranks of `team` run together.

        All ranks of the team begin the same number of runs, so the count identifies the run.
        """
        count = self.runs[team] = self.runs.get(team, 0) + 1
        self.run = team, count

    # Collective operations

    def exchange(
        self,
        payload: bytes,
        *,
        team: Team | None = None,
        stream: str = WITHIN_CALLS,
        kind: str = "exchange",
    ) -> list[bytes]:
        """Sends this rank's `payload` to all ranks of a team; returns all payloads, in team order.

        If `team` is None, the team has all ranks. `stream` is the name of a sequence of calls (not
        a CUDA stream): calls of the ranks that have the same number in this sequence belong
        together. `kind` is the name of the operation, which must be equal on all ranks.
        """
        team = self._members(team, kind)
        if len(team) == 1:
            return [payload]
        step = self._step(kind, team, stream)
        records = self._records(step, 0, len(payload), _NO_DIGEST)
        return self._gather_varied(payload, [size for _, size, _ in records], step)

    def agree(
        self,
        error: BaseException | None,
        *,
        digest: bytes = b"",
        team: Team | None = None,
        stream: str = WITHIN_CALLS,
    ) -> None:
        """Waits for all ranks of a team; returns if no rank has an error and all digests are equal.

        `error` is this rank's error, or None. `digest` is a hash of the data that must be equal on
        all ranks. If `team` is None, the team has all ranks. `stream` is the name of a sequence of
        calls (not a CUDA stream): calls of the ranks that have the same number in this sequence
        belong together.

        Raises:
            error: this rank's own error, if there is one.
            PeerError: another rank has an error; the message names rank, type and text.
            ProgramMismatchError: the digests differ; `compare_texts` then shows where.
        """
        team = self._members(team, "agree")
        if len(digest) > 16:
            raise CommunicationError(
                "internal error: the hash by which ranks compare their programs must have at most "
                f"16 bytes, but it has {len(digest)}. Please report the program and this message"
            )
        if len(team) == 1:
            if error is not None:
                raise error
            return
        text = f"{type(error).__name__}: {error}".encode() if error is not None else b""
        step = self._step("agree", team, stream)
        records = self._records(step, int(error is not None), len(text), digest.ljust(16, b"\0"))
        if any(status for status, _, _ in records):
            texts = self._gather_varied(text, [size for _, size, _ in records], step)
            if error is not None:
                raise error
            failed = [i for i, (status, _, _) in enumerate(records) if status]
            raise PeerError(_failures_text([(team[i], texts[i].decode()) for i in failed]))
        if len({digest for _, _, digest in records}) > 1:
            groups = _groups(team, [digest.hex() for _, _, digest in records])
            raise ProgramMismatchError(
                "the ranks are about to run different programs: "
                + ", ".join(
                    f"ranks {team_text(ranks)} have the program with the hash {value}"
                    for value, ranks in groups
                )
            )

    def compare_texts(
        self,
        text: str,
        *,
        team: Team | None = None,
        where_of: Callable[[str], str] = lambda line: "",
        head: str = "the programs of the ranks",
        part: str = "line",
        stream: str = WITHIN_CALLS,
    ) -> None:
        """Raises an error that shows the first difference if the ranks of a team pass different
        texts.

        All ranks of the team must make the call.

        - `where_of`: returns the user's source line for a line of the text, "" if there is none.
        - `head`: the beginning of the error message.
        - `part`: the word that the message uses for a line of the text.
        - `stream`: the name of a sequence of calls (not a CUDA stream). Calls of the ranks that
          have the same number in this sequence belong together.

        Raises:
            ProgramMismatchError: on every rank; the message shows the first line that differs,
                which rank has which version, and the user's source lines.
        """
        team = self._members(team, "exchange")
        told = self.exchange(text.encode(), team=team, stream=stream)
        texts = [part.decode() for part in told]
        if len(set(texts)) == 1:
            return
        columns = [one.splitlines() for one in texts]
        for number in range(max(map(len, columns)) + 1):
            lines = [lines[number] if number < len(lines) else "<end>" for lines in columns]
            if len(set(lines)) > 1:
                place = where_of(lines[team.index(self.rank)])
                told = self.exchange(place.encode(), team=team, stream=stream)
                lines = [
                    f"{one} (user code at {place.decode()})" if place else one
                    for one, place in zip(lines, told, strict=True)
                ]
                shown = [
                    f"  ranks {team_text(ranks)}: {line}" for line, ranks in _groups(team, lines)
                ]
                # A comment is generated text: its line number would mean nothing to the user.
                at = (
                    ""
                    if all(one.startswith("// ") for one in lines)
                    else f" at {part} {number + 1}"
                )
                raise ProgramMismatchError(f"{head} differ{at}:\n" + "\n".join(shown))
        raise ProgramMismatchError(f"{head} differ only in their line endings")

    def _members(self, team: Team | None, kind: str) -> Team:
        team = self.world if team is None else team
        if self.rank not in team:
            raise CommunicationError(
                f"{kind}: rank {self.rank} made the call, but is not in the team {team_text(team)}"
            )
        return team

    def _step(self, kind: str, team: Team, stream: str = WITHIN_CALLS) -> ControlCall:
        key = Calls(stream, team)
        self.hear_of_deadlocks()
        return ControlCall(kind, team, self.rank, key, self.ledger.enter(key))

    def _records(
        self, step: ControlCall, status: int, nbytes: int, digest: bytes
    ) -> list[tuple[int, int, bytes]]:
        """Sends (status, size, digest) of this rank to the team of the operation `step`; returns
        those of all ranks, in team order.

        `step` identifies the operation: its kind, such as "agree", its team and its number. The
        size, `nbytes`, is that of the payload that the rank sends next. Raises `CommunicationError`
        if the ranks make different operations of the control channel.
        """
        mine = _RECORD.pack(_KINDS.index(step.kind), status, nbytes, digest)
        rows: list[tuple[int, int, int, bytes]] = [
            _RECORD.unpack(record) for record in self._gather(mine, step)
        ]
        kinds = [_KINDS[row[0]] for row in rows]
        if len(set(kinds)) > 1:
            groups = _groups(step.team, kinds)
            raise CommunicationError(
                "the ranks must exchange messages in the same order, but make different calls "
                f"(sequence number {step.seq}): "
                + ", ".join(f"ranks {team_text(ranks)} are in {_WORDS[k]}" for k, ranks in groups)
            )
        return [(status, size, digest) for _, status, size, digest in rows]


def _deadlocked(deadlock: Deadlock) -> DeadlockError:
    error = DeadlockError(deadlock.text())
    error.is_after_failure = any(w.is_after_failure for w in deadlock.waits)
    error.keys = {w.rank: [need.key for need in w.needs] for w in deadlock.waits}
    return error


class JobControl(Control):
    """The control channel of a job whose ranks are processes, which may fail and leave."""

    def connect_wait_graph(self) -> None:
        """Creates the wait-for graph, if all ranks share a host.

        The graph is in shared memory and shows which rank waits for which, so that ranks can detect
        deadlocks. All ranks of the job must make the call.
        """
        files: list[int] = []
        shared = self._shared(
            nbytes_of(self.size), self.world, on_made=lambda fd: files.append(os.dup(fd))
        )
        if shared is not None:
            self.wait_graph = WaitForGraph(shared, self.rank, self.size, *files)
        self.agree(None)
        if self.wait_graph is not None:
            self.wait_graph.connect()

    def page(self, nbytes: int, team: Team) -> memoryview | None:
        """Allocates zeroed memory that the ranks of the team share, by a mapped file; returns it as
        a view of 8-byte words.

        Returns None if the team is not on one host.
        """
        shared = self._shared(nbytes, team)
        return None if shared is None else memoryview(shared)[shared_page.LINE_NBYTES :].cast("Q")

    def _shared(
        self, nbytes: int, team: Team, on_made: Callable[[int], None] = lambda fd: None
    ) -> mmap.mmap | None:
        return shared_page.open_together(
            lambda kind, payload: self.exchange(payload, team=team, kind=kind),
            nbytes,
            is_first=team[0] == self.rank,
            on_made=on_made,
        )

    @abstractmethod
    def announce(self, event: Event) -> None:
        """Announces to all other ranks that this rank has failed, or that it leaves.

        Never raises an error and never waits.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits, with a deadline, until every other rank has announced that it leaves the job."""

    def wait_for_leavers(self, progress: Callable[[], None]) -> bool:
        """Waits until every other rank has announced that it leaves; returns False at the deadline.

        `progress()` is called repeatedly during the wait. At the deadline, this rank prints which
        ranks are missing and does not wait longer, because another rank may still compute.

        Raises:
            CommunicationTimeout: the deadline passed, and a signal has stopped the process of a
                missing rank.
            PeerError: the process of another rank has ended.
        """
        limit_s, wait_graph = options.timeout_s(), self.wait_graph
        stop = time.monotonic() + limit_s
        next_look = 0.0
        while missing := [r for r in self.world if r != self.rank and r not in self.peers.events]:
            self.listen()
            progress()
            now = time.monotonic()
            if wait_graph is not None and now >= next_look:
                next_look = now + LEAVERS_EVERY_S
                wait_graph.stay("the end of the job", missing, self.ledger.entered)
            if now < stop:
                continue
            states = [
                f"rank {r}" + (f" ({wait_graph.state(r)})" if wait_graph else "") for r in missing
            ]
            text = f"{', '.join(states)} did not leave within {limit_s:g} s (FUSER_TIMEOUT_S)"
            if wait_graph is not None and any(map(wait_graph.is_stopped, missing)):
                raise CommunicationTimeout(f"rank {self.rank} has finished, but {text}")
            print(f"[fuser] rank {self.rank}: has finished; {text}", file=sys.stderr)
            return False
        return True

    @abstractmethod
    def abort(self, code: int) -> None:
        """Ends this process with the exit code `code`; also ends the job if the launcher allows
        that.
        """


class LocalControl(Control):
    """The control channel of a job with one rank, which exchanges messages only with itself."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def page(self, nbytes: int, team: Team) -> memoryview | None:
        """Returns None, because there is no other rank to share memory with."""
        return None

    def _gather(self, record: bytes, step: ControlCall) -> list[bytes]:
        return [record]

    def _gather_varied(
        self, payload: bytes, sizes: Sequence[int], step: ControlCall
    ) -> list[bytes]:
        return [payload]


def _groups(team: Team, values: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Groups the ranks of a team by their values.

    Returns (value, ranks) for each value, in order of first appearance.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in zip(team, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _failures_text(failures: list[tuple[int, str]]) -> str:
    rank, text = failures[0]
    if len(failures) == 1:
        return f"rank {rank} failed: {text}"
    others = ", ".join(str(rank) for rank, _ in failures[1:])
    return f"rank {rank} failed: {text} (and rank {others} failed too)"


# ----------------------------------------------------------------------
# Call tokens: one integer per rank and call, in memory that a team shares: what each rank is about
# to run.
#
# A token consists of the number of the call and of a *class*. A rank publishes its token and waits
# for the tokens of the others with the same number.
#
# Two tokens per rank, used alternately, are enough. A rank overwrites the token of call n with that
# of call n + 2 only after every member has published n + 1. A member does that only after call n,
# so it has read all tokens of n. Number and class are one integer of 8 bytes, written by one store:
# no reader can see one without the other, on any processor.

# The number of the call (from 1) is in the lowest bits, the class above it.
_NUMBER_BITS = 16
_NUMBERS = (1 << _NUMBER_BITS) - 1
CLASSES = (1 << 48) - 1
# The class that means "this rank left the call with an error".
GAVE_UP = 1
# Position, after the tokens of a line, of the members for which a rank that gives up waited: one
# bit per member in team order, for the first 64 members.
_AWAITED, _BITS = 2, 64
# Number of reads of the tokens before a wait that yields the processor: about 3 us.
_SPINS = 50


def call_token(kind: int, number: int) -> int:
    """Returns a call token: an integer that contains the class `kind` and the number of a call.

    The class is an integer that stands for the program that a rank is about to run. Ranks compare
    their tokens before a call.
    """
    return kind << _NUMBER_BITS | (number + 1) & _NUMBERS


class CallTokens:
    """The call tokens of one team in shared memory, as one of its ranks sees them.

    A call token is an integer that says what a rank is about to run, and the number of that call.

    - `page`: the shared memory, with a line of LINE_WORDS 8-byte words per rank, in team order.
    - `key`: the key under which the ledgers of the ranks count these calls.
    - `what`: a function that returns the description of a call for error messages. Its arguments
      are the number of the call and the argument `about` of `say`.
    """

    def __init__(
        self,
        control: Control,
        team: Team,
        page: memoryview,
        key: Calls,
        what: Callable[[int, Any], str],
    ) -> None:
        self._control, self._team, self._key, self._what = control, team, key, what
        self.page = page
        start = LINE_WORDS * team.index(control.rank)
        self.mine = (start, start + 1)
        lines = [(rank, LINE_WORDS * i) for i, rank in enumerate(team) if rank != control.rank]
        self._others = tuple(tuple((rank, at + turn) for rank, at in lines) for turn in (0, 1))
        self._slots = tuple(tuple(at for _, at in others) for others in self._others)
        self._all = tuple(tuple(LINE_WORDS * i + turn for i in range(len(team))) for turn in (0, 1))

    def say(self, kind: int, number: int, about: object = None) -> bool:
        """Announces what this rank is about to run in call `number`; returns whether all ranks run
        the same.

        The integer `kind` (a class) stands for the program and its sizes. Waits until all ranks of
        the team have announced a class for this call. `about` is passed to the function that
        describes the call. Raises `PeerError` if another rank gave the call up, because an error
        ended its wait. Also raises all errors of `Control.poll_until`.
        """
        word = call_token(kind, number)
        words, turn = self.page, number & 1
        words[self.mine[turn]] = word
        self._control.wake(self._team)
        waiting = self._slots[turn]
        for _ in range(_SPINS):
            for slot in waiting:
                if words[slot] != word:
                    break
            else:
                return True
        return self._wait(number, word, about)

    def tell(self, kind: int, number: int) -> tuple[int, ...]:
        """Announces the class `kind` of this rank for call `number`; returns the classes of all
        ranks.

        A class is an integer that stands for what the rank is about to run. The classes are in team
        order. Waits and raises errors as `say` does.
        """
        word = call_token(kind, number)
        words, turn = self.page, number & 1
        words[self.mine[turn]] = word
        self._control.wake(self._team)
        slots, wanted = self._all[turn], word & _NUMBERS
        for _ in range(_SPINS):
            found = [words[slot] for slot in slots]
            for one in found:
                if one & _NUMBERS != wanted:
                    break
            else:
                kinds = tuple([one >> _NUMBER_BITS for one in found])
                if GAVE_UP not in kinds:
                    return kinds
                break
        self._wait(number, word, None)
        return tuple([words[slot] >> _NUMBER_BITS for slot in slots])

    def who_says(self, kind: int, number: int) -> list[int]:
        """Returns the other ranks that have announced the class `kind` for call `number`, without
        waiting.

        A class is an integer that stands for what a rank is about to run.
        """
        word = call_token(kind, number)
        return [rank for rank, slot in self._others[number & 1] if self.page[slot] == word]

    def _have_given_up(self, number: int) -> list[int]:
        """Returns the other ranks that gave up call `number`, or are already in a later call."""
        words, mine = self.page, (number + 1) & _NUMBERS
        # The numbers wrap around. A difference of more than half the range means that the member is
        # ahead: it gave this call up.
        return [
            rank
            for rank, slot in self._others[number & 1]
            if (mine - words[slot]) & _NUMBERS > _NUMBERS // 2
            or (words[slot] ^ mine) == GAVE_UP << _NUMBER_BITS
        ]

    def _awaited_by(self, left: Sequence[int], number: int) -> list[int]:
        """Returns the missing ranks for an error message, after some ranks waited too long and gave
        up call `number`: the ranks for which they waited.

        `left` are the ranks that gave up. These ranks and this rank are not in the result, because
        they did reach the call.
        """
        gave_up, words, awaited = call_token(GAVE_UP, number), self.page, 0
        for _, slot in self._others[number & 1]:
            if words[slot] == gave_up:
                awaited |= words[slot + _AWAITED]
        come = {self._control.rank, *left}
        return [r for i, r in enumerate(self._team) if awaited >> i & 1 and r not in come]

    def _wait(self, number: int, word: int, about: object) -> bool:
        words, others = self.page, self._others[number & 1]

        def behind() -> list[Need]:
            return [
                Need(rank, self._key, number + 1)
                for rank, slot in others
                if (word - words[slot]) & _NUMBERS
            ]

        def what() -> str:
            return self._what(number, about)

        try:
            self._control.poll_until(
                lambda: not behind() or bool(self._have_given_up(number)), what=what, needs=behind
            )
            if left := self._have_given_up(number):
                self._control.check_ended(what, [Need(r, self._key, number + 1) for r, _ in others])
                awaited = self._awaited_by(left, number)
                raise PeerError(
                    f"{what()} failed on ranks {team_text(left)}, which raised an error while they "
                    f"waited{f' for ranks {team_text(awaited)}' if awaited else ''}: look for the "
                    f"error of ranks {team_text(left)}"
                )
        except BaseException:
            mine, missing = self.mine[number & 1], {need.rank for need in behind()}
            words[mine + _AWAITED] = sum(
                1 << i for i, rank in enumerate(self._team[:_BITS]) if rank in missing
            )
            words[mine] = call_token(GAVE_UP, number)
            self._control.wake(self._team)
            raise
        return all(words[slot] == word for _, slot in others)
