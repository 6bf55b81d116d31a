"""Cuts a whole torch tensor into the shards of devices, and joins shards to a whole tensor.

Also defines the public class `DeviceMesh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.device_mesh import DeviceMesh as IrDeviceMesh
from fuser.ir.domain.tensor_domain import SplitTransform, transform_text
from fuser.ir.fusion import TensorView
from fuser.ir.memory_layout import declared_order, stored_part
from fuser.ir.naming import axis_words, misfit_of_mesh, tensor_words
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.support.arguments import checked, refuses_swapped
from fuser.support.errors import (
    ShardingError,
    UnsupportedError,
    counted,
    padding_words,
    user_code,
)
from multidevice.sharding.placement import cut_line, is_allocated_per_step
from multidevice.sharding.queries import UnevenAxis, unsharded_sizes

if TYPE_CHECKING:
    import torch


def _swapped(first: object, second: object) -> str:
    """Returns the error message if the two arguments of `shard_tensor` are in the wrong order; ""
    if they are not.
    """
    import torch

    if not (isinstance(first, TensorView) and isinstance(second, torch.Tensor)):
        return ""
    return (
        f"shard_tensor(): the two arguments are in the wrong order: the first is "
        f"{tensor_words(first)}, the second is a torch tensor of shape {tuple(second.shape)}. "
        "Swap them: shard_tensor(torch tensor, tensor of the definition)"
    )


@refuses_swapped(_swapped)
@checked
def shard_tensor(tensor: torch.Tensor, tv: TensorView, *, copy: bool = False) -> torch.Tensor:
    """Returns this rank's shard of `tensor`, which is the whole value of the fusion's tensor `tv`.

    The shard is dense in the memory order that `tv` declares. All elements along an expanded axis
    share memory. d devices divide an axis of N elements into blocks of ceil(N / d) elements; the
    last blocks are shorter or empty.

    The shard may be a view of `tensor`: for example if `tensor` is contiguous and cut along its
    first axis, or not cut at all. A write into the shard or the tensor is then visible in both.
    This includes a program that updates its input. Pass `copy=True` for a shard in new memory. A
    rank outside the mesh gets the shard at coordinate 0.

    Raises:
        ArgumentError: an argument has the wrong type, or the two arguments are swapped.
        ShardingError: `tv` has no mesh, `tv` is a result without a placement of its own, `tensor`
            has another number of dimensions than `tv`, or an axis cannot be divided unevenly.
        UnsupportedError: the axis that is divided over devices is the result of a merge of axes, or
            the tensor is computed in steps, and memory holds only the part of one step at a time.
    """
    from multidevice.job.communicator import Communicator

    made_by = tv.definition()
    is_sharded = any(v.mesh is not None for v in tv.fusion.tensors())
    if made_by is not None and is_sharded and not tv.has_own_mesh:
        # The tensor has no mesh or that of an operand. The shard could be any part of the tensor.
        raise ShardingError(
            f"shard_tensor(): {tensor_words(tv)} has no placement of its own. The compiler chooses "
            f"the placements of such results when it compiles the program. {_placement_of(tv)}Or "
            "give it a placement in the definition, by shard(tensor, mesh, [...])"
            f"{user_code(made_by.where)}"
        )
    return shard_for_rank(tensor, tv, Communicator.instance().rank(), copy=copy)


def _placement_of(tv: TensorView) -> str:
    """Returns the part of an error message that says how to read the placement of the output `tv`
    after a run.

    Returns "" if `tv` is not an output, because only the placements of outputs can be read.
    """
    shown = [out for out in tv.fusion.outputs if not tv.fusion.is_hidden(out)]
    position = next((i for i, out in enumerate(shown) if out is tv), None)
    if position is None:
        return ""
    return (
        f"After a run, fd.fec.get_output_shardings()[{position}] has its mesh and its cut axes; on "
        "a 1-D mesh, mesh.shard_tensor(tensor, axis) then cuts the whole tensor. "
    )


def shard_for_rank(
    tensor: torch.Tensor, tv: TensorView, rank: int, *, copy: bool = False
) -> torch.Tensor:
    """Returns the shard that rank `rank` stores, if `tensor` is the whole value of `tv`.

    The arguments and errors are those of `shard_tensor`.
    """
    view, axes, steps, uneven = _split_view(tensor, tv)
    assert tv.mesh is not None
    for dim, (_, ptype) in enumerate(axes):
        if ptype is not None:
            view = view.narrow(dim, tv.mesh.coordinate(rank, ptype), 1)
    shard = _uneven_part(_merge_back(view, steps), uneven, tv.mesh, rank)
    stored = in_declared_order(tv, shard)
    if copy and stored.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        stored = stored_part(tv, stored).clone().expand(shard.shape)
    return stored


def _uneven_part(
    tensor: torch.Tensor, uneven: Mapping[int, UnevenAxis], mesh: IrDeviceMesh, rank: int
) -> torch.Tensor:
    """Returns the part of `tensor` that rank `rank` stores along the axes `uneven`.

    Devices divide these axes into unequal blocks. Along them, `tensor` has the extents of the whole
    tensor. The part may be empty.
    """
    for position, axis in uneven.items():
        start, size = axis.block_at(mesh.coordinate(rank, axis.ptype))
        tensor = tensor.narrow(position, start, size)
    return tensor


def in_declared_order(tv: TensorView, shard: torch.Tensor) -> torch.Tensor:
    """Returns the torch tensor `shard` in the memory order that the fusion's tensor `tv` declares.

    The result is dense; all elements along an expanded axis share memory. Returns `shard` itself if
    it already has this layout, otherwise a copy.
    """
    # The axes in memory order, outermost first. An allocation of other axes than the logical ones
    # defines no order.
    order = declared_order(tv) or tuple(range(tv.ndim))
    stored = stored_part(tv, shard).permute(order).contiguous()
    places = sorted(range(tv.ndim), key=order.__getitem__)
    return stored.permute(places).expand(shard.shape)


def unshard(shards: Sequence[torch.Tensor], tv: TensorView) -> torch.Tensor:
    """Joins the shards of all devices to the whole tensor `tv`.

    `shards[i]` is the shard of the device `tv.mesh.devices[i]`.
    """
    assert tv.mesh is not None, f"{tv} has no mesh"
    whole = shards[0].new_empty(unsharded_sizes(tv, tuple(shards[0].shape)))
    view, axes, steps, uneven = _split_view(whole, tv)
    for shard, rank in zip(shards, tv.mesh.devices, strict=True):
        block = view
        for dim, (_, ptype) in enumerate(axes):
            if ptype is not None:
                block = block.narrow(dim, tv.mesh.coordinate(rank, ptype), 1)
        if uneven:
            block = _uneven_part(_merge_back(block, steps), uneven, tv.mesh, rank)
        block.copy_(shard.reshape(block.shape))
    return whole


def _split_view(
    tensor: torch.Tensor, tv: TensorView
) -> tuple[
    torch.Tensor,
    list[tuple[int, ParallelType | None]],
    list[tuple[int, int]],
    dict[int, UnevenAxis],
]:
    """Returns a view of the whole tensor `tensor` in which each axis that is divided over devices
    is a separate dimension.

    Axes that devices divide into unequal blocks remain whole. Returns four values:

    - the view;
    - for each dimension of the view, (number of the axis, the mesh dimension over which the axis is
      divided, or None);
    - the splits in order, as (dimension that was split, number of dimensions after the split);
    - the axes that devices divide into unequal blocks, by position.
    """
    domain = tv.domain
    if tv.mesh is None:
        is_input = tv.definition() is None
        advice = (
            "pass the whole tensor to the program, or give the input a mesh by set_device_mesh"
            if is_input
            else "execute returns the whole tensor, because no input has a mesh"
        )
        raise ShardingError(f"{tensor_words(tv)} has no DeviceMesh, so it has no shards: {advice}")
    if is_allocated_per_step(tv):
        raise UnsupportedError(
            f"{tensor_words(tv)} is allocated anew in each step of a stream loop, so no single "
            "tensor is its shard"
        )
    logical = domain.no_reductions
    if tensor.dim() != len(logical):
        raise ShardingError(
            f"{tensor_words(tv)} has {counted(len(logical), 'axis')}, but the tensor has shape "
            f"{tuple(tensor.shape)}"
        )
    device = [a for a in domain.loop if a.is_device and not a.is_reduction() and a.size != sc.ONE]
    types: dict[int, ParallelType] = {a.number: a.ptype for a in device}
    axes: list[tuple[int, ParallelType | None]] = [(a.number, types.get(a.number)) for a in logical]
    steps: list[tuple[int, int]] = []
    uneven: dict[int, UnevenAxis] = {}
    view = tensor
    for t in transforms_between(domain, logical, device):
        dim = next((d for d, (n, _) in enumerate(axes) if n == t.inputs[0]), None)
        split = domain.splits.get(t.inputs[0])
        if split is None or split is not t or dim is None:
            raise UnsupportedError(
                f"{tensor_words(tv)}: shard_tensor needs device axes that are made by splits "
                f"alone, but found {transform_text(t, domain)}"
            )
        if (axis := _uneven_axis(view.size(dim), split, tv)) is not None:
            uneven[next(p for p, a in enumerate(logical) if a.number == split.inp)] = axis
            axes[dim] = split.inp, None
            types.pop(split.outer)
            continue
        sizes = _split_sizes(view.size(dim), split, tv)
        view = view.reshape(*view.shape[:dim], *sizes, *view.shape[dim + 1 :])
        axes[dim : dim + 1] = [(n, types.get(n)) for n in t.outputs]
        steps.append((dim, 2))
    for dim, (number, ptype) in enumerate(axes):
        is_there = ptype is None or tv.mesh.dim_of(ptype) is not None
        if ptype is not None and (not is_there or view.size(dim) != tv.mesh.size_of(ptype)):
            axis = next(a for a in device if a.number == number)
            raise ShardingError(misfit_of_mesh(tv, axis, view.size(dim)))
    assert all(p in DEVICE_TYPES for p in types.values())
    return view, axes, steps, uneven


def _uneven_axis(size: int, split: SplitTransform, tv: TensorView) -> UnevenAxis | None:
    """Returns how devices divide an axis of `size` elements into unequal blocks by `split`.

    Returns None if the blocks are equal, or if no program accepts such blocks: the axis has one
    element, or is divided further.
    """
    domain, devices = tv.domain, sc.int_value(split.factor)
    outer = domain.axes[split.outer]
    is_alone = split.inp in domain.logical_numbers and split.inner in domain.loop_numbers
    if devices is None or size % devices == 0 or size == 1 or split.inner_split or not is_alone:
        return None
    is_over_devices = tv.mesh is not None and tv.mesh.dim_of(outer.ptype) is not None
    if not is_over_devices or outer.number not in domain.loop_numbers:
        return None
    return UnevenAxis(size, devices, outer.ptype)


def _split_sizes(size: int, split: SplitTransform, tv: TensorView) -> tuple[int, int]:
    axis, factor = tv.domain.axes[split.inp], sc.int_value(split.factor)
    if factor is None:
        raise UnsupportedError(
            f"{tensor_words(tv)} is split by the symbolic factor {split.factor}: shard_tensor "
            "needs a constant factor"
        )
    if factor < 1 or size % factor != 0:
        line = cut_line(tv, tv.domain.rotated(split.outer).ptype)
        annotated = f" (annotated at {line})" if line else ""
        advice = padding_words(size, factor) if factor > 0 else ""
        raise ShardingError(
            f"the extent {size} of {axis_words(tv, axis)} is not divisible by {factor} "
            f"(device mesh {tv.mesh}){advice}{annotated}"
        )
    return (size // factor, factor) if split.inner_split else (factor, size // factor)


def _merge_back(view: torch.Tensor, steps: list[tuple[int, int]]) -> torch.Tensor:
    for dim, count in reversed(steps):
        view = view.flatten(dim, dim + count - 1)
    return view


# ----------------------------------------------------------------------
# The public DeviceMesh: the IR's mesh, and the methods that need this process's rank.


class LocalDeviceMesh(IrDeviceMesh):
    """A mesh: ranks of the job, arranged in 1 to 3 dimensions, over which tensors are divided.

    The last dimension is named mesh_x. This subclass adds the method that needs the rank of this
    process.
    """

    @checked
    def shard_tensor(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Cuts `tensor` along `axis` into one equal part per device; returns this rank's part.

        Part i belongs to the device at position i in the mesh's list of devices. A rank outside the
        mesh gets part 0. The part is a contiguous tensor.

        Raises:
            ShardingError: the axis does not exist, or the mesh's size does not divide its extent.
        """
        from multidevice.job.communicator import Communicator

        return shard_along(tensor, axis, self, Communicator.instance().rank())


def shard_along(tensor: torch.Tensor, axis: int, mesh: IrDeviceMesh, rank: int) -> torch.Tensor:
    """Cuts `tensor` along `axis` into one equal part per device of `mesh`; returns the part of rank
    `rank`.

    A rank outside the mesh gets the first part. Raises `ShardingError` if the axis does not exist,
    or if the mesh's size does not divide its extent.
    """
    if not -tensor.dim() <= axis < tensor.dim():
        raise ShardingError(
            f"cannot cut axis {axis} over {mesh}: a tensor of shape {tuple(tensor.shape)} has "
            f"{counted(tensor.dim(), 'axis')}"
        )
    size = tensor.size(axis)
    if size % mesh.size != 0:
        raise ShardingError(
            f"Sharded axis must be evenly divisble by mesh: axis {axis} of shape "
            f"{tuple(tensor.shape)} has extent {size}, {mesh} has {mesh.size} devices"
            f"{padding_words(size, mesh.size)}"
        )
    part = size // mesh.size
    index = mesh.devices.index(rank) if mesh.has(rank) else 0
    return tensor.narrow(axis, index * part, part).contiguous()
