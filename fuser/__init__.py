"""A compiler for tensor programs on a device mesh: one import gives the public names.

Nothing is imported until a name is asked for, so `import fuser` needs neither CUDA nor MPI and
takes no time. `fuser.ops`, `fuser.schedule` and `fuser.multidevice` are public modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuser import multidevice, ops, schedule
    from fuser.errors import (
        ArgumentError,
        CommunicationError,
        CommunicationTimeout,
        CompileError,
        DeadlockError,
        DefinitionError,
        DivisionByZeroError,
        DtypeError,
        EmptyDefinitionError,
        ExecutionError,
        FuserError,
        InputError,
        KernelError,
        NoOperandError,
        NoReproInputsError,
        NotCompiledError,
        OptionError,
        OtherEntranceError,
        ParseError,
        PeerError,
        ProgramMismatchError,
        ShardingError,
        UnknownOpError,
        UnsupportedError,
        VerifyError,
    )
    from fuser.frontend.definition import FusionDefinition
    from fuser.frontend.executor_cache import FusionExecutorCache
    from fuser.frontend.fusion_cache import LRUCache, LruFusionCache
    from fuser.frontend.python_text import translate_fusion
    from fuser.ir.axis import Axis as IterDomain
    from fuser.ir.axis import Merge, Split
    from fuser.ir.domain import TensorDomain
    from fuser.ir.dtypes import DataType
    from fuser.ir.fusion import Fusion
    from fuser.ir.mesh import DeviceMesh
    from fuser.ir.nodes import BroadcastOp, ReshapeOp, SqueezeOp
    from fuser.ir.statement import Expr, Statement, Val
    from fuser.ir.tensor import TensorView
    from fuser.ir.types import IterType, MemoryType, ParallelType
    from fuser.version import __version__ as __version__

__all__ = [
    "FusionDefinition",
    "FusionExecutorCache",
    "LRUCache",
    "LruFusionCache",
    "translate_fusion",
    "DataType",
    "ParallelType",
    "MemoryType",
    "IterType",
    "Fusion",
    "TensorView",
    "IterDomain",
    "TensorDomain",
    "Statement",
    "Val",
    "Expr",
    "Split",
    "Merge",
    "BroadcastOp",
    "SqueezeOp",
    "ReshapeOp",
    "DeviceMesh",
    "ops",
    "schedule",
    "multidevice",
    "FuserError",
    "UnsupportedError",
    "UnknownOpError",
    "ExecutionError",
    "DivisionByZeroError",
    "DeadlockError",
    "ArgumentError",
    "DefinitionError",
    "EmptyDefinitionError",
    "NoOperandError",
    "NotCompiledError",
    "NoReproInputsError",
    "OtherEntranceError",
    "DtypeError",
    "InputError",
    "ShardingError",
    "VerifyError",
    "ParseError",
    "OptionError",
    "CompileError",
    "KernelError",
    "CommunicationError",
    "CommunicationTimeout",
    "PeerError",
    "ProgramMismatchError",
]

_MODULES = frozenset({"ops", "schedule", "multidevice"})

_DEFINED_IN: dict[str, str] = {
    "FusionDefinition": "fuser.frontend.definition",
    "FusionExecutorCache": "fuser.frontend.executor_cache",
    "LRUCache": "fuser.frontend.fusion_cache",
    "LruFusionCache": "fuser.frontend.fusion_cache",
    "translate_fusion": "fuser.frontend.python_text",
    "DataType": "fuser.ir.dtypes",
    "ParallelType": "fuser.ir.types",
    "MemoryType": "fuser.ir.types",
    "IterType": "fuser.ir.types",
    "Fusion": "fuser.ir.fusion",
    "TensorView": "fuser.ir.tensor",
    "IterDomain": "fuser.ir.axis:Axis",
    "TensorDomain": "fuser.ir.domain",
    "Statement": "fuser.ir.statement",
    "Val": "fuser.ir.statement",
    "Expr": "fuser.ir.statement",
    "Split": "fuser.ir.axis",
    "Merge": "fuser.ir.axis",
    "BroadcastOp": "fuser.ir.nodes",
    "SqueezeOp": "fuser.ir.nodes",
    "ReshapeOp": "fuser.ir.nodes",
    "DeviceMesh": "fuser.ir.mesh",
    "__version__": "fuser.version",
}
"""Public name -> the module that defines it (and its name there); every other name of `__all__` is
an error type."""


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _DEFINED_IN:
        raise AttributeError(f"module 'fuser' has no attribute {name!r}")
    if name in _MODULES:
        value = import_module(f"fuser.{name}")
    else:
        module, _, defined_as = _DEFINED_IN.get(name, "fuser.errors").partition(":")
        value = getattr(import_module(module), defined_as or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
