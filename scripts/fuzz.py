"""Run random programs and compare them with torch in float64.

    python scripts/fuzz.py single --seed 0 --cases 1000 --seconds 600
    python scripts/fuzz.py sharded --seed 0 --cases 100 --seconds 600
    mpirun -np 4 python scripts/fuzz.py sharded --seed 0 --cases 100
    python scripts/fuzz.py streams --seed 0 --cases 100 --seconds 600

A program is a function of its seed alone. The report says how many were compared, how many were
refused and why, and which failed. Hypothesis shrinks a failure; it is written as a standalone
program, whose path and text are printed. The exit code is 1 after a failure, or after more refusals
than --refusals allows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.fuzz.kinds import GENERATORS
from tools.fuzz.search import Search, search_in_processes
from tools.fuzz.tally import Tally, summary


def main() -> int:
    """Runs the command of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for kind in GENERATORS:
        _search_arguments(commands.add_parser(kind, help=f"random {kind} programs"))
    show = commands.add_parser("show", help="print the program of a seed")
    show.add_argument("kind", choices=GENERATORS)
    show.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    return _show(args) if args.command == "show" else _search(args)


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1_000_000, help="how many seeds at most")
    parser.add_argument("--seconds", type=float, default=90, help="wall time, shrinking aside")
    parser.add_argument("--schedules", default="", help="cpu, h200, graphs; own on GPUs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--refusals", type=float, default=100, metavar="PERCENT", help="how many may be refused"
    )
    parser.add_argument(
        "--show-refused", default="", metavar="TEXT", help="refusals with TEXT count as failures"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--without", default="", help="skip programs with these ops, or `expanded`")
    parser.add_argument("--shrink-seconds", type=float, default=60, help="for each failure")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"))


def _schedules(args: argparse.Namespace) -> str:
    if args.schedules:
        return args.schedules
    return "own" if args.device == "cuda" else "cpu" if args.command == "streams" else "cpu,h200"


def _search(args: argparse.Namespace) -> int:
    schedules, started = _schedules(args), time.monotonic()
    if args.command == "sharded" and (size := _launched_ranks()) > 1:
        from tools.fuzz.launched import run_launched
        from tools.fuzz.sharded import RANKS

        if size not in RANKS:
            print(f"no program has {size} ranks: start {' or '.join(map(str, sorted({*RANKS})))}")
            return 1
        seeds = range(args.seed, args.seed + args.cases)
        tally = run_launched(seeds, args.seconds, schedules, args.device, args.without)
        return _exit_code(tally, percent=args.refusals)
    print(f"{args.command} from seed {args.seed}, schedules {schedules} on {args.device}")
    plan = Search(
        kind=args.command,
        seed=args.seed,
        cases=args.cases,
        seconds=args.seconds,
        schedules=tuple(schedules.split(",")),
        device=args.device,
        without=tuple(args.without.split(",")),
        shown=args.show_refused,
        shrink_s=args.shrink_seconds,
        out=args.out.resolve(),
    )
    tally = search_in_processes(plan, args.processes)
    for failure in tally.failures:
        # Where this machine's files are out of reach, the log is all there is.
        print(f"--- {failure.path}\n{Path(failure.path).read_text()}---", flush=True)
    print(summary(tally, time.monotonic() - started))
    return _exit_code(tally, percent=args.refusals)


def _exit_code(tally: Tally, *, percent: float) -> int:
    refused = tally.refused_beyond(percent)
    print("\n".join(refused), end="\n" if refused else "")
    return 1 if tally.failures or refused else 0


def _launched_ranks() -> int:
    """Returns how many ranks of this script mpirun or torchrun started."""
    sizes = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
    return max(int(os.environ.get(name, "1")) for name in sizes)


def _show(args: argparse.Namespace) -> int:
    from tools.fuzz.program import define_text

    program = GENERATORS[args.kind](args.seed)
    print(define_text(program))
    for call in program.calls:
        print(call)
    return 0


if __name__ == "__main__":
    sys.exit(main())
