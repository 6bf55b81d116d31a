"""Loops for a CPU: summation in blocks of terms, and vectorised innermost loops.

The rounding error of a running sum grows with its length. A running sum in the dtype of its terms
is therefore at most one block of terms long. The sums of blocks are added in double precision. In
the example, a block has B terms, r has 256 sums, and wide_r the same sums in double precision:

    for k < n { for j < 256 { r[j] += x[k, j]; } }
->  if (B < n) {
      double wide_r[256] = 0;
      for c < ceildiv(n, B) {
        for i < min(B, n - B*c) { for j < 256 { r[j] += x[B*c + i, j]; } }
        for j < 256 { wide_r[j] += r[j]; r[j] = 0; } }
      for j < 256 { r[j] = wide_r[j]; }
    } else { for k < n { for j < 256 { r[j] += x[k, j]; } } }

Each update of a mean and variance (Welford) depends on the previous update. Instead, the values of
an innermost loop are collected in an array, and two passes over each block compute its mean and sum
of squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fuser.ir.dtypes import DataType, c_type, is_complex, is_floating, is_inexact
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar
from fuser.lower.buffers import no_values
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBlock,
    Assign,
    Body,
    Compute,
    Convert,
    Declare,
    Element,
    Expr,
    For,
    If,
    ScalarValue,
    Statement,
    Sync,
    ThreadReduce,
    Var,
    VectorLoad,
    VectorStore,
    bodies,
    map_statement,
    walk,
)
from fuser.lower.passes.unroll import conjuncts

# The number of terms in a block:
#
# - TERMS for a single accumulator, whose vector lanes take a part each.
# - VALUES for an accumulator in nested loops and for a Welford, whose values stay in the L1 cache.
# - ROWS for an array of accumulators, which costs more to add to the wide one.
TERMS = 2048
VALUES = 256
ROWS = 128


def _wide_of(dtype: DataType) -> DataType:
    """Returns the double-precision dtype in which sums of dtype `dtype` are added up, so that
    rounding errors stay small.
    """
    return DataType.ComplexDouble if is_complex(dtype) else DataType.Double


@dataclass(frozen=True, eq=False)
class _Sum:
    """One update of a sum's accumulator, with the loops and conditions around the update. The sum
    is to be computed in blocks of terms.

    - `declared`: the declaration of the accumulator.
    - `path`: all loops and conditions around the update, outer first.
    - `loops`: the loops of `path` over the terms of the sum.
    - `size`: the number of iterations of the last of these loops in one block of terms.
    """

    declared: Declare
    update: Accumulate
    path: list[For | If]
    loops: list[For]
    size: int

    @property
    def target(self) -> Var | Element:
        return self.update.target

    @property
    def wide(self) -> Var | Element:
        return replace(
            self.target, name=f"wide_{self.target.name}", dtype=_wide_of(self.target.dtype)
        )

    @property
    def depth(self) -> int:
        """The number of loops and conditions from the outermost one to the innermost loop over
        terms of the sum, inclusive.

        All of them are in `path`. A statement in the body of that innermost loop is already inside
        them. `nest` must therefore not place them around the statement again.
        """
        return 1 + next(k for k, s in enumerate(self.path) if s is self.loops[-1])

    @property
    def is_long(self) -> Scalar:
        """The condition that the sum has more than one block of terms, so that blocks are summed
        separately.

        It is always true for a mean and variance (Welford) whose values are collected in an array:
        the code with blocks then serves any number of values.
        """
        if self.collects:
            return sc.const(True)
        return sc.lt(self.size, sc.product(s.extent for s in self.loops))

    @property
    def collects(self) -> bool:
        is_value = isinstance(self.target, Var) and self.update.kind == "welford"
        return is_value and any(s is self.update for s in self.loops[-1].body.statements)

    # ------------------------------------------------------------ statements
    def identity(self, dtype: DataType) -> Expr:
        if self.update.kind == "welford":
            return no_values(dtype)
        return ScalarValue(sc.ZERO, dtype)

    def add_to_wide(self) -> Statement:
        return Accumulate(self.wide, self.target, self.update.kind, self.update.functor)

    def move(self) -> list[Statement]:
        return [self.add_to_wide(), Assign(self.target, self.identity(self.target.dtype))]

    @property
    def is_counted(self) -> bool:
        """Whether the end of a block of terms is found by a count of terms, because the block may
        span several executions of the innermost loop over terms.

        This is true for an accumulator array with several loops over terms: to add a whole array to
        the double-precision accumulators is expensive, so it is done only after a complete block. A
        scalar accumulator is added after each execution of the innermost loop, even if that loop is
        short.
        """
        return isinstance(self.target, Element) and len(self.loops) > 1

    def rest(self) -> list[Statement]:
        """Returns the statements that add the last block of terms, which may be incomplete, to the
        double-precision accumulator. The list is empty if every block is added where it ends.
        """
        return [self.add_to_wide()] if self.is_counted else []

    def settle(self) -> Statement:
        """Returns the statement that assigns the complete sum, rounded from double precision, to
        the original accumulator.
        """
        narrow = self.target.dtype
        if self.update.kind == "welford":
            return Assign(self.target, Compute("welford_cast<{t}>({0})", (self.wide,), narrow))
        return Assign(
            self.target, self.wide if narrow is self.wide.dtype else Convert(self.wide, narrow)
        )

    def nest(self, statements: list[Statement], *, depth: int = 0) -> list[Statement]:
        """Returns `statements` inside loops over the elements of the accumulator, so that they run
        once for each element.

        The loops and their conditions are copied from `path` (all loops and conditions around the
        update of the accumulator), from position `depth` on. Loops over terms of the sum are left
        out, and so are conditions that contain the indices of such loops.
        """
        own = sc.symbols(self.target.index) if isinstance(self.target, Element) else ()
        reduced = {s.symbol for s in self.path if isinstance(s, For) and s.symbol not in own}
        for s in reversed(self.path[depth:]):
            if isinstance(s, If):
                kept = [c for c in conjuncts(s.cond) if not reduced & {*sc.symbols(c)}]
                if kept or s.flags:
                    statements = [replace(s, cond=sc.all_of(kept), then=Body(statements))]
            elif s.symbol not in reduced:
                # These statements run rarely, so unrolling would only make the kernel longer.
                statements = [For(s.symbol, s.extent, Body(statements))]
        return statements


# ------------------------------------------------------------------ the sums of a body
def _find(top: Statement, declared: Mapping[str, Declare]) -> Iterator[_Sum]:
    """Yields the sums inside the statement `top` that may have many terms.

    `declared` has the accumulators that are declared before the statement, by name. Updates of
    other accumulators are skipped.
    """
    for update, path in _updates(top):
        if update.target.name in declared:
            loops, size = _counted(update, path)
            if loops and _can_cut(loops[-1]):
                yield _Sum(declared[update.target.name], update, path, loops, size)


def _updates(statement: Statement) -> Iterator[tuple[Accumulate, list[For | If]]]:
    """Yields the updates of sums inside a statement, each with the loops and conditions around the
    update, outer first.

    If an update is in the else branch of an `If`, this `If` is left out, because its condition is
    false there.
    """
    match statement:
        case Accumulate():
            is_sum = statement.kind == "welford" or statement.functor.startswith("SumOp<")
            if is_sum and is_inexact(statement.target.dtype):
                yield statement, []
        case For() | If():
            for inner in bodies(statement):
                is_taken = isinstance(statement, For) or inner is statement.then
                for s in inner.statements:
                    for update, path in _updates(s):
                        yield update, [statement, *path] if is_taken else path
        case _:
            pass


def _counted(update: Accumulate, path: Sequence[For | If]) -> tuple[list[For], int]:
    """Returns the loops over the terms of a sum that are computed in blocks of terms, and the
    number of iterations of the innermost of these loops in one block.

    `path` has the loops and conditions around `update`. Short loops of constant extent inside of
    these loops fit in one block, so they stay whole and are left out.
    """
    own = sc.symbols(update.target.index) if isinstance(update.target, Element) else ()
    loops = [s for s in path if isinstance(s, For) and s.symbol not in own]
    size = _size(update, is_nested=len(loops) > 1)
    while loops:
        extent = sc.int_value(loops[-1].extent)
        if extent is None or extent > size:
            break
        size //= max(extent, 1)
        loops.pop()
    return loops, size


def _size(update: Accumulate, *, is_nested: bool) -> int:
    if isinstance(update.target, Element):
        return ROWS
    return VALUES if is_nested or update.kind == "welford" else TERMS


def _can_cut(loop: For) -> bool:
    """Whether a loop can be split into blocks of iterations. Returns False if the loop's index
    addresses an element of an accumulator array, because each iteration then updates another sum.
    """
    return not any(
        isinstance(s, Accumulate)
        and isinstance(s.target, Element)
        and loop.symbol in sc.symbols(s.target.index)
        for s in walk(loop.body)
    )


# ------------------------------------------------------------------ the pass
def sum_in_blocks(body: Body) -> None:
    """Rewrites long sums of floating-point or complex types, in place, so that blocks of terms are
    added up in double precision, which has smaller rounding errors.

    Before: no loop is vectorised, and no value is moved out of a loop. After: no sum of many terms
    is accumulated in the dtype of the terms only.
    """
    declared: dict[str, Declare] = {}
    out: list[Statement] = []
    for s in body.statements:
        for inner in bodies(s):
            sum_in_blocks(inner)
        if isinstance(s, Declare):
            declared[s.name] = s
        sums = list(_find(s, declared))
        out += _in_blocks(s, sums) if sums else [s]
    body.statements = out


def _in_blocks(top: Statement, sums: Sequence[_Sum]) -> list[Statement]:
    """Returns the statements that replace `top` and compute the sums in it (`sums`) in blocks of
    terms.

    If all sums have equally many terms, there are two versions. An unchanged copy of `top` runs if
    there is at most one block, and the version with blocks otherwise.
    """
    conds = {found.is_long for found in sums}
    is_long = conds.pop() if len(conds) == 1 else sc.const(True)
    if is_long == sc.const(False):
        return [top]
    plain = _moved(top, {})
    before: list[Statement] = []
    after: list[Statement] = []
    for found in {found.target.name: found for found in sums}.values():
        wide = _wide_of(found.target.dtype)
        ctype = found.declared.ctype.replace(c_type(found.target.dtype), c_type(wide))
        start = found.identity(wide)
        before.append(Declare(found.wide.name, ctype, found.declared.size, start))
        after += found.nest([*found.rest(), found.settle()])
    groups: dict[int, list[_Sum]] = {}
    for found in sums:
        groups.setdefault(id(found.loops[-1]), []).append(found)
    # Inner loops first: splitting a loop copies its contents.
    for group in sorted(groups.values(), key=lambda g: -g[0].depth):
        _cut(group[0].loops[-1], group)
    blocks: list[Statement] = [*before, top, *after]
    return blocks if is_long == sc.const(True) else [If(is_long, Body(blocks), Body([plain]))]


def _cut(loop: For, group: Sequence[_Sum]) -> None:
    """Splits a loop into blocks of iterations, in place.

    After each block, the accumulators of the sums in `group` are added to their double-precision
    accumulators, which keeps rounding errors small.
    """
    rest = clamp(loop)
    size = min(found.size for found in group)
    name, blocks = loop.symbol.name, sc.ceildiv(loop.extent, size)
    block, lane = sc.index(f"{name}_block", blocks), sc.index(f"{name}_lane", size)
    start = sc.mul(block, size)
    count = sc.minimum(size, sc.sub(loop.extent, start))
    before: list[Statement] = []
    after: list[Statement] = []
    old = loop.body.statements
    inside = [_moved(s, {loop.symbol: sc.add(start, lane)}) for s in old]
    for found in group:
        at = next((k for k, s in enumerate(old) if s is found.update), None)
        if found.collects and at is not None and isinstance(found.wide, Var):
            update, array = inside[at], f"block_{found.target.name}"
            assert isinstance(update, Accumulate)
            before.append(Declare(array, c_type(found.target.dtype), size))
            inside[at] = Assign(Element(array, lane, found.target.dtype), update.value)
            after.append(AccumulateBlock(found.wide, array, count))
        else:
            after += _moves(found, start, count)
    cut = [*before, For(lane, count, Body(inside)), *after]
    loop.symbol, loop.extent = block, blocks
    loop.body = Body(cut if rest == sc.const(True) else [If(rest, Body(cut))])


def _moves(found: _Sum, start: Scalar, count: Scalar) -> list[Statement]:
    """Returns the statements that add the sum `found` to its double-precision accumulator. They run
    after each block of iterations.

    The block has `count` iterations, and `start` is the first. A block of terms may span several
    executions of the loop (`is_counted`). The statements then do nothing unless a block of terms
    ends.
    """
    moves = found.nest(found.move(), depth=found.depth)
    if not found.is_counted:
        return moves
    turn: Scalar = sc.ZERO
    for s in found.loops[:-1]:
        turn = sc.add(sc.mul(turn, s.extent), s.symbol)
    turn = sc.add(sc.mul(turn, found.loops[-1].extent), start)
    ended = sc.lt(sc.floordiv(turn, found.size), sc.floordiv(sc.add(turn, count), found.size))
    return [If(ended, Body(moves))]


def _moved(statement: Statement, index: Mapping[Scalar, Scalar]) -> Statement:
    """Returns a copy of a statement in which each symbol in `index` is replaced by the expression
    stored for it.
    """

    def moved(x: Scalar) -> Scalar:
        return sc.substitute(x, index)

    def moved_body(body: Body) -> Body:
        return Body([_moved(s, index) for s in body.statements])

    match statement:
        case For():
            return replace(
                statement, extent=moved(statement.extent), body=moved_body(statement.body)
            )
        case If():
            other = None if statement.otherwise is None else moved_body(statement.otherwise)
            then = moved_body(statement.then)
            return replace(statement, cond=moved(statement.cond), then=then, otherwise=other)
        case _:
            return map_statement(statement, moved, lambda v: replace(v, scalar=moved(v.scalar)))


# ----------------------------------------------------------------------
# The compiler vectorises the innermost loops.
#
#     FUSER_UNROLL for k < 256 { if (h + k < n) { a[k] += x[h + k]; } }
#  ->  FUSER_SIMD for k < min(256, n - h) { a[k] += x[h + k]; }

# Loops over registers with fewer iterations stay unrolled.
MIN_ITERATIONS = 8
_SUMS = {"add": "FUSER_SIMD_SUM", "mul": "FUSER_SIMD_PROD"}
_EXTREMA = {"max": "FUSER_SIMD_MAX", "min": "FUSER_SIMD_MIN"}


def vectorize_loops(body: Body) -> None:
    """Prepares innermost loops for SIMD instructions, in place: shortens each to the iterations
    that do work, and sets its pragma.

    Before: loops are marked for unrolling. After: an innermost loop has a SIMD pragma if its
    iterations are independent, or only reduce into one scalar. A condition that only bounds the
    loop index has become part of the loop's extent.
    """
    out: list[Statement] = []
    for s in body.statements:
        for inner in bodies(s):
            vectorize_loops(inner)
        if isinstance(s, For) and not any(isinstance(x, For) for x in walk(s.body)):
            out += _innermost(s)
        else:
            out.append(s)
    body.statements = out


def _innermost(loop: For) -> list[Statement]:
    extent = sc.int_value(loop.extent)
    if extent is not None and extent < MIN_ITERATIONS:
        return [loop]
    if any(isinstance(s, Sync | ThreadReduce | VectorLoad | VectorStore) for s in walk(loop.body)):
        return [loop]
    rest = clamp(loop)
    statements = _mark(loop)
    return statements if rest == sc.const(True) else [If(rest, Body(statements))]


def clamp(loop: For) -> Scalar:
    """Shortens a loop, in place, so that it needs no condition around its whole body. For the loop
    index k, the condition `h + k < n` becomes the number of iterations `n - h`.

    Returns the tests of the condition that do not depend on the loop. The caller must place these
    tests around the loop. If some test that depends on the loop cannot be expressed by the number
    of iterations, the loop stays unchanged.
    """
    only = loop.body.statements[0] if len(loop.body.statements) == 1 else None
    if not isinstance(only, If) or only.otherwise is not None or only.flags:
        return sc.const(True)
    bounds: list[Scalar] = []
    outside: list[Scalar] = []
    for test in conjuncts(only.cond):
        if loop.symbol not in sc.symbols(test):
            outside.append(test)
            continue
        bound = _bound(test, loop)
        if bound is None:
            return sc.const(True)
        bounds.append(bound)
    for bound in bounds:
        loop.extent = sc.minimum(loop.extent, bound)
    if bounds:
        loop.unroll = False
    loop.body = only.then
    return sc.all_of(outside)


def _bound(test: Scalar, loop: For) -> Scalar | None:
    """Returns the number of iterations for which a test of the loop index k is true: `b - a` for
    the test `a + k < b`. Returns None for other tests.
    """
    if not isinstance(test, Apply) or test.op != "<":
        return None
    left, right = test.args
    zero: dict[Scalar, Scalar] = {loop.symbol: sc.ZERO}
    start = sc.substitute(left, zero)
    if loop.symbol in sc.symbols(right) or sc.add(start, loop.symbol) != left:
        return None
    return sc.sub(right, start)


def _mark(loop: For) -> list[Statement]:
    """Sets the SIMD pragma of a loop, if its iterations are independent or only reduce into one
    scalar.

    Returns the statements that replace the loop: the loop itself, and those that the pragma
    requires before and after the loop.
    """
    sums: dict[str, str] = {}
    extrema: list[Accumulate] = []
    # These accumulators belong to one iteration: their reduction has an extent of 1.
    private = {s.name for s in walk(loop.body) if isinstance(s, Declare)}
    for s in walk(loop.body):
        if not isinstance(s, Accumulate) or s.target.name in private:
            continue
        if s.kind == "welford":
            return [loop]
        if isinstance(s.target, Element) and loop.symbol in sc.symbols(s.target.index):
            continue
        if not isinstance(s.target, Var) or s.target.dtype is DataType.Bool:
            return [loop]
        if s.kind in _SUMS:
            sums[s.target.name] = s.kind
        elif s.kind in _EXTREMA:
            extrema.append(s)
        else:
            return [loop]
    kinds = set(sums.values())
    if len(kinds) + len(extrema) > 1:
        return [loop]
    loop.unroll = False
    if extrema:
        return _mark_extremum(loop, extrema[0])
    loop.pragma = f"{_SUMS[kinds.pop()]}({', '.join(sums)})" if kinds else "FUSER_SIMD"
    return [loop]


def _mark_extremum(loop: For, step: Accumulate) -> list[Statement]:
    """Sets the SIMD pragma of a loop that computes a maximum or minimum. `step` is the statement
    that updates the accumulator.

    Returns the loop and the statements around it. For floating types, a separate flag records NaNs,
    because the SIMD maximum ignores them. The flag is set before the loop if the accumulator
    is NaN already. An earlier execution of the loop may have read a NaN.
    """
    assert isinstance(step.target, Var)
    name, dtype = step.target.name, step.target.dtype
    macro = _EXTREMA[step.kind]
    if not is_floating(dtype):
        loop.pragma = f"{macro}({name})"
        return [loop]
    step.nan_flag = f"nan_{name}"
    loop.pragma = f"{macro}_NAN({name}, {step.nan_flag})"
    flag = Var(step.nan_flag, DataType.Int32)
    settled = Compute("fm_nan_if({0}, {1})", (flag, step.target), dtype)
    start = Compute("fm_isnan({0})", (step.target,), DataType.Bool)
    return [Declare(step.nan_flag, "int", None, start), loop, Assign(step.target, settled)]
