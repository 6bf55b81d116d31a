"""The evaluator: a table from op type to the function that carries the op out.

`HostIrEvaluator.evaluate` is the reading of a program that everything faster must equal bit for
bit. `HostIrEvaluator.run` uses it once per class of inputs, and replays it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fuser import dumps, options
from fuser.errors import (
    ExecutionError,
    FuserError,
    ShardingError,
    UnsupportedError,
    user_code,
)
from fuser.ir.binding import signature_of
from fuser.ir.core import Op
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Value
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.text import op_text
from fuser.options import Settings
from fuser.recent import Recent
from hostir.announce import announcer
from hostir.arena import Arena
from hostir.bind import Argument, InputBinder, Values
from hostir.container import HostIrContainer, KernelGroup
from hostir.effects import Shows
from hostir.frame import Frame, KernelRunner, Machine
from hostir.layout import allocated_strides, parts, write
from hostir.library import compute, compute_into
from hostir.ops import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Deallocate,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    SymmetricContiguousView,
    Synchronize,
)
from hostir.overlap import Updates
from hostir.post import Call, Done, Posted, exchange, permute, post, transfer
from hostir.replay import Plan, Recorder, dropped_axes
from hostir.step_kernels import StepKernels, split_output
from hostir.storage import Storage
from hostir.streams import (
    CpuStreams,
    CudaStreams,
    DelayedStreams,
    Streams,
    UnservedStreams,
    Work,
)
from hostir.transfers import (
    AT_ROOT,
    CollectivePermute,
    Communication,
    EndCoalescing,
    P2PCommunication,
    ShareMemHandles,
    StartCoalescing,
    Wait,
)
from multidevice.backends.protocol import Backend, Team, Transfer
from multidevice.placement import Block

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelExecutor, KernelRequest
    from multidevice.communicator import Communicator

MakeRunner = Callable[[KernelGroup], KernelRunner]
# Classes of inputs that an evaluator remembers.
MAX_PLANS = 256


# ------------------------------------------------------------------ the table
# A handler binds names and shapes at once, as the host does, and submits the work to the stream.
def _allocate(op: Allocate, frame: Frame) -> None:
    tv = op.buffer
    if tv in frame.storage.named:
        return  # It is a part of another buffer, as in the loops of nvFuser's programs.
    shape = frame.local_shape(tv, op.stream_index)
    buffer = torch.empty_strided(
        shape,
        allocated_strides(tv, shape),
        dtype=to_torch(tv.dtype()),
        device=frame.machine.device,
    )
    frame.tensors[tv] = buffer.zero_() if op.zero_init else buffer
    frame.owned.add(tv)
    if frame.machine.streams.delays and not op.zero_init:
        poison(buffer)


def _deallocate(op: Deallocate, frame: Frame) -> None:
    buffer = frame.tensors.pop(op.buffer)
    if op.buffer in frame.owned and frame.machine.streams.delays:
        # The next to use this memory is on this stream, and may begin at once.
        frame.submit(partial(poison, buffer))


def poison(buffer: torch.Tensor) -> None:
    """Fill a buffer with what no program computes by accident."""
    buffer.fill_(float("nan") if buffer.is_floating_point() else 85)


def launch_operands(
    op: LaunchKernel | PostOnStream, frame: Frame
) -> tuple[list[Argument], list[torch.Tensor]]:
    """Return what a kernel reads and writes; an in-place output is the input that it overwrites."""
    for out in op.outs:
        if out not in frame.tensors:
            frame.tensors[out] = frame.tensors[frame.alias_target(out)]
    ins, outs = [frame.operand(v) for v in op.ins], [frame.tensors[o] for o in op.outs]
    for values, axes in zip((ins, outs), dropped_axes(op, frame.program), strict=True):
        for k, axis in axes.items():
            values[k] = values[k].unsqueeze(axis)
    return ins, outs


def _launch(op: LaunchKernel, frame: Frame) -> None:
    ins, outs = launch_operands(op, frame)
    frame.submit(frame.machine.launch(op.group, ins, outs, frame.sizes))


def _post_on_stream(op: PostOnStream, frame: Frame) -> None:
    for out in op.outs:
        if out not in frame.tensors:
            shape = frame.local_shape(out)
            frame.tensors[out] = torch.empty_strided(
                shape,
                allocated_strides(out, shape),
                dtype=to_torch(out.dtype()),
                device=frame.machine.device,
            )
    ins, outs = launch_operands(op, frame)
    frame.submit(partial(frame.machine.unit(op.unit), ins, outs))


def _local_slice(op: LocalSlice, frame: Frame) -> None:
    start, length = frame.slice_bounds(op)
    part = frame.tensors[op.inp].narrow(op.axis, start, length)
    frame.submit(partial(write, frame.tensors[op.out], part))


def _alias_select(op: HirAliasSelect, frame: Frame) -> None:
    (shown,) = op.effects()
    source = frame.tensors[op.inp]
    if isinstance(shown, Shows) and shown.part is not None:
        start, _ = frame.part(source, shown.part)
        source = source.select(shown.part.axis, start)
    frame.tensors[op.out] = source


def _shard_by_stream(op: ShardByStream, frame: Frame) -> None:
    source, part = frame.tensors[op.inp], op.part
    frame.tensors[op.out] = source.narrow(part.axis, *frame.part(source, part))


def _symmetric_view(op: SymmetricContiguousView, frame: Frame) -> None:
    raise UnsupportedError(
        f"{op.name}: no backend maps {op.inp} of other ranks yet{user_code(op.where)}"
    )


def _share_handles(op: ShareMemHandles, frame: Frame) -> None:
    """Nothing to do: the backends of today copy through their own buffers."""


def _tensor_op(op: TensorOp, frame: Frame) -> None:
    """Compute into allocated outputs; an output without a buffer becomes a view."""
    if all(out in frame.storage.buffered for out in op.outputs):
        now = frame.at(op) if frame.machine.streams.delays else frame
        frame.submit(partial(compute_into, op, now, [frame.tensors[o] for o in op.outputs]))
        return
    results = compute(op, frame)
    if frame.machine.streams.delays and not all(_is_view(r, op, frame) for r in results):
        # What was computed now says the shapes; the values come when the stream gets there.
        results = [torch.empty_like(r) for r in results]
        frame.submit(partial(_fill, op, frame.at(op), results))
    frame.tensors.update(zip(op.outputs, results, strict=True))


def _is_view(result: torch.Tensor, op: TensorOp, frame: Frame) -> bool:
    source = op.inputs[0] if op.inputs else None
    return isinstance(source, TensorView) and _share(result, frame.tensors[source])


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _fill(op: TensorOp, frame: Frame, outs: list[torch.Tensor]) -> None:
    for out, value in zip(outs, compute(op, frame), strict=True):
        write(out, value)


# ------------------------------------------------------------------ communications
def _posted(number: int, frame: Frame) -> Posted:
    frame.works[number] = Posted()
    return frame.works[number]


def _received(frame: Frame, tv: TensorView, posted: Posted) -> torch.Tensor:
    """Return what to receive `tv` into."""
    out = frame.tensors[tv]
    return posted.landing(out) if frame.machine.streams.delays else out


def _communicate(op: Communication, frame: Frame) -> None:
    rank = frame.machine.rank
    team = op.team.ranks(rank)
    if not team:
        return
    posted, backend = _posted(op.number, frame), frame.machine.backend
    root = -1 if op.root is None else member(team, frame.integer(op.root), op)
    inp = frame.tensors[op.inp] if frame.is_mine(op.inp) else None
    out = frame.tensors[op.out] if frame.is_mine(op.out) else None
    if out is not None and (rank == root or op.type not in AT_ROOT["result"]):
        out = _received(frame, op.out, posted)

    def start() -> None:
        posted.work = post(Call(op, rank, team, backend(), root), inp, out)

    _start(posted, start, frame)


def _start(posted: Posted, start: Work, frame: Frame) -> None:
    frame.submit(start)
    posted.mark = frame.machine.streams.mark()


def member(team: Team, position: int, op: Op) -> int:
    """Return the global rank at a position of a team; raises `ExecutionError` outside."""
    if not 0 <= position < len(team):
        raise ExecutionError(f"{op.name}: position {position} in a team of {len(team)}")
    return team[position]


def _permute(op: CollectivePermute, frame: Frame) -> None:
    rank = frame.machine.rank
    team = op.team.ranks(rank)
    if not team:
        return
    posted, backend = _posted(op.number, frame), frame.machine.backend
    inp, out = frame.tensors[op.inp], _received(frame, op.out, posted)
    to, source = (member(team, frame.integer(p), op) for p in (op.send_peer, op.recv_peer))

    def start() -> None:
        posted.work = permute(op, (to, source), rank, team, backend(), inp, out)

    _start(posted, start, frame)


def _transfer(op: P2PCommunication, frame: Frame) -> None:
    tensor, peer = frame.tensors[op.buffer], frame.integer(op.peer)
    if frame.group is not None:
        transfers, posted = frame.group
        frame.works[op.number] = posted
    else:
        transfers, posted = [], _posted(op.number, frame)
    if op.type == "recv":
        tensor = _received(frame, op.buffer, posted)
    transfers.append(transfer(op, tensor, peer))
    if frame.group is None:
        _exchange(op, transfers, posted, frame)


def _exchange(
    op: P2PCommunication | EndCoalescing, transfers: list[Transfer], posted: Posted, frame: Frame
) -> None:
    backend, team = frame.machine.backend, tuple(range(frame.machine.size))

    def start() -> None:
        posted.work = exchange(op, transfers, team, backend()) if transfers else Done()

    _start(posted, start, frame)


def _start_coalescing(op: StartCoalescing, frame: Frame) -> None:
    if frame.group is not None:
        raise ExecutionError(f"{op.name} inside another one")
    frame.group = [], Posted()


def _end_coalescing(op: EndCoalescing, frame: Frame) -> None:
    if frame.group is None:
        raise ExecutionError(f"{op.name} without StartCoalescing")
    transfers, posted = frame.group
    frame.group = None
    frame.works[op.number] = posted
    _exchange(op, transfers, posted, frame)


def _wait(op: Wait, frame: Frame) -> None:
    posted = frame.works.pop(op.number, None)
    # Absent on a rank outside the communication's mesh.
    if posted is not None:
        frame.machine.streams.join_mark(posted.mark)
        frame.submit(posted.wait)


# ------------------------------------------------------------------ streams and control flow
def _set_stream(op: SetCurrentStream, frame: Frame) -> None:
    frame.machine.streams.enter(frame.stream(op.stream))


def _get_stream(op: GetCurrentStream, frame: Frame) -> None:
    frame.captured[op.stream.name] = frame.machine.streams.current()


def _synchronize(op: Synchronize, frame: Frame) -> None:
    frame.machine.streams.join(frame.stream(op.stream))


def _for_loop(op: ForLoop, frame: Frame) -> None:
    start, stop, step = map(frame.integer, (op.start, op.stop, op.step))
    if step < 1:
        raise ExecutionError(f"FOR {op.index}: a step of {step}")
    with frame.with_index(op.index) as bind:
        for i in range(start, stop, step):
            bind(i)
            run_block(op.body, frame)


def _if_then_else(op: IfThenElse, frame: Frame) -> None:
    run_block(op.then if frame.number(op.predicate) else op.orelse, frame)


HANDLERS: dict[type[Op], Callable[..., None]] = {
    Allocate: _allocate,
    CollectivePermute: _permute,
    Communication: _communicate,
    Deallocate: _deallocate,
    EndCoalescing: _end_coalescing,
    ForLoop: _for_loop,
    GetCurrentStream: _get_stream,
    HirAliasSelect: _alias_select,
    IfThenElse: _if_then_else,
    LaunchKernel: _launch,
    LocalSlice: _local_slice,
    P2PCommunication: _transfer,
    PostOnStream: _post_on_stream,
    SetCurrentStream: _set_stream,
    ShardByStream: _shard_by_stream,
    ShareMemHandles: _share_handles,
    StartCoalescing: _start_coalescing,
    SymmetricContiguousView: _symmetric_view,
    Synchronize: _synchronize,
    Wait: _wait,
}


def run_block(ops: Sequence[Op], frame: Frame) -> None:
    """Run the ops of a region that concern this rank, in order."""
    for op in ops:
        if frame.is_idle(op):
            continue
        carry_out(op, frame)
        if frame.recorder is not None:
            frame.recorder.record(op)


def carry_out(op: Op, frame: Frame) -> None:
    """Run one op that concerns this rank.

    Raises `ExecutionError` naming op and user line where torch refuses it.
    """
    handler = HANDLERS.get(type(op), _tensor_op)
    # With tensors without contents the program is rehearsed, and nothing is posted.
    is_real = frame.machine.device.type != "meta"
    if is_real and (announce := announcer(op, frame.machine.rank)):
        announce(frame.tensors.get)
    try:
        handler(op, frame)
    except (FuserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Torch raises errors of every kind, and knows neither the op nor where it was written.
        raise ExecutionError(
            f"{op.name} failed ({type(error).__name__}: {error}), user code at "
            f"{op.where or 'unknown'}:\n{op_text(op)}"
        ) from error


# ------------------------------------------------------------------ the evaluator
def make_kernel_executor(
    group: KernelGroup, settings: Settings, *, of: str = "a host program", rank: int = 0
) -> KernelExecutor | StepKernels:
    """Return the executor that compiles a group's kernel for local shards, or for steps' blocks.

    Dumps say that it is a kernel of `of`, made by `rank`.
    """
    from fuser.kernels.executor import KernelExecutor
    from multidevice.localize import localize

    def make(block: Block) -> KernelExecutor:
        fusion, _ = localize(group.fusion, block)
        last = "_last" if block == "last" else ""
        return KernelExecutor(
            fusion,
            scheduler=group.scheduler,
            name=f"kernel{group.number}{last}",
            settings=settings,
            of=f"kernel group {group.number}{last} of {of}",
            dump=partial(dumps.write, rank=rank),
        )

    out = split_output(group)
    return make("first") if out is None else StepKernels(out, make)


class HostIrEvaluator:
    """Runs one program on one rank; ranks do not share evaluators.

    `communicator` defaults to this process's, asked for only by programs with a mesh. `device`
    defaults to that of the first tensor input, `settings` to those of the environment.
    `make_runner` makes what runs a kernel group. `number_of_streams` is the value of that name in
    the program; streams persist from run to run.

    `late_stream` (CPU only) holds back the work of one stream, a number or "entry", or of "all", as
    far as the program's own waits allow: a program that lacks a wait then gives wrong results.
    """

    def __init__(
        self,
        program: HostIrContainer,
        communicator: Communicator | None = None,
        *,
        device: torch.device | str | None = None,
        settings: Settings | None = None,
        make_runner: MakeRunner | None = None,
        number_of_streams: int = 4,
        late_stream: str | int | None = None,
    ) -> None:
        program.check_full()
        if number_of_streams < 1:
            raise ExecutionError(f"number_of_streams={number_of_streams}: at least 1")
        self.program = program
        self._storage = Storage.of(program)
        self._number_of_streams = number_of_streams
        is_number = isinstance(late_stream, str) and late_stream.isdigit()
        self._late = int(late_stream) if is_number else late_stream
        self._streams: dict[torch.device, Streams] = {}
        self._binder = InputBinder(program.values)
        self.free = program.free_inputs()
        self._device = None if device is None else torch.device(device)
        self._runners: dict[int, KernelRunner] = {}
        self._arena = Arena()
        self._plans: Recent[object, Plan] = Recent(MAX_PLANS, on_drop=self._arena.forget)
        if communicator is None and program.devices():
            from multidevice.communicator import Communicator

            communicator = Communicator.instance()
        self._communicator = communicator
        self._rank = communicator.rank() if communicator is not None else 0
        self._make_runner = make_runner or partial(
            make_kernel_executor,
            settings=options.settings() if settings is None else settings,
            rank=self._rank,
        )
        self._size = communicator.size() if communicator is not None else 1
        check_devices(program, self._size)
        # Whose local shape may be impossible, which is checked before anything runs.
        self._sized = [tv for tv in program.tensors() if _is_computed(tv)]
        into = {a.out: a.into for a in program.aliases}
        hidden = {a.out for a in program.aliases if a.hidden}
        self._updates = Updates(program) if program.aliases else None
        self._visible = [into.get(o, o) for o in program.outputs if o not in hidden]

    def kernel(self, group: int) -> KernelRunner:
        """Return what runs a kernel group, made at its first use."""
        if group not in self._runners:
            self._runners[group] = self._make_runner(self.program.groups[group])
        return self._runners[group]

    # ------------------------------------------------------------ running
    def run(
        self,
        inputs: Sequence[Argument],
        *,
        signature: Hashable | None = None,
        are_apart: bool | None = None,
    ) -> list[torch.Tensor]:
        """Return the visible outputs in order; hidden aliased ones are written into their inputs.

        The ranks have agreed on program and inputs (`hostir.digest.run_agreed`, or the frontend).
        `signature` stands for the class of the inputs, and `are_apart` for what the method of this
        name returned, where the caller knows it already.

        Raises `InputError` or `ShardingError` when an input does not fit; nothing was launched.
        """
        inputs = list(inputs)
        key = signature_of(inputs, self.free) if signature is None else signature
        if self._updates is None:
            plan = self._plans.get(key)
            # Entering and leaving no_grad costs a tenth of a small program.
            if plan is not None and not plan.records:
                return self._replay(plan, inputs)
        with torch.no_grad():
            if self.are_apart(inputs, key) if are_apart is None else are_apart:
                return self._run(inputs, key)
            assert self._updates is not None, "inputs meet where nothing is updated"
            return self._updates.run(inputs, lambda apart: self._run(apart, key))

    def are_apart(self, inputs: Sequence[Argument], signature: Hashable) -> bool:
        """Whether no input that is updated in place shares memory with another.

        Raises `InputError` where two updated ones do: one update would be lost.
        """
        return self._updates is None or self._updates.are_apart(inputs, signature)

    def run_with_input(self, values: Mapping[Value, Argument]) -> list[torch.Tensor]:
        """Run on values by name: every input has one; any other tensor is where the program puts
        that result instead of a tensor of its own. Returns as `run` does.
        """
        inputs = [values[v] for v in self.program.inputs if v in values]
        given = {
            v: t
            for v, t in values.items()
            if isinstance(v, TensorView)
            and isinstance(t, torch.Tensor)
            and v not in self.program.inputs
        }
        with torch.no_grad():
            frame = self._frame(inputs)
            frame.tensors.update(given)
            frame.storage = frame.storage.with_buffers(given)
            return self._walk(frame, None)

    def current_stream(self, device: torch.device | str = "cpu") -> object:
        """Return the stream on which this thread would go on: a name on the CPU."""
        return self._streams_of(torch.device(device)).current()

    def _replay(self, plan: Plan, inputs: list[Argument]) -> list[torch.Tensor]:
        try:
            return plan.run(inputs, self._arena)
        except BaseException:
            # What is still in flight may write to this arena: it is not used again.
            self._arena = Arena()
            raise

    def _run(self, inputs: list[Argument], key: Hashable) -> list[torch.Tensor]:
        plan = self._plans.recall(key)
        if plan is not None:
            return self._replay(plan, inputs)
        frame = self._frame(inputs)
        if frame.machine.streams.delays:
            return self._walk(frame, None)
        recorder = Recorder(frame)
        outputs = self._walk(frame, recorder)
        self._plans[key] = recorder.finish(self._visible)
        # The plan's steps know the frame's values; they must not keep its tensors.
        frame.tensors.clear()
        return outputs

    def check(self, inputs: Sequence[Argument]) -> Values:
        """Return the values of all symbols; raise what `run` would raise about these inputs."""
        values = self._frame(list(inputs)).values
        return {s: v for s, v in values.items() if s not in (RANK, NUMBER_OF_STREAMS)}

    def prepare(self, inputs: Sequence[Argument]) -> None:
        """Lower and compile, all at once, every kernel that `run` needs for inputs like these.

        Raises what `run` would raise about these inputs or their kernels.
        """
        from fuser.kernels.executor import compile_many

        compile_many(self.requests(inputs), device=self._device or _device_of(self.program, inputs))

    def requests(self, inputs: Sequence[Argument]) -> list[KernelRequest]:
        """Return what `prepare` compiles.

        Nothing is launched, computed or communicated: the program is walked on tensors without
        contents, of which only views are taken.
        """
        from fuser.kernels.executor import KernelExecutor

        frame = self._frame(list(inputs))
        requests: list[KernelRequest] = []

        def note(
            group: int,
            ins: Sequence[Argument],
            outs: Sequence[torch.Tensor],
            sizes: Mapping[Symbol, int],
        ) -> Work:
            runner = self.kernel(group)
            if isinstance(runner, StepKernels):
                runner = runner.pick(outs, sizes)
            if isinstance(runner, KernelExecutor):
                requests.append((runner, ins, outs, sizes))
            return lambda: None

        meta = torch.device("meta")
        machine = replace(frame.machine, device=meta, streams=UnservedStreams(), launch=note)
        contents = {tv: _without_contents(t) for tv, t in frame.tensors.items()}
        with torch.no_grad():
            run_block(
                self.program.ops,
                Frame(self.program, machine, frame.storage, frame.values, contents),
            )
        return requests

    def evaluate(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Like `run`, op by op through the table, remembering nothing."""
        with torch.no_grad():
            return Updates(self.program).run(
                list(inputs), lambda apart: self._walk(self._frame(apart), None)
            )

    def _walk(self, frame: Frame, recorder: Recorder | None) -> list[torch.Tensor]:
        streams = frame.machine.streams
        entry = streams.current()
        frame.recorder = recorder
        try:
            run_block(self.program.ops, frame)
            streams.finish()
        except BaseException:
            streams.enter(entry)
            raise
        return [frame.result(tv) for tv in self._visible]

    def _frame(self, inputs: list[Argument]) -> Frame:
        """Bind and check the inputs."""
        device = self._device or _device_of(self.program, inputs)
        values = {
            **self._binder.bind(inputs, device),
            RANK: self._rank,
            NUMBER_OF_STREAMS: self._number_of_streams,
        }
        frame = Frame(self.program, self._machine(device), self._storage, values, {})
        for tv in self._sized:
            frame.local_shape(tv)
        for declared, given in zip(self.program.inputs, inputs, strict=True):
            if isinstance(declared, TensorView) and isinstance(given, torch.Tensor):
                frame.tensors[declared] = given
        return frame

    def _machine(self, device: torch.device) -> Machine:
        def backend() -> Backend:
            assert self._communicator is not None, "a program without a mesh communicates"
            return self._communicator.backend_for(device)

        def launch(
            group: int,
            ins: Sequence[Argument],
            outs: Sequence[torch.Tensor],
            sizes: Mapping[Symbol, int],
        ) -> Work:
            return partial(self.kernel(group).run, ins, outs, sizes=sizes)

        return Machine(
            self._rank,
            self._size,
            device,
            backend,
            launch,
            self.kernel,
            self._streams_of(device),
            self._unit,
        )

    def _streams_of(self, device: torch.device) -> Streams:
        if device not in self._streams:
            if self._late is not None and device.type != "cuda":
                self._streams[device] = DelayedStreams(None if self._late == "all" else self._late)
            else:
                self._streams[device] = (
                    CudaStreams(device) if device.type == "cuda" else CpuStreams()
                )
        return self._streams[device]

    def _unit(self, number: int) -> Callable[..., None]:
        """Return what runs a host unit on local shards, made at its first use."""
        raise UnsupportedError(f"PostOnStream: HostUnit{number} cannot run yet")


def _is_computed(tv: TensorView) -> bool:
    """Whether a mesh or a formula decides some extent, rather than the inputs alone."""
    return any(n > 1 for n in parts(tv)) or not all(isinstance(x, Symbol) for x in tv.shape())


def _without_contents(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def check_devices(program: HostIrContainer, size: int) -> None:
    """Raise `ShardingError` when a mesh names a rank that a job of `size` ranks lacks."""
    for tv in program.tensors():
        if tv.mesh is not None and max(tv.mesh.devices, default=0) >= size:
            raise ShardingError(
                f"{tv.mesh} of {tv.label} names rank {max(tv.mesh.devices)}, but the job has "
                f"{size} rank{'s' if size != 1 else ''}"
            )


def _device_of(program: HostIrContainer, inputs: Sequence[Argument]) -> torch.device:
    """Return the device of the first tensor (CPU scalars aside), else torch's default."""
    for declared, given in zip(program.inputs, inputs, strict=False):
        is_scalar = isinstance(declared, TensorView) and declared.is_cpu_scalar
        if isinstance(given, torch.Tensor) and not is_scalar:
            return given.device
    return torch.get_default_device()
