"""Block-quantised 8-bit floats and scales in tiles: statements, and their meaning for the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tools.fuzz.ops.lookups import MakeInput
from tools.fuzz.program import Dt, Ref
from tools.fuzz.values import INF, InvalidProgram, Val, difference, stored

if TYPE_CHECKING:
    from tools.fuzz.builder import Builder, Dim

Tensor = torch.Tensor
# The number of elements that share a scale, and the largest value of the result's dtype.
_BLOCK = 32
_LARGEST = 448.0


# ------------------------------------------------------------------ the oracle
def nv_block_quantize(
    v: Val,
    swizzle_block_scales: bool = False,
    block_size: int = 16,
    dtype: str = "Float4_e2m1fn",
) -> list[Val]:
    """Returns quantised values, and a scale for each 32 neighbours.

    The scale is the least power of two with which no element overflows.
    """
    assert (block_size, dtype) == (_BLOCK, "Float8_e4m3fn")
    if v.ref.shape[-1] % _BLOCK:
        raise InvalidProgram(
            f"the last extent of {tuple(v.ref.shape)} is not a multiple of {_BLOCK}"
        )
    ref, bound = (t.unflatten(-1, (t.shape[-1] // _BLOCK, _BLOCK)) for t in (v.ref, v.bound))
    scale = _power(ref.abs().amax(-1))
    ends = [_power(x.amax(-1)) for x in ((ref.abs() - bound).clamp(min=0), ref.abs() + bound)]
    off = torch.maximum(*(difference(end, scale) for end in ends))
    off = torch.where(bound.isinf().any(-1), INF, off)
    by = scale.unsqueeze(-1)
    values = stored(ref / by, bound / by, "Float8_e4m3fn")
    known = torch.where((off > 0).unsqueeze(-1), INF, values.bound)
    scales = Val(scale, off, "Float8_e8m0fnu")
    return [
        Val(values.ref.flatten(-2), known.flatten(-2), "Float8_e4m3fn"),
        in_tiles(scales, -(-len(scale) // 128)) if swizzle_block_scales else scales,
    ]


def _power(largest: Tensor) -> Tensor:
    """Returns the first power of two of the dtype that is large enough, or the last one."""
    powers = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
    is_small = largest.unsqueeze(-1) > _LARGEST * powers
    found = powers[is_small.sum(-1).clamp(max=len(powers) - 1)]
    return torch.where(largest.isnan(), largest, found)


def in_tiles(v: Val, count: int) -> Val:
    """Moves each element of a matrix to its position in its tile; `count` tiles of 128 rows."""
    (m, k), columns = v.ref.shape, -(-v.ref.shape[1] // 4)
    row, column = torch.arange(m).unsqueeze(1), torch.arange(k)
    tile = row // 128 * columns + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    # The value whose bits are all 0: a dtype of powers of two has no zero.
    nothing = 2.0**-127 if v.dtype == "Float8_e8m0fnu" else 0

    def moved(t: Tensor, beside: float) -> Tensor:
        out = t.new_full((count * columns * 512,), beside)
        out[place.flatten()] = t.flatten()
        return out.view(count * 128, columns * 4)

    return Val(moved(v.ref, nothing), moved(v.bound, 0), v.dtype)


def preprocess_grouped_matmul_input_sf(v: Val, starts: Val, begins: Val) -> Val:
    """Moves the rows of each group to the start of its tiles."""
    if not (starts.is_exact and begins.is_exact):
        raise InvalidProgram("the oracle does not know the starts of the groups exactly")
    m, first, begin = len(v.ref), starts.ref.tolist(), begins.ref.tolist()
    rows = (m + 127 * len(first)) // 128 * 128
    taken: list[int] = []
    if len(first) != len(begin) or [*first, m][0]:
        raise InvalidProgram(f"groups that start at rows {first} cannot move to rows {begin}")
    for at, (x, y) in zip(begin, pairwise([*first, m]), strict=True):
        if x > y or at % 128 or at < max([0, *(n + 1 for n in taken[-1:])]):
            raise InvalidProgram(
                f"groups of {m} rows that start at {first} cannot move to rows {begin}"
            )
        taken += range(at, at + y - x)
    if any(n >= rows for n in (*taken, *(n - 1 for n in begin))):
        raise InvalidProgram(f"a result of {rows} rows has no room for the groups at rows {begin}")
    placed = v.view(lambda t: t.new_zeros(rows, t.shape[1]))
    if v.dtype == "Float8_e8m0fnu":
        placed.ref.fill_(2.0**-127)
    placed.ref[taken], placed.bound[taken] = v.ref[: len(taken)], v.bound[: len(taken)]
    return in_tiles(placed, rows // 128)


def nv_grouped_block_quantize(
    v: Val,
    starts: Val,
    begins: Val,
    block_size: int = 16,
    dtype: str = "Float4_e2m1fn",
) -> list[Val]:
    """Returns quantised values, and their scales in the tiles of groups of rows."""
    values, scales = nv_block_quantize(v, False, block_size, dtype)
    return [values, preprocess_grouped_matmul_input_sf(scales, starts, begins)]


MEANINGS: dict[str, Callable[..., Val | list[Val]]] = {
    "nv_block_quantize": nv_block_quantize,
    "nv_grouped_block_quantize": nv_grouped_block_quantize,
    "preprocess_grouped_matmul_input_sf": preprocess_grouped_matmul_input_sf,
}


# ------------------------------------------------------------------ the generators
def quantize(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Appends a block quantisation of a tensor with whole blocks, or of a new one."""
    dims, kind = b.dims[name], b.dtype[name]
    if kind not in ("Half", "BFloat16", "Float"):
        kind = b.rng.choice(("Half", "BFloat16", "Float"))
    way = b.rng.choice(("plain", "tiles", "groups"))
    outer = dims[:-1] if way == "plain" or len(dims) == 2 else [extents()]
    is_other = kind != b.dtype[name] or len(outer) != len(dims) - 1
    if is_other or dims[-1].expanded or any(n % _BLOCK for n in dims[-1].vec):
        counts = [b.rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(b.ncalls)]
        last = type(dims[0])(tuple(_BLOCK * c for c in counts), False)
        if b.chance(0.5) and counts[0]:
            last = b.constant(_BLOCK * counts[0])
        dims = [*outer, last]
        if not b.fits(dims):
            return
        name = make(dims, kind)
    *outer, last = [type(d)(d.vec, d.static) for d in b.dims[name]]
    blocks = type(last)(tuple(n // _BLOCK for n in last.vec), last.static)
    whole, named = [*outer, last], {"block_size": _BLOCK, "dtype": Dt("Float8_e4m3fn")}
    if way == "groups" and (groups := _groups(b, outer[0], extents, make)):
        tiles = _tiles(outer[0], blocks, b.dims[groups[0].name][0])
        b.emit_many("nv_grouped_block_quantize", [Ref(name), *groups], [whole, tiles], **named)
    elif way == "tiles":
        tiles = _tiles(outer[0], blocks, b.one)
        named |= {"swizzle_block_scales": True}
        b.emit_many("nv_block_quantize", [Ref(name)], [whole, tiles], **named)
    else:
        b.emit_many("nv_block_quantize", [Ref(name)], [whole, [*outer, blocks]], **named)


def lay_out(b: Builder, name: str, extents: Callable[[], Dim], make: MakeInput) -> None:
    """Appends the tiles of groups of rows of a matrix."""
    m, k = [type(d)(d.vec, d.static) for d in b.dims[name]]
    if groups := _groups(b, m, extents, make):
        tiles = _tiles(m, k, b.dims[groups[0].name][0])
        b.emit("preprocess_grouped_matmul_input_sf", [Ref(name), *groups], tiles)


def _tiles(m: Dim, k: Dim, groups: Dim) -> list[Dim]:
    pairs = zip(m.vec, groups.vec, strict=True)
    rows = tuple((n + 127 * g) // 128 * 128 for n, g in pairs)
    columns = tuple(-(-n // 4) * 4 for n in k.vec)
    return [type(m)(rows, m.static and groups.static), type(m)(columns, k.static)]


def _groups(b: Builder, m: Dim, extents: Callable[[], Dim], make: MakeInput) -> list[Ref]:
    """Draws groups of rows: the first row of each, and the first row of its tiles.

    Returns [] where there would be too many tiles, or rows without a group.
    """
    rng = b.rng
    count = b.constant(rng.choice((1, 1, 2, 3))) if b.chance(0.7) else extents()
    count = type(count)(count.vec, count.static)
    if any((n + 127 * g) // 128 * 512 > b.cap for n, g in zip(m.vec, count.vec, strict=True)):
        return []
    if any(n and not g for n, g in zip(m.vec, count.vec, strict=True)):
        return []
    starts: list[list[int]] = []
    begins: list[list[int]] = []
    for n, g in zip(m.vec, count.vec, strict=True):
        starts.append(sorted([0, *(rng.randint(0, n) for _ in range(g - 1))])[:g])
        needed = [-(-(y - x) // 128) for x, y in pairwise([*starts[-1], n])]
        # Unused tiles are before some of the groups.
        left = (n + 127 * g) // 128 - sum(needed)
        before = sorted(rng.randint(0, left) for _ in range(g))
        begins.append([128 * (x + sum(needed[:i])) for i, x in enumerate(before)])
    made = [make([count], "Int32", _these(numbers)) for numbers in (starts, begins)]
    return [Ref(name) for name in made]


def _these(numbers: Sequence[Sequence[int]]) -> list[str]:
    return [f"these {' '.join(map(str, some))}" for some in numbers]
