"""The error types: every error that this project raises on purpose is a `FuserError`.

A message names the op, the tensor, the numbers (expected and found) and, if it is known, the line
of the user's program. `assert` is kept for bugs of this project.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType, TracebackType

# Frames of these packages are not the user's code. `contextlib` runs `with` blocks of ours.
_OWN_PACKAGES = frozenset({"fuser", "hostir", "multidevice", "contextlib"})


class FuserError(RuntimeError):
    """Base of all errors raised on purpose by `fuser`, `multidevice` and `hostir`.

    `ranks` are the ranks that caused the error, if the ranks have compared; else it is empty.
    """

    ranks: tuple[int, ...] = ()


class UnsupportedError(FuserError):
    """The request is meaningful, but this version does not implement it."""


class DefinitionError(FuserError, ValueError):
    """A fusion or a schedule is ill-formed: shapes, axes, arguments of an op."""


class EmptyDefinitionError(DefinitionError, NotImplementedError):
    """A definition cannot run, because it was never written or has no output."""


class OtherEntranceError(DefinitionError, AssertionError):
    """A definition was run by `execute` and by `manual_execute`. Only one of them is allowed."""


class NotCompiledError(FuserError):
    """A program was requested from a definition that has not run yet."""


class NoReproInputsError(FuserError, AssertionError):
    """No call was made with `save_repro_inputs=True`, so no script can be written for its
    inputs."""


class ArgumentError(FuserError, TypeError):
    """An argument of a call has a type that the call does not accept."""


class NoOperandError(FuserError, IndexError):
    """An op has no input or output with this number."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """A name of nvFuser that this project does not have; the message says what to use instead."""


class UnknownOpError(UnsupportedNameError):
    """There is no op with this name; the message shows the name to use."""


class IntegerRangeError(DefinitionError, TypeError):
    """An integer does not fit into 64 bits."""


class ValidationError(FuserError, AssertionError):
    """A result differs from torch's, or from the one that the caller expects."""


class DtypeError(FuserError, TypeError):
    """An operand has a dtype that the op does not accept."""


class UnknownDtypeError(DtypeError, KeyError):
    """A torch dtype, or a Python type, has no counterpart in `DataType`."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class InputError(FuserError, ValueError):
    """The inputs of a run do not fit the program: number, rank, dtype, device or size."""


class DivisionByZeroError(InputError, ZeroDivisionError):
    """An integer division by 0 among the scalars of a run; the message names the scalar and its
    symbols."""


class ShardingError(FuserError, ValueError):
    """A mesh, a sharding or a resharding is impossible or inconsistent."""


class DTensorError(ShardingError, AssertionError):
    """A DTensor has another mesh or sharding than the program's input, or a result cannot be a
    DTensor."""


class VerifyError(FuserError):
    """A program in one of our IRs violates an invariant; the message marks the line."""


class ParseError(FuserError, ValueError):
    """A program text does not follow the grammar; the message marks line and column."""


class OptionError(FuserError, ValueError):
    """An option or environment variable has an unknown name or an impossible value."""


class CompileError(FuserError):
    """The kernel compiler rejected a generated kernel; the message has its log."""


class NoCompilerError(CompileError):
    """The machine has no working compiler; the message says what to install or to set."""


class KernelError(FuserError):
    """A kernel failed while it ran: a finding of the checked mode, or an error of the device."""


class ExecutionError(FuserError):
    """An op of a host program failed while it ran; the message names the op and the cause."""


class CommunicationError(FuserError):
    """A communication failed."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """A communication did not complete within its deadline."""


class DeadlockError(CommunicationError):
    """No rank can continue; the message shows the position of every rank."""

    # For each rank, the sequences of calls in which it waits: kind, team, ends of a transfer.
    keys: Mapping[int, Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
        {}
    )
    # Whether the last call of one of these ranks failed.
    is_after_failure = False


class PeerError(CommunicationError):
    """Another rank failed; the message names the rank and its error."""


class ProgramMismatchError(CommunicationError):
    """The ranks were about to run different programs; the message shows the first difference."""


def is_users(frame: FrameType) -> bool:
    """Returns whether a frame runs code outside our packages."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN_PACKAGES


def is_users_comparison() -> bool:
    """Returns whether user code called the caller, which is a method of `==` or of truth.

    The compiler and the containers of the standard library compare objects, not values.
    """
    module = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return module not in _OWN_PACKAGES and module not in sys.stdlib_module_names


def user_line() -> str:
    """Returns the line of the innermost frame outside our packages, as `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Issues a warning at the user's line. Python shows this line, and its filters use its
    module."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and not is_users(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def last_user_line(trace: TracebackType | None) -> str:
    """Returns the line of the innermost frame of a traceback outside our packages, as `file.py:12`.

    Without such a frame, it is the line of the innermost frame.
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
    """Returns the end of a message, which has the user's line; "" for an unknown line."""
    return f" (user code at {where})" if where else ""
