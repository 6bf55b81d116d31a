"""The base of host ops with the slots that each fills, and the check of their fields: a value of
another kind is refused when an op is made.
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

# What every run binds: this rank, and how many streams the evaluator has.
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
    """The program in which an op stands, as the op is checked against it."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The ranks that the meshes of tensors name."""
        ...

    @property
    def meshes(self) -> Collection[DeviceMesh | None]:
        """The meshes of tensors."""
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
        """Returns the fusion of a kernel group; raises `VerifyError` where there is none."""
        ...

    def unit(self, number: int) -> Fusion:
        """Returns the fusion of a host unit; raises `VerifyError` where there is none."""
        ...


# ------------------------------------------------------------------ communications
# The library of peer copies; every other name stands for that of the run's device.
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
# An op of the class that a verb names: this module stands below the op classes.
_Named = Any


class LocalShapes(Protocol):
    """The sizes of local shards in one run, or for one class of inputs."""

    @property
    def rank(self) -> int: ...

    def local_shape(
        self, tv: TensorView, stream_index: Scalar | None = None
    ) -> tuple[int, ...]: ...


class Runtime(Protocol):
    """Carries out one host program on one rank: what an op's `emit` speaks to.

    An op says once what has to be done. Whether that is done at once, kept for later runs, or only
    looked at on tensors without contents is decided by the runtime (`hostir.runtime.execute`).
    Verbs bind names, sizes and peers when they are called, as the host does; work is given to the
    current stream.
    """

    @property
    def rank(self) -> int: ...

    @property
    def team(self) -> Team:
        """The ranks of the program's meshes."""
        ...

    # -------------------------------------------------------------- questions
    def number(self, x: Scalar) -> Number:
        """Returns the value of a scalar now."""
        ...

    def integer(self, x: Scalar) -> int: ...

    def is_named(self, tv: TensorView) -> bool:
        """Whether `tv` is a name for memory of another tensor, or of the caller."""
        ...

    # -------------------------------------------------------------- buffers and names
    def allocate(self, tv: TensorView, stream_index: Scalar | None, *, is_cleared: bool) -> None:
        """Makes the buffer of a local shard, or of the part of it at a step of a stream loop."""
        ...

    def deallocate(self, tv: TensorView) -> None:
        """Gives up a buffer, or a view of the shards of several ranks."""
        ...

    def name_part(self, out: TensorView, inp: TensorView, part: Part | None) -> None:
        """Names a part of `inp`: an element along an axis, which `out` lacks, or a chunk; all of it
        without a part."""
        ...

    def name_as_shaped(self, out: TensorView, inp: TensorView) -> None:
        """Names all elements of `inp`, which is dense, in the local shape of `out`."""
        ...

    def show_shards(self, op: _Named) -> None:
        """Names the shards of all ranks of a `SymmetricContiguousView`, where they meet."""
        ...

    # -------------------------------------------------------------- work on the current stream
    def call(self, work: Callable[..., object], *operands: TensorView | Scalar) -> None:
        """Calls `work` with the tensors and numbers that the operands are in the run."""
        ...

    def copy_part(
        self,
        out: TensorView,
        inp: TensorView,
        axis: int,
        bounds: Callable[[LocalShapes], tuple[int, int]],
    ) -> None:
        """Copies (start, length) of `inp` along an axis; `bounds` tells them for given sizes."""
        ...

    def launch(self, op: _Named) -> None:
        """Launches the kernel of a `LaunchKernel`."""
        ...

    def run_unit(self, op: _Named) -> None:
        """Runs the host unit of a `PostOnStream`; makes those of its results without a buffer."""
        ...

    # -------------------------------------------------------------- communications
    def post(self, op: _Named, team: Team, root: int) -> None:
        """Starts a `Communication` in a team; `root` is a global rank, -1 without one."""
        ...

    def permute(self, op: _Named, team: Team, to: int, source: int) -> None:
        """Starts a `CollectivePermute`: sends to one global rank and receives from another."""
        ...

    def transfer(self, op: _Named, peer: int) -> None:
        """Starts a `P2PCommunication` with a global rank, or adds it to the open group."""
        ...

    def open_group(self, op: Op) -> None: ...

    def close_group(self, op: _Named) -> None:
        """Starts the transfers since the group was opened as the communication `op.number`."""
        ...

    def wait(self, number: int) -> None:
        """Makes the current stream wait for a communication; nothing where this rank has no part in
        it."""
        ...

    # -------------------------------------------------------------- streams and control flow
    def enter(self, stream: Stream) -> None: ...

    def capture(self, stream: Stream) -> None:
        """Gives the current stream a name."""
        ...

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all that another one has been given."""
        ...

    def run_loop(self, index: Symbol, steps: range, body: Sequence[Op]) -> None: ...

    def run(self, ops: Sequence[Op]) -> None:
        """Carries out the ops of a region that concern this rank, in order."""
        ...


# ------------------------------------------------------------------ the base
class HostOp(Op):
    """Base of the ops of host programs.

    An op class states its fields, its text (`TEXT`, or `template` and `variants`), `effects`, and
    how it runs (`emit`).
    Each other slot has a default, which an op with something else to say overrides.
    """

    # Spellings of earlier versions, which the parser still reads.
    OLDER: ClassVar[tuple[str, ...]] = ()
    # Whether the op makes those of its results that have no buffer.
    MAKES_RESULTS: ClassVar[bool] = False
    # Whether the scalars of the op are control scalars: they decide which ops run, how often and on
    # what, so each of their values needs a plan of its own. Other scalars are read in each run.
    HAS_CONTROL_SCALARS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        complete_fields(self)

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the op does, in order; regions speak for themselves."""
        raise NotImplementedError(f"{type(self).__name__} declares no effects")

    def emit(self, rt: Runtime) -> None:
        """Carries the op out: tell a runtime, once, what has to be done. It also runs regions."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it runs")

    @property
    def subject(self) -> str:
        """The op's name in a sentence about it."""
        return self.name

    @property
    def buffer_sharing(self) -> BufferSharing:
        """How an operand and a result of the op may share one buffer; see `BufferSharing`."""
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
        """The tensor that the op brings to another placement, and the result that has it; None for
        an op that starts no communication, or only one half of it."""
        movement = self.movement
        return None if movement is None or len(movement.tensors) < 2 else movement.both

    @property
    def ranks_meet(self) -> bool:
        """Whether ranks meet in the op: it starts a communication, or says so itself."""
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
        """Returns what the device of one rank does for the op; None for an op that gives it nothing
        to do. What it takes is the cost model's matter (`hostir.cost`).

        By default, each tensor that the effects name is read or written once. Raises
        `UnsupportedError` where that is not known.
        """
        effects = self.effects()
        if not is_computed(effects):
            return None
        touched = (e.tensor for e in effects if isinstance(e, Makes | Reads | Writes))
        return {tv: held_nbytes(tv, sizes(tv)) for tv in dict.fromkeys(touched)}

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` where the op does not fit the program in which it stands."""

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `VerifyError` where a result cannot be what the op makes of its operands.

        By default, what names a tensor, or an element of one, has the other axes of that tensor.
        `values` binds symbols of sizes.
        """
        for effect in self.effects():
            if isinstance(effect, Shows):
                match effect.part:
                    case None:
                        check_kept_axes(self, effect.source, effect.out, None, values)
                    case Part(axis, _, None):
                        check_kept_axes(self, effect.source, effect.out, axis, values)
                    case _:
                        pass  # a chunk is declared with the axes of the whole


def missing_slots(cls: type[HostOp]) -> list[str]:
    """Returns the slots without a default that an op class does not fill."""
    filled = {
        "text (TEXT, or template() and variants())": bool(cls.TEXT)
        or (hasattr(cls, "template") and hasattr(cls, "variants")),
        "effects()": cls.effects is not HostOp.effects,
        "emit()": cls.emit is not HostOp.emit,
    }
    return [slot for slot, is_filled in filled.items() if not is_filled]


def checked_slots(cls: type[HostOp]) -> type[HostOp]:
    """Returns an op class that fills every slot. Raises `TypeError` naming op and slots."""
    if missing := missing_slots(cls):
        raise TypeError(f"{cls.__name__}: a host op declares {' and '.join(missing)}")
    return cls


# ------------------------------------------------------------------ fields
# How messages call a type; others go by their name.
_WORDS: dict[object, str] = {
    TensorView: "a tensor",
    Scalar: "a scalar or a number",
    type(None): "None",
}


def complete_fields(op: Op) -> None:
    """Puts constants for Python numbers among the operands, and tuples for lists.

    Raises `ArgumentError` naming op and field for a value of a wrong kind.
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
    """Returns (name, kind, type, classes that were found to fit) of every field of an op class."""
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Returns what an annotation means; `get_type_hints` takes a millisecond per class."""
    return eval(text, vars(sys.modules[module]))


def _is_number(value: object) -> bool:
    # A comparison by `==` is a bool by accident.
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
    """Returns what was given instead; a tensor by name, its type below."""
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; a comparison of tensors has one answer per element: compare scalars"
    return ""
