"""Where the ranks of a host stand: what each waits for, and whether its process still lives.

A rank that has waited for a while posts its position: what it waits in, which entries it needs of
whom, and what it has entered itself. From these every waiting rank can tell whether its wait can
end. Rank q is *behind* rank r when q needs an entry of r that r has not made, or is behind such a
rank. A rank that waits for one behind itself waits in vain.

The proof needs no clock. A rank waits in one place at a time, so one that needs an entry which this
rank has not made is still where its position says; what it posted, whom it found behind itself
included, is still true. Only an error ends its wait otherwise: collectives that have ended so stay
posted, and nobody counts as stuck in them.
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

# How long a rank whose process is gone may still be announced by what it sent before.
_GRACE_S = 0.5
_KEPT_ENDS = 8
_TRIES = 1000
# The kind of the streams of programs' calls, and under which a ledger has the latest that failed.
CALL, LEFT = "call", "left"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead", "R": "running"}


def nbytes_of(size: int) -> int:
    """Returns how large the board of `size` ranks is."""
    return size * (LINE_NBYTES + AREA_NBYTES)


@dataclass(frozen=True)
class BlockedRank:
    """A rank, whose last call may have failed, waits in `what` for the entries `needs`."""

    rank: int
    what: str
    needs: tuple[Need, ...]
    is_after_failure: bool = False

    def is_same(self, other: BlockedRank) -> bool:
        """Whether both wait in one collective."""
        ours, theirs = ({(n.key, n.count) for n in w.needs} for w in (self, other))
        return bool(ours & theirs)

    def text(self) -> str:
        return f"  rank {self.rank}: waits in {self.what}"


@dataclass(frozen=True)
class Deadlock:
    """Waits that cannot end. Their ranks raise and count all of them as entered; so does whoever
    comes to one of these collectives later, since it cannot complete any more.
    """

    waits: tuple[BlockedRank, ...]

    def text(self) -> str:
        lines = [w.text() for w in sorted(self.waits, key=lambda w: w.rank)]
        return "\n".join(["deadlock: these ranks wait for each other", *lines])


@dataclass(frozen=True)
class _RankPosition:
    wait: BlockedRank | None
    entered: dict[Calls, int]
    behind: tuple[BlockedRank, ...]
    ended: tuple[Deadlock, ...]


class Board:
    """The positions of the ranks of one job, all on one host; `view` is the shared memory."""

    def __init__(self, page: mmap.mmap, rank: int, size: int, file: int = -1) -> None:
        self._page = page
        self._rank = rank
        self._size = size
        # On the rank that made the page, until somebody takes it: a descriptor of its file.
        self.file = file
        self._words = memoryview(page).cast("Q")
        self._line(rank)[PID] = os.getpid()
        # One word: how many calls of programs this rank has begun, for the monitor of the ranks.
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
        """Opens handles of the peers' processes, which have all registered by now."""
        for rank in range(self._size):
            if rank != self._rank:
                with suppress(OSError, AttributeError):
                    self._pidfds[rank] = os.pidfd_open(self._line(rank)[PID])

    def processes(self) -> list[int]:
        """Returns the process numbers of all ranks."""
        return [self._line(rank)[PID] for rank in range(self._size)]

    def say(self, word: int) -> None:
        """Notes what this rank has said about its own end: a word of `rank_monitor`."""
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
        """Posts this rank's position and returns why its wait cannot end, if so.

        A patient one still expects from peers what they have entered, though the call in which they
        did has failed there and they are in their next.

        Raises:
            PeerError: the process of a rank that is needed is gone.
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
                # A collective that has ended since is being left: nobody is stuck there.
                again = self._behind(mine, entered, self._peers())
                if again.keys() >= behind.keys():
                    return self._end(Deadlock(tuple(behind.values())))
        others = tuple(w for w in behind.values() if w is not mine)
        self._post(_RankPosition(mine, dict(entered), others, self._ended))
        self._check_lives(what, {n.rank for n in mine.needs})
        return None

    def stay(self, what: str, ranks: Iterable[int], entered: Mapping[Calls, int]) -> None:
        """Posts that this rank waits in `what` for an announcement of `ranks`, not for calls: it
        holds nobody up that does not need calls of it, which that hears from its own.

        Raises what `watch` raises.
        """
        self._post(_RankPosition(BlockedRank(self._rank, what, ()), dict(entered), (), self._ended))
        self._check_lives(what, ranks)

    def news(self) -> list[Deadlock]:
        """Returns the deadlocks that peers have found since the last look, as far as they still
        keep them; a few may come twice.
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
        """Returns the waits that cannot end before this rank has left its own, by rank."""
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
        # The others may not have looked yet: what has ended stays readable.
        self._ended = (*self._ended, deadlock)[-_KEPT_ENDS:]
        self._post(_RankPosition(None, {}, (), self._ended))
        return deadlock

    def clear(self) -> None:
        """Takes back this rank's position, if it has posted one."""
        if self._posted:
            self._post(_RankPosition(None, {}, (), self._ended))
            self._posted = b""

    def suspects(self, needs: Iterable[Need]) -> str:
        """Returns which of the needed ranks do not wait themselves, with the state of their
        processes.
        """
        texts: list[str] = []
        for need in needs:
            position = self._read(need.rank)
            wait = position.wait if position is not None else None
            if position is None or wait is None:
                texts.append(f"rank {need.rank} has not come ({self.state(need.rank)})")
            elif position.entered.get(need.key, 0) < need.count:
                texts.append(f"rank {need.rank} waits in {wait.what}")
        return "; ".join(texts)

    # ------------------------------------------------------------ processes
    def state(self, rank: int) -> str:
        """Returns number and state of a rank's process as text."""
        pid = self._line(rank)[PID]
        return f"process {pid} is {_STATES.get(self._letter(rank), 'alive')}"

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of a rank is stopped by a signal."""
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
                    f"rank {rank} is gone: process {self._line(rank)[PID]} ended without a word "
                    f"while rank {self._rank} waits for it in {what}"
                )

    # ------------------------------------------------------------ shared text
    def _post(self, position: _RankPosition) -> None:
        fields = position.wait, rows_of(position.entered), position.behind, position.ended
        data = json.dumps(fields, default=_plain).encode()
        if data == self._posted or len(data) > AREA_NBYTES:
            return
        self._posted = data
        # A reader that finds an odd version, or another one afterwards, has read in between.
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
    """Returns under which key a ledger has the number of a team's latest call, counted from 1, if
    that failed on its rank, until all others have heard of it."""
    return Calls(LEFT, team)


def _has_left(theirs: Mapping[Calls, int], mine: Mapping[Calls, int]) -> bool:
    """Whether an error ended the call that this rank is in, or a later one, on a peer."""
    left = [(key.team, n) for key, n in theirs.items() if key.kind == LEFT]
    return any(0 < mine.get(Calls(CALL, team), 0) <= n for team, n in left)


def _plain(value: Any) -> list[Any]:
    """Returns the fields of one of the records above, for JSON."""
    return [getattr(value, name) for name in value.__dataclass_fields__]


def _wait(row: list[Any]) -> BlockedRank:
    rank, what, needs, has_failed = row
    needed = tuple(Need(r, Calls.from_row(key), count) for r, key, count in needs)
    return BlockedRank(rank, what, needed, has_failed)
