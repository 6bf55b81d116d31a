"""What is tried, in turn, where a kernel with the chosen parameters cannot be lowered.

Parameters are chosen from sizes and strides; whether an address is linear in the vector axis is
known only once its index has been written. Each rung relies on less than the one before: narrower
vectors, scalar accesses, nothing loaded ahead of its use (everything inlined), and at last what
serves every input.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

# What a rung changes, and to what; a scheduler without such a parameter leaves it out.
SCALAR = {"vector": 1, "staged_vector": 1}
INLINED = {**SCALAR, "unroll": 1, "unroll_outer": False, "columns": 1}


def rungs(chosen: Any, generic: Any) -> tuple[Any, ...]:
    """Return parameters from `chosen` down to `generic`, each once.

    vector 4, unroll 2  ->  4 x 2, 2 x 2, 1 x 2, 1 x 1, generic
    """
    narrower = [{"vector": chosen.vector >> k} for k in range(1, chosen.vector.bit_length() - 1)]
    known = {f.name for f in fields(chosen)}
    tried = [
        replace(chosen, **{name: value for name, value in step.items() if name in known})
        for step in ({}, *narrower, SCALAR, INLINED)
    ]
    return tuple(dict.fromkeys([*tried, generic]))
