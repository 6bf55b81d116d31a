"""Random stream programs: the check says clean iff no order that the streams allow is wrong.

The oracle knows nothing of clocks: it runs a tiny program in every order that the queues and their
waits allow, on numbers that remember how they came about.
"""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Deallocate,
    GetCurrentStream,
    HirAliasSelect,
    HostIrContainer,
    SetCurrentStream,
    Stream,
    Synchronize,
)
from hostir.analysis.races import LEFT, find_races
from hostir.ir.diagnostics import report
from tests.support.stream_programs import MAIN, select

STREAMS, ROWS = 2, 2
# A value is what it was computed from; nothing else can give the same.
State = dict[tuple[int, int], object]
Work = tuple[str, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


def random_program(seed: int) -> HostIrContainer:
    """Rows of 2 buffers are computed from others and from the input, on 2 streams and the caller's,
    with waits in random places; at the end the caller's stream is entered, and mostly waits."""
    rng = random.Random(seed)
    hic = HostIrContainer()
    with hic:
        x = hic.input([ROWS, 4])
        buffers = [hic.tensor([ROWS, 4]) for _ in range(2)]
        hic.append(*map(Allocate, buffers), GetCurrentStream(MAIN))
        # All rows have contents.
        hic.append(*(nodes.LoadStoreOp(b, x) for b in buffers))
        for stream in range(STREAMS):
            if rng.random() < 0.85:
                hic.append(SetCurrentStream(Stream(stream)), Synchronize(MAIN))
        for _ in range(rng.randint(2, 4)):
            stream = rng.choice([MAIN, Stream(0), Stream(1)])
            hic.append(SetCurrentStream(stream))
            if rng.random() < 0.5:
                hic.append(Synchronize(rng.choice([MAIN, Stream(0), Stream(1)])))
            source, target = rng.choice([x, *buffers]), rng.choice(buffers)
            if rng.random() < 0.3:
                hic.append(nodes.BinaryOp(target, source, target, kind="add"))
            else:
                a, b = (select(hic, v, 0, rng.randrange(ROWS)) for v in (source, target))
                hic.append(nodes.BinaryOp(b, a, a, kind="add"))
        hic.append(SetCurrentStream(MAIN))
        for stream in range(STREAMS):
            if rng.random() < 0.85:
                hic.append(Synchronize(Stream(stream)))
        if rng.random() < 0.5:
            hic.append(Deallocate(buffers[1]))
        hic.add_output(buffers[0])
    return hic


# ------------------------------------------------------------------ the oracle
def _queues(hic: HostIrContainer) -> dict[str, list[Work | tuple[str, str, int]]]:
    """Returns what each stream is given, in order: work on rows, or a wait for (stream, count)."""
    rows: dict[TensorView, tuple[tuple[int, int], ...]] = {}
    queues: dict[str, list[Work | tuple[str, str, int]]] = {"S0": [], "0": [], "1": []}
    current = "S0"

    def cells(tv: TensorView) -> tuple[tuple[int, int], ...]:
        return rows.setdefault(tv, tuple((tv.number, k) for k in range(ROWS)))

    for op in hic.ops:
        if isinstance(op, HirAliasSelect):
            k = int(str(op.index))
            rows[op.out] = (cells(op.inp)[k],)
        elif isinstance(op, SetCurrentStream):
            current = str(op.stream)
        elif isinstance(op, Synchronize):
            other = str(op.stream)
            if other != current:
                queues[current].append(("wait", other, len(queues[other])))
        elif isinstance(op, Deallocate):
            queues[current].append(("free", (), cells(op.buffer)))
        elif isinstance(op, TensorOp):
            reads = tuple(c for v in op.inputs for c in cells(v))
            queues[current].append((f"op{id(op)}", reads, cells(op.outputs[0])))
    return queues


def _results(hic: HostIrContainer) -> Iterator[object]:
    """Yields what the caller sees, for every order; the caller looks when its stream is through."""
    queues = _queues(hic)
    names = list(queues)
    # All memory is the caller's, or the allocator's, again as soon as its stream is through.
    ends = len(queues["S0"])
    x, out = (v.number for v in (hic.inputs[0], hic.outputs[0]))  # pyright: ignore[reportAttributeAccessIssue]
    memory = {x, *(op.buffer.number for op in hic.ops if isinstance(op, Allocate))}
    start: State = {(x, k): ("x", k) for k in range(ROWS)}
    stack = [(dict.fromkeys(names, 0), start, None)]
    seen: set[object] = set()
    while stack:
        done, state, answer = stack.pop()
        key = (tuple(done.values()), frozenset(state.items()), answer)
        if key in seen:
            continue
        seen.add(key)
        if answer is None and done["S0"] == ends:
            # Work that still waits observes that other work uses its memory.
            taken = {(n, k): "caller" for n in memory for k in range(ROWS)}
            seen_now = tuple(state.get((out, k)) for k in range(ROWS))
            stack.append((done, {**state, **taken}, seen_now))
        ready = [n for n in names if done[n] < len(queues[n]) and _may_go(queues[n][done[n]], done)]
        if not ready and answer is not None:
            yield answer, frozenset(_trace(state))
        for name in ready:
            what, reads, writes = queues[name][done[name]]
            after = dict(state)
            if what != "wait":
                made = (
                    what,
                    tuple(after.get(c) for c in reads),
                    tuple(after.get(c) for c in writes),
                )
                after |= {c: (made, k) for k, c in enumerate(writes)}
                after["log", what] = made
            stack.append(({**done, name: done[name] + 1}, after, answer))


def _trace(state: State) -> Iterator[object]:
    """Yields what every op saw: reads, and what it wrote over."""
    return ((k, v) for k, v in state.items() if k[0] == "log")  # pyright: ignore[reportUnnecessaryComparison]


def _may_go(work: tuple[object, ...], done: dict[str, int]) -> bool:
    return work[0] != "wait" or done[str(work[1])] >= int(str(work[2]))


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_clean_means_that_every_order_is_the_same(first: int) -> None:
    clean = 0
    for seed in range(first, first + 50):
        hic = random_program(seed)
        found = find_races(hic, {RANK: 0, NUMBER_OF_STREAMS: STREAMS})
        found = [f for f in found if f.kind != LEFT]
        orders = set(_results(hic))
        assert bool(found) == (len(orders) > 1), (
            f"seed {seed}: {len(orders)} outcomes\n{report(hic, found)}\n{hic}"
        )
        clean += not found
    assert 5 <= clean <= 45, clean


def test_the_oracle_sees_an_order() -> None:
    """It could not find a race if all orders had the same result."""
    counts = {len(set(_results(random_program(seed)))) for seed in range(20)}
    assert 1 in counts and max(counts) > 1


def test_programs_are_of_more_than_one_stream() -> None:
    ops: list[Op] = [op for seed in range(20) for op in random_program(seed).ops]
    assert sum(isinstance(op, Synchronize) for op in ops) > 20
