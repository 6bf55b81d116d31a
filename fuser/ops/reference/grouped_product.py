"""What grouped_mm means in torch: a matmul per group, or a product with scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from fuser.ir.ops.matrix_products import GroupedMmaOp
from fuser.ops.reference.matmul_calls import Tensor
from fuser.ops.reference.scaled_product import Given, scaled_into
from fuser.support.errors import InputError, user_code

# What torch's kernel for groups takes: floats of this dtype, whose rows or columns begin at
# multiples of so many elements, of fewer groups than this; and the GPUs that have it (major).
_NATIVE, _MULTIPLE, _MAX_GROUPS = torch.bfloat16, 8, 1024
_ALIGNMENT = 16
_CAPABILITIES = (9, 10)


class GroupKernels(Protocol):
    """Kernels beside torch's for groups, so that the host need not read where these end."""

    def ends_of(self, op: GroupedMmaOp, extent: int) -> Callable[[Tensor], Tensor]:
        """Returns what makes of offsets ends that rise from 0 to `extent`."""
        ...

    def clear_rows(self, out: Tensor, ends: Tensor) -> None:
        """Sets the rows behind the last end to 0."""
        ...


def grouped_product(
    op: GroupedMmaOp, given: Mapping[str, Tensor], dtype: torch.dtype, wide: torch.dtype
) -> Tensor:
    """Return one product per group, in `dtype`; what is in none is 0. With scales, sums are in
    `wide`. Raises `InputError` for offsets that fall, or leave the axis."""
    sizes = _sizes(op, given)
    out = given["mat1"].new_empty([sizes[c] for c in op.letters("out")], dtype=dtype)
    grouped_into(op, given, out, wide)
    return out


def grouped_into(
    op: GroupedMmaOp, given: Mapping[str, Tensor], out: Tensor, wide: torch.dtype
) -> None:
    """Write what `grouped_product` returns into `out`."""
    offsets = given["offsets"]
    if offsets.is_meta:
        # A tensor without contents is asked for its shape alone.
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
    """Return the sizes of what is there: a shard may have less than the extents say."""
    sizes: dict[str, int] = {}
    for field in ("mat1", "mat2", "offsets"):
        sizes.update(zip(op.letters(field), given[field].shape, strict=True))
    return sizes


def _ends(op: GroupedMmaOp, extent: int, offsets: Tensor) -> list[int]:
    ends = offsets.tolist()
    check_ends(op, extent, ends)
    return ends


def check_ends(op: GroupedMmaOp, extent: int, ends: Sequence[int]) -> None:
    """Raise `InputError` for ends of groups that fall, or leave the axis."""
    if any(x > y for x, y in pairwise([0, *ends, extent])):
        raise InputError(
            f"grouped_mm: Expected offsets that rise from 0 to {extent}, the size of axis "
            f"{op.ragged} of {op.mat1} and {op.mat2}, but {op.offsets} is {[*ends]}"
            f"{user_code(op.where)}"
        )


# ------------------------------------------------------------------ torch's kernel for groups
def bind_native(
    op: GroupedMmaOp, given: Given, kernels: GroupKernels | None
) -> Callable[[Given], Tensor] | None:
    """Return what computes all groups of rows by one kernel of torch's; None where it has none for
    operands like these. Without `kernels`, the host reads where groups end."""
    if op.ragged != "m" or op.is_scaled or not _takes_native(given):
        return None
    extent = given["mat1"].shape[0]
    ends_of = None if kernels is None else kernels.ends_of(op, extent)
    if not torch.cuda.is_current_stream_capturing():
        # Of the call that binds, what is wrong is told at once.
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
    """Call torch's kernel; what it has in rows of no group is not said."""
    return torch._grouped_mm(a, b, ends)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _takes_native(given: Given) -> bool:
    a, b, offsets = (given[f] for f in ("mat1", "mat2", "offsets"))
    if not (a.is_cuda and b.is_cuda and offsets.is_cuda) or not hasattr(torch, "_grouped_mm"):
        return False
    if torch.cuda.get_device_capability(a.device)[0] not in _CAPABILITIES:
        return False
    is_whole = not (b.shape[1] % _MULTIPLE or b.shape[2] % _MULTIPLE or b.stride(0) % _MULTIPLE)
    has_groups = 0 < len(offsets) < _MAX_GROUPS and offsets.is_contiguous()
    is_dtype = a.dtype is b.dtype is _NATIVE
    return is_dtype and is_whole and has_groups and a.numel() > 0 and all(map(_is_matrix, (a, b)))


def _is_matrix(x: Tensor) -> bool:
    """Whether rows or columns lie one behind the other, each where a vector may begin."""
    m, n = x.shape[-2:]
    row, column = x.stride()[-2:]
    lies = (column == 1 and row >= n and not row % _MULTIPLE) or (
        row == 1 and column >= m and not column % _MULTIPLE
    )
    return lies and not x.data_ptr() % _ALIGNMENT
