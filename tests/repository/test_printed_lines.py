"""The comparison of shown and printed text, which the tests of pages use."""

from __future__ import annotations

import pytest

from tests.support.printed_lines import missing_lines

PRINTED = "first  line\nsecond line of three words\n  third: 0.25 ms of 8\n"


@pytest.mark.parametrize(
    "shown",
    [
        "first line",
        "third: .. ms of 8\nfirst line",
        "second line ..",
        "third: 0.25 ms of 8 ..",
        "first line second\nline of three words",
    ],
)
def test_lines_that_were_printed(shown: str) -> None:
    assert missing_lines(shown, PRINTED) == []


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("first", ["first"]),
        ("first line\n\nline of three words ..", ["line of three words .."]),
        ("third: .. us of 8", ["third: .. us of 8"]),
        ("third: 0.2. ms of 8", ["third: 0.2. ms of 8"]),
    ],
)
def test_lines_that_were_not_printed(shown: str, missing: list[str]) -> None:
    assert missing_lines(shown, PRINTED) == missing
