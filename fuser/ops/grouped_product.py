"""What grouped_mm means in torch: a matmul per group, or a product with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from fuser.errors import InputError, user_code
from fuser.ir.mma import GroupedMmaOp
from fuser.ops.scaled_product import scaled_into

Tensor = torch.Tensor


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
