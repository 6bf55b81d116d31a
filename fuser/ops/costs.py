"""What ops cost a thread, in instructions: rough, to decide between computing and keeping."""

from __future__ import annotations

from fuser.ir.nodes import TensorOp

# What costs a thread more than keeping the result in a register: special functions, divisions,
# random numbers.
EXPENSIVE = frozenset(
    "acos acosh asin asinh atan atan2 atanh cos cosh div erf erfc erfcinv erfinv exp exp2 expm1 "
    "fmod lgamma log log10 log1p log2 normal pow reciprocal remainder rsqrt sigmoid silu sin "
    "sinh sqrt tan tanh uniform".split()
)
_EXPENSIVE_INSTRUCTIONS = 20


def instructions(op: TensorOp) -> int:
    """Return about how many instructions an op takes per element."""
    return _EXPENSIVE_INSTRUCTIONS if op.name in EXPENSIVE else 1
