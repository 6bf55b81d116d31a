"""Finding the text of a host program in a file: a program, a dump, or what a job printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fuser.errors import ParseError
from hostir.container import HostIrContainer
from hostir.parse import parse

_DUMP = re.compile(
    r"^// host_ir(?:_lowering)? of .*?^// end of host_ir(?:_lowering)? of [^\n]*$",
    re.MULTILINE | re.DOTALL,
)


def dumped_programs(text: str) -> list[str]:
    """Return the host programs among the dumps in a text, each with heading and last line."""
    return _DUMP.findall(text)


def read_program(path: str, *, number: int | None = None) -> HostIrContainer:
    """Return the program that a file holds; `-` is stdin.

    Around a dump, other lines may stand (what the job printed). `number` chooses among several
    dumped programs, counted from 0.

    Raises:
        ParseError: the text is no program, or the choice among several is open.
    """
    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    dumped = dumped_programs(text)
    if number is not None and not 0 <= number < len(dumped):
        raise ParseError(
            f"{path} has {len(dumped)} dumped host programs, and none of number {number}"
        )
    if number is None and len(set(dumped)) > 1:
        found = (f"\n  --program {i}: {d.splitlines()[0]}" for i, d in enumerate(dumped))
        raise ParseError(f"{path} has several host programs; choose one:{''.join(found)}")
    return parse(dumped[number or 0] if dumped else text)
