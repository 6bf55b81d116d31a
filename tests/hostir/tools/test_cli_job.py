"""Tests `python -m hostir run` on the ranks of a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.host_programs import CASES, build, expected
from tests.support.jobs import MPIRUN, ROOT, needs_mpi
from tests.support.limits import HANG_S


def run_on_two_ranks(*args: str, command: str = "run") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MPIRUN), "-np", "2", sys.executable, "-m", "hostir", command, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@needs_mpi
def test_real_ranks_run_what_simulated_ones_do(tmp_path: Path) -> None:
    case = CASES["mlp2"]
    (tmp_path / "program.txt").write_text(build(case).full_text())
    torch.save(case.inputs(), tmp_path / "inputs.pt")
    program, inputs, out = (str(tmp_path / n) for n in ("program.txt", "inputs.pt", "out"))
    job = run_on_two_ranks(program, "--inputs", inputs, "--save", out)
    assert job.returncode == 0, job.stderr
    assert [line.split(":")[0] for line in job.stdout.splitlines()] == [
        f"rank {rank} output 0" for rank in (0, 1)
    ]
    (want,) = expected(case)
    for rank in (0, 1):
        (shard,) = torch.load(tmp_path / "out" / f"rank{rank}.pt")
        torch.testing.assert_close(shard.double(), want, atol=1e-5, rtol=1e-5)


@needs_mpi
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "3"], "InputError: --ranks 3 was given, but the launcher started 2 ranks"),
        (["--size", "i7=2"], "InputError: no input of the program has a size named 'i7'"),
        (["--save", "PROGRAM"], "InputError: --save"),
    ],
)
def test_an_error_ends_the_job_with_its_message(
    args: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "program.txt"
    path.write_text(build(CASES["mlp2"]).full_text())
    job = run_on_two_ranks(str(path), *(a.replace("PROGRAM", str(path)) for a in args))
    assert job.returncode == 1
    assert f"rank 0: {message}" in job.stderr
    assert "Traceback" not in job.stderr


@needs_mpi
def test_real_ranks_are_traced(tmp_path: Path) -> None:
    path, out = tmp_path / "program.txt", tmp_path / "trace.json"
    path.write_text(build(CASES["mlp2"]).full_text())
    job = run_on_two_ranks(str(path), "--run", "-o", str(out), command="trace")
    assert job.returncode == 0, job.stderr
    assert "rank 1: " in job.stdout and "the ranks share that of their host" in job.stdout
    assert {e["pid"] for e in json.loads(out.read_text())["traceEvents"]} >= {0, 1}
    wrong = run_on_two_ranks(str(path), "--run", "-o", str(tmp_path), command="trace")
    assert wrong.returncode != 0 and "InputError: trace: path=" in wrong.stderr
