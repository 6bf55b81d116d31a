"""`hostir.program_for`: lowers, verifies and costs a program for ranks that nobody has started.

One process does this for a mesh of any size. It needs no launcher, no GPU, and no memory for the
tensors, because a program depends on their shapes and layouts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.shard_annotation import mesh_of
from fuser.support.arguments import checked
from fuser.support.errors import InputError
from hostir.analysis.preflight import check_before_run
from hostir.analysis.rank_values import PerRank, at
from hostir.analysis.unrolled_program import Unroller
from hostir.cost.machine_model import Machine, find_machine, usual_machine
from hostir.cost.report import (
    CommunicationCost,
    Prediction,
    communications_of,
    predict,
    sent_along,
)
from hostir.cost.simulator import simulated_schedule
from hostir.cost.traffic import traffic_of
from hostir.ir.ops import LIBRARIES, NUMBER_OF_STREAMS, RANK
from hostir.ir.program import HostIrContainer

# The communication library of a job whose caller names none.
_USUAL_LIBRARY = {"cuda": "NCCL", "cpu": "MPI"}


@dataclass(frozen=True)
class JobDescription:
    """The description of a job for which a definition is lowered. The job need not exist.

    - `rank`: the rank for which the program is verified.
    - `device`: "cuda" or "cpu", where all ranks compute.
    - `library`: the communication library, such as "NCCL".
    - `ranks_per_host`: ranks 0 to `ranks_per_host` - 1 are on the first host. Communication and
      computation are only made to overlap if all ranks are on one host.
    - `machine`: the machine by whose speeds overlap is decided.
    - `mesh`: the mesh that replaces the mesh of the definition; None keeps the definition's meshes.
    """

    rank: int
    device: Literal["cuda", "cpu"]
    library: str
    ranks_per_host: int
    machine: Machine
    mesh: DeviceMesh | None = None


class Definition(Protocol):
    """The interface of a definition that can be lowered for a job, such as `FusionDefinition`."""

    def lower_for_job(
        self, inputs: Sequence[object] | None, job: JobDescription
    ) -> tuple[HostIrContainer, Mapping[Symbol, Number]]:
        """Returns the host program that the ranks of a job run, and the values of the symbols of
        its inputs.

        `inputs` has the global shape of each tensor and the value of each number.
        """
        ...


@dataclass(frozen=True)
class RankProgram:
    """A verified host program, with the rank and the sizes for which `hostir.program_for` has
    lowered it.

    - `program`: the host program. All ranks of a job run the same one.
    - `rank`: the rank whose memory and bytes the properties return.
    - `values`: the sizes: a number for each symbol of the inputs, for the rank and for the number
      of streams.
    - `machine`: the machine for which `predict` computes times by default.
    """

    program: HostIrContainer
    rank: int
    values: Mapping[Symbol, Number]
    machine: Machine

    @cached_property
    def _unrolled(self) -> Unroller:
        """The ops of all ranks in each loop iteration."""
        unrolled = Unroller(self.program, self.program.devices(), self.values)
        unrolled.run(self.program.ops)
        unrolled.finish()
        return unrolled

    @property
    def _place(self) -> int:
        return self._unrolled.ranks.index(self.rank)

    def _at(self, x: PerRank) -> int:
        value: Any = at(x, self._place)
        return int(value)

    @property
    def input_nbytes(self) -> int:
        """The bytes of the shards that the rank passes as inputs."""
        return self._at(self._unrolled.inputs)

    @property
    def peak_nbytes(self) -> int:
        """The largest number of bytes of the rank's intermediate tensors and results that exist at
        one time. The inputs are not counted.
        """
        return self._at(self._unrolled.peak)

    @cached_property
    def communications(self) -> tuple[CommunicationCost, ...]:
        """The communications in which the rank takes part, in program order, with the bytes that
        the rank sends and receives. `predict` also returns their times.
        """
        traffic = traffic_of(self._unrolled, [self._place])
        return communications_of(self.program, traffic, 0, {})

    @property
    def sent_along(self) -> dict[str, int]:
        """The bytes that the rank sends along each mesh dimension in one run, such as `{"mesh_y":
        4096, "mesh_x": 512}`.
        """
        return sent_along(self.communications)

    def predict(self, machine: Machine | str | None = None) -> Prediction:
        """Returns the predicted times, memory and bytes of all ranks.

        `machine` is a description or its name, as for `python -m hostir cost --machine`. By
        default, it is the machine that `program_for` used. The links of a description are those
        within one host.

        Raises:
            UnsupportedError: the speed of an op is unknown.
        """
        found = find_machine(machine) if isinstance(machine, str) else machine
        made = simulated_schedule(self.program, self.values, found or self.machine)
        return predict(self.program, made)


@checked
def program_for(
    definition: Any,
    mesh: Any = None,
    *,
    rank: int = 0,
    inputs: Sequence[Any] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    backend: str | None = None,
    machine: Any = None,
    ranks_per_host: int = 8,
    number_of_streams: int = 4,
) -> RankProgram:
    """Lowers and verifies a definition for one rank of a job that need not exist.

    The result has the program that each rank of a real job runs, with the memory, the bytes and the
    predicted time of the rank. Nothing runs: there is no launcher, and no tensor has memory.

        planned = hostir.program_for(fd, inputs=[(8192, 4096), (16384, 4096)], rank=3)
        planned.peak_nbytes, planned.sent_along, planned.predict("h200").seconds

    - `definition`: a `FusionDefinition` with tensors on a mesh.
    - `mesh`: a mesh that replaces the definition's only one, with as many dimensions. Axes are
      divided along the same dimensions. So one definition can be compared on many meshes. By
      default, the meshes are those of the definition.
    - `rank`: a rank of these meshes.
    - `inputs`: for each input of the definition, the shape of the whole tensor (not of a shard), or
      the value of a number. An entry may be None if the definition gives all extents as numbers. If
      all entries would be None, `inputs` may be left out. Shards are dense, in the memory order
      that the definition declares.
    - `device`: the device on which all ranks compute.
    - `backend`: the communication library. By default, it is NCCL for "cuda" and MPI for "cpu".
    - `machine`: the description of a machine, or its name. Its speeds decide which communication
      and computation overlap. By default, it is that of this machine's GPUs if they were measured,
      and else "h200".
    - `ranks_per_host`: as a job on several hosts would not overlap anything, the program depends on
      whether all ranks are on one host.
    - `number_of_streams`: the number of streams of each rank.

    Raises:
        InputError: `inputs` is missing or does not fit the definition, or there is no such library
            or machine.
        ShardingError: the definition names no mesh, `mesh` cannot replace its meshes, no mesh
            contains `rank`, or a mesh does not divide an axis.
        UnsupportedError: `mesh` is given, and the definition depends on the number of devices by
            more than its annotations.
        VerifyError: the program has a race, or the communications of the ranks do not match.
    """
    library = _USUAL_LIBRARY[device] if backend is None else backend.upper()
    if library not in LIBRARIES:
        raise InputError(f"there is no backend {backend!r}: expected one of {', '.join(LIBRARIES)}")
    for name, number in (
        ("ranks_per_host", ranks_per_host),
        ("number_of_streams", number_of_streams),
    ):
        if number < 1:
            raise InputError(f"{name} = {number}: expected a number of at least 1")
    if not isinstance(machine, Machine):
        machine = find_machine(usual_machine() if machine is None else machine)
    other = None if mesh is None else mesh_of(mesh)
    job = JobDescription(rank, device, library, ranks_per_host, machine, other)
    program, sizes = _definition(definition).lower_for_job(inputs, job)
    values = {**sizes, NUMBER_OF_STREAMS: number_of_streams, RANK: rank}
    check_before_run(program, values, rank=rank)
    return RankProgram(program, rank, values, machine)


def _definition(given: Any) -> Definition:
    if not hasattr(given, "lower_for_job"):
        raise InputError(
            f"expected a FusionDefinition, but found a {type(given).__name__}: pass the definition "
            "that you would execute"
        )
    return given
