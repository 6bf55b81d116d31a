"""Numbers of a call that must be values of the dtype of a result, and are refused where not.

    y = fd.ops.clamp(x, None, s)     x of Int32, s an Int of the call: 2**40 would be 0 in 32 bits

Constants are refused where they are written. Sums, products and bits of integers wrap instead, as
torch's do: they are right modulo 2**32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fuser.ir.dtypes import DataType, category, is_complex, is_floating, misfit, nbytes_of, to_torch
from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Apply, Const, Number, Scalar, Symbol, symbols
from fuser.ir.tensor import TensorView
from fuser.support.errors import InputError, user_code
from fuser.support.record import record


@record
class _Exact:
    """A scalar, the dtype of which it must be a value, and the op that takes it."""

    scalar: Scalar
    dtype: DataType
    op: TensorOp


class ExactNumbers:
    """The numbers of these ops that must be values of the dtypes of results. `inputs` are those of
    the program."""

    def __init__(self, ops: Iterable[Op], inputs: Sequence[object]) -> None:
        self._inputs = [(i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol)]
        # Others are those of loops.
        bound = {v for _, v in self._inputs}
        for value in inputs:
            if isinstance(value, TensorView):
                bound.update(s for x in value.shape() for s in symbols(x))
        found: dict[tuple[Scalar, DataType], _Exact] = {}
        for op in ops:
            for one in _of(op):
                if bound.issuperset(symbols(one.scalar)) and symbols(one.scalar):
                    found.setdefault((one.scalar, one.dtype), one)
        self._found = list(found.values())
        self._values = Computed([one.scalar for one in self._found])

    def __bool__(self) -> bool:
        return bool(self._found)

    def check(self, values: Mapping[Symbol, Number]) -> None:
        """Raise `InputError` naming the first number that is out of range, and its op."""
        for one, value in zip(self._found, self._values(values), strict=True):
            problem = misfit(value, one.dtype)
            if problem:
                raise self._refusal(one, problem, values)

    def check_of(self, values: Mapping[Symbol, Number]) -> Callable[[Sequence[Any]], None]:
        """Return the check of arguments of one signature, of which `values` knows the sizes."""
        known = dict(values)
        positions = {v: i for i, v in self._inputs}
        # A look at each number, where all are inputs as they are: calls take microseconds.
        ranges = [
            (positions[one.scalar], *_range_of(one.dtype))
            for one in self._found
            if isinstance(one.scalar, Symbol) and one.scalar in positions
            if not is_complex(one.dtype)
        ]
        are_inputs = len(ranges) == len(self._found)

        def check(arguments: Sequence[Any]) -> None:
            if are_inputs:
                for i, low, high in ranges:
                    if not low <= arguments[i] <= high:
                        break
                else:
                    return
            known.update((v, Const(arguments[i], v.dtype).value) for i, v in self._inputs)
            self.check(known)

        return check

    def _refusal(self, one: _Exact, problem: str, values: Mapping[Symbol, Number]) -> InputError:
        positions = {v: i for i, v in self._inputs}
        names = ", ".join(
            f"{s} = {values[s]}" + (f" (input {positions[s]})" if s in positions else "")
            for s in symbols(one.scalar)
        )
        op, found = (
            one.op,
            names if isinstance(one.scalar, Symbol) else f"{one.scalar} with {names}",
        )
        return InputError(
            f"{op.name}: {found}: {problem}, the dtype of {op.out_tensor}: cast the tensor first, "
            f"or give a number that fits{user_code(op.where) if op.where else ''}"
        )


def _range_of(dtype: DataType) -> tuple[Number, Number]:
    """Return the least and the largest finite value of a dtype."""
    own = to_torch(dtype)
    info = torch.finfo(own) if is_floating(dtype) else torch.iinfo(own)
    return info.min, info.max


def _of(op: Op) -> Iterator[_Exact]:
    if not isinstance(op, TensorOp):
        return
    dtype = op.out_tensor.dtype()
    for x in op.exact_numbers():
        # What the op itself has cast to its dtype.
        while isinstance(x, Apply) and x.op.startswith("cast:") and _is_narrower(x, x.args[0]):
            x = x.args[0]
        if category(x.dtype) == category(dtype) and nbytes_of(x.dtype) > nbytes_of(dtype):
            yield _Exact(x, dtype, op)


def _is_narrower(x: Scalar, other: Scalar) -> bool:
    is_alike = category(x.dtype) == category(other.dtype)
    return is_alike and nbytes_of(x.dtype) < nbytes_of(other.dtype)
