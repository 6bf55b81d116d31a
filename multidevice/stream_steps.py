"""Streams: what can be computed in steps, and with which block of each operand.

A tensor with a stream axis is computed block by block, one step of a loop for each. An op can be
computed so when one block of the result needs, of every operand, one block or the whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fuser.errors import UnsupportedError, user_code
from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import LoadStoreOp, ReductionOp, Reshard, TensorOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from multidevice.communication import exchanged_axes, is_copy
from multidevice.placement import (
    SPREAD_TYPES,
    Cut,
    Cuts,
    Placement,
    add_cuts,
    axis_cuts,
    clone_domain,
    copy_like,
    copy_memory_order,
    cut_origin,
    outside_streams,
    placement,
    sharded_axis,
    spread_axes,
    stream_axis_of,
    unparallelize,
    unparallelize_inward,
    without_streams,
)
from multidevice.propagate import backward_cuts, is_from_devices, uncuttable_axes
from multidevice.sharding import have_different_shardings, is_resharding
from multidevice.stepwise import replace_operand

_STREAM = (ParallelType.stream,)


# ------------------------------------------------------------------ one op
def _stream_position(tv: TensorView) -> tuple[int, Cut] | None:
    """Return (position among all logical axes, cut) of the stream axis, None without one."""
    found = stream_axis_of(tv)
    return None if found is None else (tv.domain.logical_numbers.index(found[0]), found[1])


def is_computable_in_steps(op: TensorOp) -> bool:
    """Whether blocks along the stream axis of an op's results come from blocks of its operands.

    True without stream axes.
    """
    first = _stream_position(op.out_tensor)
    if any(_stream_position(out) != first for out in op.outputs[1:]):
        return False
    if first is None:
        return True
    return op.out_tensor.domain.logical_numbers[first[0]] not in uncuttable_axes(op, SPREAD_TYPES)


def needed_block(op: TensorOp, index: int) -> tuple[int, Cuts] | None:
    """Return of which axis of a tensor operand (position without reductions) a step of the op needs
    one block, and that axis's cuts, the stream's included; None where it needs the whole.
    """
    exchanged = exchanged_axes(op)
    if exchanged is not None:
        # The block that is sent, not the one that is received.
        return exchanged[1], placement(op.inputs[index])[exchanged[1]]
    axes = op.inputs[index].domain.no_reductions
    for axis, cuts in backward_cuts(op, index, op.out_tensor):
        if any(c.ptype is ParallelType.stream for c in cuts):
            return axes.index(axis), cuts
    return None


def is_in_step(op: TensorOp, index: int) -> bool:
    """Whether the blocks that the steps of an op need of an operand are the operand's own."""
    needed = needed_block(op, index)
    found = stream_axis_of(op.inputs[index])
    if needed is None or found is None:
        return False
    if exchanged_axes(op) is not None:
        return True
    made_by = op.inputs[index].definition()
    if made_by is not None and exchanged_axes(made_by) is not None:
        return False  # a step has received another block than it has computed
    position, cuts = needed
    number, mine = found
    is_axis = op.inputs[index].domain.no_reductions[position].number == number
    # Blocks of one index may be counted with empty ones behind them, or without; and with an axis
    # of extent 1, or without.
    is_cut = any((c.ptype, c.count, c.whole) == (mine.ptype, mine.count, mine.whole) for c in cuts)
    return is_axis and is_cut and not have_different_shardings(op, index, _STREAM)


# ------------------------------------------------------------------ passes
def drop_steps_of_devices(fusion: Fusion) -> None:
    """Take the stream from every reduced axis of which a device has one index: it has no steps.

    c [DIDx, stream, N], out [rstream, DIDx, N] = sum(c)   ->   out [r, DIDx, N]
    Users write it to say that the steps of `c` are reduced one by one, which `c` says as well.
    """
    for op in fusion.exprs:
        if not isinstance(op, ReductionOp):
            continue
        reduced = [a for a in op.out.domain.logical if a.is_reduction() and a.is_stream]
        source = {c.number: p for p, c in mapped_axes(op, 0)} if reduced else {}
        for axis in reduced:
            if source[axis.number].is_device:
                op.out.parallelize_axis(axis, ParallelType.serial)


def keep_computable_streams(fusion: Fusion, *, asked: Collection[TensorView] = ()) -> None:
    """Take the stream axis from every result that cannot be computed in steps along it, and the
    devices' blocks inside of it.

    Raises `UnsupportedError` naming op and axis when the user asked for it.
    """
    for op in fusion.exprs:
        if is_computable_in_steps(op):
            continue
        for out in op.outputs:
            if out in asked:
                raise _not_computable(op, out)
            unparallelize_inward(out, lambda a: a.is_stream)


def slice_operands(fusion: Fusion) -> None:
    """Give every op that is computed in steps its operands in the blocks that the steps need.

        y [stream(M), N] = add(x [M, N], b)  ->  s [stream(M), N] = Reshard(x, along stream)
                                                 y = add(s, b)

    Afterwards an operand of such an op is in step with it, or used whole. Where the steps of a
    communication need other blocks than the devices have, it comes first, as a whole; so does one
    between devices that are at different blocks, because each starts with its own; and an op, a
    reshape, whose blocks nobody can prove to be blocks of its operands.
    """
    made: _Slices = {}
    for op in fusion.exprs:
        _feed_steps(fusion, op, made)


_Slices = dict[tuple[TensorView, Placement], TensorView]


def _feed_steps(fusion: Fusion, op: TensorOp, made: _Slices) -> None:
    if stream_axis_of(op.out_tensor) is None:
        return
    slices = None if _mixes_rotated_steps(op) else _find_slices(op, made)
    if slices is None:
        for part in _compute_first(fusion, op):
            _feed_steps(fusion, part, made)
        return
    fed = op
    for index, (block, position) in slices.items():
        operand = op.inputs[index]
        key = operand, placement(block)
        if key not in made:
            made[key] = block
            copy_memory_order(operand, block)
            slicing = Reshard(block, operand, ptypes=_STREAM, target=position)
            fusion.insert_before(op, [slicing.replace(where=op.where)])
        fed = replace_operand(fed, index, made[key])
    if slices:
        fusion.replace_expr(op, [fed])


def _mixes_rotated_steps(op: TensorOp) -> bool:
    """Whether devices that are at different blocks in the same step would communicate."""
    found = stream_axis_of(op.out_tensor)
    by = None if found is None else found[1].swizzle
    if by is None or not is_resharding(op) or exchanged_axes(op) is not None:
        return False
    for index, operand in tensor_operands(op):
        needed = needed_block(op, index)
        is_ring = needed is not None and is_from_devices(operand, *needed, op.out_tensor.mesh)
        is_gathered = sharded_axis(operand, by) and have_different_shardings(op, index, (by,))
        if is_gathered and not (is_copy(op) and is_ring):
            return True
    return False


def _find_slices(op: TensorOp, made: _Slices) -> dict[int, tuple[TensorView, int]] | None:
    """Return, by number, which block a step needs of each operand that is not in step, and the axis
    to slice; None where some cannot be sliced.
    """
    found: dict[int, tuple[TensorView, int]] = {}
    for index, operand in tensor_operands(op):
        needed = needed_block(op, index)
        if needed is None or (is_in_step(op, index) and not _is_read_both_ways(operand)):
            continue
        (position, cuts), have = needed, placement(operand)
        if is_resharding(op):
            if is_copy(op) and is_from_devices(operand, position, cuts, op.out_tensor.mesh):
                continue
            depth = len(outside_streams(cuts))
            if outside_streams(have[position]) != cuts[:depth]:
                return None
            # The devices inside of a step are what it is about.
            cuts = (*cuts[: depth + 1], *have[position][depth + 1 :])
        wanted = tuple(cuts if p == position else outside_streams(c) for p, c in enumerate(have))
        block = made.get((operand, wanted)) or copy_like(operand, operand.mesh, wanted)
        if have_different_shardings(replace_operand(op, index, block), index, _STREAM):
            return None  # the same blocks, perhaps, but nobody can prove it
        found[index] = block, position
    return found


def _is_read_both_ways(tv: TensorView) -> bool:
    """Whether steps read a tensor's own blocks and steps read the whole: one kernel may do both,
    and has to get both. A communication stands for itself.
    """
    ways = {
        is_in_step(op, index)
        for op in tv.fusion.uses(tv)
        if stream_axis_of(op.out_tensor) is not None and not is_resharding(op)
        for index, operand in tensor_operands(op)
        if operand is tv
    }
    return len(ways) > 1


def _compute_first(fusion: Fusion, op: TensorOp) -> list[TensorOp]:
    """Compute an op at once, and copy its results in steps; return the ops that do so.

    Where devices share each step, the op is computed in steps that are the same on all.
    """
    first, copies = op, list[TensorOp]()
    for out in op.outputs:
        domain, _ = clone_domain(fusion, out.domain)
        whole = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
        _leave_steps(op, whole)
        out.domain = out.domain.without_root()
        first = first.map_values(lambda v, o=out, w=whole: w if v is o else v)
        copies.append(LoadStoreOp(out, whole).replace(where=op.where))
    fusion.replace_expr(op, [first, *copies])
    return [first, *copies]


def _leave_steps(op: TensorOp, out: TensorView) -> None:
    number = next(iter(axis_cuts(out, _STREAM)))
    cuts = axis_cuts(out)[number]
    if without_streams(cuts) != cuts:
        unparallelize(out, lambda a: a.is_stream)
        return
    aligned = tuple(replace(c, swizzle=None) for c in cuts)
    if aligned == cuts:
        raise _not_computable(op, out)
    mine = {a.number for a in spread_axes(out) if cut_origin(out, a)[0] == number}
    unparallelize(out, lambda a: a.number in mine)
    add_cuts(out, number, aligned)


def _not_computable(op: TensorOp, out: TensorView) -> UnsupportedError:
    axis = next(a for a in out.domain.loop if a.is_stream)
    return UnsupportedError(
        f"{op.name} cannot be computed in steps along the stream axis {axis} of {out}: "
        f"a block of the result is not made from blocks of the operands{user_code(op.where)}"
    )
