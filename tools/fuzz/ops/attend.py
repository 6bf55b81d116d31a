"""Statements of attention, for the generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tools.fuzz.builder import Builder, Dim
from tools.fuzz.program import Arg, Ref

# The largest number of scores of a statement: the oracle keeps several tensors of this size.
_MOST = 2**14


def statement(b: Builder, name: str, make: Callable[[Sequence[Dim], str], str]) -> None:
    """Appends attention of a tensor with four axes, the query, and sometimes its gradient.

    `make` appends a new input with the given axes and dtype.
    """
    dims = b.dims[name]
    dtype = b.dtype[name]
    # Equal rows of an operand do not make equal rows of a result.
    n, h, rows, e = query = [Dim(d.vec, d.static) for d in dims]
    columns = b.rng.choice((rows, b.constant(b.rng.choice((1, 3, 5, 8)))))
    v = e if b.chance(0.7) else b.constant(b.rng.choice((2, 4, 7)))
    scores = [n, h, rows, columns]
    if any(math.prod(max(d.vec[m], 1) for d in scores) > _MOST for m in range(b.ncalls)):
        return
    has_gradient = b.chance(0.4)
    batch = [d if has_gradient or b.chance(0.85) else b.one for d in (n, h)]
    shapes = [*batch, columns, e], [*batch, columns, v]
    if not all(map(b.fits, shapes)):
        return
    key, value = (Ref(make(s, dtype)) for s in shapes)
    named: dict[str, Arg] = {"is_causal": b.chance(0.4)}
    scale: Arg = b.rng.choice((None, None, 0.5, 2, -0.25))
    if scale is not None:
        named["scale"] = scale
    if not has_gradient and b.chance(0.4) and b.fits(scores):
        for what, kind in (("bias", dtype), ("mask", "Bool")):
            if b.chance(0.6):
                some = [d if b.chance(0.6) else b.one for d in scores]
                named[what] = Ref(make(some, kind))
    shape = [n, h, rows, v]
    made = b.emit_many("sdpfa_fwd", [Ref(name), key, value], [shape, shape[:3]], True, 2, **named)
    if not made or not has_gradient:
        return
    grad = Ref(make(shape, dtype))
    out, log_sums, seed, offset = map(Ref, made)
    read = [grad, Ref(name), key, value, out, log_sums]
    args = [*read, None, named["is_causal"], seed, offset, scale]
    b.emit_many("sdpfa_bwd", args, [query, *shapes])
