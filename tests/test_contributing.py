"""The worked examples of CONTRIBUTING.md, performed step by step on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_EDIT = re.compile(r"In\s+`([\w./]+)`,\s+after\s+`([^`]+)`:\n\n *```\w+\n(.*?)\n *```", re.DOTALL)
_COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)
TRY = """
import torch
from fuser import FusionDefinition
with FusionDefinition() as fd:
    x, y = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
    two = fd.ops.hypot(fd.define_scalar(), 1.0)
    assert str(two).startswith("( hypot(d")
    fd.add_output(fd.ops.hypot(x, fd.ops.hypot(y, two)))
out = fd.execute([torch.tensor([3.0, 0.5]), torch.tensor([1.5, 4.0]), 3.0**0.5])[0]
torch.testing.assert_close(out, torch.tensor([15.25, 20.25]).sqrt())
"""


def section(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.split(r"^## ", text.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def insert(file: Path, anchor: str, text: str) -> None:
    """Put text behind the only line that has the anchor, as far to the right."""
    lines = file.read_text().split("\n")
    (at,) = [i for i, line in enumerate(lines) if anchor in line]
    indent = re.match(r" *", lines[at])
    assert indent is not None
    lines.insert(at + 1, textwrap.indent(textwrap.dedent(text), indent[0]))
    file.write_text("\n".join(lines))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what git has of the packages, tests, scripts and docs."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("fuser", "multidevice", "hostir", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_op_is_added_in_the_steps_that_are_told(tree: Path) -> None:
    text = section("Add an op")
    edits = _EDIT.findall(text)
    assert [file for file, _, _ in edits] == [
        "fuser/pointwise.py",
        "fuser/codegen/rt_math.h",
        "tests/fuzz/table.py",
    ]
    for file, anchor, lines in edits:
        insert(tree / file, anchor, lines)
    (commands,) = _COMMANDS.findall(text)
    lines = [line.split() for line in commands.strip().split("\n")]
    assert {command[0] for command in lines} == {"python"}
    *_, printed = [run(tree, sys.executable, *command[1:]) for command in lines]
    # Cases of each dtype, calls of scalars, the parts of the row.
    assert int(re.findall(r"(\d+) passed", printed)[0]) >= 7
    assert "`hypot(lhs, rhs, /)`" in (tree / "docs" / "ops.md").read_text()
    run(tree, sys.executable, "-c", TRY)


def test_a_row_without_a_reference_is_told(tree: Path) -> None:
    (file, anchor, lines), *_ = _EDIT.findall(section("Add an op"))
    insert(tree / file, anchor, lines)
    command = (sys.executable, "-m", "pytest", "-q", "tests/ops/test_rows.py", "-k", "hypot")
    with pytest.raises(
        AssertionError, match=r"hypot lacks: docs/ops.md, case in tests/ops, fuzzer"
    ):
        run(tree, *command)
