"""What a kernel reads of its tables: what lookups find in them, which may be far less than all."""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.fusion import Fusion
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.tensor import TensorView
from hostir.cost.op_costs import NOTHING, Found, held_nbytes
from hostir.ir.ops import LaunchKernel
from multidevice.sharding.queries import local_extents


def found_in_tables(op: LaunchKernel, kernel: Fusion, values: Mapping[Symbol, Number]) -> Found:
    """Return how many bytes a rank's launch of a kernel finds in operands that are nothing but
    tables; `values` binds the symbols of extents."""
    if not any(isinstance(e, LookupOp) for e in kernel.exprs):
        return NOTHING
    found: dict[TensorView, int] = {}
    for given, declared in zip(op.ins, kernel.inputs, strict=False):
        if not (isinstance(given, TensorView) and isinstance(declared, TensorView)):
            continue
        lookups = [e for e in kernel.exprs if isinstance(e, LookupOp) and e.table is declared]
        is_table = lookups and all(e in lookups for e in kernel.uses(declared))
        if is_table and not any(e.index is declared for e in lookups):
            found[given] = sum(_nbytes(e.out, values) for e in lookups)
    return found


def _nbytes(tv: TensorView, values: Mapping[Symbol, Number]) -> int:
    shape = tuple(int(sc.evaluate(n, values)) for n in local_extents(tv))
    return held_nbytes(tv, shape)
