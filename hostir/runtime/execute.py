"""The reading of host ops: a table from op type to the function that carries the op out.

A handler binds names and shapes at once, as the host does, and submits the work to the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from fuser.support.device import VECTOR_BYTES
from fuser.support.errors import ExecutionError, FuserError, user_code
from hostir.ir.effects import Shows
from hostir.ir.ops import (
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    EndCoalescing,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    P2PCommunication,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    ShareMemHandles,
    StartCoalescing,
    SymmetricContiguousView,
    Synchronize,
    Wait,
)
from hostir.ir.program import walk
from hostir.ir.shard_layout import share_storage, viewed_strides, write
from hostir.lowering.slices import dropped_axes
from hostir.runtime.communication import (
    CommunicationCall,
    Done,
    Posted,
    exchange,
    permute,
    post,
    transfer,
)
from hostir.runtime.frame import Frame, new_buffer, op_failed
from hostir.runtime.inputs import Argument
from hostir.runtime.steps import announcer, meet_at, range_of, show_shards, without_gradient
from hostir.runtime.torch_ops import compute, compute_into
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.transports.base.protocol import Transfer


# ------------------------------------------------------------------ buffers and computing
def _allocate(op: Allocate, frame: Frame) -> None:
    tv = op.buffer
    if tv in frame.storage.named:
        # A part of another buffer, as in the loops of nvFuser's programs, or the caller's.
        if op.zero_init:
            frame.submit(frame.tensors[tv].zero_)
        return
    shape = frame.local_shape(tv, op.stream_index)
    machine = frame.machine
    buffer = new_buffer(frame.program, tv, shape, machine.device, frame.symmetric(tv))
    frame.tensors[tv] = buffer.zero_() if op.zero_init else buffer
    frame.owned.add(tv)
    if frame.machine.streams.delays and not op.zero_init:
        poison(buffer)


def _deallocate(op: Deallocate, frame: Frame) -> None:
    buffer = frame.tensors.pop(op.buffer)
    view = frame.storage.views.get(op.buffer)
    if view is not None and not is_rehearsed(frame):
        frame.submit(partial(meet_at, view, frame.machine))
    if op.buffer in frame.owned and frame.machine.streams.delays:
        # The next to use this memory is on this stream, and may begin at once.
        frame.submit(partial(poison, buffer))


def poison(buffer: torch.Tensor) -> None:
    """Fill a buffer with what no program computes by accident."""
    buffer.fill_(float("nan") if buffer.is_floating_point() or buffer.is_complex() else 85)


def launch_operands(
    op: LaunchKernel | PostOnStream, frame: Frame
) -> tuple[list[Argument], list[torch.Tensor]]:
    """Return what a kernel reads and writes; an in-place output is the input that it overwrites."""
    for out in op.outs:
        if out not in frame.tensors:
            frame.tensors[out] = frame.tensors[frame.alias_target(out)]
    ins: list[Any] = [frame.operand(v) for v in op.ins]
    outs = [frame.tensors[o] for o in op.outs]
    for values, axes in zip((ins, outs), dropped_axes(op, frame.program), strict=True):
        for k, gone in axes.items():
            for axis in gone:
                values[k] = values[k].unsqueeze(axis)
    return ins, outs


def _launch(op: LaunchKernel, frame: Frame) -> None:
    ins, outs = frame.launched = launch_operands(op, frame)
    frame.submit(frame.machine.launch(op.group, ins, outs, frame.sizes))


def _post_on_stream(op: PostOnStream, frame: Frame) -> None:
    for out in op.outs:
        if out not in frame.tensors:
            shape, machine = frame.local_shape(out), frame.machine
            frame.tensors[out] = new_buffer(
                frame.program, out, shape, machine.device, frame.symmetric(out)
            )
    ins, outs = launch_operands(op, frame)
    frame.submit(partial(frame.machine.unit(op.unit), ins, outs))


def _local_slice(op: LocalSlice, frame: Frame) -> None:
    start, length = frame.slice_bounds(op)
    part = frame.tensors[op.inp].narrow(op.axis, start, length)
    frame.submit(partial(write, frame.tensors[op.out], part))


def _alias_select(op: HirAliasSelect, frame: Frame) -> None:
    (shown,) = op.effects()
    source = frame.tensors[op.inp]
    if isinstance(shown, Shows) and shown.part is not None:
        start, _ = frame.part(op, source, shown.part)
        source = source.select(shown.part.axis, start)
    frame.tensors[op.out] = source


def _shard_by_stream(op: ShardByStream, frame: Frame) -> None:
    source, part = frame.tensors[op.inp], op.part
    frame.tensors[op.out] = source.narrow(part.axis, *frame.part(op, source, part))


def _symmetric_view(op: SymmetricContiguousView, frame: Frame) -> None:
    source, shape = frame.tensors[op.inp], frame.local_shape(op.out)
    if op.team is None:
        frame.tensors[op.out] = source.view(shape)
    elif is_rehearsed(frame):
        frame.tensors[op.out] = source.new_empty(shape)
    else:
        frame.tensors[op.out] = show_shards(op, frame.machine, source, shape)
        if frame.machine.streams.delays:
            # The others see what this stream has written when it comes to here.
            frame.submit(partial(meet_at, op, frame.machine))


def _share_handles(op: ShareMemHandles, frame: Frame) -> None:
    """Nothing to do: memory is mapped where it is first copied from."""


def _tensor_op(op: TensorOp, frame: Frame) -> None:
    """Compute into allocated outputs; an output without a buffer becomes a view."""
    if all(out in frame.storage.buffered for out in op.outputs):
        now = frame.at(op) if frame.machine.streams.delays else frame
        frame.submit(partial(compute_into, op, now, [frame.tensors[o] for o in op.outputs]))
        return
    results = compute(op, frame)
    if op.out_tensor in frame.program.outputs and op.out_tensor in frame.storage.shows:
        results = [_as_result(op.out_tensor, results[0])]
    if frame.machine.streams.delays and not all(_is_view(r, op, frame) for r in results):
        # What was computed now says the shapes; the values come when the stream gets there.
        results = [torch.empty_like(r) for r in results]
        frame.submit(partial(_fill, op, frame.at(op), results))
    frame.tensors.update(zip(op.outputs, results, strict=True))


def _as_result(tv: TensorView, view: torch.Tensor) -> torch.Tensor:
    """Return a view with the strides that the caller asked for; results carry no gradient."""
    view = without_gradient(view)
    strides = viewed_strides(tv, view.shape, view.stride())
    return view if strides == view.stride() else view.as_strided(view.shape, strides)


def _is_view(result: torch.Tensor, op: TensorOp, frame: Frame) -> bool:
    source = op.inputs[0] if op.inputs else None
    return isinstance(source, TensorView) and share_storage(result, frame.tensors[source])


def _fill(op: TensorOp, frame: Frame, outs: list[torch.Tensor]) -> None:
    for out, value in zip(outs, compute(op, frame), strict=True):
        write(out, value)


# ------------------------------------------------------------------ communications
def _posted(number: int, frame: Frame) -> Posted:
    frame.works[number] = Posted()
    return frame.works[number]


def _received(frame: Frame, tv: TensorView, posted: Posted) -> torch.Tensor:
    """Return what to receive `tv` into."""
    out = frame.tensors[tv]
    return posted.landing(out) if frame.machine.streams.delays else out


def _communicate(op: Communication, frame: Frame) -> None:
    rank = frame.machine.rank
    team = op.team.ranks(rank)
    if not team:
        return
    posted, backend = _posted(op.number, frame), partial(frame.machine.backend, op.backend)
    inp = frame.tensors[op.inp] if frame.is_mine(op.inp) else None
    out = frame.tensors[op.out] if frame.is_mine(op.out) else None
    root = -1 if op.root is None else member(team, frame.integer(op.root), op)
    if out is not None and (rank == root or not op.collective.out.at_root):
        out = _received(frame, op.out, posted)

    def start() -> None:
        posted.work = post(CommunicationCall(op, rank, team, backend(), root), inp, out)

    _start(posted, start, frame)


def _start(posted: Posted, start: Callable[[], object], frame: Frame) -> None:
    frame.submit(start)
    posted.mark = frame.machine.streams.mark()


def member(team: Team, position: int, op: Op) -> int:
    """Return the global rank at a position of a team; raises `ExecutionError` outside."""
    if not 0 <= position < len(team):
        raise ExecutionError(
            f"{op.name}: position {position} in a team of {len(team)}{user_code(op.where)}"
        )
    return team[position]


def _permute(op: CollectivePermute, frame: Frame) -> None:
    rank = frame.machine.rank
    team = op.team.ranks(rank)
    if not team:
        return
    posted, backend = _posted(op.number, frame), partial(frame.machine.backend, op.backend)
    inp, out = frame.tensors[op.inp], _received(frame, op.out, posted)
    to, source = (member(team, frame.integer(p), op) for p in (op.send_peer, op.recv_peer))

    def start() -> None:
        posted.work = permute(op, (to, source), rank, team, backend(), inp, out)

    _start(posted, start, frame)


def _transfer(op: P2PCommunication, frame: Frame) -> None:
    tensor, peer = frame.tensors[op.buffer], frame.integer(op.peer)
    if peer not in frame.machine.team:
        raise ExecutionError(
            f"{op.name}: peer {op.peer} = {peer} of {op.buffer}, but the program is on ranks "
            f"{team_text(frame.machine.team)}{user_code(op.where)}"
        )
    if frame.group is not None:
        transfers, posted, _ = frame.group
        frame.works[op.number] = posted
    else:
        transfers, posted = [], _posted(op.number, frame)
    if op.type == "recv":
        tensor = _received(frame, op.buffer, posted)
    posted.is_alone = frame.group is None
    transfers.append(transfer(op, tensor, peer, frame.order(op.type, peer)))
    if frame.group is None:
        _exchange(op, transfers, posted, op.backend, frame)
    else:
        frame.group = transfers, posted, op.backend


def _exchange(
    op: P2PCommunication | EndCoalescing,
    transfers: list[Transfer],
    posted: Posted,
    library: str,
    frame: Frame,
) -> None:
    backend, team = frame.machine.backend, frame.machine.team

    def start() -> None:
        posted.work = exchange(op, transfers, team, backend(library)) if transfers else Done()

    _start(posted, start, frame)


def _start_coalescing(op: StartCoalescing, frame: Frame) -> None:
    if frame.group is not None:
        raise ExecutionError(f"{op.name} inside another one")
    frame.group = [], Posted(), ""


def _end_coalescing(op: EndCoalescing, frame: Frame) -> None:
    if frame.group is None:
        raise ExecutionError(f"{op.name} without StartCoalescing")
    transfers, posted, library = frame.group
    frame.group = None
    frame.works[op.number] = posted
    _exchange(op, transfers, posted, library, frame)


def _wait(op: Wait, frame: Frame) -> None:
    posted = frame.works.pop(op.number, None)
    # Absent on a rank outside the communication's mesh.
    if posted is not None:
        frame.machine.streams.join_mark(posted.mark)
        frame.submit(posted.wait, posted.is_done if posted.is_alone else None)


# ------------------------------------------------------------------ streams and control flow
def _set_stream(op: SetCurrentStream, frame: Frame) -> None:
    frame.machine.streams.enter(frame.stream(op.stream))


def _get_stream(op: GetCurrentStream, frame: Frame) -> None:
    frame.captured[op.stream.name] = frame.machine.streams.current()


def _synchronize(op: Synchronize, frame: Frame) -> None:
    frame.machine.streams.join(frame.stream(op.stream))


def _for_loop(op: ForLoop, frame: Frame) -> None:
    start, stop, step = map(frame.integer, (op.start, op.stop, op.step))
    if step < 1:
        raise ExecutionError(f"FOR {op.index}: a step of {op.step} = {step}{user_code(op.where)}")
    steps: Sequence[int] = range(start, stop, step)
    if is_rehearsed(frame) and not any(isinstance(o, ShardByStream) for o in walk(op.body)):
        steps = _unlike(steps)
    with frame.with_index(op.index) as bind:
        for i in steps:
            bind(i)
            run_block(op.body, frame)


def _unlike(steps: Sequence[int]) -> Sequence[int]:
    """Return the steps of which others only repeat the kernels: elements along an axis begin in the
    same places of a vector of memory again after as many steps as that has bytes."""
    return steps[:VECTOR_BYTES]


def _if_then_else(op: IfThenElse, frame: Frame) -> None:
    run_block(op.then if frame.number(op.predicate) else op.orelse, frame)


_META = torch.device("meta")

HANDLERS: dict[type[Op], Callable[..., None]] = {
    Allocate: _allocate,
    CollectivePermute: _permute,
    Communication: _communicate,
    Deallocate: _deallocate,
    EndCoalescing: _end_coalescing,
    ForLoop: _for_loop,
    GetCurrentStream: _get_stream,
    HirAliasSelect: _alias_select,
    IfThenElse: _if_then_else,
    LaunchKernel: _launch,
    LocalSlice: _local_slice,
    P2PCommunication: _transfer,
    PostOnStream: _post_on_stream,
    SetCurrentStream: _set_stream,
    ShardByStream: _shard_by_stream,
    ShareMemHandles: _share_handles,
    StartCoalescing: _start_coalescing,
    SymmetricContiguousView: _symmetric_view,
    Synchronize: _synchronize,
    Wait: _wait,
}


def is_rehearsed(frame: Frame) -> bool:
    """Whether tensors have no contents: then nothing is posted."""
    return frame.machine.device == _META


def run_block(ops: Sequence[Op], frame: Frame) -> None:
    """Run the ops of a region that concern this rank, in order."""
    for op in ops:
        if frame.is_idle(op):
            continue
        carry_out(op, frame)
        if frame.recorder is not None:
            frame.recorder.record(op)


def carry_out(op: Op, frame: Frame) -> None:
    """Run one op that concerns this rank.

    Raises `ExecutionError` naming op and user line where torch refuses it.
    """
    handler = HANDLERS.get(type(op), _tensor_op)
    if not is_rehearsed(frame) and (announce := announcer(op, frame.machine)):
        announce(frame.tensors.get)
    frame.op = op
    try:
        if torch_profiler._is_profiler_enabled and not is_rehearsed(frame):  # pyright: ignore[reportPrivateUsage]
            with range_of(op, frame.program):
                handler(op, frame)
        else:
            handler(op, frame)
    except FuserError:
        raise
    except Exception as error:  # torch raises errors of every kind
        raise op_failed(op, error) from error
