"""What the ranks do to each other: matched before anything runs, for all ranks at once.

The program is unrolled once. Where ranks differ (peers, roots, slices, branches) a value is an
array over ranks, so that thousands of ranks cost little more than two. Found are: collectives in
which members of a team differ or do not come, transfers without partner or of another size, cycles
of waits, teams and sizes that do not fit the tensors, and parts of tensors that arrive as other
parts than they left (`MISPLACED`, which relies on the shardings that the tensors declare).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuser.ir.core import Op
from fuser.ir.dtypes import dtype_text
from fuser.ir.scalar import Number, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from hostir.container import HostIrContainer, has_communications
from hostir.effects import Part, Shows, Waits, effects_of
from hostir.findings import Finding, Indices, Site
from hostir.ops import Allocate, ForLoop, IfThenElse
from hostir.rank_posts import (
    MISMATCH,
    PARTNER,
    Await,
    Collective,
    Event,
    Group,
    Half,
    Teams,
    at,
    compare_halves,
    follow,
    ranks_text,
)
from hostir.rank_values import Array, PerRank, RankValues, np
from hostir.spots import Shapes, Spot, device_cuts
from hostir.storage import Storage
from hostir.transfers import (
    REDUCING,
    ROOTED,
    CollectivePermute,
    Communication,
    EndCoalescing,
    P2PCommunication,
    StartCoalescing,
)
from multidevice.communication import TeamOf

SIZES = "sizes do not fit"
TEAM = "wrong team"
MISPLACED = "parts do not fit"
OUT_OF_RANGE = "peer or part out of range"

# Type -> how many times as large as its input its output is (-1: the other way round).
_GROWS: dict[str, int] = {"Allgather": 1, "Gather": 1, "ReduceScatter": -1, "Scatter": -1}


def find_mismatches(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, ranks: Sequence[int] = ()
) -> list[Finding]:
    """Return what does not fit between the ranks of a program, each group of ops once.

    `values` binds the symbols of the inputs (global extents) and `numberOfStreams`; `ranks`
    defaults to those of the program's meshes.
    """
    if not has_communications(program):
        return []
    walker = _Walker(program, ranks or program.devices(), dict(values))
    walker.run(program.ops)
    walker.finish()
    return list(walker.found.values())


def _first_difference(x: PerRank, teams: Teams, here: Array) -> tuple[int, int] | None:
    """Return two members of one team, by place, whose values differ; None where none do."""
    if not isinstance(x, np.ndarray):
        return None
    by_team = x[teams.members]
    differ = (by_team != by_team[:, :1]).any(1) & here[teams.members[:, 0]]
    if not differ.any():
        return None
    first, *rest = teams.members[int(np.argmax(differ))].tolist()
    return first, next(i for i in rest if x[i] != x[first])


class _Walker:
    """Goes through the unrolled program for all ranks; `mask` tells which ones are here."""

    def __init__(
        self, program: HostIrContainer, ranks: Sequence[int], values: dict[Symbol, Number]
    ) -> None:
        self.ranks = tuple(ranks)
        self.values = RankValues(ranks, values)
        self.shapes = Shapes(self.values)
        self.storage = Storage.of(program)
        self.mask = np.ones(len(ranks), dtype=bool)
        self.indices: Indices = ()
        self.found: dict[object, Finding] = {}
        self.spots: dict[TensorView, Spot] = {}
        self.facts: dict[int, list[Shows | Waits]] = {}
        self.teams: dict[TeamOf, Teams] = {}
        self.place = np.full(max(ranks, default=0) + 2, -1)
        self.place[list(ranks)] = np.arange(len(ranks))
        self.events: list[Event] = []
        self.group: list[Half] | None = None
        # Whether some partners did not come to the same place of the program.
        self.is_uneven = False

    # ------------------------------------------------------------ control flow
    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, ForLoop):
                self._loop(op)
            elif isinstance(op, IfThenElse):
                self._branch(op)
            elif type(op) in HANDLERS:
                HANDLERS[type(op)](self, op, Site(op, self.indices))
            else:
                self._names(op)

    def _loop(self, op: ForLoop) -> None:
        bounds = [self.values.of(x) for x in (op.start, op.stop, op.step)]
        columns = np.stack([np.broadcast_to(b, self.mask.shape) for b in bounds])
        outside, outer = self.indices, self.mask
        for start, stop, step in np.unique(columns[:, outer], axis=1).T.tolist():
            self.mask = outer & ((start, stop, step) == columns.T).all(1)
            for i in range(start, stop, max(step, 1)):
                self.values.values[op.index] = i
                self.indices = (*outside, (op.index, i))
                self.run(op.body)
        self.indices, self.mask = outside, outer
        self.values.values.pop(op.index, None)

    def _branch(self, op: IfThenElse) -> None:
        holds = self.values.of(op.predicate)
        outer = self.mask
        for region, chosen in ((op.then, holds), (op.orelse, np.logical_not(holds))):
            self.mask = outer & chosen
            if region and self.mask.any():
                self.run(region)
        self.mask = outer

    # ------------------------------------------------------------ names
    def _names(self, op: Op) -> None:
        effects = self.facts.get(id(op))
        if effects is None:
            every = effects_of(op, self.storage.buffered)
            effects = self.facts[id(op)] = [e for e in every if isinstance(e, Shows | Waits)]
        for effect in effects:
            if isinstance(effect, Shows):

                def check(part: Part, index: PerRank, limit: int, shows: Shows = effect) -> None:
                    self._in_range(op, shows, part, index, limit)

                source = self._spot(effect.source)
                self.spots[effect.out] = self.shapes.named(source, effect, op, check)
            else:
                self.events.append(Await(Site(op, self.indices), effect.number, self.mask))

    def _in_range(self, op: Op, shows: Shows, part: Part, index: PerRank, limit: int) -> None:
        outside = np.broadcast_to((index < 0) | (index >= limit), self.mask.shape) & self.mask
        if outside.any():
            i = int(np.argmax(outside))
            what = f"part {part.index} = {at(index, i)} of axis {part.axis} of "
            what += f"{shows.source.label}, which has {at(limit, i)}, on {self._who(outside)}"
            self._note(Finding(OUT_OF_RANGE, what, ((Site(op, self.indices), ""),)))

    def _spot(self, tv: TensorView) -> Spot:
        spot = self.spots.get(tv)
        if spot is None:
            shown = self.storage.shown_by(tv)
            if shown is not None and tv not in self.storage.named:
                return self._spot(shown)
            spot = self.spots[tv] = self.shapes.spot(tv)
        return spot

    def _allocate(self, op: Allocate, site: Site) -> None:
        if op.stream_index is not None and op.buffer not in self.storage.named:
            # Its shape is that of one step.
            self.spots[op.buffer] = self.shapes.step(op.buffer, op.stream_index)

    # ------------------------------------------------------------ collectives
    def _teams(self, of: TeamOf) -> Teams:
        if of not in self.teams:
            self.teams[of] = Teams(of, self.ranks)
        return self.teams[of]

    def _comes(self, op: Communication | CollectivePermute, site: Site) -> tuple[Teams, Array]:
        """Return the teams, and which ranks are in one whose members are all here."""
        if any(tv.mesh is not None and tv.mesh != op.team.mesh for tv in (op.inp, op.out)):
            self._check_meshes(op, site)
        teams = self._teams(op.team)
        here = self.mask[teams.members]
        whole = here.all(axis=1)
        self.is_uneven |= bool((here.any(axis=1) & ~whole).any())
        return teams, (teams.team >= 0) & whole[teams.team]

    def _check_meshes(self, op: Communication | CollectivePermute, site: Site) -> None:
        meshes = {tv.mesh for tv in (op.inp, op.out) if tv.mesh is not None}
        held = {r for mesh in meshes for r in mesh.devices}
        is_shaped = len(meshes) > 1 or all(m.shape == op.team.mesh.shape for m in meshes)
        if held != set(op.team.mesh.devices) or not is_shaped:
            text = f"{op.name} is on {op.team.mesh}, but {op.inp.label} and {op.out.label} are on "
            text += " and ".join(str(tv.mesh) for tv in dict.fromkeys((op.inp, op.out)))
            self._note(Finding(TEAM, text, ((site, ""),)))

    def _collective(self, op: Communication, site: Site) -> None:
        teams, here = self._comes(op, site)
        inp, out = self._spot(op.inp), self._spot(op.out)
        mine, theirs = (
            spot.elements(order.expanded) for spot, order in zip((inp, out), op.orders, strict=True)
        )
        root: PerRank = 0 if op.root is None else self.values.of(op.root)
        terms = (
            ("type", op.type),
            ("dtype", dtype_text(op.inp.dtype())),
            ("reduction", op.red_op),
            ("root", root),
            ("size of the input", mine),
            ("size of the output", theirs),
        )
        mask = self.mask & (teams.team >= 0)
        self.events.append(Collective(site, op.number, mask, teams, terms))
        if not here.any():
            return
        if not self._are_alike(terms, teams, here, site):
            return
        if not self._in_team(root, op.team.size, here, site, "root"):
            return
        self._check_sizes(op, mine, theirs, here, site)
        self._check_cuts(op, inp, out, site)
        self._check_collective(op, inp, out, root, teams, here, site)

    def _are_alike(
        self,
        terms: Sequence[tuple[str, PerRank]],
        teams: Teams,
        here: Array,
        site: Site,
    ) -> bool:
        for what, value in terms:
            two = _first_difference(value, teams, here)
            if two is not None:
                a, b = two
                text = f"the members of a team differ in {what}: {value[a]} on rank "
                text += f"{self.ranks[a]}, {value[b]} on rank {self.ranks[b]}"
                self._note(Finding(MISMATCH, text, ((site, ""),)))
                return False
        return True

    def _in_team(self, position: PerRank, size: int, here: Array, site: Site, what: str) -> bool:
        outside = np.broadcast_to((position < 0) | (position >= size), here.shape) & here
        if outside.any():
            i = int(np.argmax(outside))
            text = f"{what} {at(position, i)} in a team of {size}, on {self._who(outside)}"
            self._note(Finding(OUT_OF_RANGE, text, ((site, ""),)))
        return not outside.any()

    def _check_sizes(
        self, op: Communication, mine: PerRank, theirs: PerRank, here: Array, site: Site
    ) -> None:
        count, grows = op.team.size, _GROWS.get(op.type, 0)
        fits = mine * count == theirs if grows > 0 else mine == theirs * (count if grows else 1)
        if op.type == "AllToAll":
            fits = (mine == theirs) & (mine % count == 0)
        wrong = np.broadcast_to(np.logical_not(fits), here.shape) & here
        if wrong.any():
            i = int(np.argmax(wrong))
            wanted = "as large as" if not grows else f"{count} times"
            large, small = (op.out, op.inp) if grows >= 0 else (op.inp, op.out)
            text = f"{op.type} of {count} ranks: {op.inp.label} has {at(mine, i)} elements and "
            text += f"{op.out.label} {at(theirs, i)}, on {self._who(wrong)}"
            note = f"{large.label} must be {wanted} {small.label}"
            self._note(Finding(SIZES, text, ((site, note),)))

    def _check_cuts(self, op: Communication, inp: Spot, out: Spot, site: Site) -> None:
        """The team must lie along what spreads the tensor that is gathered or scattered."""
        grows = _GROWS.get(op.type, 0)
        if not grows:
            return
        spread, whole = (inp, out) if grows > 0 else (out, inp)
        along = frozenset[ParallelType]().union(*device_cuts(spread.owner))
        if along and not along & set(op.team.ptypes):
            names = " and ".join(p.text for p in op.team.ptypes)
            found = " and ".join(sorted(p.text for p in along))
            text = f"{op.type} along {names}, but {spread.owner.label} is spread along {found}"
            self._note(Finding(TEAM, text, ((site, ""),)))
        still = frozenset[ParallelType]().union(*device_cuts(whole.owner)) & set(op.team.ptypes)
        if grows > 0 and along and still:
            text = f"{op.type} of {spread.owner.label}, but {whole.owner.label} stays spread along "
            self._note(Finding(TEAM, text + " and ".join(p.text for p in still), ((site, ""),)))

    # ------------------------------------------------------------ parts
    def _box(self, spot: Spot, without: int | None = None) -> tuple[list[PerRank], list[PerRank]]:
        """Return where the part lies in the whole tensor, without an axis of partial sums."""
        offsets = self.shapes.offsets(spot.owner)
        starts = [a + b for a, b in zip(spot.starts, offsets, strict=True)]
        keep = [a for a in range(len(starts)) if a != without]
        return [starts[a] for a in keep], [spot.lengths[a] for a in keep]

    def _check_collective(
        self,
        op: Communication,
        inp: Spot,
        out: Spot,
        root: PerRank,
        teams: Teams,
        here: Array,
        site: Site,
    ) -> None:
        """What arrives must be the part of the whole that it was: where the whole is the same."""
        partial = self._partial_axis(op, inp) if op.type in REDUCING else None
        whole = list(self.shapes.whole(inp.owner))
        if partial is not None:
            del whole[partial]
        if whole != list(self.shapes.whole(out.owner)) or op.type in ("AllToAll", "Gather"):
            return
        (a, n), (b, m) = self._box(inp, partial), self._box(out)
        checked = here
        if op.type in ("Broadcast", "Scatter"):
            a, n = ([self._from(x, root, teams) for x in side] for side in (a, n))
        if op.type == "Reduce":
            checked = here & (teams.position == root)
        place, count = teams.position, op.team.size
        grows = _GROWS.get(op.type, 0)
        wrong = np.zeros(here.shape, dtype=bool)
        for axis in range(len(whole)):
            is_same = (a[axis] == b[axis]) & (n[axis] == m[axis])
            if grows > 0:
                is_same |= (a[axis] == b[axis] + place * n[axis]) & (m[axis] == count * n[axis])
            elif grows < 0:
                is_same |= (b[axis] == a[axis] + place * m[axis]) & (n[axis] == count * m[axis])
            wrong |= np.logical_not(is_same)
        wrong &= checked
        if wrong.any():
            i = int(np.argmax(wrong))
            source = f" from root {at(root, i)}" if op.type in ROOTED else ""
            text = f"{op.type}{source} brings {inp.owner.label}{_range_text(a, n, i)} into "
            text += f"{out.owner.label}{_range_text(b, m, i)}, on {self._who(wrong)}"
            self._note(Finding(MISPLACED, text, ((site, ""),)))
        elif op.type == "Allgather":
            self._check_together(op, out, (b, m), teams, checked, site)
        elif op.type in REDUCING:
            self._check_together(op, inp, (a, n), teams, here, site)

    def _check_together(
        self,
        op: Communication,
        spot: Spot,
        box: tuple[list[PerRank], list[PerRank]],
        teams: Teams,
        here: Array,
        site: Site,
    ) -> None:
        """What a team gathers, or reduces, is one part of a whole, the same for all members."""
        for x in box[0]:
            two = _first_difference(x, teams, here)
            if two is not None:
                i, k = two
                text = f"{op.type} of different parts: {spot.owner.label}{_range_text(*box, i)} on "
                text += f"rank {self.ranks[i]}, {_range_text(*box, k)} on rank {self.ranks[k]}"
                self._note(Finding(MISPLACED, text, ((site, ""),)))
                return

    def _from(self, x: PerRank, root: PerRank, teams: Teams) -> PerRank:
        """Return the value of each rank's root."""
        if not isinstance(x, np.ndarray):
            return x
        roots = teams.members[teams.team, np.broadcast_to(root, teams.team.shape)]
        return x[roots]

    def _partial_axis(self, op: Communication, spot: Spot) -> int | None:
        """Return the axis of the owner that numbers the partial sums of a team."""
        sizes, cuts = self.shapes.local(spot.owner), device_cuts(spot.owner)
        ptypes = set(op.team.ptypes)
        return next((k for k, c in enumerate(cuts) if c & ptypes and sizes[k] == 1), None)

    def _check_pair(
        self, inp: Spot, out: Spot, sender: Array, here: Array, sites: tuple[Site, ...]
    ) -> None:
        """A transfer brings a part of a whole to the same part; `sender` [ranks] has the places."""
        (a, n), (b, m) = self._box(inp), self._box(out)
        is_spread = any(map(bool, (*device_cuts(inp.owner), *device_cuts(out.owner))))
        differ = any(isinstance(x, np.ndarray) for x in (*a, *b))
        if self.shapes.whole(inp.owner) != self.shapes.whole(out.owner) or not differ:
            return
        if not is_spread and inp.owner is not out.owner:
            return
        if not is_spread and not all(any(isinstance(x, np.ndarray) for x in s) for s in (a, b)):
            return  # a buffer whose slots are the user's own
        sent = [x[sender] if isinstance(x, np.ndarray) else x for x in a]
        wrong = np.zeros(here.shape, dtype=bool)
        for x, y in zip(sent, b, strict=True):
            wrong |= np.asarray(x != y)
        wrong &= here
        if wrong.any():
            i = int(np.argmax(wrong))
            text = f"rank {self.ranks[int(sender[i])]} sends {inp.owner.label}"
            text += f"{_range_text(sent, n, i)}, which arrives as {out.owner.label}"
            text += f"{_range_text(b, m, i)} on rank {self.ranks[i]}"
            self._note(Finding(MISPLACED, text, tuple((s, "") for s in dict.fromkeys(sites))))

    # ------------------------------------------------------------ transfers
    def _permute(self, op: CollectivePermute, site: Site) -> None:
        teams, here = self._comes(op, site)
        to, source = self.values.of(op.send_peer), self.values.of(op.recv_peer)
        size, inp, out = op.team.size, self._spot(op.inp), self._spot(op.out)
        mine = inp.elements(op.orders[0].expanded)
        theirs = out.elements(op.orders[1].expanded)
        terms = (("type", "CollectivePermute"), ("dtype", dtype_text(op.inp.dtype())))
        mask = self.mask & (teams.team >= 0)
        self.events.append(Collective(site, op.number, mask, teams, terms))
        for what, peer in (("send_peer", to), ("recv_peer", source)):
            if not self._in_team(peer, size, here, site, what):
                return
        to, source = (np.broadcast_to(p, here.shape) for p in (to, source))
        target, sender = (teams.members[teams.team, np.where(here, p, 0)] for p in (to, source))
        me = np.arange(len(here))
        lost = here & (sender[target] != me)
        if lost.any():
            i = int(np.argmax(lost))
            k, other = int(target[i]), int(sender[target[i]])
            text = f"rank {self.ranks[i]} sends to rank {self.ranks[k]}, which receives from rank "
            text += f"{self.ranks[other]}"
            self._note(Finding(PARTNER, text, ((site, f"on {self._who(lost)}"),)))
            return
        sent = mine[sender] if isinstance(mine, np.ndarray) else mine
        wrong = np.broadcast_to(np.asarray(sent != theirs), here.shape) & here
        if wrong.any():
            i = int(np.argmax(wrong))
            text = f"rank {self.ranks[int(sender[i])]} sends {at(sent, i)} elements, rank "
            text += f"{self.ranks[i]} receives {at(theirs, i)}"
            self._note(Finding(SIZES, text, ((site, ""),)))
        self._check_pair(inp, out, sender, here, (site,))

    def _transfer(self, op: P2PCommunication, site: Site) -> None:
        spot = self._spot(op.buffer)
        peer, elements = self.values.of(op.peer), spot.elements(op.orders[0].expanded)
        holds = self._holds(op.buffer)
        half = Half(site, op, self.mask & holds, peer, elements, spot)
        if self.group is not None:
            self.group.append(half)
        else:
            self._start(Group(site, op.number, half.mask, [half], op.backend == "NCCL"))

    def _holds(self, tv: TensorView) -> Array:
        if tv.mesh is None or tv.mesh.size == len(self.ranks):
            return np.ones(len(self.ranks), dtype=bool)
        held = set(tv.mesh.devices)
        return np.asarray([r in held for r in self.ranks])

    def _open(self, op: StartCoalescing, site: Site) -> None:
        self.group = []

    def _close(self, op: EndCoalescing, site: Site) -> None:
        halves, self.group = self.group or [], None
        self._start(Group(site, op.number, self.mask, halves, True))

    def _start(self, group: Group) -> None:
        self.events.append(group)
        for half in group.halves:
            if not self._peers_exist(half):
                return
        sends, receives = self._pairs(group, "send"), self._pairs(group, "recv")
        if len(sends) != len(receives) or (sends[:, :2] != receives[:, :2]).any():
            self.is_uneven = True
            return
        differ = sends[:, 3] != receives[:, 3]
        met = np.stack([sends[:, 2], receives[:, 2]], axis=1)
        kinds: list[list[int]] = np.unique(met, axis=0).tolist()
        for k, j in kinds:
            source, target = group.halves[k], group.halves[j]
            rows = np.nonzero((met == (k, j)).all(axis=1))[0]
            first = rows[int(np.argmax(differ[rows]))]
            sender = np.zeros(len(self.ranks), dtype=np.int64)
            here = np.zeros(len(self.ranks), dtype=bool)
            sender[sends[rows, 1]], here[sends[rows, 1]] = sends[rows, 0], True
            a, b = sends[first, :2].tolist()
            compare_halves(source, a, target, b, self.ranks, self._note)
            self._check_pair(source.spot, target.spot, sender, here, (source.site, target.site))

    def _peers_exist(self, half: Half) -> bool:
        peer = np.broadcast_to(half.peer, half.mask.shape)
        outside = half.mask & ((peer < 0) | (peer >= len(self.place)))
        outside |= half.mask & (self.place[np.clip(peer, 0, len(self.place) - 1)] < 0)
        if outside.any():
            i = int(np.argmax(outside))
            text = f"peer {half.op.peer} = {peer[i]} is no rank of the program, on "
            text += self._who(outside)
            self._note(Finding(OUT_OF_RANGE, text, ((half.site, ""),)))
        return not outside.any()

    def _pairs(self, group: Group, kind: str) -> Array:
        """Return (from, to, number of the half, elements) per transfer, sorted by the ends."""
        rows = [np.zeros((0, 4), dtype=np.int64)]
        for number, half in enumerate(group.halves):
            if half.op.type == kind:
                me = np.nonzero(half.mask)[0]
                peer = self.place[np.broadcast_to(half.peer, half.mask.shape)[me]]
                elements = np.broadcast_to(half.elements, half.mask.shape)[me]
                ends = (me, peer) if kind == "send" else (peer, me)
                rows.append(np.stack([*ends, np.full(len(me), number), elements], axis=1))
        found = np.concatenate(rows)
        return found[np.lexsort((found[:, 1], found[:, 0]))]

    def finish(self) -> None:
        if self.is_uneven:
            follow(self.events, self.ranks, self._note)

    # ------------------------------------------------------------ reports
    def _who(self, mask: Array) -> str:
        places: list[int] = np.nonzero(mask)[0].tolist()
        return ranks_text([self.ranks[i] for i in places])

    def _note(self, finding: Finding) -> None:
        self.found.setdefault((finding.kind, *map(id, finding.ops)), finding)


def _range_text(starts: Sequence[PerRank], lengths: Sequence[PerRank], i: int) -> str:
    ends = [(int(str(at(s, i))), int(str(at(n, i)))) for s, n in zip(starts, lengths, strict=True)]
    return "[" + ", ".join(str(s) if n == 1 else f"{s}:{s + n}" for s, n in ends) + "]"


HANDLERS: dict[type[Op], Callable[[_Walker, Any, Site], None]] = {
    Allocate: _Walker._allocate,  # pyright: ignore[reportPrivateUsage]
    CollectivePermute: _Walker._permute,  # pyright: ignore[reportPrivateUsage]
    Communication: _Walker._collective,  # pyright: ignore[reportPrivateUsage]
    EndCoalescing: _Walker._close,  # pyright: ignore[reportPrivateUsage]
    P2PCommunication: _Walker._transfer,  # pyright: ignore[reportPrivateUsage]
    StartCoalescing: _Walker._open,  # pyright: ignore[reportPrivateUsage]
}
