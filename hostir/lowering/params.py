"""The options of lowering a sharded fusion to a host program."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fuser.support.errors import ArgumentError, DefinitionError


@dataclass(frozen=True)
class LowerParams:
    """The options of lowering. The defaults are those of `FusionDefinition.execute`.

    - `propagate`: tensors without annotation are sharded like their neighbours.
    - `standalone`: ops that torch can compute remain separate ops, and results that no caller gets
      have no `Allocate`, as in nvFuser's `MultiDeviceExecutor`.
    - `offset_by_rank`: on each rank, the steps of a loop begin with its own block, and blocks of
      other devices are received from them in a ring instead of broadcast. It has no effect on a
      loop whose steps gather or reduce blocks.
    - `inter_stream_synchronization`: the next step's stream waits until this step's transfer has
      been posted.
    - `stream_slots`: a tensor of which each step of one loop uses one element has one slot per
      stream.
    - `backend`: the library of communications; "" for that of the device.
    - `step_backend`: the library of transfers between ranks in the steps of a loop; "" for
      `backend`.
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
    """Raises `ArgumentError` if the number is no integer, and `DefinitionError` if it is below 1.

    `of` names the call in the message.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(f"{of}: number_of_streams={number!r}: expected an integer")
    if number < 1:
        raise DefinitionError(f"{of}: number_of_streams={number}: at least 1")


DEFAULT = LowerParams()
STANDALONE = LowerParams(propagate=False, standalone=True)
