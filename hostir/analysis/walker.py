"""The one walk through host programs that all analyses use.

`Walk` unrolls a program in the order of the host, for one rank or for all ranks at once, or visits
each op once. Its *domain* has the values of scalars, and the ranks that run the current op.

`EffectState` applies effects of ops to streams, to the open group and to communications in flight.
An unrolled walk uses it, and a run that is followed op by op (`hostir.runtime.recorder`).

An analysis derives from `Walk` and overrides the methods for the events that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.support.errors import InputError
from hostir.analysis.rank_values import Array, PerRank, RankValues, np
from hostir.ir.diagnostics import Indices, Site
from hostir.ir.effects import (
    CALLER,
    Captures,
    ClosesGroup,
    Effect,
    Enters,
    Joins,
    OpensGroup,
    Starts,
    Stream,
    Waits,
)
from hostir.ir.ops import ForLoop, IfThenElse

# A number on one rank, or one per rank.
N = TypeVar("N")
# The record that an analysis keeps for a transfer in a group.
G = TypeVar("G")


# ------------------------------------------------------------------ domains
class Domain(Protocol[N]):
    """The values of scalars during a walk, and the ranks that run the current op."""

    def value(self, x: Scalar) -> N:
        """Returns the current value of a scalar."""
        ...

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the index of a loop, or removes it after the loop (None)."""
        ...

    def ranges(self, bounds: Sequence[N]) -> Iterator[range]:
        """Yields each range of steps that some ranks run. Until the next one, only these ranks are
        active."""
        ...

    def branches(self, holds: N) -> Iterator[bool]:
        """Yields the value of the condition for each branch that some ranks run. Until the next
        one, only these ranks are active."""
        ...


class OneRank:
    """The values of scalars on one rank; `values` binds every symbol."""

    def __init__(self, values: dict[Symbol, Number]) -> None:
        self.values = values

    def value(self, x: Scalar) -> Number:
        """Returns the value of a scalar. Raises `InputError` for a symbol that no input binds."""
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the index of a loop, or removes it after the loop (None)."""
        if value is None:
            self.values.pop(index, None)
        else:
            self.values[index] = value

    def ranges(self, bounds: Sequence[Number]) -> Iterator[range]:
        """Yields the range of the loop."""
        start, stop, step = map(int, bounds)
        yield range(start, stop, max(step, 1))

    def branches(self, holds: Number) -> Iterator[bool]:
        """Yields the value of the condition."""
        yield bool(holds)


class EachOpOnce:
    """No values: one step of each loop is visited, and both regions of each branch."""

    def value(self, x: Scalar) -> None:
        """Returns None: no scalar is evaluated."""
        return

    def bind(self, index: Symbol, value: int | None) -> None:
        """Does nothing."""

    def ranges(self, bounds: Sequence[None]) -> Iterator[range]:
        """Yields one step."""
        yield range(1)

    def branches(self, holds: None) -> Iterator[bool]:
        """Yields both values of the condition."""
        yield True
        yield False


class AllRanks:
    """The values of scalars on all ranks at once; `mask` has the ranks that run the current op."""

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.values = RankValues(ranks, values)
        self.mask: Array = np.ones(len(ranks), dtype=bool)

    def value(self, x: Scalar) -> PerRank:
        """Returns a number that all ranks share, or an array over ranks."""
        return self.values.of(x)

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the index of a loop, or removes it after the loop (None)."""
        self.values.bind(index, value)

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns the new value on the active ranks and the old one on all others."""
        return new if self.mask.all() else np.where(self.mask, new, old)

    # The body of a loop or branch runs while the generator is suspended. A walk must exhaust it, or
    # the mask keeps the ranks of the body.
    def ranges(self, bounds: Sequence[PerRank]) -> Iterator[range]:
        """Yields each different range of steps, with `mask` set to the ranks that run it."""
        if not any(isinstance(b, np.ndarray) for b in bounds):
            start, stop, step = map(int, bounds)
            yield range(start, stop, max(step, 1))
            return
        outer = self.mask
        columns = np.stack([np.broadcast_to(b, outer.shape) for b in bounds])
        for start, stop, step in np.unique(columns[:, outer], axis=1).T.tolist():
            self.mask = outer & ((start, stop, step) == columns.T).all(1)
            yield range(start, stop, max(step, 1))
        self.mask = outer

    def branches(self, holds: PerRank) -> Iterator[bool]:
        """Yields the value of the condition for each branch, with `mask` set to the ranks that run
        it."""
        if not isinstance(holds, np.ndarray):
            yield bool(holds)
            return
        outer = self.mask
        for is_then in (True, False):
            self.mask = outer & (holds if is_then else np.logical_not(holds))
            if self.mask.any():
                yield is_then
        self.mask = outer


# ------------------------------------------------------------------ control flow
class Walk(Generic[N]):
    """Unrolls a program in the order of the host.

    A subclass defines `on_op`, which is called for each op without regions at each step of its
    loops. If needed, it also defines `on_region`, `on_left`, `on_skipped` and `needed`.
    """

    def __init__(self, domain: Domain[N]) -> None:
        self._domain = domain
        self.indices: Indices = ()
        # An analysis that needs no more ops sets it, and the walk ends.
        self.is_over = False

    def on_op(self, op: Op) -> None:
        """Is called for an op without regions."""
        raise NotImplementedError

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Is called for a loop or branch, before its bounds or condition are evaluated."""

    def on_left(self, op: ForLoop) -> None:
        """Is called after a loop has ended."""

    def on_skipped(self, ops: Sequence[Op]) -> None:
        """Is called for ops that do not run: those of a branch that is not taken, or a loop without
        steps."""

    def needed(self, x: Scalar, what: str, op: Op) -> N:
        """Returns the value of a bound or condition; `what` names it in messages."""
        return self._domain.value(x)

    def site(self, op: Op) -> Site:
        """Returns the op with the current indices of its loops."""
        return Site(op, self.indices)

    def run(self, ops: Sequence[Op]) -> None:
        """Visits these ops, and the ops of their regions at each step."""
        for op in ops:
            if self.is_over:
                return
            kind = type(op)
            if kind is ForLoop:
                self._loop(op)  # pyright: ignore[reportArgumentType]
            elif kind is IfThenElse:
                self._branch(op)  # pyright: ignore[reportArgumentType]
            else:
                self.on_op(op)

    def _loop(self, op: ForLoop) -> None:
        self.on_region(op)
        outside = self.indices
        bounds = [self.needed(x, "bound", op) for x in (op.start, op.stop, op.step)]
        for steps in self._domain.ranges(bounds):
            if not steps:
                self.on_skipped(op.body)
            for i in steps:
                if self.is_over:
                    break
                self._domain.bind(op.index, i)
                self.indices = (*outside, (op.index, i))
                self.run(op.body)
        self.indices = outside
        self._domain.bind(op.index, None)
        self.on_left(op)

    def _branch(self, op: IfThenElse) -> None:
        self.on_region(op)
        for is_then in self._domain.branches(self.needed(op.predicate, "condition", op)):
            taken, other = (op.then, op.orelse) if is_then else (op.orelse, op.then)
            self.on_skipped(other)
            self.run(taken)


# ------------------------------------------------------------------ streams
class StreamState(Generic[N]):
    """The current stream of a run, and the stream of each captured name.

    A stream is any value on one rank, or an array over ranks. `number` evaluates the index of a
    stream, `entry` is the caller's stream, `default` the stream called Default.
    """

    def __init__(self, number: Callable[[Scalar], N], entry: N, default: N) -> None:
        self._number, self._entry, self._default = number, entry, default
        self.current: N = entry
        self.captured: dict[str, N] = {}

    def find(self, stream: Stream) -> N:
        """Returns the stream that an op names."""
        if stream.index is not None:
            return self._number(stream.index)
        if stream.name in self.captured:
            return self.captured[stream.name]
        return self._default if stream.name == "Default" else self.unnamed(stream.name)

    def unnamed(self, name: str) -> N:
        """Returns the stream of a name that no op captured."""
        raise NotImplementedError

    def merge(self, new: N, old: N) -> N:
        """Returns the stream after a change: the new one, on the active ranks."""
        return new

    def enter(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        self.current = self.merge(self.find(stream), self.current)

    def capture(self, stream: Stream) -> None:
        """Binds a name to the current stream."""
        before = self.captured.get(stream.name, self._entry)
        self.captured[stream.name] = self.merge(self.current, before)

    # This class keeps no order of streams. `hostir.analysis.clocks.Clocks` adds vector clocks.
    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for another one. Without clocks, nothing changes."""

    def learn(self, theirs: dict[Hashable, int]) -> None:
        """Orders the current stream after everything in a clock. Without clocks,
        nothing changes."""

    @property
    def now(self) -> dict[Hashable, int]:
        """The clock of the current stream."""
        return {}


class StreamNumbers(StreamState[PerRank]):
    """Streams as numbers, on one rank or per rank.

    The caller's stream is -1. Streams of names that no op captured have numbers below -1.
    """

    def __init__(
        self,
        number: Callable[[Scalar], PerRank],
        merge: Callable[[PerRank, PerRank], PerRank] | None = None,
    ) -> None:
        """`merge` is the method of `AllRanks`, for all ranks at once."""
        super().__init__(number, CALLER, CALLER)
        self._merge = merge
        # The streams of names that no op captured.
        self.uncaptured: dict[str, int] = {}

    def unnamed(self, name: str) -> PerRank:
        """Returns the stream of a name that no op captured."""
        return self.uncaptured.setdefault(name, CALLER - 1 - len(self.uncaptured))

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns the stream after a change: the new one, on the active ranks."""
        return new if self._merge is None else self._merge(new, old)


# ------------------------------------------------------------------ groups and communications
@dataclass(eq=False)
class InFlight(Generic[G]):
    """A communication in flight: it has started and has no `Wait` yet.

    `began` is the stream that started it, `clock` the clock of that stream then. `touched` are the
    uses of buffers by its op, or by all members of its group. `site` and `note` belong to the
    analysis.
    """

    number: int
    began: Hashable
    clock: dict[Hashable, int]
    touched: Sequence[G]
    site: Site | None = None
    note: Any = None


class EffectState(Generic[G]):
    """The streams, the open group and the communications in flight of a walk."""

    def __init__(self, streams: StreamState[Any]) -> None:
        self.streams = streams
        self.group: list[G] | None = None
        self.in_flight: dict[int, InFlight[G]] = {}

    def apply(self, effect: Effect, touched: Sequence[G] = ()) -> InFlight[G] | None:
        """Applies an effect on streams or communications; ignores all other effects.

        `touched` are the uses of a communication that starts. Returns the communication that the
        effect starts or waits for. Returns None if a transfer joins the open group, if no
        communication of the number is in flight, or for other effects.
        """
        match effect:
            case Enters(stream):
                self.streams.enter(stream)
            case Captures(stream):
                self.streams.capture(stream)
            case Joins(stream):
                self.streams.join(stream)
            case OpensGroup():
                self.group = []
            case Starts() if self.group is not None:
                self.group += touched
            case Starts(number):
                return self._begin(number, touched)
            case ClosesGroup(number):
                members, self.group = self.group, None
                return self._begin(number, members or ())
            case Waits(number):
                communication = self.in_flight.pop(number, None)
                if communication is not None:
                    self.streams.learn(communication.clock)
                return communication
            case _:
                pass
        return None

    def _begin(self, number: int, touched: Sequence[G]) -> InFlight[G]:
        streams = self.streams
        communication = InFlight(number, streams.current, dict(streams.now), touched)
        self.in_flight[number] = communication
        return communication
