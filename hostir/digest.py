"""The digest of a program, which the ranks compare before they run it."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

from hostir.container import HostIrContainer

if TYPE_CHECKING:
    from multidevice.communicator import Communicator


class Agreement:
    """Keeps the ranks of a program in step: same program, and no rank with an error.

    Every run of a program with a mesh agrees once, before anything is launched: an error that one
    rank finds in its inputs would otherwise leave the others waiting in a collective.
    """

    def __init__(self, program: HostIrContainer, communicator: Communicator | None) -> None:
        team = program.devices()
        self._program = program
        self._communicator = communicator
        self._team = team
        is_member = communicator is not None and communicator.rank() in team
        self._is_needed = is_member and len(team) > 1

    @cached_property
    def text(self) -> str:
        return self._program.full_text()

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()

    def agree(self, error: Exception | None) -> None:
        """Return when all ranks of the program's meshes run this program and none has an error.

        Raises `error` itself, `PeerError` naming a rank that has one, or `ProgramMismatchError`
        with the first line that differs.
        """
        if self._is_needed:
            assert self._communicator is not None
            self._communicator.agree_on_text(
                self.text, digest=self.digest, error=error, team=self._team
            )
        elif error is not None:
            raise error
