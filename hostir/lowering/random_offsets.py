"""Where the shards of random tensors lie in the whole: what a launch tells its kernel beside.

A kernel sees local shards, and a random number follows from its place in the tensor of all ranks.
So a kernel gets the index of its first element along each axis that ranks or steps share:

    T1[iDIDx{4}, i{i0/4}] = rng_uniform({i0}, float, i3, i4)
    ->  T1 = rng_uniform({i0}, float, i3, i4, begin = {first1_0})       first1_0: rank * (i0/4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.op import Op
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import ParallelType
from fuser.support.errors import UnsupportedError, user_code
from hostir.lowering.slices import coordinate
from multidevice.sharding.placement import Cuts, axis_cuts, local_extent
from multidevice.sharding.queries import check_dropout

# Which block of a tensor a step has, of those along a stream.
BlockOf = Callable[[TensorView, ParallelType], Scalar]


def _no_steps(tv: TensorView, ptype: ParallelType) -> Scalar:
    raise AssertionError(f"{tv} is computed in steps of {ptype.text}, outside of a loop")


def with_places(fusion: Fusion, block_of: BlockOf = _no_steps) -> tuple[Fusion, tuple[Scalar, ...]]:
    """Return a kernel's fusion whose random tensors know their places, and what a launch gives for
    the inputs that it has more: expressions of the rank and of the step."""
    ops: list[TensorOp] = []
    given: dict[Symbol, Scalar] = {}
    for op in fusion.exprs:
        cuts = axis_cuts(op.out) if isinstance(op, RandomOp) else {}
        if isinstance(op, RandomOp) and cuts:
            begin: list[Scalar] = []
            for k, axis in enumerate(op.out.domain.logical):
                first = _first(op.out, axis.size, cuts.get(axis.number, ()), block_of)
                symbol = Symbol(f"first{op.out.number}_{k}", DataType.Index, lo=0)
                begin.append(first if first is sc.ZERO else symbol)
                if first is not sc.ZERO:
                    given[symbol] = first
            op = op.replace(begin=tuple(begin))
        ops.append(op)
    if not given:
        return fusion, ()
    exprs, fusion.exprs = fusion.exprs, ops
    try:
        made, _ = fusion.copy()
    finally:
        fusion.exprs = exprs
    made.inputs = [*made.inputs, *given]
    return made, tuple(given.values())


def check_places(ops: Iterable[Op]) -> None:
    """Raise `UnsupportedError` for a random op whose shards would all begin at its first element,
    as in a program by hand, and for dropout on several ranks."""
    ops = list(ops)
    check_dropout(ops)
    for op in ops:
        if isinstance(op, RandomOp) and not op.begin and axis_cuts(op.out):
            raise UnsupportedError(
                f"{op.name}: ranks or steps share {tensor_words(op.out)}; only a program lowered "
                "from a definition knows which part each of them has"
                f"{user_code(op.where)}{in_ir(op.out)}"
            )


def _first(tv: TensorView, extent: Scalar, cuts: Cuts, block_of: BlockOf) -> Scalar:
    """Return the index of the first element that this rank, in this step, has along an axis."""
    extent, first = tv.fusion.canonical(extent), sc.ZERO
    for cut in cuts:
        extent = local_extent(extent, (cut,), "first")
        if cut.ptype.is_device:
            assert tv.mesh is not None, f"{tv} is cut over devices, and has no mesh"
            number = coordinate(tv.mesh, cut.ptype)
        else:
            number = block_of(tv, cut.ptype)
        first = sc.add(first, sc.mul(number, extent))
    return first
