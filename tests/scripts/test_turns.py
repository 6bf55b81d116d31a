"""The loop, the statistics and the lines of measurements in turns (`benchmarks/turns.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import turns

from multidevice import Communicator, simulate


def test_each_round_has_each_candidate_once_and_warm_ups_are_left_out() -> None:
    order: list[str] = []

    def measure(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    found = turns.take_turns({n: measure(n) for n in "ab"}, rounds=3, warm_ups=1)
    assert "".join(order) == "abababab"
    assert found == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_no_round_begins_that_may_not() -> None:
    found = turns.take_turns({"a": lambda: 1.0}, rounds=9, goes_on=lambda number: number < 2)
    assert found == {"a": [1.0, 1.0]}


def test_a_time_is_per_call_and_begins_after_what_comes_before() -> None:
    calls: list[str] = []
    measure = turns.by_clock(lambda: calls.append("run"), 3, before=lambda: calls.append("before"))
    assert 0 < measure() < 1
    assert calls == ["before", "run", "run", "run"]


def test_a_time_between_events_is_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the GPU's events by a clock of calls: each call takes 2 ms."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = calls.count("run")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, stop: Event) -> float:
            assert calls[-1] == "synchronize"
            return 2.0 * (stop.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    measure = turns.by_events(lambda: calls.append("run"), 5, before=lambda: calls.append("run"))
    assert measure() == 2e-3
    assert calls == ["run"] * 6 + ["synchronize"]
    assert turns.clock_of("cuda:1") is turns.by_events and turns.clock_of("cpu") is turns.by_clock


def test_a_spread_has_median_least_and_most() -> None:
    found = turns.spread([4e-6, 1e-6, 3e-6])
    assert found == (3e-6, 1e-6, 4e-6)
    assert found.fields("us") == {"us": 3.0, "us_min": 1.0, "us_max": 4.0}
    assert found.scaled("ms", 4) == [0.003, 0.001, 0.004]


def test_lines_are_appended_by_the_first_rank_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 0}\n')
    for rank in (0, 1):
        lines = turns.Lines(path, rank=rank, bench="x")
        lines.emit({"a": rank})
        assert lines.rows == [{"bench": "x", "a": rank}]
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [{"a": 0}, {"bench": "x", "a": 0}]
    assert capsys.readouterr().out == '{"bench": "x", "a": 0}\n'


def test_the_slowest_rank_counts() -> None:
    def mine() -> dict[str, list[float]]:
        rank = Communicator.instance().rank()
        return turns.slowest(Communicator.instance(), {"x": [[1.0, 5.0], [3.0, 2.0]][rank]})

    with simulate(2) as world:
        assert world.run(mine) == [{"x": [3.0, 5.0]}] * 2


def test_ranks_make_the_same_calls() -> None:
    def count() -> tuple[int, turns.Times]:
        calls: list[None] = []
        found = turns.take_turns_on_ranks(
            {"x": lambda: calls.append(None)}, torch.device("cpu"), rounds=4, burst=5
        )
        return len(calls), found["x"]

    with simulate(2) as world:
        (one, times), (other, same) = world.run(count)
    assert one == other == (turns.WARM_UPS + 4) * (1 + 5)
    assert times == same and len(times.ms) == len(times.host_us) == 4
    row = times.row()
    assert 0 < row["min"] <= row["ms"] <= row["max"]
