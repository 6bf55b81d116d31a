"""`fuser.pytorch_utils` and `fuser.benchmark_utils`, except for the parts that need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, PythonProfiler, benchmark_utils, pytorch_utils
from fuser.support.errors import FuserError, InputError, NotCompiledError, UnsupportedError


def test_dtypes() -> None:
    names = {
        torch.complex128: "ComplexDouble",
        torch.complex64: "ComplexFloat",
        torch.float64: "Double",
        torch.float32: "Float",
        torch.float16: "Half",
        torch.bfloat16: "BFloat16",
        torch.float8_e4m3fn: "Float8_e4m3fn",
        torch.float8_e5m2: "Float8_e5m2",
        torch.float8_e8m0fnu: "Float8_e8m0fnu",
        torch.int64: "Int",
        torch.int32: "Int32",
        torch.bool: "Bool",
        complex: "ComplexDouble",
        float: "Double",
        int: "Int",
        bool: "Bool",
    }
    if hasattr(torch, "float4_e2m1fn_x2"):
        names[torch.float4_e2m1fn_x2] = "Float4_e2m1fn_x2"
    for dtype, name in names.items():
        assert pytorch_utils.torch_dtype_to_nvfuser_dtype(dtype) is DataType[name]
    for value in (True, 1, 1.5, 2j):
        want = DataType[names[type(value)]]
        assert pytorch_utils.python_scalar_to_nvfuser_dtype(value) is want


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint64, str, "float", [], None]
)
def test_other_dtypes(dtype: Any) -> None:
    with pytest.raises(KeyError) as caught:
        pytorch_utils.torch_dtype_to_nvfuser_dtype(dtype)
    assert isinstance(caught.value, FuserError)
    assert str(caught.value).startswith("torch_dtype_to_nvfuser_dtype: ")
    with pytest.raises(KeyError):
        pytorch_utils.python_scalar_to_nvfuser_dtype("text")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu() -> None:
    assert pytorch_utils.DEVICE_PROPERTIES is None
    with pytest.raises(InputError, match="no CUDA device"):
        pytorch_utils.get_device_properties()
    for make in (benchmark_utils.CuptiProfiler, benchmark_utils.CuptiTimer):
        with pytest.raises(UnsupportedError, match=r"CuptiProfiler: .*torch finds none"):
            make()


def test_a_test_runs_again_without_memory() -> None:
    calls: list[object] = []

    @pytorch_utils.retry_on_oom_or_skip_test
    def once(x: int, *, y: int = 0) -> int:
        """Needs memory."""
        calls.append((x, y))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return x + y

    assert (once.__name__, once.__doc__) == ("once", "Needs memory.")
    assert once(1, y=2) == 3 and calls == [(1, 2)] * 2

    @pytorch_utils.retry_on_oom_or_skip_test
    def never() -> None:
        calls.append("never")
        raise torch.OutOfMemoryError("no memory at all")

    with pytest.raises(pytest.skip.Exception, match="no memory at all"):
        never()
    assert calls[2:] == ["never"] * 2

    @pytorch_utils.retry_on_oom_or_skip_test
    def wrong() -> None:
        calls.append("wrong")
        raise ValueError("another error")

    with pytest.raises(ValueError, match="another"):
        wrong()
    assert calls[4:] == ["wrong"]


def test_timers() -> None:
    timer = benchmark_utils.Timer()
    first = timer()
    assert timer() > first
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    timer = benchmark_utils.FusionProfileTimer()
    now = 0.0
    for _ in range(2):
        assert timer() == now
        with PythonProfiler() as prof:
            fd.execute([torch.ones(3)])
        now += prof.profile.host_time_ms * 1e-3
        assert timer() == pytest.approx(now, rel=1e-12)
    timer()
    fd.execute([torch.ones(3)])
    with pytest.raises(NotCompiledError, match="nothing was profiled"):
        timer()
