"""Schedulers: decide how the work of a kernel is divided among CUDA blocks, threads and loops.

Question: which scheduler is chosen for a kernel, and with which parameters?
Imports: `fuser.support`, `fuser.ir`, `fuser.ops` and `fuser.passes`.
Files, in reading order:

- `automatic`: the public `SchedulerType`s and their parameters.
- `registry`: the table of schedulers, in the order in which they are tried.
- `input_facts`: the sizes and alignments from which parameters are chosen.
- `iteration_space`: the axes that a kernel iterates over, and the maximum width of its vectors.
- `loop_propagation`: copies the loops of one tensor to all others.
- `inlining`: computes a tensor inside the loops of its consumers.
- `tiling`: steps that all automatic schedules share, such as splitting a tile.
- `pointwise`: kernels without reductions, in which all outputs have the same axes.
- `transpose`: kernels whose tensors have two memory orders.
- `reduction`: reductions whose inputs are read once.
- `inner_persistent`: reductions along rows whose inputs are read again, such as softmax. A row is
  held in registers or read twice, by a chosen number of threads.
- `outer_persistent`: the same along columns.
- `inner_outer_persistent`: reductions along rows, and sums of the results over the rows.
- `cluster_persistent`: rows too long for one CUDA block, which clusters of blocks process.
- `row_levels`: the levels of dependent reductions, and rewrites that the row schedulers share.
- `plain`: any kernel, with a simple and slow schedule.
- `horizontal`: several small kernels in one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import NoReturn

from fuser.ir.fusion import TensorView
from fuser.ir.primitives import cache_after, cache_before, cache_fork, rfactor
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import MemoryType, ParallelType
from fuser.schedule.automatic import (
    SchedulerType,
    can_schedule,
    compute_heuristics,
    find_compatible_schedulers,
    schedule,
)
from fuser.schedule.inlining import inline_at, inline_most
from fuser.schedule.input_facts import Facts
from fuser.schedule.loop_propagation import (
    bounded_transform_backward,
    parallelize_like,
    transform_like,
)
from fuser.schedule.registry import SCHEDULERS, find_scheduler, rejections, scheduler
from fuser.support.arguments import checked
from fuser.support.errors import UnsupportedError

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
    """Splits the loop axis at position `dim` of a tensor into two, one of which has extent
    `factor`.

    With `inner_split`, the inner one has this extent. See `TensorView.split`.
    """
    return tv.split(dim, factor, inner_split)


def merge(tv: TensorView, axis_o: int, axis_i: int | None = None) -> TensorView:
    """Merges two neighbouring loop axes of a tensor into one; see `TensorView.merge`.

    `axis_o` and `axis_i` are the positions of the outer and the inner one; by default, `axis_i` is
    the position after `axis_o`.
    """
    return tv.merge(axis_o, axis_i)


def reorder(tv: TensorView, old2new: Mapping[int, int] | Sequence[tuple[int, int]]) -> TensorView:
    """Moves loop axes of a tensor from old to new positions; see `TensorView.reorder`."""
    return tv.reorder(dict(old2new))


def parallelize(tv: TensorView, axis: int, parallel_type: ParallelType) -> None:
    """Sets which CUDA blocks, threads or loops execute the loop axis at position `axis` of a
    tensor.
    """
    tv.axis(axis).parallelize(parallel_type)


def set_memory_type(tv: TensorView, memory_type: MemoryType) -> None:
    """Sets the memory in which a tensor is stored; see `TensorView.set_memory_type`."""
    tv.set_memory_type(memory_type)


def warp_specialize(
    tv: TensorView,
    number_of_stages: int,
    prefetch_distance: int,
    parallel_type: ParallelType,
    num_registers: tuple[int, int] | None = None,
) -> NoReturn:
    """Always raises `UnsupportedError`, because all warps of a kernel execute the same code.

    nvFuser has a function with this signature, which lets some warps load data while others
    compute.
    """
    raise UnsupportedError(
        f"warp_specialize of {tv} is not supported: all warps of a kernel execute the same code. "
        "fuser.schedule.schedule prefetches where it pays"
    )


_CALLS = [n for n in __all__ if isfunction(globals()[n])]
globals().update({n: checked(globals()[n], name=n) for n in _CALLS})
