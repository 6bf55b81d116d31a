"""Every option that comes from the environment or from one call, in one typed table.

`FUSER_X` is the name of a variable; the rows that have an alias also accept `NVFUSER_X`, and the
first name wins where both are set. An unknown `FUSER_` variable, an unknown name inside a list,
or an impossible value raises `OptionError` with the nearest known name. Values are read at each
call, so a test may set a variable and see it at once; parsing a list is cached by its text.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fuser.errors import OptionError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its names in order of precedence, its default and its meaning."""

    name: str
    default: str | None
    meaning: str
    alias: str | None = None
    choices: tuple[str, ...] = ()

    def text(self) -> str | None:
        """Returns the raw value; an empty value counts as not set.

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
    Variable("FUSER_ENABLE", None, "comma-separated features to turn on", "NVFUSER_ENABLE"),
    Variable("FUSER_DISABLE", None, "comma-separated features to turn off", "NVFUSER_DISABLE"),
    Variable("FUSER_PROF", None, "comma-separated profiler modes", "NVFUSER_PROF"),
    Variable("FUSER_TIMEOUT_S", "60", "seconds until a communication that waits is an error"),
    Variable("FUSER_CACHE_DIR", None, "folder of compiled kernels; default in the user's cache"),
    Variable("FUSER_MASTER_ADDR", None, "host of the store without MPI", "NVFUSER_MASTER_ADDR"),
    Variable("FUSER_MASTER_PORT", None, "port of the store without MPI", "NVFUSER_MASTER_PORT"),
    Variable(
        "FUSER_BACKEND", "auto", "communication of CPU ranks", choices=("auto", "mpi", "gloo")
    ),
    Variable("FUSER_NCCL", "auto", "Python binding of NCCL", choices=("auto", "nccl4py", "cupy")),
)
VARIABLES: Mapping[str, Variable] = {row.name: row for row in _VARIABLES}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DUMP_NAMES = _names(
    """
    host_ir host_ir_lowering host_ir_jit communication fusion_ir_preseg pre_segmenter_logging
    segmented_fusion fusion_ir_concretized fusion_ir_presched fusion_ir fusion_ir_math
    fusion_ir_original python_definition fusion_args kernel_args launch_param compile_params
    cuda_kernel cuda_full cuda_to_file kernel_ir ptx cubin sass sass_to_file ptxas_verbose
    perf_debug_verbose scheduler_params scheduler_verbose segmenter_logging fusion_ir_graph
    draw_segmented_fusion transform_propagator inlining ca_map indexing_verbose index_type
    sync_map parallel_dimensions predicate_elimination lower_verbose expr_simplify expr_sort
    expr_sort_verbose bank_conflict buffer_reuse_verbose dynamic_shared_memory
    global_zeroed_memory occupancy ftrace cutlass_compile
    """
)

# The dumps that this version prints; the others are nvFuser's names, accepted with a warning.
PRINTED_DUMPS = frozenset(
    """
    host_ir fusion_ir_concretized fusion_ir_preseg segmented_fusion scheduler_params fusion_ir
    kernel_ir cuda_kernel
    """.split()
)

ENABLE_NAMES = _names(
    """
    host_ir_lowering host_ir_jit insert_resharding_after p2p_protocol p2p_transport
    multicast_protocol wait_debugger fuse_matmul fuse_multiple_matmuls cutlass_scheduler
    kernel_profile kernel_debug kernel_lineinfo kernel_db static_fusion_count
    warn_register_spill fast_math reuse_zeroed_memory memory_promotion io_to_lower_precision
    id_model_extra_validation tma_pointwise tma_inner_persistent tma_reduction ws_normalization
    """
)

DISABLE_NAMES = _names(
    """
    multidevice infer_contiguity resize_scheduler greedy_scheduler matmul_expr_eval kernel_reuse
    parallel_compile nvrtc_caching compile_to_sass fallback nvtx contig_indexing expr_simplify
    fma grouped_grid_welford_outer_opt index_hoist magic_zero predicate_elimination
    reuse_mismatched_type_registers var_name_remapping welford_vectorization
    python_inline_definitions
    """
)

PROF_NAMES = frozenset({"enable", "enable.nocupti", "print", "print.nocupti", "print.verbose"})

# The list-valued variables: which names each of them knows.
_LISTS: Mapping[str, frozenset[str]] = {
    "DUMP": DUMP_NAMES,
    "ENABLE": ENABLE_NAMES,
    "DISABLE": DISABLE_NAMES,
    "PROF": PROF_NAMES,
}


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_environment() -> None:
    """Checks that every set `FUSER_` variable is known and that every list in them is well-formed.

    Raises:
        OptionError: an unknown variable, name or value, with the nearest known one.
    """
    for name in sorted(os.environ):
        if name.startswith("FUSER_") and name not in VARIABLES:
            raise OptionError(
                f"unknown environment variable {name}{_nearest(name, VARIABLES)}\n"
                f"Available variables: {', '.join(sorted(VARIABLES))}"
            )
    for variable in VARIABLES.values():
        variable.text()
    for kind in _LISTS:
        _options(kind)
    silent = sorted(set(_options("DUMP")) - PRINTED_DUMPS)
    if silent:
        warnings.warn(
            f"FUSER_DUMP: nothing is printed yet for {', '.join(silent)}; "
            f"these are: {', '.join(sorted(PRINTED_DUMPS))}",
            stacklevel=2,
        )
    timeout_s()
    master_port()


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
    """Returns the folder of compiled kernels; the folder need not exist yet."""
    text = VARIABLES["FUSER_CACHE_DIR"].text()
    if text is not None:
        return Path(text).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fuser-hostir"


def master_addr() -> str | None:
    """Returns the host of the job's store, if the user chose one."""
    return VARIABLES["FUSER_MASTER_ADDR"].text()


def master_port() -> int | None:
    """Returns the port of the job's store, if the user chose one.

    Raises:
        OptionError: the value is not a port number.
    """
    text = VARIABLES["FUSER_MASTER_PORT"].text()
    if text is None:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise OptionError(f"FUSER_MASTER_PORT={text!r} is not a port number (1 to 65535)")
    return int(text)


def backend() -> str:
    """Returns the backend chosen for CPU tensors: auto, mpi or gloo."""
    return VARIABLES["FUSER_BACKEND"].text() or "auto"


def nccl_binding() -> str:
    """Returns the Python binding chosen for NCCL: auto, nccl4py or cupy."""
    return VARIABLES["FUSER_NCCL"].text() or "auto"


def dump_enabled(name: str) -> bool:
    """Returns whether `FUSER_DUMP` names this dump.

    Raises:
        OptionError: the variable's text, or `name` itself, is not a known dump.
    """
    return _lookup("DUMP", name) is not None


def dump_args(name: str) -> tuple[str, ...]:
    """Returns the arguments of a dump, as in `host_ir(indices)`; empty when absent."""
    return _lookup("DUMP", name) or ()


def enabled(name: str, per_call: Iterable[str] = ()) -> bool:
    """Returns whether a feature is on, by `FUSER_ENABLE` or by the options of one call."""
    return _lookup("ENABLE", name) is not None or name in per_call


def disabled(name: str, per_call: Iterable[str] = ()) -> bool:
    """Returns whether a feature is off, by `FUSER_DISABLE` or by the options of one call."""
    return _lookup("DISABLE", name) is not None or name in per_call


def check_enable_options(options: Iterable[str]) -> frozenset[str]:
    """Returns the enable options of one call as a set.

    Raises:
        OptionError: a name is unknown (`Unrecognized enable_option: <x>`).
    """
    return _per_call("enable", options, ENABLE_NAMES)


def check_disable_options(options: Iterable[str]) -> frozenset[str]:
    """Returns the disable options of one call as a set.

    Raises:
        OptionError: a name is unknown (`Unrecognized disable_option: <x>`).
    """
    return _per_call("disable", options, DISABLE_NAMES)


def _per_call(kind: str, options: Iterable[str], known: frozenset[str]) -> frozenset[str]:
    if isinstance(options, str):
        raise OptionError(f"{kind} options are a list of names, not the string {options!r}")
    chosen = tuple(options)
    for name in chosen:
        if name not in known:
            hint = _nearest(str(name), known)
            raise OptionError(f"Unrecognized {kind}_option: {name}{hint}")
    return frozenset(chosen)


def _lookup(kind: str, name: str) -> tuple[str, ...] | None:
    if name not in _LISTS[kind]:
        raise OptionError(f"{name!r} is not a {kind} option{_nearest(name, _LISTS[kind])}")
    return _options(kind).get(name)


def _options(kind: str) -> Mapping[str, tuple[str, ...]]:
    text = VARIABLES[f"FUSER_{kind}"].text()
    return _parse(kind, text) if text else {}


@lru_cache(maxsize=64)
def _parse(kind: str, text: str) -> Mapping[str, tuple[str, ...]]:
    """Parses `name,name(a,b),...` into a map from name to arguments."""
    known = _LISTS[kind]
    found: dict[str, tuple[str, ...]] = {}
    rest = text
    while rest:
        stop = min((i for i in (rest.find(","), rest.find("(")) if i >= 0), default=len(rest))
        name, rest = rest[:stop], rest[stop:]
        if name not in known:
            raise OptionError(
                f"Parsing {kind} failed. Invalid option: '{name}'{_nearest(name, known)}\n"
                f"Available options: {', '.join(sorted(known))}"
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
        found[name] = args
        rest = rest[1:]
    return found
