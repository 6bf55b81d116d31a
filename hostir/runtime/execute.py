"""Carries out a host program: each op emits steps, and a receiver runs or records them.

A step is a part of an op's work that later runs can repeat, such as a kernel launch. An op's `emit`
calls methods of an `Execution`, which implements `hostir.ir.ops.base.Runtime` for one pass over a
program. The execution evaluates names, sizes and peers immediately. Steps work on *slots*:
positions in the list of a run's tensors and other values.

    op.emit(execution) -> step over slots -> receiver

A receiver decides what happens with a step:

- `Immediate` runs the step.
- `hostir.runtime.recorder.Recorder` runs the step and also records it in a plan for later runs.

In a dry run the tensors have no contents. Steps are then made and recorded, but do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.autograd import profiler as torch_profiler

from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op, walk
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.kernels.executor import FusedKernelExecutor
from fuser.ops.reference.meaning import NODES
from fuser.support.device import VECTOR_BYTES
from fuser.support.errors import DefinitionError, ExecutionError, FuserError, user_code
from fuser.support.torch_calls import raw_stream_on
from hostir.ir.effects import Part, Stream
from hostir.ir.ops import (
    CollectivePermute,
    Communication,
    EndCoalescing,
    HostOp,
    LaunchKernel,
    P2PCommunication,
    PostOnStream,
    ShardByStream,
    StartsCommunication,
    SymmetricContiguousView,
)
from hostir.ir.ops.base import LocalShapes
from hostir.ir.shard_layout import share_storage, viewed_strides, write
from hostir.lowering.slices import Dropped, dropped_axes
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
from hostir.runtime.frame import ExecutionContext, Frame, new_buffer, op_failed
from hostir.runtime.inputs import Argument
from hostir.runtime.steps import (
    Action,
    Binding,
    Block,
    Closure,
    CollectiveStep,
    ExchangeStep,
    LaunchStep,
    Multiply,
    Slots,
    Step,
    TwoPhaseStep,
    View,
    allocation,
    announcer,
    collective_text,
    meet_at,
    range_of,
    shows_shards,
    without_gradient,
)
from hostir.runtime.streams import Handle, Ready, raw_handle
from hostir.runtime.torch_ops import (
    VIEWS,
    compute,
    computing,
    contraction,
    view_of,
    writer,
    writing,
    writing_at_once,
)
from multidevice.coordination.bounded_wait import Team
from multidevice.sharding.queries import local_extents
from multidevice.transports.base.protocol import Backend, Transfer

_META = torch.device("meta")
MakeStep = Callable[[], Step | Closure]
# A send or a receive: op, slot, peer, and the backend's transfer for this run.
Half = tuple[P2PCommunication, int, int, Transfer]


class OnlyRunTells(Exception):
    """Raised during a dry run, if an op's result has strides that only torch can choose.

    A dry run follows a program on tensors without contents, so it cannot call torch. A real run
    must record the program's steps instead.
    """


def as_step(made: Step | Closure) -> Step:
    """Returns `made` as a step, an object that a run can carry out: a plain function is wrapped in
    an `Action`.
    """
    return Action(made) if callable(made) else made


class InputSizes(Protocol):
    """The sizes and the tensor layouts of one set of inputs, from which a step is made. A step is a
    part of an op's work that later runs can repeat, such as a kernel launch.

    A function that makes a step takes this interface instead of an `Execution`. The same function
    can then make the step for new inputs that have other sizes.
    """

    @property
    def frame(self) -> Frame:
        """The state of the run. It has the values of input scalars, and computes the shapes of this
        rank's parts of tensors.
        """
        ...

    def like(self, slot: int) -> torch.Tensor:
        """Returns a tensor with the shape, strides and dtype of the tensor in `slot`, a position in
        the list of a run's values.

        The elements of the returned tensor do not matter.
        """
        ...

    def shape(self, tv: TensorView, slot: int) -> tuple[int, ...]:
        """Returns the shape of this rank's shard (part) of `tv`. A run stores the tensor in `slot`,
        a position in its list of values.
        """
        ...


# A step for any sizes: the slots on whose layouts it depends, and the function that makes it for
# given sizes. The function returns None for sizes that may need another step.
GenericStep = tuple[tuple[int, ...], Callable[[InputSizes], Step | Closure | None]]
MakeGeneric = Callable[[], GenericStep | None]


def for_all_sizes(step: Step | Closure) -> MakeGeneric:
    """Returns the function `generic` (see `Receiver.enqueue`) for a recorded step that does not
    depend on the sizes of inputs. Plans for other sizes then use `step` itself.
    """
    return lambda: ((), lambda sizes: step)


class Receiver(Protocol):
    """The interface of the object that decides what happens with the steps of a program's ops: it
    runs or records them. A step is a part of an op's work, such as a kernel launch.

    `Immediate` runs each step at once. `Recorder` also records each step in a plan, so that later
    runs can repeat the steps without a new pass over the ops.
    """

    def carry_out(self, op: Op) -> None:
        """Processes one op of the program: calls `Execution.emit`, which makes the op's steps and
        passes each of them back to this object. This object then runs or records the step.
        """
        ...

    def enqueue(
        self,
        make: MakeStep,
        *,
        generic: MakeGeneric | None = None,
        after: Closure | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Takes a step, a part of the current op's work, that is to run on the current stream. This
        object runs or records the step.

        - `make`: a function that makes the step. A dry run that records nothing does not call
          `make`.
        - `generic`: returns a function that makes the step for inputs of other sizes.
        - `after`: a function that the host calls right after the step has been enqueued.
        - `ready`: returns whether the step can run without waiting for another rank.
        """
        ...

    def run_now(self, run: Closure) -> None:
        """Takes a function that the host calls at once, not in the order of a stream, and runs or
        records it. A switch to another stream is an example.
        """
        ...

    def name(self, out: TensorView, view: View, generic: MakeGeneric | None = None) -> None:
        """Makes tensor `out` a view of another tensor, so that it needs no memory.

        `view` has the positions of both tensors in the list of a run's values, the shape, the
        strides and the offset. `generic` returns a function that makes the view for inputs of other
        sizes.
        """
        ...

    def allocate(
        self, tv: TensorView, slot: int, shape: tuple[int, ...], *, is_cleared: bool
    ) -> None:
        """Allocates a buffer for this rank's shard (part) of `tv`, or records that later runs
        allocate it.

        `shape` is the shape of the shard. The buffer's tensor is stored in `slot`, a position in
        the list of a run's values. If `is_cleared`, the elements are set to zero.
        """
        ...

    def deallocate(self, tv: TensorView) -> None:
        """Frees the memory of `tv`, which no later op of the program uses, or records that later
        runs free it.

        `tv` is a buffer, or a view of the parts (shards) of a tensor that several ranks store. For
        such a view, the ranks wait for one another before the view ends, because each of them reads
        the parts of the others.
        """
        ...

    def results(self, op: TensorOp, found: list[torch.Tensor]) -> None:
        """Stores `found`, the results of `op` that torch has computed in new memory, as the outputs
        of `op` in this run.

        If this object records the run, so that later runs can repeat it, it also records that they
        compute `op` again.
        """
        ...

    def may_make_results(self, op: TensorOp) -> None:
        """Tells this object that torch may return the results of `op` as new tensors, although the
        program allocates buffers for them.

        If this object records the run, later runs may then use these tensors and not allocate the
        buffers.
        """
        ...

    def backend(self, name: str, op: Op, what: str) -> Backend:
        """Returns the backend that carries out the communication `op`, such as NCCL or gloo.

        `name` is the backend's name. `what` is the kind of communication, such as "Allreduce"; an
        object that records the run needs it to decide whether CUDA graphs can contain the
        communication.
        """
        ...

    def keep_out_of_graphs(self, why: str) -> None:
        """Tells this object that no CUDA graph can repeat this run. `why` is the reason, for a
        report.
        """
        ...


class Execution:
    """One pass over a host program. It turns each op into steps (such as a kernel launch) and
    passes them to a receiver, which runs or records them.

    The class implements `hostir.ir.ops.base.Runtime`, the interface that ops call. An execution
    knows the slot of each value, the current stream, and the open group of sends and receives. A
    slot is a position in the list `slots`, which holds the tensors and other values of a run. Each
    slot is assigned once: a loop that allocates a tensor uses a new slot in each loop iteration.
    """

    def __init__(
        self,
        frame: Frame,
        free: frozenset[int] = frozenset(),
        machine: ExecutionContext | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        """Prepares a pass over the program of `frame`, the state of the run. The pass turns ops
        into steps, parts of their work such as kernel launches.

        - `free`: the positions of those input scalars on which no size depends. Their values may
          change between the runs that repeat the steps.
        - `machine`: the context in which the steps will run. The default is the context of `frame`.
          A dry run passes another one, because its frame has tensors without contents.
        - `receiver`: runs or records the steps. The default runs each step at once.
        """
        self.frame = frame
        self.machine = frame.machine if machine is None else machine
        self.rank, self.team = self.machine.rank, self.machine.team
        inputs = frame.program.inputs
        self._slot: dict[object, int] = {v: i for i, v in enumerate(inputs)}
        self.slots: Slots = [
            frame.tensors.get(v)
            if isinstance(v, TensorView)
            else frame.values.get(cast("Symbol", v))
            for v in inputs
        ]
        # Slots that two tensors share: the end of one tensor must not clear the slot.
        self._aliased_slots: set[int] = set()
        # The slots of the input scalars, and the input scalars whose value may change between
        # runs that share a plan.
        self.places = {v: i for i, v in enumerate(inputs) if isinstance(v, Symbol)}
        self.free_positions, self.free_symbols = free, free_scalars(frame, free)
        self.free_slots = tuple((s, self.places[s]) for s in self.free_symbols)
        self.is_dry = frame.machine.device == _META
        self.holds_work_back = frame.machine.streams.holds_work_back
        self.switches_streams = frame.storage.switches_streams
        # The current stream, and the streams that the program captured. None stands for the stream
        # on which the run began.
        self.stream: Handle | None = None
        self._captured: dict[str, Handle | None] = {}
        # The sends and receives since StartCoalescing; None outside.
        self._group: list[Half] | None = None
        # For streams that delay work: by the slot of a communication, pairs (result, temporary
        # buffer that receives the result). `_alone` has the slots of sends and receives outside a
        # group: their peer may wait for work that other streams of this rank have still to post.
        self._landed: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._alone: set[int] = set()
        self._receiver: Receiver = Immediate(self) if receiver is None else receiver

    # ------------------------------------------------------------ names
    def slot(self, value: object) -> int:
        """Returns the slot of `value`: its position in the list of a run's values.

        `value` is a tensor, an input scalar, or a key such as `("work", 3)` for communication 3. A
        value that has no slot gets a new slot.
        """
        i = self._slot.get(value)
        if i is None:
            i = self.new_slot(value)
            if isinstance(value, TensorView):
                self.slots[i] = self.frame.tensors.get(value)
        return i

    def new_slot(self, value: object) -> int:
        """Gives `value` a new slot, a position in the list of a run's values, and returns it.

        If `value` had a slot before, the tensor in the old slot is dropped. The tensor stays in the
        old slot if delayed work (in a test mode) or another tensor still uses the slot.
        """
        slots, before = self.slots, self._slot.get(value)
        if before is not None and not self.holds_work_back and before not in self._aliased_slots:
            slots[before] = None
        i = self._slot[value] = len(slots)
        slots.append(None)
        return i

    def empty(self, slot: int) -> None:
        """Drops the tensor in `slot`, so that its memory can be freed. A slot is a position in the
        list of the run's values.

        The tensor stays in `slot` if delayed work (in a test mode) or another tensor still uses the
        slot.
        """
        if not self.holds_work_back and slot not in self._aliased_slots:
            self.slots[slot] = None

    def has_slot(self, value: object) -> bool:
        """Whether `value` already has a slot in the list of the run's values."""
        return value in self._slot

    def argument(self, value: TensorView | Scalar) -> Callable[[Slots], Argument]:
        """Returns a function that reads an op's operand from the list of a run's values. The
        function serves the first run and all runs that repeat the recorded steps.

        A tensor is read from its slot, a position in the list. A scalar is computed from the input
        scalars of that run.
        """
        if isinstance(value, TensorView):
            i = self.slot(value)
            return lambda slots: slots[i]
        return reader(value, self.places, self.free_symbols, self.frame)

    def like(self, slot: int) -> torch.Tensor:
        """Returns the tensor that this pass over the program has stored in `slot`, a position in
        its list of values.

        Implements `InputSizes.like`. The caller makes a step of a run from the tensor's shape,
        strides and dtype, and does not read its elements.
        """
        return self.slots[slot]

    def shape(self, tv: TensorView, slot: int) -> tuple[int, ...]:
        """Returns the shape of this rank's shard of `tv` (the part that it stores), for the sizes
        of the present inputs. `slot` is ignored.
        """
        return self.frame.local_shape(tv)

    def is_named(self, tv: TensorView) -> bool:
        """Whether `tv` is only a name for memory that it does not own.

        Such a tensor is a part of another tensor, or is stored in a buffer of the caller.
        """
        return tv in self.frame.storage.named

    def number(self, x: Scalar) -> Number:
        """Returns the value of the scalar `x` for the present inputs and loop indices.

        The value is read once, when the current op makes its steps. The recorded steps are repeated
        only in runs with the same value. Raises `DefinitionError` if the class of the op has
        declared the opposite by `HAS_CONTROL_SCALARS = False`: that no scalar decides what the op
        does.
        """
        op = self.frame.op
        if isinstance(op, HostOp) and not op.HAS_CONTROL_SCALARS:
            raise DefinitionError(
                f"{op.name}: its emit reads the scalar {x} once, for all later runs, but "
                "HAS_CONTROL_SCALARS = False declares that no scalar decides what the op does. "
                "Pass the scalar to rt.call, which reads it in each run, or remove "
                "HAS_CONTROL_SCALARS = False"
                f"{user_code(op.where)}"
            )
        return self.frame.number(x)

    def integer(self, x: Scalar) -> int:
        """Returns the value of the integer scalar `x` for the present inputs and loop indices.
        Raises `DefinitionError` in the same case as `number`.
        """
        return int(self.number(x))

    # ------------------------------------------------------------ control flow
    def run(self, ops: Sequence[Op]) -> None:
        """Carries out `ops` in order, without the ops that concern only other ranks.

        `ops` is the whole program, the body of a loop, or a branch. Carrying out an op means that
        its steps are run or recorded. If torch fails, raises `ExecutionError` with the op and the
        user's source line.
        """
        frame, carry_out = self.frame, self.carry_out
        # In a program without meshes, every op concerns this rank.
        is_idle = frame.is_idle if frame.storage.is_placed else None
        for op in ops:
            if is_idle is None or not is_idle(op):
                carry_out(op)

    def carry_out(self, op: Op) -> None:
        """Passes one op to the receiver, the object that runs or records its work. An error of
        torch becomes an `ExecutionError` that names the op and the user's source line.
        """
        self.frame.op = op
        try:
            if torch_profiler._is_profiler_enabled and not self.is_dry:  # pyright: ignore[reportPrivateUsage]
                with range_of(op, self.frame.program):
                    self._receiver.carry_out(op)
            else:
                self._receiver.carry_out(op)
        except (FuserError, OnlyRunTells):
            raise
        except Exception as error:  # torch raises errors of every kind
            raise op_failed(op, error) from error

    def emit(self, op: Op) -> None:
        """Makes the steps of `op`, the parts of its work, and passes them to the receiver, which
        runs or records them.

        A host op makes its steps itself, in its `emit` method. For a tensor op of a fusion, the
        step lets torch compute the results.
        """
        if isinstance(op, HostOp):
            op.emit(self)
        else:
            assert isinstance(op, TensorOp), f"{op.name} does not say how it runs"
            self._compute(op)

    def run_loop(self, index: Symbol, steps: range, body: Sequence[Op]) -> None:
        """Carries out the ops in a loop's `body` once for each `index` in the range `steps`.

        A dry run only looks for the needed kernels. It therefore skips loop iterations that need
        the same kernels as earlier ones.
        """
        if self.is_dry and not any(isinstance(op, ShardByStream) for op in walk(body)):
            # A few iterations show all kernels. Without `ShardByStream`, iterations differ only in
            # the alignments of tensor parts. The alignments repeat after VECTOR_BYTES iterations.
            steps = steps[:VECTOR_BYTES]
        with self.frame.with_index(index) as bind:
            for i in steps:
                bind(i)
                self.run(body)

    # ------------------------------------------------------------ buffers and names
    def allocate(self, tv: TensorView, stream_index: Scalar | None, *, is_cleared: bool) -> None:
        """Allocates a buffer for this rank's shard of `tv`, the part that it stores, or records the
        allocation for later runs.

        If `stream_index` is given, a loop computes the shard block by block, and the buffer only
        has room for the block of iteration `stream_index`. If `is_cleared`, the elements are set to
        zero.
        """
        shape = self.frame.local_shape(tv, stream_index)
        self._receiver.allocate(tv, self.new_slot(tv), shape, is_cleared=is_cleared)

    def deallocate(self, tv: TensorView) -> None:
        """Frees the buffer of `tv`, or records that later runs free it.

        If `tv` is a view of the parts (shards) of a tensor on all ranks, ends the view instead,
        after all ranks have finished with it.
        """
        self._receiver.deallocate(tv)

    def name_part(self, out: TensorView, inp: TensorView, part: Part | None) -> None:
        """Defines `out` as a view of `inp`: one element or one chunk along an axis.

        `part` has the axis, the index and the number of chunks. If `part` is None, `out` is a view
        of all elements of `inp`. No data moves.
        """
        i = self.slot(inp)
        source: torch.Tensor = self.slots[i]
        shape, strides, shift = tuple(source.shape), source.stride(), 0
        if part is not None:
            op, axis = self.frame.op, part.axis
            assert op is not None, f"{out} is named by no op"
            start, length = self.frame.part(op, source, part)
            shift = start * strides[axis]
            if part.chunks is None:
                shape = (*shape[:axis], *shape[axis + 1 :])
                strides = (*strides[:axis], *strides[axis + 1 :])
            else:
                shape = (*shape[:axis], length, *shape[axis + 1 :])
        view = View(i, self.new_slot(out), shape, strides, shift, source.element_size())
        self._receiver.name(out, view)

    def name_as_shaped(self, out: TensorView, inp: TensorView) -> None:
        """Defines `out` as a view of all elements of `inp`, with the local shape of `out`.

        `inp` must be dense in memory.
        """
        self._name_as(out, inp, self.frame.tensors[inp].view(self.frame.local_shape(out)))

    def _name_as(self, out: TensorView, inp: TensorView, seen: torch.Tensor) -> None:
        """Defines `out` as a view of `inp`. The torch tensor `seen`, which is a view of the tensor
        of `inp`, shows the shape, the strides and the first element of the view.
        """
        i = self.slot(inp)
        shift = int(seen.storage_offset()) - int(self.slots[i].storage_offset())
        shape, strides, itemsize = tuple(seen.shape), seen.stride(), seen.element_size()
        self._receiver.name(out, View(i, self.new_slot(out), shape, strides, shift, itemsize))

    def show_shards(self, op: SymmetricContiguousView) -> None:
        """Maps the shards of all ranks (the parts that they store) into this process as one tensor,
        the result of `op`.

        Every rank must call this method, and waits until the others have called it.
        """
        frame, machine, shape = self.frame, self.machine, self.frame.local_shape(op.out)
        i, o = self.slot(op.inp), self.new_slot(op.out)
        if self.is_dry:
            self.slots[o] = frame.tensors[op.inp].new_empty(shape)
        self._receiver.keep_out_of_graphs(f"the ranks wait for one another in each {op.name}")
        self._receiver.run_now(shows_shards(op, machine, i, o, shape).run)
        frame.tensors[op.out] = self.slots[o]
        if self.holds_work_back:
            # Delayed work of this stream must be done before other ranks read this rank's shard.
            self._receiver.enqueue(lambda: lambda slots: meet_at(op, machine))

    # ------------------------------------------------------------ work on the current stream
    def call(self, work: Callable[..., object], *operands: TensorView | Scalar) -> None:
        """Enqueues a call of the function `work` on the current stream.

        `work` is called in this run and in each later run that repeats the recorded steps. It
        receives the tensors and numbers that `operands` have in that run.
        """
        reads = [self.argument(v) for v in operands]

        def call(slots: Slots) -> None:
            work(*[read(slots) for read in reads])

        # `read` may have fixed the number of a scalar for all runs of this plan.
        has_numbers = any(isinstance(v, Scalar) for v in operands)
        self._receiver.enqueue(lambda: call, generic=None if has_numbers else for_all_sizes(call))

    def copy_part(
        self,
        out: TensorView,
        inp: TensorView,
        axis: int,
        bounds: Callable[[LocalShapes], tuple[int, int]],
    ) -> None:
        """Enqueues, on the current stream, a copy of a part of `inp` into the whole of `out`.

        The part is a range of indices along the axis number `axis`. `bounds` computes (start,
        length) of the range from the shapes of this rank's shards (the parts of tensors that it
        stores).
        """
        i, o = self.slot(inp), self.slot(out)

        def make(sizes: InputSizes) -> Closure:
            return copying(sizes.like(o), (i, o), axis, bounds(sizes.frame))

        self._receiver.enqueue(lambda: make(self), generic=lambda: ((i, o), make))

    def launch(self, op: LaunchKernel) -> None:
        """Enqueues a launch of the kernel with the number `op.group` on the current stream."""
        frame = self.frame
        for out in op.outs:
            if out not in frame.tensors:
                # An in-place output shares the slot of the input that the output overwrites.
                into = frame.alias_target(out)
                i = self._slot[out] = self.slot(into)
                self._aliased_slots.add(i)
                frame.tensors[out] = frame.tensors[into]
        ins: list[Any] = [frame.operand(v) for v in op.ins]
        outs = [frame.tensors[o] for o in op.outs]
        _drop_axes((ins, outs), dropped_axes(op, frame.program))
        # In a dry run, this only notes which kernel is needed.
        work = frame.machine.launch(op.group, ins, outs, frame.sizes)
        self._receiver.enqueue(
            lambda: TwoPhaseStep(
                lambda slots: work(), lambda slots: self._launch_step(op, ins, outs)
            ),
            generic=lambda: self._generic_launch(op),
        )

    def _launch_step(
        self, op: LaunchKernel, given: list[Argument], results: list[torch.Tensor]
    ) -> Step:
        """Returns the step that launches the kernel of `op` in later runs, which repeat the first
        run.

        `given` and `results` are the operands and results of the first run. Later runs have tensors
        of equal shapes, strides and alignments, so the compiled kernel and its launch sizes are
        looked up once, here. If the executor says that they differ between runs, the returned step
        looks them up in each run.
        """
        frame, sizes, runner = self.frame, self.frame.sizes, self.machine.runner(op.group)
        device = self.machine.device if self.is_dry else None
        kernel = runner.launch_for(given, results, sizes=sizes, device=device)
        if kernel is not None:
            operands = tuple(self.slot(v) for v in (*op.ins, *op.outs) if isinstance(v, TensorView))
            numbers = tuple(x for x in given if not isinstance(x, torch.Tensor))
            scalars = [v for v in op.ins if isinstance(v, Scalar)]
            read = numbers_reader(scalars, self.places, self.free_symbols, frame)
            return LaunchStep(kernel, operands, numbers, read, raw_handle(self.stream))
        self._receiver.keep_out_of_graphs(
            f"the launch of kernel group {op.group} is looked up in each run"
        )
        run, dropped = runner.run, dropped_axes(op, frame.program)
        ins, outs = [self.argument(v) for v in op.ins], [self.slot(o) for o in op.outs]

        def launch(slots: Slots) -> None:
            operands: list[Any] = [get(slots) for get in ins]
            made = [slots[o] for o in outs]
            _drop_axes((operands, made), dropped)
            run(operands, made, sizes=sizes)

        return Action(launch)

    def _generic_launch(self, op: LaunchKernel) -> GenericStep | None:
        """Returns (slots, function): the function makes the kernel launch of `op` for inputs of
        other sizes, from the layouts of the tensors in `slots`.

        A slot is a position in the list of a run's values. Returns None if the launch must be made
        from real tensors. This is so if some tensors lack axes of the kernel, or if the kernel runs
        once per iteration of a loop, on parts of tensors.
        """
        runner, device = self.machine.runner(op.group), self.machine.device
        if not isinstance(runner, FusedKernelExecutor) or any(dropped_axes(op, self.frame.program)):
            return None
        tensors = [v for v in (*op.ins, *op.outs) if isinstance(v, TensorView)]
        operands = tuple(self.slot(v) for v in tensors)
        scalars = [v for v in op.ins if isinstance(v, Scalar)]
        are_sized = runner.sizes_fit([local_shape_of(tv) for tv in tensors])
        places, free, stream = self.places, self.free_symbols, raw_handle(self.stream)

        def make(sizes: InputSizes) -> LaunchStep | None:
            laid, frame = (
                cast("list[StridedLayout]", [sizes.like(slot) for slot in operands]),
                sizes.frame,
            )
            numbers = tuple([frame.number(v) for v in scalars]) if scalars else ()
            kernel = runner.launch_laid(laid, frame.sizes, device, numbers, are_sized=are_sized)
            if kernel is None:
                return None
            read = numbers_reader(scalars, places, free, frame) if scalars else None
            return LaunchStep(kernel, operands, numbers, read, stream)

        return operands, make

    def run_unit(self, op: PostOnStream) -> None:
        """Enqueues a run of `op.unit`, a fusion that is compiled to a separate host program, on the
        current stream.

        Results of `op` without a buffer get one now, for this run. In later runs, which repeat the
        recorded steps, the step allocates them before the separate program runs.
        """
        frame, machine = self.frame, self.machine
        makes: list[Closure] = []
        for out in op.outs:
            if out not in frame.tensors:
                shape, symmetric = frame.local_shape(out), frame.symmetric(out)
                device, i = frame.machine.device, self.new_slot(out)
                made = new_buffer(frame.program, out, shape, device, symmetric)
                self.slots[i] = frame.tensors[out] = made
            if out not in frame.storage.buffered:
                like = frame.tensors[out]
                block = Block(self.slot(out), tuple(like.shape), like.stride(), like.dtype)
                makes.append(allocation(out, block, machine, frame.program).run)
        ins, outs = [self.argument(v) for v in op.ins], [self.slot(o) for o in op.outs]
        self._receiver.keep_out_of_graphs(f"{op.name} runs a separate host program")

        def make() -> TwoPhaseStep:
            unit = machine.unit(op.unit)

            def run(slots: Slots) -> None:
                unit([get(slots) for get in ins], [slots[i] for i in outs])

            def make_and_run(slots: Slots) -> None:
                for make in makes:
                    make(slots)
                run(slots)

            return TwoPhaseStep(run, lambda slots: Action(make_and_run))

        self._receiver.enqueue(make)

    def _compute(self, op: TensorOp) -> None:
        """Makes the step (a part of a run that later runs repeat) in which torch computes the
        tensor op `op`.

        There are three cases. If the outputs have buffers, torch computes into the buffers. If the
        result shares memory with the operand, the output becomes a view. Otherwise, the output is a
        new tensor of torch.
        """
        frame, receiver = self.frame, self._receiver
        if isinstance(op, nodes.LibraryOp):
            if op.draws:
                receiver.keep_out_of_graphs(
                    f"{op.name} may draw numbers from torch's generator in each run"
                )
            if op.READS_ON_HOST:
                receiver.keep_out_of_graphs(f"{op.name} reads an operand on the host in each run")
        if frame.storage.buffered.issuperset(op.outputs):
            if isinstance(op, nodes.Contraction):
                self._multiply(op)
            else:
                self._write(op)
            return
        if type(op) in VIEWS and (view := self._view(op)):
            receiver.name(op.out_tensor, *view)
            return
        found = compute(op, frame)
        if op.out_tensor in frame.program.outputs and op.out_tensor in frame.storage.shows:
            found = [_as_result(op.out_tensor, found[0])]
        source = op.inputs[0] if op.inputs else None
        if isinstance(source, TensorView) and len(found) == 1 and _shows(found[0], source, frame):
            self._name_as(op.out_tensor, source, found[0])
        else:
            receiver.results(op, found)

    def _view(self, op: TensorOp) -> tuple[View, MakeGeneric] | None:
        """Returns the result of a view op, such as a reshape, as a `View` of its operand.

        Also returns a function that makes the `View` for inputs of other sizes. Returns None if
        only torch can decide whether the result shares memory with the operand.
        """
        (source, *_), tv = op.inputs, op.out_tensor
        assert isinstance(source, TensorView), f"{op.name} is a view of a tensor"
        is_result, i = tv in self.frame.program.outputs, self.slot(source)

        def make(sizes: InputSizes, o: int) -> View | None:
            like, shape = sizes.like(i), sizes.shape(tv, o)
            found = view_of(op, like, shape, sizes.frame.values)
            if found is None:
                return None
            strides, shift = found
            if is_result:
                strides = viewed_strides(tv, shape, strides)
            return View(i, o, shape, strides, shift, like.element_size())

        view = make(self, -1)
        if view is None:
            return None
        o = self.new_slot(tv)
        return view._replace(out=o), lambda: ((i,), lambda sizes: make(sizes, o))

    def _multiply(self, op: nodes.Contraction) -> None:
        """Enqueues the matrix product `op` on the current stream, as a step that later runs repeat.
        Torch computes the product into the buffer of the result.
        """
        ins, out = tuple(self.slot(v) for v in op.inputs), self.slot(op.out)

        def make(sizes: InputSizes) -> Step | Closure:
            return contraction(op, (ins, out), [sizes.like(i) for i in ins], sizes.like(out))

        def generic() -> GenericStep | None:
            is_plain = min(v.ndim for v in op.inputs[:2]) >= 2
            return ((*ins, out), make) if is_plain else None

        self._receiver.enqueue(lambda: make(self), generic=generic)

    def _write(self, op: TensorOp) -> None:
        """Enqueues `op` on the current stream, as a step that later runs repeat. Torch computes
        `op` into the buffers of its outputs.

        Matrix products are not passed to this method, but to `_multiply`.
        """
        row = NODES[type(op)]
        if row.into is None or row.may_return:
            self._receiver.may_make_results(op)
        frame, machine, free = self.frame, self.machine, self.free_slots
        ins, outs = self.operands(op), [self.slot(o) for o in op.outputs]
        compute_op = computing(op, frame, ins, free, machine)

        def later(sizes: InputSizes) -> Step:
            like = [(i, sizes.like(i)) for i in outs]
            return Action(writing(op, sizes.frame, ins, free, like, machine))

        self._receiver.enqueue(
            lambda: TwoPhaseStep(
                writing_at_once(op, frame, ins, outs, compute_op), lambda slots: later(self)
            ),
            generic=lambda: (tuple(i for i in (*ins, *outs) if i is not None), later),
        )

    def computing(self, op: TensorOp) -> Callable[[Slots], list[torch.Tensor]]:
        """Returns a function that computes `op` with torch, from the list of a run's values. The
        function returns the results as a list of tensors.
        """
        return computing(op, self.frame, self.operands(op), self.free_slots, self.machine)

    def operands(self, op: TensorOp) -> list[int | None]:
        """Returns the slot of each operand of `op`; None for an operand that is a scalar.

        A slot is a position in the list of a run's values.
        """
        return [self.slot(v) if isinstance(v, TensorView) else None for v in op.inputs]

    # ------------------------------------------------------------ communications
    def post(self, op: Communication, team: Team, root: int) -> None:
        """Starts the collective `op` among the ranks of `team`, for example an allreduce.

        `root` is the global rank that sends or receives all data, or -1 for a collective without a
        root.
        """
        self._announce(op)
        rank, work = self.rank, self._new_work(op.number)
        inp, out = self._held(op.inp), self._held(op.out)
        if out >= 0 and (rank == root or not op.collective.out.at_root):
            out = self._landing(op.out, work)

        known: list[Posting] = []

        def make() -> TwoPhaseStep:
            if not known:
                backend = self._receiver.backend(op.backend, op, op.type)
                call = CommunicationCall(op, rank, team, backend, root)
                known.append(Posting(call, inp, out, work, raw_handle(self.stream)))
            return known[0].two_phase_step()

        is_fixed = op.root is None or sc.int_value(op.root) is not None
        asks = tuple(i for i in (inp, out) if i >= 0)
        self._start(work, make, (lambda: (asks, lambda sizes: make())) if is_fixed else None)

    def permute(self, op: CollectivePermute, team: Team, to: int, source: int) -> None:
        """Starts the permutation `op`: a send to rank `to` and a receive from rank `source`."""
        self._announce(op)
        rank, work = self.rank, self._new_work(op.number)
        inp, out = self.slot(op.inp), self._landing(op.out, work)

        def make() -> TwoPhaseStep:
            backend, stream = self._receiver.backend(op.backend, op, op.name), self.stream

            def first(slots: Slots) -> None:
                slots[work] = permute(op, (to, source), rank, team, backend, slots[inp], slots[out])

            def later_step(slots: Slots) -> Step:
                both = halves(op, (to, source), slots[inp], slots[out])
                bound = None if to == source == rank else bind_exchange(op, both, team, backend)
                if bound is None:
                    return Action(first, 2)
                return ExchangeStep(bound, (inp, out), work, raw_handle(stream))

            return TwoPhaseStep(first, later_step)

        self._start(work, make)

    def transfer(self, op: P2PCommunication, peer: int) -> None:
        """Starts the send or receive `op` with rank `peer`.

        Inside `StartCoalescing` and `EndCoalescing`, the transfer is only added to the open group.
        All transfers of the group start together.
        """
        self._announce(op)
        i, group = self.slot(op.buffer), self._group
        work = _GROUPED if group is not None else self._new_work(op.number)
        if op.type == "recv":
            i = self._landing(op.buffer, work)
        half = transfer(op, self.slots[i], peer, self.frame.order(op.type, peer))
        if group is None:
            if self.holds_work_back:
                self._alone.add(work)
            self._exchange(op, [(op, i, peer, half)], work)
        else:
            group.append((op, i, peer, half))

    def open_group(self, op: Op) -> None:
        """Opens a group, to which the following sends and receives are added.

        Raises `ExecutionError` if a group is open already, because groups cannot be nested.
        """
        if self._group is not None:
            raise ExecutionError(
                f"{op.name}: another group of sends and receives is open, and groups cannot be "
                f"nested: close the open group with EndCoalescing first{user_code(op.where)}"
            )
        self._group = []

    def close_group(self, op: EndCoalescing) -> None:
        """Starts all sends and receives of the open group together.

        A later `Wait` for the number of `op` waits for the whole group. Raises `ExecutionError` if
        no group is open.
        """
        if self._group is None:
            raise ExecutionError(
                f"{op.name}: no group of sends and receives is open: open a group with "
                f"StartCoalescing first{user_code(op.where)}"
            )
        group, self._group = self._group, None
        work = self._new_work(op.number)
        if _GROUPED in self._landed:
            self._landed[work] = self._landed.pop(_GROUPED)
        for one, *_ in group:
            self._slot["work", one.number] = work
        self._exchange(op, group, work)

    def _exchange(self, op: P2PCommunication | EndCoalescing, group: list[Half], work: int) -> None:
        """Starts the sends and receives of `group` together. The group may be empty or have one
        member.

        The handle of the communication, on which the `Wait` op waits, is stored in the slot `work`,
        a position in the list of a run's values.
        """
        team, stream, receiver = self.machine.team, self.stream, self._receiver

        def make() -> TwoPhaseStep:
            if not group:
                return TwoPhaseStep(done, lambda slots: Action(done, 0))
            backend = receiver.backend(group[0][0].backend, op, op.name)
            transfers = [half for *_, half in group]
            # Later runs must not keep the tensors of this run alive.
            kept = [(one, i, peer) for one, i, peer, _ in group]

            def first(slots: Slots) -> None:
                slots[work] = exchange(op, transfers, team, backend)

            def start_later(slots: Slots) -> None:
                given = [transfer(one, slots[i], peer) for one, i, peer in kept]
                slots[work] = exchange(op, given, team, backend)

            def later_step(slots: Slots) -> Step:
                bound = bind_exchange(op, transfers, team, backend)
                if bound is None:
                    return Action(start_later, len(kept))
                buffers = tuple(i for _, i, _ in kept)
                return ExchangeStep(bound, buffers, work, raw_handle(stream))

            return TwoPhaseStep(first, later_step)

        def done(slots: Slots) -> None:
            slots[work] = Done()

        self._start(work, make)

    def wait(self, number: int) -> None:
        """Makes the current stream wait for the communication with this number.

        Does nothing if this rank has not started the communication, because the rank is outside of
        the communication's mesh.
        """
        # A rank outside the communication's mesh has started nothing.
        work = self._slot.get(("work", number))
        if work is None:
            return
        landed = self._landed.pop(work, ())

        def wait(slots: Slots) -> None:
            if slots[work] is not None:
                slots[work].wait()
                slots[work] = None
                for out, staged in landed:
                    write(out, staged)

        if not self.switches_streams:
            self._receiver.enqueue(
                lambda: wait, generic=for_all_sizes(wait), ready=self._ready(work)
            )
            return
        join, mark = self.machine.streams.join_mark, self.slot(("mark", work))
        if self.holds_work_back:
            # The join enters the queue of delayed work now: the position in the queue decides
            # after which work the join is done.
            self._receiver.run_now(lambda slots: None if slots[mark] is None else join(slots[mark]))
            self._receiver.enqueue(lambda: wait, ready=self._ready(work))
            return

        def join_and_wait(slots: Slots) -> None:
            if slots[work] is not None:
                join(slots[mark])
            wait(slots)

        self._receiver.enqueue(lambda: join_and_wait)

    def _ready(self, work: int) -> Ready | None:
        """Returns a function that tests whether a transfer is done. `work` is the slot (position in
        the list of a run's values) of the transfer's handle.

        Returns None unless the communication is a send or a receive outside a group.
        `DelayedStreams` (a test mode) uses the function to run other streams while the transfer
        waits for its peer.
        """
        if work not in self._alone:
            return None
        slots = self.slots

        def is_done() -> bool:
            done = getattr(slots[work], "is_done", None)
            return done is not None and done()

        return is_done

    def _new_work(self, number: int) -> int:
        """Returns the slot, a position in the list of a run's values, for the handle of
        communication `number`, which is about to start.

        If streams delay work (a test mode), each start gets a new slot. The reason is that an
        earlier communication with this number may not have been waited for yet.
        """
        name = "work", number
        return self.new_slot(name) if self.holds_work_back else self.slot(name)

    def _start(self, work: int, make: MakeStep, generic: MakeGeneric | None = None) -> None:
        """Enqueues the step that starts a communication, and records a stream event after the step.

        The `Wait` for the communication may be on another stream, which then waits for the event. A
        program that never switches streams needs no event. `work` is the slot (position in the list
        of a run's values) of the communication's handle. `make` makes the step, and `generic`
        returns a function that makes the step for other input sizes.
        """
        if not self.switches_streams:
            self._receiver.enqueue(make, generic=generic)
            return
        take, mark = self.machine.streams.mark, self.slot(("mark", work))

        def note(slots: Slots) -> None:
            slots[mark] = take()

        self._receiver.enqueue(make, after=note)

    def _held(self, tv: TensorView) -> int:
        """Returns the slot of this rank's shard of `tv`, its position in the list of a run's
        values. Returns -1 if the rank stores no part of `tv`.
        """
        return self.slot(tv) if self.frame.is_mine(tv) else -1

    def _landing(self, tv: TensorView, work: int) -> int:
        """Returns the slot of the buffer that receives the data of a communication for `tv`. A slot
        is a position in the list of a run's values.

        Usually this is the buffer of `tv`. If streams delay work (a test mode), a temporary buffer
        receives the data, and the `Wait` copies the data to `tv`. A program that reads `tv` before
        the `Wait` then computes a wrong result, so a test finds the missing wait. `work` is the
        slot of the communication's handle.
        """
        i = self.slot(tv)
        if not self.holds_work_back:
            return i
        out = self.slots[i]
        staged = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        self._landed.setdefault(work, []).append((out, staged))
        self.slots.append(staged)
        return len(self.slots) - 1

    def _announce(self, op: StartsCommunication) -> None:
        """Makes each run write a line about the communication `op` when it starts, if the user has
        set `FUSER_DUMP=communication`.

        CUDA graphs cannot write lines, so no graph may repeat such a run.
        """
        announce = None if self.is_dry else announcer(op, self.machine)
        if announce is None:
            return
        held = [v for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)]
        places = {tv: self.slot(tv) for tv in held if self.frame.is_mine(tv)}
        self._receiver.keep_out_of_graphs("FUSER_DUMP=communication writes a line in each run")
        self._receiver.run_now(
            lambda slots: announce(lambda tv: slots[places[tv]] if tv in places else None)
        )

    # ------------------------------------------------------------ streams
    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream, on which the work of the following ops is enqueued."""
        enter, captured = self.machine.streams.enter, self._captured_slot(stream)
        if captured is None:
            handle = self.stream = self.frame.stream(stream)
            self._receiver.run_now(lambda slots: enter(handle))
        else:
            self.stream = self._captured[stream.name]
            self._receiver.run_now(lambda slots: enter(slots[captured]))

    def capture(self, stream: Stream) -> None:
        """Stores the current CUDA stream under the name of `stream`, such as `S0`. Later ops of the
        run can return to the CUDA stream by this name, or wait for it.
        """
        current, i = self.machine.streams.current, self.slot(("stream", stream.name))
        self._captured[stream.name] = self.stream

        def capture(slots: Slots) -> None:
            slots[i] = current()

        self._receiver.run_now(capture)

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all work enqueued so far on the stream `stream`."""
        join, captured = self.machine.streams.join, self._captured_slot(stream)
        if captured is None:
            handle = self.frame.stream(stream)
            self._receiver.run_now(lambda slots: join(handle))
        else:
            self._receiver.run_now(lambda slots: join(slots[captured]))

    def _captured_slot(self, stream: Stream) -> int | None:
        """Returns the slot in which a `GetCurrentStream` op of this program stores the stream with
        the name of `stream`. A slot is a position in the list of a run's values.

        Returns None for any other stream. Each run reads the stream from the slot, because runs may
        begin on different streams.
        """
        if stream.index is not None or stream.name not in self._captured:
            return None
        return self._slot["stream", stream.name]


# Placeholder for the slot of an open group: the slot is assigned when the group is closed.
_GROUPED = -1


class Immediate:
    """Runs each step of a program's ops at once, and records nothing. It is the simpler
    implementation of `Receiver`; the other one, `Recorder`, also records steps for later runs.

    In a dry run, the class only makes buffers and views, without contents. If streams delay work (a
    test mode), each step is submitted to the current stream, which runs the step later.
    """

    def __init__(self, execution: Execution) -> None:
        """Prepares an object that runs the steps of `execution`, the pass over the program. It
        shares the list of values and the state of the run with `execution`.
        """
        self._execution, self._frame = execution, execution.frame
        self._machine, self._slots = execution.machine, execution.slots
        self._is_dry, self._holds_work_back = execution.is_dry, execution.holds_work_back
        # Steps are bound to the stream on which the run begins, without an arena.
        self._stream = 0 if self._is_dry else raw_stream_on(self._machine.device)()
        self._binding: Binding | None = None
        # See `Receiver`.
        self.carry_out = execution.emit

    def enqueue(
        self,
        make: MakeStep,
        *,
        generic: MakeGeneric | None = None,
        after: Closure | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Makes the step and runs it on the current stream, then calls `after`. Does nothing in a
        dry run.

        If streams delay work (a test mode), the step is submitted to the stream and runs later.
        `generic` is not needed, because nothing is recorded.
        """
        if not self._is_dry:
            self.take(make(), after, ready)

    def take(self, made: Step | Closure, after: Closure | None, ready: Ready | None) -> None:
        """Runs the step `made` on the current stream, and then calls `after`.

        If streams delay work (a test mode), the step is submitted instead, and `after` is called at
        once. The stream then runs the step only when `ready()` is true, that is, when the step
        would not wait for another rank.
        """
        if isinstance(made, TwoPhaseStep):
            run = made.first
        elif isinstance(made, Multiply):
            run = made.run
        elif callable(made):
            run = made
        else:
            self._binding = self._binding or Binding(self._machine.device, self._stream, {})
            run = made.bind(self._binding)
            assert run is not None, f"{made} has nothing to do"
        if self._holds_work_back:
            self._frame.submit(partial(run, self._slots), ready)
        else:
            run(self._slots)
        if after is not None:
            after(self._slots)

    def run_now(self, run: Closure) -> None:
        """Calls `run` on the list of this run's values, such as tensors and streams. Does nothing
        in a dry run.
        """
        if not self._is_dry:
            run(self._slots)

    def name(self, out: TensorView, view: View, generic: MakeGeneric | None = None) -> None:
        """Makes the torch view `view`, and stores it as the tensor of `out`."""
        slots = self._slots
        slots[view.out] = self._frame.tensors[out] = view.of(slots[view.source])

    def allocate(
        self, tv: TensorView, slot: int, shape: tuple[int, ...], *, is_cleared: bool
    ) -> None:
        """Allocates a buffer of this `shape` for `tv`, and stores it at the position `slot` of the
        list of the run's values. If `is_cleared`, the elements are set to zero.

        If streams delay work (a test mode), any other buffer is filled with NaN. A read before the
        first write then shows in the results.
        """
        frame = self._frame
        made = new_buffer(frame.program, tv, shape, frame.machine.device, frame.symmetric(tv))
        self._slots[slot] = frame.tensors[tv] = made.zero_() if is_cleared else made
        frame.owned.add(tv)
        if self._holds_work_back and not is_cleared:
            poison(made)

    def deallocate(self, tv: TensorView) -> None:
        """Drops the buffer of `tv`, so that torch can reuse the memory.

        If `tv` is a view of the parts (shards) of a tensor on all ranks, this rank first waits
        until all ranks have finished with the view.
        """
        frame, execution = self._frame, self._execution
        buffer, view = frame.tensors.pop(tv), frame.storage.views.get(tv)
        if view is not None:
            machine = self._machine
            self.enqueue(lambda: lambda slots: meet_at(view, machine))
        execution.empty(execution.slot(tv))
        if self._holds_work_back and tv in frame.owned:
            # Later work on this stream may reuse the memory immediately.
            frame.submit(partial(poison, buffer))

    def results(self, op: TensorOp, found: list[torch.Tensor]) -> None:
        """Stores the tensors `found`, which torch has computed, as the outputs of `op`.

        If streams delay work (a test mode), only the shapes of `found` are used. The values are
        computed again, into new tensors, when the current stream does this part of its work.
        """
        execution, frame = self._execution, self._frame
        if self._holds_work_back and not all(_shares(r, op, frame) for r in found):
            # The results only show the shapes; the stream computes the values when the stream runs.
            outs = found = [torch.empty_like(r) for r in found]
            compute_op = execution.computing(op)

            def fill(slots: Slots) -> None:
                for out, value in zip(outs, compute_op(slots), strict=True):
                    write(out, value)

            self.enqueue(lambda: fill)
        for out, value in zip(op.outputs, found, strict=True):
            self._slots[execution.new_slot(out)] = frame.tensors[out] = value

    def may_make_results(self, op: TensorOp) -> None:
        """Does nothing, because this object records no steps for later runs. The other class,
        `Recorder`, notes that torch may return the results of `op` as new tensors, so that later
        runs need no buffers for them.
        """

    def backend(self, name: str, op: Op, what: str) -> Backend:
        """Returns this rank's backend with the given name, such as "NCCL"."""
        return self._machine.backend(name)

    def keep_out_of_graphs(self, why: str) -> None:
        """Does nothing, because this object records no steps that a CUDA graph could repeat. The
        other class, `Recorder`, notes that no CUDA graph can repeat the run, with the reason `why`.
        """


def poison(buffer: torch.Tensor) -> None:
    """Fills `buffer` with NaN, or with 85 if the dtype has no NaN.

    In a test mode in which streams delay work, this marks memory that the program must not read. A
    wrong read then shows in the results.
    """
    buffer.fill_(float("nan") if buffer.is_floating_point() or buffer.is_complex() else 85)


def copying(like: torch.Tensor, slots: tuple[int, int], axis: int, at: tuple[int, int]) -> Closure:
    """Returns a function that copies a part of one tensor into another tensor, in any run.

    The function takes the list of a run's values.

    - `like`: a tensor with the layout of the target, which decides how torch copies.
    - `slots`: (source, target), as positions in the list of a run's values.
    - `at`: (start, length) of the copied part along `axis` of the source.
    """
    (inp, out), (start, length), put = slots, at, writer(like)

    def copy(slots: Slots) -> None:
        put(slots[out], slots[inp].narrow(axis, start, length))

    return copy


def local_shape_of(tv: TensorView) -> Sequence[Scalar]:
    """Returns the shape of a rank's shard of `tv` (the part that one rank stores), as symbolic
    scalars.

    `Frame.local_shape` returns the shape in numbers.
    """
    return local_extents(tv) if tv.domain.has_devices else tv.shape()


def _drop_axes(operands: tuple[list[Any], list[Any]], dropped: Dropped) -> None:
    """Inserts axes of extent 1 into tensors that lack some axes of the kernel that will use them.

    The op `HirAliasSelect` makes such a tensor: it selects one element along an axis, and drops the
    axis. But the kernel was compiled with the axis. `operands` is (operands, results), two lists
    that are changed in place. `dropped` has the lacking axes of each tensor.
    """
    for values, axes in zip(operands, dropped, strict=True):
        for k, gone in axes.items():
            for axis in gone:
                values[k] = values[k].unsqueeze(axis)


def _shows(after: torch.Tensor, source: TensorView, frame: Frame) -> bool:
    """Whether `after`, a result of torch, is a view of the memory of the operand `source`. `frame`
    has the tensors of the run.

    Later runs can then make the result from the strides alone, without a call of torch's function.
    """
    has_memory = after.numel() > 0 and (after.is_meta or after.data_ptr() != 0)
    return has_memory and share_storage(frame.tensors[source], after)


def _shares(result: torch.Tensor, op: TensorOp, frame: Frame) -> bool:
    """Whether `result` is stored in the same memory as the first operand of `op`."""
    source = op.inputs[0] if op.inputs else None
    return isinstance(source, TensorView) and share_storage(result, frame.tensors[source])


def _as_result(tv: TensorView, view: torch.Tensor) -> torch.Tensor:
    """Returns `view` as a program output: detached from autograd, and with the strides of `tv`.

    The user may have declared these strides with `stride_order`. No data is copied.
    """
    view = without_gradient(view)
    strides = viewed_strides(tv, view.shape, view.stride())
    return view if strides == view.stride() else view.as_strided(view.shape, strides)


# ----------------------------------------------------------------------
# Reading the scalars of a program in later runs of one plan.


def free_scalars(frame: Frame, free: frozenset[int]) -> tuple[Symbol, ...]:
    """Returns the input scalars whose value may differ between the runs that repeat the same
    recorded steps.

    Such scalars are those that are no integers, and the integers on which no size depends. `free`
    has the positions of these integers among the program's inputs.
    """
    inputs = frame.program.inputs
    scalars = ((i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol))
    return tuple(v for i, v in scalars if i in free or not isinstance(frame.values[v], int))


def changes(value: Scalar, free: Sequence[Symbol]) -> bool:
    """Whether the scalar `value` may change between the runs that repeat the same recorded steps.

    It may change if it depends on one of the input scalars `free`, which may change.
    """
    return any(s in free for s in sc.symbols(value))


def reader(
    value: Scalar, places: Mapping[Symbol, int], free: Sequence[Symbol], frame: Frame
) -> Callable[[Slots], Argument]:
    """Returns a function that computes the scalar `value` from the list of a run's values.

    - `places`: the positions of the program's input scalars in that list.
    - `free`: the input scalars that may change between runs that repeat the same recorded steps.
    - `frame`: the first run. If `value` cannot change, its value in `frame` is used in all runs.
    """
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
    """Returns a function that computes several scalars from the list of a run's values.

    Returns None if no scalar can change between the runs that repeat the same recorded steps. See
    `reader` for `places`, `free` and `frame`.
    """
    if not any(changes(v, free) for v in scalars):
        return None
    readers = [reader(v, places, free, frame) for v in scalars]
    return lambda slots: [read(slots) for read in readers]  # pyright: ignore[reportReturnType]


# ----------------------------------------------------------------------
# Starting the communications of whole buffers, and repeating them.


class Posting(NamedTuple):
    """A collective of a program, such as an allreduce, that later runs repeat. A slot is a position
    in the list of a run's values.

    - `call`: the op, this rank, the participating ranks, the backend and the root.
    - `inp`, `out`: the slots of operand and result, or -1 if this rank has no such buffer.
    - `work`: the slot for the communication handle on which the `Wait` op waits.
    - `stream`: the raw handle of the stream on which the collective starts, or None for the stream
      on which runs begin.
    """

    call: CommunicationCall
    inp: int
    out: int
    work: int
    stream: int | None

    def post(self, slots: Slots) -> None:
        """Starts the collective through its backend, on the buffers in a run's list of values."""
        inp, out = self.held(slots)
        slots[self.work] = post(self.call, inp, out)

    def two_phase_step(self) -> TwoPhaseStep:
        """Returns the recorded action that starts the collective, in a form whose first run differs
        from later runs.

        The first run starts the collective normally. Afterwards the backend prepares a faster
        start, which later runs use.
        """
        text = collective_text(self.inp, self.out)
        return TwoPhaseStep(self.post, lambda slots: self.step(*self.held(slots)), text)

    def step(self, inp: PostedBuffer, out: PostedBuffer) -> Step:
        """Returns the recorded action that starts the collective in later runs.

        `inp` and `out` are the buffers of the first run; later runs have buffers with equal
        layouts. If the backend can prepare no faster start, the collective is started as in the
        first run.
        """
        bound = bind_post(self.call, inp, out)
        if bound is None:
            return Action(self.post)
        return CollectiveStep(bound, self.inp, self.out, self.work, self.stream)

    def held(self, slots: Slots) -> tuple[PostedBuffer, PostedBuffer]:
        """Returns (operand, result) of a run; None for a buffer that this rank does not have."""
        inp = slots[self.inp] if self.inp >= 0 else None
        return inp, slots[self.out] if self.out >= 0 else None
