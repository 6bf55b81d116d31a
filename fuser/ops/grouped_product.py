"""What grouped_mm means in torch: a matmul per group."""

from __future__ import annotations

from itertools import pairwise

import torch

from fuser.errors import InputError, user_code
from fuser.ir.mma import GroupedMmaOp

Tensor = torch.Tensor


def grouped_product(op: GroupedMmaOp, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return one product per group; what is in none is 0. Raises `InputError` for offsets that
    fall, or leave the axis."""
    # The sizes of what is there: a shard may have less than the extents say.
    sizes: dict[str, int] = {}
    for field, x in zip(("mat1", "mat2", "offsets"), (a, b, offsets), strict=True):
        sizes.update(zip(op.letters(field), x.shape, strict=True))
    out = a.new_zeros([sizes[c] for c in op.letters("out")])
    # A tensor without contents is asked for its shape alone.
    ends = [] if offsets.is_meta else _ends(op, sizes[op.ragged], offsets)
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        mine = slice(start, end)
        match op.ragged:
            case "k":
                out[g] = torch.matmul(a[:, mine], b[mine])
            case "n":
                out[:, mine] = torch.matmul(a[g], b[:, mine])
            case _:
                out[mine] = torch.matmul(a[mine], b[g])
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
