"""Print forms of scalars."""

from __future__ import annotations

from functools import lru_cache

from fuser.ir.dtypes import DataType, category, dtype_text
from fuser.ir.scalar_nodes import Apply, Const, Monomial, Number, Poly, Scalar, Symbol

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
