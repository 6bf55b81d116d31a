"""Inserts barriers between writes to shared memory and reads of the same array, and before the next
writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fuser.lower.kernel_ir import (
    Assign,
    Body,
    Element,
    For,
    Statement,
    Sync,
    Unswitch,
    VectorLoad,
    VectorStore,
    bodies,
    values_of,
)


@dataclass
class _SharedArrayUses:
    """The names of the shared-memory arrays that a group of statements reads and writes."""

    reads: set[str] = field(default_factory=set[str])
    writes: set[str] = field(default_factory=set[str])

    def add(self, other: _SharedArrayUses) -> None:
        self.reads |= other.reads
        self.writes |= other.writes

    def clear(self) -> None:
        self.reads.clear()
        self.writes.clear()

    def conflicts(self, later: _SharedArrayUses) -> bool:
        """Whether a barrier is necessary between the statements of this object and those of
        `later`.

        It is necessary if `later` reads an array that the earlier statements write, or writes an
        array that they read or write.
        """
        return self.overlaps(later) or bool(self.writes & later.writes)

    def overlaps(self, later: _SharedArrayUses) -> bool:
        """Whether one of two groups of statements, this one and `later`, reads a shared-memory
        array that the other writes.
        """
        return bool(self.writes & later.reads or self.reads & later.writes)


def insert_barriers(body: Body) -> None:
    """Inserts barriers for all threads of a CUDA block (`Sync` statements), in place.

    Before: each value is written before the statements that read it, without any barrier.
    After: every thread passes a barrier between two statements if one statement writes a
    shared-memory array that the other uses. This includes two statements in different iterations of
    a loop. Barriers are outside of conditions, because all threads must pass them.
    """
    _process(body, _SharedArrayUses())


def _process(body: Body, pending: _SharedArrayUses) -> None:
    out: list[Statement] = []
    for statement in body.statements:
        uses = _uses_of(statement)
        if pending.conflicts(uses):
            out.append(Sync())
            pending.clear()
        if isinstance(statement, For | Unswitch) and uses.writes:
            _process_loop(statement, uses, pending)
        else:
            pending.add(uses)
        out.append(statement)
    body.statements = out


def _process_loop(loop: For | Unswitch, uses: _SharedArrayUses, pending: _SharedArrayUses) -> None:
    inner = _SharedArrayUses()
    _process(loop.body, inner)
    # The end of an iteration is followed by the start of the next. Iterations that only write an
    # array write different elements: if one overwrote an element, a read would be between the
    # writes.
    if isinstance(loop, For) and inner.overlaps(uses):
        loop.body.statements.append(Sync())
        inner.clear()
    pending.add(inner)


def _uses_of(statement: Statement) -> _SharedArrayUses:
    uses = _SharedArrayUses()
    for part in values_of(statement):
        if isinstance(part, Element) and part.shared:
            uses.reads.add(part.name)
    target = statement.target if isinstance(statement, Assign) else None
    if isinstance(target, Element) and target.shared:
        uses.reads.discard(target.name)
        uses.writes.add(target.name)
    if isinstance(statement, VectorLoad) and statement.shared:
        uses.reads.add(statement.name)
    if isinstance(statement, VectorStore) and statement.shared:
        uses.writes.add(statement.name)
    for inner in bodies(statement):
        for s in inner.statements:
            uses.add(_uses_of(s))
    return uses
