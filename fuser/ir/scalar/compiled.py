"""Compiles symbolic scalars to a Python function, so that new values of symbols need little time.

For example, the scalars i0*i1 + 3 and ceilDiv(i0, 4) become this function:

    def compute(values):
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
    """Several symbolic scalars. A call computes their values from the values of their symbols.

    The results are those of `evaluate`, but a compiled Python function computes them faster. The
    function is compiled at the first call, so that objects that are never called cost little time.
    """

    __slots__ = ("_run", "scalars")

    def __init__(self, scalars: Sequence[Scalar]) -> None:
        self.scalars = tuple(scalars)
        self._run: Callable[[Mapping[Symbol, Number]], tuple[Number, ...]] | None = None

    def __call__(self, values: Mapping[Symbol, Number]) -> tuple[Number, ...]:
        """Returns the values of the scalars, in order. Raises the same errors as `evaluate`."""
        found = self.at_once(values)
        return tuple(evaluate(x, values) for x in self.scalars) if found is None else found

    def hold(self, values: Mapping[Symbol, Number]) -> bool:
        """Returns whether all scalars, which are conditions, are true for these values of symbols.

        Errors in scalars after the first false scalar are ignored.
        """
        found = self.at_once(values)
        return all(evaluate(x, values) for x in self.scalars) if found is None else all(found)

    def at_once(self, values: Mapping[Symbol, Number]) -> tuple[Number, ...] | None:
        """Returns the values of all scalars by the compiled function, or None if this fails.

        It fails if some value cannot be computed. `evaluate` may still succeed, because it computes
        only the selected branch of a `where`.
        """
        run = self._run
        if run is None:
            run = self._run = compiled(self.scalars)
        try:
            return run(values)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None


def compiled(scalars: Sequence[Scalar]) -> Callable[[Mapping[Symbol, Number]], Any]:
    """Compiles a function that takes the values of symbols and returns the values of all `scalars`.

    Common subexpressions are computed once. Unlike `evaluate`, the function computes both branches
    of a `where`, and its errors do not name the scalar.
    """
    text = PythonText()
    names = [text.name(x) for x in scalars]
    return text.function("values", f"({''.join(f'{name}, ' for name in names)})")


class PythonText:
    """The source text of a Python function that computes scalars, while it is being built.

    `names` maps each computed scalar to its Python variable, and `lines` has the statements. Common
    subexpressions are computed once.
    """

    def __init__(self) -> None:
        self.names: dict[Scalar, str] = {}
        self.lines: list[str] = []
        self._known: dict[str, object] = {}

    def name(self, x: Scalar) -> str:
        """Returns the Python variable of a scalar, after adding the statements that compute it.

        A symbol without a variable is looked up in the parameter `values` of the function.
        """
        for y in postorder(x, self.names.__contains__):
            self.assign(y, _text(y, self.names, self.constant))
        return self.names[x]

    def assign(self, x: Scalar, text: str) -> None:
        """Adds a statement that assigns the expression `text` to a new variable for `x`."""
        self.names[x] = f"v{len(self.names)}"
        self.lines.append(f"{self.names[x]} = {text}")

    def constant(self, value: object) -> str:
        """Returns a new name by which the compiled function can refer to the object `value`."""
        name = f"k{len(self._known)}"
        self._known[name] = value
        return name

    def function(self, parameter: str, result: str) -> Callable[..., Any]:
        """Compiles the collected statements to a function of one parameter.

        `parameter` is the parameter's name, and `result` is the Python expression that the function
        returns.
        """
        body = "\n    ".join([*self.lines, f"return {result}"])
        made: dict[str, Any] = {}
        exec(f"def compute({parameter}):\n    {body}", self._known, made)
        return made["compute"]


def _text(x: Scalar, names: Mapping[Scalar, str], named: Callable[[object], str]) -> str:
    """Returns the Python expression that computes a scalar from the variables of its operands.

    `names` has these variables. `named` returns a name for any other object in the expression.
    """
    match x:
        case Const():
            # A complex number has no literal of its own: `1+2j` is a sum.
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
            raise AssertionError(
                f"internal error: {x} is not a scalar expression. Please report this definition"
            )


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
    """Returns whether the value of `x` is certainly a Python int and needs no `int(..)`."""
    return isinstance(x, Symbol) and is_int(x)
