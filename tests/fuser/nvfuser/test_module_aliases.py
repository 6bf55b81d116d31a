"""Every member of nvFuser's Python API other than ops exists, or raises an error that says what to
use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuser
from fuser import FusionDefinition, ParallelType, UnsupportedError

# Object -> its members. Those after `|` raise an error; `test_refused_members` calls them.
MEMBERS = {
    "fuser": """FusionDefinition LruFusionCache version __version__ define_tensor define_scalar
        translate_fusion compute_tensor_descriptor validate_with_auto_inferred_outputs
        get_val_tolerances Statement Val Expr IterDomain TensorDomain TensorView Split Merge
        BroadcastOp SqueezeOp ReshapeOp FusionGuard Fusion FusionExecutorCache KernelExecutor
        LRUCache LaunchParams CompileParams DataType ParallelType MemoryType LoadStoreOpType
        CacheOp SchedulerType CommunicatorBackend ops schedule multidevice
        execute_with_dtensors get_fusion_profile reset_profiler PythonProfiler FusionProfile
        KernelProfile IdMappingMode idm pytorch_utils benchmark_utils nvfuser_direct_version
        HeuristicParams PointwiseParams ReductionParams | MatmulParams GemmTile
        MatMulTileOptions CircularBufferOptions SupportedVectorization ClusterDims MmaMacroEncode
        MmaMacro MatmulTilingStrategy MatmulBufferingLoopLevel
        MatmulCircularBufferingStrategy MatmulTileRasterizationOrder MmaMacroArch nvf_cutlass""",
    "DataType": """Double Float Half BFloat16 Float8_e4m3fn Float8_e5m2 Float8_e8m0fnu
        Float4_e2m1fn Float4_e2m1fn_x2 Int32 Int UInt64 Index Bool ComplexDouble ComplexFloat
        Null""",
    "ParallelType": """mesh_x mesh_y mesh_z grid_z grid_y grid_x block_z block_y block_x stream
        vectorize unroll unswitch mma tma serial""",
    "MemoryType": "local shared global tensor symmetric",
    "LoadStoreOpType": "set load_matrix cp_async tma",
    "CacheOp": "unspecified all_levels streaming global",
    "SchedulerType": """none no_op pointwise matmul reduction inner_persistent
        inner_outer_persistent outer_persistent transpose expr_eval resize __entries""",
    "CommunicatorBackend": "nccl ucc cuda",
    "IdMappingMode": "exact almost_exact broadcast permissive loop",
    "fuser.nvfuser.idm": "IdModel ValGraph DisjointValSets",
    "a model of axes": "maybe_build_graph __str__",
    "a graph of axes": "disjoint_val_sets map_vals __str__",
    "sets of axes": "strict_are_mapped __str__",
    "PythonProfiler": "__enter__ __exit__ profile",
    "fuser.nvfuser.pytorch_utils": """torch_dtype_to_nvfuser_dtype python_scalar_to_nvfuser_dtype
        get_device_properties DEVICE_PROPERTIES retry_on_oom_or_skip_test""",
    "fuser.nvfuser_direct_version": "Version",
    "fuser.nvfuser.benchmark_utils": "Timer CuptiProfiler CuptiTimer FusionProfileTimer",
    "a tensor": """is_symbolic is_tensor definition uses ndim size shape dtype has_root domain
        get_root_domain get_logical_domain get_loop_domain axis split inner_split outer_split merge
        reorder swizzle1d rfactor cache_after cache_before set_memory_type set_allocation_domain
        set_device_mesh __str__ | swizzle""",
    "an axis": """is_symbolic is_tensor definition uses is_reduction extent parallelize __str__""",
    "a scalar": "is_symbolic is_tensor definition __str__ | uses",
    "an op": "input output __str__",
    "a split": "input output outer inner __str__",
    "a definition": """ops sched fusion define_tensor define_scalar define_vector from_pytorch
        execute_with_dtensors add_output validate_definition execute manual_execute validate
        manual_validate repro_script_for last_repro_script __repr__ fec""",
    "a fusion": """inputs outputs vals add_input add_output print_math print_kernel __eq__""",
    "a cache of programs": """execute is_compiled fusion get_cuda_kernel get_scheduled_ir
        get_most_recent_scheduled_ir get_output_shardings""",
    "a kernel": "compile run is_compiled is_programmatic_dependent_launch_enabled",
    "a cache of fusions": "cache_compile num_fusions stats",
    "LaunchParams": "bdimx bdimy bdimz gdimx gdimy gdimz __repr__",
    "CompileParams": """index_type maxrregcount enable_magic_zero enable_ptxas_verbose device
        include_paths __repr__""",
    "parameters": """lparams cparams scheduler_type hash __eq__ __repr__ vectorization_factor
        unroll_factor_inner""",
    "fuser.schedule": """bounded_transform_backward transform_like parallelize_like inline_most
        inline_at can_schedule find_compatible_schedulers compute_heuristics schedule |
        warp_specialize""",
}


def made() -> dict[str, Any]:
    """Returns an object of each kind."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        x.split(1, 4)
    fd.execute([torch.ones(2, 8)])
    model = fuser.idm.IdModel(fd.fusion)
    graph = model.maybe_build_graph(fuser.IdMappingMode.exact)
    enumerations = [n for n in MEMBERS if n.isidentifier() and n[0].isupper()]
    return {
        **{name: getattr(fuser, name) for name in enumerations},
        "LaunchParams": fuser.LaunchParams(),
        "CompileParams": fuser.CompileParams(),
        "fuser": fuser,
        "fuser.schedule": fuser.schedule,
        "fuser.nvfuser.idm": fuser.idm,
        "fuser.nvfuser.pytorch_utils": fuser.pytorch_utils,
        "fuser.nvfuser_direct_version": fuser.nvfuser_direct_version,
        "fuser.nvfuser.benchmark_utils": fuser.benchmark_utils,
        "parameters": fuser.schedule.compute_heuristics(
            fd.fusion, fuser.SchedulerType.pointwise, [torch.ones(2, 8)]
        ),
        "a model of axes": model,
        "a graph of axes": graph,
        "sets of axes": graph.disjoint_val_sets(),
        "a tensor": x,
        "an axis": x.axis(0),
        "a scalar": x.size(0),
        "an op": fd.fusion.outputs()[0].definition(),
        "a split": x.axis(1).definition(),
        "a definition": fd,
        "a fusion": fd.fusion,
        "a cache of programs": fd.fec,
        "a kernel": fuser.KernelExecutor(),
        "a cache of fusions": fuser.LRUCache(4),
    }


OBJECTS = made()
THERE = [(of, n) for of, text in MEMBERS.items() for n in text.partition("|")[0].split()]
REFUSED = [(of, n) for of, text in MEMBERS.items() for n in text.partition("|")[2].split()]


@pytest.mark.parametrize(("of", "name"), THERE, ids=lambda v: v)
def test_members_are_there(of: str, name: str) -> None:
    assert hasattr(OBJECTS[of], name), f"{of} has no {name}"


@pytest.mark.parametrize(("of", "name"), REFUSED, ids=lambda v: v)
def test_refused_members_say_so(of: str, name: str) -> None:
    tv = OBJECTS["a tensor"]
    calls: dict[str, Callable[[], object]] = {
        "swizzle": lambda: tv.swizzle(0, 1),
        "uses": lambda: OBJECTS["a scalar"].uses(),
        "warp_specialize": lambda: fuser.schedule.warp_specialize(tv, 2, 1, ParallelType.block_y),
    }
    with pytest.raises(UnsupportedError) as caught:
        calls.get(name, lambda: getattr(OBJECTS[of], name))()
    # The message has the reason, or the replacement.
    assert name in str(caught.value) and ":" in str(caught.value)


def test_refused_names_are_no_attributes() -> None:
    assert not hasattr(fuser, "MatmulParams") and "MatmulParams" not in dir(fuser)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "FusionCache": "fuser.LruFusionCache",
        "clone": "copy.copy(fd)",
        "compute_contiguity": "fuser.compute_tensor_descriptor",
        "MatmulParams": "a matmul is a library call",
    }.items(),
)
def test_an_import_of_a_missing_name_says_what_to_use(name: str, words: str) -> None:
    with pytest.raises(ImportError) as imported:
        exec(f"from fuser import {name}")
    with pytest.raises(fuser.UnsupportedNameError) as asked:
        getattr(fuser, name)
    assert words in str(imported.value) and words in str(asked.value)
    with pytest.raises(ImportError, match=r"cannot import name 'no_such_name'"):
        exec("from fuser import no_such_name")
