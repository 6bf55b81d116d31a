"""The effects of an op: on buffers, on names, on communications in flight, on streams.

An op states its effects in order (`HostOp.effects`); tensor ops of the fusion IR have those of
`tensor_op_effects`. Verification, liveness and the race check read effects and know no op.
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

# A captured stream, the program's own, or (as nvFuser prints it) an address.
STREAM_NAME = re.compile(r"(S[0-9]+|Default|0x[0-9a-zA-Z]+)(?!\w)")
# The stream that is current when a run of CPU streams begins.
ENTRY = "entry"
# The stream of the caller among the numbers of streams; captured names that nothing captured and
# streams that the program knows by address come below it.
CALLER = -1


@record
class Stream:
    """A stream of a program: number `index` of the evaluator's, or one that is known by `name`
    (`S0`): a captured one, or the program's own."""

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
            raise DefinitionError(f"Stream: {self.name!r} is no name of a stream: S0, S1, Default")
        if index is not None and (self.name or not isinstance(index, Scalar)):
            raise ArgumentError(
                f"Stream: expected an integer scalar or name=, got {index!r}"
                + (f" and name={self.name!r}" if self.name else "")
            )

    def __str__(self) -> str:
        return self.name if self.index is None else str(self.index)


@record
class Part:
    """A slice along one axis (reductions left out): element `index`, or, of `chunks` equal chunks
    (rounded up; the last ones may be short or empty), chunk `index`."""

    axis: int
    index: Scalar
    chunks: Scalar | None = None


def bounds(size: int, index: int, chunks: int | None) -> tuple[int, int]:
    """Returns (start, length) of a part along an axis of `size` elements."""
    if chunks is None:
        return index, 1
    step = -(-size // chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


# ------------------------------------------------------------------ buffers and names
@record
class Makes:
    """The tensor gets a buffer of its own, with contents if `is_filled`; for its block of step
    `step` of a stream loop, if there is one."""

    tensor: TensorView
    is_filled: bool = False
    step: Scalar | None = None


@record
class Frees:
    """The tensor's buffer, or the name of a view, is given up."""

    tensor: TensorView


@record
class Shows:
    """`out` becomes a name of `source`, or of a part of it; no data moves."""

    out: TensorView
    source: TensorView
    part: Part | None = None


@record
class Members:
    """The members whose shards a collective touches: all of a team, or the one at
    `place`."""

    team: TeamOf
    place: Scalar | None = None


@record
class Reads:
    """Each rank reads its shard of the tensor; `by`: members of a team alone."""

    tensor: TensorView
    by: Members | None = None


@record
class Writes:
    """Each rank writes its shard of the tensor; `by`: members of a team alone."""

    tensor: TensorView
    by: Members | None = None


# ------------------------------------------------------------------ communications
@record
class Starts:
    """What the op reads and writes stays in use until the communication of this number has been
    waited for. In a group, it starts when the group ends."""

    number: int


@record
class OpensGroup:
    """The transfers up to `ClosesGroup` start together."""


@record
class ClosesGroup:
    """Starts the group's transfers, which are waited for under this number."""

    number: int


@record
class Waits:
    """The current stream goes on when the communication of this number has ended."""

    number: int


# ------------------------------------------------------------------ streams
@record
class Enters:
    """What follows runs on this stream."""

    stream: Stream


@record
class Captures:
    """The stream's name means the current stream from now on."""

    stream: Stream


@record
class Joins:
    """The current stream waits for all that this one has been given so far."""

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
    """Whether an op with these effects is work for the device, rather than a name, room in memory,
    a communication or an order of streams."""
    found = [type(e) for e in effects if not isinstance(e, Makes) or e.is_filled]
    return not {Makes, Reads, Writes}.isdisjoint(found) and {Shows, Starts}.isdisjoint(found)


def effects_of(op: Op, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns what an op does, those of its regions left out.

    `has_buffer` tells which tensors exist already: a tensor op writes into such an output, and
    makes any other, as a view of its input where it can.
    """
    if isinstance(op, TensorOp):
        return tensor_op_effects(op, has_buffer)
    declared: tuple[Effect, ...] = getattr(op, "effects")()  # noqa: B009
    if not getattr(op, "MAKES_RESULTS", False):
        return declared
    made = (e.tensor for e in declared if isinstance(e, Writes) and e.tensor not in has_buffer)
    return (*map(Makes, made), *declared)


def tensor_op_effects(op: TensorOp, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns what a tensor op of the fusion IR does in a host program."""
    found: list[Effect] = [Reads(v) for v in op.inputs if isinstance(v, TensorView)]
    for out in op.outputs:
        if out in has_buffer:
            found.append(Writes(out))
        elif isinstance(op, VIEW_OPS):
            found = [Shows(out, op.inputs[0])]
        else:
            found += [Makes(out), Writes(out)]
    return tuple(found)
