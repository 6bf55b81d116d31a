"""The public DeviceMesh: the IR's mesh plus what needs to know this process's rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuser.ir.domain.device_mesh import DeviceMesh as IrDeviceMesh
from fuser.support.arguments import checked
from fuser.support.errors import ShardingError

if TYPE_CHECKING:
    import torch


class LocalDeviceMesh(IrDeviceMesh):
    """Ranks arranged in 1 to 3 dimensions; mesh_x is the last one."""

    @checked
    def shard_tensor(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Return this rank's part of `tensor`, cut along `axis` into `size` equal parts.

        The part is the one at this rank's place in the flat device list (part 0 for a rank outside
        the mesh), as a contiguous tensor.

        Raises:
            ShardingError: the axis does not exist, or its size is not a multiple of the mesh's
            size.
        """
        from multidevice.job.communicator import Communicator

        return shard_along(tensor, axis, self, Communicator.instance().rank())


def shard_along(tensor: torch.Tensor, axis: int, mesh: IrDeviceMesh, rank: int) -> torch.Tensor:
    """Return the part of `tensor` that belongs to `rank` when all of `mesh` cuts one axis."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise ShardingError(f"{mesh}: no axis {axis} in a tensor of shape {tuple(tensor.shape)}")
    size = tensor.size(axis)
    if size % mesh.size != 0:
        raise ShardingError(
            f"Sharded axis must be evenly divisble by mesh: axis {axis} of shape "
            f"{tuple(tensor.shape)} has extent {size}, {mesh} has {mesh.size} devices"
        )
    part = size // mesh.size
    index = mesh.devices.index(rank) if mesh.has(rank) else 0
    return tensor.narrow(axis, index * part, part).contiguous()
