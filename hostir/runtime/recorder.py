"""Replay: a program bound to one class of inputs, as a flat list of steps over slots.

The ops are walked once, by the first run of a class or its rehearsal; after each op the *recorder*
notes what runs have to repeat: sizes, strides, teams and launches are fixed, only tensors change.
Intermediates lie in an arena (`hostir.runtime.plan`); what a caller gets is allocated by every
run. A slot is given once in a run: where a loop makes a tensor anew, that is another slot.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.memory_layout import lies_in_order
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import MemoryType
from fuser.ops.reference.library_calls import LibraryCall, Returning, WritingOne
from fuser.ops.reference.matmul_calls import Product, bind_contraction
from fuser.ops.reference.meaning import NODES
from fuser.runtime.captured_graphs import MAKERS
from fuser.support.torch_calls import current_device_beside, raw_stream_on
from hostir.analysis.clocks import Clock, Lifetime, StreamOrder
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    ShareMemHandles,
    StartCoalescing,
    SymmetricContiguousView,
    Synchronize,
    Wait,
    library_name,
)
from hostir.ir.shard_layout import is_repeated, share_storage, write
from hostir.lowering.slices import dropped_axes
from hostir.runtime.communication import (
    CommunicationCall,
    Done,
    PostedBuffer,
    bind_exchange,
    bind_post,
    exchange,
    halves,
    permute,
    post,
    transfer,
)
from hostir.runtime.frame import ExecutionContext, Frame
from hostir.runtime.inputs import Argument
from hostir.runtime.plan import Arenas, Plan, first_fit
from hostir.runtime.steps import (
    Action,
    Allocation,
    Block,
    Both,
    Closure,
    CollectiveStep,
    ExchangeStep,
    LaunchStep,
    Make,
    Multiply,
    PlannedBuffer,
    Release,
    Slots,
    Step,
    View,
    allocation,
    announcer,
    meets_at,
    shows_shards,
)
from hostir.runtime.streams import Handle, raw_handle
from hostir.runtime.torch_ops import (
    as_contracted,
    compute,
    contract_repeated,
    kernels_of,
    library_call,
)
from multidevice.transports.base.protocol import Backend, Transfer


class Recorder:
    """Turns the ops of one reference run, or of its rehearsal, into steps."""

    def __init__(
        self, frame: Frame, free: frozenset[int], machine: ExecutionContext | None = None
    ) -> None:
        """`free` has the positions of scalar inputs on which no size depends. `machine` is where
        the steps will run: given for a rehearsal, whose frame has tensors without contents."""
        self.frame = frame
        self.machine = frame.machine if machine is None else machine
        self.is_rehearsal = machine is not None
        inputs = frame.program.inputs
        self._slot: dict[object, int] = {v: i for i, v in enumerate(inputs)}
        self._size = len(inputs)
        # The slots of the input scalars; and those that may change within the class.
        self.places = {v: i for i, v in enumerate(inputs) if isinstance(v, Symbol)}
        self.given_free, self.free = free, free_scalars(frame, free)
        self._requires_grad = any(t.requires_grad for t in frame.tensors.values())
        self._steps: list[tuple[Step, Op | None]] = []
        # Buffers that may lie in an arena, by slot, in the order of their allocations: whose, what
        # their allocation comes after, and on which stream; and where those that do not outlive the
        # program end.
        self._blocks: dict[int, tuple[TensorView, Block]] = {}
        self._begins: dict[int, tuple[Clock, Hashable]] = {}
        self._lifetimes: dict[int, Lifetime] = {}
        # Those of them that a step makes where they do not.
        self._in_steps: set[int] = set()
        # What makes memory for them that peers can map, if some must lie in such.
        self._symmetric: Callable[[int], torch.Tensor] | None = None
        # What makes the buffers that outlive a run, by slot; and the buffers that a library op is
        # the first to use: its results may be the buffers.
        self._made: dict[int, Allocation] = {}
        self._by_steps: set[int] = set()
        # Those that are never made: what torch computes takes their place, and ends in the run.
        self._never_made: dict[int, tuple[TensorView, Block]] = {}
        self._cleared: set[int] = set()
        # The owners of buffers that ops have used so far.
        self._used: set[TensorView] = set()
        self._order = StreamOrder(frame.integer)
        self._switches = frame.storage.switches_streams
        # The sends and receives since StartCoalescing: op, slot, peer.
        self._group: list[tuple[P2PCommunication, int, int]] | None = None
        # The same as the backend takes them.
        self._halves: list[Transfer] = []
        # The current stream, and those that the program captured; None is the one on which the run
        # began.
        self._stream: Handle | None = None
        self._captured: dict[str, Handle | None] = {}
        # Which libraries communicate, and the first reason why no graph can repeat these steps.
        self._backends: list[Backend] = []
        self._why_not = ""
        # How the communications of whole buffers are started.
        self.posted: dict[Op, Posting] = {}

    def record(self, op: Op) -> None:
        """Note what the op, which has just been carried out, does."""
        self._order.follow(op)
        if isinstance(op, LibraryOp) and op.draws:
            self._keep_out_of_graphs(f"{op.name} may draw from torch's generator in each run")
        if isinstance(op, LibraryOp) and op.READS_ON_HOST:
            self._keep_out_of_graphs(f"{op.name} reads an operand on the host in each run")
        step = RECORD[type(op)](self, op) if type(op) in RECORD else tensor_op(self, op)
        if not isinstance(op, Allocate):
            root = self.frame.storage.root
            held = (*op.inputs, *op.outputs)
            self._used.update(root(v) for v in held if isinstance(v, TensorView))
        if step is None:
            return
        if announced := self._announced(op):
            self._keep_out_of_graphs("FUSER_DUMP=communication writes a line in each run")
            self._steps.append((Action(announced), op))
        self._steps.append((Action(step) if callable(step) else step, op))

    def _keep_out_of_graphs(self, why: str) -> None:
        self._why_not = self._why_not or why

    def _backend(self, name: str, op: Op, what: str) -> Backend:
        """Return what carries out a communication; `what` is the backend's name of it."""
        found = self.machine.backend(name)
        if found not in self._backends:
            self._backends.append(found)
        if not found.can_capture(what):
            self._keep_out_of_graphs(
                f"{op.name} over {library_name(found.name)} needs the host in each run"
            )
        return found

    def _announced(self, op: Op) -> Closure | None:
        announce = announcer(op, self.machine)
        if announce is None:
            return None
        held = [v for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)]
        places = {tv: self.slot(tv) for tv in held if self.frame.is_mine(tv)}
        return lambda slots: announce(lambda tv: slots[places[tv]] if tv in places else None)

    def finish(self, outputs: list[TensorView], arenas: Arenas) -> Plan:
        """Return the plan that yields these tensors."""
        device = self.machine.device.type
        if device not in MAKERS:
            self._keep_out_of_graphs(f"the device {device} has no graphs")
        for tv in outputs:
            if not self.frame.is_mine(tv):
                self._steps.append((Action(self._absent(tv)), None))
            elif tv in self.frame.storage.borrowed:
                self._steps.append((Action(self._copy(tv)), None))
        # A graph repeats its steps on the same memory.
        blocks, nbytes = self._place(self._by_steps if arenas.why_not or self._why_not else ())
        lasting = self._blocks.keys() - self._lifetimes.keys() - self._in_steps
        self._made.update({i: self._make(*self._blocks[i]) for i in sorted(lasting)})
        return Plan(
            self._made,
            tuple(self._steps),
            len(self.frame.program.inputs),
            self._size,
            tuple(self._slot.get(("copy", t), self.slot(t)) for t in outputs),
            frozenset(self._by_steps & lasting),
            blocks,
            nbytes,
            self._symmetric,
            self.machine.device,
            self._requires_grad and not all(map(_leaves_gradients_alone, self._steps)),
            self.machine.streams if self._switches else None,
            arenas,
            raw_stream_on(self.machine.device),
            current_device_beside(self.machine.device),
            tuple(self._backends),
            self.machine.vote,
            arenas.why_not or self._why_not,
            self.frame.program,
        )

    def _place(self, left: Container[int]) -> tuple[tuple[Block, ...], int]:
        """Give the buffers that the program deallocates their places in the arena, but for those
        `left` to steps: those that are used within the order of the stream on which runs begin,
        whose runs share the arena."""
        is_within = self._order.is_within
        kept = [i for i in self._blocks if i in self._lifetimes and i not in left]
        lifetimes = {i: self._lifetimes[i] for i in kept}
        placed = {i: at for i, at in lifetimes.items() if is_within(at)}
        blocks = [self._blocks[i][1] for i in placed]
        if any(self._blocks[i][0].memory is MemoryType.symmetric for i in placed):
            self._symmetric = self.machine.lasting
        offsets, nbytes = first_fit(
            [(at, b.nbytes) for at, b in zip(placed.values(), blocks, strict=True)]
        )
        return tuple(b.at(offset) for b, offset in zip(blocks, offsets, strict=True)), nbytes

    def buffers(self) -> tuple[PlannedBuffer, ...]:
        """Return the buffers that are made at once or lie in an arena, in order of their begin."""
        made = [
            PlannedBuffer(tv, i, b.dtype, lies_in_order(tv), self._lifetimes.get(i))
            for i, (tv, b) in self._blocks.items()
        ]
        never = [
            PlannedBuffer(tv, i, b.dtype, lies_in_order(tv), None, is_never_made=True)
            for i, (tv, b) in self._never_made.items()
        ]
        return (*made, *never)

    def _make(self, tv: TensorView, block: Block) -> Allocation:
        """Return what makes a buffer which outlives the run."""
        return allocation(tv, block, self.machine, self.frame.program)

    def let_results_be_buffers(self, op: TensorOp) -> None:
        """Note which buffers an op that makes tensors of its own is the first to use, on the stream
        on which runs begin: a run need not allocate them. One that ends in the run has no place in
        the arena where all that the op makes is its own."""
        storage, is_all_own = self.frame.storage, isinstance(op, LibraryOp) and op.MAKES_RESULTS
        for out in op.outputs:
            i, is_plain = self.slot(out), out.memory is not MemoryType.symmetric
            is_own = i in self._blocks and i not in self._in_steps and out not in self._used
            if not (is_own and is_plain) or self._switches or i in self._cleared:
                continue
            self._by_steps.add(i)
            is_named = out in storage.shows or out in storage.unread
            if is_all_own and not (is_named or storage.escapes(out)):
                self._never_made[i] = self._blocks.pop(i)

    def slot(self, value: object) -> int:
        """Return the slot of a tensor, an input scalar or a communication."""
        return self._slot[value] if value in self._slot else self.new_slot(value)

    def new_slot(self, value: object) -> int:
        """Return a slot for what is made now, whatever was called so before."""
        self._slot[value] = self._size
        self._size += 1
        return self._slot[value]

    # ------------------------------------------------------------ ops
    def _absent(self, tv: TensorView) -> Closure:
        i = self.slot(tv)
        nothing = torch.empty(0, dtype=to_torch(tv.dtype()), device=self.machine.device)

        def absent(slots: Slots) -> None:
            slots[i] = nothing

        return absent

    def _copy(self, tv: TensorView) -> Closure:
        i, o = self.slot(tv), self.slot(("copy", tv))
        like = torch.empty_like(self.frame.tensors[tv], device="meta")
        block = Block(o, tuple(like.shape), like.stride(), like.dtype)
        self._made[o] = self._make(tv, block)
        return lambda slots: slots[o].copy_(slots[i])

    def _allocate(self, op: Allocate) -> Step | Closure | None:
        tv = op.buffer
        if tv in self.frame.storage.named:
            return _clearing(self.slot(tv)) if op.zero_init else None
        i, made = self.new_slot(tv), self.frame.tensors[tv]
        block = Block(i, tuple(made.shape), made.stride(), made.dtype)
        clear = _clearing(i) if op.zero_init else None
        if clear is not None:
            self._cleared.add(i)
        is_mapped = tv.memory is MemoryType.symmetric
        if is_mapped and tv in self.frame.storage.shown:
            make = allocation(tv, block, self.machine, self.frame.program, self.machine.shard).run
            return make if clear is None else Both(Action(make), Action(clear))
        self._blocks[i] = tv, block
        self._begins[i] = self._order.now(), self._order.clocks.current
        if not (self.frame.indices or is_mapped) and self._stream is None:
            return clear
        # Torch keeps what is freed for the stream that it was made on.
        self._in_steps.add(i)
        make = Make(i, self._make(tv, block).run)
        return make if clear is None else Both(make, Action(clear))

    def _deallocate(self, op: Deallocate) -> Step | None:
        i = self.slot(op.buffer)
        if (view := self.frame.storage.views.get(op.buffer)) is not None:
            return Both(meets_at(view, self.machine), Release(i))
        if i in self._blocks:
            begin, stream = self._begins[i]
            self._lifetimes[i] = Lifetime(begin, self._order.moment(stream))
        is_made_before = i in self._blocks and i not in self._in_steps
        return None if is_made_before and i not in self._by_steps else Release(i)

    def _launch(self, op: LaunchKernel) -> Step | Closure:
        for out in op.outs:
            if out not in self._slot:
                self._slot[out] = self.slot(self.frame.alias_target(out))
        outs = [self.slot(o) for o in op.outs]
        runner, sizes = self.machine.runner(op.group), self.frame.sizes
        assert self.frame.launched is not None, f"{op.name} was not carried out"
        (given, results), self.frame.launched = self.frame.launched, None
        device = self.machine.device if self.is_rehearsal else None
        kernel = runner.launch_for(given, results, sizes=sizes, device=device)
        if kernel is not None:
            operands = (*(self.slot(v) for v in op.ins if isinstance(v, TensorView)), *outs)
            numbers = tuple(x for x in given if not isinstance(x, torch.Tensor))
            scalars = [v for v in op.ins if isinstance(v, Scalar)]
            read = numbers_reader(scalars, self.places, self.free, self.frame)
            return LaunchStep(kernel, operands, numbers, read, raw_handle(self._stream))
        self._keep_out_of_graphs(f"the launch of kernel group {op.group} is looked up in each run")
        run, ins = runner.run, [self._argument(v) for v in op.ins]
        dropped = dropped_axes(op, self.frame.program)

        def launch(slots: Slots) -> None:
            run([get(slots) for get in ins], [slots[o] for o in outs], sizes=sizes)

        def launch_on_elements(slots: Slots) -> None:
            operands: tuple[list[Any], list[Any]]
            operands = [get(slots) for get in ins], [slots[o] for o in outs]
            for values, axes in zip(operands, dropped, strict=True):
                for k, gone in axes.items():
                    for axis in gone:
                        values[k] = values[k].unsqueeze(axis)
            run(*operands, sizes=sizes)

        return launch_on_elements if any(dropped) else launch

    def _post_on_stream(self, op: PostOnStream) -> Closure:
        ins = [self._argument(v) for v in op.ins]
        outs = [(self.slot(o), self.frame.tensors[o]) for o in op.outs]
        makes = [
            self._make(o, Block(i, tuple(t.shape), t.stride(), t.dtype)).run
            for o, (i, t) in zip(op.outs, outs, strict=True)
            if o not in self.frame.storage.buffered
        ]
        run = self.machine.unit(op.unit)
        self._keep_out_of_graphs(f"{op.name} runs a program of its own")

        def post_on_stream(slots: Slots) -> None:
            for make in makes:
                make(slots)
            run([get(slots) for get in ins], [slots[i] for i, _ in outs])

        return post_on_stream

    def _argument(self, value: TensorView | Scalar) -> Callable[[Slots], Argument]:
        """Return how to read an operand: a slot, or a scalar over the run's input scalars."""
        if isinstance(value, TensorView):
            i = self.slot(value)
            return lambda slots: slots[i]
        return reader(value, self.places, self.free, self.frame)

    # ------------------------------------------------------------ communications
    def _work(self, number: int) -> int:
        return self.slot(("work", number))

    def _marked(self, work: int, start: Step) -> Step:
        """Return the step that also notes where a communication stands in its stream: its Wait may
        stand in another one."""
        if not self._switches:
            return start
        take, mark = self.machine.streams.mark, self.slot(("mark", work))

        def note(slots: Slots) -> None:
            slots[mark] = take()

        return Both(start, Action(note))

    def _held(self, tv: TensorView) -> int:
        """Return the slot of this rank's part of a tensor, -1 where it holds none."""
        return self.slot(tv) if self.frame.is_mine(tv) else -1

    def _communication(self, op: Communication) -> Step | None:
        frame = self.frame
        rank = self.machine.rank
        team = op.team.ranks(rank)
        if not team:
            return None
        root = -1 if op.root is None else team[frame.integer(op.root)]
        call = CommunicationCall(op, rank, team, self._backend(op.backend, op, op.type), root)
        work, inp, out = self._work(op.number), self._held(op.inp), self._held(op.out)
        held = [frame.tensors[tv] if frame.is_mine(tv) else None for tv in (op.inp, op.out)]
        posting = Posting(call, inp, out, work, raw_handle(self._stream))
        self.posted[op] = posting
        return self._marked(work, posting.step(*held))

    def _permute(self, op: CollectivePermute) -> Step | None:
        frame = self.frame
        rank, backend = self.machine.rank, self._backend(op.backend, op, op.name)
        team = op.team.ranks(rank)
        if not team:
            return None
        to, source = (team[frame.integer(p)] for p in (op.send_peer, op.recv_peer))
        work, inp, out = self._work(op.number), self.slot(op.inp), self.slot(op.out)
        both = halves(op, (to, source), frame.tensors[op.inp], frame.tensors[op.out])
        bound = None if to == source == rank else bind_exchange(op, both, team, backend)
        if bound is not None:
            step = ExchangeStep(bound, (inp, out), work, raw_handle(self._stream))
            return self._marked(work, step)

        def collective_permute(slots: Slots) -> None:
            slots[work] = permute(op, (to, source), rank, team, backend, slots[inp], slots[out])

        return self._marked(work, Action(collective_permute, 2))

    def _start_coalescing(self, op: StartCoalescing) -> None:
        self._group = []

    def _transfer(self, op: P2PCommunication) -> Step | None:
        one = op, self.slot(op.buffer), self.frame.integer(op.peer)
        half = transfer(op, self.frame.tensors[op.buffer], one[2])
        if self._group is not None:
            self._group.append(one)
            self._halves.append(half)
            return None
        return self._exchange(op, [one], [half])

    def _end_coalescing(self, op: EndCoalescing) -> Step:
        group, self._group = self._group, None
        assert group is not None, f"{op.name} without StartCoalescing"
        for member, _, _ in group:
            self._slot["work", member.number] = self._work(op.number)
        halves, self._halves = self._halves, []
        return self._exchange(op, group, halves)

    def _exchange(
        self,
        op: P2PCommunication | EndCoalescing,
        group: list[tuple[P2PCommunication, int, int]],
        halves: list[Transfer],
    ) -> Step:
        machine = self.machine
        work, team = self._work(op.number), machine.team
        backend = self._backend(group[0][0].backend if group else "", op, op.name)
        bound = bind_exchange(op, halves, team, backend) if group else None
        if bound is not None:
            buffers = tuple(i for _, i, _ in group)
            step = ExchangeStep(bound, buffers, work, raw_handle(self._stream))
            return self._marked(work, step)

        def start(slots: Slots) -> None:
            slots[work] = (
                exchange(op, [transfer(p, slots[i], peer) for p, i, peer in group], team, backend)
                if group
                else Done()
            )

        return self._marked(work, Action(start, len(group)))

    def _wait(self, op: Wait) -> Closure | None:
        if ("work", op.number) not in self._slot:
            return None
        work = self._work(op.number)

        def wait(slots: Slots) -> None:
            if slots[work] is not None:
                slots[work].wait()
                slots[work] = None

        if not self._switches:
            return wait
        join, mark = self.machine.streams.join_mark, self.slot(("mark", work))

        def join_and_wait(slots: Slots) -> None:
            if slots[work] is not None:
                join(slots[mark])
            wait(slots)

        return join_and_wait

    # ------------------------------------------------------------ streams
    def _finds(self, stream: Stream) -> Callable[[Slots], Handle]:
        """Return how to find a stream: one that this program captures differs from run to run."""
        name = ("stream", stream.name)
        if stream.index is None and name in self._slot:
            i = self._slot[name]
            return lambda slots: slots[i]
        handle = self.frame.stream(stream)
        return lambda slots: handle

    def _set_stream(self, op: SetCurrentStream) -> Closure:
        enter, find = self.machine.streams.enter, self._finds(op.stream)
        is_captured = op.stream.index is None and op.stream.name in self._captured
        self._stream = (
            self._captured[op.stream.name] if is_captured else self.frame.stream(op.stream)
        )
        return lambda slots: enter(find(slots))

    def _get_stream(self, op: GetCurrentStream) -> Closure:
        current, i = self.machine.streams.current, self.slot(("stream", op.stream.name))
        self._captured[op.stream.name] = self._stream

        def capture(slots: Slots) -> None:
            slots[i] = current()

        return capture

    def _synchronize(self, op: Synchronize) -> Closure:
        join, find = self.machine.streams.join, self._finds(op.stream)
        return lambda slots: join(find(slots))

    def _nothing(self, op: Op) -> None:
        """A region's ops were recorded one by one; the order stands in the list of steps."""

    def _local_slice(self, op: LocalSlice) -> Closure:
        start, length = self.frame.slice_bounds(op)
        inp, out, axis = self.slot(op.inp), self.slot(op.out), op.axis

        put = writer(self.frame.tensors[op.out])

        def local_slice(slots: Slots) -> None:
            put(slots[out], slots[inp].narrow(axis, start, length))

        return local_slice

    def as_strided(self, op: TensorOp) -> View | None:
        """Return a view by sizes and strides; None when the op made no view of its first input."""
        source = op.inputs[0] if op.inputs else None
        if not isinstance(source, TensorView) or len(op.outputs) != 1:
            return None
        before, after = self.frame.tensors[source], self.frame.tensors[op.out_tensor]
        has_memory = after.numel() > 0 and (after.is_meta or after.data_ptr() != 0)
        if not has_memory or not share_storage(before, after):
            return None
        return self._view(source, op.out_tensor)

    def _name(self, op: HirAliasSelect | ShardByStream | SymmetricContiguousView) -> View:
        return self._view(op.inp, op.out)

    def _symmetric_view(self, op: SymmetricContiguousView) -> Step:
        if op.team is None:
            return self._name(op)
        self._keep_out_of_graphs(f"the ranks meet in each {op.name}")
        shape = tuple(self.frame.tensors[op.out].shape)
        return shows_shards(op, self.machine, self.slot(op.inp), self.new_slot(op.out), shape)

    def _view(self, source: TensorView, out: TensorView) -> View:
        """Return the step that names the same place of `source` as now."""
        before, after = self.frame.tensors[source], self.frame.tensors[out]
        shift = int(after.storage_offset()) - int(before.storage_offset())
        i, o = self.slot(source), self.new_slot(out)
        return View(i, o, tuple(after.shape), after.stride(), shift, after.element_size())


def _clearing(slot: int) -> Closure:
    def clear(slots: Slots) -> None:
        slots[slot].zero_()

    return clear


def _leaves_gradients_alone(step: tuple[Step, Op | None]) -> bool:
    """Whether a step makes no call of torch that reads an input."""
    return isinstance(step[0], LaunchStep) or isinstance(step[1], Allocate | Deallocate)


RECORD: dict[type[Op], Callable[[Recorder, Any], Step | Closure | None]] = {
    Allocate: Recorder._allocate,  # pyright: ignore[reportPrivateUsage]
    CollectivePermute: Recorder._permute,  # pyright: ignore[reportPrivateUsage]
    Communication: Recorder._communication,  # pyright: ignore[reportPrivateUsage]
    Deallocate: Recorder._deallocate,  # pyright: ignore[reportPrivateUsage]
    EndCoalescing: Recorder._end_coalescing,  # pyright: ignore[reportPrivateUsage]
    ForLoop: Recorder._nothing,  # pyright: ignore[reportPrivateUsage]
    GetCurrentStream: Recorder._get_stream,  # pyright: ignore[reportPrivateUsage]
    HirAliasSelect: Recorder._name,  # pyright: ignore[reportPrivateUsage]
    IfThenElse: Recorder._nothing,  # pyright: ignore[reportPrivateUsage]
    LaunchKernel: Recorder._launch,  # pyright: ignore[reportPrivateUsage]
    LocalSlice: Recorder._local_slice,  # pyright: ignore[reportPrivateUsage]
    P2PCommunication: Recorder._transfer,  # pyright: ignore[reportPrivateUsage]
    PostOnStream: Recorder._post_on_stream,  # pyright: ignore[reportPrivateUsage]
    SetCurrentStream: Recorder._set_stream,  # pyright: ignore[reportPrivateUsage]
    ShardByStream: Recorder._name,  # pyright: ignore[reportPrivateUsage]
    ShareMemHandles: Recorder._nothing,  # pyright: ignore[reportPrivateUsage]
    StartCoalescing: Recorder._start_coalescing,  # pyright: ignore[reportPrivateUsage]
    SymmetricContiguousView: Recorder._symmetric_view,  # pyright: ignore[reportPrivateUsage]
    Synchronize: Recorder._synchronize,  # pyright: ignore[reportPrivateUsage]
    Wait: Recorder._wait,  # pyright: ignore[reportPrivateUsage]
}


# ----------------------------------------------------------------------
# How the ops of tensors that no kernel computes are repeated: views, products, torch's own.


class OnlyRunTells(Exception):
    """Torch chooses how a result lies in memory: that is known when it has been computed."""


def tensor_op(of: Recorder, op: Op) -> Step | Closure:
    assert isinstance(op, TensorOp), f"{op.name} cannot be replayed"
    if all(out in of.frame.storage.buffered for out in op.outputs):
        return _into(of, op)
    view = of.as_strided(op)
    if view is None and of.is_rehearsal:
        raise OnlyRunTells
    return view if view is not None else _computed(of, op)


def _into(of: Recorder, op: TensorOp) -> Step | Closure:
    if not isinstance(op, nodes.Contraction):
        return _written(of, op)
    tensors = of.frame.tensors
    ins, out = tuple(of.slot(v) for v in op.inputs), of.slot(op.out)
    return contraction(op, (ins, out), [tensors[v] for v in op.inputs], tensors[op.out])


def contraction(
    op: nodes.Contraction,
    slots: tuple[tuple[int, ...], int],
    operands: Sequence[torch.Tensor],
    sample: torch.Tensor,
) -> Step | Closure:
    """Return the step that computes a product for operands and a result that lie like these; they
    are in these slots."""
    ins, out = slots
    result = as_contracted(op, sample)
    if is_repeated(result):
        return lambda slots: contract_repeated(
            op, [slots[i] for i in ins], as_contracted(op, slots[out])
        )
    way = bind_contraction(op, operands, result)
    if isinstance(way, Product) and result is sample:
        return Multiply(way, ins, out)

    def contract(slots: Slots) -> None:
        way([slots[i] for i in ins], slots[out])

    def contract_partial(slots: Slots) -> None:
        way([slots[i] for i in ins], as_contracted(op, slots[out]))

    return contract if result is sample else contract_partial


def _written(of: Recorder, op: TensorOp) -> Closure:
    row = NODES[type(op)]
    if row.into is None or row.may_return:
        of.let_results_be_buffers(op)
    outs = {o: (of.slot(o), of.frame.tensors[o]) for o in op.outputs}
    return writing(op, of.frame, _tensor_slots(of, op), _scalar_slots(of), outs, of.machine)


def writing(
    op: TensorOp,
    frame: Frame,
    tensors: Sequence[tuple[TensorView, int]],
    scalars: Sequence[tuple[Symbol, int]],
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
    machine: ExecutionContext | None = None,
) -> Closure:
    """Return what writes the results of an op into the tensors of slots.

    `outs` has the slot of each result and a tensor that lies like it.

    Torch writes by itself where it can: the first run binds its call, for all runs of the class.
    """
    slot_of = dict(tensors)
    ins = [slot_of[v] for v in op.inputs if isinstance(v, TensorView)]
    put = _putting(op, frame, outs, ins)
    compute_step = computing(op, frame, tensors, scalars, machine)
    changes = {s for s, _ in scalars}
    numbers = [v for v in op.inputs if isinstance(v, Scalar)]
    if NODES[type(op)].into is None or any(changes & {*sc.symbols(v)} for v in numbers):
        return lambda slots: put(slots, compute_step(slots))
    may_return = NODES[type(op)].may_return
    into = [outs[o][0] for o in op.outputs]
    buffers = [Lying.of(o, outs[o][1]) for o in op.outputs]
    known = frame.values, frame.storage.unread
    where = (machine or frame.machine).device
    kernels = kernels_of(where) if where.type == "cuda" else None

    def results(slots: Slots) -> list[torch.Tensor]:
        pairs = zip(into, buffers, strict=True)
        return [buffer.make(where) if slots[i] is None else slots[i] for i, buffer in pairs]

    def bind(slots: Slots) -> Closure:
        given = [slots[i] for i in ins]
        call = library_call(op, given, results(slots), known, kernels)
        if call is None:
            return lambda slots: put(slots, compute_step(slots))
        if isinstance(call, Returning):
            keeps = isinstance(op, nodes.LibraryOp) and op.MAKES_RESULTS
            store = _keeping(op, frame, outs) if keeps else put
            if keeps and call.direct is not None:
                return _first_kept(call, ins, (into[0], buffers[0]), store)
            return lambda slots: store(slots, call.make([slots[i] for i in ins]))
        if may_return:
            return lambda slots: _write_all(slots, call, ins, into, results(slots))
        if isinstance(call, WritingOne):
            function, numbers, a, b = call.function, call.numbers, ins[0], into[call.out]
            return lambda slots: function(slots[a], *numbers, out=slots[b])
        if len(ins) == len(into) == 1:
            (a,), (b,) = ins, into
            return lambda slots: call((slots[a],), (slots[b],))
        return lambda slots: call([slots[i] for i in ins], [slots[i] for i in into])

    bound: list[Closure] = []

    def write_results(slots: Slots) -> None:
        if not bound:
            bound.append(bind(slots))
        bound[0](slots)

    return write_results


def _write_all(
    slots: Slots, call: LibraryCall, ins: list[int], into: list[int], made: list[torch.Tensor]
) -> None:
    """Write results, of which some were not made before."""
    call([slots[i] for i in ins], made)
    for i, result in zip(into, made, strict=True):
        slots[i] = result


class Lying(NamedTuple):
    """The memory layout of the buffer of a result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tv: TensorView, like: torch.Tensor) -> Lying:
        return Lying(tuple(like.shape), like.stride(), to_torch(tv.dtype()))

    def make(self, device: torch.device) -> torch.Tensor:
        """Return memory for the result."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_of(self, value: torch.Tensor, ins: Sequence[torch.Tensor]) -> bool:
        """Whether a value lies so, in memory that no operand has."""
        return (
            (tuple(value.shape), value.stride(), value.dtype) == self
            and not (value.is_conj() or value.is_neg() or value.storage_offset())
            and not any(share_storage(value, x) for x in ins)
        )


def _putting(
    op: TensorOp,
    frame: Frame,
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
    ins: Sequence[int],
) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Return what copies values that are read into the tensors of slots; into a slot without a
    tensor it puts the value itself, where that lies as the buffer would."""
    puts = [
        (slot, writer(like), Lying.of(o, like), o not in frame.storage.unread)
        for o, (slot, like) in ((o, outs[o]) for o in op.outputs)
    ]

    def put(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for value, (slot, write_into, buffer, is_read) in zip(values, puts, strict=True):
            if slots[slot] is None:
                if not is_read or buffer.is_of(value, [slots[k] for k in ins]):
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            if is_read:
                write_into(slots[slot], value)

    return put


def _keeping(
    op: TensorOp, frame: Frame, outs: Mapping[TensorView, tuple[int, torch.Tensor]]
) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Return what `_putting` does, for values in memory of their own."""
    read = [
        (k, slot, writer(like), Lying.of(o, like))
        for k, o in enumerate(op.outputs)
        if o not in frame.storage.unread
        for slot, like in [outs[o]]
    ]

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for k, slot, write_into, buffer in read:
            value = values[k]
            if slots[slot] is None:
                if value.stride() == buffer.strides and value.dtype is buffer.dtype:
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            write_into(slots[slot], value)

    return keep


def _first_kept(
    call: Returning,
    ins: Sequence[int],
    into: tuple[int, Lying],
    store: Callable[[Slots, Sequence[torch.Tensor]], None],
) -> Closure:
    """Return what calls `direct` on the tensors of slots and keeps its first result, as `_keeping`
    does, for two operands or more: few steps of the host beside torch's own call."""
    direct, (out, (shape, strides, dtype)) = call.direct, into
    is_dense = strides == torch.empty(shape, device="meta").stride()
    assert direct is not None
    a, b, *more = (ins[place] for place in call.places)

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        first = values[0]
        if is_dense and slots[out] is None and first.stride() != strides:
            # Memory and a copy by one call; itself where only strides of single elements differ.
            first = first.contiguous()
        if slots[out] is None and first.stride() == strides and first.dtype is dtype:
            slots[out] = first
        else:
            store(slots, values)

    if len(more) == 1:
        (c,) = more
        return lambda slots: keep(slots, direct(slots[a], slots[b], slots[c]))
    return lambda slots: keep(slots, direct(slots[a], slots[b], *[slots[i] for i in more]))


def writer(like: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return how values are copied into a tensor of this layout."""
    return write if is_repeated(like) else torch.Tensor.copy_


def _computed(of: Recorder, op: TensorOp) -> Closure:
    compute_step, outs = _computing(of, op), [of.new_slot(o) for o in op.outputs]

    def assign(slots: Slots) -> None:
        for out, value in zip(outs, compute_step(slots), strict=True):
            slots[out] = value

    return assign


def _computing(of: Recorder, op: TensorOp) -> Callable[[Slots], list[torch.Tensor]]:
    return computing(op, of.frame, _tensor_slots(of, op), _scalar_slots(of), of.machine)


def _tensor_slots(of: Recorder, op: TensorOp) -> list[tuple[TensorView, int]]:
    return [(v, of.slot(v)) for v in op.inputs if isinstance(v, TensorView)]


def _scalar_slots(of: Recorder) -> list[tuple[Symbol, int]]:
    return [(s, of.slot(s)) for s in of.free]


def computing(
    op: TensorOp,
    frame: Frame,
    tensors: Sequence[tuple[TensorView, int]],
    scalars: Sequence[tuple[Symbol, int]],
    machine: ExecutionContext | None = None,
) -> Callable[[Slots], list[torch.Tensor]]:
    """Return how torch computes an op on the tensors and scalars of slots; on the machine of the
    frame, or on another."""
    program, storage, values, indices = frame.program, frame.storage, frame.values, frame.indices
    where = machine or frame.machine

    def run(slots: Slots) -> list[torch.Tensor]:
        now = Frame(
            program,
            where,
            storage,
            {**values, **{s: slots[i] for s, i in scalars}},
            {v: slots[i] for v, i in tensors},
            indices=indices,
        )
        return compute(op, now)

    return run


# ----------------------------------------------------------------------
# How later runs of a class read the scalars of a program.


def free_scalars(frame: Frame, free: frozenset[int]) -> tuple[Symbol, ...]:
    """Return the input scalars whose value may change within a class of inputs; `free` has the
    positions of those on which no size depends."""
    inputs = frame.program.inputs
    scalars = ((i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol))
    return tuple(v for i, v in scalars if i in free or not isinstance(frame.values[v], int))


def changes(value: Scalar, free: Sequence[Symbol]) -> bool:
    """Whether a scalar differs between the runs of a class."""
    return any(s in free for s in sc.symbols(value))


def reader(
    value: Scalar, places: Mapping[Symbol, int], free: Sequence[Symbol], frame: Frame
) -> Callable[[Slots], Argument]:
    """Return how to read a scalar; `places` has the slots of the input scalars."""
    if isinstance(value, Symbol) and value in places:
        i = places[value]
        return lambda slots: slots[i]
    if not changes(value, free):
        number = frame.number(value)
        return lambda slots: number
    values, moving = frame.values, {s: places[s] for s in free}

    def evaluate(slots: Slots) -> Argument:
        return sc.evaluate(value, {**values, **{s: slots[i] for s, i in moving.items()}})

    return evaluate


def numbers_reader(
    scalars: Sequence[Scalar], places: Mapping[Symbol, int], free: Sequence[Symbol], frame: Frame
) -> Callable[[Slots], list[Number]] | None:
    """Return how a run reads some scalars; None where they are those of the class."""
    if not any(changes(v, free) for v in scalars):
        return None
    readers = [reader(v, places, free, frame) for v in scalars]
    return lambda slots: [read(slots) for read in readers]  # pyright: ignore[reportReturnType]


# ----------------------------------------------------------------------
# How the communications of whole buffers are repeated.


class Posting(NamedTuple):
    """A communication, and the slots of its buffers (-1 for one that this rank lacks) and of what
    is waited for."""

    call: CommunicationCall
    inp: int
    out: int
    work: int
    stream: int | None

    def post(self, slots: Slots) -> None:
        """Start it as if for the first time."""
        inp, out = self.held(slots)
        slots[self.work] = post(self.call, inp, out)

    def step(self, inp: PostedBuffer, out: PostedBuffer) -> Step:
        """Return the step that starts it on buffers like these, on which it has been started."""
        bound = bind_post(self.call, inp, out)
        if bound is None:
            return Action(self.post)
        return CollectiveStep(bound, self.inp, self.out, self.work, self.stream)

    def held(self, slots: Slots) -> tuple[PostedBuffer, PostedBuffer]:
        """Return the buffers of a run."""
        inp = slots[self.inp] if self.inp >= 0 else None
        return inp, slots[self.out] if self.out >= 0 else None


class FirstPost:
    """Starts a communication, and notes what later runs of the class start it by."""

    def __init__(self, posting: Posting) -> None:
        self._posting = posting
        self.step: Step | None = None

    def run(self, slots: Slots) -> None:
        """Start it on the buffers of a run."""
        posting = self._posting
        posting.post(slots)
        self.step = posting.step(*posting.held(slots))
