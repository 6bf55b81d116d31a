"""The tables of docs/reference/options.md are those of the code."""

from __future__ import annotations

import pytest

from fuser.support import options
from scripts import document_ops


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    text = document_ops.OPTIONS.read_text()
    assert document_ops.options_page() == text, "python scripts/document_ops.py"


def test_another_effect_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = {**options.EFFECTS["DUMP"], "none_such": "prints nothing"}
    monkeypatch.setattr(options, "EFFECTS", {**options.EFFECTS, "DUMP": dumps})
    page = document_ops.options_page()
    assert "| `none_such` | prints nothing |" in page
    assert page != document_ops.OPTIONS.read_text()
