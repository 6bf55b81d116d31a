"""Definition to host program of deep transformers and large meshes, with limits, by
pytest-benchmark.

Times are CPU seconds that fresh processes report (`lowering_time.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_process import CLOCK, time_fresh
from lowering_time import CASES, RATIOS
from pytest_benchmark.fixture import BenchmarkFixture

SCRIPT = Path(__file__).with_name("lowering_time.py")
medians: dict[str, float] = {}


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("case", CASES)
def test_lowering(case: str, benchmark: BenchmarkFixture) -> None:
    """Times a case; its limit is in seconds."""
    medians[case], _ = time_fresh(benchmark, SCRIPT, case)
    bar_s = CASES[case].bar_s
    benchmark.extra_info["bar_s"] = bar_s
    assert bar_s is None or medians[case] <= bar_s


@pytest.mark.parametrize(("more", "fewer"), RATIOS)
def test_growth(more: str, fewer: str) -> None:
    """The ratio of the times of two cases."""
    if not {more, fewer} <= medians.keys():
        pytest.skip("needs both cases")
    assert medians[more] <= RATIOS[more, fewer] * medians[fewer]
