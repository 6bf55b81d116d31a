"""The effects of an op on buffers, names, communications in flight and streams.

A host op returns its effects in order (`HostOp.effects`). Those of a tensor op of the fusion IR
follow from its operands and results (`tensor_op_effects`). Verification, liveness and the race
check read effects, so they need no table of ops.
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
    """A stream of a program: number `index` of the evaluator's streams, or a stream with a name.

    A name is that of a captured stream (`S0`), of the program's entry stream (`Default`), or an
    address.
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
    """A part of a tensor along one axis, reductions left out.

    Without `chunks`, the part is element `index`. With it, the axis is divided into `chunks` equal
    chunks, and the part is chunk `index`. Their size is rounded up, so the last ones may be short
    or empty.
    """

    axis: int
    index: Scalar
    chunks: Scalar | None = None


def bounds(size: int, index: int, chunks: int | None) -> tuple[int, int]:
    """Returns (start, length), in elements, of a part along an axis of `size` elements."""
    if chunks is None:
        return index, 1
    step = -(-size // chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


# ------------------------------------------------------------------ buffers and names
@record
class Makes:
    """The tensor gets a new buffer, which has contents if `is_filled`.

    With `step`, the buffer holds the block of that step of a stream loop.
    """

    tensor: TensorView
    is_filled: bool = False
    step: Scalar | None = None


@record
class Frees:
    """The tensor's buffer is freed, or the view that has this name ends."""

    tensor: TensorView


@record
class Shows:
    """`out` becomes a name of `source`, or of a part of it. No data moves."""

    out: TensorView
    source: TensorView
    part: Part | None = None


@record
class Members:
    """The members of a team whose shards a collective reads or writes: all, or the one at position
    `place`."""

    team: TeamOf
    place: Scalar | None = None


@record
class Reads:
    """Each rank reads its shard of the tensor; with `by`, only these members of a team do."""

    tensor: TensorView
    by: Members | None = None


@record
class Writes:
    """Each rank writes its shard of the tensor; with `by`, only these members of a team do."""

    tensor: TensorView
    by: Members | None = None


# ------------------------------------------------------------------ communications
@record
class Starts:
    """Starts the communication `number`, or adds it to the open group.

    It uses the tensors that the op reads and writes until the `Wait` with this number.
    """

    number: int


@record
class OpensGroup:
    """Opens a group: the transfers up to `ClosesGroup` start together."""


@record
class ClosesGroup:
    """Starts the group's transfers as the communication `number`."""

    number: int


@record
class Waits:
    """Makes the current stream wait for the communication `number`."""

    number: int


# ------------------------------------------------------------------ streams
@record
class Enters:
    """Makes this stream the current one for later ops."""

    stream: Stream


@record
class Captures:
    """Gives the current stream this name."""

    stream: Stream


@record
class Joins:
    """Makes the current stream wait for all work that this stream has received so far."""

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

    It is not if it only names or allocates memory, communicates, or orders streams.
    """
    found = [type(e) for e in effects if not isinstance(e, Makes) or e.is_filled]
    return not {Makes, Reads, Writes}.isdisjoint(found) and {Shows, Starts}.isdisjoint(found)


def effects_of(op: Op, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of an op, without those of ops in its regions.

    `has_buffer` contains the tensors that already have memory. A tensor op writes into these. Any
    other result gets a new buffer, or becomes a view of the input if the op can be one.
    """
    if isinstance(op, TensorOp):
        return tensor_op_effects(op, has_buffer)
    declared: tuple[Effect, ...] = getattr(op, "effects")()  # noqa: B009
    if not getattr(op, "MAKES_RESULTS", False):
        return declared
    made = (e.tensor for e in declared if isinstance(e, Writes) and e.tensor not in has_buffer)
    return (*map(Makes, made), *declared)


def tensor_op_effects(op: TensorOp, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of a tensor op of the fusion IR in a host program."""
    found: list[Effect] = [Reads(v) for v in op.inputs if isinstance(v, TensorView)]
    for out in op.outputs:
        if out in has_buffer:
            found.append(Writes(out))
        elif isinstance(op, VIEW_OPS):
            found = [Shows(out, op.inputs[0])]
        else:
            found += [Makes(out), Writes(out)]
    return tuple(found)
