"""Files that pytest-benchmark runs for `scripts/bench.py`, and the lines that come of them."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_lines
import pytest

from tests.support.jobs import ROOT

# Its process reports 0.25 s, whatever it takes; the limit of `slow` is exceeded.
SCRIPT = """
import json, sys
print(json.dumps({"seconds": {"define": 0.05, "lower": 0.2}, "case": sys.argv[1]}))
"""
BENCH = """
from pathlib import Path
import pytest
from fresh_process import CLOCK, time_fresh

@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", ["quick one", "slow"])
def test_made(case, benchmark):
    seconds, _ = time_fresh(benchmark, Path(__file__).with_name("script.py"), case, rounds=2)
    assert case != "slow" or seconds < 0.1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with a benchmark, where `benchmark_lines` looks for it."""
    pytest.importorskip("pytest_benchmark")
    made = tmp_path / "benchmarks"
    made.mkdir()
    for name in ("conftest.py", "fresh_process.py", "benchmark_lines.py"):
        shutil.copy(ROOT / "benchmarks" / name, made)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (made / "script.py").write_text(SCRIPT)
    (made / "bench_made.py").write_text(BENCH)
    monkeypatch.setattr(benchmark_lines, "FOLDER", made)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return made


def test_lines_have_the_reported_seconds_and_facts_and_the_last_an_exceeded_limit(
    folder: Path,
) -> None:
    del folder
    lines: list[dict[str, Any]] = benchmark_lines.run_benchmarks("made")
    assert lines[0] == {
        "bench": "made",
        "what": "made",
        "case": "quick one",
        **dict.fromkeys(("s", "s_min", "s_max"), 0.25),
        "rounds": 2,
        "define_s": 0.05,
        "lower_s": 0.2,
    }
    assert [line.get("case") for line in lines] == ["quick one", "slow", None]
    assert lines[-1] == {"bench": "made", "is_kept": False}


def test_the_chosen_cases_remain_and_tests_of_all_cases() -> None:
    conftest = importlib.import_module("benchmarks.conftest")

    def item(case: str | None) -> Any:
        return SimpleNamespace(callspec=SimpleNamespace(params={"case": case} if case else {}))

    items = [item("a"), item("b"), item("c"), item(None), SimpleNamespace()]
    chosen: Any = SimpleNamespace(getoption=lambda _: "c,a")
    left = [*items]
    conftest.pytest_collection_modifyitems(chosen, left)
    assert left == [items[0], items[2], items[3], items[4]]
    everything: Any = SimpleNamespace(getoption=lambda _: "")
    conftest.pytest_collection_modifyitems(everything, left := [*items])
    assert left == items


def test_an_unknown_case_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    del folder
    with pytest.raises(SystemExit, match=r"bench_made.py could not run \(exit code 4\)"):
        benchmark_lines.run_benchmarks("made", "quick")
    assert "unknown case quick: expected some of quick one, slow" in capfd.readouterr().err
