"""The names that the list-valued options know: what each does here, or why it changes nothing.

`docs/options.md` is this table for readers, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping

# What a name does. The key is the variable without `FUSER_`.
EFFECTS: Mapping[str, Mapping[str, str]] = {
    "DUMP": {
        "host_ir": "the host program that runs; host_ir(short): without what only machines need; "
        "host_ir(names): without the types of tensors, an op per line; "
        "host_ir(indices): as host_ir, where indices stand in the ops that use them",
        "host_ir_lowering": "the host program as lowered, and after each host pass",
        "communication": "each communication as it is posted, with the shapes of its shards",
        "fusion_ir_original": "the fusion as the user defined it",
        "fusion_ir_concretized": "the fusion with symbolic reshapes and extents of 0 and 1 decided",
        "fusion_ir_preseg": "the fusion before segmentation, with all shardings",
        "overlap": "which matmuls and communications run side by side, and the predicted times "
        "that decided it",
        "segmented_fusion": "one line per segment: kind, ops, results",
        "scheduler_params": "the parameters that the scheduler chose for a kernel; with tune, also "
        "what it has found: the time of that choice, the best, and all that were timed",
        "scheduled_ir": "a kernel's fusion after scheduling",
        "fusion_ir": "nvFuser's name of scheduled_ir",
        "kernel_ir": "a kernel's loop nests before they become C++",
        "cuda_kernel": "a kernel's CUDA C++ text",
    },
    "ENABLE": {
        "checked": "CPU kernels check bounds, alignment, uninitialised reads and shared-memory "
        "races; a finding is a KernelError that names tensor, op and the user's line",
        "schedules_for": "schedules_for(h200): CPU kernels get the schedules of that device",
        "stream_slots": "what only the steps of one loop see, one index of an axis each, is "
        "allocated with as many elements along it as there are streams",
        "peer_copies": "ranks copy out of each other's memory in place of NCCL, MPI or gloo: all "
        "ranks of a mesh share a host, and their GPUs have access to each other",
        "machine": "machine(h200), (measured) or (NAME.json): whether overlap pays is decided for "
        "that machine, also on CPU ranks; measured: what python -m hostir calibrate has found out "
        "here; NAME.json: a description (docs/cost.md)",
        "steps": "a matmul beside a communication takes the fastest of its steps, also where these "
        "do not pay, as those of small tensors on CPU ranks; fastest on the machine of "
        "machine(..), else on these GPUs where they are described, else on an H200",
        "double_numbers": "a number beside integers or booleans alone gives Double or "
        "ComplexDouble, as in nvFuser, and not Float or ComplexFloat, as in torch; read when the "
        "block of a definition begins, and no option of a call: "
        "FusionDefinition(double_numbers=True) chooses it for one definition",
        "tune": "the first run of a kernel for a class of inputs times parameters near the "
        "heuristic's choice on these inputs; the best is kept on disk; programs on several ranks "
        "are refused",
        "late_stream": "late_stream(all), (entry) or (0) to (7): on the CPU the work of that "
        "stream is held back as far as the program's waits allow, so that a missing wait gives "
        "wrong numbers",
    },
    "DISABLE": {
        "cuda_graphs": "every run on a GPU launches step by step; without it, runs that come back "
        "are captured as CUDA graphs and repeated by one call",
        "compiled_runner": "every call runs in Python; without it, calls that come back are "
        "repeated by one function in C, where a C++ compiler and Python's headers can make it",
        "allreduce_kernel": "allreduces of small tensors among the GPUs of a host are NCCL's, or "
        "peer copies, in place of one kernel; read when a team first has one",
        "horizontal_fusion": "small pointwise kernels that share nothing but inputs are launched "
        "one by one",
        "clusters": "reductions along rows longer than a block takes are several kernels, never "
        "one whose blocks run in clusters and read each other's shared memory",
        "auto_overlap": "no matmul runs beside a communication unless the definition says so",
        "kernel_reuse": "no kernel serves sizes near those that it was made for",
        "multidevice": "this process takes no part in a job; read when the communicator starts",
        "progress": "no line says how far a compilation of more than two seconds is, which rank 0 "
        "draws where its standard error is a terminal",
    },
    "PROF": {
        "enable": "every run is profiled (fuser.get_fusion_profile()): it takes place twice, step "
        "by step, with the results of one",
        "enable.nocupti": "enable, with times from CUDA events, never from CUPTI",
        "print": "enable, and a table after each run; of PythonProfiler, at the end of its block",
        "print.nocupti": "print, with times from CUDA events, never from CUPTI",
        "print.verbose": "print, with streams, devices, compile times and shared memory",
    },
}

_ONE_LOWERING = "every program is lowered to a host program and runs from it"
_NO_PROTOCOLS = "a communication has one protocol per backend"
_NO_SUCH_SCHEDULER = "there is no such scheduler"
_LIBRARY = "matmul and linear are always evaluated by torch"
_ALWAYS = "the code generator has one form, which needs no such switch"
_NO_DEBUG = "kernels carry no debug information: FUSER_DUMP=cuda_kernel shows their text"
_NO_OUTPUT = "no such text exists here"
_PROFILER = "FUSER_PROF=print tells the time of each kernel"

# nvFuser's names that existing programs use and that change nothing here, each with the reason.
NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "DUMP": dict.fromkeys(
        """
        host_ir_jit pre_segmenter_logging fusion_ir_presched fusion_ir_math python_definition
        fusion_args kernel_args launch_param compile_params cuda_full cuda_to_file ptx cubin sass
        sass_to_file ptxas_verbose perf_debug_verbose scheduler_verbose segmenter_logging
        fusion_ir_graph draw_segmented_fusion transform_propagator inlining ca_map indexing_verbose
        index_type sync_map parallel_dimensions predicate_elimination lower_verbose expr_simplify
        expr_sort expr_sort_verbose bank_conflict buffer_reuse_verbose dynamic_shared_memory
        global_zeroed_memory occupancy ftrace cutlass_compile
        """.split(),
        _NO_OUTPUT,
    ),
    "ENABLE": {
        "host_ir_lowering": _ONE_LOWERING,
        "host_ir_jit": _ONE_LOWERING,
        "insert_resharding_after": "decomposition decides where a resharding stands",
        "p2p_protocol": _NO_PROTOCOLS,
        "p2p_transport": _NO_PROTOCOLS,
        "multicast_protocol": _NO_PROTOCOLS,
        "wait_debugger": "attach a debugger to the rank's process",
        "fuse_matmul": _LIBRARY,
        "fuse_multiple_matmuls": _LIBRARY,
        "cutlass_scheduler": _LIBRARY,
        "kernel_profile": _PROFILER,
        "kernel_debug": _NO_DEBUG,
        "kernel_lineinfo": _NO_DEBUG,
        "kernel_db": "compiled kernels are always kept on disk, by content",
        "static_fusion_count": "kernels are named by segment",
        "warn_register_spill": "CudaKernel.attributes() tells the local bytes of a kernel",
        "fast_math": "kernels keep NaN, infinities and accuracy",
        "reuse_zeroed_memory": "zeroed workspaces are always kept with the kernel's launch",
        "memory_promotion": _ALWAYS,
        "io_to_lower_precision": "a segment's border keeps the dtype of the definition",
        "id_model_extra_validation": "fusions are verified after every pass",
        "tma_pointwise": _NO_SUCH_SCHEDULER,
        "tma_inner_persistent": _NO_SUCH_SCHEDULER,
        "tma_reduction": _NO_SUCH_SCHEDULER,
        "ws_normalization": _NO_SUCH_SCHEDULER,
    },
    "DISABLE": {
        "infer_contiguity": "contiguity is read from the tensors of each call",
        "resize_scheduler": _NO_SUCH_SCHEDULER,
        "greedy_scheduler": _NO_SUCH_SCHEDULER,
        "matmul_expr_eval": _LIBRARY,
        "parallel_compile": "one compiler process or a few threads make all kernels of a program",
        "nvrtc_caching": "compiled kernels are kept by content: FUSER_CACHE_DIR names an empty "
        "folder to compile anew",
        "fma": "the compiler of each device decides about contraction",
        "index_hoist": _ALWAYS,
        "compile_to_sass": "kernels are always compiled to machine code",
        "fallback": "nothing falls back: what cannot be compiled raises",
        "nvtx": "no ranges are marked",
        "contig_indexing": _ALWAYS,
        "expr_simplify": _ALWAYS,
        "grouped_grid_welford_outer_opt": _ALWAYS,
        "magic_zero": _ALWAYS,
        "predicate_elimination": _ALWAYS,
        "reuse_mismatched_type_registers": _ALWAYS,
        "var_name_remapping": _ALWAYS,
        "welford_vectorization": _ALWAYS,
        "python_inline_definitions": "no definition is printed as Python",
    },
    "PROF": {},
}

# Names that one call cannot choose, and why: they take part in what one process does once, or in
# how a definition is written.
_PROCESS_WIDE = "holds for the whole process: set it in FUSER_DISABLE, not for one call"
NOT_PER_CALL: Mapping[str, str] = {
    "allreduce_kernel": _PROCESS_WIDE,
    "multidevice": _PROCESS_WIDE,
    "progress": _PROCESS_WIDE,
    "double_numbers": "says how a definition is written: give it to FusionDefinition, or set it in "
    "FUSER_ENABLE before, not for one call",
}
# The argument of a name, one of these, where * is any text: a dump may have it, a feature must. The
# others take none.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "host_ir": ("short", "names", "indices"),
    "schedules_for": ("h200",),
    "machine": ("h200", "measured", "*.json"),
    "late_stream": ("all", "entry", *map(str, range(8))),
}
