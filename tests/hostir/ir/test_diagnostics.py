"""Programs by hand: each op knows the line at which it was appended, and reports name it."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import inspect
import re

import pytest
import torch

from fuser import ParallelType, ops
from fuser.ir.op import walk
from fuser.support.errors import VerifyError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Communication,
    Deallocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    SetCurrentStream,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
    equal,
    parse,
    verify,
)
from hostir.analysis.preflight import findings
from hostir.ir.diagnostics import refuse
from hostir.ir.ops import ForLoop, loop_index
from hostir.ir.printer import meaning_text
from multidevice import Communicator, DeviceMesh, simulate

MESH = DeviceMesh([0, 1])
TEAM = TeamOf(MESH, (ParallelType.mesh_x,))


def here(back: int = 0) -> str:
    """Returns `file.py:12` of the caller's line, or of one so many lines before it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno - back}"


def two_steps() -> tuple[HostIrContainer, list[str]]:
    """Returns a program that enters streams in two loops, and the lines of all its ops."""
    hic, lines = HostIrContainer(), list[str]()
    with hic:
        x, y, z = hic.input([4, 8]), hic.tensor([4, 8]), hic.tensor([4, 8])
        hic.append(Allocate(y), Allocate(z))
        lines += [here(1)] * 2
        hic.append(GetCurrentStream(Stream(name="S0")))
        lines.append(here(1))
        with hic.loop(2, name="i") as i:
            hic.append(SetCurrentStream(Stream(i)), Synchronize(Stream(name="S0")))
        lines += [here(2), here(1), here(1)]
        with hic.branch(RANK < 1):
            hic.append(SetCurrentStream(Stream(name="S0")))
        lines += [here(2), here(1)]
        with hic.otherwise():
            hic.append(SetCurrentStream(Stream(name="S0")))
        lines.append(here(1))
        a = ops.add(x, x)
        lines.append(here(1))
        hic.append(a, into=y)
        body = (SetCurrentStream(Stream(name="S0")),)
        hic.append(ForLoop(index=loop_index("k", 0, 2), stop=2, body=body))
        lines += [here(1)] * 2
        hic.append(Deallocate(z))
        lines.append(here(1))
    return hic, lines


def test_an_op_by_hand_has_the_line_at_which_it_was_appended() -> None:
    hic, lines = two_steps()
    assert [op.where for op in walk(hic.ops)] == lines


def test_the_lines_of_a_program_by_hand_survive_its_text() -> None:
    """Several ops of one name have lines of their own."""
    hic, lines = two_steps()
    again = parse(hic.full_text())
    assert [op.where for op in walk(again.ops)] == lines
    assert equal(again, hic) and again.full_text() == hic.full_text()
    # The short form is for reading, and lines are no part of what a program is.
    assert equal(parse(str(hic)), parse(meaning_text(hic).partition("\n")[2].split("\n\n")[0]))
    assert __file__ not in str(hic) and __file__ not in meaning_text(hic)


def test_a_line_that_an_op_has_is_kept() -> None:
    hic = HostIrContainer()
    with hic:
        hic.append(SetCurrentStream(Stream(0)).replace(where="model.py:7"))
    assert hic.ops[0].where == "model.py:7"


def test_a_race_in_a_program_by_hand_names_the_users_lines() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 8]), hic.tensor([4, 8])
        hic.append(Allocate(y), GetCurrentStream(Stream(name="S0")))
        hic.append(SetCurrentStream(Stream(0)), Synchronize(Stream(name="S0")))
        hic.append(ops.add(x, x), into=y)
        added = here(1)
        hic.append(SetCurrentStream(Stream(name="S0")))
        hic.append(Deallocate(y))
        given_up = here(1)
    verify(hic)
    with pytest.raises(VerifyError) as error:
        refuse(hic, findings(hic, {NUMBER_OF_STREAMS: 2}), what="test")
    for where in (added, given_up):
        assert re.search(rf"^  line \d+ \({re.escape(where)}\)", str(error.value), re.MULTILINE)


def test_a_deadlock_in_a_program_by_hand_names_the_users_line() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = (hic.input([2, 8], mesh=MESH) for _ in range(2))
        for tv in (x, y):
            tv.axis(0).parallelize(ParallelType.mesh_x)
        hic.append(P2PCommunication(x, (RANK + 1) % 2, number=0, type="send"), Wait(0))
        sent = here(1)
        hic.append(P2PCommunication(y, (RANK + 1) % 2, number=1, type="recv"), Wait(1))
    found = [f for f in findings(hic, {NUMBER_OF_STREAMS: 2}) if f.kind == "deadlock"]
    with pytest.raises(VerifyError, match=rf"line \d+ \({re.escape(sent)}\): P2PComm.* 0 "):
        refuse(hic, found, what="test")


def unawaited() -> tuple[HostIrContainer, str]:
    """Returns a program whose result is read in flight, and the line of its communication."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4, 8], mesh=MESH), hic.tensor([4, 8], mesh=MESH)
        hic.append(Allocate(y))
        hic.append(Communication(x, y, number=0, type="Allreduce", team=TEAM))
        started = here(1)
        hic.append(ops.add(y, y))
    return hic, started


def test_a_use_in_flight_says_that_there_is_no_wait_at_all() -> None:
    hic, started = unawaited()
    no_wait = rf"T1.* is used, but Communication 0, started at line 4 \({started}\), has no Wait"
    with pytest.raises(VerifyError, match=no_wait):
        verify(hic)
    with pytest.raises(
        VerifyError, match=r"T1.* is used before Wait\(Communication 0\), but .* started"
    ):
        verify(hic.with_ops((*hic.ops, Wait(0))))


def test_a_structural_error_lists_the_lines_that_it_speaks_of() -> None:
    hic, _ = unawaited()
    with pytest.raises(VerifyError) as error:
        verify(hic)
    head, *below = str(error.value).splitlines()
    rows = [re.fullmatch(r"(->|  ) +(\d+) (.*)", row) for row in below]
    shown = {int(r[2]): r[3] for r in rows if r}
    lines = dict(enumerate(str(hic).splitlines(), 1))
    assert len(shown) == len(below) and shown.items() <= lines.items()
    assert [int(r[2]) for r in rows if r and r[1] == "->"] == [5]
    assert f"at line 5 ({hic.ops[2].where})" in head and "T2_g" in shown[5]


def test_ranks_agree_though_they_wrote_a_program_at_different_lines() -> None:
    def body() -> torch.Tensor:
        communicator = Communicator.instance()
        hic = HostIrContainer()
        with hic:
            x, y = hic.input([2, 8], mesh=MESH), hic.tensor([2, 8], mesh=MESH)
            step = Communication(x, y, number=0, type="Allreduce", team=TEAM)
            if communicator.rank() == 0:
                hic.append(Allocate(y), step, Wait(0))
            else:
                hic.append(Allocate(y), step, Wait(0))
            hic.add_output(y)
        evaluator = HostIrEvaluator(hic, communicator)
        (out,) = evaluator.run([torch.ones(2, 8)])
        return out

    with simulate(2) as world:
        for out in world.run(body):
            assert torch.equal(out, torch.full((2, 8), 2.0))
