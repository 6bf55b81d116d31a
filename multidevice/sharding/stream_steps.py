"""Streams: what can be computed in steps, and with which block of each operand.

A tensor with a stream axis is computed block by block, one step of a loop for each. An op can be
computed so when one block of the result needs, of every operand, one block or the whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.memory_layout import copy_memory_order
from fuser.ir.naming import axis_words, in_ir, tensor_words
from fuser.ir.ops.nodes import LibraryOp, LoadStoreOp, ReductionOp, Reshard
from fuser.ir.tensor import TensorView
from fuser.ir.types import STREAM_TYPES, ParallelType
from fuser.passes.view_ops import is_copy
from fuser.support.errors import UnsupportedError, user_code
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Cut,
    Cuts,
    Placement,
    add_cuts,
    axis_cuts,
    clone_domain,
    copy_like,
    cut_origin,
    outside_streams,
    placement,
    sharded_axis,
    spread_axes,
    step_parts,
    stream_axis_of,
    stream_cuts,
    unparallelize,
    unparallelize_inward,
    without_streams,
)
from multidevice.sharding.propagation import backward_cuts, is_from_devices, uncuttable_axes
from multidevice.sharding.queries import have_different_shardings, is_resharding
from multidevice.sharding.reshard import exchanged_axes
from multidevice.sharding.stepwise import replace_operand


# ------------------------------------------------------------------ one op
def _stream_positions(tv: TensorView) -> list[tuple[int, Cut]]:
    """Return (position among all logical axes, cut) of the stream axis, or of all parts of it."""
    return [(tv.domain.logical_numbers.index(n), cut) for n, cut in stream_cuts(tv)]


def _is_one_step(op: TensorOp) -> bool:
    return isinstance(op, LibraryOp) and not op.RUNS_IN_STEPS


def is_computable_in_steps(op: TensorOp) -> bool:
    """Whether blocks along the stream axis of an op's results come from blocks of its operands.

    True without stream axes.
    """
    if _is_one_step(op):
        return not any(map(_stream_positions, op.outputs))
    first = _stream_positions(op.out_tensor)
    if any(_stream_positions(out) != first for out in op.outputs[1:]):
        return False
    if not first:
        return True
    streamed = {number for number, _ in stream_cuts(op.out_tensor)}
    return streamed.isdisjoint(uncuttable_axes(op, SPREAD_TYPES))


def needed_blocks(op: TensorOp, index: int) -> dict[int, Cuts]:
    """Return of which axes of a tensor operand (positions without reductions) a step of the op
    needs one block, and those axes' cuts, the stream's included; {} where it needs the whole.
    """
    exchanged = exchanged_axes(op)
    if exchanged is not None:
        # The block that is sent, not the one that is received.
        return {exchanged[1]: placement(op.inputs[index])[exchanged[1]]}
    axes = op.inputs[index].domain.no_reductions
    return {
        axes.index(axis): cuts
        for axis, cuts in backward_cuts(op, index, op.out_tensor)
        if any(c.ptype.is_stream for c in cuts)
    }


def is_in_step(op: TensorOp, index: int) -> bool:
    """Whether the blocks that the steps of an op need of an operand are the operand's own."""
    operand = op.inputs[index]
    needed, found = needed_blocks(op, index), stream_cuts(operand)
    if not needed or not found:
        return False
    if exchanged_axes(op) is not None:
        return True
    made_by = operand.definition()
    if made_by is not None and exchanged_axes(made_by) is not None:
        return False  # a step has received another block than it has computed
    axes = operand.domain.no_reductions
    if {axes[p].number for p in needed} != {number for number, _ in found}:
        return False
    # Blocks of one index may be counted with empty ones behind them, or without; and with an axis
    # of extent 1, or without.
    by_number = {axes[p].number: cuts for p, cuts in needed.items()}
    are_cuts = all(
        any((c.ptype, c.count, c.whole) == (mine.ptype, mine.count, mine.whole) for c in cuts)
        for number, mine in found
        for cuts in (by_number[number],)
    )
    return are_cuts and not have_different_shardings(op, index, STREAM_TYPES)


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


# A whole, how its slices are cut, and the op that they are for if they are for that one alone.
_Slices = dict[tuple[TensorView, Placement, TensorOp | None], TensorView]


def _feed_steps(fusion: Fusion, op: TensorOp, made: _Slices) -> None:
    if stream_axis_of(op.out_tensor) is None:
        return
    is_whole = _mixes_rotated_steps(op) or _moves_blocks_of_merged_axes(op)
    slices = None if is_whole else _find_slices(op, made)
    if slices is None:
        for part in _compute_first(fusion, op):
            _feed_steps(fusion, part, made)
        return
    fed = op
    for index, (block, position) in slices.items():
        operand = op.inputs[index]
        key = _slice_key(op, operand, placement(block))
        if key not in made:
            made[key] = block
            copy_memory_order(operand, block)
            slicing = Reshard(block, operand, ptypes=step_parts(block), target=position)
            fusion.insert_before(op, [slicing.replace(where=op.where)])
        fed = replace_operand(fed, index, made[key])
    if slices:
        fusion.replace_expr(op, [fed])


def _slice_key(
    op: TensorOp, operand: TensorView, cuts: Placement
) -> tuple[TensorView, Placement, TensorOp | None]:
    """Return what slices are found by: the parts of a merged axis that an operand has do not say,
    alone, which step has which block."""
    parts = {c.ptype for mine in cuts for c in mine if c.ptype.is_stream}
    return operand, cuts, None if parts == {*step_parts(op.out_tensor)} else op


def _mixes_rotated_steps(op: TensorOp) -> bool:
    """Whether devices that are at different blocks in the same step would communicate."""
    found = stream_axis_of(op.out_tensor)
    by = None if found is None else found[1].swizzle
    if by is None or not is_resharding(op) or exchanged_axes(op) is not None:
        return False
    for index, operand in tensor_operands(op):
        is_ring = _is_ring(op, index)
        is_gathered = sharded_axis(operand, by) and have_different_shardings(op, index, (by,))
        if is_gathered and not (is_copy(op) and is_ring):
            return True
    return False


def _moves_blocks_of_merged_axes(op: TensorOp) -> bool:
    """Whether devices would communicate in steps of elements of one axis and blocks of another:
    these have gaps in memory of the whole, and steps have none of their own."""
    cuts = [cut for _, cut in stream_cuts(op.out_tensor)]
    return len(cuts) > 1 and not all(cut.whole for cut in cuts) and is_resharding(op)


def _find_slices(op: TensorOp, made: _Slices) -> dict[int, tuple[TensorView, int]] | None:
    """Return, by number, which block a step needs of each operand that is not in step, and the axis
    to slice; None where some cannot be sliced.
    """
    found: dict[int, tuple[TensorView, int]] = {}
    for index, operand in tensor_operands(op):
        needed, have = needed_blocks(op, index), placement(operand)
        if not needed or (is_in_step(op, index) and not _is_read_both_ways(operand)):
            continue
        if is_resharding(op):
            if is_copy(op) and _is_ring(op, index):
                continue
            for position, cuts in needed.items():
                depth = len(outside_streams(cuts))
                if outside_streams(have[position]) != cuts[:depth]:
                    return None
                # The devices inside of a step are what it is about.
                needed[position] = (*cuts[: depth + 1], *have[position][depth + 1 :])
        wanted = tuple(needed.get(p) or outside_streams(c) for p, c in enumerate(have))
        known = made.get(_slice_key(op, operand, wanted))
        block = known or copy_like(operand, operand.mesh, wanted)
        if have_different_shardings(replace_operand(op, index, block), index, STREAM_TYPES):
            return None  # the same blocks, perhaps, but nobody can prove it
        found[index] = block, min(needed)
    return found


def _is_ring(op: TensorOp, index: int) -> bool:
    """Whether each step of the op would bring the block of one device."""
    needed = needed_blocks(op, index)
    if len(needed) != 1 or len(step_parts(op.out_tensor)) != 1:
        return False
    ((position, cuts),) = needed.items()
    return is_from_devices(op.inputs[index], position, cuts, op.out_tensor.mesh)


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
    number = stream_cuts(out)[0][0]
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
    uncuttable = uncuttable_axes(op, SPREAD_TYPES)
    types = [cut.ptype for number, cut in stream_cuts(out) if number in uncuttable]
    streams = [a for a in out.domain.loop if a.is_stream]
    axis = next((a for a in streams if a.ptype in types), streams[0])
    others = [o for o in op.outputs if _stream_positions(o) != _stream_positions(out)]
    why = "a block of the result is not made from blocks of the operands"
    if others and not types and not _is_one_step(op):
        why = f"the same steps make {tensor_words(others[0])}, which does not stand on it"
    return UnsupportedError(
        f"{op.name} cannot be computed in steps along {axis_words(out, axis)}: {why}"
        f"{user_code(op.where)}{in_ir(axis, out)}"
    )
