"""The checks that are made once, before a new program runs."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import re
import resource
from collections.abc import Callable

import pytest

from fuser.ir.op import op_text
from fuser.support.errors import VerifyError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Communication,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    SetCurrentStream,
    Synchronize,
)
from hostir.analysis import preflight
from hostir.analysis.collective_matching import find_mismatches
from hostir.analysis.preflight import findings
from hostir.analysis.races import find_races
from tests.support.host_programs import CASES, build, check
from tests.support.stream_programs import (
    N_STREAMS,
    PROGRAMS,
    allocated,
    change,
    double,
    drop,
    edited,
    head,
    index_of,
    is_right,
    nth,
    outputs_of,
    select,
    tail,
    worker,
)


def test_a_program_that_races_is_refused() -> None:
    case = PROGRAMS["single_set"]
    hic = case.build()
    hic = edited(hic, drop(Synchronize, 1)(hic))
    evaluator = HostIrEvaluator(hic, number_of_streams=N_STREAMS)
    for method in (evaluator.run, evaluator.evaluate, evaluator.check, evaluator.run):
        with pytest.raises(VerifyError, match="must not run:\nreturned too early"):
            method(case.inputs())
    # In the mode that shows it, it runs.
    assert not is_right(case, hic, late="all")


def test_ranks_that_would_wait_for_ever_are_refused() -> None:
    case = PROGRAMS["ring_linear"]
    hic = case.build()
    send = nth(hic, P2PCommunication, 1)
    hic = edited(hic, {send: (send.replace(peer=nth(hic, P2PCommunication, 0).peer),)})
    with pytest.raises(VerifyError, match="must not run:\ndeadlock"):
        outputs_of(case, hic)


def test_the_lines_that_a_report_names_are_numbered_and_marked_below_it() -> None:
    case = PROGRAMS["single_set"]
    hic = case.build()
    hic = edited(hic, drop(Synchronize, 1)(hic))
    (found,) = findings(hic, {NUMBER_OF_STREAMS: N_STREAMS})
    with pytest.raises(VerifyError) as caught:
        HostIrEvaluator(hic, number_of_streams=N_STREAMS).run(case.inputs())
    above, _, below = str(caught.value).partition("\n\n")
    named = {int(n) for n in re.findall(r"^  line (\d+)", above, re.MULTILINE)}
    rows = [re.fullmatch(r"(->|  ) +(\d+) (.*)", row) for row in below.splitlines()]
    lines = str(hic).splitlines()
    assert [(int(r[2]), r[3]) for r in rows if r] == [(n, s) for n, s in enumerate(lines, 1) if s]
    assert {int(r[2]) for r in rows if r and r[1] == "->"} == named
    assert all(op_text(op).split("\n")[0] in above for op in found.ops)


def test_an_index_out_of_range_is_reported_once() -> None:
    case = PROGRAMS["allgather_linear"]
    hic = case.build()
    hic = edited(hic, index_of(1, lambda i: i + 1)(hic))
    kinds = [f.kind for f in findings(hic, {NUMBER_OF_STREAMS: N_STREAMS})]
    assert sum("out of range" in kind for kind in kinds) == 1, kinds


def test_what_may_be_meant_runs() -> None:
    """Parts kept in an order of the program's own; a stream that stays current."""
    case = PROGRAMS["allgather_linear"]
    hic = case.build()
    hic = edited(hic, index_of(1, lambda i: (i + 1) % 5)(hic))
    assert findings(hic, {NUMBER_OF_STREAMS: N_STREAMS})
    assert is_right(case, hic)


def test_a_program_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = PROGRAMS["single_set"], list[object]()

    def counted(*args: object, **named: object) -> list[object]:
        calls.append(args)
        return []

    monkeypatch.setattr(preflight, "find_races", counted)
    hic = case.build()
    for evaluator in (HostIrEvaluator(hic), HostIrEvaluator(hic)):
        for _ in range(3):
            evaluator.run(case.inputs())
            evaluator.evaluate(case.inputs())
    assert len(calls) == 1


def test_programs_without_streams_and_ranks_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object, **named: object) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(preflight, "check_before_run", refused)
    check(build(CASES["heads"]), CASES["heads"])


def test_a_wrong_collective_is_found_on_all_ranks() -> None:
    case = PROGRAMS["matmul_allreduce"]
    hic = case.build()
    hic = edited(hic, change(Communication, 0, type="Allgather")(hic))
    with pytest.raises(VerifyError, match="Allgather of 4 ranks"):
        outputs_of(case, hic)


# ------------------------------------------------------------------ what it costs
def _steps(count: int) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        x = hic.input([count, 8])
        t, y = allocated(hic, count, 8), allocated(hic, count, 8)
        head(hic, count)
        with hic.loop(count, name="i") as i:
            hic.append(SetCurrentStream(worker(i)))
            a, b, c = (select(hic, v, 0, i) for v in (x, t, y))
            hic.append(double(b, a), double(c, b))
            tail(hic, i)
        hic.add_output(y)
    return hic


def _user_ms(what: Callable[[], object], times: int) -> float:
    what()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for _ in range(times):
        what()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_utime - start) / times * 1e3


@pytest.mark.parametrize("count", [64, 1024])
def test_races_cost_under_5_ms_per_100_ops(count: int) -> None:
    hic, ops = _steps(count), 2 + 2 * count + 8 * count
    values = {RANK: 0, NUMBER_OF_STREAMS: 4}
    assert _user_ms(lambda: find_races(hic, values), 2048 // count) < 5 * ops / 100


@pytest.mark.parametrize("name", ["ring_linear", "reduce_scatter_pipeline"])
def test_each_check_costs_under_5_ms_per_100_ops(name: str) -> None:
    hic, values = PROGRAMS[name].build(), {RANK: 0, NUMBER_OF_STREAMS: N_STREAMS}
    ops = {"ring_linear": 57, "reduce_scatter_pipeline": 70}[name]
    assert _user_ms(lambda: find_races(hic, values), 50) < 5 * ops / 100
    assert _user_ms(lambda: find_mismatches(hic, values), 50) < 5 * ops / 100
