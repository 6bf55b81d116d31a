"""Simplifies sums, products, divisions and extrema of integer scalars when they are built.

Proofs use the ranges of symbols: if `k` is in [0, i0 - 1], `(k + i0 * j) // i0` becomes `j`. There
are two divisions:

- `/` and `%` round towards zero, as in C and in user programs;
- `floorDiv` and `floorMod` round down, as index arithmetic needs.

If neither operand can be negative, both divisions agree and are written as `/` and `%`. A division
by 0 has no value, so proofs may assume that the divisor is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from fuser.ir.dtypes import DataType, category
from fuser.ir.scalar.scalar_nodes import (
    ONE,
    ZERO,
    Apply,
    Const,
    Interval,
    Monomial,
    Poly,
    Scalar,
    ScalarLike,
    Symbol,
    as_scalar,
    from_terms,
    int_dtype,
    int_value,
    join_monomials,
    postorder,
    single_term,
    symbols,
    terms_of,
    without_factors,
)
from fuser.support.errors import DefinitionError

# Remainder op -> its division op.
_DIVISION_OF = {"%": "/", "floorMod": "floorDiv"}
# Proofs about deeper scalars use constant bounds only, to limit the time.
_PROOF_DEPTH = 24


# ---------------------------------------------------------------- sums and products
@lru_cache(maxsize=100_000)
def add_terms(a: Scalar, b: Scalar, factor: int = 1) -> Scalar:
    """Returns the symbolic sum a + factor * b in simplified form: equal terms are added up.

    A quotient and the remainder of the same division are also added up: x / b * b + x % b becomes
    x.
    """
    terms = terms_of(a)
    for mono, coef in terms_of(b).items():
        terms[mono] = terms.get(mono, 0) + factor * coef
    return from_terms(_recombine(terms), int_dtype(a, b))


@lru_cache(maxsize=100_000)
def multiply(a: Scalar, b: Scalar) -> Scalar:
    """Returns the symbolic product a * b of integers in simplified form: as a sum of products."""
    terms: dict[Monomial, int] = {}
    for ma, ca in terms_of(a).items():
        for mb, cb in terms_of(b).items():
            mono = join_monomials(ma, mb)
            terms[mono] = terms.get(mono, 0) + ca * cb
    return from_terms(_recombine(terms), int_dtype(a, b))


def subtract(a: Scalar, b: Scalar) -> Scalar:
    """Returns the symbolic difference a - b of integers in simplified form: equal terms cancel."""
    return add_terms(a, b, -1)


def negate(x: Scalar) -> Scalar:
    """Returns -x for a symbolic integer, in simplified form."""
    return multiply(x, Const(-1, x.dtype))


# Division op -> its remainder op.
_REMAINDER_OF = {division: op for op, division in _DIVISION_OF.items()}


def _recombine(terms: dict[Monomial, int]) -> dict[Monomial, int]:
    """Simplifies a sum that contains a quotient and a remainder of the same division.

    `terms` maps products of factors to coefficients. The sum c*(x / b)*b + c*(x % b) equals c*x. If
    two of these three terms occur in the sum, they are replaced by the third term. This applies to
    both kinds of division.
    """
    while True:
        terms = {m: c for m, c in terms.items() if c}
        found = _whole(terms) or _part(terms)
        if found is None:
            return terms
        terms = found


def _whole(terms: dict[Monomial, int]) -> dict[Monomial, int] | None:
    """Replaces c*(x / b)*b + c*(x % b) by c*x in a sum, for one pair of such terms.

    `terms` maps products of factors to coefficients. Returns the new terms, or None if there is no
    such pair.
    """
    for mono, coef in terms.items():
        for atom in mono:
            if not (isinstance(atom, Apply) and atom.op in _DIVISION_OF):
                continue
            x, b = atom.args
            rest = without_factors(mono, (atom,))
            # x / b may be written differently: (k / m) / n is k / (m*n).
            split = single_term(b)
            quotient = single_term(divide(x, b, _DIVISION_OF[atom.op]))
            if rest is None or split is None or quotient is None:
                continue
            partner = join_monomials(join_monomials(rest, split[0]), quotient[0])
            if terms.get(partner) == coef * split[1] * quotient[1]:
                joined = {m: c for m, c in terms.items() if m not in (partner, mono)}
                for m, c in terms_of(x).items():
                    full = join_monomials(rest, m)
                    joined[full] = joined.get(full, 0) + coef * c
                return joined
    return None


def _part(terms: dict[Monomial, int]) -> dict[Monomial, int] | None:
    """Replaces c*(x / b)*b - c*x by -c*(x % b), or c*x - c*(x % b) by c*(x / b)*b, in a sum.

    `terms` maps products of factors to coefficients. Returns the new terms, or None if there are no
    such terms to replace.
    """
    for mono, coef in terms.items():
        for atom in mono:
            if not (isinstance(atom, Apply) and atom.op in _OTHER_PART):
                continue
            x, b = atom.args
            around, count = without_factors(mono, (atom,)), coef
            if atom.op in _REMAINDER_OF:
                divisor = single_term(b)
                if around is None or divisor is None or coef % divisor[1]:
                    continue
                around, count = without_factors(around, divisor[0]), coef // divisor[1]
            if around is None:
                continue
            taken = {join_monomials(around, m): -count * c for m, c in terms_of(x).items()}
            if mono in taken or any(terms.get(m) != c for m, c in taken.items()):
                continue
            left = {m: c for m, c in terms.items() if m not in taken and m != mono}
            other = _OTHER_PART[atom.op](x, b)
            for m, c in terms_of(other).items():
                full = join_monomials(around, m)
                left[full] = left.get(full, 0) - count * c
            return left
    return None


# ---------------------------------------------------------------- proofs
def has_index(x: Scalar) -> bool:
    """Returns whether `x` contains the index of a loop, a thread or a mesh dimension.

    Such a symbol has an upper bound; extents and numbers of the user have none.
    """
    return any(s.is_index for s in symbols(x))


def _extreme(x: Scalar, *, largest: bool) -> Scalar | None:
    """Returns the largest (or, with `largest=False`, smallest) value of `x` over all its indices.

    Indices are symbols with an upper bound. Each is replaced by its first or last position,
    whichever gives this value. The result contains no index, but may contain extents. Returns None
    if the value is unknown.
    """
    total: Scalar = Const(0, x.dtype)
    for mono, coef in terms_of(x).items():
        term: Scalar = Const(coef, x.dtype)
        moves = [has_index(atom) for atom in mono]
        # A product grows with each of its factors only if no other factor is negative.
        if len(mono) > 1 and any(moves) and any(interval(atom)[0] < 0 for atom in mono):
            return None
        for atom, moving in zip(mono, moves, strict=True):
            end = _atom_extreme(atom, largest=(coef > 0) == largest) if moving else atom
            if end is None:
                return None
            term = multiply(term, end)
        total = add_terms(total, term)
    return total


def _atom_extreme(atom: Scalar, *, largest: bool) -> Scalar | None:
    """Returns the largest (or, with `largest=False`, smallest) value of `atom` over its indices.

    `atom` is a symbol or an op other than a sum or product, and contains an index of a loop, a
    thread or a mesh dimension. Returns None if the value is unknown.
    """
    if isinstance(atom, Symbol):
        return atom.hi if largest else None if atom.lo is None else Const(atom.lo, atom.dtype)
    assert isinstance(atom, Apply)
    if atom.op in _ENDS_OF_DIVISION and is_nonnegative(atom.args[1]):
        found = _ends_of_division(atom, largest=largest)
        if found is not None:
            return found
    end = interval(atom)[largest]
    return Const(end, atom.dtype) if isinstance(end, int) else None


_ENDS_OF_DIVISION = frozenset({"/", "%", "floorDiv", "floorMod", "ceilDiv"})


def _ends_of_division(atom: Apply, *, largest: bool) -> Scalar | None:
    """Returns the largest (or, with `largest=False`, smallest) value of a quotient or remainder.

    `atom` is the quotient or remainder, and contains an index, such as that of a loop. The result
    is the extreme over all values of the index. The divisor must be positive. Returns None if the
    extreme is unknown.
    """
    x, b = atom.args
    if atom.op in ("/", "%") and not is_nonnegative(x):
        return None
    if has_index(b):
        return None
    if atom.op in _DIVISION_OF:
        return subtract(b, ONE) if largest else ZERO
    end = _extreme(x, largest=largest)
    if end is None:
        return None
    return ceil_divide(end, b) if atom.op == "ceilDiv" else divide(end, b, "floorDiv")


def is_nonnegative(x: ScalarLike) -> bool:
    """Returns whether x >= 0 certainly holds, as follows from the ranges of symbols."""
    x = as_scalar(x)
    if interval(x)[0] >= 0:
        return True
    if x.depth > _PROOF_DEPTH or not has_index(x):
        return False
    low = _extreme(x, largest=False)
    return low is not None and interval(low)[0] >= 0


def is_less(a: ScalarLike, b: ScalarLike) -> bool:
    """Returns whether a < b certainly holds, as follows from the ranges of symbols."""
    return is_nonnegative(subtract(subtract(as_scalar(b), as_scalar(a)), ONE))


def _is_smaller(a: Scalar, b: Scalar) -> bool:
    """Returns whether -b < a < b certainly holds, so that a / b is 0."""
    return is_less(a, b) and is_less(negate(a), b)


# ---------------------------------------------------------------- division
def _split_by(a: Scalar, b: Scalar) -> tuple[Scalar, Scalar] | None:
    """Returns (q, r) with a = q*b + r, where q*b has all terms of `a` that are multiples of `b`.

    Divisions are simplified by this: a / b is then q + r / b. If `b` is a sum, only equality is
    checked: the result is (1, 0) if `a` equals `b`, else None.
    """
    divisor = single_term(b)
    if divisor is None:
        return (ONE, ZERO) if a == b else None
    q: dict[Monomial, int] = {}
    r: dict[Monomial, int] = {}
    for mono, coef in terms_of(a).items():
        rest = without_factors(mono, divisor[0])
        if rest is not None and coef % divisor[1] == 0:
            q[rest] = coef // divisor[1]
        else:
            r[mono] = coef
    return from_terms(q, a.dtype), from_terms(r, a.dtype)


def _common_factor(a: Scalar, b: Scalar) -> tuple[Scalar, Scalar, Scalar] | None:
    """Returns (g, high, low) with a = g*high + low, where g > 1 divides b and 0 <= low < g.

    The division a / b is then high / (b / g), which is simpler. The factor g is a constant, an
    extent, or a product of them: for (x*n + y) / (m*n), g is n if y < n. Returns None if no such g
    is found.
    """
    divisor = single_term(b)
    if divisor is None or not is_nonnegative(b):
        return None
    for mono, coef in _factors_shared(a, divisor):
        high: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for m, c in terms_of(a).items():
            quotient = without_factors(m, mono)
            if quotient is not None and c % coef == 0:
                high[quotient] = c // coef
            else:
                rest[m] = c
        low, g = from_terms(rest, a.dtype), from_terms({mono: coef}, b.dtype)
        if high and is_nonnegative(low) and is_less(low, g):
            return g, from_terms(high, a.dtype), low
    return None


def _factors_shared(a: Scalar, divisor: tuple[Monomial, int]) -> list[tuple[Monomial, int]]:
    """Returns the factors that the divisor has in common with some term of `a`, the largest first.

    The divisor and each factor are pairs (product of symbols and ops, coefficient).
    `_common_factor` tries these factors to simplify a / divisor.
    """
    found: dict[tuple[Monomial, int], None] = {}
    for mono, coef in terms_of(a).items():
        if not mono:
            continue
        left, shared = list(divisor[0]), list[Scalar]()
        for atom in mono:
            if atom in left:
                left.remove(atom)
                shared.append(atom)
        found[(tuple(shared), math.gcd(coef, divisor[1]))] = None
    return sorted((f for f in found if f != ((), 1)), key=lambda f: (len(f[0]), f[1]), reverse=True)


def _rounds_down(x: Apply) -> bool:
    """Returns whether the quotient `x` is certainly rounded down and has a positive divisor."""
    return is_nonnegative(x.args[1]) and (x.op == "floorDiv" or is_nonnegative(x.args[0]))


@lru_cache(maxsize=100_000)
def divide(a: Scalar, b: Scalar, op: str) -> Scalar:
    """Returns the quotient a / b of symbolic integers in simplified form.

    `op` is "/" (rounding towards zero) or "floorDiv" (rounding down).

    Raises:
        DefinitionError: b is the constant 0.
    """
    dtype = int_dtype(a, b)
    av, bv = int_value(a), int_value(b)
    if bv == 0:
        raise DefinitionError(f"a scalar divides {a} by zero")
    if av is not None and bv is not None:
        down = op == "floorDiv" or (av < 0) == (bv < 0)
        return Const(av // bv if down else -(-av // bv), dtype)
    if bv == 1 or av == 0:
        return a
    parts = _split_by(a, b)
    if parts is not None and int_value(parts[1]) == 0:
        return parts[0]
    is_plain = is_nonnegative(a) and is_nonnegative(b)
    if op == "/" and not is_plain:
        return Const(0, dtype) if _is_smaller(a, b) else Apply("/", (a, b), dtype)
    if parts is not None and is_nonnegative(parts[1]):
        q, r = parts
        if is_less(r, b):
            return q
        if int_value(q) != 0:
            return add_terms(q, divide(r, b, "floorDiv"))
    if is_nonnegative(a) and is_less(a, b):
        return Const(0, dtype)
    if isinstance(a, Apply) and a.op in ("/", "floorDiv") and is_nonnegative(b) and _rounds_down(a):
        return divide(a.args[0], multiply(a.args[1], b), "floorDiv")
    common = _common_factor(a, b)
    if common is not None:
        g, high, _ = common
        return divide(high, divide(b, g, "floorDiv"), "floorDiv")
    return Apply("/" if is_plain else "floorDiv", (a, b), dtype)


@lru_cache(maxsize=100_000)
def remainder(a: Scalar, b: Scalar, op: str) -> Scalar:
    """Returns the remainder of a / b for symbolic integers, in simplified form.

    `op` is "%" (the result has the sign of `a`) or "floorMod" (the result has the sign of `b`).

    Raises:
        DefinitionError: b is the constant 0.
    """
    dtype = int_dtype(a, b)
    av, bv = int_value(a), int_value(b)
    if bv == 0:
        raise DefinitionError(f"a scalar takes the remainder of {a} by zero, which is not defined")
    if av is not None and bv is not None:
        down = op == "floorMod" or (av < 0) == (bv < 0)
        return Const(av % bv if down else -(-av % bv), dtype)
    if bv in (1, -1):
        return Const(0, dtype)
    parts = _split_by(a, b)
    if parts is not None and int_value(parts[1]) == 0:
        return Const(0, dtype)
    if isinstance(a, Apply) and (a.op == op or (op == "floorMod" and a.op == "%")):
        inner = _split_by(a.args[1], b)
        if inner is not None and int_value(inner[1]) == 0:
            return remainder(a.args[0], b, op)
    is_plain = is_nonnegative(a) and is_nonnegative(b)
    if op == "%" and not is_plain:
        return a if _is_smaller(a, b) else Apply("%", (a, b), dtype)
    if parts is not None and is_nonnegative(parts[1]):
        q, r = parts
        if is_less(r, b):
            return r
        if int_value(q) != 0:
            return remainder(r, b, "floorMod")
    if is_nonnegative(a) and is_less(a, b):
        return a
    common = _common_factor(a, b)
    if common is not None:
        g, high, low = common
        quotient = remainder(high, divide(b, g, "floorDiv"), "floorMod")
        return add_terms(multiply(quotient, g), low)
    return Apply("%" if is_plain else "floorMod", (a, b), dtype)


def _whole_multiple(a: Scalar, b: Scalar, op: str) -> Scalar:
    return multiply(divide(a, b, op), b)


@lru_cache(maxsize=100_000)
def ceil_divide(a: Scalar, b: Scalar) -> Scalar:
    """Returns a / b rounded up, for symbolic integers and in simplified form.

    Raises:
        DefinitionError: b is the constant 0.
    """
    av, bv = int_value(a), int_value(b)
    if bv == 0:
        raise DefinitionError(f"a scalar divides {a} by zero")
    if av is not None and bv is not None:
        return Const(-(-av // bv), int_dtype(a, b))
    if bv == 1:
        return a
    parts = _split_by(a, b)
    if parts is not None and int_value(parts[1]) == 0:
        return parts[0]
    return Apply("ceilDiv", (a, b), int_dtype(a, b))


_OTHER_PART: Mapping[str, Callable[[Scalar, Scalar], Scalar]] = {
    op: partial(remainder, op=rest) for op, rest in _REMAINDER_OF.items()
} | {op: partial(_whole_multiple, op=division) for op, division in _DIVISION_OF.items()}


# ---------------------------------------------------------------- extrema
def smaller(a: Scalar, b: Scalar) -> Scalar:
    """Returns the smaller of two symbolic integers: one of them if the ranges of symbols decide.

    Otherwise the result is the op `min`.
    """
    return _extremum("min", a, b)


def larger(a: Scalar, b: Scalar) -> Scalar:
    """Returns the larger of two symbolic integers: one of them if the ranges of symbols decide.

    Otherwise the result is the op `max`.
    """
    return _extremum("max", a, b)


def _extremum(op: str, a: Scalar, b: Scalar) -> Scalar:
    if a == b:
        return a
    if is_nonnegative(subtract(b, a)):
        return a if op == "min" else b
    if is_nonnegative(subtract(a, b)):
        return b if op == "min" else a
    return Apply(op, (a, b), int_dtype(a, b))


def absolute(x: Scalar) -> Scalar:
    """Returns the absolute value of a symbolic integer: `x` or -x if its range decides this."""
    if is_nonnegative(x):
        return x
    minus = negate(x)
    return minus if is_nonnegative(minus) else Apply("abs", (x,), x.dtype)


# ----------------------------------------------------------------------
# Constant bounds of integer scalars, from the ranges of their symbols alone.
#
# A division by 0 has no value, so a divisor that cannot be negative is taken to be at least 1.

End = int | float
_ANY: Interval = (-math.inf, math.inf)
_INT32: Interval = (-(2**31), 2**31 - 1)


def interval(x: Scalar) -> Interval:
    """Returns constant bounds (low, high) of `x`, both included, for all values of its symbols.

    Unknown bounds are infinite.
    """
    if x.interval is None:
        for y in postorder(x, lambda s: s.interval is not None):
            y.interval = _interval(y)
    return x.interval or _ANY


def _interval(x: Scalar) -> Interval:
    kind = category(x.dtype)
    if kind == "bool":
        return (0, 1)
    if kind != "int":
        return _ANY
    match x:
        case Const():
            return (int(x.value), int(x.value))
        case Symbol():
            low = -math.inf if x.lo is None else x.lo
            return (low, math.inf if x.hi is None else interval(x.hi)[1])
        case Poly():
            return _sum_interval(x)
        case Apply():
            op = "cast" if x.op.startswith("cast:") else x.op
            rule = _RULES.get(op)
            return rule(x.dtype, [interval(a) for a in x.args]) if rule else _ANY
        case _:
            return _ANY


def _times(a: End, b: End) -> End:
    if a == 0 or b == 0:
        return 0
    if isinstance(a, float) or isinstance(b, float):
        return math.inf if (a > 0) == (b > 0) else -math.inf
    return a * b


def _plus(a: End, b: End) -> End:
    """Returns the sum of two lower bounds, or of two upper bounds, of integers.

    If one bound is infinite, the result is this bound.
    """
    return next((x for x in (a, b) if isinstance(x, float)), a + b)


def _sum_interval(x: Poly) -> Interval:
    low: End = 0
    high: End = 0
    for mono, coef in x.terms:
        ends: Interval = (coef, coef)
        for atom in mono:
            corners = [_times(a, b) for a in ends for b in interval(atom)]
            ends = (min(corners), max(corners))
        low, high = _plus(low, ends[0]), _plus(high, ends[1])
    return (low, high)


def _largest(ends: Interval) -> End:
    return max(abs(ends[0]), abs(ends[1]))


# ---------------------------------------------------------------- one rule per op
Rule = Callable[[DataType, Sequence[Interval]], Interval]


def _quotient(divide: Callable[[int, int], int], beyond: Callable[[int], int]) -> Rule:
    """Returns the rule that computes the bounds of a quotient from the bounds of its operands.

    `divide` computes a quotient of integers. `beyond` takes a dividend, and returns its quotient by
    an infinite divisor. The kinds of division have different functions, because they round
    differently.
    """

    def corner(a: End, b: End) -> End:
        if isinstance(a, float):
            return a
        return beyond(a) if isinstance(b, float) else divide(a, b)

    def rule(_: DataType, args: Sequence[Interval]) -> Interval:
        a, (low, high) = args
        if low < 0:
            return (-_largest(a), _largest(a))
        divisors = (max(low, 1), max(high, 1))
        corners = [corner(x, d) for x in a for d in divisors]
        return (min(corners), max(corners))

    return rule


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(_: DataType, args: Sequence[Interval]) -> Interval:
    """Returns the bounds of C's remainder (`%`) from the bounds (low, high) of both operands.

    The remainder has the sign of the dividend. Its absolute value is at most that of the dividend,
    and smaller than that of the divisor.
    """
    (low, high), b = args
    limit = max(_plus(_largest(b), -1), 0)
    return (0 if low >= 0 else max(low, -limit), 0 if high <= 0 else min(high, limit))


def _floor_remainder(_: DataType, args: Sequence[Interval]) -> Interval:
    (low, high), b = args
    limit = max(_plus(_largest(b), -1), 0)
    if b[0] < 0:
        return (-limit, limit)
    return (0, min(high, limit) if low >= 0 else limit)


def _absolute(_: DataType, args: Sequence[Interval]) -> Interval:
    ((low, high),) = args
    return (max(low, -high, 0), max(-low, high))


def _cast(dtype: DataType, args: Sequence[Interval]) -> Interval:
    (ends,) = args
    if dtype is DataType.Int32 and not (_INT32[0] <= ends[0] and ends[1] <= _INT32[1]):
        return _INT32
    return ends


_RULES: dict[str, Rule] = {
    "/": _quotient(_truncated, lambda a: 0),
    "floorDiv": _quotient(lambda a, b: a // b, lambda a: -(a < 0)),
    "ceilDiv": _quotient(lambda a, b: -(-a // b), lambda a: int(a > 0)),
    "%": _remainder,
    "floorMod": _floor_remainder,
    "min": lambda _, args: (min(a[0] for a in args), min(a[1] for a in args)),
    "max": lambda _, args: (max(a[0] for a in args), max(a[1] for a in args)),
    "where": lambda _, args: (min(a[0] for a in args[1:]), max(a[1] for a in args[1:])),
    "abs": _absolute,
    "cast": _cast,
}
