"""Turns the communication ops of a host program into calls of a backend, such as NCCL or gloo.

`post` and `exchange` start a communication once. `bind_post` and `bind_exchange` return a function
that starts the same communication again in later runs, on buffers at other addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuser.ir.fusion import TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.support.errors import CommunicationError
from hostir.ir.ops import (
    AxisOrder,
    CollectivePermute,
    Communication,
    P2PCommunication,
    StartsCommunication,
)
from multidevice.coordination.bounded_wait import Team
from multidevice.transports.base import protocol
from multidevice.transports.base.protocol import Backend, Work

PostedBuffer = torch.Tensor | None


class Done:
    """The handle of a communication that is complete at once, so that a `Wait` has nothing to do.

    Examples are a rank's copy to itself, and a group without transfers.
    """

    def wait(self) -> None:
        """Does nothing, because the communication is already complete. The method exists because
        handles of backends have a method `wait`, which makes the current stream wait for the
        communication.
        """

    def synchronize(self) -> None:
        """Does nothing, because the communication is already complete. The method exists because
        handles of backends have a method `synchronize`, which makes the host wait for the
        communication.
        """


def flat(
    op: StartsCommunication, tv: TensorView, tensor: torch.Tensor, order: AxisOrder
) -> torch.Tensor:
    """Returns this rank's shard of `tv` (the part that it stores) as a contiguous view, which a
    backend can transfer.

    `tensor` is the shard, and `op` is the communication that transfers it. The axes of the view are
    in memory order (`order.axes`). An expanded axis (stride 0) has one element in the view, because
    all its elements share memory. Raises `CommunicationError` if the shard has gaps in the memory
    order that the program declares.
    """
    for axis in order.expanded:
        tensor = tensor.narrow(axis, 0, 1) if tensor.size(axis) else tensor
    if order.axes is not None:
        tensor = tensor.permute(order.axes)
    if not tensor.is_contiguous():
        raise CommunicationError(
            f"{op.name}: {tensor_words(tv)} has shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} in its declared memory order, so there are gaps between its "
            f"elements. A communication needs a tensor without gaps: pass a copy{in_ir(tv)}"
        )
    return tensor


@dataclass(frozen=True)
class CommunicationCall:
    """A collective op with everything that its call on this rank needs: ranks, backend and root.

    `rank` is this rank, and `team` has all ranks that take part. `root` is a global rank, or -1 for
    a collective without a root.
    """

    op: Communication
    rank: int
    team: Team
    backend: Backend
    root: int


def post(call: CommunicationCall, inp: PostedBuffer, out: PostedBuffer) -> Work:
    """Starts the collective of `call` on this rank's shards (its parts of the tensors), and returns
    the communication handle.

    A later `Wait` op waits for the handle. `inp` or `out` is None if this rank has no such shard.
    Raises `CommunicationError` for a shard that has gaps in its declared memory order.
    """
    op = call.op
    mine, theirs = op.orders
    if inp is not None:
        inp = flat(op, op.inp, inp, mine)
    if out is not None:
        out = flat(op, op.out, out, theirs)
    row, backend = op.collective, call.backend
    backend.where = op.where
    try:
        return backend.collective(
            row,
            out,
            inp,
            team=call.team,
            reduce=op.red_op if row.reduces else None,
            root=call.root if row.is_rooted else None,
        )
    finally:
        backend.where = ""


def bind_post(
    call: CommunicationCall, inp: PostedBuffer, out: PostedBuffer
) -> protocol.Post | None:
    """Prepares a collective for later runs, after `post` has started it once.

    Returns a function that starts the collective on shards (a rank's parts of tensors) at other
    addresses, with less work than `post`. `inp` and `out` show the shapes and strides of the
    shards. Returns None if the backend cannot prepare such a function, because it must check each
    call.
    """
    op, row = call.op, call.op.collective
    mine, theirs = op.orders
    call.backend.where = op.where
    try:
        return call.backend.bind(
            row,
            None if out is None else flat(op, op.out, out, theirs),
            None if inp is None else flat(op, op.inp, inp, mine),
            team=call.team,
            reduce=op.red_op if row.reduces else None,
            root=call.root if row.is_rooted else None,
        )
    finally:
        call.backend.where = ""


def bind_exchange(
    op: StartsCommunication, transfers: Sequence[protocol.Transfer], team: Team, backend: Backend
) -> protocol.PostBatch | None:
    """Prepares a group of sends and receives for later runs, after `exchange` has started it once.
    The parameters are those of `exchange`.

    Returns a function that starts the transfers on tensors at other addresses. Returns None if the
    backend cannot prepare such a function, because it must check each call.
    """
    backend.where = op.where
    try:
        return backend.bind_batch(transfers, team=team)
    finally:
        backend.where = ""


def permute(
    op: CollectivePermute,
    peers: tuple[int, int],
    rank: int,
    team: Team,
    backend: Backend,
    inp: torch.Tensor,
    out: torch.Tensor,
) -> Work:
    """Sends `inp` to rank `peers[0]` and receives `out` from rank `peers[1]`, as the op `op` says.

    `rank` is this rank. If both peers are this rank, copies `inp` to `out`. Returns the handle of
    the communication, for which the program's `Wait` op waits. `team` has all ranks that take part.
    """
    sent, received = both = halves(op, peers, inp, out)
    if peers == (rank, rank):
        received.tensor.copy_(sent.tensor.view_as(received.tensor))
        return Done()
    return exchange(op, both, team, backend)


def halves(
    op: CollectivePermute, peers: tuple[int, int], inp: torch.Tensor, out: torch.Tensor
) -> tuple[protocol.Transfer, protocol.Transfer]:
    """Returns the two transfers of a permutation on this rank: a send of `inp`, a receive of `out`.

    `peers` is (rank to which this rank sends, rank from which this rank receives).
    """
    mine, theirs = op.orders
    sent, received = flat(op, op.inp, inp, mine), flat(op, op.out, out, theirs)
    return protocol.Transfer("send", sent, peers[0]), protocol.Transfer("recv", received, peers[1])


def transfer(
    op: P2PCommunication, tensor: torch.Tensor, peer: int, order: int | None = None
) -> protocol.Transfer:
    """Returns the description of the send or receive `op`, which `exchange` takes.

    `tensor` is this rank's buffer and `peer` the other rank. `order` numbers the sends to this
    peer, or the receives from it, in the order of the program, from 0. It is only needed in a test
    mode, in which transfers start in another order than in the program, and is otherwise None.
    """
    return protocol.Transfer(op.type, flat(op, op.buffer, tensor, op.orders[0]), peer, order)


def exchange(
    op: StartsCommunication, transfers: Sequence[protocol.Transfer], team: Team, backend: Backend
) -> Work:
    """Starts several sends and receives (`transfers`) together, and returns the handle of the
    communication, for which the program's `Wait` op waits.

    `op` is the op of the program that needs these transfers. `team` has the ranks of the program,
    and `backend` carries out the transfers.
    """
    backend.where = op.where
    try:
        return backend.batch(transfers, team=team)
    finally:
        backend.where = ""
