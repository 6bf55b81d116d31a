"""Defines `LowerParams`, the options of lowering a sharded fusion to a host program."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fuser.support.errors import ArgumentError, DefinitionError


@dataclass(frozen=True)
class LowerParams:
    """The options of lowering a sharded fusion to a host program. The defaults are those of
    `FusionDefinition.execute`.

    - `propagate`: a tensor without annotation is sharded like the tensors that are operands or
      results of the same ops.
    - `standalone`: every op that torch can compute remains a separate op, outside of kernels. A
      result that is no output of the fusion has no `Allocate`, as in nvFuser's
      `MultiDeviceExecutor`.
    - `offset_by_rank`: on each rank, a stream loop (whose iterations compute one block of a tensor
      each, on different streams) begins with the rank's own block. Blocks of other devices are
      received in a ring instead of broadcast. The option has no effect on a loop whose iterations
      gather or reduce blocks.
    - `inter_stream_synchronization`: the stream of the next loop iteration waits until the transfer
      of this iteration has been posted.
    - `stream_slots`: saves memory for a tensor that is used only inside one stream loop, if each
      iteration uses one element of an axis. Memory then holds one such element per stream, instead
      of the whole axis.
    - `backend`: the library of communications; "" for the default library of the device.
    - `step_backend`: the library of transfers between ranks in loop iterations; "" for the library
      that `backend` names.
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
    """Raises `ArgumentError` if `number`, a number of streams, is not an integer, and
    `DefinitionError` if `number` is below 1.

    `of` is the name of the user's function, with which the message begins.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise ArgumentError(f"{of}: expected number_of_streams to be an integer, got {number!r}")
    if number < 1:
        raise DefinitionError(f"{of}: expected number_of_streams to be at least 1, got {number}")


DEFAULT = LowerParams()
STANDALONE = LowerParams(propagate=False, standalone=True)
