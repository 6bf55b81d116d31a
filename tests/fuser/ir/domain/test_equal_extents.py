"""Equal extents: their representatives, and that no order of statements loses an equality."""

from __future__ import annotations

import random

import pytest

from fuser.ir.domain.equal_extents import ExtentClasses
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol

I, J, K = (Symbol(f"i{n}", sc.ONE.dtype) for n in range(3))


def test_a_symbol_is_written_as_what_it_equals() -> None:
    extents = ExtentClasses()
    extents.unify(sc.mul(J, 2), K)
    extents.unify(J, I)
    assert extents.canonical(K) == sc.mul(I, 2)
    assert extents.canonical(sc.add(K, J)) == sc.mul(I, 3)


def test_an_extent_that_contains_the_symbol_is_a_condition() -> None:
    extents = ExtentClasses()
    extents.unify(sc.minimum(4, I), I)
    assert extents.canonical(I) == I
    assert extents.canonical(sc.minimum(4, I)) == I
    assert extents.relations() == ((sc.minimum(4, I), I),)


def test_two_computed_extents_are_a_condition_and_one_size() -> None:
    extents = ExtentClasses()
    extents.unify(sc.mul(I, 2), sc.mul(J, 3), "add")
    assert extents.canonical(sc.mul(J, 3)) == sc.mul(I, 2)
    assert extents.canonical(sc.mul(J, 6)) == sc.mul(J, 6)
    ((x, y),) = extents.relations()
    assert (x, y) == (sc.mul(J, 3), sc.mul(I, 2)) and extents.reason_of(x, y) == "add"


def test_rewriting_drops_what_became_trivial() -> None:
    extents = ExtentClasses()
    extents.unify(I, J)
    extents.unify(sc.add(I, 2), sc.mul(K, 2))
    extents.rewrite({I: sc.ZERO, J: sc.ZERO})
    assert extents.relations() == ((sc.mul(K, 2), sc.const(2)),)


@pytest.mark.parametrize("seed", range(200))
def test_statements_in_any_order_mean_the_same(seed: int) -> None:
    """Symbol values satisfy all statements exactly if they satisfy all relations."""
    rng = random.Random(seed)
    atoms: list[Scalar] = [I, J, K, sc.const(2), sc.const(3)]

    def extent() -> Scalar:
        a, b = rng.choice(atoms), rng.choice(atoms)
        return rng.choice([a, sc.add(a, b), sc.mul(a, b), sc.minimum(a, b)])

    said = [(extent(), extent()) for _ in range(rng.randint(1, 5))]
    extents = ExtentClasses()
    for a, b in said:
        extents.unify(a, b)
    kept = extents.relations()
    for i in range(1, 5):
        for j in range(1, 5):
            for k in range(1, 5):
                values = {I: i, J: j, K: k}
                holds = all(sc.evaluate(a, values) == sc.evaluate(b, values) for a, b in said)
                still = all(sc.evaluate(a, values) == sc.evaluate(b, values) for a, b in kept)
                assert holds == still, (said, kept, values)
                for x in (*(a for a, _ in said), *(b for _, b in said)):
                    if holds:
                        assert sc.evaluate(extents.canonical(x), values) == sc.evaluate(x, values)
