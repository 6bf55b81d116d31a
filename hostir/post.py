"""How a Communication becomes a call of the communicator's backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser.errors import CommunicationError
from hostir.ops import Communication
from multidevice.backends.protocol import Backend, Team, Work

Buffer = torch.Tensor | None


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same elements in memory order; a copy when it has gaps."""
    if tensor.is_contiguous():
        return tensor
    axes = sorted(range(tensor.dim()), key=lambda i: (-tensor.stride(i), -tensor.size(i)))
    return tensor.permute(axes).contiguous()


def _allgather(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert inp is not None and out is not None
    return backend.allgather(out, inp, team=team)


def _allreduce(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert inp is not None and out is not None
    return backend.allreduce(out, inp, op=op.red_op, team=team)


def _reduce_scatter(
    op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer
) -> Work:
    assert inp is not None and out is not None
    return backend.reduce_scatter(out, inp, op=op.red_op, team=team)


def _alltoall(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert inp is not None and out is not None
    return backend.alltoall(out, inp, team=team)


def _broadcast(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    if out is None:
        assert inp is not None, "the root of a broadcast has its input"
        out = inp
    elif inp is not None:
        out.copy_(inp.view_as(out))
    return backend.broadcast(out, root=_root(op, team), team=team)


def _gather(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert inp is not None
    return backend.gather(out, inp, root=_root(op, team), team=team)


def _scatter(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert out is not None
    return backend.scatter(out, inp, root=_root(op, team), team=team)


def _reduce(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    assert inp is not None
    return backend.reduce(out, inp, op=op.red_op, root=_root(op, team), team=team)


def _root(op: Communication, team: Team) -> int:
    assert op.root is not None, f"{op.name} has no root"
    return team[op.root]


Post = Callable[[Communication, Team, Backend, Buffer, Buffer], Work]
POST: dict[str, Post] = {
    "Allgather": _allgather,
    "Allreduce": _allreduce,
    "AllToAll": _alltoall,
    "Broadcast": _broadcast,
    "Gather": _gather,
    "Reduce": _reduce,
    "ReduceScatter": _reduce_scatter,
    "Scatter": _scatter,
}


def post(op: Communication, team: Team, backend: Backend, inp: Buffer, out: Buffer) -> Work:
    """Start the communication of local shards; None stands for a shard that this rank lacks.

    Raises `CommunicationError` for an output with gaps in memory: nothing could be received there.
    """
    if inp is not None:
        inp = in_memory_order(inp)
    if out is not None and not out.is_contiguous():
        flat = in_memory_order(out)
        if flat.data_ptr() != out.data_ptr():
            raise CommunicationError(
                f"{op.name}: {op.out} has shape {tuple(out.shape)} and strides {out.stride()}, "
                "which leave gaps"
            )
        out = flat
    return POST[op.type](op, team, backend, inp, out)
