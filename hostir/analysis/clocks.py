"""Vector clocks over streams. The clock of a stream says which ops of every other stream have ended
before the stream's next op."""

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
    """The streams of one rank, with a vector clock for each stream in the dictionary `of`.

    The entry of a stream in its own clock counts the ops that the stream has received. The caller's
    stream begins with one op, which represents all earlier work of the caller.
    """

    def __init__(self, number: Callable[[Scalar], Hashable], *, default: Hashable = ENTRY) -> None:
        """`number` evaluates the scalar index of a stream. `default` identifies the device's
        default stream."""
        super().__init__(number, ENTRY, default)
        self.of: dict[Hashable, Clock] = {ENTRY: {ENTRY: 1}}

    @property
    def now(self) -> Clock:
        """The clock of the current stream."""
        return self.of[self.current]

    @property
    def tick(self) -> int:
        """The number of ops that the current stream has received."""
        return self.of[self.current][self.current]

    def advance(self) -> None:
        """Counts one more op on the current stream."""
        current = self.current
        self.of[current][current] += 1

    def unnamed(self, name: str) -> Hashable:
        """Returns the stream for a name that no op captured: such a name is a stream of its own."""
        return name

    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream."""
        self.current = self.find(stream)
        self.of.setdefault(self.current, {self.current: 0})

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all work that was put on `stream` so far."""
        other = self.find(stream)
        theirs = self.of.get(other)
        if theirs is not None and self.now.get(other, 0) < theirs[other]:
            self.learn(theirs)

    def learn(self, theirs: Clock) -> None:
        """Orders the current stream after everything that the clock `theirs` contains."""
        mine = self.now
        for stream, tick in theirs.items():
            if mine.get(stream, 0) < tick:
                mine[stream] = tick

    def text(self, stream: Hashable) -> str:
        """Returns a stream as the program's text shows the stream."""
        if stream != ENTRY:
            return f"Stream {stream}"
        return f"Stream {next((n for n, s in self.captured.items() if s == ENTRY), 'Default')}"

    def name(self, stream: Hashable) -> str:
        """Returns the name of a stream in messages: `Stream 2`, `Stream S0`."""
        return self.text(stream) + (" (the caller's)" if stream == ENTRY else "")


# ----------------------------------------------------------------------
# The lifetimes of the buffers of a recorded run, as the program's own waits order them.
#
# A buffer is used from its Allocate to its Deallocate. The race check (`hostir.analysis.races`)
# requires that uses on other streams are ordered after the allocation, and before the position of
# the buffer's own stream at the Deallocate.

# A position on a stream: the stream, and the number of ops that it has received.
Moment = tuple[Hashable, int]


class Lifetime(NamedTuple):
    """The lifetime of a buffer.

    `begin` is the clock at the allocation. `end` is the position of the buffer's stream at the
    deallocation.
    """

    begin: Clock
    end: Moment


class StreamOrder:
    """The clocks of a run, which are advanced op by op."""

    def __init__(self, number: Callable[[Scalar], Hashable]) -> None:
        """`number` evaluates the scalar index of a stream."""
        # The caller's stream may differ from the device's default stream.
        self.clocks = Clocks(number, default="Default")
        self._state = EffectState[None](self.clocks)
        self._effects: dict[int, tuple[Effect, ...]] = {}

    def follow(self, op: Op) -> None:
        """Counts an op on the current stream, and applies the op's effects on the order of
        streams."""
        self.clocks.advance()
        if isinstance(op, StreamOp | StartsCommunication | StartCoalescing | Wait):
            effects = self._effects.get(id(op))
            if effects is None:
                effects = self._effects[id(op)] = op.effects()
            for effect in effects:
                self._state.apply(effect)

    def now(self) -> Clock:
        """Returns a copy of the current stream's clock."""
        return dict(self.clocks.now)

    def moment(self, stream: Hashable) -> Moment:
        """Returns the current position of a stream: (stream, number of ops that the stream has
        received)."""
        return stream, self.clocks.of[stream][stream]

    def is_within(self, lifetime: Lifetime) -> bool:
        """Whether a buffer with this lifetime is used only during the run, as seen from the
        caller's stream.

        Must be called at the end of the run. All uses must be ordered after the caller's work
        before the run, and before the caller's work after the run.
        """
        stream, tick = lifetime.end
        return ENTRY in lifetime.begin and self.clocks.of[ENTRY].get(stream, 0) >= tick
