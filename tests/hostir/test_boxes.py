"""Boxes of views: what a part of a reshaped tensor covers, against all of its elements."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from hostir.boxes import reshaped

SHAPES = (
    ((2, 3, 4), (2, 3, 2, 2)),
    ((2, 3, 4), (6, 4)),
    ((6, 4), (2, 3, 4)),
    ((1, 6, 4), (6, 1, 2, 2)),
    ((4, 3), (2, 6)),
    ((8,), (1, 8, 1)),
    ((2, 2, 3), (12,)),
    ((5, 1), (1, 5)),
)


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_parts_of_reshaped_axes_are_boxes_of_the_owner(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    whole = np.arange(math.prod(before)).reshape(before)
    view = whole.reshape(after)
    owned = reshaped(before, [(k, Fraction(1)) for k in range(len(before))], after)
    exact = 0
    for axis, (n, found) in enumerate(zip(after, owned, strict=True)):
        if found is None:
            continue
        owner, unit = found
        for start, stop in itertools.combinations(range(n + 1), 2):
            low, high = start * unit, stop * unit
            if low.denominator > 1 or high.denominator > 1:
                continue
            exact += 1
            box = whole.take(range(int(low), int(high)), axis=owner)
            part = view.take(range(start, stop), axis=axis)
            assert set(part.flat) == set(box.flat), (axis, start, stop)
    assert bool(exact) is (after != (2, 6)), "axes that are neither split nor merged have none"
