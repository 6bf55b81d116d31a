"""`FUSER_DUMP`: each stage's text under a heading, on stdout or in numbered files, by rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fuser import FusionDefinition, ParallelType, TensorView, multidevice
from fuser.ir.op import walk
from fuser.support import dumps
from fuser.support.errors import OptionError, VerifyError
from fuser.support.options import EFFECTS
from hostir import HostIrEvaluator
from hostir.ir.ops import CollectivePermute, Communication, P2PCommunication
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer, equal
from hostir.tools.cli import main
from hostir.tools.run_text import run_simulated, shards_of
from multidevice import DeviceMesh, simulate
from tests.support.stream_programs import N_STREAMS, PROGRAMS


def row_parallel(ranks: int) -> FusionDefinition:
    """Defines relu(x @ w.T) with the inner axis sharded over the ranks: one allreduce, one
    kernel."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.relu(fd.ops.linear(x, w)))
        for tv in (x, w):
            tv.set_device_mesh(DeviceMesh(range(ranks)))
            tv.outer_split(1, ranks)
            tv.axis(1).parallelize(ParallelType.mesh_x)
    return fd


X, W = torch.randn(3, 8), torch.randn(4, 8)


def run_on_two_ranks(calls: int = 1) -> list[FusionDefinition]:
    """Runs on 2 simulated ranks, each with its own definition."""

    def body() -> FusionDefinition:
        fd = row_parallel(2)
        x, w = fd.fusion.inputs
        assert isinstance(x, TensorView) and isinstance(w, TensorView)
        shards = [multidevice.shard_tensor(X, x), multidevice.shard_tensor(W, w)]
        for _ in range(calls):
            (out,) = fd.execute(shards)
            torch.testing.assert_close(out, torch.relu(X @ W.T))
        return fd

    with simulate(2) as world:
        return world.run(body)


MARKS = {
    "host_ir": "Kernel group 2 (pointwise)",
    "host_ir_lowering": "%HostIrContainer {",
    "communication": "with input_tensor [3, 4, 1] and output_tensor [3, 4]",
    "fusion_ir_original": "mesh set by user",
    "fusion_ir_concretized": "%kernel_math",
    "fusion_ir_preseg": "TransformPrinter",
    "overlap": "nothing was decided: nothing describes these cpu ranks",
    "segmented_fusion": "2: pointwise {relu} -> T3_g_float",
    "scheduler_params": "pointwise(loops",
    "scheduled_ir": "loop domain",
    "fusion_ir": "loop domain",
    "kernel_ir": "for",
    "cuda_kernel": "__global__",
}


@pytest.mark.parametrize("name", EFFECTS["DUMP"])
def test_every_dump_prints_its_text_under_a_heading(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dumps, "_open", {})
    monkeypatch.setenv("FUSER_DUMP", name)
    run_on_two_ranks()
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    of = {"communication": "this process"}.get(name, r"(kernel group 2 of )?fusion \d+")
    assert re.match(rf"// {name} of {of}", first), first
    assert first.endswith(": " + EFFECTS["DUMP"][name].split(";")[0])
    assert MARKS[name] in text
    if name != "communication":
        assert re.search(rf"\n// end of {name} of {of}.*\n$", text)
    # No text of other stages.
    assert {line.split()[1] for line in text.splitlines() if re.match("// \\w+ of", line)} == {
        name,
        "end",
    } - ({"end"} if name == "communication" else set())


def test_program_dumps_name_the_users_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "segmented_fusion")
    run_on_two_ranks()
    assert f"(user code at {__file__}:" in capsys.readouterr().out.splitlines()[0]


def test_host_ir_runs_from_what_was_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The dump was once in the short form, which no command could run."""
    monkeypatch.setenv("FUSER_DUMP", "host_ir")
    fds = run_on_two_ranks()
    text = capsys.readouterr().out
    assert ", full form: " in text.splitlines()[0]
    program = parse(text)
    assert equal(program, fds[0].fec.host_program())
    for (out,) in run_simulated(program, [X, W], ranks=2):
        torch.testing.assert_close(out, torch.relu(X @ W.T))


def test_the_short_form_says_that_it_needs_the_full_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "host_ir(short)")
    run_on_two_ranks()
    text = capsys.readouterr().out
    assert ", short form: " in text.splitlines()[0]
    assert "TransformPrinter" not in text
    program = parse(text)
    with pytest.raises(VerifyError, match=r"short form.*full form is needed: FUSER_DUMP=host_ir"):
        HostIrEvaluator(program)
    (tmp_path / "short.txt").write_text(text)
    monkeypatch.delenv("FUSER_DUMP")
    for command in ("run", "verify"):
        assert main([command, str(tmp_path / "short.txt")]) == 1
        assert "this is the short form" in capsys.readouterr().err


def test_host_ir_lowering_shows_the_program_after_each_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "host_ir_lowering")
    run_on_two_ranks()
    before, after = capsys.readouterr().out.split("// host_ir_lowering of ")[1:]
    assert ", after lowering, full form:" in before and "Deallocate" not in before
    assert ", after insert_deallocate, full form:" in after and "Deallocate" in after


def test_dumps_go_to_numbered_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "dumps"
    monkeypatch.setenv("FUSER_DUMP", "host_ir,cuda_kernel,communication")
    monkeypatch.setenv("FUSER_DUMP_DIR", str(folder))
    run_on_two_ranks(calls=3)
    assert capsys.readouterr().out == ""
    files = sorted(folder.iterdir())
    names = [re.sub(r"\d+", "N", f.name) for f in files]
    assert names == [
        "N_host_ir_fusion_N_rankN.txt",
        "N_cuda_kernel_kernel_group_N_of_fusion_N_rankN.txt",
        "N_communication_this_process_rankN.txt",
    ]
    numbers = [int(f.name.split("_")[0]) for f in files]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert all(f.stem.endswith("rank0") for f in files)
    assert parse(files[0].read_text()).communications()
    # Communications of replayed calls are printed, too.
    assert files[2].read_text().count("Posting Communication 0") == 3


def test_a_posted_line_names_the_library_that_carries_it_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program for NCCL on CPU ranks was once announced as if NCCL had run. The second call
    replays."""
    program = run_on_two_ranks()[0].fec.host_program()
    monkeypatch.setenv("FUSER_DUMP", "communication")
    for named, carrier in (
        ("NCCL", ", carried out by SIMULATED,"),
        ("SIMULATED", ""),
        ("CUDA", ""),
    ):
        text = program.full_text().replace("backend=SIMULATED", f"backend={named}")
        other = parse(text)

        def body(other: HostIrContainer = other) -> None:
            evaluator = HostIrEvaluator(other)
            shards = [X.chunk(2, 1), W.chunk(2, 1)]
            rank = multidevice.Communicator.instance().rank()
            for _ in range(2):
                evaluator.run([s[rank].contiguous() for s in shards])

        with simulate(2) as world:
            world.run(body)
        out = capsys.readouterr().out
        assert out.count(f"backend={named}){carrier} with input_tensor") == 2, out


@pytest.mark.parametrize("name", [name for name, case in PROGRAMS.items() if case.ranks > 1])
def test_the_first_run_and_later_ones_announce_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Includes the sends and receives of a group, which later runs once did not print."""
    case = PROGRAMS[name]
    program = case.build()
    started: set[int] = set()
    for op in walk(program.ops):
        if isinstance(op, Communication | P2PCommunication | CollectivePermute):
            started.add(op.number)
    monkeypatch.setenv("FUSER_DUMP", "communication")

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        shards = shards_of(program, case.inputs(), rank)
        evaluator = HostIrEvaluator(program, number_of_streams=N_STREAMS)
        for run in (evaluator.run, evaluator.run, evaluator.evaluate):
            run(shards)
            if rank == 0:
                print("-- the next run")

    with simulate(case.ranks) as world:
        world.run(body)
    texts = capsys.readouterr().out.split("-- the next run\n")
    first, later, by_op = (
        [line for line in text.splitlines() if line.startswith("Posting")] for text in texts[:3]
    )
    assert {int(line.split()[2]) for line in first} == started
    assert first == later == by_op


def test_all_ranks_dump_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "host_ir,communication")
    for ranks, expected in (("all", [0, 1]), ("1", [1]), ("7", [])):
        monkeypatch.setenv("FUSER_DUMP_RANKS", ranks)
        if expected:
            run_on_two_ranks()
        else:
            said = "'7': nothing is printed for rank 7: this job has ranks 0 to 1"
            with pytest.warns(UserWarning, match=f"FUSER_DUMP_RANKS={said}"):
                run_on_two_ranks()
        text = capsys.readouterr().out
        found = [int(r) for r in re.findall(r"^// host_ir of .*, rank (\d+):", text, re.MULTILINE)]
        assert sorted(found) == expected
        assert text.count("Posting ") == len(expected)


def test_lines_are_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a terminal, so each line must be written at once."""
    monkeypatch.setenv("FUSER_DUMP", "communication")
    pieces: list[str] = []
    whole = SimpleNamespace(write=pieces.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", whole)
    write = dumps.lines("communication", "a test of lines", rank=0)
    assert write is not None
    write("Posting")
    monkeypatch.undo()
    assert len(pieces) == 2 and pieces[1] == "Posting\n" and pieces[0].endswith("\n")


@pytest.mark.parametrize("ranks", ["", "0", "12,3", "all"])
def test_ranks_are_a_list(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DUMP_RANKS", ranks)
    expected = {"": {0}, "0": {0}, "12,3": {3, 12}, "all": None}[ranks]
    assert dumps.options.dump_ranks() == expected


def test_bad_values_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bad in ("every", "1,,2", "-1", "\u0663"):
        monkeypatch.setenv("FUSER_DUMP_RANKS", bad)
        with pytest.raises(OptionError, match=r"FUSER_DUMP_RANKS=.* is neither 'all' nor ranks"):
            dumps.options.check_environment()
    monkeypatch.delenv("FUSER_DUMP_RANKS")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSER_DUMP_DIR", str(tmp_path / "file"))
    with pytest.raises(OptionError, match=r"FUSER_DUMP_DIR=.*file' is not a folder"):
        dumps.options.check_environment()


def test_comments_may_stand_anywhere_between_lines() -> None:
    (fd, _) = run_on_two_ranks()
    text = fd.fec.host_program().full_text()
    lines = text.splitlines()
    noted = "\n".join(f"  // note {i}: {{ ( }}\n{line}" for i, line in enumerate(lines))
    assert equal(parse(noted), fd.fec.host_program())
