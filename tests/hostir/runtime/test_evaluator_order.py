"""The first run and later ones tell streams and communications the same, in the order of the text:
which stream is entered, for which one it waits, and where each communication is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fuser.ir.op import walk
from hostir import HostIrContainer, HostIrEvaluator
from hostir.ir.ops import SetCurrentStream
from hostir.runtime.streams import CpuStreams
from hostir.tools.run_text import shards_of
from multidevice import Communicator, simulate
from multidevice.transports.simulated import _SimulatedWork  # pyright: ignore[reportPrivateUsage]
from tests.hostir.runtime.test_evaluator_meaning import CASES, random
from tests.reference.host_program import interpret
from tests.support import handmade_programs, stream_programs

Told = list[tuple[str, object]]
RUNS = 3


class Watch:
    """Records the calls of one rank's streams and communications."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: dict[int, Told] = {}
        self._works: dict[int, dict[int, int]] = {}
        self._marks: dict[int, int] = {}
        for name in ("enter", "join", "join_mark"):
            tell = getattr(CpuStreams, name)
            noted = self._told_by(name.replace("_", " "), tell)
            monkeypatch.setattr(CpuStreams, name, noted)
        monkeypatch.setattr(CpuStreams, "mark", lambda streams: self._mark(streams))
        init, wait = _SimulatedWork.__init__, _SimulatedWork.wait

        def started(work: Any, *args: Any) -> None:
            init(work, *args)
            works = self._works.setdefault(_rank(), {})
            works[id(work)] = len(works)
            self._kept.append(work)

        def waited(work: Any) -> None:
            self._note("wait", self._works[_rank()][id(work)])
            wait(work)

        self._kept: list[object] = []
        monkeypatch.setattr(_SimulatedWork, "__init__", started)
        monkeypatch.setattr(_SimulatedWork, "wait", waited)

    def _told_by(self, name: str, tell: Callable[[Any, object], None]) -> Callable[..., None]:
        def noted(streams: CpuStreams, which: object) -> None:
            # Where a program is only walked, nothing is served.
            if type(streams) is CpuStreams:
                self._note(name, which)
            tell(streams, which)

        return noted

    def _note(self, what: str, which: object) -> None:
        self.told.setdefault(_rank(), []).append((what, which))

    def _mark(self, streams: CpuStreams) -> int:
        if type(streams) is not CpuStreams:
            return -1
        place = self._marks[_rank()] = self._marks.get(_rank(), -1) + 1
        return place

    @contextmanager
    def run(self) -> Iterator[Told]:
        """Restarts the counts; yields the list of this rank's calls."""
        rank = _rank()
        self.told[rank], self._works[rank], self._marks[rank] = [], {}, -1
        yield self.told[rank]


def _rank() -> int:
    return Communicator.instance().rank()


def check(
    program: HostIrContainer, inputs: list[Any], ranks: int, streams: int, watch: Watch
) -> None:
    shards = [shards_of(program, inputs, rank) for rank in range(ranks)]
    meant = [run.order for run in interpret(program, shards, number_of_streams=streams)]
    if not any(isinstance(op, SetCurrentStream) for op in walk(program.ops)):
        # Nothing is marked where there is one stream.
        meant = [[told for told in order if told[0] != "join mark"] for order in meant]

    def body() -> None:
        rank = _rank()
        communicator = Communicator.instance() if ranks > 1 else None
        evaluator = HostIrEvaluator(program, communicator, number_of_streams=streams)
        given = [copied(x) for x in shards[rank]]
        for number in range(RUNS):
            with watch.run() as told:
                evaluator.run(given)
            assert relevant(told, meant[rank]) == meant[rank], f"rank {rank}, run {number}"
        with watch.run() as told:
            evaluator.evaluate(given)
        assert relevant(told, meant[rank]) == meant[rank], f"rank {rank}, op by op"

    with simulate(ranks) as world:
        world.run(body)


def relevant(told: Told, meant: Told) -> Told:
    """Removes the calls about marks if the expected order has none."""
    has_marks = any(what == "join mark" for what, _ in meant)
    return [(what, which) for what, which in told if has_marks or what != "join mark"]


def copied(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


BY_HAND = [
    name
    for name in handmade_programs.EXAMPLES
    if "copies" not in name and "unit" not in name and "symmetric" not in name
]


@pytest.mark.parametrize("name", stream_programs.PROGRAMS)
def test_programs_with_streams_keep_their_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = stream_programs.PROGRAMS[name]
    watch = Watch(monkeypatch)
    check(case.build(), random(case.shapes, 0), case.ranks, stream_programs.N_STREAMS, watch)


@pytest.mark.parametrize("name", BY_HAND)
def test_programs_by_hand_keep_their_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = handmade_programs.EXAMPLES[name]
    watch = Watch(monkeypatch)
    check(example.build(), example.arguments(0), example.ranks, example.streams, watch)


@pytest.mark.parametrize("name", ["step buffers", "every root", "exchanges", "two in flight"])
def test_communications_are_waited_for_in_their_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    program = HostIrContainer()
    with program:
        case.define(program)
    check(program, random(case.calls[0], 0), case.ranks, case.streams, Watch(monkeypatch))
