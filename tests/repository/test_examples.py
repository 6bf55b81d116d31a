"""The examples run on simulated ranks, and each has a page that shows it and how to start it.

test_documents.py runs the commands of the pages, and compares their output with the page.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hostir import NUMBER_OF_STREAMS, HostIrContainer, explain
from hostir.cost.machine_model import H200
from hostir.cost.report import predict
from hostir.cost.simulator import simulated_schedule
from hostir.lowering.input_class import symbol_values
from multidevice import simulate
from tests.repository.documents import blocks

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "examples"
PAGE = ROOT / "docs" / "explanation" / "streams-and-overlap.md"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MAX_LINES = 60
# Example of several ranks -> how many collectives of each kind its program has.
COLLECTIVES = {
    "data_parallel_step": {"Allreduce": 2},
    "sequence_parallel_mlp": {"Allgather": 1, "ReduceScatter": 1},
    "uneven_shards": {"Allgather": 1, "ReduceScatter": 1},
    "megatron_layer": {"Allgather": 4, "ReduceScatter": 4},
    "attention_by_heads": {"Allreduce": 1},
    "sharded_dropout": {},
    "pipeline_handover": {"send": 1, "recv": 1},
    "vocab_parallel_loss": {"Allreduce": 4},
}


def test_each_example_has_a_page_and_each_page_an_example() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted([*NAMES, "index"])
    index = (PAGES / "index.md").read_text()
    for name in NAMES:
        assert index.count(f"({name}.md)") == 1, name


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_its_example_and_the_command_that_the_example_names(name: str) -> None:
    found = list(blocks(f"docs/examples/{name}.md"))
    assert [block.included for block in found if block.included] == [f"examples/{name}.py"]
    (command,) = [block.text for block in found if block.language == "bash"]
    command = re.sub(r"^FUSER_\S+ |\.venv/bin/", "", command.splitlines()[-1])
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    lines = [line.partition("  #")[0].strip() for line in docstring.splitlines()]
    assert any(line and command.startswith(line) for line in lines[1:]), command
    ranks = re.search(r"-np (\d)", command)
    row = re.search(rf"\({name}\.md\).*\| (\d) \|$", (PAGES / "index.md").read_text(), re.MULTILINE)
    assert row and row[1] == (ranks[1] if ranks else "1")


@pytest.mark.parametrize("name", [n for n in NAMES if n != "thunder_gpt_block"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_example_of_several_ranks(
    name: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example compares itself with torch; its program has the collectives of its page."""
    with simulate(ranks) as world:
        results = world.run(runpy.run_path, str(EXAMPLES / f"{name}.py"))
    printed = capsys.readouterr().out
    assert sorted(re.findall(r"^rank (\d): ", printed, re.MULTILINE)) == [*map(str, range(ranks))]
    fd = results[0]["on_all_ranks" if name == "sharded_dropout" else "fd"]
    program = fd.fec.host_program()
    kinds = re.findall(r"\(type=(\w+)", str(program))
    assert Counter(kinds) == (COLLECTIVES[name] if ranks > 1 else {})
    why = communications_explained(program)
    assert Counter(kind for kind, _ in why) == Counter(kinds)
    for kind, details in why:
        check_explanation(name, ranks, kind, details)


def communications_explained(program: HostIrContainer) -> list[tuple[str, dict[str, str]]]:
    """Returns the type of each communication, and what `hostir why` says about it, by name."""
    values = {**symbol_values(program, {}), NUMBER_OF_STREAMS: 4}
    costs = predict(program, simulated_schedule(program, values, H200))
    found: list[tuple[str, dict[str, str]]] = []
    for line in explain(program, "all", costs):
        if line.startswith("  "):
            name, _, text = line.strip().partition(": ")
            found[-1][1][name] = text
        else:
            started = re.match(r"\w*Communication \d+ \((\w+) of .*because ", line)
            found.append((started[1] if started else "", {}))
    return [(kind, details) for kind, details in found if kind]


def check_explanation(name: str, ranks: int, kind: str, details: dict[str, str]) -> None:
    """Checks that the words about a communication name placements, the example's lines and
    costs."""
    known = ["placement", "annotated", "cost", "instead"]
    assert [*details] == known[: {"send": 3, "recv": 2}.get(kind, 4)]
    before, _, after = details["placement"].partition(" -> ")
    split = r"(partial (sums|results of MAX)|axis \d split) over mesh_x"
    words = rf"(replicated|{split}(, axis \d split over mesh_x)?)( on DeviceMesh\S+( \d+)*\}})?"
    assert re.fullmatch(words, before) and re.fullmatch(words, after) and before != after
    lines = details["annotated"].split(", ")
    assert all(re.search(rf"/{name}\.py:\d+$", line) for line in lines)
    if kind == "send":
        assert re.match(r"\d.* from each sender to its receiver between meshes; ", details["cost"])
    elif kind != "recv":
        among = f"among {ranks} ranks along mesh_x; "
        assert re.match(rf"\d.* from each rank, {among}", details["cost"])
        assert re.match(r"no other sequence|(\w+ \+ )+\w+, .* as much$", details["instead"])


def test_a_megatron_layer_with_whole_tokens_needs_four_allreduces() -> None:
    text = (EXAMPLES / "megatron_layer.py").read_text()
    split = "KEPT = Shard(0)"
    assert text.count(split) == 1
    text = text.replace(split, "KEPT = __import__('fuser').Replicate()")

    def layer() -> list[str]:
        names: dict[str, Any] = {}
        exec(compile(text, "megatron_layer.py", "exec"), names)
        return re.findall(r"\(type=(\w+)", str(names["fd"].fec.host_program()))

    with simulate(4) as world:
        assert world.run(layer) == [["Allreduce"] * 4] * 4


def test_rms_norm_is_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "rms_norm.py"))
    printed = capsys.readouterr().out
    assert printed.count("LaunchKernel(") == printed.count("__global__") == 1


def test_mixture_of_experts_has_two_grouped_products(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "mixture_of_experts.py"))
    assert capsys.readouterr().out.count("GroupedMmaOp(") == 2


def test_dynamic_sizes_share_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "dynamic_sizes.py"))
    printed = capsys.readouterr().out
    assert re.findall(r"(\d+) rows: program (\d)", printed) == [
        ("8", "0"), ("100", "0"), ("1000", "0"), ("8", "0"), ("0", "1"),
    ]  # fmt: skip


def test_predicted_time_falls_with_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "predicted_time.py"))
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.M)
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    times, exposed, memory = zip(*[map(float, row[1:]) for row in rows], strict=True)
    assert list(times) == sorted(times, reverse=True)
    assert list(memory) == sorted(memory, reverse=True)
    assert exposed[0] == 0 and list(exposed) == sorted(exposed)


def test_plan_a_big_mesh_is_for_512_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "plan_a_big_mesh.py"))
    program = names["planned"].program
    assert program.devices() == tuple(range(512))
    assert [op.type for op in program.communications()] == ["Allreduce", "Allreduce"]
    assert capsys.readouterr().out.count("because") == 2


def test_missing_wait_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "missing_wait.py"))
    assert names["text"].count("Synchronize(") == names["edited"].count("Synchronize(") + 1
    printed = capsys.readouterr().out
    assert "this program must not run:\nreturned too early: " in printed
    assert printed.endswith("[nan, nan, nan]\n")


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
