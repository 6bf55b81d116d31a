"""Reductions over devices or streams: partial sums, then sums over the explicit axis of the parts.

A partial sum has an axis with one element per device, or per step of a stream loop. Such a loop
runs on the host and computes one part per step. In the examples, {d} is the number of blocks of an
axis, `r` marks a reduction axis and `i` another axis. `rf` marks both parts of a split reduction
axis.

    out [M, N, rDIDx] = linear(x, w, bias)   ->   t [M, N, iDIDx{d}rf, r] = linear(x, w)
                                                  s [M, N, rDIDx{d}] = sum(t)
                                                  out = s + broadcast(bias)
    out [M, rstream{4}, r] = sum(x)          ->   t [M, istream{4}rf, r] = sum(x)     4 steps
                                                  out [M, r{4}] = sum(t)              afterwards
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from fuser.ir.axis_graph import mapped_axes, tensor_operands
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
from fuser.passes.view_ops import is_permute
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
    spread_axes,
    stream_axis_of,
    unparallelize,
)
from multidevice.sharding.propagation import (
    apply_steps,
    apply_transfers,
    backward_cuts,
    forward_cuts,
)
from multidevice.sharding.queries import local_extents
from multidevice.sharding.redistribution import SumStage, plan_sums
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


# ------------------------------------------------------------------ products without partial sums
def gather_for_products(fusion: Fusion) -> None:
    """Removes the division of a summed axis if it would require that one operand is divided anew.

    In the example, DIDx(K) is an axis K that is divided over devices, and `r` marks a summed axis.
    Devices divide M of `a` and K of `b`. For partial sums over parts of K, they would send blocks
    of `a` in an all-to-all, and then the sums in a reduce-scatter. Instead, `b` is gathered, and
    the result needs no communication:

        out [DIDx(M), N, rDIDx(K)] = matmul(a [DIDx(M), K], b [DIDx(K), N])
          ->  out [DIDx(M), N, rK] = matmul(a, b)

    The division is removed if another op reads all of `b` in any case. It is also removed if the
    extents are constants, and a gather sends no more elements.
    """
    for op in fusion.exprs:
        if not isinstance(op, Contraction):
            continue
        for number, cuts in reduction_cuts(op.out).items():
            ptype, axis = cuts[-1].ptype, op.out.domain.axes[number]
            if ptype.is_device and _is_gathered(op, axis, ptype):
                unparallelize(op.out, lambda a, p=ptype: a.ptype is p and a.is_reduction())


def _is_gathered(op: Contraction, summed: IterDomain, ptype: ParallelType) -> bool:
    """Returns whether `gather_for_products` removes the division of `summed`, an axis over which
    `op` sums. The operand of `op` that `ptype` divides along this axis is then gathered.
    """
    out = op.out
    kept = {a.number for a in out.domain.no_reductions}
    moved: TensorView | None = None
    gathered: tuple[TensorView, IterDomain] | None = None
    for index, operand in tensor_operands(op):
        source = next((p for p, c in mapped_axes(op, index) if c is summed), None)
        types = {c.ptype: a for a, mine in forward_cuts(op, index, out) for c in mine}
        axis = types.get(ptype)
        if source is None or axis is None:
            continue
        if axis is summed and axis_cuts(operand)[source.number][-1].ptype is ptype:
            gathered = operand, source
        elif axis.number in kept and ptype in {
            c.ptype for c in axis_cuts(out).get(axis.number, ())
        }:
            moved = operand
    if moved is None or gathered is None:
        return False
    if _is_read_whole(*gathered, ptype, besides=op):
        return True
    devices = next(c.devices for c in reduction_cuts(out)[summed.number] if c.ptype is ptype)
    sizes = [_local_elements(tv) for tv in (gathered[0], moved, out)]
    if None in sizes:
        return False
    whole, blocks, result = (size or 0 for size in sizes)
    return whole * devices <= blocks + result * devices


def _is_read_whole(
    tv: TensorView, axis: IterDomain, ptype: ParallelType, *, besides: TensorOp
) -> bool:
    """Returns whether an op needs a copy of `tv` whose axis `axis` is not divided along `ptype`.

    An op with one operand needs none: it runs on the operand as it is. The op `besides` does not
    count. If `tv` is a permutation of another tensor, ops that read that tensor count, too.
    """
    op = tv.definition()
    if op is not None and is_permute(op):
        source = next(p for p, c in mapped_axes(op, 0) if c.number == axis.number)
        if _is_read_whole(op.inputs[0], source, ptype, besides=op):
            return True
    for use in tv.uses():
        operands = list(tensor_operands(use))
        if use is besides or len(operands) == 1 or use.out_tensor.mesh != tv.mesh:
            continue
        for index, operand in operands:
            needs = {a.number: c for a, c in backward_cuts(use, index, use.out_tensor)}
            if operand is tv and ptype not in {c.ptype for c in needs.get(axis.number, ())}:
                return True
    return False


def _local_elements(tv: TensorView) -> int | None:
    """Returns how many elements of `tv` a device stores; None if an extent is symbolic."""
    sizes = [sc.int_value(size) for size in local_extents(tv)]
    return None if None in sizes else prod(size or 0 for size in sizes)


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
        elif not (reduces_one_device_axis(op) or types_of_parts(op)):
            _factor(fusion, op, cuts)


def exchange_partial_sums(fusion: Fusion) -> None:
    """Inserts an exchange of partial sums where each device starts its stream loop with another
    block (a swizzled stream).

    A stream loop computes one block of a tensor per step. With a swizzled stream, devices compute
    partial sums of different blocks in the same step, and these cannot be added. So each step sends
    its block to the device that sums, and the sum is made after the loop:

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
    """Replaces `op` by an op that computes partial sums and one op that adds all of them.

    `cuts` maps the numbers of reduction axes to their divisions. `add_partial_sums` rewrites the
    op that adds.
    """
    out = op.out_tensor
    local = _partial(op, cuts)
    computed = op.map_values(lambda v: local if v is out else v)
    kind = op.kind if isinstance(op, ReductionOp) else "add"
    init = op.init if isinstance(op, ReductionOp) else sc.const(0, out.dtype())
    types = [c.ptype for mine in cuts.values() for c in mine]
    total = combine_parts(out, local, types, kind=kind, init=init)
    fusion.replace_expr(op, [computed, total.replace(where=op.where)])


def combine_parts(
    out: TensorView, parts: TensorView, types: Collection[ParallelType], *, kind: str, init: Scalar
) -> ReductionOp:
    """Returns the op that combines partial results to `out`, along all mesh dimensions at once.

    `parts` has the axes of `out`, and for each type in `types` one more axis, which has this
    parallel type and the mark `rfactor`. The domain of `out` gets the axes that the op reduces.
    `kind` and `init` are those of `ReductionOp`. The pass `add_partial_sums` rewrites the op.
    """
    become_sum(out, parts, types)
    return ReductionOp(out, parts, init, kind=kind)


def _partial(op: TensorOp, cuts: dict[int, Cuts]) -> TensorView:
    """Creates the tensor of the partial sums of `op`, with one part per device or step of a stream
    loop.

    `cuts` maps the numbers of reduction axes to their divisions; each division becomes an axis of
    the new tensor that is not reduced. Those over devices are its last axes. A stream loop that
    computes the result of `op` block by block also computes the new tensor. Without such a loop, a
    stream loop that computes an operand of `op` does.
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
    # Axes that count parts of devices are last, so that partial sums can be added to one another.
    # Their order says how the divisions are nested.
    ranked = sorted(domain.loop, key=lambda a: a.is_device)
    whole = domain.having(logical=numbers(ranked), root=domain.logical_numbers)
    local.domain = whole.having(contiguity=contiguity_for(whole.logical))
    given = [(op.inputs[index], forward_cuts(op, index, out)) for index, _ in tensor_operands(op)]
    kept = [
        (operand, tuple((axes[a.number], mine) for a, mine in found if not a.is_reduction()))
        for operand, found in given
    ]
    busy = {c.ptype for mine in cuts.values() for c in mine}
    wanted = [(axes[n], mine) for n, mine in axis_cuts(out).items() if n not in cuts]
    if any(map(_has_steps, (out, *(operand for operand, _ in given)))):
        for axis, mine in wanted:
            add_cuts(local, axis.number, tuple(c for c in mine if c.ptype not in busy))
    else:
        # The result of a reduction has fewer elements than its operand: it is communicated instead.
        first = kept if isinstance(op, ReductionOp) else []
        for transfers in (*(found for v, found in first if v.mesh == local.mesh), tuple(wanted)):
            apply_transfers(local, transfers, DEVICE_TYPES)
    for operand, transfers in kept:
        apply_steps(local, operand, transfers)
    return local


def _has_steps(tv: TensorView) -> bool:
    """Returns whether a stream loop computes the tensor `tv`, or a reduction whose result it is."""
    return any(a.is_stream for a in spread_axes(tv))


def become_sum(out: TensorView, source: TensorView, types: Collection[ParallelType]) -> None:
    """Turns `out` into the sum of the partial sums `source` over their axes of the types `types`.

    The types are mesh dimensions and stream types. An axis of such a type has one part per device,
    or one part per step of a loop on the host. Only the axes of `out` change; the caller creates
    the op.
    """
    fusion, domain = out.fusion, out.domain.without_root()
    mine = iter(domain.logical)
    logical = [
        _summed(fusion, a) if a.ptype in types else next(mine) for a in source.domain.no_reductions
    ]
    summed = [a for a in logical if a.is_reduction()]
    assert len(summed) == len(types), f"{source} has no partial sums along some of {types}"
    allocation, contiguity = domain.allocation_numbers, contiguity_for(logical)
    if allocation:
        allocation = (*allocation, *numbers(summed))
        contiguity = (*domain.contiguity, *(None for _ in summed))
    out.domain = domain.having(
        logical=numbers(logical),
        loop=(*domain.loop_numbers, *numbers(summed)),
        allocation=allocation,
        contiguity=contiguity,
        axes=summed,
    )


# ------------------------------------------------------------------ sums of partial sums
def add_partial_sums(fusion: Fusion) -> None:
    """Rewrites every sum of partial sums as the cheapest sequence of communications.

    Before: one op adds the parts along all mesh dimensions and streams, and its result may be
    divided in any way. After: each op adds the parts along one mesh dimension or stream, or is a
    copy that changes the division along one mesh dimension.

        out [DIDx(M), N] = sum(t [M, N, DIDx, DIDy])
          ->  s [DIDx(M), N, DIDy] = sum(t)             reduce-scatter
              out = sum(s)                              allreduce of one block
    """
    for op in fusion.exprs:
        if isinstance(op, ReductionOp) and op.inp.mesh == op.out.mesh:
            types = types_of_parts(op)
            if types:
                _add_in_steps(fusion, op, types)


def types_of_parts(op: TensorOp) -> tuple[ParallelType, ...]:
    """Returns the parallel types of the axes over which `op` adds partial sums, one for each axis
    that `op` reduces.

    They are mesh dimensions, if the axis has one part per device, and stream types, if it has one
    part per step of a loop on the host. Returns () if `op` reduces an axis that has no such parts.
    """
    if not isinstance(op, ReductionOp):
        return ()
    reduced = [(p, c) for p, c in mapped_axes(op, 0) if c.is_reduction()]
    is_sum = all(p.ptype in SPREAD_TYPES and c.ptype is _summed_type(p.ptype) for p, c in reduced)
    return tuple(p.ptype for p, _ in reduced) if is_sum else ()


def _add_in_steps(fusion: Fusion, op: ReductionOp, types: tuple[ParallelType, ...]) -> None:
    """Replaces an op that adds partial sums along all types in `types` by a sequence of ops, which
    `_stages` plans. Each adds the parts along one type, or changes the division over devices.
    """
    out, at, left = op.out, op.inp, types
    stages = _stages(op, types)
    if not stages:
        return
    ops: list[TensorOp] = []
    for stage in (*stages, None):
        rest = () if stage is None else tuple(c.ptype for c in stage.parts)
        added = [p for p in left if p not in rest]
        made = out if stage is None else _staged(at, stage, left, out)
        if stage is None:
            become_sum(out, at, added)
        step = ReductionOp(made, at, op.init, kind=op.kind) if added else LoadStoreOp(made, at)
        ops.append(step.replace(where=op.where))
        at, left = made, rest
    fusion.replace_expr(op, ops)


def _stages(op: ReductionOp, types: tuple[ParallelType, ...]) -> list[SumStage]:
    """Returns the stages between the partial sums that `op` adds, along `types`, and its result.

    A stage says how the axes are divided, and along which types there still are parts.
    """
    axes, target = op.inp.domain.no_reductions, placement(op.out)
    have = [cuts for a, cuts in zip(axes, placement(op.inp), strict=True) if a.ptype not in types]
    parts = {c.ptype: c for cuts in placement(op.inp) for c in cuts if c.ptype in types}
    if all(c.ptype.is_device for cuts in (*have, *target, parts.values()) for c in cuts):
        copied = [p for p, a in enumerate(op.out.domain.no_reductions) if a.is_broadcast]
        source = SumStage(tuple(have), tuple(parts[p] for p in DEVICE_TYPES if p in parts))
        return plan_sums(source, target, copied)
    order = _sum_order(types, target)
    pending = [order[k:] for k in range(1, len(order))]
    return [
        SumStage(
            tuple(tuple(c for c in cuts if c.ptype not in rest) for cuts in target),
            tuple(parts[p] for p in rest),
        )
        for rest in pending
    ]


def _sum_order(types: Collection[ParallelType], targets: Placement) -> list[ParallelType]:
    """Returns `types` in the order in which partial sums are added, if a stream loop computes them.

    The types are those along which a reduction axis was divided: mesh dimensions (one part per
    device) and stream types (one part per step of the loop). The parts along each type are added by
    an op of their own. `targets` says how the axes of the final result are divided.

    - Stream types are first, because their sums are local.
    - If two types divide an axis of the result, one inside the blocks of the other, the outer one
      is first, so that each sum scatters whole blocks.
    - Otherwise mesh_x is first, then mesh_y and mesh_z.
    """
    depth = {c.ptype: d for mine in targets for d, c in enumerate(mine)}
    return sorted(types, key=lambda p: (p.is_device, depth.get(p, 0), SPREAD_TYPES.index(p)))


def _staged(
    source: TensorView, stage: SumStage, types: Collection[ParallelType], out: TensorView
) -> TensorView:
    """Creates a tensor for the stage `stage` between the partial sums `source` and their sum `out`.

    `source` has one axis of parts for each type in `types`. In the new tensor, the axes of the
    types that are not in `stage.parts` are reduced.
    """
    fusion, rest = out.fusion, {c.ptype for c in stage.parts}
    axes: list[IterDomain] = []
    for a in source.domain.no_reductions:
        if a.ptype not in types:
            axes.append(fusion.clone_axis(a))
        elif a.ptype in rest:
            axes.append(fusion.clone_axis(a, ptype=a.ptype, rfactor=a.rfactor))
        else:
            axes.append(_summed(fusion, a))
    made = fusion.new_tensor(axes, out.dtype(), mesh=out.mesh)
    plain = [a for a in axes if not (a.ptype in rest or a.is_reduction())]
    for axis, cuts in zip(plain, stage.placement, strict=True):
        add_cuts(made, axis.number, cuts)
    return made


def _summed(fusion: Fusion, axis: IterDomain) -> IterDomain:
    """Returns a new reduction axis over the parts that the axis `axis` counts."""
    kind, ptype = IterType.reduction, _summed_type(axis.ptype)
    return fusion.clone_axis(axis, kind=kind, ptype=ptype)


def _summed_type(ptype: ParallelType) -> ParallelType:
    """Returns the parallel type of the axis over which partial sums of type `ptype` are added.

    For a mesh dimension this is the dimension itself, because devices then communicate. For a
    stream it is serial, because one op adds the parts of all steps.
    """
    return ptype if ptype.is_device else ParallelType.serial
