"""A compiler for tensor programs on a device mesh. This package has all public names.

A module is imported when one of its names is first used. `import fuser` alone is therefore fast and
needs neither CUDA nor MPI. `fuser.ops`, `fuser.schedule` and `fuser.multidevice` are public
modules.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuser.nvfuser.module_aliases import install as _install_aliases

if TYPE_CHECKING:
    from fuser import (
        benchmark_utils,
        idm,
        multidevice,
        nvfuser_direct_version,
        ops,
        pytorch_utils,
        schedule,
    )
    from fuser.frontend.definition import FusionDefinition, execute_with_dtensors
    from fuser.frontend.executor_cache import FusionExecutorCache
    from fuser.frontend.fusion_cache import LRUCache, LruFusionCache
    from fuser.frontend.manual_kernels import KernelExecutor
    from fuser.frontend.profiler import (
        FusionProfile,
        KernelProfile,
        PythonProfiler,
        get_fusion_profile,
        reset_profiler,
    )
    from fuser.frontend.python_printer import translate_fusion
    from fuser.frontend.validation import get_val_tolerances, validate_with_auto_inferred_outputs
    from fuser.ir.domain.device_mesh import DeviceMesh
    from fuser.ir.domain.tensor_domain import TensorDomain
    from fuser.ir.dtypes import DataType
    from fuser.ir.fusion import Axis as IterDomain
    from fuser.ir.fusion import Fusion, Merge, Split, TensorView
    from fuser.ir.fusion_guard import FusionGuard
    from fuser.ir.ops.nodes import BroadcastOp, ReshapeOp, SqueezeOp
    from fuser.ir.shard_annotation import Replicate, Shard, shard
    from fuser.ir.statement import Expr, Statement, Val
    from fuser.ir.types import (
        CacheOp,
        IdMappingMode,
        IterType,
        LoadStoreOpType,
        MemoryType,
        ParallelType,
    )
    from fuser.multidevice import CommunicatorBackend
    from fuser.ops.define import compute_tensor_descriptor, define_scalar, define_tensor
    from fuser.schedule.automatic import CompileParams, HeuristicParams, LaunchParams, SchedulerType
    from fuser.schedule.automatic import PointwiseHeuristicParams as PointwiseParams
    from fuser.schedule.automatic import ReductionHeuristicParams as ReductionParams
    from fuser.support.errors import (
        ArgumentError,
        CommunicationError,
        CommunicationTimeout,
        CompileError,
        DeadlockError,
        DefinitionError,
        DivisionByZeroError,
        DTensorError,
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
        UnsupportedNameError,
        ValidationError,
        VerifyError,
    )
    from fuser.support.version import __version__ as __version__
    from fuser.support.version import version
    from hostir.runtime.frame import OutOfMemoryError

__all__ = [
    "FusionDefinition",
    "FusionExecutorCache",
    "LRUCache",
    "LruFusionCache",
    "translate_fusion",
    "execute_with_dtensors",
    "PythonProfiler",
    "FusionProfile",
    "KernelProfile",
    "get_fusion_profile",
    "reset_profiler",
    "DataType",
    "ParallelType",
    "MemoryType",
    "IterType",
    "LoadStoreOpType",
    "CacheOp",
    "SchedulerType",
    "IdMappingMode",
    "CommunicatorBackend",
    "FusionGuard",
    "define_tensor",
    "define_scalar",
    "compute_tensor_descriptor",
    "get_val_tolerances",
    "validate_with_auto_inferred_outputs",
    "version",
    "Fusion",
    "KernelExecutor",
    "CompileParams",
    "LaunchParams",
    "HeuristicParams",
    "PointwiseParams",
    "ReductionParams",
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
    "shard",
    "Shard",
    "Replicate",
    "ops",
    "schedule",
    "multidevice",
    "idm",
    "pytorch_utils",
    "benchmark_utils",
    "nvfuser_direct_version",
    "FuserError",
    "UnsupportedError",
    "UnsupportedNameError",
    "UnknownOpError",
    "ExecutionError",
    "OutOfMemoryError",
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
    "DTensorError",
    "ValidationError",
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

_MODULES = frozenset(
    {
        *("ops", "schedule", "multidevice", "idm", "pytorch_utils", "benchmark_utils"),
        "nvfuser_direct_version",
    }
)

_DEFINED_IN: dict[str, str] = {
    "FusionDefinition": "fuser.frontend.definition",
    "FusionExecutorCache": "fuser.frontend.executor_cache",
    "LRUCache": "fuser.frontend.fusion_cache",
    "LruFusionCache": "fuser.frontend.fusion_cache",
    "translate_fusion": "fuser.frontend.python_printer",
    "execute_with_dtensors": "fuser.frontend.definition",
    **dict.fromkeys(("PythonProfiler", "FusionProfile"), "fuser.frontend.profiler"),
    **dict.fromkeys(("KernelProfile", "get_fusion_profile"), "fuser.frontend.profiler"),
    "reset_profiler": "fuser.frontend.profiler",
    "DataType": "fuser.ir.dtypes",
    "ParallelType": "fuser.ir.types",
    "MemoryType": "fuser.ir.types",
    "IterType": "fuser.ir.types",
    "LoadStoreOpType": "fuser.ir.types",
    "CacheOp": "fuser.ir.types",
    "IdMappingMode": "fuser.ir.types",
    "SchedulerType": "fuser.schedule.automatic",
    "CommunicatorBackend": "fuser.nvfuser.multi_device_executor",
    "FusionGuard": "fuser.ir.fusion_guard",
    "define_tensor": "fuser.ops.define",
    "define_scalar": "fuser.ops.define",
    "compute_tensor_descriptor": "fuser.ops.define",
    "get_val_tolerances": "fuser.frontend.validation",
    "validate_with_auto_inferred_outputs": "fuser.frontend.validation",
    "version": "fuser.support.version",
    "OutOfMemoryError": "hostir.runtime.frame",
    "Fusion": "fuser.frontend.manual_kernels",
    "KernelExecutor": "fuser.frontend.manual_kernels",
    "CompileParams": "fuser.schedule.automatic",
    "LaunchParams": "fuser.schedule.automatic",
    "HeuristicParams": "fuser.schedule.automatic",
    "PointwiseParams": "fuser.schedule.automatic:PointwiseHeuristicParams",
    "ReductionParams": "fuser.schedule.automatic:ReductionHeuristicParams",
    "TensorView": "fuser.ir.fusion",
    "IterDomain": "fuser.ir.fusion:Axis",
    "TensorDomain": "fuser.ir.domain.tensor_domain",
    "Statement": "fuser.ir.statement",
    "Val": "fuser.ir.statement",
    "Expr": "fuser.ir.statement",
    "Split": "fuser.ir.fusion",
    "Merge": "fuser.ir.fusion",
    "BroadcastOp": "fuser.ir.ops.nodes",
    "SqueezeOp": "fuser.ir.ops.nodes",
    "ReshapeOp": "fuser.ir.ops.nodes",
    "DeviceMesh": "fuser.ir.domain.device_mesh",
    **dict.fromkeys(("shard", "Shard", "Replicate"), "fuser.ir.shard_annotation"),
    "__version__": "fuser.support.version",
}
"""Public name -> the module that defines it (and its name there); every other name of `__all__` is
an error type of `fuser.support.errors`."""

_install_aliases()


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _DEFINED_IN:
        from fuser.support.errors import UnsupportedNameError, advice_on_nvfuser

        if advice := advice_on_nvfuser("fuser", name):
            raise UnsupportedNameError(f"fuser.{name} is not supported: {advice}")
        text = f"module 'fuser' has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    if name in _MODULES:
        value = import_module(f"fuser.{name}")
    else:
        module, _, defined_as = _DEFINED_IN.get(name, "fuser.support.errors").partition(":")
        value = getattr(import_module(module), defined_as or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
