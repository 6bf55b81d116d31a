"""The cluster persistent scheduler: the inner persistent one for rows too long for one CUDA block.

A cluster of CUDA blocks processes a row. Its blocks run at the same time and read each other's
shared memory.

Loops are listed from outer to inner: BIDx and BIDy are blocks, TIDx threads, S serial, UR unrolled
and V vector loops. `r` marks reduced axes:

    GPU kept    [BIDx rows | r S 1, r BIDy, r UR, r TIDx | r V]
    GPU looped  [BIDx rows | r S, r BIDy, r UR, r TIDx | r V]

*Kept*: the cluster's threads hold the row in registers. *Looped*, for rows that do not fit: all
levels but the first read the row from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import RandomOp, WelfordOp
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule import inner_persistent
from fuser.schedule.inner_persistent import InnerPersistentParams
from fuser.schedule.input_facts import Facts
from fuser.schedule.row_levels import RowView, levels_of, steps_that_read
from fuser.support.device import DeviceInfo

# Rows of more elements are processed by clusters if there are enough rows for all multiprocessors.
LONGEST_ROW_OF_A_BLOCK = max(columns for columns, _ in inner_persistent.ROWS_THAT_PAY)
FEWEST_ROWS = 64
# Longer rows use clusters of the maximum size, so that few rows are processed at a time.
LONG_ROW = 1 << 18
# The maximum number of waits per row, where a wait is an exchange between the blocks of a cluster
# or a read of a tensor that all rows share. The second number is for elements of four bytes or
# more, for which these waits are a smaller share of the time. Measured on an H200, 512 x 131072,
# bfloat16 and float32, cluster and several kernels, in us, with the number of waits: softmax (2)
# 133, 151; 175, 269; RMS norm (2) 96, 105; 153, 199; its gradients (3) 242, 196; 363, 375; layer
# norm (4) 125, 113; 183, 203.
MOST_WAITS, MOST_WAITS_WIDE = 2, 4


def row_class(rows: int, columns: int) -> int:
    """Returns a number from 0 to 2: rows with the same number get the same choice of kernel
    (`suits`).

    - 0: rows for which clusters never pay, because they are short or few.
    - 1: rows of at most `LONG_ROW` elements.
    - 2: longer rows.
    """
    if columns <= LONGEST_ROW_OF_A_BLOCK or rows < FEWEST_ROWS:
        return 0
    return 1 if columns <= LONG_ROW else 2


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel of clusters is at least as fast as several kernels for these sizes.

    Several kernels split a row over CUDA blocks. Kernels with random ops are excluded, because each
    of the dependent reductions would compute the random numbers again. Layer norm with dropout
    takes 483 us, in two kernels 242. If rows are longer than `LONG_ROW`, an output must have all
    axes.

    Measured on an H200, 128 x 1048576, bfloat16 and float32, one and several kernels, in us:

    - softmax: 294, 288; 523, 530
    - cross entropy with its gradient: 334, 359; 504, 653
    - cross entropy alone: 198, 165; 251, 253
    - layer norm: 313, 235; 570, 423
    """
    known = inner_persistent.rows_of(fusion, sizes)
    found = 0 if known is None else row_class(*known)
    if not found or any(isinstance(op, RandomOp) for op in fusion.exprs):
        return False
    view = RowView(fusion)
    if found == 1:
        read = [
            nbytes_of(v.dtype())
            for v in fusion.inputs
            if isinstance(v, TensorView) and v in view.full
        ]
        is_wide = min(read, default=4) >= 4
        return _waits(view) <= (MOST_WAITS_WIDE if is_wide else MOST_WAITS)
    has_results = any(out in view.full for out in fusion.outputs)
    return has_results and _waits(view) <= MOST_WAITS


def _waits(view: RowView) -> int:
    """Returns how often a cluster waits while it processes one row.

    The level of a tensor is the number of dependent reductions that lead to it. Each level of
    reductions counts once. If some level computes mean and variance, one more wait is counted. For
    a tensor with only the row's axes, each level that reads the tensor counts once.
    """
    fusion, levels, steps = view.fusion, levels_of(view.fusion), steps_that_read(view.fusion)
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCING)]
    waits = len({levels[op.out_tensor] for op in reductions})
    waits += any(isinstance(op, WelfordOp) for op in reductions)
    inputs = [v for v in fusion.inputs if isinstance(v, TensorView)]
    shared = [tv for tv in inputs if view.axes(tv) == view.row_axes]
    return waits + sum(len(steps.get(tv, ())) for tv in shared)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Returns a function that chooses the kernel's parameters from sizes and alignments of the
    inputs.

    The parameters include the number of CUDA blocks in a cluster, and whether registers hold the
    row.
    """
    return inner_persistent.chooser(fusion, device, in_clusters=True)


accepts = inner_persistent.accepts
apply = inner_persistent.apply
generic = inner_persistent.generic
