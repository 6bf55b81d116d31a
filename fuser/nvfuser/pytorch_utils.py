"""Helpers for torch, with nvFuser's names: conversions of dtypes, properties of the GPU, and a
decorator for tests that may run out of GPU memory.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fuser.ir.dtypes import DataType
from fuser.runtime.cuda_kernel import load_driver
from fuser.support.arguments import show
from fuser.support.device import bandwidth_gbs
from fuser.support.errors import InputError, KernelError, UnknownDtypeError

P = ParamSpec("P")
R = TypeVar("R")

# The entries of nvFuser's table, whether or not ops support the dtype. A float4 dtype that this
# version of torch does not have is left out.
_DTYPES: dict[object, DataType] = {
    torch.cdouble: DataType.ComplexDouble,
    torch.cfloat: DataType.ComplexFloat,
    torch.double: DataType.Double,
    torch.float: DataType.Float,
    torch.half: DataType.Half,
    torch.bfloat16: DataType.BFloat16,
    torch.float8_e4m3fn: DataType.Float8_e4m3fn,
    torch.float8_e5m2: DataType.Float8_e5m2,
    torch.float8_e8m0fnu: DataType.Float8_e8m0fnu,
    torch.long: DataType.Int,
    torch.int: DataType.Int32,
    torch.bool: DataType.Bool,
    getattr(torch, "float4_e2m1fn_x2", None): DataType.Float4_e2m1fn_x2,
    # Python's numbers.
    complex: DataType.ComplexDouble,
    float: DataType.Double,
    int: DataType.Int,
    bool: DataType.Bool,
}
_DTYPES.pop(None, None)


def torch_dtype_to_nvfuser_dtype(dtype: torch.dtype | type) -> DataType:
    """Returns the `DataType` of a torch dtype, or of a Python type of numbers.

    Raises:
        UnknownDtypeError: there is no such `DataType` (for example for uint8 and int16). The error
            is also a KeyError.
    """
    try:
        return _DTYPES[dtype]
    except (KeyError, TypeError):
        known = ", ".join(str(d) for d in _DTYPES if isinstance(d, torch.dtype))
        raise UnknownDtypeError(
            f"torch_dtype_to_nvfuser_dtype: {show(dtype)} is not supported: supported are {known}, "
            "and Python's complex, float, int and bool"
        ) from None


def python_scalar_to_nvfuser_dtype(a: object) -> DataType:
    """Returns the `DataType` that the Python number `a` has in a fusion.

    Raises:
        UnknownDtypeError: `a` is not a number.
    """
    return torch_dtype_to_nvfuser_dtype(type(a))


# Key -> the driver's attribute, without CU_DEVICE_ATTRIBUTE_.
_ATTRIBUTES = {
    "gpu_compute_capability_major": "COMPUTE_CAPABILITY_MAJOR",
    "gpu_compute_capability_minor": "COMPUTE_CAPABILITY_MINOR",
    "gpu_sm_count": "MULTIPROCESSOR_COUNT",
    "gpu_max_threads_per_block": "MAX_THREADS_PER_BLOCK",
    "gpu_smem_bytes_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "gpu_regs_per_block": "MAX_REGISTERS_PER_BLOCK",
    "gpu_clock_rate_khz": "CLOCK_RATE",
    "gpu_l2_bytes": "L2_CACHE_SIZE",
    "gpu_mem_clock_khz": "MEMORY_CLOCK_RATE",
    "gpu_mem_bus_width": "GLOBAL_MEMORY_BUS_WIDTH",
    "gpu_max_threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
}


def get_device_properties() -> dict[str, Any]:
    """Returns properties of the current GPU from the driver, by nvFuser's names.

    The bandwidth is in 1e9 bytes per second.

    Raises:
        InputError: torch has no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("get_device_properties: torch finds no CUDA device")
    index = torch.cuda.current_device()
    torch.cuda.init()
    driver, known = load_driver(), torch.cuda.get_device_properties(index)

    def ask(call: str, *args: object) -> int:
        status, found = getattr(driver, call)(*args)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(
                f"get_device_properties of GPU {index}: {call} failed with {status!r}"
            )
        return found

    device = ask("cuDeviceGet", index)
    numbers = {
        key: ask(
            "cuDeviceGetAttribute",
            getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"),
            device,
        )
        for key, name in _ATTRIBUTES.items()
    }
    peak = bandwidth_gbs(numbers["gpu_mem_clock_khz"], numbers["gpu_mem_bus_width"])
    return {
        "gpu_name": known.name,
        "gpu_gmem_bytes": known.total_memory,
        **numbers,
        "gpu_peak_bandwidth_gbps": peak,
    }


# Properties of the GPU that is current when this module is imported.
DEVICE_PROPERTIES: dict[str, Any] | None = (
    get_device_properties() if torch.cuda.is_available() else None
)


def retry_on_oom_or_skip_test(func: Callable[P, R]) -> Callable[P, R]:
    """Decorates a test so that an out-of-memory error of the GPU does not make the test fail.

    After such an error, memory is freed and the test runs again, once. If the second run has such
    an error too, the test is skipped.
    """

    @functools.wraps(func)
    def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            pass  # leaving this block drops the error, and with it the frames and their tensors
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            import pytest

            pytest.skip(f"out of memory, twice: {error}")

    return retried
