"""Writes tests/slow.txt: the tests that the daily run, `pytest -m "not slow"`, leaves out.

    python -m pytest -q -n auto --junitxml=/tmp/times.xml     # once, on a quiet machine
    python scripts/slow_tests.py /tmp/times.xml --seconds 90

The slowest test functions are left out until the others take `--seconds` of one process. The
fastest function of each file is kept if it takes less than `KEEP_S`, so that the daily run covers
nearly all files. A row has the seconds of all cases of a function, or of a file that is left out as
a whole.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLOW = Path("tests", "slow.txt")
KEEP_S = 0.3
HEAD = '# Left out by -m "not slow": seconds, and a file or a function. By scripts/slow_tests.py.\n'
# File -> function -> seconds of all its cases.
Times = Mapping[str, Mapping[str, float]]


def read_times(files: Iterable[Path], root: Path) -> Times:
    """Returns the seconds of each test function in files of `--junitxml`.

    Raises:
        ValueError: the tests belong to another tree: one of their files is not below `root`.
    """
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = case.get("name", "").partition("[")[0]
            path, classes = _split(case.get("classname", ""), root)
            times[path]["::".join([*classes, name])] += float(case.get("time", 0))
    return times


def _split(dotted: str, root: Path) -> tuple[str, list[str]]:
    """Returns the file of a dotted name of a module or class, and the classes in it."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end]).with_suffix(".py")
        if (root / path).is_file():
            return path.as_posix(), parts[end:]
    raise ValueError(
        f"no file of {root} is the module of {dotted}: were the times measured on another tree?"
    )


def choose(times: Times, budget_s: float) -> list[tuple[str, str]]:
    """Returns the (file, function) pairs to leave out, so that the others take `budget_s`."""
    cheapest = {file: min(tests, key=lambda t: tests[t]) for file, tests in times.items()}
    kept = {(file, test) for file, test in cheapest.items() if times[file][test] < KEEP_S}
    left = sum(sum(tests.values()) for tests in times.values())
    slow: list[tuple[str, str]] = []
    dearest = sorted(((s, f, t) for f, tests in times.items() for t, s in tests.items()))[::-1]
    for seconds, file, test in dearest:
        if left <= budget_s:
            break
        if (file, test) not in kept:
            slow.append((file, test))
            left -= seconds
    return slow


def rows_of(slow: Sequence[tuple[str, str]], times: Times) -> list[tuple[float, str]]:
    """Returns seconds and name of each row; a file without remaining functions is one row."""
    tests: dict[str, list[str]] = defaultdict(list)
    for file, test in slow:
        tests[file].append(test)
    rows: list[tuple[float, str]] = []
    for file, some in sorted(tests.items()):
        if len(some) == len(times[file]):
            rows.append((sum(times[file].values()), file))
        else:
            rows += [(times[file][test], f"{file}::{test}") for test in sorted(some)]
    return rows


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes the file, and prints the remaining time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("xml", nargs="+", type=Path, help="files that --junitxml has written")
    parser.add_argument("--seconds", type=float, default=90.0, help="what the others may take")
    given = parser.parse_args(arguments)
    times = read_times(given.xml, root)
    rows = rows_of(choose(times, given.seconds), times)
    (root / SLOW).write_text(HEAD + "".join(f"{s:7.1f}  {name}\n" for s, name in rows))
    whole = sum(sum(tests.values()) for tests in times.values())
    print(
        f"{len(rows)} rows; {whole - sum(s for s, _ in rows):.0f} s of {whole:.0f} s are not slow"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
