"""The transfers of a step: who sends and who receives, by brute force over ranks and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.ir.op import Op
from fuser.ir.ops.nodes import Contraction, LoadStoreOp, Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.multidevice import DeviceMesh
from fuser.support.errors import UnsupportedError
from hostir.ir.ops import (
    PEER_COPIES,
    RANK,
    CollectivePermute,
    Communication,
    EndCoalescing,
    IfThenElse,
    P2PCommunication,
    SetCurrentStream,
    Wait,
)
from hostir.lowering.loop_steps import LoopBody, LoopContext, LoweringState, OperandSlicer
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.stream_loops import CollectiveEmitter, RingEmitter
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.streams import StreamLoops

X, Y, STREAM = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.stream
OFFSET = LowerParams(offset_by_rank=True)
PEERS = LowerParams(offset_by_rank=True, step_backend=PEER_COPIES)
MESHES = {
    "of one": (torch.arange(1), X),
    "of two": (torch.arange(2), X),
    "of three": (torch.arange(3), X),
    "not from 0": (torch.tensor([2, 3, 4, 5]), X),
    "columns of a square": (torch.arange(4).reshape(2, 2), X),
    "rows of six": (torch.arange(6).reshape(2, 3), Y),
}


@dataclass
class Loop:
    """The parts of a builder, and what they have added to the loop's ops."""

    program: LoweringState
    context: LoopContext
    body: LoopBody
    slicer: OperandSlicer
    rings: RingEmitter
    collectives: CollectiveEmitter

    @classmethod
    def of(cls, define: Callable[[FusionDefinition], None], params: LowerParams) -> Loop:
        with FusionDefinition() as fd:
            define(fd)
        shard_fusion(fd.fusion)
        program = LoweringState.of(fd.fusion, StreamLoops(fd.fusion), params, "NCCL")
        context, body = LoopContext.of(program, fd.fusion.exprs), LoopBody()
        slicer = OperandSlicer(program, context, body)
        rings = RingEmitter(program, context, body, slicer)
        emitter = CollectiveEmitter(program, context, body, slicer, rings)
        return cls(program, context, body, slicer, rings, emitter)

    def reshards(self) -> list[Reshard]:
        return [op for op in self.program.fusion.exprs if isinstance(op, Reshard)]

    def emit(self) -> Loop:
        for op in self.reshards():
            self.collectives.emit(op)
        return self

    def value(self, x: Scalar, rank: int, step: int) -> int:
        return int(sc.evaluate(x, {RANK: rank, self.context.index: step}))

    def at(self, ops: Sequence[Op], rank: int, step: int) -> Iterator[Op]:
        """Yields the ops that a rank carries out in a step."""
        for op in ops:
            if isinstance(op, IfThenElse):
                taken = op.then if self.value(op.predicate, rank, step) else op.orelse
                yield from self.at(taken, rank, step)
            else:
                yield op

    def transfers(self, rank: int, step: int) -> dict[str, int]:
        return {
            op.type: self.value(op.peer, rank, step)
            for op in self.at(self.body.steps, rank, step)
            if isinstance(op, P2PCommunication)
        }


def bring(name: str, *, swizzled: bool = False) -> Callable[[FusionDefinition], None]:
    """A copy from devices' blocks to steps' blocks, as many."""
    ranks, along = MESHES[name]
    mesh = DeviceMesh(ranks)

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(mesh)
            tv.outer_split(0, mesh.size_of(along))
        x.axis(0).parallelize(along)
        if swizzled:
            y.swizzle1d(0, along)
        y.axis(0).parallelize(STREAM)

    return define


def exchange(d: int, *, swizzled: bool = True) -> Callable[[FusionDefinition], None]:
    """Products of d parts, of which a step computes one device's and sends it there."""

    def define(fd: FusionDefinition) -> None:
        a = fd.define_tensor([d, d, -1, -1], contiguity=True)
        b = fd.define_tensor([d, 1, -1, -1], contiguity=True)
        c = fd.ops.matmul(a, b)
        parts = fd.ops.set(c)
        y = fd.ops.sum(parts, [0])
        fd.add_output(y)
        for tv in (a, b, c, parts, y):
            tv.set_device_mesh(DeviceMesh(range(d)))
        for tv in (a, b, c):
            tv.axis(0).parallelize(X)
        if swizzled:
            c.swizzle1d(1, X)
        c.axis(1).parallelize(STREAM)
        parts.axis(0).parallelize(STREAM)
        parts.axis(1).parallelize(X)
        y.axis(1).parallelize(X)

    return define


# ------------------------------------------------------------------ rings
def teams(name: str) -> list[list[int]]:
    """Returns the devices that differ by their place along the axis alone, in order of it."""
    grid, along = MESHES[name]
    rows = grid.T if along is Y else grid  # mesh_x is the last dimension
    return rows.reshape(-1, rows.shape[-1]).tolist()


@pytest.mark.parametrize("params", [OFFSET, PEERS], ids=["grouped", "peer copies"])
@pytest.mark.parametrize("name", [n for n in MESHES if n != "of one"])
def test_a_ring_receives_every_block_from_its_owner_who_sends_it(
    name: str, params: LowerParams
) -> None:
    loop = Loop.of(bring(name), params).emit()
    for team in teams(name):
        for place, rank in enumerate(team):
            owners = [team[(place + step) % len(team)] for step in range(len(team))]
            for step, owner in enumerate(owners):
                found = loop.transfers(rank, step)
                if owner == rank:
                    assert found == {} and step == 0
                    continue
                assert found["recv"] == owner
                assert loop.transfers(owner, step)["send"] == rank


@pytest.mark.parametrize("d", [2, 3])
def test_an_exchange_sends_each_block_to_its_device_and_keeps_the_own_one_to_the_end(
    d: int,
) -> None:
    loop = Loop.of(exchange(d), DEFAULT)
    loop.emit()
    for rank, step in product(range(d), range(d)):
        # Step i computes the block of the device i + 1 places on.
        target, sender = (rank + step + 1) % d, (rank - step - 1) % d
        found = loop.transfers(rank, step)
        assert found == ({} if target == rank else {"send": target, "recv": sender})
        assert (target == rank) == (step == d - 1)


def test_an_exchange_in_which_all_devices_are_at_the_same_block_is_refused() -> None:
    loop = Loop.of(exchange(2, swizzled=False), DEFAULT)
    with pytest.raises(UnsupportedError, match="swizzle1d on the operand's stream axis"):
        loop.emit()


def test_grouped_transfers_are_awaited_in_the_step_and_peer_copies_sent_at_its_end() -> None:
    grouped = Loop.of(bring("of two"), OFFSET).emit()
    ops = [*grouped.at(grouped.body.steps, 0, 1)]
    assert isinstance(ops[-2], EndCoalescing) and isinstance(ops[-1], Wait)
    assert ops[-1].number == ops[-2].number
    assert not grouped.body.last

    copied = Loop.of(bring("of two"), PEERS).emit()
    steps, last = ([*copied.at(x, 0, 1)] for x in (copied.body.steps, copied.body.last))
    transfers = {op.type: op.number for op in steps if isinstance(op, P2PCommunication)}
    waits = [op.number for op in steps if isinstance(op, Wait)]
    assert waits == [transfers["recv"]]
    assert [op.number for op in last if isinstance(op, Wait)] == [transfers["send"]]
    # The sent tensor was computed on the stream on which the loop begins.
    at = next(k for k, op in enumerate(steps) if isinstance(op, P2PCommunication))
    before, sent = steps[at - 1], steps[at]
    assert isinstance(sent, P2PCommunication) and sent.type == "send"
    assert isinstance(before, SetCurrentStream) and before.stream is copied.context.entry
    # At the own block nothing moves but a copy on the device.
    assert [type(op) for op in copied.at(copied.body.steps, 0, 0)][1:] == [LoadStoreOp]


# ------------------------------------------------------------------ products
def gathered_product(fd: FusionDefinition) -> None:
    """Rows of two devices times a matrix, a step for each device's rows."""
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    rows = fd.ops.set(x)
    y = fd.ops.matmul(rows, w)
    fd.add_output(y)
    for tv in (x, w, rows, y):
        tv.set_device_mesh(DeviceMesh(range(2)))
    for tv in (x, rows, y):
        tv.outer_split(0, 2)
    x.axis(0).parallelize(X)
    for tv in (rows, y):
        tv.axis(0).parallelize(STREAM)


def row_parallel(fd: FusionDefinition) -> None:
    """Products whose summed axis two devices share, and whose rows they have in the end."""
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for tv in (x, w, y):
        tv.set_device_mesh(DeviceMesh(range(2)))
    for tv in (x, w):
        tv.outer_split(1, 2)
        tv.axis(1).parallelize(X)
    y.outer_split(0, 2)
    y.axis(0).parallelize(X)
    x.outer_split(0, 2)
    x.swizzle1d(0, X)
    x.axis(0).parallelize(STREAM)


def products(loop: Loop, rank: int, step: int) -> list[Contraction]:
    return [op for op in loop.at(loop.body.steps, rank, step) if isinstance(op, Contraction)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_product_reads_the_own_block_in_place_beside_peer_copies_alone(rank: int) -> None:
    for params, is_in_place in ((PEERS, True), (OFFSET, False)):
        loop = Loop.of(gathered_product, params).emit()
        gather, product_op = loop.program.fusion.exprs[0], loop.program.fusion.exprs[-1]
        assert isinstance(gather, Reshard)
        result = loop.slicer.result(product_op.out_tensor)
        step = product_op.with_values(loop.slicer.operands(product_op), [result])
        loop.rings.product(product_op, step)
        own, received = products(loop, rank, 0), products(loop, rank, 1)
        whole, block = loop.program.twins[gather.inp], step.inputs[0]
        assert [op.inputs[0] for op in own] == [whole if is_in_place else block]
        assert [op.inputs[0] for op in received] == [block]


def test_a_product_writes_the_own_block_into_the_result_of_its_exchange() -> None:
    loop = Loop.of(row_parallel, DEFAULT)
    product_op = next(op for op in loop.program.fusion.exprs if isinstance(op, Contraction))
    result = loop.slicer.result(product_op.out_tensor)
    step = product_op.with_values(loop.slicer.operands(product_op), [result])
    loop.rings.product(product_op, step)
    assert not products(loop, 0, 0)
    loop.emit()
    # Step 0 computes the block of rank 1, step 1 that of rank 0.
    assert [op.out_tensor is result for op in products(loop, 0, 0)] == [True]
    assert [op.out_tensor is result for op in products(loop, 0, 1)] == [False]


# ------------------------------------------------------------------ collectives
def test_all_devices_get_the_block_of_the_steps_device() -> None:
    loop = Loop.of(bring("of three"), DEFAULT).emit()
    (sent,) = (op for op in loop.body.steps if isinstance(op, Communication))
    assert (sent.type, sent.root) == ("Broadcast", loop.context.index)
    assert [op.number for op in loop.body.steps if isinstance(op, Wait)] == [sent.number]


def test_a_rotated_copy_is_a_permutation_with_one_more_place_each_step() -> None:
    loop = Loop.of(bring("of three", swizzled=True), DEFAULT).emit()
    (sent,) = (op for op in loop.body.steps if isinstance(op, CollectivePermute))
    for rank, step in product(range(3), range(3)):
        peers = [loop.value(peer, rank, step) for peer in (sent.send_peer, sent.recv_peer)]
        assert peers == [(rank - step) % 3, (rank + step) % 3]


def test_a_step_reduces_its_block_to_its_device_unless_devices_are_at_different_steps() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([2, -1, -1], contiguity=True)
        t = fd.ops.neg(x)
        y = fd.ops.sum(t, [0])
        fd.add_output(y)
        for tv in (x, t, y):
            tv.set_device_mesh(DeviceMesh(range(2)))
        for tv in (x, t):
            tv.axis(0).parallelize(X)
        t.outer_split(1, 2)
        t.axis(1).parallelize(STREAM)
        y.outer_split(1, 2)
        y.axis(1).parallelize(X)

    loop = Loop.of(define, DEFAULT).emit()
    (sent,) = (op for op in loop.body.steps if isinstance(op, Communication))
    assert (sent.type, sent.root, sent.red_op) == ("Reduce", loop.context.index, "SUM")
    with pytest.raises(UnsupportedError, match="all devices must reduce the same block"):
        Loop.of(define, OFFSET).emit()
