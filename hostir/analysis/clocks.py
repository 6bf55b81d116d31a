"""Vector clocks over streams, with which the race check decides whether one op runs after another.

The vector clock of a stream says which ops of every other stream have ended before the stream's
next op begins.
"""

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
    """The vector clocks of the streams of one rank, while the race check follows the rank's
    program. `of` maps each stream to its vector clock.

    The vector clock of a stream maps every stream to the number of that stream's ops that have
    certainly ended before the next op of the clock's own stream begins. A stream's entry in its own
    clock is the number of ops that the program has put on the stream. The caller's stream begins
    with 1, which stands for all work that the caller put on the stream before the program.
    """

    def __init__(self, number: Callable[[Scalar], Hashable], *, default: Hashable = ENTRY) -> None:
        """Begins with the caller's stream as the current and only stream.

        `number` evaluates the scalar index of a stream, such as `i % numberOfStreams`. `default` is
        the key under which the device's default stream is stored. In a program's text, this stream
        is called `Default`.
        """
        super().__init__(number, ENTRY, default)
        self.of: dict[Hashable, Clock] = {ENTRY: {ENTRY: 1}}

    @property
    def now(self) -> Clock:
        """The vector clock of the current stream, on which the program puts its next op. It maps
        each stream to the number of its ops that have certainly ended before that op.
        """
        return self.of[self.current]

    @property
    def tick(self) -> int:
        """The number of ops that the program has put on the current stream."""
        return self.of[self.current][self.current]

    def advance(self) -> None:
        """Counts one more op on the current stream. Call this once for each op of the program,
        before the op's effects are applied.
        """
        current = self.current
        self.of[current][current] += 1

    def unnamed(self, name: str) -> Hashable:
        """Returns the key for a stream whose name no `GetCurrentStream` op has introduced. Such a
        name denotes a stream of its own, so the key is the name itself.
        """
        return name

    def enter(self, stream: Stream) -> None:
        """Makes `stream` the current stream. The change orders no work: an op on the new stream may
        run before earlier ops of the previous stream."""
        self.current = self.find(stream)
        self.of.setdefault(self.current, {self.current: 0})

    def join(self, stream: Stream) -> None:
        """Makes the current stream wait for all ops that the program has put on `stream` so far."""
        other = self.find(stream)
        theirs = self.of.get(other)
        if theirs is not None and self.now.get(other, 0) < theirs[other]:
            self.learn(theirs)

    def learn(self, theirs: Clock) -> None:
        """Orders the next op of the current stream after all ops that the vector clock `theirs`
        counts. A vector clock maps each stream to a number of ops. For example, `theirs` is the
        clock of a stream for which the current stream waits.
        """
        mine = self.now
        for stream, tick in theirs.items():
            if mine.get(stream, 0) < tick:
                mine[stream] = tick

    def text(self, stream: Hashable) -> str:
        """Returns a stream as the program's text prints it, such as `Stream 2`, or `Stream S0` for
        the caller's stream."""
        if stream != ENTRY:
            return f"Stream {stream}"
        return f"Stream {next((n for n, s in self.captured.items() if s == ENTRY), 'Default')}"

    def name(self, stream: Hashable) -> str:
        """Returns the name of a stream in messages: `Stream 2`, or `Stream S0 (the caller's)` for
        the caller's stream."""
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
    """The part of a run in which a buffer is in use, from its `Allocate` to its `Deallocate`.

    - `begin`: the vector clock of the stream that allocated the buffer, at the allocation: how many
      ops of each stream have certainly ended by then.
    - `end`: (stream, number of ops put on the stream) at the deallocation.
    """

    begin: Clock
    end: Moment


class StreamOrder:
    """Tracks the order of work on the streams, while a run is recorded so that later runs can
    repeat it.

    Each stream has a vector clock: how many ops of each stream have certainly ended before the
    stream's next op. `hostir.runtime.recorder` calls `follow` for each op in the order in which the
    host issues the ops.
    """

    def __init__(self, number: Callable[[Scalar], Hashable]) -> None:
        """Begins with the caller's stream as the current and only stream. `number` evaluates the
        scalar index of a stream, such as `i % numberOfStreams`."""
        # The caller's stream may differ from the device's default stream.
        self.clocks = Clocks(number, default="Default")
        self._state = EffectState[None](self.clocks)
        self._effects: dict[int, tuple[Effect, ...]] = {}

    def follow(self, op: Op) -> None:
        """Records that the host has put `op` on the current stream.

        Some ops switch to another stream, give a stream a name, or wait for a stream or a
        communication. For these, also updates which work is ordered before which.
        """
        self.clocks.advance()
        if isinstance(op, StreamOp | StartsCommunication | StartCoalescing | Wait):
            effects = self._effects.get(id(op))
            if effects is None:
                effects = self._effects[id(op)] = op.effects()
            for effect in effects:
                self._state.apply(effect)

    def now(self) -> Clock:
        """Returns the vector clock of the current stream: how many ops of each stream have
        certainly ended before the next op of the current stream. The result is a copy, which the
        caller can store as the beginning of a `Lifetime`.
        """
        return dict(self.clocks.now)

    def moment(self, stream: Hashable) -> Moment:
        """Returns the current position of a stream: (stream, number of ops that the program has put
        on the stream)."""
        return stream, self.clocks.of[stream][stream]

    def is_within(self, lifetime: Lifetime) -> bool:
        """Returns whether the caller's stream can use the memory of a buffer with this lifetime
        before and after the run, for example in other runs.

        This is so if the buffer is allocated after the work that the caller put on its stream
        before the run, and deallocated before the caller's work after the run. Returns False if no
        wait ensures one of these. Call this method after the last op of the run, because the order
        of all work is known only then.
        """
        stream, tick = lifetime.end
        return ENTRY in lifetime.begin and self.clocks.of[ENTRY].get(stream, 0) >= tick
