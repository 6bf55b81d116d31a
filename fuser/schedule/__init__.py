"""Scheduling: primitives on tensors, their propagation, and the automatic schedulers.

The functions here are public: users write `fuser.schedule.transform_like(tv)` and the like. The
transforms of one tensor (`split`, `merge`, ...) are methods of `TensorView`, and also functions
here with the tensor first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import NoReturn

from fuser.arguments import checked
from fuser.errors import UnsupportedError
from fuser.ir.primitives import cache_after, cache_before, cache_fork, rfactor
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.schedule.automatic import (
    SchedulerType,
    can_schedule,
    compute_heuristics,
    find_compatible_schedulers,
    schedule,
)
from fuser.schedule.facts import Facts
from fuser.schedule.inline import inline_at, inline_most
from fuser.schedule.propagate import (
    bounded_transform_backward,
    parallelize_like,
    transform_like,
)
from fuser.schedule.registry import SCHEDULERS, find_scheduler, rejections, scheduler

__all__ = [
    "SCHEDULERS",
    "Facts",
    "SchedulerType",
    "bounded_transform_backward",
    "cache_after",
    "cache_before",
    "cache_fork",
    "can_schedule",
    "compute_heuristics",
    "find_compatible_schedulers",
    "find_scheduler",
    "inline_at",
    "inline_most",
    "merge",
    "parallelize",
    "parallelize_like",
    "rejections",
    "reorder",
    "rfactor",
    "schedule",
    "scheduler",
    "set_memory_type",
    "split",
    "transform_like",
    "warp_specialize",
]


def split(tv: TensorView, dim: int, factor: Scalar | int, inner_split: bool = True) -> TensorView:
    """Split loop axis `dim`; see `TensorView.split`."""
    return tv.split(dim, factor, inner_split)


def merge(tv: TensorView, axis_o: int, axis_i: int | None = None) -> TensorView:
    """Merge two loop axes; see `TensorView.merge`."""
    return tv.merge(axis_o, axis_i)


def reorder(tv: TensorView, old2new: Mapping[int, int] | Sequence[tuple[int, int]]) -> TensorView:
    """Move loop axes; see `TensorView.reorder`."""
    return tv.reorder(dict(old2new))


def parallelize(tv: TensorView, axis: int, parallel_type: ParallelType) -> None:
    """Give loop axis `axis` a parallel type."""
    tv.axis(axis).parallelize(parallel_type)


def set_memory_type(tv: TensorView, memory_type: MemoryType) -> None:
    """Move a tensor to another memory; see `TensorView.set_memory_type`."""
    tv.set_memory_type(memory_type)


def warp_specialize(
    tv: TensorView,
    number_of_stages: int,
    prefetch_distance: int,
    parallel_type: ParallelType,
    num_registers: tuple[int, int] | None = None,
) -> NoReturn:
    """Raise `UnsupportedError`: warps of a kernel all do the same."""
    raise UnsupportedError(
        f"warp_specialize of {tv}: warps of one kernel all do the same; fuser.schedule.schedule "
        "prefetches where that pays"
    )


_CALLS = [n for n in __all__ if isfunction(globals()[n])]
globals().update({n: checked(globals()[n], name=n) for n in _CALLS})
