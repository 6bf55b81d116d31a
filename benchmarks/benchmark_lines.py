"""Runs the files `bench_*.py` by pytest-benchmark, and returns its results as lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
LIMIT_EXCEEDED = 1


def product_path() -> str:
    """Returns the folder whose packages are timed: that of PYTHONPATH, else this checkout."""
    return os.environ.get("PYTHONPATH") or str(FOLDER.parent)


def run_benchmarks(name: str, only: str = "") -> list[dict[str, Any]]:
    """Runs `bench_NAME.py`; returns a line for each benchmark.

    `only` has the names of its cases, comma-separated; "" means all. A last line with
    `is_kept: False` says that a limit is exceeded.

    Raises:
        SystemExit: the benchmarks could not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        # -P, and no "." in pythonpath: `product_path` decides which product is timed.
        command = [sys.executable, "-P", "-m", "pytest", str(FOLDER / f"bench_{name}.py"), "-q"]
        command += ["-p", "no:cacheprovider", "-o", "pythonpath=scripts benchmarks"]
        command += ["-o", "timeout=0", "--only", only, f"--benchmark-json={results}"]
        # A benchmark may run in a process of pytest-xdist, which would disable it.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment["PYTHONPATH"] = product_path()
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if done.returncode not in (0, LIMIT_EXCEEDED) or not results.exists():
            raise SystemExit(f"bench_{name}.py could not run (exit code {done.returncode})")
        found = json.loads(results.read_text())["benchmarks"]
    lines = [line_of(name, benchmark) for benchmark in found]
    return [*lines, {"bench": name, "is_kept": False}] if done.returncode else lines


def line_of(name: str, benchmark: dict[str, Any]) -> dict[str, Any]:
    """Returns the line of a benchmark in the file that `--benchmark-json` wrote."""
    stats = benchmark["stats"]
    seconds = {"s": stats["median"], "s_min": stats["min"], "s_max": stats["max"]}
    test = benchmark["name"].partition("[")[0].removeprefix("test_")
    return {
        "bench": name,
        "what": test,
        "case": ", ".join(map(str, (benchmark["params"] or {"": name}).values())),
        **{key: float(f"{value:.5g}") for key, value in seconds.items()},
        "rounds": stats["rounds"],
        **benchmark["extra_info"],
    }
