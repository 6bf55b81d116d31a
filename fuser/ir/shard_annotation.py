"""Sharding in one call, with placements as in torch's DTensor: `shard(tv, mesh, [Shard(0), ..])`.

`placements` has one entry per dimension of the mesh, the first dimension first; `mesh_x` is the
*last* dimension. If several dimensions split one axis, the first of them is the outermost:

    mesh [[0 1][2 3]], placements [Shard(0), Shard(0)]   ->   rank r has quarter r of axis 0
    mesh [[0 1][2 3]], placements [Replicate(), Shard(0)] ->  ranks 0 and 2 have the first half
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import SplitTransform
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.support.arguments import Mismatch, checked, refuses_swapped, show, take_integer
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    ShardingError,
    UnsupportedError,
    counted,
    padding_words,
)
from fuser.support.record import record


@record
class Shard:
    """The placement that splits axis `dim` into blocks, one per device along a mesh dimension.

    If n devices split N elements, the blocks have ceil(N / n) elements, and the last ones are
    shorter or empty, as in torch. -1 is the last axis.
    """

    dim: int

    def __post_init__(self) -> None:
        try:
            take_integer(self.dim)
        except Mismatch as error:
            shown = show(self.dim)
            raise ArgumentError(f"Shard: expected the number of an axis, got {shown}") from error


@record
class Replicate:
    """The placement that stores the same values on all devices along a mesh dimension."""


# Per dimension of a mesh, the axis that it shards, or None.
Dims = tuple[int | None, ...]


def _swapped(first: object, second: object) -> str:
    """Returns the error message for a call of `shard` with a mesh before the tensor, or "".

    `first` and `second` are the first two arguments of the call.
    """
    if not (isinstance(first, DeviceMesh) and isinstance(second, TensorView)):
        return ""
    return (
        f"shard(): the first two arguments are in the wrong order: {first} is a DeviceMesh, "
        f"{second.label} is a tensor. Swap them: shard(tensor, mesh, placements)"
    )


@refuses_swapped(_swapped)
@checked
def shard(tv: TensorView, mesh: object, placements: Sequence[object]) -> TensorView:
    """States which devices store a tensor and how they split its axes. Returns the tensor.

    `mesh` is a DeviceMesh, the argument of its constructor, or a mesh of torch. `placements` has
    one `Shard` or `Replicate` per mesh dimension, either of this package or of
    `torch.distributed.tensor`. Axes are those of `tv.shape()`, so reduction axes are not counted.
    The compiler does not change this placement.

    The call is equivalent to `set_device_mesh`, and `outer_split` and `parallelize` for each
    `Shard`. The axes that number the devices are moved after the other loop axes. `tv.axis(k)` is
    therefore still axis k, now with the size of one device's block.

    Raises:
        ShardingError: the numbers of placements and mesh dimensions differ, an axis does not exist,
            an axis of one element is split, or an axis is split unevenly over two mesh dimensions.
        DefinitionError: the tensor is sharded already, or an axis to be sharded was split, merged
            or parallelized.
        UnsupportedError: a placement of torch other than Shard and Replicate was passed, such as
            Partial.
        ArgumentError: an entry of `placements` is not a placement, or the mesh comes first.
    """
    mesh = mesh_of(mesh)
    dims = _dims_of(tv, mesh, placements)
    logical, loop = tv.domain.no_reductions, tv.domain.loop_numbers
    if tv.domain.has_devices:
        raise DefinitionError(f"shard: {tv} is already sharded: a tensor can be sharded only once")
    for axis in (logical[d] for d in dims if d is not None):
        if axis.number not in loop or axis.ptype is not ParallelType.serial:
            raise DefinitionError(
                f"shard: axis {axis} of {tv} was split, merged or parallelized: call shard before "
                "split, merge and parallelize"
            )
    tv.set_device_mesh(mesh)
    for position, dim in enumerate(dims):
        if dim is None:
            continue
        # The divided axis keeps the position of the axis; the device axis becomes the last one.
        place = loop.index(logical[dim].number)
        tv.outer_split(place, mesh.shape[position])
        tv.reorder({place: -1})
        tv.axis(-1).parallelize(_type_of(mesh, position))
    return tv


def placements_of(tv: TensorView) -> list[Shard | Replicate] | None:
    """Returns the arguments `placements` with which `shard` would create the tensor's sharding.

    Returns None if the user did not set the mesh, or if `shard` cannot create this sharding.
    """
    mesh, domain = tv.mesh, tv.domain
    if mesh is None or not tv.mesh_is_user_set:
        return None
    left = {n: n for n in domain.logical_numbers}
    splits = transforms_between(domain, domain.logical, domain.loop)
    devices: list[int] = []
    placements: list[Shard | Replicate] = [Replicate()] * mesh.ndim
    for t in splits:
        origin = next((n for n, rest in left.items() if rest in t.inputs), None)
        if not isinstance(t, SplitTransform) or t.inner_split or origin is None:
            return None
        ptype = domain.axes[t.outer].ptype
        position = mesh.dim_of(ptype) if ptype.is_device else None
        if position is None or sc.int_value(t.factor) != mesh.shape[position]:
            return None
        axes = [a.number for a in domain.no_reductions]
        if origin not in axes:
            return None
        placements[position] = Shard(axes.index(origin))
        left[origin] = t.inner
        devices.append(t.outer)
    order = [position for position, p in enumerate(placements) if isinstance(p, Shard)]
    found = [mesh.dim_of(domain.axes[n].ptype) for n in devices]
    is_made = found == order and (*left.values(), *devices) == domain.loop_numbers
    others = [a for a in domain.axes.values() if a.number not in devices]
    return placements if is_made and all(a.ptype is ParallelType.serial for a in others) else None


def _type_of(mesh: DeviceMesh, position: int) -> ParallelType:
    return DEVICE_TYPES[mesh.ndim - 1 - position]


def mesh_of(mesh: Any) -> DeviceMesh:
    """Returns the DeviceMesh for a DeviceMesh, a mesh of torch, or an argument of `DeviceMesh`."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    is_torchs = type(mesh).__module__ == "torch.distributed.device_mesh"
    return DeviceMesh(mesh.mesh if is_torchs else mesh)


def _dims_of(tv: TensorView, mesh: DeviceMesh, placements: Sequence[object]) -> Dims:
    """Returns, for each mesh dimension, the axis of `tv` that is split over it, or None.

    Raises:
        ShardingError: there is not one placement per mesh dimension; or an axis of one element is
            split, or an axis is split unevenly over two mesh dimensions.
    """
    if not mesh.devices:
        raise ShardingError(
            f"shard: {mesh} is empty, so it has no device for {tv}: list the ranks that store it, "
            "for example DeviceMesh([0, 1])"
        )
    if len(placements) != mesh.ndim:
        raise ShardingError(
            f"shard: expected one placement per dimension of {mesh}, which has {mesh.ndim} "
            f"(shape {mesh.shape}), got {len(placements)} for {tv}: {show(list(placements))}"
        )
    dims = tuple(_dim_of(tv, k, placed) for k, placed in enumerate(placements))
    for dim in dict.fromkeys(d for d in dims if d is not None):
        axis = tv.domain.no_reductions[dim]
        counts = [n for k, n in enumerate(mesh.shape) if dims[k] == dim and n > 1]
        size, count = sc.int_value(tv.fusion.canonical(axis.size)), prod(counts)
        if size is None or size % count == 0 or (len(counts) == 1 and size != 1):
            continue
        if size == 1:
            raise ShardingError(
                f"shard: axis {dim} of {tv} has one element, which ops repeat, so {count} devices "
                f"of {mesh} cannot divide it: use Replicate()"
            )
        raise ShardingError(
            f"shard: axis {dim} of {tv} has {size} elements, which {count} devices along "
            f"{len(counts)} dimensions of {mesh} cannot divide into equal shards"
            f"{padding_words(size, count)}, or divide the axis along one mesh dimension"
        )
    return dims


def _dim_of(tv: TensorView, position: int, placed: Any) -> int | None:
    """Returns the axis that the placement `placed` splits, or None if it splits no axis.

    `position` is the mesh dimension of the placement, for messages.
    """
    module, name = str(type(placed).__module__), type(placed).__name__
    is_torchs = module.startswith("torch.distributed.")
    if isinstance(placed, Replicate) or (is_torchs and name == "Replicate"):
        return None
    if isinstance(placed, Shard) or (is_torchs and name == "Shard"):
        dim = take_integer(placed.dim)
        dim += tv.ndim if dim < 0 else 0
        if not 0 <= dim < tv.ndim:
            raise ShardingError(
                f"shard: placement {position} is Shard({placed.dim}), but {tv} has "
                f"{counted(tv.ndim, 'axis')}: expected "
                f"{f'{-tv.ndim} to {tv.ndim - 1}' if tv.ndim else 'Replicate()'}"
            )
        return dim
    if is_torchs and "Partial" in name:
        what = "an input" if tv.definition() is None else "a result"
        raise UnsupportedError(
            f"shard: placement {position} of {tv} is {placed!r}: {what} can only have Shard and "
            "Replicate. An op that reduces a sharded axis creates and adds partial sums by itself"
        )
    if is_torchs:
        raise UnsupportedError(
            f"shard: placement {position} of {tv} is {placed!r}: only Shard and Replicate are "
            "supported, because shards are contiguous blocks of equal size"
        )
    is_class = isinstance(placed, type)
    written = "Replicate()" if is_class and placed.__name__ == "Replicate" else "Shard(0)"
    hint = f": write {written}" if is_class else ""
    raise ArgumentError(
        f"shard(): incompatible function arguments: placements[{position}]: expected Shard or "
        f"Replicate, got {show(placed)}{hint}"
    )
