"""Measuring a machine: what is written is a description, and found where it is asked for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from fuser import DataType
from fuser.support.errors import FuserError, InputError, PeerError
from hostir import HostIrEvaluator
from hostir.cost import calibrate
from hostir.cost.calibrate import link_faults, matmul_faults, spread_faults
from hostir.cost.machine_model import (
    H200,
    Machine,
    find_machine,
    machine_from_json,
    machine_of,
    measured_file,
    usual_machine,
)
from hostir.cost.op_costs import collective_cost, transfer_cost
from hostir.ir.ops import PEER_COPIES
from hostir.tools.cli import main
from multidevice import Communicator, simulate
from multidevice.transports.base.collectives import ALLGATHER, Collective
from tests.support.host_programs import CASES, build
from tests.support.predicted_times import linear_program, seconds

CPU = torch.device("cpu")
LINKS = ("nccl", "nccl_other_bandwidth", "nccl_latency_s", "copy_latency_s", "pull_bandwidth")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few rounds, and a cache folder of the test's own."""
    monkeypatch.setenv("FUSER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "_ROUNDS", 1)
    # One round says nothing of what cannot be, and other tests run beside: what the checks say is
    # tested on times of the tests' own.
    for name in ("link_faults", "matmul_faults", "spread_faults"):
        monkeypatch.setattr(calibrate, name, lambda *_, **__: "")  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: 8)


def test_a_rank_alone_measures_its_device() -> None:
    before, found, _ = calibrate.calibrate(Communicator.instance(), CPU)
    assert before == H200
    assert found.name == "cpu, measured"
    assert (found.device, found.multiprocessors, found.host_run_s) == ("CPU", 1, 0.0)
    # 1 MB/s to 10 TB/s, 1 Mflop/s to 100 Tflop/s.
    assert 1e6 < found.memory_bandwidth < 1e13
    assert all(1e6 < rate < 1e14 for _, rate in found.matmul)
    assert found.matmul_dtypes["Float"] == 1.0
    # Calls that compute next to nothing: 10 ns to 1 s, on a machine that may be busy.
    assert all(1e-8 < seconds < 1 for seconds in (found.launch_s, found.matmul_launch_s))
    # Numbers that were not measured are unchanged.
    assert all(getattr(found, name) == getattr(H200, name) for name in LINKS)


def test_a_small_linear_costs_what_a_small_matmul_was_measured_to(tmp_path: Path) -> None:
    _, found, _ = calibrate.calibrate(Communicator.instance(), CPU)
    assert seconds(linear_program(1, 1, 1, DataType.Float), found) > found.matmul_launch_s
    # A matmul of twice the size of one that was measured takes longer, at about its rate.
    flops, rate = found.matmul[-1]
    n = 2 * round((flops / 2) ** (1 / 3))
    large = seconds(linear_program(n, n, n, DataType.Float), found)
    assert large == pytest.approx(8 * flops / rate, rel=0.1)


def check_links() -> None:
    _, found, _ = calibrate.calibrate(Communicator.instance(), CPU)
    assert set(found.nccl) == set(H200.nccl)
    assert all(1e4 < bandwidth < 1e13 for bandwidth in found.nccl.values())
    assert 1e4 < found.pull_bandwidth < 1e13
    assert found.pull_bandwidth != H200.pull_bandwidth
    assert 0 <= found.copy_latency_s < 1


def test_ranks_measure_their_links() -> None:
    with simulate(2) as world:
        world.run(check_links)


@pytest.mark.mpi(min_size=2)
def test_ranks_measure_their_links_under_mpirun(comm: Communicator) -> None:
    check_links()


def test_what_is_measured_is_kept_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="this machine is not measured"):
        find_machine("measured", CPU)
    assert main(["calibrate", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert str(measured_file(CPU)) in out and "name: h200 -> cpu, measured" in out
    found = find_machine("measured", CPU)
    assert found == machine_of(CPU) and found.name == "cpu, measured"
    assert found == machine_from_json(found.to_json())
    # A second one starts from it.
    assert main(["calibrate", "--device", "cpu"]) == 0
    assert "name:" not in capsys.readouterr().out


def test_a_description_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    assert main(["calibrate", "--device", "cpu", "-o", str(file)]) == 0
    assert find_machine(str(file)).name == "cpu, measured"
    assert not measured_file(CPU).exists()


def test_costs_are_those_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate.write(replace(H200, name="mine"), measured_file(CPU))
    program = tmp_path / "program.txt"
    program.write_text(build(next(iter(CASES.values()))).full_text())
    assert main(["cost", str(program), "--machine", "measured"]) == 0
    assert "predicted on mine" in capsys.readouterr().out
    # A CPU's description is none that anybody means by default.
    assert main(["cost", str(program)]) == 0
    assert "predicted on h200" in capsys.readouterr().out
    assert usual_machine() == "h200"


def test_a_broken_file_stops_no_program() -> None:
    file = measured_file(CPU)
    calibrate.write(H200, file)
    file.write_text(file.read_text().replace("launch_s", "lunch_s", 1))
    with pytest.warns(UserWarning, match="a machine has no field 'lunch_s'"):
        assert machine_of(CPU) is None
    with pytest.raises(InputError, match="lunch_s"):
        find_machine("measured", CPU)
    assert calibrate.known_before(CPU) == H200


# ------------------------------------------------------------------ what numbers are made of
class Fake:
    """Takes what the model says that it takes."""

    def __init__(self, latency: float, ramp: float, bandwidth: float) -> None:
        self.latency, self.ramp, self.bandwidth = latency, ramp, bandwidth

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        del times
        nbytes = cast(int, call())
        ramp = self.ramp if nbytes > 1e6 else 0.0
        return self.latency + ramp + ALLGATHER.bus(4) * nbytes / self.bandwidth


def test_latency_ramp_and_bandwidth_are_told_apart() -> None:
    fake: Any = Fake(14e-6, 24e-6, 325e9)
    make: Any = lambda nbytes: lambda: nbytes  # noqa: E731
    found = calibrate._fit(fake, make, ALLGATHER.bus(4), (8 << 10, 64 << 20, 256 << 20))  # pyright: ignore[reportPrivateUsage]
    assert found == pytest.approx((14e-6, 24e-6, 325e9), rel=1e-6)


def test_what_says_nothing_of_bytes_is_doubtful() -> None:
    """Large messages that take as long as small ones."""
    fake: Any = Fake(14e-6, 0.0, 1e20)
    fake.doubts = []

    def allgather(nbytes: int) -> Callable[[], int]:
        return lambda: nbytes

    sizes = (1 << 10, 1 << 20, 4 << 20)
    calibrate._fit(fake, cast(Any, allgather), ALLGATHER.bus(4), sizes)  # pyright: ignore[reportPrivateUsage]
    assert fake.doubts == [
        "allgather: 4194304 bytes took 1.4e-05 s, 1024 bytes 1.4e-05 s: "
        "the difference is too small to compute the time per byte"
    ]


@pytest.mark.parametrize("name", ["Allgather", "nccl_other_bandwidth", "pull_bandwidth"])
def test_a_link_faster_than_memory_is_not_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: dict[str, Any] = {"nccl": {"Allgather": 2e9}, "nccl_other_bandwidth": 2e9}
    links["pull_bandwidth"] = 2e9
    (links["nccl"] if name == "Allgather" else links)[name] = 3090e9
    monkeypatch.setattr(calibrate, "link_faults", link_faults)
    tries: list[object] = []
    monkeypatch.setattr(calibrate, "local_fields", lambda *_: {"memory_bandwidth": 13e9})
    monkeypatch.setattr(calibrate, "link_fields", lambda bench: tries.append(bench) or links)

    def body() -> None:
        with pytest.raises(
            FuserError,
            match=f"{name}: measured 3.09e.03 GB/s between ranks, .* only 13 GB/s.*Nothing is",
        ):
            calibrate.calibrate_here(Communicator.instance(), "cpu", None)

    with simulate(2) as world:
        world.run(body)
    assert not measured_file(CPU).exists()
    assert len(tries) == 3 * 2  # ranks
    assert not link_faults({**H200.__dict__})
    assert not link_faults({"memory_bandwidth": 10e9, "pull_bandwidth": 19e9})


def test_other_work_beside_some_repetitions_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lower quartile of nine; where that is far from the best, of up to four times as many."""
    monkeypatch.setattr(calibrate, "_ROUNDS", 9)
    bench = calibrate._Bench(Communicator.instance(), CPU)  # pyright: ignore[reportPrivateUsage]
    quiet = [9.0, 1.0, 9.0, 1.1, 30.0, 1.0, 9.0, 9.0, 9.0]
    busy = [1.0, *[5.0] * 8]
    for times, expected in ((quiet, 1.1), ([*busy, *[1.2] * 9], 1.2), ([*busy, *[5.0] * 27], 5.0)):
        left = iter([0.0, *times])  # the first tells how many calls a burst has
        monkeypatch.setattr(bench, "_burst", lambda *_, left=left: next(left))
        assert bench.seconds(lambda: None) == expected
        assert len(list(left)) == 0
    assert bench.spreads == pytest.approx([1.1, 1.2, 5.0])
    assert spread_faults(bench.spreads[:2]) == ""
    text = spread_faults(bench.spreads)
    assert text.startswith("1 of 3 measurements differ by more than a factor of 2 from repetition")


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ROUNDS", 3)
    bench = calibrate._Bench(Communicator.instance(), CPU)  # pyright: ignore[reportPrivateUsage]
    called: list[str] = []
    bench.interleaved([lambda: called.append("a"), lambda: called.append("b")], 1)
    assert called[-6:] == ["a", "b"] * 3


# (dtype, microseconds of products of 4, 34 and 268 MFLOP); what is said.
FAULTS = [
    ({"Float": (60, 400, 3000)}, ""),
    ({"Float": (60, 60, 60)}, "Float matmuls of 4e.06 and 3.4e.07 operations take 60 and 60 us"),
    ({"Float": (30, 23000, 3000)}, "take 30 and 2.3e.04 us: their rates differ by a factor of 90"),
    ({"Float": (60, 400, 300)}, "take 400 and 300 us"),
    ({"Float": (60, 400, 3000), "Half": (4, 28, 210)}, "Half matmuls are 15 times as fast as"),
    ({"Float": (60, 400, 3000), "Half": (9000, 80000, 640000)}, ""),
    ({"Float": (60, 400, 3000), "BFloat16": (30, 200, 1500)}, ""),
    ({"Float": (60, 400, 3000), "Double": (20, 130, 1000)}, "Double matmuls are 3.08 times"),
    ({"Float": (60, 400, 3000), "Double": (100, 100, 100)}, "Double matmuls of 4e.06 and"),
]


@pytest.mark.parametrize(("times", "said"), FAULTS)
def test_matmuls_that_cannot_be_are_told(times: dict[str, tuple[float, ...]], said: str) -> None:
    flops = (4e6, 34e6, 268e6)
    rates = {
        d: [(n, n / (us * 1e-6)) for n, us in zip(flops, found, strict=True)]
        for d, found in times.items()
    }
    text = matmul_faults(rates, "Float", "cpu", has_tiles=False)
    assert re.search(said, text) and bool(text) == bool(said)
    if "15 times" in said:
        assert not matmul_faults(rates, "Float", "cpu", has_tiles=True)


def test_a_larger_matmul_of_a_gpu_takes_longer() -> None:
    """Also where rates differ by less than fourfold."""
    for fast, said in ((1500e12, "1e.12 and 2e.12 operations take"), (800e12, "")):
        rates = {"BFloat16": [(1e12, 700e12), (2e12, fast)]}
        text = matmul_faults(rates, "BFloat16", "cuda", has_tiles=False)
        assert re.search(said, text) and bool(text) == bool(said)


def test_measurements_are_repeated_and_nothing_impossible_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third one has nothing that cannot be; or none has."""
    tries: list[object] = []

    def wrong(bench: Any, before: Machine) -> dict[str, Any]:
        tries.append(bench)
        bench.faults.append("" if len(tries) == good else "it cannot be")
        return {"memory_bandwidth": 1e9}

    monkeypatch.setattr(calibrate, "local_fields", wrong)
    good = 3
    calibrate.calibrate(Communicator.instance(), CPU)
    assert len(tries) == 3
    good = -1
    with pytest.raises(FuserError, match=r"it cannot be: other work .* Nothing is written"):
        calibrate.calibrate_here(Communicator.instance(), "cpu", None)
    assert len(tries) == 6 and not measured_file(CPU).exists()


def test_ranks_that_take_turns_are_refused_unless_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(calibrate, "local_fields", lambda *_: {"memory_bandwidth": 1e9})
    monkeypatch.setattr(calibrate, "link_fields", lambda _: {"pull_bandwidth": 2e9})
    file = tmp_path / "mine.json"

    def body() -> None:
        here = Communicator.instance()
        with pytest.raises(InputError, match=r"2 ranks take turns on 1 cores.*-o FILE.json"):
            calibrate.calibrate_here(here, "cpu", None)
        told = calibrate.calibrate_here(here, "cpu", str(file))
        assert "not sure: 2 ranks take turns on 1 cores" in told

    with simulate(2) as world:
        world.run(body)
    assert file.exists() and not measured_file(CPU).exists()


def test_a_description_says_whose_links_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone keeps the links that a job has measured, and their number."""
    monkeypatch.setattr(calibrate, "local_fields", lambda *_: {"memory_bandwidth": 1e9})
    monkeypatch.setattr(calibrate, "link_fields", lambda _: {"pull_bandwidth": 2e9})

    def body() -> None:
        calibrate.calibrate_here(Communicator.instance(), "cpu", None)

    body()
    assert cast(Machine, machine_of(CPU)).name == "cpu, measured"
    with simulate(2) as world:
        world.run(body)
    assert cast(Machine, machine_of(CPU)).name == "cpu, measured; links by 2 ranks"
    body()
    found = cast(Machine, machine_of(CPU))
    assert (found.name, found.pull_bandwidth) == ("cpu, measured; links by 2 ranks", 2e9)


class Model:
    """A bench, and all that it asks: calls take what a machine's description says, and peer copies
    wait a while for their answer."""

    def __init__(self, ranks: int, machine: Machine) -> None:
        self.team, self.machine = tuple(range(ranks)), machine
        self.doubts: list[str] = []
        self.device, self.communicator = torch.device("cuda"), self

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        del times
        what, backend, sizes = cast("tuple[Collective | None, str, list[int]]", call())
        machine, n = self.machine, len(self.team)
        if what is None:
            answered = 17e-6 if backend == PEER_COPIES else 0.0
            return answered + sum(transfer_cost(k, backend, machine).seconds for k in sizes)
        dtype = DataType.Float
        return collective_cost(what, n, max(sizes), backend, machine, dtype=dtype).seconds

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes // 4, device="meta")

    # Its communicator.
    def rank(self) -> int:
        return 0

    def begin_run(self, team: object) -> None:
        pass

    def are_on_one_host(self, team: object) -> bool:
        return True

    have_access = are_on_one_host

    def backend_for(self, device: object) -> Library:
        return Library("NCCL")

    def peers_for(self, device: object) -> Library:
        return Library(PEER_COPIES)


class Library:
    """Calls that say what they would move."""

    def __init__(self, name: str) -> None:
        self.name = name

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def _noted(self, what: Collective | None, *tensors: torch.Tensor) -> Any:
        sizes = [t.numel() * t.element_size() for t in tensors]
        return SimpleNamespace(wait=lambda: (what, self.name, sizes))

    def batch(self, transfers: Any, **_: object) -> Any:
        return self._noted(None, *(t.tensor for t in transfers if t.kind == "recv"))

    def collective(self, row: Collective, out: torch.Tensor, inp: torch.Tensor, **_: object) -> Any:
        return self._noted(row, out, inp)


OTHER = replace(
    H200,
    allreduce_kernel_s={**H200.allreduce_kernel_s, "ONE_OF_WORDS": 5e-6, "TWO_OF_WORDS": 9e-6},
    allreduce_kernel_bandwidth=123e9,
    copy_latency_s=7e-6,
    pull_bandwidth=200e9,
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_job_measures_is_what_there_is(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large allreduces are a library's and small ones a kernel: neither says of the other. A copy
    is measured among others, without the time until the peer's answer has come back."""
    bench: Any = Model(ranks, OTHER)
    monkeypatch.setattr(calibrate, "_host_of_posts", lambda _, count: count * 3e-6)
    found = calibrate.link_fields(bench)
    for name, value in found.items():
        expected: Any = 3e-6 if name == "host_post_s" else getattr(OTHER, name)
        # Ramps are no steps.
        assert value == pytest.approx(expected, rel=0.15), name
    assert found["copy_latency_s"] == pytest.approx(7e-6)


def test_a_call_that_waits_for_the_gpu_says_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes the host 5 us, the 7th of a burst 10 ms."""
    clock = 0.0
    calls = 0

    def call() -> None:
        nonlocal clock, calls
        calls += 1
        clock += 0.010 if calls % 20 == 7 else 5e-6

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock)
    bench = calibrate._Bench(Communicator.instance(), CPU)  # pyright: ignore[reportPrivateUsage]
    assert bench.host_seconds(call) == pytest.approx(5e-6, rel=1e-6)


def test_what_changed_is_listed_in_few_digits() -> None:
    fields = calibrate.rounded({"launch_s": 1.23456e-6, "matmul": ((1.0, 7.654321e14),)})
    after: Machine = replace(H200, **fields)
    assert calibrate.changes(H200, after) == [
        "launch_s: 2e-06 -> 1.23e-06",
        f"matmul: {json.loads(H200.to_json())['matmul']} -> [[1.0, 765000000000000.0]]",
    ]


# ------------------------------------------------------------------ what only GPUs are asked
def host_of_programs() -> dict[str, Any]:
    """Takes the GPU's way on the CPU: nothing is asynchronous, so that times mean nothing."""
    bench = calibrate._Bench(Communicator.instance(), CPU)  # pyright: ignore[reportPrivateUsage]
    found = calibrate._gpu_fields(bench)  # pyright: ignore[reportPrivateUsage]
    one, five = (calibrate._host_of_posts(bench, n) for n in (1, 5))  # pyright: ignore[reportPrivateUsage]
    return {**found, "posts": (one, five)}


def test_what_the_host_needs_is_read_off_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with simulate(2) as world:
        for found in world.run(host_of_programs):
            assert found["host_library_s"] >= 0 and found["host_run_s"] >= 0
            assert all(seconds > 0 for seconds in found["posts"])


def test_no_graph_stands_for_the_ops_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostIrEvaluator] = []

    def seconds(_: object, call: Callable[[], object]) -> float:
        made.append(cast(Any, call).__closure__[0].cell_contents)
        call()
        return 0.0

    monkeypatch.setattr(calibrate._Bench, "host_seconds", seconds)  # pyright: ignore[reportPrivateUsage]
    bench = calibrate._Bench(Communicator.instance(), CPU)  # pyright: ignore[reportPrivateUsage]
    x = torch.ones(128, 128, dtype=torch.bfloat16)
    calibrate._host_of(bench, calibrate._linears(9), [x, x])  # pyright: ignore[reportPrivateUsage]
    (evaluator,) = made
    assert evaluator.cuda_graphs() == ["not captured: FUSER_DISABLE=cuda_graphs"]


def _nobody_measures(*_: object) -> NoReturn:
    raise AssertionError("measured before the file was looked at")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--output '': expected the name of a file"),
        ("folder", "it is a folder"),
        ("nowhere/m.json", "there is no folder"),
        ("pipe", "it is not a regular file"),
    ],
)
def test_where_no_description_can_be_written_nothing_is_measured(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(calibrate, "calibrate", _nobody_measures)
    path = str(tmp_path / name) if name else ""
    with pytest.raises(InputError, match=message):
        calibrate.calibrate_here(Communicator.instance(), "cpu", path)
    assert (tmp_path / "pipe").is_fifo()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "calibrate", _nobody_measures)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="--device cuda: there is no GPU"):
        calibrate.calibrate_here(Communicator.instance(), "cuda", None)


def test_one_rank_s_file_is_the_matter_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", _nobody_measures)

    def body() -> None:
        communicator = Communicator.instance()
        path = tmp_path if communicator.rank() == 0 else tmp_path / "m.json"
        with pytest.raises(InputError if communicator.rank() == 0 else PeerError, match="a folder"):
            calibrate.calibrate_here(communicator, "cpu", str(path))

    with simulate(2) as world:
        world.run(body)


def test_a_file_that_cannot_be_written_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InputError, match=r"m\.json cannot be written: no space"):
        calibrate.write(H200, tmp_path / "m.json")
    assert not list(tmp_path.iterdir())


def test_a_link_stays_where_its_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: (H200, H200, []))
    file, link = tmp_path / "m.json", tmp_path / "link.json"
    file.write_text("{}")
    link.symlink_to(file)
    calibrate.calibrate_here(Communicator.instance(), "cpu", str(link))
    assert link.is_symlink() and "multiprocessors" in file.read_text()
