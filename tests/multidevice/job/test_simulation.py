"""Layers on many simulated ranks: values against torch in float64, and the memory they take."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fuser import FusionDefinition, Replicate, Shard, shard
from multidevice import Communicator, DeviceMesh, shard_tensor, simulate
from tests.support.jobs import ROOT
from tests.support.limits import HANG_S

TOKENS, WIDTH, HIDDEN = 64, 64, 128
# Bytes that a process of 64 ranks may have at most.
MOST_BYTES = 1 << 30


def check_layer(rows: int, columns: int, whole: list[torch.Tensor]) -> None:
    """Runs a tensor-parallel layer on a mesh of rows x columns ranks, and compares with float64."""
    mesh = DeviceMesh(torch.arange(rows * columns).reshape(rows, columns))
    by_tokens = [Shard(0), Replicate()]
    with FusionDefinition() as fd:
        x, up, down = (
            fd.define_tensor([-1, -1], contiguity=True, mesh=mesh, placements=placements)
            for placements in (by_tokens, [Replicate(), Shard(0)], [Replicate(), Shard(1)])
        )
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
        shard(y, mesh, by_tokens)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [0]))
    given = [shard_tensor(t, tv, copy=True) for t, tv in zip(whole, (x, up, down), strict=True)]
    exact_x, exact_up, exact_down = (t.double() for t in whole)
    exact = torch.relu(exact_x @ exact_up.T) @ exact_down.T
    mine = exact.chunk(rows)[Communicator.instance().rank() // columns]
    for _ in range(2):  # the second call repeats the plan
        part, total = fd.execute(given)
        torch.testing.assert_close(part.double(), mine, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(total.double(), exact.sum(0), atol=1e-3, rtol=1e-4)


def run_layer(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(TOKENS, WIDTH)]
    whole += [torch.randn(HIDDEN, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5]
    with simulate(rows * columns) as world:
        world.run(check_layer, rows, columns, whole)


def test_sixteen_ranks_run_a_layer() -> None:
    run_layer(4, 4)


def test_sixty_four_ranks_run_a_layer_in_a_gigabyte() -> None:
    """The peak of memory is that of a process of its own."""
    program = (
        "import resource\n"
        "from tests.multidevice.job.test_simulation import run_layer\n"
        "run_layer(8, 8)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_BYTES


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (16, 1)])
def test_one_dimension_may_have_all_ranks(rows: int, columns: int) -> None:
    run_layer(rows, columns)
