"""Print forms of scalars."""

from __future__ import annotations

from functools import lru_cache

from fuser.ir.dtypes import DataType, category, dtype_text
from fuser.ir.scalar.scalar_nodes import Apply, Const, Monomial, Number, Poly, Scalar, Symbol

_INFIX = frozenset("+ - * / % < <= > >= == != && || & | ^ << >>".split())


def literal_text(value: Number, dtype: DataType) -> str:
    """Return a literal with round-trip precision: `8`, `true`, `double(3)`, `float(0.5)`."""
    kind = category(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        return str(int(value))
    if kind == "complex":
        z = complex(value)
        return f"{dtype_text(dtype)}({_digits(z.real)},{_digits(z.imag)})"
    return f"{dtype_text(dtype)}({_digits(float(value))})"


def _digits(value: float) -> str:
    return repr(value).removesuffix(".0")


@lru_cache(maxsize=10_000)
def scalar_text(x: Scalar) -> str:
    """Return nvFuser's inline form: `i0`, `( i0 * i2 )`, `( ceilDiv(i0, 3) )`."""
    out: list[str] = []
    stack: list[Scalar | str] = [x]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            out.append(top)
        else:
            stack += reversed(_pieces(top))
    return "".join(out)


def _pieces(x: Scalar) -> list[Scalar | str]:
    """Return the text of `x` with its children in place of theirs."""
    match x:
        case Const():
            return [literal_text(x.value, x.dtype)]
        case Symbol():
            return [x.name]
        case Apply(op=op, args=(a, b)) if op in _INFIX:
            return ["( ", a, f" {op} ", b, " )"]
        case Apply():
            args: list[Scalar | str] = [p for a in x.args for p in (", ", a)]
            return ["( ", x.op.replace("cast:", "cast_"), "(", *args[1:], ") )"]
        case Poly():
            return _sum_pieces(x)
        case _:
            raise AssertionError(f"no text for a {type(x).__name__}")


def _sum_pieces(x: Poly) -> list[Scalar | str]:
    parts = [_product_pieces(m, abs(c)) for m, c in x.terms]
    out = parts[0] if x.terms[0][1] > 0 else ["( 0 - ", *parts[0], " )"]
    for (_, coef), part in zip(x.terms[1:], parts[1:], strict=True):
        out = ["( ", *out, " + " if coef > 0 else " - ", *part, " )"]
    return out


def _product_pieces(mono: Monomial, coef: int) -> list[Scalar | str]:
    factors: list[Scalar | str] = list(mono)
    if coef != 1 or not factors:
        factors.append(str(coef))
    out = factors[:1]
    for f in factors[1:]:
        out = ["( ", *out, " * ", f, " )"]
    return out
