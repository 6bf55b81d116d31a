"""The effects of an op on buffers, views, communications and streams.

A host op returns its effects in order (`HostOp.effects`). The effects of a tensor op of the fusion
IR follow from its operands and results (`tensor_op_effects`). Verification, liveness and the race
check read effects, so these analyses need no table of ops.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.passes.view_ops import VIEW_OPS
from fuser.support.errors import ArgumentError, DefinitionError
from fuser.support.record import record
from multidevice.sharding.reshard import TeamOf

# The name of a captured stream, the entry stream, or an address as nvFuser prints it.
STREAM_NAME = re.compile(r"(S[0-9]+|Default|0x[0-9a-zA-Z]+)(?!\w)")
# The stream that is current when a run of CPU streams begins.
ENTRY = "entry"
# The number of the caller's stream. Streams known by address, and names that no op captured, have
# lower numbers.
CALLER = -1


@record
class Stream:
    """A stream of a program: either stream number `index` of the evaluator, or a stream with a
    name.

    A name denotes a captured stream (`S0`), the program's entry stream (`Default`), or an address.
    """

    index: Scalar | None = None
    name: str = ""

    def __post_init__(self) -> None:
        index: Any = self.index
        if type(index) is int:
            if index < 0:
                raise DefinitionError(f"Stream {index}: streams count from 0")
            index = sc.const(index)
            object.__setattr__(self, "index", index)
        if index is None and not STREAM_NAME.fullmatch(self.name):
            raise DefinitionError(
                f"Stream: {self.name!r} is no name of a stream, such as S0, S1 or Default"
            )
        if index is not None and (self.name or not isinstance(index, Scalar)):
            raise ArgumentError(
                f"Stream: expected an integer scalar or name=, got {index!r}"
                + (f" and name={self.name!r}" if self.name else "")
            )

    def __str__(self) -> str:
        return self.name if self.index is None else str(self.index)


@record
class Part:
    """A part of a tensor along one axis. `axis` is counted without reductions.

    If `chunks` is None, the part is element `index`. Otherwise the axis is divided into `chunks`
    equal chunks, and the part is chunk `index`. The size of a chunk is rounded up, so the last
    chunks may be short or empty.
    """

    axis: int
    index: Scalar
    chunks: Scalar | None = None


def bounds(size: int, index: int, chunks: int | None) -> tuple[int, int]:
    """Returns (start, length), in elements, of a part along an axis of `size` elements.

    If `chunks` is None, the part is element `index`. Otherwise the part is chunk `index` of
    `chunks`.
    """
    if chunks is None:
        return index, 1
    step = -(-size // chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


# ------------------------------------------------------------------ buffers and names
@record
class Makes:
    """The effect that a tensor gets a new buffer. The buffer has contents if `is_filled`.

    If `step` is given, the buffer holds only the block that this iteration of a stream loop uses.
    """

    tensor: TensorView
    is_filled: bool = False
    step: Scalar | None = None


@record
class Frees:
    """The effect that the buffer of a tensor is freed. If the tensor is a view of several ranks'
    shards, the view ends."""

    tensor: TensorView


@record
class Shows:
    """The effect that `out` becomes a view of `source`, or of the given `part` of `source`. No data
    moves."""

    out: TensorView
    source: TensorView
    part: Part | None = None


@record
class Members:
    """The members of a team that read or write a tensor in a collective.

    If `place` is None, these are all members. Otherwise only the member at position `place` of the
    team.
    """

    team: TeamOf
    place: Scalar | None = None


@record
class Reads:
    """The effect that each rank reads its shard of the tensor. If `by` is given, only these members
    of a team read."""

    tensor: TensorView
    by: Members | None = None


@record
class Writes:
    """The effect that each rank writes its shard of the tensor. If `by` is given, only these
    members of a team write."""

    tensor: TensorView
    by: Members | None = None


# ------------------------------------------------------------------ communications
@record
class Starts:
    """The effect that the communication `number` starts, or joins the group of transfers that is
    open.

    The communication uses the tensors that the op reads and writes until the `Wait` with the same
    number.
    """

    number: int


@record
class OpensGroup:
    """The effect that a group of transfers is opened. The transfers up to `ClosesGroup` start
    together."""


@record
class ClosesGroup:
    """The effect that all transfers of the open group start, as the communication `number`."""

    number: int


@record
class Waits:
    """The effect that the current stream waits for the communication `number`."""

    number: int


# ------------------------------------------------------------------ streams
@record
class Enters:
    """The effect that `stream` becomes the current stream for later ops."""

    stream: Stream


@record
class Captures:
    """The effect that the name of `stream` is bound to the current stream."""

    stream: Stream


@record
class Joins:
    """The effect that the current stream waits for all work that was put on `stream` so far."""

    stream: Stream


Effect = (
    Makes
    | Frees
    | Shows
    | Reads
    | Writes
    | Starts
    | OpensGroup
    | ClosesGroup
    | Waits
    | Enters
    | Captures
    | Joins
)


def is_computed(effects: Iterable[Effect]) -> bool:
    """Whether an op with these effects is work for the device.

    An op that only makes views, allocates memory, communicates, or orders streams is no work for
    the device.
    """
    found = [type(e) for e in effects if not isinstance(e, Makes) or e.is_filled]
    return not {Makes, Reads, Writes}.isdisjoint(found) and {Shows, Starts}.isdisjoint(found)


def effects_of(op: Op, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of an op. Effects of the ops in the op's regions are not included.

    `has_buffer` contains the tensors that already have memory. A tensor op writes into these
    tensors. Any other result becomes a view of the operand if the op can be a view, and gets a new
    buffer otherwise.
    """
    if isinstance(op, TensorOp):
        return tensor_op_effects(op, has_buffer)
    declared: tuple[Effect, ...] = getattr(op, "effects")()  # noqa: B009
    if not getattr(op, "MAKES_RESULTS", False):
        return declared
    made = (e.tensor for e in declared if isinstance(e, Writes) and e.tensor not in has_buffer)
    return (*map(Makes, made), *declared)


def tensor_op_effects(op: TensorOp, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of a tensor op of the fusion IR in a host program.

    `has_buffer` contains the tensors that already have memory.
    """
    found: list[Effect] = [Reads(v) for v in op.inputs if isinstance(v, TensorView)]
    for out in op.outputs:
        if out in has_buffer:
            found.append(Writes(out))
        elif isinstance(op, VIEW_OPS):
            found = [Shows(out, op.inputs[0])]
        else:
            found += [Makes(out), Writes(out)]
    return tuple(found)
