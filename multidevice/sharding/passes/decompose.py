"""Decomposition: every op becomes local, or exactly one collective or local slice.

Before: shardings are propagated; operands and results of an op may be divided differently over
devices. After: an op whose operand and result are divided differently is a `set` (a copy) or a
reduction over one axis that is divided over devices. Such an op changes the division along exactly
one mesh dimension. In the examples, DIDx(N) is an axis N that is divided over the devices of mesh
dimension DIDx:

    out [M, DIDx(N)] = linear(x [DIDx(M), K], w)  ->  c [M, K] = set(x)           (allgather)
                                                      out = linear(c, w)
    y [M, N] = relu(x [DIDx(M), N])               ->  t [DIDx(M), N] = relu(x)
                                                      y = set(t)                  (allgather)
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import in_ir
from fuser.ir.ops.nodes import LoadStoreOp, ReductionOp
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.passes.view_ops import is_copy
from fuser.support.errors import ShardingError, user_code
from multidevice.sharding.passes.deferred_sums import defer_sums
from multidevice.sharding.passes.masked_lookups import mask_divided_lookups
from multidevice.sharding.passes.pad_shards import pad_uneven_shards, types_to_gather
from multidevice.sharding.passes.partial_moments import combine_partial_moments
from multidevice.sharding.passes.partial_sums import (
    add_partial_sums,
    add_row_parallel_bias_last,
    exchange_partial_sums,
    factor_spread_reductions,
    gather_for_products,
    reduces_one_device_axis,
)
from multidevice.sharding.passes.redistribute import form_exchanges, split_copies
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Cuts,
    add_cuts,
    axis_cuts,
    clone_domain,
    only_devices,
    outside_streams,
    placement,
    sharded_axis,
    step_parts,
    unparallelize,
    unparallelize_inward,
)
from multidevice.sharding.propagation import (
    Transfers,
    apply_steps,
    backward_cuts,
    fitting_placement,
    forward_cuts,
    sibling_cuts,
    uncuttable_axes,
)
from multidevice.sharding.queries import (
    has_mesh,
    has_streams,
    have_different_shardings,
    is_resharding,
    partial_sum_axes,
)
from multidevice.sharding.reshard import Copies, as_reshard, check_lowerable
from multidevice.sharding.streams import keep_computable_streams, slice_operands


def decompose_reshardings(
    fusion: Fusion, *, overlap: Callable[[Fusion], None] | None = None
) -> None:
    """Rewrites a fusion until every op is local or a `Reshard`: one collective or one local slice.

    `overlap` is called when all communications have been determined. This callback may give tensors
    stream axes, so that a loop on the host computes the tensors block by block.

    Raises:
        ShardingError: an op cannot be computed with the requested placements.
        UnsupportedError: no supported collective makes a change of placement.
    """
    if not (has_mesh(fusion) or has_streams(fusion)):
        return
    gather_for_products(fusion)
    add_row_parallel_bias_last(fusion)
    mask_divided_lookups(fusion)
    reduce_before_leaving(fusion)
    combine_partial_moments(fusion)
    factor_spread_reductions(fusion)
    defer_sums(fusion)
    add_partial_sums(fusion)
    copies = Copies(fusion)
    insert_reshardings(fusion, copies)
    pad_uneven_shards(fusion)
    if overlap is not None:
        overlap(fusion)
    complete_steps(fusion, copies)


def complete_steps(fusion: Fusion, copies: Copies) -> None:
    """Rewrites each copy and each sum that changes the division over devices as a `Reshard` op.

    These are the last steps of `decompose_reshardings`; earlier steps have inserted the copies and
    sums (`copies` has the copies). An axis has a stream type if a loop on the host is to compute
    the tensor in steps along it. If the op cannot be computed in steps along such an axis, the type
    is removed.
    """
    exchange_partial_sums(fusion)
    split_copies(fusion, copies)
    copies.drop_unused()
    form_exchanges(fusion)
    keep_computable_streams(fusion)
    slice_operands(fusion)
    name_reshardings(fusion)


def name_reshardings(fusion: Fusion) -> None:
    """Replaces every copy or reduction that changes how a tensor is divided over devices by a
    `Reshard` op.

    A `Reshard` op names one communication or one local slice. Raises `UnsupportedError` for a
    communication that is not implemented.
    """
    ops: list[TensorOp] = []
    for op in fusion.exprs:
        found = as_reshard(op)
        if found is not None:
            check_lowerable(found)
        ops.append(op if found is None else found)
    fusion.exprs = ops


# ------------------------------------------------------------------ copies around ops
def insert_reshardings(fusion: Fusion, copies: Copies) -> None:
    """Inserts copies where the operands and results of an op are divided differently over devices.

    Each copy stands for a communication, before or after the op. Afterwards only copies and
    reductions over devices change how tensors are divided. `copies` holds the inserted copies, so
    that ops that need the same tensor with the same division share one.
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
        for _ in DEVICE_TYPES:
            if not _differing(op):
                break
            # After a reshape, two index expressions may agree without a proof that they are equal.
            # The proof may need facts about an extent that is cut.
            op = _compute_whole(fusion, op, _changing_types(op))
            for index in _differing(op):
                op = _insert_before(op, index, copies)
        if _differing(op):
            operands = ", ".join(str(v) for _, v in tensor_operands(op))
            raise ShardingError(
                f"{op.name} cannot be computed with the sharding of its result, because its "
                "operands cannot be cut in the same way: cut its result in another way, or not at "
                f"all{user_code(op.where)}{in_ir(f'{operands} -> {op.out_tensor}')}"
            )


def _needs(op: TensorOp, index: int) -> Transfers:
    return backward_cuts(op, index, op.out_tensor)


def _differing(op: TensorOp) -> list[int]:
    """Returns the indices of the operands that are divided differently over devices than the result
    of `op` needs.

    The caller inserts a copy for each of these operands.
    """
    if reduces_one_device_axis(op):
        # The op is the collective itself: its operand is cut on the reduced axis, and otherwise
        # placed like the result.
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
    """Lets an op compute all its results with the division over devices that its first result has.

    One op cannot compute two results with different divisions. So if another result is divided
    differently, the op computes a new tensor in its place, and the old result becomes a copy of the
    new tensor. Returns the new op.
    """
    first = op.out_tensor
    computed, copies = op, list[TensorOp]()
    for out in op.outputs[1:]:
        wanted = _cuts_beside(op, first, out)
        if _device_cuts(out) == wanted and out.mesh == first.mesh:
            continue
        local = _result_like(out, first.mesh)
        unparallelize(local, lambda a: True)
        for axis, cuts in zip(local.domain.logical, wanted, strict=True):
            add_cuts(local, axis.number, cuts)
        out.domain = out.domain.without_root()
        computed = computed.map_values(lambda v, o=out, n=local: n if v is o else v)
        copies.append(LoadStoreOp(out, local).replace(where=op.where))
    if copies:
        fusion.replace_expr(op, [computed, *copies])
    return computed


def _cuts_beside(op: TensorOp, first: TensorView, out: TensorView) -> list[Cuts]:
    """Returns the division over devices that the result `out` gets from the result `first` of the
    same op.

    Both are results of `op`, which computes them with the same division. The list has, for each
    logical axis of `out`, the divisions (cuts) of the corresponding axis of `first`, outermost
    first. The entry is () if `first` has no corresponding axis.
    """
    cuts = _device_cuts(first)
    beside = {b: cuts[a] for a, b in op.parallel_cuts(first, out)}
    return [beside.get(k, ()) for k in range(len(out.domain.logical))]


def _device_cuts(tv: TensorView) -> list[Cuts]:
    """Returns how each logical axis of a tensor is divided over devices, including reduction axes.

    An entry lists the divisions (`Cut`: mesh dimension and number of blocks), outermost first; it
    is () for an axis that each device has completely.
    """
    cuts = axis_cuts(tv, DEVICE_TYPES)
    return [cuts.get(a.number, ()) for a in tv.domain.logical]


def _free_whole_axes(fusion: Fusion, op: TensorOp) -> TensorOp:
    """Lets an op compute undivided results, if devices divide an axis that the op can only compute
    whole.

    Such axes are the joined axis of a cat, the axis of an iota, resized axes of a slice or pad, and
    the inner axes of a reshape. An axis with uneven shards is such an axis, too, unless the op
    ignores padding. The op then computes a new, undivided tensor, and the old result becomes a copy
    of it. Returns the new op.
    """
    for position, out in enumerate(op.outputs):
        whole = uncuttable_axes(op, DEVICE_TYPES, out)
        have = axis_cuts(out, DEVICE_TYPES)
        types = {c.ptype for n, cuts in have.items() if n in whole for c in cuts}
        types |= {p for p in types_to_gather(op) if sharded_axis(out, p) is not None}
        if types:
            op = _compute_whole(fusion, op, types, position)
    return op


def _changing_types(op: TensorOp) -> set[ParallelType]:
    return {
        p
        for p in DEVICE_TYPES
        for index, _ in tensor_operands(op)
        if have_different_shardings(op, index, (p,))
    }


def _compute_whole(
    fusion: Fusion, op: TensorOp, types: Collection[ParallelType], position: int = 0
) -> TensorOp:
    """Lets an op compute one of its results undivided along the mesh dimensions `types`.

    `position` is the index of the result. The op computes a new, undivided result, and the old
    result becomes a copy of the new one, with the same division as before. Returns the new op.
    """
    out: TensorView = op.outputs[position]
    local = _result_like(out, out.mesh)
    unparallelize_inward(local, lambda a: a.ptype in types and not a.is_reduction())
    computed = op.map_values(lambda v: local if v is out else v)
    out.domain = out.domain.without_root()
    fusion.replace_expr(op, [computed, LoadStoreOp(out, local).replace(where=op.where)])
    return computed


def _result_like(out: TensorView, mesh: DeviceMesh | None) -> TensorView:
    """Creates a tensor on `mesh` with a copy of the axes of `out` and their division over devices.

    The op that computes `out` is to compute the new tensor instead. The new tensor has no declared
    memory order, because the order is chosen later.
    """
    domain, _ = clone_domain(out.fusion, out.domain)
    plain = domain.in_logical_order()
    return out.fusion.new_tensor(plain, out.dtype(), mesh=mesh)


# -- after
def _goes_after(op: TensorOp) -> bool:
    """Returns whether an op should run on its operand as it is, and its result should be
    communicated.

    The alternative is to communicate the operand before the op. Returns True for an op with one
    operand and one result, with four exceptions:

    - The operand is not divided over devices: a slice of the operand is then cheaper, because the
      op computes less.
    - The op casts to a wider type: the operand has fewer bytes to communicate.
    - The op is a reduction over devices, and so is a communication itself.
    - The op computes partial sums.
    """
    operands = list(tensor_operands(op))
    if len(operands) != 1 or len(op.outputs) != 1 or reduces_one_device_axis(op):
        return False
    operand, out = operands[0][1], op.out_tensor
    if partial_sum_axes(out):
        return False
    if nbytes_of(operand.dtype()) < nbytes_of(out.dtype()):
        return False
    return any(any(c.ptype.is_device for c in cuts) for cuts in placement(operand))


def _insert_after(fusion: Fusion, op: TensorOp) -> bool:
    """Computes an op on the parts that the devices have of its operand, and communicates the result
    instead of the operand.

    The op computes a new tensor, which is divided over devices like the operand. The old result
    becomes a copy of the new tensor; the copy is the communication. Returns False, and changes
    nothing, if the op would need communication even so. The caller ensures that the op has one
    tensor operand.
    """
    ((index, _),) = tensor_operands(op)
    out = op.out_tensor
    local, computed = _computed_like_operand(op, index)
    # The result's steps become steps of the tensor that it is copied from, if the copy allows it.
    apply_steps(local, out, sibling_cuts(op, out, local))
    if any(a.is_reduction() and a.is_device for a in local.domain.loop):
        return False
    if is_resharding(computed):
        return False
    out.domain = out.domain.without_root()
    fusion.replace_expr(op, [computed, LoadStoreOp(out, local).replace(where=op.where)])
    return True


def _computed_like_operand(op: TensorOp, index: int) -> tuple[TensorView, TensorOp]:
    """Returns a new tensor on the mesh of operand `index`, and `op` with this tensor as its result.

    Devices divide the tensor like the operand, also along the axes that the op reduces.
    """
    operand, out = op.inputs[index], op.out_tensor
    local = _result_like(out, operand.mesh)
    unparallelize(local, lambda a: True)
    computed = op.map_values(lambda v: local if v is out else v)
    cuts = forward_cuts(computed, index, local)
    is_nested = any(outside_streams(c) != only_devices(c) for _, c in cuts)
    apply_steps(local, operand, cuts, SPREAD_TYPES if is_nested else DEVICE_TYPES)
    return local, computed


def reduce_before_leaving(fusion: Fusion) -> None:
    """Lets a reduction over devices whose result is on another mesh reduce on its operand's mesh.

    The result is then copied to the other mesh; it is smaller than the operand.

        y [N] on {2 3} = sum(x [DIDx(M), N] on {0 1})   ->   t [N] on {0 1} = sum(x)
                                                             y [N] on {2 3} = set(t)
    """
    for op in fusion.exprs:
        if not isinstance(op, ReductionOp) or op.inp.mesh == op.out.mesh:
            continue
        reduced = {p.number for p, c in mapped_axes(op, 0) if c.is_reduction()}
        if reduced & axis_cuts(op.inp, DEVICE_TYPES).keys():
            out = op.out
            local, computed = _computed_like_operand(op, 0)
            out.domain = out.domain.without_root()
            fusion.replace_expr(op, [computed, LoadStoreOp(out, local).replace(where=op.where)])


# -- before
def _insert_before(op: TensorOp, index: int, copies: Copies) -> TensorOp:
    """Replaces operand `index` by a copy that is divided over devices as the result needs.

    `copies` has the copies that exist already. Returns the new op.
    """
    operand, out = op.inputs[index], op.out_tensor
    cuts = fitting_placement(operand, _needs(op, index), out.mesh, step_parts(out))
    return copies.feed(op, index, mesh=out.mesh, cuts=cuts)
