"""Records the steps of a host program in a plan, once for inputs of equal shapes and layouts. A
step is a part of an op's work, such as a kernel launch; a plan is the list of steps that later runs
repeat.

The first run on such inputs, or a dry run, carries out the ops once (`hostir.runtime.execute`). The
*recorder* runs each step and records it for later runs. Sizes, strides, teams and launches are then
fixed; only the tensors in the slots (the list of a run's values) change. Intermediates are stored
in an arena, a buffer for all of them (`hostir.runtime.plan`). Every run allocates new tensors for
its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import Protocol

import torch

from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.memory_layout import lies_in_order
from fuser.ir.op import Op
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.types import MemoryType
from fuser.runtime.captured_graphs import MAKERS
from fuser.support.torch_calls import current_device_beside, raw_stream_on
from hostir.analysis.clocks import Clock, Lifetime, StreamOrder
from hostir.ir.ops import Allocate, Deallocate, library_name
from hostir.runtime.execute import (
    Execution,
    Immediate,
    MakeGeneric,
    MakeStep,
    OnlyRunTells,
    as_step,
    for_all_sizes,
)
from hostir.runtime.frame import ExecutionContext, Frame
from hostir.runtime.plan import Arenas, Plan, first_fit
from hostir.runtime.steps import (
    Action,
    Allocation,
    Block,
    Both,
    Closure,
    LaunchStep,
    Make,
    PlannedBuffer,
    Release,
    Slots,
    Step,
    TwoPhaseStep,
    View,
    allocation,
    meets_at,
)
from hostir.runtime.streams import Ready
from multidevice.transports.base.protocol import Backend


class Listener(Protocol):
    """An object to which a `Recorder` reports the recorded steps of each op, for example to build a
    trace from them. A step is a part of an op's work that later runs repeat.
    """

    def on_kept(self, op: Op, steps: Sequence[Step]) -> None:
        """Called after the steps of `op` (the parts of its work that later runs repeat) have been
        recorded. `steps` are these steps; there may be none.

        The last step does the work of the op, and earlier steps prepare that work.
        """
        ...


class Recorder:
    """Runs each step of a program's ops, and also records it in a plan. A step is a part of an op's
    work, such as a kernel launch; later runs repeat the plan without a new pass over the ops.

    The class implements `Receiver`, whose methods `Execution` calls. In a dry run, the steps are
    recorded but do not run.
    """

    def __init__(
        self, frame: Frame, free: frozenset[int], machine: ExecutionContext | None = None
    ) -> None:
        """Prepares a recording of the program of `frame`, the state of the run.

        - `free`: the positions of those scalar inputs on which no size depends. Their values may
          change between the runs that repeat the recorded steps.
        - `machine`: the context in which the recorded steps will run; the default is
          `frame.machine`. A dry run passes `machine`, because the frame of a dry run is for torch's
          `meta` device.
        """
        frame.is_recorded = True
        self.execution = Execution(frame, free, machine, self)
        self._now = Immediate(self.execution)
        self.frame, self.machine = frame, self.execution.machine
        # Objects that are notified of recorded steps.
        self.listeners: list[Listener] = []
        self._requires_grad = any(t.requires_grad for t in frame.tensors.values())
        self._steps: list[tuple[Step, Op | None]] = []
        # For each step, how to make it for other sizes.
        self.generic: list[MakeGeneric | None] = []
        # How many steps listeners have been notified of.
        self._reported = 0
        # By slot, in the order of allocation: the buffers that may be placed in an arena, with
        # their tensors; the clock and the stream at each allocation; and the lifetimes of the
        # buffers that the program deallocates.
        self._blocks: dict[int, tuple[TensorView, Block]] = {}
        self._begins: dict[int, tuple[Clock, Hashable]] = {}
        self._lifetimes: dict[int, Lifetime] = {}
        # Slots of buffers that a step allocates if the buffer is not placed in the arena.
        self._in_steps: set[int] = set()
        # Allocates memory that peers can map, if some buffer of the arena needs it.
        self._symmetric: Callable[[int], torch.Tensor] | None = None
        # By slot, the allocations of buffers that are still used after a run. And the slots of
        # buffers that a library op is the first to use: the op's results may replace these buffers.
        self._made: dict[int, Allocation] = {}
        self._by_steps: set[int] = set()
        # Buffers that are never allocated: torch's results replace them and end within the run.
        self._never_made: dict[int, tuple[TensorView, Block]] = {}
        self._cleared: set[int] = set()
        # The owners of buffers that ops have used so far.
        self._used: set[TensorView] = set()
        self._order = StreamOrder(frame.integer)
        # The backends that communicate, and the first reason why no graph can replay the steps.
        self._backends: list[Backend] = []
        self._why_not = ""
        # The tensors that the plan returns.
        self.outputs: list[TensorView] = []

    def slot(self, value: object) -> int:
        """Returns the position of `value` in the list of a run's values.

        `value` is a tensor, an input scalar, or the key of a communication.
        """
        return self.execution.slot(value)

    def forget_tensors(self) -> None:
        """Drops the tensors of the recorded run, so that the recorded steps do not keep their
        memory.
        """
        self.frame.tensors.clear()
        self.execution.slots.clear()

    # ------------------------------------------------------------ receiving steps
    def carry_out(self, op: Op) -> None:
        """Runs one op of the program, and records the parts of its work (steps) for later runs.

        The steps are also reported to the objects in `listeners`, such as that of a trace.
        """
        self._order.follow(op)
        self._now.carry_out(op)
        if not isinstance(op, Allocate):
            root = self.frame.storage.root
            held = (*op.inputs, *op.outputs)
            self._used.update(root(v) for v in held if isinstance(v, TensorView))
        # The ops inside a region have already reported their steps.
        kept = [step for step, _ in self._steps[self._reported :]]
        self._reported = len(self._steps)
        for listener in self.listeners:
            listener.on_kept(op, kept)

    def _keep(self, step: Step | Closure, generic: MakeGeneric | None = None) -> None:
        self._steps.append((as_step(step), self.frame.op))
        self.generic.append(generic)

    def enqueue(
        self,
        make: MakeStep,
        *,
        generic: MakeGeneric | None = None,
        after: Closure | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Makes a step, a part of an op's work, runs it except in a dry run, and records it for
        later runs.

        Some steps differ between the first run and later runs; they are recorded in the form for
        later runs. See `Receiver.enqueue` for the parameters.
        """
        made, execution = make(), self.execution
        if not execution.is_dry:
            self._now.take(made, after, ready)
        kept = made.make_later(execution.slots) if isinstance(made, TwoPhaseStep) else as_step(made)
        self._keep(kept if after is None else Both(kept, Action(after)), generic)

    def run_now(self, run: Closure) -> None:
        """Calls `run` on the list of this run's values, and records `run` as a step for later runs.

        In a dry run, `run` is only recorded.
        """
        self._now.run_now(run)
        self._keep(run)

    def name(self, out: TensorView, view: View, generic: MakeGeneric | None = None) -> None:
        """Makes the torch view `view` as the tensor of `out`, and records this for later runs."""
        self._now.name(out, view)
        self._keep(view, generic)

    def allocate(
        self, tv: TensorView, slot: int, shape: tuple[int, ...], *, is_cleared: bool
    ) -> None:
        """Allocates the buffer of `tv` for this run, and records how later runs allocate it. If
        `is_cleared`, the elements are set to zero.

        `finish` decides later whether the buffer is in the arena (the memory of intermediates), so
        that runs need not allocate it. For this decision, the buffer's layout and the time of its
        allocation are recorded. Any other buffer is allocated at the beginning of each run. But it
        is allocated by a step of its own if its memory depends on the stream, the loop iteration or
        other ranks.
        """
        self._now.allocate(tv, slot, shape, is_cleared=is_cleared)
        made, clear = self.frame.tensors[tv], _clearing(slot) if is_cleared else None
        block = Block(slot, tuple(made.shape), made.stride(), made.dtype)
        if is_cleared:
            self._cleared.add(slot)
        is_mapped = tv.memory is MemoryType.symmetric
        if is_mapped and tv in self.frame.storage.shown:
            shard = allocation(tv, block, self.machine, self.frame.program, self.machine.shard)
            self._keep(shard.run if clear is None else Both(Action(shard.run), Action(clear)))
            return
        self._blocks[slot] = tv, block
        self._begins[slot] = self._order.now(), self._order.clocks.current
        if self.frame.indices or is_mapped or self.execution.stream is not None:
            # Torch reuses freed memory on the stream on which it was allocated.
            self._in_steps.add(slot)
            step = Make(slot, self._make(tv, block).run)
            self._keep(step if clear is None else Both(step, Action(clear)))
        elif clear is not None:
            self._keep(clear, for_all_sizes(clear))

    def deallocate(self, tv: TensorView) -> None:
        """Drops the buffer of `tv`, and records that the buffer is not used from now on.

        Its bytes in the arena, the memory of intermediates, can then be used for another buffer.
        """
        i, view = self.slot(tv), self.frame.storage.views.get(tv)
        self._now.deallocate(tv)
        if view is not None:
            self._keep(Both(meets_at(view, self.machine), Release(i)))
            return
        if i in self._blocks:
            begin, stream = self._begins[i]
            self._lifetimes[i] = Lifetime(begin, self._order.moment(stream))
        is_made_before = i in self._blocks and i not in self._in_steps
        if not is_made_before or i in self._by_steps:
            self._keep(Release(i), for_all_sizes(Release(i)))

    def results(self, op: TensorOp, found: list[torch.Tensor]) -> None:
        """Stores torch's results `found` as the outputs of `op`, and records that later runs
        compute `op` again.

        Raises `OnlyRunTells` in a dry run, because only torch can choose the strides of these
        results.
        """
        execution = self.execution
        if execution.is_dry:
            raise OnlyRunTells
        compute_step = execution.computing(op)
        self._now.results(op, found)
        outs = [execution.slot(o) for o in op.outputs]

        def assign(slots: Slots) -> None:
            for out, value in zip(outs, compute_step(slots), strict=True):
                slots[out] = value

        self._keep(assign)

    def keep_out_of_graphs(self, why: str) -> None:
        """Records that no CUDA graph can repeat the recorded steps, and the reason `why` for a
        report.

        If there are several reasons, the first is kept.
        """
        self._why_not = self._why_not or why

    def backend(self, name: str, op: Op, what: str) -> Backend:
        """Returns the backend `name` for the communication `op`, and records that later runs use
        it.

        `what` is the kind of communication, such as "Allreduce". If the backend cannot carry out
        such communications in a CUDA graph, records that no graph can repeat the run.
        """
        found = self._now.backend(name, op, what)
        if found not in self._backends:
            self._backends.append(found)
        if not found.can_capture(what):
            self.keep_out_of_graphs(
                f"{op.name} over {library_name(found.name)} needs the host in each run"
            )
        return found

    def may_make_results(self, op: TensorOp) -> None:
        """Records which output buffers of `op` later runs need not allocate, because torch returns
        the results as new tensors.

        An allocation is only unnecessary if `op` is the first op to use the buffer, on the stream
        on which runs begin. If torch always makes new tensors for `op`, a buffer that the program
        deallocates gets no place in the memory of intermediates, either.
        """
        storage, is_all_own = self.frame.storage, isinstance(op, LibraryOp) and op.MAKES_RESULTS
        for out in op.outputs:
            i, is_plain = self.slot(out), out.memory is not MemoryType.symmetric
            is_own = i in self._blocks and i not in self._in_steps and out not in self._used
            if not (is_own and is_plain) or self.execution.switches_streams or i in self._cleared:
                continue
            self._by_steps.add(i)
            is_named = out in storage.shows or out in storage.unread
            if is_all_own and not (is_named or storage.escapes(out)):
                self._never_made[i] = self._blocks.pop(i)

    # ------------------------------------------------------------ the plan
    def _keep_for_outputs(self, run: Closure) -> None:
        self._steps.append((Action(run), None))
        self.generic.append(None)

    def finish(self, outputs: list[TensorView], arenas: Arenas) -> Plan:
        """Returns the plan, the recorded steps, after all ops have been recorded. A run of the plan
        returns the tensors `outputs`.

        Call this method once, after all ops. `arenas` manages the memory of the plan's
        intermediates.
        """
        self.outputs = outputs
        device = self.machine.device.type
        if device not in MAKERS:
            self.keep_out_of_graphs(f"the device {device} has no graphs")
        for tv in outputs:
            if not self.frame.is_mine(tv):
                self._keep_for_outputs(self._absent(tv))
            elif tv in self.frame.storage.borrowed:
                self._keep_for_outputs(self._copy(tv))
        # A CUDA graph always writes to the same memory, so results cannot replace its buffers.
        blocks, nbytes = self._place(self._by_steps if arenas.why_not or self._why_not else ())
        lasting = self._blocks.keys() - self._lifetimes.keys() - self._in_steps
        self._made.update({i: self._make(*self._blocks[i]) for i in sorted(lasting)})
        results = tuple(self._result(tv) for tv in outputs)
        return Plan(
            self._made,
            tuple(self._steps),
            len(self.frame.program.inputs),
            len(self.execution.slots),
            results,
            frozenset(self._by_steps & lasting),
            blocks,
            nbytes,
            self._symmetric,
            self.machine.device,
            self._requires_grad and not all(map(_leaves_gradients_alone, self._steps)),
            self.machine.streams if self.execution.switches_streams else None,
            arenas,
            raw_stream_on(self.machine.device),
            current_device_beside(self.machine.device),
            tuple(self._backends),
            self.machine.vote,
            arenas.why_not or self._why_not,
            self.frame.program,
        )

    def _place(self, left: Container[int]) -> tuple[tuple[Block, ...], int]:
        """Chooses an offset in the arena, the memory of a run's intermediates, for each buffer that
        the program deallocates.

        Returns (buffers with offsets, bytes of the arena). Two kinds of buffers get no offset:

        - Buffers whose position in the list of a run's values is in `left`, because new tensors of
          torch replace them.
        - Buffers that work on other streams may use before the run's first work, or after its last
          work, on the stream on which runs begin. The next run on that stream uses the same arena.
        """
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
        """Returns the buffers that the program allocates, in order of allocation.

        Buffers that later runs never allocate, because torch's results replace them, are last.
        """
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
        """Returns the step by which each run allocates the buffer of `tv`, if the buffer is not in
        the arena, the memory that runs share for intermediates.

        `block` describes the buffer.
        """
        return allocation(tv, block, self.machine, self.frame.program)

    def _absent(self, tv: TensorView) -> Closure:
        i = self.slot(tv)
        nothing = torch.empty(0, dtype=to_torch(tv.dtype()), device=self.machine.device)

        def absent(slots: Slots) -> None:
            slots[i] = nothing

        return absent

    def _result(self, tv: TensorView) -> int:
        """Returns the position of the output `tv` in the list of a run's values.

        If later runs return a copy of `tv`, because `tv` is in the memory of an input, returns the
        position of the copy.
        """
        copy = "copy", tv
        return self.slot(copy if self.execution.has_slot(copy) else tv)

    def _copy(self, tv: TensorView) -> Closure:
        i, o = self.slot(tv), self.slot(("copy", tv))
        like = torch.empty_like(self.frame.tensors[tv], device="meta")
        block = Block(o, tuple(like.shape), like.stride(), like.dtype)
        self._made[o] = self._make(tv, block)
        return lambda slots: slots[o].copy_(slots[i])


def _clearing(slot: int) -> Closure:
    def clear(slots: Slots) -> None:
        slots[slot].zero_()

    return clear


def _leaves_gradients_alone(step: tuple[Step, Op | None]) -> bool:
    """Whether a recorded step, given with its op, only launches a kernel or manages memory.

    Torch's autograd does not see such a step, so torch records no gradient for it.
    """
    return isinstance(step[0], LaunchStep) or isinstance(step[1], Allocate | Deallocate)
