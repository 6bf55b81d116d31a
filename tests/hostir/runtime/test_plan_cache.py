"""Tests the plan cache without an evaluator; names stand for plans."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from fuser import DataType
from fuser.ir.fusion import Fusion
from fuser.support.errors import InputError
from hostir.runtime import plan_cache
from hostir.runtime.plan import Plan, Pool
from hostir.runtime.plan_cache import PlanCache

CPU = torch.device("cpu")


@dataclass(eq=False)
class Bound:
    """Stands for the arenas of a plan: notes the plans that were released."""

    gone: list[Any] = field(default_factory=list[Any])

    def forget(self, plan: Any) -> None:
        self.gone.append(plan.name)


@dataclass(eq=False)
class Named:
    """Stands for a plan."""

    name: str
    arenas: Bound


def named(name: str, bound: Bound) -> Plan:
    return cast(Plan, Named(name, bound))


def cache(*dtypes: DataType, free: frozenset[int] = frozenset(), **options: Any) -> PlanCache:
    """Returns the cache of a program with a tensor and scalar inputs."""
    fusion = Fusion()
    x = fusion.new_tensor([fusion.new_axis(fusion.new_extent())], DataType.Float)
    return PlanCache([x, *map(fusion.new_symbol, dtypes)], free, **options)


def beginning_at(place: int, n: int = 4) -> torch.Tensor:
    """Returns a tensor whose address is `place` bytes after a multiple of 16."""
    room = torch.zeros(n + 16)
    first = (-room.data_ptr() % 16 + place) // 4
    return room[first : first + n]


# ------------------------------------------------------------------ signatures
def test_what_was_kept_is_found_by_inputs_of_its_signature_alone() -> None:
    plans = cache(DataType.Int, DataType.Double, free=frozenset())
    inputs, key, known = plans.recall([torch.zeros(4), 3, 0.5])
    assert known is None
    entry = plans.new(inputs, None)
    assert plans.recall(inputs)[2] is None, "what has not run is not found"
    plans.keep(key, entry)
    assert plans.recall([torch.ones(4), 3, 2.5])[2] is entry
    for other in (
        [torch.zeros(5), 3, 0.5],
        [torch.zeros(4), 4, 0.5],
        [torch.zeros(8)[::2], 3, 0.5],
    ):
        assert plans.recall(other)[2] is None
    assert plans.recall([], signature=key)[2] is entry


def test_a_free_number_is_no_part_of_a_signature() -> None:
    plans = cache(DataType.Int, free=frozenset({1}))
    inputs, key, _ = plans.recall([torch.zeros(4), 3])
    entry = plans.new(inputs, None)
    plans.keep(key, entry)
    assert plans.recall([torch.zeros(4), 7])[2] is entry


def test_inputs_of_nested_lists_are_those_of_a_flat_one() -> None:
    plans, x = cache(), torch.zeros(4)
    _, key, _ = plans.recall([x])
    plans.keep(key, entry := plans.new([x], None))
    flat, again, known = plans.recall(cast(Any, [[x]]))
    assert len(flat) == 1 and flat[0] is x
    assert again == key and known is entry


def test_signatures_are_bounded_and_their_plans_let_go() -> None:
    plans, bound = cache(), Bound()
    for n in range(3 * plan_cache.MAX_PLANS):
        inputs, key, _ = plans.recall([torch.zeros(n)])
        entry = plans.new(inputs, None)
        entry.plans[()] = named(str(n), bound)
        plans.keep(key, entry)
    assert len(plans.plans()) <= plan_cache.MAX_PLANS
    assert len(set(bound.gone)) == len(bound.gone) >= 2 * plan_cache.MAX_PLANS
    kept = {cast(Any, plan).name for plan in plans.plans()}
    assert not kept & set(bound.gone) and str(3 * plan_cache.MAX_PLANS - 1) in kept


# ------------------------------------------------------------------ one signature
def test_a_plan_is_that_of_the_places_where_its_tensors_begin() -> None:
    plans, bound = cache(), Bound()
    inputs = [beginning_at(0)]
    entry = plans.new(inputs, None)
    assert entry.contents.check(inputs) == ()
    entry.plans[()] = named("at 0", bound)
    moved = entry.contents.check([beginning_at(4)])
    assert moved != () and entry.plans.recall(moved) is None
    entry.plans[moved] = named("at 4", bound)
    assert entry.contents.check([beginning_at(4)]) == moved
    assert entry.contents.check([beginning_at(8)]) not in ((), moved)
    entry.forget()
    assert sorted(bound.gone) == ["at 0", "at 4"]


def test_a_plan_that_was_prepared_is_taken_once() -> None:
    plans, bound = cache(), Bound()
    entry = plans.new([beginning_at(0)], None)
    entry.expect([beginning_at(4)], named("at 4", bound))
    places = entry.contents.places([beginning_at(4)])
    assert entry.take(()) is None
    assert cast(Any, entry.take(places)).name == "at 4"
    assert entry.take(places) is None


def test_later_numbers_are_checked() -> None:
    plans = cache(DataType.Int32, DataType.Int, free=frozenset({1, 2}))

    def even(arguments: Any) -> None:
        if arguments[2] % 2:
            raise InputError("odd")

    x = torch.zeros(4)
    entry = plans.new([x, 1, 2], even)
    entry.contents.check([x, 2**31 - 1, 4])
    with pytest.raises(InputError, match="input 1"):
        entry.contents.check([x, 2**31, 4])
    with pytest.raises(InputError, match="odd"):
        entry.contents.check([x, 1, 3])


# ------------------------------------------------------------------ devices
@dataclass
class GenericPlanOfOneSize:
    """A size-generic plan of which the plan of one size is known."""

    size: int
    made: Plan

    def plan_for(self, frame: Any) -> Plan | None:
        return self.made if frame.size == self.size else None


@dataclass
class Machine:
    device: torch.device


@dataclass
class SizedFrame:
    size: int
    machine: Machine = field(default_factory=lambda: Machine(CPU))


def test_a_size_generic_plan_makes_the_plans_of_its_device_for_the_sizes_that_it_serves() -> None:
    plans, made = cache(), named("of 4", Bound())
    assert plans.plan_for_new_sizes(cast(Any, SizedFrame(4))) is None
    plans.keep_generic_plan(CPU, None)
    plans.keep_generic_plan(CPU, cast(Any, GenericPlanOfOneSize(4, made)))
    assert plans.plan_for_new_sizes(cast(Any, SizedFrame(4))) is made
    assert plans.plan_for_new_sizes(cast(Any, SizedFrame(5))) is None
    assert plans.plan_for_new_sizes(cast(Any, SizedFrame(4, Machine(torch.device("meta"))))) is None
    plans.keep_generic_plan(CPU, None)
    assert plans.plan_for_new_sizes(cast(Any, SizedFrame(4))) is made, (
        "None removes no size-generic plan"
    )


def test_arenas_are_those_of_a_device_and_leave_their_pool_with_the_cache() -> None:
    pools = {CPU: Pool()}
    plans, left = cache(pools=pools, why_no_graphs="none here"), list[object]()
    arenas = plans.arenas_on(CPU)
    assert plans.arenas_on(CPU) is arenas and plans.arenas() == [arenas]
    assert arenas.pool is pools[CPU] and arenas.why_not == "none here"
    assert cache().arenas_on(CPU).pool is not pools[CPU]
    assert plans.memory().total == 0
    pools[CPU].leave = left.append  # pyright: ignore[reportAttributeAccessIssue]
    plans = cache(pools=pools)
    owner = plans.arenas_on(CPU).owner
    del plans
    gc.collect()
    assert left == [owner]
