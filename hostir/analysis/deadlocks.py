"""Finds deadlocks, and communications without a partner, in the unrolled program of all ranks: its
loops are followed iteration by iteration.

If all partners start a communication at the same op and iteration, the communication cannot block
any rank. `hostir.analysis.collective_matching` matches such communications. If partners start a
communication at different ops or iterations, `follow` follows each rank separately. In this model,
a rank stops at a communication until all partners have started it:

- at the op that starts it, for a collective or a group of transfers, because all later work of the
  stream waits for the communication;
- at the op that starts it, for a single transfer by NCCL, and for a receive by peer copy;
- at its `Wait`, for any other single transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from fuser.ir.fusion import TensorView
from hostir.analysis.rank_regions import Region, joined, merged
from hostir.analysis.rank_values import Array, PerRank, at, np
from hostir.ir.diagnostics import Finding, Site
from hostir.ir.ops import Movement, TransferKind
from multidevice.sharding.reshard import TeamOf

DEADLOCK = "deadlock"
PARTNER = "no partner"
MISMATCH = "ranks disagree"
MISPLACED = "parts do not fit"

# The number of blocked ranks whose transfers are examined for a cause.
_MAX_CAUSES = 8
_OTHER: dict[str, TransferKind] = {"send": "recv", "recv": "send"}
_VERB: dict[str, str] = {"send": "send", "recv": "receive"}


class Judge(Protocol):
    """The interface of the object that receives matched communications and findings (faults) while
    `follow` follows the ranks one by one. `MatchingWalk` is the implementation.
    """

    def note(self, finding: Finding) -> None:
        """Adds a finding, the report of a fault such as a deadlock, to the result of the check."""
        ...

    def met(self, met: PostedCollective, here: Array) -> None:
        """Checks the collective `met`, after all members of some teams have entered it. `here` is
        an array of bools, True for these members.
        """

    def paired(self, a: Half, b: Half, senders: Array, receivers: Array) -> None:
        """Checks the send `a` and the matching receive `b`. One send op can run on several ranks:
        `senders` and `receivers` have the rank indices of each transfer."""


class Teams:
    """The division of a program's ranks into the teams of a communication.

    `of` says how the mesh is divided. A rank is represented by its index in `ranks`, the list of
    the program's ranks. `members` [teams, size] has the ranks of each team. For each rank, `team`
    is the number of its team, and `position` is its position in this team. Both are -1 for a rank
    outside the mesh.
    """

    def __init__(self, of: TeamOf, ranks: Sequence[int]) -> None:
        self.of = of
        mesh, known = of.mesh, np.asarray(ranks, dtype=np.int64)
        order = np.argsort(known, kind="stable")
        grid = order[np.searchsorted(known, mesh.devices, sorter=order)].reshape(mesh.shape)
        assert (known[grid].reshape(-1) == mesh.devices).all(), f"{mesh} has ranks beyond {ranks}"
        free = [dim for p in of.ptypes if (dim := mesh.dim_of(p)) is not None]
        grid = np.moveaxis(grid, sorted(free), range(-len(free), 0))
        self.members = grid.reshape(-1, of.size)
        self.team = np.full(len(ranks), -1)
        self.position = np.full(len(ranks), -1)
        self.team[self.members] = np.arange(len(self.members))[:, None]
        self.position[self.members] = np.arange(of.size)[None, :]

    @cached_property
    def sets(self) -> list[frozenset[int]]:
        """The members of each team as a set of rank indices, in the order of `members`."""
        rows: list[list[int]] = self.members.tolist()
        return [frozenset(row) for row in rows]


@dataclass(eq=False)
class PostedCollective:
    """A collective or permutation that ranks enter in one op and loop iteration. All members of a
    team must enter the same collective.

    - `sites`: the op and iteration; several if the members of a team use different ops.
    - `kind`: the type, such as "Allreduce"; `number`: the number by which a `Wait` refers to the
      communication.
    - `mask`: an array of bools, True for the ranks that enter; `teams`: the teams of these ranks.
    - `terms`: values on which all members must agree, each with its name in messages, such as
      "dtype".
    - `inp`, `out`: the elements that are sent and received, None if unknown; `sizes`: their
      numbers.
    - `root`: the root's position in the team; `peers`: for a permutation, the positions of the
      receiver and the sender.
    """

    sites: tuple[Site, ...]
    kind: str
    number: int
    mask: Array
    teams: Teams
    terms: tuple[tuple[str, PerRank], ...]
    inp: Region | None
    out: Region | None
    sizes: tuple[PerRank, PerRank]
    root: PerRank = 0
    peers: tuple[PerRank, PerRank] | None = None


@dataclass(eq=False)
class Half:
    """One end of a transfer between two ranks: a send or a receive.

    - `site`: the op and loop iteration; `movement`: the tensor and the library of the transfer.
    - `mask`: an array of bools, True for the ranks that start the transfer; `to`: the index of each
      rank's peer.
    - `elements`: the number of elements; `part`: which elements of the whole tensor, None if
      unknown.
    - `note`: an object that a subclass of `MatchingWalk` may store with the transfer, otherwise
      None.
    """

    site: Site
    movement: Movement
    mask: Array
    to: Array
    elements: PerRank
    part: Region | None
    note: Any = None

    @property
    def kind(self) -> TransferKind:
        """The end of the transfer: "send", or "recv" for a receive."""
        return "recv" if self.movement.sent is None else "send"


@dataclass(eq=False)
class TransferGroup:
    """Sends and receives that start together, at the end of a group or as a single op.

    - `halves`: the sends and receives; `mask`: an array of bools, True for the ranks that start the
      group.
    - `number`: the number by which a `Wait` refers to the group.
    - `blocks`: whether a rank stops at the group until all transfers are matched. Otherwise the
      rank stops at the `Wait`.
    """

    site: Site
    number: int
    mask: Array
    halves: list[Half]
    blocks: bool


@dataclass(eq=False)
class Await:
    """A `Wait` op for the communication with the given `number`, in one loop iteration. `mask` has
    True for the ranks that run it.
    """

    site: Site
    number: int
    mask: Array


Event = PostedCollective | TransferGroup | Await


# ------------------------------------------------------------------ rank by rank
@dataclass(eq=False)
class _Meeting:
    """The state of one collective of one team, while each rank is followed separately (`follow`)
    and some members have not entered the collective yet.

    `members` are the ranks of the team. `come` maps each member that has already entered the
    collective to the op with which the member did so. `is_alike` becomes False if two members
    disagree, for example on the dtype.
    """

    members: frozenset[int]
    come: dict[int, PostedCollective] = field(default_factory=dict[int, PostedCollective])
    is_alike: bool = True

    def missing(self) -> set[int]:
        """Returns the members of the team that have not yet entered the collective."""
        return set(self.members.difference(self.come))


@dataclass(eq=False)
class _Open:
    """A group of sends and receives that one rank has started, while each rank is followed
    separately (`follow`). `lonely` has the sends and receives of the group that no peer has matched
    yet, each with the index of the peer's rank.
    """

    rank: int
    group: TransferGroup
    lonely: list[tuple[int, Half]]

    def missing(self) -> set[int]:
        """Returns the peers that have not yet started the matching end of a transfer in this
        group."""
        return {peer for peer, _ in self.lonely}


class _Follower:
    """Follows each rank through its communications until the rank must wait for another rank or its
    program ends. Then reports the ranks that still wait.

    `events` are the communications and waits of all ranks in program order. `judge` receives
    matched communications and findings (faults).
    """

    def __init__(self, events: Sequence[Event], ranks: Sequence[int], judge: Judge) -> None:
        self.ranks, self.judge = ranks, judge
        self.todo: list[list[Event]] = [[] for _ in ranks]
        for event in events:
            places: list[int] = np.nonzero(event.mask)[0].tolist()
            for i in places:
                self.todo[i].append(event)
        self.at = [0] * len(ranks)
        # The communication that blocks each rank.
        self.blocked: dict[int, _Meeting | _Open] = {}
        self.entered: dict[tuple[int, frozenset[int]], int] = {}
        self.meetings: dict[tuple[frozenset[int], int], _Meeting] = {}
        self.channels: dict[tuple[int, int, str], deque[tuple[Half, _Open]]] = {}
        self.open: dict[tuple[int, int], _Open] = {}
        self.runnable = deque(range(len(ranks)))
        # Matched communications, grouped by their ops, so that each group is checked at once.
        self.met: dict[tuple[PostedCollective, ...], list[_Meeting]] = {}
        self.paired: dict[tuple[Half, Half], list[tuple[int, int]]] = {}
        # Two ranks -> the pairs of tensors with which they entered one collective.
        self.brought: dict[tuple[int, int], set[tuple[TensorView, TensorView]]] = {}

    def run(self) -> None:
        """Follows all ranks through their communications, passes matched communications to the
        object `judge`, which checks them, and reports ranks that wait for ever.
        """
        while self.runnable:
            i = self.runnable.popleft()
            while self.at[i] < len(self.todo[i]):
                wait = self._step(i, self.todo[i][self.at[i]])
                self.at[i] += 1
                if wait is not None and wait.missing():
                    self.blocked[i] = wait
                    break
        self._judge()
        self._report()

    def _step(self, i: int, event: Event) -> _Meeting | _Open | None:
        if isinstance(event, PostedCollective):
            return self._enter(i, event)
        if isinstance(event, Await):
            return self.open.pop((i, event.number), None)
        opened = _Open(i, event, [])
        for half in event.halves:
            if half.mask[i]:
                self._offer(i, half, opened)
        self.open[i, event.number] = opened
        return opened if event.blocks else None

    def _enter(self, i: int, event: PostedCollective) -> _Meeting:
        members = event.teams.sets[int(event.teams.team[i])]
        count = self.entered[i, members] = self.entered.get((i, members), -1) + 1
        meeting = self.meetings.setdefault((members, count), _Meeting(members))
        other = next(iter(meeting.come), i)
        meeting.come[i] = event
        if event is not meeting.come[other]:
            self._compare(meeting, other, i)
        if not meeting.missing():
            if meeting.is_alike:
                key = tuple(dict.fromkeys(e for _, e in sorted(meeting.come.items())))
                self.met.setdefault(key, []).append(meeting)
            self._wake(meeting, meeting.come)
        return meeting

    def _compare(self, meeting: _Meeting, i: int, k: int) -> None:
        a, b = meeting.come[i], meeting.come[k]
        for (what, mine), (_, theirs) in zip(a.terms, b.terms, strict=False):
            if at(mine, i) != at(theirs, k):
                sites = [
                    (e.sites[0], f"rank {self.ranks[r]}: {what} {at(value, r)}")
                    for e, r, value in ((a, i, mine), (b, k, theirs))
                ]
                text = f"the ranks of a team enter one communication with a different {what}, "
                text += "but all of them must use the same"
                self.judge.note(Finding(MISMATCH, text, tuple(sites)))
                meeting.is_alike = False
                return

    def _offer(self, i: int, half: Half, opened: _Open) -> None:
        peer = int(half.to[i])
        ends = (i, peer) if half.kind == "send" else (peer, i)
        wanted = _OTHER[half.kind]
        partners = self.channels.setdefault((*ends, wanted), deque())
        if not partners:
            self.channels.setdefault((*ends, half.kind), deque()).append((half, opened))
            opened.lonely.append((peer, half))
            return
        other, theirs = partners.popleft()
        theirs.lonely.remove((i, other))
        pair = (half, other) if half.kind == "send" else (other, half)
        self.paired.setdefault(pair, []).append(ends)
        if not theirs.lonely:
            self._wake(theirs, (theirs.rank,))

    def _wake(self, what: _Meeting | _Open, ranks: Iterable[int]) -> None:
        for i in ranks:
            if self.blocked.get(i) is what:
                del self.blocked[i]
                self.runnable.append(i)

    # ------------------------------------------------------------ matched communications
    def _judge(self) -> None:
        for events, meetings in self.met.items():
            here = np.zeros(len(self.ranks), dtype=bool)
            came = {event: here.copy() for event in events}
            for meeting in meetings:
                for i, event in meeting.come.items():
                    here[i] = came[event][i] = True
            one = events[0] if len(events) == 1 else _together(came)
            self.judge.met(one, here)
            for meeting in meetings if len(events) > 1 else ():
                self._compare_tensors(meeting)
        for (a, b), ends in self.paired.items():
            senders, receivers = np.asarray(ends).T
            self.judge.paired(a, b, senders, receivers)

    def _compare_tensors(self, meeting: _Meeting) -> None:
        """Reports two members of a team that use two tensors in opposite order: for example, one
        rank reduces T1 and then T2, and the other rank reduces T2 and then T1. `meeting` is one
        collective of the team; the earlier ones are remembered."""
        (i, first), *others = sorted(meeting.come.items())
        for k, event in others:
            if first.inp is None or event.inp is None:
                continue
            a, b = first.inp.owners[0][1], event.inp.owners[0][1]
            seen = self.brought.setdefault((i, k), set())
            seen.add((a, b))
            if a is not b and (b, a) in seen:
                mine, theirs = self.ranks[i], self.ranks[k]
                text = f"rank {mine} uses {a.label} in a collective where rank {theirs} uses "
                text += f"{b.label}, and {b.label} in another one where rank {theirs} uses "
                text += f"{a.label}: both ranks must use the tensors in the same order"
                sites = (first.sites[0], f"rank {mine}"), (event.sites[0], f"rank {theirs}")
                self.judge.note(Finding(MISPLACED, text, sites))
                return

    # ------------------------------------------------------------ blocked ranks
    def _report(self) -> None:
        if self.blocked:
            cycle = self._cycle(next(iter(self.blocked)))
            sites = tuple(site for i in cycle for site in self._sites(i))
            last = min(self._missing(cycle[-1]))
            apart = [found for i in cycle[:_MAX_CAUSES] for found in self._apart(i)]
            for is_ever, finding in apart:
                if not is_ever:
                    self.judge.note(finding)
                    return
            if last in self.blocked:
                text = "each rank waits for the next one, and the last for the first"
                text = "; ".join([*(finding.what for _, finding in apart[:1]), text])
                self.judge.note(Finding(DEADLOCK, text, sites[:6]))
            else:
                name = self._name(last)
                self.judge.note(
                    Finding(
                        PARTNER,
                        f"{name} never enters a communication for which other ranks wait",
                        sites[:6],
                    )
                )
            return
        for waiting in self.channels.values():
            for half, opened in waiting:
                peer = self.ranks[int(half.to[opened.rank])]
                verb = "sends to" if half.kind == "send" else "receives from"
                text = f"rank {self.ranks[opened.rank]} {verb} rank {peer}, which has no matching "
                text += _VERB[_OTHER[half.kind]]
                self.judge.note(Finding(PARTNER, text, ((half.site, ""),)))

    def _apart(self, i: int) -> Iterator[tuple[bool, Finding]]:
        """Yields findings (faults) about rank `i`, which waits for ever: one for each of its
        transfers that the peer does not match.

        Each finding is paired with a flag. The flag is True if the peer starts enough matching
        transfers elsewhere in its program. Then the two ranks only disagree on the order.
        """
        wait = self.blocked[i]
        for k, half in wait.lonely if isinstance(wait, _Open) else ():
            is_send = half.kind == "send"
            verb, other = ("sends to", "receives from")[:: 1 if is_send else -1]
            mine, theirs = self._count(i, k, half.kind), self._count(k, i, _OTHER[half.kind])
            me, peer = self._name(i), "itself" if k == i else self._name(k)
            wait = self.blocked.get(k)
            lonely = wait.lonely if isinstance(wait, _Open) and k != i else []
            answer = next(((j, h) for j, h in lonely if h.kind != half.kind), None)
            sites = [(half.site, f"{me} waits for {peer}")]
            if answer is not None:
                third = "itself" if answer[0] == k else self._name(answer[0])
                rest = f"but {peer} {other} {third}"
                sites.append((answer[1].site, f"{peer} waits for {third}"))
            elif mine > theirs:
                rest = f"{'but' if k == i else 'which'} has no matching {_VERB[_OTHER[half.kind]]}"
            else:
                continue
            yield mine <= theirs, Finding(PARTNER, f"{me} {verb} {peer}, {rest}", tuple(sites))

    def _count(self, i: int, k: int, kind: str) -> int:
        """Returns the number of transfers with rank `k` in the program of rank `i`: its sends to
        rank `k` if `kind` is "send", and its receives from rank `k` if `kind` is "recv".
        """
        groups = (e for e in (self.todo[i] if i >= 0 else ()) if isinstance(e, TransferGroup))
        halves = (h for g in groups for h in g.halves if h.kind == kind and h.mask[i])
        return sum(int(h.to[i]) == k for h in halves)

    def _site(self, i: int) -> Site:
        """Returns the op and loop iteration in which rank `i` waits for ever."""
        event = self.todo[i][self.at[i] - 1]
        return event.sites[0] if isinstance(event, PostedCollective) else event.site

    def _cycle(self, i: int) -> list[int]:
        """Returns the ranks of a deadlock, found by following from rank `i` which rank waits for
        which.

        The result has only the ranks of the cycle, each waiting for the next. If the search comes
        to a rank that waits for no other, the result is the whole chain from rank `i` on.
        """
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
        """Returns the ops in which rank `i` waits for ever, each with a note such as "rank 0 waits
        for rank 1".
        """
        wait, me = self.blocked[i], f"rank {self.ranks[i]}"
        if isinstance(wait, _Open):
            return [
                (half.site, f"{me}: its {_VERB[half.kind]} waits for {self._name(peer)}")
                for peer, half in wait.lonely
            ]
        missing = ", ".join(map(self._name, sorted(self._missing(i))[:4]))
        return [(self._site(i), f"{me} waits for {missing}")]


def _together(came: dict[PostedCollective, Array]) -> PostedCollective:
    """Returns one `PostedCollective` for a collective that the members of a team entered in
    different ops.

    `came` maps each op, with its data, to an array of bools: the members that entered the
    collective there.
    """
    parts = [(ranks, event) for event, ranks in came.items()]

    def of(get: Callable[[PostedCollective], PerRank]) -> PerRank:
        return merged([(ranks, get(e)) for ranks, e in parts])

    first, peers = parts[0][1], None
    if first.peers is not None:
        peers = tuple(merged([(r, e.peers[k]) for r, e in parts if e.peers]) for k in (0, 1))
    return replace(
        first,
        sites=tuple(e.sites[0] for _, e in parts),
        mask=np.logical_or.reduce([ranks for ranks, _ in parts]),
        terms=tuple((w, of(lambda e, k=k: e.terms[k][1])) for k, (w, _) in enumerate(first.terms)),
        inp=joined([(ranks, e.inp) for ranks, e in parts]),
        out=joined([(ranks, e.out) for ranks, e in parts]),
        sizes=(of(lambda e: e.sizes[0]), of(lambda e: e.sizes[1])),
        root=of(lambda e: e.root),
        peers=peers,
    )


def follow(events: Sequence[Event], ranks: Sequence[int], judge: Judge) -> None:
    """Follows each rank separately through its communications. Reports ranks that disagree, that
    block each other, or whose transfers have no partner.

    `events` are the communications and waits of all ranks, in program order. The object `judge`
    checks the matched communications and collects the findings (faults).
    """
    _Follower(events, ranks, judge).run()
