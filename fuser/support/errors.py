"""The error types. Every error that this project raises on purpose is a `FuserError`.

A message names the op, the tensor and the numbers (expected and found). If the line of the user's
program is known, the message has it, too. `assert` is only for bugs of this project.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType, TracebackType

# Frames of these packages are not the user's code. `contextlib` runs `with` blocks of ours.
_OWN_PACKAGES = frozenset({"fuser", "hostir", "multidevice", "contextlib"})


class FuserError(RuntimeError):
    """Base class of all errors that `fuser`, `multidevice` and `hostir` raise on purpose.

    `ranks` are the ranks that caused the error. The tuple is empty if the ranks have not compared
    their runs.
    """

    ranks: tuple[int, ...] = ()


class UnsupportedError(FuserError):
    """Raised if a request is meaningful, but this version does not implement it."""


class DefinitionError(FuserError, ValueError):
    """Raised if a fusion or a schedule is ill-formed: its shapes, axes, or the arguments of an
    op."""


class EmptyDefinitionError(DefinitionError, NotImplementedError):
    """Raised if a definition cannot run, because its `with` block is missing or it has no
    output."""


class OtherEntranceError(DefinitionError, AssertionError):
    """Raised if a definition is run by both `execute` and `manual_execute`.

    Also raised if one of the two is called under a profiler for the other.
    """


class NotCompiledError(FuserError):
    """Raised if a program is requested from a definition that has not run yet."""


class NoReproInputsError(FuserError, AssertionError):
    """Raised if a script for the last inputs is requested, but no call had
    `save_repro_inputs=True`."""


class ArgumentError(FuserError, TypeError):
    """Raised if an argument of a call has a type that the call does not accept."""


class NoOperandError(FuserError, IndexError):
    """Raised if an op has no input or output with the requested index."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """Raised for a name of nvFuser that this project does not have.

    The message names a replacement.
    """


class UnknownOpError(UnsupportedNameError):
    """Raised if there is no op with the requested name. The message shows the name to use."""


_LIBRARY = "a matmul is a library call here, and the library chooses its own parameters"
_KERNELS = "use fd.fec.get_cuda_kernel(inputs)"
_ON_DISK = "compiled kernels are always kept on disk (FUSER_CACHE_DIR)"
_COPY = "copy.copy(fd) returns an equal definition that has not run"
_BY_HAND = "a schedule by hand runs by fd.manual_execute; execute always schedules"
# The only table of names of nvFuser and its retired package `nvfuser` that do not exist here.
# Object -> name -> the name to use, or the reason. Ops are in `fuser.ops.rows.SPELLED`.
INSTEAD_OF_NVFUSER: Mapping[str, Mapping[str, str]] = {
    "fuser": {
        **dict.fromkeys(("MatmulParams", "GemmTile", "MatMulTileOptions", "ClusterDims"), _LIBRARY),
        **dict.fromkeys(("CircularBufferOptions", "SupportedVectorization"), _LIBRARY),
        **dict.fromkeys(("MmaMacro", "MmaMacroEncode", "MmaMacroArch"), _LIBRARY),
        **dict.fromkeys(("MatmulTilingStrategy", "MatmulBufferingLoopLevel"), _LIBRARY),
        **dict.fromkeys(("MatmulCircularBufferingStrategy",), _LIBRARY),
        **dict.fromkeys(("MatmulTileRasterizationOrder", "nvf_cutlass"), _LIBRARY),
        "FusionCache": "each definition has its programs in fd.fec, and equal definitions share "
        "them; fuser.LruFusionCache keeps definitions",
        "clone": _COPY,
        "compute_contiguity": "use fuser.compute_tensor_descriptor, which also returns the order "
        "of the strides",
        **dict.fromkeys(("serialize", "enable_automatic_serialization"), _ON_DISK),
    },
    "fd": {
        **dict.fromkeys(("last_cuda_code", "cuda_code_for"), _KERNELS),
        "last_scheduled_fusion_ir": "use fd.fec.get_most_recent_scheduled_ir()",
        "scheduled_fusion_ir_for": "use fd.fec.get_scheduled_ir(inputs)",
        "fusion_ir": "use fd.fusion.print_math()",
        "profile": "use fuser.PythonProfiler, a context manager around execute",
        "id": "definitions have no number; equal fusions compare equal, fd.fusion == other.fusion",
        "clone": _COPY,
        "debug_output": "dumps are written to files in FUSER_DUMP_DIR",
        "define_constant": "it is called define_scalar, which takes the value",
        "schedule": "it is called sched",
    },
    "fd.fec": {
        **dict.fromkeys(("print_fusion", "print_math"), "use fd.fusion.print_math()"),
        **dict.fromkeys(("last_cuda_code", "cuda_code_for"), _KERNELS),
    },
    "fd.execute": {
        "profile": "use `with fuser.PythonProfiler() as prof:` around the call",
        **dict.fromkeys(("auto_schedule", "override_user_schedule"), _BY_HAND),
        "print_repro": "print fd.repro_script_for(inputs)",
        "capture_debug_output": "FUSER_DUMP chooses dumps, and FUSER_DUMP_DIR the folder of their "
        "files",
    },
    "fd.add_output": {
        "stride_order": "write fd.add_output(fd.ops.stride_order(y, order))",
    },
}


def advice_on_nvfuser(owner: str, name: str) -> str:
    """Returns the name to use instead of `owner.name`, a name that only nvFuser has.

    `owner` is `fuser`, `fd`, `fd.fec`, or a method such as `fd.execute`. Returns "" for all other
    names.
    """
    return INSTEAD_OF_NVFUSER.get(owner, {}).get(name, "")


class IntegerRangeError(DefinitionError, TypeError):
    """Raised if an integer does not fit into 64 bits."""


class ValidationError(FuserError, AssertionError):
    """Raised if a result differs from torch's result, or from the caller's reference."""


class DtypeError(FuserError, TypeError):
    """Raised if an operand has a dtype that the op does not accept."""


class UnknownDtypeError(DtypeError, KeyError):
    """Raised if a torch dtype, or a Python type, has no counterpart in `DataType`."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class InputError(FuserError, ValueError):
    """Raised if the inputs of a run do not fit the program: their number, dimensions, dtype, device
    or size."""


class DivisionByZeroError(InputError, ZeroDivisionError):
    """Raised if the value of a scalar in a run is an integer divided by 0.

    The message names the scalar and its symbols.
    """


class ShardingError(FuserError, ValueError):
    """Raised if a mesh, a sharding or a resharding is impossible or inconsistent."""


class DTensorError(ShardingError, AssertionError):
    """Raised if a DTensor has another mesh or sharding than the program's input, or if a result
    cannot be a DTensor."""


class VerifyError(FuserError):
    """Raised if a program in one of our IRs violates an invariant. The message shows the line."""


class ParseError(FuserError, ValueError):
    """Raised if a program text does not follow the grammar. The message shows line and column."""


class OptionError(FuserError, ValueError):
    """Raised if an option or environment variable has an unknown name or an invalid value."""


class CompileError(FuserError):
    """Raised if the kernel compiler rejects a generated kernel.

    The message has the compiler's log.
    """


class NoCompilerError(CompileError):
    """Raised if the machine has no working compiler. The message says what to install or to set."""


class KernelError(FuserError):
    """Raised if a kernel fails while it runs.

    The device reports the error, or checked mode (kernels with additional checks) finds it.
    """


class ExecutionError(FuserError):
    """Raised if an op of a host program fails while it runs.

    The message names the op and the cause.
    """


class CommunicationError(FuserError):
    """Raised if a communication between ranks fails."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """Raised if a communication does not complete within its time limit (`FUSER_TIMEOUT_S`)."""


class DeadlockError(CommunicationError):
    """Raised if ranks wait for each other, so that no rank can continue.

    The message shows the position of every rank.
    """

    # For each rank, the sequences of calls in which it waits: kind, team, ends of a transfer.
    keys: Mapping[int, Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
        {}
    )
    # Whether the last call of one of these ranks failed.
    is_after_failure = False


class PeerError(CommunicationError):
    """Raised if another rank has failed. The message names that rank and its error."""


class ProgramMismatchError(CommunicationError):
    """Raised if the ranks are about to run different programs.

    The message shows the first difference.
    """


def is_users(frame: FrameType) -> bool:
    """Returns whether a stack frame runs code of the user, outside our packages."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN_PACKAGES


def is_users_comparison() -> bool:
    """Returns whether user code called the method that calls this function, such as `__eq__`.

    The compiler and the containers of the standard library also call such methods, but they compare
    objects, not values.
    """
    module = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return module not in _OWN_PACKAGES and module not in sys.stdlib_module_names


def user_line() -> str:
    """Returns the user's source line, as `file.py:12`: that of the innermost frame outside our
    packages.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Issues a warning that Python shows with the user's source line.

    The warning belongs to the user's module, not to ours, so that a filter for that module applies
    to it.
    """
    level, frame = 2, sys._getframe(1)
    while frame is not None and not is_users(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def last_user_line(trace: TracebackType | None) -> str:
    """Returns the user's source line in a traceback, as `file.py:12`.

    The line is that of the innermost frame outside our packages. If all frames are in our packages,
    it is the line of the innermost frame.
    """
    found = ""
    is_found = False
    while trace is not None:
        here = is_users(trace.tb_frame)
        if here or not is_found:
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        is_found |= here
        trace = trace.tb_next
    return found


def user_code(where: str) -> str:
    """Returns the end of an error message, ` (user code at file.py:12)`, for the source line
    `where`.

    Returns "" if the line is unknown.
    """
    return f" (user code at {where})" if where else ""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, for messages: `1 axis`, `2 axes`, `0 loop axes`.

    `noun` is in the singular.
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns the plural of a noun: `axes` for `axis`, `entries` for `entry`."""
    for end, ends in (("axis", "axes"), ("index", "indices"), ("matrix", "matrices")):
        if noun.endswith(end):
            return noun.removesuffix(end) + ends
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "sh", "ch", "x")) else f"{noun}s"


def padding_words(extent: int, multiple: int) -> str:
    """Returns the end of a message about an extent that is no multiple of `multiple`: what the user
    can do.

    Example for 127 and 2: `: pad it to 128, or use a number of ranks that divides 127`.
    """
    padded = -(-extent // multiple) * multiple
    return f": pad it to {padded}, or use a number of ranks that divides {extent}"
