"""The allowed directions of imports, and imports without CUDA and without MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuser.nvfuser.module_aliases import ALIASES, real_name
from tests.support.limits import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the contracts of .importlinter on the packages in a folder."""
    return subprocess.run(
        [
            *(sys.executable, "-c"),
            "from importlinter.cli import lint_imports_command as run; run()",
            *("--no-cache", "--config", str(REPOSITORY / ".importlinter")),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_rooms_import_in_their_order() -> None:
    done = lint_imports(REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("fuser/passes/segment.py", "from hostir.ir.ops import Wait", "layers of the packages"),
        ("fuser/ir/fusion.py", "def f():\n    import multidevice", "layers of the packages"),
        ("fuser/runtime/kernel_cache.py", "if 0:\n    import fuser.ir", "runtime takes text only"),
        ("multidevice/transports/gloo.py", "import fuser.ir.fusion", "transports know no ir"),
        ("hostir/ir/ops/base.py", "import hostir.runtime.plan", "layers of hostir"),
    ],
)
def test_an_import_against_the_order_is_found(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    for package in ("fuser", "multidevice", "hostir"):
        shutil.copytree(
            REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and f"{contract} BROKEN" in done.stdout, done.stdout


@pytest.mark.parametrize("line", ["import cupy", "from mpi4py import MPI", "import cuda.bindings"])
def test_a_lazy_module_imported_at_the_top_is_found(line: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--select",
            "TID253",
            "--stdin-filename",
            "fuser/ir/fusion.py",
            "-",
        ],
        input=f"{line}\n",
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert "TID253" in done.stdout, done.stdout + done.stderr


IMPORT_ALL = """
import importlib, importlib.abc, pathlib, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"mpi4py", "cupy", "cuda", "nccl", "transformers", "tokenizers"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
root = pathlib.Path(sys.argv[1])
names = []
for package in ("fuser", "multidevice", "hostir"):
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def run_python(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_without_cuda_and_mpi() -> None:
    assert int(run_python(IMPORT_ALL, str(REPOSITORY))) > 10


def test_import_fuser_imports_nothing_else() -> None:
    program = """
import sys
import fuser
assert "torch" not in sys.modules, "fuser imported torch"
found = {name for name in sys.modules if name.startswith(("fuser.", "multidevice", "hostir"))}
assert found == {"fuser.nvfuser", "fuser.nvfuser.module_aliases"}, found
assert set(fuser.__all__) <= set(dir(fuser))
"""
    run_python(program)


def test_every_public_name_resolves() -> None:
    run_python("import fuser\nfor name in fuser.__all__: getattr(fuser, name)")


def test_unknown_name_is_an_attribute_error() -> None:
    import fuser

    with pytest.raises(AttributeError, match="no_such_name"):
        fuser.no_such_name  # noqa: B018


def test_multidevice_has_one_module_under_two_names() -> None:
    program = """
import importlib, pathlib, sys
import fuser.multidevice as first
from fuser import multidevice as second
import multidevice
assert first is second is multidevice
import fuser
assert fuser.multidevice is multidevice
for path in sorted(pathlib.Path("multidevice").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    assert importlib.import_module(f"fuser.{name}") is importlib.import_module(name), path
assert multidevice.__name__ == "multidevice" and multidevice.__spec__.name == "multidevice"
"""
    run_python(program)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_a_public_module_is_the_one_that_its_alias_names(alias: str) -> None:
    """A module is the same under its public name and its alias, whichever is imported first."""
    program = f"""
import importlib, importlib.util, sys
import fuser
assert importlib.util.find_spec({alias!r}) is not None
found = importlib.import_module({alias!r})
assert found is importlib.import_module({ALIASES[alias]!r})
assert found is sys.modules[{alias!r}] is getattr(fuser, {alias!r}.removeprefix("fuser."))
assert found.__name__ == found.__spec__.name == {ALIASES[alias]!r}
"""
    run_python(program)
    assert (REPOSITORY / alias.replace(".", "/")).with_suffix(".pyi").is_file()


def test_names_that_only_begin_like_an_alias_are_none() -> None:
    assert real_name("fuser.multidevice.job.communicator") == "multidevice.job.communicator"
    assert real_name("fuser.multidevices") is None and real_name("fuser") is None
