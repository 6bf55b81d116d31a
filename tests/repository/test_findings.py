"""Each fault listed in tests/findings.md is guarded by a test, or by a benchmark with a
threshold.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r'mark\.finding\(\s*"([^"]+)"')


def _rows() -> dict[str, str]:
    """Returns the test or benchmark that guards each fault of `findings.md`, by the fault's
    id.
    """
    lines = (ROOT / "tests" / "findings.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: row[2] for row in cells[2:]}


def _marked() -> set[str]:
    """Returns the fault ids in the marks of tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in _MARK.findall(file.read_text())}


def test_findings_have_the_tests_that_their_rows_name() -> None:
    assert {name for name, held in _rows().items() if held.startswith("tests")} == _marked()


def test_findings_name_benchmarks_that_exist() -> None:
    for held in _rows().values():
        for script, command in re.findall(r"`(scripts/\w+\.py) (\w+)", held):
            assert f'"{command}"' in (ROOT / script).read_text(), f"{script} has no {command}"
