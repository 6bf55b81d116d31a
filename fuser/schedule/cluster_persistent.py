"""The cluster persistent scheduler: the inner persistent one for rows that exceed a block.

A cluster of blocks, which run at the same time and read each other's shared memory, takes a row:

    GPU kept    [BIDx rows | r S 1, r BIDy, r UR, r TIDx | r V]
    GPU looped  [BIDx rows | r S, r BIDy, r UR, r TIDx | r V]

Kept: its threads hold the row. Looped, for rows that do not fit: all levels but the first find it
in the cache of second level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuser.device import DeviceInfo
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import RandomOp, WelfordOp
from fuser.ir.scalar import Number, Symbol
from fuser.ir.tensor import TensorView
from fuser.ops.torch_meaning import REDUCING
from fuser.schedule import inner_persistent, inner_persistent_params
from fuser.schedule.facts import Facts
from fuser.schedule.inner_persistent_params import InnerPersistentParams
from fuser.schedule.row_view import RowView
from fuser.schedule.rows import levels_of, steps_that_read

# Rows of more elements are a cluster's, where there are so many of them that all multiprocessors
# have one.
LONGEST_ROW_OF_A_BLOCK = max(columns for columns, _ in inner_persistent.ROWS_THAT_PAY)
FEWEST_ROWS = 64
# How often the blocks of a cluster may wait for one another for a row, and read what all rows
# share. Measured on an H200, 128 x 1048576, bfloat16 and float32, beside several kernels: softmax
# (2) 294 us, 288; 523, 530; with its gradient cross entropy (2) 334, 359; 504, 653; RMS norm (2)
# 210, 206; 405, 404; its gradients (3) 507, 470; 917, 904; layer norm (4) 313, 235; 570, 423.
MOST_WAITS = 2


def pays(rows: int, columns: int) -> bool:
    """Whether rows are too long for a block, and enough for clusters."""
    return columns > LONGEST_ROW_OF_A_BLOCK and rows >= FEWEST_ROWS


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel of clusters takes no longer than several, which share a row between
    blocks: results lie along it, all else is little, and nothing random is computed anew at each
    level. Measured as above, without results along the row (cross entropy): 198 us, 165; 251, 253;
    with dropout (and layer norm): 1176 us, 514; 1224, 834."""
    known = inner_persistent.rows_of(fusion, sizes)
    if known is None or not pays(*known):
        return False
    view = RowView(fusion)
    is_random = any(isinstance(op, RandomOp) for op in fusion.exprs)
    has_results = any(out in view.full for out in fusion.outputs)
    return has_results and not is_random and _waits(view) <= MOST_WAITS


def _waits(view: RowView) -> int:
    """Count the levels of reductions, two for mean and variance, and the steps that read each
    tensor that has the row alone."""
    fusion, levels, steps = view.fusion, levels_of(view.fusion), steps_that_read(view.fusion)
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCING)]
    waits = len({levels[op.out_tensor] for op in reductions})
    waits += any(isinstance(op, WelfordOp) for op in reductions)
    inputs = [v for v in fusion.inputs if isinstance(v, TensorView)]
    shared = [tv for tv in inputs if view.axes(tv) == view.row_axes]
    return waits + sum(len(steps.get(tv, ())) for tv in shared)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Return what chooses the form and the shape of a cluster for an input class."""
    return inner_persistent_params.chooser(fusion, device, in_clusters=True)


accepts = inner_persistent.accepts
apply = inner_persistent.apply
generic = inner_persistent_params.generic
