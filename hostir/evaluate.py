"""The evaluator: a table from op type to the function that carries the op out.

`HostIrEvaluator.evaluate` is the reading of a program that everything faster must equal bit for
bit. `HostIrEvaluator.run` uses it once per class of inputs, and replays it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from fuser import dumps, options
from fuser.errors import ExecutionError, FuserError, ShardingError
from fuser.ir.binding import signature_of
from fuser.ir.core import Op
from fuser.ir.dtypes import to_torch
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
from hostir.frame import Frame, KernelRunner, Machine
from hostir.layout import allocated_strides, parts
from hostir.library import compute, compute_into, write
from hostir.ops import Allocate, Communication, Deallocate, LaunchKernel, LocalSlice, Wait
from hostir.overlap import Updates
from hostir.post import post
from hostir.replay import Plan, Recorder
from multidevice.backends.protocol import Backend

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelExecutor, KernelRequest
    from multidevice.communicator import Communicator

MakeRunner = Callable[[KernelGroup], KernelRunner]
# Classes of inputs that an evaluator remembers.
MAX_PLANS = 256


# ------------------------------------------------------------------ the table
def _allocate(op: Allocate, frame: Frame) -> None:
    tv = op.buffer
    shape = frame.local_shape(tv)
    buffer = torch.empty_strided(
        shape,
        allocated_strides(tv, shape),
        dtype=to_torch(tv.dtype()),
        device=frame.machine.device,
    )
    frame.tensors[tv] = buffer.zero_() if op.zero_init else buffer


def _deallocate(op: Deallocate, frame: Frame) -> None:
    del frame.tensors[op.buffer]


def launch_operands(op: LaunchKernel, frame: Frame) -> tuple[list[Argument], list[torch.Tensor]]:
    """Return what a kernel reads and writes; an in-place output is the input that it overwrites."""
    for out in op.outs:
        if out not in frame.tensors:
            frame.tensors[out] = frame.tensors[frame.alias_target(out)]
    return [frame.operand(v) for v in op.ins], [frame.tensors[o] for o in op.outs]


def _launch(op: LaunchKernel, frame: Frame) -> None:
    ins, outs = launch_operands(op, frame)
    frame.machine.kernel(op.group).run(ins, outs, sizes=frame.sizes)


def _communicate(op: Communication, frame: Frame) -> None:
    team = op.team.ranks(frame.machine.rank)
    if team:
        inp, out = (frame.tensors[t] if frame.is_mine(t) else None for t in (op.inp, op.out))
        if announce := announcer(op, frame.machine.rank):
            announce(inp, out)
        frame.works[op.number] = post(op, team, frame.machine.backend(), inp, out)


def _wait(op: Wait, frame: Frame) -> None:
    work = frame.works.pop(op.number, None)
    # Absent on a rank outside the communication's mesh.
    if work is not None:
        work.wait()


def _local_slice(op: LocalSlice, frame: Frame) -> None:
    start, length = frame.slice_bounds(op)
    write(frame.tensors[op.out], frame.tensors[op.inp].narrow(op.axis, start, length))


def _tensor_op(op: TensorOp, frame: Frame) -> None:
    """Compute into allocated outputs; an output without a buffer becomes a view."""
    if all(out in frame.tensors for out in op.outputs):
        compute_into(op, frame, [frame.tensors[o] for o in op.outputs])
    else:
        frame.tensors.update(zip(op.outputs, compute(op, frame), strict=True))


HANDLERS: dict[type[Op], Callable[..., None]] = {
    Allocate: _allocate,
    Deallocate: _deallocate,
    LaunchKernel: _launch,
    Communication: _communicate,
    Wait: _wait,
    LocalSlice: _local_slice,
}


def carry_out(op: Op, frame: Frame) -> None:
    """Run one op that concerns this rank.

    Raises `ExecutionError` naming op and user line where torch refuses it.
    """
    handler = HANDLERS.get(type(op), _tensor_op)
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
) -> KernelExecutor:
    """Return the executor that compiles a group's kernel for local shards.

    Dumps say that it is a kernel of `of`, made by `rank`.
    """
    from fuser.kernels.executor import KernelExecutor
    from multidevice.localize import localize

    fusion, _ = localize(group.fusion)
    return KernelExecutor(
        fusion,
        scheduler=group.scheduler,
        name=f"kernel{group.number}",
        settings=settings,
        of=f"kernel group {group.number} of {of}",
        dump=partial(dumps.write, rank=rank),
    )


class HostIrEvaluator:
    """Runs one program on one rank; ranks do not share evaluators.

    `communicator` defaults to this process's, asked for only by programs with a mesh. `device`
    defaults to that of the first tensor input, `settings` to those of the environment.
    `make_runner` makes what runs a kernel group.
    """

    def __init__(
        self,
        program: HostIrContainer,
        communicator: Communicator | None = None,
        *,
        device: torch.device | str | None = None,
        settings: Settings | None = None,
        make_runner: MakeRunner | None = None,
    ) -> None:
        program.check_full()
        self.program = program
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
        check_devices(program, communicator.size() if communicator is not None else 1)
        # Whose local shape may be impossible, which is checked before anything runs.
        self._sized = [tv for tv in program.tensors() if _is_computed(tv)]
        into = {a.out: a.into for a in program.aliases}
        hidden = {a.out for a in program.aliases if a.hidden}
        updated = [i for a in program.aliases for i, v in enumerate(program.inputs) if v is a.into]
        self._updates = Updates(updated) if updated else None
        self._visible = [into.get(o, o) for o in program.outputs if o not in hidden]

    def kernel(self, group: int) -> KernelRunner:
        """Return what runs a kernel group, made at its first use."""
        if group not in self._runners:
            self._runners[group] = self._make_runner(self.program.groups[group])
        return self._runners[group]

    # ------------------------------------------------------------ running
    def run(
        self, inputs: Sequence[Argument], *, signature: Hashable | None = None
    ) -> list[torch.Tensor]:
        """Return the visible outputs in order; hidden aliased ones are written into their inputs.

        The ranks have agreed on program and inputs (`hostir.digest.run_agreed`, or the frontend).
        `signature` stands for the class of the inputs where the caller knows it already.

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
            if self._updates is None:
                return self._run(inputs, key)
            return self._updates.run(inputs, key, lambda apart: self._run(apart, key))

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
        recorder = Recorder(frame)
        outputs = self._walk(frame, recorder)
        self._plans[key] = recorder.finish(self._visible)
        # The plan's steps know the frame's values; they must not keep its tensors.
        frame.tensors.clear()
        return outputs

    def check(self, inputs: Sequence[Argument]) -> Values:
        """Return the values of all symbols; raise what `run` would raise about these inputs."""
        return self._frame(list(inputs)).values

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
        rehearsal = Frame(
            self.program,
            self._machine(torch.device("meta")),
            frame.values,
            {tv: _without_contents(t) for tv, t in frame.tensors.items()},
        )
        requests: list[KernelRequest] = []
        with torch.no_grad():
            for op in self.program.ops:
                if rehearsal.is_idle(op) or isinstance(op, Communication | Wait):
                    continue
                if not isinstance(op, LaunchKernel):
                    if isinstance(op, Allocate | Deallocate) or not rehearsal.has_results(op):
                        carry_out(op, rehearsal)
                    continue
                ins, outs = launch_operands(op, rehearsal)
                runner = self.kernel(op.group)
                if isinstance(runner, KernelExecutor):
                    requests.append((runner, ins, outs, rehearsal.sizes))
        return requests

    def evaluate(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Like `run`, op by op through the table, remembering nothing."""
        updates = self._updates or Updates([])
        with torch.no_grad():
            return updates.run(
                list(inputs), None, lambda apart: self._walk(self._frame(apart), None)
            )

    def _walk(self, frame: Frame, recorder: Recorder | None) -> list[torch.Tensor]:
        for op in self.program.ops:
            if frame.is_idle(op):
                continue
            carry_out(op, frame)
            if recorder is not None:
                recorder.record(op)
        return [frame.result(tv) for tv in self._visible]

    def _frame(self, inputs: list[Argument]) -> Frame:
        """Bind and check the inputs."""
        device = self._device or _device_of(self.program, inputs)
        values = self._binder.bind(inputs, device)
        frame = Frame(self.program, self._machine(device), values, {})
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

        return Machine(self._rank, device, backend, self.kernel)


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
