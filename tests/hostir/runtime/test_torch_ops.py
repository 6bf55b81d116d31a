"""Tests library calls: partial results of any mesh, views decided once, a fast first call."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.support.errors import UnsupportedError
from tests.support.limits import HANG_S

REPOSITORY = Path(__file__).resolve().parents[3]


def partial_matmul(size: int, dtype: DataType, reduced: int) -> FusionDefinition:
    """Defines a matmul that is summed over the ranks of a mesh."""
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1, 8], contiguity=True, dtype=dtype)
        b = fd.define_tensor([8, 5], contiguity=True, dtype=dtype)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
    for tv, axis in ((a, 1), (b, 0), (c, 2)):
        tv.set_device_mesh(multidevice.DeviceMesh(list(range(size))))
        tv.outer_split(axis, size)
        tv.axis(axis).parallelize(ParallelType.mesh_x)
    c.rfactor([reduced])
    return fd


def run_partial(size: int, dtype: DataType) -> None:
    fd = partial_matmul(size, dtype, 3)
    generator = torch.Generator().manual_seed(1)
    torch_dtype = torch.bfloat16 if dtype is DataType.BFloat16 else torch.float32
    a = torch.randn(3, 8, generator=generator).to(torch_dtype)
    b = torch.randn(8, 5, generator=generator).to(torch_dtype)
    part = 8 // size
    at = slice(multidevice.Communicator.instance().rank() * part, None)
    mine = [a[:, at][:, :part].contiguous(), b[at][:part].contiguous()]
    expected = a.double() @ b.double()
    tolerance = 5e-2 if torch_dtype is torch.bfloat16 else 1e-5
    for _ in range(3):
        (out,) = fd.execute(mine)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Float])
@pytest.mark.parametrize("size", [1, 2])
def test_partial_sums_over_meshes_of_any_size(size: int, dtype: DataType) -> None:
    with warnings.catch_warnings(), multidevice.simulate(size) as world:
        warnings.simplefilter("error")  # torch warns where it resizes an output
        world.run(run_partial, size, dtype)


def test_reduced_elements_that_stay_apart_are_refused() -> None:
    fd = partial_matmul(1, DataType.Float, 2)
    with (
        multidevice.simulate(1) as world,
        pytest.raises(
            UnsupportedError, match=r"matmul T\d+\w* has 8 partial sums of its reduced axis"
        ),
    ):
        world.run(fd.execute, [torch.ones(3, 8), torch.ones(8, 5)])


def test_views_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, torch tried a view that fails, and raised an error, in every call."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, 4], contiguity=[False, False, True])
        w = fd.define_tensor([5, 4], contiguity=True)
        fd.add_output(fd.ops.linear(x, w))
    rows, weight = torch.randn(3, 2, 4).transpose(0, 1), torch.randn(5, 4)
    expected = (rows.double() @ weight.double().t()).float()
    torch.testing.assert_close(fd.execute([rows, weight])[0], expected)
    view, failed = torch.Tensor.view, []

    def counting(*args: Any) -> torch.Tensor:
        try:
            return view(*args)
        except RuntimeError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(torch.Tensor, "view", counting)
    for _ in range(3):
        torch.testing.assert_close(fd.execute([rows, weight])[0], expected)
    assert not failed


def test_a_first_result_imports_no_compiler_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "cold_start.py"), "cpu"],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])["imported"]
    assert not {"torch._dynamo", "torch._inductor", "sympy"} & set(imported)
