"""Lowers segments (kernels and the ops between kernels) that are computed one block at a time to
one loop of the host program. The iterations of the loop run on different streams, and an iteration
is also called a step.

A stream axis is divided over the iterations. It may be a logical axis, or the outer part of a
split. The loop is the same for both, except where the stream S0, on which the loop begins, waits
for the others:

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

If a step waited for S0 in the same loop in which S0 waits for the steps, each step would wait for
the previous step. Therefore either the waits for S0 or the waits of S0 are in a separate loop.

The communication of a step is one of the following. In the last three rows, an axis that was
divided over devices is then divided over steps, or the other way round:

    collective   all devices of a team share every step's block
    broadcast, ring, permutation
                 from devices to steps: a step sends one device's block to the others
    reduction    from steps to devices: a step sums one device's block, on that device
    exchange     from steps to devices: a step sends a block to one device and receives another
                 block from one device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.nodes import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import MemoryType
from fuser.passes.segment import Segment
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    PEER_COPIES,
    Allocate,
    CollectivePermute,
    Communication,
    EndCoalescing,
    GetCurrentStream,
    IfThenElse,
    KernelGroup,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    SetCurrentStream,
    ShareMemHandles,
    StartCoalescing,
    Synchronize,
    Wait,
)
from hostir.lowering.loop_steps import (
    LoopBody,
    LoopContext,
    LoweringState,
    OperandSlicer,
    only_element,
    rows_or_columns,
    stepping_axis,
)
from hostir.lowering.params import LowerParams
from hostir.lowering.slices import (
    block_type,
    coordinate,
    rank_at,
    reached,
    rotated,
    split_tensor,
    with_block_number,
    with_places,
)
from multidevice.sharding.passes.localize import is_block
from multidevice.sharding.placement import clone_domain
from multidevice.sharding.reshard import (
    RED_OP_OF,
    TeamOf,
    communication_type,
    is_device_to_stream,
    is_exchange,
    sliced_axis,
    team_of,
)
from multidevice.sharding.streams import (
    StreamLoops,
    dropped_axes_of,
    is_allocated_per_step,
    scatters_steps,
)

# The ops that torch computes with `LowerParams.standalone`.
STANDALONE_OPS = (nodes.LibraryOp, nodes.BinaryOp, nodes.ReductionOp, SliceOp)


def stands_alone(loops: StreamLoops, params: LowerParams) -> Callable[[TensorOp], bool]:
    """Returns a function that says whether an op becomes a separate op of the host program, instead
    of a part of a kernel.

    The function returns True for library ops, and for plain copies in one of the stream `loops`
    (which compute tensors block by block). If `params.standalone` is set, it also returns True for
    every other op that torch can compute, and for every plain copy.
    """
    if params.standalone:
        return lambda op: isinstance(op, STANDALONE_OPS) or is_copy(op)
    return lambda op: (
        isinstance(op, nodes.LibraryOp) or (is_copy(op) and loops.loop_of(op) is not None)
    )


# ------------------------------------------------------------------ communications
class RingEmitter:
    """Lowers transfers in a stream loop in which each device sends to one device and receives from
    one. Also lowers the matmuls that use the transferred blocks. (The iterations of a stream loop
    run on different streams.)

        T1 [istream{2}(i0), i1] = Reshard( T0 [iDIDx{2}(i0), i1] ), every device from its own block
        -> T2 = ShardByStream( T1, stream_index=(i3 + rank) % 2 )
           IF Manual (to == rank):  T2 = Set( T0 )
           ELSE:  StartCoalescing; recv T2 from `source`; send T0 to `to`; EndCoalescing 2; Wait 2

    Before, the devices of the mesh dimension DIDx have one block each of axis i0 of T0. In the loop
    with index i3, each device gets all blocks, one per iteration. `to` and `source` are the two
    partners in the iteration. `IF Manual` is a branch: a device's own block is copied, others are
    transferred.

    In a peer copy, the receiver copies directly out of the sender's memory. With peer copies, such
    a matmul uses this rank's own block where the block is, without a copy:

        IF Manual (to == rank):  T5 = matmul( T0, T4 )   ELSE:  T5 = matmul( T2, T4 )
    """

    def __init__(
        self, program: LoweringState, loop: LoopContext, body: LoopBody, slicer: OperandSlicer
    ) -> None:
        self._program, self._loop, self._body, self._slicer = program, loop, body, slicer
        # A block -> (condition that it is this rank's own, the tensor that products read instead).
        self._own: dict[TensorView, tuple[Scalar, TensorView]] = {}
        # Products whose blocks are exchanged. This rank's own block is written to its final place.
        self._exchanged: dict[TensorView, TensorOp] = {}

    # -------------------------------------------------------------- rings
    def receive_from_owner(
        self, op: nodes.Reshard, inp: TensorView, out: TensorView, team: TeamOf
    ) -> None:
        """Adds a transfer to the body of a stream loop: this rank receives the block that the
        iteration needs, from the device that stores it. In the same iteration, this rank sends its
        own block to the device that needs this block.

        `op` is the reshard (change of sharding) that is lowered. `inp` is this rank's own block,
        `out` is the memory for the received block, and `team` are the devices. In the iteration
        that needs this rank's own block, nothing is sent.
        """
        (ptype,) = team.ptypes
        loop, in_turn = self._loop, self._program.copies_in_turn
        to = reached(loop.step, loop.count, team.mesh, ptype)
        source = rotated(loop.step, loop.count, team.mesh, ptype)
        own, copied = inp, list[Op]()
        if self._is_for_products(op.out):
            self._own[op.out] = _is_own(to, team), inp
        else:
            if out.ndim < inp.ndim:
                own = only_element(inp, stepping_axis(op.out).position, copied)
            copied.append(nodes.LoadStoreOp(out, own).replace(where=op.where))
        # Copies one after another each arrive as early as possible. Concurrent copies would all
        # arrive at the time of the last.
        after = [loop.next_stream_waits()] if in_turn else []
        self._pass_on(
            op, inp, out, to=to, source=source, own=copied, after=after, sent_on=loop.entry
        )

    def exchange(self, op: nodes.Reshard) -> None:
        """Adds an exchange to the body of a stream loop: this rank sends the result of the
        iteration to the device that needs it, and receives a block that this rank needs. `op` is
        the reshard (change of sharding) that is lowered.

        In one iteration, this rank needs its own result, so nothing is sent. That is the first
        iteration if each device begins with its own block (the option `offset_by_rank`), and the
        last one if each begins with the block of the next device (a swizzled stream axis). Raises
        `UnsupportedError` if all devices begin with the same block, because then all would send to
        the same device.
        """
        loop = self._loop
        if not loop.begins_at_rank and stepping_axis(op.inp).swizzle is None:
            raise UnsupportedError(
                f"set of {op.inp} to {op.out} without offset_stream_indexing_by_rank: in each loop "
                "iteration, a device sends a block to one device and receives one from another, so "
                "each device must begin with a different block. Set the parameter to True, or call "
                "swizzle1d on the operand's stream axis"
                f"{user_code(op.where)}"
            )
        team = team_of(op)
        (ptype,) = team.ptypes
        owner = rotated(loop.step, loop.count, team.mesh, ptype)
        sender = reached(loop.step, loop.count, team.mesh, ptype)
        inp, out = self._slicer.operand(op, 0), self._program.twins[op.out]
        out.give_memory()
        self._body.before.append(Allocate(out))
        received = self._slicer.part_at(op.out, out, sender)
        own: list[Op] = []
        product = self._exchanged.get(op.inp)
        if product is None:
            own = _copied_block(op, inp, received)
        else:
            straight = product.with_values(product.inputs, [received])
            by_owner = IfThenElse(_is_own(owner, team), then=(straight,), orelse=(product,))
            self._body.steps.append(by_owner)
        if self._program.copies_in_turn:
            # The first block is computed early only if it does not share the device with the
            # others.
            self._body.steps.append(loop.next_stream_waits())
        self._pass_on(op, inp, received, to=owner, source=sender, own=own)

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
        """Adds the ops by which this rank sends `inp` to one device and receives `out` from
        another, in one iteration of a stream loop. `op` is the reshard (change of sharding) that is
        lowered.

        `to` and `source` are the coordinates of these devices in the team. If `to` is this rank,
        nothing is sent, and the ops `own` run instead. With peer copies, the receiver copies out of
        the sender's memory. The ops `after` then run after this rank has received `out`, and
        `sent_on` is the stream on which `inp` was computed; None if that is the stream of the
        iteration.
        """
        team = team_of(op)
        (ptype,) = team.ptypes
        number, backend = self._program.next_communication, self._program.step_backend
        received, sent = number(), number()
        peers = rank_at(team.mesh, ptype, source), rank_at(team.mesh, ptype, to)
        recv, send = (
            t.replace(where=op.where)
            for t in (
                P2PCommunication(out, peers[0], number=received, type="recv", backend=backend),
                P2PCommunication(inp, peers[1], number=sent, type="send", backend=backend),
            )
        )
        is_own = _is_own(to, team)
        if backend == PEER_COPIES:
            # Peers may copy as soon as it is computed, independent of this step's waits.
            mine = SetCurrentStream(stream=self._loop.stream)
            sends = (SetCurrentStream(stream=sent_on), send, mine) if sent_on else (send,)
            # The receiver copies, so no op of this step waits for the peer that copies from this
            # rank.
            ring = ShareMemHandles((out, inp)), *sends, recv, Wait(number=received), *after
            self._body.last.append(IfThenElse(is_own, then=(), orelse=(Wait(number=sent),)))
        else:
            both = number()
            ring = StartCoalescing(), recv, send, EndCoalescing(number=both), Wait(number=both)
        self._body.steps.append(IfThenElse(is_own, then=tuple(own), orelse=ring))

    # -------------------------------------------------------------- matmuls beside a ring
    def product(self, op: TensorOp, step: TensorOp) -> None:
        """Adds a library op, such as a matmul, to the body of a stream loop, whose iterations run
        on different streams. `step` is `op` with the operands and results of one iteration.

        An operand or the result of `op` may be a block that devices transfer to each other. This
        rank's own block is then read, or written, directly where this rank stores it, without a
        copy.
        """
        if self._is_exchanged(op):
            self._exchanged[op.out_tensor] = step
            return
        found = [self._own[v] for v in op.inputs if v in self._own]
        if not found:
            self._body.steps.append(step)
            return
        own = {self._program.twins[v]: self._own[v][1] for v in op.inputs if v in self._own}
        mine = step.map_values(lambda v: own.get(v, v))
        self._body.steps.append(IfThenElse(found[0][0], then=(mine,), orelse=(step,)))

    def _is_for_products(self, tv: TensorView) -> bool:
        """Whether matmuls can read this rank's own block directly from the memory where this rank
        stores it. `tv` is a tensor of which a stream loop copies one block per iteration from
        another rank. (The iterations run on different streams.)

        If True, this rank's own block is not copied into `tv`. False if an op other than a matmul
        reads `tv`. Also False without peer copies: NCCL transfers data by kernels, which would wait
        for the matmul on this rank's own block.
        """
        uses = self._program.fusion.uses(tv)
        return (
            self._program.copies_in_turn
            and is_allocated_per_step(tv)
            and all(isinstance(op, nodes.Contraction) and not rows_or_columns(op) for op in uses)
        )

    def _is_exchanged(self, op: TensorOp) -> bool:
        """Whether `op` is a matmul of which each iteration computes a block for a different device,
        and sends the block to this device in an exchange. The matmul can then write this rank's own
        block directly into its final place.

        Returns False if the result of the exchange does not have a separate place for the block of
        each sender.
        """
        out = op.out_tensor
        uses = self._program.fusion.uses(out)
        is_product = isinstance(op, nodes.Contraction) and is_allocated_per_step(out)
        if self._program.params.standalone or not is_product or len(uses) != 1:
            return False
        (use,) = uses
        if not isinstance(use, nodes.Reshard) or not is_exchange(use):
            return False
        parts = [a for a in out.domain.no_reductions if a.rfactor]
        kept = [a for a in use.out.domain.no_reductions if a.rfactor]
        return len(parts) == 1 and not kept and stepping_axis(use.out).is_logical


def _copied_block(op: nodes.Reshard, mine: TensorView, theirs: TensorView) -> list[Op]:
    """Returns the ops that copy the block `mine` into `theirs`, its place in the result of an
    exchange. In an exchange, devices send blocks to each other; `mine` is the block that stays on
    this device.

    `op` is the reshard (change of sharding) that exchanges blocks. Axes of one element are removed
    first, so that both sides of the copy have equal axes.
    """
    source, target = op.source, op.target
    assert source is not None and target is not None, (
        f"{op} does not exchange blocks between devices"
    )
    copied: list[Op] = []
    drops = (stepping_axis(op.inp).is_logical, stepping_axis(op.out).is_logical)
    if drops != (True, True) or abs(source - target) != 1:
        if drops[1]:
            mine = only_element(mine, source - (drops[0] and target < source), copied)
        if drops[0]:
            theirs = only_element(theirs, target - (drops[1] and source < target), copied)
    return [*copied, nodes.LoadStoreOp(theirs, mine).replace(where=op.where)]


def _is_own(member: Scalar, team: TeamOf) -> Scalar:
    """Returns the condition that the device with the coordinate `member` in the team is the current
    rank, as a scalar expression.
    """
    (ptype,) = team.ptypes
    return sc.eq(member, coordinate(team.mesh, ptype))


class CollectiveEmitter:
    """Lowers the communications of one stream loop. Each iteration communicates one block of a
    tensor, on one of several streams.

    An example is an allgather:

        T3 [istream{3}(i0), i1] = Reshard( T2 [istream{3}(i0), iDIDx{2}(i1)] )
        -> T3 = ALLOCATE(.., stream_index=i3)
           Communication 0 (type=Allgather, input=T2, output=T3); Wait(Communication 0)

    The stream loop with the index i3 divides axis i0 into 3 blocks (`istream{3}(i0)`). Axis i1 of
    T2 is divided over 2 devices (`iDIDx{2}(i1)`), and each iteration gathers it for one block.
    """

    def __init__(
        self,
        program: LoweringState,
        loop: LoopContext,
        body: LoopBody,
        slicer: OperandSlicer,
        rings: RingEmitter,
    ) -> None:
        self._program, self._loop, self._body = program, loop, body
        self._slicer, self._rings = slicer, rings

    def emit(self, op: nodes.Reshard) -> None:
        """Adds the ops that carry out a reshard (change of sharding) for the block of one loop
        iteration."""
        kind = communication_type(op)
        if kind == "StepSlice":
            self._slicer.slice_whole(op)
        elif kind == "LocalSlice":
            self._local_slice(op)
        elif is_device_to_stream(op):
            self._bring(op)
        elif is_exchange(op):
            self._rings.exchange(op)
        elif scatters_steps(op):
            self._scatter(op)
        else:
            self._collective(op)

    def _local_slice(self, op: nodes.Reshard) -> None:
        inp = self._slicer.operand(op, 0)
        out = self._slicer.result(op.out)
        axis = sliced_axis(op)
        axis -= sum(gone < axis for gone in dropped_axes_of(op.inp, inp.ndim))
        one = LocalSlice(out, inp, axis=axis, ptype=op.ptypes[0])
        self._body.steps.append(one.replace(where=op.where))

    def _collective(self, op: nodes.Reshard) -> None:
        inp, out = self._slicer.operand(op, 0), self._slicer.result(op.out)
        self._start(
            op,
            lambda number: Communication(
                inp,
                out,
                number=number,
                type=communication_type(op),
                team=team_of(op),
                red_op=RED_OP_OF[op.reduction] if op.reduction else "SUM",
                backend=self._program.backend_name,
            ),
        )

    def _scatter(self, op: nodes.Reshard) -> None:
        """Adds a reduction to the loop: each iteration sums one block over all devices, and the sum
        is stored on the one device that needs it. `op` is the reshard (change of sharding) that is
        lowered.

        Raises `UnsupportedError` with the option `offset_by_rank`: each device then begins with its
        own block, but all devices must reduce the same block at the same time.
        """
        if self._program.params.offset_by_rank:
            raise UnsupportedError(
                f"reduction ({op.reduction}) of {op.inp} to {op.out}: all devices must reduce the "
                "same block in a loop iteration, but with offset_stream_indexing_by_rank each "
                "device begins with its own block. Leave the parameter off, or copy (set) the "
                "operand with its stream axis on the reduced axis, and sum the copy"
                f"{user_code(op.where)}"
            )
        assert op.reduction is not None
        inp, out = self._slicer.part(op.inp), self._program.twins[op.out]
        out.give_memory()
        self._body.before.append(Allocate(out))
        red_op = RED_OP_OF[op.reduction]
        self._start(
            op,
            lambda number: Communication(
                inp,
                out,
                root=self._loop.index,
                number=number,
                type="Reduce",
                team=team_of(op),
                red_op=red_op,
                backend=self._program.backend_name,
            ),
        )

    def _bring(self, op: nodes.Reshard) -> None:
        """Adds the communication by which one iteration of a stream loop gets its block from the
        device that stores the block. `op` is the reshard (change of sharding) that is lowered.

        In a broadcast, device k sends its block to all others in iteration k. If each device begins
        with its own block, the blocks move in a ring or a permutation instead.
        """
        inp, out = self._program.twins[op.inp], self._slicer.result(op.out)
        team, backend, loop = team_of(op), self._program.step_backend, self._loop
        swizzle = stepping_axis(op.out).swizzle
        is_ring = loop.begins_at_rank or swizzle is not None
        if swizzle is not None and backend != PEER_COPIES:
            # A copy in the first step, so that NCCL's kernels begin before the matmul.
            to = reached(loop.index, loop.count, team.mesh, swizzle)
            source = rotated(loop.index, loop.count, team.mesh, swizzle)
            self._start(
                op,
                lambda number: CollectivePermute(
                    inp, out, to, source, number=number, team=team, backend=backend
                ),
            )
        elif is_ring:
            self._rings.receive_from_owner(op, inp, out, team)
        else:
            self._start(
                op,
                lambda number: Communication(
                    inp,
                    out,
                    root=loop.index,
                    number=number,
                    type="Broadcast",
                    team=team,
                    backend=backend,
                ),
            )
        orders_itself = is_ring and self._program.copies_in_turn
        if self._program.params.inter_stream_synchronization and not orders_itself:
            self._body.steps.append(loop.next_stream_waits())

    def _start(self, op: Op, make: Callable[[int], Op]) -> None:
        number = self._program.next_communication()
        self._body.steps.extend((make(number).replace(where=op.where), Wait(number=number)))


# ------------------------------------------------------------------ segments
class StreamLoopBuilder:
    """Lowers the segments of one stream loop, in order: allocations, the loop, and the waits
    between streams. Segments are kernels and the ops between kernels; the iterations of the loop
    run on different streams.

    The table has the ops before the loop, and the ops in each iteration (step). `part` is the part
    of a tensor that one iteration computes:

        kernel          before: ALLOCATE of its results       step: LaunchKernel of the parts
        library op      before: ALLOCATE of its result        step: the op of the parts
        view            before: the op of the whole tensor
                   or   step: the op of the part, if each step allocates the part of the result
        communication   see `CollectiveEmitter`
    """

    def __init__(self, program: LoweringState, segments: Sequence[Segment]) -> None:
        self._program, self._segments = program, segments
        self._loop = LoopContext.of(program, [op for s in segments for op in s.exprs])
        self._body = LoopBody()
        self._slicer = OperandSlicer(program, self._loop, self._body)
        self._rings = RingEmitter(program, self._loop, self._body, self._slicer)

    def build(self) -> list[Op]:
        """Returns the ops of the loop over streams, with the ops before it. Also adds the loop's
        kernels to the host program.

        Raises `UnsupportedError` for an op that cannot be computed one block at a time.
        """
        lower = {
            "kernel": self._kernel,
            "library": self._library,
            "alias": self._view,
            "communication": self._communication,
        }
        loop, body = self._loop, self._body
        for segment in self._segments:
            before, steps = len(body.before), len(body.steps)
            lower[segment.kind](segment)
            for ops, start in ((body.before, before), (body.steps, steps)):
                ops[start:] = (op.located(segment.line) for op in ops[start:])
        join = joined_in_the_loop if loop.shares_streams else joined_behind
        return [*body.before, *join(loop, (*body.steps, *body.last))]

    def _kernel(self, segment: Segment) -> None:
        assert segment.fusion is not None, f"the kernel segment {segment.number} has no fusion"
        loop, slicer = self._loop, self._slicer
        ins: list[TensorView | Scalar] = [
            (slicer.part(v) if is_block(mine) else self._program.twins[v])
            if isinstance(v, TensorView) and isinstance(mine, TensorView)
            else v
            for v, mine in zip(segment.inputs, segment.fusion.inputs, strict=True)
        ]
        outs = [slicer.result(o) for o in segment.outputs]
        fusion, places = with_places(
            segment.fusion, lambda tv, ptype: loop.digit(loop.block_of(tv), ptype)
        )
        ins += places
        split = split_tensor(fusion)
        if split is not None and split[0] < 0:
            ins.append(loop.digit(loop.block_of(split[1]), block_type(split[1])))
            fusion = with_block_number(fusion, loop.index)
        number = segment.number
        self._program.groups[number] = KernelGroup(number, fusion, segment.scheduler)
        self._body.steps.append(LaunchKernel(tuple(ins), tuple(outs), group=number))

    def _library(self, segment: Segment) -> None:
        for op in segment.exprs:
            if isinstance(op, VIEW_OPS) and not is_copy(op) and self._loop.shares_streams:
                self._copied_view(op)
                continue
            kept = rows_or_columns(op)
            if kept:
                self._body.steps.append(self._slicer.with_kept_axes(op, kept))
                continue
            ins = self._slicer.operands(op)
            outs = [self._slicer.result(o) for o in op.outputs]
            self._rings.product(op, op.with_values(ins, outs))

    def _copied_view(self, op: TensorOp) -> None:
        """Lowers a view op whose result the stream loop computes one block at a time. The view of
        the whole tensor is made before the loop, and each iteration copies its part of this view
        into the result.

        The copy is needed because the result has memory of its own, of which each iteration fills a
        part.
        """
        out = self._program.twins[op.out_tensor]
        domain, _ = clone_domain(out.fusion, out.domain)
        view = out.fusion.new_tensor(domain, out.dtype(), mesh=out.mesh, memory=MemoryType.global_)
        wholes = [self._slicer.whole(v, op) for v in op.inputs]
        self._body.before.append(op.with_values(wholes, [view]))
        source = self._slicer.part_at(op.out_tensor, view, self._loop.index)
        result = self._slicer.result(op.out_tensor)
        self._body.steps.append(nodes.LoadStoreOp(result, source).replace(where=op.where))

    def _view(self, segment: Segment) -> None:
        for op in segment.exprs:
            out = self._program.twins[op.out_tensor]
            out.give_memory()
            if is_allocated_per_step(op.out_tensor):
                self._body.steps.append(op.with_values(self._slicer.operands(op), [out]))
            else:
                wholes = [self._slicer.whole(v, op) for v in op.inputs]
                self._body.before.append(op.with_values(wholes, [out]))

    def _communication(self, segment: Segment) -> None:
        emitter = CollectiveEmitter(
            self._program, self._loop, self._body, self._slicer, self._rings
        )
        for op in segment.exprs:
            assert isinstance(op, nodes.Reshard), (
                f"expected a reshard in a communication segment, got {op.name}"
            )
            emitter.emit(op)


# ------------------------------------------------------------------ loops
def joined_in_the_loop(loop: LoopContext, steps: Sequence[Op]) -> list[Op]:
    """Returns a stream loop with its waits between streams, as ops of the host program. Its
    iterations share a limited number of streams. `steps` are the ops of one iteration.

    Before the loop, each stream waits for the stream on which the loop began. At the end of each
    iteration, the stream on which the loop began waits for this iteration.
    """
    entry, mine = loop.entry, loop.stream
    return [
        GetCurrentStream(stream=entry),
        loop.repeat(SetCurrentStream(stream=mine), Synchronize(stream=entry)),
        loop.repeat(
            SetCurrentStream(stream=mine),
            *steps,
            SetCurrentStream(stream=entry),
            Synchronize(stream=mine),
        ),
    ]


def joined_behind(loop: LoopContext, steps: Sequence[Op]) -> list[Op]:
    """Returns a stream loop with its waits between streams, as ops of the host program. Every
    iteration has its own stream. `steps` are the ops of one iteration.

    Each iteration begins when its stream has waited for the stream on which the loop began. After
    the loop, the stream on which the loop began waits for all iterations.
    """
    entry, mine = loop.entry, loop.stream
    return [
        GetCurrentStream(stream=entry),
        loop.repeat(SetCurrentStream(stream=mine), Synchronize(stream=entry), *steps),
        SetCurrentStream(stream=entry),
        loop.repeat(Synchronize(stream=mine)),
    ]
