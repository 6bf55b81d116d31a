"""The README's first program runs as it stands, and so do the commands on its text."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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


@needs_mpi
def test_the_commands_on_programs_as_text(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "first.py").write_text(program)
    text = section("Programs as text")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = [line for kind, block in blocks if not kind for line in block.splitlines()]
    assert len(commands) > 10
    printed = ""
    for command in commands:
        line = command.replace(".venv/bin/python", sys.executable)
        line = line.replace(".venv/bin/mpirun", str(MPIRUN))
        job = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        code = re.search(r"# exit code (\d)", command)
        assert job.returncode == (int(code[1]) if code else 0), f"{command}\n{job.stderr}"
        printed += job.stdout.replace(f"{tmp_path}/", "")
    # What the README shows of it is what they print.
    for shown in (line for kind, block in blocks if kind == "text" for line in block.splitlines()):
        assert shown in printed.splitlines(), shown
