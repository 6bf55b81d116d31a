"""Regions that names mean: parts of views on one rank and on all, against all of their elements."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from fuser import FusionDefinition
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import const
from hostir import RANK
from hostir.analysis.buffer_regions import (
    Box,
    BufferRegion,
    Owned,
    TrackedBuffer,
    cut,
    reshaped,
    whole_axes,
    whole_box,
)
from hostir.analysis.rank_regions import Extent, ShardRegion
from hostir.analysis.rank_values import PerRank
from hostir.analysis.walker import AllRanks, OneRank
from hostir.ir.effects import ENTRY, Part

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
        """Cuts the axes from `axis` on; returns how many of the parts were boxes."""
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


# ------------------------------------------------------------------ names on one rank and on all
SIZES, RANKS = (4, 6, 5), (0, 1, 2)


def owner_of(*sizes: int) -> TensorView:
    with FusionDefinition() as fd:
        return fd.define_tensor(list(sizes))


def in_range(part: Part, index: PerRank, limit: PerRank) -> PerRank:
    assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < limit))
    return index


def elements_on(shard: ShardRegion, whole: np.ndarray, i: int) -> set[int]:
    """Returns the elements of a shard on the rank at place i."""
    axes: list[list[int]] = []
    for extent in shard.extents:
        assert extent is not None
        (count, stride) = extent.levels[-1]
        assert len(extent.levels) == 1
        start, n = (int(np.broadcast_to(x, len(RANKS))[i]) for x in (extent.start, count))
        axes.append([start + k * stride for k in range(n)])
    return set(whole[np.ix_(*axes)].flat)


@pytest.mark.parametrize("seed", range(60))
def test_parts_of_parts_are_the_same_on_one_rank_and_on_all(seed: int) -> None:
    """Elements, chunks and permutations in turn, with indices that depend on the rank."""
    rng, tv = random.Random(seed), owner_of(*SIZES)
    whole = np.arange(math.prod(SIZES)).reshape(SIZES)
    arrays: list[Any] = [whole for _ in RANKS]
    buffer = TrackedBuffer(tv, SIZES, ENTRY, None, True)
    regions = [BufferRegion.whole(buffer) for _ in RANKS]
    shard = ShardRegion(tv, tuple(Extent(0, ((n, 1),)) for n in SIZES), (0, 1, 2), SIZES)
    for _ in range(4):
        if not arrays[0].ndim:
            break
        axis, offset = rng.randrange(arrays[0].ndim), rng.randrange(3)
        slope = rng.randrange(2)
        index = (RANK * slope + offset) % 2
        values = [(r * slope + offset) % 2 for r in RANKS]
        kind = rng.choice(["element", "chunk", "permuted"])
        if kind == "permuted":
            order = rng.sample(range(arrays[0].ndim), arrays[0].ndim)
            kept = dict(enumerate(order))
            arrays = [a.transpose(order) for a in arrays]
            regions = [r.viewed(kept, [0] * len(order)) for r in regions]
            shard = shard.viewed(kept, [0] * len(order))
            continue
        size = min(a.shape[axis] for a in arrays)
        if kind == "element" and size < 2 and any(a.shape[axis] != 1 for a in arrays):
            continue
        part = Part(axis, index, None if kind == "element" else const(2))
        for k, r in enumerate(RANKS):
            alone = OneRank({RANK: r})
            regions[k] = regions[k].part(part, lambda x, d=alone: int(d.value(x)), in_range)
            n = arrays[k].shape[axis]
            if kind == "element":
                arrays[k] = arrays[k].take(values[k] if n > 1 else 0, axis=axis)
            else:
                step = -(-n // 2)
                arrays[k] = np.split(arrays[k], [step * values[k], step * (values[k] + 1)], axis)[1]
        shard = shard.part(part, AllRanks(RANKS, {}).value, in_range)
    for k, array in enumerate(arrays):
        assert regions[k].shape == array.shape
        assert [int(np.broadcast_to(n, len(RANKS))[k]) for n in shard.shape] == list(array.shape)
        assert _elements(whole, regions[k].box) == set(array.flat)
        assert elements_on(shard, whole, k) == set(array.flat)
