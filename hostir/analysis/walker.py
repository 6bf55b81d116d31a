"""The traversal of host programs that all analyses use.

`Walk` unrolls a program in the order in which the host issues the ops. It does so for one rank or
for all ranks at once, or visits each op once. Its *domain* has the values of scalars and the ranks
that run the current op.

`EffectState` applies the effects of ops to the current stream, the open group of transfers, and the
communications in flight. Unrolled walks use `EffectState`, and so does a run that is followed op by
op (`hostir.runtime.recorder`).

An analysis derives from `Walk` and overrides the methods for the events that the analysis needs.
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
        """Sets the value of a loop's index. The value None removes the index after the loop."""
        ...

    def ranges(self, bounds: Sequence[N]) -> Iterator[range]:
        """Yields each distinct range of a loop's index, given the `bounds` (start, stop, step).

        Until the next range is yielded, only the ranks with this range are active.
        """
        ...

    def branches(self, holds: N) -> Iterator[bool]:
        """Yields the truth value of each branch that some ranks take, given the condition `holds`.

        Until the next value is yielded, only the ranks that take this branch are active.
        """
        ...


class OneRank:
    """The values of scalars on one rank. `values` binds every symbol."""

    def __init__(self, values: dict[Symbol, Number]) -> None:
        self.values = values

    def value(self, x: Scalar) -> Number:
        """Returns the value of a scalar. Raises `InputError` for a symbol that no input binds."""
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index. The value None removes the index after the loop."""
        if value is None:
            self.values.pop(index, None)
        else:
            self.values[index] = value

    def ranges(self, bounds: Sequence[Number]) -> Iterator[range]:
        """Yields the only range of the loop's index. `bounds` are start, stop and step."""
        start, stop, step = map(int, bounds)
        yield range(start, stop, max(step, 1))

    def branches(self, holds: Number) -> Iterator[bool]:
        """Yields `holds`, the value of the condition, as the only truth value."""
        yield bool(holds)


class EachOpOnce:
    """A domain without values: one iteration of each loop is visited, and both regions of each
    branch."""

    def value(self, x: Scalar) -> None:
        """Returns None: no scalar is evaluated."""
        return

    def bind(self, index: Symbol, value: int | None) -> None:
        """Does nothing, because no scalar is evaluated."""

    def ranges(self, bounds: Sequence[None]) -> Iterator[range]:
        """Yields a range of one iteration."""
        yield range(1)

    def branches(self, holds: None) -> Iterator[bool]:
        """Yields both truth values, so that both regions are visited."""
        yield True
        yield False


class AllRanks:
    """The values of scalars on all ranks at once. `mask` selects the ranks that run the current
    op."""

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.values = RankValues(ranks, values)
        self.mask: Array = np.ones(len(ranks), dtype=bool)

    def value(self, x: Scalar) -> PerRank:
        """Returns the value of a scalar: a number that all ranks share, or an array over ranks."""
        return self.values.of(x)

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index. The value None removes the index after the loop."""
        self.values.bind(index, value)

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns `new` on the active ranks, and `old` on all other ranks."""
        return new if self.mask.all() else np.where(self.mask, new, old)

    # The body of a loop or branch runs while the generator is suspended. A walk must exhaust it, or
    # the mask keeps the ranks of the body.
    def ranges(self, bounds: Sequence[PerRank]) -> Iterator[range]:
        """Yields each distinct range of the loop's index, with `mask` set to the ranks that have
        this range.

        `bounds` are start, stop and step, each a number or an array over ranks.
        """
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
        """Yields the truth value of each branch that some ranks take, with `mask` set to these
        ranks.

        `holds` is the condition, a truth value or an array over ranks.
        """
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
    """Unrolls a program in the order in which the host issues the ops.

    A subclass defines `on_op`, which is called for each op without regions, in each iteration of
    its loops. If needed, the subclass also defines `on_region`, `on_left`, `on_skipped` and
    `needed`.
    """

    def __init__(self, domain: Domain[N]) -> None:
        self._domain = domain
        self.indices: Indices = ()
        # An analysis that needs no more ops sets this flag, and the walk ends.
        self.is_over = False

    def on_op(self, op: Op) -> None:
        """Handles an op without regions. A subclass must define this method."""
        raise NotImplementedError

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Handles a loop or branch, before its bounds or its condition are evaluated. By default,
        does nothing."""

    def on_left(self, op: ForLoop) -> None:
        """Handles the end of a loop. By default, does nothing."""

    def on_skipped(self, ops: Sequence[Op]) -> None:
        """Handles ops that do not run: those of a branch that is not taken, or of a loop without
        iterations. By default, does nothing."""

    def needed(self, x: Scalar, what: str, op: Op) -> N:
        """Returns the value of a loop bound or a condition. `what` is the word for the scalar in
        messages."""
        return self._domain.value(x)

    def site(self, op: Op) -> Site:
        """Returns the op together with the current indices of its loops."""
        return Site(op, self.indices)

    def run(self, ops: Sequence[Op]) -> None:
        """Visits the given ops, and the ops of their regions in each iteration."""
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
    """The current stream of a run, and the stream to which each captured name refers.

    A stream is represented by any value on one rank, or by an array over ranks. `number` evaluates
    the index of a stream. `entry` is the caller's stream, and `default` the stream with the name
    `Default`.
    """

    def __init__(self, number: Callable[[Scalar], N], entry: N, default: N) -> None:
        self._number, self._entry, self._default = number, entry, default
        self.current: N = entry
        self.captured: dict[str, N] = {}

    def find(self, stream: Stream) -> N:
        """Returns the stream that the number or name in an op refers to."""
        if stream.index is not None:
            return self._number(stream.index)
        if stream.name in self.captured:
            return self.captured[stream.name]
        return self._default if stream.name == "Default" else self.unnamed(stream.name)

    def unnamed(self, name: str) -> N:
        """Returns the stream for a name that no op captured. A subclass must define this method."""
        raise NotImplementedError

    def merge(self, new: N, old: N) -> N:
        """Returns the stream after a change from `old` to `new`. By default `new`; for all ranks at
        once, `new` only on the active ranks."""
        return new

    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream."""
        self.current = self.merge(self.find(stream), self.current)

    def capture(self, stream: Stream) -> None:
        """Binds the name of `stream` to the current stream."""
        before = self.captured.get(stream.name, self._entry)
        self.captured[stream.name] = self.merge(self.current, before)

    # This class keeps no order of streams. `hostir.analysis.clocks.Clocks` adds vector clocks.
    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for another stream. Does nothing here, because this class
        has no clocks."""

    def learn(self, theirs: dict[Hashable, int]) -> None:
        """Orders the current stream after everything in the clock `theirs`. Does nothing here,
        because this class has no clocks."""

    @property
    def now(self) -> dict[Hashable, int]:
        """The clock of the current stream; {} because this class has no clocks."""
        return {}


class StreamNumbers(StreamState[PerRank]):
    """Streams as numbers, on one rank or in arrays over ranks.

    The caller's stream has the number -1. Streams for names that no op captured have numbers below
    -1.
    """

    def __init__(
        self,
        number: Callable[[Scalar], PerRank],
        merge: Callable[[PerRank, PerRank], PerRank] | None = None,
    ) -> None:
        """`number` evaluates the index of a stream. `merge` is `AllRanks.merge` if the streams are
        those of all ranks."""
        super().__init__(number, CALLER, CALLER)
        self._merge = merge
        # The streams of names that no op captured.
        self.uncaptured: dict[str, int] = {}

    def unnamed(self, name: str) -> PerRank:
        """Returns a number below -1 for a name that no op captured. Equal names have equal
        numbers."""
        return self.uncaptured.setdefault(name, CALLER - 1 - len(self.uncaptured))

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns `new` on the active ranks, and `old` on all other ranks. For one rank, returns
        `new`."""
        return new if self._merge is None else self._merge(new, old)


# ------------------------------------------------------------------ groups and communications
@dataclass(eq=False)
class InFlight(Generic[G]):
    """A communication in flight: the communication has started and has no `Wait` yet.

    `began` is the stream that started the communication, and `clock` the clock of that stream at
    the start. `touched` are the uses of buffers by the op, or by all transfers of the group. Each
    analysis may use `site` and `note` for its own data.
    """

    number: int
    began: Hashable
    clock: dict[Hashable, int]
    touched: Sequence[G]
    site: Site | None = None
    note: Any = None


class EffectState(Generic[G]):
    """The streams, the open group of transfers, and the communications in flight during a walk."""

    def __init__(self, streams: StreamState[Any]) -> None:
        self.streams = streams
        self.group: list[G] | None = None
        self.in_flight: dict[int, InFlight[G]] = {}

    def apply(self, effect: Effect, touched: Sequence[G] = ()) -> InFlight[G] | None:
        """Applies an effect on streams or communications. Ignores all other effects.

        `touched` are the uses of buffers by a communication that starts. Returns the communication
        that the effect starts or waits for. Returns None if a transfer is added to the open group,
        if no communication with the number is in flight, or for other effects.
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
