"""Tests direct launches through the driver's C interface, with a substitute for the driver's
library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fuser.runtime import cuda_kernel
from fuser.runtime.cuda_kernel import CudaKernel, PreparedCudaLaunch

# The structure from the documentation of CUDA's driver API, and a launch that records its
# arguments.
DRIVER = """
#include <initializer_list>
struct Config {
  unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, sharedMemBytes;
  void* stream;
  void* attributes;
  unsigned numberOfAttributes;
};
extern "C" {
unsigned long long seen[16];
int status = 0;
int cuLaunchKernelEx(const Config* c, void* function, void** params, void** extra) {
  unsigned long long* s = seen;
  for (unsigned x : {c->gridX, c->gridY, c->gridZ, c->blockX, c->blockY, c->blockZ}) *s++ = x;
  *s++ = c->sharedMemBytes;
  *s++ = (unsigned long long)c->stream;
  *s++ = c->numberOfAttributes;
  *s++ = (unsigned long long)function;
  *s++ = *(unsigned long long*)params[0];
  *s++ = *(unsigned long long*)params[1];
  *s++ = extra != nullptr;
  return status;
}
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    assert compiler is not None, "CPU kernels need g++, too"
    source, library = tmp_path / "driver.cpp", tmp_path / "libdriver.so"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(cuda_kernel, "_launch_directly", lambda: loaded.cuLaunchKernelEx)
    return loaded


def _prepared() -> tuple[PreparedCudaLaunch, list[object]]:
    retried: list[object] = []
    kernel = SimpleNamespace(
        _handle=0x7FFF_1234_5678,
        _allow_smem=lambda nbytes: None,
        _enqueue=lambda *args: retried.append(args),
    )
    arguments = cuda_kernel._Arguments(2)  # pyright: ignore[reportPrivateUsage]
    prepared = PreparedCudaLaunch(
        cast("CudaKernel", kernel), arguments, (5, 6, 7), (32, 4, 2), 1024
    )
    return prepared, retried


def test_the_driver_sees_the_launch(driver: ctypes.CDLL) -> None:
    prepared, retried = _prepared()
    call = prepared.bind(0x7FFF_0000_0010)
    seen = (ctypes.c_ulonglong * 16).in_dll(driver, "seen")
    for address in (0x7F00_0000_0100, 0x7F00_0000_0200):
        call.words[0], call.words[1] = address, 2**63 + 5
        assert call.function(*call.arguments) == 0
        assert list(seen)[:13] == [
            *(5, 6, 7, 32, 4, 2, 1024),
            *(0x7FFF_0000_0010, 0, 0x7FFF_1234_5678, address, 2**63 + 5, 0),
        ]
    assert retried == []


def test_a_refused_launch_is_tried_by_the_way_that_explains(driver: ctypes.CDLL) -> None:
    prepared, retried = _prepared()
    call: Any = prepared.bind(0)
    ctypes.c_int.in_dll(driver, "status").value = 700
    status = call.function(*call.arguments)
    assert status == 700
    call.fail(status)
    assert len(retried) == 1 and cast("tuple[object, ...]", retried[0])[-1] == 0
