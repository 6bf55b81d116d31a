"""A loop over rows asks for the next row while its threads put the sums of this one together.

    for k in n:                        for k in n:
      x = T0[k, i]                       x = T0[k, i]
      s = sum of x over threads   ->     if k + 1 < n: prefetch T0[k + 1, i]
      T1[k, i] = x - s                   s = sum of x over threads
                                         T1[k, i] = x - s

The threads of a block wait for one another in every iteration, so nothing else would be under way
meanwhile. The next row waits in the second-level cache: it takes no registers. Measured on an H200,
gradients of layer norm in bfloat16, 16384 x 8192: 245 us, 292 without; kept in registers the next
row gained nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.lower.kernel_ir import (
    Body,
    Declare,
    Define,
    For,
    GlobalLoad,
    If,
    Let,
    LetValue,
    Prefetch,
    Statement,
    ThreadReduce,
    VectorLoad,
    bodies,
    values_of,
    walk,
)

TRUE = sc.const(True)


def prefetch_next(body: Body) -> None:
    """Add, in place, what asks for the next iteration's elements where a loop's threads meet."""
    for statement in body.statements:
        if isinstance(statement, For) and not statement.unroll and _meets(statement.body):
            _Loop(statement).prefetch()
        else:
            for inner in bodies(statement):
                prefetch_next(inner)


def _meets(body: Body) -> bool:
    return any(isinstance(s, ThreadReduce) for s in body.statements)


class _Loop:
    """A loop whose threads meet."""

    def __init__(self, loop: For) -> None:
        self.loop = loop
        self.following = sc.add(loop.symbol, 1)
        # What is known in this iteration alone: places that depend on it are not asked for.
        self.made: Container[str] = {
            s.symbol.name if isinstance(s, Let | LetValue) else s.name
            for s in walk(loop.body)
            if isinstance(s, Let | LetValue | Define | Declare)
        }

    def prefetch(self) -> None:
        """Ask behind the last load before threads meet."""
        statements = self.loop.body.statements
        meeting = next(k for k, s in enumerate(statements) if isinstance(s, ThreadReduce))
        asked = [(k, p) for k, s in enumerate(statements[:meeting]) for p in self._asked(s)]
        if asked:
            another = If(sc.lt(self.following, self.loop.extent), Body([p for _, p in asked]))
            statements.insert(asked[-1][0] + 1, another)

    def _asked(self, statement: Statement) -> list[Statement]:
        """Return what asks for the elements that a statement loads, an iteration later."""
        match statement:
            case For():
                inner = self._all_asked(statement.body)
                if not inner or not self._is_known(statement.extent):
                    return []
                return [For(statement.symbol, statement.extent, Body(inner), statement.unroll)]
            case If():
                inner = self._all_asked(statement.then)
                return self._under(statement.cond, inner) if not statement.flags else []
            case _:
                return [p for access in _accesses(statement) for p in self._prefetch(*access)]

    def _all_asked(self, body: Body) -> list[Statement]:
        return [p for s in body.statements for p in self._asked(s)]

    def _prefetch(self, name: str, index: Scalar, guard: Scalar) -> list[Statement]:
        if self.loop.symbol not in sc.symbols(index) or not self._is_known(index):
            return []
        return self._under(guard, [Prefetch(name, self._later(index))])

    def _under(self, cond: Scalar, statements: list[Statement]) -> list[Statement]:
        if not statements or not self._is_known(cond):
            return []
        return statements if cond == TRUE else [If(self._later(cond), Body(statements))]

    def _is_known(self, x: Scalar) -> bool:
        return not any(s.name in self.made for s in sc.symbols(x))

    def _later(self, x: Scalar) -> Scalar:
        return sc.substitute(x, {self.loop.symbol: self.following})


def _accesses(statement: Statement) -> Iterator[tuple[str, Scalar, Scalar]]:
    """Yield name, place and condition of the loads from global memory of a statement."""
    if isinstance(statement, VectorLoad) and not statement.shared:
        yield statement.name, statement.index, TRUE
    for v in values_of(statement):
        if isinstance(v, GlobalLoad):
            yield v.name, v.index, v.guard
