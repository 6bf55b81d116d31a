"""Streams: what can be computed in steps, and with which block of each operand.

A tensor with a stream axis is computed block by block, one step of a loop for each. An op can be
computed so when one block of the result needs, of every operand, one block or the whole.
"""

from __future__ import annotations

from collections.abc import Collection

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
    axis_cuts,
    clone_domain,
    copy_like,
    copy_memory_order,
    cut_origin,
    outside_streams,
    placement,
    spread_axes,
    stream_axis_of,
    unparallelize,
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
    """Take the stream axis from every result that cannot be computed in steps along it.

    Raises `UnsupportedError` naming op and axis when the user asked for it.
    """
    for op in fusion.exprs:
        if is_computable_in_steps(op):
            continue
        for out in op.outputs:
            if out in asked:
                raise _not_computable(op, out)
            unparallelize(out, lambda a: a.is_stream)


def _not_computable(op: TensorOp, out: TensorView) -> UnsupportedError:
    axis = next(a for a in out.domain.loop if a.is_stream)
    return UnsupportedError(
        f"{op.name} cannot be computed in steps along the stream axis {axis} of {out}: "
        f"a block of the result is not made from blocks of the operands{user_code(op.where)}"
    )


def gather_in_steps(fusion: Fusion) -> None:
    """Bring devices' blocks that lie inside of a stream's together step by step: as a whole, what a
    device has is no block.

        y [N] = set(x [stream(N), DIDx])  ->  t [stream(N)] = set(x), y = set(t)

    Raises `UnsupportedError` where such an axis becomes one over other devices.
    """
    for op in fusion.exprs:
        if not (is_copy(op) and is_resharding(op)) or exchanged_axes(op) is not None:
            continue
        inp, out = op.inputs[0], op.out_tensor
        have, want = placement(inp), placement(out)
        for position, (mine, cuts) in enumerate(zip(have, want, strict=True)):
            if without_streams(mine) == _devices(mine) or _devices(mine) == _devices(cuts):
                continue
            step = mine[: len(outside_streams(mine)) + 1]
            if cuts[: len(step)] == step:
                continue
            if (
                without_streams(cuts)
                or inp.mesh != out.mesh
                or any(without_streams(c) != _devices(c) for c in want)
            ):
                raise UnsupportedError(
                    f"{op.name} of {inp} -> {out}: of axis {position}, each step of a stream is "
                    f"spread over devices, and has to be gathered first{user_code(op.where)}"
                )
            kept = tuple(step if p == position else _devices(c) for p, c in enumerate(want))
            whole = copy_like(inp, out.mesh, kept)
            gathered = op.map_values(lambda v, o=out, w=whole: w if v is o else v)
            copy = LoadStoreOp(out, whole).replace(where=op.where)
            fusion.replace_expr(op, [gathered, copy])
            break


def slice_operands(fusion: Fusion) -> None:
    """Give every op that is computed in steps its operands in the blocks that the steps need.

        y [stream(M), N] = add(x [M, N], b)  ->  s [stream(M), N] = Reshard(x, along stream)
                                                 y = add(s, b)

    Afterwards an operand of such an op is in step with it, or used whole. Where the steps of a
    communication need other blocks than the devices have, it comes first, as a whole; so does one
    between devices that are at different blocks, because each starts with its own.
    """
    made: dict[tuple[TensorView, Placement], TensorView] = {}
    for op in fusion.exprs:
        if stream_axis_of(op.out_tensor) is None:
            continue
        if _mixes_rotated_steps(op):
            op = _communicate_first(fusion, op)
        for index, _ in tensor_operands(op):
            op = _slice_operand(fusion, op, index, made)


def _mixes_rotated_steps(op: TensorOp) -> bool:
    """Whether devices that are at different blocks in the same step would communicate."""
    found = stream_axis_of(op.out_tensor)
    by = None if found is None else found[1].swizzle
    if by is None or not is_resharding(op) or exchanged_axes(op) is not None:
        return False
    for index, operand in tensor_operands(op):
        needed = needed_block(op, index)
        is_ring = needed is not None and is_from_devices(operand, *needed, op.out_tensor.mesh)
        if have_different_shardings(op, index, (by,)) and not (is_copy(op) and is_ring):
            return True
    return False


def _slice_operand(
    fusion: Fusion, op: TensorOp, index: int, made: dict[tuple[TensorView, Placement], TensorView]
) -> TensorOp:
    needed, operand = needed_block(op, index), op.inputs[index]
    if needed is None or is_in_step(op, index):
        return op
    position, cuts = needed
    have = placement(operand)
    if is_resharding(op):
        if is_copy(op) and is_from_devices(operand, position, cuts, op.out_tensor.mesh):
            return op
        if _devices(have[position]) != outside_streams(cuts):
            return _slice_operand(fusion, _communicate_first(fusion, op), 0, made)
        # The devices inside of a step are what it is about.
        cuts = cuts[: len(outside_streams(cuts)) + 1]
    wanted = tuple(cuts if p == position else outside_streams(c) for p, c in enumerate(have))
    block = made.get((operand, wanted))
    if block is None:
        block = made[operand, wanted] = copy_like(operand, operand.mesh, wanted)
        copy_memory_order(operand, block)
        slicing = Reshard(block, operand, ptypes=_STREAM, target=position)
        fusion.insert_before(op, [slicing.replace(where=op.where)])
    fed = replace_operand(op, index, block)
    if have_different_shardings(fed, index, _STREAM):
        raise _not_computable(op, op.out_tensor)
    fusion.replace_expr(op, [fed])
    return fed


def _devices(cuts: Cuts) -> Cuts:
    return tuple(c for c in cuts if c.ptype.is_device)


def _communicate_first(fusion: Fusion, op: TensorOp) -> LoadStoreOp:
    """Compute a communication at once, and copy its result in steps; return the copy."""
    out = op.out_tensor
    domain, _ = clone_domain(fusion, out.domain)
    whole = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
    for number, cuts in axis_cuts(whole).items():
        ends = {c.ptype for c in cuts} - {c.ptype for c in outside_streams(cuts)}
        is_end = {a.number for a in spread_axes(whole) if cut_origin(whole, a)[0] == number}
        unparallelize(whole, lambda a, n=is_end, p=ends: a.number in n and a.ptype in p)
    out.domain = out.domain.without_root()
    copy = LoadStoreOp(out, whole).replace(where=op.where)
    fusion.replace_expr(op, [op.map_values(lambda v: whole if v is out else v), copy])
    return copy
