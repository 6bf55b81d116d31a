"""Tests can_schedule, find_compatible_schedulers, compute_heuristics and schedule, on
real inputs."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import CompileParams, LaunchParams, ops, schedule
from fuser.schedule import SchedulerType, pointwise, reduction
from fuser.schedule.automatic import HeuristicParams, compute_heuristics
from fuser.schedule.inner_persistent import InnerPersistentParams
from fuser.schedule.outer_persistent import OuterPersistentParams
from fuser.schedule.transpose import TransposeParams
from fuser.support.errors import (
    ArgumentError,
    DefinitionError,
    FuserError,
    InputError,
    UnsupportedError,
    UnsupportedNameError,
)
from tests.support.small_fusions import define


def test_ask_compute_and_apply() -> None:
    fusion = define(lambda x: ops.neg(ops.sum(x, [1])), (None, None))
    inputs = [torch.ones(4, 6)]
    assert schedule.find_compatible_schedulers(fusion, inputs) == [SchedulerType.reduction]
    assert schedule.can_schedule(fusion, SchedulerType.reduction, inputs) == (True, "")
    accepted, reason = schedule.can_schedule(fusion, SchedulerType.pointwise, inputs)
    assert not accepted
    assert "***Rejected***" in reason and "not pointwise" in reason
    params = schedule.compute_heuristics(fusion, SchedulerType.reduction, inputs)
    assert str(params) == "reduction(inner, loops)"
    assert schedule.schedule(fusion, SchedulerType.reduction, params) is None
    assert [op.out_tensor.compute_at for op in fusion.exprs] == [1, 0]


def test_apply_for_inputs_returns_the_parameters() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    params = schedule.schedule(fusion, SchedulerType.pointwise, [torch.ones(4, 6)])
    assert str(params) == "pointwise(loops)"
    assert len(fusion.outputs[0].domain.loop) == 1


def test_a_transpose_by_its_name() -> None:
    """Two schedulers accept it, and both make plain loops on the CPU."""
    fusion = define(lambda x: ops.neg(ops.permute(x, [1, 0])), (None, None))
    inputs = [torch.ones(4, 6)]
    accepted = schedule.find_compatible_schedulers(fusion, inputs)
    assert accepted == [SchedulerType.transpose, SchedulerType.pointwise]
    params = schedule.schedule(fusion, SchedulerType.transpose, inputs)
    assert str(params) == "pointwise(loops)"
    again = define(lambda x: ops.neg(ops.permute(x, [1, 0])), (None, None))
    tile = HeuristicParams.of(SchedulerType.transpose, TransposeParams(32, 1, 1, 16, 8))
    assert schedule.schedule(again, SchedulerType.transpose, tile) is None
    assert [tv.memory.name for tv in again.tensors()].count("shared") == 1


def test_what_was_chosen_is_read_by_nvfusers_names() -> None:
    """Kernels have plain loops on the CPU; on an H200, threads read vectors."""
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    params = compute_heuristics(fusion, SchedulerType.pointwise, [torch.ones(4, 6)])
    assert type(params) is fuser.PointwiseParams and isinstance(params, fuser.HeuristicParams)
    assert (params.vectorization_factor, params.unroll_factor_inner) == (1, 1)
    assert params.scheduler_type is SchedulerType.pointwise and not params.split_block
    again = compute_heuristics(fusion, SchedulerType.pointwise, [torch.ones(40, 6)])
    assert params == again and params.hash() == again.hash() and len({params, again}) == 1
    chosen = pointwise.PointwiseParams(128, 2, vector=4, unroll=8)
    found = HeuristicParams.of(SchedulerType.pointwise, chosen)
    assert (found.vectorization_factor, found.unroll_factor_inner) == (4, 8)
    assert found.split_block and found != params and str(found) == str(chosen)
    assert params.lparams == LaunchParams() and params.cparams == CompileParams()


@pytest.mark.parametrize(
    ("chosen", "yes"),
    [
        (reduction.ReductionParams(True, 128, vector=4), "fastest_dim vectorize_inner_reduction"),
        (reduction.ReductionParams(False, 32, 4, grid=8), "cross_grid_outer_reduction"),
        (reduction.ReductionParams(True, 32, grid=8), "fastest_dim cross_grid_inner_reduction"),
        (InnerPersistentParams(128), "fastest_dim persistent_kernel"),
        (OuterPersistentParams(32, vector=2), "persistent_kernel vectorize_iter_dom"),
    ],
    ids=str,
)
def test_what_was_chosen_of_reductions(chosen: object, yes: str) -> None:
    params = HeuristicParams.of(SchedulerType.reduction, chosen)
    assert type(params) is fuser.ReductionParams
    assert {name for name in params.NAMES if getattr(params, name)} == set(yes.split())


def test_parameters_are_read() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    params = compute_heuristics(fusion, SchedulerType.pointwise, [torch.ones(4, 6)])
    with pytest.raises(UnsupportedError, match="vectorization_factor cannot be set"):
        params.vectorization_factor = 4
    with pytest.raises(ArgumentError, match="lparams"):
        params.lparams = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        UnsupportedNameError, match=r"attribute break_point; it has .*unroll_factor_inner"
    ):
        _ = params.break_point
    for cls in (fuser.HeuristicParams, fuser.PointwiseParams, fuser.ReductionParams):
        with pytest.raises(UnsupportedError, match=f"{cls.PUBLIC} objects cannot be constructed"):
            cls()
    with pytest.raises(DefinitionError, match=r"belong to SchedulerType.pointwise, not"):
        schedule.schedule(fusion, SchedulerType.transpose, params)
    with pytest.raises(ArgumentError, match="heuristic_params"):
        schedule.schedule(fusion, SchedulerType.pointwise, params.chosen)


def test_what_parameters_ask_of_a_launch_holds_or_is_refused() -> None:
    with fuser.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        y = fd.ops.neg(x)
        fd.add_output(y)
        y.axis(1).parallelize(fuser.ParallelType.block_x)
    given = [torch.randn(3, 8)]
    params = HeuristicParams.of(SchedulerType.pointwise, pointwise.PointwiseParams())
    params.lparams = LaunchParams(bdimx=8)
    torch.testing.assert_close(fd.manual_execute(given, params), [-given[0]])
    params.lparams.bdimx = 16
    with pytest.raises(DefinitionError, match="bdimx=16: the schedule makes it 8"):
        fd.manual_execute(given, params)
    params.lparams.bdimx = -1
    params.cparams.maxrregcount = 32
    with pytest.raises(UnsupportedError, match="maxrregcount=32"):
        fd.manual_execute(given, params)


def test_refusals() -> None:
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    with pytest.raises(FuserError, match="Could not schedule fusion with the SchedulerType"):
        schedule.compute_heuristics(fusion, SchedulerType.pointwise, [torch.ones(4, 6)])
    with pytest.raises(FuserError, match="one memory order"):
        schedule.schedule(fusion, SchedulerType.transpose, [torch.ones(4, 6)])
    with pytest.raises(FuserError, match="no resize scheduler"):
        schedule.schedule(fusion, SchedulerType.resize, [torch.ones(4, 6)])
    with pytest.raises(InputError, match="has 1 input, but 0 were passed"):
        schedule.compute_heuristics(fusion, SchedulerType.reduction, [])
