"""What preprocess_grouped_matmul_input_sf means in torch: rows put in their places, then tiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from fuser.ir.ops.block_scales import LANES, TILE_COLUMNS, TILE_ROWS, GroupedScalesOp
from fuser.ir.scalar.constructors import Number
from fuser.ops.reference.matmul_calls import Tensor
from fuser.support.errors import InputError, user_code


def grouped_scales(
    op: GroupedScalesOp, x: Tensor, input_offsets: Tensor, output_offsets: Tensor, nothing: Number
) -> Tensor:
    """Return the tiles of all groups, `nothing` where there is no row.

    See `grouped_scales_into`.
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
    """Write the tiles of all groups into `out`.

    Raises `InputError` for offsets that fall, leave their axis or let groups overlap.
    """
    x, input_offsets, output_offsets = given
    if x.is_meta:
        # A tensor without contents is asked for its shape alone.
        return
    m, k = x.shape
    tiles, columns = out.shape[0] // TILE_ROWS, out.shape[1] // TILE_COLUMNS
    starts, begins = input_offsets.tolist(), output_offsets.tolist()
    _check(op, starts, begins, m, len(out))
    placed = x.new_full(out.shape, nothing)
    if m:
        # Each row lies as far behind the beginning of its group as before.
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
            f"{op.name}: Expected input_offsets that rise from 0 to at most {m}, the rows of "
            f"{op.inp}, but {op.input_offsets} is {starts}{user_code(op.where)}"
        )
    sizes = [y - x for x, y in pairwise(edges)]
    spans = zip(begins, sizes, [*begins, rows][1:], strict=True)
    overlaps = any(begin + size > limit for begin, size, limit in spans)
    if overlaps or any(x % TILE_ROWS or x < 0 for x in begins):
        raise InputError(
            f"{op.name}: Expected output_offsets that are multiples of {TILE_ROWS} and rise by "
            f"the sizes of the groups, {sizes}, up to {rows}, but {op.output_offsets} is {begins}"
            f"{user_code(op.where)}"
        )
