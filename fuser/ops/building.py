"""Functions that all ops share: operands, dtype promotion, output axes, errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.dtypes import (
    STORED,
    Config,
    DataType,
    Rank,
    category,
    check_supported,
    common_dtype,
    dtype_of_python,
    dtype_text,
    is_complex,
    misfit,
    number_width,
    promote_operands,
)
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import BroadcastOp, CastOp, LibraryOp, SqueezeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ir.types import IterType
from fuser.ops.reduction_table import operand_dtype
from fuser.support.arguments import Kind, Mismatch, wrong
from fuser.support.errors import (
    DefinitionError,
    DtypeError,
    UnsupportedError,
    counted,
    user_line,
)

Operand = TensorView | Scalar
OperandLike = TensorView | Scalar | bool | int | float | complex
SizeLike = Scalar | int
OpT = TypeVar("OpT", bound=TensorOp)


def fail(op_name: str, message: str) -> DefinitionError:
    """Returns the error for a wrong call of an op, with the op's name and the user's line."""
    return DefinitionError(f"{op_name}: {message} (at {user_line()})")


def unsupported(op_name: str, message: str) -> UnsupportedError:
    """Returns the error for a correct call that is not implemented, with the user's line."""
    return UnsupportedError(f"{op_name}: {message} (at {user_line()})")


def refuse_complex(op_name: str, *values: Operand) -> None:
    """Raises `DtypeError` if one of `values` is complex. It is called by ops that are defined on
    real numbers only.
    """
    for value in values:
        if is_complex(operand_dtype(value)):
            raise DtypeError(
                f"{op_name}: the operands must be real, because complex numbers have no order, no "
                f"rounding and no remainder, but {value} is {dtype_text(operand_dtype(value))} "
                f"(at {user_line()})"
            )


# ------------------------------------------------------------------ operands
def _take_tensor(value: object) -> TensorView:
    if not isinstance(value, TensorView):
        raise wrong("a tensor", value)
    if value.fusion is not active_fusion():
        raise Mismatch(
            f"{value} belongs to another definition than the one being written",
            kind=DefinitionError,
        )
    return value


def _take_scalar(value: object) -> Scalar:
    if not isinstance(value, Scalar):
        raise wrong("a scalar", value)
    fusion = active_fusion()
    if any(not fusion.may_have_made(s) for s in sc.symbols(value)):
        raise Mismatch(
            f"{value} belongs to another definition than the one being written",
            kind=DefinitionError,
        )
    return value


# Ops are stricter than other calls: a tensor or scalar must belong to the active definition.
ARGUMENTS = {
    TensorView: Kind("a tensor", _take_tensor),
    Scalar: Kind("a scalar", _take_scalar),
}


@overload
def as_operand(value: ScalarLike, op_name: str) -> Scalar: ...
@overload
def as_operand(value: OperandLike, op_name: str) -> Operand: ...
def as_operand(value: OperandLike, op_name: str) -> Operand:
    """Returns a Python number as a new constant, and a tensor or a scalar unchanged."""
    if isinstance(value, TensorView | Scalar):
        return value
    active_fusion().next_scalar()
    return literal(value, dtype_of_python(value), op_name)


def as_extent(
    value: SizeLike, op_name: str, index: int = 0, *, lowest: int | None = None
) -> Scalar:
    """Returns an extent, or a number from which extents are computed, as an Index scalar.

    A scalar of a floating dtype is cast to Index, but the value must be an integer. A constant is
    checked now, and any other scalar when the program runs (`fuser.frontend.implicit_inputs`).
    `index` is the position among the sizes, for messages. A Python int must be at least `lowest`.

    Raises:
        DefinitionError: a constant is not an integer.
        DtypeError: the scalar is neither an integer nor floating.
    """
    if isinstance(value, int) or category(value.dtype) != "float":
        return as_integer(value, op_name, index, lowest=lowest)
    if isinstance(value, Const):
        if problem := misfit(value.value, DataType.Index):
            raise fail(op_name, f"size at index {index}: {problem}")
        return as_integer(int(value.value), op_name, index, lowest=lowest)
    return sc.cast(value, DataType.Index)


def check_offsets(name: str, field: str, tv: TensorView) -> None:
    """Raises `DtypeError` unless `tv` has one axis and the dtype Int32.

    Such a tensor lists the positions at which groups of rows begin or end. `name` is the op and
    `field` the argument, for the message.
    """
    if tv.dtype() is not DataType.Int32 or tv.ndim != 1:
        raise DtypeError(
            f"{name}: {field} must have 1 axis and the dtype Int32, but {tv} has "
            f"{counted(tv.ndim, 'axis')} and the dtype {tv.dtype().name} (at {user_line()})"
        )


def literal(value: bool | int | float | complex, dtype: DataType, op_name: str) -> Const:
    """Returns `value` as a constant of `dtype`.

    Raises `DefinitionError` if the dtype cannot represent the value.
    """
    problem = misfit(value, dtype)
    if problem:
        raise fail(op_name, problem)
    return Const(value, dtype)


def check_exact(value: Operand, dtype: DataType, op_name: str) -> None:
    """Raises `DefinitionError` if `value` is a constant integer that `dtype` cannot represent.

    A scalar whose value is known only in a run is checked in the run (`hostir.runtime.inputs`).
    """
    if not (isinstance(value, Const) and category(value.dtype) == category(dtype) == "int"):
        return
    problem = misfit(value.value, dtype)
    if problem:
        hint = "cast the tensor first, or pass a number that fits"
        raise fail(op_name, f"{problem}, the dtype of the result: {hint}")


def number_in(value: bool | int | float | complex, dtype: DataType, op_name: str) -> Const:
    """Returns a number argument of an op as a new constant of `dtype`, the dtype of a tensor.

    Raises `DefinitionError` if the dtype cannot represent the number.
    """
    active_fusion().next_scalar()
    return literal(value, dtype, op_name)


def as_integer(
    value: SizeLike, op_name: str, index: int = 0, *, lowest: int | None = None
) -> Scalar:
    """Returns an integer as an Index scalar.

    A Python int must be at least `lowest`, if `lowest` is not None. `index` is the position of the
    integer among the op's arguments, for messages. Raises `DtypeError` for another dtype.
    """
    if isinstance(value, int):
        if lowest is not None and value < lowest:
            raise fail(op_name, f"size at index {index} must be at least {lowest}, got {value}")
        active_fusion().next_scalar()
        return sc.const(value)
    if category(value.dtype) != "int":
        raise DtypeError(
            f"{op_name}: {value} at index {index} has the dtype {dtype_text(value.dtype)} and is "
            "not an integer"
        )
    # Constants compare equal to our Index constants whatever integer type the user gave them.
    return sc.const(int(value.value)) if isinstance(value, Const) else value


def wrap_dim(dim: int, rank: int, op_name: str, tv: TensorView) -> int:
    """Returns the position, from 0, of axis `dim`; a negative `dim` counts from the last axis.

    `rank` is the number of axes of `tv`. Raises `DefinitionError` if there is no such axis.
    """
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise fail(
            op_name,
            f"Tried to access out of boundary index {dim}. total index: {rank} in {tv}: it has "
            f"{counted(rank, 'axis')}, so the number of an axis must be from {-max(rank, 1)} to "
            f"{max(rank, 1) - 1}",
        )
    return dim + rank if dim < 0 else dim


def axes_of(tv: TensorView) -> tuple[IterDomain, ...]:
    """Returns the axes of `tv` that the user sees: all but reduction axes, which exist only inside
    the op that reduces them.
    """
    return tv.domain.no_reductions


# ------------------------------------------------------------------ making ops
def mesh_of(values: Iterable[object]) -> DeviceMesh | None:
    """Returns the device mesh of the first tensor in `values` that has a mesh.

    Returns None if no tensor has a mesh.
    """
    return next((v.mesh for v in values if isinstance(v, TensorView) and v.mesh is not None), None)


def new_output(
    domain: TensorDomain | Sequence[IterDomain], dtype: DataType, values: Iterable[object]
) -> TensorView:
    """Creates the result tensor of an op. It is placed on the mesh of the first operand that has a
    mesh.

    `domain` has the axes of the result. `values` are the operands of the op.
    """
    check_supported(dtype, "op result")
    return active_fusion().new_tensor(domain, dtype, mesh=mesh_of(values))


def add_op(op: OpT) -> OpT:
    """Adds `op` to the definition that is being written, and returns the op, which now has the
    user's line.

    Raises `DefinitionError` if a tensor belongs to another definition, and `UnsupportedError` if no
    kernel can compute with its dtype.
    """
    op = op.replace(where=user_line())
    fusion = active_fusion()
    for tv in op.inputs:
        if isinstance(tv, TensorView) and tv.fusion is not fusion:
            raise fail(op.name, f"{tv} belongs to another definition than the one being written")
        if isinstance(tv, TensorView) and tv.dtype() in STORED and not isinstance(op, LibraryOp):
            raise unsupported(
                op.name,
                f"{tv} has the dtype {dtype_text(tv.dtype())}, a dtype that can be stored, but not "
                "computed with",
            )
    fusion.add(op)
    return op


def clone_axes(tv: TensorView) -> list[IterDomain]:
    """Returns new axes with the sizes of the axes of `tv` that the user sees.

    The new axes are not split over devices, and neither threads nor CUDA blocks are assigned to
    them.
    """
    fusion = active_fusion()
    return [fusion.clone_axis(a) for a in axes_of(tv)]


# ------------------------------------------------------------------ casts and promotion
def rank_class(value: Operand) -> Rank:
    """Returns the kind of an operand, on which the common dtype of several operands depends.

    The kinds are "dim" (a tensor with axes), "zero_dim" (a tensor without axes) and "scalar".
    """
    if isinstance(value, Scalar):
        return "scalar"
    return "dim" if value.ndim else "zero_dim"


def cast_tensor(tv: TensorView, dtype: DataType) -> TensorView:
    """Adds a cast of `tv` to `dtype`, even if `tv` already has this dtype."""
    out = new_output(clone_axes(tv), dtype, [tv])
    add_op(CastOp(out, tv))
    return out


def convert(value: Operand, dtype: DataType) -> Operand:
    """Returns `value` in `dtype`; adds a cast op for a tensor of another dtype.

    A scalar is cast only if its category (bool, int, float, complex) differs from that of `dtype`.
    """
    if isinstance(value, TensorView):
        return value if value.dtype() is dtype else cast_tensor(value, dtype)
    is_same_class = category(value.dtype) == category(dtype) and value.dtype is not DataType.Bool
    return value if is_same_class or value.dtype is dtype else sc.cast(value, dtype)


def promote(values: Sequence[Operand], config: Config) -> tuple[list[Operand], DataType]:
    """Converts the operands of an op to one dtype, and returns (converted operands, this dtype).

    `config` selects the rule that determines the dtype from the dtypes of the operands. The rule
    "float" gives a floating dtype for integers, for example.
    """
    is_on_tensors = any(isinstance(v, TensorView) for v in values)
    dtype = common_dtype(_promoted_as(values, is_on_tensors=is_on_tensors), config)
    return [convert(v, dtype) for v in values], dtype


def promote_keeping_half(
    values: Sequence[Operand], *, is_on_tensors: bool
) -> tuple[list[Operand], DataType]:
    """Converts the operands of an op to one dtype, and returns (converted operands, this dtype).
    Unlike `promote`, it does not widen Half, BFloat16 and Float8 to Float.

    `is_on_tensors` says whether any operand of the op is a tensor, also an operand that is not in
    `values`.
    """
    dtype = promote_operands(_promoted_as(values, is_on_tensors=is_on_tensors))
    return [convert(v, dtype) for v in values], dtype


def _promoted_as(values: Sequence[Operand], *, is_on_tensors: bool) -> list[tuple[DataType, Rank]]:
    """Returns the pair (dtype, kind of operand) of each operand, from which the common dtype of the
    operands is determined.

    If the op has tensor operands (`is_on_tensors`), only the category (bool, int, float, complex)
    of a scalar matters, not its width. For example, a Double scalar is then listed as Float, so
    that it does not widen the result. A definition with the option `double_numbers` keeps Double.
    """
    operands: list[tuple[DataType, Rank]] = [(operand_dtype(v), rank_class(v)) for v in values]
    is_wide = not is_on_tensors or active_fusion().double_numbers
    return operands if is_wide else number_width(operands)


# ------------------------------------------------------------------ pointwise domains
def align_ranks(values: Sequence[Operand]) -> list[Operand]:
    """Returns the operands with equal numbers of axes.

    Adds a broadcast op with new leading axes for each tensor that has fewer axes.
    """
    rank = max((v.ndim for v in values if isinstance(v, TensorView)), default=0)
    return [
        prepend_axes(v, rank - v.ndim) if isinstance(v, TensorView) and v.ndim < rank else v
        for v in values
    ]


def prepend_axes(tv: TensorView, count: int) -> TensorView:
    """Adds a broadcast op that gives `tv` `count` new leading axes of size 1."""
    return broadcast_tensor(tv, (True,) * count + (False,) * tv.ndim)


def broadcast_tensor(tv: TensorView, flags: tuple[bool, ...]) -> TensorView:
    """Adds a BroadcastOp; `flags` has one flag per output axis, True for a new axis of size 1."""
    fusion = active_fusion()
    source = iter(axes_of(tv))
    axes = [
        fusion.new_axis(sc.ONE, IterType.broadcast) if new else fusion.clone_axis(next(source))
        for new in flags
    ]
    out = new_output(axes, tv.dtype(), [tv])
    add_op(BroadcastOp(out, tv, flags=flags))
    return out


def squeeze_axes(tv: TensorView, gone: set[int]) -> TensorView:
    """Adds a SqueezeOp that removes the axes at the positions `gone`."""
    fusion = active_fusion()
    kept = [fusion.clone_axis(a) for i, a in enumerate(axes_of(tv)) if i not in gone]
    out = new_output(kept, tv.dtype(), [tv])
    flags = tuple(i in gone for i in range(tv.ndim))
    add_op(SqueezeOp(out, tv, flags=flags))
    return out


def join_axes(
    fusion: Fusion, pairs: Sequence[tuple[TensorView, IterDomain]], what: str
) -> IterDomain:
    """Returns the axis of an op's result that corresponds to one axis of each operand.

    `pairs` has (operand, axis of the operand). The returned axis belongs to no tensor yet.

    - An iteration axis is preferred to a broadcast axis, and a constant extent to a symbolic
      extent. Among symbolic extents, the first is used.
    - Extents that must be equal are recorded as equal in the fusion.
    - A `?` axis is undecided: it may turn out to be a broadcast of size 1. Its extent is therefore
      not recorded as equal to others.

    Raises `DefinitionError`, which names both tensors, if two constant extents differ. `what` names
    the op for the message.
    """
    concrete = [(tv, a) for tv, a in pairs if a.kind is not IterType.broadcast]
    if not concrete:
        expanded = [(tv, a) for tv, a in pairs if a.expanded is not None]
        size = _join_sizes(fusion, [(tv, a.size) for tv, a in expanded], what)
        return _bare(pairs[0][1], IterType.broadcast, sc.ONE, size)
    known = [(tv, a) for tv, a in concrete if a.kind is not IterType.symbolic]
    if not known:
        size = _size_of_undecided(fusion, [a.extent for _, a in concrete])
        return _bare(concrete[0][1], IterType.symbolic, size, None)
    skipped = (IterType.symbolic, IterType.broadcast)
    sized = [(tv, a.size) for tv, a in pairs if a.kind not in skipped or a.expanded is not None]
    extent = _join_sizes(fusion, sized, what)
    assert extent is not None
    return _bare(known[0][1], IterType.iteration, extent, None)


def _size_of_undecided(fusion: Fusion, sizes: Sequence[Scalar]) -> Scalar:
    """Returns the common size of axes that may turn out to be broadcasts: the first of `sizes` that
    is not 1.

    Only the sizes of the program's inputs decide which of the axes are broadcasts of size 1. The
    result is therefore an expression, which selects one of `sizes` in each run.
    """
    *firsts, last = dict.fromkeys(fusion.canonical(x) for x in sizes)
    for x in reversed(firsts):
        last = sc.where(sc.eq(x, 1), last, x)
    return last if firsts else sizes[0]


def unexpanded(axis: IterDomain) -> IterDomain:
    """Returns an expanded axis (repeated, stride 0) as an ordinary axis, whose elements may differ.

    Returns any other axis unchanged.
    """
    if axis.expanded is None:
        return axis
    return _bare(axis, IterType.iteration, axis.expanded, None)


def _bare(like: IterDomain, kind: IterType, extent: Scalar, expanded: Scalar | None) -> IterDomain:
    return IterDomain(like.number, kind, extent, expanded=expanded)


def _join_sizes(
    fusion: Fusion, sized: Sequence[tuple[TensorView, Scalar]], what: str
) -> Scalar | None:
    """Records in the fusion that all sizes are equal; returns one of the sizes.

    `sized` has (tensor, size). Returns a constant size if there is one, else the first size; None
    without sizes. `what` names the op for errors.
    """
    if not sized:
        return None
    chosen_tv, chosen = sized[0]
    for tv, size in sized[1:]:
        if fusion.canonical(size) != fusion.canonical(chosen):
            same_extent(fusion, chosen, size, f"{what}: {chosen_tv} and {tv}")
        if not isinstance(chosen, Const) and isinstance(size, Const):
            chosen_tv, chosen = tv, size
    return chosen


def same_extent(fusion: Fusion, a: Scalar, b: Scalar, what: str) -> None:
    """Records that two sizes are equal because of the op that is being added.

    Raises `DefinitionError` for two different constants. `what` names op and tensors for errors.
    """
    if _may_match(fusion, a, b, what):
        fusion.unify_extents(a, b, f"{what} at {user_line()}")


def declare_extent(fusion: Fusion, a: Scalar, b: Scalar, what: str) -> None:
    """Records that two sizes are equal because the caller declared it, as in the shape of an
    `expand`.

    No op implies this equality, so the fusion stores it in a list of declared equalities. `what`
    names op and tensors for errors. Raises `DefinitionError` for two different constants.
    """
    if _may_match(fusion, a, b, what):
        fusion.declare_extents(a, b, f"{what} at {user_line()}")


def _may_match(fusion: Fusion, a: Scalar, b: Scalar, what: str) -> bool:
    """Returns True if two sizes may be equal, but the fusion does not know yet that they are.

    The caller then records the equality. Raises `DefinitionError` for two different constants.
    `what` names op and tensors.
    """
    x, y = fusion.canonical(a), fusion.canonical(b)
    if isinstance(x, Const) and isinstance(y, Const) and x != y:
        raise DefinitionError(
            f"Expected sizes to match, but found {x} and {y} in {what} (at {user_line()})"
        )
    return x != y


def pointwise_output(values: Sequence[Operand], dtype: DataType, what: str) -> TensorView:
    """Creates the result tensor of an elementwise op. The operands have equally many axes."""
    fusion = active_fusion()
    tensors = [v for v in values if isinstance(v, TensorView)]
    columns = zip(*(axes_of(tv) for tv in tensors), strict=True)
    joined = [join_axes(fusion, list(zip(tensors, c, strict=True)), what) for c in columns]
    axes = [fusion.new_axis(j.extent, j.kind, expanded=j.expanded) for j in joined]
    return new_output(axes, dtype, tensors)


def axis_of_extent(extent: Scalar) -> IterDomain:
    """Creates an axis of size `extent`: a broadcast for the constant 1, else an iteration axis."""
    kind = IterType.broadcast if sc.int_value(extent) == 1 else IterType.iteration
    return active_fusion().new_axis(extent, kind)
