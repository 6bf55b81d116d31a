"""Calls of the communicator's backend for the ops that communicate."""

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
    """A communication of a rank with itself, a copy that was made; or an empty group."""

    def wait(self) -> None:
        """See `Work.wait`."""

    def synchronize(self) -> None:
        """See `Work.synchronize`."""


def flat(
    op: StartsCommunication, tv: TensorView, tensor: torch.Tensor, order: AxisOrder
) -> torch.Tensor:
    """Returns the shard of `tv` as backends take it: contiguous, as memory holds it.

    Raises `CommunicationError` when the shard does not lie in memory as the program declares it.
    """
    for axis in order.expanded:
        tensor = tensor.narrow(axis, 0, 1) if tensor.size(axis) else tensor
    if order.axes is not None:
        tensor = tensor.permute(order.axes)
    if not tensor.is_contiguous():
        raise CommunicationError(
            f"{op.name}: {tensor_words(tv)} has shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} in its declared memory order, which leave gaps{in_ir(tv)}"
        )
    return tensor


@dataclass(frozen=True)
class CommunicationCall:
    """A communication as one rank sees it; `root` is a global rank (-1: none)."""

    op: Communication
    rank: int
    team: Team
    backend: Backend
    root: int


def post(call: CommunicationCall, inp: PostedBuffer, out: PostedBuffer) -> Work:
    """Starts the communication of local shards; None stands for a shard that this rank lacks.

    Raises `CommunicationError` for a shard that is not dense in its declared order.
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
    """Returns how `post` starts this communication, which it has done once, on other shards of
    these shapes and strides; None where it has to look at each call."""
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
    """Returns how `exchange` starts these, which it has done once, on other tensors like them; None
    where it has to look at each call."""
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
    """Sends `inp` to the rank peers[0] and receive `out` from peers[1]; a copy to oneself."""
    sent, received = both = halves(op, peers, inp, out)
    if peers == (rank, rank):
        received.tensor.copy_(sent.tensor.view_as(received.tensor))
        return Done()
    return exchange(op, both, team, backend)


def halves(
    op: CollectivePermute, peers: tuple[int, int], inp: torch.Tensor, out: torch.Tensor
) -> tuple[protocol.Transfer, protocol.Transfer]:
    """Returns what a permutation sends and what it receives here."""
    mine, theirs = op.orders
    sent, received = flat(op, op.inp, inp, mine), flat(op, op.out, out, theirs)
    return protocol.Transfer("send", sent, peers[0]), protocol.Transfer("recv", received, peers[1])


def transfer(
    op: P2PCommunication, tensor: torch.Tensor, peer: int, order: int | None = None
) -> protocol.Transfer:
    """Returns one half of a point-to-point copy, for `exchange`."""
    return protocol.Transfer(op.type, flat(op, op.buffer, tensor, op.orders[0]), peer, order)


def exchange(
    op: StartsCommunication, transfers: Sequence[protocol.Transfer], team: Team, backend: Backend
) -> Work:
    """Starts sends and receives at once."""
    backend.where = op.where
    try:
        return backend.batch(transfers, team=team)
    finally:
        backend.where = ""
