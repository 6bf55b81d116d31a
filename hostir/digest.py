"""The digest of a program, which the ranks compare before they run it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fuser.errors import FuserError
from hostir.bind import Argument
from hostir.evaluate import HostIrEvaluator

if TYPE_CHECKING:
    from multidevice.communicator import Communicator


def digest_of(text: str) -> bytes:
    """Return 16 bytes that tell texts apart."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def run_agreed(
    evaluator: HostIrEvaluator, inputs: Sequence[Argument], communicator: Communicator
) -> list[torch.Tensor]:
    """Run once the ranks of the program's meshes agree: same program, no error in any inputs.

    Raises the error of this rank's inputs, `PeerError` naming another rank's, or
    `ProgramMismatchError` with the first line that differs; nothing was launched then.
    """
    error: FuserError | None = None
    try:
        evaluator.check(inputs)
    except FuserError as found:
        error = found
    team = evaluator.program.devices()
    if communicator.rank() in team and len(team) > 1:
        text = evaluator.program.full_text()
        communicator.agree_on_text(text, digest=digest_of(text), error=error, team=team)
    elif error is not None:
        raise error
    return evaluator.run(inputs)
