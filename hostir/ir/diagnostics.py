"""Defines the findings of the checks that unroll a program. A finding names ops, with their source
lines and loop indices."""

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
    """An op, with one value for the index of each loop around the op."""

    op: Op
    indices: Indices = ()

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns the place and the text of the op: `line 9 (user.py:3) at i = 2: T3 = Set( T2 )`.

        `lines` maps the `id` of each op to the op's line number.
        """
        text = " ".join(op_text(self.op).split())
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        return f"{self.place(lines)}: {text}"

    def place(self, lines: Mapping[int, int]) -> str:
        """Returns the place of the op: `line 9 (user.py:3) at i = 2`.

        `lines` maps the `id` of each op to the op's line number.
        """
        steps = ", ".join(f"{s} = {v}" for s, v in self.indices)
        return f"{line_text(self.op, lines)}{' at ' + steps if steps else ''}"


@dataclass(frozen=True)
class Finding:
    """A fault of a program: the kind of fault, the ops concerned, and the change that would repair
    the program.

    `what` describes the fault and `fix` the change. Both may contain `{0}`, `{1}`, ...: these are
    replaced by the line numbers of the sites. `sites` pairs each op with a note, which may be
    empty.
    """

    kind: str
    what: str
    sites: tuple[tuple[Site, str], ...]
    fix: str = ""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the sites, in order."""
        return tuple(site.op for site, _ in self.sites)

    @property
    def remedy(self) -> tuple[str, ...]:
        """The wait that is missing, without a place in the program; () if no wait would repair the
        fault.

        Findings with equal remedies can be repaired by one wait.
        """
        who, before, rest = self.fix.partition(" before ")
        return (who, rest.partition(": ")[2]) if before and "must wait for" in who else ()

    def short(self, lines: Mapping[int, int]) -> str:
        """Returns the finding in one line. `lines` maps the `id` of each op to the op's line
        number."""
        numbers = dict.fromkeys(str(lines.get(id(site.op), 0)) for site, _ in self.sites)
        return f"{self.kind}: {self.what} (line {', '.join(numbers)})"

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns the finding in full: fault, ops and change. `lines` maps the `id` of each op to
        the op's line number."""
        numbers = [f"line {lines.get(id(site.op), 0)}" for site, _ in self.sites]
        parts = [f"{self.kind}: {self.what}"]
        parts += [
            f"  {site.text(lines)}" + (f"\n    {note}" if note else "") for site, note in self.sites
        ]
        if self.fix:
            parts.append("  " + self.fix.format(*numbers))
        return "\n".join(parts)


def line_text(op: Op, lines: Mapping[int, int]) -> str:
    """Returns the line number of an op and the user's source line: `line 9 (user.py:3)`.

    `lines` maps the `id` of each op to the op's line number.
    """
    return f"line {lines.get(id(op), 0)}{f' ({op.where})' if op.where else ''}"


def line_numbers(program: HostIrContainer) -> dict[int, int]:
    """Maps the `id` of each op to the number of the op's line in `str(program)`. Line numbers begin
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
    """Returns the text of the findings. Only the first `MAX_SHOWN` are shown, and the others are
    counted.

    If one wait would repair several findings, only the first of these findings has its full text.
    """
    alike: dict[object, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(finding.remedy or id(finding), []).append(finding)
    lines = line_numbers(program)
    parts: list[str] = []
    for first, *others in list(alike.values())[:MAX_SHOWN]:
        parts.append(first.text(lines))
        if others:
            parts.append("  for want of such a wait also:")
            parts += [f"    {f.short(lines)}" for f in others]
    if len(alike) > MAX_SHOWN:
        parts.append(f"and {len(alike) - MAX_SHOWN} more")
    return "\n".join(parts)


def listing(program: HostIrContainer, ops: Iterable[Op], *, within: range | None = None) -> str:
    """Returns the program with line numbers, and `->` at the first line of each of `ops`.

    `within` selects the line numbers to show. If `within` is None, a long program is shortened to
    the lines around the arrows.
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
    """Raises `VerifyError` with the text of the findings, if there are any.

    `what` is the beginning of the message.
    """
    found = list(findings)
    if found:
        ops = [op for finding in found for op in finding.ops]
        raise VerifyError(f"{what}:\n{report(program, found)}\n\n{listing(program, ops)}")
