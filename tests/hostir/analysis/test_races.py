"""Happens-before over streams: correct programs are clean, and each broken one is reported."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fuser.ir.op import Op, walk
from fuser.ir.ops import nodes
from fuser.support.errors import FuserError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Communication,
    Deallocate,
    EndCoalescing,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    HostIrContainer,
    IfThenElse,
    P2PCommunication,
    SetCurrentStream,
    Stream,
    Synchronize,
    Wait,
)
from hostir.analysis import races as race
from hostir.analysis.races import find_chains, find_races
from hostir.ir.diagnostics import Finding, line_numbers, report
from hostir.ir.queries import has_streams
from hostir.ir.verifier import verify
from tests.support import stream_programs
from tests.support.stream_programs import (
    MAIN,
    N_STREAMS,
    PROGRAMS,
    D,
    Edit,
    change,
    drop,
    edited,
    index_of,
    is_right,
    move,
    nth,
    ring,
    spread_over,
    twice,
)

LATE = ("all", "entry", 0, 1, 2)


def races(name: str, hic: HostIrContainer) -> list[Finding]:
    found: list[Finding] = []
    for rank in range(PROGRAMS[name].ranks):
        found += find_races(hic, {RANK: rank, NUMBER_OF_STREAMS: N_STREAMS}, rank=rank)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_correct_programs_are_clean_and_right(name: str) -> None:
    case = PROGRAMS[name]
    hic = case.build()
    verify(hic)
    found = races(name, hic)
    assert not found, report(hic, found)
    for late in (None, *LATE):
        assert is_right(case, hic, late), late


# ------------------------------------------------------------------ mutants
@dataclass(frozen=True)
class Mutant:
    """A program with one edit: what is reported, about which ops, and whether some delay of a
    stream shows it in a run."""

    program: str
    edit: Edit
    kind: str
    # (class, place in the edited text) of ops that one finding names.
    names: tuple[tuple[type[Op], int], ...]
    shows: bool = True


COPY, BINARY, MATMUL, LINEAR = nodes.LoadStoreOp, nodes.BinaryOp, nodes.MatmulOp, nodes.LinearOp
ENTER, JOIN = SetCurrentStream, Synchronize

MUTANTS: dict[str, Mutant] = {
    # Entering waits
    "no head wait": Mutant("single_set", drop(JOIN, 0), race.RACE, ((COPY, 0),), shows=False),
    "no head wait behind an op": Mutant(
        "disjoint_loops", drop(JOIN, 2), race.RACE, ((BINARY, 1), (BINARY, 2))
    ),
    "head wait of the first streams": Mutant(
        "disjoint_loops", change(ForLoop, 2, stop=2), race.RACE, ((BINARY, 1), (BINARY, 2))
    ),
    "head wait of one stream": Mutant(
        "disjoint_loops", change(ENTER, 3, stream=Stream(0)), race.RACE, ((BINARY, 1), (BINARY, 2))
    ),
    "head wait before the stream is entered": Mutant(
        "matmul_chunks",
        move(JOIN, 0, ENTER, 0, before=True),
        race.RACE,
        ((Allocate, 0), (MATMUL, 0)),
        shows=False,
    ),
    "the stream is captured too late": Mutant(
        "single_set", move(GetCurrentStream, 0, ForLoop, 0), race.LEFT, ((ENTER, 2),), shows=False
    ),
    # Joins
    "no tail wait": Mutant("single_set", drop(JOIN, 1), race.NOT_JOINED, ((COPY, 0),)),
    "no tail wait before an op": Mutant(
        "disjoint_loops", drop(JOIN, 1), race.RACE, ((BINARY, 0), (BINARY, 1))
    ),
    "tail wait for one stream": Mutant(
        "single_set", change(JOIN, 1, stream=Stream(0)), race.NOT_JOINED, ((COPY, 0),)
    ),
    "tail wait on the stream itself": Mutant(
        "single_set", move(JOIN, 1, ENTER, 2, before=True), race.NOT_JOINED, ((COPY, 0),)
    ),
    "join of all streams but one": Mutant(
        "matmul_chunks", change(ForLoop, 1, stop=2), race.NOT_JOINED, ((MATMUL, 0),)
    ),
    "join of the slots' streams but one": Mutant(
        "reduce_scatter_pipeline",
        change(ForLoop, 2, stop=N_STREAMS - 1),
        race.NOT_JOINED,
        ((Communication, 0),),
    ),
    "ring without tail wait": Mutant("ring_linear", drop(JOIN, 1), race.NOT_JOINED, ((LINEAR, 0),)),
    "collective without tail wait": Mutant(
        "matmul_allreduce", drop(JOIN, 1), race.NOT_JOINED, ((Communication, 0),)
    ),
    # Streams
    "not back on the stream of the program": Mutant(
        "single_set", drop(ENTER, 2), race.LEFT, ((ENTER, 1),)
    ),
    "all steps on one stream, joins of others": Mutant(
        "single_set", change(ENTER, 1, stream=Stream(0)), race.NOT_JOINED, ((COPY, 0),)
    ),
    "step stays on the stream of the program before": Mutant(
        "matmul_chunks", drop(ENTER, 1), race.LEFT, ((ENTER, 0),), shows=False
    ),
    # Slots
    "one slot for all streams": Mutant(
        "slots", index_of(1, lambda i: i % 1), race.RACE, ((BINARY, 0), (BINARY, 0)), shows=False
    ),
    "a slot of a collective less than streams": Mutant(
        "reduce_scatter_pipeline",
        lambda hic: {
            (op := nth(hic, HirAliasSelect, 1)): (op.replace(index=nth(hic, ForLoop, 1).index % 2),)
        },
        race.RACE,
        ((Communication, 0), (MATMUL, 0)),
        shows=False,
    ),
    "a slot less than streams": Mutant(
        "slots",
        lambda hic: {
            (op := nth(hic, HirAliasSelect, 1)): (op.replace(index=nth(hic, ForLoop, 1).index % 2),)
        },
        race.RACE,
        ((BINARY, 0), (BINARY, 0)),
        shows=False,
    ),
    "every step receives into one slice": Mutant(
        "broadcast_linear",
        index_of(0, lambda i: i * 0),
        race.RACE,
        ((Communication, 0),) * 2,
        shows=False,
    ),
    # Slices and loops
    "slice off by one": Mutant(
        "single_set", index_of(1, lambda i: i + 1), race.OUT_OF_RANGE, ((HirAliasSelect, 1),)
    ),
    "slice off by one leaves a part": Mutant(
        "single_set", index_of(1, lambda i: (i + 1) % 4), race.UNWRITTEN, ((COPY, 0),)
    ),
    "loop from 1": Mutant("single_set", change(ForLoop, 1, start=1), race.UNWRITTEN, ((COPY, 0),)),
    "loop of a step less": Mutant(
        "two_sets", change(ForLoop, 1, stop=4), race.UNWRITTEN, ((BINARY, 1),)
    ),
    "loop of every other step": Mutant(
        "single_set", change(ForLoop, 1, step=2), race.UNWRITTEN, ((COPY, 0),)
    ),
    "nobody writes the slice": Mutant("two_sets", drop(BINARY, 0), race.UNWRITTEN, ((BINARY, 0),)),
    "one chunk too many": Mutant(
        "matmul_chunks", change(ForLoop, 0, stop=4), race.OUT_OF_RANGE, ()
    ),
    # Memory
    "Deallocate before the last use": Mutant(
        "step_buffers", move(Deallocate, 0, MATMUL, 0), race.FREED, ((Deallocate, 0), (MATMUL, 1))
    ),
    "Deallocate twice": Mutant(
        "two_sets", twice(Deallocate, -1), race.FREED, ((Deallocate, -1),) * 2
    ),
    "Deallocate before the joins": Mutant(
        "forwarding_ring",
        lambda hic: {
            (free := _free(hic, Allocate, 0)): (),
            (last := nth(hic, ForLoop, 1)): (last, free),
        },
        race.FREED_EARLY,
        ((MATMUL, 0), (Deallocate, -1)),
    ),
    "Deallocate on another stream": Mutant(
        "step_buffers",
        lambda hic: {
            (free := _free(hic, Allocate, 1)): (SetCurrentStream(Stream(9)), free),
        },
        race.FREED_EARLY,
        ((MATMUL, 1), (Deallocate, 0)),
        shows=False,
    ),
    # Communications
    "no Wait": Mutant("allgather_linear", drop(Wait), race.NO_WAIT, ((Communication, 0),)),
    "Wait behind the reader": Mutant(
        "allgather_linear", move(Wait, 0, LINEAR, 0), race.RACE, ((Communication, 0), (LINEAR, 0))
    ),
    "two Waits": Mutant(
        "allgather_linear", twice(Wait), race.NOT_IN_FLIGHT, ((Wait, 0), (Wait, 1)), shows=False
    ),
    "Wait before the start": Mutant(
        "matmul_allreduce",
        move(Wait, 0, Communication, 0, before=True),
        race.NOT_IN_FLIGHT,
        ((Wait, 0),),
    ),
    "the ring goes on before its Wait": Mutant(
        "forwarding_ring", move(IfThenElse, 0, IfThenElse, 1), race.NO_WAIT, ((EndCoalescing, 0),)
    ),
    "no Wait in a ring": Mutant("forwarding_ring", drop(Wait), race.NO_WAIT, ((EndCoalescing, 0),)),
    "a ring receives into what it sends": Mutant(
        "forwarding_ring",
        lambda hic: {
            (op := nth(hic, HirAliasSelect, 3)): (
                op.replace(index=nth(hic, HirAliasSelect, 2).index),
            )
        },
        race.RACE,
        ((P2PCommunication, 0), (P2PCommunication, 1)),
    ),
    "a coalesced transfer without Wait": Mutant(
        "ring_linear", drop(Wait), race.NO_WAIT, ((EndCoalescing, 0),)
    ),
}


def _free(hic: HostIrContainer, kind: type[Allocate], index: int) -> Op:
    """Returns the Deallocate of what an Allocate makes."""
    made = nth(hic, kind, index).buffer
    return next(o for o in walk(hic.ops) if isinstance(o, Deallocate) and o.buffer is made)


def mutated(name: str) -> HostIrContainer:
    hic = PROGRAMS[MUTANTS[name].program].build()
    return edited(hic, MUTANTS[name].edit(hic))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    mutant, hic = MUTANTS[name], mutated(name)
    found = races(mutant.program, hic)
    wanted = [nth(hic, kind, index) for kind, index in mutant.names]
    named = [f for f in found if f.kind == mutant.kind and all(o in f.ops for o in wanted)]
    assert named, f"{[(f.kind, [o.name for o in f.ops]) for f in found]}\n{hic}"
    # The report has the line and the text of each op, and the step.
    lines = line_numbers(hic)
    text, printed = named[0].text(lines), str(hic).splitlines()
    for op in wanted:
        assert f"line {lines[id(op)]}" in text
        assert printed[lines[id(op)] - 1].strip()[:20] in str(op)


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.shows])
def test_mutants_are_wrong_under_some_delay(name: str) -> None:
    """The other judge: holding back the streams, as far as the program allows, shows the fault."""
    case, hic = PROGRAMS[MUTANTS[name].program], mutated(name)

    def is_wrong(late: object) -> bool:
        try:
            return not is_right(case, hic, late)
        except (FuserError, KeyError):  # KeyError: a freed buffer, read by work that was held back
            return True

    assert any(map(is_wrong, LATE))


# ------------------------------------------------------------------ what the checks found
def test_buffers_of_a_loop_are_given_up_behind_its_joins() -> None:
    """`insert_deallocate` gave them up between the loop and the waits that end it."""
    hic = PROGRAMS["forwarding_ring"].build()
    kinds = [type(op) for op in hic.ops]
    assert kinds[-4:] == [ForLoop, SetCurrentStream, ForLoop, Deallocate]


def test_a_wait_on_another_stream_is_for_the_start() -> None:
    """A communication that starts on one stream and is waited for on the next one, which gets
    there first when the other is held back."""
    case = PROGRAMS["forwarding_ring"]
    assert is_right(case, case.build(), late=0)


def test_reports_name_lines_streams_and_the_missing_wait() -> None:
    hic = mutated("no tail wait before an op")
    (found,) = (f for f in races("disjoint_loops", hic) if f.kind == race.RACE)
    lines = line_numbers(hic)
    first, second = (lines[id(nth(hic, BINARY, k))] for k in (0, 1))
    text = found.text(lines)
    assert f"line {first} at i = 0: " in text
    assert "on Stream 0: writes T1_g_float[0, :]" in text
    assert "on Stream S0 (the caller's): reads T1_g_float" in text
    assert (
        f"Stream S0 (the caller's) must wait for Stream 0 before line {second}: "
        "Synchronize(Stream 0) is missing"
    ) in text


def test_a_wait_that_a_loop_lacks_is_missing_in_the_same_step() -> None:
    hic = PROGRAMS["forwarding_ring"].build()
    hic = edited(hic, {nth(hic, Wait): ()})
    (found, *_) = (f for f in races("forwarding_ring", hic) if f.kind == race.NO_WAIT)
    line = line_numbers(hic)[id(nth(hic, EndCoalescing))]
    text = found.text(line_numbers(hic))
    assert f"Wait(Communication 3) is missing behind line {line}, in the same iteration" in text


def test_transfers_of_one_group_cannot_wait_for_each_other() -> None:
    hic = PROGRAMS["forwarding_ring"].build()
    send, receive = nth(hic, P2PCommunication, 0), nth(hic, P2PCommunication, 1)
    hic = edited(hic, {receive: (receive.replace(buffer=send.buffer),)})
    (found, *_) = (f for f in races("forwarding_ring", hic) if f.kind == race.RACE)
    line = line_numbers(hic)[id(nth(hic, P2PCommunication, 1))]
    text = found.text(line_numbers(hic))
    assert f"move line {line} behind Wait(Communication 3), into another group" in text


def test_findings_of_one_missing_wait_are_reported_together() -> None:
    hic = PROGRAMS["allgather_linear"].build()
    hic = edited(hic, {nth(hic, JOIN, 0): ()})
    found = races("allgather_linear", hic)
    assert len(found) > 2
    text = report(hic, found)
    assert text.count("Synchronize(Stream S0) is missing") == 1
    # Each is there, the others in a line.
    assert all(f.what in text for f in found)


def test_the_users_line_is_named() -> None:
    case = PROGRAMS["single_set"]
    hic = case.build()
    copy = nth(hic, COPY)
    hic = edited(hic, {copy: (copy.replace(where="model.py:7"),), nth(hic, JOIN, 1): ()})
    assert "(model.py:7) at i = 0" in report(hic, races("single_set", hic))


def test_programs_without_streams_are_not_unrolled() -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([4]), hic.tensor([4])
        hic.append(Allocate(y), nodes.LoadStoreOp(y, x))
        hic.add_output(y)
    assert not has_streams(hic)
    assert find_races(hic, {}) == []


def given_back_beside_a_communication(*, is_awaited: bool) -> HostIrContainer:
    """A buffer whose communication is waited for on a stream of its own, joined before or after."""
    hic = HostIrContainer()
    with hic:
        x, team = spread_over(hic.input([D, 4]), ring(), 0), stream_programs.team()
        t = spread_over(hic.tensor([D, 4]), ring())
        hic.append(GetCurrentStream(MAIN), Allocate(t), SetCurrentStream(Stream(0)))
        hic.append(Synchronize(MAIN), Communication(x, t, number=0, type="Allgather", team=team))
        hic.append(SetCurrentStream(Stream(1)), Wait(0), SetCurrentStream(MAIN))
        last = (Synchronize(Stream(1)), Deallocate(t))
        hic.append(*(last if is_awaited else reversed(last)))
    return hic


@pytest.mark.parametrize("is_awaited", [False, True])
def test_memory_that_a_communication_uses_is_not_given_back(is_awaited: bool) -> None:
    hic = given_back_beside_a_communication(is_awaited=is_awaited)
    verify(hic)
    found = find_races(hic, {RANK: 0, NUMBER_OF_STREAMS: N_STREAMS}, rank=0)
    assert {f.kind for f in found} == (set() if is_awaited else {race.FREED_EARLY})


# ------------------------------------------------------------------ chained steps
def test_head_waits_inside_of_a_loop_that_joins_its_steps_chain_them() -> None:
    for name in ("single_set", "ring_linear", "permute_ring"):
        hic = PROGRAMS[name].build()
        values = {RANK: 0, NUMBER_OF_STREAMS: N_STREAMS}
        assert not find_chains(hic, values)
        enter, wait = nth(hic, ENTER, 1), nth(hic, JOIN, 0)
        hic = edited(hic, {nth(hic, ForLoop, 0): (), enter: (enter, wait)})
        assert not races(name, hic)
        (found,) = find_chains(hic, values)
        assert found.ops == (nth(hic, JOIN, 1), nth(hic, JOIN, 0))
        assert (
            "every iteration on Stream 1 waits for the iteration before on Stream 0" in found.what
        )


def test_waits_in_a_loop_chain_nothing_where_the_joins_follow_it() -> None:
    hic = PROGRAMS["matmul_chunks"].build()
    assert not find_chains(hic, {RANK: 0, NUMBER_OF_STREAMS: N_STREAMS})
