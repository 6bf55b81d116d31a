"""Computes which part of a tensor a rank stores. Part of the text of sharded standalone scripts.

A mesh is a sequence of ranks (mesh dimension x) or of rows of ranks (y, then x). A cut is a triple:
an axis, a mesh dimension, and the number of blocks into which a stream cuts the axis before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def mesh_sizes(ranks: Sequence[Any]) -> dict[str, int]:
    """Returns the size along each mesh dimension; x is the last one."""
    if isinstance(ranks[0], Sequence):
        return {"x": len(ranks[0]), "y": len(ranks)}
    return {"x": len(ranks)}


def coordinate(ranks: Sequence[Any], rank: int, dim: str) -> int | None:
    """Returns the coordinate of a rank along a mesh dimension, None outside the mesh."""
    rows = [list(r) for r in ranks] if isinstance(ranks[0], Sequence) else [list(ranks)]
    for y, row in enumerate(rows):
        if rank in row:
            return row.index(rank) if dim == "x" else y
    return None


def shard_of(t: torch.Tensor, ranks: Sequence[Any], cuts: Any, rank: int) -> torch.Tensor:
    """Returns the part of a tensor that `rank` stores: its block of each of the `blocks` blocks.

    A rank outside the mesh gets block 0.
    """
    sizes = mesh_sizes(ranks)
    for axis, dim, blocks in cuts:
        length = t.shape[axis] // (sizes[dim] * blocks)
        start = length * (coordinate(ranks, rank, dim) or 0)
        if blocks == 1:
            t = t.narrow(axis, start, length)
            continue
        whole = [
            t.narrow(axis, length * sizes[dim] * b, length * sizes[dim]) for b in range(blocks)
        ]
        t = torch.cat([b.narrow(axis, start, length) for b in whole], axis)
    return t


def local_input(t: torch.Tensor, ranks: Sequence[Any], cuts: Any, rank: int) -> torch.Tensor:
    """Returns a rank's shard in new memory: dense, in the memory order of the whole tensor.

    Axes with stride 0 keep it.
    """
    part = shard_of(t, ranks, cuts, rank)
    places = sorted(range(t.ndim), key=lambda k: (t.stride(k), -k))
    strides, step = [0] * t.ndim, 1
    for k in places:
        if t.stride(k):
            strides[k] = step
            step *= max(part.shape[k], 1)
    out = torch.empty_strided(part.shape, strides, dtype=t.dtype)
    base = out
    for k in range(t.ndim):
        if not t.stride(k):
            base, part = base.narrow(k, 0, 1), part.narrow(k, 0, 1)
    base.copy_(part)
    return out


def spread_of(sharding: Any, types: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Returns (mesh, cuts) of the sharding that the product reports for an output."""
    mesh = torch.tensor(sharding.mesh.devices).reshape(sharding.mesh.shape).tolist()
    found = [(sharding.axis_sharded_on(types[d]), d) for d in mesh_sizes(mesh)]
    return mesh, [(axis, dim, 1) for axis, dim in found if axis >= 0]
