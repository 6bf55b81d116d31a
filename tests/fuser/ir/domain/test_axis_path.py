"""Paths and rules over domains, checked by brute force on random transforms over small extents."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fuser.ir.domain.axis_path import (
    SizeRules,
    StrideRules,
    forward,
    indices_backward,
    indices_forward,
    path,
    replay,
)
from fuser.ir.domain.tensor_domain import DomainBuilder, TensorDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType

EXTENTS = (0, 1, 2, 3, 5, 7)


def chain(rng: random.Random, *, exact: bool) -> tuple[TensorDomain, list[int]]:
    """Returns a domain with random transforms from logical to loop axes, and its logical extents.

    With `exact`, every split divides its axis.
    """
    fusion = Fusion()
    extents = [rng.choice(EXTENTS) for _ in range(rng.randint(1, 3))]
    logical = [fusion.new_axis(sc.const(n)) for n in extents]
    built = DomainBuilder(fusion, logical)
    loop = list(logical)
    for _ in range(rng.randint(1, 5)):
        if len(loop) > 1 and rng.random() < 0.5:
            a, b = rng.sample(range(len(loop)), 2)
            merged = built.merge(loop[a], loop[b])
            loop = [x for k, x in enumerate(loop) if k not in (a, b)]
            loop.insert(min(a, b), merged)
            continue
        k = rng.randrange(len(loop))
        size = sc.int_value(loop[k].extent) or 0
        factors = [f for f in (1, 2, 3, 5) if not exact or size % f == 0]
        parts = built.split(loop[k], sc.const(rng.choice(factors)), inner_split=rng.random() < 0.5)
        loop[k : k + 1] = parts
    rng.shuffle(loop)
    domain = TensorDomain.of(
        logical, loop, transforms=built.transforms, between=built.axes.values()
    )
    return domain, extents


def extent(domain: TensorDomain, number: int) -> int:
    return int(sc.evaluate(domain.axes[number].extent, {}))


@pytest.mark.parametrize("seed", range(60))
def test_indices_round_trip(seed: int) -> None:
    """Every logical index maps to loop indices in range, which map back to the same logical
    index."""
    domain, extents = chain(random.Random(seed), exact=False)
    for point in itertools.product(*map(range, extents)):
        start = dict(zip(domain.logical_numbers, map(sc.const, point), strict=True))
        ahead = indices_forward(domain, start)
        for n in domain.loop_numbers:
            assert 0 <= int(sc.evaluate(ahead[n], {})) < extent(domain, n)
        back = indices_backward(domain, {n: ahead[n] for n in domain.loop_numbers})
        assert [sc.int_value(back[n]) for n in domain.logical_numbers] == list(point)


@pytest.mark.parametrize("seed", range(60))
def test_sizes_count_the_distinct_indices(seed: int) -> None:
    """With exact splits, the size of each axis is the number of its distinct indices."""
    domain, extents = chain(random.Random(seed), exact=True)
    sizes = dict(zip(domain.logical_numbers, map(sc.const, extents), strict=True))
    sizes = replay(forward(domain.transforms), sizes, SizeRules())
    seen: dict[int, set[int]] = {n: set() for n in domain.axes}
    for point in itertools.product(*map(range, extents)):
        start = dict(zip(domain.logical_numbers, map(sc.const, point), strict=True))
        for n, index in indices_forward(domain, start).items():
            seen[n].add(int(sc.evaluate(index, {})))
    for n in domain.axes:
        assert int(sc.evaluate(sizes[n], {})) == extent(domain, n)
        if math.prod(extents):
            assert seen[n] == set(range(extent(domain, n)))


@pytest.mark.parametrize("seed", range(60))
def test_strides_give_the_same_address(seed: int) -> None:
    """If every loop axis has a stride, the sum of index * stride is the logical address."""
    rng = random.Random(seed)
    domain, extents = chain(rng, exact=True)
    order = list(range(len(extents)))
    rng.shuffle(order)
    given, step = [0] * len(extents), rng.choice((1, 4))
    for k in reversed(order):
        given[k], step = step, step * extents[k]
    strides = dict(zip(domain.logical_numbers, map(sc.const, given), strict=True))
    rules = StrideRules(lambda n: domain.axes[n].size)
    strides = replay(path(domain, domain.logical, domain.loop), strides, rules)
    if not strides.keys() >= set(domain.loop_numbers):
        return  # two axes that are not adjacent in memory were merged
    for point in itertools.product(*map(range, extents)):
        start = dict(zip(domain.logical_numbers, map(sc.const, point), strict=True))
        ahead = indices_forward(domain, start)
        found = sum(int(sc.evaluate(sc.mul(ahead[n], strides[n]), {})) for n in domain.loop_numbers)
        assert found == sum(i * s for i, s in zip(point, given, strict=True))


def test_the_path_goes_back_and_then_ahead() -> None:
    """Memory axes determine the loop axes; one loop axis alone does not determine its sibling."""
    fusion = Fusion()
    a, b = (fusion.new_axis(sc.const(n)) for n in (6, 4))
    built = DomainBuilder(fusion, (a, b))
    outer, inner = built.split(a, sc.const(2))
    merged = built.merge(a, b)
    domain = TensorDomain.of(
        [a, b],
        [merged],
        allocation=[b, outer, inner],
        transforms=built.transforms,
        between=built.axes.values(),
    )
    split, merge = domain.transforms
    steps = path(domain, domain.allocation, domain.loop)
    assert [tuple(s) for s in steps] == [(split, False), (merge, True)]
    assert path(domain, (outer,), domain.loop) == ()
    assert [tuple(s) for s in path(domain, (outer,), domain.logical)] == [(split, False)]
    assert path(domain, domain.logical, domain.logical) == ()


def test_resizes_and_rotations_round_trip() -> None:
    fusion = Fusion()
    axis = fusion.new_axis(sc.const(5))
    built = DomainBuilder(fusion, (axis,))
    wide = built.resize(axis, sc.const(2), sc.const(-1))
    turned = built.swizzle(wide, ParallelType.mesh_x)
    domain = TensorDomain.of(
        [wide], [turned], root=[axis], transforms=built.transforms, between=built.axes.values()
    )
    assert extent(domain, turned.number) == 6
    for coordinate, i in itertools.product(range(6), range(4)):
        here = sc.const(coordinate, DataType.Index)
        ahead = indices_forward(domain, {axis.number: sc.const(i)}, coordinate=lambda _, c=here: c)
        assert sc.int_value(ahead[wide.number]) == i + 2
        assert sc.int_value(ahead[turned.number]) == (i + 2 - coordinate) % 6
        last = {turned.number: ahead[turned.number]}
        back = indices_backward(domain, last, coordinate=lambda _, c=here: c)
        assert sc.int_value(back[axis.number]) == i
