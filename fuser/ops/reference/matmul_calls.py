"""Torch calls for matrix products: one call on views of the operands and of the result, without
copies where possible.

The views that torch can make depend on shapes and strides, so they are chosen once per shapes and
strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from fuser.ir.ops import nodes
from fuser.ir.ops.matrix_products import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    GroupedMmaOp,
    GroupedScalesOp,
)
from fuser.ir.scalar.constructors import Number
from fuser.support.errors import InputError, user_code

Tensor = torch.Tensor
ViewOf = Callable[[Tensor], Tensor]
# The function behind F.linear, which takes `out` and transposes the weight without Python code.
_LINEAR: Callable[..., object] = torch._C._nn.linear  # pyright: ignore
Contract = Callable[[Sequence[Tensor], Tensor], object]
"""Writes the product of the inputs into the output."""


@dataclass(frozen=True)
class Product:
    """A matrix product by one call `function(*operands, out=...)` on views of tensors.

    `operands` has, for each operand, the position among the inputs and a function that makes the
    view of the input. `result` is a function that makes the view of the output. None in place of
    such a function stands for the tensor itself.
    """

    function: Callable[..., object]
    operands: tuple[tuple[int, ViewOf | None], ...]
    result: ViewOf | None = None

    def __call__(self, ins: Sequence[Tensor], out: Tensor) -> None:
        """Computes the product of the inputs `ins` into `out`."""
        operands = [ins[i] if view is None else view(ins[i]) for i, view in self.operands]
        self.function(*operands, out=out if self.result is None else self.result(out))


def bind_contraction(op: nodes.Contraction, inputs: Sequence[Tensor], out: Tensor) -> Contract:
    """Returns a function (inputs, out) that computes the matrix product `op` for tensors of these
    shapes and strides.

    The function never resizes the output. If torch can view operands and result as one matrix
    product, or as one batch of products, the function is a `Product` and allocates nothing.
    """
    met = met_operands(op, inputs)
    way = (_bind_matmul if isinstance(op, nodes.MatmulOp) else _bind_linear)(met, out)
    return way if met is inputs else lambda ins, out: way(met_operands(op, ins), out)


def met_operands(op: nodes.Contraction, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the operands of a matrix product, after making the sizes of the summed axis equal.

    If this axis is empty in one operand and has size 1 in the other, it becomes empty in both. Such
    operands occur if a loop on the host computes an empty block of a tensor. In all other cases,
    returns `inputs`.
    """
    a, b, *bias = inputs
    at = -1 if isinstance(op, nodes.LinearOp) else max(b.dim() - 2, 0)
    if a.shape[-1] == b.shape[at] or 0 not in (a.shape[-1], b.shape[at]):
        return inputs
    return [a.narrow(-1, 0, 0), b.narrow(at, 0, 0), *bias]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, rounded once.

    x [*i, k], weight [*w, n, k], bias [*w, n] -> [*w, *i, n].
    """
    if weight.dim() < 3:
        return F.linear(x, weight, bias)
    *batch, n, k = weight.shape
    rows, count = prod(x.shape[:-1]), prod(batch)
    left = x.reshape(rows, k).expand(count, rows, k)
    right = weight.reshape(count, n, k).mT
    if bias is None:
        made = torch.bmm(left, right)
    else:
        made = torch.baddbmm(bias.reshape(count, 1, n), left, right)
    return made.view(*batch, *x.shape[:-1], n)


def _bind_linear(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    if inputs[1].dim() > 2:
        return _bind_batched(inputs, out)
    if inputs[1].dim() == 1:
        # The weight is a vector: the result has one column.
        wide = _bind_linear(_widened(inputs), out.unsqueeze(-1))
        return lambda ins, out: wide(_widened(ins), out.unsqueeze(-1))
    rows, result = (-1, inputs[0].shape[-1]), (-1, out.shape[-1])
    if not (_can_view(inputs[0], rows) and _can_view(out, result)):
        return _copied_linear
    bias = ((2, None),) if len(inputs) == 3 else ()
    return Product(_LINEAR, ((0, _as(inputs[0], rows)), (1, None), *bias), _as(out, result))


def _bind_batched(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    """Returns torch's call for a linear layer with a batch of weights, each of which is multiplied
    with all rows of x.
    """
    x, weight, *bias = inputs
    *batch, n, k = weight.shape
    rows, columns = (-1, k), (-1, n, k)
    result, addend = (prod(batch), prod(x.shape[:-1]), n), (-1, 1, n)
    viewed = ((x, rows), (weight, columns), (out, result), *((b, addend) for b in bias))
    if not all(_can_view(t, shape) for t, shape in viewed):
        return _copied_linear

    def left(x: Tensor) -> Tensor:
        return x.view(rows).expand(result[0], -1, -1)

    def right(weight: Tensor) -> Tensor:
        return weight.view(columns).mT

    factors = (0, left), (1, right)
    if not bias:
        return Product(torch.bmm, factors, _as(out, result))
    return Product(torch.baddbmm, ((2, lambda b: b.view(addend)), *factors), _as(out, result))


def _copied_linear(ins: Sequence[Tensor], out: Tensor) -> None:
    out.copy_(linear(*ins))


def _widened(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [inputs[0], *(t.unsqueeze(0) for t in inputs[1:])]


def _bind_matmul(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    a, b = inputs
    if a.ndim == b.ndim == out.ndim == 2 and a.numel() and out.numel():
        return _AS_THEY_ARE

    def copied(ins: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(torch.matmul(ins[0], ins[1]))

    if b.ndim == 2:
        # A vector counts as one row.
        kept, function = 1, torch.mm
    elif a.ndim == b.ndim > 2 and a.shape[:-2] == b.shape[:-2]:
        kept, function = 2, torch.bmm
    else:
        kept, function = 0, torch.matmul
    rows_a, rows_b, rows_out = ((-1, *x.shape[-kept:]) if kept else () for x in (a, b, out))
    viewed = ((a, rows_a), (out, rows_out), *(((b, rows_b),) if kept == 2 else ()))
    if kept and all(_can_view(x, shape) for x, shape in viewed):
        right = _as(b, rows_b) if kept == 2 else None
        return Product(function, ((0, _as(a, rows_a)), (1, right)), _as(out, rows_out))
    # Permuted heads: torch packs the operands, and writes a contiguous `out` without a copy.
    if a.ndim > 2 and b.ndim > 2 and out.is_contiguous():
        return Product(torch.matmul, ((0, None), (1, None)))
    return copied


_AS_THEY_ARE = Product(torch.mm, ((0, None), (1, None)))


def _can_view(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns whether torch can view the tensor with another shape without a copy.

    Returns False for an empty tensor.
    """
    try:
        return x.numel() > 0 and (_is_own(x, shape) or x.view(shape) is not None)
    except RuntimeError:
        return False


def _as(x: Tensor, shape: tuple[int, ...]) -> ViewOf | None:
    """Returns a function that views a tensor like `x` with this shape, or None if `x` already has
    the shape.
    """
    return None if _is_own(x, shape) else lambda x: x.view(shape)


def _is_own(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns whether `x` already has the shape `shape`, so that it needs no view.

    The first size is not compared, because it may be -1 in `shape` (a size to infer).
    """
    return x.dim() == len(shape) and x.shape[1:] == shape[1:]


# ----------------------------------------------------------------------
# scaled_mm in torch, and each group of grouped_mm: by torch's own kernel on CUDA if it supports the
# call, else by a product in float32.

Given = Mapping[str, Tensor]

# Limits of the kernels for tensor cores: k and n are multiples of this number of elements; the
# dtypes of results, without and with a bias.
_MULTIPLE = 16
_NATIVE = (torch.bfloat16, torch.float16, torch.float32)
_BIASED = (torch.bfloat16, torch.float16)
# Alignment of addresses in bytes: the size of one vector load.
_ALIGNMENT = 16
# (major, minor) of the first GPU with products of floats of one byte.
_FIRST_CAPABILITY = 8, 9


def scaled_product(given: Given, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """Returns alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias, summed in dtype `wide`.

    `given` has the operands by the name of the argument. The result has the dtype `dtype` if one
    kernel of torch computes everything, else the dtype `wide`.
    """
    a, b = given["mat1"], given["mat2"]
    is_native = wide is torch.float32 and _is_native(a, b)
    if is_native and (found := _in_one_call(given, dtype)) is not None:
        return found
    if is_native:
        one = torch.ones((), device=a.device)
        product = _native(a, b, one, one, torch.float32)
    else:
        product = torch.matmul(a.to(wide), b.to(wide))
    for field in ("scale1", "scale2", "alpha"):
        if field in given:
            product = product * _fitting(given[field].to(wide))
    if "bias" not in given:
        return product
    bias = given["bias"].to(wide)
    return product + (bias * _fitting(given["beta"].to(wide)) if "beta" in given else bias)


def scaled_into(given: Given, out: Tensor, wide: torch.dtype) -> None:
    """Computes alpha * (scale1 * mat1) @ (scale2 * mat2) + beta * bias into `out`, summed in dtype
    `wide` and rounded once to the dtype of `out`.

    `given` has the operands by the name of the argument.
    """
    a, b = given["mat1"], given["mat2"]
    is_native = wide is torch.float32 and _can_write(out) and _is_native(a, b)
    if is_native and _in_one_call(given, out.dtype, out) is not None:
        return
    # Scales of one group may still have the axis of groups, with size 1.
    out.copy_(scaled_product(given, out.dtype, wide).reshape(out.shape))


def bind_scaled(
    fields: Sequence[str], ins: Sequence[Tensor], out: Tensor
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], object] | None:
    """Returns a call of torch's kernel for scaled products that needs no checks and copies in each
    run.

    The call is valid for operands and a result with these shapes and strides. `fields` are the
    names of the operands `ins`. Returns None if a call must check or copy a tensor.
    """
    given = dict(zip(fields, ins, strict=True))
    a, b = given["mat1"], given["mat2"]
    if not (_can_write(out) and _is_native(a, b)):
        return None
    bias, scales = given.get("bias"), (given["scale1"], given["scale2"])
    is_one = all(scale.numel() == 1 for scale in scales)
    is_each = scales[0].numel() == a.shape[0] and scales[1].numel() == b.shape[1]
    lying = (a, b.t(), *scales, *([] if bias is None else [bias]))
    if not (is_one or is_each) or not all(map(_lies_as_wanted, lying)):
        return None
    if _in_one_call(given, out.dtype, out) is None:
        return None
    call: Any = partial(torch._scaled_mm, out_dtype=out.dtype)  # pyright: ignore[reportPrivateImportUsage]
    if is_one:
        return lambda ins, outs: call(
            *ins[:2], *(scale.reshape(()) for scale in ins[2:4]), *ins[4:], out=outs[0]
        )
    # After the matrices and scales, only a bias can follow, as in the argument order of torch.
    return lambda ins, outs: call(*ins, out=outs[0])


def _lies_as_wanted(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_cuda and not x.data_ptr() % _ALIGNMENT


def _can_write(out: Tensor) -> bool:
    """Returns whether torch's kernel for scaled products can write into `out` without a copy."""
    return out.is_cuda and out.is_contiguous() and not out.data_ptr() % _ALIGNMENT


def _fitting(x: Tensor) -> Tensor:
    """Returns a tensor of one element without its axes, because it then broadcasts with any tensor.

    Returns any other tensor unchanged.
    """
    return x.reshape(()) if x.numel() == 1 else x


def _is_native(a: Tensor, b: Tensor) -> bool:
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < _FIRST_CAPABILITY:
        return False
    sizes = *a.shape, *b.shape
    is_whole = not (b.shape[0] % _MULTIPLE or b.shape[1] % _MULTIPLE)
    # There is no kernel for two factors of Float8_e5m2.
    return 0 not in sizes and is_whole and torch.float8_e4m3fn in (a.dtype, b.dtype)


def _in_one_call(given: Given, dtype: torch.dtype, out: Tensor | None = None) -> Tensor | None:
    """Returns the scaled product of the operands `given`, bias and rounding included, by one kernel
    of torch.

    Writes into `out` if `out` is passed. Returns None if the kernel cannot compute everything.
    """
    bias = given.get("bias")
    if "alpha" in given or "beta" in given or dtype not in _NATIVE:
        return None
    if bias is not None and (bias.ndim != 1 or bias.dtype is not dtype or dtype not in _BIASED):
        return None
    a, b, scale1, scale2 = (given[f] for f in ("mat1", "mat2", "scale1", "scale2"))
    if bias is not None and bias.shape[0] != b.shape[1]:
        return None
    if scale1.numel() == scale2.numel() == 1:
        return _native(a, b, _fitting(scale1), _fitting(scale2), dtype, bias, out)
    if dtype is not torch.bfloat16:
        return None
    rows, columns = scale1.expand(a.shape[0], 1), scale2.expand(1, b.shape[1])
    return _native(a, b, rows, columns, dtype, bias, out)


def _native(
    a: Tensor,
    b: Tensor,
    scale1: Tensor,
    scale2: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Calls torch's kernel for scaled products, and returns the result; copies operands of another
    layout than the kernel requires.

    The kernel needs `a` stored by matrix rows and `b` stored by matrix columns.
    """
    rows, columns = _aligned(a), _aligned(b.t()).t()
    scales = _aligned(scale1), _aligned(scale2)
    bias = None if bias is None else _aligned(bias)
    # By keywords, because torch's type stubs have no `out`.
    into: Any = {"bias": bias, "out_dtype": dtype} | ({} if out is None else {"out": out})
    return torch._scaled_mm(rows, columns, *scales, **into)  # pyright: ignore[reportPrivateImportUsage]


def _aligned(x: Tensor) -> Tensor:
    """Returns `x` as a contiguous tensor at a multiple of 16 bytes; copies if necessary.

    A view of a tensor, such as the rows of a group, may begin at another address.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


# ----------------------------------------------------------------------
# grouped_mm in torch: a matmul per group, or a product with scales.

# Limits of torch's kernel for groups: the dtype of the matrices; rows or columns begin at multiples
# of this number of elements; fewer groups than this. Below: the major compute capabilities of GPUs
# that have the kernel.
_GROUPED_NATIVE, _GROUPED_MULTIPLE, _MAX_GROUPS = torch.bfloat16, 8, 1024
_GROUPED_ALIGNMENT = 16
_CAPABILITIES = (9, 10)


class GroupKernels(Protocol):
    """Kernels of this project for grouped products: products of matrices of which an axis is
    divided into groups.

    With these kernels, the host does not have to read the ends of the groups (offsets) from the
    device.
    """

    def ends_of(self, op: GroupedMmaOp, extent: int) -> Callable[[Tensor], Tensor]:
        """Returns a function that takes the offsets of a grouped product, and returns the ends of
        groups. The ends do not decrease and are in the range 0 to `extent`, even if the offsets are
        wrong.
        """
        ...

    def clear_rows(self, out: Tensor, ends: Tensor) -> None:
        """Sets the rows of the matrix `out` that are after the last of the groups' `ends` to 0."""
        ...


def grouped_product(
    op: GroupedMmaOp, given: Mapping[str, Tensor], dtype: torch.dtype, wide: torch.dtype
) -> Tensor:
    """Returns one matrix product per group, in `dtype`; elements that belong to no group are 0.

    `given` has the operands by the name of the argument. Products with scales are summed in dtype
    `wide`. Raises `InputError` for offsets that decrease or exceed the axis.
    """
    sizes = _sizes(op, given)
    out = given["mat1"].new_empty([sizes[c] for c in op.letters("out")], dtype=dtype)
    grouped_into(op, given, out, wide)
    return out


def grouped_into(
    op: GroupedMmaOp, given: Mapping[str, Tensor], out: Tensor, wide: torch.dtype
) -> None:
    """Computes one matrix product per group into `out`; elements that belong to no group become 0.

    `given` has the operands by the name of the argument. Products with scales are summed in dtype
    `wide`. Raises `InputError` for offsets that decrease or exceed the axis.
    """
    offsets = given["offsets"]
    if offsets.is_meta:
        # A meta tensor has no contents: only shapes matter.
        return
    letters = {field: op.letters(field) for field, _ in op.tensors()}
    extent = _sizes(op, given)[op.ragged]
    ends = _ends(op, extent, offsets)
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        at: dict[str, int | slice] = {"g": g, op.ragged: slice(start, end)}
        places = {f: tuple(at.get(c, slice(None)) for c in mine) for f, mine in letters.items()}
        mine = {field: x[places[field]] for field, x in given.items() if field != "offsets"}
        part = out[places["out"]]
        if op.is_scaled:
            scaled_into(mine, part, wide)
        else:
            torch.mm(mine["mat1"], mine["mat2"], out=part)
    if op.ragged in letters["out"]:
        start = ends[-1] if ends else 0
        out.narrow(letters["out"].index(op.ragged), start, extent - start).zero_()


def _sizes(op: GroupedMmaOp, given: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the sizes of the axes of the operands of a grouped product, by the letter of the
    axis.

    The sizes are taken from the tensors, because one device's part may be smaller than the sizes
    that the program declares.
    """
    sizes: dict[str, int] = {}
    for field in ("mat1", "mat2", "offsets"):
        sizes.update(zip(op.letters(field), given[field].shape, strict=True))
    return sizes


def _ends(op: GroupedMmaOp, extent: int, offsets: Tensor) -> list[int]:
    ends = offsets.tolist()
    check_ends(op, extent, ends)
    return ends


def check_ends(op: GroupedMmaOp, extent: int, ends: Sequence[int]) -> None:
    """Raises `InputError` if the `ends` of groups decrease, or leave the range 0 to `extent`."""
    if any(x > y for x, y in pairwise([0, *ends, extent])):
        raise InputError(
            f"grouped_mm: Expected sorted offsets from 0 to {extent}, the size of axis {op.ragged} "
            f"of {op.mat1} and {op.mat2}, but {op.offsets} is {[*ends]}{user_code(op.where)}"
        )


# ------------------------------------------------------------------ torch's kernel for groups
def bind_native(
    op: GroupedMmaOp, given: Given, kernels: GroupKernels | None
) -> Callable[[Given], Tensor] | None:
    """Returns a function that computes the products of all groups of rows by one kernel of torch.

    Returns None if torch has no such kernel for operands like these. `given` has the operands by
    the name of the argument. If `kernels` is None, the host reads the offsets in each call.
    """
    if op.ragged != "m" or op.is_scaled or not _takes_native(given):
        return None
    extent = given["mat1"].shape[0]
    ends_of = None if kernels is None else kernels.ends_of(op, extent)
    if not torch.cuda.is_current_stream_capturing():
        # Wrong offsets in the call that binds are reported at once.
        _ends(op, extent, given["offsets"])

    def product(given: Given) -> Tensor:
        a, b, offsets = (given[f] for f in ("mat1", "mat2", "offsets"))
        if kernels is None or ends_of is None:
            last = _ends(op, extent, offsets)[-1]
            out = _native_groups(a, b, offsets)
            out[last:].zero_()
            return out
        ends = ends_of(offsets)
        out = _native_groups(a, b, ends)
        kernels.clear_rows(out, ends)
        return out

    return product


def _native_groups(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Calls torch's kernel for grouped products; rows that belong to no group get undefined values.
    `ends` are the ends of the groups.
    """
    return torch._grouped_mm(a, b, ends)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _takes_native(given: Given) -> bool:
    a, b, offsets = (given[f] for f in ("mat1", "mat2", "offsets"))
    if not (a.is_cuda and b.is_cuda and offsets.is_cuda) or not hasattr(torch, "_grouped_mm"):
        return False
    if torch.cuda.get_device_capability(a.device)[0] not in _CAPABILITIES:
        return False
    is_whole = not (
        b.shape[1] % _GROUPED_MULTIPLE
        or b.shape[2] % _GROUPED_MULTIPLE
        or b.stride(0) % _GROUPED_MULTIPLE
    )
    has_groups = 0 < len(offsets) < _MAX_GROUPS and offsets.is_contiguous()
    is_dtype = a.dtype is b.dtype is _GROUPED_NATIVE
    return is_dtype and is_whole and has_groups and a.numel() > 0 and all(map(_is_matrix, (a, b)))


def _is_matrix(x: Tensor) -> bool:
    """Returns whether the matrix `x` is stored by rows or by columns that are aligned to 16 bytes,
    as torch's kernel for grouped products requires.
    """
    m, n = x.shape[-2:]
    row, column = x.stride()[-2:]
    lies = (column == 1 and row >= n and not row % _GROUPED_MULTIPLE) or (
        row == 1 and column >= m and not column % _GROUPED_MULTIPLE
    )
    return lies and not x.data_ptr() % _GROUPED_ALIGNMENT


# ----------------------------------------------------------------------
# preprocess_grouped_matmul_input_sf in torch: rows are moved to their groups, then to tiles.


def grouped_scales(
    op: GroupedScalesOp, x: Tensor, input_offsets: Tensor, output_offsets: Tensor, nothing: Number
) -> Tensor:
    """Returns the scales `x` in the tiled layout in which a grouped matrix product reads them.

    A group consists of consecutive rows. Group g begins at row `input_offsets[g]` of `x`, and at
    row `output_offsets[g]` of the result, where a tile begins. Elements of the result without a
    scale are set to `nothing`.

    Raises `InputError` if offsets decrease, exceed their axis, let groups overlap or do not begin
    at a tile.
    """
    m, k = x.shape
    tiles = (m + (TILE_ROWS - 1) * len(input_offsets)) // TILE_ROWS
    columns = -(-k // TILE_COLUMNS)
    out = x.new_empty((tiles * TILE_ROWS, columns * TILE_COLUMNS))
    grouped_scales_into(op, (x, input_offsets, output_offsets), out, nothing)
    return out


def grouped_scales_into(
    op: GroupedScalesOp, given: Sequence[Tensor], out: Tensor, nothing: Number
) -> None:
    """Writes the scales into `out`, in the tiled layout in which a grouped matrix product reads
    them.

    `given` is (scales, input_offsets, output_offsets). A group consists of consecutive rows; group
    g begins at row `input_offsets[g]` of the scales, and at row `output_offsets[g]` of `out`, where
    a tile begins. Elements of `out` without a scale are set to `nothing`.

    Raises `InputError` if offsets decrease, exceed their axis, let groups overlap or do not begin
    at a tile.
    """
    x, input_offsets, output_offsets = given
    if x.is_meta:
        # A meta tensor has no contents: only shapes matter.
        return
    m, k = x.shape
    tiles, columns = out.shape[0] // TILE_ROWS, out.shape[1] // TILE_COLUMNS
    starts, begins = input_offsets.tolist(), output_offsets.tolist()
    _check(op, starts, begins, m, len(out))
    placed = x.new_full(out.shape, nothing)
    if m:
        # Each row keeps its distance from the first row of its group.
        rows = torch.arange(m, device=x.device, dtype=input_offsets.dtype)
        group = torch.bucketize(rows, input_offsets, right=True) - 1
        places = rows + (output_offsets - input_offsets)[group]
        placed.narrow(1, 0, k).index_copy_(0, places.long(), x)
    parts = placed.view(tiles, TILE_ROWS // LANES, LANES, columns, TILE_COLUMNS)
    tiled = out.view(tiles, columns, LANES, TILE_ROWS // LANES, TILE_COLUMNS)
    tiled.copy_(parts.permute(0, 3, 2, 1, 4))


def _check(op: GroupedScalesOp, starts: list[int], begins: list[int], m: int, rows: int) -> None:
    edges = [*starts, m]
    if edges[0] or any(x > y for x, y in pairwise(edges)):
        raise InputError(
            f"{op.name}: Expected sorted input_offsets from 0 to at most {m}, the number of rows "
            f"of {op.inp}, but {op.input_offsets} is {starts}{user_code(op.where)}"
        )
    sizes = [y - x for x, y in pairwise(edges)]
    spans = zip(begins, sizes, [*begins, rows][1:], strict=True)
    overlaps = any(begin + size > limit for begin, size, limit in spans)
    if overlaps or any(x % TILE_ROWS or x < 0 for x in begins):
        raise InputError(
            f"{op.name}: Expected output_offsets that are multiples of {TILE_ROWS} and leave room "
            f"for the rows of each group, {sizes}, in the {rows} rows of the result, but "
            f"{op.output_offsets} is {begins}{user_code(op.where)}"
        )
