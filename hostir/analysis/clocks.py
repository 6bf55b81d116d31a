"""Vector clocks: how far each stream, and what it waited for, has come on every other stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from fuser.ir.scalar.constructors import Scalar
from hostir.ir.effects import ENTRY, Stream

Clock = dict[Hashable, int]


@dataclass(slots=True)
class Clocks:
    """The streams of one run: which is current, which names mean what, and all clocks.

    `number` evaluates a scalar. A stream's own entry counts the ops that it was given; the stream
    of the caller has one before the program begins, which is what the caller did. `default` is the
    device's default stream.
    """

    number: Callable[[Scalar], object]
    current: Hashable = ENTRY
    default: Hashable = ENTRY
    captured: dict[str, Hashable] = field(default_factory=dict[str, Hashable])
    of: dict[Hashable, Clock] = field(default_factory=lambda: {ENTRY: {ENTRY: 1}})

    @property
    def now(self) -> Clock:
        return self.of[self.current]

    @property
    def tick(self) -> int:
        """How many ops the current stream has been given."""
        return self.of[self.current][self.current]

    def advance(self) -> None:
        """Count an op on the current stream."""
        self.of[self.current][self.current] += 1

    def find(self, stream: Stream) -> Hashable:
        """Return what a stream of the program is in this run."""
        if stream.index is not None:
            return self.number(stream.index)
        found = self.captured.get(stream.name)
        if found is not None:
            return found
        return self.default if stream.name == "Default" else stream.name

    def enter(self, stream: Stream) -> None:
        self.current = self.find(stream)
        self.of.setdefault(self.current, {self.current: 0})

    def join(self, stream: Stream) -> None:
        """Make the current stream wait for all that another one has been given so far."""
        other = self.find(stream)
        theirs = self.of.get(other)
        if theirs is not None and self.now.get(other, 0) < theirs[other]:
            self.learn(theirs)

    def learn(self, theirs: Clock) -> None:
        """Make the current stream wait for what a clock says."""
        mine = self.now
        for stream, tick in theirs.items():
            if mine.get(stream, 0) < tick:
                mine[stream] = tick

    def text(self, stream: Hashable) -> str:
        """Return a stream as the program spells it."""
        if stream != ENTRY:
            return f"Stream {stream}"
        return f"Stream {next((n for n, s in self.captured.items() if s == ENTRY), 'Default')}"

    def name(self, stream: Hashable) -> str:
        return self.text(stream) + (" (the caller's)" if stream == ENTRY else "")
