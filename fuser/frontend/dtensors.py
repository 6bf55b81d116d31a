"""Runs a definition on torch's DTensors (tensors that are distributed over processes): takes this
process's part out of each, and wraps the results.

Dimension i of a torch mesh is dimension i of the fusion's mesh (mesh_x is the last dimension). If
several mesh dimensions split one axis, the first of them splits it outermost, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakSet

import torch

from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.binding import Argument
from fuser.ir.domain.device_mesh import DeviceMesh, ranks_text
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import declared_order, expanded_positions, memory_order
from fuser.support.arguments import show
from fuser.support.errors import (
    DTensorError,
    InputError,
    ShardingError,
    UnsupportedError,
    user_code,
    warn,
)
from fuser.support.inputs import check_count, flatten
from fuser.support.lru import Recent
from hostir.runtime.inputs import misplaced_axis
from multidevice.job.agreement import Prepared
from multidevice.job.communicator import Communicator
from multidevice.job.shard_tensor import in_declared_order
from multidevice.sharding.placement import Placement, cut_line, placement
from multidevice.sharding.queries import UnevenAxis, uneven_positions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import DTensor

# For each dimension of a mesh, the axis that it cuts; None if it cuts none.
Axes = tuple[int | None, ...]
# Torch meshes that were made for results and that no input has. They are cached, because torch
# creates groups of ranks for each.
_MESHES: Recent[tuple[object, ...], Any] = Recent(16)
# Executor caches that have already warned about copies of shards.
_TOLD: WeakSet[FusionExecutorCache] = WeakSet()


def prepare_dtensors(
    cache: FusionExecutorCache, in_dtensors: Iterable[object]
) -> Prepared[list[DTensor]]:
    """Prepares a run on DTensors: checks the inputs and finds the program, but launches nothing.

    Returns this rank's run signature, the scalar inputs, and the function that runs the program.
    The run signature describes the program and its sizes. All ranks compare their run signatures
    and scalar inputs before they run.

    Raises:
        DTensorError, UnsupportedError, InputError: in the same cases as
            `FusionDefinition.execute_with_dtensors`.
    """
    defined = cache.fusion()
    given = flatten(in_dtensors, declared=defined.inputs)
    check_count(len(given), defined.inputs, defined.scalar_lines)
    names = _check_inputs(defined, given)
    shards = _shards(cache, defined, given)
    run_signature, numbers, run = cache.prepare(shards)
    program = cache.program_like(shards)
    meshes_of_outputs = [_mesh_of(tv) for tv in program.shown_outputs]
    outputs = zip(program.shown_outputs, program.output_shardings, strict=True)
    axes = [_axes_of(tv, f"output {i}", s.cuts) for i, (tv, s) in enumerate(outputs)]
    places = [*zip(meshes_of_outputs, axes, strict=True)]
    meshes = [v.device_mesh for v in given if _is_dtensor(v)]
    makers = [_maker(i, mesh, meshes, names, cache.devices) for i, (mesh, _) in enumerate(places)]

    uneven = [s.uneven for s in program.output_shardings]

    def run_on_shards() -> list[DTensor]:
        found = zip(run(), makers, places, uneven, strict=True)
        return [
            _dtensor(local, make(local.device.type), axes, blocks)
            for local, make, (_, axes), blocks in found
        ]

    return run_signature, numbers, run_on_shards


# ------------------------------------------------------------------ inputs
def _is_dtensor(value: object) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _check_inputs(fusion: Fusion, given: Sequence[Argument]) -> tuple[str, ...] | None:
    """Checks that the DTensors have the meshes and shardings that the fusion declares.

    Returns the dimension names of the inputs' meshes. Returns None if no input is a DTensor, or if
    the meshes have no dimension names.
    """
    _check_ranks()
    first: tuple[int, tuple[str, ...] | None] | None = None
    for position, (value, tv) in enumerate(zip(given, fusion.inputs, strict=True)):
        if not isinstance(tv, TensorView) or (tv.is_cpu_scalar and not _is_dtensor(value)):
            continue
        if not _is_dtensor(value):
            raise DTensorError(
                f"execute_with_dtensors: input {position}, {tv}, must be a DTensor, got "
                f"{show(value)}: use execute for shards of each rank{user_code(tv.user_line())}"
            )
        names = value.device_mesh.mesh_dim_names
        first = first or (position, names)
        if names != first[1]:
            raise DTensorError(
                f"execute_with_dtensors: input {position}, {tv}, has a mesh with the dimension "
                f"names {names}, but input {first[0]} has a mesh with the names {first[1]}: use "
                "the same names for all inputs"
            )
        _check_placed(position, tv, value)
    return None if first is None else first[1]


def _check_ranks() -> None:
    """Checks that this process has the same rank in torch.distributed as in this project's
    Communicator, and that both have equally many ranks.

    Raises:
        DTensorError: the ranks or their numbers differ, or there is no default process group.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise DTensorError(
            "execute_with_dtensors: torch.distributed has no default process group: call "
            "torch.distributed.init_process_group"
        )
    here = Communicator.instance()
    theirs, ours = (dist.get_rank(), dist.get_world_size()), (here.rank(), here.size())
    if theirs != ours:
        raise DTensorError(
            f"execute_with_dtensors: for torch.distributed this process is rank {theirs[0]} of "
            f"{theirs[1]}, but for the Communicator it is rank {ours[0]} of {ours[1]}: pass "
            f"rank={ours[0]} and world_size={ours[1]} to init_process_group"
        )


def _check_placed(position: int, tv: TensorView, value: Any) -> None:
    """Checks that a DTensor has the mesh, sharding and sizes that the fusion declares for its
    input.

    `tv` is the declared input, and `position` its index for messages.

    Raises:
        DTensorError: the DTensor differs from the declaration, or this rank is not in its mesh.
    """
    what, where = f"execute_with_dtensors: input {position}, {tv},", user_code(tv.user_line())
    axes = _axes_of_dtensor(value, what, where)
    mesh: torch.Tensor = value.device_mesh.mesh
    shape, ranks = tuple(mesh.shape), tuple(mesh.flatten().tolist())
    if Communicator.instance().rank() not in ranks:
        raise DTensorError(
            f"{what} is on {_spelled(shape, ranks)}, which does not contain rank "
            f"{Communicator.instance().rank()}, the rank of this process: pass a DTensor on a mesh "
            "with this rank"
        )
    if tv.mesh is None:
        # Callers pass an input without a mesh as a whole, however propagation shards it.
        expected: Axes = (None,) * len(shape)
    elif (tv.mesh.shape, tv.mesh.devices) == (shape, ranks):
        expected = _axes_of(tv, what, placement(tv))
    else:
        raise DTensorError(
            f"{what} is on {tv.mesh} in the fusion, but the DTensor is on "
            f"{_spelled(shape, ranks)}: use the same mesh{where}"
        )
    # A dimension of one device cuts nothing.
    if any(a != b for a, b, n in zip(axes, expected, shape, strict=True) if n > 1):
        raise DTensorError(
            f"{what} is {_placements_text(expected)} in the fusion, but the DTensor is "
            f"{_placements_text(axes)}: redistribute the DTensor, or shard the input of the fusion "
            f"in the same way{where}"
        )
    uneven = uneven_positions(tv)
    for axis, size in enumerate(value.shape):
        parts = [n for a, n in zip(axes, shape, strict=True) if a == axis]
        if axis in uneven and uneven[axis].extent != size:
            raise DTensorError(
                f"{what} has extent {uneven[axis].extent} along axis {axis} in the fusion, but the "
                f"DTensor has size {size}{where}"
            )
        if parts and axis not in uneven and size % (count := prod(parts)):
            raise DTensorError(
                f"{what} has size {size} along axis {axis}, which is not a multiple of its {count} "
                f"devices: define the input with the constant extent {size}, or pad it{where}"
            )


def _axes_of_dtensor(value: Any, what: str, where: str) -> Axes:
    from torch.distributed.tensor import Replicate, Shard

    axes: list[int | None] = []
    for placed in value.placements:
        if type(placed) is Replicate:
            axes.append(None)
        elif type(placed) is Shard:
            axes.append(placed.dim % max(value.ndim, 1))
        else:
            raise UnsupportedError(
                f"{what} is a DTensor with {placed!r}: only Shard and Replicate are supported; "
                f"redistribute it first{where}"
            )
    return tuple(axes)


def _shards(
    cache: FusionExecutorCache, fusion: Fusion, given: Sequence[Argument]
) -> list[Argument]:
    """Returns the parts of the inputs that this rank stores (its shards), in the memory orders that
    the fusion declares.

    Torch chooses the memory order of a shard: usually row-major, whatever the strides of the
    DTensor. A shard in another memory order is therefore not the user's mistake. The shard is
    copied, and one warning per definition names the copied inputs.

    Raises:
        DTensorError: an input that is updated in place, and so cannot be copied, has another memory
            order.
    """
    updated = {alias.into for alias in fusion.aliases}
    shards, copied = list[Argument](), list[str]()
    for position, (value, tv) in enumerate(zip(given, fusion.inputs, strict=True)):
        shard = _shard(value)
        if isinstance(tv, TensorView) and isinstance(shard, torch.Tensor) and _is_moved(tv, shard):
            made = in_declared_order(tv, shard)
            what = (
                f"input {position}, {tv}, has a shard with strides {shard.stride()}, but declares "
                f"{made.stride()}"
            )
            if tv in updated:
                raise DTensorError(
                    f"execute_with_dtensors: {what}. An input that is updated in place cannot be "
                    "copied to the declared order: leave stride_order out of define_tensor, or "
                    "create the DTensor by DTensor.from_local from a shard in this order"
                    f"{user_code(tv.user_line())}"
                )
            copied.append(what + user_code(tv.user_line()))
            shard = made
        shards.append(shard)
    if copied and cache not in _TOLD and Communicator.instance().rank() == min(cache.devices):
        _TOLD.add(cache)
        warn(
            f"execute_with_dtensors copies a shard in each call: {'; '.join(copied)}. Shards of "
            "torch are row-major: declare the input without stride_order, or with "
            "contiguity=False to accept any order"
        )
    return shards


def _is_moved(tv: TensorView, shard: torch.Tensor) -> bool:
    """Returns whether `shard`, this rank's part of an input, must be copied because it has another
    memory order than the declared input `tv`.

    Returns False if the number of dimensions differs, or if an expanded axis has several elements
    in memory, because other checks report these errors.
    """
    if shard.dim() != tv.ndim or not shard.numel() or declared_order(tv) is None:
        return False
    if any(shard.size(p) > 1 and shard.stride(p) for p in expanded_positions(tv)):
        return False
    return misplaced_axis(memory_order(tv), shard) is not None


def _shard(value: Argument) -> Argument:
    """Returns the part of a DTensor that this rank stores, after waiting for pending communication.

    Any other value is returned unchanged.
    """
    if not _is_dtensor(value):
        return value
    local: Any = value.to_local()
    return local.wait() if hasattr(local, "wait") else local


# ------------------------------------------------------------------ outputs
def _mesh_of(tv: TensorView) -> DeviceMesh:
    if tv.mesh is None:
        raise DTensorError(
            f"execute_with_dtensors: the output {tv} has no mesh: call set_device_mesh for it or "
            f"an input{user_code(tv.user_line())}"
        )
    return tv.mesh


def _axes_of(tv: TensorView, what: str, cuts_of_axes: Placement) -> Axes:
    """Returns, for each dimension of a tensor's mesh, the axis that this dimension splits, or None.

    `cuts_of_axes` has, for each axis, the mesh dimensions (as parallel types) that split it,
    outermost first. `what` names the tensor in messages.

    Raises:
        UnsupportedError: a DTensor cannot be distributed like this, because the parts are not
            contiguous blocks.
    """
    assert tv.mesh is not None
    axes: list[int | None] = [None] * tv.mesh.ndim
    for position, cuts in enumerate(cuts_of_axes):
        dims = [tv.mesh.dim_of(c.ptype) if c.ptype.is_device else None for c in cuts]
        while dims and dims[-1] is None:
            dims.pop()  # a stream's blocks, which are within a shard
        order = [-1 if d is None else d for d in dims]
        if None in dims or order != sorted(order):
            within = ", then ".join(f"{c.ptype.text} into {c.count}" for c in cuts)
            raise UnsupportedError(
                f"{what}: axis {position} of {tv} is divided along {within}. A DTensor needs "
                "another order: first along the first of these mesh dimensions, last along the "
                f"last. Divide the axis in this order{user_code(cut_line(tv, cuts[0].ptype))}"
            )
        for d in order:
            axes[d] = position
    return tuple(axes)


def _maker(
    output: int,
    mesh: DeviceMesh,
    meshes: Sequence[Any],
    names: tuple[str, ...] | None,
    devices: Sequence[int],
) -> Any:
    """Returns a function that takes "cuda" or "cpu" and returns the torch mesh of output number
    `output`. `mesh` is the mesh of that output in the fusion.

    If an input is on the same mesh, the output uses the input's torch mesh. `meshes` are the
    inputs' torch meshes, `names` their dimension names, and `devices` the ranks that run the
    program.

    Raises:
        ShardingError: a new mesh is needed, and not all ranks of the job run the program.
    """
    for one in meshes:
        if (tuple(one.mesh.shape), tuple(one.mesh.flatten().tolist())) == (
            mesh.shape,
            mesh.devices,
        ):
            return lambda kind: one
    size = Communicator.instance().size()
    if tuple(devices) != tuple(range(size)):
        raise ShardingError(
            f"execute_with_dtensors: output {output} is on {mesh}, and no input is on this mesh, "
            f"so all {size} ranks must create the mesh together. But only {ranks_text(devices)} "
            f"execute this definition: give an input the mesh {mesh}, or add tensors on the other "
            "ranks to the definition"
        )
    return partial(_made_mesh, mesh, names if names and len(names) == mesh.ndim else None)


def _made_mesh(mesh: DeviceMesh, names: tuple[str, ...] | None, kind: str) -> TorchMesh:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    # The group is part of the key, because its meshes are invalid after it is destroyed.
    key = (dist.group.WORLD, mesh, names, kind)
    found = _MESHES.recall(key)
    if found is None:
        ranks = torch.tensor(mesh.devices).reshape(mesh.shape)
        found = _MESHES[key] = TorchMesh(kind, ranks, mesh_dim_names=names)
    return found


def _dtensor(
    local: torch.Tensor, mesh: TorchMesh, axes: Axes, uneven: Mapping[int, UnevenAxis]
) -> DTensor:
    """Returns a DTensor of which this rank stores `local`.

    `axes` has the axis that each mesh dimension splits. `uneven` has the axes that are split into
    unequal blocks; torch cannot compute their extents from one rank's shard.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placed = [Replicate() if axis is None else Shard(axis) for axis in axes]
    if not uneven:
        return DTensor.from_local(local, mesh, placed, run_check=False)
    counts = [
        prod(n for a, n in zip(axes, mesh.mesh.shape, strict=True) if a == position)
        for position in range(local.dim())
    ]
    shape = tuple(
        uneven[p].extent if p in uneven else size * counts[p] for p, size in enumerate(local.shape)
    )
    strides, step = [0] * local.dim(), 1
    # The whole tensor has the memory order of the shard.
    for p in sorted(range(local.dim()), key=lambda p: (local.stride(p), -p)):
        strides[p], step = step, step * max(shape[p], 1)
    return DTensor.from_local(
        local, mesh, placed, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


# ------------------------------------------------------------------ words
def _placements_text(axes: Axes) -> str:
    return f"({', '.join('Replicate()' if a is None else f'Shard({a})' for a in axes)})"


def _spelled(shape: tuple[int, ...], ranks: tuple[int, ...]) -> str:
    try:
        return str(DeviceMesh(torch.tensor(ranks).reshape(shape)))
    except (ShardingError, InputError):
        return f"a mesh of shape {shape}"
