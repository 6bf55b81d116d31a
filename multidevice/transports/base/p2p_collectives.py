"""Collectives made of point-to-point transfers, directly between each pair of ranks of the team.

Each collective is a generator that yields lists of transfers. All transfers of a list must be
complete before the generator continues. The generator depends neither on the transport nor on how
the caller waits. No rank sends more than twice the data that it must send. A reduction adds in team
order, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from multidevice.transports.base.checked_backend import HALF, CollectiveCall
from multidevice.transports.base.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    TransportTable,
)
from multidevice.transports.base.protocol import Transfer

Steps = Iterator[list[Transfer]]

# Buffers of at least this size are sent in one part per member: twice the messages, but less data.
SPLIT_NBYTES = 32768

# torch's sum over up to this number of rows adds them one after another.
IN_ORDER = 4

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def steps_of(call: CollectiveCall) -> Steps:
    """Returns the sends and receives by which this rank takes part in a collective, as a generator.

    The generator yields lists of sends and receives. The caller completes all transfers of a list,
    then asks for the next list.
    """
    inp, out = (None if t is None else t.detach() for t in (call.inp, call.out))
    return _STEPS[call.row](replace(call, inp=inp, out=out))


# ---------------------------------------------------------------- the steps of each collective
def _allgather(call: CollectiveCall) -> Steps:
    inp, out = _both(call)
    parts = _parts(out, call)
    if inp.data_ptr() != parts[call.index].data_ptr():
        parts[call.index].copy_(inp.view(-1))
    yield _swap(call, [inp.view(-1)] * len(parts), parts)


def _alltoall(call: CollectiveCall) -> Steps:
    inp, out = _both(call)
    given, taken = _parts(inp, call), _parts(out, call)
    taken[call.index].copy_(given[call.index])
    yield _swap(call, given, taken)


def _gather(call: CollectiveCall) -> Steps:
    assert call.inp is not None, "checked"
    if call.out is None:
        yield [_send(call, call.inp, call.root_index)]
        return
    taken = _parts(call.out, call)
    taken[call.index].copy_(call.inp.view(-1))
    yield [_recv(call, taken[i], i) for i in _others(call)]


def _scatter(call: CollectiveCall) -> Steps:
    assert call.out is not None, "checked"
    if call.inp is None:
        yield [_recv(call, call.out, call.root_index)]
        return
    given = _parts(call.inp, call)
    call.out.view(-1).copy_(given[call.index])
    yield [_send(call, given[i], i) for i in _others(call)]


def _broadcast(call: CollectiveCall) -> Steps:
    _, buf = _both(call)
    root = call.root_index
    if not _is_split(buf, call):
        yield (
            [_send(call, buf, i) for i in _others(call)]
            if call.is_root
            else [_recv(call, buf, root)]
        )
        return
    blocks = _blocks(buf, call)
    if call.is_root:
        yield [_send(call, blocks[i], i) for i in _others(call)]
        yield [_send(call, blocks[root], i) for i in _others(call)]
        return
    yield [_recv(call, blocks[call.index], root)]
    targets = [i for i in _others(call) if i != root]
    yield [
        *(_send(call, blocks[call.index], i) for i in targets),
        *(_recv(call, blocks[i], i) for i in _others(call)),
    ]


def _reduce_scatter(call: CollectiveCall) -> Steps:
    inp, out = _both(call)
    yield from _reduce_blocks(call, _parts(inp, call), out.view(-1))


def _reduce(call: CollectiveCall) -> Steps:
    assert call.inp is not None, "checked"
    if not _is_split(call.inp, call):
        if call.out is None:
            yield [_send(call, call.inp, call.root_index)]
            return
        parts = [torch.empty_like(call.inp).view(-1) for _ in call.team]
        parts[call.index] = call.inp.view(-1)
        yield [_recv(call, parts[i], i) for i in _others(call)]
        _fold(call, parts, call.out.view(-1))
        return
    whole = torch.empty_like(call.inp) if call.out is None else call.out
    blocks = _blocks(whole, call)
    yield from _reduce_blocks(call, _blocks(call.inp, call), blocks[call.index])
    if call.out is None:
        yield [_send(call, blocks[call.index], call.root_index)]
    else:
        yield [_recv(call, blocks[i], i) for i in _others(call)]


def _allreduce(call: CollectiveCall) -> Steps:
    inp, out = _both(call)
    if not _is_split(inp, call):
        parts = [torch.empty_like(inp).view(-1) for _ in call.team]
        parts[call.index] = inp.view(-1)
        yield _share(call, parts)
        _fold(call, parts, out.view(-1))
        return
    blocks = _blocks(out, call)
    yield from _reduce_blocks(call, _blocks(inp, call), blocks[call.index])
    yield _share(call, blocks)


def _barrier(call: CollectiveCall) -> Steps:
    nothing = torch.empty(0)
    yield _share(call, [nothing] * len(call.team))


_STEPS = TransportTable[Callable[[CollectiveCall], Steps]](
    "sends and receives",
    {
        ALLGATHER: _allgather,
        ALLREDUCE: _allreduce,
        REDUCE: _reduce,
        REDUCE_SCATTER: _reduce_scatter,
        ALL_TO_ALL: _alltoall,
        BROADCAST: _broadcast,
        GATHER: _gather,
        SCATTER: _scatter,
        BARRIER: _barrier,
    },
)


def _reduce_blocks(
    call: CollectiveCall, blocks: Sequence[torch.Tensor], out: torch.Tensor
) -> Steps:
    """Yields this rank's transfers of a reduce-scatter, and then reduces the received blocks into
    `out`.

    Each rank's operand is divided into one block per rank of the team; `blocks` are those of this
    rank. The i-th rank receives block i of every other rank, and reduces these blocks and its own.
    """
    own = blocks[call.index]
    room = own.new_empty((len(blocks), own.numel()))
    found = [*room.unbind(0)]
    is_one_sum = _is_one_sum(call, own)
    if is_one_sum:
        found[call.index].copy_(own)
    else:
        found[call.index] = own
    yield _swap(call, blocks, found)
    if is_one_sum:
        torch.sum(room, 0, out=out)
    else:
        _fold(call, found, out)


def _is_one_sum(call: CollectiveCall, own: torch.Tensor) -> bool:
    """Returns whether one call of torch's sum gives the same bits as a sum in the order of the
    team.

    This is true for few blocks of 16-bit floats on a GPU, because torch adds them in order, in
    float32. `own` is this rank's block.
    """
    is_sum = call.reduce == "SUM" and own.dtype in HALF
    return is_sum and own.is_cuda and len(call.team) <= IN_ORDER


def _fold(call: CollectiveCall, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Reduces the tensors `parts`, one for each rank in team order, and writes the result to `out`.

    The tensors have equal size and are reduced one after another, so that all ranks get the same
    bits. 16-bit floats are reduced in float32. `out` may be one of `parts`. The memory of received
    parts may be overwritten.
    """
    assert call.reduce is not None, "a reduction has an op"
    apply = _REDUCE[call.reduce]
    if out.dtype in HALF:
        wide = parts[0].float()
        for part in parts[1:]:
            apply(wide, part, out=wide)
        out.copy_(wide)
        return
    total = parts[0]
    # Received parts may be overwritten; this member's own part belongs to the caller.
    spare = parts[1 if call.index == 0 else 0]
    for part in parts[1:-1]:
        total = apply(total, part, out=spare)
    apply(total, parts[-1], out=out)


def _share(call: CollectiveCall, parts: Sequence[torch.Tensor]) -> list[Transfer]:
    """Returns this rank's transfers if each rank of the team sends its own part to all other ranks.

    `parts` has one tensor per rank, in team order: this rank's part to send, and for each other
    rank the memory that receives its part.
    """
    return _swap(call, [parts[call.index]] * len(parts), parts)


def _swap(
    call: CollectiveCall, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]
) -> list[Transfer]:
    """Returns this rank's transfers of an exchange in which each pair of ranks swaps one part.

    Part i of `given` is sent to the i-th rank of the team. Part i of `taken` is received from that
    rank. This rank's own parts are left out.
    """
    others = _others(call)
    return [
        *(_recv(call, taken[i], i) for i in others),
        *(_send(call, given[i], i) for i in others),
    ]


def _send(call: CollectiveCall, tensor: torch.Tensor, index: int) -> Transfer:
    return Transfer("send", tensor, call.team[index])


def _recv(call: CollectiveCall, tensor: torch.Tensor, index: int) -> Transfer:
    return Transfer("recv", tensor, call.team[index])


def _others(call: CollectiveCall) -> list[int]:
    """Returns the positions of the other ranks in the team, starting after this rank.

    The start differs between ranks, so that no rank is the first target of all others.
    """
    count = len(call.team)
    return [(call.index + i) % count for i in range(1, count)]


def _both(call: CollectiveCall) -> tuple[torch.Tensor, torch.Tensor]:
    assert call.inp is not None and call.out is not None, "checked"
    return call.inp, call.out


def _parts(tensor: torch.Tensor, call: CollectiveCall) -> Sequence[torch.Tensor]:
    """Divides a buffer that has one equal part for each rank of the team into these parts."""
    count = len(call.team)
    return tensor.view(count, tensor.numel() // count).unbind(0)


def _blocks(tensor: torch.Tensor, call: CollectiveCall) -> Sequence[torch.Tensor]:
    """Divides a buffer of any size into one block for each rank of the team.

    The last blocks may be one element shorter.
    """
    return tensor.view(-1).tensor_split(len(call.team))


def _is_split(tensor: torch.Tensor, call: CollectiveCall) -> bool:
    return len(call.team) > 2 and tensor.numel() * tensor.element_size() >= SPLIT_NBYTES
