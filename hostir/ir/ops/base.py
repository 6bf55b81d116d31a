"""The base class of host ops, the interfaces that the methods of ops use, and the check of op
fields.

The fields of an op are checked when the op is created: a value of a wrong type is refused.
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
    """The properties of a whole program that `HostOp.verify_in` reads."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The ranks of the meshes of all tensors."""
        ...

    @property
    def meshes(self) -> Collection[DeviceMesh | None]:
        """The meshes of all tensors. None is included for tensors without a mesh."""
        ...

    @property
    def streams(self) -> Collection[str]:
        """The names of the streams that some op captures (`GetCurrentStream`) or enters
        (`SetCurrentStream`)."""
        ...

    @property
    def twice(self) -> Collection[int]:
        """The communication numbers that more than one op starts, which is an error."""
        ...

    def kernel(self, group: int) -> Fusion:
        """Returns the fusion of the kernel group with number `group`. Raises `VerifyError` if no
        kernel group has that number."""
        ...

    def unit(self, number: int) -> Fusion:
        """Returns the fusion of the host unit with number `number`. Raises `VerifyError` if no host
        unit has that number."""
        ...


# ------------------------------------------------------------------ communications
# The library name of peer copies. With any other name, a run uses the library of its device.
PEER_COPIES = "CUDA"


@dataclass(frozen=True, eq=False)
class Movement:
    """The data that the communication of one op moves between ranks.

    A movement has one of three kinds:

    - a collective: every member of `team` takes part, and `collective` describes the collective;
    - a permutation: every member of `team` takes part, and `peers` are positions in the team;
    - one end of a transfer between two ranks: `team` is None, and `peers` has one global rank.
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
        """Whether the ranks copy out of each other's memory, without a communication library."""
        return self.backend == PEER_COPIES

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """The tensor sent and the tensor received, in this order. One end of a transfer has only
        one of the two."""
        return tuple(tv for tv in (self.sent, self.received) if tv is not None)

    @property
    def both(self) -> tuple[TensorView, TensorView]:
        """The pair (tensor sent, tensor received) of a collective or a permutation."""
        assert self.sent is not None and self.received is not None, f"{self.kind} has one end"
        return self.sent, self.received

    @property
    def buffer(self) -> TensorView:
        """The tensor that a send reads or a receive writes."""
        return self.tensors[0]

    @cached_property
    def expanded(self) -> Mapping[TensorView, tuple[int, ...]]:
        """For each tensor, the expanded axes: memory holds only one element along an expanded
        axis."""
        return {tv: expanded_positions(tv) for tv in self.tensors}


# ------------------------------------------------------------------ how ops run
# An op of the class that the method's docstring names. This module cannot import the op classes.
_Named = Any


class LocalShapes(Protocol):
    """The interface that evaluates the sizes of local shards, for one run or for all inputs of
    equal sizes."""

    @property
    def rank(self) -> int:
        """The global rank of the process that runs the program."""
        ...

    def local_shape(self, tv: TensorView, stream_index: Scalar | None = None) -> tuple[int, ...]:
        """Returns the shape of this rank's shard of `tv`.

        With `stream_index`, returns the shape of the block that this iteration of a stream loop
        uses.
        """
        ...


class Runtime(Protocol):
    """The interface through which `HostOp.emit` runs an op on one rank.

    An op describes its work once, as calls of these methods. The implementation
    (`hostir.runtime.execute`) does the work at once, records the work for later runs, or follows
    the calls in a dry run without data. Methods evaluate tensor names, sizes and peers at once, on
    the host. Work for the device is put on the current stream.
    """

    @property
    def rank(self) -> int:
        """The global rank of the process that runs the program."""
        ...

    @property
    def team(self) -> Team:
        """The ranks of all meshes of the program."""
        ...

    # -------------------------------------------------------------- questions
    def number(self, x: Scalar) -> Number:
        """Returns the current value of a scalar."""
        ...

    def integer(self, x: Scalar) -> int:
        """Returns the current value of an integer scalar."""
        ...

    def is_named(self, tv: TensorView) -> bool:
        """Whether `tv` is a view of another tensor, or is stored in a buffer that the caller
        passed."""
        ...

    # -------------------------------------------------------------- buffers and names
    def allocate(self, tv: TensorView, stream_index: Scalar | None, *, is_cleared: bool) -> None:
        """Allocates the buffer for this rank's shard of `tv`, filled with zeros if `is_cleared`.

        With `stream_index`, the buffer holds only the block that this iteration of a stream loop
        uses.
        """
        ...

    def deallocate(self, tv: TensorView) -> None:
        """Frees the buffer of `tv`. If `tv` is a view of several ranks' shards, ends the view."""
        ...

    def name_part(self, out: TensorView, inp: TensorView, part: Part | None) -> None:
        """Makes `out` a view of a part of `inp`. If `part` is None, `out` is a view of all of
        `inp`.

        A part is one element along an axis that `out` lacks, or a chunk of an axis. No data moves.
        """
        ...

    def name_as_shaped(self, out: TensorView, inp: TensorView) -> None:
        """Makes `out` a view of all elements of `inp`, in the local shape of `out`. `inp` must be
        dense."""
        ...

    def show_shards(self, op: _Named) -> None:
        """Synchronises the ranks of `op`, a `SymmetricContiguousView`, and makes the result of `op`
        a view of all ranks' shards."""
        ...

    # -------------------------------------------------------------- work on the current stream
    def call(self, work: Callable[..., object], *operands: TensorView | Scalar) -> None:
        """Calls `work` on the current stream. The arguments are the run's tensors and numbers for
        `operands`."""
        ...

    def copy_part(
        self,
        out: TensorView,
        inp: TensorView,
        axis: int,
        bounds: Callable[[LocalShapes], tuple[int, int]],
    ) -> None:
        """Copies a range of `inp` along `axis` into `out`. The range is (start, length) =
        `bounds(shapes)`."""
        ...

    def launch(self, op: _Named) -> None:
        """Launches the kernel of `op`, a `LaunchKernel`, on the current stream."""
        ...

    def run_unit(self, op: _Named) -> None:
        """Runs the host unit of `op`, a `PostOnStream`. The unit allocates the results that have no
        buffer."""
        ...

    # -------------------------------------------------------------- communications
    def post(self, op: _Named, team: Team, root: int) -> None:
        """Starts the collective of `op`, a `Communication`, among the ranks of `team`.

        `root` is a global rank, or -1 if this type of collective has no root.
        """
        ...

    def permute(self, op: _Named, team: Team, to: int, source: int) -> None:
        """Starts `op`, a `CollectivePermute`: sends to the global rank `to` and receives from the
        global rank `source`."""
        ...

    def transfer(self, op: _Named, peer: int) -> None:
        """Starts `op`, a `P2PCommunication`, with the global rank `peer`. If a group is open, adds
        the transfer to the group."""
        ...

    def open_group(self, op: Op) -> None:
        """Opens a group of transfers, for the `StartCoalescing` `op`. Later transfers are added to
        the group."""
        ...

    def close_group(self, op: _Named) -> None:
        """Starts all transfers of the open group as one communication with the number of `op`, an
        `EndCoalescing`."""
        ...

    def wait(self, number: int) -> None:
        """Makes the current stream wait for the communication `number`.

        Does nothing if this rank does not take part in the communication.
        """
        ...

    # -------------------------------------------------------------- streams and control flow
    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream."""
        ...

    def capture(self, stream: Stream) -> None:
        """Binds the name of `stream` to the stream that is current now."""
        ...

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all work that was put on `stream` so far."""
        ...

    def run_loop(self, index: Symbol, steps: range, body: Sequence[Op]) -> None:
        """Runs the ops of `body` once for each value in `steps`, with `index` bound to the
        value."""
        ...

    def run(self, ops: Sequence[Op]) -> None:
        """Runs the ops of a region, in order. Ops that do not concern this rank, such as ops on
        tensors of other ranks, are left out."""
        ...


# ------------------------------------------------------------------ the base
class HostOp(Op):
    """Base class of the ops of host programs.

    Every op class declares its fields, its text (`TEXT`, or `template` and `variants`), its
    `effects`, and how the op runs (`emit`). All other methods and class variables have defaults,
    which an op overrides if the defaults do not fit.
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
        """Returns the effects of the op, in order. Effects of the ops in the op's regions are not
        included."""
        raise NotImplementedError(f"{type(self).__name__} declares no effects")

    def emit(self, rt: Runtime) -> None:
        """Runs the op: calls the methods of `rt` that do its work. An op with regions runs the ops
        of a region."""
        raise NotImplementedError(f"{type(self).__name__} does not define emit")

    @property
    def subject(self) -> str:
        """The phrase that names the op at the beginning of a message."""
        return self.name

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The way in which an operand and a result may share one buffer; see `BufferSharing`."""
        return "same"

    @cached_property
    def movement(self) -> Movement | None:
        """The data that the op's communication moves; None for an op that starts no communication.

        By default, ranks send the tensor that the effects read and receive the tensor that the
        effects write. The team is taken from the effects.
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
        """The pair (operand, result) of an op whose result has the operand's values with another
        placement.

        None for an op that starts no communication, and for one end of a transfer.
        """
        movement = self.movement
        return None if movement is None or len(movement.tensors) < 2 else movement.both

    @property
    def ranks_meet(self) -> bool:
        """Whether the ranks of a team synchronise in the op. By default, True for an op that starts
        a communication."""
        return any(isinstance(e, Starts | ClosesGroup) for e in self.effects())

    @property
    def has_dry_run(self) -> bool:
        """Whether a dry run, on tensors without contents, learns everything about the op that later
        runs repeat.

        By default, True for an op that only uses buffers and views. Streams and communications are
        created in real runs, because all ranks must first agree. Loops are excluded because a dry
        run does not walk all iterations.
        """
        only = Makes | Frees | Shows | Reads | Writes
        is_local = all(isinstance(e, only) for e in self.effects())
        return is_local and not self.region_heads() and not self.MAKES_RESULTS

    def work(self, sizes: Sizes) -> Work | None:
        """Returns how many bytes the device of one rank reads and writes for the op, per tensor.

        Returns None for an op without work for the device. By default, each tensor in the effects
        is read or written once. `sizes` returns the local shape of a tensor. The cost model
        (`hostir.cost`) turns the bytes into time. Raises `UnsupportedError` if the work is unknown.
        """
        effects = self.effects()
        if not is_computed(effects):
            return None
        touched = (e.tensor for e in effects if isinstance(e, Makes | Reads | Writes))
        return {tv: held_nbytes(tv, sizes(tv)) for tv in dict.fromkeys(touched)}

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if the op does not fit the rest of its program. By default, checks
        nothing."""

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `VerifyError` if the shape of a result does not fit the operands.

        By default, a view of a whole tensor must have the axes of that tensor. A view of one
        element along an axis must have all other axes. `values` binds the symbols in extents.
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
    """Returns which of the required definitions (text, `effects`, `emit`) an op class lacks."""
    filled = {
        "text (TEXT, or template() and variants())": bool(cls.TEXT)
        or (hasattr(cls, "template") and hasattr(cls, "variants")),
        "effects()": cls.effects is not HostOp.effects,
        "emit()": cls.emit is not HostOp.emit,
    }
    return [slot for slot, is_filled in filled.items() if not is_filled]


def checked_slots(cls: type[HostOp]) -> type[HostOp]:
    """Returns the class unchanged. Raises `TypeError` if the class lacks its text, `effects` or
    `emit`."""
    if missing := missing_slots(cls):
        raise TypeError(f"{cls.__name__}: a host op declares {' and '.join(missing)}")
    return cls


# ------------------------------------------------------------------ fields
# The words for a type in messages. All other types appear by their name.
_WORDS: dict[object, str] = {
    TensorView: "a tensor",
    Scalar: "a scalar or a number",
    type(None): "None",
}


def complete_fields(op: Op) -> None:
    """Converts the fields of a new op in place: numbers in operands become constants, and lists
    become tuples.

    Raises `ArgumentError` naming op and field for a value of a wrong type.
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
    """Returns (name, kind, type, accepted classes) for each field of an op class.

    `complete_fields` adds a class to the accepted classes once a value of that class has passed the
    check.
    """
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Evaluates the annotation `text` in a module's namespace.

    `get_type_hints` is not used because it would take a millisecond per class.
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
    """Returns the end of a message about a value of a wrong type: the value `given`, and advice on
    how to get the type `hint`.

    For a tensor, the tensor's full text follows on a new line.
    """
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; a comparison of tensors has one answer per element: compare scalars"
    return ""
