"""The job for which `hostir.program_for` lowers a definition: ranks that nobody has started, on the
definition's mesh or on another one, and inputs without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fuser.ir.binding import Argument
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import declared_order
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES
from fuser.support.arguments import Mismatch, take_integer
from fuser.support.errors import InputError, ShardingError, UnsupportedError, user_code
from fuser.support.inputs import check_count
from hostir.ir.shard_layout import allocated_strides
from multidevice.coordination.bounded_wait import Team
from multidevice.coordination.launcher import read_launch
from multidevice.job.communicator import current_communicator
from multidevice.sharding.placement import add_cuts, axis_cuts, unparallelize
from multidevice.sharding.queries import (
    has_streams,
    local_sizes,
    requested_devices,
    uneven_positions,
)

if TYPE_CHECKING:
    from hostir.cost.rank_program import JobDescription


class Library(Protocol):
    """The properties of a communication library that decide how a program is lowered: its name,
    and whether CUDA graphs may repeat its communications. It moves no data.
    """

    @property
    def name(self) -> str:
        """The name of the library, such as `nccl`."""
        ...

    def can_capture(self, what: str) -> bool:
        """Returns whether a CUDA graph may repeat the communication `what`, such as "batch"."""
        ...


class Job(Protocol):
    """The interface of a job, as far as programs depend on it. A `Communicator` is a job that
    runs."""

    def rank(self) -> int:
        """Returns the rank of this process: its number in the job. Dumps that are written to files
        have the number in their names.
        """
        ...

    def size(self) -> int:
        """Returns the number of ranks of the job."""
        ...

    def are_on_one_host(self, devices: Team) -> bool:
        """Returns whether all ranks in `devices` run on one host."""
        ...

    def have_access(self, device: torch.device) -> bool:
        """Returns whether the ranks of a host can map each other's memory on `device`."""
        ...

    def backend_for(self, device: torch.device) -> Library:
        """Returns the library that communicates tensors on `device`."""
        ...

    def peers_for(self, device: torch.device) -> Library:
        """Returns the backend that copies tensors on `device` out of other ranks' memory."""
        ...


@dataclass(frozen=True)
class _PlannedLibrary:
    """A communication library of a job that does not run.

    CUDA graphs are assumed to be able to repeat all of its communications except barriers. This
    holds for NCCL and for peer copies.
    """

    name: str

    def can_capture(self, what: str) -> bool:
        """Returns whether a CUDA graph may repeat the communication `what`: all but "barrier"."""
        return what != "barrier"


@dataclass(frozen=True)
class PlannedJob:
    """A job of `count` ranks that does not run. All ranks of a host can map each other's memory."""

    described: JobDescription
    count: int

    def rank(self) -> int:
        """Returns the rank of this process in the job that runs, without connecting to its ranks.

        The result is 0 if no launcher started this process.
        """
        simulated = current_communicator.get()
        return read_launch().rank if simulated is None else simulated.rank()

    def size(self) -> int:
        """Returns the number of ranks of the job."""
        return self.count

    def are_on_one_host(self, devices: Team) -> bool:
        """Returns whether all ranks in `devices` run on one host."""
        return len({rank // self.described.ranks_per_host for rank in devices}) < 2

    def have_access(self, device: torch.device) -> bool:
        """Returns True: the ranks of a host can map each other's memory."""
        del device
        return True

    def backend_for(self, device: torch.device) -> Library:
        """Returns the communication library that the description of the job names."""
        del device
        return _PlannedLibrary(self.described.library)

    def peers_for(self, device: torch.device) -> Library:
        """Returns the backend for peer copies."""
        del device
        return _PlannedLibrary("peer copies")


def planned_job(fusion: Fusion, described: JobDescription) -> PlannedJob:
    """Returns the job that has all ranks of the fusion's meshes.

    Raises:
        ShardingError: no tensor has a mesh, or no mesh contains the rank of the description.
    """
    devices, rank = requested_devices(fusion), described.rank
    if not devices:
        raise ShardingError(
            "the definition names no mesh, so there are no ranks to plan for: annotate a tensor, "
            "for example with define_tensor(.., mesh=mesh, placements=[Shard(0)])"
        )
    if rank not in devices:
        meshes = dict.fromkeys(str(tv.mesh) for tv in fusion.tensors() if tv.mesh is not None)
        raise ShardingError(
            f"rank {rank} is on no mesh of the definition, so it would store and send nothing: "
            f"choose a rank of {' or '.join(meshes)}"
        )
    return PlannedJob(described, devices[-1] + 1)


# ----------------------------------------------------------------------
# Another mesh.


def on_mesh(fusion: Fusion, mesh: DeviceMesh) -> Fusion:
    """Returns a copy of a fusion in which `mesh` replaces the fusion's only mesh. If the two are
    equal, returns the fusion itself.

    Each axis is divided along the same mesh dimensions as before, into as many parts as `mesh` has
    devices along them.

    Raises:
        ShardingError: the fusion has several meshes or none, or a mesh with another number of
            dimensions.
        UnsupportedError: the user divided an axis over streams, or wrote the number of devices into
            an extent or a memory layout.
    """
    meshes = list(dict.fromkeys(tv.mesh for tv in fusion.tensors() if tv.mesh is not None))
    if meshes == [mesh]:
        return fusion
    if len(meshes) != 1 or meshes[0].ndim != mesh.ndim:
        names = " and ".join(map(str, meshes)) or "none"
        raise ShardingError(
            f"{mesh} can replace one mesh of {mesh.ndim} dimension{'s' if mesh.ndim > 1 else ''}, "
            f"but the definition has {names}: write the definition on {mesh}"
        )
    if has_streams(fusion):
        raise UnsupportedError(
            f"program_for cannot replace the mesh by {mesh}, because the definition divides axes "
            "over streams, whose number of steps may depend on the number of devices: define the "
            f"tensors on {mesh}, and leave out `mesh`"
        )
    copy, _ = fusion.copy()
    for tv in copy.tensors():
        if tv.mesh is not None:
            _move(tv, mesh)
    return copy


def _move(tv: TensorView, mesh: DeviceMesh) -> None:
    """Divides a tensor over the devices of another mesh, along the same dimensions."""
    found = axis_cuts(tv, DEVICE_TYPES)
    if declared_order(tv) is None or any(cut.whole for cuts in found.values() for cut in cuts):
        raise UnsupportedError(
            f"{tv.label} has an extent or a memory layout with the number of devices of {tv.mesh}: "
            f"write the definition on {mesh}{user_code(tv.user_line())}"
        )
    unparallelize(tv, lambda axis: axis.is_device)
    tv.mesh = mesh
    for number, cuts in found.items():
        add_cuts(tv, number, tuple(replace(c, count=mesh.size_of(c.ptype)) for c in cuts))


# ----------------------------------------------------------------------
# Inputs without memory.


def stand_ins(fusion: Fusion, inputs: Sequence[object] | None, rank: int) -> list[Argument]:
    """Returns the inputs that `rank` passes to a definition, with tensors on torch's meta device.

    Tensors on this device have no memory. `inputs` has an entry for each declared input. For a
    tensor, the entry is the global shape; it may be None if the definition has numbers for all
    extents. For a number, the entry is its value. A CPU scalar becomes a tensor of one element on
    the CPU. Shards are dense, in the declared memory order. A shard may be shorter than that of
    other ranks.

    Raises:
        InputError: an extent or a number is missing, or does not fit the definition.
        ShardingError: a mesh does not divide an extent.
    """
    declared = fusion.inputs
    given = [None] * len(declared) if inputs is None else list(inputs)
    check_count(len(given), declared, fusion.scalar_lines)
    return [
        _shard(fusion, position, tv, value, rank)
        if isinstance(tv, TensorView)
        else _number(position, tv, value, fusion)
        for position, (tv, value) in enumerate(zip(declared, given, strict=True))
    ]


def _number(position: int, declared: object, value: object, fusion: Fusion) -> Argument:
    if isinstance(value, bool | int | float | complex):
        return value  # pyright: ignore[reportReturnType]
    line = fusion.scalar_lines.get(declared, "")  # pyright: ignore[reportArgumentType, reportCallIssue]
    raise InputError(
        f"input {position}, {declared}, is a number, but found {value!r}: pass its value, such as "
        f"inputs=[.., 2.0, ..]{user_code(line)}"
    )


def _shard(fusion: Fusion, position: int, tv: TensorView, value: object, rank: int) -> torch.Tensor:
    """Returns the shard of an input tensor on `rank`, without memory."""
    dtype = to_torch(tv.dtype())
    if tv.is_cpu_scalar:
        return torch.ones((), dtype=dtype)
    whole, uneven = _global_shape(fusion, position, tv, value), uneven_positions(tv)
    for axis, found in uneven.items():
        whole[axis] = found.block * found.devices
    shape = list(local_sizes(tv, whole))
    for axis, found in uneven.items():
        assert tv.mesh is not None, f"{tv} is sharded without a mesh"
        shape[axis] = found.block_at(tv.mesh.coordinate(rank, found.ptype))[1]
    return torch.empty_strided(shape, allocated_strides(tv, shape), dtype=dtype, device="meta")


def _global_shape(fusion: Fusion, position: int, tv: TensorView, value: Any) -> list[int]:
    """Returns the extents of a whole input tensor: those in `value`, which must agree with the
    numbers in the definition.
    """
    known = [sc.int_value(fusion.canonical(x)) for x in tv.shape()]
    words, line = f"input {position}, {tv.label} {_shape_text(tv)},", user_code(tv.user_line())
    if value is None:
        if None in known:
            raise InputError(
                f"{words} has an extent that is not known before a call: pass inputs=[..] with the "
                f"shape of each whole tensor, such as (8192, 4096){line}"
            )
        return [n for n in known if n is not None]
    if isinstance(value, torch.Tensor) or not isinstance(value, tuple | list):
        raise InputError(
            f"{words} needs the shape of the whole tensor, such as (8192, 4096), but found a "
            f"{type(value).__name__}{line}"
        )
    try:
        shape = [take_integer(n) for n in value]  # pyright: ignore[reportUnknownVariableType]
    except Mismatch as error:
        raise InputError(f"{words} needs a shape of integers: {error.text}{line}") from None
    fits = len(shape) == len(known) and all(
        n >= 0 and k in (None, n) for n, k in zip(shape, known, strict=True)
    )
    if not fits:
        raise InputError(f"{words} cannot have the global shape {tuple(shape)}{line}")
    return shape


def _shape_text(tv: TensorView) -> str:
    return f"[{', '.join(map(str, tv.shape()))}]"
