"""Op functions along one axis: scans, sorting and the largest elements.

Torch runs these ops; they are not part of kernels. Every device needs the whole axis. A sharded
axis is therefore gathered first. For these ops, an expanded axis (one element in memory, repeated)
is an ordinary axis, because the elements of the result along the axis may differ.
"""

from __future__ import annotations

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import FLOAT8, STORED, DataType, category, dtype_text
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.scan_ops import ArgsortOp, ScanOp, TopKOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ops import elementwise
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    axes_of,
    axis_of_extent,
    cast_tensor,
    fail,
    literal,
    new_output,
    number_in,
    refuse_complex,
    unexpanded,
    unsupported,
    wrap_dim,
)
from fuser.ops.factories import full_tensor
from fuser.ops.reduction_table import REDUCTIONS
from fuser.support.errors import DtypeError, user_line

# The op with which a scan combines two elements.
_JOINS = {
    "add": elementwise.ELEMENTWISE["add"],
    "mul": elementwise.ELEMENTWISE["mul"],
    "max": elementwise.ELEMENTWISE["maximum"],
    "min": elementwise.ELEMENTWISE["minimum"],
}


def _check_dtype(
    name: str, tv: TensorView, *, bools: bool = False, takes_complex: bool = False
) -> None:
    if tv.dtype() in STORED:
        raise unsupported(
            name,
            f"{tv} has the dtype {dtype_text(tv.dtype())}, a dtype that can be stored, but not "
            "computed with",
        )
    if not takes_complex:
        refuse_complex(name, tv)
    if category(tv.dtype()) == "bool" and not bools:
        raise DtypeError(
            f"{name}: the operand must have an integer, floating or complex dtype, but {tv} is "
            f"{dtype_text(tv.dtype())} (at {user_line()})"
        )


def _widened(tv: TensorView) -> TensorView:
    """Returns a tensor of one-byte floats cast to Float, because torch cannot compute with bytes.

    Returns any other tensor unchanged.
    """
    return cast_tensor(tv, DataType.Float) if tv.dtype() in FLOAT8 else tv


def _axes(tv: TensorView) -> list[IterDomain]:
    """Creates axes with the sizes of the axes of `tv`; an expanded axis becomes an iteration axis.

    The elements of the result along such an axis may differ.
    """
    fusion = active_fusion()
    return [fusion.new_axis(a.extent, a.kind) for a in map(unexpanded, axes_of(tv))]


# ------------------------------------------------------------------ scans
def cumsum(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView:
    """Computes, at each position i along axis `dim`, the sum of the elements 0 to i, plus `init`.

    Half, BFloat16 and Float8 are added in Float. Integers keep their dtype and wrap on overflow.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the operand is Bool, or `init` is of another category.
    """
    return _scan("add", arg, dim, init)


def cumprod(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView:
    """Computes, at each position i along axis `dim`, the product of the elements 0 to i and `init`.

    Half, BFloat16 and Float8 are multiplied in Float. Integers keep their dtype and wrap on
    overflow.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the operand is Bool, or `init` is of another category.
    """
    return _scan("mul", arg, dim, init)


def cummax(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView:
    """Computes, at each position i along axis `dim`, the maximum of the elements 0 to i and `init`.

    NaN counts as larger than all numbers.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the operand is Bool or complex, or `init` is of another category.
    """
    return _scan("max", arg, dim, init)


def cummin(arg: TensorView, dim: int, init: ScalarLike | None = None) -> TensorView:
    """Computes, at each position i along axis `dim`, the minimum of the elements 0 to i and `init`.

    NaN counts as smaller than all numbers.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the operand is Bool or complex, or `init` is of another category.
    """
    return _scan("min", arg, dim, init)


def _scan(kind: str, arg: TensorView, dim: int, init: ScalarLike | None) -> TensorView:
    name = ScanOp.NAMES[kind]
    _check_dtype(name, arg, takes_complex=kind in ("add", "mul"))
    if arg.dtype() in FLOAT8:
        return elementwise.cast(_scan(kind, _widened(arg), dim, init), arg.dtype())
    dtype = arg.dtype()
    axis = wrap_dim(dim, arg.ndim, name, arg)
    if init is not None:
        init = _first(name, arg, init)
    if not arg.ndim or (axes_of(arg)[axis].is_broadcast and axes_of(arg)[axis].expanded is None):
        # The axis has a single element.
        if init is None:
            return elementwise.copy_tensor(arg)
        joined = _JOINS[kind](init, arg)
        assert isinstance(joined, TensorView)
        return elementwise.cast(joined, dtype)
    if init is None:
        init = Const(REDUCTIONS[kind].identity(dtype), dtype)
        active_fusion().next_scalar()
    out = new_output(_axes(arg), dtype, [arg])
    add_op(ScanOp(out, arg, init, dim=axis, kind=kind))
    return out


def _first(name: str, arg: TensorView, init: ScalarLike) -> Scalar:
    """Returns `init`, the initial value of a scan, in the dtype of the operand `arg`.

    Raises `DtypeError` if `init` is a scalar of another category (bool, int, float, complex) than
    `arg`.
    """
    if not isinstance(init, Scalar):
        return number_in(init, arg.dtype(), name)
    if category(init.dtype) != category(arg.dtype()):
        raise DtypeError(
            f"{name}: init must be of the same category (Bool, integer, floating or complex) as "
            f"{arg}, whose dtype is {dtype_text(arg.dtype())}, but {init} is "
            f"{dtype_text(init.dtype)}: cast init with fd.ops.cast (at {user_line()})"
        )
    return literal(init.value, arg.dtype(), name) if isinstance(init, Const) else init


# ------------------------------------------------------------------ order
def argsort(
    arg: TensorView, dim: int, descending: bool = False, stable: bool = False
) -> TensorView:
    """Returns the indices (Int) that sort the elements along axis `dim`.

    With `descending`, the largest element is first. With `stable`, equal elements keep their order.
    NaN counts as larger than all numbers.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the operand is complex.
    """
    name = "argsort"
    _check_dtype(name, arg, bools=True)
    arg = _widened(arg)
    axis = wrap_dim(dim, arg.ndim, name, arg)
    if not arg.ndim:
        return full_tensor([], Const(0, DataType.Int), DataType.Int)
    out = new_output(_axes(arg), DataType.Int, [arg])
    add_op(ArgsortOp(out, arg, dim=axis, descending=descending, stable=stable))
    return out


def topk(
    arg: TensorView, k: SizeLike, dim: int = -1, largest: bool = True, sorted: bool = False
) -> tuple[TensorView, TensorView]:
    """Returns (the `k` largest elements along axis `dim`, the indices (Int) of these elements).

    - If `largest` is False, the `k` smallest elements are selected.
    - The results are always in order, also without `sorted`.
    - NaN counts as larger than all numbers.
    - Of equal elements, any may be selected.

    Raises:
        DefinitionError: there is no axis `dim`, or a constant `k` exceeds a constant size.
        DtypeError: the operand is Bool or complex.
    """
    name = "topk"
    _check_dtype(name, arg)
    if arg.dtype() in FLOAT8:
        values, where = topk(_widened(arg), k, dim, largest, sorted)
        return elementwise.cast(values, arg.dtype()), where
    axis = wrap_dim(dim, arg.ndim, name, arg)
    if not arg.ndim:
        raise fail(name, f"the operand needs at least 1 axis, but {arg} has none")
    k = as_extent(k, name)
    axes = _axes(arg)
    axes[axis] = axis_of_extent(k)
    also = [active_fusion().clone_axis(a) for a in axes]
    found = new_output(axes, arg.dtype(), [arg])
    places = new_output(also, DataType.Int, [arg])
    op = TopKOp(found, places, arg, k, dim=axis, largest=largest, sorted=sorted)
    count, extent = sc.int_value(k), sc.int_value(axes_of(arg)[axis].size)
    problem = "" if count is None else op.misfit(count, extent)
    if problem:
        raise fail(name, problem)
    add_op(op)
    return found, places
