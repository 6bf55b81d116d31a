"""One failing rank ends the whole job at once, and the output names the rank and the failure."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
# Rank 0 waits for ever: a job that is not aborted is stopped here, and fails its test.

pytestmark = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py",
)

# Rank 0 waits in a barrier, so only an abort can end the job in time.
TEST_FILE = """\
from mpi4py import MPI
import os, sys, threading
import pytest

RANK = MPI.COMM_WORLD.rank
{at_import}

@pytest.fixture
def thing():
    if RANK == 1:
        {in_fixture}
    yield
    if RANK == 1:
        {in_teardown}

@pytest.mark.mpi
def test_barrier(thing):
    if RANK == 1:
        {in_test}
    MPI.COMM_WORLD.Barrier()

@pytest.mark.mpi
def test_second_barrier():
    MPI.COMM_WORLD.Barrier()
"""
CONFTEST_FILE = """\
from mpi4py import MPI
from pathlib import Path
import pytest
import re
maps = Path("/proc/self/maps").read_text()
Path("segments").write_text("\\n".join(re.findall(r"/dev/shm/mpich\\w+$", maps, re.MULTILINE)))
RANK = MPI.COMM_WORLD.rank
{conftest}
"""
PLACES = ("at_import", "in_fixture", "in_teardown", "in_test", "conftest")

CASES = {
    "test": ({"in_test": "assert 2 + 2 == 5"}, "assert (2 + 2) == 5"),
    "fixture": ({"in_fixture": "raise ValueError('no thing')"}, "no thing"),
    "teardown": ({"in_teardown": "raise ValueError('not undone')"}, "not undone"),
    "collection": ({"at_import": "if RANK == 1: import no_such_module"}, "no_such_module"),
    "conftest": ({"conftest": "if RANK == 1: raise KeyError('early')"}, "KeyError"),
    "usage": (
        {
            "conftest": "def pytest_configure(config):\n"
            "    if RANK == 1: raise pytest.UsageError('not so')"
        },
        "ends before its tests do",
    ),
    "internal": (
        {
            "conftest": "def pytest_collection_modifyitems(items):\n"
            "    if RANK == 1: raise OSError('inside')"
        },
        "inside",
    ),
    "stop": ({"in_test": "pytest.exit('enough', returncode=0)"}, "enough"),
    "exit": ({"in_test": "sys.exit(0)"}, "SystemExit"),
    "timeout": (
        # Only rank 1 has a limit: with one of its own, a healthy rank 0 could be the first.
        {
            "in_test": "threading.Event().wait()",
            "conftest": "def pytest_collection_modifyitems(items):\n"
            "    if RANK == 1: items[0].add_marker(pytest.mark.timeout(1, method='thread'))",
        },
        "TIMEOUT test_it.py::test_barrier",
    ),
}


def run_two_ranks(
    folder: Path, sources: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs a pytest session of two ranks on these source files."""
    filled = {place: sources.get(place, "pass") for place in PLACES}
    (folder / "test_it.py").write_text(TEST_FILE.format(**filled))
    (folder / "conftest.py").write_text(CONFTEST_FILE.format(**filled))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = mpi\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [MPIRUN or "mpirun", "-np", "2", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "--with-mpi", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.finding("F58")
def test_failing_rank_ends_the_job(case: str, tmp_path: Path) -> None:
    sources, expected = CASES[case]
    done = run_two_ranks(tmp_path, sources, "-p", "tests.support.mpi_abort")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "[rank 1]" in output, output
    assert expected in output, output
    left = [name for name in (tmp_path / "segments").read_text().split() if Path(name).exists()]
    assert not left, "segments of shared memory outlive the job"


def test_passing_ranks_report_once(tmp_path: Path) -> None:
    done = run_two_ranks(tmp_path, {}, "-p", "tests.support.mpi_abort")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed") == 1, done.stdout
