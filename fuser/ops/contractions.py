"""Products of matrices: matmul, linear, scaled_mm, grouped_mm.

Inside the graph, a result has the summed axis k as an additional last axis, a reduction axis. Users
do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import FLOAT8, DataType, DtypeLike, check_supported, dtype_text, is_floating
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.matrix_products import FACTORS, GroupedMmaOp, ProductOp, ScaledMmaOp
from fuser.ir.ops.nodes import LinearOp, MatmulOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const
from fuser.ir.types import IterType
from fuser.ops.building import (
    add_op,
    axes_of,
    check_offsets,
    declare_extent,
    fail,
    join_axes,
    new_output,
    same_extent,
    unexpanded,
    unsupported,
)
from fuser.ops.elementwise import check_rank_at_least
from fuser.ops.factories import full_tensor
from fuser.support.errors import DtypeError, counted, user_line

Mapped = list[tuple[TensorView, IterDomain]]


def check_same_dtypes(
    name: str, tensors: Sequence[TensorView], advice: str = "write scaled_mm"
) -> None:
    """Raises `DtypeError` if the operands of op `name` have different dtypes.

    Raises `UnsupportedError` for floats of one byte, whose products need scales. `advice` is the
    part of this second message that says what to do.
    """
    if len({t.dtype() for t in tensors}) > 1:
        found = ", ".join(f"{t.label} is {dtype_text(t.dtype())}" for t in tensors)
        raise DtypeError(f"{name}: Expected all operands to have one dtype, but {found}")
    if tensors[0].dtype() in FLOAT8:
        raise unsupported(
            name,
            f"{tensors[0]} has the dtype {dtype_text(tensors[0].dtype())}, whose products need "
            f"scales: {advice}, or cast the operands",
        )


def _axis(name: str, mapped: Mapped) -> IterDomain:
    """Creates the axis of a product's result that corresponds to one axis of each operand.

    `mapped` has these axes as pairs (operand, axis). They must have equal sizes.
    """
    fusion = active_fusion()
    joined = join_axes(fusion, mapped, name)
    return fusion.new_axis(joined.extent, joined.kind, expanded=joined.expanded)


def contracted_axes(name: str, mapped: Mapped) -> list[IterDomain]:
    """Returns a list of one new axis, over which a product sums.

    `mapped` has the corresponding axes of the operands, as pairs (operand, axis). Returns an empty
    list if the axis has size 1 in all operands, because there is nothing to sum.
    """
    fusion = active_fusion()
    joined = join_axes(fusion, mapped, name)
    if joined.is_broadcast and joined.expanded is None:
        return []
    return [fusion.new_axis(joined.size, IterType.reduction)]


def matmul(arg1: TensorView, arg2: TensorView) -> TensorView:
    """Computes `torch.matmul(arg1, arg2)`.

    The rules for operands of one axis and for batch axes are those of torch.

    Raises:
        DefinitionError: sizes differ, or an operand has no axes.
        DtypeError: the dtypes differ.
        UnsupportedError: the operands are Float8 (use scaled_mm).

    Example: a [m, k], b [k, n] -> [m, n]; a [b, m, k], b [k, n] -> [b, m, n].
    """
    name = "matmul"
    a, b = arg1, arg2
    for tv in (a, b):
        check_rank_at_least(name, tv, 1)
    check_same_dtypes(name, (a, b))
    ax, bx = axes_of(a), axes_of(b)
    nbatch = max(a.ndim - 2, b.ndim - 2, 0)
    axes: list[IterDomain] = []
    for i in range(nbatch):
        back = nbatch - i + 2
        mapped = [(tv, x[-back]) for tv, x in ((a, ax), (b, bx)) if len(x) >= back]
        axes.append(_axis(name, mapped))
    if a.ndim > 1:
        axes.append(_axis(name, [(a, ax[-2])]))
    if b.ndim > 1:
        axes.append(_axis(name, [(b, bx[-1])]))
    k = contracted_axes(name, [(a, ax[-1]), (b, bx[max(b.ndim - 2, 0)])])
    if k and sc.int_value(k[0].extent) == 0:
        return full_tensor([x.size for x in axes], Const(0, a.dtype()), a.dtype())
    out = new_output([*axes, *k], a.dtype(), [a, b])
    add_op(MatmulOp(out, a, b))
    return out


def _check_bias(name: str, weight: TensorView, bias: TensorView) -> None:
    """Raises `DefinitionError` if `bias` has several elements along an axis along which `weight`
    has only one.
    """
    fusion = active_fusion()
    for w, b in zip(axes_of(weight), axes_of(bias), strict=False):
        if not w.is_broadcast or w.expanded is not None or b.is_broadcast:
            continue
        size = fusion.canonical(b.size)
        if sc.int_value(size) not in (None, 1):
            raise fail(
                name,
                f"bias {bias} has size {size} along its axis {b}, but weight {weight} has size 1 "
                f"along its axis {w}: both sizes must be equal",
            )
        declare_extent(fusion, sc.ONE, b.size, f"{name}: {weight} and {bias}")


def linear(arg1: TensorView, arg2: TensorView, bias: TensorView | None = None) -> TensorView:
    """Computes x @ weight.T + bias of x [*i, K], weight [*w, N, K] and bias [*w, N] -> [*w, *i, N].

    x is `arg1`, and weight is `arg2`. `*i` and `*w` stand for any number of axes. The device mesh
    of x is copied to the output, the meshes of weight and bias are not.

    Raises:
        DefinitionError: the numbers of axes or the sizes of the operands contradict each other.
        DtypeError: the dtypes differ.
        UnsupportedError: the operands are Float8.
    """
    name = "linear"
    x, weight = arg1, arg2
    check_rank_at_least(name, x, 1)
    if weight.ndim < 2:
        raise fail(
            name, f"Input B must be at least 2D, but {weight} has {counted(weight.ndim, 'axis')}"
        )
    operands = [x, weight]
    if bias is not None:
        operands.append(bias)
        if bias.ndim != weight.ndim - 1:
            want = (
                "1 axis" if weight.ndim == 2 else f"{weight.ndim - 1} axes, one less than {weight}"
            )
            raise fail(name, f"bias must have {want}, but {bias} has {bias.ndim}")
        _check_bias(name, weight, bias)
    check_same_dtypes(name, operands)
    *rows, x_k = axes_of(x)
    *columns, weight_k = axes_of(weight)
    mapped: list[Mapped] = [[(weight, a)] for a in columns]
    if bias is not None:
        for found, a in zip(mapped, axes_of(bias), strict=True):
            found.append((bias, a))
    *batch, n = mapped
    axes = [_axis(name, found) for found in (*batch, *([(x, a)] for a in rows), n)]
    k = contracted_axes(name, [(x, x_k), (weight, weight_k)])
    # Only the mesh of x is copied: weights are often sharded on axes that the result lacks.
    out = new_output([*axes, *k], x.dtype(), [x])
    add_op(LinearOp(out, x, weight, bias))
    return out


# ----------------------------------------------------------------------
# scaled_mm, a product of floats of one byte.

# Field of the product op -> operand, in the order of the op's fields.
Given = Mapping[str, TensorView]


def scaled_mm(
    mat1: TensorView,
    mat2: TensorView,
    scale1: TensorView,
    scale2: TensorView,
    alpha: TensorView | None = None,
    bias: TensorView | None = None,
    beta: TensorView | None = None,
    dtype: DtypeLike = DataType.BFloat16,
    output_block_scale_size: int = 0,
    output_block_scale_dtype: DtypeLike = DataType.BFloat16,
    output_gamma: bool = False,
) -> tuple[TensorView, None, None]:
    """Computes alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias.

    - mat1 is [m, k] and mat2 [k, n], of dtype Float8_e4m3fn or Float8_e5m2. The product is computed
      in Float and rounded once to `dtype`.
    - The scales, alpha and beta are Float tensors of one element. scale1 may also be [m, 1], and
      scale2 [1, n].
    - bias is [n] or [m, n].
    - The second and third result are always None. nvFuser uses them for an output that is quantized
      in blocks, for which the arguments `output_..` are passed. This is not supported, so leave
      these arguments at their defaults.

    Raises:
        DefinitionError: a shape is wrong, or `beta` is passed without `bias`.
        DtypeError: a dtype is wrong.
        UnsupportedError: scales of blocks along k, or `output_block_scale_size` or `output_gamma`.
    """
    del output_block_scale_dtype
    factors = {"mat1": mat1, "mat2": mat2, "scale1": scale1, "scale2": scale2}
    optional = {"alpha": alpha, "bias": bias, "beta": beta}
    given = factors | {field: tv for field, tv in optional.items() if tv is not None}
    check_block_scales("scaled_mm", mat1, output_block_scale_size, is_gamma=output_gamma)
    dtype = scaled_dtype("scaled_mm", given, dtype)
    return add_product("scaled_mm", ScaledMmaOp, given, dtype), None, None


# ------------------------------------------------------------------ any product with scales
_DTYPES = {
    **dict.fromkeys(("mat1", "mat2"), FACTORS),
    **dict.fromkeys(("scale1", "scale2", "alpha", "beta"), (DataType.Float,)),
    "bias": (DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double),
}


def check_block_scales(name: str, mat1: TensorView, size: int, *, is_gamma: bool) -> None:
    """Raises `UnsupportedError` if the caller asks for a result that is quantized with one scale
    per block of elements.

    `size` is the argument `output_block_scale_size`, and `is_gamma` says whether `output_gamma` was
    passed.
    """
    if size:
        raise unsupported(
            name,
            f"output_block_scale is not yet supported, because the product of {mat1} has no block "
            f"scales: leave out output_block_scale_size={size}",
        )
    if is_gamma:
        raise unsupported(
            name,
            f"output_gamma is not yet supported, because the product of {mat1} has no global "
            "scale: leave output_gamma out",
        )


def scaled_dtype(name: str, given: Given, dtype: DtypeLike) -> DataType:
    """Checks the dtypes of a product with scales, and returns the dtype of the result.

    `given` has the operands by the name of the argument, and `dtype` is the user's choice for the
    result. Raises `DtypeError` for a wrong dtype, and `DefinitionError` for a `beta` without a
    bias.
    """
    if "beta" in given and "bias" not in given:
        raise fail(name, f"Expected a bias, because beta {given['beta']} scales it")
    dtype = check_supported(dtype, name)
    if not is_floating(dtype):
        raise DtypeError(
            f"{name}: the result must have a floating dtype, but dtype is {dtype_text(dtype)}"
        )
    for field, tv in given.items():
        wanted = _DTYPES.get(field, (tv.dtype(),))
        if tv.dtype() not in wanted:
            known = " or ".join(d.name for d in wanted)
            raise DtypeError(
                f"{name}: Expected {field} of dtype {known}, but {tv} is {dtype_text(tv.dtype())} "
                f"(at {user_line()})"
            )
    return dtype


def add_product(name: str, op: type[ProductOp], given: Given, dtype: DataType) -> TensorView:
    """Adds an op of the class `op`, a product of matrices, and returns its result, which has the
    dtype `dtype`.

    `given` has the operands by the name of the argument. Raises `DefinitionError` for an operand
    with wrong axes, and for sizes that differ.
    """
    fusion = active_fusion()
    known = op.matrices(given["mat1"], given["mat2"])
    mapped: dict[str, Mapped] = {}
    factors: dict[str, Mapped] = {}
    for field, tv in given.items():
        forms = {len(known[field]): known[field]} if field in known else op.SCALES[field]
        for letter, axis in zip(_letters(name, field, tv, forms), axes_of(tv), strict=True):
            mapped.setdefault(letter, []).append((tv, axis))
            if field in known:
                factors.setdefault(letter, []).append((tv, axis))
    mapped.pop("1", None)
    for found in mapped.values():
        (first, axis), *others = found
        for tv, other in others:
            same_extent(fusion, axis.size, other.size, f"{name}: {first} and {tv}")
    joined = [unexpanded(join_axes(fusion, factors[c], name)) for c in known["out"]]
    axes = [fusion.new_axis(a.extent, a.kind) for a in joined]
    k = contracted_axes(name, factors["k"])
    out = new_output([*axes, *k], dtype, [given["mat1"], given["mat2"]])
    fields: dict[str, Any] = {field: given.get(field) for field in op.fields_of("operand")}
    add_op(op(out, **fields))
    return out


def _letters(name: str, field: str, tv: TensorView, forms: Mapping[int, str]) -> str:
    """Returns a letter for each axis of an operand, such as "mk" for a matrix [m, k].

    `forms` has the letters by the number of axes that the operand may have. The letter 1 stands for
    an axis of size 1 in a scale or bias. Raises `DefinitionError` or `UnsupportedError` for an
    operand with other axes.
    """
    is_matrix = field not in ProductOp.SCALES
    letters = forms.get(tv.ndim, "1" * tv.ndim)
    known = " or ".join(f"[{', '.join(f)}]" for f in forms.values())
    if tv.ndim not in forms and (is_matrix or field == "bias"):
        raise fail(
            name, f"{field} must have the axes {known}, but {tv} has {counted(tv.ndim, 'axis')}"
        )
    if is_matrix:
        return letters
    is_one = [a.is_broadcast and sc.int_value(a.size) == 1 for a in axes_of(tv)]
    if any(c == "1" and not one for c, one in zip(letters, is_one, strict=True)):
        more = f" or the axes {known}" if forms else ""
        large = is_one.index(False) if letters == "1" * tv.ndim else letters.index("1")
        raise unsupported(
            name,
            f"{field} must have one element{more}, but {tv} has {counted(tv.ndim, 'axis')}, and "
            f"axis {large} is not known to have size 1",
        )
    return "".join("1" if one else c for c, one in zip(letters, is_one, strict=True))


# ----------------------------------------------------------------------
# grouped_mm, a matrix product per group.


@overload
def grouped_mm(mat1: TensorView, mat2: TensorView, offsets: TensorView) -> TensorView: ...
@overload
def grouped_mm(
    mat1: TensorView,
    mat2: TensorView,
    offsets: TensorView,
    scale1: TensorView,
    scale2: TensorView,
    alpha: TensorView | None = None,
    bias: TensorView | None = None,
    beta: TensorView | None = None,
    dtype: DtypeLike = DataType.BFloat16,
    output_block_scale_size: int = 0,
    output_block_scale_dtype: DtypeLike = DataType.BFloat16,
    output_gamma: bool = False,
) -> tuple[TensorView, None, None]: ...
def grouped_mm(
    mat1: TensorView,
    mat2: TensorView,
    offsets: TensorView,
    scale1: TensorView | None = None,
    scale2: TensorView | None = None,
    alpha: TensorView | None = None,
    bias: TensorView | None = None,
    beta: TensorView | None = None,
    dtype: DtypeLike = DataType.BFloat16,
    output_block_scale_size: int = 0,
    output_block_scale_dtype: DtypeLike = DataType.BFloat16,
    output_gamma: bool = False,
) -> TensorView | tuple[TensorView, None, None]:
    """Computes one matrix product per group; the Int32 `offsets` [g] are the ends of the groups.

    The numbers of axes of the operands decide which axis is divided into groups:

    | mat1, mat2 | axis with groups | result |
    |---|---|---|
    | [m, k], [k, n] | k | [g, m, n] |
    | [g, m, k], [k, n] | n | [m, n] |
    | [m, k], [g, k, n] | m | [m, n] |

    - Rows and columns that belong to no group are 0.
    - Without scales, both matrices have the same floating dtype, and the result has this dtype,
      too. With scales, the dtype of the result is `dtype`.
    - With scales, each group is a product as by `scaled_mm`. scale1 is [m, 1] or [g, m, 1], scale2
      [1, n] or [g, 1, n], alpha and beta [g], bias [n], [m, n] or [g, m, n]. Any of these axes may
      have size 1. Scales, alpha and beta may also have one element.
    - Offsets must not decrease, and must not exceed the axis. The host reads and checks the offsets
      in each run. The exception is groups of rows in BFloat16 on GPUs of compute capability 9.0 and
      10.0, for which torch has one kernel. The GPU then replaces a wrong offset by the nearest
      correct offset, and the next run of the program raises the error.
    - The arguments `output_..` are those of nvFuser for outputs with block scales. These are not
      supported, so leave the arguments at their defaults.

    Raises:
        DefinitionError: a shape is wrong, or only one of the scales is passed.
        DtypeError: a dtype is wrong.
        UnsupportedError: block scales, or Float8 without scales.
    """
    name = "grouped_mm"
    if (mat1.ndim, mat2.ndim) not in GroupedMmaOp.FORMS:
        raise fail(
            name,
            "mat1 and mat2 must be two matrices (2 and 2 axes), or a matrix and a batch of "
            f"matrices (2 and 3, or 3 and 2 axes), but {mat1} has {counted(mat1.ndim, 'axis')} "
            f"and {mat2} has {counted(mat2.ndim, 'axis')}",
        )
    check_block_scales(name, mat1, output_block_scale_size, is_gamma=output_gamma)
    del output_block_scale_dtype
    more = {"scale1": scale1, "scale2": scale2, "alpha": alpha, "bias": bias, "beta": beta}
    scales = {field: tv for field, tv in more.items() if tv is not None}
    given = {"mat1": mat1, "mat2": mat2, "offsets": offsets, **scales}
    if scale1 is not None and scale2 is not None:
        dtype = scaled_dtype(name, given, dtype)
        check_offsets(name, "offsets", offsets)
        return add_product(name, GroupedMmaOp, given, dtype), None, None
    _check_plain(name, given, dtype)
    check_offsets(name, "offsets", offsets)
    return add_product(name, GroupedMmaOp, given, mat1.dtype())


def _check_plain(name: str, given: Given, dtype: DtypeLike) -> None:
    """Checks the arguments of a grouped product without scales.

    Raises `DefinitionError` for an argument that needs scales, and `UnsupportedError` or
    `DtypeError` for a dtype without such a product.
    """
    mat1, mat2, _, *scales = given.values()
    # BFloat16 is the default of `dtype`, so it does not show that the caller passed one.
    if scales or check_supported(dtype, name) not in (DataType.BFloat16, mat1.dtype()):
        found = f"{scales[0]} alone" if scales else f"dtype {dtype} for {mat1} without scales"
        raise fail(
            name,
            f"Expected scale1 and scale2, but found {found}: pass both scales, or leave them and "
            f"dtype out. Without scales, cast {mat1} and {mat2} instead",
        )
    check_same_dtypes(name, (mat1, mat2), "pass scale1 and scale2")
    if not is_floating(mat1.dtype()):
        raise DtypeError(
            f"{name}: Expected operands of a floating dtype, but {mat1} is "
            f"{dtype_text(mat1.dtype())} (at {user_line()})"
        )
