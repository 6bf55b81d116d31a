"""docs/reference/errors.md lists every error type once, with its Python base classes."""

from __future__ import annotations

import builtins
import re

import torch

import fuser
from fuser.support import errors
from tests.support.jobs import ROOT

_PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
_TYPES = {
    name: cls
    for name, cls in {**vars(errors), "OutOfMemoryError": fuser.OutOfMemoryError}.items()
    if isinstance(cls, type) and issubclass(cls, errors.FuserError)
}
# The error that all are.
_BASE = "FuserError"


def _rows(page: str) -> list[list[str]]:
    return [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", page, re.MULTILINE)]


def test_every_error_type_has_one_row() -> None:
    rows = [re.match(r"`(\w+)`", row[0]) for row in _rows(_PAGE) if len(row) == 3]
    assert sorted(m[1] for m in rows if m) == sorted(set(_TYPES) - {_BASE})


def test_names_that_fuser_lacks_are_marked() -> None:
    marked = set(re.findall(r"`(\w+)` ‡", _PAGE))
    assert marked == set(_TYPES) - set(fuser.__all__)


def test_python_errors_are_the_bases_of_the_types() -> None:
    section = _PAGE.partition("## Types that are also Python's")[2].partition("\n## ")[0]
    said = {
        (name, base.strip("`"))
        for base, *names in _rows(section)
        for name in re.findall(r"`(\w+)`", names[0])
    }
    python = {c for c in vars(builtins).values() if isinstance(c, type)} - {RuntimeError}
    python |= {torch.OutOfMemoryError}
    names = {torch.OutOfMemoryError: "torch.OutOfMemoryError"}
    true = {
        (name, names.get(base, base.__name__))
        for name, cls in _TYPES.items()
        for base in cls.__bases__
        if base in python
    }
    inherited = {("UnknownOpError", "AttributeError")}
    assert said == true | inherited
