"""Two programs compared by structure: aligned ops, and the first field in which a pair differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, TypeVar, cast

from fuser.ir.canonical_form import Key, op_key
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.op import Op, op_text, value_text
from fuser.ir.text.printer import domain_text
from hostir.ir.program import HostIrContainer, KernelGroup


def differences(a: HostIrContainer, b: HostIrContainer) -> list[str]:
    """Return one line per difference, `what: in a | in b`; [] for equal programs.

    Values are compared by number, as in `equal`; where the user wrote an op does not count. What a
    short form does not say is not compared.
    """
    is_short = a.is_short or b.is_short
    found = [
        *_values(a.values, b.values, is_short=is_short),
        *_tensors(a.tensors(), b.tensors(), is_short=is_short),
        *_ops(a.ops, b.ops),
    ]
    if is_short:
        return found
    found += _by_number("kernel group", a.groups, b.groups, _groups)
    found += _by_number("host unit", a.units, b.units, _fusions)
    return found


T = TypeVar("T")


def _by_number(
    what: str, a: Mapping[int, T], b: Mapping[int, T], compare: Callable[[T, T], Iterator[str]]
) -> Iterator[str]:
    for number in sorted({*a, *b}):
        if number in a and number in b:
            yield from (f"{what} {number}, {line}" for line in compare(a[number], b[number]))
        else:
            yield f"{what} {number}: only in {'a' if number in a else 'b'}"


def _groups(a: KernelGroup, b: KernelGroup) -> Iterator[str]:
    yield from _two("scheduler", a.scheduler, b.scheduler)
    yield from _fusions(a.fusion, b.fusion)


def _fusions(a: Fusion, b: Fusion) -> Iterator[str]:
    yield from _values(a, b, is_short=False)
    yield from _tensors(a.tensors(), b.tensors(), is_short=False)
    yield from _ops(a.exprs, b.exprs)


def _two(what: str, a: object, b: object) -> Iterator[str]:
    if (mine := _text(a)) != (theirs := _text(b)):
        yield f"{what}: {mine} | {theirs}"


def _text(value: object) -> str:
    """Return a value in few words: tensors without their axes, ops by name."""
    match value:
        case TensorView():
            return value.label
        case Op():
            return value.name
        case list() | tuple():
            return ", ".join(map(_text, cast("Sequence[object]", value))) or "none"
        case None:
            return "none"
        case _:
            return value_text(value)


# ------------------------------------------------------------------ values
def _values(a: Fusion, b: Fusion, *, is_short: bool) -> Iterator[str]:
    yield from _two("inputs", a.inputs, b.inputs)
    yield from _two("outputs", a.outputs, b.outputs)
    if is_short:
        return
    aliases, others = (
        [f"T{x.out.number} -> T{x.into.number}{' hidden' * x.hidden}" for x in f.aliases]
        for f in (a, b)
    )
    yield from _two("aliases", aliases, others)
    yield from _two(
        "equal extents", *([f"{s} = {x}" for s, x in f.equal_extents()] for f in (a, b))
    )


def _tensors(a: Sequence[TensorView], b: Sequence[TensorView], *, is_short: bool) -> Iterator[str]:
    """Compare the domain sections of tensors with one number, line by line."""
    mine, theirs = ({tv.number: tv for tv in tensors} for tensors in (a, b))
    for number in sorted({*mine, *theirs}):
        if number not in mine or number not in theirs:
            side, tv = ("a", mine[number]) if number in mine else ("b", theirs[number])
            yield f"T{number}: only in {side}: {tv}"
            continue
        lines, others = (domain_text(side[number]).splitlines() for side in (mine, theirs))
        pairs = zip(lines[: 1 if is_short else None], others, strict=False)
        differing = next(((x, y) for x, y in pairs if x != y), None)
        if differing is None and len(lines) != len(others) and not is_short:
            differing = lines[-1], others[-1]
        if differing is not None:
            yield from _two(f"T{number}", *(line.strip() for line in differing))


# ------------------------------------------------------------------ ops
def _ops(a: Sequence[Op], b: Sequence[Op], where: str = "") -> Iterator[str]:
    """Align two lists of ops; `where` is the place of the region that they are. The first op is
    number 1, as in errors about ranks with different programs."""
    mine, theirs = list(map(op_key, a)), list(map(op_key, b))
    for kind, i, i_end, j, j_end in SequenceMatcher(None, mine, theirs, False).get_opcodes():
        if kind != "equal":
            yield from _block(a, (i, i_end), b, (j, j_end), where)


def _block(
    a: Sequence[Op], at: tuple[int, int], b: Sequence[Op], there: tuple[int, int], where: str
) -> Iterator[str]:
    """Compare two runs of ops of which none is equal: those of one class, in order, are pairs."""
    kinds = (
        [type(op).__name__ for op in a[slice(*at)]],
        [type(op).__name__ for op in b[slice(*there)]],
    )
    for kind, i, i_end, j, j_end in SequenceMatcher(None, *kinds, False).get_opcodes():
        if kind == "equal":
            for m, n in zip(range(i, i_end), range(j, j_end), strict=True):
                place = f"{where}{at[0] + m + 1}"
                yield from _pair(a[at[0] + m], b[there[0] + n], place)
            continue
        for side, ops, start, stop in (
            ("a", a, at[0] + i, at[0] + i_end),
            ("b", b, there[0] + j, there[0] + j_end),
        ):
            for k in range(start, stop):
                yield f"op {where}{k + 1} only in {side}: {' '.join(op_text(ops[k]).split())}"


def _pair(a: Op, b: Op, place: str) -> Iterator[str]:
    """Yield the first field in which two ops of one class differ, and what differs in regions."""
    regions = a.fields_of("region")
    mine, theirs = _fields(op_key(a)), _fields(op_key(b))
    for name in (n for n in mine if mine[n] != theirs[n] and n not in regions):
        yield from _two(f"op {place}, {a.name}: {name}", getattr(a, name), getattr(b, name))
        break
    for name in regions:
        yield from _ops(getattr(a, name), getattr(b, name), f"{place}.{name}.")


def _fields(key: Key) -> dict[str, Any]:
    pairs: Any = key[1:]
    return dict(pairs)
