"""What a program needs of the job that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.support.errors import ExecutionError, ShardingError, UnsupportedError, user_code
from fuser.support.options import Settings
from hostir.ir.program import HostIrContainer, walk
from hostir.ir.transfers import EndCoalescing, P2PCommunication, StartCoalescing


def read_late_stream(late: str | int | None) -> str | int | None:
    """Return which stream's work is held back: a number, "entry", "all", or None.

    Raises `ExecutionError` for anything else.
    """
    if isinstance(late, str) and late.isascii() and late.isdigit():
        return int(late)
    is_number = type(late) is int and late >= 0
    if not is_number and late not in (None, "all", "entry"):
        raise ExecutionError(f"late_stream={late!r}: the number of a stream, 'entry' or 'all'")
    return late


def check_grouped(program: HostIrContainer) -> None:
    """Raise `UnsupportedError` for a send or a receive of its own: where streams start them later
    than the program says, only simulated ranks know which ones belong together."""
    is_grouped = False
    for op in walk(program.ops):
        if isinstance(op, StartCoalescing | EndCoalescing):
            is_grouped = isinstance(op, StartCoalescing)
        elif isinstance(op, P2PCommunication) and not is_grouped:
            raise UnsupportedError(
                f"late_stream: {op.name} is in no group, which only simulated ranks can hold back: "
                f"use multidevice.simulate{user_code(op.where)}"
            )


def check_devices(program: HostIrContainer, size: int) -> None:
    """Raise `ShardingError` when a mesh names a rank that a job of `size` ranks lacks."""
    for tv in program.tensors():
        if tv.mesh is not None and max(tv.mesh.devices, default=0) >= size:
            raise ShardingError(
                f"{tv.mesh} of {tv.label} names rank {max(tv.mesh.devices)}, but the job has "
                f"{size} rank{'s' if size != 1 else ''}"
            )


def check_tuning(settings: Settings, team: Sequence[int]) -> bool:
    """Return whether the option `tune` is on. Raise `UnsupportedError` for a program of several
    ranks: what each finds fastest is its own, and replicated tensors equal in every bit."""
    is_on = settings.enabled("tune")
    if is_on and len(team) > 1:
        raise UnsupportedError(
            f"tune: this program runs on {len(team)} ranks, whose kernels have to be the same on "
            "all: the option is for programs of one rank"
        )
    return is_on
