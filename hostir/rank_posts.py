"""What the ranks post, as the unrolled program has it, and which of it meets nobody.

Where all partners post at the same place of the program, they meet there, and no order can block
them. Only a program where some do not is followed rank by rank (`follow`): a collective and a group
of transfers keep their rank until all partners have come, as they do on a stream; a transfer of its
own keeps it there where NCCL carries it out, else at its Wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fuser.ir.mesh import DeviceMesh
from hostir.findings import Finding, Site
from hostir.rank_values import Array, PerRank, np
from hostir.spots import Spot
from hostir.transfers import P2PCommunication
from multidevice.communication import TeamOf

DEADLOCK = "deadlock"
PARTNER = "no partner"
MISMATCH = "ranks disagree"

Note = Callable[[Finding], None]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0 1`, `ranks 0..1023`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {DeviceMesh(list(map(int, ranks))).ranks_text}"


def at(value: PerRank, i: int) -> object:
    """Return the value on one rank, by its place among the ranks."""
    return value[i].item() if isinstance(value, np.ndarray) else value


class Teams:
    """The teams of all ranks, by places among `ranks`.

    `members` [teams, size]; `team` and `position` [ranks], -1 for a rank in none.
    """

    def __init__(self, of: TeamOf, ranks: Sequence[int]) -> None:
        mesh, place = of.mesh, {rank: i for i, rank in enumerate(ranks)}
        grid = np.asarray([place[r] for r in mesh.devices], dtype=np.int64).reshape(mesh.shape)
        free = [dim for p in of.ptypes if (dim := mesh.dim_of(p)) is not None]
        grid = np.moveaxis(grid, sorted(free), range(-len(free), 0))
        self.members = grid.reshape(-1, of.size)
        self.team = np.full(len(ranks), -1)
        self.position = np.full(len(ranks), -1)
        self.team[self.members] = np.arange(len(self.members))[:, None]
        self.position[self.members] = np.arange(of.size)[None, :]


@dataclass(eq=False)
class Collective:
    """A communication that all members of a team enter; `terms` must be the same for all."""

    site: Site
    number: int
    mask: Array
    teams: Teams
    terms: tuple[tuple[str, PerRank], ...]


@dataclass(eq=False)
class Half:
    """A send or a receive."""

    site: Site
    op: P2PCommunication
    mask: Array
    peer: PerRank
    elements: PerRank
    spot: Spot


@dataclass(eq=False)
class Group:
    """Sends and receives that start together."""

    site: Site
    number: int
    mask: Array
    halves: list[Half]
    blocks: bool


@dataclass(eq=False)
class Await:
    site: Site
    number: int
    mask: Array


Event = Collective | Group | Await


# ------------------------------------------------------------------ rank by rank
@dataclass(eq=False)
class _Meeting:
    """A collective of one team: who has come, and who has to."""

    first: tuple[int, Collective]
    members: frozenset[int]
    come: set[int] = field(default_factory=set[int])

    def missing(self) -> set[int]:
        return set(self.members - self.come)


@dataclass(eq=False)
class _Open:
    """A rank's group, and those of its halves that have met nobody, by peer."""

    rank: int
    group: Group
    lonely: list[tuple[int, Half]]

    def missing(self) -> set[int]:
        return {peer for peer, _ in self.lonely}


class _Follower:
    """Follows every rank up to where it blocks."""

    def __init__(self, events: Sequence[Event], ranks: Sequence[int], note: Note) -> None:
        self.ranks, self.note = ranks, note
        self.place = {rank: i for i, rank in enumerate(ranks)}
        self.todo: list[list[Event]] = [[] for _ in ranks]
        for event in events:
            places: list[int] = np.nonzero(event.mask)[0].tolist()
            for i in places:
                self.todo[i].append(event)
        self.at = [0] * len(ranks)
        # What a blocked rank waits for.
        self.blocked: dict[int, _Meeting | _Open] = {}
        self.entered: dict[tuple[int, frozenset[int]], int] = {}
        self.meetings: dict[tuple[frozenset[int], int], _Meeting] = {}
        self.channels: dict[tuple[int, int, str], deque[tuple[Half, _Open]]] = {}
        self.open: dict[tuple[int, int], _Open] = {}
        self.runnable = deque(range(len(ranks)))

    def run(self) -> None:
        while self.runnable:
            i = self.runnable.popleft()
            while self.at[i] < len(self.todo[i]):
                wait = self._step(i, self.todo[i][self.at[i]])
                self.at[i] += 1
                if wait is not None and wait.missing():
                    self.blocked[i] = wait
                    break
        self._report()

    def _step(self, i: int, event: Event) -> _Meeting | _Open | None:
        if isinstance(event, Collective):
            return self._enter(i, event)
        if isinstance(event, Await):
            return self.open.pop((i, event.number), None)
        opened = _Open(i, event, [])
        for half in event.halves:
            if half.mask[i]:
                self._offer(i, half, opened)
        self.open[i, event.number] = opened
        return opened if event.blocks else None

    def _enter(self, i: int, event: Collective) -> _Meeting:
        members = frozenset(event.teams.members[event.teams.team[i]].tolist())
        count = self.entered[i, members] = self.entered.get((i, members), -1) + 1
        meeting = self.meetings.get((members, count))
        if meeting is None:
            meeting = self.meetings[members, count] = _Meeting((i, event), members)
        meeting.come.add(i)
        other, first = meeting.first
        if event is not first:
            self._compare(other, first, i, event)
        if not meeting.missing():
            self._wake(meeting)
        return meeting

    def _compare(self, i: int, a: Collective, k: int, b: Collective) -> None:
        for (what, mine), (_, theirs) in zip(a.terms, b.terms, strict=False):
            if at(mine, i) != at(theirs, k):
                sites = [
                    (site, f"rank {self.ranks[r]}: {what} {at(value, r)}")
                    for site, r, value in ((a.site, i, mine), (b.site, k, theirs))
                ]
                text = f"the ranks of a team meet in communications of different {what}"
                self.note(Finding(MISMATCH, text, tuple(sites)))
                return

    def _offer(self, i: int, half: Half, opened: _Open) -> None:
        peer = self.place.get(int(str(at(half.peer, i))), -1)
        ends = (i, peer) if half.op.type == "send" else (peer, i)
        wanted = "recv" if half.op.type == "send" else "send"
        partners = self.channels.setdefault((*ends, wanted), deque())
        if not partners:
            self.channels.setdefault((*ends, half.op.type), deque()).append((half, opened))
            opened.lonely.append((peer, half))
            return
        other, theirs = partners.popleft()
        theirs.lonely.remove((i, other))
        compare_halves(other, theirs.rank, half, i, self.ranks, self.note)
        if not theirs.lonely:
            self._wake(theirs)

    def _wake(self, what: _Meeting | _Open) -> None:
        for i in [i for i, wait in self.blocked.items() if wait is what]:
            del self.blocked[i]
            self.runnable.append(i)

    # ------------------------------------------------------------ who is left
    def _report(self) -> None:
        if self.blocked:
            cycle = self._cycle(next(iter(self.blocked)))
            sites = tuple(site for i in cycle for site in self._sites(i))
            last = min(self._missing(cycle[-1]))
            if last in self.blocked:
                text = "each rank waits for the next one, and the last for the first"
                self.note(Finding(DEADLOCK, text, sites[:6]))
            else:
                name = self._name(last)
                self.note(
                    Finding(PARTNER, f"{name} never comes to what others wait for", sites[:6])
                )
            return
        for waiting in self.channels.values():
            for half, opened in waiting:
                peer = at(half.peer, opened.rank)
                verb = "sends to" if half.op.type == "send" else "receives from"
                text = f"rank {self.ranks[opened.rank]} {verb} rank {peer}, which has no partner"
                self.note(Finding(PARTNER, text + " for it", ((half.site, ""),)))

    def _cycle(self, i: int) -> list[int]:
        """Follow who waits for whom, up to a rank that comes again or does not wait."""
        path: list[int] = []
        while i in self.blocked and i not in path:
            path.append(i)
            i = min(self._missing(i), key=lambda k: k in self.blocked)
        return path[path.index(i) :] if i in path else path

    def _missing(self, i: int) -> set[int]:
        found = self.blocked[i].missing()
        return {k for k in found if k not in self.blocked} or found

    def _name(self, i: int) -> str:
        return f"rank {self.ranks[i]}" if i >= 0 else "a rank outside of the job"

    def _sites(self, i: int) -> list[tuple[Site, str]]:
        """Return what a blocked rank has posted that nobody has met."""
        wait, me = self.blocked[i], f"rank {self.ranks[i]}"
        if isinstance(wait, _Open):
            return [
                (half.site, f"{me}: its {half.op.type} waits for {self._name(peer)}")
                for peer, half in wait.lonely
            ]
        missing = ", ".join(map(self._name, sorted(self._missing(i))[:4]))
        return [(self.todo[i][self.at[i] - 1].site, f"{me} waits for {missing}")]


def compare_halves(a: Half, i: int, b: Half, k: int, ranks: Sequence[int], note: Note) -> None:
    """Report a send and a receive of different sizes or dtypes."""
    for what, mine, theirs in (
        ("dtype", a.op.buffer.dtype(), b.op.buffer.dtype()),
        ("size", at(a.elements, i), at(b.elements, k)),
    ):
        if mine != theirs:
            sites = (
                (a.site, f"rank {ranks[i]}: {a.op.type}, {what} {mine}"),
                (b.site, f"rank {ranks[k]}: {b.op.type}, {what} {theirs}"),
            )
            note(Finding(MISMATCH, f"a send and its receive differ in {what}", sites))
            return


def follow(events: Sequence[Event], ranks: Sequence[int], note: Note) -> None:
    """Follow the ranks one by one; report who disagrees, blocks, or has no partner."""
    _Follower(events, ranks, note).run()
