"""The fuzzers find planted faults, and the programs that they write reproduce the failures."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from fuser.frontend.program_cache import PROGRAMS
from fuser.ir import pointwise_table
from fuser.ir.dtypes import INFO
from fuser.ops.rows import ROWS
from scripts import fuzz
from tests.support.limits import HANG_S
from tools.fuzz import search as searching
from tools.fuzz import single, table
from tools.fuzz.kinds import GENERATORS
from tools.fuzz.placed import misplaced
from tools.fuzz.product import Mode
from tools.fuzz.program import (
    Layout,
    Output,
    Program,
    Ref,
    Stmt,
    Streaming,
    TensorArg,
    TensorInput,
    define_text,
    plain_layout,
)
from tools.fuzz.runner import Case, Outcome, run
from tools.fuzz.search import Search, in_child, search
from tools.fuzz.tally import Failure, Tally, total

ROOT = Path(__file__).parents[3]


def _first_wrong(seeds: Iterable[int], uses: Callable[[Program], bool]) -> int:
    """Returns the first seed whose program uses what is at fault and has a wrong result."""
    return next(
        seed
        for seed in seeds
        if uses(program := single.generate(seed)) and run(Case.of(program), Mode()).kind == "wrong"
    )


def _uses(*ops: str) -> Callable[[Program], bool]:
    return lambda p: any(s.op in ops for s in p.stmts)


def test_a_program_is_a_function_of_its_seed() -> None:
    assert single.generate(17) == single.generate(17)
    assert single.generate(17) != single.generate(18)


# Programs on several ranks draw few of the elementwise ops, which are all alike there; and ranks
# agree on torch's generators only after a seed that no program sets.
_ON_ONE_DEVICE = {*table.ROWS, "addcmul", "rand_like", "randn_like"}


def _drawn(kind: str) -> tuple[set[str], set[str]]:
    """Returns the ops and the input dtypes of the random programs of many seeds."""
    programs = [GENERATORS[kind](n) for n in range(2500 if kind == "single" else 1500)]
    ops = {op for p in programs for op in re.findall(r"fd\.ops\.(\w+)\(", define_text(p))}
    dtypes = {i.dtype for p in programs for i in p.inputs if isinstance(i, TensorInput)}
    return ops, dtypes


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_op_and_dtype_is_generated(kind: str) -> None:
    left = set[str]() if kind == "single" else _ON_ONE_DEVICE
    ops, dtypes = _drawn(kind)
    assert {name for name, row in ROWS.items() if row.is_implemented} - ops <= left
    # Index is Int by another name.
    needed = {d.name for d in INFO} - {"Index"}
    assert needed - dtypes <= (set() if kind == "single" else {"Half", "ComplexDouble"})


@pytest.fixture
def other_programs() -> Iterator[None]:
    """Clears the cache of compiled programs around a test, so that no planted fault stays in it."""
    PROGRAMS.clear()
    yield
    PROGRAMS.clear()


@pytest.mark.usefixtures("other_programs")
def test_a_wrong_op_is_found_and_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = pointwise_table.POINTWISE["maximum"]
    wrong = dataclasses.replace(row, cuda=row.cuda.replace("maximum", "minimum"))
    monkeypatch.setitem(pointwise_table.POINTWISE, "maximum", wrong)
    seed = _first_wrong(range(300), _uses("maximum"))
    plan = Search("single", seed, 1, HANG_S, ("cpu",), shrink_s=15, out=tmp_path)
    (failure,) = search(plan).failures
    script = Path(failure.path)
    text = script.read_text()
    assert "fd.ops.maximum(" in text
    # Without the fault the script is content; with it, it is not.
    healthy = subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False, timeout=HANG_S)
    assert healthy.returncode == 0
    plant = f"""
import dataclasses
from fuser.ir import pointwise_table
from fuser.frontend.program_cache import PROGRAMS
row = pointwise_table.POINTWISE["maximum"]
pointwise_table.POINTWISE["maximum"] = dataclasses.replace(row, cuda={wrong.cuda!r})
"""
    at = text.index("\nnan, inf")
    script.write_text(text[:at] + plant + text[at:])
    faulty = subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False, timeout=HANG_S)
    assert faulty.returncode == 1


def test_a_wrong_index_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.ops import reshaping

    def flipped(arg: object, dims: list[int]) -> object:
        return reshaping.permute(arg, dims[::-1])  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("fuser.ops.permute", flipped)
    square = TensorInput("x", "Float", (3, 3, 3), True, (), plain_layout(3))
    stmt = Stmt(("t",), "permute", (Ref("x"), [1, 2, 0]))
    call = (TensorArg((3, 3, 3), 0, "normal", 1),)
    program = Program((square,), (stmt,), (Output("t"),), (call,))
    assert run(Case.of(program), Mode()).kind == "wrong"


def test_a_misplaced_result_is_found() -> None:
    """A view must be in its input's memory; other results must not, and must have no gaps."""
    x, y = (TensorInput(name, "Float", (3, 4), True, (), plain_layout(2)) for name in "xy")
    turned = Stmt(("t",), "permute", (Ref("x"), [1, 0]))
    negative = Stmt(("n",), "neg", (Ref("x"),))
    program = Program((x, y), (turned, negative), (Output("t"), Output("n")), ())
    given = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}

    def found(name: str, result: torch.Tensor, program: Program = program) -> str:
        return (misplaced(program, name, result, given) or "").rpartition(", ")[2]

    view = given["x"].t()
    assert found("t", view) == ""
    assert found("t", view.clone()) == "a copy of x"
    assert found("t", given["y"].t()) == "in the memory of y"
    assert found("n", view.clone()) == ""
    assert found("n", view) == "in the memory of x"
    assert found("n", torch.randn(3, 8)[:, ::2]) == "with gaps"
    updated = dataclasses.replace(program, outputs=(Output("t"), Output("n", "x")))
    assert found("t", view, updated) == "in the memory of x"
    assert found("t", view.clone(), updated) == ""
    assert found("n", given["x"], updated) == ""


def test_a_lost_update_is_found() -> None:
    """An input that changes although the program does not update it is a failure."""
    x = TensorInput("x", "Float", (4,), True, (), plain_layout(1))
    stmt = Stmt(("t",), "neg", (Ref("x"),))
    call = (TensorArg((4,), 0, "normal", 1),)
    updated = Program((x,), (stmt,), (Output("t", "x"),), (call,))
    case = Case.of(updated)
    assert run(case, Mode()).kind == "ok"
    case.expected[0]["t"] = case.expected[0]["x"]
    assert run(case, Mode()).kind == "wrong"


def test_the_order_of_ops_is_checked_with_the_inputs_that_were_passed() -> None:
    """Not with copies of the inputs: a copy of an expanded tensor has other strides."""
    layout = Layout((2, 1, 0), (0, 0, 0), expanded=(1,))
    x = TensorInput("x", "Float", (-1, 6, 4), (False, None, False), (), layout)
    stmt = Stmt(("t",), "relu", (Ref("x"),))
    call = (TensorArg((2, 6, 4), 0, "normal", 1),)
    steps = (Streaming("t", 2, 2),)
    program = Program((x,), (stmt,), (Output("t"),), (call,), streams=steps)
    outcome = run(Case.of(program), Mode())
    assert outcome.kind == "ok", outcome


def test_the_command_reports_and_exits(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/fuzz.py", "single", "--seed", "0", "--cases", "3"]
    command += ["--seconds", "200", "--schedules", "cpu", "--out", str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert "3 runs" in answer.stdout and "refused" in answer.stdout, answer.stdout + answer.stderr
    assert answer.returncode == (0 if "\n0 failures" in answer.stdout else 1)
    assert torch.get_num_threads() >= 1


def test_a_failure_is_printed_as_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log has the failing program's text, because files of a remote run may be lost."""
    path = tmp_path / "5.py"
    path.write_text("its whole text\n")
    failure = Failure("cpu", "wrong", "value", "", str(path))
    monkeypatch.setattr(fuzz, "search_in_processes", lambda *_: Tally(failures=[failure]))
    monkeypatch.setattr("sys.argv", ["fuzz.py", "single", "--out", str(tmp_path)])
    assert fuzz.main() == 1
    printed = capsys.readouterr().out
    assert f"{path}\nits whole text\n" in printed
    assert printed.rstrip().endswith(f"wrong: value |  {path}")


def _dies() -> Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome("ok")


def _raises() -> Outcome:
    raise KeyError("a planted error")


def _hangs() -> Outcome:
    threading.Event().wait()
    return Outcome("ok")


def test_a_crash_and_a_hang_are_outcomes() -> None:
    died = in_child(_dies)
    assert (died.kind, died.reason) == ("crash", "signal 11") and "Segmentation" in died.detail
    assert in_child(_hangs, limit_s=0.2).kind == "hang"
    fails = in_child(_raises)
    assert fails.reason == "ended without an outcome" and "a planted error" in fails.detail
    assert in_child(lambda: Outcome("wrong", "value", "x" * 200_000)).detail == "x" * 200_000


def test_a_crash_costs_one_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def outcome_of(case: Case, mode: Mode) -> Outcome:
        return _dies() if any(s.op == "neg" for s in case.program.stmts) else Outcome("ok")

    monkeypatch.setattr(searching, "outcome_of", outcome_of)
    monkeypatch.setattr(searching, "_warm_up", lambda: None)
    cases = 1 + next(n for n in range(300) if _uses("neg")(single.generate(n))) + 5
    tally = search(Search("single", 0, cases, HANG_S, ("cpu",), shrink_s=1, out=tmp_path))
    assert sum(tally.cases.values()) == cases
    assert {f.kind for f in tally.failures} == {"crash"}


def test_a_failure_is_shrunk_to_the_op_at_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_program(program: Program, mode: Mode) -> tuple[Outcome, Mode]:
        is_wrong = any(s.op == "neg" for s in program.stmts)
        return Outcome("wrong" if is_wrong else "ok", "value"), mode

    monkeypatch.setattr(searching, "run_program", run_program)
    monkeypatch.setattr(searching, "_warm_up", lambda: None)
    seeds = (n for n in range(300) if _uses("neg")(p := single.generate(n)) and len(p.stmts) > 6)
    plan = Search("single", next(seeds), 1, HANG_S, ("cpu",), shrink_s=HANG_S, out=tmp_path)
    (failure,) = search(plan).failures
    text = Path(failure.path).read_text()
    assert re.findall(r"fd\.ops\.(\w+)", text) == ["neg"]
    assert text.count("fd.add_output(") == 1


def _with_refusals(count: int, refused: int) -> Tally:
    tally = Tally()
    for seed in range(count):
        kind = "refused" if seed < refused else "ok"
        tally.add("cpu", Outcome(kind, outputs=1, elements=1), seed)
    return tally


def test_more_refusals_than_allowed_make_a_run_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert _with_refusals(1000, 190).refused_beyond(16) == []
    assert _with_refusals(1000, 200).refused_beyond(16) == [
        "cpu: 200 of 1000 runs were refused, more than 16%"
    ]
    # Of a few runs, some more may be chance.
    assert _with_refusals(10, 4).refused_beyond(16) == []
    assert _with_refusals(10, 10).refused_beyond(16)
    assert _with_refusals(10, 10).refused_beyond(100) == []
    assert fuzz._exit_code(_with_refusals(10, 10), percent=16) == 1  # pyright: ignore[reportPrivateUsage]
    assert "10 of 10 runs were refused" in capsys.readouterr().out
    assert fuzz._exit_code(_with_refusals(10, 0), percent=16) == 0  # pyright: ignore[reportPrivateUsage]


def test_tallies_of_processes_add_up() -> None:
    parts = [_with_refusals(10, 4), _with_refusals(5, 0)]
    for part in parts:
        part.failures.append(Failure("cpu", "wrong", "value", "", ""))
    whole = total(parts)
    assert whole.cases == {"cpu": 15} and whole.refused == {"cpu": {"": 4}}
    assert (whole.outputs, whole.elements, whole.examples) == (15, 15, {("cpu", ""): 0})
    assert len(whole.failures) == 1
