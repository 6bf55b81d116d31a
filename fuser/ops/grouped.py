"""grouped_mm, a matrix product per group."""

from __future__ import annotations

from typing import overload

from fuser.ir.dtypes import DataType, DtypeLike, check_supported, dtype_text, is_floating
from fuser.ir.ops.matrix_products import GroupedMmaOp
from fuser.ir.tensor import TensorView
from fuser.ops.building import check_offsets, fail
from fuser.ops.contractions import check_same_dtypes
from fuser.ops.scaled import Given, add_product, check_block_scales, scaled_dtype
from fuser.support.errors import DtypeError, user_line


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
    """Append a matrix product per group, where the Int32 `offsets` [g] say at which positions of k
    (of [m, k] and [k, n]), n (of [g, m, k] and [k, n]) or m (of [m, k] and [g, k, n]) groups end.

    Rows and columns of no group are 0. Offsets that fall or leave the axis are refused. The host
    reads them in each run, but where torch has a kernel for all groups of rows (BFloat16, GPUs of
    compute capability 9.0 and 10.0): there the next call of the program is refused, and until then
    each of them counts as the nearest that is in order. With scales, three
    results as of `scaled_mm`, which says what each group then is: scale1 is [m, 1] or [g, m, 1],
    scale2 [1, n] or [g, 1, n], alpha and beta [g], bias [n], [m, n] or [g, m, n]. Each of these
    axes may be 1, and scales, alpha and beta one element. Without them, the matrices have one
    floating dtype, which is the result's.
    """
    name = "grouped_mm"
    if (mat1.ndim, mat2.ndim) not in GroupedMmaOp.FORMS:
        raise fail(
            name, f"Expected two matrices, or one and a batch of them, but found {mat1} and {mat2}"
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
    """Raise for what belongs to products with scales, and for matrices that need them."""
    mat1, mat2, _, *scales = given.values()
    # An argument that says BFloat16 is no other than the default.
    if scales or check_supported(dtype, name) not in (DataType.BFloat16, mat1.dtype()):
        found = f"{scales[0]} alone" if scales else f"dtype {dtype} for {mat1}"
        raise fail(name, f"Expected scale1 and scale2, but found {found}: without them cast {mat1}")
    check_same_dtypes(name, (mat1, mat2), "give scale1 and scale2")
    if not is_floating(mat1.dtype()):
        raise DtypeError(
            f"{name}: Expected floating operands, but {mat1} is {dtype_text(mat1.dtype())} "
            f"(at {user_line()})"
        )
