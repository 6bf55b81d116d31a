"""The README's first program runs as it stands, and so do the commands on its text."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hostir.cli import main
from multidevice import simulate
from tests.multidevice.test_communicator_jobs import MPIRUN, ROOT, needs_mpi

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_program(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    file = tmp_path / "first.py"
    file.write_text(program)
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(file))
    lines = sorted(capsys.readouterr().out.split("\n")[:-1])
    assert [int(line.split()[0]) for line in lines] == list(range(ranks))
    assert all(float(line.split()[1]) < 1e-5 for line in lines)
    text = str(results[0]["fd"].fec.host_program())
    assert text.count("type=Allreduce") == (ranks > 1)


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)^## ", README.read_text(), re.DOTALL | re.MULTILINE)
    return text


def run_line(line: str, folder: Path) -> tuple[int, str]:
    """Run one command of the README; returns its exit code and what it printed.

    `python -m hostir` runs here, which saves the start of an interpreter; all else in a shell.
    """
    command, _, target = line.partition("#")[0].partition(" > ")
    start = ".venv/bin/python -m hostir "
    printed = io.StringIO()
    if command.startswith(start):
        words = [sorted(glob.glob(w)) or [w] for w in shlex.split(command.removeprefix(start))]
        with contextlib.redirect_stdout(printed):
            code = main([w for found in words for w in found])
    else:
        command = command.replace(".venv/bin/python", sys.executable)
        job = subprocess.run(
            ["bash", "-c", command.replace(".venv/bin/mpirun", str(MPIRUN))],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
        code = job.returncode
        printed.write(job.stdout)
    if target:
        (folder / target.strip()).write_text(printed.getvalue())
    return code, printed.getvalue()


def test_definitions_as_python(capsys: pytest.CaptureFixture[str]) -> None:
    text = section("Definitions as Python")
    (program,) = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("1 Max Fusions Allowed: 64\n")
    assert "make_tensor((2, 3), dtype=torch.float32, device='cpu')" in printed


def test_looking_inside_of_a_definition(capsys: pytest.CaptureFixture[str]) -> None:
    text = section("Looking inside of a definition")
    (program,) = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("[(2.95788e-06, ") and "__global__" in printed
    assert "TransformPrinter" in printed and "%kernel_math" in printed


@needs_mpi
def test_the_commands_on_programs_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "first.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    text = section("Programs as text")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = [line for kind, block in blocks if not kind for line in block.splitlines()]
    assert len(commands) > 10
    printed: list[str] = []
    for command in commands:
        code, out = run_line(command, tmp_path)
        expected = re.search(r"# exit code (\d)", command)
        assert code == (int(expected[1]) if expected else 0), command
        printed += out.replace(f"{tmp_path}/", "").splitlines()
    # What the README shows of it is what they print.
    shown = [line for kind, block in blocks if kind == "text" for line in block.splitlines()]
    assert shown
    for line in shown:
        assert line in printed
