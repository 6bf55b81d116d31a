"""Starts programs of `rank_programs` as jobs of several processes, by mpirun or torchrun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "support" / "rank_programs"
# mpirun usually stands beside the interpreter, which need not be on PATH.
MPIRUN = shutil.which(
    "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
# FUSER_TIMEOUT_S of a job, unless its program sets another: far more than HANG_S, after which a
# hanging job is killed and its test fails. So jobs end by the failure under test, not by a timeout.
DEADLINE_S = "1000"

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpirun and mpi4py"
)


@dataclass(frozen=True)
class Job:
    """A finished job: its exit code and its output."""

    code: int
    text: str


def run_job(
    launcher: str,
    size: int,
    program: str,
    *args: str,
    **env: str,
) -> Job:
    """Runs a program on `size` ranks; a job that does not end is killed, and the test fails."""
    command = {
        "mpirun": [str(MPIRUN), "-np", str(size), sys.executable],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(size)),
        ],
    }[launcher]
    settings = {
        "FUSER_TIMEOUT_S": DEADLINE_S,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    process = subprocess.Popen(
        [*command, str(PROGRAMS / program), *args],
        env={**os.environ, **settings, **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"the job did not end within {HANG_S:g} s:\n{text}")
    return Job(process.returncode, text)
