"""Aliases of modules, such as `fuser.multidevice`: an import of the alias returns the real module.

`multidevice` builds on the single-device compiler in `fuser`, but users expect to import
`fuser.multidevice`. Submodules of an alias are the same module objects under both names. Otherwise,
classes would exist twice, and two `Communicator` classes would be two singletons.

    import fuser.idm, fuser.nvfuser.idm
    assert fuser.idm is fuser.nvfuser.idm
    from fuser.multidevice.job.communicator import Communicator     # the one of multidevice.job
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Alias -> real module. For type checkers, each has a stub file next to `fuser/__init__.py`.
ALIASES: Mapping[str, str] = {
    "fuser.multidevice": "multidevice",
    "fuser.idm": "fuser.nvfuser.idm",
    "fuser.pytorch_utils": "fuser.nvfuser.pytorch_utils",
    "fuser.benchmark_utils": "fuser.nvfuser.benchmark_utils",
    "fuser.nvfuser_direct_version": "fuser.support.version",
}


def real_name(name: str) -> str | None:
    """Returns the real name of a module alias, or of a submodule of an alias.

    Returns None for all other names. Example: the real name of `fuser.multidevice.job` is
    `multidevice.job`.
    """
    for alias, real in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name.removeprefix(alias)
    return None


class _AliasLoader(Loader):
    """Module loader for Python's import system: replaces the new module of an alias by the real
    module.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Imports the real module, and registers it in `sys.modules` under the alias."""
        real = real_name(module.__name__)
        assert real is not None, f"{module.__name__} is no alias"
        sys.modules[module.__name__] = import_module(real)


class _AliasFinder(MetaPathFinder):
    """Module finder for Python's import system: finds the modules that are aliases, and refuses
    names of nvFuser that this project does not have.

    For `from fuser import FusionCache`, Python first calls the package's `__getattr__`, discards
    its error, and looks for a module `fuser.FusionCache`. The finder therefore raises the error
    again, so that the user sees the name to use instead.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == "fuser" and (advice := _advice(name)):
            raise ImportError(f"cannot import {name!r} from 'fuser': {advice}", name=fullname)
        return None if real_name(fullname) is None else ModuleSpec(fullname, _AliasLoader())


def _advice(name: str) -> str:
    """Returns the name to use instead of `fuser.NAME`, for a name that only nvFuser has.

    Returns "" for all other names.
    """
    # While the errors are imported, there is no table yet. Only public names are in the table.
    errors: Any = sys.modules.get("fuser.support.errors")
    return errors.advice_on_nvfuser("fuser", name) if hasattr(errors, "advice_on_nvfuser") else ""


def install() -> None:
    """Registers the aliases in Python's import system."""
    sys.meta_path.insert(0, _AliasFinder())
