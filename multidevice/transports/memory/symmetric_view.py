"""Shards of all members of a team as one range of memory, without a copy: where members meet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.coordination import shared_page
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.coordination.control_channel import Control


@dataclass(frozen=True)
class MemoryLocation:
    """Where the memory of a rank is: how its process calls it, and where in it."""

    rank: int
    name: tuple[int, ...]
    at: int


class Rows(Protocol):
    """Memory whose parts of several ranks can be mapped one behind the other."""

    # In what it is mapped: the word for it, and its size.
    unit: str

    @property
    def unit_nbytes(self) -> int: ...

    @property
    def why_not(self) -> str:
        """Why others cannot map it; "" where they can."""
        ...

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns how peers call the memory of a tensor, and the bytes from its beginning; None
        where they cannot map it."""
        ...

    def row(self, places: Sequence[MemoryLocation], nbytes: int) -> torch.Tensor:
        """Returns so many bytes of each place, one behind the other, as uint8 that may be read."""
        ...


def side_by_side(
    control: Control, memory: Rows, tensor: torch.Tensor, team: Team, what: str
) -> torch.Tensor:
    """See `PeerMemory.side_by_side`: each member tells the others where its shard lies."""
    place = memory.name_of(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    mine = (what, shared_page.host(), nbytes, memory.why_not, *(place or ((), 0)))
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
    size = memory.unit_nbytes
    for rank, (*_, why_not, name, at) in zip(team, rows, strict=True):
        if not name:
            why_not = why_not or "let the program allocate it, in symmetric memory"
            raise UnsupportedError(
                f"{what}: the shard of rank {rank} lies in memory that others cannot map: {why_not}"
            )
        if nbytes % size or at % size:
            begins = f" and begins {at % size} bytes behind one" * bool(at % size)
            raise UnsupportedError(
                f"{what}: shards are mapped back to back in {memory.unit} of {size} bytes, but "
                f"that of rank {rank} has {nbytes} bytes{begins}: pad it, or gather the shards by "
                "an Allgather"
            )
    places = [
        MemoryLocation(r, tuple(name), at) for r, (*_, name, at) in zip(team, rows, strict=True)
    ]
    try:
        return memory.row(places, nbytes)
    except CommunicationError as error:
        raise type(error)(f"{what}: {error}") from None


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
