"""Boxes: parts of a buffer, in the axes of its owner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

# (start, length) along each axis of the owner of a buffer.
Box = tuple[tuple[int, int], ...]
# How a box was cut out, part by part: (axis of the owner, chunks; 0: one element), and in which
# units.
Grid = tuple[tuple[int, int, Fraction], ...]
# An axis of the owner, and how many of its elements are one of the axis that names it.
Owned = tuple[int, Fraction]


def whole_box(shape: Iterable[int]) -> Box:
    return tuple((0, n) for n in shape)


def reshaped(
    shape: Sequence[int], owned: Sequence[Owned | None], out: Sequence[int]
) -> list[Owned | None]:
    """Return what the axes of a reshape own, in terms of those that it was made of.

    The outermost axis of a split has whole rows of what was split, and rows of the outermost axis
    of a merge are what the merged axis counts.
    """
    found: list[Owned | None] = [None] * len(out)
    i = j = 0
    while i < len(shape) and j < len(out):
        if (shape[i] == 1) != (out[j] == 1):
            i, j = i + (shape[i] == 1), j + (out[j] == 1)
            continue
        first, left, inside, outside = i, j, shape[i], out[j]
        while inside != outside:
            if inside < outside and i + 1 < len(shape):
                i += 1
                inside *= shape[i]
            elif inside > outside and j + 1 < len(out):
                j += 1
                outside *= out[j]
            else:
                return found
        source = owned[first]
        if source is not None and inside and (i == first or j == left):
            owner, unit = source
            rows = Fraction(outside // max(out[left], 1), inside // max(shape[first], 1))
            found[left] = owner, unit * rows
        i, j = i + 1, j + 1
    return found


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes have an element in common."""
    return all(i < j + m and j < i + n for (i, n), (j, m) in zip(a, b, strict=True))


def box_text(box: Box, whole: Iterable[int]) -> str:
    """Return `[2:4, :]`; "" for all of a buffer of the sizes `whole`."""
    sizes = tuple(whole)
    if all(b == (0, n) for b, n in zip(box, sizes, strict=True)):
        return ""
    cuts = (
        ":" if (start, n) == (0, size) else str(start) if n == 1 else f"{start}:{start + n}"
        for (start, n), size in zip(box, sizes, strict=True)
    )
    return f"[{', '.join(cuts)}]"


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return what the covers leave of a box, as boxes that do not overlap."""
    left = [box]
    for cover in covers:
        left = [piece for one in left for piece in _subtract(one, cover)]
        if not left:
            break
    return left


def _subtract(box: Box, cover: Box) -> list[Box]:
    if not overlap(box, cover) or math.prod(n for _, n in box) == 0:
        return [box]
    pieces: list[Box] = []
    for axis, ((i, n), (j, m)) in enumerate(zip(box, cover, strict=True)):
        before, after = (i, j - i), (j + m, i + n - j - m)
        for piece in (before, after):
            if piece[1] > 0:
                pieces.append((*box[:axis], piece, *box[axis + 1 :]))
        start = max(i, j)
        kept = (start, min(i + n, j + m) - start)
        box = (*box[:axis], kept, *box[axis + 1 :])
    return pieces
