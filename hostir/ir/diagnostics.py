"""Defines `Finding`, a fault that a check of a host program reports, and the text of such reports.

The checks unroll loops. Therefore a finding names ops with their source lines and with the values
of loop indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fuser.ir.op import Op, op_text
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.support.errors import VerifyError
from hostir.ir.program import HostIrContainer

MAX_SHOWN = 8
# The lines shown around each mark of a long listing, so that the message above it stays on the
# screen.
_LONGEST, _AROUND = 40, 4
_MAX_TEXT = 160

# The indices of the loops around an op, outermost first.
Indices = tuple[tuple[Symbol, Number], ...]


@dataclass(frozen=True)
class Site:
    """An op of a host program in one particular loop iteration: `indices` has the value of the
    index of each loop around the op."""

    op: Op
    indices: Indices = ()

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns the position and the text of the op: `line 9 (user.py:3) at i = 2: T3 = Set( T2
        )`.

        `lines` maps the `id` of each op to the op's line number. A long text is shortened.
        """
        text = " ".join(op_text(self.op).split())
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        return f"{self.place(lines)}: {text}"

    def place(self, lines: Mapping[int, int]) -> str:
        """Returns the position of the op, with loop indices: `line 9 (user.py:3) at i = 2`.

        `lines` maps the `id` of each op to the op's line number.
        """
        steps = ", ".join(f"{s} = {v}" for s, v in self.indices)
        return f"{line_text(self.op, lines)}{' at ' + steps if steps else ''}"


@dataclass(frozen=True)
class Finding:
    """A fault that a check found in a host program.

    - `kind` is the kind of fault in a word or two, such as `race`.
    - `what` describes the fault.
    - `sites` are the ops concerned, each with a note that may be empty.
    - `fix` is the change that would repair the program.

    In `fix`, the text `{0}` stands for the line number of the first site, `{1}` for that of the
    second.
    """

    kind: str
    what: str
    sites: tuple[tuple[Site, str], ...]
    fix: str = ""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops that this report of a fault names, in the order of its sites."""
        return tuple(site.op for site, _ in self.sites)

    @property
    def remedy(self) -> tuple[str, ...]:
        """The wait that is missing, as a pair such as ("Stream 1 must wait for Stream 0",
        "Synchronize(Stream 0) is missing"). () if no wait would repair the fault.

        The texts have no line numbers, because one wait repairs all findings that have equal
        remedies.
        """
        who, before, rest = self.fix.partition(" before ")
        return (who, rest.partition(": ")[2]) if before and "must wait for" in who else ()

    def short(self, lines: Mapping[int, int]) -> str:
        """Returns the report of this fault in one line: kind, description and line numbers. `lines`
        maps the `id` of each op to the op's line number.
        """
        numbers = dict.fromkeys(str(lines.get(id(site.op), 0)) for site, _ in self.sites)
        return f"{self.kind}: {self.what} (line {', '.join(numbers)})"

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns the full report of this fault: the description, one line per op, and the change
        that would repair the program. `lines` maps the `id` of each op to the op's line number.
        """
        numbers = [f"line {lines.get(id(site.op), 0)}" for site, _ in self.sites]
        parts = [f"{self.kind}: {self.what}"]
        parts += [
            f"  {site.text(lines)}" + (f"\n    {note}" if note else "") for site, note in self.sites
        ]
        if self.fix:
            parts.append("  " + self.fix.format(*numbers))
        return "\n".join(parts)


def line_text(op: Op, lines: Mapping[int, int]) -> str:
    """Returns the position of an op for a message: the line number in the program's text and the
    user's source line, as `line 9 (user.py:3)`.

    `lines` maps the `id` of each op to the op's line number.
    """
    return f"line {lines.get(id(op), 0)}{f' ({op.where})' if op.where else ''}"


def line_numbers(program: HostIrContainer) -> dict[int, int]:
    """Maps the `id` of each op to the line number of the op in `str(program)`. Line numbers begin
    at 1."""
    found: dict[int, int] = {}
    _number(program.ops, 3, found)
    return found


def _number(ops: Sequence[Op], line: int, found: dict[int, int]) -> int:
    for op in ops:
        found[id(op)] = line
        heads = op.region_heads()
        if not heads:
            line += op_text(op).count("\n") + 1
            continue
        line += 1
        for name, head in heads.items():
            region = getattr(op, name)
            line = _number(region, line + bool(head and region), found)
    return line


def report(program: HostIrContainer, findings: Iterable[Finding]) -> str:
    """Returns the text of the findings (faults) of a check, as part of an error message. `program`
    is the program that was checked.

    Several findings that the same wait would repair form a group: the first one is shown in full,
    each other one in one line. At most `MAX_SHOWN` groups are shown, and the number of further
    groups is stated.
    """
    alike: dict[object, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(finding.remedy or id(finding), []).append(finding)
    lines = line_numbers(program)
    parts: list[str] = []
    for first, *others in list(alike.values())[:MAX_SHOWN]:
        parts.append(first.text(lines))
        if others:
            parts.append("  the same wait would also repair:")
            parts += [f"    {f.short(lines)}" for f in others]
    if len(alike) > MAX_SHOWN:
        parts.append(f"and {len(alike) - MAX_SHOWN} more faults, which are not shown")
    return "\n".join(parts)


def listing(program: HostIrContainer, ops: Iterable[Op], *, within: range | None = None) -> str:
    """Returns the text of the program with line numbers. An arrow `->` marks the first line of each
    op in `ops`.

    `within` selects the line numbers to show. If `within` is None, a long program is shortened to
    the lines near the arrows.
    """
    found = line_numbers(program)
    marked = {found.get(id(op)) for op in ops}
    lines = list(enumerate(str(program).splitlines(), 1))
    width = len(str(len(lines)))
    is_cut = within is None and len(lines) > _LONGEST
    if is_cut:
        ends = [n for n in marked if n is not None] or [1, len(lines)]
        near = {n for end in ends for n in range(end - _AROUND, end + _AROUND + 1)}
    else:
        near = range(len(lines) + 1) if within is None else within
    shown = [(n, s) for n, s in lines if s and n in near]
    parts: list[str] = []
    for (before, _), (n, s) in zip([(0, ""), *shown], shown, strict=False):
        if is_cut and n > before + 1:
            parts.append("   ...")
        parts.append(f"{'->' if n in marked else '  '} {n:{width}} {s}")
    return "\n".join(parts)


def refuse(program: HostIrContainer, findings: Iterable[Finding], *, what: str) -> None:
    """Raises `VerifyError` with all findings of a check and a listing of the program that marks the
    ops concerned. Does nothing if there are no findings.

    `what` is the first line of the message, which says what is wrong in general.
    """
    found = list(findings)
    if found:
        ops = [op for finding in found for op in finding.ops]
        raise VerifyError(f"{what}:\n{report(program, found)}\n\n{listing(program, ops)}")
