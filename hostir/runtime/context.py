"""The context of the runs of one host program on one rank.

- `RunBinder` checks the inputs of a run, and computes the values of the program's symbols.
- `Devices` makes the execution context of each device: streams, backends and host units.
- The functions at the end check that a program fits the job that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from fuser.ir.binding import Values, free_inputs, signature_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.op import walk
from fuser.ir.scalar.constructors import Symbol
from fuser.support.errors import (
    ExecutionError,
    FuserError,
    ShardingError,
    UnsupportedError,
    VerifyError,
    counted,
    user_code,
)
from fuser.support.inputs import flatten
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.ir import queries
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    PEER_COPIES,
    RANK,
    EndCoalescing,
    ForLoop,
    P2PCommunication,
    StartCoalescing,
)
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import write
from hostir.lowering.input_class import Classifier
from hostir.lowering.pipeline import build_program
from hostir.runtime.frame import ExecutionContext, Frame, KernelRunner
from hostir.runtime.inputs import Argument, ExactNumbers, InputBinder, device_of, is_computed
from hostir.runtime.streams import CpuStreams, CudaStreams, DelayedStreams, Streams, Work
from multidevice.coordination.bounded_wait import Team
from multidevice.sharding.queries import check_divisible
from multidevice.transports.base.protocol import Backend, PeerMemory, Vote

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator


class RunBinder:
    """Checks the inputs of each run of one program, and makes the `Frame`, the state with which the
    run begins.

    The frame has the values of all symbols, the input tensors, and the execution context of the
    device.
    """

    def __init__(
        self,
        program: HostIrContainer,
        storage: Storage,
        devices: Devices,
        *,
        device: torch.device | None,
        rank: int,
        number_of_streams: int,
        is_checked: bool,
    ) -> None:
        """Prepares the checks for the runs of `program`.

        - `storage`: says which tensors of the program share memory.
        - `devices`: makes the execution context of each device.
        - `device`: the device of all runs; None: each run uses the device of its first tensor
          input.
        - `rank`, `number_of_streams`: the values of these symbols in the program.
        - `is_checked`: whether the program is checked for races and deadlocks before the first run.
        """
        self._program, self.storage = program, storage
        self.devices, self._device = devices, device
        # Values that do not come from inputs: this rank and the number of streams.
        self.own: Values = {RANK: rank, NUMBER_OF_STREAMS: number_of_streams}
        self._inputs = InputBinder(program.values)
        self._exact = ExactNumbers(queries.computations(program), program.inputs)
        self._is_checked = is_checked
        # Tensors whose local shape may be impossible; checked before anything runs.
        self._sized = [tv for tv in program.tensors() if is_computed(tv)]

    def frame(
        self,
        inputs: list[Argument],
        results: Sequence[TensorView] = (),
        checked_on: torch.device | None = None,
    ) -> Frame:
        """Checks the inputs of a run and returns the `Frame`, the state with which the run begins.

        `results` are the tensors for which the caller provides buffers. `checked_on` is the device
        for which the caller has already checked kinds, dtypes and layouts, which are then not
        checked again.

        Raises `InputError` or `ShardingError` for inputs that do not fit the program. Raises
        `VerifyError` if streams of the program race, or if its ranks would wait for ever.
        """
        program = self._program
        device = checked_on or self._device or device_of(program.inputs, inputs)
        binder = self._inputs
        bound = binder.values(inputs) if checked_on else binder.bind(inputs, device)
        if self._exact:
            self._exact.check(bound)
        values = {**bound, **self.own}
        frame = Frame(program, self.devices.machine(device), self.storage, values, {})
        if binder.has_only_tensors:
            frame.sizes = cast("dict[Symbol, int]", bound)
        for tv in self._sized:
            frame.local_shape(tv)
        for declared, given in zip(program.inputs, inputs, strict=True):
            if isinstance(declared, TensorView) and isinstance(given, torch.Tensor):
                frame.tensors[declared] = given
        if self._is_checked:
            from hostir.analysis.preflight import check_before_run

            check_before_run(program, values, rank=frame.machine.rank, given=results)
        return frame

    def check(self, inputs: Sequence[Argument]) -> Values:
        """Checks that the inputs of a run fit the program, and returns the values of the program's
        symbols. Raises the same errors as `frame`.

        The values of the rank and of the number of streams are left out, because they are no
        inputs.
        """
        values = self.frame(flatten(inputs)).values
        return {s: v for s, v in values.items() if s not in self.own}

    def check_of_numbers(
        self, inputs: Sequence[Argument]
    ) -> Callable[[Sequence[Any]], None] | None:
        """Returns a function that checks the scalar inputs of later calls, or None if no scalar
        needs a check.

        The check is that each scalar can be represented in the dtypes of the results that depend on
        it. The later calls have tensors with the layouts of `inputs`.
        """
        return self._exact.check_of(self.check(inputs)) if self._exact else None


class Devices:
    """The execution contexts (`ExecutionContext`) of one program, one per device.

    A context is made at the first run on its device, and is kept for later runs.
    """

    def __init__(
        self,
        program: HostIrContainer,
        communicator: Communicator | None,
        settings: Settings,
        kernel: Callable[[int], KernelRunner],
        make_evaluator: Callable[..., UnitEvaluator],
        *,
        team: Team,
        votes: bool,
        late_stream: str | int | None,
    ) -> None:
        """Prepares contexts for runs of `program`; nothing is made for a device yet.

        - `kernel`: returns the executor of the kernel that has a given number in the program.
        - `make_evaluator`: makes the object that runs the program of a host unit, a fusion that
          `program` runs as a separate host program.
        - `team`: the ranks that run the program together.
        - `votes`: whether all ranks vote before each run, so that either all of them launch a CUDA
          graph or none does.
        - `late_stream`: the stream whose work is delayed in a test mode; None: no stream.
        """
        self._program, self._communicator, self._settings = program, communicator, settings
        self._kernel, self._make_evaluator = kernel, make_evaluator
        self._team, self._votes, self._late = team, votes, late_stream
        self._streams: dict[torch.device, Streams] = {}
        self._machines: dict[torch.device, ExecutionContext] = {}
        self._units: dict[tuple[int, torch.device], UnitRunner] = {}

    def machine(self, device: torch.device) -> ExecutionContext:
        """Returns the execution context for runs on `device`, which is made at the first call."""
        found = self._machines.get(device)
        if found is None:
            found = self._machines.setdefault(device, self._machine_on(device))
        return found

    def streams(self, device: torch.device) -> Streams:
        """Returns the streams of the program on `device`, which are made at the first call."""
        if device not in self._streams:
            made: Streams
            if device.type == "cuda":
                made = CudaStreams(device)
            elif self._late is not None:
                made = DelayedStreams(None if self._late == "all" else self._late)
            else:
                made = CpuStreams()
            self._streams[device] = made
        return self._streams[device]

    def _machine_on(self, device: torch.device) -> ExecutionContext:
        communicator, team = self._communicator, self._team
        rank = 0 if communicator is None else communicator.rank()

        def backend(library: str) -> Backend:
            assert communicator is not None, "a program without a mesh must not communicate"
            if library == PEER_COPIES:
                return communicator.peers_for(device)
            return communicator.backend_for(device)

        def memory(
            of: Callable[[PeerMemory], Callable[[int], torch.Tensor]],
        ) -> Callable[[int], torch.Tensor]:
            def make(nbytes: int) -> torch.Tensor:
                if communicator is None:
                    return torch.empty(nbytes, dtype=torch.uint8, device=device)
                return of(communicator.peers_for(device))(nbytes)

            return make

        def launch(
            group: int,
            ins: Sequence[Argument],
            outs: Sequence[torch.Tensor],
            sizes: Mapping[Symbol, int],
        ) -> Work:
            return partial(self._kernel(group).run, ins, outs, sizes=sizes)

        vote = None
        # All ranks of the program vote, also those that send and receive nothing.
        if self._votes and communicator is not None and rank in team:
            vote = Vote(partial(communicator.peers_for, device), team)
        return ExecutionContext(
            rank,
            1 if communicator is None else communicator.size(),
            device,
            team,
            backend,
            memory(lambda peers: peers.empty),
            memory(lambda peers: peers.lasting),
            memory(lambda peers: peers.shard),
            launch,
            self._kernel,
            self.streams(device),
            partial(self._unit, device=device),
            vote,
        )

    def _unit(self, number: int, device: torch.device) -> UnitRunner:
        """Returns the object that runs host unit `number` on `device`; makes it at the first call.

        A host unit is a fusion that a `PostOnStream` op runs as a separate host program.
        """
        key = number, device
        if key not in self._units:
            unit = self._program.units[number]
            made = UnitRunner(
                number, unit, self._communicator, device, self._settings, self._make_evaluator
            )
            self._units.setdefault(key, made)
        return self._units[key]


# ----------------------------------------------------------------------
# Host units: fusions that `PostOnStream` runs; each is compiled to its own host program.
#
# A unit is scheduled automatically, once per class of inputs that can share a program. The program
# is cached.

# The cache of one unit: signatures of inputs, and programs.
MAX_SIGNATURES = 64
MAX_PROGRAMS = 16


class UnitEvaluator(Protocol):
    """The interface of the object that runs a host unit: a fusion that another host program runs,
    and that is compiled to a separate program.
    """

    def run_as_agreed(
        self, inputs: Sequence[Argument], *, signature: Hashable | None = None
    ) -> list[torch.Tensor]:
        """Runs the unit's program on these inputs. The ranks do not compare what they run, because
        they have compared the whole call of which this run is a part.

        `signature` is the key of the inputs (layouts and numbers), if it has been computed already.
        """
        ...


class UnitRunner:
    """Runs one host unit on this rank's shards (the parts of tensors that it stores). A host unit
    is a fusion that a `PostOnStream` op of a host program runs as a separate program.

    The fusion is compiled to its own host program, once per input class (inputs that can share a
    program).
    """

    def __init__(
        self,
        number: int,
        fusion: Fusion,
        communicator: Communicator | None,
        device: torch.device,
        settings: Settings,
        make_evaluator: Callable[..., UnitEvaluator],
    ) -> None:
        """Prepares runs of host unit `number`, a fusion that another host program runs, on
        `device`.

        `fusion` is the definition of the unit. `make_evaluator` makes the evaluator that runs a
        compiled program. The function takes the program, the communicator, the device and the
        settings, and is called once per compiled program.
        """
        self._name = f"HostUnit{number}"
        self._fusion = fusion
        self._communicator = communicator
        self._device = device
        self._settings = settings
        self._make_evaluator = make_evaluator
        self._binder = InputBinder(fusion)
        self._classifier = Classifier(fusion)
        self._free = free_inputs(fusion)
        self._by_signature: Recent[object, UnitEvaluator] = Recent(MAX_SIGNATURES)
        self._by_class: Recent[object, UnitEvaluator] = Recent(MAX_PROGRAMS)

    def __call__(self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor]) -> None:
        """Runs the host unit (a separately compiled fusion) on the current stream, and writes the
        results into `outputs`.

        Raises `InputError` or `ShardingError`, with the unit's name, for inputs that do not fit.
        """
        key = signature_of(inputs, self._free)
        evaluator = self._by_signature.recall(key)
        if evaluator is None:
            evaluator = self._by_signature[key] = self._evaluator(inputs)
        for out, value in zip(outputs, evaluator.run_as_agreed(inputs, signature=key), strict=True):
            write(out, value)

    def size(self) -> int:
        """Returns the number of compiled programs that are kept of this host unit, a fusion that
        another host program runs. There is one for each class of inputs that can share a program.
        """
        return self._by_class.size()

    def _evaluator(self, inputs: Sequence[Argument]) -> UnitEvaluator:
        try:
            values = self._binder.bind(inputs, self._device)
        except FuserError as error:
            raise type(error)(f"{self._name}: {error}") from None
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        found = self._classifier.classify(inputs, sizes, self._device)
        evaluator = self._by_class.recall(found.key)
        if evaluator is None:
            backend = (
                "NCCL"
                if self._communicator is None
                else self._communicator.backend_for(self._device).name.upper()
            )
            segmented, program, _ = build_program(
                self._fusion,
                found,
                backend_name=backend,
                settings=self._settings,
            )
            check_divisible(segmented.fusion, sizes)
            evaluator = self._by_class[found.key] = self._make_evaluator(
                program, self._communicator, device=self._device, settings=self._settings
            )
        return evaluator


# ----------------------------------------------------------------------
# Checks that a program fits the job that runs it.


def read_late_stream(late: str | int | None) -> str | int | None:
    """Returns the option `late_stream` in its checked form. The option names the stream whose work
    is delayed in a test.

    The option is a stream number, "entry" (the stream on which runs begin), "all", or None. A
    string of digits is returned as an int. Raises `ExecutionError` for any other value.
    """
    if isinstance(late, str) and late.isascii() and late.isdigit():
        return int(late)
    is_number = type(late) is int and late >= 0
    if not is_number and late not in (None, "all", "entry"):
        raise ExecutionError(
            f"late_stream={late!r} is not a stream: pass the number of a stream (from 0), 'entry' "
            "or 'all'"
        )
    return late


def check_lowered(program: HostIrContainer) -> None:
    """Raises `VerifyError` if a tensor of `program` has a stream axis, but the program has no loop.

    A stream axis is divided over the iterations of a loop, which run on different streams. The
    program cannot compute such a tensor without the loop, which `hostir.lower_streams` adds.
    """
    ops = list(walk(program.ops))
    if any(isinstance(op, ForLoop) for op in ops):
        return
    for op in ops:
        if isinstance(op, TensorOp) and _has_stream(op.out_tensor):
            raise VerifyError(
                f"{op.name}: {op.out_tensor} has a stream axis, but the program has no loop over "
                f"that axis: call hostir.lower_streams(program) first{user_code(op.where)}"
            )


def _has_stream(tv: TensorView) -> bool:
    return any(a.is_stream and not a.is_reduction() for a in tv.domain.loop)


def check_grouped(program: HostIrContainer) -> None:
    """Raises `UnsupportedError` if a send or a receive is outside a group of transfers
    (`StartCoalescing` .. `EndCoalescing`).

    The check is for ranks that are processes, if the option `late_stream` delays a stream.
    Transfers then start in another order than in the program, but processes match sends with
    receives by this order. Only simulated ranks, which are threads of one process, match them by
    numbers.
    """
    is_grouped = False
    for op in walk(program.ops):
        if isinstance(op, StartCoalescing | EndCoalescing):
            is_grouped = isinstance(op, StartCoalescing)
        elif isinstance(op, P2PCommunication) and not is_grouped:
            raise UnsupportedError(
                f"late_stream: {op.name} is outside of StartCoalescing and EndCoalescing. Only "
                "simulated ranks can delay such a transfer: use multidevice.simulate"
                f"{user_code(op.where)}"
            )


def check_devices(program: HostIrContainer, size: int) -> None:
    """Raises `ShardingError` if a mesh of `program` has a rank that the job does not have.

    `size` is the number of ranks of the job.
    """
    for tv in program.tensors():
        if tv.mesh is not None and max(tv.mesh.devices, default=0) >= size:
            raise ShardingError(
                f"{tv.mesh} of {tv.label} names rank {max(tv.mesh.devices)}, but the job has "
                f"{counted(size, 'rank')}: start more ranks or use a smaller mesh"
            )


def check_tuning(settings: Settings, team: Sequence[int]) -> bool:
    """Checks the option `tune`, by which kernels are timed to choose their parameters; returns
    whether the option is on.

    Raises `UnsupportedError` if `tune` is on for a program of several ranks. Each rank could choose
    another kernel then, but replicated tensors must be equal in every bit on all ranks.
    """
    is_on = settings.enabled("tune")
    if is_on and len(team) > 1:
        raise UnsupportedError(
            f"tune: this program runs on {len(team)} ranks, and each rank could choose other "
            "kernels, but all ranks must use the same kernels. Remove the option, which is only "
            "for programs of one rank"
        )
    return is_on
