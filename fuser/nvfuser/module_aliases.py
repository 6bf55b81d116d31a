"""Public names of modules that stand elsewhere: an import of the name gives the module itself.

`multidevice`, for one, builds on the single-device compiler in `fuser`, yet users expect to find it
beside `fuser.ops`. Its submodules, too, are the same module objects under both names, so that a
class never exists twice (two `Communicator` classes would be two singletons).

    import fuser.idm, fuser.nvfuser.idm
    assert fuser.idm is fuser.nvfuser.idm
    from fuser.multidevice.job.communicator import Communicator     # that of multidevice.job
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Public name -> the module. For type checkers each has a stub beside `fuser/__init__.py`.
ALIASES: Mapping[str, str] = {
    "fuser.multidevice": "multidevice",
    "fuser.idm": "fuser.nvfuser.idm",
    "fuser.pytorch_utils": "fuser.nvfuser.pytorch_utils",
    "fuser.benchmark_utils": "fuser.nvfuser.benchmark_utils",
    "fuser.nvfuser_direct_version": "fuser.support.version",
}


def real_name(name: str) -> str | None:
    """Returns the name of the module that an alias, or a submodule of one, stands for; None for
    other names."""
    for alias, real in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name.removeprefix(alias)
    return None


class _AliasLoader(Loader):
    """Ends the import of an alias with the real module in its place."""

    def exec_module(self, module: ModuleType) -> None:
        real = real_name(module.__name__)
        assert real is not None, f"{module.__name__} is no alias"
        sys.modules[module.__name__] = import_module(real)


class _AliasFinder(MetaPathFinder):
    """Finds the modules that have an alias."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if real_name(fullname) is None else ModuleSpec(fullname, _AliasLoader())


def install() -> None:
    """Makes imports find the aliases."""
    sys.meta_path.insert(0, _AliasFinder())
