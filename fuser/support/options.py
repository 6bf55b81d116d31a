"""The options: environment variables and options of one call, in typed tables.

`FUSER_X` is the name of a variable. Some variables also have the alias `NVFUSER_X`; if both are
set, `FUSER_X` is used. An unknown `FUSER_` variable, an unknown name in a list, or an invalid value
raises `OptionError`, whose message has the nearest known name.

A definition reads `FUSER_ENABLE` and `FUSER_DISABLE` when it first runs. The options of a call are
added to them. All other variables are read where they are used. `EFFECTS` describes each name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import platformdirs

from fuser.support.arguments import Mismatch, list_items, show
from fuser.support.errors import OptionError, user_code, user_line, warn

# ----------------------------------------------------------------------
# The names in list-valued options, each with its effect, or the reason why it has none.
#
# `docs/reference/options.md` has the same table; a test compares them.

# Variable without `FUSER_` -> name -> effect.
EFFECTS: Mapping[str, Mapping[str, str]] = {
    "DUMP": {
        "host_ir": "the host program that runs; host_ir(short): a form for reading, without the "
        "details that only the parser needs; host_ir(names): without the types of tensors, an op "
        "per line; host_ir(indices): as host_ir, with indices inside the ops that use them",
        "host_ir_lowering": "the host program as lowered, and after each host pass",
        "communication": "each communication as it is posted, with the shapes of its shards",
        "fusion_ir_original": "the fusion as the user defined it",
        "fusion_ir_concretized": "the fusion with symbolic reshapes and extents of 0 and 1 decided",
        "fusion_ir_preseg": "the fusion before segmentation, with all shardings",
        "overlap": "which matmuls and communications run side by side, and the predicted times "
        "that decided it",
        "segmented_fusion": "one line per segment: kind, ops, results",
        "scheduler_params": "the parameters that the scheduler chose for a kernel; with tune, also "
        "the result of tuning: the time of that choice, the best, and all that were timed",
        "scheduled_ir": "a kernel's fusion after scheduling",
        "fusion_ir": "nvFuser's name of scheduled_ir",
        "kernel_ir": "a kernel's loop nests before they become C++",
        "cuda_kernel": "a kernel's CUDA C++ text",
    },
    "ENABLE": {
        "checked": "CPU kernels check bounds, alignment, uninitialised reads and shared-memory "
        "races; a violation raises a KernelError that names tensor, op and the user's line",
        "schedules_for": "schedules_for(h200): CPU kernels get the schedules of that device",
        "stream_slots": "saves memory in stream loops: an intermediate that only the steps of one "
        "loop use has one slot per stream, not one per step; each step must use one index of the "
        "axis",
        "peer_copies": "ranks copy out of each other's memory, without NCCL, MPI or gloo; all "
        "ranks of a mesh must share a host, and their GPUs must have access to each other",
        "machine": "machine(h200), (measured) or (NAME.json): the machine for which the cost model "
        "decides whether overlap pays, also on CPU ranks; measured: the result of python -m hostir "
        "calibrate on this machine; NAME.json: a description (docs/explanation/cost-model.md)",
        "steps": "a matmul next to a communication is always divided into the fastest number of "
        "steps, even if that does not pay (small tensors on CPU ranks); fastest on the machine of "
        "machine(..), else on these GPUs if they are described, else on an H200",
        "double_numbers": "a Python float or complex number with integer or boolean tensors gives "
        "Double or ComplexDouble, as in nvFuser, instead of Float or ComplexFloat, as in torch; "
        "read when the block of a definition begins, so it cannot be an option of a call: "
        "FusionDefinition(double_numbers=True) chooses it for one definition",
        "tune": "the first run of a kernel for a tuning class of inputs measures parameters near "
        "the heuristic's choice on these inputs; the best is kept on disk; programs on several "
        "ranks raise UnsupportedError",
        "late_stream": "late_stream(all), (entry) or (0) to (7): on the CPU the work of that "
        "stream is delayed as far as the program's waits allow, so that a missing wait can give "
        "wrong numbers",
    },
    "DISABLE": {
        "cuda_graphs": "every run on a GPU launches step by step; by default, repeated runs "
        "are captured as CUDA graphs and launched by one call",
        "compiled_runner": "every call runs in Python; by default, repeated calls are run by one "
        "function in C, if a C++ compiler and Python's headers are there to compile it",
        "allreduce_kernel": "allreduces of small tensors among the GPUs of a host use NCCL or "
        "peer copies, instead of one kernel; read at a team's first such allreduce",
        "horizontal_fusion": "small pointwise kernels that share nothing but inputs are launched "
        "one by one, instead of together",
        "clusters": "a reduction along rows that are too long for a block is several kernels, "
        "instead of one whose blocks run in clusters and read each other's shared memory",
        "auto_overlap": "no matmul overlaps a communication unless the definition says so",
        "kernel_reuse": "a kernel is used only for the sizes for which it was compiled, not for "
        "similar ones",
        "multidevice": "this process takes no part in a job; read when the communicator starts",
        "progress": "no progress line for a compilation of more than two seconds; by default, "
        "rank 0 draws one if its standard error is a terminal",
    },
    "PROF": {
        "enable": "every run is profiled (fuser.get_fusion_profile()): the program runs twice, "
        "step by step, with the results of one run",
        "enable.nocupti": "enable, with times from CUDA events, never from CUPTI",
        "print": "enable, and prints a table after each run; for PythonProfiler, at the end of its "
        "block",
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
_PROFILER = "FUSER_PROF=print shows the time of each kernel"
_SHAPES = "fd.repro_script_for(inputs) has shapes, strides and dtypes of the inputs"

# Names of nvFuser that existing programs use and that have no effect, each with the reason.
NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "DUMP": {
        **dict.fromkeys(
            """
            host_ir_jit ptx cubin sass sass_to_file ptxas_verbose segmenter_logging fusion_ir_graph
            draw_segmented_fusion transform_propagator inlining ca_map indexing_verbose index_type
            sync_map parallel_dimensions predicate_elimination lower_verbose expr_simplify
            expr_sort expr_sort_verbose bank_conflict buffer_reuse_verbose dynamic_shared_memory
            global_zeroed_memory occupancy ftrace cutlass_compile
            """.split(),
            _NO_OUTPUT,
        ),
        "fusion_ir_math": "fd.fusion.print_math() returns this text",
        "python_definition": "repr(fd) is this text",
        **dict.fromkeys(("fusion_args", "kernel_args"), _SHAPES),
        "launch_param": "FUSER_PROF=print shows grid and block of each kernel",
        "compile_params": "FUSER_DUMP=scheduler_params shows the parameters of each kernel",
        "scheduler_verbose": "FUSER_DUMP=scheduler_params shows the parameters of each kernel",
        "perf_debug_verbose": _PROFILER,
        "cuda_full": "fd.fec.get_cuda_kernel(inputs, intrinsic_code=True) returns this text",
        "cuda_to_file": "FUSER_DUMP=cuda_kernel writes files if FUSER_DUMP_DIR names a folder",
        "fusion_ir_presched": "FUSER_DUMP=segmented_fusion shows the ops of each segment",
        "pre_segmenter_logging": "FUSER_DUMP=fusion_ir_preseg shows the fusion after these passes",
    },
    "ENABLE": {
        "host_ir_lowering": _ONE_LOWERING,
        "host_ir_jit": _ONE_LOWERING,
        "insert_resharding_after": "decomposition decides where a resharding is inserted",
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
        "warn_register_spill": "CudaKernel.attributes() has the local bytes of a kernel",
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
        "parallel_compile": "one compiler process or a few threads compile a program's kernels",
        "nvrtc_caching": "compiled kernels are cached by content: to compile again, set "
        "FUSER_CACHE_DIR to an empty folder",
        "fma": "the compiler of each device decides about contraction",
        "index_hoist": _ALWAYS,
        "compile_to_sass": "kernels are always compiled to machine code",
        "fallback": "there is no fallback: a program that cannot be compiled raises an error",
        "nvtx": "no ranges are marked",
        "contig_indexing": _ALWAYS,
        "expr_simplify": _ALWAYS,
        "grouped_grid_welford_outer_opt": _ALWAYS,
        "magic_zero": _ALWAYS,
        "predicate_elimination": _ALWAYS,
        "reuse_mismatched_type_registers": _ALWAYS,
        "var_name_remapping": _ALWAYS,
        "welford_vectorization": _ALWAYS,
        "python_inline_definitions": "repr(fd) has one form",
    },
    "PROF": {},
}

# Names that one call cannot choose, and why: they affect the whole process, or how a definition is
# written.
_PROCESS_WIDE = "holds for the whole process: set it in FUSER_DISABLE, not for one call"
NOT_PER_CALL: Mapping[str, str] = {
    "allreduce_kernel": _PROCESS_WIDE,
    "multidevice": _PROCESS_WIDE,
    "progress": _PROCESS_WIDE,
    "double_numbers": "affects how a definition is written: pass it to FusionDefinition, or set it "
    "in FUSER_ENABLE before, not for one call",
}
# Name -> its possible arguments, where * is any text. A dump may have an argument, a feature must
# have one. Names that are not in the table take none.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "host_ir": ("short", "names", "indices"),
    "schedules_for": ("h200",),
    "machine": ("h200", "measured", "*.json"),
    "late_stream": ("all", "entry", *map(str, range(8))),
}


# ----------------------------------------------------------------------
# The environment variables, in one typed table.


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default and meaning.

    If the variable `name` is not set, `alias` is read, for example nvFuser's name. If `choices` is
    not empty, the value must be one of them.
    """

    name: str
    default: str | None
    meaning: str
    alias: str | None = None
    choices: tuple[str, ...] = ()

    def text(self) -> str | None:
        """Returns the value of the variable as text. An empty value counts as not set.

        Raises:
            OptionError: the value is not one of the choices.
        """
        value = os.environ.get(self.name) or (os.environ.get(self.alias) if self.alias else None)
        value = value or self.default
        if value is not None and self.choices and value not in self.choices:
            raise OptionError(
                f"{self.name}={value!r} is not one of {', '.join(self.choices)}"
                f"{_nearest(value, self.choices)}"
            )
        return value


_VARIABLES = (
    Variable(
        "FUSER_DUMP", None, "comma-separated dump names, each name or name(a,b)", "NVFUSER_DUMP"
    ),
    Variable("FUSER_DUMP_DIR", None, "folder for dumps, one numbered file each; default: stdout"),
    Variable("FUSER_DUMP_RANKS", "0", "ranks that write dumps: all, or numbers as in 0,3"),
    Variable("FUSER_ENABLE", None, "comma-separated features to turn on", "NVFUSER_ENABLE"),
    Variable("FUSER_DISABLE", None, "comma-separated features to turn off", "NVFUSER_DISABLE"),
    Variable("FUSER_PROF", None, "comma-separated profiler modes", "NVFUSER_PROF"),
    Variable(
        "FUSER_TIMEOUT_S", "60", "seconds after which a waiting communication raises an error"
    ),
    Variable("FUSER_CACHE_DIR", None, "folder of compiled kernels; default in the user's cache"),
    Variable("FUSER_MASTER_ADDR", None, "host of the store without MPI", "NVFUSER_MASTER_ADDR"),
    Variable("FUSER_MASTER_PORT", None, "port of the store without MPI", "NVFUSER_MASTER_PORT"),
    Variable(
        "FUSER_BACKEND", "auto", "communication of CPU ranks", choices=("auto", "mpi", "gloo")
    ),
    Variable("FUSER_NCCL", "auto", "Python binding of NCCL", choices=("auto", "nccl4py", "cupy")),
)
VARIABLES: Mapping[str, Variable] = {row.name: row for row in _VARIABLES}

# The list-valued variables, without `FUSER_`.
KINDS = tuple(EFFECTS)


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_environment() -> None:
    """Checks that every `FUSER_` variable that is set is known, and that its value is well-formed.

    Raises:
        OptionError: a variable, name or value is unknown. The message has the nearest known one.
    """
    for name in sorted(os.environ):
        if name.startswith("FUSER_") and name not in VARIABLES:
            raise OptionError(
                f"unknown environment variable {name}{_nearest(name, VARIABLES)}\n"
                f"Available variables: {', '.join(sorted(VARIABLES))}"
            )
    for variable in VARIABLES.values():
        variable.text()
    for kind in KINDS:
        _options(kind)
    silent = sorted(set(_options("DUMP")) & NO_EFFECT["DUMP"].keys())
    if silent:
        names: dict[str, list[str]] = {}
        for name in silent:
            names.setdefault(NO_EFFECT["DUMP"][name], []).append(name)
        warn(
            "FUSER_DUMP: nothing is printed for "
            + "; ".join(f"{', '.join(same)} ({why})" for why, same in names.items())
            + f"; available dumps: {', '.join(sorted(EFFECTS['DUMP']))}"
        )
    timeout_s()
    master_port()
    cache_dir()
    dump_ranks()
    dump_dir()


def timeout_s() -> float:
    """Returns the seconds after which a waiting communication raises `CommunicationTimeout`.

    Raises:
        OptionError: the value is not a positive number.
    """
    text = VARIABLES["FUSER_TIMEOUT_S"].text() or "60"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise OptionError(f"FUSER_TIMEOUT_S={text!r} is not a positive number of seconds")
    return value


def cache_dir() -> Path:
    """Returns the folder for compiled kernels, which may not exist yet.

    Raises:
        OptionError: the path begins with an unknown home folder.
    """
    text = VARIABLES["FUSER_CACHE_DIR"].text()
    try:
        if text is None:
            return platformdirs.user_cache_path("fuser-hostir", appauthor=False).expanduser()
        return Path(text).expanduser()
    except RuntimeError as error:
        given = "FUSER_CACHE_DIR is not set" if text is None else f"FUSER_CACHE_DIR={text!r}"
        raise OptionError(f"{given}: {error}") from None


def master_addr() -> str | None:
    """Returns the host of the store by which ranks of a job without MPI find each other.

    Returns None if the user has not chosen a host.
    """
    return VARIABLES["FUSER_MASTER_ADDR"].text()


def master_port() -> int | None:
    """Returns the port of the store by which ranks of a job without MPI find each other.

    Returns None if the user has not chosen a port.

    Raises:
        OptionError: the value is not a port number.
    """
    text = VARIABLES["FUSER_MASTER_PORT"].text()
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise OptionError(f"FUSER_MASTER_PORT={text!r} is not a port number (1 to 65535)")
    return int(text)


def backend() -> str:
    """Returns the communication backend chosen for CPU tensors: auto, mpi or gloo."""
    return VARIABLES["FUSER_BACKEND"].text() or "auto"


def nccl_binding() -> str:
    """Returns the Python binding chosen for NCCL: auto, nccl4py or cupy."""
    return VARIABLES["FUSER_NCCL"].text() or "auto"


def dump_enabled(name: str) -> bool:
    """Returns whether `FUSER_DUMP` contains the dump `name`.

    Raises:
        OptionError: a name in the variable, or `name` itself, is not a known dump.
    """
    return _lookup("DUMP", name) is not None


def dump_args(name: str) -> tuple[str, ...]:
    """Returns the arguments of a dump, such as ("short",) for `host_ir(short)`.

    The tuple is empty if the dump is not requested.
    """
    return _lookup("DUMP", name) or ()


def profiler_modes() -> frozenset[str]:
    """Returns the names in `FUSER_PROF`. The set is empty if nothing is profiled.

    Raises:
        OptionError: a name is unknown.
    """
    return frozenset(_options("PROF"))


def dump_ranks() -> frozenset[int] | None:
    """Returns the ranks that write dumps. Returns None if all ranks do.

    Raises:
        OptionError: the value is neither `all` nor a list of ranks.
    """
    text = VARIABLES["FUSER_DUMP_RANKS"].text() or "0"
    if text == "all":
        return None
    ranks = text.split(",")
    if not all(r.isascii() and r.isdigit() and len(r) < 10 for r in ranks):
        raise OptionError(f"FUSER_DUMP_RANKS={text!r} is neither 'all' nor ranks such as '0,3'")
    return frozenset(map(int, ranks))


def check_dump_ranks(size: int) -> None:
    """Warns if `FUSER_DUMP_RANKS` has ranks that a job of `size` ranks does not have."""
    missing = sorted(rank for rank in dump_ranks() or () if rank >= size)
    if missing and _options("DUMP"):
        here = "rank 0 alone" if size == 1 else f"ranks 0 to {size - 1}"
        warn(
            f"FUSER_DUMP_RANKS={VARIABLES['FUSER_DUMP_RANKS'].text()!r}: nothing is printed for "
            f"rank {', '.join(map(str, missing))}: this job has {here}",
        )


def dump_dir() -> Path | None:
    """Returns the folder for dumps, which may not exist yet. Returns None if dumps go to stdout.

    Raises:
        OptionError: the path exists and is not a folder.
    """
    text = VARIABLES["FUSER_DUMP_DIR"].text()
    if text is None:
        return None
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"FUSER_DUMP_DIR={text!r} is not a folder")
    return folder


@dataclass(frozen=True, eq=False)
class Settings:
    """The features that are turned on and off for one call.

    They result from the environment and from the options of the call. Equal settings are the same
    object, so settings are compared and hashed by identity.
    """

    enable: Mapping[str, tuple[str, ...]]
    disable: Mapping[str, tuple[str, ...]]

    def enabled(self, name: str) -> bool:
        """Returns whether a feature that is off by default is turned on."""
        return _known("ENABLE", name) in self.enable

    def disabled(self, name: str) -> bool:
        """Returns whether a feature that is on by default is turned off."""
        return _known("DISABLE", name) in self.disable

    def argument(self, name: str) -> str | None:
        """Returns the argument of an enabled feature, such as `h200` for `schedules_for(h200)`.

        Returns None if the feature is off.
        """
        return next(iter(self.enable.get(_known("ENABLE", name), ())), None)

    def __str__(self) -> str:
        def text(chosen: Mapping[str, tuple[str, ...]]) -> str:
            rows = (f"{n}({','.join(args)})" if args else n for n, args in sorted(chosen.items()))
            return ",".join(rows) or "nothing"

        return f"enabled {text(self.enable)}; disabled {text(self.disable)}"


def settings(enable: Iterable[str] = (), disable: Iterable[str] = ()) -> Settings:
    """Returns the features that are turned on and off for one call.

    They result from `FUSER_ENABLE`, `FUSER_DISABLE` and the options of the call.

    Raises:
        OptionError: a name is unknown, its arguments are wrong, or it cannot be an option of a
            call.
    """
    return _settings(
        VARIABLES["FUSER_ENABLE"].text() or "",
        VARIABLES["FUSER_DISABLE"].text() or "",
        _per_call("enable", enable),
        _per_call("disable", disable),
    )


@lru_cache(maxsize=256)
def _settings(
    enable_text: str, disable_text: str, enable: tuple[str, ...], disable: tuple[str, ...]
) -> Settings:
    per_call = [
        {name: args for option in options for name, args in _parse(kind, option).items()}
        for kind, options in (("ENABLE", enable), ("DISABLE", disable))
    ]
    for names in per_call:
        for name in sorted(NOT_PER_CALL.keys() & names.keys()):
            raise OptionError(f"{name} {NOT_PER_CALL[name]}")
    on = {**_parse("ENABLE", enable_text), **per_call[0]}
    off = {**_parse("DISABLE", disable_text), **per_call[1]}
    return _interned(
        tuple(sorted((n, args) for n, args in on.items() if n in EFFECTS["ENABLE"])),
        tuple(sorted((n, args) for n, args in off.items() if n in EFFECTS["DISABLE"])),
    )


@lru_cache(maxsize=256)
def _interned(
    enable: tuple[tuple[str, tuple[str, ...]], ...],
    disable: tuple[tuple[str, tuple[str, ...]], ...],
) -> Settings:
    return Settings(dict(enable), dict(disable))


# Settings in which no feature is chosen, independent of the environment.
NO_SETTINGS = _interned((), ())


def disabled(name: str) -> bool:
    """Returns whether `FUSER_DISABLE` turns a feature off for the whole process."""
    return settings().disabled(name)


# The default of a call: no options of its own.
NONE: tuple[str, ...] = ()


def _per_call(kind: str, options: Iterable[str]) -> tuple[str, ...]:
    """Checks the names of the options of one call, and returns the options as a tuple.

    `kind` is "enable" or "disable".

    Raises:
        OptionError: the options are not a list of names, or a name is unknown.
    """
    try:
        chosen = tuple(map(str, list_items(options, "names")))
    except Mismatch:
        raise OptionError(f"{kind} options must be a list of names, got {show(options)}") from None
    except Exception:  # a str may raise anything
        raise OptionError(f"{kind} options must be a list of names, got {show(options)}") from None
    known = known_names(kind.upper())
    for option in chosen:
        name = str(option).partition("(")[0]
        if name not in known:
            raise OptionError(
                f"Unrecognized {kind}_option: {option}{_nearest(name, known)}\n"
                f"Available options: {', '.join(sorted(EFFECTS[kind.upper()]))}"
                f"{user_code(user_line())}"
            )
    return chosen


def known_names(kind: str) -> frozenset[str]:
    """Returns every name that the environment variable `FUSER_<kind>` accepts.

    Names of nvFuser that have no effect are included.
    """
    return frozenset(EFFECTS[kind]) | frozenset(NO_EFFECT[kind])


def _known(kind: str, name: str) -> str:
    if name not in EFFECTS[kind]:
        raise OptionError(f"{name!r} is not a {kind} option{_nearest(name, EFFECTS[kind])}")
    return name


def _lookup(kind: str, name: str) -> tuple[str, ...] | None:
    if name not in known_names(kind):
        raise OptionError(f"{name!r} is not a {kind} option{_nearest(name, known_names(kind))}")
    return _options(kind).get(name)


def _options(kind: str) -> Mapping[str, tuple[str, ...]]:
    text = VARIABLES[f"FUSER_{kind}"].text()
    return _parse(kind, text) if text else {}


@lru_cache(maxsize=64)
def _parse(kind: str, text: str) -> Mapping[str, tuple[str, ...]]:
    """Parses `text`, the value `name,name(a,b),...` of the variable `FUSER_<kind>`, and returns the
    arguments of each name.

    Raises:
        OptionError: a name is unknown, or the syntax is wrong.
    """
    known = known_names(kind)
    found: dict[str, tuple[str, ...]] = {}
    rest = text
    while rest:
        stop = min((i for i in (rest.find(","), rest.find("(")) if i >= 0), default=len(rest))
        name, rest = rest[:stop], rest[stop:]
        if name not in known:
            raise OptionError(
                f"Parsing {kind} failed. Invalid option: '{name}'{_nearest(name, known)}\n"
                f"Available options: {', '.join(sorted(EFFECTS[kind])) or 'none'}; further names "
                "of nvFuser are accepted without effect (docs/reference/options.md)"
            )
        args: tuple[str, ...] = ()
        if rest.startswith("("):
            inside, closed, rest = rest[1:].partition(")")
            if not closed:
                raise OptionError(f"Parsing {kind} failed. Syntax error: unclosed '(' in {text!r}")
            args = tuple(inside.split(",")) if inside else ()
            if rest and not rest.startswith(","):
                raise OptionError(
                    f"Parsing {kind} failed. Syntax error: expect a ',' after ')' in {text!r}"
                )
        _check_arguments(kind, name, args)
        found[name] = args
        rest = rest[1:]
    return found


def _check_arguments(kind: str, name: str, args: tuple[str, ...]) -> None:
    """Checks the arguments `args` of the name `name` in the variable `FUSER_<kind>` against the
    table `ARGUMENTS`.

    If the name is a dump of nvFuser that has no effect here, any arguments are accepted.

    Raises:
        OptionError: the arguments are not in the table.
    """
    if kind == "DUMP" and (name in NO_EFFECT[kind] or not args):
        return
    choices = ARGUMENTS.get(name)
    if choices is None and args:
        raise OptionError(f"{name} takes no arguments, got {name}({','.join(args)})")
    if choices is None:
        return
    if len(args) != 1 or not any(fnmatchcase(args[0], choice) for choice in choices):
        wanted = " or ".join(f"{name}({c})" for c in choices)
        near = _nearest(args[0], choices) if len(args) == 1 else ""
        raise OptionError(f"{name}({','.join(args)}) is not known: expected {wanted}{near}")
