"""Tests machine descriptions in files, and `python -m hostir cost` and `trace`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.support.errors import InputError, UnsupportedError
from hostir import NUMBER_OF_STREAMS, Allocate, HostIrContainer, PostOnStream
from hostir.cost import calibrate
from hostir.cost.machine_model import H200, find_machine, machine_from_json
from hostir.cost.report import predict
from hostir.cost.simulator import simulated_schedule
from hostir.lowering.input_class import symbol_values
from hostir.profiling.timeline import trace_text
from hostir.tools.cli import main
from tests.hostir.ir.test_parser import GOLDEN
from tests.support.handmade_programs import EXAMPLES
from tests.support.host_programs import CASES, build
from tests.support.predicted_times import PLAIN, gather, predicted


# ------------------------------------------------------------------ machines
def test_a_machine_is_a_file(tmp_path: Path) -> None:
    assert machine_from_json(PLAIN.to_json()) == PLAIN
    assert machine_from_json("{}") == H200
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "pull_bandwidth": 5e10, "nccl": {"Allreduce": 1e11}}')
    found = find_machine(str(path))
    assert (found.name, found.pull_bandwidth, found.multiprocessors) == ("mine", 5e10, 132)
    assert found.nccl == {**H200.nccl, "Allreduce": 1e11}
    (bad := tmp_path / "bad.json").write_text('{"memory_bandwidth": -3}')
    with pytest.raises(
        InputError, match=r"bad\.json: machine h200: the field memory_bandwidth = -3 is wrong: "
    ):
        find_machine(str(bad))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "is not valid JSON"),
        ('{"pul_bandwidth": 1}', "no field 'pul_bandwidth'; did you mean 'pull_bandwidth'"),
        ('{"pull_bandwidth": 0}', "pull_bandwidth = 0 is wrong: expected a number above 0"),
        ('{"launch_s": -1}', "launch_s = -1"),
        ('{"device": "TPU"}', "device = 'TPU' is wrong: expected one of GPU, CPU"),
        ('{"multiprocessors": 1.5}', "expected an integer above 0"),
        ('{"multiprocessors": true}', "expected an integer above 0"),
        ('{"memory_bandwidth": NaN}', "memory_bandwidth = nan"),
        ('{"matmul": [[2, 1], [1, 1]]}', "expected rows of 2 numbers"),
        ('{"tiles": [[128, 128]]}', "expected rows of 3 numbers"),
        (
            '{"nccl": {"AllGather": 1}}',
            "nccl cannot have an entry 'AllGather': its entries are Allgather, ",
        ),
        ('{"matmul_dtypes": {"Float": "fast"}}', "expected numbers above 0"),
    ],
)
def test_a_machine_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        machine_from_json(text)
    assert message in str(error.value)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(
        InputError, match="there is no machine 'h100': expected h200, measured, or a file"
    ):
        find_machine("h100")


def test_a_description_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"machine 'nope\.json': the file .*nope\.json .*does not exist"
    ):
        find_machine("nope.json")
    folder = tmp_path / "is_a_folder.json"
    folder.mkdir()
    with pytest.raises(InputError, match=r"is_a_folder\.json' cannot be read"):
        find_machine(str(folder))


# ------------------------------------------------------------------ programs of other tests
@pytest.mark.parametrize("name", [n for n in EXAMPLES if "unit" not in n and "HI-7" not in n])
def test_the_numbers_of_a_program_by_hand_fit_together(name: str) -> None:
    program = EXAMPLES[name].build()
    values = {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4}
    made = simulated_schedule(program, values, H200)
    found = predict(program, made)
    longest = max(one.seconds for one in found.classes)
    assert sum(step.seconds for step in found.critical_path) == pytest.approx(longest)
    for one in found.classes:
        assert 0 <= one.exposed <= one.communication <= one.seconds + 1e-12
        assert one.compute + one.exposed <= one.seconds + 1e-12
        for stream in one.streams:
            used = stream.compute + stream.communication + stream.idle
            assert used >= one.seconds - 1e-12 and stream.idle >= -1e-12
    assert sum(one.sent_nbytes * len(one.ranks) for one in found.classes) == sum(
        one.received_nbytes * len(one.ranks) for one in found.classes
    )
    json.loads(trace_text(program, made))


# ------------------------------------------------------------------ the commands
@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.txt"
    path.write_text(build(CASES["mlp2"]).full_text())
    return path


def test_the_report_of_a_program(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", str(file), "--size", "i0=4096"]) == 0
    # The golden text holds wherever the programs stand.
    text = re.sub(r"\(\S+\.py:\d+\)", "(programs.py:LINE)", capsys.readouterr().out)
    assert text == (GOLDEN / "cost_mlp2.txt").read_text()


def test_cost_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times: list[float] = []
    for size in ("i0=4096", "i0=8192"):
        assert main(["cost", str(file), "--json", "-s", size]) == 0
        found = json.loads(capsys.readouterr().out)
        times.append(found["classes"][0]["seconds"])
    assert times[0] < times[1]
    assert found["sizes"] == {"i0": 8192}
    assert found["classes"][0]["ranks"] == [0, 1]


def test_what_the_commands_refuse(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, message in (
        (["--machine", "h100"], "there is no machine 'h100'"),
        (["--ranks", "1"], "--ranks 1: the program's meshes need 2"),
        (["--ranks", "1000000"], "--ranks 1000000: the program's meshes need 2"),
        (["--machine", ""], "there is no machine ''"),
        (["--streams", "0"], "--streams 0: the number of streams must be at least 1"),
        (["--size", "i9=1"], "no input of the program has a size named 'i9'"),
    ):
        assert main(["cost", str(file), *args]) == 1
        assert message in capsys.readouterr().err
        assert main(["trace", str(file), "-o", str(tmp_path / "t.json"), *args]) == 1
        assert message in capsys.readouterr().err


def test_commands_say_which_sizes_they_took(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = ["trace", str(file), "-o", str(tmp_path / "t.json")]
    for args in (["cost", str(file)], ["run", str(file)], ["verify", str(file)], trace):
        assert main(args) == 0
        assert "sizes: i0=8 (not given)\n" in capsys.readouterr().out
        assert main([*args, "-s", "i0=16"]) == 0
        assert "sizes: i0=16\n" in capsys.readouterr().out


@pytest.mark.finding("G25")
def test_sizes_are_given_one_by_one_or_in_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = HostIrContainer()
    with program:
        x = program.input([-1, -1])
        y = program.tensor(x.shape())
        program.append(Allocate(y))
        program.append(ops.neg(x), into=y)
        program.add_output(y)
    path = tmp_path / "program.txt"
    path.write_text(program.full_text())
    for given in (["--size", "i0=2", "--size", "i2=3"], ["--size", "i0=2,i2=3"], ["-si0=2,i2=3"]):
        assert main(["cost", str(path), *given]) == 0
        assert "sizes: i0=2, i2=3\n" in capsys.readouterr().out
    for given in ("i0=2,", "i0=2,i2", "i0=2,i0=3"):
        assert main(["cost", str(path), "--size", given]) == 1
        assert "InputError: --size " in capsys.readouterr().err
    assert "T1 = -T0;" in program.names_text()
    assert max(map(len, program.names_text().splitlines())) <= 100


def test_what_cannot_be_written_or_understood_is_said_in_words(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(file), "-o", "/no/such/folder/t.json"]) == 1
    assert "InputError: --output /no/such/folder/t.json cannot be" in capsys.readouterr().err
    full = str(file)  # a file, where a folder is asked for
    assert main(["run", str(file), "--save", full]) == 1
    assert f"InputError: --save {full}: rank0.pt cannot be written" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"p\.json cannot be written"):
        calibrate.write(H200, file / "p.json")
    with pytest.raises(SystemExit):
        main(["run", str(file), "-s", "i0=16", "i1=8"])
    assert "i1=8; several sizes are -s i0=16,i1=8 or -s i0=16 -s i1=8" in capsys.readouterr().err


def test_a_unit_that_nobody_scheduled_is_refused() -> None:
    program = EXAMPLES["HI-1 unit"].build()
    with pytest.raises(UnsupportedError, match=r"PostOnStream \(HostUnit0\)"):
        predicted(program)


def test_the_trace_has_a_process_per_rank_and_a_track_per_stream() -> None:
    program = gather(2, kernel="before")
    made = simulated_schedule(program, {NUMBER_OF_STREAMS: 4}, PLAIN)
    found = json.loads(trace_text(program, made))
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in found["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {e["pid"] for e in events} == {0, 1}
    tracks = {names[e["pid"], e["tid"]]: e for e in events if e["pid"] == 1}
    assert set(tracks) == {"Stream 0", "Stream 1", "link out", "link in"}
    kernel, moved = tracks["Stream 0"], tracks["Stream 1"]
    assert (kernel["ts"], kernel["dur"]) == pytest.approx((0.0, 2.0))
    assert (moved["ts"], moved["dur"]) == pytest.approx((2.0, 10.0))
    assert kernel["args"]["bytes"] == 2000 and moved["args"]["bytes"] == 1000
    assert moved["name"].startswith("Communication 0 (type=Allgather")
    assert tracks["link in"]["ts"] == moved["ts"]


def test_a_run_that_nothing_predicts_is_traced_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1, 8], contiguity=True, dtype=DataType.Float)
        fd.add_output(fd.ops.sum(t, [1]))
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, 8])
        y = hic.tensor([x.size(0)])
        hic.append(Allocate(y), PostOnStream((x,), (y,), unit=hic.unit(fd.fusion)))
        hic.add_output(y)
    program, out = tmp_path / "p.txt", tmp_path / "t.json"
    program.write_text(hic.full_text())
    assert main(["trace", str(program), "-o", str(out), "--run"]) == 0
    why = "not predicted: cost: the time of PostOnStream (HostUnit0) cannot be predicted"
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(why) for line in lines if "predicted" in line] == [True]
    found = json.loads(out.read_text())
    titles = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert titles == ["rank 0"] and f"not predicted: {found['otherData']['not predicted']}" in lines
    assert main(["trace", str(program), "-o", str(out)]) == 1, "nothing is measured here"


def test_the_trace_of_many_ranks_has_a_process_per_class() -> None:
    program = gather(128)
    made = simulated_schedule(program, {NUMBER_OF_STREAMS: 4}, PLAIN)
    found = json.loads(trace_text(program, made))["traceEvents"]
    processes = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert processes == ["ranks 0..127"]


def test_a_real_run_is_traced_beside_the_predicted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, out = tmp_path / "p.txt", tmp_path / "t.json"
    program.write_text(build(CASES["mlp2"]).full_text())
    assert main(["trace", str(program), "-o", str(out), "--run", "--seed", "3"]) == 0
    assert "rank 1: " in (text := capsys.readouterr().out) and "predicted on h200" in text
    events = json.loads(out.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(titles) == [
        f"rank {rank}{more}" for rank in (0, 1) for more in ("", ", predicted on h200")
    ]
    torch.save(CASES["mlp2"].inputs(), inputs := tmp_path / "inputs.pt")
    args = ["trace", str(program), "-o", str(out), "--run", "--inputs", str(inputs)]
    assert main(args) == 0
    capsys.readouterr()
    for wrong, message in (
        (["-o", str(out), "--seed", "1"], "InputError: --seed is for a real run only: add --run"),
        (["-o", str(out), "--device", "cpu"], "--device is for a real run"),
        (["-o", str(tmp_path / "no" / "t.json"), "--run"], "InputError: trace: path="),
        (["-o", str(out), "--run", "--machine", "h100"], "there is no machine 'h100'"),
        (
            ["-o", str(out), "--run", "--size", "i99=3"],
            "no input of the program has a size named 'i99'",
        ),
    ):
        assert main(["trace", str(program), *wrong]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.finding("G43")
@pytest.mark.parametrize("command", ["cost", "trace"])
def test_a_prediction_says_which_sizes_it_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, -1])
        y = hic.tensor([x.size(0), x.size(1)])
        hic.append(Allocate(y))
        hic.append(ops.mul(x, 2.0), into=y)
        hic.add_output(y)
    rows, inner = (str(x.size(k)) for k in (0, 1))
    (path := tmp_path / "program.txt").write_text(hic.full_text())
    args = [command, str(path), *(["-o", str(tmp_path / "t.json")] if command == "trace" else [])]
    assert main([*args, "--size", f"{rows}=8192"]) == 0
    told = capsys.readouterr().out
    assert f"sizes: {rows}=8192, {inner}=8 (not given)\n" in told
    assert (
        f"assumed: {inner}=8 (axis 1 of T0); the prediction is for these sizes alone: "
        f"give --size {inner}=N\n"
    ) in told
    assert main([*args, "-s", f"{rows}=8192", "-s", f"{inner}=4096"]) == 0
    assert "assumed" not in capsys.readouterr().out
    if command == "cost":
        assert main([*args, "-s", f"{rows}=8192", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sizes"] == {rows: 8192, inner: 8}
        assert found["assumed"] == [inner]
