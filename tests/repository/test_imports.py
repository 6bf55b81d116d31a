"""The import direction, read from the source, and imports without CUDA and without MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuser.nvfuser.module_aliases import ALIASES, real_name
from scripts import check_imports
from tests.support.limits import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]


def test_source_follows_the_import_direction() -> None:
    assert check_imports.check(REPOSITORY) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fuser.ir.fusion", "import multidevice"),
        ("fuser.ir.fusion", "from hostir.ir.ops import Wait"),
        ("fuser.passes.segment", "from fuser import frontend"),
        ("fuser.passes.segment", "from ..frontend import definition"),
        ("fuser.ops.reduction_table", "from ..frontend.definition import FusionDefinition"),
        ("fuser.passes.x", "def f():\n    import hostir.ir.ops"),
        ("fuser.passes.x", "if TYPE_CHECKING:\n    from multidevice import Communicator"),
        ("fuser.passes.x", "from importlib import import_module\nimport_module('multidevice')"),
        ("multidevice.sharding.queries", "import hostir"),
        ("multidevice.transports.gloo", "from fuser.ir import mesh"),
        ("hostir.executor", "from fuser.frontend.definition import FusionDefinition"),
        ("fuser.ir.fusion", "def f():\n    from fuser.schedule import propagate"),
        ("fuser.ir.fusion", "import fuser.ops"),
        ("fuser.ops.reduction_table", "from fuser.passes import segment"),
        ("fuser.passes.segment", "from fuser.schedule.registry import find_scheduler"),
        ("fuser.schedule.registry", "import fuser.runtime"),
        (
            "fuser.lower.statements",
            "def f():\n    from fuser.codegen.cuda_text import print_kernel",
        ),
        ("fuser.codegen.cuda_text", "from fuser.runtime.compile import compile_kernels"),
        (
            "fuser.runtime.compiled_kernel",
            "if TYPE_CHECKING:\n    from fuser.ir.fusion import Fusion",
        ),
        ("fuser.runtime.compiled_kernel", "from fuser.kernels import executor"),
        ("fuser.support.device", "from fuser.runtime.compiled_kernel import CompiledKernel"),
        ("fuser.kernels.executor", "import multidevice"),
        ("multidevice.sharding.passes.decompose", "from fuser.lower.kernel_ir import For"),
        ("multidevice.transports.nccl", "import cupy"),
        ("multidevice.transports.mpi", "try:\n    from mpi4py import MPI\nexcept ImportError: ..."),
        ("multidevice.transports.gloo", "from torch import distributed"),
        ("fuser.runtime.cuda_kernel", "class A:\n    from cuda.bindings import nvrtc"),
        (
            "fuser.runtime.cuda_kernel",
            "if TYPE_CHECKING:\n    x = 1\nelse:\n    import cuda.bindings",
        ),
    ],
)
def test_wrong_imports_are_found(module: str, source: str) -> None:
    assert len(check_imports.violations_of(source, module=module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("multidevice.sharding.queries", "from fuser.ir.fusion import TensorView"),
        (
            "hostir.lowering.segments",
            "import multidevice.sharding.reshard\nimport fuser.passes.segment",
        ),
        ("fuser.frontend.definition", "import hostir, multidevice, fuser.ir"),
        (
            "fuser.kernels.executor",
            "import fuser.runtime.compiled_kernel, fuser.codegen.cuda_text, fuser.ir",
        ),
        ("fuser.codegen.cuda_text", "from fuser.lower.kernel_ir import For"),
        ("fuser.runtime.compiled_kernel", "from fuser.support.device import DeviceInfo"),
        ("multidevice.transports.gloo", "from fuser.support.errors import CommunicationError"),
        ("multidevice.transports.mpi", "def f():\n    from mpi4py import MPI"),
        ("multidevice.transports.mpi", "if TYPE_CHECKING:\n    from mpi4py import MPI"),
        ("hostir.executor", "import fuserish, hostirx, cudax"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert check_imports.violations_of(source, module=module) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    source = "from ..frontend import x"
    wrong = check_imports.violations_of(source, module="fuser.lower", is_package=True)
    assert len(wrong) == 1


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
    """First imported by either name, and as an attribute of `fuser`; type checkers have a stub."""
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
    assert real_name("fuser.multidevice.communicator") == "multidevice.job.communicator"
    assert real_name("fuser.multidevices") is None and real_name("fuser") is None
