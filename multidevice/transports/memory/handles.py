"""What a process has mapped of its peers' memory, and how it finds that they have given it back.

Memory is shared in pieces. Each has a file without a name, which its process has open for as long
as it shares the piece, and peers find under the process's number: closing it gives the piece back.
The names that a process tells its peers say how many it has closed: where that number has changed,
whoever hears a name looks which of the files are still there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from fuser.support.errors import CommunicationError

T = TypeVar("T")
Name = tuple[int, ...]
# File descriptors are used again: pieces of this process are told apart by these.
_SERIALS = itertools.count()


def new_serial() -> int:
    """Returns what tells a piece of this process from all others."""
    return next(_SERIALS)


def name_of_piece(fd: int, nbytes: int, serial: int, closed: int) -> Name:
    """Returns how peers call a piece: NAME_WORDS words (`protocol`)."""
    return os.getpid(), fd, nbytes, serial, closed


def not_mapped(rank: int, error: OSError) -> CommunicationError:
    """Returns the error of a piece whose file cannot be opened."""
    return CommunicationError(f"rank {rank}'s memory cannot be mapped: {error}")


class Mapped(Generic[T]):
    """What this process has mapped of its peers; each piece until it is given back.

    `map_file` maps the piece of an open file (its number, the bytes); it may raise `OSError`.
    """

    def __init__(
        self,
        map_file: Callable[[int, int], T],
        *,
        limit: int | None = None,
        on_forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        """`limit`: how many pieces stay mapped; None for as many as peers share. `on_forgotten` is
        called after peers have given back some."""
        self._map_file, self._limit, self._on_forgotten = map_file, limit, on_forgotten
        # By name, with the number of its file in the system.
        self._found: dict[Name, tuple[T, int]] = {}
        # How many pieces each process had closed when it was last looked at.
        self._closed_by: dict[int, int] = {}

    def __contains__(self, name: Name) -> bool:
        return name[:4] in self._found

    def __len__(self) -> int:
        return len(self._found)

    def find(self, name: Name, peer: int) -> T:
        """Returns a piece of a peer; maps it at its first use.

        Raises `CommunicationError` when its process is gone, and what `map_file` raises.
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
        """Drops the pieces whose files their process, or any process, has closed."""
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
        """Drops all."""
        self._found.clear()


def _is_open(name: Name, number: int) -> bool:
    """Whether a process still has the file of a piece of its memory open."""
    try:
        return os.stat(f"/proc/{name[0]}/fd/{name[1]}").st_ino == number
    except OSError:
        return False
