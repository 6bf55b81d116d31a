"""Generates the full text of programs: ops, and after them sections about tensors and users' lines.

`fuser.ir.op` generates the text of single ops, and `fuser.ir.fusion` that of a fusion's ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from fuser.ir.domain.tensor_domain import (
    TensorDomain,
    transform_text,
)
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import Fusion, TensorView, fusion_math, tensor_text
from fuser.ir.op import Op, op_text, value_text
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar


def domain_text(tv: TensorView, indent: str = "") -> str:
    """Returns the text that describes all axes of one tensor, one line per kind of fact.

    The text has the axes that the op computes (root), that users see (logical), in memory order
    (allocation) and of the loops. It also has the contiguity flags, and the splits and merges that
    derive the axes.
    """
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
    """Returns the text of a scheduled fusion in nvFuser's format: inputs, outputs and ops.

    After the ops, the text describes all axes of the tensors in `transformed`.
    """
    lines = ["Inputs:", *(f"  {value_text(v)}" for v in inputs)]
    lines += ["Outputs:", *(f"  {value_text(v)}" for v in outputs)]
    lines += ["", "%kernel {", *map(op_text, ops)]
    sections = [domain_text(tv) for tv in transformed]
    lines += ["", "TransformPrinter : ", *sections] if sections else []
    return "\n".join([*lines, "} // %kernel", ""])


def fusion_text(fusion: Fusion) -> str:
    """Returns the full text of a fusion, from which `parse_fusion` creates an equal fusion.

    The ops come first, as in `print_math`, then the sections of `sections_text`.
    """
    math = fusion_math(fusion, used_only=False).rstrip("\n")
    return f"{math}\n{sections_text(fusion, fusion.tensors(), fusion.exprs)}"


def sections_text(fusion: Fusion, tensors: Sequence[TensorView], ops: Iterable[Op]) -> str:
    """Returns the sections after the ops of a program's text, with all that the ops do not show.

    The sections have updates of inputs, equal extents, all axes of every tensor, and the reasons of
    shardings. They also have the dtypes of those symbols whose names do not imply the dtype.
    """
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
    """Returns the key by which a text assigns a user's source line to an op, such as `T3 add`.

    The key is the name of the op's first result, and the name of the op.
    """
    outputs = op.outputs
    return f"T{outputs[0].number} {op.name}" if outputs else op.name


def lines_text(ops: Iterable[Op]) -> str:
    """Returns the section of a program's text with the user's source line of each op, or "".

    Nested ops, such as the body of a loop, are included. If several ops have the same key
    (`line_key`), an op is listed only if its line differs from that of the first of them.
    """
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
    """Returns the ops with the user's source lines that `rows` has for them.

    `rows` maps keys (`line_key`) to lines. Nested ops, such as the body of a loop, also get their
    lines.
    """

    def place(op: Op, key: str, number: int) -> Op:
        where = rows.get(_nth(key, number), rows.get(key, ""))
        return op.replace(where=where) if where else op

    return _by_key(ops, place) if rows else tuple(ops)


def _nth(key: str, number: int) -> str:
    return f"{key} ({number})"


def _by_key(ops: Iterable[Op], change: Callable[[Op, str, int], Op]) -> tuple[Op, ...]:
    """Returns the ops after applying `change` to each of them, and to nested ops.

    `change` takes the op, its key (`line_key`), and how many ops had this key so far, the op
    included. An op comes before the ops that are nested in it.
    """
    counts: Counter[str] = Counter()

    def changed(op: Op) -> Op:
        key = line_key(op)
        counts[key] += 1
        op = change(op, key, counts[key])
        was = {name: getattr(op, name) for name in op.fields_of("region")}
        regions = {name: tuple(map(changed, region)) for name, region in was.items()}
        return op if regions == was else op.replace(**regions)

    return tuple(map(changed, ops))


_PREFIX_DTYPE = {
    "b": DataType.Bool,
    "i": DataType.Index,
    "f": DataType.Float,
    "d": DataType.Double,
}


def default_dtype(name: str) -> DataType:
    """Returns the dtype that the name of a symbol implies in a text.

    It is Index for `i3`, Double for `d2`, Float for `f4`, Bool for `b5`, and Index for any other
    name.
    """
    return _PREFIX_DTYPE.get(name[0], DataType.Index) if name[1:].isdigit() else DataType.Index


def program_symbols(
    fusion: Fusion, tensors: Iterable[TensorView], ops: Iterable[Op]
) -> tuple[sc.Symbol, ...]:
    """Returns each symbol of a program once, in order of appearance.

    Symbols occur in inputs, axes and splits of `tensors`, operands of `ops`, and equal extents.
    """
    found: dict[sc.Symbol, None] = {}

    def add(value: object) -> None:
        if isinstance(value, Scalar):
            found.update(dict.fromkeys(sc.symbols(value)))

    for value in fusion.inputs:
        add(value)
    for tv in tensors:
        found.update(dict.fromkeys(tv.domain.symbols))
    for op in ops:
        for value in (*op.inputs, *op.scalars):
            add(value)
    for symbol, x in fusion.equal_extents():
        add(symbol)
        add(x)
    return tuple(found)
