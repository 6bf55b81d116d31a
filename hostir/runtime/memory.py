"""Buffers that a program allocates, and the errors where there is no memory, or an op fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser.ir.dtypes import nbytes_of, to_torch
from fuser.ir.op import Op, op_text
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType
from fuser.support.errors import ExecutionError, FuserError, user_code
from hostir.ir.ops import Allocate, LaunchKernel
from hostir.ir.program import HostIrContainer, walk
from hostir.ir.shard_layout import allocated_strides, spanned


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """There is no memory for a tensor; the message names op, tensor and bytes."""


def op_failed(op: Op, error: Exception) -> ExecutionError:
    """Return the error of an op that torch refused; torch knows neither the op nor its line."""
    kind = OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else ExecutionError
    return kind(
        f"{op.name} failed ({type(error).__name__}: {error}){user_code(op.where)}:\n{op_text(op)}"
    )


def guarded(op: Op, work: Callable[[], object]) -> None:
    """Do the work of an op; raises `ExecutionError` naming op and user line where torch refuses."""
    try:
        work()
    except FuserError:
        raise
    except Exception as error:  # torch raises errors of every kind
        raise op_failed(op, error) from error


def new_buffer(
    program: HostIrContainer,
    tv: TensorView,
    shape: Sequence[int],
    device: torch.device,
    symmetric: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Return memory for a tensor of this local shape; `symmetric` makes what peers can map.

    Raises `OutOfMemoryError` where there is none, whatever torch says then.
    """
    strides, dtype = allocated_strides(tv, shape), to_torch(tv.dtype())
    try:
        if tv.memory is MemoryType.symmetric and device.type != "meta":
            room = symmetric(spanned(shape, strides) * dtype.itemsize)
            return room.view(dtype).as_strided(tuple(shape), strides)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        raise no_memory(program, tv, shape, device) from error


def no_memory(
    program: HostIrContainer, tv: TensorView, shape: Sequence[int], device: torch.device
) -> OutOfMemoryError:
    """Return the error of a tensor of this local shape that cannot be allocated."""
    name, where = _maker(program, tv)
    nbytes = spanned(shape, allocated_strides(tv, shape)) * nbytes_of(tv.dtype())
    place = "" if device.type == "meta" else f" on {device}"  # found before anything was run
    return OutOfMemoryError(
        f"{name}: no memory for {tv} of shape {tuple(shape)}, {nbytes} bytes{place}"
        f"{user_code(where)}"
    )


def _maker(program: HostIrContainer, tv: TensorView) -> tuple[str, str]:
    """Return the name of the op that computes `tv`, and the user's line."""
    for op in walk(program.ops):
        if isinstance(op, Allocate) or tv not in op.outputs:
            continue
        if isinstance(op, LaunchKernel):
            exprs = program.groups[op.group].fusion.exprs
            found = [e for e in exprs if any(o.number == tv.number for o in e.outputs)]
            op = found[0] if found else op
        return op.name.removesuffix("Op").lower(), op.where
    return "allocate", ""
