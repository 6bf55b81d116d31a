"""What a program needs of the job that runs it."""

from __future__ import annotations

from fuser.errors import ShardingError, UnsupportedError, user_code
from hostir.container import HostIrContainer, walk
from hostir.transfers import EndCoalescing, P2PCommunication, StartCoalescing


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
