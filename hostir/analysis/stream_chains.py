"""Waits that chain the steps of a loop: correct, and the end of all overlap.

    FOR i: SetCurrentStream(Stream (i % n)), Synchronize(Stream S0), ..,
           SetCurrentStream(Stream S0), Synchronize(Stream (i % n))

S0 waits for step i, and step i + 1 for S0. Where the program stays free of races with the first
wait in a loop of its own before, the steps need not wait for each other. A wait under a condition
is meant for its step (`inter_stream_synchronization`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from fuser.ir.op import Op
from fuser.ir.scalar.constructors import Number, Symbol
from hostir.analysis.clocks import Clock
from hostir.analysis.races import RaceWalk
from hostir.ir.diagnostics import Finding, Site
from hostir.ir.effects import Joins
from hostir.ir.ops import ForLoop, IfThenElse
from hostir.ir.program import HostIrContainer, walk
from hostir.ir.queries import has_streams

CHAINED = "steps are chained"

# How often a program is walked through; of waits that take longer to tell apart, nothing is said.
MAX_WALKS = 16


def find_chains(
    program: HostIrContainer, values: Mapping[Symbol, Number], *, rank: int = 0
) -> list[Finding]:
    """Return the waits that chain steps of loops without need; for arguments see `find_races`."""
    if not has_streams(program):
        return []
    first = _ChainWalk(program, dict(values), rank, ())
    first.run(program.ops)
    found: list[Finding] = []
    # All waits at once, then halves: what is free of races with more of them moved is so with less.
    left = [tuple(first.chains)] if first.chains else []
    for _ in range(MAX_WALKS):
        if not left:
            break
        waits = left.pop()
        other = _ChainWalk(program, dict(values), rank, (), hoisted=frozenset(waits))
        other.run(program.ops)
        other.finish()
        half = len(waits) // 2
        if not other.found:
            found += [first.chains[op] for op in waits]
        elif half:
            left += [waits[half:], waits[:half]]
    return found


class _ChainWalk(RaceWalk):
    """Notes which waits chain steps; lets those `hoisted` stand in a loop of their own before."""

    def __init__(self, *args: object, hoisted: frozenset[Op] = frozenset()) -> None:
        super().__init__(*args)  # pyright: ignore[reportArgumentType]
        self.hoisted = hoisted
        self.chains: dict[Op, Finding] = {}
        branches = (op for op in walk(self.program.ops) if isinstance(op, IfThenElse))
        self.conditional = {inner for op in branches for r in op.regions for inner in walk(r)}
        # The clocks at the begin of each loop that is being walked; they stand for that walk.
        self.at_entry: list[dict[Hashable, Clock]] = []
        # (stream, the one that it waited for) -> how far that had come, where it waited, and in
        # which walk.
        self.joined: dict[tuple[Hashable, Hashable], tuple[int, Site, object]] = {}

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Keep the clocks at the begin of a loop."""
        if isinstance(op, ForLoop):
            self.at_entry.append({s: dict(c) for s, c in self.clocks.of.items()})

    def on_left(self, op: ForLoop) -> None:
        """Forget the clocks at the begin of a loop."""
        self.at_entry.pop()

    def on_join(self, effect: Joins, site: Site) -> None:
        """Note a wait that chains steps; one of `hoisted` waits for what was before the loop."""
        me, other = self.clocks.current, self.clocks.find(effect.stream)
        if site.op in self.conditional:
            return super().on_join(effect, site)
        if site.op in self.hoisted and self.at_entry:
            self.clocks.learn(self.at_entry[-1].get(other, {}))
            return None
        here = self.at_entry[-1] if self.at_entry else None
        for (waiter, stream), (tick, at, during) in self.joined.items():
            is_ahead = waiter == other and stream != me and self.clocks.now.get(stream, 0) < tick
            is_earlier = here is not None and during is here and at.indices != site.indices
            if is_ahead and is_earlier and site.op not in self.chains:
                name = self.clocks.name
                self.chains[site.op] = Finding(
                    CHAINED,
                    f"every step on {name(me)} waits for the step before on {name(stream)}",
                    (
                        (at, f"{name(other)} waits for {name(stream)}"),
                        (site, f"{name(me)} waits for {name(other)}"),
                    ),
                    "{1} belongs in a loop of its own before this one",
                )
        super().on_join(effect, site)
        self.joined[me, other] = self.clocks.of.get(other, {}).get(other, 0), site, here
        return None
