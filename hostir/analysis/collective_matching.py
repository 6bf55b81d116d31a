"""Matches the collectives and transfers of all ranks before anything runs.

The program is unrolled once for all ranks: its loops are followed iteration by iteration. A value
that differs between ranks (peer, root, slice, branch) is an array over ranks, so thousands of ranks
cost little more than two. A team is a group of ranks that take part in a collective together. The
check reports:

- members of a team that enter different collectives, or that do not enter a collective;
- transfers without a partner, or whose partner has another size or dtype;
- cycles of ranks that wait for each other;
- teams and sizes that do not fit the tensors;
- elements of a tensor that arrive at another position than the declared shardings say.

If partners communicate in different ops, or not in the same iteration, the ranks are followed one
by one (`hostir.analysis.deadlocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fuser.ir.domain.device_mesh import DeviceMesh, ranks_text
from fuser.ir.dtypes import dtype_text
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import ParallelType
from hostir.analysis.deadlocks import (
    MISMATCH,
    MISPLACED,
    PARTNER,
    Await,
    Event,
    Half,
    PostedCollective,
    Teams,
    TransferGroup,
    follow,
)
from hostir.analysis.rank_regions import Region, Shapes, ShardRegion
from hostir.analysis.rank_values import (
    Array,
    PerRank,
    at,
    everywhere,
    np,
    outside_of,
    pick,
)
from hostir.analysis.walker import AllRanks, EffectState, StreamNumbers, Walk
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.diagnostics import Finding, Site
from hostir.ir.effects import (
    ClosesGroup,
    Effect,
    Frees,
    Makes,
    OpensGroup,
    Part,
    Shows,
    Starts,
    Waits,
    effects_of,
)
from hostir.ir.ops import HostOp, Movement, SymmetricContiguousView
from hostir.ir.program import HostIrContainer
from hostir.ir.queries import has_communications
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.collectives import ALLGATHER, COLLECTIVES, Collective

SIZES = "sizes do not fit"
TEAM = "wrong team"
OUT_OF_RANGE = "peer or part out of range"
UNDEFINED = "no value"


def find_mismatches(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, ranks: Sequence[int] = ()
) -> list[Finding]:
    """Returns the mismatches between the communications of a program's ranks, such as a send
    without a receive. There is at most one finding of each kind about the same ops.

    `values` maps symbols to numbers: `numberOfStreams`, and the extents of the inputs as whole
    tensors, not as the parts of one rank.
    `ranks` defaults to the ranks of the program's meshes.
    """
    if not has_communications(program):
        return []
    matching = MatchingWalk(program, ranks or program.devices(), dict(values))
    matching.run(program.ops)
    matching.finish()
    return list(matching.found.values())


class MatchingWalk(Walk[PerRank]):
    """Follows a program for all ranks at once, loop iteration by loop iteration, and matches the
    ranks' communications. `found` collects the findings (faults).

    A communication that all partners start in the same op and iteration is matched at once. As soon
    as one communication cannot be matched at once, this and all later communications are only
    recorded, in `events`. After the walk, `finish` follows each rank separately through the
    recorded communications. `hostir.analysis.unrolled_program` derives from this class.
    """

    def __init__(
        self, program: HostIrContainer, ranks: Sequence[int], values: dict[Symbol, Number]
    ) -> None:
        self.domain = AllRanks(ranks, values)
        super().__init__(self.domain)
        self.ranks = tuple(ranks)
        self.values = self.domain.values
        self.shapes = Shapes(self.values)
        self.storage = Storage.of(program)
        self.streams = StreamNumbers(self.values.of, self.domain.merge)
        self.state = EffectState[Half](self.streams)
        self.found: dict[object, Finding] = {}
        self.shard_regions: dict[TensorView, ShardRegion] = {}
        self.facts: dict[int, list[Effect]] = {}
        self.teams: dict[TeamOf, Teams] = {}
        # For each collective: the teams, and which ranks are in one.
        self.entered: dict[Movement, tuple[Teams, Array]] = {}
        # The allgather that a view of several ranks' shards is matched as.
        self.gathers: dict[SymmetricContiguousView, Movement] = {}
        self.held: dict[DeviceMesh | None, Array] = {}
        self.me = np.arange(len(ranks))
        # Rank -> position in `ranks`; the last entry is for all other ranks, and for -1.
        self.place = np.full(max(ranks, default=0) + 2, -1)
        self.place[list(ranks)] = self.me
        # The communications since the first one that did not match at once. `follow` matches them.
        self.events: list[Event] = []
        self.is_uneven = False
        # A single send that has no partner yet.
        self.sent: TransferGroup | None = None
        # Whether a peer is undefined, so that ranks cannot be followed.
        self.is_lost = False

    # ------------------------------------------------------------ ops
    @property
    def mask(self) -> Array:
        """The ranks that run the current op, as an array of bools: True for a rank that has taken
        this branch and is in this iteration.
        """
        return self.domain.mask

    def on_op(self, op: Op) -> None:
        """Matches the communication of an op in the current iteration. If the op slices or views a
        tensor, also records which elements the result refers to."""
        effects = self.facts.get(id(op))
        if effects is None:
            every = effects_of(op, self.storage.buffered)
            effects = self.facts[id(op)] = [e for e in every if self._matters(e)]
        for effect in effects:
            self._apply(effect, op, Site(op, self.indices))

    def _matters(self, effect: Effect) -> bool:
        """Returns whether the check of communications must follow an effect of an op: whether the
        effect decides which elements ranks send and receive, or when.

        Such effects are the start and the wait of a communication, and the creation and the end of
        a view. The allocation of a buffer is one if the buffer holds only one block of a tensor.
        """
        if isinstance(effect, Makes):
            # The buffer has the shape of one step's block.
            return effect.step is not None and effect.tensor not in self.storage.named
        if isinstance(effect, Frees):
            return effect.tensor in self.storage.views
        return isinstance(effect, Shows | Starts | Waits | OpensGroup | ClosesGroup)

    def _apply(self, effect: Effect, op: Op, site: Site) -> None:
        match effect:
            case Makes(tensor, _, step) if step is not None:
                self.shard_regions[tensor] = self.shapes.step(tensor, step)
            case Shows(out) if out in self.storage.views:
                self._open_view(self.storage.views[out], site)
            case Shows():
                self._name(effect, op)
            case Frees(tensor):
                self._close_view(tensor, site)
            case Starts(number):
                self._starts(op, number, site)
            case OpensGroup():
                self.state.apply(effect)
            case ClosesGroup():
                self._close(effect, site)
            case Waits(number):
                self._wait(number, site)
            case _:
                raise AssertionError(
                    f"internal error: the check of communications does not support the effect "
                    f"{effect} of the op {op.name}. Please report this program"
                )

    def _starts(self, op: Op, number: int, site: Site) -> None:
        movement = op.movement if isinstance(op, HostOp) else None
        assert movement is not None, f"{op.name} starts a communication, and moves nothing"
        if movement.team is None:
            self._transfer(movement, number, site)
        elif movement.collective is None:
            self._permute(movement, number, site)
        else:
            self._collective(movement, number, site)

    def needed(self, x: Scalar, what: str, op: Op) -> PerRank:
        """Returns the value of `x`, which is a loop bound or the condition of the branch `op`, on
        all ranks.

        Reports the ranks on which `x` divides by 0. `what` is the role of `x` in the report, such
        as "bound".
        """
        return self._value(x, what, self.mask, self.site(op))

    # ------------------------------------------------------------ names
    def _name(self, effect: Shows, op: Op) -> None:
        def check(part: Part, index: PerRank, limit: PerRank) -> PerRank:
            self._in_range(op, effect, part, index, limit)
            return index

        source = self.shard_region(effect.source)
        self.shard_regions[effect.out] = self.shapes.named(source, effect, op, check)

    def _wait(self, number: int, site: Site) -> None:
        if self.sent is not None and self.sent.number == number:
            self._begin()
        if self.is_uneven:
            self.events.append(Await(site, number, self.mask))

    def _in_range(self, op: Op, shows: Shows, part: Part, index: PerRank, limit: PerRank) -> None:
        self._check_defined("part", part.index, self.mask, Site(op, self.indices))
        outside = outside_of(index, limit, self.mask)
        if outside is not None:
            i = int(np.argmax(outside))
            what = f"part {part.index} = {at(index, i)} of axis {part.axis} of "
            what += f"{shows.source.label} does not exist on {self._who(outside)}: the axis has "
            what += f"{at(limit, i)} parts, counted from 0"
            self.note(Finding(OUT_OF_RANGE, what, ((Site(op, self.indices), ""),)))

    def shard_region(self, tv: TensorView) -> ShardRegion:
        """Returns which elements of a tensor each rank has in the current iteration: those of the
        rank's shard, the part of the tensor that the rank stores. If `tv` is a view, these are
        elements of the tensor of which it is a view."""
        shard = self.shard_regions.get(tv)
        if shard is None:
            shown = self.storage.shown_by(tv)
            if shown is not None and tv not in self.storage.named:
                return self.shard_region(shown)
            shard = self.shard_regions[tv] = self.shapes.shard_region(tv)
        return shard

    # ------------------------------------------------------------ collectives
    def _teams(self, of: TeamOf) -> Teams:
        if of not in self.teams:
            self.teams[of] = Teams(of, self.ranks)
        return self.teams[of]

    def _comes(self, movement: Movement, site: Site) -> tuple[Teams, Array]:
        """Returns the ranks that take part in `movement`, a communication. The first result has its
        teams: groups of ranks that communicate with each other. The second is an array of bools,
        True for the ranks that run the op and are in a team.

        Also reports a team that does not fit the tensors; `site` is the op, for the report. If only
        some members of a team run the op, sets `is_uneven`: the ranks must then be followed one by
        one after the walk.
        """
        if movement not in self.entered:
            team = movement.team
            assert team is not None, f"a {movement.kind} has no team"
            if any(tv.mesh is not None and tv.mesh != team.mesh for tv in movement.tensors):
                self._check_meshes(movement, team, site)
            if movement.collective is not None:
                self._check_cuts(movement, movement.collective, team, site)
            teams = self._teams(team)
            self.entered[movement] = teams, teams.team >= 0
        teams, inside = self.entered[movement]
        here = self.mask & inside
        if not here.all():
            by_team = here[teams.members]
            self.is_uneven |= bool((by_team.any(axis=1) & ~by_team.all(axis=1)).any())
        return teams, here

    def _check_meshes(self, movement: Movement, team: TeamOf, site: Site) -> None:
        """Reports a communication, `movement`, whose team has other ranks, or another arrangement
        of ranks, than the mesh of the tensors that it moves. `site` is the op, for the report.
        """
        meshes = {tv.mesh for tv in movement.tensors if tv.mesh is not None}
        held = {r for mesh in meshes for r in mesh.devices}
        is_shaped = len(meshes) > 1 or all(m.shape == team.mesh.shape for m in meshes)
        if held != set(team.mesh.devices) or not is_shaped:
            labels = " and ".join(tv.label for tv in movement.tensors)
            text = f"the team of {site.op.name} is on {team.mesh}, but {labels} are on "
            text += " and ".join(str(tv.mesh) for tv in dict.fromkeys(movement.tensors))
            text += ": the meshes must be the same"
            self.note(Finding(TEAM, text, ((site, ""),)))

    def _enters(self, event: PostedCollective, here: Array) -> None:
        """Matches the collective `event` if all members of each team enter it in the same op and
        iteration. `here` has True for the ranks that enter.

        Otherwise records the collective. After the walk, it is matched by following the ranks one
        by one.
        """
        self._begin()
        if self.is_uneven:
            self.events.append(event)
        elif here.any() and self._are_alike(event, here):
            self.met(event, here)

    def _collective(self, movement: Movement, number: int, site: Site, library: str = "") -> None:
        row, team = movement.collective, movement.team
        assert row is not None and team is not None, f"{movement.kind} is no collective"
        teams, here = self._comes(movement, site)
        inp, out = map(self.shard_region, movement.both)
        mine, theirs = (self._elements(movement, tv) for tv in movement.both)
        root: PerRank = 0
        if movement.root is not None:
            root = self._value(movement.root, "root", here, site)
        terms = (
            ("type", movement.kind),
            ("library", library or _library(movement)),
            ("dtype", dtype_text(movement.both[0].dtype())),
            ("reduction", movement.red_op),
            ("root", root),
            ("size of the input", mine),
            ("size of the output", theirs),
        )
        is_right = self._in_team(root, team.size, here, site, "root")
        is_right &= self._check_sizes(movement, mine, theirs, here, site)
        partial = None
        if row.reduces == "all":
            partial = self.shapes.partial_axis(inp, team.ptypes)
        parts = self.shapes.region(inp, without=partial), self.shapes.region(out)
        if not is_right:
            parts = None, None
        event = PostedCollective(
            (site,), movement.kind, number, here, teams, terms, *parts, (mine, theirs)
        )
        event.root = root
        self._enters(event, here)

    def _open_view(self, op: SymmetricContiguousView, site: Site) -> None:
        """Checks a `SymmetricContiguousView`. This op makes one tensor out of the parts (shards) of
        a tensor that several ranks store, without copying them. All ranks of the team must reach
        the op, so the op is matched like an allgather of the shards.
        """
        gather = self.gathers.get(op)
        if gather is None:
            assert op.team is not None, f"{op.out} is a view of only one rank's shard"
            kind = ALLGATHER.name
            gather = Movement(kind, op.inp, op.out, op.team, collective=ALLGATHER)
            self.gathers[op] = gather
        self.shard_regions[op.out] = self.shapes.shard_region(op.out)
        self._collective(gather, -1, site, library="none: a view of shards")

    def _close_view(self, shown: TensorView, site: Site) -> None:
        view = self.storage.views[shown]
        if view not in self.gathers:
            return
        teams, here = self._comes(self.gathers[view], site)
        terms = (("type", f"Deallocate of {shown.label}"),)
        self._enters(
            PostedCollective((site,), "", -1, here, teams, terms, None, None, (0, 0)), here
        )

    def _are_alike(self, event: PostedCollective, here: Array) -> bool:
        for what, value in event.terms:
            two = first_difference(value, event.teams, here)
            if two is not None:
                a, b = two
                text = (
                    f"the ranks of a team differ in {what}, but must use the same: {value[a]} on "
                )
                text += f"rank {self.ranks[a]}, {value[b]} on rank {self.ranks[b]}"
                self.note(Finding(MISMATCH, text, ((event.sites[0], ""),)))
                return False
        return True

    def _value(self, x: Scalar, what: str, here: Array, site: Site) -> PerRank:
        """Returns the value of the scalar `x` on all ranks, and reports the ranks in `here` on
        which `x` divides by 0. `what` is the role of `x` in the report, such as "root".
        """
        value = self.values.of(x)
        self._check_defined(what, x, here, site)
        return value

    def _check_defined(self, what: str, x: Scalar, here: Array, site: Site) -> None:
        """Reports the ranks in `here` on which the scalar `x` divides by 0.

        The caller has evaluated `x` directly before, because only the faults of the latest
        evaluation are remembered. `what` is the role of `x` in the report, such as "peer".
        """
        undefined = self.values.undefined
        if undefined is not None and (wrong := undefined & here).any():
            text = f"{what} {x} divides by 0 on {self._who(wrong)}"
            self.note(Finding(UNDEFINED, text, ((site, ""),)))
            self.is_lost = True

    def _in_team(self, position: PerRank, size: int, here: Array, site: Site, what: str) -> bool:
        outside = outside_of(position, size, here)
        if outside is not None:
            i = int(np.argmax(outside))
            text = (
                f"{what} {at(position, i)} is no position in a team of {size} ranks, counted from "
            )
            text += f"0, on {self._who(outside)}"
            self.note(Finding(OUT_OF_RANGE, text, ((site, ""),)))
        return outside is None

    def _check_sizes(
        self, movement: Movement, mine: PerRank, theirs: PerRank, here: Array, site: Site
    ) -> bool:
        team, row, (inp, out) = movement.team, movement.collective, movement.both
        assert team is not None and row is not None, f"{movement.kind} is no collective"
        count = team.size
        inputs, outputs = row.inp.parts(count), row.out.parts(count)
        fits = (mine * outputs == theirs * inputs) & (mine % inputs == 0)
        if everywhere(fits):
            return True
        wrong = np.broadcast_to(np.logical_not(fits), here.shape) & here
        if wrong.any():
            i = int(np.argmax(wrong))
            wanted = f"{count} times as many" if row.growth else "as many"
            large, small = (out, inp) if row.growth >= 0 else (inp, out)
            text = f"{movement.kind} of {count} ranks: {inp.label} has {at(mine, i)} elements and "
            text += f"{out.label} has {at(theirs, i)}, on {self._who(wrong)}"
            note = f"{large.label} must have {wanted} elements as {small.label}"
            self.note(Finding(SIZES, text, ((site, note),)))
        return not wrong.any()

    def _check_cuts(self, movement: Movement, row: Collective, team: TeamOf, site: Site) -> None:
        """Reports a gather or scatter whose team is formed along other mesh dimensions than those
        over which the divided tensor is split. The divided tensor is the operand of a gather, or
        the result of a scatter.

        Also reports a gather whose result is declared as still split over a mesh dimension of the
        team. `row` describes the type of collective, such as whether the result is larger than the
        operand.
        """
        growth = row.growth
        if not growth:
            return
        inp, out = map(self.shard_region, movement.both)
        spread, whole = (inp, out) if growth > 0 else (out, inp)
        cuts = self.shapes.device_cuts
        along = frozenset[ParallelType]().union(*cuts(spread.owner))
        if along and not along & set(team.ptypes):
            names = " and ".join(p.text for p in team.ptypes)
            found = " and ".join(sorted(p.text for p in along))
            text = f"{row} works along {names}, but {spread.owner.label} is sharded along {found}: "
            text += "the mesh dimensions must be the same"
            self.note(Finding(TEAM, text, ((site, ""),)))
        still = frozenset[ParallelType]().union(*cuts(whole.owner)) & set(team.ptypes)
        if growth > 0 and along and still:
            text = f"{row} of {spread.owner.label} gathers along "
            text += " and ".join(p.text for p in still)
            text += f", but its result {whole.owner.label} is declared as sharded along this mesh "
            self.note(Finding(TEAM, text + "dimension", ((site, ""),)))

    def _elements(self, movement: Movement, tv: TensorView) -> PerRank:
        """Returns, for each rank, how many elements of its shard of `tv` (the part that the rank
        stores) the communication moves. An expanded axis counts as one element, because memory
        holds only one.
        """
        return self.shard_region(tv).elements(movement.expanded[tv])

    def _permute(self, movement: Movement, number: int, site: Site) -> None:
        teams, here = self._comes(movement, site)
        kind, (inp, out) = movement.kind, movement.both
        sizes = self._elements(movement, inp), self._elements(movement, out)
        terms = (
            ("type", kind),
            ("library", _library(movement)),
            ("dtype", dtype_text(inp.dtype())),
        )
        peers: list[PerRank] = []
        for what, peer in movement.peers.items():
            value = self._value(peer, what, here, site)
            if not self._in_team(value, teams.members.shape[1], here, site, what):
                value = -1
            peers.append(value)
        sent, received = (self.shapes.region(self.shard_region(tv)) for tv in (inp, out))
        event = PostedCollective((site,), kind, number, here, teams, terms, sent, received, sizes)
        event.peers = peers[0], peers[1]
        self._enters(event, here)

    # ------------------------------------------------------------ transfers
    def _transfer(self, movement: Movement, number: int, site: Site) -> None:
        tv, is_copied = movement.buffer, movement.is_copied
        mask = self.mask & self.holds(tv)
        to = self._partners(movement.peers["peer"], mask, site)
        elements = self._elements(movement, tv)
        half = Half(site, movement, mask, to, elements, self.shapes.region(self.shard_region(tv)))
        self.on_half(half)
        if self.state.apply(Starts(number), (half,)) is None:
            return  # it joins the open group
        blocks = half.kind == "recv" if is_copied else movement.backend == "NCCL"
        group = TransferGroup(site, number, mask, [half], blocks)
        if is_copied and half.kind == "send" and not self.is_uneven:
            # A send does not block, and the next op may be its receive.
            self._begin()
            self.sent = group
        elif is_copied and self.sent is not None and self._meet([*self.sent.halves, half]):
            self.sent = None
        else:
            self._start(group)

    def _partners(self, scalar: Scalar, mask: Array, site: Site) -> Array:
        """Returns, for each rank, the partner with which the rank exchanges data in a send or
        receive, as an index in the list of ranks.

        `scalar` evaluates to the partner's number, and `mask` selects the ranks that take part in
        the transfer. A partner that is no rank of the program is reported and has the index -1.
        """
        peer = self._value(scalar, "peer", mask, site)
        if not isinstance(peer, np.ndarray):
            peer = np.full(len(self.ranks), peer)
        to = self.place[np.minimum(np.maximum(peer, -1), len(self.place) - 1)]
        outside = mask & (to < 0)
        if outside.any():
            text = f"peer {scalar} = {peer[int(np.argmax(outside))]} is no rank of the program, "
            text += f"on {self._who(outside)}: the program has {ranks_text(self.ranks)}"
            self.note(Finding(OUT_OF_RANGE, text, ((site, ""),)))
            self.is_lost = True
        return to

    def holds(self, tv: TensorView) -> Array:
        """Returns an array of bools, True for each rank that has a shard (part) of a tensor: the
        ranks in the tensor's mesh, or all ranks if the tensor has no mesh.
        """
        mesh = tv.mesh
        if mesh not in self.held:
            here = np.ones(len(self.ranks), dtype=bool)
            if mesh is not None and mesh.size < len(self.ranks):
                here = np.isin(self.values.ranks, mesh.devices)
            self.held[mesh] = here
        return self.held[mesh]

    def on_half(self, half: Half) -> None:
        """Handles a send or receive before it is matched with its partner. By default, does
        nothing; the subclass `Unroller` records the op, whose cost is predicted.
        """

    def _close(self, effect: ClosesGroup, site: Site) -> None:
        group = self.state.apply(effect)
        assert group is not None
        self._start(TransferGroup(site, effect.number, self.mask, list(group.touched), True))

    def _start(self, group: TransferGroup) -> None:
        self._begin()
        if not self._meet(group.halves):
            self.is_uneven = True
            self.events.append(group)

    def _begin(self) -> None:
        """Prepares for a communication that is not the receive of the last send.

        A send by peer copy is kept in `sent`, because the next communication may be its receive. A
        send that is still kept now is moved to `events`. After the walk, it is matched by following
        the ranks one by one.
        """
        sent, self.sent = self.sent, None
        if sent is not None:
            self.is_uneven = True
            self.events.append(sent)

    def _meet(self, halves: Sequence[Half]) -> bool:
        """Pairs each send in `halves` with its receive in `halves`, on all ranks, checks each pair,
        and returns True. If a send or a receive has no partner in `halves`, pairs nothing and
        returns False. Also returns False if an earlier communication could not be matched, because
        the order of communications is then unknown.
        """
        pairs = None if self.is_uneven or self.is_lost else self._pairs(halves)
        for pair in pairs or ():
            self.paired(*pair)
        return pairs is not None

    def _pairs(self, halves: Sequence[Half]) -> list[tuple[Half, Half, Array, Array]] | None:
        """Pairs each send in `halves` with its receive in `halves`. Returns (send, receive, indices
        of the sending ranks, indices of the receiving ranks) for each pair of ops.

        Returns None if a send or a receive has no partner in `halves`. Several transfers between
        two ranks are paired in program order.
        """
        if {h.kind for h in halves[:2]} == {"send", "recv"} and len(halves) == 2:
            a, b = halves if halves[0].kind == "send" else halves[::-1]
            if (a.mask & b.mask).all() and (b.to[a.to] == self.me).all():
                return [(a, b, self.me, a.to)]
        sends, receives = (self._ends(halves, kind) for kind in ("send", "recv"))
        if len(sends[0]) != len(receives[0]) or (sends[0] != receives[0]).any():
            return None
        found: list[tuple[Half, Half, Array, Array]] = []
        met = sends[1] * len(halves) + receives[1]
        codes: list[int] = np.unique(met).tolist()
        for code in codes:
            ends = sends[0][met == code]
            a, b = halves[code // len(halves)], halves[code % len(halves)]
            found.append((a, b, ends // len(self.ranks), ends % len(self.ranks)))
        return found

    def _ends(self, halves: Sequence[Half], kind: str) -> tuple[Array, Array]:
        """Lists the transfers of all sends in `halves`, or of all receives if `kind` is "recv".
        There is one entry per rank that takes part, and entries are sorted by sender and receiver,
        so that the lists of sends and receives can be compared.

        Returns two arrays. The first encodes the sender and the receiver of each entry in one
        number. The second has the index in `halves`.
        """
        ends, numbers = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for number, half in enumerate(halves):
            if half.kind == kind:
                me = np.nonzero(half.mask)[0]
                peer = half.to[me]
                source, target = (me, peer) if kind == "send" else (peer, me)
                ends.append(source * len(self.ranks) + target)
                numbers.append(np.full(len(me), number))
        both = np.concatenate(ends), np.concatenate(numbers)
        order = np.argsort(both[0], kind="stable")
        return both[0][order], both[1][order]

    def finish(self) -> None:
        """Completes the check after the walk. If some communication could not be matched at once,
        follows the ranks one by one through all recorded communications."""
        self._begin()
        if self.is_uneven and not self.is_lost:
            follow(self.events, self.ranks, self)

    # ------------------------------------------------------------ where ranks meet
    def met(self, met: PostedCollective, here: Array) -> None:
        """Checks a collective or permutation, `met`, after all members of some teams have entered
        it: reports elements of a tensor that arrive at a wrong position. `here` has True for these
        members.
        """
        sites = tuple((site, "") for site in met.sites)
        if met.peers is not None:
            self._permuted(met, here)
        elif (found := misplaced(met, here, self.ranks)) is not None:
            text, wrong, note = found
            if wrong is not None:
                text += f", on {self._who(wrong)}"
            self.note(Finding(MISPLACED, text, ((met.sites[0], note), *sites[1:])))

    def _permuted(self, met: PostedCollective, here: Array) -> None:
        """Checks a permutation, `met`, in which each rank sends to one rank and receives from one
        rank. If rank r sends to rank s, reports r if s receives from another rank than r, or if s
        receives another number of elements than r sends.
        """
        teams, sites = met.teams, tuple((site, "") for site in met.sites)
        to, source = (np.broadcast_to(p, here.shape) for p in met.peers or ())
        if ((to < 0) & here).any() or ((source < 0) & here).any():
            return
        target, sender = (teams.members[teams.team, np.where(here, p, 0)] for p in (to, source))
        lost = here & (sender[target] != np.arange(len(here)))
        if lost.any():
            i = int(np.argmax(lost))
            k, other = int(target[i]), int(sender[target[i]])
            theirs = "itself" if other == k else f"rank {self.ranks[other]}"
            text = f"rank {self.ranks[i]} sends to rank {self.ranks[k]}, which receives from "
            text += f"{theirs}: send_peer and recv_peer do not match"
            note = f"on {self._who(lost)}"
            self.note(Finding(PARTNER, text, ((met.sites[0], note), *sites[1:])))
            return
        mine, theirs = met.sizes
        receivers = np.nonzero(here)[0]
        senders = sender[receivers]
        sent = pick(mine, senders)
        wrong = np.broadcast_to(np.asarray(sent != pick(theirs, receivers)), receivers.shape)
        if wrong.any():
            k = int(np.argmax(wrong))
            text = f"rank {self.ranks[senders[k]]} sends {at(sent, k)} elements, but rank "
            text += f"{self.ranks[receivers[k]]} receives {at(theirs, receivers[k])} elements"
            self.note(Finding(SIZES, text, sites))
            return
        self.check_parts(met.inp, met.out, senders, receivers, met.sites)

    def paired(self, a: Half, b: Half, senders: Array, receivers: Array) -> None:
        """Checks the send `a` and the matching receive `b`: both must use the same library, dtype
        and size. `senders` and `receivers` have the rank indices of each transfer."""
        own = senders == receivers
        if own.any():
            places: list[int] = senders[own].tolist()
            who = ranks_text([self.ranks[i] for i in places])
            text = (
                f"{who}: the peer is the rank itself; copy the tensor by `set` instead of a send "
            )
            text += "and a receive"
            self.note(Finding(PARTNER, text, ((a.site, ""), (b.site, ""))))
            return
        for what, mine, theirs in (
            ("library", _library(a.movement), _library(b.movement)),
            ("dtype", a.movement.buffer.dtype(), b.movement.buffer.dtype()),
            ("size", pick(a.elements, senders), pick(b.elements, receivers)),
        ):
            same = mine == theirs
            if not everywhere(same):
                differ = np.broadcast_to(np.logical_not(same), senders.shape)
                k = int(np.argmax(differ))
                sites = (
                    (a.site, f"rank {self.ranks[senders[k]]}: send, {what} {at(mine, k)}"),
                    (b.site, f"rank {self.ranks[receivers[k]]}: recv, {what} {at(theirs, k)}"),
                )
                text = f"a send and its receive differ in {what}, but must have the same"
                self.note(Finding(MISMATCH, text, sites))
                return
        self.check_parts(a.part, b.part, senders, receivers, (a.site, b.site))

    def check_parts(
        self,
        a: Region | None,
        b: Region | None,
        senders: Array,
        receivers: Array,
        sites: tuple[Site, ...],
    ) -> None:
        """Checks transfers between ranks: reports elements of a tensor that the receiver stores at
        another position of the tensor than the sender.

        Transfer k goes from `senders[k]` to `receivers[k]`. `a` has the elements that each rank
        sends, and `b` the elements that each rank overwrites with the received data. `sites` are
        the ops, for the report. Nothing is checked if `a` or `b` is unknown.
        """
        found = lost_on_the_way(self.shapes, a, b, senders, receivers)
        if found is not None:
            what, k = found
            text = f"rank {self.ranks[senders[k]]} {what} on rank {self.ranks[receivers[k]]}"
            self.note(Finding(MISPLACED, text, tuple((s, "") for s in dict.fromkeys(sites))))

    # ------------------------------------------------------------ reports
    def _who(self, mask: Array) -> str:
        places: list[int] = np.nonzero(mask)[0].tolist()
        return ranks_text([self.ranks[i] for i in places])

    def note(self, finding: Finding) -> None:
        """Adds a finding (the report of a fault), unless there is already a finding of the same
        kind about the same ops.
        """
        self.found.setdefault((finding.kind, *map(id, finding.ops)), finding)


def _library(movement: Movement) -> str:
    return "peer copies" if movement.is_copied else "that of the device"


# ----------------------------------------------------------------------
# Checks that a communication delivers the slices that the declared shardings promise, if both of
# its tensors are parts of one whole tensor.
#
# A collective moves contiguous memory. A member's piece is therefore a slice of the tensor only if
# the gathered or scattered axis is outermost in memory.

# The numbers of partners per member that are checked in an AllToAll of a larger team: the first on
# small meshes, the second on meshes so large that more would take longer than lowering.
_MAX_PARTNERS, _MIN_PARTNERS = 64, 4
_MAX_PAIRS = 1 << 15


# ------------------------------------------------------------------ collectives
Wrong = tuple[str, Array | None, str]


def misplaced(met: PostedCollective, here: Array, ranks: Sequence[int]) -> Wrong | None:
    """Checks whether a collective, `met`, delivers each element of a tensor to the position that
    the declared sharding of the result says.

    - `here`: an array of bools, True for the ranks that entered the collective.
    - `ranks`: the global ranks, in the order of `here`.

    Returns None if all is right. Otherwise returns (message, array of the wrong ranks, note). The
    array is None if the message already names ranks. The note is an explanation that the report
    prints beside the op, or "".
    """
    inp, out = met.inp, met.out
    if inp is None or out is None or inp.whole != out.whole or not here.any():
        return None
    row, teams, count = COLLECTIVES[met.kind], met.teams, met.teams.members.shape[1]
    if row.inp.per_member and row.out.per_member:
        return _exchanged(met, inp, out, here)
    checked = here
    if row.reduces and row.out.at_root:
        checked = here & (teams.position == met.root)
    elif row.is_rooted:
        roots = teams.members[teams.team, np.where(here, met.root, 0)]
        inp, out = (inp, out.on(roots)) if row.out.at_root else (inp.on(roots), out)
    left: Region | None = inp
    right: Region | None = out
    if row.growth > 0:
        right = out.piece(count, teams.position)
    elif row.growth < 0:
        left = inp.piece(count, teams.position)
    if left is None or right is None:
        return None
    same = left.is_same(right)
    wrong = np.logical_not(same) & checked
    if not everywhere(same) and wrong.any():
        i = int(np.argmax(wrong))
        source = f" from root {at(met.root, i)}" if row.is_rooted else ""
        text = f"{row}{source} brings {inp.text(i)} into {out.text(i)}"
        return text, wrong, _lies(met, inp, out, left, right, i)
    if row.reduces == "all":
        return _apart(met, inp, here, ranks)
    return _apart(met, out, here, ranks) if row.growth > 0 and not row.is_rooted else None


def _lies(
    met: PostedCollective, inp: Region, out: Region, left: Region, right: Region, i: int
) -> str:
    """Returns an explanation for the report about a collective that stores a piece at a wrong
    place, such as "in memory, T1[0:2] is the piece for position 1 of the team".

    Returns "" if each rank sends and receives its whole tensor. `met` is the collective, with
    operand `inp` and result `out`. `left` is the part of the operand that is sent, and `right` the
    part of the result that is stored; both should have the same elements. `i` is the index of a
    rank on which they differ.
    """
    if left is not inp:
        position = met.teams.position[i]
        return f"in memory, {left.text(i)} is the piece for position {position} of the team"
    if right is not out:
        position = met.teams.position[i]
        return f"in memory, {right.text(i)} is the piece of position {position} of the team"
    return ""


def _apart(met: PostedCollective, part: Region, here: Array, ranks: Sequence[int]) -> Wrong | None:
    """Checks a collective, `met`, that gathers or reduces: on all members of a team, the parts of
    the tensor must begin at the same position. `part` has the elements on each rank, and `here` has
    True for the ranks to check.

    Returns None if all is right. Otherwise returns (message that names two members with different
    parts, None, "").
    """
    teams = met.teams
    for x in part.starts:
        two = first_difference(x, teams, here)
        if two is not None:
            i, k = two
            text = f"the ranks of a team use different parts of a tensor in one {met.kind}: "
            text += f"{part.text(i)} on rank {ranks[i]}, "
            text += f"{part.text(k).removeprefix(part.label(i))} on rank {ranks[k]}"
            return text, None, ""
    return None


def _exchanged(met: PostedCollective, inp: Region, out: Region, here: Array) -> Wrong | None:
    """Checks an all-to-all, `met`: piece k of member i's input must arrive as piece i of member k's
    output. `inp` and `out` have the elements of input and output on each rank, and `here` has True
    for the ranks to check.

    Returns None if all is right. Otherwise returns (message, array of the wrong ranks, "").
    """
    teams, count = met.teams, met.teams.members.shape[1]
    for shift in _shifts(count, len(here)):
        to = (teams.position + shift) % count
        left = inp.piece(count, to)
        right = out.on(teams.members[teams.team, to]).piece(count, teams.position)
        if left is None or right is None:
            return None
        wrong = np.logical_not(left.is_same(right)) & here
        if wrong.any():
            i = int(np.argmax(wrong))
            text = f"{met.kind} brings {left.text(i)} into {right.text(i)}"
            return text, wrong, ""
    return None


def _shifts(count: int, ranks: int) -> Iterable[int]:
    """Returns the distances in a team of `count` members over which an AllToAll is checked.

    `ranks` is the number of ranks in all teams. In a large team, the distances are spread evenly,
    and 1 is among them.
    """
    most = min(max(_MAX_PAIRS // ranks, _MIN_PARTNERS), _MAX_PARTNERS)
    spread = range(0, count, -(-count // most))
    return spread if len(spread) == count else (*spread, 1)


def first_difference(x: PerRank, teams: Teams, here: Array) -> tuple[int, int] | None:
    """Returns the indices of two members of one team that have different values of `x`. Returns
    None if the members of each team agree. `here` has True for the ranks to check.
    """
    if not isinstance(x, np.ndarray):
        return None
    by_team = x[teams.members]
    differ = (by_team != by_team[:, :1]).any(1) & here[teams.members[:, 0]]
    if not differ.any():
        return None
    first, *rest = teams.members[int(np.argmax(differ))].tolist()
    return first, next(i for i in rest if x[i] != x[first])


# ------------------------------------------------------------------ transfers
def lost_on_the_way(
    shapes: Shapes, a: Region | None, b: Region | None, senders: Array, receivers: Array
) -> tuple[str, int] | None:
    """Checks whether transfers store each element of a tensor at the position that it had at the
    sender.

    Transfer k goes from `senders[k]` to `receivers[k]`. `a` has the elements that each rank sends,
    and `b` the elements that each rank overwrites with the received data. Returns None if all is
    right, and otherwise (message, index of the first wrong transfer). Two cases are not checked,
    because they can be intended:

    - The tensor is not split over any mesh dimension. The user may then divide the buffer in any
      way.
    - Ranks exchange whole shards, the parts that they store.
    """
    if a is None or b is None or a.whole != b.whole or (a.is_alike and b.is_alike):
        return None
    if not (a.is_alike or b.is_alike or a.by_rank or b.by_rank):
        return None
    owners = {tv for x in (a, b) for _, tv in x.owners}
    is_spread = any(map(bool, (c for tv in owners for c in shapes.device_cuts(tv))))
    if not is_spread and (len(owners) > 1 or a.is_alike or b.is_alike):
        return None
    sent, received = a.on(senders), b.on(receivers)
    same = sent.is_same(received)
    if everywhere(same):
        return None
    k = int(np.argmin(np.broadcast_to(same, senders.shape)))
    return f"sends {sent.text(k)}, which arrives as {received.text(k)}", k
