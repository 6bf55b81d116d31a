"""Tests that intermediates share one buffer by liveness, and results are never stored in it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir import HostIrEvaluator
from hostir.analysis.clocks import Lifetime
from hostir.ir.effects import ENTRY
from hostir.runtime.plan import (
    ALIGNMENT_NBYTES,
    MAX_ROOM_NBYTES,
    MAX_SPARE,
    Arena,
    Arenas,
    first_fit,
    with_room,
)
from hostir.runtime.steps import Block
from tests.support.host_programs import CASES, Case, build, expected

_LIFETIMES = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 8), st.integers(0, 2000)), max_size=8
).map(lambda rows: sorted((begin, begin + length, n) for begin, length, n in rows))


def on_one_stream(row: tuple[int, int, int]) -> tuple[Lifetime, int]:
    begin, end, nbytes = row
    return Lifetime({ENTRY: begin}, (ENTRY, end)), nbytes


@settings(max_examples=300, deadline=None)
@given(_LIFETIMES)
def test_live_blocks_never_overlap(lifetimes: list[tuple[int, int, int]]) -> None:
    offsets, total = first_fit(list(map(on_one_stream, lifetimes)))
    for i, (begin, end, nbytes) in enumerate(lifetimes):
        assert offsets[i] % ALIGNMENT_NBYTES == 0
        assert offsets[i] + nbytes <= total
        for k, (other_begin, other_end, other) in enumerate(lifetimes[:i]):
            alive_together = begin < other_end and other_begin < end
            apart = offsets[i] + nbytes <= offsets[k] or offsets[k] + other <= offsets[i]
            assert not alive_together or apart or not nbytes or not other


def test_a_chain_needs_two_buffers() -> None:
    """t1 = f(t0); t2 = f(t1); ...: a block begins while only its predecessor is alive."""
    offsets, total = first_fit([on_one_stream((i, i + 2, 1024)) for i in range(10)])
    assert total == 2048
    assert offsets == [0, 1024] * 5


def test_blocks_have_the_bytes_of_their_layout() -> None:
    assert Block(0, (3, 4), (4, 1), torch.float32).nbytes == 48
    assert Block(0, (4, 3), (1, 4), torch.float32).nbytes == 48
    assert Block(0, (3, 4), (1, 0), torch.bfloat16).nbytes == 6
    assert Block(0, (3, 0), (1, 1), torch.float32).nbytes == 0
    assert Block(0, (), (), torch.float64).nbytes == 8


def test_outputs_are_fresh_and_intermediates_are_accounted() -> None:
    case = CASES["heads"]
    evaluator = HostIrEvaluator(build(case))
    inputs = case.inputs()
    evaluator.run(inputs)
    (plan,) = evaluator.plans()
    # The linear's result [5, 12] in float32 is the only intermediate with a buffer of its own.
    assert plan.nbytes == ALIGNMENT_NBYTES
    assert [b.nbytes for b in plan.blocks] == [5 * 12 * 4]
    first, second = evaluator.run(inputs), evaluator.run(inputs)
    assert first[0].data_ptr() != second[0].data_ptr()


def test_a_nested_run_gets_memory_of_its_own() -> None:
    case, cpu = CASES["heads"], torch.device("cpu")
    evaluator = HostIrEvaluator(build(case))
    evaluator.run(case.inputs())
    (plan,) = evaluator.plans()
    place, arenas = plan.blocks[0].slot - plan.inputs, Arenas(cpu)

    def address(arena: Arena) -> int:
        return arena.bind(plan).rest[place].data_ptr()

    outer, inner, elsewhere = arenas.take(0), arenas.take(0), arenas.take(1)
    assert len({address(outer), address(inner), address(elsewhere)}) == 3
    arenas.give(outer)
    again = arenas.take(0)
    assert again is outer and address(again) == address(outer)
    for arena in [again, inner, *(arenas.take(0) for _ in range(MAX_SPARE))]:
        arenas.give(arena)
    kept = [arenas.take(0) for _ in range(MAX_SPARE)]
    assert outer in kept and inner in kept
    assert arenas.take(0) not in (outer, inner), "no more than MAX_SPARE are kept"


def test_a_larger_plan_moves_the_arena_and_the_smaller_one_follows() -> None:
    evaluator = HostIrEvaluator(build(CASES["linear_relu_sum"]))
    for rows in (4, 500, 4, 500, 0, 4):
        case = Case(CASES["linear_relu_sum"].define, ((rows, 6), (7, 6), (7,)))
        for _ in range(2):
            got = evaluator.run(case.inputs())
        for a, b in zip(got, expected(case), strict=True):  # pyright: ignore[reportPossiblyUnboundVariable]
            torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


def test_room_for_somewhat_larger_sizes() -> None:
    for nbytes in (0, 1, 7, 255, 256, 4097, 10**5, 3 << 20, (64 << 20) + 1):
        room = with_room(nbytes)
        assert nbytes <= room <= nbytes * 5 // 4 and room - nbytes < MAX_ROOM_NBYTES
    assert with_room(10**5) == with_room(10**5 + 1000), "each new size would need a new buffer"
