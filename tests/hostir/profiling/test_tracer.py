"""Tests measured timelines of hand-written programs: sums, slices, tracks, attribution, clocks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser.support.errors import (
    ArgumentError,
    ExecutionError,
    InputError,
    PeerError,
    ProgramMismatchError,
    UnsupportedError,
)
from hostir import HostIrEvaluator
from hostir.cost.report import Busy
from hostir.ir.diagnostics import line_numbers
from hostir.ir.ops import CollectivePermute, EndCoalescing, P2PCommunication
from hostir.profiling.op_recorder import TracedOp
from hostir.profiling.timeline import RankTrace, Trace, run_times
from hostir.profiling.timers import (
    CuptiWatch,
    EventWatch,
    HostWatch,
    Round,
    Timed,
    clock,
    read_profile,
)
from hostir.profiling.tracer import (
    aligned,
    ways_to_time,  # pyright: ignore[reportPrivateUsage]
)
from hostir.tools.run_text import shards_of
from multidevice import Communicator, simulate
from multidevice.job.shard_tensor import shard_for_rank
from tests.support.handmade_programs import EXAMPLES, Example


def traced(example: Example, **options: Any) -> list[Trace]:
    """Returns the traces of simulated ranks; one rank has no communicator."""

    def here(communicator: Communicator | None) -> Trace:
        program = example.build()
        evaluator = HostIrEvaluator(program, communicator, number_of_streams=example.streams)
        rank = communicator.rank() if communicator is not None else 0
        mine = shards_of(program, example.arguments(0), rank)
        return evaluator.trace(mine, warm_up=1, repeat=3, **options)

    if example.ranks == 1:
        return [here(None)]
    with simulate(example.ranks) as world:
        return world.run(lambda: here(Communicator.instance()))


def counted(rank: RankTrace) -> Busy:
    """Computes the sums of the last run from its slices, one interval at a time."""
    wall = rank.runs[-1].wall
    work = [s for s in rank.slices if not s.on_host]
    marks = sorted({0.0, wall, *(s.begin for s in work), *(s.end for s in work)})
    sums = dict.fromkeys(("compute", "communication", "exposed", "idle"), 0.0)
    for a, b in pairwise(marks):
        kinds = {rank.ops[s.op].kind for s in work if s.begin <= a and b <= s.end}
        moves = bool(kinds & {"communication", "wait"})
        sums["compute"] += b - a if "compute" in kinds else 0.0
        sums["communication"] += b - a if moves else 0.0
        sums["exposed"] += b - a if moves and "compute" not in kinds else 0.0
        sums["idle"] += b - a if not kinds else 0.0
    return Busy(**sums)


# ------------------------------------------------------------------ sums and slices
@pytest.mark.parametrize("name", EXAMPLES)
def test_times_add_up(name: str) -> None:
    example = EXAMPLES[name]
    for trace in traced(example):
        assert [r.rank for r in trace.ranks] == [*range(example.ranks)]
        for rank in trace.ranks:
            for run in rank.runs:
                busy = run.busy
                assert busy.compute + busy.exposed + busy.idle == pytest.approx(run.wall)
                assert 0 < run.host <= run.wall
                assert min(busy.idle, busy.compute, busy.exposed) >= -1e-12
                for one in run.streams:
                    assert one.compute + one.communication + one.idle == pytest.approx(run.wall)
            assert len(rank.plain) == len(rank.usual) == len(rank.runs) == 3
            assert all(0 < host <= wall for wall, host in (*rank.plain, *rank.usual))
            assert len(rank.graphs) == 1 and rank.graphs[0].startswith("not captured: ")
            found = rank.runs[-1].busy
            assert vars(found) == pytest.approx(vars(counted(rank)), abs=1e-12)
            assert not rank.doubts
        longest = max(trace.ranks, key=lambda r: r.runs[trace.run].wall).runs[trace.run]
        assert trace.wall_ms == pytest.approx(longest.wall * 1e3)
        parts = trace.compute_ms + trace.exposed_communication_ms + trace.idle_ms
        assert parts == pytest.approx(trace.wall_ms)
        assert trace.plain_host_ms <= trace.plain_wall_ms
        assert trace.usual_host_ms <= trace.usual_wall_ms


MODELLED = [n for n in EXAMPLES if "unit" not in n and "HI-7" not in n]


@pytest.mark.parametrize("name", MODELLED)
def test_every_op_is_there_as_often_as_the_loops_say(name: str) -> None:
    """Compares with the cost model, which unrolls programs independently."""
    example = EXAMPLES[name]
    trace = traced(example, predicted="h200")[-1]
    rank = trace.ranks[-1]
    ops = [rank.ops[s.op] for s in rank.slices if not s.on_host]
    found = Counter((op.where, op.stream) for op in ops if not op.name.startswith(MOVES))
    assert trace.predicted is not None
    program, made = trace.predicted
    lines, number = line_numbers(program), made.classes.tolist()[-1]
    work = [w for w in made.of_class(number) if not isinstance(w.item.site.op, TRANSFERS)]
    want = Counter((w.item.site.place(lines), w.streams[number]) for w in work)
    assert found == want
    # A communication is one op, also a group that starts several transfers.
    moved = [op for op in ops if op.kind == "communication"]
    assert bool(moved) == any(w.is_transfer for w in made.of_class(number))
    assert all(op.tensors for op in ops)


TRANSFERS = (P2PCommunication, CollectivePermute, EndCoalescing)
MOVES = ("Wait", "P2PCommunication", "CollectivePermute", "EndCoalescing")


def test_a_steps_work_stands_on_its_stream() -> None:
    (trace,) = traced(EXAMPLES["rows"])
    (rank,) = trace.ranks
    ops = [rank.ops[s.op] for s in rank.slices if not s.on_host]
    found = [(rank.streams[op.stream], int(op.where.rpartition(" = ")[2])) for op in ops]
    assert found == [(f"Stream {i % 4}", i) for i in range(9)]


def test_what_is_announced_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `FUSER_DUMP=communication`, an extra step writes a line; it must not count as work."""
    monkeypatch.setenv("FUSER_DUMP", "communication")
    rank = traced(EXAMPLES["HO-3 on 2"])[0].ranks[0]
    works = [rank.ops[s.op].kind for s in rank.slices if not s.on_host]
    assert Counter(works) == {"communication": 8, "wait": 8, "compute": 8}


def test_a_permutation_to_oneself_computes() -> None:
    rank = traced(EXAMPLES["permutations on 2"])[1].ranks[1]
    kinds = [op.kind for op in rank.ops if op.name.startswith("CollectivePermute")]
    assert kinds == ["compute", "communication"]


def test_a_group_and_its_wait_say_what_they_move() -> None:
    rank = traced(EXAMPLES["HO-4 on 2"])[0].ranks[0]
    moves = {op.name: op.tensors for op in rank.ops if op.kind in ("communication", "wait")}
    assert moves == {
        "EndCoalescing 2": ("T6_g_float", "T7_g_float"),
        "Wait 2": ("T6_g_float", "T7_g_float"),
    }


def test_an_updated_input_keeps_its_value_and_each_run_begins_with_it() -> None:
    example = EXAMPLES["HI-10 then"]
    evaluator = HostIrEvaluator(example.build())
    _, x = arguments = example.arguments(0)
    assert isinstance(x, torch.Tensor)
    before = x.clone()
    evaluator.trace(arguments, repeat=2)
    assert torch.equal(x, before)
    evaluator.run(arguments)
    assert torch.equal(x, before + 2)


@pytest.mark.parametrize("name", [n for n, e in EXAMPLES.items() if not e.updates])
def test_outputs_are_those_of_a_run(name: str) -> None:
    example = EXAMPLES[name]
    wanted = example.expected(example.arguments(0))
    outputs = example.build().outputs
    for rank, trace in enumerate(traced(example)):
        assert len(trace.outputs) == len(wanted)
        for tv, got, want in zip(outputs, trace.outputs, wanted, strict=True):
            mine = want if tv.mesh is None else shard_for_rank(want, tv, rank)
            torch.testing.assert_close(got.double(), mine, atol=example.atol, rtol=1e-4)


def test_what_lies_outside_of_a_run_is_cut_off() -> None:
    ops = [TracedOp("a", "a", "", (), 0, kind) for kind in ("compute", "communication", "wait")]
    work = [Timed(0, 9.0, 12.0), Timed(1, 11.0, 15.0), Timed(2, 16.0, 17.0), Timed(0, 19.0, 30.0)]
    run = run_times(Round(10.0, 13.0, 20.0, [], work), ops, {0: "Stream 0"})
    assert (run.wall, run.host) == (10.0, 3.0)
    assert run.busy == Busy(compute=3.0, communication=5.0, exposed=4.0, idle=3.0)
    (stream,) = run.streams
    assert (stream.compute, stream.communication, stream.exposed, stream.idle) == (3, 5, 4, 3)


# ------------------------------------------------------------------ the file
def test_the_file_is_a_chrome_trace_with_a_track_per_stream_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traces = traced(EXAMPLES["HO-3 on 2"], path=str(path), predicted="h200")
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms" and found["otherData"]["from"] == "a real run"
    events = found["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M"}
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for e in events:
        assert type(e["pid"]) is int and type(e["tid"]) is int
        if e["name"] == "thread_name":
            names[e["pid"], e["tid"]] = e["args"]["name"]
        elif e["name"] == "process_name":
            processes[e["pid"]] = e["args"]["name"]
    assert sorted(processes.values()) == [
        "rank 0",
        "rank 0, predicted on h200",
        "rank 1",
        "rank 1, predicted on h200",
    ]
    tracks: dict[str, list[dict[str, Any]]] = {}
    for e in (e for e in events if e["ph"] == "X"):
        assert e["name"] and e["ts"] >= 0 and e["dur"] >= 0 and e["cat"]
        names_no_op = ("memory of the outputs", "the host waits")
        assert e["name"].startswith(names_no_op) or e["args"]["where"].startswith("line ")
        tracks.setdefault(f"{processes[e['pid']]}: {names[e['pid'], e['tid']]}", []).append(e)
    streams = [f"Stream {i}" for i in range(3)]
    for rank in ("rank 0", "rank 1"):
        mine = {n.partition(": ")[2] for n in tracks if n.startswith(f"{rank}:")}
        assert mine == {"host", *streams}
        theirs = {n.partition(": ")[2] for n in tracks if n.startswith(f"{rank}, ")}
        assert theirs == {*streams, "link out", "link in"}
        # Streams have the same names in both timelines.
        for stream in streams:
            alike = [tracks[f"{rank}{beside}: {stream}"] for beside in ("", ", predicted on h200")]
            measured, predicted = (
                [(e["name"], e["args"]["where"]) for e in of if not e["name"].startswith("Wait")]
                for of in alike
            )
            assert measured == predicted
    for mine in (t for n, t in tracks.items() if "predicted" not in n):
        for a, b in pairwise(mine):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-3
    matmul = next(e for e in tracks["rank 1: Stream 1"] if "matmul" in e["name"])
    assert matmul["args"] == {
        "where": "line 19 at i2 = 1",
        "op": "matmul",
        "tensors": "T6_g_float, T5_g_float, T1_g_float",
        "stream": "Stream 1",
    }
    alone = json.loads(traces[1].to_json(predicted=False))["traceEvents"]
    assert {e["pid"] for e in alone} == {0, 1}


def test_the_summary_says_what_was_measured() -> None:
    trace = traced(EXAMPLES["HO-1 on 2"], predicted="h200")[0]
    text = trace.summary()
    assert "measured on the CPU by the host's clock around each op" in text
    assert "the middle one of 3 runs, after 1 to warm up" in text and "no CUDA graph" in text
    assert "rank 0: " in text and "rank 1: " in text and "predicted on h200, ranks 0 1: " in text
    assert "clocks: the ranks share that of their host; barriers bound" in text


def test_the_sums_are_of_the_run_of_middle_length() -> None:
    (trace,) = traced(EXAMPLES["rows"])
    (rank,) = trace.ranks
    runs = [replace(rank.runs[0], wall=wall) for wall in (5.0, 1.0, 3.0, 9.0)]
    several = replace(trace, ranks=(replace(rank, runs=tuple(runs)),))
    assert (several.run, several.wall_ms) == (2, 3000.0)


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"path": "no/such/folder/t.json"}, InputError, "there is no folder 'no/such/folder'"),
        ({"path": "."}, InputError, "expected the name of a file"),
        ({"path": "/"}, InputError, "it is a folder"),
        ({"path": 3}, InputError, "path=3: expected the name of a file"),
        ({"path": ""}, InputError, "expected the name of a file"),
        ({"repeat": 0}, InputError, "repeat=0: expected a number from 1 to"),
        ({"warm_up": -1}, InputError, "warm_up=-1: expected a number from 0 to"),
        ({"repeat": "5"}, ArgumentError, "repeat: expected an integer"),
        ({"repeat": True}, ArgumentError, "repeat: expected an integer"),
        (
            {"source": "cupti"},
            InputError,
            "source='cupti' cannot be used on cpu: expected one of auto, host",
        ),
        ({"source": None}, InputError, "source=None cannot be used on cpu"),
        ({"predicted": "h100"}, InputError, "there is no machine 'h100'"),
        ({"predicted": 5}, ArgumentError, "predicted: expected a name or None"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    evaluator = HostIrEvaluator(EXAMPLES["rows"].build())
    with pytest.raises(kind, match=message):
        evaluator.trace(EXAMPLES["rows"].arguments(0), **options)


def test_ranks_that_ask_for_different_runs_are_refused() -> None:
    example = EXAMPLES["HO-3 on 2"]

    def here() -> Trace:
        rank = Communicator.instance().rank()
        evaluator = HostIrEvaluator(example.build(), Communicator.instance())
        mine = shards_of(evaluator.program, example.arguments(0), rank)
        with pytest.raises(ProgramMismatchError, match=r"(?s)traced: warm_up=3, repeat=1, .*=2"):
            evaluator.trace(mine, repeat=1 + rank)
        # The prediction may differ between ranks.
        return evaluator.trace(mine, repeat=1, predicted="h200" if rank else None)

    with simulate(2) as world:
        traces = world.run(here)
    assert [t.predicted is None for t in traces] == [True, False]


def test_wrong_inputs_are_refused_as_in_a_run() -> None:
    evaluator = HostIrEvaluator(EXAMPLES["rows"].build())
    with pytest.raises(InputError, match="bound to a tensor of rank 2"):
        evaluator.trace([torch.ones(3)])
    late = HostIrEvaluator(EXAMPLES["rows"].build(), late_stream="all")
    with pytest.raises(
        UnsupportedError, match="trace: the evaluator has late_stream, which delays work"
    ):
        late.trace(EXAMPLES["rows"].arguments(0))


# ------------------------------------------------------------------ times of devices
def test_the_ways_to_tell_the_time_of_a_gpu() -> None:
    gpu = torch.device("cuda", 0)

    def kinds(source: object, communicator: Communicator | None = None) -> list[object]:
        return [getattr(way, "func", way) for way in ways_to_time(gpu, source, communicator)]

    assert kinds("auto") == [CuptiWatch, EventWatch]
    assert kinds("cupti") == [CuptiWatch] and kinds("events") == [EventWatch]
    with pytest.raises(
        InputError, match="source='host' cannot be used on cuda:0: expected one of auto, cupti"
    ):
        kinds("host")

    def simulated() -> None:
        assert kinds("auto", Communicator.instance()) == [EventWatch]
        with pytest.raises(UnsupportedError, match="simulated ranks are threads of one process"):
            kinds("cupti", Communicator.instance())

    with simulate(2) as world:
        world.run(simulated)


class FakeEvent:
    """Stands in for a CUDA event of a device that finishes all work immediately."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = clock()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


def watched_by(monkeypatch: pytest.MonkeyPatch, *ways: Callable[..., HostWatch]) -> None:
    """Makes traces use these sources of time on any device."""
    monkeypatch.setattr("hostir.profiling.tracer.ways_to_time", lambda *_: [*ways])


def test_events_lie_around_what_gives_a_stream_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    watched_by(monkeypatch, lambda ops: EventWatch(ops, torch.device("cpu")))
    trace = traced(EXAMPLES["HO-3 on 2"])[0]
    assert trace.source == "CUDA events around each op"
    for rank in trace.ranks:
        works = [s for s in rank.slices if not s.on_host]
        assert Counter(rank.ops[s.op].kind for s in works) == {"communication": 8, "compute": 8}
        on_host = {s.op: s for s in rank.slices if s.on_host}
        slack = rank.skew_s + 1e-9  # as far as the base event may be from the host's clock
        for s in works:
            assert on_host[s.op].begin - slack <= s.begin <= s.end <= on_host[s.op].end + slack
        assert not rank.doubts and rank.skew_s > 0


# Of torch.profiler, without a GPU.
no_gpu = pytest.mark.filterwarnings("ignore:CUDA is not available")


@no_gpu
def test_what_does_not_work_is_said_and_the_next_way_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, torch.profiler records the steps but no work of a device."""
    watched_by(monkeypatch, CuptiWatch, HostWatch)
    (trace,) = traced(EXAMPLES["rows"])
    assert trace.source == HostWatch.source
    (doubt,) = trace.doubts
    assert doubt.startswith("rank 0: not by CUPTI, through torch.profiler: rank 0: ")
    assert "has recorded no work of the device" in doubt and doubt in trace.summary()
    watched_by(monkeypatch, CuptiWatch)
    with pytest.raises(ExecutionError, match="the work of the device cannot be timed"):
        traced(EXAMPLES["rows"])


class Refusing(HostWatch):
    """A source of times that fails on rank 1 before anything runs."""

    source = "refusing"
    left: list[int] = []  # noqa: RUF012

    def start(self) -> None:
        if Communicator.instance().rank() == 1:
            raise ExecutionError("no permission")

    def abandon(self) -> None:
        self.left.append(Communicator.instance().rank())


def test_all_ranks_tell_the_time_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Refusing.left.clear()
    watched_by(monkeypatch, Refusing, HostWatch)
    for trace in traced(EXAMPLES["HO-3 on 2"]):
        assert {r.source for r in trace.ranks} == {HostWatch.source}
        assert all("not by refusing: rank 1: no permission" in r.doubts[0] for r in trace.ranks)
    assert sorted(Refusing.left) == [0, 1]


class Failing(HostWatch):
    """A source of times that raises an error in the first traced run of rank 1."""

    def begin_round(self) -> None:
        if Communicator.instance().rank() == 1:
            raise RuntimeError("the device is gone")


def test_a_rank_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    watched_by(monkeypatch, Failing)
    example, others = EXAMPLES["HO-3 on 2"], list[BaseException]()

    def here() -> None:
        evaluator = HostIrEvaluator(example.build(), Communicator.instance())
        rank = Communicator.instance().rank()
        try:
            evaluator.trace(shards_of(evaluator.program, example.arguments(0), rank))
        except Exception as error:
            others.append(error)
            raise

    with simulate(2) as world, pytest.raises(RuntimeError, match="the device is gone"):
        world.run(here)
    assert {type(error) for error in others} == {PeerError, RuntimeError}


class Injecting(CuptiWatch):
    """Adds to torch's profile what a GPU would have done: one kernel for each step that computes,
    launched within its range and over before that ends.

    Ranges are as long as the steps, and begin with them, every second one 0.2 us late, by a clock
    that is ahead: torch's own may be late on a busy machine."""

    lost = 0

    def take(self, text: str) -> None:
        profile = json.loads(text)
        events = profile["traceEvents"]
        ranges = [e for e in events if e["name"].startswith("hostir step ")]
        notes = [t for one in self.rounds for t in one.host]
        in_order = sorted(ranges, key=lambda r: r["ts"])
        for k, (t, r) in enumerate(zip(notes, in_order, strict=True)):
            r["ts"], r["dur"] = (t.begin + 3.0) * 1e6 + 0.2 * (k % 2), (t.end - t.begin) * 1e6
        for k, r in enumerate(ranges):
            if self.ops[int(r["name"].split()[-1])].kind != "compute":
                continue
            at = {"cat": "kernel", "ph": "X", "name": f"kernel {k}", "pid": 0, "tid": 7}
            external = r["args"]["External id"] if k % 2 else 0
            args = {"correlation": 5000 + k, "External id": external, "stream": 7}
            times = {"ts": r["ts"] + r["dur"] * 0.5, "dur": r["dur"] * 0.25}
            events.append({**at, **times, "args": args})
            if not k % 2 and k >= self.lost:
                launch = {**at, "cat": "cuda_driver", "name": "cuLaunchKernelEx"}
                began = {"ts": r["ts"] + r["dur"] * 0.25, "dur": 0.0}
                events.append({**launch, **began, "args": {"correlation": 5000 + k}})
        super().take(json.dumps(profile))


@no_gpu
def test_kernels_belong_to_the_op_that_launched_them(monkeypatch: pytest.MonkeyPatch) -> None:
    watched_by(monkeypatch, Injecting)
    (trace,) = traced(EXAMPLES["rows"])
    (rank,) = trace.ranks
    works = [s for s in rank.slices if not s.on_host]
    on_host = {s.op: s for s in rank.slices if s.on_host}
    assert [rank.ops[s.op].kind for s in works] == ["compute"] * 9
    assert {s.queue for s in works} == {"stream 7"}
    for s in works:
        assert s.activity.startswith("kernel ")
        assert on_host[s.op].begin - 1e-6 <= s.begin <= s.end <= on_host[s.op].end + 1e-6
    assert not trace.doubts and 0 < rank.skew_s < 1e-6
    assert "times of devices may be" in trace.clocks and trace.clocks in trace.summary()


class Shifting(Injecting):
    """A source of times whose clock is one second ahead of the host's."""

    def stop(self) -> None:
        super().stop()
        for one in self.rounds:
            one.work = [replace(t, begin=t.begin + 1.0, end=t.end + 1.0) for t in one.work]


@no_gpu
def test_work_outside_of_its_run_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    watched_by(monkeypatch, Shifting)
    (trace,) = traced(EXAMPLES["rows"])
    assert trace.doubts == (
        "rank 0: by the device's clock, 27 pieces of work are outside of their run",
    )


@no_gpu
def test_kernels_that_belong_to_no_op_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Injecting, "lost", 10**9)
    watched_by(monkeypatch, Injecting)
    (trace,) = traced(EXAMPLES["rows"])
    doubts = " ".join(trace.doubts)
    assert "activities of the device belong to no op, and are in no sum: kernel " in doubts
    assert "ops left no work on the device" in doubts


def profile_of(*events: dict[str, Any]) -> str:
    return json.dumps({"traceEvents": [{"ph": "X", "dur": 1.0, **e} for e in events]})


def a_range(number: int, ts: float, external: int) -> dict[str, Any]:
    args = {"External id": external}
    return {"cat": "cpu_op", "name": f"step {number}", "ts": ts, "dur": 10.0, "args": args}


def a_kernel(ts: float, **args: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": "k", "ts": ts, "args": {"stream": 3, **args}}


def test_an_activity_finds_its_range_by_its_launch_or_by_the_op_that_ran() -> None:
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 25.0}
    inner = {"cat": "cpu_op", "name": "aten::mm", "ts": 3.0, "args": {"External id": 9}}
    found = read_profile(
        profile_of(
            a_range(1, 20.0, 2),
            a_range(0, 0.0, 1),
            inner,
            {**launch, "args": {"correlation": 70}},
            {**launch, "ts": 15.0, "args": {"correlation": 71}},
            a_kernel(100.0, correlation=70),
            a_kernel(101.0, correlation=71),
            {**a_kernel(102.0, **{"External id": 9}), "cat": "gpu_memcpy"},
            a_kernel(103.0, correlation=70, **{"External id": 1}),
            {**a_kernel(104.0), "cat": "gpu_user_annotation"},
        ),
        "step ",
    )
    assert [r.name for r in found.ranges] == ["step 0", "step 1"]
    # By the launch in range 1; launched between ranges; by the op in range 0; both, which differ.
    assert [a.range for a in found.activities] == [1, None, 0, 0]
    assert found.doubtful == 1
    assert found.activities[0].begin == pytest.approx(100e-6)
    assert found.activities[0].queue == "stream 3"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"traceEvents": [{"ph": "X"}]}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ExecutionError, match=r"export of torch.profiler cannot be read"):
        read_profile(text, "step ")


# ------------------------------------------------------------------ clocks
class FakeRanks:
    """Stands in for two ranks: the clock of the other is `ahead`; a barrier takes about 1 ms."""

    rank = 1

    def __init__(self, host: str, ahead: float) -> None:
        self.host, self.ahead = host, ahead

    def barrier(self) -> None:
        until = clock() + 1e-3
        while clock() < until:
            pass

    def exchange(self, what: tuple[str, list[tuple[float, float]], int]) -> list[object]:
        mine, marks, _ = what
        host = self.host or mine
        first = [(a + self.ahead, b + self.ahead) for a, b in marks]
        return [(host, first, 0), what]


def test_ranks_of_a_host_share_its_clock() -> None:
    shift, text = aligned(FakeRanks("", 0.0))  # pyright: ignore[reportArgumentType]
    assert shift == 0.0 and text.startswith("the ranks share that of their host")


@pytest.mark.parametrize("host", ["another host", ""])
def test_clocks_of_hosts_are_set_by_barriers(host: str) -> None:
    shift, text = aligned(FakeRanks(host, 250.0))  # pyright: ignore[reportArgumentType]
    assert shift == pytest.approx(250.0, abs=2e-3)
    assert text.startswith("of several hosts") and "barriers bound their distance to 1" in text
