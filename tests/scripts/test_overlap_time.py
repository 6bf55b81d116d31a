"""Runs benchmarks/overlap_time.py on CPU ranks: its results are checked, and its report is
right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import mpi_abort
from tests.support.jobs import needs_mpi, run_job

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "overlap_time.py"
FAULT = ROOT / "tests" / "support" / "rank_programs" / "wrong_overlap.py"
# A shape of each op, and what our steps by peer copies move.
COPIES = {
    "nvf_col": ["recv by CUDA", "send by CUDA"],
    "l70b_down": ["recv by CUDA", "send by CUDA"],
    "ar_2k": ["Allgather by CUDA", "recv by CUDA", "send by CUDA"],
    "sp_mlp": None,
}
DEFINED = {
    "nvf_col": ["Allgather by MPI"],
    "l70b_down": ["ReduceScatter by MPI"],
    "ar_2k": ["Allreduce by MPI"],
    "sp_mlp": ["Allgather by MPI", "ReduceScatter by MPI"],
}

pytestmark = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


@pytest.fixture
def overlap_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the script as a module."""
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.setenv(name, "1" if name.startswith("TORCH") else "0")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, SCRIPT.stem, raising=False)
    return __import__(SCRIPT.stem)


def rows_of(tmp_path: Path, program: Path, *args: str) -> list[dict[str, Any]]:
    """Runs a job of two CPU ranks; returns the rows of the file that it writes."""
    file = tmp_path / "rows.jsonl"
    job = run_job("mpirun", 2, str(program), "--cpu", "--json", str(file), *args)
    assert job.code == 0, job.text
    return [json.loads(line) for line in file.read_text().splitlines()]


@needs_mpi
def test_every_method_of_every_op_is_right_and_has_a_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, SCRIPT, "--rounds", "3", "--shapes", ",".join(COPIES))
    assert not [row for row in rows if "skipped" in row]
    for shape, copies in COPIES.items():
        mine = {row["method"]: row for row in rows if row.get("shape") == shape}
        ours = {"as_defined", "auto", *(["copies"] if copies else [])}
        assert mine.keys() == {"mm", "nccl", "seq", *ours}
        roof = max(mine["mm"]["ms"], mine["nccl"]["ms"])
        for row in mine.values():
            assert 0 < row["min"] <= row["ms"] <= row["max"] and row["rounds"] == 3
            assert row["to_roof"] == pytest.approx(row["ms"] / roof, rel=0.05, abs=1e-3)
        assert mine["as_defined"]["moves"] == DEFINED[shape]
        if copies:
            assert mine["copies"]["moves"] == copies
        # Small sizes stay as they are, by the report.
        auto = mine["auto"]
        assert auto["chosen"] == ["as it is"] * len(DEFINED[shape])
        predicted = sum(pair["as it is"] for pair in auto["candidates"])
        assert auto["report_ms"] == pytest.approx(predicted)
    summaries = {(row["summary"], row["method"]): row for row in rows if "summary" in row}
    assert summaries["ag+rs", "auto"]["shapes"] == 2 and summaries["mlp", "auto"]["shapes"] == 1


@needs_mpi
def test_a_wrong_result_is_left_out_in_words_on_all_ranks(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, FAULT, "--rounds", "3", "--shapes", "quack_8k")
    (skipped,) = (row for row in rows if "skipped" in row)
    assert skipped["method"] == "copies"
    assert skipped["skipped"].startswith("rank 1: relative error")
    timed = [row["method"] for row in rows if "ms" in row]
    assert timed == ["mm", "nccl", "seq", "as_defined", "auto"]


@needs_mpi
def test_where_torch_itself_is_wrong_the_job_ends_in_words() -> None:
    job = run_job("mpirun", 2, str(FAULT), "--cpu", "--shapes", "sp_mlp", WRONG="scatter")
    assert job.code != 0 and "NCCL, then cuBLAS, against float64: rank 0: relative" in job.text


@needs_mpi
def test_a_spent_budget_says_what_was_left(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, SCRIPT, "--budget", "0", "--shapes", "ddlb,sp_mlp")
    assert [row["left"] for row in rows if "left" in row] == [["ddlb", "sp_mlp"]]
    assert not any("ms" in row for row in rows)


def test_what_an_overlap_report_says(overlap_time: ModuleType) -> None:
    report = """on h200; steps must gain 3%
Allgather T0 [8192, 8192]; linear of T2, .. over 4 deviceIdx.x (user code at mlp.py:57)
  as it is                1.720 ms
  steps, peer copies      1.357 ms   <- chosen
  steps, NCCL             cannot be: no
linear of T4; ReduceScatter T5 over 4 deviceIdx.x (user code at mlp.py:58)
  as it is      0.500 ms   <- chosen
  the host alone would take 65.0 us for the steps"""
    assert overlap_time.reported(report) == {
        "candidates": [{"as it is": 1.72, "steps, peer copies": 1.357}, {"as it is": 0.5}],
        "chosen": ["steps, peer copies", "as it is"],
        "report_ms": 1.857,
    }
    # On ranks of a library that no description knows.
    guessed = report.replace("as it is", "as it is by the numbers of NCCL")
    assert overlap_time.reported(guessed) == overlap_time.reported(report)


def test_a_summary_names_the_worst_shapes(overlap_time: ModuleType) -> None:
    rows = [
        {"shape": "a", "async_tp_to_it": 1.2, "to_roof": 1.5, "predicted_to_measured": 0.86},
        {"shape": "b", "async_tp_to_it": 0.9, "to_roof": 1.1, "predicted_to_measured": 0.84},
    ]
    found = overlap_time.summary_of(rows)
    assert (found["worst_async_tp_to_it"], found["worst_async_tp_to_it_shape"]) == (0.9, "b")
    assert (found["worst_to_roof"], found["worst_to_roof_shape"]) == (1.5, "a")
    assert found["async_tp_to_it"] == 1.039  # the root of 1.08
    assert found["predicted_to_measured_within_15%"] == "1 of 2"


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (torch.ones(4, 4), ""),
        (torch.full((4, 4), 1.02), "relative error 2.00e-02"),
        (torch.full((4, 4), float("nan")), "relative error nan"),
        (torch.ones(4, 1), "the result is [4, 1], expected [4, 4]"),
    ],
)
def test_results_are_compared(overlap_time: ModuleType, got: torch.Tensor, why: str) -> None:
    found = overlap_time.difference(got, torch.ones(4, 4), 1e-2)
    assert found.startswith(why) and bool(found) == bool(why)
