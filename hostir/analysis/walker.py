"""The traversal of host programs that all analyses use.

`Walk` visits the ops of a program in the order in which the host issues the ops, iteration by
iteration. Its *domain* evaluates the scalars of the program, and knows which ranks run the current
op. There are three domains: one rank, all ranks at once, and each op once without values.

`EffectState` tracks the current stream, the sends and receives of a group that will start together,
and the communications for which no `Wait` has run yet. Walks that follow iterations use an
`EffectState`, and so does `hostir.runtime.recorder`, which follows a real run op by op.

An analysis derives a class from `Walk`, and overrides the methods for the events that the analysis
needs.
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
    """The way in which a `Walk` evaluates scalars, loop ranges and conditions: on one rank, on all
    ranks at once, or not at all."""

    def value(self, x: Scalar) -> N:
        """Returns the value of a scalar in the current loop iteration."""
        ...

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index before each iteration. The value None removes the index
        after the loop."""
        ...

    def ranges(self, bounds: Sequence[N]) -> Iterator[range]:
        """Yields the range of a loop's index, once for each group of ranks with an equal range.
        `bounds` are the loop's (start, stop, step).

        Until the next range is yielded, only the ranks of the current group are active.
        """
        ...

    def branches(self, holds: N) -> Iterator[bool]:
        """Yields True if some ranks run the first region of a branch, and False if some ranks run
        the second. `holds` is the value of the branch's condition.

        Until the next value is yielded, only the ranks that run the current region are active.
        """
        ...


class OneRank:
    """The way in which a `Walk` evaluates a program for one rank, as the race check does. `values`
    maps every symbol of the program to a number.
    """

    def __init__(self, values: dict[Symbol, Number]) -> None:
        self.values = values

    def value(self, x: Scalar) -> Number:
        """Returns the value of a scalar on this rank. Raises `InputError` for a symbol that no
        input of the program defines.
        """
        try:
            return sc.evaluate(x, self.values)
        except KeyError as missing:
            raise InputError(
                f"the value of {x} is unknown, because no input of the program determines "
                f"{missing.args[0]}: define {missing.args[0]} as a scalar input"
            ) from None

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index before each iteration. The value None removes the index
        after the loop."""
        if value is None:
            self.values.pop(index, None)
        else:
            self.values[index] = value

    def ranges(self, bounds: Sequence[Number]) -> Iterator[range]:
        """Yields the range of a loop's index. There is exactly one range, because there is one
        rank. `bounds` are the loop's start, stop and step."""
        start, stop, step = map(int, bounds)
        yield range(start, stop, max(step, 1))

    def branches(self, holds: Number) -> Iterator[bool]:
        """Yields the value of a branch's condition. There is exactly one value, because there is
        one rank."""
        yield bool(holds)


class EachOpOnce:
    """The way in which a `Walk` visits each op of a program once, without values. A loop has one
    iteration, and both regions of a branch are visited.
    """

    def value(self, x: Scalar) -> None:
        """Returns the value of a scalar. Always None in this class, because the walk visits each op
        once, whatever the values are.
        """
        return

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index. Does nothing here, because no scalar is evaluated."""

    def ranges(self, bounds: Sequence[None]) -> Iterator[range]:
        """Yields the ranges of a loop's index that are visited. In this class, this is one range of
        one iteration, so that the walk visits the body of each loop once.
        """
        yield range(1)

    def branches(self, holds: None) -> Iterator[bool]:
        """Yields which regions of a branch are visited. In this class, yields True and then False,
        so that the walk visits both regions.
        """
        yield True
        yield False


class AllRanks:
    """The way in which a `Walk` evaluates a program for all ranks at once. A value is a number if
    the ranks agree, and an array over ranks otherwise.

    `mask` selects the active ranks: those that run the current op. The other ranks have taken
    another branch, or are not in the current iteration.
    """

    def __init__(self, ranks: Sequence[int], values: dict[Symbol, Number]) -> None:
        self.values = RankValues(ranks, values)
        self.mask: Array = np.ones(len(ranks), dtype=bool)

    def value(self, x: Scalar) -> PerRank:
        """Returns the value of a scalar in the current iteration: one number if all ranks agree,
        otherwise an array over ranks."""
        return self.values.of(x)

    def bind(self, index: Symbol, value: int | None) -> None:
        """Sets the value of a loop's index before each iteration. The value None removes the index
        after the loop."""
        self.values.bind(index, value)

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns a value, rank by rank, after an op has changed it: `new` on the ranks that run
        the current op, and `old` on all other ranks.
        """
        return new if self.mask.all() else np.where(self.mask, new, old)

    # The body of a loop or branch runs while the generator is suspended. A walk must exhaust it, or
    # the mask keeps the ranks of the body.
    def ranges(self, bounds: Sequence[PerRank]) -> Iterator[range]:
        """Yields each distinct range of a loop's index. Meanwhile, `mask` selects the ranks whose
        loop has this range.

        `bounds` are the loop's start, stop and step, each a number or an array over ranks.
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
        """Yields True if some active ranks run the first region of a branch, and False if some run
        the second. Meanwhile, `mask` selects these ranks.

        `holds` is the value of the branch's condition: a truth value, or an array over ranks.
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
    """Visits the ops of a program in the order in which the host issues the ops, loop iteration by
    loop iteration.

    A subclass defines `on_op`, which is called for each op that is not a loop or a branch, in each
    iteration. A subclass may also define:

    - `on_region` and `on_left`: called before a loop or branch, and after a loop.
    - `on_skipped`: called for ops that do not run.
    - `needed`: evaluates loop bounds and conditions.
    """

    def __init__(self, domain: Domain[N]) -> None:
        self._domain = domain
        self.indices: Indices = ()
        # An analysis that needs no more ops sets this flag, and the walk ends.
        self.is_over = False

    def on_op(self, op: Op) -> None:
        """Handles an op that is not a loop or a branch, in one iteration of the loops around the
        op. A subclass must define this method."""
        raise NotImplementedError

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Handles a loop or branch before the walk evaluates its bounds or condition. By default,
        does nothing."""

    def on_left(self, op: ForLoop) -> None:
        """Handles the end of a loop, after its last iteration. By default, does nothing."""

    def on_skipped(self, ops: Sequence[Op]) -> None:
        """Handles ops that do not run: those of a branch that is not taken, or of a loop without
        iterations. By default, does nothing."""

    def needed(self, x: Scalar, what: str, op: Op) -> N:
        """Returns the value of `x`, which is a loop bound or the condition of the branch `op`.
        Subclasses override this method to report an undefined value. `what` says in such reports
        which scalar `x` is, such as "bound"."""
        return self._domain.value(x)

    def site(self, op: Op) -> Site:
        """Returns the op together with the current values of the loop indices, to name the place in
        the report of a fault.
        """
        return Site(op, self.indices)

    def run(self, ops: Sequence[Op]) -> None:
        """Visits `ops` in order. For a loop, visits its body in each iteration; for a branch, the
        regions that some rank runs."""
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
    """The current stream of a run or walk, and the streams to which the names in the program (such
    as `S0`) refer.

    Each subclass chooses how it represents a stream: by any hashable value on one rank, or by an
    array over ranks.

    - `number`: a function that evaluates the scalar index of a stream.
    - `entry`: the caller's stream, on which the program begins.
    - `default`: the stream that the program calls `Default`, the device's default stream.
    """

    def __init__(self, number: Callable[[Scalar], N], entry: N, default: N) -> None:
        self._number, self._entry, self._default = number, entry, default
        self.current: N = entry
        self.captured: dict[str, N] = {}

    def find(self, stream: Stream) -> N:
        """Returns the actual stream that `stream` means at this point of the program. An op names a
        stream by an index or by a name, such as `S0`. The result is the value by which the subclass
        represents a stream, for example its number.
        """
        if stream.index is not None:
            return self._number(stream.index)
        if stream.name in self.captured:
            return self.captured[stream.name]
        return self._default if stream.name == "Default" else self.unnamed(stream.name)

    def unnamed(self, name: str) -> N:
        """Returns the stream for a name that no `GetCurrentStream` op has introduced. A subclass
        defines this method, because each represents streams by other values.
        """
        raise NotImplementedError

    def merge(self, new: N, old: N) -> N:
        """Returns the current stream after an op has changed the current stream from `old` to
        `new`. By default, the result is `new`. A subclass that follows all ranks at once returns
        `new` for the ranks that run the op, and `old` for the other ranks.
        """
        return new

    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream, on which the program puts its next ops."""
        self.current = self.merge(self.find(stream), self.current)

    def capture(self, stream: Stream) -> None:
        """Gives the current CUDA stream the name of `stream`, such as `S0`. Later ops refer to the
        CUDA stream by this name.
        """
        before = self.captured.get(stream.name, self._entry)
        self.captured[stream.name] = self.merge(self.current, before)

    # This class keeps no order of streams. `hostir.analysis.clocks.Clocks` adds vector clocks.
    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for another stream. Does nothing in this class, which does
        not track the order of work. `hostir.analysis.clocks.Clocks` overrides this method."""

    def learn(self, theirs: dict[Hashable, int]) -> None:
        """Orders the current stream after all work that the vector clock `theirs` counts (numbers
        of ops, by stream). Does nothing in this class, which does not track the order of work.
        """

    @property
    def now(self) -> dict[Hashable, int]:
        """The vector clock of the current stream: how many ops of each stream have certainly ended
        before its next op. Empty in this class, which does not track the order of work.
        """
        return {}


class StreamNumbers(StreamState[PerRank]):
    """The streams of a run or walk as integers, on one rank or in arrays over ranks.

    `Stream i` has the number i, and the caller's stream has the number -1. A stream whose name no
    `GetCurrentStream` op has introduced has a number below -1.
    """

    def __init__(
        self,
        number: Callable[[Scalar], PerRank],
        merge: Callable[[PerRank, PerRank], PerRank] | None = None,
    ) -> None:
        """Begins with the caller's stream as the current stream.

        - `number` evaluates the scalar index of a stream, such as `i % numberOfStreams`.
        - `merge(new, old)` is called when an op changes the current stream, and returns the stream
          after the op. If the walk follows all ranks at once, `merge` is `AllRanks.merge`: ranks
          that run the op get `new`, and other ranks keep `old`. If the walk follows one rank,
          `merge` is None, and the result is always `new`.
        """
        super().__init__(number, CALLER, CALLER)
        self._merge = merge
        # The streams of names that no op captured.
        self.uncaptured: dict[str, int] = {}

    def unnamed(self, name: str) -> PerRank:
        """Returns a number below -1 for a stream name that no `GetCurrentStream` op has introduced.
        The same name always has the same number.
        """
        return self.uncaptured.setdefault(name, CALLER - 1 - len(self.uncaptured))

    def merge(self, new: PerRank, old: PerRank) -> PerRank:
        """Returns the current stream after an op has changed the current stream from `old` to
        `new`. If the walk follows all ranks at once, ranks that do not run the op keep `old`.
        """
        return new if self._merge is None else self._merge(new, old)


# ------------------------------------------------------------------ groups and communications
@dataclass(eq=False)
class InFlight(Generic[G]):
    """A communication that an op has started and for which no `Wait` has run yet.

    - `number`: the number by which a `Wait` refers to the communication.
    - `began`: the stream that started the communication; `clock`: this stream's vector clock at the
      start, which counts the ops that have certainly ended on each stream.
    - `touched`: an analysis's records of the tensors that the communication reads and writes. For a
      group, these are the records of all its transfers.
    - `site`: the op that started the communication; `note`: data of the analysis. Both are None
      unless the analysis sets a value.
    """

    number: int
    began: Hashable
    clock: dict[Hashable, int]
    touched: Sequence[G]
    site: Site | None = None
    note: Any = None


class EffectState(Generic[G]):
    """The state that stream and communication ops change during a walk or run. It consists of:

    - the current stream;
    - the open group: sends and receives that will start together;
    - the communications in flight: started, with no `Wait` so far.
    """

    def __init__(self, streams: StreamState[Any]) -> None:
        self.streams = streams
        self.group: list[G] | None = None
        self.in_flight: dict[int, InFlight[G]] = {}

    def apply(self, effect: Effect, touched: Sequence[G] = ()) -> InFlight[G] | None:
        """Applies the effect of an op on streams or communications. Ignores effects on buffers and
        views.

        `touched` has the analysis's records of the tensors that a communication reads and writes.
        Returns the communication that the effect starts or waits for. Returns None in all other
        cases:

        - The effect adds a transfer to the open group, which starts later.
        - The effect waits for a communication that is not in flight.
        - The effect concerns no communication.
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
