"""Defines `HostOp`, the base class of the ops of host programs, and the interfaces that the methods
of ops use.

The module also checks the fields of a new op: a value of a wrong type raises `ArgumentError`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import UnionType
from typing import Any, ClassVar, Literal, Protocol, Union, cast, get_args, get_origin

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import expanded_positions
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Number, Scalar, Symbol, as_scalar
from fuser.support.arguments import show
from fuser.support.errors import ArgumentError
from hostir.ir.effects import (
    ClosesGroup,
    Effect,
    Frees,
    Makes,
    Part,
    Reads,
    Shows,
    Starts,
    Stream,
    Writes,
    is_computed,
)
from hostir.ir.shape_rules import check_kept_axes
from hostir.ir.shard_layout import held_nbytes
from multidevice.coordination.bounded_wait import Team
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.collectives import Collective, Sharing
from multidevice.transports.base.protocol import RedOp

# The symbols that every run binds: its rank, and the number of the evaluator's streams.
RANK = Symbol("rank", DataType.Index, lo=0)
NUMBER_OF_STREAMS = Symbol("numberOfStreams", DataType.Index, lo=1)


# How an operand and a result may share one buffer: a value of `Sharing`, as for a collective, or
#   freely   the whole result is computed before any element is written
BufferSharing = Sharing | Literal["freely"]

# A function that returns the local shape of an operand or result of an op.
Sizes = Callable[[TensorView], tuple[int, ...]]
# The bytes of each tensor that a device reads or writes for an op, on one rank.
Work = Mapping[TensorView, int]


class ProgramAround(Protocol):
    """The facts about a whole host program by which `HostOp.verify_in` checks whether an op fits
    the program.
    """

    @property
    def devices(self) -> tuple[int, ...]:
        """The ranks in the meshes of all tensors of the program."""
        ...

    @property
    def meshes(self) -> Collection[DeviceMesh | None]:
        """The meshes of all tensors of the program. None is included if some tensor has no mesh."""
        ...

    @property
    def streams(self) -> Collection[str]:
        """The names of streams that the ops of the program define: a `GetCurrentStream` op names
        the current stream, and a `SetCurrentStream` op makes the named stream current. `Default` is
        always included."""
        ...

    @property
    def twice(self) -> Collection[int]:
        """The communication numbers that more than one op of the program starts. Such a program is
        wrong, because a `Wait` names its communication by number."""
        ...

    def kernel(self, group: int) -> Fusion:
        """Returns the fusion that the kernel with the number `group` computes. Raises `VerifyError`
        if the program has no such kernel."""
        ...

    def unit(self, number: int) -> Fusion:
        """Returns the fusion of the host unit with this number. A host unit is a fusion that is
        compiled separately. Raises `VerifyError` if the program has no such host unit."""
        ...


# ------------------------------------------------------------------ communications
# The library name of peer copies. With any other name, a run uses the library of its device.
PEER_COPIES = "CUDA"


@dataclass(frozen=True, eq=False)
class Movement:
    """The data that one communication op moves between ranks.

    A movement has one of three kinds:

    - a collective: every member of `team` takes part, and `collective` describes the collective;
    - a permutation: every member of `team` takes part, and `peers` are positions in the team;
    - the send or the receive of a transfer between two ranks: `team` is None, and `peers` has one
      global rank.
    """

    # The name of the communication's type in messages.
    kind: str
    # The tensor whose local shard a rank sends; None for one that only receives.
    sent: TensorView | None
    # The tensor whose local shard a rank receives; None for one that only sends.
    received: TensorView | None
    team: TeamOf | None
    backend: str = ""
    collective: Collective | None = None
    root: Scalar | None = None
    red_op: RedOp = "SUM"
    # The scalars that select the other ranks, by the names of their fields.
    peers: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])

    @property
    def is_copied(self) -> bool:
        """Whether ranks copy out of each other's memory (peer copies), without a communication
        library such as NCCL."""
        return self.backend == PEER_COPIES

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """The tensor sent and the tensor received, in this order. A send or a receive has only one
        of the two."""
        return tuple(tv for tv in (self.sent, self.received) if tv is not None)

    @property
    def both(self) -> tuple[TensorView, TensorView]:
        """The pair (tensor sent, tensor received) of a collective or a permutation. Must not be
        used for a send or a receive, which has only one tensor."""
        assert self.sent is not None and self.received is not None, (
            f"{self.kind} has only one tensor"
        )
        return self.sent, self.received

    @property
    def buffer(self) -> TensorView:
        """The tensor that a send reads or a receive writes."""
        return self.tensors[0]

    @cached_property
    def expanded(self) -> Mapping[TensorView, tuple[int, ...]]:
        """The expanded axes of each tensor that moves, by axis index. An expanded axis repeats one
        element with stride 0. Memory holds only this element, so only this element is sent.
        """
        return {tv: expanded_positions(tv) for tv in self.tensors}


# ------------------------------------------------------------------ how ops run
# An op of the class that the method's docstring names. This module cannot import the op classes.
_Named = Any


class LocalShapes(Protocol):
    """The interface that evaluates the sizes of a rank's local shards, the parts of tensors that
    the rank stores. One implementation is for a single run, another for all runs on inputs of equal
    sizes.
    """

    @property
    def rank(self) -> int:
        """The global rank of the process that runs the program."""
        ...

    def local_shape(self, tv: TensorView, stream_index: Scalar | None = None) -> tuple[int, ...]:
        """Returns the shape of this rank's shard of `tv`, the part that this rank stores.

        If `stream_index` is given, a loop computes the shard block by block, one block per
        iteration. The shape of the block for this iteration is returned.
        """
        ...


class Runtime(Protocol):
    """The interface through which `HostOp.emit` runs an op on one rank.

    An op describes its work once, as calls of these methods. `hostir.runtime.execute` has the
    implementations: one does the work at once, one also records the work for later runs, and one
    makes a dry run on tensors without data.

    During the call, each method evaluates sizes and peers, and looks up the torch tensors that its
    arguments stand for. Work for the device is only put on the current stream, and may run after
    the call.
    """

    @property
    def rank(self) -> int:
        """The global rank of the process that runs the program."""
        ...

    @property
    def team(self) -> Team:
        """The ranks in all meshes of the program: the ranks that run the program together."""
        ...

    # -------------------------------------------------------------- questions
    def number(self, x: Scalar) -> Number:
        """Returns the value that the scalar `x` has at this point of the run."""
        ...

    def integer(self, x: Scalar) -> int:
        """Returns the value that the integer scalar `x` has at this point of the run."""
        ...

    def is_named(self, tv: TensorView) -> bool:
        """Whether `tv` has memory without an allocation by the program: as a view of another
        tensor, or in a buffer that the caller passed."""
        ...

    # -------------------------------------------------------------- buffers and names
    def allocate(self, tv: TensorView, stream_index: Scalar | None, *, is_cleared: bool) -> None:
        """Allocates the buffer for this rank's shard of `tv`, the part that this rank stores. If
        `is_cleared` is True, the buffer is filled with zeros.

        If `stream_index` is given, a loop computes the shard block by block, and the buffer holds
        only the block for this iteration.
        """
        ...

    def deallocate(self, tv: TensorView) -> None:
        """Frees the buffer of `tv`. If `tv` is a view of the parts (shards) of a tensor that
        several ranks store, no memory is freed; the ranks wait for one another and the view ends.
        """
        ...

    def name_part(self, out: TensorView, inp: TensorView, part: Part | None) -> None:
        """Makes `out` a view of `part` of `inp`, or of all of `inp` if `part` is None. No data
        moves.

        A part is one element along an axis that `out` lacks, or a chunk of an axis.
        """
        ...

    def name_as_shaped(self, out: TensorView, inp: TensorView) -> None:
        """Makes `out` a view of all elements of `inp`, with the local shape of `out`. `inp` must be
        dense in memory. No data moves."""
        ...

    def show_shards(self, op: _Named) -> None:
        """Runs a `SymmetricContiguousView` op: waits for the other ranks that have shards (parts of
        the tensor), then makes the result a view of all their shards.
        """
        ...

    # -------------------------------------------------------------- work on the current stream
    def call(self, work: Callable[..., object], *operands: TensorView | Scalar) -> None:
        """Calls the function `work` on the current stream. The arguments of `work` are the torch
        tensors and numbers that `operands` stand for in this run."""
        ...

    def copy_part(
        self,
        out: TensorView,
        inp: TensorView,
        axis: int,
        bounds: Callable[[LocalShapes], tuple[int, int]],
    ) -> None:
        """Copies a range of `inp` along the axis number `axis` into `out`.

        `bounds` computes the range as (start, length), in elements, from the local shapes of the
        run.
        """
        ...

    def launch(self, op: _Named) -> None:
        """Launches the kernel that a `LaunchKernel` op names, on the current stream."""
        ...

    def run_unit(self, op: _Named) -> None:
        """Runs the host unit, a separately compiled fusion, that a `PostOnStream` op names, on the
        current stream. The host unit allocates results that have no buffer.
        """
        ...

    # -------------------------------------------------------------- communications
    def post(self, op: _Named, team: Team, root: int) -> None:
        """Starts the collective of a `Communication` op among the ranks of `team`.

        `root` is the global rank of the root, or -1 if this type of collective has no root.
        """
        ...

    def permute(self, op: _Named, team: Team, to: int, source: int) -> None:
        """Starts a `CollectivePermute` op: this rank sends to the global rank `to` and receives
        from the global rank `source`."""
        ...

    def transfer(self, op: _Named, peer: int) -> None:
        """Starts the send or receive of a `P2PCommunication` op, with the global rank `peer`. If a
        group of transfers is open, only adds the transfer to the group."""
        ...

    def open_group(self, op: Op) -> None:
        """Opens a group of transfers for a `StartCoalescing` op. Later transfers are added to the
        group, until `close_group` starts all of them."""
        ...

    def close_group(self, op: _Named) -> None:
        """Starts all transfers of the open group together, as one communication. The communication
        has the number of the `EndCoalescing` op."""
        ...

    def wait(self, number: int) -> None:
        """Makes the current stream wait for the end of the communication with this number.

        Does nothing if this rank does not take part in the communication.
        """
        ...

    # -------------------------------------------------------------- streams and control flow
    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream. Later work is put on the current stream."""
        ...

    def capture(self, stream: Stream) -> None:
        """Gives the current CUDA stream the name of `stream`, such as `S0`. Later ops refer to the
        CUDA stream by this name.
        """
        ...

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all work that earlier ops put on `stream`. The host
        does not wait."""
        ...

    def run_loop(self, index: Symbol, steps: range, body: Sequence[Op]) -> None:
        """Runs the ops of the loop body `body` once for each value in `steps`. The symbol `index`
        is bound to the value."""
        ...

    def run(self, ops: Sequence[Op]) -> None:
        """Runs the ops of a region (a whole program, loop body or branch), in order.

        Ops that do not concern this rank are left out, such as ops on tensors of other ranks.
        """
        ...


# ------------------------------------------------------------------ the base
class HostOp(Op):
    """Base class of host ops: the ops that exist only in host programs.

    Every op class declares its fields, its text (`TEXT`, or `template` and `variants`), its
    `effects`, and how the op runs (`emit`). All other methods and class variables have defaults. An
    op class overrides those defaults that do not fit.
    """

    # Texts of earlier versions, which the parser still reads.
    OLDER: ClassVar[tuple[str, ...]] = ()
    # Whether the op allocates the results that have no buffer.
    MAKES_RESULTS: ClassVar[bool] = False
    # Whether the scalars of the op are control scalars: they decide which ops run, how often and on
    # what, so each of their values needs a plan of its own. Other scalars are read in each run.
    HAS_CONTROL_SCALARS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        complete_fields(self)

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the op does to buffers, views, communications and streams, in order. Effects
        of ops inside a loop body or branch are not included."""
        raise NotImplementedError(f"the host op {type(self).__name__} must define effects()")

    def emit(self, rt: Runtime) -> None:
        """Runs the op on one rank, by calling the methods of `rt` that do its work. A loop or
        branch calls `rt` to run the ops inside."""
        raise NotImplementedError(f"the host op {type(self).__name__} must define emit()")

    @property
    def subject(self) -> str:
        """The phrase that names the op at the beginning of an error message, such as `The launch of
        kernel group 1`. By default, the op's name."""
        return self.name

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The way in which an operand and a result of the op may share one buffer: a value of
        `BufferSharing`. The default is `same`: element i of the operand must have the same address
        as element i of the result.
        """
        return "same"

    @cached_property
    def movement(self) -> Movement | None:
        """The data that the op's communication moves between ranks; None for an op that starts no
        communication.

        By default, this follows from the op's effects. A rank sends the tensor that the op reads,
        and receives the tensor that the op writes. The team is that of the ranks that read or
        write.
        """
        effects = self.effects()
        if not any(isinstance(e, Starts) for e in effects):
            return None
        touched = [e for e in effects if isinstance(e, Reads | Writes)]
        return Movement(
            type(self).__name__,
            next((e.tensor for e in touched if isinstance(e, Reads)), None),
            next((e.tensor for e in touched if isinstance(e, Writes)), None),
            next((e.by.team for e in touched if e.by is not None), None),
        )

    @property
    def moved(self) -> tuple[TensorView, TensorView] | None:
        """The pair (operand, result) of an op that copies values of one tensor to another tensor,
        on the same rank or on other ranks. None for any other op, and for a send or a receive,
        which has only one tensor.

        By default, only an op that starts a communication has such a pair.
        """
        movement = self.movement
        return None if movement is None or len(movement.tensors) < 2 else movement.both

    @property
    def ranks_meet(self) -> bool:
        """Whether several ranks wait for each other in the op, as in a communication or a barrier.
        By default, True for an op that starts a communication.
        """
        return any(isinstance(e, Starts | ClosesGroup) for e in self.effects())

    @property
    def has_dry_run(self) -> bool:
        """Whether a dry run, on tensors without contents, can record the op for later runs.
        Otherwise the first real run must record it.

        By default, True for an op that only uses buffers and views. Ops on streams and
        communications need a real run, because all ranks must first agree on the run and then take
        part. Loops are excluded because a dry run does not walk all iterations.
        """
        only = Makes | Frees | Shows | Reads | Writes
        is_local = all(isinstance(e, only) for e in self.effects())
        return is_local and not self.region_heads() and not self.MAKES_RESULTS

    def work(self, sizes: Sizes) -> Work | None:
        """Returns how many bytes the device of one rank reads and writes for the op, per tensor.
        The cost model (`hostir.cost`) estimates the op's time from the bytes.

        By default, each tensor in the effects is read or written once. Returns None if the op gives
        the device no work. `sizes` returns the local shape of a tensor. Raises `UnsupportedError`
        if the work is unknown.
        """
        effects = self.effects()
        if not is_computed(effects):
            return None
        touched = (e.tensor for e in effects if isinstance(e, Makes | Reads | Writes))
        return {tv: held_nbytes(tv, sizes(tv)) for tv in dict.fromkeys(touched)}

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if the op does not fit the rest of its program, for example if a
        kernel that the op names does not exist. By default, checks nothing."""

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `VerifyError` if the shape of a result does not fit the shapes of the operands.

        By default, only views are checked. A view of a whole tensor must have the axes of that
        tensor. A view of one element along an axis must have all other axes. `values` binds the
        symbols in extents.
        """
        for effect in self.effects():
            if isinstance(effect, Shows):
                match effect.part:
                    case None:
                        check_kept_axes(self, effect.source, effect.out, None, values)
                    case Part(axis, _, None):
                        check_kept_axes(self, effect.source, effect.out, axis, values)
                    case _:
                        pass  # a chunk has the declared axes of the whole tensor


def missing_slots(cls: type[HostOp]) -> list[str]:
    """Returns the names of the required parts that the host op class `cls` does not declare: its
    text, `effects` or `emit`. An empty list means that the class is complete.
    """
    filled = {
        "text (TEXT, or template() and variants())": bool(cls.TEXT)
        or (hasattr(cls, "template") and hasattr(cls, "variants")),
        "effects()": cls.effects is not HostOp.effects,
        "emit()": cls.emit is not HostOp.emit,
    }
    return [slot for slot, is_filled in filled.items() if not is_filled]


def checked_slots(cls: type[HostOp]) -> type[HostOp]:
    """Returns the host op class `cls` unchanged, after a check. Raises `TypeError` if the class
    does not declare its text, `effects` or `emit`."""
    if missing := missing_slots(cls):
        raise TypeError(
            f"{cls.__name__}: a host op must declare {' and '.join(missing)}; this class does not"
        )
    return cls


# ------------------------------------------------------------------ fields
# The words for a type in messages. All other types appear by their name.
_WORDS: dict[object, str] = {
    TensorView: "a tensor",
    Scalar: "a scalar or a number",
    type(None): "None",
}


def complete_fields(op: Op) -> None:
    """Converts the fields of a new op in place: a number in an operand becomes a constant scalar,
    and a list becomes a tuple.

    Raises `ArgumentError` with the names of the op and the field if a value has a wrong type.
    """
    for name, kind, hint, known in _fields(type(op)):
        given: Any = getattr(op, name)
        if type(given) in known:
            continue
        value = _completed(given, kind, hint)
        if not _fits(value, hint):
            words = _words(hint)
            raise ArgumentError(
                f"{type(op).__name__}.{name}: expected {words}, {_got(given, hint)}"
            )
        if value is not given:
            object.__setattr__(op, name, value)
        elif get_origin(hint) not in (tuple, Literal):
            known.add(cast("type[object]", type(given)))


def _completed(given: Any, kind: str, hint: Any) -> Any:
    if kind == "operand" and _is_number(given):
        return as_scalar(given)
    if get_origin(hint) is tuple and type(given) in (tuple, list):
        return tuple(as_scalar(v) if _is_number(v) else v for v in given)
    return given


@cache
def _fields(cls: type[Op]) -> tuple[tuple[str, str, Any, set[type[object]]], ...]:
    """Returns (name, kind, type, accepted classes) for each field of the op class `cls`. The kind
    is the role of the field, such as "operand", "result" or "attr".

    The accepted classes are a set, empty at first. When a value of a new class has passed the check
    of `complete_fields`, its class is added, so that later values of this class need no check.
    """
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Evaluates the type annotation `text` in the namespace of the module named `module`.

    `typing.get_type_hints` is not used, because it takes a millisecond per class.
    """
    return eval(text, vars(sys.modules[module]))


def _is_number(value: object) -> bool:
    # A bool is usually the result of comparing scalars with `==`, which compares objects.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: object, hint: Any) -> bool:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is tuple:
        return f"a tuple, each {_words(get_args(hint)[0])}"
    return _WORDS.get(hint) or str(hint.__name__)


def _got(given: object, hint: Any) -> str:
    """Returns the end of an error message about a field of a wrong type: the value `given`, and
    advice on how to get a value of type `hint`.

    For a tensor, the tensor's full text follows on a new line.
    """
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return (
            "; Python's == and != compare objects, not values: write hostir.eq(a, b) or "
            "hostir.ne(a, b)"
        )
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; comparing tensors gives one answer per element: compare scalars instead"
    return ""
