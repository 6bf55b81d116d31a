"""What ops cost a thread, in instructions: rough, to decide between computing and keeping."""

from __future__ import annotations

from fuser.ir.fusion import TensorOp
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.pointwise_table import POINTWISE

# What costs a thread more than keeping the result in a register: special functions, divisions,
# random numbers.
EXPENSIVE = frozenset((*(k for k, row in POINTWISE.items() if row.is_slow), *RandomOp.KINDS))
_EXPENSIVE_INSTRUCTIONS = 20


def instructions(op: TensorOp) -> int:
    """Return about how many instructions an op takes per element."""
    return _EXPENSIVE_INSTRUCTIONS if op.name in EXPENSIVE else 1
