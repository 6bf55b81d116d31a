"""How a Communication becomes a call of the communicator's backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser.errors import CommunicationError
from hostir.ops import Communication, Order
from multidevice.backends.protocol import Backend, Team, Work

Buffer = torch.Tensor | None


def flat(op: Communication, tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Return a shard as backends take it: a contiguous tensor of what memory holds, in its order.

    Raises `CommunicationError` when the shard does not lie in memory as the program declares it.
    """
    for axis in order.expanded:
        tensor = tensor.narrow(axis, 0, 1) if tensor.size(axis) else tensor
    if order.axes is not None:
        tensor = tensor.permute(order.axes)
    if not tensor.is_contiguous():
        tv = op.out if order is op.orders[1] else op.inp
        raise CommunicationError(
            f"{op.name}: {tv} has shape {tuple(tensor.shape)} and strides {tensor.stride()} in its "
            "declared memory order, which leave gaps"
        )
    return tensor


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

    Raises `CommunicationError` for a shard that is not dense in its declared order.
    """
    mine, theirs = op.orders
    if inp is not None:
        inp = flat(op, inp, mine)
    if out is not None:
        out = flat(op, out, theirs)
    backend.where = op.where
    work = POST[op.type](op, team, backend, inp, out)
    backend.where = ""
    return work
