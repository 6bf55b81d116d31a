"""Traces of GPUs: CUPTI finds the op of every kernel, and its sums are those of events.

`python -m pytest tests/gpu/test_trace.py`, and under mpirun with `--with-mpi` on two GPUs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh
from hostir.measured import RankTrace, Trace
from hostir.watch import CuptiWatch, EventWatch
from multidevice import Communicator

SIZE = 4096


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
    """Nothing is in doubt, and the clocks are together."""
    assert not trace.doubts, trace.doubts
    for rank in trace.ranks:
        assert rank.skew_s < 100e-6
        for run in rank.runs:
            busy = run.busy
            assert busy.compute + busy.exposed + busy.idle == pytest.approx(run.wall)


def activities(rank: RankTrace) -> Counter[tuple[str, str]]:
    """Return which kind of kernels ran for which ops: (op, kernel, nccl, memcpy or library)."""
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


def test_events_say_what_cupti_says() -> None:
    fd, inputs = two_layers(), operands()
    by_events = fd.trace(inputs, source="events")
    assert by_events.source == EventWatch.source
    assert_sure(by_events)
    by_cupti = fd.trace(inputs, source="cupti")
    assert by_events.compute_ms == pytest.approx(by_cupti.compute_ms, rel=0.15, abs=0.03)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("peers", [False, True])
def test_communications_of_two_gpus(comm: Communicator, peers: bool) -> None:
    d, chunks, size = comm.size(), 4, 4096
    torch.cuda.set_device(comm.local_rank())
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
