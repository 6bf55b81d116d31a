"""Traces on GPUs: CUPTI finds the op of every kernel, and its times agree with CUDA events.

Run `python -m pytest tests/gpu/hostir/test_tracer_of_definitions.py`, and under mpirun with
`--with-mpi` on two GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh
from hostir.profiling.op_recorder import TracedOp
from hostir.profiling.timeline import RankTrace, Trace
from hostir.profiling.timers import CuptiWatch, EventWatch, Timed
from hostir.runtime.steps import Closure
from multidevice import Communicator
from tests.support.moved_inputs import needs_a_gpu_per_rank

SIZE = 4096
# As far as two clocks of a device differ over a kernel: of events, and of CUPTI.
RESOLUTION_S = 5e-6


def two_layers() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, v, w = (
            fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.BFloat16) for _ in range(3)
        )
        hidden = fd.ops.relu(fd.ops.linear(x, v))
        fd.add_output(fd.ops.cast(fd.ops.relu(fd.ops.linear(hidden, w)), DataType.BFloat16))
    return fd


def operands() -> list[torch.Tensor]:
    return [torch.randn(SIZE, SIZE, device="cuda").bfloat16() for _ in range(3)]


def assert_sure(trace: Trace) -> None:
    """Checks that a trace has no doubts, and that no device work begins before its op on the host.

    The two clocks may differ by as much as the trace states.
    """
    assert not trace.doubts, trace.doubts
    for rank in trace.ranks:
        issued: dict[int, float] = {}
        for s in rank.slices:
            if s.on_host:
                issued[s.op] = min(s.begin, issued.get(s.op, s.begin))
        slack = rank.skew_s + RESOLUTION_S
        works = [s for s in rank.slices if not s.on_host]
        assert works
        assert all(s.begin >= issued[s.op] - slack for s in works)
        for run in rank.runs:
            busy = run.busy
            assert busy.compute + busy.exposed + busy.idle == pytest.approx(run.wall)


def activities(rank: RankTrace) -> Counter[tuple[str, str]]:
    """Counts the device work by op and by kind: kernel, nccl, Memcpy or library."""
    kinds = ("nccl", "Memcpy", "kernel")
    return Counter(
        (
            rank.ops[s.op].name.partition(" ")[0],
            next((k for k in kinds if k.lower() in s.activity.lower()), "library"),
        )
        for s in rank.slices
        if not s.on_host
    )


def test_cupti_finds_the_op_of_every_kernel(tmp_path: Path) -> None:
    fd, inputs = two_layers(), operands()
    trace = fd.trace(inputs, tmp_path / "trace.json", predicted="h200")
    assert trace.source == CuptiWatch.source
    assert_sure(trace)
    (rank,) = trace.ranks
    computing = [op for op in rank.ops if op.kind == "compute"]
    assert {op.text for op in computing} == {
        rank.ops[s.op].text for s in rank.slices if not s.on_host
    }
    assert all(s.activity and s.queue for s in rank.slices if not s.on_host)
    torch.testing.assert_close(trace.outputs[0], fd.execute(inputs)[0])
    # Without a trace graphs repeat it; what was traced ran step by step.
    assert trace.graphs[0].startswith("rank 0: captured: "), trace.graphs
    assert trace.usual_host_ms < trace.host_ms


def test_compute_is_what_a_full_gpu_takes() -> None:
    fd, inputs = two_layers(), operands()
    trace = fd.trace(inputs)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = 20
    for _ in range(3):
        fd.execute(inputs)
    begin.record()
    for _ in range(calls):
        fd.execute(inputs)
    end.record()
    end.synchronize()
    # Kernels follow one another without a gap: the host is ahead.
    assert trace.compute_ms == pytest.approx(begin.elapsed_time(end) / calls, rel=0.15)


class BothWatch(CuptiWatch):
    """Times runs with CUPTI and, in the same runs, with CUDA events."""

    def __init__(self, ops: Sequence[TracedOp]) -> None:
        super().__init__(ops)
        self.events = EventWatch(ops, torch.device("cuda"))

    def around(self, number: int, closure: Closure) -> Closure:
        return super().around(number, self.events.around(number, closure))

    def begin_round(self) -> None:
        super().begin_round()
        self.events.begin_round()

    def end_round(self, begin: float, issued: float, end: float) -> None:
        super().end_round(begin, issued, end)
        self.events.end_round(begin, issued, end)


def test_events_lie_where_cupti_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of an op, and no others, run between its two events."""
    watches: list[BothWatch] = []

    def both(ops: Sequence[TracedOp]) -> BothWatch:
        watches.append(BothWatch(ops))
        return watches[-1]

    monkeypatch.setattr("hostir.profiling.tracer.ways_to_time", lambda *_: [both])
    two_layers().trace(operands())
    (watch,) = watches
    for by_cupti, by_events in zip(watch.rounds, watch.events.rounds, strict=True):
        kernels: dict[int, list[Timed]] = {}
        for t in by_cupti.work:
            if watch.ops[t.step].kind == "compute":
                kernels.setdefault(t.step, []).append(t)
        begins = [min(t.begin for t in found) for found in kernels.values()]
        ends = [max(t.end for t in found) for found in kernels.values()]
        took = [t.end - t.begin for t in by_events.work]
        assert [*kernels] == [t.step for t in by_events.work] and len(took) > 2
        for i, seconds in enumerate(took):
            assert seconds >= ends[i] - begins[i] - RESOLUTION_S
            if 0 < i < len(took) - 1:
                assert seconds <= begins[i + 1] - ends[i - 1] + RESOLUTION_S


@pytest.mark.finding("G24")
def test_a_trace_by_events() -> None:
    fd, inputs = two_layers(), operands()
    trace = fd.trace(inputs, source="events")
    assert trace.source == EventWatch.source
    assert_sure(trace)
    (rank,) = trace.ranks
    computing = Counter(op.text for op in rank.ops if op.kind == "compute")
    assert Counter(rank.ops[s.op].text for s in rank.slices if not s.on_host) == computing
    torch.testing.assert_close(trace.outputs[0], fd.execute(inputs)[0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("peers", [False, True])
def test_communications_of_two_gpus(comm: Communicator, peers: bool) -> None:
    d, chunks, size = comm.size(), 4, 4096
    needs_a_gpu_per_rank(comm)
    with FusionDefinition() as fd:
        x = fd.define_tensor([chunks, d, size // d, size], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([size, size], contiguity=True, dtype=DataType.BFloat16)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tensor in (x, w, y):
            tensor.set_device_mesh(DeviceMesh(range(d)))
        x.axis(1).parallelize(ParallelType.mesh_x)
        y.axis(0).parallelize(ParallelType.stream)
    inputs = [
        torch.randn(chunks, 1, size // d, size, device="cuda").bfloat16(),
        torch.randn(size, size, device="cuda").bfloat16(),
    ]
    options = ["peer_copies"] if peers else []
    trace = fd.trace(inputs, repeat=3, _enable_options=options)
    assert trace.source == CuptiWatch.source
    assert_sure(trace)
    assert [r.rank for r in trace.ranks] == [*range(d)]
    for rank in trace.ranks:
        found = activities(rank)
        moved = sum(n for (op, _), n in found.items() if op in ("Communication", "EndCoalescing"))
        carrier = "Memcpy" if peers else "nccl"
        assert moved >= chunks and any(kind == carrier for _, kind in found), found
        assert sum(n for (op, _), n in found.items() if op == "linear") >= chunks
        for run in rank.runs:
            assert run.busy.exposed <= run.busy.communication + 1e-12
    torch.testing.assert_close(trace.outputs[0], fd.execute(inputs, _enable_options=options)[0])
