"""Tests `python -m hostir`: print, change, compare, verify and run programs as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh
from fuser.support.errors import InputError, OptionError, ParseError, ShardingError
from hostir import HostIrContainer
from hostir.ir.ops import Allocate, Communication, Wait
from hostir.ir.parser import parse, read_program
from hostir.ir.printer import SHORT_FORM
from hostir.ir.program import equal
from hostir.lowering.input_class import size_symbols
from hostir.passes.deallocation import PASSES
from hostir.tools.cli import main
from hostir.tools.run_text import summaries
from multidevice.sharding.queries import local_sizes
from multidevice.sharding.reshard import TeamOf
from tests.support.host_programs import CASES, build, expected
from tests.support.stream_programs import PROGRAMS

PROGRAM = build(CASES["mlp2"])
TEXT = PROGRAM.full_text()
OUTPUT = re.compile(
    r"rank (\d) output 0: torch.float32 \((\d+), 6\) mean (\S+) min (\S+) max (\S+) checksum (\S+)"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.txt"
    path.write_text(TEXT)
    return path


def edited(tmp_path: Path, old: str, new: str) -> str:
    """Returns a file with the program's text after one replacement."""
    assert old in TEXT
    path = tmp_path / "edited.txt"
    path.write_text(TEXT.replace(old, new, 1))
    return str(path)


def test_print(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print", str(file), "--full"]) == 0
    assert capsys.readouterr().out.strip() == TEXT.strip()
    assert main(["print", str(file)]) == 0
    short = capsys.readouterr().out
    assert short.endswith(str(PROGRAM))
    assert parse(short).is_short


@pytest.mark.finding("F21")
def test_a_short_text_prints_but_not_in_full(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(str(PROGRAM))
    assert main(["print", str(file)]) == 0
    assert capsys.readouterr().out.endswith(str(PROGRAM))
    for command in (["print", "--full"], ["run"], ["verify"]):
        assert main([*command, str(file)]) == 1
        assert "VerifyError: this is the short form" in capsys.readouterr().err


def test_verify(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file)]) == 0
    wrong = edited(tmp_path, "  Wait(Communication 0)\n", "")
    assert main(["verify", wrong]) == 1
    assert re.search(
        r"Communication 0, started at line \d+ .*, has no Wait", capsys.readouterr().err
    )
    assert main(["verify", str(file), "--streams", "0"]) == 1
    assert (
        "InputError: --streams 0: the number of streams must be at least 1"
        in capsys.readouterr().err
    )


# ------------------------------------------------------------------ run
def test_run_on_random_inputs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(file), "--size", "i0=3", "--ranks", "2"]) == 0
    sizes, *lines = capsys.readouterr().out.splitlines()
    assert sizes == "sizes: i0=3"
    rows = [OUTPUT.fullmatch(line) for line in lines]
    assert [(r[1], r[2]) for r in rows if r] == [("0", "3"), ("1", "3")]
    # An allreduce: both ranks have the same numbers.
    assert rows[0] and rows[1] and rows[0].groups()[2:] == rows[1].groups()[2:]


def test_run_on_given_inputs_saves_each_ranks_outputs(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(CASES["mlp2"].inputs(), tmp_path / "inputs.pt")
    args = ["--inputs", str(tmp_path / "inputs.pt"), "--save", str(tmp_path / "new" / "out")]
    assert main(["run", str(file), *args]) == 0
    (want,) = expected(CASES["mlp2"])
    for rank in (0, 1):
        (out,) = torch.load(tmp_path / "new" / "out" / f"rank{rank}.pt")
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    row = OUTPUT.match(capsys.readouterr().out)
    assert row is not None
    found, summary = [float(x) for x in row.groups()[2:5]], [want.mean(), want.min(), want.max()]
    assert found == pytest.approx([float(x) for x in summary], rel=1e-4)


def test_random_sizes_fit_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, eight rows were cut over any number of ranks."""
    case = CASES["mesh2x2"]
    (tmp_path / "p.txt").write_text(build(case).full_text())
    assert main(["run", str(tmp_path / "p.txt")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sizes: ") and "rank 3 output 0: torch.float32 (4, 6)" in out


def test_seeds_are_no_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel draws random numbers; a run takes their seed and offset from torch."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.add(x, fd.ops.rand_like(x)))
    fd.execute([torch.zeros(2, 4)])
    program = fd.fec.host_program()
    rows, seed, offset = size_symbols(program)
    (tmp_path / "p.txt").write_text(program.full_text())
    for command in ("run", "verify", "cost"):
        assert main([command, str(tmp_path / "p.txt"), "--size", f"{offset}=3"]) == 0
        assert capsys.readouterr().out.startswith(
            f"sizes: {rows}=8 (not given), seed of random numbers {seed}=8 (not given), "
            f"offset of random numbers {offset}=3\n"
        )


def test_an_axis_that_is_the_devices_has_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, the size 8 was chosen, and the error was about divisibility."""
    mesh = DeviceMesh([0, 1, 2])
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, -1], mesh=mesh)
        y = hic.tensor([x.size(0), x.size(1)], mesh=mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        team = TeamOf(mesh, (ParallelType.mesh_x,))
        gather = Communication(x, y, number=0, type="Allgather", team=team)
        hic.append(Allocate(y), gather, Wait(0))
        hic.add_output(y)
    path = tmp_path / "program.txt"
    path.write_text(hic.full_text())
    assert main(["verify", str(path)]) == 0
    assert main(["run", str(path), "--ranks", "3"]) == 0
    assert "rank 2 output 0: torch.float32 (3, 9)" in capsys.readouterr().out
    with pytest.raises(ShardingError, match=r"T0.* extent 6, but DeviceMesh{0 1 2} has 3 devices"):
        local_sizes(x, [6, 9])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--size", "i0"], "InputError: --size i0: expected NAME=N"),
        (
            ["--size", "i0=8", "--size", "i0=9"],
            "InputError: --size i0=9: i0 was already given as 8",
        ),
        (["--size", "i0=\u0663"], "InputError: --size i0="),
        # It was ignored.
        (["--size", "i9=7"], "InputError: no input of the program has a size named 'i9'"),
        (["--inputs", "PROGRAM"], "InputError: PROGRAM cannot be read as a list of tensors"),
        (["--inputs", "MISSING"], "InputError: MISSING cannot be read as a list of tensors"),
        (
            ["--inputs", "TENSOR"],
            "InputError: TENSOR holds a Tensor, expected a list of all inputs",
        ),
        (["--inputs", "ONE"], "InputError: ONE: the program has 5 inputs, but the file has 1"),
        (["--inputs", "ONE", "--size", "i0=3"], "InputError: --size cannot be used with --inputs"),
        (["--ranks", "1"], "ShardingError: DeviceMesh{0 1} of T0_g_float names rank 1"),
        (["--ranks", "0"], "InputError: --ranks 0: the number of ranks must be at least 1"),
        (
            ["--seed", "99999999999999999999"],
            "InputError: --seed 99999999999999999999: the seed must fit into 64 bits",
        ),
        (["--size", "i0=9223372036854775807"], "854775807: a size can have at most 18 digits"),
        (
            ["--size", "i0=922337203685477580"],
            "InputError: there is not enough memory for the input T0_g_float",
        ),
        (["--program", "1"], "OptionError: PROGRAM has no host program number 1: it has 1"),
        (["--save", "PROGRAM"], "InputError: --save"),
    ],
)
@pytest.mark.finding("F21")
def test_wrong_runs(
    args: list[str],
    message: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    torch.save([torch.ones(2)], tmp_path / "one.pt")
    names = {"PROGRAM": file.name, "MISSING": "missing.pt", "TENSOR": "tensor.pt", "ONE": "one.pt"}
    for name, path in names.items():
        args = [a.replace(name, str(tmp_path / path)) for a in args]
        message = message.replace(name, str(tmp_path / path))
    assert main(["run", str(file), *args]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print", str(tmp_path / "missing")]) == 1
    assert "InputError: cannot read " in capsys.readouterr().err


# ------------------------------------------------------------------ opt
def without_deallocate(tmp_path: Path) -> str:
    path = tmp_path / "lowered.txt"
    path.write_text(re.sub(r"  Deallocate \{\n.*\n  \}\n", "", TEXT))
    assert "Deallocate" not in path.read_text()
    return str(path)


def test_opt_runs_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowered = without_deallocate(tmp_path)
    assert main(["opt", lowered]) == 0
    assert equal(parse(capsys.readouterr().out), PROGRAM)
    assert main(["opt", lowered, "-p", "insert_deallocate", "-o", str(tmp_path / "out.txt")]) == 0
    assert capsys.readouterr().out == ""
    assert equal(read_program(str(tmp_path / "out.txt")), PROGRAM)


def test_opt_prints_before_and_after_each_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lowered = without_deallocate(tmp_path)
    assert main(["opt", lowered, "--print-after-all"]) == 0
    text = capsys.readouterr().out
    names = [p.__name__ for p in PASSES]
    heads = re.findall("^// (before|after) (.*)$", text, re.MULTILINE)
    assert heads == [(when, name) for name in names for when in ("before", "after")]
    _, before, after = re.split("^// (?:before|after) .*$", text, flags=re.MULTILINE)[:3]
    assert before == str(read_program(lowered))
    assert after == str(PROGRAM)


def test_opt_names_the_passes_that_exist(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", str(file), "-p", "insert_dealocate"]) == 1
    assert "no pass 'insert_dealocate' for host programs; did you mean 'insert_deallocate'?" in (
        capsys.readouterr().err
    )
    assert main(["opt", str(file), "-p", "insert_deallocate"]) == 1
    assert "already has a Deallocate" in capsys.readouterr().err


# ------------------------------------------------------------------ diff
def test_equal_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(file), str(file)]) == 0
    assert capsys.readouterr().out == "the programs are equal\n"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "type=Allreduce, team=(0 1)",
            "type=Allreduce, team=(0 1), red_op=MAX",
            r"op \d+, Communication 0 \(Allreduce\): red_op: SUM \| MAX",
        ),
        ("Kernel group 4 (pointwise)", "Kernel group 4 (reduction)",
         r"kernel group 4, scheduler: pointwise \| reduction"),
        ("contiguity: t t", "contiguity: t f", r"T0: contiguity: t t \| contiguity: t f"),
        ("  Wait(Communication 0)\n", "", r"op \d+ only in a: Wait\(Communication 0\)"),
        (
            "zero_init=false",
            "zero_init=true",
            r"op 1, Allocate: zero_init: false \| true",
        ),
        ("= silu(", "= relu(", r"kernel group \d+, op 1, \w+: kind: silu \| relu"),
    ],
)  # fmt: skip
def test_the_first_field_that_differs(
    old: str, new: str, line: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(file), edited(tmp_path, old, new)]) == 1
    (found,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(line, found), found


def test_ops_are_aligned(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing op and a changed op are reported as two lines."""
    (tmp_path / "b.txt").write_text(
        re.sub(r"  Deallocate \{\n.*\n  \}\n", "", TEXT, count=1).replace(
            "Communication 0 (type=Allreduce", "Communication 0 (type=ReduceScatter", 1
        )
    )
    assert main(["diff", str(file), str(tmp_path / "b.txt")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert any(" only in a: Deallocate {" in line for line in lines)
    assert any("type: Allreduce | ReduceScatter" in line for line in lines)


def test_what_differs_inside_of_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """%HostIrContainer { (T0_g_float[iS0{8}]) -> (T0_g_float[iS0{8}]) :
  FOR i3 from 0 to 8:
    SetCurrentStream(Stream ( i3 % numberOfStreams ))
    IF Manual ( i3 < 2 ):
      Synchronize(Stream 0)
} // %HostIrContainer"""
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text.replace("Stream 0", "Stream 1").replace("to 8", "to 9"))
    assert main(["diff", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 1
    head, *lines = capsys.readouterr().out.splitlines()
    assert "short form" in head
    assert [line.split(", ", 1)[0] for line in lines] == ["op 1", "op 1.body.2.then.1"]
    assert lines[1].endswith("Synchronize: stream: 0 | 1")


# ------------------------------------------------------------------ where a program stands
DUMP = (
    "// host_ir of fusion {n}, full form: the host program that runs\n"
    "{text}"
    "// end of host_ir of fusion {n}\n"
)


def test_a_program_is_found_in_what_a_job_printed(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text("starting ...\n" + DUMP.format(n=0, text=TEXT) + "loss = 0.25\n0 1e-7\n")
    assert equal(read_program(str(path)), PROGRAM)


def test_the_summary_tells_rows_that_stand_in_each_others_place() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    lines = [summaries([t], 0) for t in (rows, rows[[2, 3, 0, 1]], rows.clone())]
    assert lines[0] == lines[2] != lines[1]
    assert lines[0].partition(" checksum ")[0] == lines[1].partition(" checksum ")[0]


@pytest.mark.parametrize("before", ["", "starting ...\n\nepoch 1\n"])
@pytest.mark.parametrize(
    "text",
    [TEXT, f"// {SHORT_FORM}{PROGRAM}", str(PROGRAM), DUMP.format(n=0, text=TEXT)],
    ids=["full", "short", "bare", "dump"],
)
def test_lines_are_those_of_the_file(tmp_path: Path, before: str, text: str) -> None:
    path = tmp_path / "job.txt"
    path.write_text(before + text)
    found = read_program(str(path))
    assert equal(found, parse(text.partition("// end of ")[0]))
    assert found.is_short == parse(text.partition("// end of ")[0]).is_short
    path.write_text(before + text.replace("  Wait(", "  Wiat("))
    lines = path.read_text().splitlines()
    (at,) = (n for n, line in enumerate(lines, 1) if line.lstrip().startswith("Wiat("))
    with pytest.raises(ParseError, match=rf"^line {at}, column 3: unknown op Wiat"):
        read_program(str(path))


def test_one_of_several_plain_programs_is_chosen(tmp_path: Path) -> None:
    other = build(CASES["slice2"])
    path = tmp_path / "two.txt"
    path.write_text(f"first\n{TEXT}{other.full_text()}")
    with pytest.raises(OptionError, match=r"choose one:\n  --program 0: // .*\n  --program 1: // "):
        read_program(str(path))
    assert equal(read_program(str(path), number=0), PROGRAM)
    assert equal(read_program(str(path), number=1), other)


@pytest.mark.parametrize("text", ["", "\n", "loss = 0.25\n", DUMP.format(n=0, text="")])
def test_a_file_without_a_program(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.txt"
    path.write_text(text)
    with pytest.raises(ParseError, match=f"no host program in {path}"):
        read_program(str(path))
    with pytest.raises(InputError, match=f"cannot read {tmp_path}/missing: No such file"):
        read_program(f"{tmp_path}/missing")


def test_one_of_several_programs_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = build(CASES["slice2"])
    path = tmp_path / "job.txt"
    path.write_text(DUMP.format(n=0, text=TEXT) + DUMP.format(n=1, text=other.full_text()))
    with pytest.raises(OptionError, match=r"--program 1: // host_ir of fusion 1, full form"):
        read_program(str(path))
    assert equal(read_program(str(path), number=1), other)
    assert main(["verify", str(path), "--program", "2"]) == 1
    assert "has no host program number 2: it has 2" in capsys.readouterr().err
    assert main(["diff", str(path), str(path), "--program", "1", "--other-program", "1"]) == 0
    capsys.readouterr()
    assert main(["diff", str(path), str(path), "--program", "0", "--other-program", "1"]) == 1


def test_dumps_of_equal_programs_need_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 rows are another input class than 16: the number of rows is no multiple of 4."""
    monkeypatch.setenv("FUSER_DUMP", "host_ir")
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 48], contiguity=True)
        fd.add_output(fd.ops.rms_norm(x, [48]))
    for rows in (16, 6, 12):
        fd.execute([torch.randn(rows, 48)])
    path = tmp_path / "job.txt"
    path.write_text(capsys.readouterr().out)
    heads = [line for line in path.read_text().splitlines() if line.startswith("// host_ir of")]
    assert len(heads) == 2 and "first run" not in heads[0]
    assert ", program 1 (user code at " in heads[1]
    assert ", full form, first run with i0 = 6: " in heads[1]
    assert equal(read_program(str(path)), read_program(str(path), number=1))


# ------------------------------------------------------------------ streams
def ring(tmp_path: Path, *, without: str = "") -> str:
    """Returns a file with an allgather and linear in four steps on streams, less some lines."""
    text = PROGRAMS["ring_linear"].build().full_text()
    path = tmp_path / "ring.txt"
    path.write_text("".join(x for x in text.splitlines(True) if not without or without not in x))
    return str(path)


def test_verify_finds_what_streams_leave_unordered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", ring(tmp_path), "--streams", "3"]) == 0
    assert "with 3 streams, waits order all conflicting uses of buffers" in capsys.readouterr().out
    assert main(["verify", ring(tmp_path, without="Synchronize(Stream S0)")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("VerifyError: with 4 streams:\nrace: on rank 0: ")
    assert "Synchronize(Stream S0) is missing" in error


def test_late_says_that_nothing_is_checked_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, a program with a race ran without a message."""
    racing = ring(tmp_path, without="Synchronize(Stream S0)")
    assert main(["run", racing]) == 1
    assert "race: " in capsys.readouterr().err
    assert main(["run", racing, "--late", "all"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not checked before the run" in said
    assert f"python -m hostir verify {racing}" in said
    assert main(["run", ring(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_run_holds_streams_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing wait at the end of the program shows in the results."""

    def run(file: str, *args: str) -> str:
        assert main(["run", file, *args]) == 0
        return capsys.readouterr().out

    right = run(ring(tmp_path))
    assert right == run(ring(tmp_path), "--late", "all") == run(ring(tmp_path), "--streams", "2")
    assert right != run(ring(tmp_path, without="Synchronize(Stream ( i %"), "--late", "all")
    for bad in (["--late", "first"], ["--streams", "0"]):
        assert main(["run", ring(tmp_path), *bad]) == 1
        assert bad[1] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["print", "opt", "run", "verify", "cost"])
def test_a_file_that_is_no_text_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(b"\xff\xfe\x00")
    assert main([command, str(path)]) == 1
    assert (
        f"cannot read {path}: the file is not a text file, byte 0 is not valid UTF-8"
        in capsys.readouterr().err
    )
