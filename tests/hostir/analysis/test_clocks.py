"""Buffers of all streams lie in one arena, and share bytes only in an order that the waits keep.

The oracle knows nothing of clocks: it writes down what comes directly after what, in two runs one
after the other, follows that everywhere, and compares all uses of any two blocks that share bytes.
"""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateUsage=false

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.op import Op
from hostir import (
    NUMBER_OF_STREAMS,
    Allocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    SetCurrentStream,
    Stream,
    Synchronize,
)
from hostir.analysis.clocks import Lifetime
from hostir.ir.effects import ENTRY
from hostir.ir.ops import (
    Deallocate,
    EndCoalescing,
    P2PCommunication,
    StartCoalescing,
    StartsCommunication,
    Wait,
)
from hostir.passes.deallocation import insert_deallocate
from hostir.profiling.tracer import recorded
from hostir.runtime import evaluator as evaluating
from hostir.runtime import recorder as replaying
from hostir.runtime import steps as made_of
from hostir.runtime.plan import Arenas, Plan, first_fit
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import Block, Slots, Step, View
from hostir.runtime.streams import DelayedStreams, _Until
from tests.support.counted_calls import calls_of
from tests.support.stream_programs import (
    MAIN,
    N_STREAMS,
    PROGRAMS,
    Program,
    allocated,
    double,
    is_right,
    select,
    worker,
)
from tools.fuzz import streams as fuzzed
from tools.fuzz.product import Mode
from tools.fuzz.runner import Case, run


class Watching:
    """Listens to a recorder, to write down what comes directly after what, and who uses which
    slot."""

    found: ClassVar[list[tuple[Watching, Plan]]] = []

    def __init__(self, recorder: Recorder) -> None:
        recorder.listeners.append(self)
        self.execution, self.frame = recorder.execution, recorder.frame
        # Of each node: its stream (None: a communication's own), and other nodes that it comes
        # after, or ("last", stream).
        self.nodes: list[tuple[object, list[object]]] = [(ENTRY, [])]
        self.used: dict[int, list[int]] = {}
        self.current: object = ENTRY
        self.names: dict[str, object] = {}
        self.shown: dict[int, int] = {}
        self.in_flight: dict[int, int] = {}
        self.halves: list[int] | None = None

    @classmethod
    def recorder(cls, *given: Any) -> Recorder:
        """Makes a recorder that is watched until it has finished."""
        made = Recorder(*given)
        watching, finish = cls(made), made.finish

        def finish_and_tell(outputs: list[TensorView], arenas: Arenas) -> Plan:
            plan = finish(outputs, arenas)
            cls.found.append((watching, plan))
            return plan

        made.finish = finish_and_tell
        return made

    def slots(self, values: Sequence[object]) -> list[int]:
        has_slot, slot_of = self.execution.has_slot, self.execution.slot
        found = [slot_of(v) for v in values if isinstance(v, TensorView) and has_slot(v)]
        for k, slot in enumerate(found):
            while slot in self.shown:
                slot = self.shown[slot]
            found[k] = slot
        return found

    def node(self, stream: object, *after: object) -> int:
        self.nodes.append((stream, list(after)))
        return len(self.nodes) - 1

    def stream(self, stream: Stream) -> object:
        if stream.index is not None:
            return self.frame.integer(stream.index)
        return self.names.get(stream.name, stream.name)

    def on_kept(self, op: Op, steps: Sequence[Step]) -> None:
        views = [s for s in steps if isinstance(s, View)]
        self.shown.update((v.out, v.source) for v in views)
        slots = {*self.slots(op.inputs), *self.slots(op.outputs)}
        if isinstance(op, GetCurrentStream):
            self.names[op.stream.name] = self.current
        elif isinstance(op, SetCurrentStream):
            self.current = self.stream(op.stream)
        elif isinstance(op, Synchronize):
            self.node(self.current, ("last", self.stream(op.stream)))
        elif isinstance(op, StartCoalescing):
            self.halves = []
        elif isinstance(op, P2PCommunication) and self.halves is not None:
            self.halves += slots
        elif isinstance(op, StartsCommunication | EndCoalescing):
            start = self.node(self.current)
            flight = self.in_flight[op.number] = self.node(None, start)
            for slot in (*slots, *(self.halves or ())):
                self.used.setdefault(slot, []).append(flight)
            self.halves = None
        elif isinstance(op, Wait):
            self.node(self.current, *[self.in_flight[op.number]] * (op.number in self.in_flight))
        elif not isinstance(op, Deallocate) and not views:
            here = self.node(self.current)
            for slot in slots:
                self.used.setdefault(slot, []).append(here)

    def before(self, runs: int) -> list[int]:
        """Returns, for each node of so many runs one after the other, which ones come before it."""
        last: dict[object, int] = {}
        found: list[int] = []
        for run_number in range(runs):
            first = run_number * len(self.nodes)
            for stream, others in self.nodes:
                after = [last[stream]] if stream in last else []
                for other in others:
                    if isinstance(other, int):
                        after.append(first + other)
                    elif isinstance(other, tuple) and other[1] in last:
                        after.append(last[other[1]])
                mask = 0
                for node in after:
                    mask |= found[node] | 1 << node
                if stream is not None:
                    last[stream] = len(found)
                found.append(mask)
        return found


def shared_unordered(of: Watching, plan: Plan) -> Iterator[tuple[Block, Block]]:
    """Yields the blocks of which two share bytes, though some of their uses are not in order."""
    before, count = of.before(2), len(of.nodes)

    def is_after(a: list[int], b: list[int]) -> bool:
        uses = sum(1 << k for k in a)
        return all(before[k] & uses == uses for k in b)

    every = [
        (b, r, [k + r * count for k in of.used.get(b.slot, ())])
        for r in (0, 1)
        for b in plan.blocks
    ]
    for (a, _, used_a), (b, _, used_b) in itertools.combinations(every, 2):
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        if not apart and not is_after(used_a, used_b) and not is_after(used_b, used_a):
            yield a, b


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Watching, Plan]]:
    monkeypatch.setattr(Watching, "found", [])
    monkeypatch.setattr(evaluating, "Recorder", Watching.recorder)
    return Watching.found


def in_host_order(blocks: Sequence[tuple[Lifetime, int]]) -> tuple[list[int], int]:
    """Places blocks as if there were one stream: what the next step takes, the last one may use."""
    size = max((n for _, n in blocks), default=0)
    size = -(-size // 256) * 256
    return [0] * len(blocks), size


# ------------------------------------------------------------------ programs
def chain_of_steps(steps: int = 7, streams: bool = True) -> Callable[[HostIrContainer], None]:
    """Two buffers of its own in each step."""

    def define(hic: HostIrContainer) -> None:
        x = hic.input([steps, 8])
        y = allocated(hic, steps, 8)
        hic.append(GetCurrentStream(MAIN))
        if streams:
            with hic.loop(NUMBER_OF_STREAMS, name="h") as i:
                hic.append(SetCurrentStream(Stream(i)), Synchronize(MAIN))
        with hic.loop(steps, name="i") as i:
            if streams:
                hic.append(SetCurrentStream(worker(i)))
            t, u = allocated(hic, 8), allocated(hic, 8)
            hic.append(double(t, select(hic, x, 0, i)), double(u, t))
            hic.append(double(select(hic, y, 0, i), u))
        hic.append(SetCurrentStream(MAIN))
        if streams:
            with hic.loop(NUMBER_OF_STREAMS, name="j") as j:
                hic.append(Synchronize(Stream(j)))
        hic.add_output(y)

    return define


def by_program(steps: int = 7, streams: bool = True) -> Program:
    return Program(chain_of_steps(steps, streams), ((steps, 8),), lambda x: (x * 8,))


CASES = {**PROGRAMS, "chain_of_steps": by_program()}


# ------------------------------------------------------------------ order
@pytest.mark.parametrize("name", CASES)
def test_blocks_that_share_bytes_are_used_one_after_the_other(
    name: str, watched: list[tuple[Watching, Plan]]
) -> None:
    case = CASES[name]
    assert is_right(case, case.build())
    assert len(watched) == case.ranks
    for of, plan in watched:
        assert list(shared_unordered(of, plan)) == []


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_share_bytes_in_order(
    seed: int, watched: list[tuple[Watching, Plan]]
) -> None:
    """`scripts/fuzz.py streams` has more of them."""
    outcome = run(Case.of(fuzzed.generate(seed)), Mode())
    assert outcome.kind in ("ok", "refused"), outcome.detail
    for of, plan in watched:
        assert list(shared_unordered(of, plan)) == []


def test_the_oracle_finds_blocks_that_streams_use_at_once(
    watched: list[tuple[Watching, Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "first_fit", in_host_order)
    case = CASES["chain_of_steps"]
    HostIrEvaluator(case.build(), number_of_streams=N_STREAMS).run(case.inputs())
    ((of, plan),) = watched
    assert list(shared_unordered(of, plan))


# ------------------------------------------------------------------ any order of the streams
class Shuffled(DelayedStreams):
    """Queues that advance in random order, if they need not wait."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def finish(self) -> None:
        while ready := [q for q in self._queues.values() if q.waiting and self._may_go_on(q)]:
            self._serve(self._rng.choice(ready))

    def _may_go_on(self, queue: Any) -> bool:
        entry = queue.waiting[0]
        return not isinstance(entry, _Until) or self._queue(entry.stream).done >= entry.count


def replayed(case: Program, seed: int) -> list[torch.Tensor]:
    """Returns what a recorded plan yields in some order of its streams' work."""
    evaluator = HostIrEvaluator(case.build(), number_of_streams=N_STREAMS, late_stream="all")
    streams = evaluator.binder.devices._streams[torch.device("cpu")] = Shuffled(seed)
    inputs = case.inputs()
    _, plan = recorded(evaluator, inputs, lambda recorder: None)
    bound = plan.arenas.take(0).bind(plan)
    slots: Slots = [*inputs, *bound.rest]
    for make in bound.makes:
        make(slots)
    for block in plan.blocks:
        slots[block.slot].fill_(float("nan"))
    for closure, op in zip(bound.closures, bound.ops, strict=True):
        assert not isinstance(op, Deallocate), "what lies in the arena stays there"
        if isinstance(op, TensorOp) and op.outputs[0] in evaluator.binder.storage.buffered:
            streams.submit(partial(closure, slots))
        else:
            closure(slots)
    streams.finish()
    return [slots[i] for i in plan.outputs]


def is_close(outs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    pairs = zip(outs, wanted, strict=True)
    return all(torch.allclose(a.double(), b, atol=1e-4, rtol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 1])
def test_a_plan_is_right_in_any_order_of_its_streams(name: str) -> None:
    case = CASES[name]
    for seed in range(10):
        assert is_close(replayed(case, seed), case.expected()), f"seed {seed}"


def test_some_order_shows_bytes_that_are_shared_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "first_fit", in_host_order)
    case = CASES["chain_of_steps"]
    assert not all(is_close(replayed(case, seed), case.expected()) for seed in range(10))


# ------------------------------------------------------------------ placement of buffers
class Counted(TorchDispatchMode):
    """Counts the tensors that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.made += func._schema.name in ("aten::empty", "aten::empty_strided")
        return func(*args, **(kwargs or {}))


def _counted(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.parametrize("streams", [True, False])
def test_a_steady_run_allocates_its_outputs_alone(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory that torch does not manage is not counted.
    monkeypatch.setattr(made_of, "empty_on", lambda device: _counted)
    case = by_program(steps=9, streams=streams)
    evaluator = HostIrEvaluator(case.build(), number_of_streams=N_STREAMS)
    for _ in range(2):
        evaluator.run(case.inputs())
    (plan,) = evaluator.plans()
    assert len(plan.blocks) == 2 * 9
    inputs = case.inputs()
    with Counted() as counted:
        evaluator.run(inputs)
    assert counted.made == 1


def test_loops_of_any_length_need_what_their_streams_need_at_once() -> None:
    """Two blocks of 32 bytes, each rounded up to 256, on each of the streams."""
    for count in (N_STREAMS, 100):
        case = by_program(count)
        evaluator = HostIrEvaluator(case.build(), number_of_streams=N_STREAMS)
        evaluator.run(case.inputs())
        (plan,) = evaluator.plans()
        assert plan.nbytes == 2 * N_STREAMS * 256


def test_what_no_stream_orders_with_the_caller_is_not_shared_with_the_next_run() -> None:
    """A stream whose buffer is freed while neither it nor the caller waits for the other."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([8])
        y = allocated(hic, 8)
        hic.append(double(y, x), SetCurrentStream(Stream(0)))
        t, u = (hic.tensor([8]) for _ in range(2))
        hic.append(Allocate(t, zero_init=True), Allocate(u), double(u, t))
        hic.append(SetCurrentStream(Stream(name="Default")))
        hic.add_output(y)
    evaluator = HostIrEvaluator(insert_deallocate(hic))
    evaluator.run([torch.ones(8)])
    (plan,) = evaluator.plans()
    assert plan.blocks == ()


def test_placing_thousands_of_blocks_compares_few_of_them() -> None:
    """Of 8 streams, in steps of three buffers, each given up when the next step begins."""
    blocks: list[tuple[Lifetime, int]] = []
    for step in range(1000):
        stream, tick = step % 8, 10 * (step // 8)
        for k, nbytes in enumerate((4096, 100, 70000)):
            begin = {stream: tick + k + 1, ENTRY: 1}
            blocks.append((Lifetime(begin, (stream, tick + 9)), nbytes))
    found = set[int]()
    names = calls_of(lambda: found.add(first_fit(blocks)[1]))
    # 12.5 comparisons for each block; where each pair is compared, 1,500.
    assert names.total() < 20 * len(blocks)
    (total,) = found
    assert total == 8 * (4096 + 256 + 70144)
