"""Inputs of a definition: `define_tensor`, `define_scalar`, and the memory layout that follows from
sizes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.dtypes import (
    DataType,
    DtypeLike,
    check_stored,
    check_supported,
    dtype_of_python,
    from_torch,
    is_inexact,
)
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.shard_annotation import Replicate, mesh_of, shard
from fuser.ir.types import IterType
from fuser.ops.building import literal, unsupported
from fuser.ops.reshaping import ordered_axes
from fuser.support.arguments import checked, show
from fuser.support.errors import ArgumentError, DefinitionError, counted, user_code, user_line

Contiguity = Sequence[bool | None]
_NAME = "define_tensor"
_entrance = partial(checked, name=_NAME)


def define_tensor(*args: object, **kwargs: object) -> TensorView:
    """Adds a tensor that no op computes, usually an input of the program, and returns the tensor.

    The arguments have one of three forms:

    1. `(shape, contiguity: list[bool | None], dtype=Float, is_cpu=False, stride_order=[])`
    2. `(shape, contiguity: bool = False, dtype=Float, is_cpu=False, stride_order=[])`
    3. `(sizes, strides: list[int], dtype=Float, static_sizes=False, is_cpu=False)`

    The form is the third if `sizes` or `strides` are passed by name, or if the second argument is a
    list of integers.

    - An entry of `shape` is -1 for a symbolic size, 1 for a broadcast axis, and 0 or a number above
      1 for a constant size.
    - `contiguity` has one entry per axis, in the order of memory (outermost first). True says that
      there is no gap in memory: the stride of the axis is the product of size and stride of the
      next inner axis, or 1 for the innermost axis. None marks a broadcast axis. If the size of such
      an axis is not 1, its one element in memory is repeated (stride 0). A single bool applies to
      all axes of a size other than 1.
    - `stride_order` has, per axis, its position in the order of strides: 0 for the axis with the
      smallest stride. By default, the tensor is row-major.
    - `sizes` and `strides` are those of an example. By default, every size other than 1 becomes
      symbolic. With `static_sizes=True`, all sizes are constant.
    - A tensor without axes may have `is_cpu=True`. The tensor is then stored on the host, and each
      run reads its current value.
    - All forms also take `mesh=` and `placements=` (see `fuser.shard`). A mesh without placements
      replicates the tensor. Sizes are those of the whole tensor, not of one device's part.

    Raises:
        ArgumentError: an argument is of the wrong kind, or the shape is a torch tensor with data.
        DefinitionError: sizes, contiguity and stride order contradict each other.
        UnsupportedError: no tensor can have this dtype.

    Example: `x = fd.define_tensor([-1, 768], contiguity=True, dtype=DataType.BFloat16)`
    """
    mesh, placements = kwargs.pop("mesh", None), kwargs.pop("placements", None)
    if mesh is None:
        if placements is not None:
            raise DefinitionError(
                f"{_NAME}: placements={show(placements)} was passed without mesh=: pass both"
            )
        return _defined(*args, **kwargs)
    mesh = mesh_of(mesh)
    tv = _defined(*args, **kwargs)
    return shard(tv, mesh, [Replicate()] * mesh.ndim if placements is None else placements)  # pyright: ignore[reportArgumentType]


def _defined(*args: object, **kwargs: object) -> TensorView:
    _refuse_values(args[0] if args else kwargs.get("shape", kwargs.get("sizes")))
    second = args[1] if len(args) > 1 else None
    is_strides = isinstance(second, list | tuple) and any(type(v) is int for v in second)
    if "sizes" in kwargs or "strides" in kwargs or is_strides:
        return _from_strides(*args, **kwargs)  # pyright: ignore[reportArgumentType]
    return _from_shape(*args, **kwargs)  # pyright: ignore[reportArgumentType]


def _refuse_values(shape: object) -> None:
    """Raises `ArgumentError` if the argument `shape` is a tensor with data instead of a shape."""
    data = shape if isinstance(shape, torch.Tensor) else None
    if hasattr(shape, "__array__") and data is None:
        try:
            data = torch.as_tensor(shape)
        except (TypeError, ValueError, RuntimeError):  # an array of strings, say
            return
    if data is None or (data.dim() == 1 and not is_inexact(from_torch(data.dtype))):
        return
    sizes = list(data.shape)
    raise ArgumentError(
        f"{_NAME}(): incompatible function arguments: shape: expected a list of sizes, got a "
        f"{type(shape).__name__} of shape {sizes}: write fd.{_NAME}({sizes}), or "
        f"fd.from_pytorch(x) for an input like this one{user_code(user_line())}"
    )


@_entrance
def _from_strides(
    sizes: Sequence[int],
    strides: Sequence[int],
    dtype: DtypeLike = DataType.Float,
    static_sizes: bool = False,
    is_cpu: bool = False,
) -> TensorView:
    contiguity, order = compute_tensor_descriptor(sizes, strides)
    shape = [s if static_sizes or s == 1 else -1 for s in sizes]
    return _from_shape(shape, contiguity, dtype, is_cpu, order)


@_entrance
def _from_shape(
    shape: Sequence[int],
    contiguity: Contiguity | bool = False,
    dtype: DtypeLike = DataType.Float,
    is_cpu: bool = False,
    stride_order: Sequence[int] = (),
) -> TensorView:
    _check_shape(shape)
    dtype = check_stored(dtype, _NAME)
    rank = len(shape)
    if is_cpu and rank:
        raise DefinitionError(
            f"{_NAME}: CPU non-scalar tensor is not supported! shape {shape}: pass is_cpu=True "
            "only with the shape []"
        )
    if stride_order and any(s < 0 for s in stride_order):
        raise unsupported(
            _NAME,
            f"stride_order has negative entries, which are not supported: {list(stride_order)}",
        )
    # Allocation positions of the logical axes; checks stride_order before anything is created.
    positions = _allocation_positions(rank, stride_order)
    if isinstance(contiguity, bool):
        flag = contiguity
        flags: list[bool | None] = [None if s == 1 else flag for s in shape]
    else:
        if len(contiguity) != rank:
            raise DefinitionError(
                f"{_NAME}: Length of contiguity argument ({len(contiguity)}) must match that of "
                f"shape argument ({rank})"
            )
        flags = [contiguity[p] for p in positions]
        _check_flags(shape, flags)
    axes = _make_axes(shape, flags)
    tv = active_fusion().new_tensor(axes, dtype)
    tv.is_cpu_scalar, tv.where = is_cpu, user_line()
    _set_layout(tv, axes, positions, flags)
    return tv


def _check_shape(shape: Sequence[int]) -> None:
    for i, s in enumerate(shape):
        literal(s, DataType.Index, _NAME)
        if s < -1:
            raise DefinitionError(
                f"{_NAME}: The value {s} at index {i} was neither symbolic(-1), zero_element(0), "
                "broadcast(1), or static(>1)."
            )


def _check_flags(shape: Sequence[int], flags: Contiguity) -> None:
    for i, (s, flag) in enumerate(zip(shape, flags, strict=True)):
        if s == 1 and flag is not None:
            raise DefinitionError(
                f"{_NAME}: the contiguity of the broadcast dimension {i} must be None, got {flag}"
            )


def _allocation_positions(rank: int, stride_order: Sequence[int]) -> list[int]:
    """Returns for each axis of a tensor its position in memory order; 0 is the outermost axis.

    `stride_order` has for each axis its position in the order of strides (0 for the smallest), and
    is empty for row-major order. `rank` is the number of axes.
    """
    if not stride_order:
        return list(range(rank))
    placeholders = [IterDomain(i, IterType.iteration, sc.ONE) for i in range(rank)]
    order = [a.number for a in ordered_axes(placeholders, stride_order, _NAME)]
    return [order.index(i) for i in range(rank)]


def _make_axes(shape: Sequence[int], flags: Contiguity) -> list[IterDomain]:
    """Creates the axes of a tensor; an axis whose contiguity flag is None becomes a broadcast axis.

    All extents are created first, so that their symbols have consecutive numbers.
    """
    fusion = active_fusion()
    sizes: list[Scalar] = [fusion.new_extent() if s == -1 else sc.const(s) for s in shape]
    axes: list[IterDomain] = []
    for s, size, flag in zip(shape, sizes, flags, strict=True):
        if flag is not None:
            axes.append(fusion.new_axis(size))
        else:
            expanded = None if s == 1 else size
            axes.append(fusion.new_axis(sc.ONE, IterType.broadcast, expanded=expanded))
    return axes


def _set_layout(
    tv: TensorView, axes: Sequence[IterDomain], positions: Sequence[int], flags: Contiguity
) -> None:
    placed = sorted(range(len(axes)), key=lambda i: positions[i])
    is_logical_order = placed == list(range(len(axes)))
    tv.domain = TensorDomain.of(
        axes,
        allocation=() if is_logical_order else [axes[i] for i in placed],
        contiguity=[flags[i] for i in placed],
    )


@checked
def compute_tensor_descriptor(
    sizes: Sequence[int], strides: Sequence[int]
) -> tuple[list[bool | None], list[int]]:
    """Returns (contiguity flags, stride order) of a tensor with these sizes and strides.

    A flag is True if there is no gap in memory between an axis and the next inner axis. It is None
    for an axis of size 1 or stride 0. The flags are in memory order: axes sorted by decreasing
    stride. An axis with stride 0 (one element, repeated) keeps the position that it has in `sizes`.
    The stride order has, per axis of `sizes`, its position in the order of strides, 0 for the
    smallest.

    Raises:
        DefinitionError: a stride is negative, or the two lists differ in length.

    Example: sizes [4, 8] with strides [1, 4] give ([True, True], [0, 1]).
    """
    if len(sizes) != len(strides):
        raise DefinitionError(
            f"compute_tensor_descriptor: got {counted(len(sizes), 'size')}, but "
            f"{counted(len(strides), 'stride')}: pass one stride for each size"
        )
    for i, s in enumerate(strides):
        if s < 0:
            raise DefinitionError(f"negative stride on tensor is not supported: strides[{i}]={s}")
    rank = len(sizes)
    order = sorted((i for i in range(rank) if strides[i]), key=lambda i: -strides[i])
    for i in range(rank):
        if not strides[i]:
            order.insert(i, i)
    contiguity: list[bool | None] = []
    expected = 1
    for i in reversed(order):
        if strides[i] == 0 or sizes[i] == 1:
            contiguity.append(None)
            continue
        contiguity.append(strides[i] == expected)
        expected = strides[i] * sizes[i]
    positions = {axis: p for p, axis in enumerate(order)}
    return contiguity[::-1], [rank - 1 - positions[i] for i in range(rank)]


@checked
def define_scalar(
    value: bool | int | float | complex | DataType | None = None, dtype: DtypeLike | None = None
) -> Scalar:
    """Adds a scalar to the definition and returns the scalar.

    With a `value`, the scalar is a constant. Without a value, the scalar is symbolic: its value is
    known only in a run. The default dtype of a symbolic scalar is Double.

    Raises:
        DefinitionError: the dtype cannot represent the value.
        UnsupportedError: no scalar can have this dtype.
    """
    if isinstance(value, DataType):
        if dtype is not None:
            raise ArgumentError(
                "define_scalar(): incompatible function arguments: the dtype was passed twice"
            )
        value, dtype = None, value
    fusion = active_fusion()
    if value is None:
        return fusion.new_symbol(check_supported(dtype or DataType.Double, "define_scalar"))
    fusion.next_scalar()
    found = check_supported(dtype or dtype_of_python(value), "define_scalar")
    return literal(value, found, "define_scalar")
