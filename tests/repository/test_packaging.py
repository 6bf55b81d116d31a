"""The distribution: it lists all packages, includes data files, and declares the right
extras.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("fuser", "multidevice", "hostir")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def source_files() -> list[Path]:
    """Returns the packages' files that belong to the distribution, relative to the
    repository.
    """
    return sorted(
        path.relative_to(REPOSITORY)
        for root in ROOTS
        for path in (REPOSITORY / root).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    found = {".".join(path.parent.parts) for path in source_files() if path.name == "__init__.py"}
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_folder_of_source_is_a_package() -> None:
    folders = {path.parent for path in source_files() if path.suffix == ".py"}
    assert [
        str(folder) for folder in folders if not (REPOSITORY / folder / "__init__.py").exists()
    ] == []


def test_name_license_and_dependencies(project: dict[str, Any]) -> None:
    about = project["project"]
    assert about["name"] == "fuser-hostir"
    assert about["license"] == "BSD-3-Clause"
    assert (REPOSITORY / "LICENSE").read_text().startswith("BSD 3-Clause License")
    assert about["requires-python"] == ">=3.11"
    names = sorted(item.split(">")[0] for item in about["dependencies"])
    assert names == ["numpy", "platformdirs", "torch"]
    assert set(about["optional-dependencies"]) == {
        "mpi", "cu12", "cu13", "nvrtc", "test", "demo",
    }  # fmt: skip


def test_mpi_pytest_is_no_dependency(project: dict[str, Any]) -> None:
    """mpi-pytest and pytest-mpi have the same import name, so only one may be installed."""
    extras = project["project"]["optional-dependencies"]
    assert not [
        item for items in extras.values() for item in items if item.startswith("mpi-pytest")
    ]


def build(kind: str, tmp_path: Path, files: Sequence[str], folders: Sequence[str]) -> Path:
    """Builds a `wheel` or `sdist` from a copy of these files and folders; returns its path."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in files:
        shutil.copy(REPOSITORY / name, tree)
    for folder in folders:
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(REPOSITORY / folder, tree / folder, ignore=ignore)
    call = f"from setuptools.build_meta import build_{kind}; print(build_{kind}('..'))"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / done.stdout.splitlines()[-1]


ABOUT = ("pyproject.toml", "README.md", "LICENSE")


@pytest.mark.finding("F24")
def test_sdist_holds_what_a_reader_needs(tmp_path: Path) -> None:
    """The sdist has docs, examples, scripts, benchmarks and tests besides the packages."""
    folders = (*ROOTS, "docs", "examples", "scripts", "benchmarks", "tests", "tools")
    pages = ("CONTRIBUTING.md", *ABOUT)
    made = build("sdist", tmp_path, (*pages, "MANIFEST.in"), folders)
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tree = tmp_path / "tree"
    files = [p.relative_to(tree) for f in folders for p in (tree / f).rglob("*") if p.is_file()]
    assert {*pages} <= names
    assert [str(path) for path in files if path.as_posix() not in names] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"), ABOUT, ROOTS)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of a fresh environment with the wheel installed; it uses our torch."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=HANG_S
    )
    packages = next(folder.glob("lib/python3*/site-packages"))
    # Installs the wheel as pip does: it has no scripts, so unpacking is enough.
    zipfile.ZipFile(wheel).extractall(packages)
    outer = {path for path in sys.path if Path(path, "torch").is_dir()}
    (packages / "outer.pth").write_text("\n".join(sorted(outer)))
    return folder / "bin" / "python"


def run_outside(installed: Path, *command: str | Path, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "FUSER_" not in k}
    done = subprocess.run(
        command,
        cwd=installed.parents[1],
        env={**kept, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    assert wheel.name.startswith("fuser_hostir-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [str(path) for path in source_files() if path.as_posix() not in names] == []
    assert not [name for name in names if name.startswith("tests/")]


PROGRAM = """
import torch, fuser, multidevice, hostir
from fuser import FusionDefinition, multidevice
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(fd.ops.sum(fd.ops.exp(x), dim=1))

def run():
    x = torch.arange(12288.0).reshape(3, 4096) / 12288
    (y,) = fd.execute([x], _enable_options=["schedules_for(h200)"])
    torch.testing.assert_close(y, x.exp().sum(1))
    return "LaunchKernel" in str(fd.fec.host_program())

print(run(), *{m.__file__ for m in (fuser, hostir)}, sep="\\n")
"""


def test_the_installed_wheel_runs_a_kernel(installed: Path, tmp_path: Path) -> None:
    """The kernel has barriers, so that the CPU runtime is compiled from files of the wheel,
    too.
    """
    out = run_outside(installed, installed, "-c", PROGRAM, FUSER_CACHE_DIR=str(tmp_path))
    ran, *files = out.split()
    assert ran == "True" and len(files) == 2
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in files)
    assert list(tmp_path.rglob("*.so"))
    assert "rank 0 of 1" in run_outside(installed, installed, "-m", "fuser")


TYPED = """
from fuser import FusionDefinition, TensorView

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], contiguity=True)
    reveal_type(fd.ops.add(x, 1.0))
    reveal_type(fd.ops.add(2, 1.0))
    reveal_type(fd.ops.var_mean(x, [1]))
    y: TensorView = fd.ops.sum(x, dim=1, keep_dims=True)
    fd.ops.softmin(x)
    fd.ops.add(x, "1")
    fd.sched.inline_most([x])
"""


def test_type_checkers_know_the_ops(installed: Path) -> None:
    """Type checkers get the ops' types from declarations in the installed wheel."""
    pytest.importorskip("pyright", reason="the group lint")
    program = installed.parents[1] / "typed.py"
    program.write_text(TYPED)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", installed, program]
    found = subprocess.run(
        command, cwd=program.parent, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    told = json.loads(found.stdout)["generalDiagnostics"]
    at = {d["range"]["start"]["line"]: d["message"].split("\n")[0] for d in told}
    assert [at.pop(line).split(" is ")[-1] for line in (5, 6, 7)] == [
        '"TensorView"',
        '"Scalar"',
        '"tuple[TensorView, TensorView]"',
    ]
    assert sorted(at) == [8, 9, 10], at
    assert "keep_dims" in at[8] and "softmin" in at[9] and "add" in at[10]
