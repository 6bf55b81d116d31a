"""Symbolic scalars that simplify when they are built.

A scalar is a constant, a symbol, or an op applied to scalars. Integer sums and products are kept as
polynomials over atoms (symbols and non-polynomial ops such as `//`), so two equal index expressions
usually become the same object text. Division and modulo use ranges: an index symbol `v` with extent
`n` satisfies 0 <= v < n, and every other integer symbol (an extent) is at least 1; extents of 0 are
removed before anything here divides by them.

Constructors (`add`, `mul`, `floordiv`, ...) are the only way to build a non-leaf; nothing simplifies
later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from fuser.errors import DefinitionError
from fuser.ir.dtypes import DataType, category, common_dtype, dtype_of_python, dtype_text

Number = bool | int | float
Key = tuple[object, ...]


class Scalar:
    """Base of all scalars; immutable, compared by structure."""

    __slots__ = ("_hash", "dtype", "key")
    dtype: DataType
    key: Key

    def __init__(self, dtype: DataType, key: Key) -> None:
        self.dtype = dtype
        self.key = key
        self._hash = hash(key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Scalar) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return scalar_text(self)

    __repr__ = __str__

    # nvFuser's `Val` queries.
    def is_tensor(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        """Return whether the scalar has no constant value."""
        return not isinstance(self, Const)


class Const(Scalar):
    """A literal."""

    __slots__ = ("value",)

    def __init__(self, value: Number, dtype: DataType) -> None:
        kind = category(dtype)
        self.value: Number = (
            bool(value) if kind == "bool" else int(value) if kind == "int" else float(value)
        )
        # repr() separates 0.0 from -0.0 and lets nan equal itself.
        super().__init__(dtype, ("const", dtype.name, repr(self.value)))


class Symbol(Scalar):
    """A named value. With `extent` it is an index: 0 <= symbol < extent."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, dtype: DataType, *, extent: Scalar | None = None) -> None:
        self.name = name
        self.extent = extent
        # The extent is part of the identity: simplifications that rely on it are cached.
        super().__init__(
            dtype, ("sym", _natural(name), dtype.name, None if extent is None else extent.key)
        )


class Apply(Scalar):
    """An op on scalars that is not polynomial: `//`, `%`, ceilDiv, comparisons, float math."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Scalar, ...], dtype: DataType) -> None:
        self.op = op
        self.args = args
        super().__init__(dtype, ("apply", op, dtype.name, *(a.key for a in args)))


Monomial = tuple[Scalar, ...]


class Poly(Scalar):
    """An integer polynomial: sorted (monomial, coefficient) terms; () is the constant term."""

    __slots__ = ("terms",)

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], dtype: DataType) -> None:
        self.terms = terms
        super().__init__(
            dtype, ("poly", dtype.name, *((tuple(a.key for a in m), c) for m, c in terms))
        )


def _natural(name: str) -> tuple[object, ...]:
    """Split a name so that i2 sorts before i10."""
    return tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in re.split(r"(\d+)", name))


def _order(key: object) -> str:
    return repr(key)


@lru_cache(maxsize=100_000)
def _sort_key(atom: Scalar) -> tuple[object, ...]:
    kind = 0 if isinstance(atom, Symbol) else 1
    return (kind, _natural(atom.name) if isinstance(atom, Symbol) else (), _order(atom.key))


def const(value: Number, dtype: DataType | None = None) -> Const:
    """Return a literal; the dtype is inferred from the Python type (int: Index) when not given."""
    if dtype is None:
        dtype = DataType.Index if type(value) is int else dtype_of_python(value)
    return Const(value, dtype)


ZERO: Final = const(0)
ONE: Final = const(1)
ScalarLike = Scalar | bool | int | float


def as_scalar(value: ScalarLike) -> Scalar:
    """Return `value` itself, or the constant for a Python number."""
    return value if isinstance(value, Scalar) else const(value)


def int_value(x: ScalarLike) -> int | None:
    """Return the constant integer value, or None for anything symbolic."""
    if isinstance(x, int):
        return int(x)
    return x.value if isinstance(x, Const) and isinstance(x.value, int) else None


def is_int(x: Scalar) -> bool:
    return category(x.dtype) == "int"


# ---------------------------------------------------------------- polynomial form
def _terms(x: Scalar) -> dict[Monomial, int]:
    if isinstance(x, Const):
        return {(): int(x.value)} if x.value else {}
    return dict(x.terms) if isinstance(x, Poly) else {(x,): 1}


def _join(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=_sort_key)) if a and b else a or b


def _without(mono: Monomial, part: Monomial) -> Monomial | None:
    """Return mono / part, or None when part does not divide mono."""
    rest = list(mono)
    for atom in part:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _build(terms: Mapping[Monomial, int], dtype: DataType) -> Scalar:
    terms = {m: c for m, c in terms.items() if c}
    if not terms:
        return Const(0, dtype)
    if len(terms) == 1:
        ((mono, coef),) = terms.items()
        if not mono:
            return Const(coef, dtype)
        if coef == 1 and len(mono) == 1:
            return mono[0]
    ordered = sorted(terms.items(), key=lambda t: (-len(t[0]), [_sort_key(a) for a in t[0]]))
    return Poly(tuple(ordered), dtype)


def _int_dtype(a: Scalar, b: Scalar) -> DataType:
    if a.dtype is b.dtype:
        return a.dtype
    # A literal adapts to the other side; otherwise Index absorbs the fixed-width types.
    if isinstance(a, Const):
        return b.dtype
    if isinstance(b, Const):
        return a.dtype
    return DataType.Index if DataType.Index in (a.dtype, b.dtype) else DataType.Int


def _recombine(terms: dict[Monomial, int]) -> dict[Monomial, int]:
    """Rewrite c*(x // b)*b + c*(x % b) into c*x."""
    for mono, coef in list(terms.items()):
        for atom in mono:
            if not (isinstance(atom, Apply) and atom.op == "%") or mono not in terms:
                continue
            x, b = atom.args
            rest = _without(mono, (atom,))
            split = _single(b)
            if rest is None or split is None:
                continue
            partner_mono = _join(_join(rest, split[0]), (Apply("/", (x, b), atom.dtype),))
            if terms.get(partner_mono) == coef * split[1]:
                del terms[partner_mono], terms[mono]
                for m, c in _terms(x).items():
                    full = _join(rest, m)
                    terms[full] = terms.get(full, 0) + coef * c
                return _recombine({m: c for m, c in terms.items() if c})
    return terms


def _single(x: Scalar) -> tuple[Monomial, int] | None:
    """Return (monomial, coefficient) of a one-term integer, None for sums."""
    terms = _terms(x)
    return next(iter(terms.items())) if len(terms) == 1 else None


def add(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if not (is_int(a) and is_int(b)):
        return _float_op("+", a, b)
    terms = _terms(a)
    for mono, coef in _terms(b).items():
        terms[mono] = terms.get(mono, 0) + coef
    return _build(_recombine({m: c for m, c in terms.items() if c}), _int_dtype(a, b))


def mul(a: ScalarLike, b: ScalarLike) -> Scalar:
    a, b = as_scalar(a), as_scalar(b)
    if not (is_int(a) and is_int(b)):
        return _float_op("*", a, b)
    terms: dict[Monomial, int] = {}
    for ma, ca in _terms(a).items():
        for mb, cb in _terms(b).items():
            mono = _join(ma, mb)
            terms[mono] = terms.get(mono, 0) + ca * cb
    return _build(_recombine({m: c for m, c in terms.items() if c}), _int_dtype(a, b))


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
    for mono, coef in _terms(x).items():
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
    for mono, coef in _terms(x).items():
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
    divisor = _single(b)
    if divisor is None:
        return None
    q: dict[Monomial, int] = {}
    r: dict[Monomial, int] = {}
    for mono, coef in _terms(a).items():
        rest = _without(mono, divisor[0])
        if rest is not None and coef % divisor[1] == 0:
            q[rest] = coef // divisor[1]
        else:
            r[mono] = coef
    return _build(q, a.dtype), _build(r, a.dtype)


def _common_factor(a: Scalar, b: Scalar) -> tuple[int, Scalar, Scalar] | None:
    """Find g > 1 dividing b with a = g*high + low, 0 <= low < g; return (g, high, low)."""
    divisor = _single(b)
    if divisor is None:
        return None
    for g in sorted({abs(c) for m, c in _terms(a).items() if m}, reverse=True):
        g = math.gcd(g, divisor[1])
        if g <= 1:
            continue
        high = {m: c // g for m, c in _terms(a).items() if c % g == 0}
        low = _build({m: c for m, c in _terms(a).items() if c % g}, a.dtype)
        if high and is_nonnegative(low) and is_less(low, g):
            return g, _build(high, a.dtype), low
    return None


@lru_cache(maxsize=100_000)
def _floordiv(a: Scalar, b: Scalar) -> Scalar:
    dtype = _int_dtype(a, b)
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
        return _floordiv(high, _floordiv(b, Const(g, b.dtype)))
    return Apply("/", (a, b), dtype)


@lru_cache(maxsize=100_000)
def _mod(a: Scalar, b: Scalar) -> Scalar:
    dtype = _int_dtype(a, b)
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
        return add(mul(_mod(high, _floordiv(b, Const(g, b.dtype))), g), low)
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
        return Const(-(-av // bv), _int_dtype(a, b))
    if bv == 1:
        return a
    parts = _split_by(a, b)
    if parts is not None and int_value(parts[1]) == 0:
        return parts[0]
    return Apply("ceilDiv", (a, b), _int_dtype(a, b))


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
    if is_less(a, b):
        return a if op == "min" else b
    if is_nonnegative(sub(a, b)):
        return b if op == "min" else a
    return Apply(op, (a, b), _int_dtype(a, b))


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


def _c_div(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        q = abs(a) // abs(b)
        return q if (a < 0) == (b < 0) else -q
    return a / b if b else math.copysign(math.inf, a) if a else math.nan


def _where(cond: Number, a: Number, b: Number) -> Number:
    return a if cond else b


def _ceil_div(a: Number, b: Number) -> Number:
    return -(-int(a) // int(b))


# How a scalar op is computed on Python numbers. A one-argument entry is marked by its name in
# _UNARY; every other takes two (where: three).
COMPUTE: dict[str, Callable[..., Number]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _c_div,
    "%": lambda a, b: int(math.fmod(a, b)) if isinstance(a, int) else math.fmod(a, b),
    "ceilDiv": _ceil_div,
    "min": min,
    "max": max,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
    "!": lambda a: not a,
    "neg": lambda a: -a,
    "abs": abs,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1.0 / math.sqrt(a),
    "exp": math.exp,
    "log": math.log,
    "reciprocal": lambda a: 1.0 / a,
    "pow": pow,
    "where": _where,
}


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


# ---------------------------------------------------------------- text
_INFIX = frozenset({"+", "-", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "&&", "||"})


def literal_text(value: Number, dtype: DataType) -> str:
    """Return a literal with round-trip precision: `8`, `true`, `double(3)`, `float(0.5)`."""
    kind = category(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        return str(int(value))
    digits = repr(float(value))
    return f"{dtype_text(dtype)}({digits[:-2] if digits.endswith('.0') else digits})"


@lru_cache(maxsize=100_000)
def scalar_text(x: Scalar) -> str:
    """Return nvFuser's inline form: `i0`, `( i0 * i2 )`, `( ceilDiv(i0, 3) )`."""
    if isinstance(x, Const):
        return literal_text(x.value, x.dtype)
    if isinstance(x, Symbol):
        return x.name
    if isinstance(x, Apply):
        args = [scalar_text(a) for a in x.args]
        if x.op in _INFIX and len(args) == 2:
            return f"( {args[0]} {x.op} {args[1]} )"
        op = x.op.replace("cast:", "cast_")
        return f"( {op}({', '.join(args)}) )"
    assert isinstance(x, Poly)
    parts = [_monomial_text(m, abs(c)) for m, c in x.terms]
    out = parts[0] if x.terms[0][1] > 0 else f"( 0 - {parts[0]} )"
    for (_, coef), part in zip(x.terms[1:], parts[1:], strict=True):
        out = f"( {out} {'+' if coef > 0 else '-'} {part} )"
    return out


def _monomial_text(mono: Monomial, coef: int) -> str:
    factors = [scalar_text(a) for a in mono]
    if coef != 1 or not factors:
        factors.append(str(coef))
    out = factors[0]
    for f in factors[1:]:
        out = f"( {out} * {f} )"
    return out
