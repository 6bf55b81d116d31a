"""Loops for the CPU: the compiler vectorises the innermost ones.

    FUSER_UNROLL for k < 256 { if (h + k < n) { a[k] += x[h + k]; } }
->  FUSER_SIMD for k < min(256, n - h) { a[k] += x[h + k]; }
"""

from __future__ import annotations

from fuser.ir.dtypes import DataType, is_floating
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar
from fuser.lower.kernel_ir import (
    Accumulate,
    Assign,
    Body,
    Compute,
    Declare,
    Element,
    For,
    If,
    Statement,
    Sync,
    ThreadReduce,
    Var,
    VectorLoad,
    VectorStore,
    bodies,
    walk,
)
from fuser.lower.passes.unroll import conjuncts

# Loops over registers with fewer iterations stay unrolled.
MIN_ITERATIONS = 8
_SUMS = {"add": "FUSER_SIMD_SUM", "mul": "FUSER_SIMD_PROD"}
_EXTREMA = {"max": "FUSER_SIMD_MAX", "min": "FUSER_SIMD_MIN"}


def vectorize_loops(body: Body) -> None:
    """Clamp and mark the innermost loops, in place.

    Before: loops marked for unrolling. After: every innermost loop whose iterations are
    independent, or only reduce into one scalar, has a simd pragma and, where its only predicate
    bounds its index, no predicate.
    """
    out: list[Statement] = []
    for s in body.statements:
        for inner in bodies(s):
            vectorize_loops(inner)
        if isinstance(s, For) and not any(isinstance(x, For) for x in walk(s.body)):
            out += _innermost(s)
        else:
            out.append(s)
    body.statements = out


def _innermost(loop: For) -> list[Statement]:
    extent = sc.int_value(loop.extent)
    if extent is not None and extent < MIN_ITERATIONS:
        return [loop]
    if any(isinstance(s, Sync | ThreadReduce | VectorLoad | VectorStore) for s in walk(loop.body)):
        return [loop]
    rest = clamp(loop)
    statements = _mark(loop)
    return statements if rest == sc.const(True) else [If(rest, Body(statements))]


def clamp(loop: For) -> Scalar:
    """Turn the predicate around a whole loop body into a bound of the loop; return the part of it
    that does not depend on the loop."""
    only = loop.body.statements[0] if len(loop.body.statements) == 1 else None
    if not isinstance(only, If) or only.otherwise is not None or only.flags:
        return sc.const(True)
    bounds: list[Scalar] = []
    outside: list[Scalar] = []
    for test in conjuncts(only.cond):
        if loop.symbol not in sc.symbols(test):
            outside.append(test)
            continue
        bound = _bound(test, loop)
        if bound is None:
            return sc.const(True)
        bounds.append(bound)
    for bound in bounds:
        loop.extent = sc.minimum(loop.extent, bound)
    if bounds:
        loop.unroll = False
    loop.body = only.then
    return sc.all_of(outside)


def _bound(test: Scalar, loop: For) -> Scalar | None:
    """Return `b - a` for a test `a + k < b`, None for another form."""
    if not isinstance(test, Apply) or test.op != "<":
        return None
    left, right = test.args
    zero: dict[Scalar, Scalar] = {loop.symbol: sc.ZERO}
    start = sc.substitute(left, zero)
    if loop.symbol in sc.symbols(right) or sc.add(start, loop.symbol) != left:
        return None
    return sc.sub(right, start)


def _mark(loop: For) -> list[Statement]:
    """Set the pragma of a loop; return it with what must stand around it."""
    sums: dict[str, str] = {}
    extrema: list[Accumulate] = []
    # An accumulator of one iteration: its reduction has an extent of 1.
    private = {s.name for s in walk(loop.body) if isinstance(s, Declare)}
    for s in walk(loop.body):
        if not isinstance(s, Accumulate) or s.target.name in private:
            continue
        if s.kind == "welford":
            return [loop]
        if isinstance(s.target, Element) and loop.symbol in sc.symbols(s.target.index):
            continue
        if not isinstance(s.target, Var) or s.target.dtype is DataType.Bool:
            return [loop]
        if s.kind in _SUMS:
            sums[s.target.name] = s.kind
        elif s.kind in _EXTREMA:
            extrema.append(s)
        else:
            return [loop]
    kinds = set(sums.values())
    if len(kinds) + len(extrema) > 1:
        return [loop]
    loop.unroll = False
    if extrema:
        return _mark_extremum(loop, extrema[0])
    loop.pragma = f"{_SUMS[kinds.pop()]}({', '.join(sums)})" if kinds else "FUSER_SIMD"
    return [loop]


def _mark_extremum(loop: For, step: Accumulate) -> list[Statement]:
    """Vectorise a maximum: NaNs of floating types are collected in a flag beside it.

    The flag starts from the accumulator, where a loop around this one may have left a NaN.
    """
    assert isinstance(step.target, Var)
    name, dtype = step.target.name, step.target.dtype
    macro = _EXTREMA[step.kind]
    if not is_floating(dtype):
        loop.pragma = f"{macro}({name})"
        return [loop]
    step.nan_flag = f"nan_{name}"
    loop.pragma = f"{macro}_NAN({name}, {step.nan_flag})"
    flag = Var(step.nan_flag, DataType.Int32)
    settled = Compute("fm_nan_if({0}, {1})", (flag, step.target), dtype)
    start = Compute("fm_isnan({0})", (step.target,), DataType.Bool)
    return [Declare(step.nan_flag, "int", None, start), loop, Assign(step.target, settled)]
