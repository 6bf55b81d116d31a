"""What may be chosen about how a sharded fusion becomes a host program."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fuser.support.errors import ArgumentError, DefinitionError


@dataclass(frozen=True)
class LowerParams:
    """The defaults are those of `FusionDefinition.execute`.

    `standalone`: ops that torch can carry out stand in the program as themselves, and results that
    no caller gets are not allocated before, as in nvFuser's `MultiDeviceExecutor`.
    `offset_by_rank`: the steps of a loop begin at this rank's own, and what comes from another
    device's step is received from it (a ring), instead of broadcast. A loop whose steps gather or
    reduce blocks together has the same block on every device all the same.
    `inter_stream_synchronization`: the next step's stream waits until this step's transfer has been
    posted. `stream_slots`: a tensor that only the steps of one loop see, an element each, has room
    for as many as there are streams. `propagate`: tensors that the user did not annotate are
    sharded like their neighbours. `backend` is the library of communications, "" that of the
    device; `step_backend` that of what the steps of a loop send from rank to rank, "" for the same.
    """

    propagate: bool = True
    standalone: bool = False
    offset_by_rank: bool = False
    inter_stream_synchronization: bool = False
    stream_slots: bool = False
    backend: str = ""
    step_backend: str = ""

    def __str__(self) -> str:
        chosen = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in chosen) or "as usual"


def check_number_of_streams(number: object, *, of: str) -> None:
    """Raises `ArgumentError` for what is no integer, `DefinitionError` for fewer than one; `of`
    names the call."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(f"{of}: number_of_streams={number!r}: expected an integer")
    if number < 1:
        raise DefinitionError(f"{of}: number_of_streams={number}: at least 1")


DEFAULT = LowerParams()
STANDALONE = LowerParams(propagate=False, standalone=True)
