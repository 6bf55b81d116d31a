"""Unrolls a program for all ranks at once: lists each op in each iteration of its loops, as an
`UnrolledOp`.

An `UnrolledOp` has the ranks that run the op, their streams, the local sizes of the op's tensors,
and the ranks' communication partners. `hostir.analysis.collective_matching` finds the partners.
`hostir.cost.simulator` reads the list. The simulator groups ranks whose ops are equal, and
simulates the first rank of each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.memory_layout import expanded_positions
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Number, Symbol
from hostir.analysis.collective_matching import MatchingWalk
from hostir.analysis.deadlocks import Half, PostedCollective, Teams
from hostir.analysis.rank_regions import Region
from hostir.analysis.rank_values import Array, PerRank, at, most, np
from hostir.ir.diagnostics import Site
from hostir.ir.effects import (
    Captures,
    ClosesGroup,
    Effect,
    Enters,
    Frees,
    Joins,
    Makes,
    Starts,
    Waits,
    effects_of,
    is_computed,
)
from hostir.ir.ops import Deallocate, HostOp, Movement, SymmetricContiguousView
from hostir.ir.program import HostIrContainer

Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class UnrolledOp:
    """One op in one iteration of the loops around it, on all ranks that run the op.

    - `site`: the op and the loop indices; `mask`: an array of bools, True for the ranks that run
      the op; `stream`: the stream on each rank.
    - `joins`: the stream that the op waits for; `waits`: the number of the communication that the
      op waits for.
    - `starts`: the number of the communication or group that the op starts; `movement`: the data
      that the op sends or receives.
    - `shapes`: the shape of each tensor of the op on one rank.
    - `teams`, `root`, `peers`: the partners in a collective or permutation.
    - `pairs`: for a send or receive, triples of (the partner's `UnrolledOp`, indices of this op's
      ranks, indices of the partner ranks).
    - `group`: for the end of a group, the sends and receives that start together.
    - `far`: operand -> (teams, number of ranks in a team), for each operand that is one tensor made
      of the shards of all ranks of a team, without a copy. Most of such an operand is in the memory
      of other ranks.
    """

    site: Site
    mask: Array
    stream: PerRank
    joins: PerRank | None = None
    waits: int | None = None
    starts: int | None = None
    movement: Movement | None = None
    shapes: dict[TensorView, tuple[PerRank, ...]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    teams: Teams | None = None
    root: PerRank = 0
    peers: tuple[PerRank, PerRank] | None = None
    pairs: list[tuple[UnrolledOp, Array, Array]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    group: list[UnrolledOp] | None = None
    far: dict[TensorView, tuple[Teams, int]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    # The items in which the members enter the collective, which may be different ops.
    together: tuple[UnrolledOp, ...] = ()

    def sizes(self, place: int) -> dict[TensorView, Shape]:
        """Returns the shapes of the op's tensors on one rank. `place` is the index of the rank in
        the list of ranks."""
        return {tv: tuple(int(at(n, place)) for n in s) for tv, s in self.shapes.items()}  # pyright: ignore[reportArgumentType]


class Unroller(MatchingWalk):
    """Follows a program for all ranks, matches their communications, and records an `UnrolledOp`
    for each op and loop iteration. The simulation of the program reads these.

    `items` has the recorded ops in program order. `peak` is the largest number of bytes that are
    allocated at once, per rank, and `inputs` the number of bytes of the inputs.
    """

    def __init__(
        self, program: HostIrContainer, ranks: Sequence[int], values: Mapping[Symbol, Number]
    ) -> None:
        super().__init__(program, ranks, dict(values))
        self.items: list[UnrolledOp] = []
        self.at: dict[object, list[UnrolledOp]] = {}
        self.known: dict[int, tuple[Effect, ...]] = {}
        # Bytes that are allocated now, and their maximum so far; per rank.
        self.alive: PerRank = 0
        self.peak: PerRank = 0
        self.buffers: dict[TensorView, PerRank] = {}
        self.inputs: PerRank = 0
        for tv in program.inputs:
            if isinstance(tv, TensorView):
                self.inputs = self.inputs + self._held(tv)

    # ------------------------------------------------------------ ops
    def on_op(self, op: Op) -> None:
        """Handles an op in the current iteration: records an `UnrolledOp` for it, and matches the
        communication that it starts.
        """
        effects = self.known.get(id(op))
        if effects is None:
            effects = self.known[id(op)] = effects_of(op, self.storage.buffered)
        is_block = any(isinstance(e, Makes) and e.step is not None for e in effects)
        if is_block:
            super().on_op(op)  # binds the buffer to its step
        item = self._remember(op, effects)
        if not is_block:
            super().on_op(op)
        for effect in effects:
            if isinstance(effect, ClosesGroup):
                item.group = [half.note for half in self.state.in_flight[effect.number].touched]
            self._effect(effect)

    def on_half(self, half: Half) -> None:
        """Handles a send or receive before it is matched with its partner: stores the `UnrolledOp`
        of the send or receive in `half.note`, so that `paired` can later link the `UnrolledOp`s of
        both partners."""
        half.note = self.at[id(half.site.op), self.indices][-1]

    def _effect(self, effect: Effect) -> None:
        if isinstance(effect, Enters | Captures):
            self.state.apply(effect)
        elif isinstance(effect, Makes) and effect.tensor not in self.storage.named:
            self._gives_up(effect.tensor)
            held = self.buffers[effect.tensor] = self._held(effect.tensor)
            self.alive = self.alive + held
            self.peak = most(self.peak, self.alive)
        elif isinstance(effect, Frees):
            self._gives_up(effect.tensor)

    def _gives_up(self, tv: TensorView) -> None:
        held = self.buffers.pop(tv, None)
        if held is not None:
            gone = self.domain.merge(held, 0)
            self.alive = self.alive - gone
            if gone is not held:
                self.buffers[tv] = held - gone

    def _held(self, tv: TensorView) -> PerRank:
        """Returns the number of bytes of a tensor's shard (the part that a rank stores) on each
        rank that runs the current op. The number is 0 on a rank without a shard.
        """
        elements = self.shard_region(tv).elements(expanded_positions(tv)) * nbytes_of(tv.dtype())
        has = self.holds(tv) & self.mask
        return elements if has.all() else np.where(has, elements, 0)

    def _remember(self, op: Op, effects: tuple[Effect, ...]) -> UnrolledOp:
        item = UnrolledOp(Site(op, self.indices), self.mask, self.streams.current)
        for effect in effects:
            if isinstance(effect, Joins):
                item.joins = self.streams.find(effect.stream)
            elif isinstance(effect, Waits):
                item.waits = effect.number
            elif isinstance(effect, Starts | ClosesGroup):
                item.starts = effect.number
        movement = item.movement = op.movement if isinstance(op, HostOp) else None
        is_work = is_computed(effects)
        if movement is not None or is_work:
            for tv in (*op.inputs, *op.outputs):
                if isinstance(tv, TensorView):
                    item.shapes[tv] = self.shard_region(tv).shape
                    if tv.mesh is not None and not self.holds(tv).all():
                        item.mask = item.mask & self.holds(tv)
        for tv in op.inputs if is_work and self.storage.views else ():
            view = self.storage.view(tv) if isinstance(tv, TensorView) else None
            if isinstance(tv, TensorView) and view is not None and view.team is not None:
                item.far[tv] = self._teams(view.team), view.team.size
        team = None if movement is None else movement.team
        if team is not None:
            item.teams = self._teams(team)
            item.mask = item.mask & (item.teams.team >= 0)
        in_group = movement is not None and team is None and self.state.group is not None
        is_ordered = item.joins is not None or item.waits is not None
        if (item.starts is not None and not in_group) or is_work or is_ordered:
            self.items.append(item)
        if movement is not None:
            self.at.setdefault((id(op), self.indices), []).append(item)
        return item

    def _items(self, sites: Iterable[Site]) -> tuple[UnrolledOp, ...]:
        return tuple(r for s in sites for r in self.at[id(s.op), s.indices])

    # ------------------------------------------------------------ where ranks meet
    def met(self, met: PostedCollective, here: Array) -> None:
        """Handles a collective or permutation after all members of some teams have entered it:
        records the partners in the `UnrolledOp` of each op. `here` has True for these members.
        """
        super().met(met, here)
        if isinstance(met.sites[0].op, SymmetricContiguousView | Deallocate):
            return  # readers of the view move the bytes; the barrier has no known cost
        items = self._items(met.sites)
        for item in items:
            item.peers, item.root = met.peers, met.root
            item.together = items

    def check_parts(
        self,
        a: Region | None,
        b: Region | None,
        senders: Array,
        receivers: Array,
        sites: tuple[Site, ...],
    ) -> None:
        """Does nothing. The base class checks here whether the receivers store elements at the
        positions that the elements had at the senders. The predicted time, for which this class
        unrolls a program, does not depend on the positions.
        """

    def paired(self, a: Half, b: Half, senders: Array, receivers: Array) -> None:
        """Handles a send `a` and the matching receive `b`: links them, so that each `UnrolledOp`
        has the other one in its `pairs`. `senders` and `receivers` have the rank indices of each
        transfer.
        """
        super().paired(a, b, senders, receivers)
        sends: UnrolledOp = a.note
        receives: UnrolledOp = b.note
        sends.pairs.append((receives, senders, receivers))
        receives.pairs.append((sends, receivers, senders))
