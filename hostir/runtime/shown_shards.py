"""Views of the shards of several ranks: mapped back to back, where the ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.ops import SymmetricContiguousView
from hostir.ir.transfers import PEER_COPIES
from hostir.runtime.frame import ExecutionContext
from hostir.runtime.steps import Action, Slots
from multidevice.coordination.bounded_wait import Team
from multidevice.transports.base.protocol import PeerMemory


def show_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    shard: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Return the shards of all ranks as one tensor; returns when all have come.

    Raises `UnsupportedError` or `CommunicationError` on all ranks where they have none that can be
    mapped so, naming op, tensor and user line.
    """
    peers, team, what = _where(op, machine)
    if not shard.is_contiguous():
        raise UnsupportedError(
            f"{what}: shards of shape {tuple(shard.shape)} with strides {shard.stride()} are not "
            "dense: allocate them so, in the order of their axes"
        )
    return peers.side_by_side(shard, team, what).view(shard.dtype).view(tuple(shape))


def meet_at(op: SymmetricContiguousView, machine: ExecutionContext) -> None:
    """Return when all ranks have come to where the view is given up."""
    peers, team, what = _where(op, machine)
    peers.meet(team, what)


def shows_shards(
    op: SymmetricContiguousView,
    machine: ExecutionContext,
    inp: int,
    out: int,
    shape: tuple[int, ...],
) -> Action:
    """Return the step that shows the shards of which this rank's is in slot `inp`."""

    def show(slots: Slots) -> None:
        slots[out] = show_shards(op, machine, slots[inp], shape)

    return Action(show)


def meets_at(op: SymmetricContiguousView, machine: ExecutionContext) -> Action:
    """Return the step where ranks meet to give up a view."""
    return Action(lambda slots: meet_at(op, machine))


def _where(op: SymmetricContiguousView, machine: ExecutionContext) -> tuple[PeerMemory, Team, str]:
    assert op.team is not None, "one rank sees its shard as it is"
    peers = cast("PeerMemory", machine.backend(PEER_COPIES))
    return peers, op.team.ranks(machine.rank), f"{op.name} of {op.inp.label}{user_code(op.where)}"
