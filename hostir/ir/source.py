"""Finding the text of a host program in a file: a program, a dump, or what a job printed."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

from fuser.support.errors import InputError, ParseError
from hostir.ir.forms import NOTES
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer

_DUMP = re.compile(
    r"^// host_ir(?:_lowering)? of .*?^// end of host_ir(?:_lowering)? of [^\n]*$",
    re.MULTILINE | re.DOTALL,
)
_START = re.compile(r"^[ \t]*%HostIrContainer\b", re.MULTILINE)


def programs_in(text: str) -> list[tuple[int, str]]:
    """Return the host programs in a text, each with where it starts: the dumps, with heading and
    last line; or without any what follows each first line of a program, and the comment before it.
    """
    dumps = [(d.start(), d[0]) for d in _DUMP.finditer(text) if _START.search(d[0])]
    if dumps:
        return dumps
    starts = [_with_comment(text, found.start()) for found in _START.finditer(text)]
    return [(start, text[start:end]) for start, end in pairwise((*starts, len(text)))]


def _with_comment(text: str, start: int) -> int:
    """Return where the comment before a program starts, which names the form of its text."""
    while start > 0:
        line = text.rfind("\n", 0, start - 1) + 1
        if text[line:start].strip() and not text.startswith("//", line):
            break
        start = line
    return start


def read_program(path: str, *, number: int | None = None) -> HostIrContainer:
    """Return the program that a file holds; `-` is stdin.

    Around a dump, and before any program, other lines may stand (what the job printed). `number`
    chooses among several programs, counted from 0. Errors count the lines of the file.

    Raises:
        InputError: there is no such file, or it is no text.
        ParseError: the file has no program, or the choice among several is open.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is no {error.encoding.upper()}"
        raise InputError(f"cannot read {path}: it is no text, {where}") from None
    found = programs_in(text)
    if not found:
        raise ParseError(f"no host program in {path}: no line begins with %HostIrContainer")
    if number is not None and not 0 <= number < len(found):
        raise ParseError(f"{path} has {len(found)} host programs, and none of number {number}")
    if number is None and len({program for _, program in found}) > 1:
        heads = (f"\n  --program {i}: {p.splitlines()[0]}" for i, (_, p) in enumerate(found))
        raise ParseError(f"{path} has several host programs; choose one:{''.join(heads)}")
    start, program = found[number or 0]
    if NOTES["names"] in program.partition("%HostIrContainer")[0]:
        raise ParseError(
            f"{path} has a program with names only, for reading: FUSER_DUMP=host_ir writes all"
        )
    return parse("\n" * text.count("\n", 0, start) + program)
