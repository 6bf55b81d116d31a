"""Ops of torch.nn.functional that expand into other ops: softmax, norms, losses, activations.

Names, arguments and meaning are those of torch. The IR has no nodes for these ops: a definition
shows the ops into which a call has expanded. Half, BFloat16 and Float8 are computed in Float and
rounded once. Float and Double are computed in their own dtype. All other dtypes raise `DtypeError`,
as in torch. The expansions are written so that kernels read each input from memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast as typing_cast

from fuser.ir.dtypes import (
    DataType,
    DtypeLike,
    category,
    check_supported,
    dtype_text,
    is_floating,
    is_inexact,
    promote_operands,
)
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const
from fuser.ops import reductions
from fuser.ops.building import (
    OperandLike,
    SizeLike,
    as_integer,
    broadcast_tensor,
    convert,
    declare_extent,
    fail,
    wrap_dim,
)
from fuser.ops.elementwise import apply_pointwise, copy_tensor
from fuser.ops.factories import iota, uniform
from fuser.ops.reduction_table import computed_in
from fuser.support.arguments import show
from fuser.support.errors import DtypeError, counted, user_line

_SQRT_HALF, _SQRT_TWO_BY_PI, _CUBIC = 0.7071067811865476, 0.7978845608028654, 0.044715
_REDUCTIONS = ("none", "mean", "sum")


# ------------------------------------------------------------------ shared parts
def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, apply_pointwise(name, operands))


def _in(tv: TensorView, dtype: DataType) -> TensorView:
    return typing_cast(TensorView, convert(tv, dtype))


def _result_dtype(name: str, input: TensorView, dtype: DtypeLike | None) -> DataType:
    if dtype is None or dtype is DataType.Null:
        return input.dtype()
    return check_supported(dtype, name)


def _wide(name: str, input: TensorView, dtype: DtypeLike | None = None) -> TensorView:
    """Returns `input` in the dtype in which a composed op computes, for example Float for Half.

    If `dtype` is passed, `input` is first cast to `dtype`. Raises `DtypeError` for a dtype that is
    not floating.
    """
    result = _result_dtype(name, input, dtype)
    if not is_floating(result):
        given = "" if dtype is None else f", and dtype={dtype_text(result)} was passed"
        raise DtypeError(
            f"{name}: a floating dtype is needed, but {input} is {dtype_text(input.dtype())}{given}"
            f": cast it to DataType.Float first (at {user_line()})"
        )
    return _in(_in(input, result), computed_in(result))


def _parameter(name: str, field: str, tv: TensorView, like: TensorView) -> TensorView:
    """Returns the parameter `tv`, such as a weight, cast to the dtype of `like`.

    `name` is the op and `field` the argument, for errors. Raises `DtypeError` for a parameter that
    is not floating or has a wider dtype.
    """
    is_wider = tv.dtype() is DataType.Double and like.dtype() is not DataType.Double
    if not is_floating(tv.dtype()) or is_wider:
        raise DtypeError(
            f"{name}: {field} must have a floating dtype with values that fit into "
            f"{dtype_text(like.dtype())}, the dtype of the computation, but {tv} is "
            f"{dtype_text(tv.dtype())}: cast it first (at {user_line()})"
        )
    return _in(tv, like.dtype())


def _shifted(x: TensorView, axis: int) -> TensorView:
    """Returns x minus its maximum along an axis, so that exponentials are at most 1."""
    return _call("sub", x, reductions.max(x, axis, keepdim=True))


def _log_total(shifted: TensorView, axis: int, *, keepdim: bool) -> TensorView:
    return _call("log", reductions.sum(_call("exp", shifted), axis, keepdim))


# ------------------------------------------------------------------ along an axis
def softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView:
    """Computes exp(input) / sum(exp(input), dim).

    If `dtype` is passed, `input` is first cast to `dtype`. If all elements along `dim` are -inf,
    the result is NaN, as in torch.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the dtype is not floating.

    Example: `weights = fd.ops.softmax(scores, dim=-1)`
    """
    axis = wrap_dim(dim, input.ndim, "softmax", input)
    x = _wide("softmax", input, dtype)
    exponential = _call("exp", _shifted(x, axis))
    out = _call("div", exponential, reductions.sum(exponential, axis, keepdim=True))
    return _in(out, _result_dtype("softmax", input, dtype))


def log_softmax(input: TensorView, dim: int, dtype: DtypeLike | None = None) -> TensorView:
    """Computes input - log(sum(exp(input), dim)).

    If `dtype` is passed, `input` is first cast to `dtype`.

    Raises:
        DefinitionError: there is no axis `dim`.
        DtypeError: the dtype is not floating.
    """
    axis = wrap_dim(dim, input.ndim, "log_softmax", input)
    shifted = _shifted(_wide("log_softmax", input, dtype), axis)
    out = _call("sub", shifted, _log_total(shifted, axis, keepdim=True))
    return _in(out, _result_dtype("log_softmax", input, dtype))


def mean(
    input: TensorView,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: DtypeLike | None = None,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Computes the mean over one axis or several (`dim`, also called `dims`), or over all axes.

    If `dtype` is passed, `input` is first cast to `dtype`. As in torch, an empty list of axes
    stands for all axes, and the mean of no elements is NaN. `keepdim` keeps the reduced axes with
    size 1.

    Raises:
        ArgumentError: `dim` and `dims` are both passed.
        DefinitionError: an axis does not exist or is repeated.
        DtypeError: the dtype is neither floating nor complex.
    """
    result = _result_dtype("mean", input, dtype)
    if not is_inexact(result):
        named = "" if dtype is None else f", and dtype= names {dtype_text(result)}"
        raise DtypeError(
            f"mean: a floating or complex dtype is needed, but {input} is "
            f"{dtype_text(input.dtype())}{named}: "
            f"write mean(x, dtype=DataType.Float) (at {user_line()})"
        )
    x = _in(input, result)
    x = _in(x, computed_in(result))
    given = reductions.given_dims("mean", dim, dims)
    given = None if isinstance(given, Sequence) and not given else given
    axes = sorted(reductions.axes_to_reduce("mean", x, given))
    total = reductions.sum(x, axes or None, keepdim)
    count = sc.product(x.size(i) for i in axes) if axes else 1
    return _in(_call("div", total, count), result)


# ------------------------------------------------------------------ norms over the last axes
def layer_norm(
    input: TensorView,
    normalized_shape: Sequence[SizeLike],
    weight: TensorView | None = None,
    bias: TensorView | None = None,
    eps: float = 1e-5,
) -> TensorView:
    """Computes (input - mean) / sqrt(variance + eps) * weight + bias over the last axes.

    `normalized_shape` has the sizes of these axes. `weight` and `bias` must have exactly these
    sizes.

    Raises:
        DefinitionError: `normalized_shape`, `weight` or `bias` has other sizes than the last axes
            of `input`.
        DtypeError: a dtype is not floating, or a parameter has a wider dtype than the computation.
    """
    x = _wide("layer_norm", input)
    axes = _last_axes("layer_norm", input, normalized_shape)
    variance, average = reductions.var_mean(x, axes, 0, True)
    inverse = _call("rsqrt", _call("add", variance, eps))
    out = _call("mul", _call("sub", x, average), inverse)
    for field, op, tv in (("weight", "mul", weight), ("bias", "add", bias)):
        if tv is not None:
            out = _call(op, out, _normalized("layer_norm", field, tv, input, axes, x))
    return _in(out, input.dtype())


def rms_norm(
    input: TensorView,
    normalized_shape: Sequence[SizeLike],
    weight: TensorView | None = None,
    eps: float | None = None,
) -> TensorView:
    """Computes input / sqrt(mean(input ** 2) + eps) * weight over the last axes.

    `normalized_shape` has the sizes of these axes. `weight` must have exactly these sizes. The
    default of `eps` is the machine epsilon of the dtype in which the op computes.

    Raises:
        DefinitionError: `normalized_shape` or `weight` has other sizes than the last axes of
            `input`.
        DtypeError: a dtype is not floating, or the weight has a wider dtype than the computation.
    """
    x = _wide("rms_norm", input)
    axes = _last_axes("rms_norm", input, normalized_shape)
    if eps is None:
        eps = 2.0**-52 if x.dtype() is DataType.Double else 2.0**-23
    count = sc.product(x.size(axis) for axis in axes)
    square = _call("div", reductions.sum(_call("mul", x, x), axes, keepdim=True), count)
    inverse = _call("rsqrt", _call("add", square, eps))
    out = _call("mul", x, inverse)
    if weight is not None:
        out = _call("mul", out, _normalized("rms_norm", "weight", weight, input, axes, x))
    return _in(out, input.dtype())


def _last_axes(name: str, input: TensorView, shape: Sequence[SizeLike]) -> list[int]:
    """Returns the positions of the last axes of `input`, over which a norm is computed.

    Raises `DefinitionError` if these axes have other sizes than `shape` says.
    """
    if not 0 < len(shape) <= input.ndim:
        raise fail(
            name,
            f"normalized_shape has {counted(len(shape), 'size')}, but {input} has "
            f"{counted(input.ndim, 'axis')}: pass the sizes of one or more of the last axes",
        )
    axes = list(range(input.ndim - len(shape), input.ndim))
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        given = as_integer(size, name, i, lowest=0)
        what = f"{name}: normalized_shape[{i}] and axis {axis} of {input}"
        declare_extent(active_fusion(), input.size(axis), given, what)
    return axes


def _normalized(
    name: str, field: str, tv: TensorView, input: TensorView, axes: list[int], x: TensorView
) -> TensorView:
    """Returns the weight or bias `tv` of a norm, cast to the dtype of `x`, in which the norm is
    computed.

    Records that the axes of `tv` have the sizes of the axes `axes` of `input`. Raises
    `DefinitionError` if constant sizes differ.
    """
    if tv.ndim != len(axes):
        raise fail(
            name,
            f"{field} must have {counted(len(axes), 'axis')}, one for each size in "
            f"normalized_shape, but {tv} has {tv.ndim}",
        )
    for i, axis in enumerate(axes):
        what = f"{name}: {field} {tv} and {input}"
        declare_extent(active_fusion(), input.size(axis), tv.size(i), what)
    return _parameter(name, field, tv, x)


# ------------------------------------------------------------------ element by element
def gelu(input: TensorView, approximate: str = "none") -> TensorView:
    """Computes input * P(X <= input) for a standard normal X.

    P is computed by erf, or approximated by tanh if `approximate` is "tanh".

    Raises:
        DefinitionError: `approximate` is neither "none" nor "tanh".
        DtypeError: the operand is not floating.
    """
    x = _wide("gelu", input)
    if approximate == "none":
        inner = _call("erf", _call("mul", x, _SQRT_HALF))
    elif approximate == "tanh":
        cube = _call("mul", _call("mul", x, x), x)
        inner = _call("add", x, _call("mul", cube, _CUBIC))
        inner = _call("tanh", _call("mul", inner, _SQRT_TWO_BY_PI))
    else:
        raise fail("gelu", f'approximate must be "none" or "tanh", got {approximate!r}')
    out = _call("mul", _call("mul", x, 0.5), _call("add", inner, 1.0))
    return _in(out, input.dtype())


def dropout(input: TensorView, p: float = 0.5, training: bool = True) -> TensorView:
    """Multiplies each element by 1 / (1 - p) with probability 1 - p, else by 0.

    Without `training`, or if p is 0, the result is a copy. Each run of the program draws new random
    numbers from torch's generator.

    Raises:
        DefinitionError: p is not a number from 0 to 1.
        DtypeError: the operand is not floating.
    """
    x = _wide("dropout", input)
    if not 0.0 <= p <= 1.0:
        raise fail("dropout", f"p must be a probability from 0 to 1, got {show(p)}")
    if not training or p == 0.0:
        return copy_tensor(input)
    keep = 1.0 - p
    if not keep:
        return _in(_call("mul", x, 0.0), input.dtype())
    drawn = uniform(0.0, 1.0, [input.size(i) for i in range(input.ndim)])
    # A product, not `where`: dropped elements that are infinite or NaN become NaN, as in torch.
    kept = _call("mul", x, _in(_call("lt", drawn, keep), x.dtype()))
    return _in(_call("mul", kept, 1.0 / keep), input.dtype())


# ------------------------------------------------------------------ cross entropy
def cross_entropy(
    input: TensorView,
    target: TensorView,
    weight: TensorView | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorView:
    """Computes -log_softmax(input) at the target, for logits [C], [N, C] or [N, C, ..].

    - `target` has class indices or class probabilities. Class indices are integers, and `target`
      lacks the axis C. Class probabilities are floating, and `target` has the shape of `input`.
    - `weight` [C] has a factor for the loss of each class.
    - Targets that are `ignore_index` have a loss of 0.
    - `reduction` is "none", "mean" or "sum". For class indices, the mean divides by the total
      weight of the targets that are not `ignore_index`. For probabilities, the mean divides by the
      number of losses.
    - `label_smoothing` is the share of the target that is spread evenly over all classes.
    - An index that is not a class gives NaN; torch raises an error instead.

    Raises:
        DefinitionError: a shape, `reduction`, `label_smoothing` or `ignore_index` is wrong.
        DtypeError: the logits are not floating, or a weight has a wider dtype than the computation.
    """
    name = "cross_entropy"
    if reduction not in _REDUCTIONS:
        raise fail(name, f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise fail(name, f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not input.ndim:
        raise fail(name, f"{input} has no axes, but logits need an axis of classes")
    x, axis = _wide(name, input), min(input.ndim - 1, 1)
    if weight is not None:
        if weight.ndim != 1:
            raise fail(
                name,
                f"weight must have 1 axis, that of the classes, but {weight} has {weight.ndim}",
            )
        what = f"{name}: weight {weight} and axis {axis} of {input}"
        declare_extent(active_fusion(), input.size(axis), weight.size(0), what)
        weight = _along(_parameter(name, "weight", weight, x), axis, x.ndim)
    is_index = category(target.dtype()) == "int"
    given = x, target, weight, axis, ignore_index, label_smoothing
    if is_index:
        losses, weights = _of_indices(*given)
    else:
        losses, weights = _of_probabilities(*given), x
    if reduction != "none":
        losses = reductions.sum(losses)
    if reduction == "mean" and is_index:
        zero = Const(0.0, x.dtype())
        counted = _call("where", _call("eq", target, ignore_index), zero, weights)
        losses = _call("div", losses, reductions.sum(_in(counted, x.dtype())))
    elif reduction == "mean":
        rows = sc.product(x.size(i) for i in range(x.ndim) if i != axis)
        losses = _call("div", losses, rows)
    if is_index:
        return _in(losses, input.dtype())
    return _in(losses, promote_operands([(tv.dtype(), "dim") for tv in (input, target)]))


def _of_indices(
    x: TensorView,
    target: TensorView,
    weight: TensorView | None,
    axis: int,
    ignore_index: int,
    smoothing: float,
) -> tuple[TensorView, TensorView | Const]:
    """Returns (loss of each target, weight of the target's class) of a cross entropy, for class
    indices `target`.

    `x` has the logits, with the classes along `axis`. `weight` has a factor for each class, and
    targets that are `ignore_index` have a loss of 0. `smoothing` is the share of the target that is
    spread evenly over all classes.
    """
    name, dtype, classes = "cross_entropy", x.dtype(), x.size(axis)
    if target.ndim != x.ndim - 1:
        raise fail(
            name,
            f"class indices must have {counted(x.ndim - 1, 'axis')}, those of {x} without axis "
            f"{axis}, but {target} has {counted(target.ndim, 'axis')}",
        )
    _declare(x, target, [i for i in range(x.ndim) if i != axis])
    places = _along(iota(classes, dtype=DataType.Int), axis, x.ndim)
    is_target = _call("eq", places, _beside(target, axis))
    zero = Const(0.0, dtype)
    shifted = _shifted(x, axis)
    log_total = _log_total(shifted, axis, keepdim=False)
    picked = reductions.sum(_call("where", is_target, shifted, zero), axis)
    losses = _call("sub", log_total, picked)
    of_class: TensorView | Const = Const(1.0, dtype)
    if weight is not None:
        of_class = reductions.sum(_call("where", is_target, weight, zero), axis)
        losses = _call("mul", losses, of_class)
    if smoothing:
        spread = _smooth(shifted, log_total, weight, axis)
        spread = _call("mul", spread, apply_pointwise("div", (smoothing, classes)))
        losses = _call("add", _call("mul", losses, 1.0 - smoothing), spread)
    is_class = _call("logical_and", _call("ge", target, 0), _call("lt", target, classes))
    losses = _call("where", is_class, losses, Const(float("nan"), dtype))
    return _call("where", _call("eq", target, ignore_index), zero, losses), of_class


def _smooth(
    shifted: TensorView, log_total: TensorView, weight: TensorView | None, axis: int
) -> TensorView:
    """Returns -sum(weight * log_softmax) over the classes: the part of a cross entropy that label
    smoothing adds.

    `shifted` has the logits minus their maximum, with the classes along `axis`. `log_total` is
    log(sum(exp(shifted))).
    """
    if weight is None:
        whole = _call("mul", log_total, shifted.size(axis))
        return _call("sub", whole, reductions.sum(shifted, axis))
    less = _call("sub", _beside(log_total, axis), shifted)
    return reductions.sum(_call("mul", weight, less), axis)


def _of_probabilities(
    x: TensorView,
    target: TensorView,
    weight: TensorView | None,
    axis: int,
    ignore_index: int,
    smoothing: float,
) -> TensorView:
    """Returns the losses of a cross entropy for class probabilities `target`.

    `x` has the logits, with the classes along `axis`. `weight` has a factor for each class.
    `smoothing` is the share of the target that is spread evenly over all classes. `ignore_index`
    must be negative, because it applies to class indices only.
    """
    name = "cross_entropy"
    if ignore_index >= 0:
        raise fail(
            name,
            f"ignore_index {ignore_index} applies to class indices only, and {target} holds "
            "probabilities",
        )
    if target.ndim != x.ndim:
        raise fail(
            name,
            f"class probabilities must have the {counted(x.ndim, 'axis')} of {x}, but {target} has "
            f"{counted(target.ndim, 'axis')}",
        )
    _declare(x, target, list(range(x.ndim)))
    share = _parameter(name, "target", target, x)
    if smoothing:
        spread = apply_pointwise("div", (smoothing, x.size(axis)))
        share = _call("add", _call("mul", share, 1.0 - smoothing), spread)
    share = share if weight is None else _call("mul", share, weight)
    shifted = _shifted(x, axis)
    losses = _call("sub", _log_total(shifted, axis, keepdim=True), shifted)
    return reductions.sum(_call("mul", share, losses), axis)


def _along(tv: TensorView, axis: int, rank: int) -> TensorView:
    """Returns the vector `tv` as a tensor of `rank` axes.

    The axis of the vector is at position `axis`; the other axes are broadcasts of size 1.
    """
    return tv if rank == 1 else broadcast_tensor(tv, tuple(i != axis for i in range(rank)))


def _beside(tv: TensorView, axis: int) -> TensorView:
    """Returns `tv` with a new broadcast axis of size 1 at position `axis`."""
    return broadcast_tensor(tv, tuple(i == axis for i in range(tv.ndim + 1)))


def _declare(x: TensorView, target: TensorView, axes: list[int]) -> None:
    """Records that the axes of `target` have the sizes of the axes `axes` of `x`.

    Raises `DefinitionError` if constant sizes differ, because targets are not broadcast.
    """
    for i, axis in enumerate(axes):
        what = f"cross_entropy: target {target} and {x}"
        declare_extent(active_fusion(), x.size(axis), target.size(i), what)
