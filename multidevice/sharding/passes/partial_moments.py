"""Means and variances along a divided axis, from the moments of the parts that devices have.

Each device computes the mean and the sum of squared deviations of its own part. Two sums over
devices combine them, because a sum of squares around the mean of all parts needs this mean:

    avg, var, n [M] = Welford(x [M, DIDx(N)])
      ->  a, v [M, DIDx(d)]  = Welford(reshape(x) [M, DIDx(d), N/d])
          avg [M, rDIDx(d)]  = sum(a) / d                                  an allreduce
          var [M, rDIDx(d)]  = sum(v + N/d * (a - avg)^2)                  an allreduce

All parts have N/d elements, so the mean of their means is the mean of all elements. Source: Chan,
Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", equation 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import cast as typing_cast

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.dtypes import HALF_LIKE, DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import CastOp, FullOp, LoadStoreOp, ReductionOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.ops import reductions
from fuser.ops.building import OperandLike, broadcast_tensor, convert
from fuser.ops.elementwise import apply_pointwise
from multidevice.sharding.passes.device_axes import split_over_devices
from multidevice.sharding.passes.partial_sums import combine_parts
from multidevice.sharding.passes.provenance import record_parts
from multidevice.sharding.placement import (
    Cuts,
    add_cuts,
    copy_like,
    placement,
    reduction_cuts,
    spread_axes,
)
from multidevice.sharding.propagation import apply_transfers, forward_cuts
from multidevice.sharding.queries import uneven_axes


def combine_partial_moments(fusion: Fusion) -> None:
    """Rewrites every `Welford` along axes that devices divide: moments of parts, then two sums.

    Ops that a stream loop computes in steps are left as they are; their operand is gathered later.
    """
    for op in fusion.exprs:
        if isinstance(op, WelfordOp) and (divisions := _divisions(op)):
            fusion.replace_expr(op, _combined(op, divisions))


def _divisions(op: WelfordOp) -> dict[int, Cuts]:
    """Returns how devices divide the reduced axes, by the position of the axis in the operand.

    Returns {} if the moments of parts cannot be combined: with steps of a stream loop, or if the
    operand is on another mesh, is divided in another way, has parts of unequal sizes, or has no
    elements.
    """
    cuts = reduction_cuts(op.avg)
    reduced = [a for a in op.avg.domain.logical if a.is_reduction()]
    found = {k: cuts[a.number] for k, a in enumerate(op.avg.domain.logical) if a.number in cuts}
    have = placement(op.inp)
    has_steps = any(a.is_stream for tv in (op.inp, *op.outputs) for a in spread_axes(tv))
    is_other = op.inp.mesh != op.avg.mesh or any(have[k] != mine for k, mine in found.items())
    uneven, axes = uneven_axes(op.inp), op.inp.domain.no_reductions
    is_uneven = any(axes[k].number in uneven for k in found)
    is_empty = any(sc.int_value(op.avg.fusion.canonical(a.size)) == 0 for a in reduced)
    return {} if has_steps or is_other or is_uneven or is_empty else found


def _combined(op: WelfordOp, divisions: dict[int, Cuts]) -> list[TensorOp]:
    """Returns the ops that replace `op`, of which devices divide reduced axes by `divisions`."""
    fusion, dtype = op.avg.fusion, op.avg.dtype()
    wide = DataType.Float if dtype in HALF_LIKE else dtype
    before = fusion.exprs
    with FusionGuard(fusion):
        split = split_over_devices(op.inp, divisions)
        dims, is_device = _axes_of_split(op, divisions)
        average, squares, _ = reductions.welford(_converted(split, wide), dims)
        _place(fusion.exprs[len(before) :])
        mean = _mean_of_parts(op, average, divisions, is_device)
        distance = _call("sub", average, broadcast_tensor(mean, is_device))
        size = sc.product(split.domain.no_reductions[k].size for k in dims)
        part = _call("add", squares, _call("mul", _call("mul", distance, distance), size))
    made = list(fusion.exprs[len(before) :])
    fusion.exprs = before
    _place(made)
    count = sc.product(a.size for a in op.avg.domain.logical if a.is_reduction())
    made += _results(op, mean, part, _types(divisions), count)
    return [new.replace(where=op.where) for new in made]


def _types(divisions: dict[int, Cuts]) -> list[ParallelType]:
    return [cut.ptype for cuts in divisions.values() for cut in cuts]


def _axes_of_split(op: WelfordOp, divisions: dict[int, Cuts]) -> tuple[list[int], tuple[bool, ...]]:
    """Returns the axes of the split operand that each device reduces, and the kind of the others.

    The second entry has, for each axis that is left, whether it is a device axis.
    """
    dims: list[int] = []
    left: list[bool] = []
    for k, axis in enumerate(op.avg.domain.logical):
        left += [True] * len(divisions.get(k, ()))
        if axis.is_reduction():
            dims.append(len(left) + len(dims))
        else:
            left.append(False)
    return dims, tuple(left)


def _mean_of_parts(
    op: WelfordOp, average: TensorView, divisions: dict[int, Cuts], is_device: Sequence[bool]
) -> TensorView:
    """Appends the ops that compute the mean of all elements from the means of the parts.

    `is_device` says which axes of `average`, the means of the parts, are device axes. The mean has
    the other axes, divided in the same way.
    """
    fusion, types = average.fusion, _types(divisions)
    kept = [k for k, is_part in enumerate(is_device) if not is_part]
    cuts, axes = placement(average), average.domain.no_reductions
    total = fusion.new_tensor(
        [fusion.clone_axis(axes[k]) for k in kept], average.dtype(), mesh=average.mesh
    )
    for k, axis in zip(kept, total.domain.no_reductions, strict=True):
        add_cuts(total, axis.number, cuts[k])
    fusion.add(_sum(op, total, average, types))
    return _call("div", total, prod(cut.devices for mine in divisions.values() for cut in mine))


def _sum(
    op: WelfordOp, total: TensorView, parts: TensorView, types: Sequence[ParallelType]
) -> ReductionOp:
    zero = sc.const(0, total.dtype())
    made = combine_parts(total, parts, types, kind="add", init=zero)
    if total not in op.outputs:  # propagation has recorded why these have parts
        record_parts(op, op.inp, made, "forward")
    return made


def _results(
    op: WelfordOp,
    mean: TensorView,
    part: TensorView,
    types: Sequence[ParallelType],
    count: Scalar,
) -> Iterator[TensorOp]:
    """Yields the ops that compute the results of `op`; these lose their reduction axes.

    `part` has what each device adds to the sum of squared deviations, `count` is the number of
    elements.
    """
    for out in op.outputs:
        out.domain = out.domain.without_root()
    is_wide = mean.dtype() is op.avg.dtype()
    yield LoadStoreOp(op.avg, mean) if is_wide else CastOp(op.avg, mean)
    if is_wide:
        yield _sum(op, op.var, part, types)
    else:
        total = copy_like(op.var, op.var.mesh, placement(op.var), dtype=part.dtype())
        yield _sum(op, total, part, types)
        yield CastOp(op.var, total)
    if op.n.uses() or op.n in op.n.fusion.outputs:
        shape = tuple(axis.size for axis in op.n.domain.no_reductions)
        yield FullOp(op.n, shape, sc.cast(count, op.n.dtype()))


def _place(made: Sequence[TensorOp]) -> None:
    """Divides the results of the ops `made` over devices like their operands.

    Skips results that are divided already.
    """
    for op in made:
        for out in op.outputs:
            if not spread_axes(out):
                for index, _ in tensor_operands(op):
                    apply_transfers(out, forward_cuts(op, index, out), DEVICE_TYPES)


def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, apply_pointwise(name, operands))


def _converted(tv: TensorView, dtype: DataType) -> TensorView:
    return typing_cast(TensorView, convert(tv, dtype))
