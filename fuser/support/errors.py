"""The error hierarchy: every error that this project raises on purpose is a `FuserError`.

An error names the op, the tensor, the numbers (expected and found) and, where it is known, the line
of the user's program. `assert` is kept for our own bugs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType, TracebackType

# What opens a `with` block of ours is no code of the user.
_OWN_PACKAGES = frozenset({"fuser", "hostir", "multidevice", "contextlib"})


class FuserError(RuntimeError):
    """Base of all errors raised on purpose by `fuser`, `multidevice` and `hostir`.

    `ranks` are those on which the cause lies, where the ranks have compared; else it is empty.
    """

    ranks: tuple[int, ...] = ()


class UnsupportedError(FuserError):
    """The request is meaningful, but this version does not implement it."""


class DefinitionError(FuserError, ValueError):
    """A fusion or a schedule is ill-formed: shapes, axes, arguments of an op."""


class EmptyDefinitionError(DefinitionError, NotImplementedError):
    """A definition that was never written, or has no output, is to run."""


class OtherEntranceError(DefinitionError, AssertionError):
    """A definition runs by `execute` or by `manual_execute`, not by both."""


class NotCompiledError(FuserError):
    """A definition is asked about a program that it has not made yet."""


class NoReproInputsError(FuserError, AssertionError):
    """A script is asked for with the inputs of the last call, which were not to be remembered."""


class ArgumentError(FuserError, TypeError):
    """An argument of a call is of a kind that the call does not take."""


class NoOperandError(FuserError, IndexError):
    """An op has no input or output of that number."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """A name of nvFuser's that this project does not have; the message says what to use."""


class UnknownOpError(UnsupportedNameError):
    """There is no op of that name; the message shows how it is spelled."""


class IntegerRangeError(DefinitionError, TypeError):
    """An integer has no place in 64 bits."""


class ValidationError(FuserError, AssertionError):
    """A result is not what torch computes, or what the caller expects."""


class DtypeError(FuserError, TypeError):
    """An operand has a dtype that the op does not accept."""


class UnknownDtypeError(DtypeError, KeyError):
    """A torch dtype, or a type of Python, has no counterpart here."""

    __str__ = Exception.__str__  # not quoted, as a key would be


class InputError(FuserError, ValueError):
    """The runtime inputs do not fit the program: count, rank, dtype, device, extent."""


class DivisionByZeroError(InputError, ZeroDivisionError):
    """The integer scalars of a run divide by 0; the message names the scalar and its symbols."""


class ShardingError(FuserError, ValueError):
    """A mesh, a sharding or a resharding is impossible or inconsistent."""


class DTensorError(ShardingError, AssertionError):
    """A DTensor does not lie as the program has its input, or a result can be none."""


class VerifyError(FuserError):
    """A program in one of our IRs breaks an invariant; the text marks the line."""


class ParseError(FuserError, ValueError):
    """A program text does not follow the grammar; the message marks line and column."""


class OptionError(FuserError, ValueError):
    """An option or environment variable has an unknown name or an impossible value."""


class CompileError(FuserError):
    """A generated kernel was refused by the kernel compiler; the message holds its log."""


class NoCompilerError(CompileError):
    """The machine has no compiler that works; the message says what to install or to set."""


class KernelError(FuserError):
    """A kernel failed while running: a checked-mode finding or a device error."""


class ExecutionError(FuserError):
    """An op of a host program failed while running; the message holds the op and the cause."""


class CommunicationError(FuserError):
    """A communication could not be carried out."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """A communication did not complete within its deadline."""


class DeadlockError(CommunicationError):
    """No rank can run any more; the message shows the position of every rank."""

    # The streams of calls in which each of these ranks waits: kind, team, ends of a transfer.
    keys: Mapping[int, Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
        {}
    )
    # Whether the last call of any of them failed there.
    is_after_failure = False


class PeerError(CommunicationError):
    """Another rank failed; the message names the rank and its error."""


class ProgramMismatchError(CommunicationError):
    """The ranks were about to run different programs; the message shows the first difference."""


def is_users(frame: FrameType) -> bool:
    """Returns whether a frame is outside our packages."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN_PACKAGES


def is_users_comparison() -> bool:
    """Returns whether the caller, the method of `==` or of truth, was called by a user's code: the
    compiler and the containers of the standard library ask for objects, not for values."""
    module = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return module not in _OWN_PACKAGES and module not in sys.stdlib_module_names


def user_line() -> str:
    """Returns `file.py:12` of the innermost frame outside our packages."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warns at the user's line: Python shows that line, and its filters go by its module."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and not is_users(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def last_user_line(trace: TracebackType | None) -> str:
    """Returns `file.py:12` of the innermost frame of a traceback outside our packages, else of the
    innermost one."""
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
    """Returns what a message ends in that knows the user's line; "" for an unknown one."""
    return f" (user code at {where})" if where else ""
