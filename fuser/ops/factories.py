"""Op functions that create tensors from numbers: full, iota, random numbers; and triu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuser.ir.dtypes import (
    FLOAT8,
    DataType,
    DtypeLike,
    category,
    check_supported,
    dtype_text,
    is_floating,
)
from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import FullOp, IotaOp, RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    as_operand,
    axis_of_extent,
    broadcast_tensor,
    check_exact,
    fail,
    new_output,
)
from fuser.ops.elementwise import apply_pointwise, check_rank_at_least
from fuser.ops.reduction_table import computed_in
from fuser.support.errors import DtypeError, UnsupportedError, user_code, user_line


def full(shape: Sequence[SizeLike], fill_value: ScalarLike, dtype: DtypeLike) -> TensorView:
    """Creates a tensor of the given shape in which every element is `fill_value`, cast to `dtype`.

    Raises:
        DefinitionError: a size is negative or not an integer, or an integer dtype cannot hold the
            integer `fill_value`.
    """
    sizes = [as_extent(s, "full", i, lowest=0) for i, s in enumerate(shape)]
    value, dtype = as_operand(fill_value, "full"), check_supported(dtype, "full")
    check_exact(value, dtype, "full")
    return full_tensor(sizes, value, dtype)


def full_tensor(sizes: Sequence[Scalar], value: Scalar, dtype: DataType) -> TensorView:
    """Adds an op that fills a tensor of these sizes with `value`, and returns the tensor.

    Unlike the op `full` of users, this function takes only scalars of the definition, and checks
    nothing.
    """
    out = new_output([axis_of_extent(s) for s in sizes], dtype, ())
    add_op(FullOp(out, tuple(sizes), sc.cast(value, dtype)))
    return out


def iota(
    length: SizeLike,
    start: ScalarLike | None = None,
    step: ScalarLike | None = None,
    dtype: DtypeLike = DataType.Int,
) -> TensorView:
    """Creates the vector of the numbers start + i * step for 0 <= i < length.

    The default of `start` is 0, and the default of `step` is 1.

    Raises:
        DefinitionError: the step is 0 or not finite, or the length is negative.
        DtypeError: the dtype is neither integer nor floating, or `start` or `step` is of the other
            kind.
    """
    dtype = check_supported(dtype, "iota")
    if category(dtype) not in ("int", "float"):
        raise DtypeError(
            f"iota: dtype must be an integer or floating dtype, got {dtype_text(dtype)} "
            f"(at {user_line()})"
        )
    size = as_extent(length, "iota", lowest=0)
    first, stride = (_iota_scalar(v, default, dtype) for v, default in ((start, 0), (step, 1)))
    # Checked before the cast, because a cast scalar is no constant any more.
    value = stride.value if isinstance(stride, Const) else 1
    if value == 0 or not math.isfinite(value):
        raise fail("iota", f"step must be finite and not 0, got {value}")
    out = new_output([axis_of_extent(size)], dtype, ())
    add_op(IotaOp(out, size, sc.cast(first, dtype), sc.cast(stride, dtype)))
    return out


def _iota_scalar(value: ScalarLike | None, default: int, dtype: DataType) -> Scalar:
    if value is None:
        return Const(default, dtype)
    scalar = as_operand(value, "iota")
    if category(scalar.dtype) != category(dtype):
        raise DtypeError(
            f"iota: start and step must be integers for an integer dtype, and floating for a "
            f"floating dtype, but {scalar} is {dtype_text(scalar.dtype)} and dtype is "
            f"{dtype_text(dtype)} (at {user_line()})"
        )
    return scalar


def triu(arg: TensorView, diagonal: ScalarLike = 0) -> TensorView:
    """Copies the matrices of the last two axes, with zeros where column - row < diagonal.

    Raises:
        DefinitionError: the operand has fewer than two axes.
    """
    tv = arg
    check_rank_at_least("triu", tv, 2)
    row = broadcast_tensor(iota(tv.size(-2)), (False, True))
    column = iota(tv.size(-1))
    distance = apply_pointwise("sub", (column, row))
    kept = apply_pointwise("ge", (distance, as_operand(diagonal, "triu")))
    out = apply_pointwise("where", (kept, tv, Const(0, tv.dtype())))
    assert isinstance(out, TensorView)
    return out


# ----------------------------------------------------------------------
# Op functions for random tensors: uniform, normal, rand_like, randn_like.
#
# A random number depends only on the seed, the offset and its index in the tensor (`philox`). No
# schedule, sharding or recomputation changes the number. Without a seed and an offset, each run of
# the program takes both from torch's generator and advances the generator. The first such op of the
# definition gets the lowest offset.

Ends = tuple[Scalar, Scalar]


def uniform(
    minval: ScalarLike,
    maxval: ScalarLike,
    shape: Sequence[SizeLike],
    *,
    rng_seed: Scalar | int | None = None,
    rng_offset: Scalar | int | None = None,
    dtype: DtypeLike = DataType.Float,
) -> TensorView:
    """Creates a tensor of the given shape with random numbers, uniform in [minval, maxval).

    `rng_seed` and `rng_offset` are 64-bit integers or integer scalars; pass both or neither. Equal
    seeds and offsets give equal numbers. Without seed and offset, each run draws from torch's
    generator.

    Raises:
        DefinitionError: minval is above maxval, or only one of seed and offset is passed.
        DtypeError: the dtype is not floating, or a scalar is of a wrong kind.
        UnsupportedError: the dtype is Float8.
    """
    low, high = _ends("uniform", (minval, maxval), dtype)
    if isinstance(low, Const) and isinstance(high, Const) and not low.value <= high.value:
        raise fail("uniform", f"minval must be at most maxval, but {low.value} > {high.value}")
    return _random("uniform", (low, high), shape, (rng_seed, rng_offset), dtype)


def normal(
    mean: ScalarLike,
    std: ScalarLike,
    shape: Sequence[SizeLike],
    *,
    rng_seed: Scalar | int | None = None,
    rng_offset: Scalar | int | None = None,
    dtype: DtypeLike = DataType.Float,
) -> TensorView:
    """Creates a tensor of the given shape with normally distributed random numbers.

    `mean` and `std` are the mean and the standard deviation. `rng_seed` and `rng_offset` are 64-bit
    integers or integer scalars; pass both or neither. Equal seeds and offsets give equal numbers.
    Without seed and offset, each run draws from torch's generator.

    Raises:
        DefinitionError: `std` is negative, or only one of seed and offset is passed.
        DtypeError: the dtype is not floating, or a scalar is of a wrong kind.
        UnsupportedError: the dtype is Float8.
    """
    center, deviation = _ends("normal", (mean, std), dtype)
    if isinstance(deviation, Const) and not deviation.value >= 0:
        raise fail("normal", f"std must be at least 0, got {deviation.value}")
    return _random("normal", (center, deviation), shape, (rng_seed, rng_offset), dtype)


def rand_like(arg: TensorView, /) -> TensorView:
    """Creates a tensor of the shape and dtype of `arg` with random numbers, uniform in [0, 1).

    The values of `arg` are not read. The sharding of the result therefore follows from the ops that
    read it, not from `arg`.

    Raises:
        DtypeError: the operand is not floating.
        UnsupportedError: the operand is Float8.
    """
    return _random_like("rand_like", "uniform", arg)


def randn_like(arg: TensorView, /) -> TensorView:
    """Creates a tensor of the shape and dtype of `arg` with standard normal random numbers.

    The values of `arg` are not read. The sharding of the result therefore follows from the ops that
    read it, not from `arg`.

    Raises:
        DtypeError: the operand is not floating.
        UnsupportedError: the operand is Float8.
    """
    return _random_like("randn_like", "normal", arg)


def key_of(op: RandomOp) -> tuple[Scalar, Scalar]:
    """Returns (seed, offset) of a random op, the two numbers that determine its random numbers.

    Raises `UnsupportedError` if the op has neither. Such an op draws both from torch's generator.
    This is possible only in a FusionDefinition, and not where this function is called.
    """
    if op.seed is None or op.offset is None:
        raise UnsupportedError(
            f"{op.kind} of {op.out} has no seed: only a FusionDefinition can draw from torch's "
            f"generator; pass rng_seed and rng_offset{user_code(op.where)}"
        )
    return op.seed, op.offset


def _random_like(name: str, kind: str, arg: TensorView) -> TensorView:
    _check_floating(name, arg.dtype())
    return _random(kind, None, [arg.size(i) for i in range(arg.ndim)], (None, None), arg.dtype())


def _check_floating(name: str, dtype: DtypeLike) -> DataType:
    dtype = check_supported(dtype, name)
    if not is_floating(dtype):
        raise DtypeError(
            f"{name}: a floating dtype is needed for random numbers, got {dtype_text(dtype)} "
            f"(at {user_line()})"
        )
    if dtype in FLOAT8:
        raise UnsupportedError(
            f"{name}: random numbers of {dtype_text(dtype)} are not supported, because this dtype "
            f"has too few values for the distribution: draw Float and cast the result"
            f"{user_code(user_line())}"
        )
    return dtype


def _ends(name: str, values: tuple[ScalarLike, ScalarLike], dtype: DtypeLike) -> Ends:
    """Returns the two parameters of a distribution (its bounds, or mean and standard deviation),
    cast to the dtype of the computation.

    `dtype` is the dtype of the random numbers. `name` is the op, for errors.
    """
    computed = computed_in(_check_floating(name, dtype))
    low, high = (as_operand(v, name) for v in values)
    for value in (low, high):
        if category(value.dtype) not in ("int", "float"):
            raise DtypeError(
                f"{name}: the parameters of the distribution must be real numbers, but {value} is "
                f"{dtype_text(value.dtype)} (at {user_line()})"
            )
    return sc.cast(low, computed), sc.cast(high, computed)


def _random(
    kind: str,
    ends: Ends | None,
    shape: Sequence[SizeLike],
    key: tuple[Scalar | int | None, Scalar | int | None],
    dtype: DtypeLike,
) -> TensorView:
    dtype = _check_floating(kind, dtype)
    sizes = tuple(as_extent(s, kind, i, lowest=0) for i, s in enumerate(shape))
    seed, offset = (as_operand(v, kind) if isinstance(v, int) else v for v in key)
    if (seed is None) != (offset is None):
        given, missing = ("rng_seed", "rng_offset")[:: 1 if offset is None else -1]
        raise fail(kind, f"{given} is passed without {missing}: pass both or neither")
    for value in (seed, offset):
        if value is not None and category(value.dtype) != "int":
            raise DtypeError(
                f"{kind}: rng_seed and rng_offset must be integers, but {value} is "
                f"{dtype_text(value.dtype)} (at {user_line()})"
            )
    out = new_output([axis_of_extent(s) for s in sizes], dtype, ())
    a, b = ends or (None, None)
    add_op(RandomOp(out, sizes, a, b, seed, offset, kind=kind))
    return out
