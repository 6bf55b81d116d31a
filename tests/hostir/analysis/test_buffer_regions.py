"""Boxes of views: what a part of a reshaped tensor covers, against all of its elements."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hostir.analysis.buffer_regions import Box, Owned, cut, reshaped, whole_axes, whole_box

SHAPES = (
    ((2, 3, 4), (2, 3, 2, 2)),
    ((2, 3, 4), (6, 4)),
    ((6, 4), (2, 3, 4)),
    ((1, 6, 4), (6, 1, 2, 2)),
    ((4, 3), (2, 6)),
    ((2, 6), (4, 3)),
    ((8,), (1, 8, 1)),
    ((2, 2, 3), (12,)),
    ((12,), (2, 2, 3)),
    ((5, 1), (1, 5)),
    ((6, 4), (4, 6)),
)


def _elements(whole: np.ndarray, box: Box) -> set[int]:
    return set(whole[tuple(slice(i, i + n) for i, n in box)].flat)


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_ranges_of_reshaped_axes_are_boxes_of_the_owner(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    whole = np.arange(math.prod(before)).reshape(before)
    view = whole.reshape(after)
    found = reshaped(before, whole_axes(before), after)
    assert (None in found) is (after == (4, 6)), "axes that are neither split nor merged"

    def check(part: np.ndarray, box: Box, owned: list[Owned | None], axis: int) -> int:
        """Cut the axes from `axis` on; return how many of the parts were boxes."""
        if axis == part.ndim:
            assert _elements(whole, box) == set(part.flat)
            return 1
        exact, mine = 0, owned[axis]
        for start, stop in itertools.combinations(range(part.shape[axis] + 1), 2):
            cut_out = None if mine is None else cut(box, mine, start, stop - start)
            if cut_out is not None:
                smaller = part.take(range(start, stop), axis=axis)
                exact += check(smaller, cut_out[0], owned, axis + 1)
        return exact

    exact = check(view, whole_box(before), found, 0)
    assert (exact > 0) is (None not in found)


def test_elements_of_merged_and_split_axes_are_boxes() -> None:
    (rows, _) = reshaped((2, 4, 6), whole_axes((2, 4, 6)), (8, 6))
    assert rows is not None
    assert cut(whole_box((2, 4, 6)), rows, 5, 1) == (((1, 1), (1, 1), (0, 6)), ())
    assert cut(whole_box((2, 4, 6)), rows, 3, 2) is None
    outer, inner, _ = reshaped((4, 6), whole_axes((4, 6)), (2, 2, 6))
    assert outer is not None
    assert inner is not None
    half = cut(whole_box((4, 6)), outer, 1, 1)
    assert half is not None
    assert cut(half[0], inner, 1, 1) == (((3, 1), (0, 6)), ())
    assert cut(whole_box((4, 6)), inner, 1, 1) is None, "rows of both halves"
