"""scaled_mm, a product of floats of one byte; and floats of one byte with a scale per block."""

from __future__ import annotations

from typing import cast as typing_cast

import torch

from fuser.errors import DtypeError, user_line
from fuser.ir import scalar as sc
from fuser.ir.dtypes import DataType, DtypeLike, check_supported, dtype_text, is_floating
from fuser.ir.guard import active_fusion
from fuser.ir.mma import ScaledMmaOp
from fuser.ir.tensor import TensorView
from fuser.ops import reductions
from fuser.ops.building import (
    OperandLike,
    add_op,
    axes_of,
    broadcast_tensor,
    fail,
    new_output,
    same_extent,
    unsupported,
)
from fuser.ops.contractions import Mapped, contracted_axes, joined_axes
from fuser.ops.elementwise import apply_pointwise, cast, check_rank_at_least
from fuser.ops.reshape import reshape


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
    name = "scaled_mm"
    if output_block_scale_size:
        raise unsupported(name, f"output_block_scale is not yet supported, of {mat1}")
    if output_gamma:
        raise unsupported(name, f"output_gamma is not yet supported, of {mat1}")
    if beta is not None and bias is None:
        raise fail(name, f"Expected a bias for {beta}, which scales it")
    del output_block_scale_dtype
    dtype = check_supported(dtype, name)
    if not is_floating(dtype):
        raise DtypeError(f"{name}: a floating dtype is needed, got {dtype_text(dtype)}")
    given = {"mat1": mat1, "mat2": mat2, "scale1": scale1, "scale2": scale2}
    optional = {"alpha": alpha, "bias": bias, "beta": beta}
    given |= {field: tv for field, tv in optional.items() if tv is not None}
    mapped: dict[str, Mapped] = {}
    for field, tv in given.items():
        for letter, axis in zip(_letters(field, tv), axes_of(tv), strict=True):
            if letter != "1":
                mapped.setdefault(letter, []).append((tv, axis))
    for found in mapped.values():
        (first, axis), *others = found
        for tv, other in others:
            same_extent(active_fusion(), axis.size, other.size, f"{name}: {first} and {tv}")
    factors = {c: [(t, a) for t, a in found if t in (mat1, mat2)] for c, found in mapped.items()}
    axes = [*joined_axes(name, [factors[c] for c in "mn"]), *contracted_axes(name, factors["k"])]
    out = new_output(axes, dtype, [mat1, mat2])
    add_op(ScaledMmaOp(out, mat1, mat2, scale1, scale2, alpha, bias, beta))
    return out, None, None


def _letters(field: str, tv: TensorView) -> str:
    """Return the letters of an operand's axes, 1 where there is one element; raises for what is no
    such operand."""
    name = "scaled_mm"
    forms, is_factor = ScaledMmaOp.AXES[field], field in ("mat1", "mat2")
    wanted = {True: ScaledMmaOp.FACTORS, False: (DataType.Float,)}[is_factor]
    if field == "bias":
        wanted = (DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double)
    if tv.dtype() not in wanted:
        known = " or ".join(d.name for d in wanted)
        raise DtypeError(
            f"{name}: Expected {field} of dtype {known}, but {tv} is {dtype_text(tv.dtype())} "
            f"(at {user_line()})"
        )
    axes = axes_of(tv)
    if is_factor or field == "bias":
        if tv.ndim not in forms:
            known = " or ".join(f"[{', '.join(f)}]" for f in forms.values())
            raise fail(name, f"Expected {field} {known}, but found {tv}")
        letters = forms[tv.ndim]
    else:
        letters = forms.get(tv.ndim, "1" * tv.ndim)
    is_one = [a.is_broadcast and sc.int_value(a.size) == 1 for a in axes]
    if any(c == "1" and not one for c, one in zip(letters, is_one, strict=True)):
        known = f" or one for each, [{', '.join(forms[2])}]" if forms else ""
        raise unsupported(name, f"Expected one element{known} for {field}, but found {tv}")
    if is_factor:
        return letters
    return "".join("1" if one else c for c, one in zip(letters, is_one, strict=True))


# ------------------------------------------------------------------ scales of blocks
def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, apply_pointwise(name, operands))


# Elements that share a scale, and the largest value of what they become.
_BLOCK = 32
_LARGEST = 448.0
_QUANTIZED = (DataType.Half, DataType.BFloat16, DataType.Float)


def nv_block_quantize(
    input: TensorView,
    global_scale: TensorView | None = None,
    swizzle_block_scales: bool = False,
    block_size: int = 16,
    dtype: DtypeLike = DataType.Float4_e2m1fn,
) -> tuple[TensorView, TensorView]:
    """Append (values, scales): Float8_e4m3fn [.., k] and Float8_e8m0fnu [.., k / 32] for which
    values * scales, each for 32 neighbours, is near `input`.

    A scale is the least power of two with which the largest of its elements is at most 448: none is
    cut off. A NaN makes its block NaN; an infinity becomes what `cast` makes of it (448, or NaN
    with older versions of torch), with the largest scale, 2^127. Half, BFloat16 and Float are
    taken. Float4_e2m1fn, a global scale, and scales in another order than their elements' are
    refused.

    Source: OCP Microscaling Formats (MX) v1.0, MXFP8 E4M3; rounding up as in Mishra et al. 2025,
    Recipes for Pre-training LLMs with MXFP8.
    """
    name = "nv_block_quantize"
    if dtype is not DataType.Float8_e4m3fn and dtype is not torch.float8_e4m3fn:
        raise unsupported(
            name,
            f"{dtype} of {input}: there is DataType.Float8_e4m3fn with block_size={_BLOCK}, as no "
            "kernel stores two elements in a byte",
        )
    if block_size != _BLOCK:
        raise fail(name, f"Expected blocks of {_BLOCK} for Float8_e4m3fn, but got {block_size}")
    if global_scale is not None:
        raise unsupported(name, f"global_scale {global_scale}: blocks of {_BLOCK} have none")
    if swizzle_block_scales:
        raise unsupported(name, f"swizzle_block_scales, of {input}")
    if input.dtype() not in _QUANTIZED:
        raise DtypeError(
            f"{name}: Expected Half, BFloat16 or Float, but {input} is "
            f"{dtype_text(input.dtype())} (at {user_line()})"
        )
    check_rank_at_least(name, input, 1)
    *outer, last = input.shape()
    count = sc.int_value(last)
    if count is not None and count % _BLOCK:
        raise fail(name, f"Expected whole blocks of {_BLOCK} along the last axis of {input}")
    blocks = cast(reshape(input, [*outer, sc.truncdiv(last, _BLOCK), _BLOCK]), DataType.Float)
    scales = _scales(reductions.max(_call("abs", blocks), input.ndim))
    flags = (False,) * input.ndim + (True,)
    scaled = _call("mul", blocks, broadcast_tensor(_call("reciprocal", scales), flags))
    values = reshape(cast(scaled, DataType.Float8_e4m3fn), [*outer, last])
    return values, cast(scales, DataType.Float8_e8m0fnu)


def _scales(largest: TensorView) -> TensorView:
    """Return, as Float, the least powers of two that are no less than largest / 448."""
    ratio = _call("minimum", _call("div", largest, _LARGEST), 2.0**127)
    near = cast(cast(ratio, DataType.Float8_e8m0fnu), DataType.Float)
    return _call("where", _call("lt", near, ratio), _call("mul", near, 2.0), near)
