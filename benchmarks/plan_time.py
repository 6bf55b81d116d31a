"""Times the host work of host programs with streams. `python benchmarks/plan_time.py [--rounds N]`

Prints microseconds of CPU time of one process, on the CPU, for three ways to run the programs of
tests/support/stream_programs.py that need one rank:

- `evaluate`: op by op;
- first run: the first run of a class of inputs by a new evaluator, which records a plan;
- replay: a later run, which replays the plan.

Each time is the minimum over rounds, in which the programs and the ways take turns. To compare two
versions, run the script in each, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from hostir import HostIrEvaluator
from tests.support.stream_programs import N_STREAMS, PROGRAMS, Program

CALLS = {"evaluate": 20, "first run": 5, "replay": 100}


def ways_to_run(case: Program) -> dict[str, Callable[[], None]]:
    """Returns a function for each way to run a program; it makes the calls of one round."""
    program, inputs = case.build(), case.inputs()
    kept = HostIrEvaluator(program, number_of_streams=N_STREAMS)
    kept.run(inputs)
    kept.run(inputs)

    def evaluate() -> None:
        for _ in range(CALLS["evaluate"]):
            kept.evaluate(inputs)

    def first() -> None:
        for _ in range(CALLS["first run"]):
            HostIrEvaluator(program, number_of_streams=N_STREAMS).run(inputs)

    def replay() -> None:
        for _ in range(CALLS["replay"]):
            kept.run(inputs)

    return {"evaluate": evaluate, "first run": first, "replay": replay}


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases = {name: ways_to_run(case) for name, case in PROGRAMS.items() if case.ranks == 1}
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name, ways in cases.items():
            for way, run in ways.items():
                begin = time.process_time()
                run()
                taken = (time.process_time() - begin) / CALLS[way]
                best[name, way] = min(taken, best.get((name, way), taken))
    print(f"{'us of CPU time':20}" + "".join(f"{way:>12}" for way in CALLS))
    for name in cases:
        print(f"{name:20}" + "".join(f"{best[name, way] * 1e6:12.1f}" for way in CALLS))


if __name__ == "__main__":
    main()
