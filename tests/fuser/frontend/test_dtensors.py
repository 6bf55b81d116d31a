"""`execute_with_dtensors` under mpirun and torchrun, and checks that need a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fuser
from fuser import FusionDefinition
from fuser.support.errors import ArgumentError, DTensorError
from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[3]
# The import of torch's DTensors takes seconds. Only ranks import them.
CHECKS = (
    "linears on d",
    "linears on d/2 x 2",
    "linears on 1 x 2 x d/2",
    "an axis cut twice",
    "other inputs",
    "memory orders",
    "uneven shards",
    "refusals",
)


_ORDERS = pytest.mark.finding("order of a DTensor's shard")


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, Callable[[str], None]]]:
    from tests.support.rank_programs import dtensors

    assert tuple(dtensors.CHECKS) == CHECKS
    with dtensors.default_group():
        yield dtensors.CHECKS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=_ORDERS if n == "memory orders" else ()) for n in CHECKS],
)
def test_dtensors_under_mpirun(
    name: str, comm: object, checks: dict[str, Callable[[str], None]]
) -> None:
    checks[name]("cpu")


def run_under_torchrun(ranks: int, *args: str) -> str:
    """Runs the checks in a separate job; returns its output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "tests/support/rank_programs/dtensors.py", *args),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dtensors_under_torchrun() -> None:
    assert f"{len(CHECKS)} checks on 2 ranks: ok" in run_under_torchrun(2)


@_ORDERS
def test_shards_in_other_memory_orders_on_one_rank() -> None:
    assert "1 checks on 1 ranks: ok" in run_under_torchrun(1, "--only", "memory orders")


def test_no_default_group() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    with pytest.raises(DTensorError, match="no default process group"):
        fuser.execute_with_dtensors(fd, [torch.ones(2)])
    with pytest.raises(ArgumentError, match=r"execute_with_dtensors.*fd"):
        fuser.execute_with_dtensors([torch.ones(2)], fd)  # pyright: ignore[reportArgumentType]
