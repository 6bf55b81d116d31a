"""Loops over what an earlier loop has read go backwards, so that they begin with what it read last:
that is still in the cache.

    for k in n: m = max(m, T0[k])       for k in n: m = max(m, T0[k])
    for k in n: s += exp(T0[k] - m)  -> for k in n - 1 ... 0: s += exp(T0[k] - m)
"""

from __future__ import annotations

from collections.abc import Iterator

from fuser.ir.scalar.constructors import Scalar
from fuser.lower.kernel_ir import (
    Body,
    For,
    GlobalLoad,
    Statement,
    Sync,
    ThreadReduce,
    VectorLoad,
    bodies,
    values_of,
    walk,
)

# What threads of a block come to at once: its order stays.
_MEETINGS = (Sync, ThreadReduce)


def alternate_directions(body: Body) -> None:
    """Turn around, in place, every second one of the loops side by side that go over a tensor."""
    # How often it goes around, and in which direction it did last.
    latest: dict[str, tuple[Scalar, bool]] = {}
    for statement in body.statements:
        if isinstance(statement, For) and not statement.unroll and _is_free(statement):
            read = dict.fromkeys(_tensors_read(statement))
            statement.backward = any(latest.get(name) == (statement.extent, False) for name in read)
            latest.update(dict.fromkeys(read, (statement.extent, statement.backward)))
        else:
            for inner in bodies(statement):
                alternate_directions(inner)


def _is_free(loop: For) -> bool:
    """Whether the iterations of a loop may come in any order."""
    return not any(isinstance(s, _MEETINGS) for s in walk(loop.body))


def _tensors_read(loop: For) -> Iterator[str]:
    """Yield the names of tensors in global memory."""
    for s in walk(loop.body):
        if isinstance(s, VectorLoad) and not s.shared:
            yield s.name
        yield from _loaded(s)


def _loaded(statement: Statement) -> Iterator[str]:
    return (v.name for v in values_of(statement) if isinstance(v, GlobalLoad))
