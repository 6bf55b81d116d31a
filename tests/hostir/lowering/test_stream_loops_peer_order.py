"""The order of ops in steps with peer copies: transfers start as early as they can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import multidevice
from fuser.frontend.executor_cache import FusionExecutorCache
from fuser.ir.op import Op
from fuser.ir.ops.nodes import LinearOp, LoadStoreOp
from hostir.ir.ops import Allocate, ForLoop, HirAliasSelect, IfThenElse
from hostir.ir.program import HostIrContainer
from hostir.lowering.params import LowerParams
from multidevice import Communicator
from tests.support.peer_graph_cases import CASES, numbers

ORDER = {
    # Data for peers is offered on the entry stream. The own block is computed beside the first
    # copy; each copy beside the matmul of the last one.
    "gather in steps": [
        *("Stream S0)", "type=send", "Stream i", "type=recv", "Stream ( i", "Synchronize"),
        "= linear",
    ],
    # A block is sent when it is there, while the next one is computed.
    "scatter": ["= linear", "Stream ( i", "Synchronize", "type=send", "type=recv"],
}


def program_of(name: str) -> HostIrContainer:
    def body() -> HostIrContainer:
        fd = CASES[name](4)
        rank = Communicator.instance().rank()
        cache = FusionExecutorCache(fd.fusion, params=LowerParams(backend="CUDA"))
        shapes = [(32, 384), (32, 384)] if name == "scatter" else [(32, 96), (32, 96)]
        x, w = (numbers(shape, 0) for shape in shapes)
        if name == "scatter":
            inputs = [t.chunk(4, 1)[rank].contiguous() for t in (x, w)]
        else:
            inputs = [x.chunk(4, 0)[rank], w]
        cache.execute(inputs, _disable_options=["auto_overlap"])
        return cache.host_program()

    with multidevice.simulate(4) as world:
        return world.run(body)[0]


@pytest.mark.parametrize("name", ORDER)
def test_steps_take_turns(name: str) -> None:
    body = str(program_of(name)).partition("  FOR ")[2]
    if name == "gather in steps":
        # The own block is not waited for: the wait is in the branch of the others.
        branch, wait = (
            next(x for x in body.splitlines() if t in x) for t in ("ELSE:", "i1 + 1 ) <")
        )
        assert len(wait) - len(wait.lstrip()) > len(branch) - len(branch.lstrip()), body
    at = -1
    for piece in ORDER[name]:
        found = body.find(piece, at + 1)
        assert found > at, f"{piece} does not follow in {body}"
        at = found


def branches(program: HostIrContainer) -> Iterator[tuple[Op, Op]]:
    """Yields what the steps compute of the own block, and of any other."""
    (loop, *_) = (op for op in program.ops if isinstance(op, ForLoop))
    for op in loop.body:
        if isinstance(op, IfThenElse) and op.then and op.orelse:
            (mine,), (other,) = op.then, op.orelse
            yield mine, other


def test_the_own_rows_are_read_where_they_lie() -> None:
    program = program_of("gather in steps")
    ((mine, other),) = branches(program)
    assert isinstance(mine, LinearOp) and isinstance(other, LinearOp)
    assert mine.x is program.inputs[0] and mine.out is other.out
    (loop, *_) = (op for op in program.ops if isinstance(op, ForLoop))
    assert other.x in {op.buffer for op in loop.body if isinstance(op, Allocate)}
    assert not any(isinstance(op, LoadStoreOp) for op in loop.body)


def test_the_own_part_of_a_sum_is_computed_where_it_is_added() -> None:
    program = program_of("scatter")
    ((mine, other),) = branches(program)
    assert isinstance(mine, LinearOp) and isinstance(other, LinearOp)
    assert mine.inputs == other.inputs
    (loop, *_) = (op for op in program.ops if isinstance(op, ForLoop))
    room = next(op.inp for op in loop.body if isinstance(op, HirAliasSelect) and op.out is mine.out)
    assert room in {op.buffer for op in program.ops if isinstance(op, Allocate)}
    assert other.out in {op.buffer for op in loop.body if isinstance(op, Allocate)}
