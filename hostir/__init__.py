"""The host program: what runs on every rank, in order, and what runs it.

Nothing is imported until a name is used. `docs/host_ir.md` shows how programs are built by hand.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuser.ir.scalar import as_scalar as as_scalar
    from fuser.ir.scalar import ceildiv as ceildiv
    from fuser.ir.scalar import eq as eq
    from fuser.ir.scalar import logical_and as logical_and
    from fuser.ir.scalar import logical_not as logical_not
    from fuser.ir.scalar import ne as ne
    from fuser.ir.scalar import where as where
    from hostir.container import HostIrContainer as HostIrContainer
    from hostir.container import equal as equal
    from hostir.effects import Stream as Stream
    from hostir.lower_streams import lower_streams as lower_streams
    from hostir.ops import NUMBER_OF_STREAMS as NUMBER_OF_STREAMS
    from hostir.ops import RANK as RANK
    from hostir.ops import Allocate as Allocate
    from hostir.ops import Deallocate as Deallocate
    from hostir.ops import ForLoop as ForLoop
    from hostir.ops import GetCurrentStream as GetCurrentStream
    from hostir.ops import HirAliasSelect as HirAliasSelect
    from hostir.ops import IfThenElse as IfThenElse
    from hostir.ops import LaunchKernel as LaunchKernel
    from hostir.ops import LocalSlice as LocalSlice
    from hostir.ops import PostOnStream as PostOnStream
    from hostir.ops import SetCurrentStream as SetCurrentStream
    from hostir.ops import ShardByStream as ShardByStream
    from hostir.ops import SymmetricContiguousView as SymmetricContiguousView
    from hostir.ops import Synchronize as Synchronize
    from hostir.parse import parse as parse
    from hostir.tracing import HostIrEvaluator as HostIrEvaluator
    from hostir.transfers import CollectivePermute as CollectivePermute
    from hostir.transfers import Communication as Communication
    from hostir.transfers import EndCoalescing as EndCoalescing
    from hostir.transfers import P2PCommunication as P2PCommunication
    from hostir.transfers import ShareMemHandles as ShareMemHandles
    from hostir.transfers import StartCoalescing as StartCoalescing
    from hostir.transfers import Wait as Wait
    from hostir.verify import verify as verify
    from multidevice.communication import TeamOf as TeamOf

# Module -> the public names that it defines.
_MODULES = {
    "fuser.ir.scalar": ("as_scalar", "ceildiv", "eq", "logical_and", "logical_not", "ne", "where"),
    "hostir.container": ("HostIrContainer", "equal"),
    "hostir.effects": ("Stream",),
    "hostir.lower_streams": ("lower_streams",),
    "hostir.ops": (
        "NUMBER_OF_STREAMS",
        "RANK",
        "Allocate",
        "Deallocate",
        "ForLoop",
        "GetCurrentStream",
        "HirAliasSelect",
        "IfThenElse",
        "LaunchKernel",
        "LocalSlice",
        "PostOnStream",
        "SetCurrentStream",
        "ShardByStream",
        "SymmetricContiguousView",
        "Synchronize",
    ),
    "hostir.parse": ("parse",),
    "hostir.tracing": ("HostIrEvaluator",),
    "hostir.transfers": (
        "CollectivePermute",
        "Communication",
        "EndCoalescing",
        "P2PCommunication",
        "ShareMemHandles",
        "StartCoalescing",
        "Wait",
    ),
    "hostir.verify": ("verify",),
    "multidevice.communication": ("TeamOf",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)


class _Package(ModuleType):
    """The functions `parse` and `verify` are not hidden by the modules that they come from."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
