"""`scripts/compare.py` runs a command with two products in turns and compares its times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import compare
import pytest

# Notes which product it measures; the other's time is 2 s, this checkout's 3 s.
COMMAND = """
import json, os, sys
product = os.environ["PYTHONPATH"]
is_other = product.endswith("other")
with open(os.environ["ORDER"], "a") as file:
    file.write("o" if is_other else "m")
with open(sys.argv[sys.argv.index("--json") + 1], "a") as file:
    for case, scale in (("x", 1), ("y", 1e-6)):
        times = {"s": (2.0 if is_other else 3.0) * scale, "rounds": 7}
        file.write(json.dumps({"bench": "b", "case": case, **times}) + "\\n")
"""


def test_the_products_take_turns_and_ratios_are_this_over_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, order, found = tmp_path / "other", tmp_path / "order", tmp_path / "found.jsonl"
    (other / "fuser").mkdir(parents=True)
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    monkeypatch.setenv("ORDER", str(order))
    words = ["compare.py", str(other), "--turns", "2", "--json", str(found), "--"]
    monkeypatch.setattr(sys, "argv", [*words, sys.executable, str(command)])
    assert compare.main() == 0
    assert order.read_text() == "moommo"
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [row["of"] for row in rows[:-1]] == ["bench=b case=x s", "bench=b case=y s"]
    assert [row["ratio"] for row in rows[:-1]] == [1.5, 1.5]
    assert rows[0]["times"] == [3.0, 2.0]
    assert rows[-1] == {"bench": "compare", "times": 2, "geomean": 1.5, "worst": 1.5}


def test_a_ratio_is_the_median_over_the_turns() -> None:
    turns = [({("x",): a}, {("x",): b}) for a, b in ((1.0, 2.0), (3.0, 2.0), (9.0, 10.0))]
    (row, _) = compare.compared(turns)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (0.9, 0.5, 1.5)


def test_our_time_of_each_kind_of_line_is_found() -> None:
    rows = [
        {"bench": "kernels", "pattern": "p", "us": {"ours": 3.0, "eager": 4.0}},
        {"bench": "library", "op": "o", "eager_us": {"ours": [5.0, 4.0, 6.0], "torch": [1, 1, 1]}},
        {"bench": "transformer_layer", "ms": {"ours": {"median": 7.0, "min": 6.0}}},
        {"bench": "host_time", "what": "steady", "us": 8.0, "us_min": 1.0},
        {"bench": "kernels", "machine": "none"},
    ]
    assert compare.keyed(rows) == {
        ("bench=kernels", "pattern=p", "us"): 3.0,
        ("bench=library", "op=o", "eager_us"): 5.0,
        ("bench=transformer_layer", "ms"): 7.0,
        ("bench=host_time", "what=steady", "us"): 8.0,
    }


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["scripts/bench.py", "cpu"], [sys.executable, "{}/scripts/bench.py", "cpu"]),
        (["python3", "scripts/bench.py"], ["python3", "{}/scripts/bench.py"]),
        (
            ["mpirun", "-np", "2", "benchmarks/host_time.py"],
            ["mpirun", "-np", "2", sys.executable, "{}/benchmarks/host_time.py"],
        ),
    ],
)
def test_scripts_are_those_of_this_checkout(words: list[str], begins: list[str]) -> None:
    expected = [word.format(compare.ROOT) for word in begins]
    assert compare.command_of(words, Path("f")) == [*expected, "--json", "f"]


def test_a_command_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 3 and no times"):
        compare.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path)
