"""Errors for code that asks a tensor or scalar of a definition for its value.

While a definition is written, a tensor has no values yet. But `len(x)`, `float(x)`, `numpy.exp(x)`
and `torch.exp(x)` ask for values. Each of these calls raises an `ArgumentError` that says which op
to use instead. `fuser.ops.operators` adds the methods of this module to `TensorView` and `Scalar`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.ir.statement import is_defining
from fuser.ops.elementwise import apply_pointwise
from fuser.support.errors import ArgumentError, is_users, user_code

_Values = TensorView | Scalar


# ------------------------------------------------------------------ the user's line
def _is_caller(frame: FrameType) -> bool:
    """Returns whether a stack frame runs the user's code, and not code of this project, torch or
    numpy. Error messages name the source line of the user's code.
    """
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return is_users(frame) and module not in ("torch", "numpy")


def _refusal(text: str) -> ArgumentError:
    frame = sys._getframe(1)
    while frame.f_back and not _is_caller(frame):
        frame = frame.f_back
    return ArgumentError(f"{text}{user_code(f'{frame.f_code.co_filename}:{frame.f_lineno}')}")


def _has_no_value(what: str, value: _Values, instead: str) -> ArgumentError:
    kind = "tensor" if isinstance(value, TensorView) else "scalar"
    return _refusal(
        f"{what} of {value}: a {kind} has no value while the program is written; {instead}"
    )


# ------------------------------------------------------------------ Python
def _refuse(what: str, instead: str) -> Callable[..., NoReturn]:
    def method(self: TensorView, *_: object) -> NoReturn:
        raise _refusal(f"{what} of {self}: {instead}")

    return method


_AT_RUN = "execute returns the values of outputs as torch tensors"
# Python's function -> the op that computes it.
_ROUNDINGS = {"round": "round", "floor": "floor", "ceil": "ceil", "trunc": "trunc"}
# Python's conversions, which constants support.
_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "int": int,
    "float": float,
    "complex": complex,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}


def _convert(name: str) -> Callable[..., object]:
    """Returns the method that Python calls for `int(x)`, `round(x)` or a similar function `name`.

    The method converts a constant, and raises `ArgumentError` for any other tensor or scalar,
    because its value is not known while a program is defined.
    """
    op = _ROUNDINGS.get(name)
    converted = "write fd.ops.cast for a conversion of elements, fd.ops.exp for math.exp"
    instead = f"write fd.ops.{op}" if op else f"{converted}; {_AT_RUN}"

    def method(self: _Values, *digits: Any) -> object:
        if not isinstance(self, Const):
            raise _has_no_value(f"{name}()", self, instead)
        return round(self.value, *digits) if name == "round" else _CONVERSIONS[name](self.value)

    return method


def _index(self: _Values) -> int:
    if isinstance(self, Const) and isinstance(self.value, int):
        return self.value
    raise _has_no_value(
        "an index or a count",
        self,
        "sizes are integers after define_tensor with constant sizes, or after "
        "fd.from_pytorch(x, static_sizes=True); fd.ops.full and fd.ops.iota take scalars",
    )


def _format(self: _Values, spec: str) -> str:
    if spec and not isinstance(self, Const):
        raise _has_no_value(f"the format {spec!r}", self, f"{{x}} is its name, and {_AT_RUN}")
    return format(self.value if spec and isinstance(self, Const) else str(self), spec)


# ------------------------------------------------------------------ torch and numpy
def _instead_of(name: str) -> str:
    from fuser.ops.rows import ROWS, SPELLED

    return f"write fd.ops.{name}" if name in ROWS else SPELLED.get(name, "see dir(fd.ops)")


def _refuse_function(library: str, name: str, given: tuple[object, ...]) -> ArgumentError:
    lists = (v if isinstance(v, list | tuple) else (v,) for v in given)
    values: list[object] = [v for items in lists for v in cast("Sequence[object]", items)]
    of = next((f"{v}, a tensor" for v in values if isinstance(v, TensorView)), None)
    of = of or next((f"{v}, a scalar" for v in values if isinstance(v, Scalar)), "a value")
    text = (
        f"{library}'s {name}: {of} of a definition, has no values while the program is written: "
        f"{_instead_of(name)}"
    )
    return _refusal(text)


def _torch_function(
    cls: type, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
) -> NoReturn:
    """Raises `ArgumentError`, which names the op to use instead of the torch function `function`.

    Torch calls this method (`__torch_function__`) if an argument of a torch function is a tensor or
    scalar of a definition. Torch also calls it for an operator, such as `t + x` with a torch tensor
    t. After its error, Python tries the method of the other operand, `x.__radd__`.
    """
    del cls, types
    name = getattr(function, "__name__", str(function))
    raise _refuse_function("torch", name, (*args, *(kwargs or {}).values()))


def _array_function(
    self: _Values, function: Any, types: object, args: Any, kwargs: Any
) -> NoReturn:
    raise _refuse_function("numpy", function.__name__, (self,))


def _array(self: _Values, *_: object, **__: object) -> NoReturn:
    raise _has_no_value("numpy's array", self, _AT_RUN)


# numpy's functions -> names of Python's operators. `number * x` with a numpy number calls them.
_UFUNCS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
    "matmul": "matmul",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "left_shift": "lshift",
    "right_shift": "rshift",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}
# numpy's names of functions -> ops of another name.
_NEAR = {"absolute": "abs", "negative": "neg", "rint": "round"}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _array_ufunc(self: _Values, ufunc: Any, method: str, *inputs: Any, **options: Any) -> object:
    """Computes a Python operator on a numpy number and a tensor or scalar of a definition.

    Numpy calls this method (`__array_ufunc__`) for its operators and elementwise functions if an
    operand is a tensor or scalar of a definition. For a function that is no Python operator, the
    method raises `ArgumentError`.
    """
    called: str = ufunc.__name__
    name = _UFUNCS.get(called)
    if name is None or method != "__call__" or options:
        raise _refuse_function("numpy", _NEAR.get(called) or name or called, (self,))
    lhs, rhs = inputs
    if name in ("eq", "ne"):  # the methods of tensors would compare identity, as in the compiler
        return apply_pointwise(name, inputs) if is_defining() else name == "ne"
    if isinstance(lhs, TensorView | Scalar):
        return getattr(lhs, f"__{name}__")(rhs)
    reflected = _TURNED.get(name, f"r{name}")
    return getattr(rhs, f"__{reflected}__")(lhs)


# Methods of tensors and of scalars.
METHODS: dict[str, Any] = {
    **{f"__{name}__": _convert(name) for name in _CONVERSIONS},
    "__index__": _index,
    "__format__": _format,
    "__array__": _array,
    "__array_ufunc__": _array_ufunc,
    "__array_function__": _array_function,
    "__torch_function__": classmethod(_torch_function),
}
_NOT_IN_PLACE = "tensors are not changed in place"
_IN_PLACE = (
    f"{_NOT_IN_PLACE}: write fd.ops.where, cat, scatter or index_put_accumulate, and use the result"
)
# Methods of tensors alone.
OF_TENSORS: dict[str, Any] = {
    "__len__": _refuse(
        "len()",
        "a size is known only when the program runs: write x.size(0), which is a scalar, or x.ndim",
    ),
    # Without this method, Python would iterate by x[0], x[1], .., which never ends.
    "__iter__": _refuse(
        "iteration",
        "the number of parts is known only when the program runs: write x[0] or x[0:2] for a part, "
        "an op for the whole (fd.ops.max, fd.ops.sum)",
    ),
    "__contains__": _refuse(
        "in",
        "a tensor has no value while the program is written; write fd.ops.sum(x == value, dims) "
        "> 0, and any(t is x for t in tensors) for a list of tensors",
    ),
    "__setitem__": _refuse("assignment to a part", _IN_PLACE),
    "__delitem__": _refuse("deletion of a part", _IN_PLACE),
}
# Attributes of torch's tensors that are not ops -> the hint that `x.NAME` raises.
_VALUES = f"it has no value yet; {_AT_RUN}"
_DEVICE = "a program runs on the device of its inputs; if it has none, pass device= to execute"
_GRADIENT = "outputs carry no gradient: write the backward as ops, in this or another definition"
_MEMORY = "the compiler decides the memory order; x.set_allocation_domain requests one"
ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("item", "numpy", "tolist", "data", "values"), _VALUES),
    **dict.fromkeys(("cuda", "cpu", "device", "is_cuda", "get_device"), _DEVICE),
    **dict.fromkeys(("grad", "backward", "detach", "requires_grad", "requires_grad_"), _GRADIENT),
    **dict.fromkeys(("grad_fn", "retain_grad", "is_leaf"), _GRADIENT),
    **dict.fromkeys(("stride", "is_contiguous", "layout", "storage_offset", "data_ptr"), _MEMORY),
    **dict.fromkeys(("numel", "nelement"), "write the product of x.shape, x.size(0) * x.size(1)"),
    **dict.fromkeys(("element_size", "itemsize", "nbytes"), "x.dtype() is its type of element"),
    **dict.fromkeys(("int", "long", "short", "bool"), "it is called cast, which takes the dtype"),
    **dict.fromkeys(("mT", "H", "mH", "adjoint"), "it is called permute, which takes all axes"),
    "copy_": f"{_NOT_IN_PLACE}: use the other tensor instead",
    **dict.fromkeys(("fill_", "zero_"), f"{_NOT_IN_PLACE}: use fd.ops.full(x.shape, ...) instead"),
    "dim": "it is called ndim, without a call",
    "type_as": "write fd.ops.cast(x, y.dtype())",
    "view_as": "write fd.ops.reshape(x, y.shape)",
    "reshape_as": "write fd.ops.reshape(x, y.shape)",
    "expand_as": "write fd.ops.expand(x, y.shape)",
}


def no_attribute(self: _Values, name: str) -> NoReturn:
    """Raises `AttributeError` for `x.NAME`, with a hint if torch's tensors have the attribute
    `name`.
    """
    hint = attribute_hint(name)
    text = f"{type(self).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{text}: {hint}" if hint else text, name=name, obj=self)


def attribute_hint(name: str) -> str:
    """Returns a hint on what to write instead of `x.NAME`, for an attribute of torch's tensors.

    Returns "" for a name without a hint.
    """
    from fuser.ops.rows import ROWS, SPELLED

    if name in ROWS:
        return f"ops are functions, fd.ops.{name}"
    if name in ATTRIBUTES or name in SPELLED:
        return ATTRIBUTES.get(name) or SPELLED[name]
    base = name.removesuffix("_")
    if base == name or name.startswith("_"):
        return ""
    instead = f"write fd.ops.{base}" if base in ROWS else SPELLED.get(base)
    return f"{_NOT_IN_PLACE}: {instead}, and use the result" if instead else _NOT_IN_PLACE
