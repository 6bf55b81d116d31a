"""Defines the effects of an op: what the op does to buffers, views, communications and streams.

A host op returns its effects in order (`HostOp.effects`). The effects of a tensor op of the fusion
IR are derived from its operands and results (`tensor_op_effects`). Verification, liveness analysis
and the race check read only effects. Therefore these analyses work for every op without a case per
op class.
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
    """A stream that a host program refers to, either by number or by name.

    `index` is the number of a stream that a run creates, counted from 0. `name` is one of three: a
    name that a `GetCurrentStream` op gives, such as `S0`; `Default`, the device's default stream;
    or an address such as `0x5f10`, which the text of an nvFuser program contains.
    """

    index: Scalar | None = None
    name: str = ""

    def __post_init__(self) -> None:
        index: Any = self.index
        if type(index) is int:
            if index < 0:
                raise DefinitionError(f"Stream: the number must be at least 0, got {index}")
            index = sc.const(index)
            object.__setattr__(self, "index", index)
        if index is None and not STREAM_NAME.fullmatch(self.name):
            raise DefinitionError(
                f"Stream: expected a name of a stream, such as S0 or Default, got {self.name!r}"
            )
        if index is not None and (self.name or not isinstance(index, Scalar)):
            raise ArgumentError(
                f"Stream: expected either an integer scalar or name=, got {index!r}"
                + (f" and name={self.name!r}" if self.name else "")
            )

    def __str__(self) -> str:
        return self.name if self.index is None else str(self.index)


@record
class Part:
    """A part of a tensor along one axis: a single element, or a chunk.

    `axis` is the index of the axis, not counting reduction axes. If `chunks` is None, the part is
    the element `index` of that axis. Otherwise the axis is divided into `chunks` equal chunks, and
    the part is chunk `index`. The size of a chunk is rounded up, so the last chunks may be short or
    empty.
    """

    axis: int
    index: Scalar
    chunks: Scalar | None = None


def bounds(size: int, index: int, chunks: int | None) -> tuple[int, int]:
    """Returns (start, length), in elements, of a part of an axis that has `size` elements.

    If `chunks` is None, the part is the element `index`. Otherwise the axis is divided into
    `chunks` equal chunks, and the part is chunk `index`.
    """
    if chunks is None:
        return index, 1
    step = -(-size // chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


# ------------------------------------------------------------------ buffers and names
@record
class Makes:
    """The effect of an op that gives `tensor` a new buffer. `is_filled` says whether the op also
    writes the contents of the buffer.

    If `step` is given, a loop computes `tensor` block by block. The buffer holds only the block
    that iteration number `step` uses.
    """

    tensor: TensorView
    is_filled: bool = False
    step: Scalar | None = None


@record
class Frees:
    """The effect of an op that frees the buffer of `tensor`. If `tensor` is a view of the parts
    (shards) of a tensor that several ranks store, the op ends the view instead.
    """

    tensor: TensorView


@record
class Shows:
    """The effect of an op that makes `out` a view of `source`, or of only the `part` of `source`.
    No data moves."""

    out: TensorView
    source: TensorView
    part: Part | None = None


@record
class Members:
    """The members of a team that read or write a tensor in a collective. A team is the set of ranks
    that take part.

    If `place` is None, all members read or write the tensor. Otherwise only the member at position
    `place` in the team reads or writes it, such as the root of a broadcast.
    """

    team: TeamOf
    place: Scalar | None = None


@record
class Reads:
    """The effect of an op that reads `tensor`: each rank reads its own shard (the part that it
    stores). If `by` is given, only the ranks that it describes read, such as the root of a
    collective.
    """

    tensor: TensorView
    by: Members | None = None


@record
class Writes:
    """The effect of an op that writes `tensor`: each rank writes its own shard (the part that it
    stores). If `by` is given, only the ranks that it describes write, such as the root of a
    collective.
    """

    tensor: TensorView
    by: Members | None = None


# ------------------------------------------------------------------ communications
@record
class Starts:
    """The effect of an op that starts the communication `number`. If a group of transfers is open
    (between `StartCoalescing` and `EndCoalescing`), the communication joins the group and starts
    when the group ends.

    Until its `Wait` op has run, the communication uses the tensors that this op reads and writes.
    """

    number: int


@record
class OpensGroup:
    """The effect of `StartCoalescing`: a group of sends and receives is opened. The sends and
    receives of later ops join the group, until an op with the effect `ClosesGroup` starts all of
    them together.
    """


@record
class ClosesGroup:
    """The effect of `EndCoalescing`: all transfers of the open group start together, as the
    communication `number`."""

    number: int


@record
class Waits:
    """The effect of a `Wait` op: later work on the current stream begins after the communication
    `number` has ended."""

    number: int


# ------------------------------------------------------------------ streams
@record
class Enters:
    """The effect of an op that makes `stream` the current stream. Later ops put their work on the
    current stream."""

    stream: Stream


@record
class Captures:
    """The effect of a `GetCurrentStream` op: names the stream that is current when the op runs.
    Later ops refer to the stream by this name, such as `S0`, which is in `stream`.
    """

    stream: Stream


@record
class Joins:
    """The effect of an op that makes the current stream wait for all work that earlier ops put on
    `stream`."""

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
    """Whether an op with these effects makes the device compute or copy something.

    The result is False for an op that only makes views, allocates memory, communicates, or orders
    streams.
    """
    found = [type(e) for e in effects if not isinstance(e, Makes) or e.is_filled]
    return not {Makes, Reads, Writes}.isdisjoint(found) and {Shows, Starts}.isdisjoint(found)


def effects_of(op: Op, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of `op`, which is a host op or a tensor op. Effects of the ops inside a
    loop body or branch are not included.

    `has_buffer` contains the tensors that already have memory. A tensor op writes its result into
    such a tensor. Any other result becomes a view of the operand if the op is a view op. Otherwise
    the result gets a new buffer.
    """
    if isinstance(op, TensorOp):
        return tensor_op_effects(op, has_buffer)
    declared: tuple[Effect, ...] = getattr(op, "effects")()  # noqa: B009
    if not getattr(op, "MAKES_RESULTS", False):
        return declared
    made = (e.tensor for e in declared if isinstance(e, Writes) and e.tensor not in has_buffer)
    return (*map(Makes, made), *declared)


def tensor_op_effects(op: TensorOp, has_buffer: Container[TensorView]) -> tuple[Effect, ...]:
    """Returns the effects of a tensor op of the fusion IR when a host program contains the op.

    `has_buffer` contains the tensors that already have memory. The op writes into these tensors.
    For any other result, a view op makes a view of its operand, and other ops allocate a new
    buffer.
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
