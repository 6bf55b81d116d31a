"""What grouped_mm means in torch: a matmul per group, or a product with scales."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from fuser.errors import InputError, user_code
from fuser.ir.mma import GroupedMmaOp
from fuser.ops.scaled_product import scaled_product

Tensor = torch.Tensor


def grouped_product(
    op: GroupedMmaOp, given: Mapping[str, Tensor], dtype: torch.dtype, wide: torch.dtype
) -> Tensor:
    """Return one product per group, in `dtype`; what is in none is 0. With scales, sums are in
    `wide`. Raises `InputError` for offsets that fall, or leave the axis."""
    # The sizes of what is there: a shard may have less than the extents say.
    sizes: dict[str, int] = {}
    letters = {field: op.letters(field) for field, _ in op.tensors()}
    for field in ("mat1", "mat2", "offsets"):
        sizes.update(zip(letters[field], given[field].shape, strict=True))
    out = given["mat1"].new_zeros([sizes[c] for c in letters["out"]], dtype=dtype)
    offsets = given["offsets"]
    # A tensor without contents is asked for its shape alone.
    ends = [] if offsets.is_meta else _ends(op, sizes[op.ragged], offsets)
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        at: dict[str, int | slice] = {"g": g, op.ragged: slice(start, end)}
        places = {f: tuple(at.get(c, slice(None)) for c in mine) for f, mine in letters.items()}
        mine = {field: x[places[field]] for field, x in given.items() if field != "offsets"}
        if op.is_scaled:
            out[places["out"]] = scaled_product(mine, dtype, wide)
        else:
            out[places["out"]] = torch.matmul(mine["mat1"], mine["mat2"])
    return out


def _ends(op: GroupedMmaOp, extent: int, offsets: Tensor) -> list[int]:
    ends = offsets.tolist()
    if any(x > y for x, y in pairwise([0, *ends, extent])):
        raise InputError(
            f"grouped_mm: Expected offsets that rise from 0 to {extent}, the size of axis "
            f"{op.ragged} of {op.mat1} and {op.mat2}, but {op.offsets} is {ends}"
            f"{user_code(op.where)}"
        )
    return ends
