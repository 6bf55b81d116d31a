"""Fusions that the user schedules by hand."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView


def bias_relu() -> tuple[FusionDefinition, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        b = fd.define_tensor([-1], contiguity=True)
        out = fd.ops.relu(fd.ops.add(x, b))
        fd.add_output(out)
        out.merge(0)
        out.split(0, 32)
        fd.sched.transform_like(out)
        out.axis(0).parallelize(ParallelType.grid_x)
        out.axis(1).parallelize(ParallelType.block_x)
        fd.sched.parallelize_like(out)
        fd.sched.inline_most()
    return fd, out


def test_a_schedule_by_hand_runs_as_given() -> None:
    fd, _ = bias_relu()
    for shape in ((4, 8), (7, 13), (1, 1)):
        x, b = torch.randn(shape), torch.randn(shape[1])
        (out,) = fd.manual_execute([x, b])
        torch.testing.assert_close(out, torch.relu(x + b))
    text = fd.ke.kernel_text()
    assert "threadIdx.x" in text and "blockIdx.x" in text and "__launch_bounds__(32)" in text


def test_execute_and_manual_execute_exclude_each_other() -> None:
    inputs = [torch.ones(2, 2), torch.ones(2)]
    fd, _ = bias_relu()
    fd.manual_execute(inputs)
    with pytest.raises(AssertionError, match="KernelExecutor already exists"):
        fd.execute(inputs)
    with FusionDefinition() as other:
        x = other.define_tensor([-1], contiguity=True)
        other.add_output(other.ops.neg(x))
    other.execute([torch.ones(2)])
    with pytest.raises(AssertionError, match="FusionExecutorCache already exists"):
        other.manual_execute([torch.ones(2)])
