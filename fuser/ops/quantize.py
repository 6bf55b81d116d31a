"""Quantization to floats of one byte, with one scale per block of elements.

The scales may be stored in tiles (`fuser.ir.ops.matrix_products`). Floats of four bits raise
`UnsupportedError`, because no GPU for which this project builds kernels can compute with four bits.
"""

from __future__ import annotations

from typing import NoReturn
from typing import cast as typing_cast

import torch

from fuser.ir.dtypes import NO_FLOAT4, DataType, DtypeLike, dtype_text
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.matrix_products import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    GroupedScalesOp,
    padding,
    tiles_of_groups,
    whole_tiles,
)
from fuser.ir.scalar import constructors as sc
from fuser.ops import reductions
from fuser.ops.building import (
    OperandLike,
    add_op,
    axes_of,
    axis_of_extent,
    broadcast_tensor,
    check_offsets,
    fail,
    new_output,
    same_extent,
    unsupported,
)
from fuser.ops.elementwise import apply_pointwise, cast, check_rank_at_least
from fuser.ops.reshaping import permute, reshape
from fuser.ops.resize import pad
from fuser.support.errors import DtypeError, UnsupportedError, user_line

# The number of elements that share a scale, and the largest value of Float8_e4m3fn.
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
    """Quantizes `input` to (values, scales), so that values * scales approximates `input`.

    Only the format MXFP8 is supported: pass `block_size=32` and `dtype=DataType.Float8_e4m3fn`, and
    no `global_scale`. The defaults are those of nvFuser's op for NVFP4, and raise an error.

    The values are Float8_e4m3fn [.., k], and the scales Float8_e8m0fnu [.., k / 32]. A block of 32
    consecutive elements has one scale.

    - A scale is the smallest power of two by which the block can be divided so that no element
      exceeds 448. No element is clipped.
    - A NaN makes all elements of its block NaN. A block with an infinity gets the largest scale,
      2^127. The infinity becomes 448, or NaN with older versions of torch.
    - `swizzle_block_scales` returns the scales of [m, k] in tiles of 128 rows and 4 columns:
      [ceil(m / 128) * 128, ceil(k / 128) * 4]. Element (r, c) of a tile is number (r % 32) * 16 +
      (r // 32) * 4 + c of its 512 elements. The next tile in memory is that of the next columns.
      Padding has bits of 0.

    Raises:
        DefinitionError: the size of the last axis is not divisible by 32, or `block_size` is not
            32.
        DtypeError: the operand is not Half, BFloat16 or Float.
        UnsupportedError: `dtype` is not Float8_e4m3fn, or a `global_scale` is passed.

    Source: OCP Microscaling Formats (MX) v1.0, MXFP8 E4M3; rounding up as in Mishra et al. 2025,
    Recipes for Pre-training LLMs with MXFP8. Tiles: cuBLAS, 1D block scaling factors layout.
    """
    name = "nv_block_quantize"
    if swizzle_block_scales and input.ndim != 2:
        raise unsupported(
            name,
            f"swizzle_block_scales needs an input with 2 axes, [m, k], but {input} has "
            f"{input.ndim}",
        )
    values, scales = _quantized(name, input, global_scale, block_size, dtype)
    return values, _tiled(scales) if swizzle_block_scales else scales


def nv_grouped_block_quantize(
    input: TensorView,
    input_offsets: TensorView,
    output_offsets: TensorView,
    global_scale: TensorView | None = None,
    block_size: int = 16,
    dtype: DtypeLike = DataType.Float4_e2m1fn,
) -> tuple[TensorView, TensorView]:
    """Quantizes the groups of rows of `input` [m, k] to (values, scales), for a grouped product.

    Only the format MXFP8 is supported: pass `block_size=32` and `dtype=DataType.Float8_e4m3fn`, and
    no `global_scale`. The defaults are those of nvFuser's op for NVFP4, and raise an error.

    The values are Float8_e4m3fn [m, k]. Each block of 32 consecutive elements of a row has one
    scale of dtype Float8_e8m0fnu; `nv_block_quantize` says how it is chosen. The scales are stored
    in the layout that `preprocess_grouped_matmul_input_sf` returns. `input_offsets` has the first
    row of each group in `input`, and `output_offsets` the first row of each group in the scales.

    Raises:
        DefinitionError: a shape is wrong, or `block_size` is not 32.
        DtypeError: the operand is not Half, BFloat16 or Float, or an offset is not Int32.
        UnsupportedError: `dtype` is not Float8_e4m3fn, or a `global_scale` is passed.
    """
    name = "nv_grouped_block_quantize"
    _check_groups(name, input, input_offsets, output_offsets)
    values, scales = _quantized(name, input, global_scale, block_size, dtype)
    return values, _grouped(name, scales, input_offsets, output_offsets)


def preprocess_grouped_matmul_input_sf(
    input: TensorView, input_offsets: TensorView, output_offsets: TensorView
) -> TensorView:
    """Copies the scales [m, k] of groups of rows into tiles, which a grouped product reads.

    The result is [(m + 127 g) // 128 * 128, ceil(k / 4) * 4].

    - Group i has the rows from input_offsets[i] to input_offsets[i + 1] - 1; the last group ends at
      m. The tiles of group i begin at row output_offsets[i], a multiple of 128.
    - Both offsets are Int32 [g] and begin with 0. Groups keep their order. The host reads the
      offsets in each run.
    - `nv_block_quantize` describes the order of the elements in a tile. Elements that belong to no
      group have bits of 0.
    - Any dtype is accepted.

    Raises:
        InputError: in a run, the offsets decrease, exceed their axis or let groups overlap.
    """
    name = "preprocess_grouped_matmul_input_sf"
    _check_groups(name, input, input_offsets, output_offsets)
    return _grouped(name, input, input_offsets, output_offsets)


def cutlass_nvfp4_grouped_mm(
    mat1: TensorView,
    mat2: TensorView,
    scale1: TensorView,
    scale2: TensorView,
    alpha: TensorView,
    problem_sizes: TensorView,
    expert_offsets: TensorView,
    sf_offsets: TensorView,
    dtype: DtypeLike = DataType.BFloat16,
) -> NoReturn:
    """Raises `UnsupportedError`: write grouped_mm with scales and matrices of Float8_e4m3fn.

    Floats of four bits need a GPU of compute capability 10.0 or more, for which this project builds
    no kernels.
    """
    del scale1, scale2, alpha, problem_sizes, expert_offsets, sf_offsets, dtype
    raise unsupported(
        "cutlass_nvfp4_grouped_mm",
        f"the product of {mat1} and {mat2} is not supported: {NO_FLOAT4}: write grouped_mm with "
        "scales and matrices of Float8_e4m3fn",
    )


# ------------------------------------------------------------------ values and scales
def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, apply_pointwise(name, operands))


def _quantized(
    name: str,
    input: TensorView,
    global_scale: TensorView | None,
    block_size: int,
    dtype: DtypeLike,
) -> tuple[TensorView, TensorView]:
    """Returns (values, scales) of `input` quantized to Float8, both in the order of the elements,
    without tiles.

    Raises `DefinitionError`, `DtypeError` or `UnsupportedError` for an operand or argument that
    cannot be used; `name` is the op in the message.
    """
    if dtype is not DataType.Float8_e4m3fn and dtype is not torch.float8_e4m3fn:
        raise _no_format(name, input, dtype)
    if block_size != _BLOCK:
        raise fail(name, f"block_size must be {_BLOCK} for Float8_e4m3fn, but it is {block_size}")
    if global_scale is not None:
        raise unsupported(
            name,
            f"global_scale {global_scale} of {input} is not supported: MXFP8 needs none, because "
            "its block scales, powers of two from 2^-127 to 2^127, cover all values",
        )
    if input.dtype() not in _QUANTIZED:
        raise DtypeError(
            f"{name}: input must have the dtype Half, BFloat16 or Float, but {input} is "
            f"{dtype_text(input.dtype())} (at {user_line()})"
        )
    check_rank_at_least(name, input, 1)
    *outer, last = input.shape()
    count = sc.int_value(last)
    if count is not None and count % _BLOCK:
        raise fail(
            name, f"the last axis of {input} must be a multiple of {_BLOCK}, but has size {count}"
        )
    blocks = cast(reshape(input, [*outer, sc.truncdiv(last, _BLOCK), _BLOCK]), DataType.Float)
    scales = _scales(reductions.max(_call("abs", blocks), input.ndim))
    flags = (False,) * input.ndim + (True,)
    scaled = _call("mul", blocks, broadcast_tensor(_call("reciprocal", scales), flags))
    values = reshape(cast(scaled, DataType.Float8_e4m3fn), [*outer, last])
    return values, cast(scales, DataType.Float8_e8m0fnu)


def _no_format(name: str, input: TensorView, dtype: DtypeLike) -> UnsupportedError:
    known = f"write dtype=DataType.Float8_e4m3fn with block_size={_BLOCK}"
    is_float4 = "float4" in str(dtype).lower()
    reason = f"{NO_FLOAT4}: " * is_float4
    return unsupported(name, f"there is no {dtype} of {input}: {reason}{known}")


def _scales(largest: TensorView) -> TensorView:
    """Returns the scale of each block of elements, as Float: the smallest power of two >= largest /
    448.

    `largest` has the largest absolute value of each block. 448 is the largest Float8_e4m3fn, so no
    element of the block exceeds the range after the division.
    """
    ratio = _call("minimum", _call("div", largest, _LARGEST), 2.0**127)
    near = cast(cast(ratio, DataType.Float8_e8m0fnu), DataType.Float)
    return _call("where", _call("lt", near, ratio), _call("mul", near, 2.0), near)


# ------------------------------------------------------------------ tiles
def _tiled(scales: TensorView) -> TensorView:
    """Returns the scales [m, k] of a quantized matrix in the layout in which matrix products read
    them.

    The layout consists of tiles of 128 rows and 4 columns. Bits of 0 fill the rest of tiles that
    are not full.
    """
    m, k = scales.shape()
    rows, columns = whole_tiles(m, TILE_ROWS), whole_tiles(k, TILE_COLUMNS)
    whole = sc.mul(rows, TILE_ROWS), sc.mul(columns, TILE_COLUMNS)
    widths = 0, sc.sub(whole[1], k), 0, sc.sub(whole[0], m)
    padded = pad(scales, widths, padding(scales.dtype()))
    parts = reshape(padded, [rows, TILE_ROWS // LANES, LANES, columns, TILE_COLUMNS])
    return reshape(permute(parts, [0, 3, 2, 1, 4]), list(whole))


def _check_groups(name: str, input: TensorView, starts: TensorView, begins: TensorView) -> None:
    if input.ndim != 2:
        raise fail(name, f"input must have the 2 axes [m, k], but {input} has {input.ndim}")
    check_offsets(name, "input_offsets", starts)
    check_offsets(name, "output_offsets", begins)
    sizes = axes_of(starts)[0].size, axes_of(begins)[0].size
    same_extent(active_fusion(), *sizes, f"{name}: {starts} and {begins}")


def _grouped(name: str, scales: TensorView, starts: TensorView, begins: TensorView) -> TensorView:
    m, k = scales.shape()
    rows = sc.mul(tiles_of_groups(m, axes_of(starts)[0].size), TILE_ROWS)
    columns = sc.mul(whole_tiles(k, TILE_COLUMNS), TILE_COLUMNS)
    axes = [axis_of_extent(rows), axis_of_extent(columns)]
    out = new_output(axes, scales.dtype(), [scales])
    add_op(GroupedScalesOp(out, scales, starts, begins))
    return out
