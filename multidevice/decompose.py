"""Decomposition: every op becomes local, or exactly one collective or local slice.

Before: shardings are propagated, operands and results of an op may be placed differently. After:
an op whose operand and result differ in sharding is a `set` or a reduction over one device axis,
with one device type changing.

    out [M, N, rDIDx] = linear(x, w, bias)   ->   t [M, N, iDIDx{d}rf, r] = linear(x, w)
                                                  s [M, N, rDIDx{d}] = sum(t)          (allreduce)
                                                  out = s + broadcast(bias)
    out [M, DIDx(N)] = linear(x [DIDx(M), K], w)  ->  c [M, K] = set(x)                (allgather)
                                                      out = linear(c, w)
"""

from __future__ import annotations

from dataclasses import replace

from fuser.errors import ShardingError
from fuser.ir import scalar as sc
from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.domain import IterDomain, TensorDomain, contiguity_for
from fuser.ir.dtypes import HALF_LIKE, DataType, nbytes_of
from fuser.ir.fusion import Fusion
from fuser.ir.mesh import DeviceMesh
from fuser.ir.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    CatOp,
    IotaOp,
    LinearOp,
    LoadStoreOp,
    MatmulOp,
    ReductionOp,
    TensorOp,
)
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, IterType, ParallelType
from multidevice.communication import check_lowerable, is_copy
from multidevice.placement import (
    Cuts,
    Placement,
    add_cut,
    axis_cuts,
    clone_domain,
    copy_like,
    placement,
    reduction_cuts,
    unparallelize,
    without_root,
)
from multidevice.propagate import (
    Transfers,
    apply_transfers,
    backward_cuts,
    fitting_placement,
    forward_cuts,
    has_cut_origin,
)
from multidevice.sharding import have_different_shardings, is_resharding
from multidevice.stepwise import Copies, split_copies


def decompose_reshardings(fusion: Fusion) -> None:
    """Rewrite the fusion until every resharding op is one collective or one local slice.

    Raises:
        ShardingError: an op cannot be computed with the placements asked for.
        UnsupportedError: a change of placement that no supported collective makes.
    """
    if not any(tv.mesh is not None for tv in fusion.tensors()):
        return
    add_row_parallel_bias_last(fusion)
    factor_device_reductions(fusion)
    copies = Copies(fusion)
    insert_reshardings(fusion, copies)
    split_copies(fusion, copies)
    for op in fusion.exprs:
        check_lowerable(op)


# ------------------------------------------------------------------ row-parallel bias
def add_row_parallel_bias_last(fusion: Fusion) -> None:
    """Take the bias out of every linear whose sum is spread over devices, and add it once, after.

    The sum is cast back to the dtype of the linear; bias add and cast fuse with what follows.
    """
    for op in fusion.exprs:
        if isinstance(op, LinearOp) and op.bias is not None and reduction_cuts(op.out):
            _take_bias_out(fusion, op, op.bias)


def _take_bias_out(fusion: Fusion, op: LinearOp, bias: TensorView) -> None:
    out, where = op.out, op.where
    domain, _ = clone_domain(fusion, out.domain)
    plain = fusion.new_tensor(domain, out.dtype(), mesh=out.mesh)
    out.domain = without_root(out.domain)
    ops: list[TensorOp] = [op.replace(out=plain, bias=None)]
    addend = bias
    if out.ndim > 1:
        flags = (True,) * (out.ndim - 1) + (False,)
        axes = [
            fusion.clone_axis(a) if not new else fusion.new_axis(sc.ONE, IterType.broadcast)
            for new, a in zip(flags, out.domain.no_reductions, strict=True)
        ]
        addend = fusion.new_tensor(axes, bias.dtype(), mesh=out.mesh)
        ops.append(BroadcastOp(addend, bias, flags=flags).replace(where=where))
    total = out
    if out.dtype() in HALF_LIKE:
        total = copy_like(out, out.mesh, placement(out), dtype=DataType.Float)
    addition = BinaryOp(total, plain, addend, kind="add").replace(where=where)
    ops.append(addition)
    if total is not out:
        ops.append(CastOp(out, total).replace(where=where))
    fusion.replace_expr(op, ops)
    if addend is not bias:
        apply_transfers(addend, backward_cuts(addition, 1, total), DEVICE_TYPES)


# ------------------------------------------------------------------ partial sums
def factor_device_reductions(fusion: Fusion) -> None:
    """Split every reduction that is spread over devices into a local op and sums over device axes.

    The local op's result has an explicit device axis: `[M, N, iDIDx{d}rf, r{K/d}rf]`; the user's
    tensor becomes the sum over it, `[M, N, rDIDx{d}]`. With several device types the sums follow
    each other, one type at a time.
    """
    for op in fusion.exprs:
        cuts = reduction_cuts(op.out_tensor)
        if not cuts:
            continue
        if not isinstance(op, ReductionOp | MatmulOp | LinearOp):
            # No pairwise combination is declared: the operand is gathered instead.
            for out in op.outputs:
                unparallelize(out, lambda a: a.is_reduction() and a.is_device)
        elif not _reduces_one_device_axis(op):
            _factor(fusion, op, cuts)


def _reduces_one_device_axis(op: TensorOp) -> bool:
    """Whether the op is a sum over a single axis that is a device axis as a whole."""
    reduced = [a for a in op.out_tensor.domain.logical if a.is_reduction()]
    return isinstance(op, ReductionOp) and len(reduced) == 1 and reduced[0].is_device


def _factor(fusion: Fusion, op: TensorOp, cuts: dict[int, Cuts]) -> None:
    out = op.out_tensor
    types = [c.ptype for mine in cuts.values() for c in mine]
    local = _partial(out, cuts)
    ops = [op.map_values(lambda v: local if v is out else v)]
    kind = op.kind if isinstance(op, ReductionOp) else "add"
    init = op.init if isinstance(op, ReductionOp) else sc.const(0, out.dtype())
    targets = placement(out)
    source, last = local, _sum_order(types, targets)[-1]
    for ptype in _sum_order(types, targets):
        pending = set(types) - {ptype}
        types = [t for t in types if t is not ptype]
        if ptype is last:
            _become_sum(out, source, ptype)
            result = out
        else:
            result = _intermediate_sum(source, ptype, out, pending)
        ops.append(ReductionOp(result, source, init, kind=kind).replace(where=op.where))
        source = result
    fusion.replace_expr(op, ops)


def _sum_order(types: list[ParallelType], targets: Placement) -> list[ParallelType]:
    """Return the device types in the order of summation: mesh_x first.

    A type that also cuts the result comes after the types that cut the same axis outside it, so
    that each step scatters whole blocks.
    """
    depth = {c.ptype: d for mine in targets for d, c in enumerate(mine)}
    return sorted(types, key=lambda p: (depth.get(p, 0), DEVICE_TYPES.index(p)))


def _partial(out: TensorView, cuts: dict[int, Cuts]) -> TensorView:
    """Create the result of the local op: device axes of reductions become iteration axes."""
    fusion = out.fusion
    axes = {a.number: fusion.clone_axis(a) for a in out.domain.maybe_root}
    local = fusion.new_tensor(
        replace(
            out.domain,
            logical=tuple(axes[a.number] for a in out.domain.logical),
            loop=tuple(axes[a.number] for a in out.domain.logical),
            root=(),
            allocation=(),
            contiguity=contiguity_for(out.domain.logical),
            transforms=(),
        ),
        out.dtype(),
        mesh=out.mesh,
    )
    for number, mine in cuts.items():
        for cut in mine:
            # A whole cut still needs an axis of extent 1 to contract locally.
            add_cut(local, axes[number].number, replace(cut, whole=False))
    is_rfactor = {o.number for t in local.domain.transforms for o in t.outputs}
    device = {a.number for a in local.domain.loop if a.is_device}
    local.domain = local.domain.map_axes(
        lambda a: replace(
            a,
            rfactor=a.number in is_rfactor,
            kind=IterType.iteration if a.number in device else a.kind,
        )
    )
    domain = local.domain
    local.domain = replace(
        domain, logical=domain.loop, root=domain.logical, contiguity=contiguity_for(domain.loop)
    )
    busy = {c.ptype for mine in cuts.values() for c in mine}
    for number, mine in axis_cuts(out).items():
        if number not in cuts:
            _cut_all(local, axes[number].number, tuple(c for c in mine if c.ptype not in busy))
    return local


def _cut_all(tv: TensorView, number: int, cuts: Cuts) -> None:
    for cut in cuts:
        add_cut(tv, number, cut)


def _become_sum(out: TensorView, source: TensorView, ptype: ParallelType) -> None:
    """Rebind `out` as the sum of `source` over its axis with device type `ptype`."""
    fusion, domain = out.fusion, without_root(out.domain)
    mine = iter(domain.logical)
    summed: IterDomain | None = None
    logical: list[IterDomain] = []
    for axis in source.domain.no_reductions:
        if axis.ptype is ptype and axis.rfactor:
            summed = fusion.clone_axis(axis, kind=IterType.reduction, ptype=ptype)
            logical.append(summed)
        else:
            logical.append(next(mine))
    assert summed is not None, f"{source} has no partial-sum axis along {ptype.text}"
    allocation, contiguity = domain.allocation, domain.contiguity
    if allocation:
        allocation, contiguity = (*allocation, summed), (*contiguity, None)
    else:
        contiguity = contiguity_for(logical)
    out.domain = TensorDomain(
        logical=tuple(logical),
        loop=(*domain.loop, summed),
        allocation=allocation,
        contiguity=contiguity,
        transforms=domain.transforms,
    )


def _intermediate_sum(
    source: TensorView, ptype: ParallelType, out: TensorView, pending: set[ParallelType]
) -> TensorView:
    """Create the sum over one of several device axes, placed like `out` where types are free."""
    fusion = out.fusion
    axes = tuple(
        fusion.clone_axis(
            a,
            ptype=a.ptype if a.rfactor and a.is_device else ParallelType.serial,
            kind=IterType.reduction if a.rfactor and a.ptype is ptype else a.kind,
            rfactor=a.rfactor and a.ptype is not ptype,
        )
        for a in source.domain.no_reductions
    )
    result = fusion.new_tensor(axes, out.dtype(), mesh=out.mesh)
    plain = [a for a in axes if not (a.is_device or a.is_reduction())]
    for axis, mine in zip(plain, placement(out), strict=True):
        free = tuple(c for c in mine if c.ptype not in pending)
        _cut_all(result, axis.number, free)
    return result


# ------------------------------------------------------------------ copies around ops
def insert_reshardings(fusion: Fusion, copies: Copies) -> None:
    """Put resharding copies before or after the ops whose operands and results differ in placement.

    Several consumers of one tensor share a copy with the same placement.
    """
    for op in fusion.exprs:
        op = _align_siblings(fusion, _free_whole_axes(fusion, op))
        if is_copy(op):
            continue
        differing = _differing(op)
        if not differing:
            continue
        if _goes_after(op) and _insert_after(fusion, op):
            continue
        for index in differing:
            op = _insert_before(op, index, copies)
        if _differing(op):
            raise ShardingError(
                f"{op.name} of {', '.join(str(v) for _, v in tensor_operands(op))} cannot be "
                f"computed as {op.out_tensor}: an operand has no matching placement"
            )


def _needs(op: TensorOp, index: int) -> Transfers:
    return backward_cuts(op, index, op.out_tensor)


def _differing(op: TensorOp) -> list[int]:
    """Return the operands that are not placed as the op's result needs them."""
    if _reduces_one_device_axis(op):
        # The collective itself: its operand is cut on the reduced axis, and nowhere else differs.
        operand = op.inputs[0]
        types = [p for p in DEVICE_TYPES if have_different_shardings(op, 0, (p,))]
        summed = next(a.ptype for a in op.out_tensor.domain.logical if a.is_reduction())
        reduced = next(p for p, c in mapped_axes(op, 0) if c.is_reduction())
        have = axis_cuts(operand, DEVICE_TYPES).get(reduced.number, ())
        is_fit = types == [summed] and any(c.ptype is summed for c in have)
        return [] if is_fit else [0]
    return [
        index
        for index, _ in tensor_operands(op)
        if any(have_different_shardings(op, index, out=out) for out in op.outputs)
    ]


def _align_siblings(fusion: Fusion, op: TensorOp) -> TensorOp:
    """Give all results of an op the placement of the first, and copy those that differ from it."""
    first = op.out_tensor
    computed, copies = op, list[TensorOp]()
    for out in op.outputs[1:]:
        if _device_cuts(out) == _device_cuts(first) and out.mesh == first.mesh:
            continue
        local = _result_like(out, first.mesh)
        unparallelize(local, lambda a: True)
        for axis, cuts in zip(local.domain.logical, _device_cuts(first), strict=True):
            _cut_all(local, axis.number, cuts)
        out.domain = without_root(out.domain)
        computed = computed.map_values(lambda v, o=out, n=local: n if v is o else v)
        copies.append(LoadStoreOp(out, local).replace(where=op.where))
    if copies:
        fusion.replace_expr(op, [computed, *copies])
    return computed


def _device_cuts(tv: TensorView) -> list[Cuts]:
    """Return the device cuts per logical axis, reductions included."""
    cuts = axis_cuts(tv, DEVICE_TYPES)
    return [cuts.get(a.number, ()) for a in tv.domain.logical]


def _free_whole_axes(fusion: Fusion, op: TensorOp) -> TensorOp:
    """Compute an op whole along axes that it cannot split, and cut its result in a copy.

    Such are the axes that a cat joins, an iota counts, a slice or pad resizes, and the inner axes of
    a reshape.
    """
    out = op.out_tensor
    whole = _uncuttable_axes(op)
    cut = [n for n, cuts in axis_cuts(out, DEVICE_TYPES).items() if cuts and n in whole]
    if not cut:
        return op
    types = {c.ptype for n in cut for c in axis_cuts(out, DEVICE_TYPES)[n]}
    local = _result_like(out, out.mesh)
    unparallelize(local, lambda a: a.ptype in types and not a.is_reduction())
    computed = op.map_values(lambda v: local if v is out else v)
    out.domain = without_root(out.domain)
    fusion.replace_expr(op, [computed, LoadStoreOp(out, local).replace(where=op.where)])
    return computed


def _uncuttable_axes(op: TensorOp) -> set[int]:
    """Return the logical axes of the result whose cuts no operand can match, by number."""
    out = op.out_tensor
    if isinstance(op, CatOp | IotaOp):
        return {out.domain.logical[op.dim if isinstance(op, CatOp) else 0].number}
    cuts = axis_cuts(out, DEVICE_TYPES)
    return {a.number for a in out.domain.logical if not has_cut_origin(out, a, cuts)}


def _result_like(out: TensorView, mesh: DeviceMesh | None) -> TensorView:
    """Create a tensor with the domain of `out` under fresh numbers, without declared memory order."""
    domain, _ = clone_domain(out.fusion, out.domain)
    plain = replace(domain, allocation=(), contiguity=contiguity_for(domain.logical))
    return out.fusion.new_tensor(plain, out.dtype(), mesh=mesh)


# -- after
def _goes_after(op: TensorOp) -> bool:
    """Whether the op should run with its operand's placement: one in, one out, and not dearer.

    Slicing the operand of the op costs less than slicing its result, and gathering before a cast to
    a wider type costs less than gathering after it.
    """
    operands = list(tensor_operands(op))
    if len(operands) != 1 or len(op.outputs) != 1 or _reduces_one_device_axis(op):
        return False
    operand, out = operands[0][1], op.out_tensor
    if nbytes_of(operand.dtype()) < nbytes_of(out.dtype()):
        return False
    return any(any(c.ptype.is_device for c in cuts) for cuts in placement(operand))


def _insert_after(fusion: Fusion, op: TensorOp) -> bool:
    """Run the op with its operand's placement and copy the result; False if that is impossible."""
    ((index, operand),) = tensor_operands(op)
    out = op.out_tensor
    local = _result_like(out, operand.mesh)
    unparallelize(local, lambda a: True)
    computed = op.map_values(lambda v: local if v is out else v)
    try:
        cuts = forward_cuts(computed, index, local)
    except ShardingError:
        return False
    apply_transfers(local, cuts, DEVICE_TYPES)
    if any(a.is_reduction() and a.is_device for a in local.domain.loop):
        return False
    if is_resharding(computed):
        return False
    out.domain = without_root(out.domain)
    fusion.replace_expr(op, [computed, LoadStoreOp(out, local).replace(where=op.where)])
    return True


# -- before
def _insert_before(op: TensorOp, index: int, copies: Copies) -> TensorOp:
    """Give one operand the placement that the result needs, through a shared copy."""
    operand, out = op.inputs[index], op.out_tensor
    cuts = fitting_placement(operand, _needs(op, index), out.mesh)
    return copies.feed(op, index, mesh=out.mesh, cuts=cuts)
