"""CPU time of host programs with streams on the CPU, by pytest-benchmark.

The programs are those of tests/support/stream_programs.py that need one rank. They run op by op
(`evaluate`), for the first time, which records a plan (`first_run`), and again, which replays the
plan (`replay`).
"""

from __future__ import annotations

import time

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from hostir import HostIrEvaluator
from tests.support.stream_programs import N_STREAMS, PROGRAMS

pytestmark = [
    pytest.mark.benchmark(timer=time.process_time, min_time=0.005, max_time=0.5, warmup=True),
    pytest.mark.parametrize("case", [name for name, p in PROGRAMS.items() if p.ranks == 1]),
]
torch.set_num_threads(1)


def evaluator_of(case: str) -> tuple[HostIrEvaluator, list[torch.Tensor]]:
    """Returns a new evaluator of a program, and its inputs."""
    program = PROGRAMS[case]
    return HostIrEvaluator(program.build(), number_of_streams=N_STREAMS), program.inputs()


def test_evaluate(case: str, benchmark: BenchmarkFixture) -> None:
    """Times a run op by op."""
    evaluator, inputs = evaluator_of(case)
    evaluator.run(inputs)
    benchmark(evaluator.evaluate, inputs)


def test_first_run(case: str, benchmark: BenchmarkFixture) -> None:
    """Times the first run of a new evaluator."""
    program, inputs = PROGRAMS[case].build(), PROGRAMS[case].inputs()
    benchmark(lambda: HostIrEvaluator(program, number_of_streams=N_STREAMS).run(inputs))


def test_replay(case: str, benchmark: BenchmarkFixture) -> None:
    """Times a replay of the plan of an evaluator."""
    evaluator, inputs = evaluator_of(case)
    evaluator.run(inputs)
    benchmark(evaluator.run, inputs)
