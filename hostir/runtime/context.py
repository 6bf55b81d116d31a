"""What one program runs on at one rank: a `Machine` per device, its streams, its host units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from fuser.ir.scalar.constructors import Symbol
from fuser.support.options import Settings
from hostir.ir.program import HostIrContainer
from hostir.ir.transfers import PEER_COPIES
from hostir.runtime.frame import ExecutionContext, KernelRunner
from hostir.runtime.inputs import Argument
from hostir.runtime.streams import CpuStreams, CudaStreams, DelayedStreams, Streams, Work
from hostir.runtime.unit import UnitEvaluator, UnitRunner
from multidevice.coordination.bounded_wait import Team
from multidevice.transports.base.captured import Vote
from multidevice.transports.base.protocol import Backend, PeerMemory

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
