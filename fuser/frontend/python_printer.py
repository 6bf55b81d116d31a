"""A fusion as a Python program that defines it again, with users' own calls.

    def nvfuser_fusion(fd : FusionDefinition) -> None :
        tv0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Float, ...)
        tv1 = fd.ops.exp(tv0)
        fd.add_output(tv1)

Running it gives an equal fusion (`Fusion.__eq__`), of which this text is the text again: tensors
are numbered in the order of their statements, scalars in that of theirs. What shards, schedules and
lays out tensors stands behind the outputs (`python_schedule`).

Source: the statements and their spelling are nvFuser's; floats that six digits do not give back
have more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fuser.frontend.python_rfactor import Factored, factored_reductions
from fuser.frontend.python_schedule import ScheduleText, transform_call
from fuser.frontend.python_statements import STATEMENTS, PythonCall, ScalarArgument, stride_order_of
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import Declared, Fusion, TensorOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Poly, Scalar
from fuser.ir.scalar.scalar_nodes import Monomial, postorder
from fuser.ir.tensor import TensorView
from fuser.support.arguments import checked
from fuser.support.errors import UnsupportedError, user_code
from fuser.support.record import replace

HEADER = "def nvfuser_fusion(fd : FusionDefinition) -> None :"
# What a Python number becomes; constants of other dtypes are defined.
_D = DataType
_INLINED = (_D.Bool, _D.Int, _D.Index, _D.Double, _D.ComplexDouble)
# Scalar op -> the op of a definition that gives it; several may, of which the first one counts.
SCALAR_CALLS = {
    op: name for name, (kind, _) in reversed(PUBLIC.items()) for op in POINTWISE[kind].scalar_ops
}
# Those that no op gives, but Python's operators on scalars.
OPERATORS = {"floorDiv": "//", "floorMod": "%"}


def number_text(value: float | complex) -> str:
    """Return a number as Python that gives it back: `2.50000`, `float("inf")`, `1.00000+2.00000j`.

    Six digits are nvFuser's; a number that has more is written with as many as give it back.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return f'float("{value}")'
        short = f"{value:#.6g}"
        return short if float(short) == value else repr(value)
    parts = value.real, value.imag
    # A sum would lose the sign of a zero, and has no way to write what is not finite.
    is_sum = all(math.isfinite(x) and (x or math.copysign(1, x) > 0) for x in parts)
    if is_sum:
        return f"{number_text(parts[0])}{'' if parts[1] < 0 else '+'}{number_text(parts[1])}j"
    return f"complex({number_text(parts[0])}, {number_text(parts[1])})"


@checked
def translate_fusion(fusion: Fusion) -> str:
    """Return a fusion as a Python program: the text of `repr(fd)`, which ends with a newline.

    Raises:
        UnsupportedError: a value has no statement; the message names it.
    """
    lines = _Writer(fusion).program()
    return "\n".join([HEADER, *(f"    {line}" for line in lines or ["pass"])]) + "\n"


class _Writer:
    """Writes one fusion; `names` has what has a name so far."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._lines: list[str] = []
        self._tensors: dict[TensorView, str] = {}
        self._scalars: dict[Scalar, str] = {}
        self._count = 0
        # Where each symbolic extent can be asked for.
        self._sizes: dict[Scalar, tuple[TensorView, int]] = {}
        self._declared: dict[TensorView | None, list[Declared]] = {}
        last = fusion.exprs[-1].outputs if fusion.exprs else (None,)
        for said in fusion.declared:
            # What an output says is said with it, unless ops that follow may rely on it.
            if not (said.by_output and said.after in last):
                self._declared.setdefault(said.after, []).append(said)

    # ------------------------------------------------------------ the program
    def program(self) -> list[str]:
        """Return the lines of the body."""
        if self._fusion.double_numbers:
            self._add("fd.fusion.double_numbers = True")
        for value in self._fusion.inputs:
            self._input(value)
        self._declare(None)
        factored = factored_reductions(self._fusion)
        parts = {op for found in factored.values() for op in found.ops}
        for op in self._fusion.exprs:
            if op in factored:
                self._factored(factored[op])
            elif op not in parts:
                self._op(op)
        for said in [*self._declared]:
            self._declare(said)
        self._outputs()
        at = len(self._lines)
        names = ScheduleText(self._fusion, self.text, self._add).write()
        if names:
            self._lines.insert(at, f"from fuser import {', '.join(names)}")
        return self._lines

    def _input(self, value: TensorView | Scalar) -> None:
        if isinstance(value, TensorView):
            for dim, size in enumerate(value.shape()):
                if not isinstance(size, Const):
                    self._sizes.setdefault(size, (value, dim))
            self._name(value)
            self._add(f"{self._tensors[value]} = {self._call(_definition_of(value))}")
        else:
            dtype = self.text(value.dtype)
            self._scalar_line(value, f"fd.define_scalar(None, dtype={dtype})")

    def _op(self, op: TensorOp) -> None:
        self._made(_statement_of(op), op.outputs)

    def _made(self, call: PythonCall, results: Sequence[TensorView]) -> None:
        """Write a statement, and the equalities that were said behind it."""
        text = self._call(call)
        for out in results:
            self._name(out)
        names = [*(self._tensors[o] for o in results), *["_"] * call.unused]
        self._add(f"{', '.join(names)} = {text}")
        for out in results:
            self._declare(out)

    def _factored(self, found: Factored) -> None:
        """Write a reduction as a whole, and the calls that make its parts."""
        call = _statement_of(found.ops[0])
        dims = {"dims": found.dims} if "dims" in call.kwargs else {}
        self._made(replace(call, kwargs={**call.kwargs, **dims}), [found.out])
        for step in found.steps:
            loop = [*step.loop]
            for t in step.transforms:
                transform = transform_call(t, loop, self.text)
                self._add(f"{self._tensors[step.of]}.{transform}")
            self._name(step.made)
            rfactor = f"{self._tensors[step.of]}.rfactor(axes={list(step.axes)})"
            self._add(f"{self._tensors[step.made]} = {rfactor}")
            self._declare(step.made)

    def _declare(self, after: TensorView | None) -> None:
        """Write the equalities that no op says."""
        for said in self._declared.pop(after, ()):
            a, b = self.text(said.a), self.text(said.b)
            self._add(f"fd.fusion.declare_extents({a}, {b})")

    def _outputs(self) -> None:
        """Write the outputs in their order; an update stands in front of the plain form."""
        updated: set[TensorView] = set()
        for out in self._fusion.outputs:
            name = self.text(out)
            if out not in updated:
                into = [a.into for a in self._fusion.aliases if a.out is out]
                for target in into:
                    self._add(f"fd.add_output({name}, {self.text(target)})")
                updated.update([out] * bool(into))
            if not self._fusion.is_hidden(out):
                self._add(f"fd.add_output({name})")

    # ------------------------------------------------------------ values
    def _add(self, line: str) -> None:
        self._lines.append(line)

    def _name(self, tv: TensorView) -> None:
        self._tensors[tv] = f"tv{len(self._tensors)}"

    def _call(self, call: PythonCall) -> str:
        arguments = [self.text(v) for v in call.args]
        arguments += [f"{name}={self.text(v)}" for name, v in call.kwargs.items()]
        return f"fd.{call.name}({', '.join(arguments)})"

    def text(self, value: object) -> str:
        """Return a value as Python; scalars that need statements get them first."""
        match value:
            case TensorView():
                name = self._tensors.get(value)
                if name is None:
                    raise UnsupportedError(f"no statement makes {value}: it is no input")
                return name
            case Scalar():
                return self._scalar(value)
            case ScalarArgument(Const() as constant):
                name, self._count = f"c{self._count}", self._count + 1
                self._add(f"{name} = {self._constant(constant)}")
                return name
            case ScalarArgument():
                return self._scalar(value.scalar)
            case DataType():
                return f"DataType.{value.name}"
            case float() | complex():
                return number_text(value)
            case list() | tuple():
                return f"[{', '.join(map(self.text, value))}]"  # pyright: ignore[reportUnknownArgumentType]
            case _:
                return repr(value)

    # ------------------------------------------------------------ scalars
    def _scalar(self, x: Scalar) -> str:
        """Return the name or the literal of a scalar, whose statements are written first."""
        for y in postorder(x, lambda s: s in self._scalars or _is_literal(s)):
            self._write_scalar(y)
        return self._scalars[x] if x in self._scalars else self.text(_number(x))

    def _write_scalar(self, x: Scalar) -> None:
        match x:
            case Const():
                self._scalar_line(x, self._constant(x))
            case _ if x in self._sizes:
                tv, dim = self._sizes[x]
                self._scalar_line(x, f"fd.ops.size({self.text(tv)}, dim={dim})")
            case Poly():
                self._sum(x)
            case Apply():
                self._scalar_line(x, self._applied(x))
            case _:
                raise UnsupportedError(f"no statement makes {x}: it is neither an input nor a size")

    def _constant(self, x: Const) -> str:
        return f"fd.define_scalar({self.text(x.value)}, dtype={self.text(x.dtype)})"

    def _scalar_line(self, x: Scalar, text: str) -> None:
        name = f"c{self._count}"
        self._count += 1
        self._scalars[x] = name
        self._add(f"{name} = {text}")

    def _applied(self, x: Apply) -> str:
        args = list(map(self.text, x.args))
        if x.op.startswith("cast:"):
            return f"fd.ops.cast({args[0]}, dtype={self.text(x.dtype)})"
        if x.op in OPERATORS:
            return f" {OPERATORS[x.op]} ".join(args)
        if x.op == "ceilDiv":
            self._add("from fuser.ir.scalar.constructors import ceildiv")
            return f"ceildiv({', '.join(args)})"
        name = SCALAR_CALLS.get(x.op)
        if name is None:
            raise UnsupportedError(f"no statement for the scalar {x} ({dtype_text(x.dtype)})")
        return f"fd.ops.{name}({', '.join(args)})"

    def _sum(self, x: Poly) -> None:
        """Write a polynomial as products and their sum."""
        total: Scalar | None = None
        for atoms, coefficient in x.terms:
            is_taken = total is not None and coefficient < 0
            term = self._product(atoms, -coefficient if is_taken else coefficient)
            if total is None:
                total = term
            elif is_taken:
                total = self._step("sub", sc.sub, total, term)
            else:
                total = self._step("add", sc.add, total, term)
        assert total is not None
        self._scalars.setdefault(x, self.text(total))

    def _product(self, atoms: Monomial, coefficient: int) -> Scalar:
        if not atoms:
            return Const(coefficient, DataType.Int)
        out = atoms[0]
        for atom in atoms[1:]:
            out = self._step("mul", sc.mul, out, atom)
        if coefficient == 1:
            return out
        return self._step("mul", sc.mul, out, Const(coefficient, DataType.Int))

    def _step(
        self, name: str, make: Callable[[Scalar, Scalar], Scalar], a: Scalar, b: Scalar
    ) -> Scalar:
        """Write one op of two scalars, unless its result has a name; return the result."""
        made = make(a, b)
        if made not in self._scalars:
            self._scalar_line(made, f"fd.ops.{name}({self.text(a)}, {self.text(b)})")
        return made


def _statement_of(op: TensorOp) -> PythonCall:
    statement = STATEMENTS.get(type(op))
    if statement is None:
        raise UnsupportedError(f"no statement for {op.name}{user_code(op.where)}\n{op}")
    return statement(op)


def _is_literal(x: Scalar) -> bool:
    return isinstance(x, Const) and x.dtype in _INLINED


def _number(x: Scalar) -> object:
    assert isinstance(x, Const), x
    return x.value


# ------------------------------------------------------------------ inputs
def _definition_of(tv: TensorView) -> PythonCall:
    """Return the call that defines an input; what it does not say, `ScheduleText` does."""
    axes, domain = tv.domain.logical, tv.domain
    order = stride_order_of(tv)
    flags: Sequence[bool | None] = domain.contiguity
    if domain.allocation_numbers and order is None:
        flags = [None if a.is_broadcast else True for a in axes]
    shape = [sc.int_value(a.size) for a in axes]
    arguments: dict[str, object] = {
        "shape": [-1 if s is None else s for s in shape],
        "contiguity": list(flags),
        "dtype": tv.dtype(),
        "is_cpu": tv.is_cpu_scalar,
    }
    if order is not None:
        arguments["stride_order"] = order
    return PythonCall("define_tensor", (), arguments)


__all__ = ["HEADER", "translate_fusion"]
