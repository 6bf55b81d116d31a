"""Cuts tensors of a definition over a mesh, and tensor values into shards."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch

from fuser import ParallelType, TensorView
from fuser.multidevice import (
    DeviceMesh,
)

X = ParallelType.mesh_x


def cut(tv: TensorView, axis: int, mesh: DeviceMesh, ptype: ParallelType = X) -> None:
    seen = [k for k, a in enumerate(tv.get_loop_domain()) if not a.is_reduction()]
    tv.set_device_mesh(mesh)
    tv.outer_split(seen[axis], mesh.size_of(ptype))
    tv.axis(seen[axis]).parallelize(ptype)


def shards(whole: torch.Tensor, like: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """Returns a rank's block of a whole tensor; `like` has the shape of a block."""
    for axis, (n, mine) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if n != mine:
            whole = whole.narrow(axis, rank * mine, mine)
            assert mine * count == n
    return whole
