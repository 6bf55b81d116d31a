"""The forms in which a host program is dumped and printed."""

from __future__ import annotations

from hostir.ir.program import HostIrContainer

# What a dump's heading says of its form.
NOTES = {"short": "short form", "names": "names only"}


def dumped(program: HostIrContainer, form: str) -> str:
    """Return the text of a dump: `form` is "short", "names", or anything else for the full one."""
    if form == "names":
        return program.names_text()
    return str(program) if form == "short" else program.full_text(first_line="")
