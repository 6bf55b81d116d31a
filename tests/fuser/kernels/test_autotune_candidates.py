"""Tests the neighbours of a heuristic's choice: they are near, different, and right in checked
mode."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion
from fuser.kernels.autotune_candidates import from_fields, neighbours, to_fields
from fuser.kernels.executor import compile_many
from fuser.schedule import plain, pointwise, reduction
from fuser.schedule.inner_persistent import InnerPersistentParams
from fuser.schedule.outer_persistent import OuterPersistentParams
from fuser.schedule.plain import PlainParams
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.reduction import ReductionParams
from fuser.schedule.registry import UserParams
from fuser.schedule.transpose import TransposeParams
from fuser.support.device import CPU
from fuser.support.record import replace
from tests.support.small_fusions import define, make_executor, random, run, sizes_of

CHOSEN = (
    PointwiseParams(128, 1, 8, 1),
    PointwiseParams(32, 4, 4, 2, inner_on_x=True),
    PointwiseParams(128, 1, 8, pieces=2),
    PointwiseParams(128, 1, 8, 2, flat=True),
    ReductionParams(True, 256, 1, 8, 4, 64),
    ReductionParams(True, 32, 4, 8, 4, unroll_outer=True),
    ReductionParams(True, 64, 2, 8, 4, shifted=True),
    ReductionParams(False, 32, 8, 4, 16, 16),
    ReductionParams(False, 128, 1, 8, 8, columns=2),
    InnerPersistentParams(128, 1, 8, 32, True, resident=768, exact=True),
    InnerPersistentParams(32, 4, 8, 16, shifted=True, resident=1024),
    InnerPersistentParams(512, 1, 8, unroll=4),
    OuterPersistentParams(4, 64, 4, 8, resident=1024, exact=True),
    OuterPersistentParams(8, 32, 4),
    TransposeParams(128, 8, 8, 64, 64),
    PlainParams(128),
)


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_they_are_many_different_and_of_one_kind(chosen: Any) -> None:
    found = neighbours(chosen)
    assert 4 <= len(found) < 1000
    assert len(set(found)) == len(found) and chosen not in found
    assert all(type(p) is type(chosen) for p in found)
    assert len({str(p) for p in found}) == len(found), "people tell them apart by their text"
    for p in found:
        threads = p.threads_x * p.threads_y if hasattr(p, "threads_x") else p.threads
        assert 1 <= threads <= 1024
        assert from_fields(json.loads(json.dumps(to_fields(p))), chosen) == p


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_the_nearest_differ_in_one_thing(chosen: Any) -> None:
    """All neighbours that change one parameter by one step come before those that take
    two steps."""

    def changed(p: Any) -> set[str]:
        found = {f.name for f in fields(p) if getattr(p, f.name) != getattr(chosen, f.name)}
        return found - {"kept", "shifted", "keeps_costly", "threads_y"} or {"one"}

    nearest = [len(changed(p)) for p in neighbours(chosen)[:4]]
    assert nearest[0] == 1 and max(nearest) <= 2


@pytest.mark.parametrize(
    "params",
    [pointwise.generic(CPU), reduction.generic(CPU), plain.generic(CPU), UserParams()],
    ids=str,
)
def test_plain_loops_and_the_users_schedule_have_none(params: Any) -> None:
    assert neighbours(params) == []


def test_only_what_was_written_is_read() -> None:
    chosen = PointwiseParams(128, 1, 8, 1)
    good = to_fields(replace(chosen, unroll=2))
    assert from_fields(good, chosen) == replace(chosen, unroll=2)
    tile = TransposeParams(128, 8, 8, 64, 64)
    assert from_fields(good, tile) == replace(chosen, unroll=2), "both serve two orders"
    assert from_fields(to_fields(tile), chosen) is None
    for bad in (
        None,
        [],
        {},
        {**good, "unroll": "2"},
        {**good, "unroll": True},
        {**good, "inner_on_x": 0},
        {**good, "more": 1},
        {k: v for k, v in good.items() if k != "vector"},
        {**good, "kind": "Fusion"},
    ):
        assert from_fields(bad, chosen) is None, bad


def _centered_columns(x: Any) -> Any:
    mean = ops.mul(ops.sum(x, [0]), 0.01)
    return ops.sub(x, ops.broadcast(mean, [True, False]))


def _softmax(x: Any) -> Any:
    e = ops.exp(ops.sub(x, ops.broadcast(ops.max(x, [1]), [False, True])))
    return ops.div(e, ops.broadcast(ops.sum(e, [1]), [False, True]))


PROGRAMS = {
    "pointwise": (lambda x: ops.add(ops.sin(x), x), lambda x: x.sin() + x),
    "inner": (lambda x: ops.sum(x, [1]), lambda x: x.sum(1)),
    "outer": (lambda x: ops.sum(x, [0]), lambda x: x.sum(0)),
    "all": (lambda x: ops.sum(x, [0, 1]), lambda x: x.sum()),
    "persistent": (_softmax, lambda x: x.softmax(1)),
    "columns": (_centered_columns, lambda x: x - x.sum(0) * 0.01),
    "transpose": (lambda x: ops.neg(ops.permute(x, [1, 0])), lambda x: -x.t()),
}


@pytest.mark.parametrize("shape", [(96, 256), (37, 77)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_near_one_computes_the_same(name: str, shape: tuple[int, int]) -> None:
    """Runs in checked mode with the H200's schedules. Few neighbours may fail to lower."""
    build, meaning = PROGRAMS[name]
    fusion: Fusion = define(build, (None, None))
    x = random(shape, torch.float32)
    want = meaning(x.double()).float()
    sizes = sizes_of(fusion, shape)
    bound = make_executor(fusion, "h200").bind([x], [want], sizes=sizes)
    assert bound is not None
    near = neighbours(bound[0].params)[:10]
    executors = [make_executor(fusion, "h200") for _ in near]
    for executor, params in zip(executors, near, strict=True):
        executor.scheduler = replace(executor.scheduler, chooser=partial(_always, params))
    compile_many([(e, [x], [want], sizes) for e in executors], device="cpu")
    for executor, params in zip(executors, near, strict=True):
        (out,) = run(executor, [x], [want.shape])
        assert torch.allclose(out, want, rtol=1e-4, atol=1e-4), params
    served = [e.variants[0].params == p for e, p in zip(executors, near, strict=True)]
    assert sum(served) >= len(near) // 2


def _always(params: Any, *_: object) -> Any:
    return lambda facts: params
