"""Tests of `conftest.py`: which tests a session selects, what it imports and watches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.slow_tests import ROOT
from tests.support import mpi_abort

pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts sessions of its own")
PROGRAMS = """\
import pytest
import torch

from fuser import FusionDefinition


def run(op):
    with FusionDefinition() as fd:
        fd.add_output(getattr(fd.ops, op)(fd.define_tensor([-1])))
    fd.execute([torch.ones(3)])


@pytest.mark.from_text
def test_marked():
    run("exp")


@pytest.mark.from_text(runs=False)
def test_copied():
    run("sin")


@pytest.mark.from_text(watched=False)
def test_with_faults():
    run("cos")


def test_plain():
    run("neg")
"""
# The rules of the suite, of which `slow.txt` is another.
CONFTEST = """\
from pathlib import Path

from tests import conftest

conftest._ROOT = Path(__file__).parent
conftest._SLOW = conftest.slow_names(conftest._ROOT)
"""
SLOW = "# a comment\n 3.0  test_left.py\n 1.0  test_some.py::test_slow\n"
LEFT = "raise AssertionError('is not imported')\n"
SOME = """\
import pytest


@pytest.mark.parametrize("x", [1, 2])
def test_slow(x): ...


def test_slower(): ...


@pytest.mark.slow
def test_marked(): ...
"""


def session(folder: Path, *options: str, **env: str) -> str:
    """Runs pytest on a folder with the suite's `conftest.py`; returns its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "tests", "programs"),
    [
        ([], "4 passed", 0),
        (["--from-text"], "3 passed, 1 deselected", 2),
        (["--from-text=all"], "4 passed", 3),
        (["-m", "not from_text"], "1 passed, 3 deselected", 0),
    ],
)
def test_a_session_watches_the_tests_that_its_option_names(
    options: list[str], tests: str, programs: int, tmp_path: Path
) -> None:
    (tmp_path / "test_programs.py").write_text(PROGRAMS)
    printed = session(tmp_path, *options)
    assert tests in printed
    if not programs:
        assert "from their text" not in printed
        return
    # One of them is not run again.
    assert f"{programs - 1} runs" in printed
    assert f"{programs} programs, {programs} different ones, 1 tests without runs" in printed


@pytest.mark.parametrize(
    ("options", "tests"),
    [
        (["-m", "not slow"], "1 passed, 3 deselected"),
        ([], "is not imported"),
        (["-m", "slow"], "is not imported"),
        (["--from-text"], "no tests ran"),
    ],
)
def test_files_of_which_nothing_is_selected_are_not_imported(
    options: list[str], tests: str, tmp_path: Path
) -> None:
    texts = {"conftest.py": CONFTEST, "slow.txt": SLOW, "test_left.py": LEFT, "test_some.py": SOME}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert tests in session(tmp_path, *options)


def test_slow_functions_are_marked_with_all_their_cases(tmp_path: Path) -> None:
    texts = {"conftest.py": CONFTEST, "slow.txt": SLOW, "test_some.py": SOME}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert "3 passed, 1 deselected" in session(tmp_path, "-m", "slow")
