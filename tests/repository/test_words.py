"""Docstrings, comments and pages name their subject: no sentence begins with What, Whose, .."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "benchmarks",
    "examples",
    "fuser",
    "hostir",
    "multidevice",
    "scripts",
    "tests",
    "tools",
)
FILES = [p.relative_to(ROOT) for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py"))]
_SUBJECT = re.compile(r"(What|Whose|Of which|Of what|Whatever|Whoever|Whichever)\b")


def _sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a docstring without its blocks of code."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|] ", text):
        yield from re.split(r"(?<=[.!?;:])\s+", " ".join(paragraph.split()))


def unnamed_subjects(source: str) -> list[str]:
    """Returns the sentences of docstrings and comments that begin with a relative pronoun."""
    tree = ast.parse(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (n for n in ast.walk(tree) if isinstance(n, kinds))
    sentences = [s for n in documented for s in _sentences(ast.get_docstring(n) or "")]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    sentences += [t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT]
    return [s for s in sentences if _SUBJECT.match(s)]


def test_sentences_without_a_subject_are_found() -> None:
    source = '''"""Whose turn it is."""

def f() -> None:
    """Returns a number. What is read, is
    bound.

    A line. Of which two are left.
    """
    x = 1  # What is left.
    y = "What is a text is no comment."
'''
    assert unnamed_subjects(source) == [
        "Whose turn it is.",
        "What is read, is bound.",
        "Of which two are left.",
        "What is left.",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_name_their_subject(folder: str) -> None:
    files = [f for f in FILES if f.parts[0] == folder]
    assert files
    found = {str(f): unnamed_subjects((ROOT / f).read_text()) for f in files}
    assert not {name: lines for name, lines in found.items() if lines}
