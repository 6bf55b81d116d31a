"""CONTRIBUTING.md has a line for each file of `scripts` and `benchmarks`."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs import ROOT

_PAGE = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("folder", ["scripts", "benchmarks"])
def test_each_file_has_one_line(folder: str) -> None:
    begin = f"| `{folder}/` | |\n|---|---|\n"
    assert begin in _PAGE
    table = _PAGE.partition(begin)[2].partition("\n\n")[0]
    names = [re.match(r"\| `([\w.]+)` \| \S.* \|$", line) for line in table.splitlines()]
    assert all(names), "each line names a file and says what it does"
    files = [p.name for p in (ROOT / folder).iterdir() if p.suffix in (".py", ".sh")]
    assert sorted(name[1] for name in names if name) == sorted(files)
