"""Prints a host program as text. The text has one of three forms:

- short: for reading, without memory layouts, aliases and kernels;
- full: the complete program, which can be parsed and run again;
- names only: one line per op, in which a tensor is only a number.

`hostir.ir.parser` reads the short and the full form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.op import INDENT, Op, op_text, region_text, value_text, walk
from fuser.ir.text.printer import fusion_text, lines_text, sections_text
from hostir.ir.ops import KernelGroup

# The first line of the full text. It marks a complete program that has no sections.
FULL_FORM = "// host program, full form: this text runs"
SHORT_FORM = (
    "this is the short form of a host program, which is for reading: memory layouts, aliases and "
    "kernels are not in it. The full form is needed: FUSER_DUMP=host_ir writes it, "
    "HostIrContainer.full_text() returns it"
)
# The words for each form in the heading of a dump.
NOTES = {"short": "short form", "names": "names only"}

# `T4_l_float[iS0{i0}, ideviceIdx.x7{2}] (DeviceMesh{0 1})`: the number, and the rest.
_TYPE = re.compile(r"\b(T\d+)_\w+\[[^\[\]]*\](?: \(DeviceMesh\{[^()]*\}\))?")


class Printable(Protocol):
    """The attributes of a host program that appear in its text. `HostIrContainer` has all of these
    attributes."""

    values: Fusion
    ops: tuple[Op, ...]
    groups: Mapping[int, KernelGroup]
    units: Mapping[int, Fusion]

    def tensors(self) -> tuple[TensorView, ...]:
        """Returns every tensor of the program once: first the inputs, then the tensors of the ops
        in program order, then the outputs."""
        ...


def dumped(program: Printable, form: str) -> str:
    """Returns the text of a program that is printed because the environment variable `FUSER_DUMP`
    asks for it.

    `form` is "short" or "names". Any other word selects the full form.
    """
    if form == "names":
        return names_text(program)
    return short_text(program) if form == "short" else full_text(program, first_line="")


def short_text(program: Printable) -> str:
    """Returns the short form of a program's text, for reading: the inputs, outputs, ops and host
    units (separately compiled fusions).
    """
    values = program.values
    ins, outs = (", ".join(map(value_text, vs)) for vs in (values.inputs, values.outputs))
    units = "".join(f"\n\n  {unit_line(n, f)}" for n, f in program.units.items())
    head = f"\n%HostIrContainer {{ ({ins}) -> ({outs}) :"
    return f"{head}{region_text(program.ops)}{units}\n}} // %HostIrContainer\n\n"


def full_text(program: Printable, *, first_line: str) -> str:
    """Returns the full form of a program's text, which `hostir.parse` reads back. `first_line` is
    put before the program: usually a comment that names the full form."""
    return first_line + _sections(program, lines_text(program.ops))


def meaning_text(program: Printable) -> str:
    """Returns the full form of a program's text without the user's source lines. Ranks may have
    different source lines and still run the same program.

    The ranks compare these texts to check that all of them run the same program.
    """
    return FULL_FORM + _sections(program, "")


def _sections(program: Printable, lines: str) -> str:
    parts = [
        short_text(program),
        sections_text(program.values, program.tensors(), tuple(walk(program.ops))),
        lines,
    ]
    parts += [
        f"\nKernel group {g.number} ({g.scheduler}) : \n{fusion_text(g.fusion)}"
        for g in program.groups.values()
    ]
    parts += [f"\nHost unit {n} : \n{fusion_text(f)}" for n, f in program.units.items()]
    return "".join(parts)


def unit_line(number: int, unit: Fusion) -> str:
    """Returns the line that describes a host unit in the text of a program. A host unit is a fusion
    that is compiled separately, and `number` identifies the host unit."""
    ins, outs = value_text(tuple(unit.inputs)), value_text(tuple(unit.outputs))
    return f"HostUnit{number}: Inputs={ins} -> Outputs={outs}"


def names_text(program: Printable) -> str:
    """Returns the program as text for reading: one line per op, in which a tensor is only a number,
    such as `T3`."""
    text = short_text(program)
    first, *_ = text.lstrip("\n").splitlines()
    *_, last = text.rstrip("\n").splitlines()
    lines = [first, *_op_lines(program.ops, INDENT), last]
    return "".join(_TYPE.sub(r"\1", line) + "\n" for line in lines)


def _op_lines(ops: Sequence[Op], indent: str) -> Iterator[str]:
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
            yield from _op_lines(region, indent + INDENT)
