"""Hoisting: computes index arithmetic once, in the outermost loop in which its value does not
change.

- A sum is computed in several steps. The terms that do not change in an inner loop are added
  outside of it: each such partial sum becomes a `Let` statement (the definition of a constant) at
  the start of the body of the innermost loop in which it changes.
- Every division and modulo becomes a `Let` statement, too.
- The host computes expressions of sizes alone, such as quotients, and passes them as kernel
  parameters. A kernel never computes a division that is known before the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fuser.ir.dtypes import HALF_LIKE, DataType, is_complex, part_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Poly, Scalar, Symbol
from fuser.lower.kernel_ir import (
    Body,
    Compute,
    Expr,
    For,
    If,
    Let,
    LetValue,
    ScalarValue,
    Statement,
    Unswitch,
    map_statement,
)


@dataclass
class _Frame:
    """A loop body that is being rewritten, with the values that are computed at its start.

    - `lets`: the statements that define these values.
    - `known`: maps each of these values to the symbol that names it.
    """

    lets: list[Statement] = field(default_factory=list[Statement])
    known: dict[Scalar, Symbol] = field(default_factory=dict[Scalar, Symbol])


@dataclass
class Parameters:
    """The scalars that the host computes and passes to the kernel, in the order of first use.

    `by_value` maps (scalar, dtype in the kernel) to the symbol of the parameter. `composite` counts
    the parameters whose scalars are expressions; these get new names (`s0`, `s1`, ..).
    """

    by_value: dict[tuple[Scalar, DataType], Symbol] = field(
        default_factory=dict[tuple[Scalar, DataType], Symbol]
    )
    composite: int = 0

    def symbol(self, value: Scalar, dtype: DataType) -> Symbol:
        """Returns the kernel parameter that holds `value` as `dtype`, and creates it at the first
        request.
        """
        key = (value, dtype)
        found = self.by_value.get(key)
        if found is None:
            if isinstance(value, Symbol) and value.dtype is dtype:
                name = value.name
            else:
                name = f"s{self.composite}"
                self.composite += 1
            found = self.by_value[key] = sc.name_for(name, value, dtype)
        return found


class Hoister:
    """Moves the index arithmetic of a kernel's statements to the outermost loops in which it does
    not change, in place.

    `parameters` collects the scalars that the host must compute.
    """

    def __init__(self) -> None:
        self.parameters = Parameters()
        self._frames: list[_Frame] = []
        self._levels: dict[Symbol, int] = {}
        self._names = 0

    def run(self, body: Body) -> None:
        """Rewrites the body of a whole kernel, in place: index arithmetic moves to the outermost
        loops in which its value does not change.
        """
        self._frame(body)

    # ------------------------------------------------------------ statements
    def _frame(self, body: Body) -> None:
        """Rewrites the statements of a loop body, and inserts at its start the definitions of
        values that inner statements need.
        """
        frame = _Frame()
        self._frames.append(frame)
        self._inside(body)
        body.statements[:0] = frame.lets
        self._frames.pop()

    def _inside(self, body: Body) -> None:
        made: list[Statement] = []
        for k, statement in enumerate(body.statements):
            made.append(self._statement(statement))
            if isinstance(statement, LetValue):
                # Values that depend on it can be computed only after it: the rest is a frame by
                # itself.
                rest = Body(body.statements[k + 1 :])
                self._levels[statement.symbol] = len(self._frames)
                self._frame(rest)
                made += rest.statements
                break
        body.statements = made

    def _statement(self, statement: Statement) -> Statement:
        match statement:
            case For():
                statement.extent = self.rewrite(statement.extent)
                self._levels[statement.symbol] = len(self._frames)
                self._frame(statement.body)
                return statement
            case If():
                statement.cond = self.rewrite(statement.cond)
                self._inside(statement.then)
                if statement.otherwise is not None:
                    self._inside(statement.otherwise)
                return statement
            case Unswitch():
                raise AssertionError(
                    "internal error: the lowering pass hoist has found an Unswitch statement, "
                    "which "
                    "the pass expand_unswitch must replace before. Please report this definition"
                )
            case _:
                return map_statement(statement, self.rewrite, self._value)

    def _value(self, value: ScalarValue) -> Expr:
        scalar = value.scalar
        if isinstance(scalar, Const):
            return value
        if sc.has_index(scalar):
            return ScalarValue(self.rewrite(scalar), value.dtype)
        if is_complex(value.dtype):
            return self._complex_value(scalar, value.dtype)
        # The host converts, so that a Double input of a Float op needs no double arithmetic in the
        # kernel.
        dtype = DataType.Float if value.dtype in HALF_LIKE else value.dtype
        # A value has 64 bits. An index has the index type of the kernel, which may have 32.
        dtype = DataType.Int if dtype is DataType.Index else dtype
        return ScalarValue(self.parameters.symbol(scalar, dtype), value.dtype)

    def _complex_value(self, scalar: Scalar, dtype: DataType) -> Expr:
        """Returns the expression of a complex scalar, which the host passes as two parameters: real
        and imaginary part.

        One parameter has at most 8 bytes, and a complex number may have 16.
        """
        part = part_of(dtype)
        z = sc.cast(scalar, dtype)
        parts = tuple(
            ScalarValue(self.parameters.symbol(sc.apply(which, z), part), part)
            for which in ("real", "imag")
        )
        return Compute("fm_complex({0}, {1})", parts, dtype)

    # ------------------------------------------------------------ scalars
    def rewrite(self, x: Scalar) -> Scalar:
        """Returns an expression with the value of `x` for use in the current body, in which parts
        of `x` are replaced by names.

        The names are those of `Let` statements in outer loops, to which index arithmetic is moved,
        and of kernel parameters, which replace expressions of sizes.
        """
        if isinstance(x, Const):
            return x
        if isinstance(x, Symbol):
            return self._symbol(x)
        if isinstance(x, Poly):
            return self._sum(x)
        assert isinstance(x, Apply)
        if not sc.has_index(x):
            return self.parameters.symbol(x, x.dtype)
        args = tuple(self.rewrite(a) for a in x.args)
        rebuilt = Apply(x.op, args, x.dtype)
        if x.dtype is DataType.Bool:
            return rebuilt
        return self._let(rebuilt, max(self._level(a) for a in args))

    def _symbol(self, x: Symbol) -> Symbol:
        if x.is_index or x in self._levels:
            return x
        return self.parameters.symbol(x, x.dtype)

    def _level(self, x: Scalar) -> int:
        return max((self._levels.get(s, 0) for s in sc.symbols(x)), default=0)

    def _sum(self, x: Poly) -> Scalar:
        groups: dict[int, Scalar] = {}
        for mono, coef in x.terms:
            atoms = [self.rewrite(a) for a in mono]
            level = max((self._level(a) for a in atoms), default=0)
            term = sc.mul(coef, sc.product(atoms))
            groups[level] = sc.add(groups.get(level, sc.ZERO), term)
        total: Scalar = sc.ZERO
        here = len(self._frames) - 1
        for level in sorted(groups):
            total = sc.add(total, groups[level])
            if level < here:
                total = self._let(total, level)
        return total

    def _let(self, value: Scalar, level: int) -> Scalar:
        if isinstance(value, Const | Symbol):
            return value
        frame = self._frames[level]
        found = frame.known.get(value)
        if found is None:
            found = frame.known[value] = sc.name_for(f"h{self._names}", value)
            self._names += 1
            self._levels[found] = level
            frame.lets.append(Let(found, value))
        return found
