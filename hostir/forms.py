"""The forms in which a host program is dumped and printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fuser.ir.core import Op
from fuser.ir.text import INDENT, op_text
from hostir.container import HostIrContainer

# What a dump's heading says of its form.
NOTES = {"short": "short form", "names": "names only"}

# `T4_l_float[iS0{i0}, ideviceIdx.x7{2}] (DeviceMesh{0 1})`: the number, and what follows it.
_TYPE = re.compile(r"\b(T\d+)_\w+\[[^\[\]]*\](?: \(DeviceMesh\{[^()]*\}\))?")


def names_text(program: HostIrContainer) -> str:
    """Return the program with tensors by number alone, an op per line; nothing reads it again.

    `T5_l_float[iS18{2}]\\n   = HirAliasSelect( T3_g_float[iS12{4}], .. )` -> `T5 = HirAliasSelect(
    T3, .. )`
    """
    first, *_ = str(program).lstrip("\n").splitlines()
    *_, last = str(program).rstrip("\n").splitlines()
    lines = [first, *_lines(program.ops, INDENT), last]
    return "".join(_TYPE.sub(r"\1", line) + "\n" for line in lines)


def _lines(ops: Sequence[Op], indent: str) -> Iterator[str]:
    for op in ops:
        heads = op.region_heads()
        if not heads:
            yield indent + " ".join(op_text(op).split()).replace("{ ", "{").replace(" }", "}")
            continue
        yield indent + op_text(op).partition("\n")[0]
        for name, head in heads.items():
            region: Sequence[Op] = getattr(op, name)
            if head and region:
                yield indent + head
            yield from _lines(region, indent + INDENT)


def dumped(program: HostIrContainer, form: str) -> str:
    """Return the text of a dump: `form` is "short", "names", or anything else for the full one."""
    if form == "names":
        return names_text(program)
    return str(program) if form == "short" else program.full_text(first_line="")
