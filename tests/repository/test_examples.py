"""The examples of the README run unchanged."""

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
README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_streamed_linear(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(EXAMPLES / "streamed_linear.py"))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(ranks)]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)
    text = str(results[0]["fd"].fec.host_program())
    assert text.count("type=Allgather") == (ranks > 1)
    if ranks == 2:
        shown, run = listing(), statements(text)
        assert len(shown) == len(run)
        for line, statement in zip(shown, run, strict=True):
            assert re.fullmatch(pattern(line), statement), (line, statement)


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


def listing() -> list[str]:
    """Returns the README's listing of a program, without comments."""
    (block,) = re.findall(r"```text\n(  T3\[istream.*?)```", README.read_text(), re.DOTALL)
    return [re.split(r"(?<=\S)  +", line)[0] for line in block.splitlines()]


def statements(text: str) -> list[str]:
    """Returns the ops of a program, one line each, with their indentation."""
    found: list[str] = []
    for line in text.partition(" :\n")[2].partition("\n}")[0].splitlines():
        opened = sum(found[-1].count(o) - found[-1].count(c) for o, c in PAIRS) if found else 0
        if opened or line.lstrip().startswith("= "):
            found[-1] += " " + line.strip()
        else:
            found.append(line)
    return [s.replace("{ ", "{").replace(" }", "}") for s in found]


PAIRS = ("()", "{}", "[]")


def pattern(line: str) -> str:
    """Returns a regular expression for a statement of the README, for any types, sizes and
    backend.
    """

    def tensor(found: re.Match[str]) -> str:
        axes = r"[^\]]*" if found[2] is None else re.escape(found[2]).replace(r"\.\.\.", r"[^\]]*")
        return rf"{found[1]}_[gl]_float\[{axes}\](?: \(DeviceMesh\{{0 1\}}\))?"

    parts = re.split(r"(T\d+(?:\[.*?\])?)", line)
    parts[::2] = [re.escape(p).replace(r"\.\.\.", ".*") for p in parts[::2]]
    parts[1::2] = [re.sub(r"(T\d+)(?:\[(.*)\])?", tensor, p) for p in parts[1::2]]
    if "Communication 0 (" in line:
        parts[-1] = r", backend=\w+\)"
    return "".join(parts)
