"""The distribution: packages are all listed, data files travel, extras say what they should."""

from __future__ import annotations

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

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("fuser", "multidevice", "hostir")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def source_files() -> list[Path]:
    """Every file of the packages that belongs to the distribution, relative to the repository."""
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
    assert sorted(item.split(">")[0] for item in about["dependencies"]) == ["numpy", "torch"]
    assert set(about["optional-dependencies"]) == {
        "mpi", "cu12", "cu13", "nvrtc", "test", "demo",
    }  # fmt: skip


def test_mpi_pytest_is_no_dependency(project: dict[str, Any]) -> None:
    """mpi-pytest and pytest-mpi share an import name; only one may be installed."""
    extras = project["project"]["optional-dependencies"]
    assert not [
        item for items in extras.values() for item in items if item.startswith("mpi-pytest")
    ]


def build(kind: str, tmp_path: Path, files: Sequence[str], folders: Sequence[str]) -> Path:
    """Build a `wheel` or `sdist` from a copy of these files and folders; return its path."""
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
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / done.stdout.splitlines()[-1]


ABOUT = ("pyproject.toml", "README.md", "LICENSE")


def test_sdist_holds_what_a_reader_needs(tmp_path: Path) -> None:
    """Docs, examples, scripts, benchmarks and tests, beside the packages."""
    folders = (*ROOTS, "docs", "examples", "scripts", "benchmarks", "tests")
    made = build("sdist", tmp_path, (*ABOUT, "MANIFEST.in"), folders)
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tree = tmp_path / "tree"
    files = [p.relative_to(tree) for f in folders for p in (tree / f).rglob("*") if p.is_file()]
    assert [str(path) for path in files if path.as_posix() not in names] == []


def test_wheel_holds_every_source_file(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path, ABOUT, ROOTS)
    assert wheel.name.startswith("fuser_hostir-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [str(path) for path in source_files() if path.as_posix() not in names] == []
    assert not [name for name in names if name.startswith("tests/")]
