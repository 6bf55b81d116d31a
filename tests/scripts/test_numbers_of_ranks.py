"""Scripts under a launcher report at once if they cannot run on this number of ranks."""

from __future__ import annotations

import sys

import pytest

from fuser.multidevice import simulate
from scripts import fuzz, repeat_overlap


def test_the_fuzzer_runs_no_programs_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "sharded", "--seconds", "60"])
    assert fuzz.main() == 1
    assert capsys.readouterr().out == "no program has 3 ranks: start 2 or 4\n"


def test_overlapped_programs_need_ranks_that_divide_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with simulate(3) as world:
        codes = world.run(repeat_overlap.main, ["--seconds", "60"])
    assert codes == [1, 1, 1]
    assert "3 ranks do not divide the extents of the programs" in capsys.readouterr().out
