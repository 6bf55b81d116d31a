"""Boxes: parts of a buffer, in the axes of its owner."""

from __future__ import annotations

import math
from collections.abc import Iterable

# (start, length) along each axis of the owner of a buffer.
Box = tuple[tuple[int, int], ...]
# How a box was cut out, part by part: (axis of the owner, chunks; 0: one element).
Grid = tuple[tuple[int, int], ...]


def whole_box(shape: Iterable[int]) -> Box:
    return tuple((0, n) for n in shape)


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
