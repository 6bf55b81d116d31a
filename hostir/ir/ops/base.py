"""The base class of host ops, the interfaces that its slots use, and the check of op fields.

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


# How an operand and a result may share one buffer: as those of a collective, and
#   freely   the whole result is computed before any of it is written
BufferSharing = Sharing | Literal["freely"]

# The local shapes of an op's operands, and of its results.
Sizes = Callable[[TensorView], tuple[int, ...]]
# The bytes of each tensor that a device reads or writes for an op, on one rank.
Work = Mapping[TensorView, int]


class ProgramAround(Protocol):
    """The properties of a whole program that `HostOp.verify_in` reads."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The ranks that the meshes of tensors name."""
        ...

    @property
    def meshes(self) -> Collection[DeviceMesh | None]:
        """The meshes of all tensors, with None for tensors without a mesh."""
        ...

    @property
    def streams(self) -> Collection[str]:
        """The names of streams that some op captures or enters."""
        ...

    @property
    def twice(self) -> Collection[int]:
        """The numbers of communications that several ops start."""
        ...

    def kernel(self, group: int) -> Fusion:
        """Returns the fusion of a kernel group. Raises `VerifyError` for an unknown group."""
        ...

    def unit(self, number: int) -> Fusion:
        """Returns the fusion of a host unit. Raises `VerifyError` for an unknown unit."""
        ...


# ------------------------------------------------------------------ communications
# The library name of peer copies. With any other name, a run uses the library of its device.
PEER_COPIES = "CUDA"


@dataclass(frozen=True, eq=False)
class Movement:
    """The data that the communication of one op moves between ranks.

    One of three forms:

    - a collective: every member of `team` enters it, and `collective` has its facts;
    - a permutation: every member of `team` enters it, and `peers` are positions in the team;
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
        """Whether ranks copy out of each other's memory, without a library."""
        return self.backend == PEER_COPIES

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """The tensors that it sends and receives, in this order."""
        return tuple(tv for tv in (self.sent, self.received) if tv is not None)

    @property
    def both(self) -> tuple[TensorView, TensorView]:
        """The tensor sent and the tensor received, of a movement within a team."""
        assert self.sent is not None and self.received is not None, f"{self.kind} has one end"
        return self.sent, self.received

    @property
    def buffer(self) -> TensorView:
        """The tensor of a send, or that of a receive."""
        return self.tensors[0]

    @cached_property
    def expanded(self) -> Mapping[TensorView, tuple[int, ...]]:
        """The expanded axes of each tensor, of which memory holds one element."""
        return {tv: expanded_positions(tv) for tv in self.tensors}


# ------------------------------------------------------------------ how ops run
# An op of the class that the method's docstring names. This module cannot import the op classes.
_Named = Any


class LocalShapes(Protocol):
    """The sizes of local shards in one run, or for one class of inputs."""

    @property
    def rank(self) -> int:
        """The global rank that runs the program."""
        ...

    def local_shape(self, tv: TensorView, stream_index: Scalar | None = None) -> tuple[int, ...]:
        """Returns the shape of this rank's shard; with a stream index, that of one step's block."""
        ...


class Runtime(Protocol):
    """The interface by which the `emit` of an op runs it on one rank.

    An op describes its work once. The implementation (`hostir.runtime.execute`) does the work at
    once, records it for later runs, or follows it in a dry run without data. Methods evaluate
    names, sizes and peers at once, on the host. Work for the device is put on the current stream.
    """

    @property
    def rank(self) -> int:
        """The global rank that runs the program."""
        ...

    @property
    def team(self) -> Team:
        """The ranks of the program's meshes."""
        ...

    # -------------------------------------------------------------- questions
    def number(self, x: Scalar) -> Number:
        """Returns the current value of a scalar."""
        ...

    def integer(self, x: Scalar) -> int:
        """Returns the current value of an integer scalar."""
        ...

    def is_named(self, tv: TensorView) -> bool:
        """Whether `tv` names memory of another tensor, or a buffer of the caller."""
        ...

    # -------------------------------------------------------------- buffers and names
    def allocate(self, tv: TensorView, stream_index: Scalar | None, *, is_cleared: bool) -> None:
        """Allocates the buffer of a local shard; with a stream index, that of one step's block."""
        ...

    def deallocate(self, tv: TensorView) -> None:
        """Frees a buffer, or ends a view of the shards of several ranks."""
        ...

    def name_part(self, out: TensorView, inp: TensorView, part: Part | None) -> None:
        """Makes `out` a name of a part of `inp`; without a part, of all of `inp`.

        A part is one element along an axis, which `out` lacks, or a chunk of an axis.
        """
        ...

    def name_as_shaped(self, out: TensorView, inp: TensorView) -> None:
        """Makes `out` a name of all elements of the dense tensor `inp`, in the local shape of
        `out`."""
        ...

    def show_shards(self, op: _Named) -> None:
        """Synchronises the ranks of a `SymmetricContiguousView` and names all their shards."""
        ...

    # -------------------------------------------------------------- work on the current stream
    def call(self, work: Callable[..., object], *operands: TensorView | Scalar) -> None:
        """Calls `work` on the current stream with the run's tensors and numbers for the
        operands."""
        ...

    def copy_part(
        self,
        out: TensorView,
        inp: TensorView,
        axis: int,
        bounds: Callable[[LocalShapes], tuple[int, int]],
    ) -> None:
        """Copies (start, length) = `bounds(shapes)` of `inp` along an axis into `out`."""
        ...

    def launch(self, op: _Named) -> None:
        """Launches the kernel of a `LaunchKernel`."""
        ...

    def run_unit(self, op: _Named) -> None:
        """Runs the host unit of a `PostOnStream`, which allocates the results that have
        no buffer."""
        ...

    # -------------------------------------------------------------- communications
    def post(self, op: _Named, team: Team, root: int) -> None:
        """Starts a `Communication` in a team. `root` is a global rank, or -1 for a type without a
        root."""
        ...

    def permute(self, op: _Named, team: Team, to: int, source: int) -> None:
        """Starts a `CollectivePermute`: sends to the global rank `to` and receives from
        `source`."""
        ...

    def transfer(self, op: _Named, peer: int) -> None:
        """Starts a `P2PCommunication` with a global rank, or adds it to the open group."""
        ...

    def open_group(self, op: Op) -> None:
        """Opens a group, to which later transfers are added."""
        ...

    def close_group(self, op: _Named) -> None:
        """Starts the transfers of the open group as the communication `op.number`."""
        ...

    def wait(self, number: int) -> None:
        """Makes the current stream wait for a communication; does nothing if this rank is not in
        it."""
        ...

    # -------------------------------------------------------------- streams and control flow
    def enter(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        ...

    def capture(self, stream: Stream) -> None:
        """Gives the current stream a name."""
        ...

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all work that another stream has received."""
        ...

    def run_loop(self, index: Symbol, steps: range, body: Sequence[Op]) -> None:
        """Runs the body once per step, with `index` bound to the step."""
        ...

    def run(self, ops: Sequence[Op]) -> None:
        """Runs the ops of a region, in order, without those that do not concern this rank."""
        ...


# ------------------------------------------------------------------ the base
class HostOp(Op):
    """Base of the ops of host programs.

    Every op class declares its fields, its text (`TEXT`, or `template` and `variants`), its
    `effects`, and how it runs (`emit`). All other slots have defaults, which an op overrides if
    they do not fit.
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
        """Returns the effects of the op, in order. Those of ops in its regions are not included."""
        raise NotImplementedError(f"{type(self).__name__} declares no effects")

    def emit(self, rt: Runtime) -> None:
        """Runs the op: calls the methods of `rt` that do its work. An op with regions
        runs these."""
        raise NotImplementedError(f"{type(self).__name__} does not define emit")

    @property
    def subject(self) -> str:
        """The op as the subject of a sentence in messages."""
        return self.name

    @property
    def buffer_sharing(self) -> BufferSharing:
        """Is the way in which an operand and a result may share one buffer; see `BufferSharing`."""
        return "same"

    @cached_property
    def movement(self) -> Movement | None:
        """The data that the op's communication moves; None for an op that starts none.

        By default, ranks send the tensor that the op reads and receive the one that it writes. The
        team is the one whose members the effects name.
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
        """The tensor that the op brings to another placement, and the result that has this
        placement.

        None for an op that starts no communication, or only one end of a transfer.
        """
        movement = self.movement
        return None if movement is None or len(movement.tensors) < 2 else movement.both

    @property
    def ranks_meet(self) -> bool:
        """Whether the ranks of a team synchronise in the op. By default, if it starts a
        communication."""
        return any(isinstance(e, Starts | ClosesGroup) for e in self.effects())

    @property
    def has_dry_run(self) -> bool:
        """Whether a dry run, on tensors without contents, finds all that later runs repeat.

        By default, True for an op that only touches buffers and names. Streams and communications
        are made in runs, once the ranks have agreed. A dry run does not walk all steps of a loop.
        """
        only = Makes | Frees | Shows | Reads | Writes
        is_local = all(isinstance(e, only) for e in self.effects())
        return is_local and not self.region_heads() and not self.MAKES_RESULTS

    def work(self, sizes: Sizes) -> Work | None:
        """Returns the bytes that one rank's device reads and writes for the op, per tensor.

        None for an op without work for the device. By default, each tensor that the effects name is
        read or written once. The cost model (`hostir.cost`) turns the bytes into time. Raises
        `UnsupportedError` if the work is unknown.
        """
        effects = self.effects()
        if not is_computed(effects):
            return None
        touched = (e.tensor for e in effects if isinstance(e, Makes | Reads | Writes))
        return {tv: held_nbytes(tv, sizes(tv)) for tv in dict.fromkeys(touched)}

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` for an op that does not fit the rest of its program."""

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `VerifyError` for a result whose shape does not fit the operands.

        By default, a result that names a tensor, or one element of it, must have the other axes of
        that tensor. `values` binds symbols of sizes.
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
    """Returns the slots without a default that an op class does not define."""
    filled = {
        "text (TEXT, or template() and variants())": bool(cls.TEXT)
        or (hasattr(cls, "template") and hasattr(cls, "variants")),
        "effects()": cls.effects is not HostOp.effects,
        "emit()": cls.emit is not HostOp.emit,
    }
    return [slot for slot, is_filled in filled.items() if not is_filled]


def checked_slots(cls: type[HostOp]) -> type[HostOp]:
    """Returns the class unchanged. Raises `TypeError` naming the class and the slots
    that it lacks."""
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
    """Replaces Python numbers among the operands by constants, and lists by tuples.

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
    """Returns (name, kind, type, classes known to fit) of every field of an op class."""
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Evaluates one annotation of a module. `get_type_hints` would take a millisecond per class."""
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
    """Returns the end of a message about a wrong value; a tensor is named, with its type below."""
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; a comparison of tensors has one answer per element: compare scalars"
    return ""
