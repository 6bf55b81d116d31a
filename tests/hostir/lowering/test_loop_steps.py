"""The steps of a loop over streams: their numbers by brute force, and the parts that they name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import pytest

from fuser import FusionDefinition, ParallelType, TensorView
from fuser.ir.ops.nodes import Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import STREAM_TYPES
from fuser.multidevice import DeviceMesh
from fuser.support.errors import UnsupportedError
from hostir.ir.effects import Stream
from hostir.ir.ops import RANK, Allocate, HirAliasSelect, ShardByStream, loop_index
from hostir.lowering.loop_steps import LoopBody, LoopContext, LoweringState, OperandSlicer
from hostir.lowering.params import DEFAULT, LowerParams
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.streams import StreamLoops

X, STREAM = ParallelType.mesh_x, ParallelType.stream


def lowering_of(
    define: Callable[[FusionDefinition], None], params: LowerParams = DEFAULT
) -> LoweringState:
    with FusionDefinition() as fd:
        define(fd)
    shard_fusion(fd.fusion)
    return LoweringState.of(fd.fusion, StreamLoops(fd.fusion), params, "NCCL")


def value(x: Scalar, step: int, loop: LoopContext, rank: int = 0) -> int:
    return int(sc.evaluate(x, {loop.index: step, RANK: rank}))


def relu(fd: FusionDefinition, *, blocks: int | None = None) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.relu(x)
    fd.add_output(y)
    if blocks is not None:
        y.outer_split(0, blocks)
    y.axis(0).parallelize(STREAM)


def bring(fd: FusionDefinition, *, swizzled: bool = False) -> None:
    """A copy from two devices' blocks to the blocks of two steps."""
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.set(x)
    fd.add_output(y)
    for tv in (x, y):
        tv.set_device_mesh(DeviceMesh(range(2)))
    x.outer_split(0, 2)
    x.axis(0).parallelize(X)
    y.outer_split(0, 2)
    if swizzled:
        y.swizzle1d(0, X)
    y.axis(0).parallelize(STREAM)


# ------------------------------------------------------------------ numbers
def bare_loop(counts: tuple[int, ...]) -> LoopContext:
    count = prod(counts)
    index = loop_index("streamIdx", 0, count)
    digits = {
        ptype: (sc.as_scalar(n), sc.as_scalar(prod(counts[k + 1 :])))
        for k, (ptype, n) in enumerate(zip(STREAM_TYPES, counts, strict=False))
    }
    entry = Stream(name="S0")
    return LoopContext(
        index=index,
        count=sc.as_scalar(count),
        axis=None,
        step=index,
        block=index,
        begins_at_rank=False,
        digits=digits,
        shares_streams=True,
        entry=entry,
    )


@pytest.mark.parametrize("counts", [(1,), (7,), (2, 3), (3, 1), (1, 5), (2, 3, 5)])
def test_digits_of_a_merged_axis_count_its_parts_in_order(counts: tuple[int, ...]) -> None:
    loop = bare_loop(counts)
    for step, expected in enumerate(product(*map(range, counts))):
        digits = [value(loop.digit(loop.index, p), step, loop) for p in loop.digits]
        assert tuple(digits) == expected


def test_digit_of_a_loop_without_steps_divides_by_nothing() -> None:
    loop = bare_loop((3, 0))
    assert [loop.digit(loop.index, p) for p in loop.digits] == [sc.ZERO, sc.ZERO]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_steps_have_their_own_block_or_each_device_begins_with_its_own(
    offset: bool, swizzled: bool
) -> None:
    program = lowering_of(
        lambda fd: bring(fd, swizzled=swizzled), LowerParams(offset_by_rank=offset)
    )
    loop = LoopContext.of(program, program.fusion.exprs)
    (out,) = program.fusion.outputs
    is_rotated = offset or swizzled
    for rank, step in product(range(2), range(2)):
        expected = (step + rank) % 2 if is_rotated else step
        assert value(loop.block_of(out), step, loop, rank) == expected


def test_blocks_have_a_stream_each_and_a_whole_axis_shares_the_streams_there_are() -> None:
    for blocks, text in ((3, "i3"), (None, "( streamIdx % numberOfStreams )")):
        program = lowering_of(lambda fd, n=blocks: relu(fd, blocks=n))
        loop = LoopContext.of(program, program.fusion.exprs)
        assert str(loop.stream) == text
        assert (loop.axis is None) == (blocks is not None)


def test_the_next_stream_waits_for_this_one_in_every_step_but_the_last() -> None:
    program = lowering_of(lambda fd: relu(fd, blocks=3))
    loop = LoopContext.of(program, program.fusion.exprs)
    waits = loop.next_stream_waits()
    assert str(waits).splitlines() == [
        "IF Manual ( ( i3 + 1 ) < 3 ):",
        "  SetCurrentStream(Stream ( i3 + 1 ))",
        "  Synchronize(Stream i3)",
        "  SetCurrentStream(Stream i3)",
    ]


# ------------------------------------------------------------------ operands
def slicer_of(program: LoweringState) -> tuple[OperandSlicer, LoopBody, LoopContext]:
    loop, body = LoopContext.of(program, program.fusion.exprs), LoopBody()
    return OperandSlicer(program, loop, body), body, loop


def test_an_operand_and_a_result_along_a_whole_axis_lose_it() -> None:
    program = lowering_of(relu)
    slicer, body, loop = slicer_of(program)
    (op,) = program.fusion.exprs
    part, result = slicer.operand(op, 0), slicer.result(op.out_tensor)
    assert (part.ndim, result.ndim) == (1, 1)
    first, second = body.steps
    assert isinstance(first, HirAliasSelect) and isinstance(second, HirAliasSelect)
    assert (first.inp, first.out, first.index) == (program.twins[op.inputs[0]], part, loop.index)
    assert (second.inp, second.out) == (program.twins[op.out_tensor], result)
    (allocate,) = body.before
    assert isinstance(allocate, Allocate) and allocate.buffer is program.twins[op.out_tensor]


def test_a_part_is_named_once_in_a_step() -> None:
    program = lowering_of(lambda fd: relu(fd, blocks=3))
    slicer, body, loop = slicer_of(program)
    (op,) = program.fusion.exprs
    assert slicer.part(op.inputs[0]) is slicer.part(op.inputs[0])
    (named,) = body.steps
    assert isinstance(named, ShardByStream) and named.stream_index is loop.index


def test_a_tensor_of_one_loop_has_memory_for_a_step_or_a_slot_per_stream() -> None:
    def define(fd: FusionDefinition, blocks: int | None) -> None:
        a, b = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.matmul(a, b)
        z = fd.ops.matmul(y, b)
        fd.add_output(z)
        for tv in (y, z):
            if blocks is not None:
                tv.outer_split(0, blocks)
            tv.axis(0).parallelize(STREAM)

    own = lowering_of(lambda fd: define(fd, 3))
    slicer, body, loop = slicer_of(own)
    made = own.fusion.exprs[0].out_tensor
    assert slicer.result(made) is own.twins[made] and not body.before
    (allocate,) = body.steps
    assert isinstance(allocate, Allocate) and allocate.stream_index is loop.index

    slots = lowering_of(lambda fd: define(fd, None), LowerParams(stream_slots=True))
    slicer, body, _ = slicer_of(slots)
    made = slots.fusion.exprs[0].out_tensor
    slicer.result(made)
    (room,), (element,) = body.before, body.steps
    assert isinstance(room, Allocate) and str(room.buffer.shape()[0]) == "numberOfStreams"
    assert isinstance(element, HirAliasSelect) and element.inp is room.buffer
    assert str(element.index) == "( streamIdx % numberOfStreams )"


def test_what_a_step_slice_cuts_is_found_whole_again() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=True)
        relu = fd.ops.relu(x)
        y = fd.ops.sin(relu)
        fd.add_output(relu)
        fd.add_output(y)
        y.axis(0).parallelize(STREAM)

    with FusionDefinition() as fd:
        define(fd)
    shard_fusion(fd.fusion, propagate=False)
    program = LoweringState.of(fd.fusion, StreamLoops(fd.fusion), DEFAULT, "NCCL")
    cut, reader = fd.fusion.exprs[-2:]
    assert isinstance(cut, Reshard)
    loop, body = LoopContext.of(program, [cut, reader]), LoopBody()
    slicer = OperandSlicer(program, loop, body)
    slicer.slice_whole(cut)
    assert slicer.part(cut.out).ndim == 1
    assert slicer.whole(cut.out, reader) is program.twins[cut.inp]


def test_what_only_the_steps_make_is_not_found_whole() -> None:
    program = lowering_of(relu)
    slicer, _, _ = slicer_of(program)
    (op,) = program.fusion.exprs
    out: TensorView = op.out_tensor
    slicer.part(out)
    with pytest.raises(
        UnsupportedError, match=r"relu needs the complete tensor T1.* before the stream loop"
    ):
        slicer.whole(out, op)
    slicer.result(out)  # allocated before the loop
    assert slicer.whole(out, op) is program.twins[out]
