"""Vector loads: the consecutive elements that an unrolled loop loads are loaded by vectors before
the loop, if the address is aligned.

Operands of a concatenation, slices and padded tensors are read at shifted indices, often under a
condition. No schedule can know whether their addresses are aligned. The kernel therefore tests the
address itself, and nothing has to be assumed. In the example, `load_vec_any` makes this test and
loads 8 elements into the register array w0:

    for k in 8: t = k + x < n ? T0[b + k] : 0
    ->
    if (x + 7 < n) load_vec_any<8>(w0, T0, b);
    else if (x < n) for k in 8: if (k + x < n) w0[k] = T0[b + k];
    for k in 8: t = w0[k]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fuser.ir.dtypes import c_type, nbytes_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import postorder, single_term, without_factors
from fuser.lower.kernel_ir import (
    Assign,
    Body,
    Declare,
    Define,
    Element,
    For,
    GlobalLoad,
    If,
    LetValue,
    ScalarValue,
    Statement,
    VectorLoad,
    bodies,
    map_statement,
    walk,
)
from fuser.lower.passes.unroll import conjuncts
from fuser.lower.vector_access import MAX_VECTOR_BYTES, terms_of

TRUE, FALSE = sc.const(True), sc.const(False)


def load_vectors(body: Body) -> None:
    """Replaces the loads of single consecutive elements in unrolled loops by vector loads, which
    are placed before the loops. The body is changed in place.
    """
    _VectorLoads().run(body)


@dataclass
class _VectorLoads:
    """Replaces the loads in unrolled loops by vector loads before the loops. Each loaded vector
    gets a register array with a new name.
    """

    # The arrays are called w0, w1, ...; no other name has this form.
    count: int = 0

    def run(self, body: Body) -> None:
        made: list[Statement] = []
        for statement in body.statements:
            if isinstance(statement, For) and statement.unroll:
                made += self._before(statement)
            for inner in bodies(statement):
                self.run(inner)
            made.append(statement)
        body.statements = made

    def _before(self, loop: For) -> list[Statement]:
        """Returns the statements that load the vectors of an unrolled loop, to be placed before
        the loop.

        The loop is changed so that it reads the loaded register arrays.
        """
        made: list[Statement] = []
        arrays: dict[tuple[str, Scalar, Scalar], str] = {}
        found_here = {s.symbol for s in walk(loop.body) if isinstance(s, LetValue)}
        for statement, conditions in _definitions(loop.body, TRUE):
            load = statement.value
            if not isinstance(load, GlobalLoad):
                continue
            guard = sc.logical_and(conditions, load.guard)
            if not _is_run(load, guard, loop):
                continue
            if found_here.intersection((*sc.symbols(load.index), *sc.symbols(guard))):
                continue
            key = load.name, load.index, guard
            if key not in arrays:
                arrays[key] = f"w{self.count}"
                self.count += 1
                made += _load(arrays[key], load, guard, loop)
            statement.value = Element(arrays[key], loop.symbol, load.dtype)
        return made


def _definitions(body: Body, guard: Scalar) -> Iterator[tuple[Define, Scalar]]:
    """Yields the definitions of variables in a body, each with the condition under which it runs.

    The condition is the conjunction of `guard` and the conditions in the body. Inner loops are
    skipped.
    """
    for statement in body.statements:
        if isinstance(statement, Define):
            yield statement, guard
        elif isinstance(statement, If) and not statement.flags:
            yield from _definitions(statement.then, sc.logical_and(guard, statement.cond))


def _is_run(load: GlobalLoad, guard: Scalar, loop: For) -> bool:
    """Whether vector loads can replace the load of single elements in `loop`. Returns False in
    three cases:

    - The number of iterations is not a constant power of two greater than 1, or one element fills a
      vector.
    - The iterations do not load consecutive elements.
    - A comparison in `guard`, the condition of the load, is not linear in the loop index. If all
      are linear, then the iterations for which `guard` holds are consecutive, as a vector load
      needs.
    """
    width, v = sc.int_value(loop.extent), loop.symbol
    nbytes = nbytes_of(load.dtype)
    is_word = width is not None and width > 1 and not width & (width - 1)
    if not is_word or min(width or 1, MAX_VECTOR_BYTES // nbytes) < 2:
        return False
    base = sc.substitute(load.index, {v: sc.ZERO})
    is_run = sc.add(base, v) == load.index
    return is_run and all(_step(test, v) is not None for test in _tests(guard))


def _tests(guard: Scalar) -> list[Scalar]:
    return [] if guard == TRUE else conjuncts(guard) or [guard]


def _step(test: Scalar, v: Symbol) -> int | None:
    """Returns by how much (left side - right side) of a comparison changes when `v` grows by 1.

    Returns 0 for a test without `v`, and None if the change is not constant.
    """
    if v not in sc.symbols(test):
        return 0
    # All integer comparisons are normalised to this form.
    if not isinstance(test, Apply) or test.op != "<":
        return None
    difference = sc.sub(*test.args)
    first, second = (sc.substitute(difference, {v: sc.const(k)}) for k in (0, 1))
    step = sc.int_value(sc.sub(second, first))
    return step if step is not None and sc.add(first, sc.mul(step, v)) == difference else None


def _is_uniform(test: Scalar, v: Symbol, width: int) -> bool:
    """Whether a test provably has the same outcome for all values of `v` from 0 to `width - 1`,
    that is, for all elements of a vector.

    `test` compares two sides. Its outcome changes between the differences -1 and 0 of the sides. If
    the difference changes by 1 per element, and its smallest value in the vector is a multiple of
    `width`, no vector contains both -1 and 0.
    """
    step = _step(test, v)
    if not step:
        return True
    assert isinstance(test, Apply)
    difference = sc.sub(*test.args)
    # The outcome changes between the differences -1 and 0.
    least = sc.substitute(difference, {v: sc.ZERO if step > 0 else sc.const(width - 1)})
    return abs(step) == 1 and all(coef % width == 0 for _, coef in terms_of(least))


def _load(name: str, load: GlobalLoad, guard: Scalar, loop: For) -> list[Statement]:
    """Returns the statements that fill the register array `name` with the elements that an unrolled
    loop loads.

    `load` is the load in the loop and `guard` its condition. If the condition holds for all
    elements, vector loads are used. Otherwise the elements for which it holds are loaded one by
    one.
    """
    width, v = sc.int_value(loop.extent), loop.symbol
    assert width is not None
    # For each test, the lane that satisfies it last, and the lane that satisfies it first.
    ends = [(sc.const(width - 1), sc.ZERO), (sc.ZERO, sc.const(width - 1))]
    picked = [(test, ends[(_step(test, v) or 0) < 0]) for test in _tests(guard)]
    whole, some = (sc.all_of(sc.substitute(t, {v: e[k]}) for t, e in picked) for k in (0, 1))
    base = sc.substitute(load.index, {v: sc.ZERO})
    each = min(width, MAX_VECTOR_BYTES // nbytes_of(load.dtype))
    vectors: list[Statement] = [
        VectorLoad(name, sc.const(at), load.name, sc.add(base, at), each, load.dtype, aligned=False)
        for at in range(0, width, each)
    ]
    # Elements that are not loaded are not used, but the loop copies them, so they need a value.
    declared = Declare(name, c_type(load.dtype), width, ScalarValue(sc.ZERO, load.dtype))
    if whole == TRUE:
        return [declared, *vectors]
    if all(_is_uniform(test, v, width) for test in _tests(guard)):
        return [declared, If(whole, Body(vectors))]
    element = Assign(
        Element(name, v, load.dtype), GlobalLoad(load.name, load.index, load.dtype, TRUE)
    )
    part = For(v, loop.extent, Body([If(guard, Body([element]))]), unroll=True, pragma=loop.pragma)
    parts: list[Statement] = [part] if some == TRUE else [If(some, Body([part]))]
    if whole == FALSE:
        return [declared, *parts]
    return [declared, If(whole, Body(vectors), Body(parts))]


# ----------------------------------------------------------------------
# Divisions in vectors that cross the ends of rows: one division per vector instead of one per
# element.
#
# An operand shared by all rows is read at the index modulo the row's length. The elements of a
# vector are consecutive. At most one row ends among them if rows are at least as long as a vector:
#
#     for k in 8: t[k] = T1[(b + k) % n]
#  ->  r = b % n;  for k in 8: t[k] = T1[r + k < n ? r + k : r + k - n]
#
#     (b + k) / n   ->   b / n + (r + k < n ? 0 : 1)


def divide_once(body: Body, least: Mapping[Scalar, int]) -> None:
    """Replaces index divisions in unrolled loops, in place, by one division per vector and a
    comparison per element, which is cheaper.

    A division is replaced if its divisor is provably at least the number of iterations: the
    quotient then changes at most once. `least` maps products of sizes to their lower bounds. The
    proof uses these bounds.
    """
    _Divisions(least).run(body, {})


class _Divisions:
    """Replaces index divisions in unrolled loops by one division per vector and a comparison per
    element. Rewritten scalars are cached.

    A division is replaced only if its divisor is provably at least the number of iterations.
    `least` maps products of sizes to their lower bounds, from which this is proved.
    """

    def __init__(self, least: Mapping[Scalar, int]) -> None:
        self._least = least
        self._known: dict[tuple[Scalar, tuple[Symbol, ...]], Scalar] = {}

    def run(self, body: Body, lanes: dict[Symbol, int]) -> None:
        """Rewrites the divisions in a body, in place.

        `lanes` maps the index symbols of the unrolled loops around the body to their numbers of
        iterations.
        """

        def rewritten(x: Scalar) -> Scalar:
            return self._rewritten(x, lanes)

        def value(v: ScalarValue) -> ScalarValue:
            return ScalarValue(rewritten(v.scalar), v.dtype)

        for k, statement in enumerate(body.statements):
            inside = lanes
            if isinstance(statement, For):
                count = sc.int_value(statement.extent)
                if statement.unroll and count is not None:
                    inside = {**lanes, statement.symbol: count}
            for inner in bodies(statement):
                self.run(inner, inside)
            if lanes and not bodies(statement):
                body.statements[k] = map_statement(statement, rewritten, value)

    def _rewritten(self, x: Scalar, lanes: dict[Symbol, int]) -> Scalar:
        key = x, tuple(lanes)
        if key not in self._known:
            found: dict[Scalar, Scalar] = {}
            seen: set[Scalar] = set()
            for y in postorder(x, seen.__contains__):
                seen.add(y)
                made = self._divided_once(y, lanes) if isinstance(y, Apply) else None
                if made is not None:
                    found[y] = made
            self._known[key] = sc.substitute(x, found) if found else x
        return self._known[key]

    def _divided_once(self, x: Apply, lanes: dict[Symbol, int]) -> Scalar | None:
        """Returns an expression for the quotient or remainder `x` that divides only in the first
        iteration of an unrolled loop. Other iterations add to that result and compare it with the
        divisor.

        `lanes` maps the index symbols of unrolled loops to their numbers of iterations. Returns
        None if `x` is another operation, or if the divisor may be smaller than the number of
        iterations.
        """
        if x.op not in ("/", "%") or sc.has_index(x.args[1]):
            return None
        of, n = x.args
        for lane, count in lanes.items():
            first = sc.substitute(of, {lane: sc.ZERO})
            if sc.add(first, lane) != of or not self._is_at_least(n, count):
                continue
            rest = sc.add(sc.mod(first, n), lane)
            is_before = sc.lt(rest, n)
            if x.op == "%":
                return sc.where(is_before, rest, sc.sub(rest, n))
            return sc.add(sc.floordiv(first, n), sc.where(is_before, sc.ZERO, sc.ONE))
        return None

    def _is_at_least(self, x: Scalar, count: int) -> bool:
        """Whether `x` is provably at least `count`.

        The proof uses `x` itself, or the known lower bound of a product of sizes that divides `x`.
        """
        if sc.le(count, x) == sc.const(True):
            return True
        return any(n >= count and _is_multiple(x, y) for y, n in self._least.items())


def _is_multiple(x: Scalar, y: Scalar) -> bool:
    whole, part = single_term(x), single_term(y)
    if whole is None or part is None:
        return x == y
    return without_factors(whole[0], part[0]) is not None and whole[1] % part[1] == 0
