"""Definition to CUDA text of long programs, with its limits, by pytest-benchmark.

Times are CPU seconds that fresh processes report (`compile_time.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compile_time import CASES, GROWTH, GROWTH_BAR, LONGEST
from fresh_process import CLOCK, time_fresh
from pytest_benchmark.fixture import BenchmarkFixture

SCRIPT = Path(__file__).with_name("compile_time.py")
medians: dict[str, float] = {}


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", CASES)
def test_compile(case: str, benchmark: BenchmarkFixture) -> None:
    """Times a case. Its limit, which a busy machine may miss, is a fact of the line."""
    medians[case], report = time_fresh(benchmark, SCRIPT, case)
    benchmark.extra_info["bar_ms"] = CASES[case].bar_ms
    if case == LONGEST:
        lowering = medians[case] - report["seconds"]["define"]
        assert report["parse_s"] <= lowering, "parsing takes longer than lowering"


def test_growth() -> None:
    """The time of ten times as many ops."""
    if not {*GROWTH} <= medians.keys():
        pytest.skip(f"needs the cases {GROWTH}")
    fewer, more = (medians[case] for case in GROWTH)
    assert more <= GROWTH_BAR * fewer
