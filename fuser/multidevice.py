"""`fuser.multidevice` is the top-level package `multidevice` under its public name.

`multidevice` builds on the single-device compiler in `fuser`, yet users expect to find it beside
`fuser.ops`. This module replaces itself by that package, and maps submodules to the same module
objects, so that a class never exists twice (two `Communicator` classes would be two singletons).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuser.frontend.multi_device_executor import (
        CommunicatorBackend as CommunicatorBackend,
    )
    from fuser.frontend.multi_device_executor import (
        MultiDeviceExecutor as MultiDeviceExecutor,
    )
    from fuser.frontend.multi_device_executor import (
        MultiDeviceExecutorParams as MultiDeviceExecutorParams,
    )
    from multidevice import *  # noqa: F403

_PUBLIC = "fuser.multidevice"
_REAL = "multidevice"


class _AliasLoader(Loader):
    """Ends the import of `fuser.multidevice.x` with the module `multidevice.x` in its place."""

    def exec_module(self, module: ModuleType) -> None:
        real = _REAL + module.__name__.removeprefix(_PUBLIC)
        sys.modules[module.__name__] = import_module(real)


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PUBLIC + "."):
            return None
        return ModuleSpec(fullname, _AliasLoader())


sys.meta_path.insert(0, _AliasFinder())
sys.modules[__name__] = import_module(_REAL)
