"""Sizes that a definition computes from floats: further inputs of the program, one Int for each.

    T1[iS2{cast_nvfuser_index_t(f2)}, iS3{2}] = reshape(T0)     inputs T0, f2
    T1[iS2{i4}, iS3{2}] = reshape(T0)                           inputs T0, f2, i4

The host computes each of them once per call, so that kernels, recorded plans and ranks all see the
same integer. What an op takes as an extent is cast to Index, and is refused if it is no integer. A
cast to Int, which only users write, truncates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from fuser.ir.binding import Argument, Values, shape_scalars, structural_scalars
from fuser.ir.dtypes import DataType, category, misfit
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.scalar.constructors import (
    Apply,
    Const,
    Scalar,
    Symbol,
    children,
    evaluate,
    is_int,
    symbols,
)
from fuser.ir.scalar.scalar_nodes import postorder
from fuser.passes.concretize import replace_scalars
from fuser.support.errors import InputError, user_code
from fuser.support.inputs import check_count, device_of, flatten
from hostir.runtime.inputs import InputBinder, check_scalar


class FloatSizes:
    """The sizes of a definition that come from floats. `fusion` is the definition with an input for
    each of them, the last."""

    def __init__(self, defined: Fusion, sizes: Iterable[Scalar]) -> None:
        self._declared = list(defined.inputs)
        self._scalars = [(i, v) for i, v in enumerate(self._declared) if isinstance(v, Symbol)]
        given = {v for _, v in self._scalars}
        # Those of scalar inputs alone come first, and simple ones before what is computed of them:
        # so an error tells of the number that is no size.
        self._sizes = sorted(sizes, key=lambda x: (not given.issuperset(symbols(x)), x.depth))
        self._of_scalars = sum(given.issuperset(symbols(x)) for x in self._sizes)
        self._users = {x: _user(defined, x) for x in self._sizes}
        results = [v for op in defined.used_exprs() for v in op.outputs]
        self._extents = frozenset(a.size for v in results for a in v.domain.logical)
        self._binder = InputBinder(defined)
        self.fusion, _ = defined.copy()
        numbers = {x: self.fusion.new_symbol(DataType.Int) for x in self._sizes}
        replace_scalars(self.fusion, dict(numbers))
        self.fusion.inputs += list(numbers.values())
        # How errors call these inputs.
        self.names = tuple(f"the size {x}{_line(op)}," for x, op in self._users.items())

    @staticmethod
    def of(fusion: Fusion) -> FloatSizes | None:
        """Return the sizes that come from floats; None where there are none."""
        used = [v for op in fusion.used_exprs() for v in op.outputs]
        scalars = structural_scalars(fusion, used)
        found = dict.fromkeys(y for x in scalars for y in _made_of_floats(x))
        return FloatSizes(fusion, found) if found else None

    def complete(self, inputs: Iterable[object]) -> list[Argument]:
        """Return the inputs of `fusion`.

        Raises `InputError` for another number of inputs, and for a value that is no size.
        """
        given = flatten(inputs, declared=self._declared)
        check_count(len(given), self._declared)
        values: Values = {}
        for i, declared in self._scalars:
            number = given[i]
            check_scalar(i, declared, number)
            values[declared] = Const(number, declared.dtype).value  # pyright: ignore[reportArgumentType]
        count = self._of_scalars
        sizes = [self._size(x, values) for x in self._sizes[:count]]
        if count < len(self._sizes):
            values = self._binder.bind(given, device_of(given, None))
            sizes += (self._size(x, values) for x in self._sizes[count:])
        return [*given, *sizes]

    def _size(self, x: Scalar, values: Values) -> int:
        """Return the value of a size; raises `InputError` for a float that is none."""
        of = x.args[0] if _is_cast(x) else x
        value = evaluate(of, values)
        is_exact = _is_cast(x) and x.dtype is DataType.Index
        if isinstance(value, float) and math.isfinite(value) and not is_exact:
            value = math.trunc(value)
        problem = misfit(value, DataType.Int)
        if problem is None and x in self._extents and value < 0:
            problem = f"{value:g} is below 0"
        if problem:
            raise self._refusal(x, of, values, problem)
        return int(evaluate(x, values))

    def _refusal(self, x: Scalar, of: Scalar, values: Values, problem: str) -> InputError:
        positions = {v: i for i, v in self._scalars}
        shown = (
            f"{s} = {values[s]}" + (f" (input {positions[s]})" if s in positions else "")
            for s in symbols(of)
        )
        found = ", ".join(shown) if isinstance(of, Symbol) else f"{of} with {', '.join(shown)}"
        hint = "; cast it to DataType.Int to truncate it" if x.dtype is DataType.Index else ""
        hint = hint if math.isfinite(evaluate(of, values)) and "no integer" in problem else ""
        op = self._users[x]
        return InputError(f"{op.name if op else 'size'}: size {found}: {problem}{hint}{_line(op)}")


def _line(op: TensorOp | None) -> str:
    return user_code(op.where) if op is not None and op.where else ""


def _is_cast(x: Scalar) -> TypeGuard[Apply]:
    return isinstance(x, Apply) and x.op.startswith("cast:")


def _made_of_floats(x: Scalar) -> Iterator[Scalar]:
    """Yield the integers of `x` that an op makes of floats: of nested ones the outermost."""
    if isinstance(x, Symbol | Const) or not _has_floats(x):
        return  # an extent is an integer: by itself, or made of others
    if isinstance(x, Apply) and any(not is_int(y) and _has_floats(y) for y in x.args):
        yield x
        return
    for y in children(x):
        yield from _made_of_floats(y)


def _has_floats(x: Scalar) -> bool:
    return any(category(y.dtype) in ("float", "complex") for y in _parts(x))


def _parts(x: Scalar) -> Iterator[Scalar]:
    seen: set[Scalar] = set()
    for y in postorder(x, seen.__contains__):
        seen.add(y)
        yield y


def _user(fusion: Fusion, size: Scalar) -> TensorOp | None:
    """Return the first op whose results have a size in their shape; None where none has it."""
    for op in fusion.used_exprs():
        scalars = (x for v in op.outputs for x in shape_scalars(v))
        if any(y is size for x in scalars for y in _parts(x)):
            return op
    return None
