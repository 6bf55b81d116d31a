"""Rows that exceed one block, reduced by one kernel with clusters of blocks; torch in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import DataType, FusionDefinition, PythonProfiler
from fuser.kernels.executor import FusedKernelExecutor
from fuser.runtime.cuda_kernel import CudaKernel
from fuser.support.device import describe_device

pytestmark = pytest.mark.gpu
Build = Callable[..., Any]
# Kept by two blocks and by sixteen; looped; of odd length, shifted.
ROWS = [(64, 1 << 17), (70, 1 << 20), (64, (1 << 18) + 1), (65, 100001)]


@pytest.fixture(autouse=True)
def needs_clusters() -> None:
    if describe_device("cuda").max_cluster == 1:
        pytest.skip("blocks of this GPU form no clusters")


def softmax(fd: FusionDefinition, x: Any) -> Any:
    wide = fd.ops.cast(x, DataType.Float)
    e = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, [-1], keepdim=True)))
    return fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, [-1], keepdim=True)), x.dtype())


def rms_norm(fd: FusionDefinition, x: Any, w: Any) -> Any:
    wide = fd.ops.cast(x, DataType.Float)
    total = fd.ops.sum(fd.ops.mul(wide, wide), [-1], keepdim=True)
    scale = fd.ops.rsqrt(fd.ops.add(fd.ops.div(total, x.size(1)), 1e-6))
    made = fd.ops.mul(fd.ops.mul(wide, scale), fd.ops.cast(w, DataType.Float))
    return fd.ops.cast(made, x.dtype())


def check(build: Build, reference: Build, *inputs: torch.Tensor) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(build(fd, *map(fd.from_pytorch, inputs)))
    expected = reference(*(x.double() for x in inputs))
    for _ in range(4):  # launched, then replayed
        (out,) = fd.execute(inputs)
        eps = torch.finfo(out.dtype).eps
        error = float((out.double() - expected).abs().max())
        assert error <= 8 * eps * float(expected.abs().max())
    with PythonProfiler() as prof:
        fd.execute(inputs)
    (row,) = prof.profile.kernel_profiles
    assert row.scheduler == "cluster_persistent"
    return fd


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(7)
    x = 3 * torch.randn(shape, generator=generator, device="cuda").to(dtype)
    w = torch.randn(shape[1], generator=generator, device="cuda").to(dtype)
    check(softmax, lambda x: torch.softmax(x, -1), x)
    check(rms_norm, lambda x, w: F.rms_norm(x, x.shape[1:], w, 1e-6), x, w)


def test_a_row_in_registers_is_in_no_memory_of_threads() -> None:
    """The row stays in registers as bfloat16, is converted again after each reduction, and never
    spills.
    """
    x = torch.randn(64, 1 << 20, device="cuda").bfloat16()
    fd = check(softmax, lambda x: torch.softmax(x, -1), x)
    program = fd._executor_cache()._last().program
    (kernel,) = [program.kernel(group) for group in program.container.groups.values()]
    assert isinstance(kernel, FusedKernelExecutor)
    exact = [v for v in kernel.variants if ", exact," in str(v.params)]
    assert exact and all("forget(" in v.kernel.source.text for v in exact)
    compiled = [v.compiled for v in exact if isinstance(v.compiled, CudaKernel)]
    assert [kernel.attributes()["local_bytes"] for kernel in compiled] == [0] * len(compiled)
    assert compiled
