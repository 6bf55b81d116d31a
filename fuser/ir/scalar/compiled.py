"""Scalars as Python: what each new size of a program has to compute is compiled once.

i0*i1 + 3, ceilDiv(i0, 4)   ->   def compute(values):
                                     a, b = values[i0], values[i1]
                                     return (a * b + 3, -(-a // 4))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuser.ir.dtypes import DataType, category
from fuser.ir.scalar.constructors import evaluate
from fuser.ir.scalar.evaluate import BOOL_OPS, COMPUTE
from fuser.ir.scalar.scalar_nodes import (
    Apply,
    Const,
    Number,
    Poly,
    Scalar,
    Symbol,
    converted,
    is_int,
    postorder,
)

_INFIX = frozenset({"+", "-", "*", "<", "<=", ">", ">=", "==", "!="})
_CASTS = {"int": "int", "bool": "bool", "float": "float", "complex": "complex"}


class Computed:
    """The values of some scalars, for any values of their symbols: what `evaluate` gives for each.

    The text is compiled at the first call: many programs see one size.
    """

    __slots__ = ("_run", "scalars")

    def __init__(self, scalars: Sequence[Scalar]) -> None:
        self.scalars = tuple(scalars)
        self._run: Callable[[Mapping[Symbol, Number]], tuple[Number, ...]] | None = None

    def __call__(self, values: Mapping[Symbol, Number]) -> tuple[Number, ...]:
        """Returns the values in order; raises what `evaluate` raises."""
        found = self.at_once(values)
        return tuple(evaluate(x, values) for x in self.scalars) if found is None else found

    def hold(self, values: Mapping[Symbol, Number]) -> bool:
        """Whether all are true; none is looked at behind one that is not."""
        found = self.at_once(values)
        return all(evaluate(x, values) for x in self.scalars) if found is None else all(found)

    def at_once(self, values: Mapping[Symbol, Number]) -> tuple[Number, ...] | None:
        """Returns all values; None where one by one may do, or has an error to tell."""
        run = self._run
        if run is None:
            run = self._run = compiled(self.scalars)
        try:
            return run(values)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None


def compiled(scalars: Sequence[Scalar]) -> Callable[[Mapping[Symbol, Number]], Any]:
    """Returns a function of the symbols' values that computes all scalars, each part once.

    It computes both branches of a choice, and its errors say nothing of the scalars.
    """
    text = PythonText()
    names = [text.name(x) for x in scalars]
    return text.function("values", f"({''.join(f'{name}, ' for name in names)})")


class PythonText:
    """The lines of a function that computes scalars, each part once.

    `names` has the variable of each scalar that is computed; `lines` are the statements.
    """

    def __init__(self) -> None:
        self.names: dict[Scalar, str] = {}
        self.lines: list[str] = []
        self._known: dict[str, object] = {}

    def name(self, x: Scalar) -> str:
        """Returns the variable that has the value of a scalar from here on. Symbols without a name
        are looked up in `values`."""
        for y in postorder(x, self.names.__contains__):
            self.assign(y, _text(y, self.names, self.constant))
        return self.names[x]

    def assign(self, x: Scalar, text: str) -> None:
        """Lets a new variable have the value of a scalar."""
        self.names[x] = f"v{len(self.names)}"
        self.lines.append(f"{self.names[x]} = {text}")

    def constant(self, value: object) -> str:
        """Returns a name for an object."""
        name = f"k{len(self._known)}"
        self._known[name] = value
        return name

    def function(self, parameter: str, result: str) -> Callable[..., Any]:
        """Returns the function of one parameter."""
        body = "\n    ".join([*self.lines, f"return {result}"])
        made: dict[str, Any] = {}
        exec(f"def compute({parameter}):\n    {body}", self._known, made)
        return made["compute"]


def _text(x: Scalar, names: Mapping[Scalar, str], named: Callable[[object], str]) -> str:
    """Returns the Python expression of a scalar over the names of its parts; `named` names what
    stands in it beside them."""
    match x:
        case Const():
            # A complex number is no literal: what stands beside it would become part of it.
            kind = category(x.dtype)
            is_plain = kind in ("int", "bool") or (kind == "float" and math.isfinite(x.value))
            return repr(x.value) if is_plain else named(x.value)
        case Symbol():
            return f"values[{named(x)}]"
        case Poly():
            return _sum(x, names)
        case Apply(dtype=DataType.Bool) if x.op in COMPUTE and x.op not in BOOL_OPS | {"where"}:
            return f"bool({_call(x, names, named)})"
        case Apply(op="where"):
            cond, a, b = (names[y] for y in x.args)
            return f"{a} if {cond} else {b}"
        case Apply() if x.op not in COMPUTE:
            return _cast(x, names, named)
        case Apply(op="floorDiv"):
            return "{} // {}".format(*(names[y] for y in x.args))
        case Apply(op="floorMod"):
            return "{} % {}".format(*(names[y] for y in x.args))
        case Apply(op="ceilDiv"):
            return "-(-int({}) // int({}))".format(*(names[y] for y in x.args))
        case Apply() if x.op in _INFIX:
            return f" {x.op} ".join(names[y] for y in x.args)
        case Apply():
            return _call(x, names, named)
        case _:
            raise AssertionError(f"{x} is no scalar")


def _cast(x: Apply, names: Mapping[Scalar, str], named: Callable[[object], str]) -> str:
    kind, value = category(x.dtype), names[x.args[0]]
    if category(x.args[0].dtype) == "complex":
        return f"{named(converted)}({value}, {kind!r})"
    return f"{_CASTS[kind]}({value})"


def _call(x: Apply, names: Mapping[Scalar, str], named: Callable[[object], str]) -> str:
    return f"{named(COMPUTE[x.op])}({', '.join(names[y] for y in x.args)})"


def _sum(x: Poly, names: Mapping[Scalar, str]) -> str:
    terms: list[str] = []
    for monomial, coefficient in x.terms:
        atoms = [names[a] if _is_count(a) else f"int({names[a]})" for a in monomial]
        factors = atoms if coefficient == 1 and atoms else [f"({coefficient})", *atoms]
        terms.append(" * ".join(factors))
    return " + ".join(terms)


def _is_count(x: Scalar) -> bool:
    """Whether the value is an int as it is."""
    return isinstance(x, Symbol) and is_int(x)
