"""Runs random programs and compares them with torch in float64.

    python scripts/fuzz.py single --seed 0 --cases 1000 --seconds 600
    python scripts/fuzz.py sharded --seed 0 --cases 100 --seconds 600
    mpirun -np 4 python scripts/fuzz.py sharded --seed 0 --cases 100
    python scripts/fuzz.py streams --seed 0 --cases 100 --seconds 600

Prints the number of compared results, the refusals with their reasons, and the failures. A failure
is written as a standalone program, whose path and text are printed. The exit code is 1 after a
failure, or after more refusals than --refusals allows. A program is a function of its seed alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.fuzz.campaign import Campaign, Failure, Tally, summary

KINDS = ("single", "sharded", "streams")


def main() -> int:
    """Runs the command of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for kind in KINDS:
        _campaign_arguments(commands.add_parser(kind, help=f"random {kind} programs"))
    worker = commands.add_parser("worker")
    worker.add_argument("kind")
    worker.add_argument("--schedules", required=True)
    worker.add_argument("--device", required=True)
    worker.add_argument("--without", required=True)
    worker.add_argument("--report-to", type=int, required=True)
    for name in ("shrink", "show"):
        one = commands.add_parser(name, help=f"{name} the program of one seed")
        one.add_argument("kind", choices=KINDS)
        one.add_argument("--seed", type=int, required=True)
        one.add_argument("--mode", default="cpu", help="cpu, h200, cpu+checked, cpu+cuda, ...")
        one.add_argument("--seconds", type=float, default=60, help="negative: also a refusal")
        one.add_argument("--out", type=Path, default=Path("fuzz-failures"))
    return _COMMANDS[parser.parse_args().command](parser.parse_args())


def _campaign_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1_000_000, help="how many seeds at most")
    parser.add_argument("--seconds", type=float, default=90, help="wall time, minimising aside")
    parser.add_argument("--schedules", default="cpu,h200", help="whose schedules")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--refusals", type=float, default=100, metavar="PERCENT", help="how many may be refused"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--without", default="", help="skip programs with these ops, or `expanded`")
    parser.add_argument("--minimise", type=int, default=6, help="how many failures, at most")
    parser.add_argument("--minimise-seconds", type=float, default=30, help="for each failure")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"))


def _campaign(args: argparse.Namespace) -> int:
    if args.command == "streams" and args.schedules == "cpu,h200":
        args.schedules = "cpu"
    if args.device == "cuda" and args.schedules == "cpu,h200":
        args.schedules = "own"
    if args.command == "sharded" and _launched_ranks() > 1:
        from tools.fuzz.launched import run_launched
        from tools.fuzz.sharded import RANKS

        if (size := _launched_ranks()) not in RANKS:
            print(f"no program has {size} ranks: start {' or '.join(map(str, sorted({*RANKS})))}")
            return 1
        seeds = range(args.seed, args.seed + args.cases)
        tally = run_launched(seeds, args.seconds, args.schedules, args.device, args.without)
        return _exit_code(tally, percent=args.refusals)
    print(f"{args.command} from seed {args.seed}, schedules {args.schedules} on {args.device}")
    started = time.monotonic()
    campaign = Campaign(
        args.command,
        args.seed,
        args.cases,
        args.seconds,
        args.schedules,
        args.device,
        args.processes,
        args.without,
    )
    tally = campaign.run()
    seconds = time.monotonic() - started
    _minimise(campaign, tally.failures, args)
    print(summary(tally, seconds))
    return _exit_code(tally, percent=args.refusals)


def _exit_code(tally: Tally, *, percent: float) -> int:
    refused = tally.refused_beyond(percent)
    print("\n".join(refused), end="\n" if refused else "")
    return 1 if tally.failures or refused else 0


def _launched_ranks() -> int:
    """Returns how many ranks of this script mpirun or torchrun started."""
    sizes = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
    return max(int(os.environ.get(name, "1")) for name in sizes)


def _minimise(campaign: Campaign, failures: list[Failure], args: argparse.Namespace) -> None:
    """Writes programs for the first failures; failures with equal messages count once."""
    seen: set[str] = set()
    for failure in failures:
        if len([f for f in failures if f.path]) == args.minimise:
            break
        if failure.kind != "error" or failure.reason not in seen:
            seen.add(failure.reason)
            failure.path = campaign.shrink(failure, args.minimise_seconds, args.out.resolve())
            if failure.path.endswith(".py"):
                # Where this machine's files are out of reach, the log is all there is.
                print(f"--- {failure.path}\n{Path(failure.path).read_text()}---", flush=True)


def _worker(args: argparse.Namespace) -> int:
    from tools.fuzz.worker import serve

    without = args.without.split(",")
    serve(args.kind, args.schedules.split(","), args.device, without, args.report_to)
    return 0


def _shrink(args: argparse.Namespace) -> int:
    from tools.fuzz.worker import shrink

    print(shrink(args.kind, args.seed, args.mode, args.seconds, args.out))
    return 0


def _show(args: argparse.Namespace) -> int:
    from tools.fuzz.program import define_text
    from tools.fuzz.worker import program_of

    program = program_of(args.kind, args.seed)
    print(define_text(program))
    for call in program.calls:
        print(call)
    return 0


_COMMANDS = {
    **dict.fromkeys(KINDS, _campaign),
    "worker": _worker,
    "shrink": _shrink,
    "show": _show,
}

if __name__ == "__main__":
    sys.exit(main())
