"""Vector clocks: how far each stream, and what it waited for, has come on every other stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Scalar
from hostir.analysis.walker import EffectState, StreamState
from hostir.ir.effects import ENTRY, Effect, Stream
from hostir.ir.ops import StartCoalescing, StartsCommunication, StreamOp, Wait

Clock = dict[Hashable, int]


class Clocks(StreamState[Hashable]):
    """The streams of one rank, and their clocks, `of` each.

    A stream's own entry counts the ops that it was given; the stream of the caller has one before
    the program begins, which is what the caller did.
    """

    def __init__(self, number: Callable[[Scalar], Hashable], *, default: Hashable = ENTRY) -> None:
        """`number` evaluates a scalar; `default` is the device's default stream."""
        super().__init__(number, ENTRY, default)
        self.of: dict[Hashable, Clock] = {ENTRY: {ENTRY: 1}}

    @property
    def now(self) -> Clock:
        return self.of[self.current]

    @property
    def tick(self) -> int:
        """The number of ops that the current stream has been given."""
        return self.of[self.current][self.current]

    def advance(self) -> None:
        """Counts an op on the current stream."""
        current = self.current
        self.of[current][current] += 1

    def unnamed(self, name: str) -> Hashable:
        """Returns the stream of a name that nothing captured: one of its own."""
        return name

    def enter(self, stream: Stream) -> None:
        """Makes a stream the current one."""
        self.current = self.find(stream)
        self.of.setdefault(self.current, {self.current: 0})

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all that another one has been given so far."""
        other = self.find(stream)
        theirs = self.of.get(other)
        if theirs is not None and self.now.get(other, 0) < theirs[other]:
            self.learn(theirs)

    def learn(self, theirs: Clock) -> None:
        """Makes the current stream wait for what a clock says."""
        mine = self.now
        for stream, tick in theirs.items():
            if mine.get(stream, 0) < tick:
                mine[stream] = tick

    def text(self, stream: Hashable) -> str:
        """Returns a stream as the program spells it."""
        if stream != ENTRY:
            return f"Stream {stream}"
        return f"Stream {next((n for n, s in self.captured.items() if s == ENTRY), 'Default')}"

    def name(self, stream: Hashable) -> str:
        return self.text(stream) + (" (the caller's)" if stream == ENTRY else "")


# ----------------------------------------------------------------------
# When the buffers of a recorded run are in use: what a program's own waits say of that.
#
# A buffer is used from its Allocate to its Deallocate; other streams come to it, and leave it, in
# an order that the race check demands (`hostir.analysis.races`): all uses come after the
# allocation, and before the place where the buffer's own stream is when it is given up.

# A place in a stream: how many ops it has been given.
Moment = tuple[Hashable, int]


class Lifetime(NamedTuple):
    """The use of a buffer: all that its allocation comes after, and where its own stream is when it
    is given up."""

    begin: Clock
    end: Moment


class StreamOrder:
    """The progress of a run on its streams, op by op."""

    def __init__(self, number: Callable[[Scalar], Hashable]) -> None:
        """`number` evaluates a scalar."""
        # The caller may be on another stream than the device's default one.
        self.clocks = Clocks(number, default="Default")
        self._state = EffectState[None](self.clocks)
        self._effects: dict[int, tuple[Effect, ...]] = {}

    def follow(self, op: Op) -> None:
        """Notes that the current stream is given an op."""
        self.clocks.advance()
        if isinstance(op, StreamOp | StartsCommunication | StartCoalescing | Wait):
            effects = self._effects.get(id(op))
            if effects is None:
                effects = self._effects[id(op)] = op.effects()
            for effect in effects:
                self._state.apply(effect)

    def now(self) -> Clock:
        """Returns all that the current stream has come after."""
        return dict(self.clocks.now)

    def moment(self, stream: Hashable) -> Moment:
        """Returns where a stream is."""
        return stream, self.clocks.of[stream][stream]

    def is_within(self, lifetime: Lifetime) -> bool:
        """Whether a buffer is used only after what the caller's stream did before the run, and
        before what it does next, now that the run is at its end."""
        stream, tick = lifetime.end
        return ENTRY in lifetime.begin and self.clocks.of[ENTRY].get(stream, 0) >= tick
