"""Executes a sharded fusion for all ranks at once in this process, as a reference for the passes.

Local ops run one by one, through `localize` and torch in float64. Collectives are executed on flat
buffers, as a backend would, so that a wrong memory order gives wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fuser.ir.binding import bind_inputs
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.memory_layout import is_contiguous, memory_order
from fuser.ir.ops.nodes import Reshard
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import evaluate_fusion
from multidevice.job.shard_tensor import shard_for_rank, unshard
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.passes.pipeline import ShardingResult, shard_fusion
from multidevice.sharding.placement import Block
from multidevice.sharding.reshard import communicates, communication_type, moved_axes, team_of
from tests.support import step_by_step

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
Local = dict[TensorView, torch.Tensor]


@dataclass
class Run:
    """A sharded fusion, its outputs assembled from all ranks, and its communications."""

    fusion: Fusion
    result: ShardingResult
    outputs: list[torch.Tensor]
    shards: list[list[torch.Tensor]]
    slices: list[Reshard] = field(default_factory=list)

    @property
    def collectives(self) -> list[tuple[str, str]]:
        """Returns type and team of every collective, in order."""
        return [(communication_type(r), str(team_of(r))) for r in self.result.communications]


def shard_axis(tv: TensorView, axis: int, count: int, ptype: ParallelType = X) -> None:
    """Cuts a loop axis into `count` blocks, as users do."""
    tv.outer_split(axis, count)
    tv.axis(axis).parallelize(ptype)


def define(build: Callable[[], object]) -> Fusion:
    """Returns the fusion that `build` defines."""
    fusion = Fusion()
    with FusionGuard(fusion):
        build()
    return fusion


def run(
    fusion: Fusion,
    inputs: Sequence[torch.Tensor],
    *,
    units: Callable[[Fusion], list[step_by_step.Unit]] = step_by_step.ops_of,
) -> Run:
    """Shards a fusion in place and runs it on whole inputs, unit by unit."""
    result = shard_fusion(fusion)
    values = {s: int(v) for s, v in bind_inputs(fusion, inputs).items()}
    meshes = [tv.mesh for tv in fusion.tensors() if tv.mesh is not None]
    ranks = sorted({r for mesh in meshes for r in mesh.devices}) or [0]
    tensors: dict[int, Local] = {r: {} for r in ranks}
    for tv, whole in zip(fusion.inputs, inputs, strict=True):
        assert isinstance(tv, TensorView)
        for rank in ranks:
            wide = whole.to(torch.float64) if whole.is_floating_point() else whole
            tensors[rank][tv] = shard_for_rank(wide, tv, rank) if tv.mesh else wide
    done = Run(fusion, result, [], [])

    def execute(unit: step_by_step.Unit, tensors: dict[int, Local], block: Block) -> None:
        op = unit.exprs[0]
        if isinstance(op, Reshard) and communicates(op):
            _communicate(op, tensors)
        elif isinstance(op, Reshard):
            done.slices.append(op)
            _slice(op, tensors)
        else:
            _compute(unit.kernel or only(fusion, op), unit, values, tensors, block)

    step_by_step.run(fusion, units(fusion), values, tensors, execute)
    for out in fusion.outputs:
        if out.mesh is None:
            done.outputs.append(tensors[0][out])
            continue
        shards = [tensors[r][out] for r in out.mesh.devices]
        done.shards.append(shards)
        done.outputs.append(unshard(shards, out))
        for rank, shard in zip(out.mesh.devices, shards, strict=True):
            # Replicas agree: every rank's shard is its part of the whole.
            torch.testing.assert_close(shard, shard_for_rank(done.outputs[-1], out, rank))
    return done


def only(fusion: Fusion, op: TensorOp) -> Fusion:
    """Returns a fusion that holds a single op."""
    at = fusion.exprs.index(op)
    single, _ = fusion.copy()
    kept = single.exprs[at]
    single.exprs = (kept,)
    single.inputs = [v for v in dict.fromkeys(kept.inputs) if isinstance(v, TensorView)]
    single.outputs = list(kept.outputs)
    single.aliases = []
    return single


def _compute(
    kernel: Fusion,
    unit: step_by_step.Unit,
    values: dict[Symbol, int],
    tensors: dict[int, Local],
    block: Block,
) -> None:
    local, _ = localize(kernel, block)
    for mine in tensors.values():
        given = [mine[v] for v in unit.inputs]
        results = evaluate_fusion(local, given, dtype=torch.float64, values=values)
        mine.update(zip(unit.outputs, results, strict=True))


def _slice(op: Reshard, tensors: dict[int, Local]) -> None:
    team, axis = team_of(op), op.target
    assert axis is not None
    for rank, mine in tensors.items():
        whole = mine[op.inp]
        part = whole.shape[axis] // team.size
        mine[op.out] = whole.narrow(axis, team.ranks(rank).index(rank) * part, part)


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _buffer(tv: TensorView, local: torch.Tensor) -> torch.Tensor:
    """Returns a shard as the flat buffer described by its allocation domain."""
    assert is_contiguous(tv), tv
    return local.permute([p for p, _ in memory_order(tv)]).reshape(-1)


def _from_buffer(tv: TensorView, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    order = [p for p, _ in memory_order(tv)]
    placed = flat.view([shape[p] for p in order])
    return placed.permute([order.index(p) for p in range(len(order))])


def _communicate(op: Reshard, tensors: dict[int, Local]) -> None:
    source, out = op.inp, op.out
    kind, (_, moved) = communication_type(op), moved_axes(op)
    buffers = {rank: _buffer(source, mine[source]) for rank, mine in tensors.items()}
    for rank, mine in tensors.items():
        team = team_of(op).ranks(rank)
        assert rank in team and len(team) > 1, (op, team)
        parts = [buffers[r] for r in team]
        shape = list(mine[source].shape)
        if kind == "Allgather":
            flat = torch.cat(parts)
            assert moved is not None
            shape[moved] *= len(team)
        elif kind == "AllToAll":
            # The i-th block of every buffer goes to the i-th rank of the team.
            flat = torch.cat([part.chunk(len(team))[team.index(rank)] for part in parts])
            assert op.source is not None and moved is not None
            shape[op.source] *= len(team)
            shape[moved] //= len(team)
        else:
            assert op.reduction is not None
            flat = parts[0]
            for part in parts[1:]:
                flat = _REDUCE[op.reduction](flat, part)
            gone = _reduced_position(op)
            assert shape.pop(gone) == 1
            if kind == "ReduceScatter":
                flat = flat.chunk(len(team))[team.index(rank)]
                assert moved is not None
                shape[moved] //= len(team)
        mine[out] = _from_buffer(out, flat, shape)


def _reduced_position(op: TensorOp) -> int:
    (position,) = [
        source
        for root, source in zip(op.out_tensor.domain.maybe_root, op.axis_map(0), strict=True)
        if root.is_reduction() and source is not None
    ]
    return position


def mesh(*shape: int) -> DeviceMesh:
    """Returns a mesh of this shape over ranks 0, 1, ..."""
    return DeviceMesh(torch.arange(math.prod(shape)).reshape(shape))
