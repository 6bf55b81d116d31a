"""The communication of each `Reshard` op: its type, its team, and the axes it gathers or scatters.

A `Reshard` op changes how the axes of a tensor are divided over devices. The pass `decompose` turns
every such change into a `Reshard`. `as_reshard` proves once which change an op makes, and all later
stages read the `Reshard` node. All functions of this module return the same on all ranks, except
`TeamOf.ranks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from fuser.ir.axis_graph import mapped_axes
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import STORED, is_complex
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.ops.nodes import LoadStoreOp, ReductionOp, Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.passes.view_ops import is_copy, is_permute
from fuser.support.arguments import require
from fuser.support.errors import ShardingError, UnsupportedError, user_code
from multidevice.sharding.mesh_transfer import MeshTransfer, transfer_between
from multidevice.sharding.placement import (
    Cuts,
    Placement,
    copy_like,
    placement,
    step_parts,
    stream_axis_of,
)
from multidevice.sharding.propagation import is_from_devices
from multidevice.sharding.queries import (
    have_different_shardings,
    is_resharding,
    sharded_logical_axis,
)
from multidevice.transports.base.collectives import BROADCAST
from multidevice.transports.base.protocol import RedOp

# The name of a collective (`COLLECTIVES`), or CollectivePermute, SendRecv, LocalSlice, LocalCopy or
# StepSlice.
# SendRecv: ranks of one mesh send pieces of a tensor to ranks of another mesh.
# LocalSlice: every device keeps a block of its data. LocalCopy: the ranks of another mesh have
# their blocks already. StepSlice: every step of a stream loop uses one block.
CommunicationType = str
_LOCAL = ("LocalSlice", "LocalCopy", "StepSlice")
# ReductionOp kind -> the name of the reduction in host programs and backends.
RED_OP_OF: dict[str, RedOp] = {"add": "SUM", "mul": "PRODUCT", "min": "MIN", "max": "MAX"}


@dataclass(frozen=True)
class TeamOf:
    """The teams of a collective on a mesh: the ranks that communicate with one another, for each
    rank.

    The team of a rank consists of the ranks of `mesh` whose coordinates differ only along the mesh
    dimensions `ptypes`.
    """

    mesh: DeviceMesh
    ptypes: tuple[ParallelType, ...]

    def __post_init__(self) -> None:
        require("TeamOf", "mesh", self.mesh, DeviceMesh)
        object.__setattr__(
            self, "ptypes", tuple(require("TeamOf", "ptypes", self.ptypes, Sequence[ParallelType]))
        )

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks in the team of `rank`, in mesh order; () if the mesh does not contain
        `rank`.
        """
        return self.mesh.team(rank, self.ptypes) if self.mesh.has(rank) else ()

    @property
    def size(self) -> int:
        """The number of ranks in each team."""
        return math.prod(self.mesh.size_of(p) for p in self.ptypes)

    def __str__(self) -> str:
        if self.mesh.ndim == 1:
            return f"({self.mesh.ranks_text})"
        return f"{' '.join(p.name for p in self.ptypes)} of {self.mesh}"


# ------------------------------------------------------------------ what a Reshard does
def communication_type(op: Reshard) -> CommunicationType:
    """Returns the type of communication of a `Reshard` op, such as "Allgather" or "LocalSlice".

    Such an op changes how a tensor is divided over devices. The type follows from the axes of the
    op, its reduction and its meshes. In a stream loop, which computes one block of a tensor per
    step, the type is that of one step:

    - AllToAll: every device exchanges blocks with every other device.
    - Broadcast: each step needs the block of one device, which sends it to all.
    - CollectivePermute: each device needs the block of another device, because every device starts
      with its own block.
    - StepSlice: each step reads a block of local data.

    Between two meshes, the type is SendRecv, Broadcast or LocalCopy.

    Instead of a Broadcast or a CollectivePermute, the lowering may choose any other communication
    that brings each device the block of the step.
    """
    if any(p.is_stream for p in op.ptypes):
        if not any(p.is_device for p in op.ptypes):
            return "StepSlice"
        if is_exchange(op):
            return "AllToAll"
        found = stream_axis_of(op.out)
        return "CollectivePermute" if found is not None and found[1].swizzle else "Broadcast"
    if changes_mesh(op):
        transfer = transfer_of(op)
        if transfer.is_local:
            return "LocalCopy"
        return BROADCAST.name if transfer.teams else "SendRecv"
    source, target = _stored(op.inp, op.source), _stored(op.out, op.target)
    is_spread, becomes_spread = source is not None, target is not None
    if op.reduction is not None:
        return "ReduceScatter" if becomes_spread else "Allreduce"
    if is_spread and becomes_spread:
        return "AllToAll"
    return "Allgather" if is_spread else "LocalSlice"


def changes_mesh(op: TensorOp) -> bool:
    """Returns whether `op` is a copy of a tensor to another mesh, also before it is a `Reshard`."""
    is_plain = isinstance(op, Reshard) or is_copy(op)
    if not is_plain or op.inputs[0].mesh is None or op.out_tensor.mesh is None:
        return False
    return op.inputs[0].mesh != op.out_tensor.mesh


def transfer_of(op: TensorOp) -> MeshTransfer:
    """Returns which rank sends which piece to which rank, for a copy from one mesh to another."""
    inp, out = op.inputs[0], op.out_tensor
    assert inp.mesh is not None and out.mesh is not None, f"{op} has an operand without a mesh"
    copied = frozenset(p for p, a in enumerate(out.domain.no_reductions) if a.is_broadcast)
    return transfer_between((inp.mesh, placement(inp)), (out.mesh, placement(out)), copied)


def _stored(tv: TensorView, position: int | None) -> int | None:
    """Returns `position`, or None if the axis of `tv` at this position is a broadcast, or if
    `position` is None.

    A broadcast axis has one element in memory, also if it was expanded. Every device stores this
    element, so the axis is not divided, and no communication moves its parts.
    """
    if position is None or tv.domain.no_reductions[position].is_broadcast:
        return None
    return position


def communicates(op: TensorOp) -> bool:
    """Returns whether devices exchange data in `op`, because it changes how a tensor is divided
    over them.

    This is true for a `Reshard` op that does not only select a part of local data.
    """
    return isinstance(op, Reshard) and communication_type(op) not in _LOCAL


def is_step_slice(op: TensorOp) -> bool:
    """Returns whether `op` only selects the block of a tensor that a step of a stream loop reads.

    A stream loop is a loop on the host; each iteration (step) computes one block of a tensor.
    """
    return isinstance(op, Reshard) and communication_type(op) == "StepSlice"


def is_device_to_stream(op: TensorOp) -> bool:
    """Returns whether, in `op`, each step of a stream loop receives the block of one device.

    `op` is then a `Reshard` (change of sharding). Its operand is divided over devices along an
    axis, and its result is divided into steps along the same axis.
    """
    return _has_steps(op) and op.source == op.target


def is_exchange(op: TensorOp) -> bool:
    """Returns whether, in each step of a stream loop, every device sends one block and receives
    another.

    `op` is then a `Reshard` (change of sharding) that changes two axes. One axis is divided over
    devices in the operand, and into steps in the result. The other axis is divided into steps in
    the operand, and over devices in the result.
    """
    return _has_steps(op) and op.source != op.target


def _has_steps(op: TensorOp) -> TypeGuard[Reshard]:
    return isinstance(op, Reshard) and {p.is_device for p in op.ptypes} == {True, False}


def exchanged_axes(op: TensorOp) -> tuple[int, int] | None:
    """Returns the positions (source, target) of the two axes between which devices exchange blocks.

    In each step of a stream loop, every device sends one block and receives another. The source
    axis is divided over devices in the operand and into steps in the result. The target axis is
    divided into steps in the operand and over devices in the result. Returns None if `op` is no
    such exchange.

        u [stream, DIDx, ...] = set(t [DIDx, stream, ...])   ->   (0, 1)
    """
    if isinstance(op, Reshard):
        if not is_exchange(op) or op.source is None or op.target is None:
            return None
        return op.source, op.target
    if not is_copy(op):
        return None
    inp, out = op.inputs[0], op.out_tensor
    if inp.mesh is None or inp.mesh != out.mesh or len(step_parts(out)) != 1:
        return None
    pairs = list(zip(placement(inp), placement(out), strict=True))
    becomes_step = [
        p for p, (a, b) in enumerate(pairs) if is_same_cut(a, b) and a[0].ptype.is_device
    ]
    becomes_device = [
        p for p, (a, b) in enumerate(pairs) if is_same_cut(a, b) and b[0].ptype.is_device
    ]
    if len(becomes_step) != 1 or len(becomes_device) != 1:
        return None
    (source,), (target,) = becomes_step, becomes_device
    (device,), (received,) = pairs[source]
    (sent,), (other,) = pairs[target]
    is_one_type = device.ptype is other.ptype and sent.swizzle in (None, device.ptype)
    return (source, target) if is_one_type and received.swizzle is None else None


def is_same_cut(a: Cuts, b: Cuts) -> bool:
    """Returns whether `a` and `b` divide an axis into the same blocks, one of them over devices,
    the other over the steps of a stream loop.

    `a` and `b` list divisions of the axis. If the result is True, the block of device i is also the
    block of step i. Returns False if `a` or `b` does not have exactly one division.
    """
    if len(a) != 1 or len(b) != 1:
        return False
    (one,), (other,) = a, b
    return (
        {one.ptype.is_device, other.ptype.is_device} == {True, False}
        and sc.as_scalar(one.count) == sc.as_scalar(other.count)
        and one.whole == other.whole
    )


def moved_axes(op: Reshard) -> tuple[int | None, int | None]:
    """Returns the positions, in `inp` and `out`, of the axis that a `Reshard` op gathers or
    scatters.

    Such an op changes how a tensor is divided over devices. Reduction axes are not counted. A
    position is None if the tensor does not have the axis. Both positions are None for an allreduce.
    Both are also None if a division over devices becomes a division over the steps of a stream
    loop, or the reverse: each step then moves a block as it is, without joining or cutting it.
    """
    if _has_steps(op):
        return None, None
    to_out = position_map(op)
    source, target = _stored(op.inp, op.source), _stored(op.out, op.target)
    if target is not None and (source is None or op.reduction is not None):
        to_inp = {c: p for p, c in to_out.items()}
        return to_inp.get(target), target
    if op.reduction is not None or source is None:
        return None, None
    return source, to_out.get(source) if target is None else target


def sliced_axis(op: Reshard) -> int:
    """Returns the position of the axis along which a local slice keeps only one device's block.

    The caller ensures that `op` is a local slice. The position is the same in `inp` and `out`;
    reduction axes are not counted.
    """
    if op.target is not None:
        return op.target
    assert op.source is not None, f"{op} changes no axis"
    return position_map(op)[op.source]


def position_map(op: TensorOp) -> dict[int, int]:
    """Returns which axis of the first operand of `op` corresponds to which axis of the result.

    Maps positions in the operand to positions in the result. Reduction axes are not counted.
    """
    positions = _numbered(op.out_tensor.domain.no_reductions)
    sources = _numbered(op.inputs[0].domain.no_reductions)
    return {
        sources[p.number]: positions[c.number]
        for p, c in mapped_axes(op, 0)
        if c.number in positions
    }


def _numbered(axes: tuple[IterDomain, ...]) -> dict[int, int]:
    return {a.number: k for k, a in enumerate(axes)}


def team_of(op: Reshard) -> TeamOf:
    """Returns the teams of a `Reshard` op: the ranks that take part in one communication together.

    Such an op changes how a tensor is divided along some mesh dimensions; a team has the ranks
    along these dimensions. If the op broadcasts a tensor to another mesh, a team has a rank that
    sends, and the ranks that receive from it.
    """
    if changes_mesh(op):
        teams = transfer_of(op).teams
        assert teams, f"{communication_type(op)} of {op.inp} has no teams"
        ranks = teams if len(teams) > 1 else next(iter(teams))
        return TeamOf(DeviceMesh(ranks), (ParallelType.mesh_x,))
    assert op.inp.mesh is not None, f"{op.inp} of a Reshard has no mesh"
    return TeamOf(op.inp.mesh, tuple(p for p in op.ptypes if p.is_device))


# ------------------------------------------------------------------ finding it out, once
def as_reshard(op: TensorOp) -> Reshard | None:
    """Returns the `Reshard` op (a change of the division over devices) that is equal to `op`.

    `op` is a copy or a reduction. Returns None if its operand and result are divided in the same
    way, so that no communication is needed.

    Raises:
        ShardingError: the op is neither a copy nor a reduction over devices; or the tensor changes
            along more than one mesh dimension (decomposition leaves no such op).
        UnsupportedError: a copy to another mesh has a stream axis.
    """
    if not is_resharding(op):
        return None
    producer, consumer = op.inputs[0], op.out_tensor
    is_reduction = isinstance(op, ReductionOp)
    if not (is_copy(op) or is_reduction) or producer.mesh is None or consumer.mesh is None:
        raise ShardingError(
            f"{op.name} of {tensor_words(producer)} has a result that is placed differently on "
            "devices, and only a copy or a sum can be one communication: give the result the "
            "placement of the operand, and change it by a set"
            f"{user_code(op.where)}{in_ir(f'{producer} -> {consumer}')}"
        )
    if changes_mesh(op):
        if step_parts(producer) or step_parts(consumer):
            raise UnsupportedError(
                f"{op.name} of {tensor_words(producer)} from {producer.mesh} to {consumer.mesh}: "
                "the steps of a stream loop cannot move a tensor to another mesh; copy it (set) "
                f"without a stream axis first{user_code(op.where)}"
                f"{in_ir(f'{producer} -> {consumer}')}"
            )
        return Reshard(consumer, producer, ptypes=()).replace(where=op.where)
    ptype = _changing_type(op)
    source, target = _position(producer, ptype), _position(consumer, ptype)
    if is_reduction and source is None:
        raise ShardingError(
            f"Expected a reduction-based communication: {op.name} of {tensor_words(producer)} "
            "reduces no axis that is cut over devices"
            f"{user_code(op.where)}{in_ir(f'{producer} -> {consumer}')}"
        )
    ptypes = (ptype,)
    if exchanged_axes(op) is not None:
        ptypes = (ptype, ParallelType.stream)
    one_part = len(step_parts(consumer)) == 1
    if source is not None and target is None and not is_reduction and one_part:
        # A block per device may become a block per step.
        step = _position(consumer, ParallelType.stream)
        cuts = () if step is None else placement(consumer)[step]
        if step == position_map(op).get(source) and is_from_devices(
            producer, source, cuts, consumer.mesh
        ):
            ptypes, target = (ptype, ParallelType.stream), step
    return Reshard(
        consumer,
        producer,
        ptypes=ptypes,
        source=source,
        target=target,
        reduction=op.kind if isinstance(op, ReductionOp) else None,
    ).replace(where=op.where)


def check_lowerable(op: Reshard) -> None:
    """Raises `UnsupportedError` if no transport implements the communication of a `Reshard` op.

    Such an op changes how a tensor is divided over devices. The reason is the dtype of the tensor.
    """
    found = communication_type(op)
    if op.inp.dtype() in STORED:
        raise UnsupportedError(
            f"{found} of {tensor_words(op.inp)}: a tensor of this dtype can be stored, but not "
            f"sent to other ranks{user_code(op.where)}{in_ir(f'{op.inp} -> {op.out}')}"
        )
    if op.reduction not in (None, "add") and is_complex(op.inp.dtype()):
        raise UnsupportedError(
            f"{found} of {tensor_words(op.inp)}: the only reduction of complex numbers over "
            f"devices is a sum, not {op.reduction}{user_code(op.where)}"
            f"{in_ir(f'{op.inp} -> {op.out}')}"
        )


def _changing_type(op: TensorOp) -> ParallelType:
    """Returns the one mesh dimension along which operand and result of `op` are divided
    differently.

    Raises `ShardingError` if there are several.
    """
    producer, consumer = op.inputs[0], op.out_tensor
    types = [p for p in DEVICE_TYPES if have_different_shardings(op, 0, (p,))]
    if len(types) != 1:
        names = ", ".join(p.text for p in types)
        raise ShardingError(
            f"Expected at most one sharding change in {op.name} of {tensor_words(producer)}, "
            f"found {names}: change one mesh dimension in each op"
            f"{user_code(op.where)}{in_ir(f'{producer} -> {consumer}')}"
        )
    return types[0]


def _position(tv: TensorView, ptype: ParallelType) -> int | None:
    axis = sharded_logical_axis(tv, ptype)
    return None if axis < 0 else axis


# ----------------------------------------------------------------------
# Resharding copies, one device type at a time, shared between their consumers.
#
#     x [DIDy(a), DIDx(b)] -> t = set(x) [DIDy(a), b] -> r = set(t) [a, b]     two allgathers


class Copies:
    """Creates copies of tensors with another placement. Returns an existing copy if there is one.

    The placement of a tensor says how its axes are divided over devices and the iterations of a
    stream loop. An existing copy is used if source tensor, mesh and placement are equal. If the
    source is a permutation of another tensor, a copy of that tensor with the same divisions is
    used, too. It is permuted, so that nothing is communicated:

        y = permute(x), u = set(x), v = set(y)   ->   u = set(x), v = permute(u)
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._known: dict[tuple[TensorView, DeviceMesh | None, Placement], TensorView] = {}

    def get(
        self, source: TensorView, mesh: DeviceMesh | None, cuts: Placement, *, before: TensorOp
    ) -> TensorView:
        """Returns a copy of the tensor `source` for the op `before` to read.

        The copy is on `mesh`, and `cuts` says how its axes are divided over devices and the
        iterations of a stream loop. Creates the copy if none is defined before that op.
        """
        known = self._known.get((source, mesh, cuts))
        if known is not None and self._is_before(known, before):
            return known
        made = copy_like(source, mesh, cuts)
        op = self._permute_of_copy(source, made, before) or LoadStoreOp(made, source)
        self._fusion.insert_before(before, [op.replace(where=before.where)])
        self._known[(source, mesh, cuts)] = made
        return made

    def _permute_of_copy(
        self, source: TensorView, made: TensorView, before: TensorOp
    ) -> LoadStoreOp | None:
        """Returns an op that computes `made`, a copy of `source`, by a permutation of an existing
        copy.

        `source` must be a permutation of another tensor, and the existing copy one of that tensor,
        with the same divisions. Returns None if `source` is no permutation, if there is no such
        copy before the op `before`, or if a stream loop computes it.
        """
        permute, cuts = source.definition(), placement(made)
        is_streamed = any(not cut.ptype.is_device for mine in cuts for cut in mine)
        if permute is None or not is_permute(permute) or is_streamed:
            return None
        positions = position_map(permute)
        order = [positions[p] for p in range(made.ndim)]
        known = self._known.get((permute.inp, made.mesh, tuple(cuts[p] for p in order)))
        if known is None or not self._is_before(known, before):
            return None
        logical = made.domain.logical_numbers
        made.domain = made.domain.having(root=[logical[p] for p in order])
        return LoadStoreOp(made, known)

    def feed(
        self, op: TensorOp, index: int, *, mesh: DeviceMesh | None, cuts: Placement
    ) -> TensorOp:
        """Replaces operand `index` of an op by a copy with another placement; returns the new op.

        The copy is on `mesh`, and `cuts` says how its axes are divided over devices and the
        iterations of a stream loop.
        """
        made = self.get(op.inputs[index], mesh, cuts, before=op)
        fed = replace_operand(op, index, made)
        self._fusion.replace_expr(op, [fed])
        return fed

    def drop_unused(self) -> None:
        """Removes the copies that this object has created and that no op reads any more."""
        for made in reversed(self._known.values()):
            definition = self._fusion.definition(made)
            if definition is not None and not self._fusion.uses(made):
                self._fusion.replace_expr(definition, [])

    def _is_before(self, tv: TensorView, op: TensorOp) -> bool:
        definition = self._fusion.definition(tv)
        exprs = self._fusion.exprs
        return definition is not None and exprs.index(definition) < exprs.index(op)


def replace_operand(op: TensorOp, index: int, new: TensorView) -> TensorOp:
    """Returns a copy of `op` in which operand number `index` (as in `op.inputs`) is the tensor
    `new`.
    """
    position = -1
    changes: dict[str, object] = {}
    for f in dataclasses.fields(op):  # pyright: ignore[reportArgumentType]
        kind, value = f.metadata.get("kind"), getattr(op, f.name)
        if kind == "operand" and value is not None:
            position += 1
            if position == index:
                changes[f.name] = new
        elif kind == "operands":
            values: tuple[object, ...] = getattr(op, f.name)
            at = index - position - 1
            position += len(values)
            if 0 <= at < len(values):
                changes[f.name] = (*values[:at], new, *values[at + 1 :])
    assert len(changes) == 1, f"{op} has no operand {index}"
    return op.replace(**changes)
