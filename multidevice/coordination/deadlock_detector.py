"""Deadlock detector: the ranks of a host publish in which call each waits, and search for cycles.

A rank that has waited for a while writes its position to shared memory:

- the call in which the rank waits,
- the calls that other ranks must enter before this wait can end (its *needs*),
- the calls that the rank has entered itself.

Rank q is *behind* rank r if q needs a call that r has not entered. Rank q is also behind r if q
needs a rank that is behind r. If r waits for a rank that is behind r, the wait can never end: this
is a deadlock.

The proof needs no clock. A rank waits in one call at a time. If q needs a call that r has not
entered, q is still at its published position, and everything in that position is still true. Only
an error can end such a wait. Therefore the deadlocks that were found stay published. A wait that is
part of a known deadlock is not used in a new proof.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuser.support.errors import PeerError
from multidevice.coordination.bounded_wait import Calls, Need, Team, counts_from, rows_of
from multidevice.coordination.rank_monitor import AREA_NBYTES, CALLS, NBYTES, PID, SAID, VERSION
from multidevice.coordination.shared_page import LINE_NBYTES, LINE_WORDS

if TYPE_CHECKING:
    import mmap

# How long a rank whose process has ended may still be announced by a message that it sent before.
_GRACE_S = 0.5
_KEPT_ENDS = 8
_TRIES = 1000
# The kinds in ledgers of calls of programs, and of the latest call that failed on this rank.
CALL, LEFT = "call", "left"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead", "R": "running"}


def nbytes_of(size: int) -> int:
    """Returns the size in bytes of the shared memory for the wait-for graph of `size` ranks."""
    return size * (LINE_NBYTES + AREA_NBYTES)


@dataclass(frozen=True)
class BlockedRank:
    """A rank that waits in the call `what` until other ranks have entered the calls `needs`.

    `is_after_failure` says whether an earlier call of a program failed on this rank, and other
    ranks may not know of the failure yet.
    """

    rank: int
    what: str
    needs: tuple[Need, ...]
    is_after_failure: bool = False

    def is_same(self, other: BlockedRank) -> bool:
        """Returns whether the ranks of `self` and `other` wait for the same call of another rank,
        for example because both are in the same collective.
        """
        ours, theirs = ({(n.key, n.count) for n in w.needs} for w in (self, other))
        return bool(ours & theirs)

    def text(self) -> str:
        """Returns the line about this rank in the error message of a deadlock."""
        return f"  rank {self.rank}: waits in {self.what}"


@dataclass(frozen=True)
class Deadlock:
    """A set of waiting ranks whose waits cannot end, because the ranks wait for each other.

    All these ranks raise an error. The calls for which they waited count as entered on these ranks,
    so that the numbers of later calls match on all ranks. A rank that enters one of these calls
    later also raises the error, because the other ranks have left the call.
    """

    waits: tuple[BlockedRank, ...]

    def text(self) -> str:
        """Returns the error message of the deadlock, with one line per rank."""
        lines = [w.text() for w in sorted(self.waits, key=lambda w: w.rank)]
        return "\n".join(["deadlock: these ranks wait for each other", *lines])


@dataclass(frozen=True)
class _RankPosition:
    """The position that a rank has published: in which call it waits, and which calls it has
    entered.

    - `wait`: the wait of the rank; None if it does not wait.
    - `entered`: the number of calls that the rank has entered, per sequence.
    - `behind`: the waits of the ranks that wait, perhaps indirectly, for this rank.
    - `ended`: the latest deadlocks of which this rank was a part.
    """

    wait: BlockedRank | None
    entered: dict[Calls, int]
    behind: tuple[BlockedRank, ...]
    ended: tuple[Deadlock, ...]


class WaitForGraph:
    """The wait-for graph of all ranks on one host: which rank waits for which, in shared memory."""

    def __init__(self, page: mmap.mmap, rank: int, size: int, file: int = -1) -> None:
        self._page = page
        self._rank = rank
        self._size = size
        # On the rank that created the memory: a descriptor of its file, until `start_monitor` takes
        # it.
        self.file = file
        self._words = memoryview(page).cast("Q")
        self._line(rank)[PID] = os.getpid()
        # How many calls of programs this rank has begun, read by the monitor of the ranks.
        self.calls = self._line(rank)[CALLS : CALLS + 1]
        self._pidfds: dict[int, int] = {}
        self._gone: dict[int, float] = {}
        self._posted = b""
        self._version = 0
        self._ended: tuple[Deadlock, ...] = ()
        self._read_up_to: dict[int, int] = {}

    def _line(self, rank: int) -> memoryview:
        start = LINE_WORDS * (1 + rank)
        return self._words[start : start + LINE_WORDS]

    def _area(self, rank: int) -> int:
        return LINE_NBYTES * (1 + self._size) + rank * AREA_NBYTES

    def connect(self) -> None:
        """Opens a handle (pidfd) of the process of each other rank, to detect when the process
        ends.

        All ranks must have written their process numbers to the shared memory before.
        """
        for rank in range(self._size):
            if rank != self._rank:
                with suppress(OSError, AttributeError):
                    self._pidfds[rank] = os.pidfd_open(self._line(rank)[PID])

    def processes(self) -> list[int]:
        """Returns the process numbers of all ranks, in rank order."""
        return [self._line(rank)[PID] for rank in range(self._size)]

    def say(self, word: int) -> None:
        """Records in shared memory why this rank ends.

        `word` is a constant of `rank_monitor`: LEFT if the rank leaves normally, SAID_WHY if the
        rank has printed the reason.
        """
        self._line(self._rank)[SAID] = word

    # ------------------------------------------------------------ waiting
    def watch(
        self,
        what: str,
        needs: Iterable[Need],
        entered: Mapping[Calls, int],
        *,
        is_patient: bool = True,
    ) -> Deadlock | None:
        """Publishes the wait of this rank; returns the deadlock of which the wait is a part, or
        None.

        - `what`: the description of the call in which this rank waits.
        - `needs`: the calls that other ranks must enter before the wait can end.
        - `entered`: the calls that this rank has entered.
        - `is_patient`: if True, assumes that another rank executes every call that it has entered.
          If False, a call that failed on the other rank counts as not entered.

        Raises:
            PeerError: the process of a needed rank has ended.
        """
        has_failed = any(key.kind == LEFT for key in entered)
        mine = BlockedRank(self._rank, what, tuple(needs), has_failed)
        peers = self._peers()
        for position in peers.values():
            for deadlock in position.ended:
                if any(w.is_same(mine) for w in deadlock.waits):
                    return self._end(deadlock)
        behind = self._behind(mine, entered, peers)
        for need in mine.needs:
            peer = peers.get(need.rank)
            if need.rank not in behind or not peer:
                continue
            is_missing = peer.entered.get(need.key, 0) < need.count
            if is_missing or not (is_patient or not _has_left(peer.entered, entered)):
                # Read again: if a collective has ended since the first read, its ranks are not
                # stuck.
                again = self._behind(mine, entered, self._peers())
                if again.keys() >= behind.keys():
                    return self._end(Deadlock(tuple(behind.values())))
        others = tuple(w for w in behind.values() if w is not mine)
        self._post(_RankPosition(mine, dict(entered), others, self._ended))
        self._check_lives(what, {n.rank for n in mine.needs})
        return None

    def stay(self, what: str, ranks: Iterable[int], entered: Mapping[Calls, int]) -> None:
        """Publishes that this rank waits, but not for calls of other ranks: it waits in `what`
        until `ranks` announce that they leave or have failed.

        `entered` has the calls that this rank has entered. The wait blocks only ranks that need a
        further call of this rank, and these ranks detect the deadlock themselves. Raises
        `PeerError` if the process of one of `ranks` has ended.
        """
        self._post(_RankPosition(BlockedRank(self._rank, what, ()), dict(entered), (), self._ended))
        self._check_lives(what, ranks)

    def news(self) -> list[Deadlock]:
        """Returns the deadlocks that other ranks have published since the last call of this method.

        Other ranks keep only their latest deadlocks. A deadlock may be returned twice, because each
        of its ranks publishes it.
        """
        found: list[Deadlock] = []
        for rank in range(self._size):
            version = self._line(rank)[VERSION]
            if rank == self._rank or version == self._read_up_to.get(rank, 0):
                continue
            for _ in range(_TRIES):
                if position := self._read(rank):
                    found += position.ended
                    self._read_up_to[rank] = version
                    break
                os.sched_yield()  # its owner is just writing it
        return found

    def _peers(self) -> dict[int, _RankPosition]:
        return {r: p for r in range(self._size) if r != self._rank and (p := self._read(r))}

    def _behind(
        self, mine: BlockedRank, entered: Mapping[Calls, int], peers: Mapping[int, _RankPosition]
    ) -> dict[int, BlockedRank]:
        """Returns a dictionary (rank -> wait) of all waits that cannot end before the wait `mine`
        of this rank has ended.

        These are `mine` itself and the waits of all ranks that wait, perhaps indirectly, for this
        rank. `entered` are the calls of this rank, and `peers` the published positions of other
        ranks.
        """
        records = [*self._ended, *(d for p in peers.values() for d in p.ended)]
        ended = [w for deadlock in records for w in deadlock.waits]
        behind = {self._rank: mine}
        for position in peers.values():
            wait = position.wait
            if wait is None or any(wait.is_same(e) for e in ended):
                continue
            if any(n.rank == self._rank and entered.get(n.key, 0) < n.count for n in wait.needs):
                behind |= {w.rank: w for w in (*position.behind, wait)}
        return behind

    def _end(self, deadlock: Deadlock) -> Deadlock:
        # The other ranks may not have read it yet, so the deadlock stays posted.
        self._ended = (*self._ended, deadlock)[-_KEPT_ENDS:]
        self._post(_RankPosition(None, {}, (), self._ended))
        return deadlock

    def clear(self) -> None:
        """Removes the wait of this rank from shared memory, because the wait has ended.

        The deadlocks that this rank has published stay, because other ranks may not have read them
        yet.
        """
        if self._posted:
            self._post(_RankPosition(None, {}, (), self._ended))
            self._posted = b""

    def suspects(self, needs: Iterable[Need]) -> str:
        """Returns a text about the ranks that block a wait, with the states of their processes.

        `needs` are the calls that the wait needs.
        """
        texts: list[str] = []
        for need in needs:
            position = self._read(need.rank)
            wait = position.wait if position is not None else None
            if position is None or wait is None:
                texts.append(f"rank {need.rank} has not entered it ({self.state(need.rank)})")
            elif position.entered.get(need.key, 0) < need.count:
                texts.append(f"rank {need.rank} waits in {wait.what}")
        return "; ".join(texts)

    # ------------------------------------------------------------ processes
    def state(self, rank: int) -> str:
        """Returns the number and the state of a rank's process as text."""
        pid = self._line(rank)[PID]
        return f"process {pid} is {_STATES.get(self._letter(rank), 'alive')}"

    def is_stopped(self, rank: int) -> bool:
        """Returns whether a signal has stopped the process of a rank."""
        return self._letter(rank) in ("T", "t")

    def _letter(self, rank: int) -> str:
        if self._is_gone(rank):
            return "X"
        try:
            text = Path(f"/proc/{self._line(rank)[PID]}/stat").read_text()
        except OSError:
            return ""
        return text.rpartition(")")[2].split()[0]

    def _is_gone(self, rank: int) -> bool:
        fd = self._pidfds.get(rank)
        if fd is None:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def _check_lives(self, what: str, ranks: Iterable[int]) -> None:
        now = time.monotonic()
        for rank in sorted(ranks):
            if self._is_gone(rank) and now - self._gone.setdefault(rank, now) > _GRACE_S:
                raise PeerError(
                    f"rank {rank} has ended: process {self._line(rank)[PID]} ended without a "
                    f"message while rank {self._rank} waits for it in {what}"
                )

    # ------------------------------------------------------------ shared text
    def _post(self, position: _RankPosition) -> None:
        fields = position.wait, rows_of(position.entered), position.behind, position.ended
        data = json.dumps(fields, default=_plain).encode()
        if data == self._posted or len(data) > AREA_NBYTES:
            return
        self._posted = data
        # The version is odd during the write. A reader that finds an odd version, or another
        # version after its read, knows that the text is incomplete.
        line = self._line(self._rank)
        self._version += 2
        line[VERSION] = self._version - 1
        line[NBYTES] = len(data)
        start = self._area(self._rank)
        self._page[start : start + len(data)] = data
        line[VERSION] = self._version

    def _read(self, rank: int) -> _RankPosition | None:
        line = self._line(rank)
        version = line[VERSION]
        if version == 0 or version % 2:
            return None
        start = self._area(rank)
        data = self._page[start : start + line[NBYTES]]
        if line[VERSION] != version:
            return None
        try:
            wait, entered, behind, ended = json.loads(data)
            return _RankPosition(
                _wait(wait) if wait else None,
                counts_from(entered),
                tuple(map(_wait, behind)),
                tuple(Deadlock(tuple(map(_wait, waits))) for (waits,) in ended),
            )
        except ValueError:
            return None  # torn, on a machine that orders stores weakly: the next look reads again


def left_key(team: Team) -> Calls:
    """Returns the key under which this rank's `Ledger` records that a call of a team has failed.

    The entry of this key is the number of the team's latest call that failed on this rank, counted
    from 1. The entry is removed when all other ranks know of the failure.
    """
    return Calls(LEFT, team)


def _has_left(theirs: Mapping[Calls, int], mine: Mapping[Calls, int]) -> bool:
    """Returns whether another rank has left the call of a program in which this rank is.

    This is so if an error ended this call, or a later call of the same team, on the other rank.
    `theirs` and `mine` are the call counts of the other rank and of this rank.
    """
    left = [(key.team, n) for key, n in theirs.items() if key.kind == LEFT]
    return any(0 < mine.get(Calls(CALL, team), 0) <= n for team, n in left)


def _plain(value: Any) -> list[Any]:
    """Returns the fields of a dataclass of this module as a list, which JSON can write."""
    return [getattr(value, name) for name in value.__dataclass_fields__]


def _wait(row: list[Any]) -> BlockedRank:
    rank, what, needs, has_failed = row
    needed = tuple(Need(r, Calls.from_row(key), count) for r, key, count in needs)
    return BlockedRank(rank, what, needed, has_failed)
