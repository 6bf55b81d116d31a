"""Which communication a resharding op is: type, device type, axes, reduction, mesh and team.

A resharding op is classified by where its producer and its consumer are cut along the one device
type that changes. The description holds for all ranks; `team_of` evaluates it for one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from fuser.errors import ShardingError, UnsupportedError
from fuser.ir.axis_graph import mapped_axes
from fuser.ir.domain import IterDomain
from fuser.ir.mesh import DeviceMesh
from fuser.ir.nodes import LoadStoreOp, ReductionOp, SqueezeOp, TensorOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, ParallelType
from multidevice.sharding import have_different_shardings, is_resharding, sharded_logical_axis


class CommunicationType(enum.Enum):
    """The collectives and copies between devices; the value is the print form."""

    allgather = "Allgather"
    allreduce = "Allreduce"
    reduce_scatter = "ReduceScatter"
    all_to_all = "AllToAll"
    broadcast = "Broadcast"
    gather = "Gather"
    scatter = "Scatter"
    reduce = "Reduce"
    send_recv = "SendRecv"


SUPPORTED = (
    CommunicationType.allgather,
    CommunicationType.allreduce,
    CommunicationType.reduce_scatter,
)

# ReductionOp.kind -> the reduction of the communicator backends.
REDUCTIONS = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}


@dataclass(frozen=True)
class CommunicationInfo:
    """One communication.

    `ptype` is the device type that changes; the team lies along it in `mesh` (the producer's).
    `producer_axis` and `consumer_axis` are the logical positions (without reductions) of the axis
    that is gathered, scattered or summed over, on either side; None where that side has no such
    axis. `reduction` is sum, prod, min or max for allreduce, reduce-scatter and reduce.
    """

    type: CommunicationType
    ptype: ParallelType
    producer_axis: int | None
    consumer_axis: int | None
    mesh: DeviceMesh
    consumer_mesh: DeviceMesh
    reduction: str | None = None

    @property
    def team_size(self) -> int:
        return self.mesh.size_of(self.ptype)

    def team_text(self) -> str:
        """Return the team as text: `(0 1)` on a 1-D mesh, else the mesh dimension by name."""
        return team_text(self.mesh, self.ptype)


@dataclass(frozen=True)
class LocalSlice:
    """A replicated operand of which every device keeps its own block of one logical axis."""

    ptype: ParallelType
    axis: int
    mesh: DeviceMesh

    @property
    def count(self) -> int:
        return self.mesh.size_of(self.ptype)


def team_text(mesh: DeviceMesh, ptype: ParallelType) -> str:
    if mesh.ndim == 1:
        return "(" + " ".join(map(str, mesh.devices)) + ")"
    return f"{ptype.name} of {mesh}"


def team_of(info: CommunicationInfo, rank: int) -> tuple[int, ...]:
    """Return the ranks that communicate with `rank`, itself included, in part order.

    () for a rank outside the mesh. Raises `UnsupportedError` for types that are not collectives of
    one mesh dimension.
    """
    if info.type not in (*SUPPORTED, CommunicationType.all_to_all):
        raise UnsupportedError(f"{info.type.value}: teams over two meshes are not supported yet")
    return info.mesh.team(rank, (info.ptype,)) if info.mesh.has(rank) else ()


def is_copy(op: TensorOp) -> bool:
    """Whether the op is a plain copy: same axes in the same order."""
    return isinstance(op, LoadStoreOp) and not op.out.domain.root


# ------------------------------------------------------------------ classification
def resharding_of(op: TensorOp) -> CommunicationInfo | LocalSlice | None:
    """Return what a resharding op does; None for an op that is local on every device.

    Raises:
        ShardingError: the op is neither a copy nor a reduction over devices, or more than one
        device
            type changes (decomposition leaves no such op).
    """
    if not is_resharding(op):
        return None
    producer, consumer = op.inputs[0], op.out_tensor
    is_reduction = isinstance(op, ReductionOp | SqueezeOp)
    if not (is_copy(op) or is_reduction) or producer.mesh is None or consumer.mesh is None:
        raise ShardingError(f"{op.name} is not one communication: {producer} -> {consumer}")
    ptype = _changing_type(op)
    p_axis = _position(producer, ptype)
    c_axis = _position(consumer, ptype)
    to_consumer = _position_map(op)
    to_producer = {c: p for p, c in to_consumer.items()}
    same_mesh = producer.mesh == consumer.mesh
    if is_reduction:
        if p_axis is None:
            raise ShardingError(
                f"Expected a reduction-based communication: {op.name} of {producer} -> {consumer}"
            )
        kind = op.kind if isinstance(op, ReductionOp) else "add"
        found = _reduction_type(c_axis is not None, same_mesh)
        axes = (p_axis, None) if c_axis is None else (to_producer.get(c_axis), c_axis)
        return _info(found, ptype, axes, op, reduction=REDUCTIONS[kind])
    if p_axis is None and c_axis is None:
        return _info(CommunicationType.broadcast, ptype, (None, None), op)
    if p_axis is not None and c_axis is None:
        found = CommunicationType.allgather if same_mesh else CommunicationType.gather
        return _info(found, ptype, (p_axis, to_consumer.get(p_axis)), op)
    assert c_axis is not None
    if p_axis is None:
        if same_mesh:
            return LocalSlice(ptype, c_axis, consumer.mesh)
        return _info(CommunicationType.scatter, ptype, (to_producer.get(c_axis), c_axis), op)
    is_same_axis = to_consumer.get(p_axis) == c_axis
    found = CommunicationType.send_recv if is_same_axis else CommunicationType.all_to_all
    return _info(found, ptype, (p_axis, c_axis), op)


def communication_info(op: TensorOp) -> CommunicationInfo | None:
    """Return the communication that an op is; None for local ops and local slices."""
    found = resharding_of(op)
    return found if isinstance(found, CommunicationInfo) else None


def local_slice(op: TensorOp) -> LocalSlice | None:
    """Return the slice that a copy from replicated to sharded is; None for all other ops."""
    found = resharding_of(op)
    return found if isinstance(found, LocalSlice) else None


def check_lowerable(op: TensorOp) -> None:
    """Raise when the op reshards and is not a supported collective or a local slice.

    Raises `ShardingError` for an op that is not one communication, `UnsupportedError` for one
    that is not implemented.
    """
    found = resharding_of(op)
    if not isinstance(found, CommunicationInfo):
        return
    if found.type not in SUPPORTED:
        raise UnsupportedError(
            f"{found.type.value} for {op.name} of {op.inputs[0]} -> {op.out_tensor}: only "
            f"{', '.join(t.value for t in SUPPORTED)} on one mesh are supported yet"
        )


def _info(
    found: CommunicationType,
    ptype: ParallelType,
    axes: tuple[int | None, int | None],
    op: TensorOp,
    *,
    reduction: str | None = None,
) -> CommunicationInfo:
    producer, consumer = op.inputs[0], op.out_tensor
    assert producer.mesh is not None and consumer.mesh is not None
    return CommunicationInfo(
        found, ptype, axes[0], axes[1], producer.mesh, consumer.mesh, reduction=reduction
    )


def _reduction_type(is_scattered: bool, same_mesh: bool) -> CommunicationType:
    if is_scattered:
        return CommunicationType.reduce_scatter
    return CommunicationType.allreduce if same_mesh else CommunicationType.reduce


def _changing_type(op: TensorOp) -> ParallelType:
    """Return the one device type whose sharding changes.

    Between two meshes every type of theirs counts as different; then it is the one that cuts either
    side, or mesh_x.
    """
    producer, consumer = op.inputs[0], op.out_tensor
    types = [p for p in DEVICE_TYPES if have_different_shardings(op, 0, (p,))]
    if producer.mesh != consumer.mesh:
        types = [
            p
            for p in types
            if _position(producer, p) is not None or _position(consumer, p) is not None
        ] or types[:1]
    if len(types) != 1:
        names = ", ".join(p.text for p in types)
        raise ShardingError(
            f"Expected at most one sharding change in {op.name} of {producer} -> {consumer}, "
            f"found {names}"
        )
    return types[0]


def _position(tv: TensorView, ptype: ParallelType) -> int | None:
    axis = sharded_logical_axis(tv, ptype)
    return None if axis < 0 else axis


def _position_map(op: TensorOp) -> dict[int, int]:
    """Return producer position -> consumer position (both without reductions)."""
    producer, consumer = op.inputs[0], op.out_tensor
    positions = _numbered(consumer.domain.no_reductions)
    sources = _numbered(producer.domain.no_reductions)
    return {
        sources[p.number]: positions[c.number]
        for p, c in mapped_axes(op, 0)
        if c.number in positions
    }


def _numbered(axes: Sequence[IterDomain]) -> dict[int, int]:
    return {a.number: k for k, a in enumerate(axes)}
