"""The daily run leaves out the tests in `slow.txt`, which a script chooses by measured times."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import slow_tests

ROOT = slow_tests.ROOT
TIMES = {
    "tests/test_a.py": {"test_x": 50.0, "test_y": 0.1, "TestZ::test_z": 3.0},
    "tests/test_b.py": {"test_x": 20.0, "test_y": 1.0},
    "tests/test_c.py": {"test_x": 0.2},
}


def names() -> list[str]:
    lines = (ROOT / slow_tests.SLOW).read_text().splitlines()
    return [line.split()[1] for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("name", names())
def test_rows_name_tests_that_exist(name: str) -> None:
    path, *functions = name.split("::")
    found = ast.parse((ROOT / path).read_text()).body
    for part in functions:
        (node,) = [
            n for n in found if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part
        ]
        found = node.body


@pytest.mark.parametrize(
    ("budget_s", "slow"),
    [
        (100.0, []),
        (74.3, []),
        (74.2, ["tests/test_a.py::test_x"]),
        (5.0, ["tests/test_a.py::test_x", "tests/test_b.py::test_x"]),
        # The fastest function of each file stays if it is short, whatever the budget.
        (0.0, ["tests/test_a.py::TestZ::test_z", "tests/test_a.py::test_x", "tests/test_b.py"]),
    ],
)
def test_the_dearest_functions_leave(budget_s: float, slow: list[str]) -> None:
    rows = slow_tests.rows_of(slow_tests.choose(TIMES, budget_s), TIMES)
    assert [name for _, name in rows] == slow
    for seconds, name in rows:
        path, _, function = name.partition("::")
        assert seconds == (TIMES[path][function] if function else 21.0)


def test_times_of_cases_are_added_up_by_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests" / "ir").mkdir(parents=True)
    (tmp_path / "tests" / "ir" / "test_a.py").touch()
    cases = [
        ("tests.ir.test_a", "test_x[1-[2]]", 40),
        ("tests.ir.test_a", "test_x[3]", 30.5),
        ("tests.ir.test_a.TestZ", "test_z", 2),
        ("tests.ir.test_a", "test_y", 0.25),
    ]
    lines = [f'<testcase classname="{c}" name="{n}" time="{s}"/>' for c, n, s in cases]
    xml = tmp_path / "times.xml"
    xml.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    assert slow_tests.main([str(xml), "--seconds", "3"], tmp_path) == 0
    assert capsys.readouterr().out == "1 rows; 2 s of 73 s are not slow\n"
    written = (tmp_path / slow_tests.SLOW).read_text()
    assert written == slow_tests.HEAD + "   70.5  tests/ir/test_a.py::test_x\n"
    with pytest.raises(ValueError, match="is the module of tests"):
        slow_tests.main([str(xml)], tmp_path / "elsewhere")
