"""The cluster persistent scheduler: the inner persistent one for rows too long for one CUDA block.

A row is the reduced axes of a kernel with dependent reductions, taken as one axis. A cluster of
CUDA blocks processes a row. Its blocks run at the same time and read each other's shared memory.

Loops are listed from outer to inner. BIDx and BIDy loops run over blocks, and TIDx loops over
threads. S loops are serial, UR unrolled, and V a vector. S 1 has one iteration, and `r` marks
reduced axes. `|` separates the loops over rows from those along a row, and these from the elements
of a vector:

    GPU kept    [BIDx rows | r S 1, r BIDy, r UR, r TIDx | r V]
    GPU looped  [BIDx rows | r S, r BIDy, r UR, r TIDx | r V]

*Kept*: the cluster's threads hold the row in registers. *Looped*, for rows that do not fit: after
the first reduction, the row is read again, from the L2 cache.
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
    """Returns the class, 0, 1 or 2, of `rows` rows with `columns` elements each.

    - 0: rows for which clusters of CUDA blocks never pay, because the rows are short or few.
    - 1: rows of at most `LONG_ROW` elements.
    - 2: longer rows.

    `suits` chooses between one kernel with clusters and several kernels. The choice depends on the
    sizes only by this class.
    """
    if columns <= LONGEST_ROW_OF_A_BLOCK or rows < FEWEST_ROWS:
        return 0
    return 1 if columns <= LONG_ROW else 2


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Returns whether one kernel with clusters of CUDA blocks is at least as fast as several
    kernels.

    A cluster processes a row together; several kernels split it over blocks and read it several
    times. The answer is False in these cases:

    - A size is unknown, or the rows are short or few.
    - The kernel draws random numbers, which would be drawn again after each reduction. Layer norm
      with dropout takes 483 us, in two kernels 242.
    - The blocks of a cluster wait for one another too often (`MOST_WAITS`), as in layer norm in
      bfloat16.
    - Rows are longer than `LONG_ROW`, and no output has all axes, as in cross entropy alone.

    Measured on an H200, 128 rows of 1048576 elements, in us; each pair is (one kernel, several):

        |                                 | bfloat16   | float32    |
        | softmax                         | (294, 288) | (523, 530) |
        | cross entropy with its gradient | (334, 359) | (504, 653) |
        | cross entropy alone             | (198, 165) | (251, 253) |
        | layer norm                      | (313, 235) | (570, 423) |
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
    """Returns how often the CUDA blocks of a cluster wait while they process a row together.

    Three kinds of waits are counted:

    - Reductions that run at the same time cause one wait: after them, the blocks exchange results.
    - A reduction that computes mean and variance causes one more wait. Several of them cause no
      further wait.
    - Each loop over the row that reads an input with only the axes of a row, such as a weight,
      causes a wait for memory, for each such input.
    """
    fusion, levels, steps = view.fusion, levels_of(view.fusion), steps_that_read(view.fusion)
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCING)]
    waits = len({levels[op.out_tensor] for op in reductions})
    waits += any(isinstance(op, WelfordOp) for op in reductions)
    inputs = [v for v in fusion.inputs if isinstance(v, TensorView)]
    shared = [tv for tv in inputs if view.axes(tv) == view.row_axes]
    return waits + sum(len(steps.get(tv, ())) for tv in shared)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Returns a function that chooses a kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. It chooses, among others, the number
    of CUDA blocks that process a row together (a cluster), and whether their registers hold the
    row.
    """
    return inner_persistent.chooser(fusion, device, in_clusters=True)


accepts = inner_persistent.accepts
apply = inner_persistent.apply
generic = inner_persistent.generic
