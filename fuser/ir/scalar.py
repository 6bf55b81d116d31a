"""Symbolic scalars that simplify when they are built.

A scalar is a constant, a symbol, or an op applied to scalars. Integer sums and products are kept as
polynomials over atoms (symbols and non-polynomial ops such as `//`), so two equal index expressions
usually become the same object text. Division and modulo use ranges: an index symbol `v` with extent
`n` satisfies 0 <= v < n, and every other integer symbol (an extent) is at least 1; extents of 0 are
removed before anything here divides by them.

Constructors (`add`, `mul`, `floordiv`, ...) are the only way to build a non-leaf; nothing
simplifies later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from fuser.errors import DefinitionError
from fuser.ir.dtypes import DataType, common_dtype, dtype_text
from fuser.ir.scalar_compute import COMPUTE
from fuser.ir.scalar_nodes import (
    ONE,
    ZERO,
    Apply,
    Const,
    Monomial,
    Number,
    Poly,
    Scalar,
    ScalarLike,
    Symbol,
    as_scalar,
    const,
    from_terms,
    int_dtype,
    int_value,
    is_int,
    join_monomials,
    single_term,
    terms_of,
    without_factors,
)
from fuser.ir.scalar_text import literal_text, scalar_text

__all__ = [
    "Apply",
    "COMPUTE",
    "Const",
    "Number",
    "ONE",
    "Poly",
    "Scalar",
    "ScalarLike",
    "Symbol",
    "ZERO",
    "add",
    "all_of",
    "apply",
    "as_scalar",
    "cast",
    "ceildiv",
    "children",
    "const",
    "eq",
    "evaluate",
    "floordiv",
    "has_index",
    "int_value",
    "is_int",
    "is_less",
    "is_nonnegative",
    "le",
    "literal_text",
    "logical_and",
    "lt",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "product",
    "rebuild",
    "scalar_text",
    "sub",
    "substitute",
    "symbols",
    "where",
]


def _recombine(terms: dict[Monomial, int]) -> dict[Monomial, int]:
    """Rewrite c*(x // b)*b + c*(x % b) into c*x."""
    for mono, coef in list(terms.items()):
        for atom in mono:
            if not (isinstance(atom, Apply) and atom.op == "%") or mono not in terms:
                continue
            x, b = atom.args
            rest = without_factors(mono, (atom,))
            # x // b may have another spelling: (k // m) // n is k // (m*n).
            split, quotient = single_term(b), single_term(_floordiv(x, b))
            if rest is None or split is None or quotient is None:
                continue
            partner_mono = join_monomials(join_monomials(rest, split[0]), quotient[0])
            if terms.get(partner_mono) == coef * split[1] * quotient[1]:
                del terms[partner_mono], terms[mono]
                for m, c in terms_of(x).items():
                    full = join_monomials(rest, m)
                    terms[full] = terms.get(full, 0) + coef * c
                return _recombine({m: c for m, c in terms.items() if c})
    return terms


def add(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if not (is_int(a) and is_int(b)):
        return _float_op("+", a, b)
    terms = terms_of(a)
    for mono, coef in terms_of(b).items():
        terms[mono] = terms.get(mono, 0) + coef
    return from_terms(_recombine({m: c for m, c in terms.items() if c}), int_dtype(a, b))


def mul(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if not (is_int(a) and is_int(b)):
        return _float_op("*", a, b)
    terms: dict[Monomial, int] = {}
    for ma, ca in terms_of(a).items():
        for mb, cb in terms_of(b).items():
            mono = join_monomials(ma, mb)
            terms[mono] = terms.get(mono, 0) + ca * cb
    return from_terms(_recombine({m: c for m, c in terms.items() if c}), int_dtype(a, b))


def sub(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if not (is_int(a) and is_int(b)):
        return _float_op("-", a, b)
    return add(a, mul(b, Const(-1, b.dtype)))


def product(factors: Iterable[ScalarLike]) -> Scalar:
    """Return the product; 1 for none."""
    out: Scalar = ONE
    for f in factors:
        out = mul(out, f)
    return out


# ---------------------------------------------------------------- ranges
def _extreme(x: Scalar, *, largest: bool) -> Scalar | None:
    """Replace every index in `x` by the end of its range that makes `x` largest or smallest.

    The result holds no index symbols; None when an atom's range is unknown.
    """
    total: Scalar = Const(0, x.dtype)
    for mono, coef in terms_of(x).items():
        factors = [_atom_extreme(atom, largest=(coef > 0) == largest) for atom in mono]
        term: Scalar = Const(coef, x.dtype)
        for f in factors:
            if f is None:
                return None
            term = mul(term, f)
        total = add(total, term)
    return total


def _atom_extreme(atom: Scalar, *, largest: bool) -> Scalar | None:
    """Return an end of a non-negative atom's range; None when it may be negative or is unknown."""
    if isinstance(atom, Symbol):
        if atom.extent is None:
            return atom
        return sub(atom.extent, 1) if largest else ZERO
    assert isinstance(atom, Apply)
    if atom.op == "%":
        if not is_nonnegative(atom.args[0]):
            return None
        return sub(atom.args[1], 1) if largest else ZERO
    if atom.op in ("/", "ceilDiv"):
        if not has_index(atom):
            return atom
        end = _extreme(atom.args[0], largest=largest)
        if end is None or not is_nonnegative(atom.args[0]):
            return None
        return floordiv(end, atom.args[1]) if atom.op == "/" else ceildiv(end, atom.args[1])
    if atom.op in ("min", "max") and not has_index(atom):
        return atom
    return None


def _constant_floor(x: Scalar) -> int | None:
    """Return a constant lower bound of an index-free integer whose symbols are >= 1."""
    total = 0
    for mono, coef in terms_of(x).items():
        if mono and coef < 0:
            return None
        low = coef
        for atom in mono:
            low *= _atom_floor(atom)
        total += low
    return total


def _atom_floor(atom: Scalar) -> int:
    if isinstance(atom, Symbol):
        return 1 if atom.extent is None else 0
    return 1 if isinstance(atom, Apply) and atom.op == "ceilDiv" else 0


def is_nonnegative(x: ScalarLike) -> bool:
    """Return whether x >= 0 is provable."""
    low = _extreme(as_scalar(x), largest=False)
    floor = None if low is None else _constant_floor(low)
    return floor is not None and floor >= 0


def is_less(a: ScalarLike, b: ScalarLike) -> bool:
    """Return whether a < b is provable."""
    return is_nonnegative(sub(sub(b, a), 1))


# ---------------------------------------------------------------- division
def _split_by(a: Scalar, b: Scalar) -> tuple[Scalar, Scalar] | None:
    """Write a as q*b + r with every term of q*b a multiple of b; None when b is a sum."""
    divisor = single_term(b)
    if divisor is None:
        return None
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
    """Find g > 1 dividing b with a = g*high + low, 0 <= low < g; return (g, high, low).

    g is a constant, an extent, or a product of such: (x*n + y) over (m*n) has g = n when y < n.
    """
    divisor = single_term(b)
    if divisor is None:
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
    """Return the non-trivial common factors of the divisor and of single terms of `a`, larger
    first."""
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


@lru_cache(maxsize=100_000)
def _floordiv(a: Scalar, b: Scalar) -> Scalar:
    dtype = int_dtype(a, b)
    av, bv = int_value(a), int_value(b)
    if bv == 0:
        raise DefinitionError(f"division of {a} by zero")
    if av is not None and bv is not None:
        return Const(av // bv, dtype)
    if bv == 1 or av == 0:
        return a
    parts = _split_by(a, b)
    if parts is not None:
        q, r = parts
        if int_value(r) == 0:
            return q
        if is_nonnegative(r):
            if is_less(r, b):
                return q
            if int_value(q) != 0:
                return add(q, _floordiv(r, b))
    elif a == b:
        return Const(1, dtype)
    if is_nonnegative(a) and is_less(a, b):
        return Const(0, dtype)
    if isinstance(a, Apply) and a.op == "/" and is_nonnegative(a.args[0]):
        return _floordiv(a.args[0], mul(a.args[1], b))
    common = _common_factor(a, b)
    if common is not None:
        g, high, _ = common
        return _floordiv(high, _floordiv(b, g))
    return Apply("/", (a, b), dtype)


@lru_cache(maxsize=100_000)
def _mod(a: Scalar, b: Scalar) -> Scalar:
    dtype = int_dtype(a, b)
    av, bv = int_value(a), int_value(b)
    if bv == 0:
        raise DefinitionError(f"{a} modulo zero")
    if av is not None and bv is not None:
        return Const(av % bv, dtype)
    if bv == 1 or a == b:
        return Const(0, dtype)
    parts = _split_by(a, b)
    if parts is not None:
        q, r = parts
        if int_value(r) == 0:
            return Const(0, dtype)
        if is_nonnegative(r):
            if is_less(r, b):
                return r
            if int_value(q) != 0:
                return _mod(r, b)
    if is_nonnegative(a) and is_less(a, b):
        return a
    if isinstance(a, Apply) and a.op == "%":
        inner = _split_by(a.args[1], b)
        if inner is not None and int_value(inner[1]) == 0:
            return _mod(a.args[0], b)
    common = _common_factor(a, b)
    if common is not None:
        g, high, low = common
        return add(mul(_mod(high, _floordiv(b, g)), g), low)
    return Apply("%", (a, b), dtype)


def floordiv(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Integer division; operands are non-negative wherever the value is used."""
    return _floordiv(as_scalar(a), as_scalar(b))


def mod(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Integer remainder; operands are non-negative wherever the value is used."""
    return _mod(as_scalar(a), as_scalar(b))


def ceildiv(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    av, bv = int_value(a), int_value(b)
    if av is not None and bv is not None:
        return Const(-(-av // bv), int_dtype(a, b))
    if bv == 1:
        return a
    parts = _split_by(a, b)
    if parts is not None and int_value(parts[1]) == 0:
        return parts[0]
    return Apply("ceilDiv", (a, b), int_dtype(a, b))


# ---------------------------------------------------------------- comparisons, logic, floats
def minimum(a: ScalarLike, b: ScalarLike) -> Scalar:
    return _extremum("min", as_scalar(a), as_scalar(b))


def maximum(a: ScalarLike, b: ScalarLike) -> Scalar:
    return _extremum("max", as_scalar(a), as_scalar(b))


def _extremum(op: str, a: Scalar, b: Scalar) -> Scalar:
    if not (is_int(a) and is_int(b)):
        return _float_op(op, a, b)
    if a == b:
        return a
    if is_less(a, b) or is_nonnegative(sub(b, a)):
        return a if op == "min" else b
    if is_nonnegative(sub(a, b)):
        return b if op == "min" else a
    return Apply(op, (a, b), int_dtype(a, b))


def lt(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if is_int(a) and is_int(b):
        if is_less(a, b):
            return const(True)
        if is_nonnegative(sub(a, b)):
            return const(False)
    return apply("<", a, b)


def le(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    return lt(a, add(b, 1)) if is_int(a) and is_int(b) else apply("<=", a, b)


def eq(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    return const(True) if a == b and is_int(a) else apply("==", a, b)


def logical_and(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value else x
    return a if a == b else apply("&&", a, b)


def all_of(conditions: Iterable[ScalarLike]) -> Scalar:
    """Return the conjunction; true for none."""
    out: Scalar = const(True)
    for c in conditions:
        out = logical_and(out, c)
    return out


def where(cond: ScalarLike, a: ScalarLike, b: ScalarLike) -> Scalar:
    cond, a, b = as_scalar(cond), as_scalar(a), as_scalar(b)
    if isinstance(cond, Const):
        return a if cond.value else b
    return a if a == b else Apply("where", (cond, a, b), _result_dtype((a, b), "where"))


def cast(x: ScalarLike, dtype: DataType) -> Scalar:
    x = as_scalar(x)
    if x.dtype is dtype:
        return x
    if isinstance(x, Const):
        return Const(x.value, dtype)
    return Apply(f"cast:{dtype_text(dtype)}", (x,), dtype)


_BOOL_OPS = frozenset({"<", "<=", ">", ">=", "==", "!=", "&&", "||", "!"})


def _result_dtype(args: Sequence[Scalar], op: str) -> DataType:
    if op in _BOOL_OPS:
        return DataType.Bool
    return common_dtype([(a.dtype, "scalar") for a in args], "default")


def apply(op: str, *args: ScalarLike) -> Scalar:
    """Apply a named op of `COMPUTE`, folding constants. Integer + - * / % go to their own form."""
    scalars = tuple(as_scalar(a) for a in args)
    if len(scalars) == 2 and all(is_int(s) for s in scalars) and op in _INT_FORMS:
        return _INT_FORMS[op](*scalars)
    dtype = _result_dtype(scalars, op)
    values = [s.value for s in scalars if isinstance(s, Const)]
    if len(values) == len(scalars):
        try:
            return Const(COMPUTE[op](*values), dtype)
        except (ValueError, ZeroDivisionError, OverflowError):
            pass  # outside the op's domain: keep it symbolic, the runtime decides
    return Apply(op, scalars, dtype)


def _float_op(op: str, a: Scalar, b: Scalar) -> Scalar:
    return apply(op, a, b)


_INT_FORMS: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": floordiv,
    "%": mod,
    "ceilDiv": ceildiv,
    "min": minimum,
    "max": maximum,
}


# ---------------------------------------------------------------- traversal
@lru_cache(maxsize=100_000)
def symbols(x: Scalar) -> tuple[Symbol, ...]:
    """Return the symbols of `x` in order of first appearance, without repeats."""
    if isinstance(x, Symbol):
        return (x,)
    found: dict[Symbol, None] = {}
    for child in children(x):
        found.update(dict.fromkeys(symbols(child)))
    return tuple(found)


def children(x: Scalar) -> tuple[Scalar, ...]:
    if isinstance(x, Apply):
        return x.args
    return tuple(a for m, _ in x.terms for a in m) if isinstance(x, Poly) else ()


def has_index(x: Scalar) -> bool:
    """Return whether any symbol of `x` is an index (has an extent)."""
    return any(s.extent is not None for s in symbols(x))


def substitute(x: Scalar, mapping: Mapping[Scalar, Scalar]) -> Scalar:
    """Rebuild `x` with atoms replaced, simplifying again."""
    if x in mapping:
        return mapping[x]
    if isinstance(x, Poly):
        total: Scalar = Const(0, x.dtype)
        for mono, coef in x.terms:
            total = add(total, mul(coef, product(substitute(a, mapping) for a in mono)))
        return total
    if isinstance(x, Apply):
        args = tuple(substitute(a, mapping) for a in x.args)
        return x if args == x.args else rebuild(x, args)
    return x


def rebuild(x: Apply, args: Sequence[Scalar]) -> Scalar:
    """Apply the op of `x` to other arguments through its simplifying constructor."""
    if x.op.startswith("cast:"):
        return cast(args[0], x.dtype)
    special = {"<": lt, "<=": le, "==": eq, "&&": logical_and}
    if x.op in special:
        return special[x.op](args[0], args[1])
    if x.op == "where":
        return where(args[0], args[1], args[2])
    return apply(x.op, *args)


def evaluate(x: Scalar, values: Mapping[Symbol, Number]) -> Number:
    """Return the value of `x`; raises KeyError for a symbol that `values` does not bind."""
    if isinstance(x, Const):
        return x.value
    if isinstance(x, Symbol):
        return values[x]
    if isinstance(x, Poly):
        return sum(c * math.prod(int(evaluate(a, values)) for a in m) for m, c in x.terms)
    assert isinstance(x, Apply)
    args = [evaluate(a, values) for a in x.args]
    if x.op.startswith("cast:"):
        return Const(args[0], x.dtype).value
    return COMPUTE[x.op](*args)
