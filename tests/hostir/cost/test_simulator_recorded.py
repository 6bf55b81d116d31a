"""The cost model beside recorded measurements of two and four H200: which form is faster, and how
long each takes.

The measurements are in `benchmarks/results`; the programs are lowered at full size and not run.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hostir.cost.machine_model import H200
from tests.support import mpi_abort

pytestmark = [
    pytest.mark.finding("G38"),
    pytest.mark.skipif(mpi_abort.world_size() > 1, reason="simulates ranks"),
]
SCRIPTS = Path(__file__).parents[3] / "scripts"
# No prediction is further from the median of its rounds than this factor, and half are within 5 %.
FACTOR, MEDIAN = 1.22, 1.05
_2X_GATHER, _4X_SCATTER = ("ag", 2, (8192, 8192, 28672)), ("rs", 4, (8192, 28672, 8192))
# Pairs that the model orders otherwise, as (faster, slower) by measurement. Two GPUs, N = 28672:
# chunks on several streams took as long as on one, though the last wave of their matmuls leaves
# room. Four GPUs: `exchange` was recorded with the own block first, and is now last; chunks on two
# streams were as slow as on one. None of these was profiled.
OTHERWISE = {
    *((_2X_GATHER, "broadcasts", f"chunked on {n} streams") for n in (2, 4, 8)),
    *((_4X_SCATTER, f"chunked on {n} streams", "exchange") for n in (4, 8)),
    (_4X_SCATTER, "head wait inside, 4 streams", "exchange"),
    (_4X_SCATTER, "reduces", "exchange"),
    (_4X_SCATTER, "chunked on 8 streams", "chunked on 2 streams"),
    (_4X_SCATTER, "reduces", "chunked on 2 streams"),
}


@pytest.fixture(scope="module")
def predict_streams() -> ModuleType:
    """The script as a module."""
    for folder in (SCRIPTS.parent / "benchmarks", SCRIPTS):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return __import__("predict_streams")


@pytest.fixture(scope="module")
def found(predict_streams: ModuleType) -> list[tuple[Any, float]]:
    """Each recorded line with its predicted time in ms."""
    return [(row, predict_streams.predicted_ms(row, H200)) for row in predict_streams.recorded()]


def test_forms_are_ordered_as_measured_where_their_rounds_do_not_overlap(
    found: list[tuple[Any, float]],
) -> None:
    compared, otherwise = 0, set[Any]()
    for (a, of_a), (b, of_b) in itertools.combinations(found, 2):
        place = (a.op, a.gpus, a.shape)
        is_clear = a.largest < b.smallest or b.largest < a.smallest
        if a.run != b.run or place != (b.op, b.gpus, b.shape) or not is_clear:
            continue
        compared += 1
        (fast, less), (slow, more) = sorted(((a, of_a), (b, of_b)), key=lambda p: p[0].ms)
        if less >= more:
            otherwise.add((place, fast.form, slow.form))
    assert compared == 158
    assert otherwise == OTHERWISE


def test_predicted_times_are_within_a_factor_of_the_measured_ones(
    found: list[tuple[Any, float]],
) -> None:
    factors = [(max(ms / row.ms, row.ms / ms), str(row)) for row, ms in found]
    assert len(factors) == 156
    assert max(factors)[0] <= FACTOR, max(factors)
    assert sorted(factors)[len(factors) // 2][0] <= MEDIAN


def test_an_allgather_in_chunks_hides_on_four_streams_and_not_on_one(
    predict_streams: ModuleType,
) -> None:
    """Measured: 2.14 ms on one stream, 1.57 on four, 1.70 unchunked."""
    rows = {
        row.form: predict_streams.predicted_ms(row, H200)
        for row in predict_streams.recorded()
        if (row.run.split()[0], row.shape) == ("h200x2_streams", (8192, 8192, 14336))
    }
    one, four = rows["chunked on 1 streams"], rows["chunked on 4 streams"]
    assert four < rows["unchunked"] * 1.05 < one
    assert one == pytest.approx(2.14, rel=0.1) and four == pytest.approx(1.57, rel=0.05)
