"""Host programs, which list the operations that every rank of a job runs, and the evaluator that
runs them.

Importing `hostir` imports no other module: each public name is imported when it is first used.
`docs/reference/host-operations.md` shows how to build a host program by hand.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuser.ir.scalar.constructors import as_scalar as as_scalar
    from fuser.ir.scalar.constructors import ceildiv as ceildiv
    from fuser.ir.scalar.constructors import eq as eq
    from fuser.ir.scalar.constructors import logical_and as logical_and
    from fuser.ir.scalar.constructors import logical_not as logical_not
    from fuser.ir.scalar.constructors import ne as ne
    from fuser.ir.scalar.constructors import where as where
    from hostir.cost.rank_program import RankProgram as RankProgram
    from hostir.cost.rank_program import program_for as program_for
    from hostir.ir.effects import Stream as Stream
    from hostir.ir.ops import NUMBER_OF_STREAMS as NUMBER_OF_STREAMS
    from hostir.ir.ops import RANK as RANK
    from hostir.ir.ops import Allocate as Allocate
    from hostir.ir.ops import CollectivePermute as CollectivePermute
    from hostir.ir.ops import Communication as Communication
    from hostir.ir.ops import Deallocate as Deallocate
    from hostir.ir.ops import EndCoalescing as EndCoalescing
    from hostir.ir.ops import ForLoop as ForLoop
    from hostir.ir.ops import GetCurrentStream as GetCurrentStream
    from hostir.ir.ops import HirAliasSelect as HirAliasSelect
    from hostir.ir.ops import IfThenElse as IfThenElse
    from hostir.ir.ops import LaunchKernel as LaunchKernel
    from hostir.ir.ops import LocalSlice as LocalSlice
    from hostir.ir.ops import P2PCommunication as P2PCommunication
    from hostir.ir.ops import PostOnStream as PostOnStream
    from hostir.ir.ops import SetCurrentStream as SetCurrentStream
    from hostir.ir.ops import ShardByStream as ShardByStream
    from hostir.ir.ops import ShareMemHandles as ShareMemHandles
    from hostir.ir.ops import StartCoalescing as StartCoalescing
    from hostir.ir.ops import SymmetricContiguousView as SymmetricContiguousView
    from hostir.ir.ops import Synchronize as Synchronize
    from hostir.ir.ops import Wait as Wait
    from hostir.ir.parser import parse as parse
    from hostir.ir.program import HostIrContainer as HostIrContainer
    from hostir.ir.program import equal as equal
    from hostir.ir.verifier import verify as verify
    from hostir.lowering.pipeline import lower_streams as lower_streams
    from hostir.profiling.tracer import HostIrEvaluator as HostIrEvaluator
    from hostir.tools.explain import explain as explain
    from multidevice.sharding.reshard import TeamOf as TeamOf

# Module -> the public names that it defines. Every host op (`HOST_OPS`) has one, too.
_MODULES = {
    "fuser.ir.scalar.constructors": (
        "as_scalar",
        "ceildiv",
        "eq",
        "logical_and",
        "logical_not",
        "ne",
        "where",
    ),
    "hostir.ir.program": ("HostIrContainer", "equal"),
    "hostir.cost.rank_program": ("RankProgram", "program_for"),
    "hostir.ir.effects": ("Stream",),
    "hostir.lowering.pipeline": ("lower_streams",),
    "hostir.ir.ops": ("NUMBER_OF_STREAMS", "RANK"),
    "hostir.ir.parser": ("parse",),
    "hostir.profiling.tracer": ("HostIrEvaluator",),
    "hostir.ir.verifier": ("verify",),
    "hostir.tools.explain": ("explain",),
    "multidevice.sharding.reshard": ("TeamOf",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


@cache
def _host_ops() -> dict[str, type]:
    """Returns the classes of all host ops (operations that exist only in host programs), by class
    name."""
    return {cls.__name__: cls for cls in import_module("hostir.ir.ops").HOST_OPS}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if not name.startswith("_") and name in _host_ops():
        return _host_ops()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_EXPORTS, *_host_ops()})
