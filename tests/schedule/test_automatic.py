"""can_schedule, find_compatible_schedulers, compute_heuristics and schedule, on real inputs."""

from __future__ import annotations

import pytest
import torch

from fuser import ops, schedule
from fuser.errors import FuserError, InputError
from fuser.schedule import SchedulerType
from fuser.schedule.transpose_params import TransposeParams
from tests.schedule.programs import define


def test_ask_compute_and_apply() -> None:
    fusion = define(lambda x: ops.neg(ops.sum(x, [1])), (None, None))
    inputs = [torch.ones(4, 6)]
    assert schedule.find_compatible_schedulers(fusion, inputs) == [SchedulerType.reduction]
    assert schedule.can_schedule(fusion, SchedulerType.reduction, inputs) == (True, "")
    accepted, reason = schedule.can_schedule(fusion, SchedulerType.pointwise, inputs)
    assert not accepted
    assert "***rejected***" in reason and "not pointwise" in reason
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
    """Two schedulers accept it; on the CPU both make plain loops."""
    fusion = define(lambda x: ops.neg(ops.permute(x, [1, 0])), (None, None))
    inputs = [torch.ones(4, 6)]
    accepted = schedule.find_compatible_schedulers(fusion, inputs)
    assert accepted == [SchedulerType.transpose, SchedulerType.pointwise]
    params = schedule.schedule(fusion, SchedulerType.transpose, inputs)
    assert str(params) == "pointwise(loops)"
    again = define(lambda x: ops.neg(ops.permute(x, [1, 0])), (None, None))
    tile = TransposeParams(32, 1, 1, 16, 8)
    assert schedule.schedule(again, SchedulerType.transpose, tile) is None
    assert [tv.memory.name for tv in again.tensors()].count("shared") == 1


def test_refusals() -> None:
    fusion = define(lambda x: ops.sum(x, [1]), (None, None))
    with pytest.raises(FuserError, match="Could not schedule fusion with the SchedulerType"):
        schedule.compute_heuristics(fusion, SchedulerType.pointwise, [torch.ones(4, 6)])
    with pytest.raises(FuserError, match="in one order"):
        schedule.schedule(fusion, SchedulerType.transpose, [torch.ones(4, 6)])
    with pytest.raises(FuserError, match="no resize scheduler"):
        schedule.schedule(fusion, SchedulerType.resize, [torch.ones(4, 6)])
    with pytest.raises(InputError, match="expected 1 inputs"):
        schedule.compute_heuristics(fusion, SchedulerType.reduction, [])
