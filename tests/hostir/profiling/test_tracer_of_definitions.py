"""Tests `FusionDefinition.trace` on one rank, on simulated ranks, and under mpirun."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.support.errors import (
    EmptyDefinitionError,
    FuserError,
    InputError,
    OtherEntranceError,
    PeerError,
    ProgramMismatchError,
)
from hostir.profiling.timeline import Trace
from multidevice import simulate

CHUNKS, ROWS, K, N = 4, 6, 16, 8


def streamed_linear(d: int) -> tuple[FusionDefinition, list[torch.Tensor], torch.Tensor]:
    """Returns the allgather and linear of `examples/streamed_linear.py` in four steps, the shards
    of this rank, and the result."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([CHUNKS, d, ROWS, K], contiguity=True, dtype=DataType.Float)
        w = fd.define_tensor([N, K], contiguity=True, dtype=DataType.Float)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tensor in (x, w, y):
            tensor.set_device_mesh(DeviceMesh(range(d)))
        x.axis(1).parallelize(ParallelType.mesh_x)
        y.axis(0).parallelize(ParallelType.stream)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(CHUNKS, d, ROWS, K, generator=generator)
    weight = torch.randn(N, K, generator=generator)
    want = (rows.double() @ weight.double().T).float()
    return fd, [shard_tensor(rows, x), weight], want


def row_parallel(ranks: tuple[int, ...]) -> FusionDefinition:
    """Defines x [t, k] and w [n, k], both cut on k, so that the result needs one allreduce."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.linear(x, w))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh(ranks))
            tv.outer_split(1, len(ranks))
            tv.axis(1).parallelize(ParallelType.mesh_x)
    return fd


GOOD = [torch.ones(3, 4), torch.ones(5, 4)]


# ------------------------------------------------------------------ several ranks
def check_streamed(folder: Path) -> None:
    communicator = Communicator.instance()
    d, rank = communicator.size(), communicator.rank()
    fd, inputs, want = streamed_linear(d)
    path = folder / "trace.json"
    trace = fd.trace(inputs, path, warm_up=1, repeat=3, predicted="h200")
    torch.testing.assert_close(trace.outputs[0], want, atol=1e-5, rtol=1e-5)
    assert [r.rank for r in trace.ranks] == [*range(d)]
    for one in trace.ranks:
        kinds = [
            (one.streams[one.ops[s.op].stream], one.ops[s.op].kind)
            for s in one.slices
            if not s.on_host
        ]
        steps = [
            (f"Stream {i}", k) for i in range(CHUNKS) for k in ("communication", "wait", "compute")
        ]
        assert kinds == steps
        names = Counter(op.name.partition(" ")[0] for op in one.ops)
        assert names["linear"] == names["Wait"] == names["Communication"] == CHUNKS
        for run in one.runs:
            assert run.busy.compute + run.busy.exposed + run.busy.idle == pytest.approx(run.wall)
            # On a CPU nothing is beside anything.
            assert run.busy.exposed == pytest.approx(run.busy.communication)
        assert any(__file__ in op.where for op in one.ops)
    # All ranks have the same of each.
    texts = communicator.exchange(trace.to_json().encode())
    assert len(set(texts)) == 1
    if rank == 0:
        assert path.read_text() == trace.to_json()
        pids = {e["pid"] for e in json.loads(path.read_text())["traceEvents"]}
        assert len(pids) == 2 * d
    assert fd.fec.host_program().communications()
    (again,) = fd.execute(inputs)
    assert torch.equal(again, trace.outputs[0])


def check_differing_calls(folder: Path) -> None:
    rank = Communicator.instance().rank()
    fd = row_parallel((0, 1))
    with pytest.raises(ProgramMismatchError, match=r"// traced: warm_up=3, repeat=[52]"):
        fd.trace(GOOD, repeat=2 if rank else 5)
    with pytest.raises(ProgramMismatchError, match=r"// traced: |<end>"):
        _ = fd.trace(GOOD) if rank else fd.execute(GOOD)
    assert fd.trace(GOOD, repeat=1).repeat == 1


def check_an_error_of_one_rank(folder: Path) -> None:
    """An error of one rank is raised on all ranks before anything runs."""
    rank = Communicator.instance().rank()
    fd = row_parallel((0, 1))
    path = folder / "t.json"
    with pytest.raises(InputError if rank == 1 else PeerError, match="to be bound to a tensor of"):
        fd.trace([torch.ones(3), GOOD[1]] if rank == 1 else GOOD, path)
    # The first one writes.
    with pytest.raises(PeerError if rank == 1 else InputError, match="there is no folder"):
        fd.trace(GOOD, folder / "none" / "t.json")
    with pytest.raises(InputError if rank == 1 else PeerError, match="no machine 'h100'"):
        fd.trace(GOOD, path, predicted="h100" if rank == 1 else None)
    assert not path.exists()
    assert len(fd.trace(GOOD).ranks) == 2


def check_a_rank_outside_of_the_mesh(folder: Path) -> None:
    rank = Communicator.instance().rank()
    fd = row_parallel((1,))
    path = folder / "alone.json"
    trace = fd.trace(GOOD, path, repeat=2)
    assert [r.rank for r in trace.ranks] == [rank]
    if rank == 1:
        assert "rank 1" in path.read_text() and trace.compute_ms > 0
    else:
        assert trace.compute_ms == 0 and trace.outputs[0].numel() == 0


CHECKS: dict[str, Callable[[Path], None]] = {
    "streamed": check_streamed,
    "differing calls": check_differing_calls,
    "an error of one rank": check_an_error_of_one_rank,
    "a rank outside of the mesh": check_a_rank_outside_of_the_mesh,
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_simulated_ranks(name: str, tmp_path: Path) -> None:
    with simulate(2) as world:
        world.run(CHECKS[name], tmp_path)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CHECKS)
def test_under_mpirun(name: str, comm: Communicator, tmp_path: Path) -> None:
    if comm.size() == 2 or name == "streamed":
        CHECKS[name](tmp_path)


# ------------------------------------------------------------------ one rank
def in_place() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.add(x, 1.0)
        fd.add_output(y, x)
        fd.add_output(fd.ops.sum(fd.ops.exp(y), [1]))
    return fd


def test_without_a_mesh_a_rank_traces_alone() -> None:
    def here() -> Trace:
        fd, x = in_place(), torch.randn(5, 7)
        before = x.clone()
        trace = fd.trace([x], repeat=2)
        assert torch.equal(x, before)
        want = (before.double() + 1).exp().sum(1).float()
        torch.testing.assert_close(trace.outputs[-1], want)
        fd.execute([x])
        assert torch.equal(x, before + 1)
        return trace

    with simulate(2) as world:
        traces = world.run(here)
    assert [[r.rank for r in t.ranks] for t in traces] == [[0], [1]]
    assert all(t.clocks == "one" and t.exposed_communication_ms == 0 for t in traces)
    assert all(t.compute_ms + t.idle_ms == pytest.approx(t.wall_ms) for t in traces)


def test_inputs_are_those_of_execute() -> None:
    fd = in_place()
    with pytest.raises(InputError, match=r"share elements|updated in place"):
        x = torch.ones(4, 7)
        two_updates().trace([x, x])
    negative = torch.complex(torch.ones(3, 4), torch.ones(3, 4)).conj().imag
    assert negative.is_neg()
    with FusionDefinition() as plain:
        x = plain.define_tensor([-1, -1], contiguity=[False, False])
        plain.add_output(plain.ops.mul(x, 2.0))
    assert torch.equal(plain.trace([negative]).outputs[0], torch.full((3, 4), -2.0))
    assert torch.equal(
        fd.trace([[torch.zeros(2, 3)]]).outputs[-1], torch.full((2,), 3.0).mul_(torch.e)
    )
    with pytest.raises(InputError, match="pass \\[tensor\\]"):
        fd.trace(torch.zeros(2, 3))


def two_updates() -> FusionDefinition:
    with FusionDefinition() as fd:
        for _ in range(2):
            x = fd.define_tensor([-1, -1], contiguity=True)
            fd.add_output(fd.ops.add(x, 1.0), x)
    return fd


def test_a_class_of_inputs_with_a_float_control_scalar_is_traced() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        s = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(x, s))
    for scale in (2.0, 3.0):
        (out,) = fd.trace([torch.ones(4), scale], repeat=1).outputs
        assert torch.equal(out, torch.full((4,), scale))


def test_nothing_to_compute() -> None:
    trace = in_place().trace([torch.zeros(0, 7)], repeat=1)
    assert trace.idle_ms <= trace.wall_ms and trace.outputs[-1].numel() == 0


def test_options_hold_for_the_call() -> None:
    fd = in_place()
    options: dict[str, Any] = {"_enable_options": ["stream_slots"]}
    fd.trace([torch.ones(2, 3)], repeat=1, **options)
    assert fd.trace([torch.ones(2, 3)], repeat=1).repeat == 1


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")

    def __fspath__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("name", ["path", "warm_up", "repeat", "source", "predicted"])
def test_junk_is_refused_in_words(name: str, tmp_path: Path) -> None:
    fd, x = in_place(), torch.ones(2, 3)
    long = str(tmp_path / ("a" * 5000))
    numbers = [-1, 2**200] if name in ("warm_up", "repeat") else [3, True]
    junk: list[Any] = [*numbers, 1.5, "x\0y", long, [], object(), Unspeakable(), ["auto"]]
    for value in junk:
        with pytest.raises(FuserError, match=r"trace|machine|long"):
            fd.trace([x], **{name: value})
    assert torch.equal(x, torch.ones(2, 3)) and not list(tmp_path.iterdir())


def test_what_has_no_program_is_refused() -> None:
    with pytest.raises(EmptyDefinitionError):
        FusionDefinition().trace([])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0))
    fd.manual_execute([torch.ones(4)])
    with pytest.raises(OtherEntranceError):
        fd.trace([torch.ones(4)])
