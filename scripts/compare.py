"""Runs a measurement with this checkout's product and with another's, in turns, and compares them.

    python scripts/compare.py OTHER_CHECKOUT [--turns 5] [--json FILE] -- COMMAND ARGUMENTS
    python scripts/compare.py ../before -- scripts/bench.py lowering --only "transformer 8"
    python scripts/compare.py ../before -- benchmarks/host_time.py --no-peer
    python scripts/compare.py ../before -- mpirun -np 2 benchmarks/allreduce_time.py

The command is any that appends its measurements to the file of `--json`, a JSON line each. The
scripts are those of this checkout in every run; PYTHONPATH decides which product they measure. A
first turn, which compiles kernels, is left out. In every second turn the other's product is first.

Reported for each time of each line are the median, the smallest and the largest ratio over the
turns: this checkout's time over the other's. The last line has their geometric mean.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Fields of lines that are times of this project: values, or `ours` of several candidates.
TIMES = ("s", "ms", "us", "ours_ms", "median_us", "eager_us", "device_us", "us_calls")
LABELS = (
    *("bench", "what", "case", "who", "way", "op", "pattern", "mode", "direction", "kernel"),
    *("method", "form", "mask", "dtype", "shape", "nbytes", "ranks"),
)
Key = tuple[str, ...]


def times_of(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the times of a line: the name of the field, and our time."""
    for name in TIMES:
        value = row.get(name)
        if isinstance(value, dict):
            value = value.get("ours")
        if isinstance(value, dict):
            value = value.get("median")
        if isinstance(value, list):
            value = value[0]
        if isinstance(value, int | float):
            yield name, value


def keyed(rows: Sequence[dict[str, Any]]) -> dict[Key, float]:
    """Returns the times of lines, by the labels of their lines and the names of their fields."""
    found: dict[Key, float] = {}
    for row in rows:
        labels = [f"{name}={row[name]}" for name in LABELS if row.get(name) not in (None, "")]
        for name, value in times_of(row):
            found[(*labels, name)] = value
    return found


def command_of(words: Sequence[str], file: Path) -> list[str]:
    """Returns a command in which scripts of this checkout have the interpreter before them."""
    command: list[str] = []
    for word in words:
        if word.endswith(".py") and (ROOT / word).is_file():
            if not Path(command[-1] if command else "").name.startswith("python"):
                command.append(sys.executable)
            word = str(ROOT / word)
        command.append(word)
    return [*command, "--json", str(file)]


def run(words: Sequence[str], product: Path, folder: Path) -> dict[Key, float]:
    """Returns the times of a command with the product of a checkout.

    Raises:
        SystemExit: the command measured nothing.
    """
    file = Path(tempfile.mkstemp(dir=folder)[1])
    command = command_of(words, file)
    env = {**os.environ, "PYTHONPATH": str(product)}
    done = subprocess.run(command, env=env, stdout=sys.stderr, check=False)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if not (found := keyed(rows)):
        raise SystemExit(
            f"with {product}, exit code {done.returncode} and no times: {shlex.join(command)}"
        )
    return found


def compared(turns: Sequence[tuple[dict[Key, float], dict[Key, float]]]) -> list[dict[str, Any]]:
    """Returns a line for each time that all runs have, and one for all of them.

    A time of 0 is left out.
    """
    keys = [k for k in turns[0][0] if all(run.get(k) for turn in turns for run in turn)]
    rows: list[dict[str, Any]] = []
    for key in keys:
        ratios = [ours[key] / others[key] for ours, others in turns]
        medians = [statistics.median(run[key] for run in runs) for runs in zip(*turns, strict=True)]
        rows.append(
            {
                "bench": "compare",
                "of": " ".join(key),
                "times": [round(t, 4) for t in medians],
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
        )
    every = [row["ratio"] for row in rows]
    mean = round(statistics.geometric_mean(every), 4) if every else None
    worst = max(every, default=None)
    return [*rows, {"bench": "compare", "times": len(every), "geomean": mean, "worst": worst}]


def main() -> int:
    """Compares the two checkouts, and prints the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("command", nargs="+", help="the measurement, after --")
    args = parser.parse_args()
    products = ROOT, args.other.resolve()
    if not (products[1] / "fuser").is_dir():
        parser.error(f"{args.other} is no checkout of this project")
    turns: list[tuple[dict[Key, float], dict[Key, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns + 1):
            # Each is the first in every second turn, so that no product gains from the order.
            order = products[:: -1 if turn % 2 else 1]
            found = {product: run(args.command, product, Path(folder)) for product in order}
            turns.append((found[products[0]], found[products[1]]))
    lines = compared(turns[1:])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="", flush=True)
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
