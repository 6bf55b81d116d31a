"""The classes of symbolic scalars and their polynomial form.

Use `fuser.ir.scalar`: its constructors keep every scalar simplified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from fuser.ir.dtypes import DataType, category, dtype_of_python

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
        from fuser.ir.scalar_text import scalar_text

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
def terms_of(x: Scalar) -> dict[Monomial, int]:
    if isinstance(x, Const):
        return {(): int(x.value)} if x.value else {}
    return dict(x.terms) if isinstance(x, Poly) else {(x,): 1}


def join_monomials(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=_sort_key)) if a and b else a or b


def without_factors(mono: Monomial, part: Monomial) -> Monomial | None:
    """Return mono / part, or None when part does not divide mono."""
    rest = list(mono)
    for atom in part:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def from_terms(terms: Mapping[Monomial, int], dtype: DataType) -> Scalar:
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


def int_dtype(a: Scalar, b: Scalar) -> DataType:
    if a.dtype is b.dtype:
        return a.dtype
    # A literal adapts to the other side; otherwise Index absorbs the fixed-width types.
    if isinstance(a, Const):
        return b.dtype
    if isinstance(b, Const):
        return a.dtype
    return DataType.Index if DataType.Index in (a.dtype, b.dtype) else DataType.Int


def single_term(x: Scalar) -> tuple[Monomial, int] | None:
    """Return (monomial, coefficient) of a one-term integer, None for sums."""
    terms = terms_of(x)
    return next(iter(terms.items())) if len(terms) == 1 else None
