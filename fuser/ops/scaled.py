"""scaled_mm, a product of floats of one byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuser.ir.dtypes import DataType, DtypeLike, check_supported, dtype_text, is_floating
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.matrix_products import FACTORS, ProductOp, ScaledMmaOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.tensor import TensorView
from fuser.ops.building import (
    add_op,
    axes_of,
    fail,
    join_axes,
    new_output,
    same_extent,
    unexpanded,
    unsupported,
)
from fuser.ops.contractions import Mapped, contracted_axes
from fuser.support.errors import DtypeError, user_line

# The tensors of a product, by field, in the order of the op's fields.
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
    """Append alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias, of Float8_e4m3fn or
    Float8_e5m2; computed in Float and rounded once.

    mat1 [m, k], mat2 [k, n]; scales, alpha and beta are Float tensors of one element, or scale1
    [m, 1] and scale2 [1, n]; bias is [n] or [m, n]. Scales of blocks along k are refused. The other
    two results belong to results with scales of blocks, which are refused too.
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
    """Raise `UnsupportedError` for results with scales of blocks."""
    if size:
        raise unsupported(name, f"output_block_scale is not yet supported, of {mat1}")
    if is_gamma:
        raise unsupported(name, f"output_gamma is not yet supported, of {mat1}")


def scaled_dtype(name: str, given: Given, dtype: DtypeLike) -> DataType:
    """Return the dtype of a product with scales; raises for what has another than it may have."""
    if "beta" in given and "bias" not in given:
        raise fail(name, f"Expected a bias for {given['beta']}, which scales it")
    dtype = check_supported(dtype, name)
    if not is_floating(dtype):
        raise DtypeError(f"{name}: a floating dtype is needed, got {dtype_text(dtype)}")
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
    """Append a product of `given`, by field; raises for axes that no such operand has, and for
    sizes that differ."""
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
    """Return the letters of an operand's axes, 1 where a scale or bias has one element; raises for
    what is no such operand."""
    is_matrix = field not in ProductOp.SCALES
    letters = forms.get(tv.ndim, "1" * tv.ndim)
    known = " or ".join(f"[{', '.join(f)}]" for f in forms.values())
    if tv.ndim not in forms and (is_matrix or field == "bias"):
        raise fail(name, f"Expected {field} {known}, but found {tv}")
    if is_matrix:
        return letters
    is_one = [a.is_broadcast and sc.int_value(a.size) == 1 for a in axes_of(tv)]
    if any(c == "1" and not one for c, one in zip(letters, is_one, strict=True)):
        more = f" or one for each, {known}" if forms else ""
        raise unsupported(name, f"Expected one element{more} for {field}, but found {tv}")
    return "".join("1" if one else c for c, one in zip(letters, is_one, strict=True))
