"""Declared strides of inputs.

A tensor with the declared strides is read directly. Any other one is read by its actual strides, or
refused with the axis, the expected stride and the actual ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch

from fuser import DataType, FusionDefinition, compute_tensor_descriptor
from fuser.support.errors import InputError
from tests.fuser.ir.test_memory_layout import strided

pytestmark = pytest.mark.from_text

PROGRAMS, BATCH = 120, 40
Way = tuple[list[int], list[int], int]


def random_way(rng: random.Random) -> Way:
    """Returns (shape, strides, offset): any order, gaps, overlaps, stride 0, size 1 with any
    stride."""
    rank = rng.randint(0, 4)
    shape = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(rank)]
    strides, step = [0] * rank, rng.choice((1, 1, 1, 2, 3))
    for p in rng.sample(range(rank), rank):
        if rng.random() < 0.15:
            continue
        strides[p] = step
        if shape[p] <= 1 and rng.random() < 0.5:
            strides[p] = rng.choice((0, 1, 2, 7, 977))
            continue
        step = step * max(shape[p], 1) + rng.choice((0,) * 8 + (1, 4, -1))
        step = max(step, 1)
    return shape, strides, rng.choice((0, 0, 1, 3))


def made(way: Way, seed: int) -> torch.Tensor:
    shape, strides, offset = way
    return torch.randn(0).new_empty(shape) if 0 in shape else strided(shape, strides, offset, seed)


def defined(shape: Sequence[int], strides: Sequence[int], form: int) -> FusionDefinition:
    """Returns a definition that reads an input with these declared sizes and strides."""
    contiguity, order = compute_tensor_descriptor(list(shape), list(strides))
    is_static = form % 2 == 0
    with FusionDefinition() as fd:
        if form < 2:
            x = fd.define_tensor(sizes=shape, strides=strides, static_sizes=is_static)
        else:
            sizes = [n if is_static or n == 1 else -1 for n in shape]
            x = fd.define_tensor(sizes, contiguity, DataType.Float, False, order)
        fd.add_output(fd.ops.neg(x))
        if shape:
            fd.add_output(fd.ops.sum(x, list(range(len(shape)))))
    return fd


@pytest.mark.parametrize("batch", range(PROGRAMS // BATCH))
def test_a_descriptor_takes_the_tensor_that_it_was_made_of(batch: int) -> None:
    """Another tensor of the same sizes is read correctly or refused."""
    refused = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        rng = random.Random(seed)
        way = random_way(rng)
        x, what = made(way, seed), (seed, *way)
        fd = defined(*way[:2], rng.randrange(4))
        for given in (x, x, made((way[0], dense(way[0], rng), 0), 1)):
            try:
                found = fd.execute([given])
            except InputError as error:
                assert given is not x and "to have stride" in str(error), what
                refused += 1
                continue
            assert torch.equal(found[0], -given), what
            if given.dim():
                torch.testing.assert_close(found[1], given.sum(), msg=str(what))
    assert refused


def dense(shape: Sequence[int], rng: random.Random) -> list[int]:
    strides, step = [0] * len(shape), 1
    for p in rng.sample(range(len(shape)), len(shape)):
        strides[p], step = step, step * shape[p]
    return strides


def test_what_breaks_its_declaration_is_refused_by_axis() -> None:
    for order in permutations(range(3)):
        stride_order = [2 - order.index(p) for p in range(3)]
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1] * 3, contiguity=[True] * 3, stride_order=stride_order)
            fd.add_output(fd.ops.neg(x))
        shape, inner = (2, 3, 4), order[-1]
        good = torch.randn([shape[p] for p in order]).permute(stride_order_of(order))
        for _ in range(2):
            assert torch.equal(fd.execute([good])[0], -good)
            wide = torch.randn([shape[p] + (p == inner) for p in order])
            gapped = wide.permute(stride_order_of(order)).narrow(inner, 0, shape[inner])
            axis, step = order[1], shape[inner]
            with pytest.raises(
                InputError, match=f"Stride mismatch .* stride {step} at axis {axis}"
            ):
                fd.execute([gapped])
            # An axis of one element may have any stride.
            unit = [1 if p == order[0] else n for p, n in enumerate(shape)]
            steps = [977 if p == order[0] else n for p, n in enumerate(good.stride())]
            given = strided(unit, steps)
            assert torch.equal(fd.execute([given])[0], -given)


def stride_order_of(order: Sequence[int]) -> list[int]:
    """Returns the inverse of a permutation of axes."""
    return [list(order).index(p) for p in range(len(order))]


def test_an_expanded_axis_has_stride_0() -> None:
    """Otherwise, elements along the axis could differ, of which only one is read."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=[True, None])
        fd.add_output(fd.ops.neg(x))
    column = torch.randn(3, 1)
    for _ in range(2):
        assert torch.equal(fd.execute([column.expand(3, 5)])[0], -column.expand(3, 5))
        assert torch.equal(fd.execute([column])[0], -column)
        with pytest.raises(
            InputError, match=r"which is expanded, to have stride 0 at axis 1.*\(5, 1"
        ):
            fd.execute([torch.randn(3, 5)])
