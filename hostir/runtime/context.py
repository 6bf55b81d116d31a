"""What one program runs on at one rank: a `Machine` per device, its streams, its host units."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from fuser.ir.binding import free_inputs, signature_of
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Symbol
from fuser.support.errors import FuserError
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.ir.ops import PEER_COPIES
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import write
from hostir.lowering.input_class import Classifier
from hostir.lowering.pipeline import build_program
from hostir.runtime.frame import ExecutionContext, KernelRunner
from hostir.runtime.inputs import Argument, InputBinder
from hostir.runtime.streams import CpuStreams, CudaStreams, DelayedStreams, Streams, Work
from multidevice.coordination.bounded_wait import Team
from multidevice.sharding import queries
from multidevice.transports.base.protocol import Backend, PeerMemory, Vote

if TYPE_CHECKING:
    from multidevice.job.communicator import Communicator


class Devices:
    """The machines of a program, each made at its first use; streams persist from run to run."""

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
        """`kernel` returns what runs a kernel group, `make_evaluator` what runs the program of a
        unit. `votes`: the ranks of the program, `team`, agree on how each run is carried out.
        `late_stream`: see `ProgramEvaluator`."""
        self._program, self._communicator, self._settings = program, communicator, settings
        self._kernel, self._make_evaluator = kernel, make_evaluator
        self._team, self._votes, self._late = team, votes, late_stream
        self._streams: dict[torch.device, Streams] = {}
        self._machines: dict[torch.device, ExecutionContext] = {}
        self._units: dict[tuple[int, torch.device], UnitRunner] = {}

    def machine(self, device: torch.device) -> ExecutionContext:
        """Return what the program runs on there."""
        found = self._machines.get(device)
        if found is None:
            found = self._machines.setdefault(device, self._machine_on(device))
        return found

    def streams(self, device: torch.device) -> Streams:
        """Return the streams there."""
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
            assert communicator is not None, "a program without a mesh communicates"
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
        # All ranks of the program vote, also those that will send and receive nothing.
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
        """Return what runs a host unit on local shards, made at its first use."""
        key = number, device
        if key not in self._units:
            unit = self._program.units[number]
            made = UnitRunner(
                number, unit, self._communicator, device, self._settings, self._make_evaluator
            )
            self._units.setdefault(key, made)
        return self._units[key]


# ----------------------------------------------------------------------
# Host units: fusions that `PostOnStream` runs, each through the whole compiler.
#
# A unit is scheduled automatically, once per class of inputs; what was made for a class is kept.

# What one unit remembers: signatures of inputs, and programs.
MAX_SIGNATURES = 64
MAX_PROGRAMS = 16


class UnitEvaluator(Protocol):
    """Runs the program of a unit."""

    def run_as_agreed(
        self, inputs: Sequence[Argument], *, signature: Hashable | None = None
    ) -> list[torch.Tensor]: ...


class UnitRunner:
    """Runs one unit on local shards, on the current stream."""

    def __init__(
        self,
        number: int,
        fusion: Fusion,
        communicator: Communicator | None,
        device: torch.device,
        settings: Settings,
        make_evaluator: Callable[..., UnitEvaluator],
    ) -> None:
        """`make_evaluator` is given the program of a class of inputs, the communicator, `device`
        and `settings`."""
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
        """Compute `outputs`, which are allocated.

        Raises `InputError` or `ShardingError` for inputs that do not fit the unit.
        """
        key = signature_of(inputs, self._free)
        evaluator = self._by_signature.recall(key)
        if evaluator is None:
            evaluator = self._by_signature[key] = self._evaluator(inputs)
        for out, value in zip(outputs, evaluator.run_as_agreed(inputs, signature=key), strict=True):
            write(out, value)

    def size(self) -> int:
        """Return how many programs are kept."""
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
            queries.check_divisible(segmented.fusion, sizes)
            evaluator = self._by_class[found.key] = self._make_evaluator(
                program, self._communicator, device=self._device, settings=self._settings
            )
        return evaluator
