"""The findings of the checks that unroll a program: each names ops, with their lines and loop
steps."""

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
    """An op at one step of its loops."""

    op: Op
    indices: Indices = ()

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns `line 9 (user.py:3) at i = 2: T3 = Set( T2 )`."""
        text = " ".join(op_text(self.op).split())
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        return f"{self.place(lines)}: {text}"

    def place(self, lines: Mapping[int, int]) -> str:
        """Returns `line 9 (user.py:3) at i = 2`."""
        steps = ", ".join(f"{s} = {v}" for s, v in self.indices)
        return f"{line_text(self.op, lines)}{' at ' + steps if steps else ''}"


@dataclass(frozen=True)
class Finding:
    """A fault of a program: its kind, its ops, and the change that would repair it.

    `what` and `fix` may contain `{0}`, `{1}`, ...: these become the lines of the sites.
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
        """The missing wait, without its place in the program; () if the fault is another one."""
        who, before, rest = self.fix.partition(" before ")
        return (who, rest.partition(": ")[2]) if before and "must wait for" in who else ()

    def short(self, lines: Mapping[int, int]) -> str:
        """Returns the report in one line."""
        numbers = dict.fromkeys(str(lines.get(id(site.op), 0)) for site, _ in self.sites)
        return f"{self.kind}: {self.what} (line {', '.join(numbers)})"

    def text(self, lines: Mapping[int, int]) -> str:
        """Returns the report; `lines` has the line of each op, by identity."""
        numbers = [f"line {lines.get(id(site.op), 0)}" for site, _ in self.sites]
        parts = [f"{self.kind}: {self.what}"]
        parts += [
            f"  {site.text(lines)}" + (f"\n    {note}" if note else "") for site, note in self.sites
        ]
        if self.fix:
            parts.append("  " + self.fix.format(*numbers))
        return "\n".join(parts)


def line_text(op: Op, lines: Mapping[int, int]) -> str:
    """Returns `line 9 (user.py:3)`; `lines` has the line of each op, by identity."""
    return f"line {lines.get(id(op), 0)}{f' ({op.where})' if op.where else ''}"


def line_numbers(program: HostIrContainer) -> dict[int, int]:
    """Returns the line of each op in `str(program)`, by identity; the first line is number 1."""
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
    """Returns the text of the findings, at most the first ones of many.

    Of the findings that one wait would repair, only the first has its full text.
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
    """Returns the program with line numbers, and `->` at the first line of each of `ops`. `within`
    selects lines."""
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
    """Raises `VerifyError` with the text of the findings, if there are any. `what` begins the
    message."""
    found = list(findings)
    if found:
        ops = [op for finding in found for op in finding.ops]
        raise VerifyError(f"{what}:\n{report(program, found)}\n\n{listing(program, ops)}")
