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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.nodes import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import LoadStoreOpType, MemoryType, ParallelType
from fuser.passes.segment import Segment, SegmentedFusion
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    PEER_COPIES,
    Allocate,
    CollectivePermute,
    Communication,
    EndCoalescing,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    KernelGroup,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    SetCurrentStream,
    ShardByStream,
    ShareMemHandles,
    StartCoalescing,
    Synchronize,
    Wait,
    loop_index,
)
from hostir.lowering.params import LowerParams
from hostir.lowering.random_offsets import with_places
from hostir.lowering.slices import (
    block,
    block_type,
    coordinate,
    rank_at,
    reached,
    rotated,
    selected,
    slots,
    split_tensor,
    with_block_number,
)
from multidevice.sharding.passes.localize import is_block
from multidevice.sharding.placement import clone_domain
from multidevice.sharding.reshard import (
    RED_OP_OF,
    TeamOf,
    communicates,
    communication_type,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
    sliced_axis,
    team_of,
)
from multidevice.sharding.streams import (
    StreamAxis,
    StreamLoops,
    dropped_axes_of,
    is_allocated_per_step,
    is_in_step,
    scatters_steps,
    stream_axes,
    stream_axis,
)

# ----------------------------------------------------------------------
# The steps of one loop over streams: their index, and names for what each of them sees.


@dataclass
class LoweringState:
    """What the lowering of a fusion has so far: tensors, and the ops and kernels of the program.

    `values` are the program's own tensors, `twins` names them by the fusion's, and `in_place` has
    the outputs that are computed in the buffer of an input.
    """

    segmented: SegmentedFusion
    backend_name: str
    params: LowerParams
    loops: StreamLoops
    ops: list[Op] = field(default_factory=list[Op])
    groups: dict[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    numbers: int = 0
    streams: int = 0
    values: Fusion = field(init=False)
    twins: dict[TensorView, TensorView] = field(init=False)
    in_place: dict[TensorView, TensorView] = field(init=False)

    @property
    def step_backend(self) -> str:
        """The library of what the steps of a loop send from rank to rank."""
        return self.params.step_backend or self.backend_name

    def next_number(self) -> int:
        """Return the number of the next communication."""
        self.numbers += 1
        return self.numbers - 1

    def next_stream(self) -> Stream:
        """Return the name of the next stream that is captured."""
        self.streams += 1
        return Stream(name=f"S{self.streams - 1}")

    def add_group(self, segment: Segment) -> None:
        """Keep the kernel of a segment."""
        group = KernelGroup(segment.number, self._kernel_fusion(segment), segment.scheduler)
        self.groups[segment.number] = group

    def _kernel_fusion(self, segment: Segment) -> Fusion:
        """Return the kernel's fusion, which knows of buffers that it both reads and writes."""
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        targets = {o.number: self.in_place.get(self._twin(o)) for o in segment.outputs}
        read = {v.number: v for v in segment.fusion.inputs if isinstance(v, TensorView)}
        pairs = [
            (number, into.number)
            for number, into in targets.items()
            if into is not None and into.number in read
        ]
        if not pairs:
            return segment.fusion
        fusion, _ = segment.fusion.copy()
        known = {tv.number: tv for tv in fusion.tensors()}
        fusion.aliases = [Alias(known[out], known[into]) for out, into in pairs]
        return fusion

    def _twin(self, tv: TensorView) -> TensorView:
        return self.twins[tv]


class StepParts:
    """The index of one loop, and the tensors that its steps read and write: parts of what is there
    before the loop, or memory of a step's own."""

    def __init__(self, lowering: LoweringState, segments: Sequence[Segment]) -> None:
        self._lowering = lowering
        self._segments = segments
        # What stands before the loop, the steps, and how each of them ends.
        self._before: list[Op] = []
        self._steps: list[Op] = []
        self._last: list[Op] = []
        self._parts: dict[TensorView, TensorView] = {}
        # What was whole before the loop, by what its slices are called.
        self._sliced: dict[TensorView, TensorView] = {}
        # What products read in place of a block that this rank has: (when it is its own, what).
        self._own: dict[TensorView, tuple[Scalar, TensorView]] = {}
        # Products whose blocks are exchanged: this rank's own is computed where it belongs.
        self._exchanged: dict[TensorView, TensorOp] = {}
        # The stream on which the loop begins.
        self._entry = lowering.next_stream()
        ops = [op for s in segments for op in s.exprs]
        # The loop is named after what it computes, not after what it reads.
        op = next((op for op in ops if not is_step_slice(op)), ops[0])
        first = op.inputs[0] if scatters_steps(op) else op.out_tensor
        axes, is_logical = stream_axes(first), stepping_axis(first).is_logical
        counts = [lowering.values.canonical(axis.count) for axis in axes]
        count = sc.product(counts)
        twin = lowering.twins[first]
        self._loop_axis = next(a for a in twin.domain.loop if a.is_stream)
        # Steps of blocks, of one axis, have a stream each; any others share what there are.
        self._shares_streams = len(axes) > 1 or is_logical
        # A loop over a whole axis is written as one where the inputs bind the axis's own extent.
        self._over_axis = len(axes) == 1 and is_logical and count is self._loop_axis.extent
        name = "streamIdx" if self._shares_streams else f"i{lowering.values.next_scalar()}"
        self._count = count
        # How many steps count each axis, and how many there are for each of its elements.
        self._digits = {
            axis.ptype: (n, sc.product(counts[k + 1 :]))
            for k, (axis, n) in enumerate(zip(axes, counts, strict=True))
        }
        self._index = loop_index(name, 0, count)
        # The steps are taken in order, but where all send what they compute the own one comes last:
        # it needs no transfer, and those of the others are under way meanwhile.
        is_own_last = not lowering.params.offset_by_rank and _sends_all(ops)
        self._step: Scalar = sc.add(self._index, 1) if is_own_last else self._index
        # Which block a step has: on every device the same, or another on each.
        self._block_index = sc.mod(self._step, count) if is_own_last else self._index
        along = None if first.mesh is None else self._rotation(ops)
        self._offset = lowering.params.offset_by_rank and along is not None
        if self._offset and along is not None and first.mesh is not None:
            self._block_index = rotated(self._index, count, first.mesh, along)
        modulo = sc.mod(self._index, NUMBER_OF_STREAMS)
        self._stream = Stream(modulo if self._shares_streams else self._index)

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

    def _twin(self, tv: TensorView) -> TensorView:
        return self._lowering.twins[tv]

    def _axis_of(self, op: TensorOp) -> StreamAxis:
        return stepping_axis(op.out_tensor)

    def _digit(self, which: Scalar, ptype: ParallelType) -> Scalar:
        """Return the part of a step's number that counts one of the axes of a merged one."""
        count, inner = self._digits[ptype]
        if sc.int_value(self._count) == 0:
            return sc.ZERO  # there is no step
        if ptype is ParallelType.stream:
            return sc.floordiv(which, inner)
        return sc.mod(sc.floordiv(which, inner), count)

    def _operands(self, op: TensorOp) -> list[object]:
        """Return what a step reads: its part of an operand, or the whole."""
        return [
            self._operand(op, k) if isinstance(v, TensorView) else v
            for k, v in enumerate(op.inputs)
        ]

    def _operand(self, op: TensorOp, index: int) -> TensorView:
        v = op.inputs[index]
        found = self._part(v) if is_in_step(op, index) else self._twin(v)
        return self._without_repeated(op, index, found)

    def _without_repeated(
        self, op: TensorOp, index: int, found: TensorView, *, keep: Collection[ParallelType] = ()
    ) -> TensorView:
        """Name the element of an operand, or of its part, that is repeated along stream axes that
        slices lack: every step has the same one. Of an axis that is both repeated and cut in steps,
        an expanded one, the part is that element already."""
        operand = op.inputs[index]
        is_part = found.ndim < operand.ndim
        gone = {
            s.position
            for s in stream_axes(operand)
            if is_part and s.is_logical and s.ptype not in keep
        }
        for position in sorted(self._repeated(op, index, keep) - gone, reverse=True):
            at = position - sum(p < position for p in gone)
            found = self._element(found, at, self._steps)
        return found

    def _repeated(self, op: TensorOp, index: int, keep: Collection[ParallelType]) -> set[int]:
        """Return which axes of an operand are repeated along stream axes that slices drop."""
        axes = op.inputs[index].domain.no_reductions
        places = (
            self._operand_position(op, index, axis)
            for axis in stream_axes(op.out_tensor)
            if axis.is_logical and axis.ptype not in keep
        )
        return {p for p in places if p is not None and axes[p].is_broadcast}

    def _operand_position(self, op: TensorOp, index: int, axis: StreamAxis) -> int | None:
        """Return which axis of an operand a stream axis of the result comes from."""
        domain = op.out_tensor.domain
        number = domain.no_reductions[axis.position].number
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
        swizzle = stepping_axis(tv).swizzle
        index = self._block_index if swizzle is None else self._step
        return rotated(index, self._count, tv.mesh, swizzle)

    def _part_at(
        self,
        tv: TensorView,
        source: TensorView,
        which: Scalar,
        *,
        keep: Collection[ParallelType] = (),
    ) -> TensorView:
        """Name one part of `source`, as the stream axis of `tv` cuts it: of a merged one, a part of
        a part. Along the axes to `keep` it is a block, of one element."""
        like = self._twin(tv)
        elements = [s.ptype for s in stream_axes(tv) if s.is_logical and s.ptype not in keep]
        for ptype in elements:
            position = next(s.position for s in stream_axes(like) if s.ptype is ptype)
            out, axis = selected(like, position), source.domain.no_reductions[position]
            index = self._digit(which, ptype)
            self._steps.append(HirAliasSelect(out, source, index, axis=axis))
            like = source = out
        for axis in stream_axes(like):
            out, index = block(like, axis.ptype), self._digit(which, axis.ptype)
            self._steps.append(ShardByStream(out, source, index))
            source = out
        return source

    def _result(self, tv: TensorView) -> TensorView:
        """Return what a step writes: its part of a buffer that was made before, or its own."""
        twin = self._twin(tv)
        twin.give_memory()
        if is_allocated_per_step(tv):
            self._steps.append(Allocate(twin, stream_index=self._which(tv)))
            return twin
        if self._takes_slots(tv):
            return self._slot(tv, twin)
        self._before.append(Allocate(twin))
        return self._part(tv)

    def _takes_slots(self, tv: TensorView) -> bool:
        """Whether a stream needs one element of the tensor at a time, and nothing else sees it."""
        lowering = self._lowering
        fusion = lowering.segmented.fusion
        made_by = [op for op in (fusion.definition(tv),) if op is not None]
        return (
            lowering.params.stream_slots
            and len(stream_axes(tv)) == 1
            and stepping_axis(tv).is_logical
            and tv not in fusion.outputs
            and lowering.loops.fits_in_loop(tv)
            and not any(self._takes_whole(op) for op in fusion.uses(tv))
            and not any(map(self._rows_or_columns, made_by))
        )

    def _takes_whole(self, op: TensorOp) -> bool:
        """Whether steps of an op find their part of its operands in all of these."""
        is_border = isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set
        is_view = isinstance(op, VIEW_OPS) and not is_copy(op)
        return is_border or is_view or bool(self._rows_or_columns(op))

    def _rows_or_columns(self, op: TensorOp) -> list[ParallelType]:
        """Return along which stream axes a step computes one row or column of matrices of a batch:
        without that axis an operand would be another batch of matrices, or a matrix."""
        if isinstance(op, nodes.MatmulOp) and max(op.a.ndim, op.b.ndim) > 2:
            alone = [op.a.ndim - 2, None], [None, op.b.ndim - 1]
        elif isinstance(op, nodes.LinearOp) and op.weight.ndim > 2:
            alone = ([None, op.weight.ndim - 2],)
        else:
            return []
        return [
            axis.ptype
            for axis in stream_axes(op.out)
            if axis.is_logical and [self._operand_position(op, k, axis) for k in range(2)] in alone
        ]

    def _slot(self, tv: TensorView, twin: TensorView) -> TensorView:
        """Make room for one element per stream; steps of one stream follow one another."""
        position = stepping_axis(tv).position
        room, out = slots(twin, position), selected(twin, position)
        self._before.append(Allocate(room))
        which = sc.mod(self._index, NUMBER_OF_STREAMS)
        axis = room.domain.no_reductions[0]
        self._steps.append(HirAliasSelect(out, room, which, axis=axis))
        self._parts[tv] = out
        return out

    def _element(self, tv: TensorView, position: int, into: list[Op]) -> TensorView:
        """Name the one element that a tensor has along an axis."""
        out = selected(tv, position)
        axis = tv.domain.no_reductions[position]
        into.append(HirAliasSelect(out, tv, sc.ZERO, axis=axis))
        return out


def _sends_all(ops: Sequence[TensorOp]) -> bool:
    """Whether the transfers of a loop are exchanges, each of another block on every
    device."""
    moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
    return bool(moves) and all(is_exchange(op) and stepping_axis(op.inp).swizzle for op in moves)


def stepping_axis(tv: TensorView) -> StreamAxis:
    """Return the stream axis of a tensor that is computed in steps."""
    axis = stream_axis(tv)
    assert axis is not None, f"{tv} is in a loop without a stream axis"
    return axis


# ----------------------------------------------------------------------
# What the steps of a loop send and receive.
#
# collective every step's block is shared by all devices of a team broadcast, ring, permutation from
# devices to steps: a step brings one device's block reduction from steps to devices: a step sums
# one device's block, there exchange the same in a ring: a step sends one device its block, and
# receives one


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


# ----------------------------------------------------------------------
# Loops over streams: segments that are computed in steps become one loop of the host program.

# What torch carries out where `LowerParams.standalone` asks for it.
STANDALONE_OPS = (nodes.LibraryOp, nodes.BinaryOp, nodes.ReductionOp, SliceOp)


def stands_alone(loops: StreamLoops, params: LowerParams) -> Callable[[TensorOp], bool]:
    """Return which ops are no part of kernels: those of the library, and plain copies in steps."""
    if params.standalone:
        return lambda op: isinstance(op, STANDALONE_OPS) or is_copy(op)
    return lambda op: (
        isinstance(op, nodes.LibraryOp) or (is_copy(op) and loops.loop_of(op) is not None)
    )


class StreamLoopBuilder(StepTransfers):
    """Lowers the segments of one loop, in order."""

    def build(self) -> list[Op]:
        """Return the allocations, the loops, and what they wait for."""
        for segment in self._segments:
            before, steps = len(self._before), len(self._steps)
            STEP[segment.kind](self, segment)
            for ops, start in ((self._before, before), (self._steps, steps)):
                ops[start:] = (op.located(segment.line) for op in ops[start:])
        self._steps += self._last
        form = FORMS[self._shares_streams]
        return [*self._before, *form(self)]

    # ------------------------------------------------------------ segments
    def _kernel(self, segment: Segment) -> None:
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        ins: list[TensorView | Scalar] = [
            (self._part(v) if is_block(mine) else self._twin(v))
            if isinstance(v, TensorView) and isinstance(mine, TensorView)
            else v
            for v, mine in zip(segment.inputs, segment.fusion.inputs, strict=True)
        ]
        outs = [self._result(o) for o in segment.outputs]
        fusion, places = with_places(
            segment.fusion, lambda tv, ptype: self._digit(self._which(tv), ptype)
        )
        ins += places
        segment = replace(segment, fusion=fusion)
        split = split_tensor(fusion)
        if split is not None and split[0] < 0:
            ins.append(self._digit(self._which(split[1]), block_type(split[1])))
            segment = replace(segment, fusion=with_block_number(fusion, self._index))
        self._lowering.add_group(segment)
        self._steps.append(LaunchKernel(tuple(ins), tuple(outs), group=segment.number))

    def _library(self, segment: Segment) -> None:
        for op in segment.exprs:
            if isinstance(op, VIEW_OPS) and not is_copy(op) and self._shares_streams:
                self._copied_view(op)
                continue
            kept = self._rows_or_columns(op)
            if kept:
                self._steps.append(self._with_kept_axes(op, kept))
                continue
            ins = self._operands(op)
            outs = [self._result(o) for o in op.outputs]
            self._product(op, op.with_values(ins, outs))

    def _with_kept_axes(self, op: TensorOp, keep: Sequence[ParallelType]) -> Op:
        """Return the step of an op on blocks of one element along these stream axes."""

        def kept(tv: TensorView) -> TensorView:
            source = self._twin(self._sliced.get(tv, tv))
            return self._part_at(tv, source, self._which(tv), keep=keep)

        ins = [
            self._without_repeated(
                op, k, kept(v) if is_in_step(op, k) else self._twin(v), keep=keep
            )
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
        source = self._part_at(op.out_tensor, view, self._index)
        result = self._result(op.out_tensor)
        self._steps.append(nodes.LoadStoreOp(result, source).replace(where=op.where))

    def _view(self, segment: Segment) -> None:
        for op in segment.exprs:
            out = self._twin(op.out_tensor)
            out.give_memory()
            if is_allocated_per_step(op.out_tensor):
                self._steps.append(op.with_values(self._operands(op), [out]))
            else:
                self._before.append(op.with_values([self._whole(v, op) for v in op.inputs], [out]))

    # ------------------------------------------------------------ loops
    def _for(self, *body: Op) -> ForLoop:
        if self._over_axis:
            return ForLoop(index=self._index, axis=self._loop_axis, body=body)
        return ForLoop(index=self._index, stop=self._count, body=body)

    def _joined_in_the_loop(self) -> list[Op]:
        entry, mine = self._entry, self._stream
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
        entry, mine = self._entry, self._stream
        return [
            GetCurrentStream(stream=entry),
            self._for(SetCurrentStream(stream=mine), Synchronize(stream=entry), *self._steps),
            SetCurrentStream(stream=entry),
            self._for(Synchronize(stream=mine)),
        ]


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
