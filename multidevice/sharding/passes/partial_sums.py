"""Reductions over devices or streams: partial sums, then sums over the explicit axis of the parts.

A partial sum has an axis with one element per device, or per step of a stream loop. Such a loop
runs on the host and computes one part per step. In the examples, `r` is a reduction axis, and `rf`
marks both parts of a split reduction axis.

    out [M, N, rDIDx] = linear(x, w, bias)   ->   t [M, N, iDIDx{d}rf, r] = linear(x, w)
                                                  s [M, N, rDIDx{d}] = sum(t)
                                                  out = s + broadcast(bias)
    out [M, rstream{4}, r] = sum(x)          ->   t [M, istream{4}rf, r] = sum(x)     4 steps
                                                  out [M, r{4}] = sum(t)              afterwards
"""

from __future__ import annotations

from dataclasses import replace

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.domain.tensor_domain import IterDomain, contiguity_for, numbers
from fuser.ir.dtypes import HALF_LIKE, DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    Contraction,
    LinearOp,
    LoadStoreOp,
    ReductionOp,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES, IterType, ParallelType
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Cut,
    Cuts,
    Placement,
    add_cut,
    add_cuts,
    axis_cuts,
    clone_domain,
    copy_like,
    placement,
    reduction_cuts,
    stream_axis_of,
    unparallelize,
)
from multidevice.sharding.propagation import apply_steps, forward_cuts
from multidevice.sharding.reshard import exchanged_axes


# ------------------------------------------------------------------ row-parallel bias
def add_row_parallel_bias_last(fusion: Fusion) -> None:
    """Adds the bias of a linear layer after the layer's sum over devices.

    If each device added the bias before the sum, the sum would contain the bias once per device.
    For 16-bit floats, the bias is added in Float, and the result is cast to the dtype of the layer.
    """
    for op in fusion.exprs:
        if isinstance(op, LinearOp) and op.bias is not None and reduction_cuts(op.out):
            _take_bias_out(fusion, op, op.bias)


def _take_bias_out(fusion: Fusion, op: LinearOp, bias: TensorView) -> None:
    out, flags = op.out, op.bias_lacks
    domain, _ = clone_domain(fusion, out.domain)
    plain = fusion.new_tensor(domain, out.dtype(), mesh=out.mesh)
    out.domain = out.domain.without_root()
    ops: list[TensorOp] = [op.replace(out=plain, bias=None)]
    addend = bias
    if any(flags):
        axes = [
            fusion.clone_axis(a) if not new else fusion.new_axis(sc.ONE, IterType.broadcast)
            for new, a in zip(flags, out.domain.no_reductions, strict=True)
        ]
        addend = fusion.new_tensor(axes, bias.dtype(), mesh=out.mesh)
        for new, a, cuts in zip(flags, axes, placement(out, DEVICE_TYPES), strict=True):
            if not new:
                add_cuts(addend, a.number, cuts)
        ops.append(BroadcastOp(addend, bias, flags=flags))
    if out.dtype() in HALF_LIKE:
        # Like every sum of 16-bit floats: computed as float, rounded once.
        terms = [_as_float(tv, ops) for tv in (plain, addend)]
        total = copy_like(out, out.mesh, placement(out), dtype=DataType.Float)
        ops += [BinaryOp(total, *terms, kind="add"), CastOp(out, total)]
    else:
        ops.append(BinaryOp(out, plain, addend, kind="add"))
    fusion.replace_expr(op, [made.replace(where=op.where) for made in ops])


def _as_float(tv: TensorView, ops: list[TensorOp]) -> TensorView:
    """Appends a cast of `tv` to Float to the list `ops`; returns the result of the cast."""
    wide = copy_like(tv, tv.mesh, placement(tv), dtype=DataType.Float)
    ops.append(CastOp(wide, tv))
    return wide


# ------------------------------------------------------------------ partial sums
def factor_spread_reductions(fusion: Fusion) -> None:
    """Splits every reduction over devices or over the steps of a stream loop in two: partial sums,
    then their sum.

    A stream loop runs on the host and computes one part per step. The tensor of partial sums has an
    axis with one part per device or step; the user's tensor becomes the sum over that axis. A
    reduction axis that is divided several times, over mesh dimensions or steps, gives one such sum
    for each division. Only reductions, matmuls and linear layers are split. For any other op, the
    division of the reduction axis is removed, so that each device later gets the whole operand.
    """
    for op in fusion.exprs:
        cuts = reduction_cuts(op.out_tensor)
        if not cuts:
            continue
        if not isinstance(op, ReductionOp | Contraction):
            # The op declares no way to combine partial results, so the operand is gathered instead.
            for out in op.outputs:
                unparallelize(out, lambda a: a.is_reduction())
        elif not reduces_one_device_axis(op):
            _factor(fusion, op, cuts)


def exchange_partial_sums(fusion: Fusion) -> None:
    """Inserts an exchange of partial sums where each device starts its stream loop with another
    block.

    A stream loop computes one block of a tensor per step. In the same step, such devices compute
    partial sums of different blocks, which cannot be added. So each step sends its block to the
    device that sums, and the sum is made after the loop:

        t [DIDx, stream swizzled, N], out [DIDx(M), N] = sum(t)
            ->  u [stream, DIDx, N] = set(t)     each step sends its block to the device that sums
                out = sum(u)                     after the steps
    """
    for op in fusion.exprs:
        if not isinstance(op, ReductionOp) or not reduces_one_device_axis(op):
            continue
        partial, out = op.inp, op.out
        found = stream_axis_of(partial)
        if found is None or found[1].swizzle is None or partial.mesh != out.mesh:
            continue
        summed = next(a for a in out.domain.logical if a.is_reduction())
        have, want = placement(partial), iter(placement(out))
        axes = zip(out.domain.logical, have, strict=True)
        cuts = tuple(
            (Cut(ParallelType.stream, c[0].count, c[0].whole),) if a is summed and c else next(want)
            for a, c in axes
        )
        copy = copy_like(partial, partial.mesh, cuts)
        sent = LoadStoreOp(copy, partial).replace(where=op.where)
        if exchanged_axes(sent) is None:
            continue
        unparallelize(out, lambda a: a.is_reduction())
        fusion.replace_expr(op, [sent, op.replace(inp=copy)])


def reduces_one_device_axis(op: TensorOp) -> bool:
    """Returns whether the op reduces exactly one axis, of which each device has one index.

    Such a reduction is a single communication: a sum over devices.
    """
    reduced = [a for a in op.out_tensor.domain.logical if a.is_reduction()]
    return isinstance(op, ReductionOp) and len(reduced) == 1 and reduced[0].is_device


def _factor(fusion: Fusion, op: TensorOp, cuts: dict[int, Cuts]) -> None:
    out = op.out_tensor
    types = [c.ptype for mine in cuts.values() for c in mine]
    local = _partial(op, cuts)
    kind = op.kind if isinstance(op, ReductionOp) else "add"
    init = op.init if isinstance(op, ReductionOp) else sc.const(0, out.dtype())
    computed = op.map_values(lambda v: local if v is out else v)
    sums = combine_parts(out, local, types, kind=kind, init=init)
    fusion.replace_expr(op, [computed, *(made.replace(where=op.where) for made in sums)])


def combine_parts(
    out: TensorView, parts: TensorView, types: list[ParallelType], *, kind: str, init: Scalar
) -> list[TensorOp]:
    """Returns the ops that combine partial results to `out`, one op for each type in `types`.

    `parts` has the axes of `out`, and for each type one more axis, which has this parallel type and
    the mark `rfactor`. The last op computes `out`, whose domain gets the axis that the op reduces.
    `kind` and `init` are those of `ReductionOp`.
    """
    targets = placement(out)
    ops: list[TensorOp] = []
    source, last = parts, _sum_order(types, targets)[-1]
    for ptype in _sum_order(types, targets):
        pending = set(types) - {ptype}
        types = [t for t in types if t is not ptype]
        if ptype is last:
            _become_sum(out, source, ptype)
            result = out
        else:
            result = _intermediate_sum(source, ptype, out, pending)
        ops.append(ReductionOp(result, source, init, kind=kind))
        source = result
    return ops


def _sum_order(types: list[ParallelType], targets: Placement) -> list[ParallelType]:
    """Returns `types` in the order in which partial sums are added, one type after the other.

    The types are the mesh dimensions and stream types along which a reduction axis was divided; the
    parts along each type are added by an op of their own. `targets` says how the axes of the final
    result are divided.

    - Stream types are first, because their sums are local.
    - If two types divide an axis of the result, one inside the blocks of the other, the outer one
      is first, so that each sum scatters whole blocks.
    - Otherwise mesh_x is first, then mesh_y and mesh_z.
    """
    depth = {c.ptype: d for mine in targets for d, c in enumerate(mine)}
    return sorted(types, key=lambda p: (p.is_device, depth.get(p, 0), SPREAD_TYPES.index(p)))


def _partial(op: TensorOp, cuts: dict[int, Cuts]) -> TensorView:
    """Creates the tensor of the partial sums of `op`, with one part per device or step of a stream
    loop.

    `cuts` maps the numbers of reduction axes to their divisions; each division becomes an axis of
    the new tensor that is not reduced. A stream loop computes the new tensor block by block if it
    does so with the result of `op`, or else with an operand of `op`.
    """
    out, fusion = op.out_tensor, op.out_tensor.fusion
    axes = {a.number: fusion.clone_axis(a) for a in out.domain.maybe_root}
    logical = [axes[a.number] for a in out.domain.logical]
    local = fusion.new_tensor(logical, out.dtype(), mesh=out.mesh)
    for number, mine in cuts.items():
        for cut in mine:
            # A cut without a split also needs an axis of extent 1, to contract over on each device.
            add_cut(local, axes[number].number, replace(cut, whole=False))
    is_rfactor = {n for t in local.domain.transforms for n in t.outputs}
    spread = {a.number for a in local.domain.loop if a.ptype in SPREAD_TYPES}
    domain = local.domain.map_axes(
        lambda a: replace(
            a,
            rfactor=a.number in is_rfactor,
            kind=IterType.iteration if a.number in spread else a.kind,
        )
    )
    whole = domain.having(logical=domain.loop_numbers, root=domain.logical_numbers)
    local.domain = whole.having(contiguity=contiguity_for(whole.logical))
    busy = {c.ptype for mine in cuts.values() for c in mine}
    for number, mine in axis_cuts(out).items():
        if number not in cuts:
            add_cuts(local, axes[number].number, tuple(c for c in mine if c.ptype not in busy))
    for index, _ in tensor_operands(op):
        found = forward_cuts(op, index, out)
        steps = tuple((axes[a.number], mine) for a, mine in found if not a.is_reduction())
        apply_steps(local, op.inputs[index], steps)
    return local


def _become_sum(out: TensorView, source: TensorView, ptype: ParallelType) -> None:
    """Turns `out` into the sum of the partial sums `source` over their axis of type `ptype`.

    `ptype` is a mesh dimension or a stream type; the axis has one part per device or step. Only the
    axes of `out` change; the caller creates the op.
    """
    fusion, domain = out.fusion, out.domain.without_root()
    mine = iter(domain.logical)
    summed: IterDomain | None = None
    logical: list[IterDomain] = []
    for axis in source.domain.no_reductions:
        if axis.ptype is ptype and axis.rfactor:
            summed = fusion.clone_axis(axis, kind=IterType.reduction, ptype=_summed_type(ptype))
            logical.append(summed)
        else:
            logical.append(next(mine))
    assert summed is not None, f"{source} has no partial-sum axis along {ptype.text}"
    allocation, contiguity = domain.allocation_numbers, contiguity_for(logical)
    if allocation:
        allocation, contiguity = (*allocation, summed.number), (*domain.contiguity, None)
    out.domain = domain.having(
        logical=numbers(logical),
        loop=(*domain.loop_numbers, summed.number),
        allocation=allocation,
        contiguity=contiguity,
        axes=(summed,),
    )


def _summed_type(ptype: ParallelType) -> ParallelType:
    """Returns the parallel type of the axis over which partial sums of type `ptype` are added.

    For a mesh dimension this is the dimension itself, because devices then communicate. For a
    stream it is serial, because one op adds the parts of all steps.
    """
    return ptype if ptype.is_device else ParallelType.serial


def _intermediate_sum(
    source: TensorView, ptype: ParallelType, out: TensorView, pending: set[ParallelType]
) -> TensorView:
    """Creates a tensor for the sum of the partial sums `source` over their axis of type `ptype`.

    Partial sums have one axis for each mesh dimension or stream type along which the sum was
    divided. The axes of the types `pending` are still to be summed, so they remain. The new tensor
    is divided over devices like `out`, the final result, but not along the types in `pending`: a
    tensor may have each type on one axis only.
    """
    fusion = out.fusion
    axes = tuple(
        fusion.clone_axis(
            a,
            ptype=_summed_type(a.ptype) if a.rfactor else ParallelType.serial,
            kind=IterType.reduction if a.rfactor and a.ptype is ptype else a.kind,
            rfactor=a.rfactor and a.ptype is not ptype,
        )
        for a in source.domain.no_reductions
    )
    result = fusion.new_tensor(axes, out.dtype(), mesh=out.mesh)
    plain = [a for a in axes if not (a.is_device or a.is_reduction())]
    for axis, mine in zip(plain, placement(out), strict=True):
        free = tuple(c for c in mine if c.ptype not in pending)
        add_cuts(result, axis.number, free)
    return result
