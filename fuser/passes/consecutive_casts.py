"""Consecutive casts: drop a cast through which another one loses nothing.

Before: cast(cast(x, A), B) where every value of x's dtype is a value of A. After: cast(x, B), or x
itself when B is its dtype. A cast that rounds stays.

    T1 = __half2float(T0)
    T2 = __float2half(T1)      ->   uses of T2 read T0
"""

from __future__ import annotations

from fuser.ir.dtypes import COMPLEX_OF, DataType
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import CastOp, LoadStoreOp
from fuser.passes.remove_bcast_squeeze import is_replaceable

_D = DataType
# dtype -> the real dtypes that hold all its values.
_REAL: dict[DataType, frozenset[DataType]] = {
    _D.Bool: frozenset({_D.Int32, _D.Int, _D.Index, _D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Int32: frozenset({_D.Int, _D.Index, _D.Double}),
    _D.Int: frozenset({_D.Index}),
    _D.Index: frozenset({_D.Int}),
    _D.Half: frozenset({_D.Float, _D.Double}),
    _D.BFloat16: frozenset({_D.Float, _D.Double}),
    _D.Float8_e4m3fn: frozenset({_D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Float8_e5m2: frozenset({_D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Float8_e8m0fnu: frozenset({_D.BFloat16, _D.Float, _D.Double}),
    _D.Float: frozenset({_D.Double}),
    _D.Double: frozenset(),
}
# dtype -> the dtypes that hold all its values: complex ones, where their parts do.
_HOLDS: dict[DataType, frozenset[DataType]] = {
    **{
        d: held | {COMPLEX_OF[x] for x in {d} | held if x in COMPLEX_OF}
        for d, held in _REAL.items()
    },
    _D.ComplexFloat: frozenset({_D.ComplexDouble}),
    _D.ComplexDouble: frozenset(),
}


def consecutive_casts(fusion: Fusion) -> None:
    """Rewrite `fusion` in place."""
    for op in fusion.exprs:
        if not isinstance(op, CastOp):
            continue
        source = op.inp
        while isinstance(definition := fusion.definition(source), CastOp):
            if source.dtype() not in _HOLDS[definition.inp.dtype()]:
                break
            source = definition.inp
        if source is op.inp:
            continue
        if source.dtype() is op.out.dtype() and is_replaceable(fusion, op.out):
            fusion.replace_uses(op.out, source)
            fusion.replace_expr(op, ())
            continue
        new: TensorOp = (
            LoadStoreOp(op.out, source)
            if source.dtype() is op.out.dtype()
            else CastOp(op.out, source)
        )
        fusion.replace_expr(op, (new.replace(where=op.where),))
    fusion.exprs = fusion.used_exprs()
