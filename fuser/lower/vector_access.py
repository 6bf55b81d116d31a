"""Vector accesses to memory: tests whether the address grows by 1 from element to element of a
vector, and whether it is aligned.
"""

from __future__ import annotations

import math

from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Poly, Scalar, Symbol
from fuser.ir.scalar.scalar_nodes import Monomial
from fuser.lower.context import Context
from fuser.lower.loop_tree import Stage
from fuser.support.device import LOADS_PER_VECTOR, VECTOR_BYTES
from fuser.support.errors import UnsupportedError

MAX_VECTOR_BYTES = VECTOR_BYTES
MAX_LOADED_BYTES = LOADS_PER_VECTOR * VECTOR_BYTES


def vector_width(stage: Stage, *, most: int = MAX_VECTOR_BYTES) -> int:
    """Returns the number of elements in one vector that a stage loads or stores. A stage is an op
    whose result is stored.

    Raises:
        UnsupportedError: the vector has more than `most` bytes, or its number of bytes is no power
            of two.
    """
    assert stage.vector is not None
    width = sc.int_value(stage.vector.extent)
    assert width is not None
    nbytes = width * nbytes_of(stage.tv.dtype())
    if nbytes > most or nbytes & (nbytes - 1):
        raise UnsupportedError(
            f"{stage.tv}: a vector of {width} elements has {nbytes} bytes, but this number must be "
            f"a power of two, at most {most}"
        )
    return width


def vector_base(ctx: Context, tv: TensorView, offset: Scalar, v: Scalar, *, width: int) -> Scalar:
    """Returns the position, in the tensor `tv`, of the first element of a vector of `width`
    elements (the base).

    `offset` is the position of an element: base + `v`, where `v` is the index inside the vector. If
    the base is a multiple of `width` only for some sizes or strides, lowering assumes such sizes
    (`Assumptions.assume_divisible`), and starts again.

    Raises:
        UnsupportedError: the access cannot be a vector.
    """
    offset = ctx.simplify(offset)
    zero: dict[Scalar, Scalar] = {v: sc.ZERO}
    base = sc.substitute(offset, zero)
    if sc.add(base, v) != offset:
        for symbol in _divisors(offset, v):
            if symbol not in ctx.assumptions.divisible:
                ctx.assumptions.assume_divisible(symbol, width)
        raise UnsupportedError(
            f"the vectorized access of {tv} at index {offset} is not contiguous along {v}: "
            "vectorize only the axis that is innermost in memory"
        )
    for mono, coef in terms_of(base):
        if coef % width == 0:
            continue
        sizes = [a for a in mono if not any(s.is_index for s in sc.symbols(a))]
        if len(sizes) > 1 or any(isinstance(a, Apply) for a in sizes):
            # Any of the sizes may contain the factors of two, so their product is tested. The same
            # holds for values computed from sizes, such as the number of elements of a channel
            # group.
            size = sc.product([math.gcd(coef, width), *sizes])
            ctx.guards[sc.eq(sc.mod(size, width), 0)] = None
            continue
        symbol = _size_in(mono)
        if symbol is None:
            raise UnsupportedError(
                f"the vectorized access of {tv} at index {offset} is not aligned, because {base} "
                f"is not a multiple of {width}: use a narrower vector"
            )
        ctx.assumptions.assume_divisible(symbol, width // math.gcd(coef, width))
    return base


def terms_of(x: Scalar) -> list[tuple[Monomial, int]]:
    """Returns the terms of a sum, each as a pair (factors, integer coefficient)."""
    value = sc.int_value(x)
    if value is not None:
        return [((), value)]
    return list(x.terms) if isinstance(x, Poly) else [((x,), 1)]


def _size_in(mono: Monomial) -> Symbol | None:
    """Returns the last factor of the product `mono` that is a size or stride, or None if there is
    none.
    """
    found = [a for a in mono if isinstance(a, Symbol) and not a.is_index]
    return found[-1] if found else None


def _divisors(x: Scalar, v: Scalar) -> list[Symbol]:
    """Returns the size symbols by which `x`, an index in memory, divides an expression that
    contains `v`, the index inside a vector. Those of the innermost divisions are first.

    If these sizes were multiples of the vector width, the divisions might disappear, so lowering
    assumes this.
    """
    found: dict[Symbol, None] = {}

    def visit(y: Scalar) -> None:
        if isinstance(y, Apply) and y.op in ("/", "%") and v in sc.symbols(y.args[0]):
            found.update(dict.fromkeys(s for s in sc.symbols(y.args[1]) if not s.is_index))
        for child in sc.children(y):
            visit(child)

    visit(x)
    return list(reversed(found))
