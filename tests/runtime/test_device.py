"""Device descriptions, the driver that refuses, and the speed of the polynomials on the CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from fuser.device import H200, describe_device
from fuser.errors import InputError, KernelError
from fuser.runtime import compile_kernels, cuda_kernel
from tests.runtime import kernels


def test_cpu_prefers_one_thread() -> None:
    info = describe_device(torch.device("cpu"))
    assert (info.kind, info.sm_count, info.preferred_threads_per_block) == ("cpu", 1, 1)
    assert info == describe_device("cpu")


def test_h200_constants() -> None:
    assert (H200.kind, H200.sm_count, H200.max_smem_per_block) == ("cuda", 132, 227 * 1024)


@pytest.mark.gpu
def test_cuda_description() -> None:
    info = describe_device("cuda")
    assert info.kind == "cuda"
    assert info.warp_size == 32
    assert info.max_smem_per_block >= 48 * 1024


def test_unknown_device() -> None:
    with pytest.raises(InputError, match="not on meta"):
        describe_device("meta")


def least_s(function: object) -> float:
    times: list[float] = []
    for _ in range(9):
        # The thread's own time: other work on the machine does not count.
        start = time.thread_time()
        function()  # pyright: ignore[reportCallIssue]
        times.append(time.thread_time() - start)
    return min(times)


def test_gelu_loop_is_vectorised() -> None:
    # Not vectorised, it takes 13 to 20 times as long as torch. With AVX-512 the compiler takes half
    # of its width and torch all of it: 3 to 5 times as long.
    source = kernels.kernel(
        "gelu_loop",
        "const float* T0, float* T1, int64_t n",
        "  FUSER_SIMD\n  for (int64_t i = 0; i < n; ++i)\n"
        "    T1[i] = 0.5f * T0[i] * (1.0f + fm_erf(0.70710678f * T0[i]));",
        threads=1,
    )
    (compiled,) = compile_kernels([source], "cpu")
    x = torch.randn(32 * 64 * 1536)
    y = torch.empty_like(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compiled.launch([x, y, x.numel()], grid=(1, 1, 1), block=(1, 1, 1))
        torch.testing.assert_close(y, torch.nn.functional.gelu(x))
        ours = least_s(lambda: compiled.launch([x, y, x.numel()], grid=(1, 1, 1), block=(1, 1, 1)))
        theirs = least_s(lambda: torch.nn.functional.gelu(x))
    finally:
        torch.set_num_threads(threads)
    assert ours <= 10 * theirs, (ours, theirs)


class FailingDriver:
    """A driver that loads a library and finds no kernel in it."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def cuLibraryLoadData(self, code: bytes, *options: object) -> tuple[int, object]:
        return 0, code

    def cuLibraryGetKernel(self, library: object, name: bytes) -> tuple[int, object]:
        return 500, None


def test_machine_code_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "load_driver", FailingDriver)
    with pytest.raises(KernelError, match=r"vector_add: cuLibraryGetKernel failed \(500"):
        cuda_kernel.CudaKernel(kernels.VECTOR_ADD, b"no kernel")
