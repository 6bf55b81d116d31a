"""KernelExecutor: one kernel of a fusion that the user has scheduled, and its queries."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import (
    CompileParams,
    DataType,
    DefinitionError,
    FusionDefinition,
    KernelExecutor,
    LaunchParams,
    ParallelType,
    UnsupportedError,
)


def doubled() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.ops.mul(fd.ops.neg(x), 2.0)
        fd.add_output(y)
        y.split(0, 32)
        fd.sched.transform_like(y)
        y.axis(0).parallelize(ParallelType.grid_x)
        y.axis(1).parallelize(ParallelType.block_x)
        fd.sched.parallelize_like(y)
        fd.sched.inline_most()
    return fd


def test_it_compiles_and_runs() -> None:
    fd, ke, x = doubled(), KernelExecutor(), torch.randn(70)
    with pytest.raises(fuser.NotCompiledError, match="compile a fusion first"):
        ke.run([x])
    assert not ke.is_compiled()
    ke.compile(fd.fusion, [x])
    assert ke.is_compiled() and not ke.is_programmatic_dependent_launch_enabled()
    assert ke.kernel_text().count("__global__") == 1
    torch.testing.assert_close(ke.run([x]), [-2 * x])
    assert torch.equal(fd.manual_execute([x])[0], ke.run([x])[0])
    assert fd.ke.is_compiled()


def test_launch_constraints_hold_or_are_refused() -> None:
    fd, ke, x = doubled(), KernelExecutor(), torch.randn(70)
    ke.compile(fd.fusion, [x], LaunchParams(gdimx=3, bdimx=32))
    torch.testing.assert_close(ke.run([x], LaunchParams(3, 1, 1, 32, 1, 1)), [-2 * x])
    with pytest.raises(DefinitionError, match="bdimx=64: the schedule makes it 32"):
        ke.run([x], LaunchParams(bdimx=64))
    with pytest.raises(DefinitionError, match="gdimx=2: the schedule makes it 3"):
        ke.compile(fd.fusion, [x], LaunchParams(gdimx=2))


def test_compile_parameters_hold_or_are_refused() -> None:
    fd, x = doubled(), torch.randn(70)
    ke = KernelExecutor()
    ke.compile(fd.fusion, [x], compile_params=CompileParams(index_type=DataType.Int32))
    with pytest.raises(DefinitionError, match=r"index_type=Int, .* indexed by Int32"):
        ke.run([x], compile_params=CompileParams(index_type=DataType.Int))
    with pytest.raises(DefinitionError, match="device=cuda:0, but the inputs are on cpu"):
        ke.run([x], compile_params=CompileParams(device="cuda:0"))
    for params in (
        CompileParams(maxrregcount=64),
        CompileParams(enable_magic_zero=False),
        CompileParams(enable_ptxas_verbose=True),
        CompileParams(include_paths=["/usr/include"]),
    ):
        with pytest.raises(UnsupportedError, match="kernels are compiled with"):
            KernelExecutor().compile(fd.fusion, compile_params=params)
    assert repr(CompileParams()).startswith(
        "Compile Parameters: index_type = NotSet, maxrregcount = 255"
    )
    assert repr(LaunchParams(bdimx=32)).startswith("Launch Parameters: BlockDim.x = 32, BlockDim.y")


def test_what_one_kernel_cannot_be_is_refused_at_compile() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], contiguity=True)
        fd.add_output(fd.ops.matmul(x, x))
    refused = r"does not support the Fusion provided.*matmul, which computes T1"
    with pytest.raises(RuntimeError, match=refused):
        KernelExecutor().compile(fd.fusion)
    with pytest.raises(RuntimeError, match=refused):
        fd.fusion.print_kernel()
    with pytest.raises(RuntimeError, match=refused):
        fd.manual_execute([torch.ones(4, 4)])
    fd.execute([torch.ones(4, 4)])  # it was not compiled, so the other entrance is free


def test_a_scheduled_fusion_prints_its_kernel() -> None:
    text = doubled().fusion.print_kernel()
    assert "CUDAGeneratedKernel(" in text and "threadIdx.x" in text and "blockIdx.x" in text
    assert "#define nvfuser_index_t int\n" not in text
    narrow = doubled().fusion.print_kernel(CompileParams(index_type=DataType.Int32))
    assert "#define nvfuser_index_t int\n" in narrow


def test_parameters_of_a_scheduler_are_taken_by_manual_execute() -> None:
    x = torch.randn(8, 8)
    with FusionDefinition() as fd:
        tv = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.exp(tv))
    params = fd.sched.schedule(fd.fusion, fuser.SchedulerType.pointwise, [x])
    with pytest.raises(TypeError, match=r"expected the result of sched\.schedule"):
        fd.manual_execute([x], "pointwise")
    torch.testing.assert_close(fd.manual_execute([x], params), [x.exp()])
