"""Runs a host program on one rank, with the class `ProgramEvaluator`.

- `evaluate` runs a program op by op (`hostir.runtime.execute`). Every faster path must return the
  same results bit for bit.
- `run` records a program's steps once for inputs of equal shapes and layouts. Later runs repeat the
  recorded plan. Recording takes a dry run (`hostir.runtime.dry_run`), which computes nothing, or a
  real run if a dry run cannot record the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from fuser.ir.binding import signature_of
from fuser.ir.dtypes import is_inexact
from fuser.ir.fusion import TensorView, Value
from fuser.ir.op import walk
from fuser.ir.types import MemoryType
from fuser.runtime import compiled_runner
from fuser.support import options, progress
from fuser.support.arguments import require
from fuser.support.errors import (
    FuserError,
)
from fuser.support.inputs import flatten, torch_device
from fuser.support.locks import make_lock
from fuser.support.options import Settings
from hostir.ir import queries
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.ops import (
    PEER_COPIES,
    KernelGroup,
)
from hostir.ir.program import HostIrContainer
from hostir.ir.verifier import verify
from hostir.lowering.params import check_number_of_streams
from hostir.runtime.agreement import RankAgreement
from hostir.runtime.context import (
    Devices,
    RunBinder,
    check_devices,
    check_grouped,
    check_lowered,
    check_tuning,
    read_late_stream,
)
from hostir.runtime.dry_run import DryRun, can_bind, dry_run, dry_run_plan
from hostir.runtime.execute import Execution
from hostir.runtime.frame import Frame, KernelRunner
from hostir.runtime.inputs import (
    Argument,
    Body,
    Updates,
    Values,
    noted,
    written_inputs,
)
from hostir.runtime.kernels import make_kernel_executor, second_reads
from hostir.runtime.native_runner import Steady, Surroundings, steady
from hostir.runtime.output_buffers import bind_buffers, inputs_and_buffers
from hostir.runtime.plan import Arenas, Memory, Plan, shared_pools
from hostir.runtime.plan_cache import PlanCache, SignatureEntry, forget
from hostir.runtime.recorder import Recorder
from hostir.runtime.size_generic_plan import size_generic_plan
from hostir.runtime.streams import on_device
from multidevice.job.agreement import Prepared
from multidevice.transports.base.protocol import STEP_BY_STEP

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelRequest
    from multidevice.job.communicator import Communicator

MakeRunner = Callable[[KernelGroup], KernelRunner]
T = TypeVar("T")
# The name in error messages: users construct the subclass `hostir.HostIrEvaluator`.
_NAME = "HostIrEvaluator"


class ProgramEvaluator:
    """Runs one host program on one rank of the job; each rank has its own evaluator.

    The first run on inputs of some shapes and layouts records the program's steps; later runs
    repeat them. The subclass `hostir.HostIrEvaluator` adds traces, and its docstring describes the
    parameters.
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
        require(_NAME, "program", program, HostIrContainer)
        program.check_full()
        check_number_of_streams(number_of_streams, of=_NAME)
        verify(program)
        check_lowered(program)
        program.seal()
        self.program = program
        self.late_stream = late_stream = read_late_stream(late_stream)
        if late_stream is not None and communicator is not None and communicator.is_real():
            check_grouped(program)
        self._late_lock = make_lock()
        self.free = queries.free_inputs(program)
        self._runners: dict[int, KernelRunner] = {}
        # A signature of inputs has no values of floats, so a float must not decide which steps run.
        self._is_replayed = all(not is_inexact(s.dtype) for s in queries.control_symbols(program))
        self._is_prepared = False
        if communicator is not None or program.devices():
            from multidevice.job.communicator import Communicator

            communicator = Communicator.instance() if communicator is None else communicator
            require(_NAME, "communicator", communicator, Communicator)
        self._settings = options.settings() if settings is None else settings
        how = f"// options: {self._settings}\n// streams: {number_of_streams}"
        self.ranks = RankAgreement(program, communicator, free=self.free, how=how)
        self._make_runner = make_runner or partial(
            make_kernel_executor,
            settings=self._settings,
            rank=self.ranks.rank,
            reads=second_reads(program),
        )
        # Tuning times kernels on real contents, which a dry run does not have.
        has_dry_run = self._is_replayed and not check_tuning(self._settings, self.ranks.team)
        self._can_bind = late_stream is None and has_dry_run and can_bind(program)
        self._copies_from_peers = any(
            getattr(op, "backend", "") == PEER_COPIES for op in walk(program.ops)
        )
        storage = Storage.of(program)
        is_mapped = any(tv.memory is MemoryType.symmetric for tv in storage.tensors)
        # All ranks allocate and free mapped memory together, so such programs share no arena.
        is_apart = is_mapped or self._copies_from_peers
        has_no_graphs = self._settings.disabled("cuda_graphs")
        self.cache = PlanCache(
            program.inputs,
            self.free,
            pools=None if is_apart else shared_pools(_simulated_rank(communicator)),
            why_no_graphs="FUSER_DISABLE=cuda_graphs" if has_no_graphs else "",
        )
        if communicator is not None and (is_mapped or self._copies_from_peers):
            weakref.finalize(self, communicator.release_peers).atexit = False
        check_devices(program, communicator.size() if communicator is not None else 1)
        devices = Devices(
            program,
            communicator,
            self._settings,
            self.kernel,
            ProgramEvaluator,
            team=self.ranks.team,
            votes=self._copies_from_peers,
            late_stream=late_stream,
        )
        self.binder = RunBinder(
            program,
            storage,
            devices,
            device=None if device is None else torch_device(device),
            rank=self.ranks.rank,
            number_of_streams=number_of_streams,
            # If streams delay work (a test mode), the run itself shows a missing wait.
            is_checked=late_stream is None
            and (queries.has_streams(program) or queries.has_communications(program)),
        )
        self._updates = Updates(program) if program.aliases else None
        self._written = written_inputs(program, storage)
        self.outputs = returned(program)

    def kernel(self, group: int) -> KernelRunner:
        """Returns the executor for the kernel of kernel group number `group`.

        A kernel group is a part of the program that one kernel computes. The executor is made when
        it is first needed.
        """
        if group not in self._runners:
            self._runners[group] = self._make_runner(self.program.groups[group])
        return self._runners[group]

    # ------------------------------------------------------------ running
    def run(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Runs the program and returns the visible outputs in order.

        An output that only updates an input is not returned. All ranks of the program's meshes call
        `run` together. The ranks first agree on the program and the inputs, and an error on one
        rank is raised on all ranks; see `multidevice.job.communicator.run_agreed`.

        Raises, before anything is launched:

        - `InputError` or `ShardingError` if an input does not fit the program;
        - `PeerError` with the message of another rank's error;
        - `ProgramMismatchError` if the ranks run different programs.
        """
        channel = self.ranks.channel()
        if channel is None:
            return self.run_as_agreed(inputs)
        return channel.run(partial(self._prepare_run, inputs))

    def run_as_agreed(
        self, inputs: Sequence[Argument], *, signature: Hashable | None = None
    ) -> list[torch.Tensor]:
        """Runs the program as `run` does, but without a comparison between the ranks.

        The caller must already have compared the ranks for the whole call of which this run is a
        part, so that they run the same program. `signature` is the key of the inputs (layouts and
        numbers), if the caller has already computed it.
        """
        inputs, key, entry = self.cache.recall(inputs, signature)
        if entry is not None:
            return self.run_entry(entry, inputs, entry.contents.check(inputs))
        entry = self.new_entry(inputs)
        outputs = self.run_entry(entry, inputs)
        self.cache.keep(key, entry)
        return outputs

    # ------------------------------------------------------------ among ranks
    def _prepare_run(self, inputs: Sequence[Argument]) -> Prepared[list[torch.Tensor]]:
        """Prepares a run on these inputs, without launching anything.

        Returns (run signature of this rank, scalar inputs that are not part of it, function that
        runs the program). A run signature describes the program, the options and the inputs of a
        run. The ranks compare the signatures and the scalars before they call the function.
        """
        inputs, key, entry = self.cache.recall(inputs)
        if entry is None:
            entry, places = self.prepare(inputs), None
        else:
            places = entry.contents.check(inputs)
        signature = entry.run_signature
        if signature is None:
            signature = self.ranks.run_signature(inputs, self.check(inputs))
            entry.run_signature = signature
        are_apart = self.are_apart(inputs, entry)

        def run() -> list[torch.Tensor]:
            outputs = self.run_entry(entry, inputs, places, are_apart)
            if places is None:
                self.cache.keep(key, entry)
            return outputs

        return signature, self.ranks.numbers(inputs), run

    def new_entry(self, inputs: Sequence[Argument]) -> SignatureEntry:
        """Returns a new, empty cache entry for inputs with the layouts of `inputs`.

        The first call of `run_entry` with the entry records the program's steps in it, and later
        calls repeat these steps.
        """
        return self.cache.new(inputs, self.binder.check_of_numbers(inputs))

    def run_entry(
        self,
        entry: SignatureEntry,
        inputs: Sequence[Argument],
        places: tuple[int, ...] | None = None,
        are_apart: bool | None = None,
    ) -> list[torch.Tensor]:
        """Runs the program on inputs whose cache entry the caller has already found.

        `entry` is the cache entry, with the recorded steps for inputs of these layouts. The ranks
        must already have agreed on the call of which this run is a part.

        - `places`: the alignments of the inputs (addresses modulo the bytes of a vector access), as
          `entry.contents.check` returns them; None before the first run.
        - `are_apart`: the result of the method `are_apart` for these inputs; None: this method
          calls it.
        """
        if self._copies_from_peers:
            self.begin_run()
        plan = None if places is None else entry.plans.get(places)
        # Entering and leaving no_grad takes a tenth of the time of a small program.
        if plan is not None and not self._written and not plan.records:
            return plan.run(inputs)
        with torch.no_grad(), noted(inputs, self._written):
            if self.are_apart(inputs, entry) if are_apart is None else are_apart:
                return self._run(inputs, entry, plan)
            assert self._updates is not None, "inputs share memory, but none is updated"
            return self._updates.run(list(inputs), lambda apart: self._run(apart, entry, None))

    def begin_run(self) -> None:
        """Adds 1 to this rank's count of runs, if ranks of the program copy out of each other's
        memory.

        Every rank of the program must call this once per run, also a rank that sends nothing,
        because peer copies tell the runs apart by the counts.
        """
        if self._copies_from_peers:
            self.ranks.begin_run()

    def are_apart(self, inputs: Sequence[Argument], signature: Hashable) -> bool:
        """Whether each input that the program updates in place has memory that no other input
        shares.

        Otherwise, the update would change elements of another input. That input must be copied
        before a run. `signature` is a key of the inputs' layouts, by which the last answer is
        cached. Raises `InputError` if two updated inputs share memory, because one update would be
        lost.
        """
        return self._updates is None or self._updates.are_apart(inputs, signature)

    def run_with_input(self, values: Mapping[Value, Argument]) -> list[torch.Tensor]:
        """Runs the program like `run`, but takes a dictionary, in which the caller can also pass
        buffers for results.

        `values` has a value for every input of the program. Any other key is a tensor of the
        program, and its value is the caller's buffer into which the program writes that tensor.
        """
        channel = self.ranks.channel()
        if channel is None:
            return self._with_buffers(*inputs_and_buffers(self.program, values))
        return channel.run(partial(self._prepare_with_buffers, values))

    def _prepare_with_buffers(
        self, values: Mapping[Value, Argument]
    ) -> Prepared[list[torch.Tensor]]:
        inputs, buffers = inputs_and_buffers(self.program, values)
        bind_buffers(self.binder.frame(inputs, tuple(buffers)), buffers)
        self.are_apart(inputs, None)
        names = sorted(tv.label for tv in buffers)
        given = f"// given: {', '.join(names)}"
        signature = self.ranks.run_signature(inputs, self.check(inputs), given)
        run = partial(self._with_buffers, inputs, buffers)
        return signature, self.ranks.numbers(inputs), run

    def _with_buffers(
        self, inputs: list[Argument], buffers: Mapping[TensorView, Argument]
    ) -> list[torch.Tensor]:
        self.begin_run()

        def body(apart: list[Argument]) -> list[torch.Tensor]:
            frame = self.binder.frame(apart, tuple(buffers))
            bind_buffers(frame, buffers)
            return self.walk(frame, None)

        written = (*self._written, *range(len(inputs), len(inputs) + len(buffers)))
        with torch.no_grad(), noted([*inputs, *buffers.values()], written):
            return self._on_apart(inputs, body)

    def current_stream(self, device: torch.device | str = "cpu") -> object:
        """Returns this thread's current stream on `device`: a CUDA stream, or a name on the CPU."""
        return self.binder.devices.streams(torch_device(device)).current()

    def _run(
        self, inputs: Sequence[Argument], entry: SignatureEntry, plan: Plan | None
    ) -> list[torch.Tensor]:
        if plan is not None:
            return plan.run(inputs)
        places = entry.contents.places(inputs)
        plan = entry.plans.recall(places)
        if plan is not None:
            return plan.run(inputs)
        if (plan := entry.take(places)) is not None:
            return self._first_replay(plan, inputs, entry, places)
        frame = self.binder.frame(list(inputs))
        if frame.machine.streams.holds_work_back or not self._is_replayed:
            return self.walk(frame, None)
        plan = self.cache.plan_for_new_sizes(frame)
        if plan is None and self._can_bind:
            plan = self._dry_run_plan(frame)
        if plan is not None:
            return self._first_replay(plan, inputs, entry, places)
        recorder = Recorder(frame, self.free)
        outputs = self.walk(frame, recorder)
        device = frame.machine.device
        arenas = self.cache.arenas_on(device)
        plan = entry.plans[places] = recorder.finish(self.outputs, arenas)
        self.cache.keep_generic_plan(device, size_generic_plan(recorder, plan))
        recorder.forget_tensors()
        return outputs

    def _first_replay(
        self, plan: Plan, inputs: Sequence[Argument], entry: SignatureEntry, places: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Runs a new plan, a list of recorded steps, for the first time, and adds the plan to the
        cache entry `entry`.

        A plan needs memory for all intermediates at once. If there is not enough, the program runs
        op by op instead, and the plan is not added. Such a run needs less memory, or raises an
        error that names the op. `places` are the alignments of the inputs, under which the plan is
        stored.
        """
        try:
            with on_device(plan.device):
                plan.reserve()
        except FuserError:
            raise
        except RuntimeError:
            return self.walk(self.binder.frame(list(inputs)), None)
        outputs = plan.run(inputs)
        if plan.after_first_run is not None:
            forget(plan)
            plan = plan.after_first_run()
        entry.plans[places] = plan
        return outputs

    def plans(self) -> list[Plan]:
        """Returns all recorded plans that `run` has cached for this program. A plan is the list of
        steps that repeat a run, for inputs of certain shapes and layouts.
        """
        return self.cache.plans()

    def steady(
        self, entry: SignatureEntry, inputs: Sequence[Argument], around: Surroundings
    ) -> Steady | str:
        """Returns a compiled runner, a C function that repeats runs of the program on inputs like
        these.

        The program must have run on such inputs before. `entry` is their cache entry. `around`
        describes the context that must not change between runs. If C code cannot run the program
        now, returns the reason as text.
        """
        if self._settings.disabled("compiled_runner"):
            return "FUSER_DISABLE=compiled_runner"
        if self._updates is not None:
            return "it updates inputs in place"
        if self._copies_from_peers:
            return "it copies from peers"
        plan = entry.plans.recall(entry.contents.places(inputs))
        runner = compiled_runner.find()
        if plan is None or runner is None:
            return compiled_runner.why_not() or "its steps are not recorded"
        return steady(runner, plan, inputs, around)

    def arenas(self) -> list[Arenas]:
        """Returns the buffers (arenas) in which runs of this program store intermediates: one
        manager of such buffers per device.

        The program may share the buffers with other programs.
        """
        return self.cache.arenas()

    def memory(self) -> Memory:
        """Returns how many bytes this evaluator keeps between runs, by purpose."""
        return self.cache.memory()

    def cuda_graphs(self, entry: SignatureEntry | None = None) -> list[str]:
        """Returns lines of text about the CUDA graphs that repeat this program's runs.

        A plan is the list of steps that were recorded for inputs of certain shapes and layouts. For
        each plan and each stream on which it has run, one line says how many graphs are captured,
        or why there is none. If `entry` is given, the lines are only about the plans of that cache
        entry.
        """
        if not self._is_replayed:
            return ["not captured: the value of a float decides which ops run"]
        plans = self.plans() if entry is None else entry.plans.values()
        return [line for plan in plans for line in plan.graphs()]

    def check(self, inputs: Sequence[Argument]) -> Values:
        """Checks that `inputs` fit the program, and returns the values of the program's symbols,
        which follow from the sizes of the inputs. Nothing runs.

        Raises the errors that `run` raises for wrong inputs.
        """
        return self.binder.check(inputs)

    def _checked(self, inputs: Sequence[Argument]) -> Values:
        """Checks that `inputs` fit the program, and returns the values of the program's symbols.
        Unlike `check`, also raises `InputError` if two inputs that the program updates in place
        share memory.
        """
        values = self.check(inputs)
        self.are_apart(inputs, None)
        return values

    def prepare(
        self, inputs: Sequence[Argument], *, checked_on: torch.device | None = None
    ) -> SignatureEntry:
        """Compiles all kernels that `run` needs for inputs like these, several at the same time.

        Returns the cache entry to pass to `run_entry`. Nothing is launched, computed or
        communicated. `checked_on` is the device for which the caller has already checked kinds,
        dtypes and layouts, so that they are not checked again. Raises the errors that `run` would
        raise about inputs or kernels.
        """
        inputs = flatten(inputs)
        frame = self.binder.frame(inputs, checked_on=checked_on)
        entry = self.new_entry(inputs)
        plan = self.cache.plan_for_new_sizes(frame)
        if plan is None and not (self._can_bind and self._is_prepared):
            # These are the first kernels: each is compiled while the next one is lowered.
            self._compile(dry_run(frame), frame)
        if plan is None and self._can_bind:
            plan = self._dry_run_plan(frame)
        self._is_prepared = True
        if plan is not None:
            entry.expect(inputs, plan)
        return entry

    def requests(self, inputs: Sequence[Argument]) -> Sequence[KernelRequest]:
        """Returns the kernels that a run on `inputs` needs, each with its operands; compiles
        nothing.

        Loop iterations that can use the same kernel share one entry.
        """
        return dry_run(self.binder.frame(flatten(inputs))).requests

    def _dry_run_plan(self, frame: Frame) -> Plan | None:
        """Records a plan, the list of steps of a run, for the inputs of `frame`, and compiles the
        plan's kernels.

        The recording is a dry run, which carries out the program on tensors without contents.
        Returns None if only a real run can record the plan.
        """
        device = frame.machine.device
        findings = dry_run_plan(frame, self.free, self.outputs, self.cache.arenas_on(device))
        self.cache.keep_generic_plan(device, findings.generic_plan)
        if not findings.is_compiled:
            self._compile(findings, frame)
        return findings.plan

    def _compile(self, kernels: DryRun, frame: Frame) -> None:
        from fuser.kernels.executor import compile_many

        with progress.shown(frame.machine.rank):
            compile_many(kernels.requests, device=frame.machine.device)

    def evaluate(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Runs the program op by op, without recorded plans, and returns the same outputs as `run`.

        This method is the reference: every faster path must return the same results bit for bit.
        """
        return self.ranks.agreed(inputs, self._checked, self._evaluate)

    def _evaluate(self, inputs: list[Argument]) -> list[torch.Tensor]:
        self.begin_run()
        with torch.no_grad(), noted(inputs, self._written):
            return self._on_apart(inputs, lambda apart: self.walk(self.binder.frame(apart), None))

    def _on_apart(self, inputs: list[Argument], body: Body) -> list[torch.Tensor]:
        """Calls `body`, which runs the program, and returns its outputs.

        `inputs` may share memory. An input that shares memory with an input that the program
        updates is copied first, and `body` gets the copy, so that the program reads the old values.
        """
        signature_of(inputs)  # raises for an input that is no dense tensor or number
        return body(inputs) if self._updates is None else self._updates.run(inputs, body)

    def walk(self, frame: Frame, recorder: Recorder | None) -> list[torch.Tensor]:
        """Runs the program op by op and returns the outputs. `frame` has the inputs of the run.

        If `recorder` is given, each op's steps are also recorded in it, so that later runs can
        repeat them.
        """
        if not frame.machine.streams.holds_work_back:
            return self._walk_streams(frame, recorder)
        # The queues of delayed work serve one run at a time.
        with self._late_lock:
            return self._walk_streams(frame, recorder)

    def _walk_streams(self, frame: Frame, recorder: Recorder | None) -> list[torch.Tensor]:
        streams = frame.machine.streams
        entry = streams.current()
        execution = Execution(frame) if recorder is None else recorder.execution
        if frame.machine.vote is not None:
            frame.machine.vote.ask(STEP_BY_STEP)
        try:
            with on_device(frame.machine.device):
                execution.run(self.program.ops)
                streams.finish()
        except BaseException:
            streams.abandon()
            streams.enter(entry)
            raise
        return [frame.result(tv) for tv in self.outputs]


def returned(program: HostIrContainer) -> list[TensorView]:
    """Returns the tensors of `program` whose values a run returns, in order.

    If an output updates an input in place, the input is in the list instead of the output. Outputs
    that the user does not see, because they only update an input, are left out.
    """
    # An input that is an output is the caller's own tensor, whatever else it is written into.
    into = {a.out: a.into for a in program.aliases if a.out not in program.inputs}
    hidden = {a.out for a in program.aliases if a.hidden}
    return [into.get(o, o) for o in program.outputs if o not in hidden]


def _simulated_rank(communicator: Communicator | None) -> Communicator | None:
    """Returns `communicator` if it belongs to a simulated rank, and None for a real process.

    Simulated ranks are threads of one process that run concurrently, so each needs its own memory
    for intermediates. The returned object is the key of this memory.
    """
    if communicator is None or not communicator.is_available() or communicator.is_real():
        return None
    return communicator
