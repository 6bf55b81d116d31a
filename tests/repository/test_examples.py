"""The examples of the pages run."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from multidevice import simulate

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "explanation" / "streams-and-overlap.md"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_streamed_linear(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(EXAMPLES / "streamed_linear.py"))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(ranks)]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)
    program = results[0]["fd"].fec.host_program()
    assert str(program).count("type=Allgather") == (ranks > 1)
    if ranks == 2:
        assert listing() in re.sub(r"backend=\w+", "backend=MPI", program.names_text())


def test_traced_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the example, and draws its timeline."""
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["traced_linear.py", str(trace), "--device", "cpu"])
    with simulate(2) as world:
        world.run(runpy.run_path, str(EXAMPLES / "traced_linear.py"))
    text = capsys.readouterr().out
    assert "rank 1: " in text and "predicted on h200, ranks 0 1: " in text
    draw = runpy.run_path(str(EXAMPLES.parent / "scripts" / "draw_trace.py"))["main"]
    draw([str(trace), str(picture), "--processes", "4"])
    drawn = ElementTree.parse(picture).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    words = [found.text for found in drawn.iter(f"{svg}text")]
    titles = [word for word in words if word and word.startswith("rank ")]
    beside = [f"rank {rank}{more}" for rank in (0, 1) for more in ("", ", predicted on h200")]
    assert titles == beside and {"host", "Stream 3", "link in"} <= set(words)
    events = json.loads(trace.read_text())["traceEvents"]
    pieces = [found for found in drawn.iter(f"{svg}rect") if found.get("class") == "piece"]
    assert len(pieces) == sum(e["ph"] == "X" for e in events)


def listing() -> str:
    """Returns the loops of this program as the page on streams shows them."""
    (block,) = re.findall(r"```text\n(  Stream S0 = .*?)```", PAGE.read_text(), re.DOTALL)
    return block
