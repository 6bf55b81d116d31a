"""Printing of nodes, tensors and fusions in nvFuser's notation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from textwrap import indent
from typing import TYPE_CHECKING

from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.domain import (
    MergeTransform,
    Resize,
    Shift,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    Transform,
)
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.scalar import Scalar
from fuser.ir.types import ParallelType

if TYPE_CHECKING:
    from fuser.ir.fusion import Fusion
    from fuser.ir.tensor import TensorView

# One level of a region.
INDENT = "  "
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


def value_text(value: object) -> str:
    """Return the print form of a field value: tensors, scalars, tuples `{a, b}`, numbers, names."""
    if isinstance(value, tuple):
        return "{" + ", ".join(value_text(v) for v in value) + "}"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, DataType):
        return dtype_text(value)
    if isinstance(value, ParallelType):
        return value.text
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Scalar):
        return sc.scalar_text(value)
    return str(value)


def fill_template(op: Op, template: str) -> str:
    """Replace `{field}` and `{field.method}` placeholders by the op's values; regions are indented
    on lines of their own."""
    heads, rows = op.region_heads(), op.rows()

    def one(match: re.Match[str]) -> str:
        name, _, method = match[1].partition(".")
        value = getattr(op, name)
        if name in heads:
            return region_text(value, heads[name])
        if name in rows:
            return _rows_text(value, rows[name])
        return value_text(getattr(value, method)() if method else value)

    return _PLACEHOLDER.sub(one, template)


def _rows_text(values: Sequence[object], length: int) -> str:
    rows = (tuple(values[k : k + length]) for k in range(0, len(values), length))
    return " ".join(["{", *map(value_text, rows), "}"])


def op_text(op: Op) -> str:
    """Return the text of one op, without indentation or a final newline."""
    template = getattr(op, "template", None)
    return fill_template(op, template() if template is not None else op.TEXT)


def region_text(ops: Sequence[Op], head: str = "") -> str:
    """Return the ops of a region, each on a new line and indented, after the line `head`."""
    lines = [indent(op_text(op), INDENT) for op in ops]
    return "".join("\n" + line for line in ([head, *lines] if head and ops else lines))


def tensor_text(tv: TensorView) -> str:
    """Return `T0_g_float[iS0{i0}, iS1{i1}] (DeviceMesh{0 1})`."""
    suffix = f" ca_pos( {tv.compute_at} )" if tv.compute_at else ""
    mesh = f" ({tv.mesh})" if tv.mesh is not None else ""
    return f"{tv.label}{tv.domain}{suffix}{mesh}"


def fusion_math(fusion: Fusion, *, used_only: bool = True) -> str:
    """Return nvFuser's `print_math` text.

    `used_only` leaves out ops that reach no output, and writes each op before its first user, from
    the first output on; else all ops stand in the order in which they were written.
    """
    lines = ["Inputs:"]
    lines += [f"  {value_text(v)}" for v in fusion.inputs]
    lines += ["Outputs:"]
    lines += [f"  {value_text(v)}" for v in fusion.outputs]
    lines += ["", "%kernel_math {"]
    lines += [op_text(op) for op in (_by_use(fusion) if used_only else fusion.exprs)]
    return "\n".join(lines) + "\n} // %kernel_math \n\n"


def _by_use(fusion: Fusion) -> list[Op]:
    """Return the ops that reach an output, depth first from the outputs, operands before users."""
    found: dict[Op, None] = {}
    stack: list[tuple[object, bool]] = [(out, False) for out in reversed(fusion.outputs)]
    while stack:
        value, is_ready = stack.pop()
        op = fusion.definition(value)  # pyright: ignore[reportArgumentType]
        if op is None or op in found:
            continue
        if is_ready:
            found[op] = None
        else:
            stack.append((value, True))
            stack += ((v, False) for v in reversed(op.inputs))
    return list(found)


def transform_text(t: Transform, domain: TensorDomain) -> str:
    """Return `Split: iS0{i0} by factor 4 -> iS2{( ceilDiv(i0, 4) )}, iS3{4}`."""
    ins, outs = domain.states(t.inputs), ", ".join(map(str, domain.states(t.outputs)))
    match t:
        case SplitTransform():
            title = "Split" if t.inner_split else "Outer split"
            return f"{title}: {ins[0]} by factor {t.factor} -> {outs}"
        case MergeTransform():
            return f"Merge: {ins[0]} and {ins[1]} -> {outs}"
        case Resize():
            return f"Resize: {ins[0]} by {t.left} and {t.right} -> {outs}"
        case Swizzle1D():
            return f"{outs} = Swizzle1D({ins[0]}, parallelType={t.ptype.text})"
        case Shift():
            return f"Shift: {ins[1]} by {ins[0]} to words of {t.width} -> {outs}"


def domain_text(tv: TensorView, indent: str = "") -> str:
    """Return the domain section of one tensor: root, logical, allocation, contiguity, transforms,
    loop."""
    domain: TensorDomain = tv.domain
    lines = [f"{indent}{tensor_text(tv)}"]

    def axes(title: str, group: tuple[object, ...]) -> str:
        return f"{indent} {title} domain: ({', '.join(map(str, group))})"

    if domain.root:
        lines.append(axes("root", domain.root))
    lines.append(axes("logical", domain.logical))
    if domain.allocation:
        lines.append(axes("allocation", domain.allocation))
    flags = " ".join("n" if c is None else "t" if c else "f" for c in domain.contiguity)
    lines.append(f"{indent} contiguity: {flags}".rstrip())
    lines += [f"{indent}  {transform_text(t, domain)}" for t in domain.transforms]
    lines.append(axes("loop", domain.loop))
    if tv.is_cpu_scalar:
        lines.append(f"{indent} cpu scalar")
    if tv.mesh_is_user_set:
        lines.append(f"{indent} mesh set by user")
    return "\n".join(lines)


def scheduled_text(
    inputs: Iterable[object],
    outputs: Iterable[object],
    ops: Iterable[Op],
    transformed: Iterable[TensorView] = (),
) -> str:
    """Return nvFuser's text of a scheduled fusion, and the domain sections of some tensors."""
    lines = ["Inputs:", *(f"  {value_text(v)}" for v in inputs)]
    lines += ["Outputs:", *(f"  {value_text(v)}" for v in outputs)]
    lines += ["", "%kernel {", *map(op_text, ops)]
    sections = [domain_text(tv) for tv in transformed]
    lines += ["", "TransformPrinter : ", *sections] if sections else []
    return "\n".join([*lines, "} // %kernel", ""])


def fusion_text(fusion: Fusion) -> str:
    """Return the full form, which `parse_fusion` reads back: math, then the sections."""
    math = fusion_math(fusion, used_only=False).rstrip("\n")
    return f"{math}\n{sections_text(fusion, fusion.tensors(), fusion.exprs)}"


def sections_text(fusion: Fusion, tensors: Sequence[TensorView], ops: Iterable[Op]) -> str:
    """Return what a program's math does not say: aliases, equal extents, the dtypes of symbols that
    their names do not tell, the domain section of every tensor, and where shardings came from."""
    parts = {
        "Aliases": [
            f"  T{a.out.number} -> T{a.into.number}" + (" hidden" if a.hidden else "")
            for a in fusion.aliases
        ],
        "Equal extents": [f"  {symbol} = {x}" for symbol, x in fusion.equal_extents()],
        "Symbols": [
            f"  {s.name} : {dtype_text(s.dtype)}"
            for s in program_symbols(fusion, tensors, ops)
            if default_dtype(s.name) is not s.dtype
        ],
        "TransformPrinter": [domain_text(tv, "  ") for tv in tensors],
        "Provenance": [f"  {origin}" for origin in fusion.origins],
    }
    return "".join(
        f"{title} : \n" + "\n".join(rows) + "\n" for title, rows in parts.items() if rows
    )


def line_key(op: Op) -> str:
    """Return what the section of the users' lines calls an op: by its first result and its name."""
    outputs = op.outputs
    return f"T{outputs[0].number} {op.name}" if outputs else op.name


def lines_text(ops: Iterable[Op]) -> str:
    """Return the section that tells where the user wrote the ops and those of their regions, ""
    where nothing is known; what has the line of the first op of its name needs no row."""
    rows: dict[str, str] = {}

    def add(op: Op, key: str, number: int) -> Op:
        where = " ".join(op.where.split())
        if where and where != rows.get(key):
            rows[_nth(key, number) if key in rows else key] = where
        return op

    _by_key(ops, add)
    text = "".join(f"  {key} : {where}\n" for key, where in rows.items())
    return f"User lines : \n{text}" if text else ""


def with_lines(ops: Iterable[Op], rows: Mapping[str, str]) -> tuple[Op, ...]:
    """Return the ops, and those of their regions, with the lines that such a section tells."""

    def place(op: Op, key: str, number: int) -> Op:
        where = rows.get(_nth(key, number), rows.get(key, ""))
        return op.replace(where=where) if where else op

    return _by_key(ops, place) if rows else tuple(ops)


def _nth(key: str, number: int) -> str:
    return f"{key} ({number})"


def _by_key(ops: Iterable[Op], change: Callable[[Op, str, int], Op]) -> tuple[Op, ...]:
    """Return what `change` makes of each op, given its key and how many of it there were so far; an
    op comes before those of its regions."""
    counts: Counter[str] = Counter()

    def one(op: Op) -> Op:
        key = line_key(op)
        counts[key] += 1
        op = change(op, key, counts[key])
        was = {name: getattr(op, name) for name in op.fields_of("region")}
        regions = {name: tuple(map(one, region)) for name, region in was.items()}
        return op if regions == was else op.replace(**regions)

    return tuple(map(one, ops))


_PREFIX_DTYPE = {
    "b": DataType.Bool,
    "i": DataType.Index,
    "f": DataType.Float,
    "d": DataType.Double,
}


def default_dtype(name: str) -> DataType:
    """Return the dtype that a symbol's name tells: Index of `i3`, Double of `d2`, Float, Bool."""
    return _PREFIX_DTYPE.get(name[0], DataType.Index) if name[1:].isdigit() else DataType.Index


def program_symbols(
    fusion: Fusion, tensors: Iterable[TensorView], ops: Iterable[Op]
) -> tuple[sc.Symbol, ...]:
    """Return every symbol of inputs, domains, ops and extent classes, in order of appearance."""
    found: dict[sc.Symbol, None] = {}

    def add(value: object) -> None:
        if isinstance(value, Scalar):
            found.update(dict.fromkeys(sc.symbols(value)))

    for value in fusion.inputs:
        add(value)
    for tv in tensors:
        for axis in tv.domain.axes.values():
            add(axis.extent)
            add(axis.expanded)
        for t in tv.domain.transforms:
            for value in t.scalars:
                add(value)
    for op in ops:
        for value in (*op.inputs, *op.scalars):
            add(value)
    for symbol, x in fusion.equal_extents():
        add(symbol)
        add(x)
    return tuple(found)
