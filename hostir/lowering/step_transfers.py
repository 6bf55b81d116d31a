"""What the steps of a loop send and receive.

collective      every step's block is shared by all devices of a team
broadcast, ring, permutation    from devices to steps: a step brings one device's block
reduction       from steps to devices: a step sums one device's block, there
exchange        the same in a ring: a step sends one device its block, and receives one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.passes.segment import Segment
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    Allocate,
    IfThenElse,
    LocalSlice,
    SetCurrentStream,
    Synchronize,
)
from hostir.ir.program import dropped_axes_of
from hostir.ir.transfers import (
    PEER_COPIES,
    CollectivePermute,
    Communication,
    EndCoalescing,
    P2PCommunication,
    ShareMemHandles,
    StartCoalescing,
    Wait,
)
from hostir.lowering.slices import coordinate, rank_at, reached, rotated
from hostir.lowering.step_parts import StepParts, stepping_axis
from multidevice.sharding.reshard import (
    RED_OP_OF,
    TeamOf,
    communication_type,
    is_device_to_stream,
    is_exchange,
    sliced_axis,
    team_of,
)
from multidevice.sharding.streams import is_allocated_per_step, scatters_steps


class StepTransfers(StepParts):
    """Lowers the communications of one loop."""

    def _communication(self, segment: Segment) -> None:
        for op in segment.exprs:
            assert isinstance(op, nodes.Reshard), f"{op.name} is no communication"
            kind = communication_type(op)
            if kind == "StepSlice":
                self._parts[op.out] = self._slice(op.out, self._twin(op.inp))
                self._sliced[op.out] = op.inp
            elif kind == "LocalSlice":
                inp = self._operand(op, 0)
                out = self._result(op.out)
                axis = sliced_axis(op)
                axis -= sum(gone < axis for gone in dropped_axes_of(op.inp, inp.ndim))
                one = LocalSlice(out, inp, axis=axis, ptype=op.ptypes[0])
                self._steps.append(one.replace(where=op.where))
            elif is_device_to_stream(op):
                self._bring(op)
            elif is_exchange(op):
                self._exchange(op)
            elif scatters_steps(op):
                self._scatter(op)
            else:
                self._collective(op, self._operand(op, 0))

    def _collective(self, op: nodes.Reshard, inp: TensorView) -> None:
        out = self._result(op.out)
        self._start(
            op,
            lambda number: Communication(
                inp,
                out,
                number=number,
                type=communication_type(op),
                team=team_of(op),
                red_op=RED_OP_OF[op.reduction] if op.reduction else "SUM",
                backend=self._lowering.backend_name,
            ),
        )

    def _scatter(self, op: nodes.Reshard) -> None:
        """Reduce what this step has computed to the device that it is for."""
        if self._lowering.params.offset_by_rank:
            raise UnsupportedError(
                f"reduction ({op.reduction}) of {op.inp} to {op.out} with "
                "offset_stream_indexing_by_rank: each step reduces a block to its device, so all "
                "devices take the same step: leave the parameter off, or set a copy with the "
                f"stream on the reduced axis and sum that{user_code(op.where)}"
            )
        assert op.reduction is not None
        out = self._twin(op.out)
        out.give_memory()
        self._before.append(Allocate(out))
        red_op = RED_OP_OF[op.reduction]
        self._start(
            op,
            lambda number: Communication(
                self._part(op.inp),
                out,
                root=self._index,
                number=number,
                type="Reduce",
                team=team_of(op),
                red_op=red_op,
                backend=self._lowering.backend_name,
            ),
        )

    def _bring(self, op: nodes.Reshard) -> None:
        """Bring every device the block of the step's device."""
        inp, out = self._twin(op.inp), self._result(op.out)
        team, backend = team_of(op), self._lowering.step_backend
        swizzle = self._axis_of(op).swizzle
        is_ring = self._offset or swizzle is not None
        if swizzle is not None and backend != PEER_COPIES:
            # At the first step a copy, beside which NCCL's kernels begin before the matmul.
            to = reached(self._index, self._count, team.mesh, swizzle)
            source = rotated(self._index, self._count, team.mesh, swizzle)
            self._start(
                op,
                lambda number: CollectivePermute(
                    inp, out, to, source, number=number, team=team, backend=backend
                ),
            )
        elif is_ring:
            self._receive_from_owner(op, inp, out, team)
        else:
            self._start(
                op,
                lambda number: Communication(
                    inp,
                    out,
                    root=self._index,
                    number=number,
                    type="Broadcast",
                    team=team,
                    backend=backend,
                ),
            )
        if self._lowering.params.inter_stream_synchronization and not (
            is_ring and self._is_in_turn
        ):
            self._steps.append(self._next_stream_waits())

    def _receive_from_owner(
        self, op: nodes.Reshard, inp: TensorView, out: TensorView, team: TeamOf
    ) -> None:
        """Send the own block to where this step wants it, and receive this step's from its owner.

        The first step's block is the own one.
        """
        (ptype,) = team.ptypes
        to = reached(self._step, self._count, team.mesh, ptype)
        source = rotated(self._step, self._count, team.mesh, ptype)
        own, copied = inp, list[Op]()
        if self._is_for_products(op.out):
            self._own[op.out] = self._is_own(to, team), inp
        else:
            if out.ndim < inp.ndim:
                own = self._element(inp, self._axis_of(op).position, copied)
            copied.append(nodes.LoadStoreOp(out, own).replace(where=op.where))
        # One copy after another comes as early as it can; side by side, all come as late as the
        # last.
        after = [self._next_stream_waits()] if self._is_in_turn else []
        self._pass_on(
            op, inp, out, to=to, source=source, own=copied, after=after, sent_on=self._entry
        )

    def _is_for_products(self, tv: TensorView) -> bool:
        """Whether nothing but matmuls reads the blocks of a tensor that peers' copies bring: they
        can as well read the own one where it lies. NCCL's kernels would wait for that matmul."""
        uses = self._lowering.segmented.fusion.uses(tv)
        return (
            self._is_in_turn
            and is_allocated_per_step(tv)
            and all(
                isinstance(op, nodes.Contraction) and not self._rows_or_columns(op) for op in uses
            )
        )

    def _product(self, op: TensorOp, step: TensorOp) -> None:
        """Add the step of an op of the library."""
        if self._is_exchanged(op):
            self._exchanged[op.out_tensor] = step
            return
        found = [self._own[v] for v in op.inputs if v in self._own]
        if not found:
            self._steps.append(step)
            return
        own = {self._twin(v): self._own[v][1] for v in op.inputs if v in self._own}
        mine = step.map_values(lambda v: own.get(v, v))
        self._steps.append(IfThenElse(found[0][0], then=(mine,), orelse=(step,)))

    def _is_exchanged(self, op: TensorOp) -> bool:
        """Whether an op is a matmul of which every block belongs to one device, which has room for
        one of each: what it computes for itself can lie there."""
        out = op.out_tensor
        uses = self._lowering.segmented.fusion.uses(out)
        is_product = isinstance(op, nodes.Contraction) and is_allocated_per_step(out)
        if self._lowering.params.standalone or not is_product or len(uses) != 1:
            return False
        (use,) = uses
        if not isinstance(use, nodes.Reshard) or not is_exchange(use):
            return False
        parts = [a for a in out.domain.no_reductions if a.rfactor]
        kept = [a for a in use.out.domain.no_reductions if a.rfactor]
        return len(parts) == 1 and not kept and stepping_axis(use.out).is_logical

    def _exchange(self, op: nodes.Reshard) -> None:
        """Send what this step has computed to the device that it is for, and receive from another
        what it has computed for this one.

        The last step's block is the own one; with offset_stream_indexing_by_rank, the first one's.
        """
        if not self._offset and stepping_axis(op.inp).swizzle is None:
            raise UnsupportedError(
                f"set of {op.inp} to {op.out} without offset_stream_indexing_by_rank: each step "
                "sends a block to one device and receives one from another, so every device begins "
                "with its own block: set the parameter, or swizzle1d the operand's stream axis"
                f"{user_code(op.where)}"
            )
        (ptype,) = team_of(op).ptypes
        owner = rotated(self._step, self._count, team_of(op).mesh, ptype)
        sender = reached(self._step, self._count, team_of(op).mesh, ptype)
        inp, out = self._operand(op, 0), self._twin(op.out)
        out.give_memory()
        self._before.append(Allocate(out))
        received = self._part_at(op.out, out, sender)
        own: list[Op] = []
        product = self._exchanged.get(op.inp)
        if product is None:
            own = self._copied_block(op, inp, received)
        else:
            straight = product.with_values(product.inputs, [received])
            is_own = self._is_own(owner, team_of(op))
            self._steps.append(IfThenElse(is_own, then=(straight,), orelse=(product,)))
        if self._is_in_turn:
            # The first block is there early only if it does not share the device with the others.
            self._steps.append(self._next_stream_waits())
        self._pass_on(op, inp, received, to=owner, source=sender, own=own)

    def _copied_block(self, op: nodes.Reshard, mine: TensorView, theirs: TensorView) -> list[Op]:
        """Return the copy of an exchange's block; without the axes of one block, both sides have
        the same ones."""
        source, target = op.source, op.target
        assert source is not None and target is not None, f"{op} exchanges no axes"
        copied: list[Op] = []
        drops = (stepping_axis(op.inp).is_logical, stepping_axis(op.out).is_logical)
        if drops != (True, True) or abs(source - target) != 1:
            if drops[1]:
                mine = self._element(mine, source - (drops[0] and target < source), copied)
            if drops[0]:
                theirs = self._element(theirs, target - (drops[1] and source < target), copied)
        return [*copied, nodes.LoadStoreOp(theirs, mine).replace(where=op.where)]

    def _pass_on(
        self,
        op: nodes.Reshard,
        inp: TensorView,
        out: TensorView,
        *,
        to: Scalar,
        source: Scalar,
        own: Sequence[Op],
        after: Sequence[Op] = (),
        sent_on: Stream | None = None,
    ) -> None:
        """Send `inp` to one member of the team and receive `out` from another; `own` is what is
        done where that is this rank, `after` what follows a peer copy. Members are coordinates.
        `sent_on` is the stream on which `inp` was made, where that is another one."""
        team = team_of(op)
        (ptype,) = team.ptypes
        number, backend = self._lowering.next_number, self._lowering.step_backend
        received, sent = number(), number()
        peers = rank_at(team.mesh, ptype, source), rank_at(team.mesh, ptype, to)
        recv, send = (
            t.replace(where=op.where)
            for t in (
                P2PCommunication(out, peers[0], number=received, type="recv", backend=backend),
                P2PCommunication(inp, peers[1], number=sent, type="send", backend=backend),
            )
        )
        is_own = self._is_own(to, team)
        if backend == PEER_COPIES:
            # Peers may copy as soon as it is there, whatever this step waits for.
            mine = SetCurrentStream(stream=self._stream)
            sends = (SetCurrentStream(stream=sent_on), send, mine) if sent_on else (send,)
            # The receiver copies: nothing of this step waits for the one that copies from here.
            ring = ShareMemHandles((out, inp)), *sends, recv, Wait(number=received), *after
            self._last.append(IfThenElse(is_own, then=(), orelse=(Wait(number=sent),)))
        else:
            both = number()
            ring = StartCoalescing(), recv, send, EndCoalescing(number=both), Wait(number=both)
        self._steps.append(IfThenElse(is_own, then=tuple(own), orelse=ring))

    def _is_own(self, member: Scalar, team: TeamOf) -> Scalar:
        """Return whether a member of a team is this rank."""
        (ptype,) = team.ptypes
        return sc.eq(member, coordinate(team.mesh, ptype))

    @property
    def _is_in_turn(self) -> bool:
        """Whether the next step's transfer, or what it transfers, waits for this step's."""
        params = self._lowering.params
        return self._lowering.step_backend == PEER_COPIES and not params.standalone

    def _next_stream_waits(self) -> Op:
        """Return what keeps the next step's work from overtaking what is on this stream so far."""
        following, mine = sc.add(self._index, 1), self._stream
        streams = NUMBER_OF_STREAMS if self._shares_streams else self._count
        ordered = (
            SetCurrentStream(stream=Stream(following)),
            Synchronize(stream=mine),
            SetCurrentStream(stream=mine),
        )
        return IfThenElse(sc.lt(following, streams), then=ordered)

    def _start(self, op: Op, make: Callable[[int], Op]) -> None:
        number = self._lowering.next_number()
        self._steps += [make(number).replace(where=op.where), Wait(number=number)]
