"""Blocks of merged axes, compared with a listing of all their elements.

The steps have the elements of the blocks, in order. A program is refused only if one of its blocks
is not a box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError
from multidevice.sharding.passes.merged_streams import unmerge_streams
from multidevice.sharding.placement import stream_cuts

Element = tuple[int, ...]


def blocks_of(sizes: tuple[int, ...], n: int) -> list[list[Element]]:
    """Returns the elements of each block; empty blocks are left out."""
    every = list(itertools.product(*map(range, sizes)))
    length = math.ceil(len(every) / n)
    return [every[k : k + length] for k in range(0, len(every), length)]


def is_box(block: list[Element]) -> bool:
    return math.prod(len(set(axis)) for axis in zip(*block, strict=True)) == len(block)


def steps_of(tv: TensorView, sizes: tuple[int, ...]) -> Iterator[list[Element]]:
    """Yields the elements of each step that is not empty."""
    counts: dict[int, int] = {}
    for number, cut in stream_cuts(tv):
        assert isinstance(cut.count, int)
        counts[tv.domain.logical_numbers.index(number)] = cut.count
    for step in itertools.product(*map(range, counts.values())):
        at = dict(zip(counts, step, strict=True))
        ranges: list[range] = []
        for axis, size in enumerate(sizes):
            length = math.ceil(size / counts.get(axis, 1))
            start = min(at.get(axis, 0) * length, size)
            ranges.append(range(start, min(start + length, size)))
        found = list(itertools.product(*ranges))
        if found:
            yield found


@pytest.mark.parametrize(
    "sizes", [*itertools.product((2, 3, 4, 6), (2, 3, 4, 5)), (2, 3, 4), (3, 2, 2), (2, 1, 3)]
)
def test_blocks_of_merged_axes_are_boxes_or_refused(sizes: tuple[int, ...]) -> None:
    taken = 0
    for n in range(1, math.prod(sizes) + 4):
        fusion = Fusion()
        with FusionGuard(fusion):
            x = fusion.new_tensor([fusion.new_axis(sc.const(k)) for k in sizes], DataType.Float)
            fusion.add_input(x)
            y = ops.set(x)
            assert isinstance(y, TensorView)
            fusion.add_output(y)
        for _ in sizes[1:]:
            y.merge(0)
        y.outer_split(0, n)
        y.axis(0).parallelize(ParallelType.stream)
        blocks = blocks_of(sizes, n)
        try:
            unmerge_streams(fusion)
        except UnsupportedError:
            assert not all(map(is_box, blocks)), (sizes, n)
            continue
        assert list(steps_of(y, sizes)) == blocks, (sizes, n)
        taken += 1
    assert taken > 3
