"""Mean and variance on the GPU: adds all values of an unrolled loop to an accumulator at once.

Each update of an accumulator for mean and variance (Welford) contains a division and depends on the
previous update, so updates by single values are slow. This pass adds many values by one update: two
passes over the values in registers compute their mean and sum of squares, and the update adds
these. The accumulators of all columns hold equally many values, so they share the count and the
division.

In the example, r[j] is the accumulator of column j, and x has the values. The set bits of `mask`
select the values in the array b that exist; `held` is the count before the update:

    for i < 16 { for j < 4 { if (i < n) { welford_add(r[j], x[i, j]); } } }
->  held = r[0].n; mask = 0;
    for i < 16 { if (i < n) { mask |= 1 << i; } }
    for j < 4 {
      for i < 16 { if (i < n) { b[i] = x[i, j]; } }
      welford_add_batch(r[j], b, mask, held); }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeGuard

from fuser.ir.dtypes import DataType, c_type
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.lower.buffers import INDEX_CTYPE
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBatch,
    Assign,
    Body,
    Compute,
    Declare,
    Define,
    Element,
    Expr,
    For,
    If,
    LetValue,
    ScalarValue,
    Statement,
    Var,
    bodies,
)

# A 32-bit mask has one bit for each value of a batch.
MOST_VALUES = 32
INT = DataType.Int32


def batch_welfords(body: Body) -> None:
    """Rewrites unrolled loops, in place, so that accumulators for mean and variance (Welford)
    receive several values at a time.

    Before: the loops that the compiler must unroll are marked, and no value is moved out of a loop.
    After: nests of such loops divide once per batch of values, not once per value. A nest is
    rewritten only if its updates of accumulators have one common condition.
    """
    _rewrite(body, _uneven(body, ()))


def _rewrite(body: Body, uneven: set[str]) -> None:
    out: list[Statement] = []
    for s in body.statements:
        batch = _batch(s, uneven) if isinstance(s, For) else None
        if batch is None:
            for inner in bodies(s):
                _rewrite(inner, uneven)
        out += [s] if batch is None else batch
    body.statements = out


def _uneven(body: Body, conds: tuple[Scalar, ...]) -> set[str]:
    """Returns the names of the accumulator arrays whose elements may hold different numbers of
    values.

    `conds` are the conditions around `body`. The numbers may differ if a value is added only under
    a condition that depends on the index of the accumulator in its array.
    """
    found: set[str] = set()
    for s in body.statements:
        if isinstance(s, Accumulate):
            around = {x for c in conds for x in sc.symbols(c)}
            if around & _own_symbols(s.target):
                found.add(s.target.name)
        inside = (*conds, s.cond) if isinstance(s, If) else conds
        for inner in bodies(s):
            found |= _uneven(inner, inside)
    return found


def _own_symbols(target: Var | Element) -> set[Symbol]:
    return {*sc.symbols(target.index)} if isinstance(target, Element) else set()


def _perfect_nest(top: For) -> tuple[list[For], list[Scalar], list[Statement]]:
    """Returns the parts of a perfect loop nest: loops (outer first), conditions, and innermost
    statements.

    In a perfect nest, each loop or condition contains only the next loop or condition, and no other
    statement. `top` is the outermost loop.
    """
    loops, conds, body = [top], list[Scalar](), top.body
    while len(body.statements) == 1:
        match body.statements[0]:
            case For() as loop:
                loops.append(loop)
                body = loop.body
            case If(otherwise=None, flags=()) as test:
                conds.append(test.cond)
                body = test.then
            case _:
                break
    return loops, conds, body.statements


def _batch(top: For, uneven: set[str]) -> list[Statement] | None:
    """Returns the statements that replace a nest of unrolled loops. They add all values of the nest
    to Welford accumulators (for mean and variance) at once.

    Returns None if the nest does anything else, or if its loops and conditions do not allow this.
    `top` is the outermost loop. `uneven` has the names of accumulator arrays whose elements may
    hold different numbers of values.
    """
    loops, conds, inside = _perfect_nest(top)
    if not any(map(_is_update, inside)) or not all(
        isinstance(s, Accumulate | Define | LetValue) for s in inside
    ):
        return None
    own = {x for s in inside if isinstance(s, Accumulate) for x in _own_symbols(s.target)}
    columns = [loop for loop in loops if loop.symbol in own]
    rows = [loop for loop in loops if loop.symbol not in own]
    cond = sc.all_of(conds)
    if not 1 < _count(rows) <= MOST_VALUES or own & {*sc.symbols(cond)}:
        return None
    if not all(loop.unroll for loop in loops):
        return None
    return _Batch(columns, rows, cond, uneven).statements(inside)


def _is_update(s: Statement) -> TypeGuard[Accumulate]:
    return isinstance(s, Accumulate) and s.kind == "welford"


def _count(rows: Sequence[For]) -> int:
    return prod(sc.int_value(loop.extent) or 0 for loop in rows)


def _nested(loops: Sequence[For], statements: list[Statement]) -> list[Statement]:
    for loop in reversed(loops):
        statements = [replace(loop, body=Body(statements))]
    return statements


@dataclass(frozen=True)
class _Batch:
    """A nest of unrolled loops around updates of Welford accumulators (for mean and variance),
    which is to be rewritten so that a batch of values is added at once.

    - `columns`: the loops over accumulators. `rows`: the loops over the values of one batch.
    - `cond`: the condition under which a value exists.
    - `uneven`: the accumulator arrays whose elements may hold different numbers of values.
    """

    columns: Sequence[For]
    rows: Sequence[For]
    cond: Scalar
    uneven: set[str]

    @property
    def is_whole(self) -> bool:
        return self.cond == sc.const(True)

    @property
    def turn(self) -> Scalar:
        """The position of a value in its batch, as an expression of the indices of the loops in
        `rows`.
        """
        turn: Scalar = sc.ZERO
        for loop in self.rows:
            turn = sc.add(sc.mul(turn, loop.extent), loop.symbol)
        return turn

    def statements(self, inside: Sequence[Statement]) -> list[Statement]:
        before: list[Statement] = []
        arrays: list[Statement] = []
        collected: list[Statement] = []
        after: list[Statement] = []
        first = next(s.target for s in inside if _is_update(s))
        mask = Var(f"mask_{first.name}", INT)
        for s in inside:
            if not _is_update(s):
                collected.append(s)
                continue
            array, dtype = f"batch_{s.target.name}", s.target.dtype
            start = None if self.is_whole else ScalarValue(sc.ZERO, dtype)
            arrays.append(Declare(array, c_type(dtype), _count(self.rows), start))
            collected.append(Assign(Element(array, self.turn, dtype), s.value))
            held = f"held_{s.target.name}"
            where = arrays if s.target.name in self.uneven else before
            where.append(Declare(held, INDEX_CTYPE, None, self._held(s.target)))
            after.append(AccumulateBatch(s.target, array, "" if self.is_whole else mask.name, held))
        if not self.is_whole:
            set_bit = Compute(
                "{0} | 1u << {1}", (mask, ScalarValue(self.turn, DataType.Index)), mask.dtype
            )
            collected = [If(self.cond, Body(collected))]
            before.append(Declare(mask.name, "unsigned", None, ScalarValue(sc.ZERO, INT)))
            before += _nested(self.rows, [If(self.cond, Body([Assign(mask, set_bit)]))])
        made = _nested(self.columns, [*arrays, *_nested(self.rows, collected), *after])
        return [*before, *made]

    def _held(self, target: Var | Element) -> Expr:
        """Returns the expression of the number of values that the accumulator `target` of a mean
        and variance (Welford) holds already.

        All elements of an accumulator array usually hold equally many values. The expression then
        reads the count of the first element, so that one read serves all elements.
        """
        if isinstance(target, Var):
            return Var(f"{target.name}.n", DataType.Int)
        columns: dict[Scalar, Scalar] = {loop.symbol: sc.ZERO for loop in self.columns}
        first = target.index if target.name in self.uneven else sc.substitute(target.index, columns)
        return Element(target.name, first, DataType.Int, member="n")
