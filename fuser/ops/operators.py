"""Python's operators on the tensors of a definition: `x + 1.0`, `-x`, `x @ w`, `x < y`, `x[1:, 0]`.

Each appends an op; an operand may be a tensor, a scalar or a number, also numpy's or torch's. `x ==
y` in a user's definition is the op `eq`; `x is y` asks whether both are the same tensor. The
compiler, the containers of the standard library, and code outside a definition, which can add no
op, compare tensors by identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fuser.arguments import python_number, show, wrong
from fuser.errors import (
    ArgumentError,
    DefinitionError,
    is_users,
    is_users_comparison,
    user_code,
    user_line,
)
from fuser.ir import scalar as sc
from fuser.ir.guard import is_defining
from fuser.ir.nodes import BinaryOp
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ops.building import broadcast_tensor, unsupported
from fuser.ops.contractions import matmul
from fuser.ops.elementwise import apply_pointwise
from fuser.ops.indexing import select
from fuser.ops.resize import slice as slice_tensor

NUMBERS = (bool, int, float, complex)

# Operator -> op, of two operands; those of arithmetic stand on the right, too.
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
        if not isinstance(other, (TensorView, Scalar, *NUMBERS)):
            number = python_number(other)
            if number is None:
                raise _no_operand(op, self, other)
            other = number
        operands = (other, self) if reflected else (self, other)
        return apply_pointwise(op, operands)

    return operator


def _unary(op: str) -> Callable[[TensorView], Any]:
    return lambda self: apply_pointwise(op, (self,))


def _matmul(self: TensorView, other: Any) -> Any:
    if not isinstance(other, TensorView):
        raise _no_operand("matmul", self, other)
    return matmul(self, other)


def _no_operand(op: str, tv: TensorView, other: object) -> ArgumentError:
    words = f"a tensor{' or a scalar or a number' * (op != 'matmul')}"
    return ArgumentError(f"{op} of {tv}: {wrong(words, other).text}{user_code(user_line())}")


def _has_no_truth(self: TensorView) -> bool:
    if not is_users(sys._getframe(1)):
        return True
    op = self.definition()
    is_compared = isinstance(op, BinaryOp) and op.kind in ("eq", "ne")
    hint = (
        "; a is b asks whether two tensors are the same, any(t is a for t in tensors) whether one "
        "is in a list"
    )
    raise DefinitionError(
        f"{self} has no value while the program is written: use the op where, in place of if, and, "
        f"or, not{hint * is_compared}{user_code(user_line())}"
    )


def _equality(op: str) -> Callable[[TensorView, object], Any]:
    """Return `==` or `!=`: an op where a user writes a definition, else identity."""
    append = _binary(op)

    def operator(self: TensorView, other: object) -> Any:
        if other is None or not is_users_comparison() or not is_defining():
            return NotImplemented
        return append(self, other)

    return operator


def _no_attribute(self: TensorView, name: str) -> Any:
    """Say how a method of torch's tensors is written."""
    from fuser.ops.rows import ROWS
    from fuser.ops.spelled import SPELLED

    hint = f"ops are functions, fd.ops.{name}" if name in ROWS else SPELLED.get(name)
    text = f"{type(self).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=self)


def _no_torch_function(
    cls: type, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
) -> Any:
    """Say how a function of torch is written: tensors of a definition have no values.

    torch calls it for its operators, too, and takes the error for "ask the other operand".
    """
    del cls, types
    from fuser.ops.rows import ROWS
    from fuser.ops.spelled import SPELLED

    name = getattr(function, "__name__", str(function))
    hint = f"write fd.ops.{name}" if name in ROWS else SPELLED.get(name, "see dir(fd.ops)")
    given = (*args, *(kwargs or {}).values())
    of = next((f"{v}, a tensor" for v in given if isinstance(v, TensorView)), "a tensor")
    frame = sys._getframe(1)
    while frame.f_back and (
        not is_users(frame) or frame.f_globals["__name__"].startswith("torch.")
    ):
        frame = frame.f_back
    where = user_code(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    raise ArgumentError(f"torch's {name}: {of} of a definition, has no values: {hint}{where}")


# ------------------------------------------------------------------ slices
def _item(self: TensorView, key: object) -> TensorView:
    """Take a part: a slice of step 1 or a number for each axis, `...` for those left out, None for
    a new axis of size 1."""
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
    """Return one item for each axis, and None for new ones."""
    for item in key:
        if item is None or item is Ellipsis or isinstance(item, slice):
            continue
        if isinstance(item, bool) or not isinstance(item, int | Scalar):
            raise ArgumentError(
                f"{tv}[{_shown(key)}]: expected integers, slices, ... and None, got {show(item)}"
                f"{user_code(user_line())}"
            )
    given = sum(item is not None and item is not Ellipsis for item in key)
    if given > tv.ndim or sum(item is Ellipsis for item in key) > 1:
        raise DefinitionError(
            f"{tv}[{_shown(key)}]: {given} indices for {tv.ndim} axes{user_code(user_line())}"
        )
    whole = [slice(None)] * (tv.ndim - given)
    if Ellipsis not in key:
        return [*key, *whole]
    at = key.index(Ellipsis)
    return [*key[:at], *whole, *key[at + 1 :]]


def _bounds(
    tv: TensorView, key: object, item: Any, size: Scalar
) -> tuple[Scalar | int, Scalar | int]:
    """Return the ends of what a slice takes, all of the axis for anything else."""
    if not isinstance(item, slice):
        return 0, size
    if item.step not in (None, 1):
        raise unsupported("slice", f"{tv}[{_shown(key)}]: a step other than 1")
    start, end = _end(tv, key, item.start, 0, size), _end(tv, key, item.stop, size, size)
    # A scalar below 0 is refused once it is known: it is not to be hidden.
    return start, end if isinstance(item.stop, Scalar) else sc.maximum(start, end)


def _end(
    tv: TensorView, key: object, given: Any, default: Scalar | int, size: Scalar
) -> Scalar | int:
    """Return an end of a slice as torch takes it: a negative number counts from the end."""
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | Scalar):
        raise ArgumentError(
            f"{tv}[{_shown(key)}]: an end of a slice is an integer, got {show(given)}"
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
    "__pos__": lambda self: self,
    "__getitem__": _item,
    # What has places is gone through by asking for one after the other, without an end.
    "__iter__": None,
    # numpy's arrays would take it for one of their elements: `array + x`, `numpy.exp(x)`.
    "__array_ufunc__": None,
    "__getattr__": _no_attribute,
    "__torch_function__": classmethod(_no_torch_function),
    "__bool__": _has_no_truth,
    "__eq__": _equality("eq"),
    "__ne__": _equality("ne"),
    "__hash__": object.__hash__,
}


def install() -> None:
    """Give tensors their operators: `fuser.ir` knows no ops."""
    for name, method in METHODS.items():
        setattr(TensorView, name, method)
