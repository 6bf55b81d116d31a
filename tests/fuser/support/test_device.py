"""Descriptions of devices, a driver that fails, and polynomials in vectors of the CPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from fuser.runtime import compile_kernels, cpu_kernel, cuda_kernel
from fuser.runtime.kernel_text import RT_FILES, SIMT_FILES, preamble
from fuser.support.device import H200, describe_device
from fuser.support.errors import InputError, KernelError
from fuser.support.kernel_source import KernelSource
from tests.support import handwritten_kernels


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


# Instructions for products and sums of floats on x86-64 and Arm: of vectors, and of one float.
_OF_VECTORS = re.compile(r"^\s+(v?(mul|add|fn?m(add|sub)\w*)ps|f(mul|add|ml[as])\s+v\S+4s)\b", re.M)
_OF_ONE = re.compile(
    r"^\s+(v?(mul|add|fn?m(add|sub)\w*)ss|f(n?mul|n?m?add|n?m?sub)\s+s\d+)\b", re.M
)


def assembler_of(source: KernelSource, *flags: str) -> str:
    """Returns the assembler text of a CPU kernel."""
    text = preamble(SIMT_FILES + RT_FILES) + cpu_kernel._unit(source, "k", checked=False)
    return cpu_kernel._run_compiler(
        (*cpu_kernel._fast_flags([source]), *flags, "-S"), text, {}
    ).decode()


def test_gelu_loop_is_vectorised() -> None:
    """Reads the machine code, so the result does not depend on how busy the machine is."""
    source = handwritten_kernels.kernel(
        "gelu_loop",
        "const float* T0, float* T1, int64_t n",
        "  FUSER_SIMD\n  for (int64_t i = 0; i < n; ++i)\n"
        "    T1[i] = 0.5f * T0[i] * (1.0f + fm_erf(0.70710678f * T0[i]));",
        threads=1,
    )
    text = assembler_of(source)
    scalar = assembler_of(source, "-fno-tree-vectorize", "-fno-openmp-simd")
    # The polynomial in vectors, once more for the elements after the last vector, and no calls.
    assert len(_OF_VECTORS.findall(text)) >= len(_OF_ONE.findall(text)) > 10
    assert not re.search(r"(call|bl)\s+\S*erf", text)
    assert not _OF_VECTORS.search(scalar) and _OF_ONE.search(scalar)
    (compiled,) = compile_kernels([source], "cpu")
    x = torch.randn(1001)
    y = torch.empty_like(x)
    compiled.launch([x, y, x.numel()], grid=(1, 1, 1), block=(1, 1, 1))
    torch.testing.assert_close(y, torch.nn.functional.gelu(x))


class FailingDriver:
    """A driver that loads a library and finds no kernel in it."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def cuLibraryLoadData(self, code: bytes, *options: object) -> tuple[int, object]:
        return 0, code

    def cuLibraryGetKernel(self, library: object, name: bytes) -> tuple[int, object]:
        return 500, None


def test_machine_code_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernel, "load_driver", FailingDriver)
    with pytest.raises(KernelError, match=r"vector_add: .*cuLibraryGetKernel failed with 500"):
        cuda_kernel.CudaKernel(handwritten_kernels.VECTOR_ADD, b"no kernel")
