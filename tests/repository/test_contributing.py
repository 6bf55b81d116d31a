"""The worked examples of CONTRIBUTING.md, performed step by step on a copy of the tree."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[2]
_EDIT = re.compile(
    r"In\s+`([\w./-]+)`,\s+(after|before)\s+`([^`]+)`:\n\n *```\w+\n(.*?)\n *```", re.DOTALL
)
_FILE = re.compile(r"In a new file\s+`([\w./-]+)`:\n\n *```\w+\n(.*?)\n *```", re.DOTALL)
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
TRY_FILL = """
import torch
from hostir import Allocate, Fill, HostIrContainer, HostIrEvaluator, equal, parse
program = HostIrContainer()
with program:
    x = program.input([-1])
    y = program.tensor([x.size(0)])
    program.append(Allocate(y), Fill(y, x.size(0) * 2.0))
    program.add_output(y)
assert "= Fill(( ( cast_double(i0) ) * double(2) ))" in str(program), str(program)
again = parse(program.full_text())
assert equal(again, program)
fill = program.ops[1]
assert fill.work(lambda tv: (5,)) == {y: 20} and fill.buffer_sharing == "same", fill.work
evaluator = HostIrEvaluator(again)
for size in (3, 3, 5, 3):
    (out,) = evaluator.run([torch.ones(size)])
    assert torch.equal(out, torch.full((size,), 2.0 * size)), out
"""
# Shards, in the order of the mesh; reductions of all kinds; the row's rules in verification.
TRY_SCAN = """
import pytest
import torch
from fuser.support.errors import VerifyError
from hostir import Allocate, Communication, HostIrContainer, HostIrEvaluator, TeamOf, Wait, verify
from fuser import ParallelType
from multidevice import Communicator, DeviceMesh, simulate
def program(**more):
    hic, mesh = HostIrContainer(), DeviceMesh([2, 0, 1])
    with hic:
        x = hic.input([3, 4], mesh=mesh)
        y = hic.tensor([3, 4], mesh=mesh)
        for tv in (x, y):
            tv.axis(0).parallelize(ParallelType.mesh_x)
        team = TeamOf(mesh, (ParallelType.mesh_x,))
        move = Communication(x, y, number=0, type="Scan", team=team, **more)
        hic.append(Allocate(y), move, Wait(0))
        hic.add_output(y)
    return hic
rows = torch.tensor([[1.0, -2, 3, 0], [4, 5, -6, 7], [-1, 9, 8, 2]])
wanted = {"SUM": rows.cumsum(0), "MAX": rows.cummax(0).values, "PRODUCT": rows.cumprod(0)}
for op, result in wanted.items():
    def body():
        comm = Communicator.instance()
        place = (2, 0, 1).index(comm.rank())
        (out,) = HostIrEvaluator(program(red_op=op), comm).run([rows[place : place + 1]])
        assert torch.equal(out, result[place : place + 1]), (op, place, out)
    with simulate(3) as world:
        world.run(body)
with pytest.raises(VerifyError, match="Scan takes no root"):
    verify(program(root=0))
"""
# Those of nvFuser's names are found as before.
TRY_SCHEDULERS = """
import torch
from fuser import FusionDefinition, SchedulerType, schedule
with FusionDefinition() as fd:
    x = fd.define_tensor([])
    fd.add_output(fd.ops.exp(x))
found = schedule.find_compatible_schedulers(fd.fusion, [torch.tensor(1.0)])
assert SchedulerType.pointwise in found, found
"""


def section(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.split(r"^## ", text.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def insert(file: Path, where: str, anchor: str, text: str) -> None:
    """Inserts text at an indented line: after the only one that contains the anchor, or before the
    only one that begins with it.
    """
    lines = file.read_text().split("\n")
    if where == "before":
        (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(anchor.strip())]
    else:
        (at,) = [i for i, line in enumerate(lines) if anchor in line]
    indent = re.match(r" *", lines[at])
    assert indent is not None
    # The first entry of a table is one level deeper.
    level = "    " if where == "after" and lines[at].endswith(("(", "{", "[")) else ""
    lines.insert(at + (where == "after"), textwrap.indent(textwrap.dedent(text), indent[0] + level))
    file.write_text("\n".join(lines))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copies the packages, tests, scripts and docs."""
    ignored = shutil.ignore_patterns("__pycache__")
    packages = ("fuser", "multidevice", "hostir", "tests", "tools")
    for name in (*packages, "scripts", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *command: str, settings: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **(settings or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def perform(tree: Path, title: str) -> str:
    """Performs the steps of a section; returns the output of its last command."""
    text = section(title)
    edits, files, (commands,) = _EDIT.findall(text), _FILE.findall(text), _COMMANDS.findall(text)
    assert len(edits) + len(files) + 1 == text.count("```") / 2, "each block is a step"
    for file, where, anchor, lines in edits:
        insert(tree / file, where, anchor, lines)
    for file, lines in files:
        assert not (tree / file).exists()
        (tree / file).write_text(textwrap.dedent(lines) + "\n")
    check_style(tree, {file for file, *_ in (*edits, *files) if file.endswith(".py")})
    printed = ""
    for line in commands.strip().split("\n"):
        before, python, after = line.partition("python ")
        assert python, f"a command of Python: {line}"
        settings = dict(word.split("=") for word in before.split())
        printed = run(tree, sys.executable, *shlex.split(after), settings=settings)
    return printed


def check_style(tree: Path, files: set[str]) -> None:
    """Runs the linter and the formatter on files, where they are installed (`setup_venv lint`)."""
    ruff = shutil.which(
        "ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if ruff is not None:
        run(tree, ruff, "check", "--no-cache", *sorted(files))
        run(tree, ruff, "format", "--no-cache", "--diff", *sorted(files))


def passed(printed: str) -> int:
    return int(re.findall(r"(\d+) passed", printed)[0])


def test_an_op_is_added_in_the_steps_that_are_told(tree: Path) -> None:
    # Cases of each dtype, calls of scalars, the parts of the row.
    assert passed(perform(tree, "Add an op")) >= 7
    page = tree / "docs" / "reference" / "operations.md"
    assert "`hypot(lhs, rhs, /)`" in page.read_text()
    assert "def hypot(lhs: TensorView, " in (tree / "fuser" / "ops" / "__init__.pyi").read_text()
    run(tree, sys.executable, "-c", TRY)


def test_a_host_op_is_added_in_the_steps_that_are_told(tree: Path) -> None:
    # Its parts, its page, its example: text, runs with late streams, races.
    assert passed(perform(tree, "Add a host op")) >= 6
    edited = {file for file, *_ in _EDIT.findall(section("Add a host op"))}
    product = {file for file in edited if file.startswith(("fuser/", "multidevice/", "hostir/"))}
    others = edited - product
    assert len(product) <= 2 and len(others) <= 1, edited
    run(tree, sys.executable, "-c", TRY_FILL)


def test_a_collective_is_added_in_the_steps_that_are_told(tree: Path) -> None:
    # Simulated ranks, jobs of mpirun and torchrun; text, sizes, runs, predictions of a program.
    assert passed(perform(tree, "Add a collective")) >= 16
    run(tree, sys.executable, "-c", TRY_SCAN)


def test_a_scheduler_is_added_in_the_steps_that_are_told(tree: Path) -> None:
    assert passed(perform(tree, "Add a scheduler")) == 4
    run(tree, sys.executable, "-c", TRY_SCHEDULERS)


def test_a_row_without_a_reference_is_told(tree: Path) -> None:
    (file, where, anchor, lines), *_ = _EDIT.findall(section("Add an op"))
    insert(tree / file, where, anchor, lines)
    command = (sys.executable, "-m", "pytest", "-q", "tests/fuser/ops/test_rows.py", "-k", "hypot")
    lacks = r"hypot lacks: docs/reference/operations\.md, case in tests/support, fuzzer"
    with pytest.raises(AssertionError, match=lacks):
        run(tree, *command)
