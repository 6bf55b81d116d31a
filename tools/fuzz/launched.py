"""Runs sharded programs on ranks that a launcher started; every rank runs all and checks its
shards.

    mpirun -np 4 python scripts/fuzz.py sharded --seed 0 --cases 200

The ranks stay together: after each program all of them exchange their outcomes.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from fuser import multidevice
from tools.fuzz import sharded
from tools.fuzz.kinds import has_any, modes_of
from tools.fuzz.product import Mode
from tools.fuzz.program import Program
from tools.fuzz.ranks import kind_of, run_rank
from tools.fuzz.runner import Case, Outcome, define, failure, quietly
from tools.fuzz.tally import Failure, Tally, summary


def _run_here(program: Program, mode: Mode) -> Outcome:
    counts = [0, 0, 0]

    def body() -> Outcome:
        try:
            wrong = run_rank(Case.of(program), mode, define(program), counts)
        except Exception as error:
            return failure(error)
        if wrong is not None:
            return Outcome("wrong", kind_of(wrong), wrong)
        return Outcome("ok", "", "", *counts)

    with mode.eager_graphs():
        return quietly(body)


def _worst(found: Sequence[Outcome]) -> Outcome:
    """Returns the outcome to report for all ranks: the first failure that another rank did not
    cause.
    """
    own = [o for o in found if not o.reason.startswith("PeerError")]
    for kind in ("wrong", "error", "refused"):
        for outcome in own:
            if outcome.kind == kind:
                return outcome
    return found[0]


def run_launched(seeds: range, seconds: float, schedules: str, device: str, without: str) -> Tally:
    """Runs seeds on this job's ranks until all are done or the time is over; rank 0 prints the
    report.
    """
    faulthandler.enable()
    communicator = multidevice.Communicator.instance()
    rank, size = communicator.rank(), communicator.size()
    torch.set_num_threads(1)
    tally = Tally()
    started = time.monotonic()
    for seed in seeds:
        program = sharded.generate(seed)
        spent = time.monotonic() - started > seconds
        if json.loads(communicator.exchange(json.dumps(spent).encode())[0]):
            break
        if program.ranks != size or has_any(program, without.split(",")):
            continue
        if rank == 0:
            # The last line of a job that was ended names the program.
            print(f"  seed {seed}", flush=True)
        for mode in modes_of("sharded", seed, schedules.split(","), device):
            mine = asdict(_run_here(program, mode))
            told = communicator.exchange(json.dumps(mine).encode())
            found = [Outcome(**json.loads(text)) for text in told]
            worst = _worst(found)
            if rank == 0:
                tally.add(str(mode), worst, seed)
            if worst.is_failure:
                failed = Failure(str(mode), worst.kind, worst.reason, worst.detail, f"seed {seed}")
                (tally.fail if rank == 0 else tally.failures.append)(failed)
    if rank == 0:
        print(summary(tally, time.monotonic() - started))
        sys.stdout.flush()
    return tally
