"""`python -m hostir`: print, verify and run from text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hostir.cli import main
from tests.hostir.programs import CASES, build


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.txt"
    path.write_text(build(CASES["mlp2"]).full_text())
    return path


def test_print(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print", str(file), "--full"]) == 0
    assert capsys.readouterr().out.strip() == file.read_text().strip()


def test_verify(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file)]) == 0
    text = file.read_text()
    file.write_text(text.replace("  Wait(Communication 0)\n", "", 1))
    assert main(["verify", str(file)]) == 1
    assert "is used before Wait(Communication 0)" in capsys.readouterr().err


def test_run_on_random_and_on_given_inputs(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(file), "--size", "i0=3", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" mean")[0] for line in lines] == [
        f"rank {r} output 0: torch.float32 (3, 6)" for r in (0, 1)
    ]
    assert lines[0].split("mean")[1] == lines[1].split("mean")[1]
    torch.save(CASES["mlp2"].inputs(), tmp_path / "inputs.pt")
    assert main(["run", str(file), "--inputs", str(tmp_path / "inputs.pt")]) == 0
    assert "(5, 6)" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_code_1(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(file), "--size", "i0"]) == 1
    assert "InputError: --size i0: expected NAME=N" in capsys.readouterr().err
    assert main(["print", str(file.parent / "missing")]) == 1
    assert "FileNotFoundError" in capsys.readouterr().err
