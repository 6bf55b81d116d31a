"""One walk through host programs for all analyses.

`Walk` unrolls a program as the host does, for one rank or for all ranks at once, or visits each op
once. Its *domain* says which numbers scalars have, and which ranks are at the current place.
`EffectState` keeps what the effects of ops do to streams, to the open group and to communications
in flight; an unrolled walk drives it, or a run op by op (`hostir.runtime.recorder`). An analysis
derives from `Walk` and replaces the methods for what it wants to hear of.
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
# What an analysis keeps of a transfer in a group.
G = TypeVar("G")


# ------------------------------------------------------------------ domains
class Domain(Protocol[N]):
    """The numbers of a walk, and which ranks are at the current place of the program."""

    def value(self, x: Scalar) -> N: ...

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the index of a loop; None after the loop."""
        ...

    def ranges(self, bounds: Sequence[N]) -> Iterator[range]:
        """Yields each range of steps that ranks take; meanwhile only these ranks are here."""
        ...

    def branches(self, holds: N) -> Iterator[bool]:
        """Yields each branch that ranks take; meanwhile only these ranks are here."""
        ...


class OneRank:
    """The numbers of one rank; `values` binds every symbol."""

    def __init__(self, values: dict[Symbol, Number]) -> None:
        self.values = values

    def value(self, x: Scalar) -> Number:
        """Returns the value of a scalar. Raises `InputError` where no input binds a symbol."""
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(f"{x}: no input binds {missing.args[0]}") from None

    def bind(self, index: Symbol, value: int | None) -> None:
        if value is None:
            self.values.pop(index, None)
        else:
            self.values[index] = value

    def ranges(self, bounds: Sequence[Number]) -> Iterator[range]:
        start, stop, step = map(int, bounds)
        yield range(start, stop, max(step, 1))

    def branches(self, holds: Number) -> Iterator[bool]:
        yield bool(holds)


class EachOpOnce:
    """No numbers: one step of each loop, and both regions of each branch."""

    def value(self, x: Scalar) -> None:
        return None

    def bind(self, index: Symbol, value: int | None) -> None:
        pass

    def ranges(self, bounds: Sequence[None]) -> Iterator[range]:
        yield range(1)

    def branches(self, holds: None) -> Iterator[bool]:
        yield True
        yield False


class AllRanks:
    """The numbers of all ranks at once; `mask` says which ones are here."""

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.values = RankValues(ranks, values)
        self.mask: Array = np.ones(len(ranks), dtype=bool)

    def value(self, x: Scalar) -> PerRank:
        return self.values.of(x)

    def bind(self, index: Symbol, value: int | None) -> None:
        self.values.bind(index, value)

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns the new value on the ranks that are here, the old one on others."""
        return new if self.mask.all() else np.where(self.mask, new, old)

    # The body of a loop or branch runs while the generator is suspended. A walk must exhaust it:
    # only then does the mask return to what it was.
    def ranges(self, bounds: Sequence[PerRank]) -> Iterator[range]:
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
    """Goes through the unrolled program as the host does.

    An analysis has `on_op` for each op without regions, at each step of its loops, and where it
    needs them `on_region`, `on_left`, `on_skipped` and `needed`.
    """

    def __init__(self, domain: Domain[N]) -> None:
        self._domain = domain
        self.indices: Indices = ()
        # An analysis that has seen enough sets it; nothing more is visited then.
        self.is_over = False

    def on_op(self, op: Op) -> None:
        """Hears of an op without regions."""
        raise NotImplementedError

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Hears of a loop or branch before its bounds or its condition are asked for."""

    def on_left(self, op: ForLoop) -> None:
        """Hears that a loop has ended."""

    def on_skipped(self, ops: Sequence[Op]) -> None:
        """Hears of ops that are passed over: a branch that is not taken, a loop without steps."""

    def needed(self, x: Scalar, what: str, op: Op) -> N:
        """Returns the value of a bound or condition; `what` names it in messages."""
        return self._domain.value(x)

    def site(self, op: Op) -> Site:
        """Returns the place of an op in the walk."""
        return Site(op, self.indices)

    def run(self, ops: Sequence[Op]) -> None:
        """Visits these ops, those of their regions at each step."""
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
    """The current stream of a run, and which streams the captured names mean.

    A stream is any value of one rank, or an array over ranks. `number` evaluates the index of a
    stream, `entry` is the caller's stream, `default` the one called Default.
    """

    def __init__(self, number: Callable[[Scalar], N], entry: N, default: N) -> None:
        self._number, self._entry, self._default = number, entry, default
        self.current: N = entry
        self.captured: dict[str, N] = {}

    def find(self, stream: Stream) -> N:
        """Returns the stream that the program means."""
        if stream.index is not None:
            return self._number(stream.index)
        if stream.name in self.captured:
            return self.captured[stream.name]
        return self._default if stream.name == "Default" else self.unnamed(stream.name)

    def unnamed(self, name: str) -> N:
        """Returns the stream of a name that nothing captured."""
        raise NotImplementedError

    def merge(self, new: N, old: N) -> N:
        """Returns what holds now where the ranks that are here have a new value."""
        return new

    def enter(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        self.current = self.merge(self.find(stream), self.current)

    def capture(self, stream: Stream) -> None:
        """Lets a name mean the current stream from now on."""
        before = self.captured.get(stream.name, self._entry)
        self.captured[stream.name] = self.merge(self.current, before)

    # What orders streams: nothing here, vector clocks in `hostir.analysis.clocks.Clocks`.
    def join(self, stream: Stream) -> None:
        """Lets the current stream wait for another one."""

    def learn(self, theirs: dict[Hashable, int]) -> None:
        """Lets the current stream wait for all that a clock has come after."""

    @property
    def now(self) -> dict[Hashable, int]:
        """The clock of the current stream."""
        return {}


class StreamNumbers(StreamState[PerRank]):
    """Streams by number, on one rank or per rank: the caller's is -1, those that nothing captured
    come below."""

    def __init__(
        self,
        number: Callable[[Scalar], PerRank],
        merge: Callable[[PerRank, PerRank], PerRank] | None = None,
    ) -> None:
        """`merge` is that of `AllRanks`, for all ranks at once."""
        super().__init__(number, CALLER, CALLER)
        self._merge = merge
        # The streams of the names that nothing captured.
        self.uncaptured: dict[str, int] = {}

    def unnamed(self, name: str) -> PerRank:
        """Returns the stream of a name that nothing captured."""
        return self.uncaptured.setdefault(name, CALLER - 1 - len(self.uncaptured))

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns what holds now where the ranks that are here have a new value."""
        return new if self._merge is None else self._merge(new, old)


# ------------------------------------------------------------------ groups and communications
@dataclass(eq=False)
class Flight(Generic[G]):
    """A communication between its start and its Wait.

    `began` is the stream that was current, `clock` what that had come after, `touched` what its
    op, or all members of its group, said to touch. `site` and `note` are for the analysis.
    """

    number: int
    began: Hashable
    clock: dict[Hashable, int]
    touched: Sequence[G]
    site: Site | None = None
    note: Any = None


class EffectState(Generic[G]):
    """The streams, the open group and the communications in flight, as effects change them."""

    def __init__(self, streams: StreamState[Any]) -> None:
        self.streams = streams
        self.group: list[G] | None = None
        self.flights: dict[int, Flight[G]] = {}

    def apply(self, effect: Effect, touched: Sequence[G] = ()) -> Flight[G] | None:
        """Follows an effect on streams and communications; other effects change nothing.

        `touched` is what a start touches. Returns the communication that the effect starts or waits
        for; None where it does neither, a transfer only joins the open group, or nothing of this
        number is in flight.
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
                flight = self.flights.pop(number, None)
                if flight is not None:
                    self.streams.learn(flight.clock)
                return flight
            case _:
                pass
        return None

    def _begin(self, number: int, touched: Sequence[G]) -> Flight[G]:
        streams = self.streams
        flight = Flight(number, streams.current, dict(streams.now), touched)
        self.flights[number] = flight
        return flight
