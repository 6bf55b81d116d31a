"""Loops over streams: segments that are computed in steps become one loop of the host program.

One skeleton for both kinds of stream axis; what differs is the table `FORMS`:

    logical axis: FOR streamIdx in istreamIdx2{8}:
                    SetCurrentStream(Stream (streamIdx % numberOfStreams)), Synchronize(Stream S0)
                  FOR streamIdx in istreamIdx2{8}:
                    SetCurrentStream(Stream (streamIdx % numberOfStreams))
                    the steps' ops
                    SetCurrentStream(Stream S0), Synchronize(Stream (streamIdx % numberOfStreams))

    split axis:   FOR i9 from 0 to 3:
                    SetCurrentStream(Stream i9), Synchronize(Stream S0)
                    the steps' ops
                  SetCurrentStream(Stream S0)
                  FOR i9 from 0 to 3:
                    Synchronize(Stream i9)

Waiting for S0 inside of a loop that S0 joins step by step would chain the steps: so either the
entering waits or the joins stand in a loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fuser.errors import UnsupportedError, user_code
from fuser.ir import nodes
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.passes.segment import LIBRARY_OPS, VIEW_OPS, Segment
from hostir.effects import Stream
from hostir.lower_params import LowerParams
from hostir.ops import (
    NUMBER_OF_STREAMS,
    Allocate,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    SetCurrentStream,
    ShardByStream,
    Synchronize,
    loop_index,
)
from hostir.slices import block, coordinate, dropped_axis, rank_at, rotated, selected, slots
from hostir.transfers import (
    CollectivePermute,
    Communication,
    EndCoalescing,
    P2PCommunication,
    StartCoalescing,
    Wait,
)
from multidevice.communication import (
    RED_OP_OF,
    TeamOf,
    communicates,
    communication_type,
    is_copy,
    is_device_to_stream,
    is_exchange,
    sliced_axis,
    team_of,
)
from multidevice.localize import is_block
from multidevice.placement import clone_domain
from multidevice.stream_steps import is_in_step
from multidevice.streams import (
    StreamAxis,
    StreamLoops,
    is_allocated_per_step,
    scatters_steps,
    stream_axis,
)

if TYPE_CHECKING:
    from hostir.lower import Lowering


# What torch carries out where `LowerParams.standalone` asks for it.
STANDALONE_OPS = (*LIBRARY_OPS, nodes.BinaryOp, nodes.ReductionOp, nodes.SliceOp)


def stands_alone(loops: StreamLoops, params: LowerParams) -> Callable[[TensorOp], bool]:
    """Return which ops are no part of kernels: those of the library, and plain copies in steps."""
    if params.standalone:
        return lambda op: isinstance(op, STANDALONE_OPS) or is_copy(op)
    return lambda op: isinstance(op, LIBRARY_OPS) or (is_copy(op) and loops.loop_of(op) is not None)


def _is_slice(op: TensorOp) -> bool:
    return isinstance(op, nodes.Reshard) and communication_type(op) == "StepSlice"


class StreamLoopBuilder:
    """Lowers the segments of one loop, in order."""

    def __init__(self, lowering: Lowering, segments: Sequence[Segment]) -> None:
        self._lowering = lowering
        self._segments = segments
        # What stands before the loop, and the steps.
        self._before: list[Op] = []
        self._steps: list[Op] = []
        self._parts: dict[TensorView, TensorView] = {}
        # What was whole before the loop, by what its slices are called.
        self._sliced: dict[TensorView, TensorView] = {}
        ops = [op for s in segments for op in s.exprs]
        # The loop is named after what it computes, not after what it reads.
        op = next((op for op in ops if not _is_slice(op)), ops[0])
        first = op.inputs[0] if scatters_steps(op) else op.out_tensor
        self._axis = _stream_axis(first)
        twin = lowering.twins[first]
        self._loop_axis = next(a for a in twin.domain.loop if a.is_stream)
        count = lowering.values.canonical(self._axis.count)
        # A loop over a whole axis is written as one where the inputs bind the axis's own extent.
        self._over_axis = self._axis.is_logical and count is self._loop_axis.extent
        name = "streamIdx" if self._axis.is_logical else f"i{lowering.values.next_scalar()}"
        self._count = count
        self._index = loop_index(name, 0, count)
        # Which block a step has: on every device the same, or first its own.
        self._block_index: Scalar = self._index
        along = None if first.mesh is None else self._rotation(ops)
        self._offset = lowering.params.offset_by_rank and along is not None
        if self._offset and along is not None and first.mesh is not None:
            here = coordinate(first.mesh, along)
            self._block_index = sc.mod(sc.add(here, self._index), count)
        modulo = sc.mod(self._index, NUMBER_OF_STREAMS)
        self._stream = Stream(modulo if self._axis.is_logical else self._index)

    def _rotation(self, ops: Sequence[TensorOp]) -> ParallelType | None:
        """Return along which device type devices may be at different blocks; None where they gather
        or reduce one block together.

        Raises `UnsupportedError` when the loop has both.
        """
        moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
        rings = [op for op in moves if is_device_to_stream(op) or is_exchange(op)]
        along = next((p for op in rings for p in op.ptypes if p.is_device), ParallelType.mesh_x)
        together = [op for op in moves if op not in rings and along in op.ptypes]
        if together and rings and self._lowering.params.offset_by_rank:
            kind = communication_type(together[0])
            raise UnsupportedError(
                f"{kind} of {together[0].inp} in steps of which every device begins with its own "
                f"block (offset_stream_indexing_by_rank), as {rings[0].out} is made in the same "
                f"loop: leave the parameter off{user_code(together[0].where)}"
            )
        return None if together else along

    def build(self) -> list[Op]:
        """Return the allocations, the loops, and what they wait for."""
        for segment in self._segments:
            STEP[segment.kind](self, segment)
        form = FORMS[self._axis.is_logical]
        return [*self._before, *form(self)]

    # ------------------------------------------------------------ segments
    def _kernel(self, segment: Segment) -> None:
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        ins = [
            (self._part(v) if is_block(mine) else self._twin(v))
            if isinstance(v, TensorView) and isinstance(mine, TensorView)
            else v
            for v, mine in zip(segment.inputs, segment.fusion.inputs, strict=True)
        ]
        outs = [self._result(o) for o in segment.outputs]
        self._lowering.add_group(segment)
        self._steps.append(LaunchKernel(tuple(ins), tuple(outs), group=segment.number))

    def _library(self, segment: Segment) -> None:
        for op in segment.exprs:
            if isinstance(op, VIEW_OPS) and not is_copy(op) and self._axis_of(op).is_logical:
                self._copied_view(op)
                continue
            if self._is_row_or_column(op):
                self._steps.append(self._with_kept_axis(op))
                continue
            ins = self._operands(op)
            outs = [self._result(o) for o in op.outputs]
            self._steps.append(op.with_values(ins, outs))

    def _is_row_or_column(self, op: TensorOp) -> bool:
        """Whether a step computes one row or column of each matrix of a batch: without that axis
        an operand would be another batch of matrices."""
        if not isinstance(op, nodes.MatmulOp) or max(op.a.ndim, op.b.ndim) < 3:
            return False
        maps = [self._operand_position(op, k) for k in range(2)]
        return self._axis_of(op).is_logical and maps in (
            [op.a.ndim - 2, None],
            [None, op.b.ndim - 1],
        )

    def _with_kept_axis(self, op: TensorOp) -> Op:
        """Return the step of an op on blocks of one element along the stream axis."""

        def kept(tv: TensorView) -> TensorView:
            out = block(self._twin(tv))
            source = self._twin(self._sliced.get(tv, tv))
            self._steps.append(ShardByStream(out, source, self._which(tv)))
            return out

        ins = [
            kept(v) if is_in_step(op, k) else self._twin(v)
            for k, v in enumerate(op.inputs)
            if isinstance(v, TensorView)
        ]
        self._result(op.out_tensor)
        return op.with_values(ins, [kept(op.out_tensor)])

    def _copied_view(self, op: TensorOp) -> None:
        """A view of the whole is made before the loop, and copied step by step."""
        out = self._twin(op.out_tensor)
        domain, _ = clone_domain(out.fusion, out.domain)
        view = out.fusion.new_tensor(domain, out.dtype(), mesh=out.mesh, memory=MemoryType.global_)
        self._before.append(op.with_values([self._whole(v, op) for v in op.inputs], [view]))
        position = self._axis_of(op).position
        source = selected(view, position)
        self._steps.append(
            HirAliasSelect(source, view, self._index, axis=view.domain.no_reductions[position])
        )
        result = self._result(op.out_tensor)
        self._steps.append(nodes.LoadStoreOp(result, source).replace(where=op.where))

    def _view(self, segment: Segment) -> None:
        for op in segment.exprs:
            out = self._twin(op.out_tensor)
            out.memory = MemoryType.global_
            if is_allocated_per_step(op.out_tensor):
                self._steps.append(op.with_values(self._operands(op), [out]))
            else:
                self._before.append(op.with_values([self._whole(v, op) for v in op.inputs], [out]))

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
                axis, gone = sliced_axis(op), dropped_axis(op.inp, inp.ndim)
                axis -= gone is not None and gone < axis
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
        out.memory = MemoryType.global_
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
        team, backend = team_of(op), self._lowering.backend_name
        swizzle = self._axis_of(op).swizzle
        if swizzle is not None:
            here = coordinate(team.mesh, swizzle)
            to = sc.mod(sc.sub(sc.add(self._count, here), self._index), self._count)
            source = sc.mod(sc.add(here, self._index), self._count)
            self._start(
                op,
                lambda number: CollectivePermute(
                    inp, out, to, source, number=number, team=team, backend=backend
                ),
            )
        elif self._offset:
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
        if self._lowering.params.inter_stream_synchronization:
            self._let_next_stream_wait()

    def _receive_from_owner(
        self, op: nodes.Reshard, inp: TensorView, out: TensorView, team: TeamOf
    ) -> None:
        """Send the own block to where this step wants it, and receive this step's from its owner.

        The first step's block is the own one.
        """
        (ptype,) = team.ptypes
        here, count = coordinate(team.mesh, ptype), self._count
        to = sc.mod(sc.sub(sc.add(count, here), self._index), count)
        own, copied = inp, list[Op]()
        if out.ndim < inp.ndim:
            own = self._element(inp, self._axis_of(op).position, copied)
        copied.append(nodes.LoadStoreOp(out, own).replace(where=op.where))
        self._pass_on(op, inp, out, to=to, source=self._block_index, own=copied)

    def _exchange(self, op: nodes.Reshard) -> None:
        """Send what this step has computed to the device that it is for, and receive from another
        what it has computed for this one.

        The first step's block is the own one.
        """
        source, target = op.source, op.target
        assert source is not None and target is not None, f"{op} exchanges no axes"
        axis = _stream_axis(op.inp)
        if not self._offset and axis.swizzle is None:
            raise UnsupportedError(
                f"set of {op.inp} to {op.out} without offset_stream_indexing_by_rank: each step "
                "sends a block to one device and receives one from another, so every device begins "
                "with its own block: set the parameter, or swizzle1d the operand's stream axis"
                f"{user_code(op.where)}"
            )
        (ptype,) = team_of(op).ptypes
        here, count = coordinate(team_of(op).mesh, ptype), self._count
        owner = sc.mod(sc.add(here, self._index), count)
        sender = sc.mod(sc.sub(sc.add(count, here), self._index), count)
        inp, out = self._operand(op, 0), self._twin(op.out)
        out.memory = MemoryType.global_
        self._before.append(Allocate(out))
        received = self._part_at(op.out, out, sender)
        # Without the axes of one block, both sides have the same ones.
        copied: list[Op] = []
        mine, theirs = inp, received
        drops = (axis.is_logical, _stream_axis(op.out).is_logical)
        if drops != (True, True) or abs(source - target) != 1:
            if drops[1]:
                mine = self._element(mine, source - (drops[0] and target < source), copied)
            if drops[0]:
                theirs = self._element(theirs, target - (drops[1] and source < target), copied)
        copied.append(nodes.LoadStoreOp(theirs, mine).replace(where=op.where))
        self._pass_on(op, inp, received, to=owner, source=sender, own=copied)

    def _pass_on(
        self,
        op: nodes.Reshard,
        inp: TensorView,
        out: TensorView,
        *,
        to: Scalar,
        source: Scalar,
        own: Sequence[Op],
    ) -> None:
        """Send `inp` to one member of the team and receive `out` from another; `own` is what is
        done where that is this rank. Members are coordinates."""
        team = team_of(op)
        (ptype,) = team.ptypes
        number, backend = self._lowering.next_number, self._lowering.backend_name
        received, sent, both = number(), number(), number()
        peers = rank_at(team.mesh, ptype, source), rank_at(team.mesh, ptype, to)
        transfers = (
            P2PCommunication(out, peers[0], number=received, type="recv", backend=backend),
            P2PCommunication(inp, peers[1], number=sent, type="send", backend=backend),
        )
        ring = (
            StartCoalescing(),
            *(t.replace(where=op.where) for t in transfers),
            EndCoalescing(number=both),
            Wait(number=both),
        )
        here = coordinate(team.mesh, ptype)
        self._steps.append(IfThenElse(sc.eq(to, here), then=tuple(own), orelse=ring))

    def _element(self, tv: TensorView, position: int, into: list[Op]) -> TensorView:
        """Name the one element that a tensor has along an axis."""
        out = selected(tv, position)
        axis = tv.domain.no_reductions[position]
        into.append(HirAliasSelect(out, tv, sc.ZERO, axis=axis))
        return out

    def _let_next_stream_wait(self) -> None:
        """Keep the next step's work from overtaking this step's transfer."""
        following, mine = sc.add(self._index, 1), self._stream
        ordered = (
            SetCurrentStream(stream=Stream(following)),
            Synchronize(stream=mine),
            SetCurrentStream(stream=mine),
        )
        self._steps.append(IfThenElse(sc.lt(following, NUMBER_OF_STREAMS), then=ordered))

    def _start(self, op: Op, make: Callable[[int], Op]) -> None:
        number = self._lowering.next_number()
        self._steps += [make(number).replace(where=op.where), Wait(number=number)]

    # ------------------------------------------------------------ tensors
    def _twin(self, tv: TensorView) -> TensorView:
        return self._lowering.twins[tv]

    def _axis_of(self, op: TensorOp) -> StreamAxis:
        return _stream_axis(op.out_tensor)

    def _operands(self, op: TensorOp) -> list[object]:
        """Return what a step reads: its part of an operand, or the whole."""
        return [
            self._operand(op, k) if isinstance(v, TensorView) else v
            for k, v in enumerate(op.inputs)
        ]

    def _operand(self, op: TensorOp, index: int) -> TensorView:
        v = op.inputs[index]
        if is_in_step(op, index):
            return self._part(v)
        twin, position = self._twin(v), self._repeated(op, index)
        if position is None:
            return twin
        # Every step's element is the one that is repeated along the axis that slices lack.
        return self._element(twin, position, self._steps)

    def _repeated(self, op: TensorOp, index: int) -> int | None:
        """Return which axis of an operand is repeated along a stream axis that slices drop."""
        axis = stream_axis(op.out_tensor)
        if axis is None or not axis.is_logical:
            return None
        position = self._operand_position(op, index)
        if position is None or not op.inputs[index].domain.no_reductions[position].is_broadcast:
            return None
        return position

    def _operand_position(self, op: TensorOp, index: int) -> int | None:
        """Return which axis of an operand the stream axis of the result comes from."""
        domain = op.out_tensor.domain
        number = domain.no_reductions[self._axis_of(op).position].number
        if number not in domain.root_numbers and domain.root:
            return None
        places = [a.number for a in domain.maybe_root]
        return op.axis_map(index)[places.index(number)]

    def _whole(self, v: object, op: TensorOp) -> object:
        if not isinstance(v, TensorView):
            return v
        if v in self._sliced:
            return self._twin(self._sliced[v])
        if v in self._parts and self._twin(v) not in self._known():
            raise UnsupportedError(
                f"{op.name} of {v} in steps along a whole axis: the operand has no memory of its "
                f"own{user_code(op.where)}"
            )
        return self._twin(v)

    def _known(self) -> set[TensorView]:
        made = {o.buffer for o in self._before if isinstance(o, Allocate)}
        views = {o for op in self._before for o in op.outputs}
        return made | views | {v for v in self._lowering.values.inputs if isinstance(v, TensorView)}

    def _part(self, tv: TensorView) -> TensorView:
        """Return the name of a step's part of a tensor that is in step with the loop."""
        if tv not in self._parts and is_allocated_per_step(tv):
            return self._twin(tv)
        if tv not in self._parts:
            self._parts[tv] = self._slice(tv, self._twin(tv))
        return self._parts[tv]

    def _slice(self, tv: TensorView, source: TensorView) -> TensorView:
        """Name the step's part of `source` as the stream axis of `tv` says."""
        return self._part_at(tv, source, self._which(tv))

    def _which(self, tv: TensorView) -> Scalar:
        """Return which part of a tensor this step has."""
        swizzle = _stream_axis(tv).swizzle
        index = self._block_index if swizzle is None else self._index
        return rotated(index, self._count, tv.mesh, swizzle)

    def _part_at(self, tv: TensorView, source: TensorView, which: Scalar) -> TensorView:
        """Name one part of `source`, as the stream axis of `tv` cuts it."""
        axis, twin = _stream_axis(tv), self._twin(tv)
        if axis.is_logical:
            out = selected(twin, axis.position)
            whole = source.domain.no_reductions[axis.position]
            self._steps.append(HirAliasSelect(out, source, which, axis=whole))
        else:
            out = block(twin)
            self._steps.append(ShardByStream(out, source, which))
        return out

    def _result(self, tv: TensorView) -> TensorView:
        """Return what a step writes: its part of a buffer that was made before, or its own."""
        twin = self._twin(tv)
        twin.memory = MemoryType.global_
        if is_allocated_per_step(tv):
            self._steps.append(Allocate(twin, stream_index=self._index))
            return twin
        if self._takes_slots(tv):
            return self._slot(tv, twin)
        self._before.append(Allocate(twin))
        return self._part(tv)

    def _takes_slots(self, tv: TensorView) -> bool:
        """Whether a stream needs one element of the tensor at a time, and nothing else sees it."""
        lowering = self._lowering
        fusion = lowering.segmented.fusion
        return (
            lowering.params.stream_slots
            and _stream_axis(tv).is_logical
            and tv not in fusion.outputs
            and lowering.loops.fits_in_loop(tv)
            and not any(isinstance(u, VIEW_OPS) and not is_copy(u) for u in fusion.uses(tv))
        )

    def _slot(self, tv: TensorView, twin: TensorView) -> TensorView:
        """Make room for one element per stream; steps of one stream follow one another."""
        position = _stream_axis(tv).position
        room, out = slots(twin, position), selected(twin, position)
        self._before.append(Allocate(room))
        which = sc.mod(self._index, NUMBER_OF_STREAMS)
        axis = room.domain.no_reductions[0]
        self._steps.append(HirAliasSelect(out, room, which, axis=axis))
        self._parts[tv] = out
        return out

    # ------------------------------------------------------------ loops
    def _for(self, *body: Op) -> ForLoop:
        if self._over_axis:
            return ForLoop(index=self._index, axis=self._loop_axis, body=body)
        return ForLoop(index=self._index, stop=self._count, body=body)

    def _joined_in_the_loop(self) -> list[Op]:
        entry = self._lowering.next_stream()
        mine = self._stream
        return [
            GetCurrentStream(stream=entry),
            self._for(SetCurrentStream(stream=mine), Synchronize(stream=entry)),
            self._for(
                SetCurrentStream(stream=mine),
                *self._steps,
                SetCurrentStream(stream=entry),
                Synchronize(stream=mine),
            ),
        ]

    def _joined_behind(self) -> list[Op]:
        entry = self._lowering.next_stream()
        mine = self._stream
        return [
            GetCurrentStream(stream=entry),
            self._for(SetCurrentStream(stream=mine), Synchronize(stream=entry), *self._steps),
            SetCurrentStream(stream=entry),
            self._for(Synchronize(stream=mine)),
        ]


def _stream_axis(tv: TensorView) -> StreamAxis:
    axis = stream_axis(tv)
    assert axis is not None, f"{tv} is in a loop without a stream axis"
    return axis


# Whether the stream axis is a logical axis -> the loops around the steps.
FORMS: dict[bool, Callable[[StreamLoopBuilder], list[Op]]] = {
    True: StreamLoopBuilder._joined_in_the_loop,  # pyright: ignore[reportPrivateUsage]
    False: StreamLoopBuilder._joined_behind,  # pyright: ignore[reportPrivateUsage]
}
STEP: dict[str, Callable[[StreamLoopBuilder, Segment], None]] = {
    "kernel": StreamLoopBuilder._kernel,  # pyright: ignore[reportPrivateUsage]
    "library": StreamLoopBuilder._library,  # pyright: ignore[reportPrivateUsage]
    "alias": StreamLoopBuilder._view,  # pyright: ignore[reportPrivateUsage]
    "communication": StreamLoopBuilder._communication,  # pyright: ignore[reportPrivateUsage]
}
