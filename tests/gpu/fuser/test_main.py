"""`python -m fuser` reports the GPUs without creating a CUDA context."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

PROGRAM = """
from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
from fuser.__main__ import main
main(["--json"])
import torch
for index in range(torch.cuda.device_count()):
    status, _, is_active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(index)[1])
    assert status == driver.CUresult.CUDA_SUCCESS and not is_active, (index, status, is_active)
"""


def test_gpus_are_told_without_a_context() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["devices"]
    for index in range(torch.cuda.device_count()):
        told = found[f"cuda:{index}"]
        assert torch.cuda.get_device_name(index) in told and "sm_" in told and "GiB" in told
