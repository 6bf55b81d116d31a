"""Sharded MLPs on simulated ranks, under mpirun, and under torchrun with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multidevice import simulate
from tests.support.limits import HANG_S
from tests.support.rank_programs import mlp

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("case", mlp.CASES, ids=lambda c: c.name)
def test_mlp_on_simulated_ranks(case: mlp.Case) -> None:
    with simulate(4) as world:
        world.run(mlp.check, case)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("case", mlp.CASES, ids=lambda c: c.name)
def test_mlp_under_mpirun(case: mlp.Case, comm: object) -> None:
    mlp.check(case)


def test_mlp_under_torchrun() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", "tests/support/rank_programs/mlp.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 programs on 4 ranks: ok" in done.stdout
