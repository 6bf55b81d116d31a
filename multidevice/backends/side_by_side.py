"""Shards of all members of a team as one range of memory, without a copy: where members meet."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence

import torch

from fuser.errors import CommunicationError, UnsupportedError
from multidevice import page
from multidevice.backends.protocol import Team
from multidevice.backends.shared_memory import Place, SharedMemory
from multidevice.control import Control
from multidevice.waiting import team_text


def side_by_side(
    control: Control, memory: SharedMemory, tensor: torch.Tensor, team: Team, what: str
) -> torch.Tensor:
    """See `PeerMemory.side_by_side`: each member tells the others where its shard lies."""
    place = memory.name_of(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    mine = (what, page.host(), nbytes, *(place or ((), 0)))
    rows = [json.loads(text) for text in _exchange(control, json.dumps(mine), team, what)]
    # All members find the same, so that none is left alone with what another one raises.
    _agree(team, what, [row[0] for row in rows], "comes to")
    _agree(team, what, [f"{row[2]} bytes" for row in rows], "has a shard of")
    if len({row[1] for row in rows}) > 1 or not rows[0][1]:
        raise UnsupportedError(
            f"{what}: ranks {team_text(team)} do not share a host and its processes: gather the "
            "shards by an Allgather"
        )
    if not nbytes:
        return tensor.new_empty(0, dtype=torch.uint8)
    for rank, (*_, name, at) in zip(team, rows, strict=True):
        if not name:
            raise UnsupportedError(
                f"{what}: the shard of rank {rank} lies in memory that others cannot map: let the "
                "program allocate it, in symmetric memory"
            )
        if nbytes % mmap.PAGESIZE or at % mmap.PAGESIZE:
            begins = f" and begins {at % mmap.PAGESIZE} bytes behind one" * bool(at % mmap.PAGESIZE)
            raise UnsupportedError(
                f"{what}: shards are mapped back to back in pages of {mmap.PAGESIZE} bytes, but "
                f"that of rank {rank} has {nbytes} bytes{begins}: pad it, or gather the shards by "
                "an Allgather"
            )
    places = [Place(r, tuple(name), at) for r, (*_, name, at) in zip(team, rows, strict=True)]
    return memory.row(places, nbytes)


def all_come(control: Control, team: Team, what: str) -> None:
    """See `PeerMemory.meet`."""
    _agree(team, what, _exchange(control, what, team, what), "comes to")


def _exchange(control: Control, text: str, team: Team, what: str) -> list[str]:
    """Returns what each member tells; an error also names what they tell it for."""
    try:
        told = control.exchange(text.encode(), team=team)
    except CommunicationError as error:
        raise type(error)(f"{what}: {error}") from None
    return [one.decode() for one in told]


def _agree(team: Team, what: str, said: Sequence[str], verb: str) -> None:
    if len(set(said)) > 1:
        found = "; ".join(f"rank {r} {verb} {one}" for r, one in zip(team, said, strict=True))
        raise CommunicationError(f"{what}: the ranks differ: {found}")
