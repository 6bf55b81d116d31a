"""Python's operators on the tensors of a definition: `x + 1.0`, `-x`, `x @ w`, `x < y`, `x[1:, 0]`.

Each operator adds an op. The other operand may be a tensor, a scalar, or a number of Python, numpy
or torch. In a user's definition, `x == y` is the op `eq`, and `x is y` tests whether both are the
same tensor. In the compiler, in containers of the standard library, and outside of a definition, no
op can be added. In these places, `==` compares by identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fuser.ir.dtypes import DataType, category, is_inexact
from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import BinaryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.statement import is_defining
from fuser.ops import no_values
from fuser.ops.building import (
    as_operand,
    broadcast_tensor,
    refuse_complex,
    unsupported,
)
from fuser.ops.contractions import matmul
from fuser.ops.elementwise import apply_pointwise, cast, typed
from fuser.ops.indexing import select
from fuser.ops.resize import slice as slice_tensor
from fuser.support.arguments import python_number, show, wrong
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    DtypeError,
    counted,
    is_users,
    is_users_comparison,
    user_code,
    user_line,
)

NUMBERS = (bool, int, float, complex)

# Operator of two operands -> op. Arithmetic operators exist in reflected form, too (`1.0 + x`).
ARITHMETIC = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "truediv",
    "mod": "remainder",
    "pow": "pow",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
COMPARISONS = ("lt", "le", "gt", "ge")
UNARY = {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}


def _binary(op: str, *, reflected: bool = False) -> Callable[[TensorView, Any], Any]:
    def operator(self: TensorView, other: Any) -> Any:
        other = _operand(op, self, other)
        operands = (other, self) if reflected else (self, other)
        return apply_pointwise(op, operands)

    return operator


def _operand(op: str, tv: TensorView, other: Any) -> Any:
    """Returns `other`, the second operand of the Python operator `op`, in a form that ops accept: a
    number of numpy or torch becomes a Python number.

    Raises `ArgumentError` if `other` is no tensor, scalar or number. `tv` is the first operand, for
    the message.
    """
    if isinstance(other, (TensorView, Scalar, *NUMBERS)):
        return other
    number = python_number(other)
    if number is None:
        raise _no_operand(op, tv, other)
    return number


def _unary(op: str) -> Callable[[TensorView], Any]:
    return lambda self: apply_pointwise(op, (self,))


def _matmul(self: TensorView, other: Any) -> Any:
    if not isinstance(other, TensorView):
        raise _no_operand("matmul", self, other)
    return matmul(self, other)


def _floor_divide(op: str, self: TensorView, other: Any, *, reflected: bool) -> TensorView:
    """Returns the quotient rounded down, equal to torch's result.

    The floor of a floating quotient can be wrong: 1.0 / 0.1 rounds up to 10, but 0.1 fits into 1.0
    only nine times. The quotient is therefore computed from the remainder of `fmod`, which is
    exact. For integers, x // 0 is -1, as in `div`. If `reflected`, `other` is divided by `self`.
    """
    given = [as_operand(_operand(op, self, v), op) for v in (self, other)]
    refuse_complex(op, *given)
    (x, y), dtype = typed(op, "default", given[::-1] if reflected else given)
    if dtype is DataType.Bool:
        raise DtypeError(
            f"{op}: Bool cannot be divided: cast it, fd.ops.cast(x, DataType.Int) "
            f"(at {user_line()})"
        )

    def call(name: str, *operands: Any) -> Any:
        return apply_pointwise(name, operands)

    rest = call("fmod", x, y)
    is_left = call("logical_and", call("ne", rest, 0), call("ne", y, 0))
    # A remainder has the sign of x. If y has the other sign, the truncated quotient is above the
    # floor.
    is_above = call("logical_and", is_left, call("ne", call("lt", rest, 0), call("lt", y, 0)))
    correction = cast(is_above, dtype)
    if not is_inexact(dtype):
        return call("sub", call("div", x, y), correction)
    ratio = call("truediv", x, y)
    quotient = call("sub", call("truediv", call("sub", x, rest), y), correction)
    floor = call("floor", quotient)
    nearest = call("where", call("gt", call("sub", quotient, floor), 0.5), floor + 1.0, floor)
    # A quotient of zero has the sign of the ratio; x / 0.0 is infinite or NaN.
    signed = call("where", call("eq", quotient, 0.0), call("mul", ratio, 0.0), nearest)
    return call("where", call("eq", y, 0.0), ratio, signed)


def _division(name: str, *, reflected: bool = False) -> Callable[[TensorView, Any], Any]:
    """Returns the method for the Python operator `//` (if `name` is "floordiv"), or for the
    function `divmod`, which returns (`x // y`, `x % y`).

    If `reflected`, the tensor is the right operand.
    """

    def operator(self: TensorView, other: Any) -> Any:
        quotient = _floor_divide("//", self, other, reflected=reflected)
        if name == "floordiv":
            return quotient
        rest = METHODS["__rmod__" if reflected else "__mod__"](self, other)
        return quotient, rest

    return operator


def _no_operand(op: str, tv: TensorView, other: object) -> ArgumentError:
    words = f"a tensor{' or a scalar or a number' * (op != 'matmul')}"
    return ArgumentError(f"{op} of {tv}: {wrong(words, other).text}{user_code(user_line())}")


def _has_no_truth(self: TensorView) -> bool:
    if not is_users(sys._getframe(1)):
        return True
    op = self.definition()
    is_compared = isinstance(op, BinaryOp) and op.kind in ("eq", "ne")
    hint = (
        "; `a is b` tests whether two tensors are the same, and `any(t is a for t in tensors)` "
        "whether a tensor is in a list"
    )
    raise DefinitionError(
        f"{self} has no value yet, because values exist only when the program runs: Python's "
        "`if`, `and`, `or` and `not` cannot test it. Use the op `where` instead"
        f"{hint * is_compared}{user_code(user_line())}"
    )


def _equality(op: str) -> Callable[[TensorView, object], Any]:
    """Returns the method for the Python operator `==` or `!=` on tensors and scalars.

    In a user's definition, the method adds an op. Elsewhere, the method compares by identity, so
    that containers can hold tensors.
    """
    append = _binary(op)

    def operator(self: TensorView, other: object) -> Any:
        if other is None or not is_users_comparison() or not is_defining():
            return NotImplemented
        return append(self, other)

    return operator


# ------------------------------------------------------------------ slices
def _item(self: TensorView, key: object) -> TensorView:
    """Adds the ops that compute `x[key]`, a part of the tensor `x`, and returns their result.

    `key` has one item per axis: a slice of step 1, or an index, which removes the axis. `...`
    stands for omitted axes, and None adds an axis of size 1.
    """
    wanted = _per_axis(self, key if isinstance(key, tuple) else (key,))
    along = [item for item in wanted if item is not None]
    part = self
    if any(isinstance(item, slice) and item != slice(None) for item in along):
        bounds = [_bounds(self, key, i, s) for i, s in zip(along, self.shape(), strict=True)]
        part = slice_tensor(part, [a for a, _ in bounds], [b for _, b in bounds])
    for dim in reversed(range(len(along))):
        if not isinstance(along[dim], slice):
            place = along[dim]
            part = select(part, place if isinstance(place, Scalar) else sc.const(place), dim)
    flags = tuple(item is None for item in wanted if item is None or isinstance(item, slice))
    return broadcast_tensor(part, flags) if any(flags) else part


def _per_axis(tv: TensorView, key: tuple[object, ...]) -> list[Any]:
    """Returns `key` with exactly one item for each axis of `tv`, and None for each new axis.

    Raises `ArgumentError` or `DefinitionError` for a key that `tv` does not support, for example
    one with too many items.
    """
    for item in key:
        if item is None or item is Ellipsis or isinstance(item, slice):
            continue
        if isinstance(item, bool) or not isinstance(item, int | Scalar):
            raise ArgumentError(
                f"{tv}[{_shown(key)}]: expected integers, slices, ... and None, got {show(item)}"
                f"{_chosen_by(item)}{user_code(user_line())}"
            )
    given = sum(item is not None and item is not Ellipsis for item in key)
    if given > tv.ndim or sum(item is Ellipsis for item in key) > 1:
        raise DefinitionError(
            f"{tv}[{_shown(key)}]: got {counted(given, 'index')} for "
            f"{counted(tv.ndim, 'axis')}{user_code(user_line())}"
        )
    whole = [slice(None)] * (tv.ndim - given)
    if Ellipsis not in key:
        return [*key, *whole]
    at = key.index(Ellipsis)
    return [*key[:at], *whole, *key[at + 1 :]]


def _chosen_by(item: object) -> str:
    """Returns a hint for the error about `x[item]`: the op that selects elements by a tensor, an
    array or a list. Returns "" if `item` is of another type.
    """
    if not isinstance(item, TensorView):
        is_list = isinstance(item, list) or hasattr(item, "shape")
        with_data = ": write fd.ops.index_select(x, index, dim), index from define_tensor"
        return with_data if is_list else ""
    if item.dtype() is DataType.Bool:
        return (
            ": the number of elements that a mask selects is known only in a run; write "
            "fd.ops.where(mask, x, 0.0)"
        )
    return ": write fd.ops.index_select(x, index, dim), or fd.ops.gather(x, dim, index)"


def _bounds(
    tv: TensorView, key: object, item: Any, size: Scalar
) -> tuple[Scalar | int, Scalar | int]:
    """Returns the range (start, end) of positions that `item` selects along an axis.

    `item` is the entry of `key` for this axis, in `x[key]`. If it is no slice, returns (0, `size`),
    where `size` is the size of the axis. `key` is used for errors.
    """
    if not isinstance(item, slice):
        return 0, size
    if item.step not in (None, 1):
        raise unsupported("slice", f"{tv}[{_shown(key)}]: only slices with step 1 are supported")
    start, end = _end(tv, key, item.start, 0, size), _end(tv, key, item.stop, size, size)
    # A scalar below 0 is an error once it is known. A maximum would hide it.
    return start, end if isinstance(item.stop, Scalar) else sc.maximum(start, end)


def _end(
    tv: TensorView, key: object, given: Any, default: Scalar | int, size: Scalar
) -> Scalar | int:
    """Returns the start or the end of a slice as a position, counted from 0.

    `given` is the start or the end as the user wrote it. A negative number counts from the end of
    the axis, which has `size` elements. If `given` is None, returns `default`. `tv` and `key` are
    the tensor and the key of `tv[key]`, for messages.
    """
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | Scalar):
        raise ArgumentError(
            f"{tv}[{_shown(key)}]: the ends of a slice must be integers, got {show(given)}"
            f"{user_code(user_line())}"
        )
    return sc.maximum(sc.add(size, given), 0) if isinstance(given, int) and given < 0 else given


def _shown(key: object) -> str:
    items = key if isinstance(key, tuple) else (key,)
    return ", ".join(map(_item_text, items))


def _item_text(item: object) -> str:
    if isinstance(item, slice):
        parts = [item.start, item.stop, *([item.step] if item.step is not None else [])]
        return ":".join("" if p is None else str(p) for p in parts)
    return "..." if item is Ellipsis else str(item)


METHODS: dict[str, Any] = {
    **{f"__{name}__": _binary(op) for name, op in ARITHMETIC.items()},
    **{f"__r{name}__": _binary(op, reflected=True) for name, op in ARITHMETIC.items()},
    **{f"__{name}__": _binary(name) for name in COMPARISONS},
    **{f"__{name}__": _unary(op) for name, op in UNARY.items()},
    "__matmul__": _matmul,
    "__rmatmul__": _matmul,
    **{f"__{name}__": _division(name) for name in ("floordiv", "divmod")},
    **{f"__r{name}__": _division(name, reflected=True) for name in ("floordiv", "divmod")},
    "__pos__": lambda self: self,
    "__getitem__": _item,
    "__getattr__": no_values.no_attribute,
    **no_values.METHODS,
    **no_values.OF_TENSORS,
    "__bool__": _has_no_truth,
    "__eq__": _equality("eq"),
    "__ne__": _equality("ne"),
    "__hash__": object.__hash__,
}


def _negate(self: Scalar) -> Any:
    """Returns -n for the scalar n.

    For integers, the result is built as 0 - n, because sums of integers are simplified. For floats,
    0 - n would be wrong, because 0 - 0.0 is not -0.0.
    """
    if category(self.dtype) in ("int", "bool"):
        return sc.sub(0, self)
    return apply_pointwise("neg", (self,))


# The class of scalars has its own methods to add, multiply and compare
# (`fuser.ir.scalar.scalar_nodes`).
_OF_SCALARS = ("truediv", "pow", "and", "or", "xor", "lshift", "rshift")
SCALAR_METHODS: dict[str, Any] = {
    **{f"__{name}__": _binary(ARITHMETIC[name]) for name in _OF_SCALARS},
    **{f"__r{name}__": _binary(ARITHMETIC[name], reflected=True) for name in _OF_SCALARS},
    "__abs__": _unary("abs"),
    "__neg__": _negate,
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__getattr__": no_values.no_attribute,
    **no_values.METHODS,
}


def install() -> None:
    """Adds the operators of this module as methods to the classes `TensorView` and `Scalar`.

    These classes are in `fuser.ir`, which must not import ops.
    """
    for of, methods in ((TensorView, METHODS), (Scalar, SCALAR_METHODS)):
        for name, method in methods.items():
            setattr(of, name, method)
