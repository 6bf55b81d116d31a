"""Communication layout: gives operands and results of collectives the memory order that they need.

A collective works on flat buffers: part i of the gathered (or scattered) buffer belongs to the i-th
rank of the team. Therefore every buffer must be contiguous. In an allgather or reduce-scatter, the
gathered or scattered axis must also be outermost in the memory of operand and result. If a tensor
has another order, the pass inserts a local copy with a permuted allocation domain (the axes in
memory order). In the example, an allgather removes the division of N over devices, DIDx(N):

    y [M, N] = set(x [M, DIDx(N)])   ->   t [M, DIDx(N)] = set(x)    memory order (N, M)
                                          y [M, N] = set(t)          memory order (N, M)
"""

from __future__ import annotations

from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import copy_memory_order, is_contiguous, memory_order, set_memory_order
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.ops.nodes import LibraryOp, LoadStoreOp, ReshapeOp, Reshard
from fuser.passes.view_ops import is_copy
from fuser.support.errors import UnsupportedError, user_code
from multidevice.sharding.placement import (
    clone_domain,
    copy_like,
    placement,
    without_streams,
)
from multidevice.sharding.reshard import (
    changes_mesh,
    communicates,
    communication_type,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
    moved_axes,
    position_map,
    transfer_of,
)
from multidevice.sharding.streams import (
    StepMemory,
    is_single,
    scatters_steps,
    steps_outermost,
    stream_axis,
)
from multidevice.transports.base.collectives import ALL_TO_ALL, COLLECTIVES


def lay_out_communication(fusion: Fusion) -> None:
    """Gives operand and result of every collective a contiguous memory order that the collective
    supports.

    Before: every op is local or a `Reshard` op (the fusion is decomposed). After, for every
    collective:

    - operand and result are contiguous and have the same order of axes;
    - the gathered or scattered axis is outermost, if the type of collective needs that.

    The host program relies on this. A result without a declared memory order (allocation domain)
    takes the order of the collective. A declared memory order does not change: a copy after the
    collective produces it.

    In a stream loop, a collective works on one block per step. The memory of a block has no gaps if
    each step allocates its own memory, or if the axis of the blocks is outermost. Otherwise the
    pass inserts a copy in the same step.
    """
    memory = StepMemory(fusion)
    for op in fusion.exprs:
        if isinstance(op, Reshard) and communicates(op):
            _fit_consumer(memory, _fit_producer(memory, op))


def communicated(fusion: Fusion) -> set[TensorView]:
    """Returns the operands and results of all collectives, whose memory order all ranks must share.

    If the operand of a collective is a slice, the sliced tensor is included. The caller keeps the
    memory order of these tensors, and lets only other tensors follow the orders of the inputs,
    because the orders of inputs may differ from rank to rank.
    """
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if communicates(op) or (is_step_slice(op) and op.out_tensor in found):
            found.update((op.inputs[0], op.out_tensor))  # pyright: ignore[reportArgumentType]
    return found


def _required_order(tv: TensorView, first: tuple[int, ...], *, in_steps: bool) -> list[int]:
    """Returns the memory order that a collective needs for `tv`: the axes `first` outermost, then
    the other axes in their present order.

    Both lists have axis positions, outermost first. If the needed order differs from the present
    one only in the positions of axes with one element, the present order is returned, because the
    memory is the same. With `in_steps`, the collective sends one block of `tv` per iteration of a
    loop on the host. An axis with one element is then one of which a block has one index.
    """
    order = [p for p, _ in memory_order(tv)]
    wanted = [*first, *(p for p in order if p not in first)]
    return order if _are_same_memory(tv, order, wanted, in_steps=in_steps) else wanted


def _are_same_memory(tv: TensorView, a: list[int], b: list[int], *, in_steps: bool) -> bool:
    """Returns whether the axis orders `a` and `b` of `tv` differ only in axes with one element.

    With `in_steps`, an axis counts as such if the block that one step of a stream loop computes has
    one index of it.
    """
    several = {p for p in a if not is_single(tv, p, in_steps=in_steps)}
    return [p for p in a if p in several] == [p for p in b if p in several]


def _outermost_axes(op: Reshard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes that must be outermost in memory for a collective: (axes of the operand,
    axes of the result).

    - Allgather and reduce-scatter: the gathered or scattered axis, because the part of each rank
      must be contiguous.
    - AllToAll, which divides axis b of a tensor that was divided along axis a. In the operand, b is
      outermost, because each block of b is sent to another rank; a follows. In the result, a is
      outermost, because each rank sends one block of it.
    - A transfer to another mesh: the axes of which a rank sends or receives several pieces.

    An entry is () if no axis must be outermost.
    """
    if changes_mesh(op):
        axes = transfer_of(op).cut_axes
        return axes, axes
    if _moves_division(op):
        assert op.source is not None and op.target is not None, f"{op} moves no division"
        to_out = position_map(op)
        receiver = next(p for p, q in to_out.items() if q == op.target)
        return (receiver, op.source), (to_out[op.source],)
    row = COLLECTIVES.get(communication_type(op))
    if row is None or not row.growth:
        return (), ()
    source, target = moved_axes(op)
    return () if source is None else (source,), () if target is None else (target,)


def _moves_division(op: Reshard) -> bool:
    """Returns whether `op` is an all-to-all of whole shards, and not of a block per loop step."""
    return communication_type(op) == ALL_TO_ALL.name and not is_exchange(op)


def _fit_producer(memory: StepMemory, op: Reshard) -> Reshard:
    fusion, operand = memory.fusion, op.inp
    scatters = scatters_steps(op)
    in_steps = scatters or (stream_axis(op.out) is not None and not is_device_to_stream(op))
    first = () if scatters else _outermost_axes(op)[0]
    order = _required_order(operand, first, in_steps=in_steps)
    order = steps_outermost(operand, order) if in_steps else order
    is_dense = not in_steps or memory.is_dense(operand, order)
    if order == [p for p, _ in memory_order(operand)] and is_contiguous(operand) and is_dense:
        return op
    if is_dense and _may_relayout(fusion, operand):
        set_memory_order(operand, order)
        return op
    cuts = placement(operand)
    if not in_steps:
        cuts = tuple(map(without_streams, cuts))
    made = copy_like(operand, operand.mesh, cuts)
    set_memory_order(made, order)
    moved = op.replace(inp=made)
    fusion.replace_expr(op, [LoadStoreOp(made, operand).replace(where=op.where), moved])
    return moved


def _may_relayout(fusion: Fusion, tv: TensorView) -> bool:
    """Returns whether this pass may change the memory order of `tv` itself, without a copy.

    This is so if a kernel computes `tv`, because a kernel can write any order. Returns False if the
    order of `tv` is declared, if `tv` is an output of the fusion, or if `tv` has more than one
    reader.
    """
    definition = tv.definition()
    if definition is None or tv.domain.allocation or tv in fusion.outputs:
        return False
    if isinstance(definition, LibraryOp | ReshapeOp):
        return False  # torch chose the order of its results; a reshape may alias its operand
    if isinstance(definition, LoadStoreOp) and not is_copy(definition):
        return False  # so may a permute
    return len(tv.uses()) == 1 and not isinstance(definition, Reshard)


def _fit_consumer(memory: StepMemory, op: Reshard) -> None:
    """Gives the result of a collective the memory order of its operand, because a collective copies
    flat buffers.

    If the order of the result is declared, the collective writes a new tensor in the order of the
    operand, and a copy makes the result from it. `memory` says which blocks of tensors are without
    gaps in memory. Raises `UnsupportedError` if each iteration of a loop on the host (a stream
    loop) sends one block and receives another, and the received block is not contiguous.
    """
    fusion, operand, out = memory.fusion, op.inp, op.out
    order = _mapped_order(op, [p for p, _ in memory_order(operand)])
    # Where a step computes the block of one device, the block is sent unchanged.
    in_steps = stream_axis(out) is not None
    first = () if scatters_steps(op) else _outermost_axes(op)[1]
    if first:
        # The operand's order is kept. An axis with extent 1 on each shard may still be outermost.
        wanted = [*first, *(p for p in order if p not in first)]
        is_first = _are_same_memory(out, order, wanted, in_steps=in_steps)
        order = order if is_first else wanted
    order = steps_outermost(out, order)
    is_dense = not in_steps or memory.is_dense(out, order)
    current = [p for p, _ in memory_order(out)]
    if _moves_division(op) and _are_same_memory(out, order, current, in_steps=in_steps):
        order = current
    if order == current and is_contiguous(out) and is_dense:
        return
    if not out.domain.allocation and is_contiguous(out) and is_dense:
        set_memory_order(out, order)
        for use in out.uses():
            if is_step_slice(use):
                copy_memory_order(out, use.out_tensor)
        return
    domain, _ = clone_domain(fusion, out.domain)
    made = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
    out.domain = out.domain.without_root()
    set_memory_order(made, order)
    computed = op.map_values(lambda v: made if v is out else v)
    fusion.replace_expr(op, [computed, LoadStoreOp(out, made).replace(where=op.where)])
    stream = stream_axis(made)
    if is_exchange(op) and stream is not None and not memory.is_dense(made, order):
        # A step receives a block other than the one that it computes, so the block is stored in
        # memory of the whole tensor.
        raise UnsupportedError(
            f"{op.name} of {tensor_words(operand)}: the block along axis {stream.position} that "
            f"each step receives is not contiguous, because axis {order[0]} is outermost in "
            f"memory: make axis {stream.position} the outermost in memory"
            f"{user_code(op.where)}{in_ir(f'{operand} -> {out}')}"
        )


def _mapped_order(op: TensorOp, order: list[int]) -> list[int]:
    """Returns the memory order `order` of an op's operand as a memory order of the op's result.

    Both orders list axis positions, outermost first; the operand is the first one of `op`. Axes
    that the result does not have are left out.
    """
    out = op.out_tensor
    position = 0
    to_out: dict[int, int] = {}
    for root, source in zip(out.domain.maybe_root, op.axis_map(0), strict=True):
        if root.is_reduction():
            continue
        if source is not None:
            to_out[source] = position
        position += 1
    return [to_out[p] for p in order if p in to_out]
