"""Maps the memory of other processes, and shows the shards of a team as one range of addresses.

A shard is the part of a tensor that one rank stores. Memory is shared in pieces. Each piece has a
file without a name, which the owner process keeps open while it shares the piece. Other processes
open the file through `/proc` under the number of the owner process. The owner withdraws a piece by
closing the file.

The owner sends the name of a piece to other ranks. The name also contains how many pieces the owner
has closed so far. If that number has changed, the receiver checks which of the files still exist.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.coordination import shared_page
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.coordination.control_channel import Control

T = TypeVar("T")
Name = tuple[int, ...]
# File descriptors are reused; serial numbers distinguish the pieces of this process.
_SERIALS = itertools.count()


def new_serial() -> int:
    """Returns a number that no other piece of shared memory of this process has.

    File descriptors are reused; this number is not, so it distinguishes two pieces.
    """
    return next(_SERIALS)


def name_of_piece(fd: int, nbytes: int, serial: int, closed: int) -> Name:
    """Returns the name by which other processes map a piece of this process's memory.

    The name has NAME_WORDS integers. `fd` is the descriptor of the file through which the piece is
    shared, `nbytes` its size, and `serial` a number that no other piece has. `closed` is how many
    pieces this process has closed.
    """
    return os.getpid(), fd, nbytes, serial, closed


def not_mapped(rank: int, error: OSError) -> CommunicationError:
    """Returns the exception for memory of the rank `rank` that cannot be mapped; `error` is the
    cause.
    """
    return CommunicationError(
        f"rank {rank}'s memory cannot be mapped, for example because its process has ended: {error}"
    )


class Mapped(Generic[T]):
    """The memory of other processes that this process has mapped, in pieces that are found by name.

    A piece is one allocation that its owner process shares through a file. A piece stays mapped
    until its owner closes the file.
    """

    def __init__(
        self,
        map_file: Callable[[int, int], T],
        *,
        limit: int | None = None,
        on_forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates an empty table for the mapped memory of other processes.

        - `map_file`: maps one piece of memory (an allocation that its owner process shares through
          a file); its arguments are the descriptor of the open file and the size in bytes. The
          function may raise `OSError`.
        - `limit`: the number of pieces, the most recently used ones, that stay mapped; None for no
          limit.
        - `on_forgotten`: called after this object has dropped pieces, because their owners no
          longer share them.
        """
        self._map_file, self._limit, self._on_forgotten = map_file, limit, on_forgotten
        # Name -> (piece, inode number of its file).
        self._found: dict[Name, tuple[T, int]] = {}
        # How many pieces each process had closed at the last check.
        self._closed_by: dict[int, int] = {}

    def __contains__(self, name: Name) -> bool:
        return name[:4] in self._found

    def __len__(self) -> int:
        return len(self._found)

    def find(self, name: Name, peer: int) -> T:
        """Returns the piece of memory `name` (an allocation that the rank `peer` shares). The first
        call maps the piece.

        Raises `CommunicationError` if the process of the rank has ended. Also raises the errors of
        `map_file`.
        """
        pid, fd, nbytes, _, closed = name
        if self._closed_by.get(pid, 0) != closed:
            self._closed_by[pid] = closed
            self.forget_closed(pid)
        key = name[:4]
        found = self._found.get(key)
        if found is not None and self._limit is None:
            return found[0]
        self._found.pop(key, None)
        if found is None:
            try:
                opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                try:
                    found = self._map_file(opened, nbytes), os.fstat(opened).st_ino
                finally:
                    os.close(opened)
            except OSError as error:
                raise not_mapped(peer, error) from None
        self._found[key] = found
        while self._limit is not None and len(self._found) > self._limit:
            del self._found[next(iter(self._found))]
        return found[0]

    def forget_closed(self, pid: int | None = None) -> None:
        """Drops the mapped memory that its owner process no longer shares, because it has closed
        the file.

        `pid` is the owner process to check; None for all processes.
        """
        gone = [
            name
            for name, (_, number) in list(self._found.items())
            if pid in (None, name[0]) and not _is_open(name, number)
        ]
        for name in gone:
            self._found.pop(name, None)
        if gone:
            self._on_forgotten()

    def clear(self) -> None:
        """Drops all memory of other processes, which unmaps the memory that no tensor uses."""
        self._found.clear()


def _is_open(name: Name, number: int) -> bool:
    """Returns whether the owner process of a piece still has the piece's file open.

    `number` is the inode number of the file at the time when the piece was mapped.
    """
    try:
        return os.stat(f"/proc/{name[0]}/fd/{name[1]}").st_ino == number
    except OSError:
        return False


# ----------------------------------------------------------------------
# The shards of all members of a team as one range of memory, without a copy.


@dataclass(frozen=True)
class MemoryLocation:
    """A location in shared memory of the rank `rank`.

    `name` is the name of the memory, and `at` the offset in bytes.
    """

    rank: int
    name: tuple[int, ...]
    at: int


class Rows(Protocol):
    """The interface of shared memory that can map parts of several ranks' memory at consecutive
    addresses.

    `unit` is the word for the unit of mapping in error messages, such as "pages".
    """

    # The word for the unit of mapping in error messages.
    unit: str

    @property
    def unit_nbytes(self) -> int:
        """The size in bytes of the unit of mapping.

        The size of a shard must be a multiple of this number.
        """
        ...

    @property
    def why_not(self) -> str:
        """The reason why other processes cannot map this memory; "" if they can map it."""
        ...

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name by which other processes map a tensor's memory, and the offset in bytes.

        Returns None if other processes cannot map the memory.
        """
        ...

    def row(self, places: Sequence[MemoryLocation], nbytes: int) -> torch.Tensor:
        """Maps `nbytes` bytes at each location in `places`, at consecutive addresses, as one uint8
        tensor. A location is a rank, the name of memory that the rank shares, and an offset.
        """
        ...


def side_by_side(
    control: Control, memory: Rows, tensor: torch.Tensor, team: Team, what: str
) -> torch.Tensor:
    """Maps the shards of all ranks of a team as one tensor, in team order, without a copy.

    A shard is the part of a tensor that one rank stores; `tensor` is this rank's. The ranks first
    send each other the locations of their shards. `memory` maps the shards. `what` names the
    operation in error messages. Raises the same error on all ranks if the shards cannot be mapped.
    """
    place = memory.name_of(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    mine = (what, shared_page.host(), nbytes, memory.why_not, *(place or ((), 0)))
    rows = [json.loads(text) for text in _exchange(control, json.dumps(mine), team, what)]
    # All members make the same checks on the same data, so that all raise the same error.
    _agree(team, what, [row[0] for row in rows], "calls")
    _agree(team, what, [f"{row[2]} bytes" for row in rows], "has a shard of")
    if len({row[1] for row in rows}) > 1 or not rows[0][1]:
        raise UnsupportedError(
            f"{what}: ranks {team_text(team)} cannot map each other's memory, because they run on "
            "several hosts or in separate containers: gather the shards by an Allgather instead"
        )
    if not nbytes:
        return tensor.new_empty(0, dtype=torch.uint8)
    size = memory.unit_nbytes
    for rank, (*_, why_not, name, at) in zip(team, rows, strict=True):
        if not name:
            why_not = why_not or "let the program allocate the shard in symmetric memory"
            raise UnsupportedError(
                f"{what}: other ranks cannot map the memory of rank {rank}'s shard: {why_not}"
            )
        if nbytes % size or at % size:
            begins = f" and begins {at % size} bytes after a multiple of {size}" * bool(at % size)
            raise UnsupportedError(
                f"{what}: shards are mapped one after another in {memory.unit} of {size} bytes, "
                f"but the shard of rank {rank} has {nbytes} bytes{begins}: pad the shard, or "
                "gather the shards by an Allgather"
            )
    places = [
        MemoryLocation(r, tuple(name), at) for r, (*_, name, at) in zip(team, rows, strict=True)
    ]
    try:
        return memory.row(places, nbytes)
    except CommunicationError as error:
        raise type(error)(f"{what}: {error}") from None


def await_members(control: Control, team: Team, what: str) -> None:
    """Blocks until all ranks of a team have called the function with the same description
    `what`.
    """
    _agree(team, what, _exchange(control, what, team, what), "calls")


def _exchange(control: Control, text: str, team: Team, what: str) -> list[str]:
    """Sends `text` to all ranks of a team; returns the texts of all ranks, in team order.

    Errors also name the operation `what`.
    """
    try:
        told = control.exchange(text.encode(), team=team)
    except CommunicationError as error:
        raise type(error)(f"{what}: {error}") from None
    return [one.decode() for one in told]


def _agree(team: Team, what: str, said: Sequence[str], verb: str) -> None:
    if len(set(said)) > 1:
        found = "; ".join(f"rank {r} {verb} {one}" for r, one in zip(team, said, strict=True))
        raise CommunicationError(f"{what}: the ranks of the team must agree, but {found}")
