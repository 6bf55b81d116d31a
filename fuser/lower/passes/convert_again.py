"""Narrow elements that a thread keeps are converted again after threads have met.

    Array<__bfloat, 128> T9                   Array<__bfloat, 128> T9
    m = max of float(T9[i])                   m = max of float(T9[i])
    m = max of m over threads           ->    m = max of m over threads
                                              forget(T9)
    s = sum of exp(float(T9[i]) - m)          s = sum of exp(float(T9[i]) - m)

Else the compiler keeps what it converted first, which takes twice the registers, and then parts of
it in memory. Measured on an H200, rows of 1048576 in bfloat16 in clusters: softmax 351 us, 299 so;
layer norm 421 and 319.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.dtypes import DataType, is_floating, nbytes_of
from fuser.lower.kernel_ir import (
    Body,
    Convert,
    Declare,
    Element,
    Forget,
    Statement,
    ThreadReduce,
    bodies,
    values_of,
    walk,
)

# Of so many elements, and fewer, a thread has registers for what they are converted to.
MOST_CONVERTED = 32
NOTHING: Mapping[str, int] = {}


def convert_again(body: Body, sizes: Mapping[str, int] = NOTHING) -> None:
    """Mark, in place, where what was converted from an array is forgotten; `sizes` are those of the
    arrays around the body."""
    own = [s for s in body.statements if isinstance(s, Declare) and s.size is not None]
    sizes = {**sizes, **{s.name: s.size for s in own if s.size is not None}}
    for statement in body.statements:
        for inner in bodies(statement):
            convert_again(inner, sizes)
    if not any(isinstance(s, ThreadReduce) for s in body.statements):
        return
    converted = [_converted(s) for s in body.statements]
    made: list[Statement] = []
    for k, statement in enumerate(body.statements):
        made.append(statement)
        if isinstance(statement, ThreadReduce):
            again = {name for names in converted[k:] for name in names}
            before = {name: None for names in converted[:k] for name in names if name in again}
            made += [Forget(n) for n in before if sizes.get(n, 0) > MOST_CONVERTED]
    body.statements = made


def _converted(statement: Statement) -> list[str]:
    """Return the register arrays of which a statement converts elements to a wider type."""
    return [
        value.arg.name
        for s in walk(Body([statement]))
        for value in values_of(s)
        if isinstance(value, Convert) and isinstance(value.arg, Element) and _widens(value)
    ]


def _widens(value: Convert) -> bool:
    arg = value.arg
    is_kept = isinstance(arg, Element) and not arg.shared and is_floating(arg.dtype)
    return is_kept and value.dtype is DataType.Float and nbytes_of(arg.dtype) < 4
