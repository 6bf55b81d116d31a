"""`scripts/repeat_overlap.py` reports a program that gives a different result in one run."""

from __future__ import annotations

from typing import Any

import pytest
import repeat_overlap  # pyright: ignore[reportMissingImports]
import torch

from fuser import FusionDefinition
from fuser.frontend.program_cache import PROGRAMS
from fuser.multidevice import Communicator

COMMAND = ["--repeats", "30", "--only", "weight gradient, linear"]
pytestmark = pytest.mark.mpi(min_size=2)


def test_forms_equal_the_program_as_it_is(
    comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeat_overlap.main(COMMAND) == 0
    PROGRAMS.clear()
    out = capsys.readouterr().out
    if comm.rank() == 0:
        lines = out.strip().splitlines()
        assert "weight gradient, linear, form 1, CUDA: 30 times" in lines[0]
        assert lines[-1].startswith("60 repetitions in ")
        assert lines[-1].endswith(", 0 not made, 0 differ")


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_one_wrong_number_on_one_rank_is_found(
    wrong: float,
    comm: Communicator,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execute, calls = FusionDefinition.execute, 0

    def damaged(self: FusionDefinition, *args: Any, **named: Any) -> list[torch.Tensor]:
        nonlocal calls
        found = execute(self, *args, **named)
        if not named.get("_disable_options"):
            calls += 1
            # Three are to make the forms; two in each repetition.
            if calls == 3 + 2 * 27 and comm.rank() == 1:
                found[0].view(-1)[5] = wrong
        return found

    monkeypatch.setattr(FusionDefinition, "execute", damaged)
    assert repeat_overlap.main(COMMAND) == 1
    PROGRAMS.clear()
    out = capsys.readouterr().out
    if comm.rank() == 0:
        assert ", 0 not made, 1 differ" in out
        assert "MPI: rank 1, repetition 26: " in out


def test_what_there_was_no_time_for_is_said(
    comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeat_overlap.main([*COMMAND, "--seconds", "0.001"]) == 1
    PROGRAMS.clear()
    assert comm.rank() or ", 10 not made, 0 differ" in capsys.readouterr().out
