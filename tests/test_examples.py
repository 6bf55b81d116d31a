"""The examples of the README run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from multidevice import simulate

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_streamed_linear(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(EXAMPLES / "streamed_linear.py"))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(ranks)]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)
    text = str(results[0]["fd"].fec.host_program())
    assert text.count("type=Allgather") == (ranks > 1)
    # What the README says of the text.
    order = ("GetCurrentStream", "Synchronize(Stream S0)", "HirAliasSelect", "linear(")
    places = [text.index(word) for word in order]
    assert places == sorted(places)
