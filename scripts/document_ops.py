"""Writes the documentation of ops from their rows (`fuser.ops.rows`).

- `docs/reference/operations.md`: the page of the public ops.
- `fuser/ops/__init__.pyi`: their signatures for type checkers.
- `docs/explanation/differences-from-nvfuser.md`: the table of names that raise.
- `docs/reference/host-operations.md`: the tables of host ops and of collectives.
- `docs/reference/options.md`: the tables of variables and options.

Run `python scripts/document_ops.py` after a change of a row, of an op's docstring, or of such a
name. A test compares the files.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from inspect import Parameter
from pathlib import Path
from types import CodeType
from typing import Any, get_overloads

from page_tables import table, with_parts

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ops.define import define_tensor
from fuser.ops.elementwise import DTYPE_RULES
from fuser.ops.rows import ROWS, SPELLED, OpRow
from fuser.support import options
from fuser.support.errors import INSTEAD_OF_NVFUSER, UnsupportedError
from hostir.ir import effects
from hostir.ir.ops import HOST_OPS, HostOp
from multidevice.transports.base.collectives import COLLECTIVES, Collective, Side

SCRIPT = "scripts/document_ops.py"
_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs" / "reference" / "operations.md"
STUB = _ROOT / "fuser" / "ops" / "__init__.pyi"
DIFFERENCES = _ROOT / "docs" / "explanation" / "differences-from-nvfuser.md"
OPTIONS = _ROOT / "docs" / "reference" / "options.md"
HOST_PAGE = _ROOT / "docs" / "reference" / "host-operations.md"

_HEAD = """# Operations

For everyone who writes a definition. After this page you know the functions of `fd.ops`: their
arguments, meaning, dtype rule and result shape. `help(fd.ops.NAME)` shows more about one of them.
[Families of operations](operation-families.md) explains random numbers, lookups, scans, floats of
one byte, complex numbers and attention.

- Operands before `/` are passed by position only.
- The dtype rules are explained [below](#dtype-rules).
- Elementwise ops and those marked † also take scalars. If all operands are scalars, the result is a
  scalar, which the host computes.
- Operands with several axes are aligned at the last one. An axis of size 1 is broadcast.

`python scripts/document_ops.py` writes this page from the rows of `fuser/ir/pointwise_table.py` and
`fuser/ops/rows.py`.
"""


# Module of `fuser/ops` -> the title of its ops on the page.
_FAMILIES = {
    "contractions": "Matrix products",
    "attention": "Attention",
    "composites": "Composed functions",
    "elementwise": "Elementwise ops with arguments of their own",
    "reductions": "Reductions",
    "scans": "Scans and sorts",
    "indexing": "Lookups",
    "reshaping": "Views and shapes",
    "resize": "Joined, padded and cut tensors",
    "factories": "Constants and random numbers",
    "quantize": "Floats of one byte",
}
_STUB_HEAD = '''# ruff: noqa: E501, I001
# fmt: off
"""The signatures of the ops for type checkers, from the rows of `fuser.ops.rows`.

`python scripts/document_ops.py` writes this file. An op returns a scalar if all its operands are
scalars.
"""
'''

# Name in an annotation -> the module that defines it.
_DEFINED_IN = {
    "NoReturn": "typing",
    "Sequence": "collections.abc",
    "overload": "typing",
    "DataType": "fuser.ir.dtypes",
    "DtypeLike": "fuser.ir.dtypes",
    "Operand": "fuser.ops.building",
    "OperandLike": "fuser.ops.building",
    "Scalar": "fuser.ir.scalar.constructors",
    "ScalarLike": "fuser.ir.scalar.constructors",
    "SizeLike": "fuser.ops.building",
    "TensorView": "fuser.ir.fusion",
}


def arguments_of(function: Callable[..., Any]) -> str:
    """Returns the parameters without annotations: `arg, dim=None, /`."""
    signature = inspect.signature(function)
    bare = [
        p.replace(
            annotation=p.empty, default=_Shown(p.default) if p.default is not p.empty else p.empty
        )
        for p in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return text[1:-1]


class _Shown:
    """A default value whose repr is the text that a user writes for it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value) if isinstance(self._value, Enum) else repr(self._value)


def meaning_of(row: OpRow) -> str:
    """Returns the meaning of an op in a sentence: the table's, or the first of the docstring."""
    if row.name in POINTWISE and not row.sample:
        return POINTWISE[row.name].meaning
    if row.name in PUBLIC and not row.sample:
        return f"As `{PUBLIC[row.name][0]}`, computed in floats."
    text = " ".join((inspect.getdoc(row.function) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z])", text)[0]


def _refused() -> Iterator[tuple[OpRow, str]]:
    """Yields the ops that raise `UnsupportedError`, and why."""
    for row in ROWS.values():
        if not row.is_implemented:
            yield row, meaning_of(row).removeprefix("Raises `UnsupportedError`: ")


def _ops(rows: Iterable[OpRow], mark: str = "") -> str:
    lines = [
        (
            f"`{row.name}({arguments_of(row.function)})`" + mark * row.takes_scalars,
            meaning_of(row),
            row.dtype,
            row.shape,
        )
        for row in sorted(rows, key=lambda row: row.name)
    ]
    return table(["op", "meaning", "dtype rule", "shape"], lines)


def _families(rows: Iterable[OpRow]) -> Iterator[str]:
    """Yields a section per module of `fuser/ops`, whose title names the ops for searches."""
    of_module: dict[str, list[OpRow]] = {}
    for row in rows:
        of_module.setdefault(row.function.__module__.rpartition(".")[2], []).append(row)
    for module, title in _FAMILIES.items():
        family = of_module.pop(module)
        names = ", ".join(f"`{name}`" for name in sorted(row.name for row in family))
        yield f"\n### {title}: {names}\n"
        yield _ops(family, " †")
    assert not of_module, f"_FAMILIES lacks {sorted(of_module)}"


def page() -> str:
    """Returns the text of the page."""
    rows = [row for row in ROWS.values() if row.is_implemented]
    is_plain = {row.name: row.name in PUBLIC and not row.sample for row in rows}
    refused = [
        f"`{row.name}({arguments_of(row.function)})` raises `UnsupportedError`: {why}"
        for row, why in _refused()
    ]
    rules = [(name, rule.sentence) for name, rule in DTYPE_RULES.items()]
    others = [(f"`{name}`", hint) for name, hint in sorted(SPELLED.items())]
    return "\n".join(
        (
            _HEAD,
            "## Elementwise\n",
            _ops([r for r in rows if is_plain[r.name]]),
            "\n## Others",
            *_families(r for r in rows if not is_plain[r.name]),
            "\n## Dtype rules\n",
            table(["rule", "operands and result"], rules),
            "\n## Names in other libraries\n",
            table(["name", "in `fd.ops`"], others),
            "\n## Not supported\n",
            "\n".join(refused) + "\n",
        )
    )


# ------------------------------------------------------------------ for type checkers
class _Bare(str):
    """An annotation, which prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


# Annotation of an operand -> its annotation in a call with scalars only.
_OF_SCALARS = {
    "OperandLike": "ScalarLike",
    "Operand": "Scalar",
    "TensorView | Scalar": "Scalar",
}


def _annotation(text: str) -> _Bare:
    """Returns an annotation in which builtins are qualified: `complex` is also the name of an
    op."""

    def named(found: re.Match[str]) -> str:
        is_both = found[0] in ROWS and hasattr(builtins, found[0])
        return f"builtins.{found[0]}" if is_both else found[0]

    return _Bare(re.sub(r"[A-Za-z_]\w*", named, text))


def _signatures(row: OpRow) -> Iterator[inspect.Signature]:
    """Yields a signature per overload of an op.

    If the op takes tensors and scalars, there is one for each operand that may be the tensor, and
    one for scalars only. Other ops keep the signature of their function.
    """
    found = inspect.signature(row.function)
    kinds = {p.name: p.annotation for p in found.parameters.values()}
    places = {name: _OF_SCALARS[kind] for name, kind in kinds.items() if kind in _OF_SCALARS}
    if found.return_annotation != "Operand" or not places:
        for found in map(inspect.signature, get_overloads(row.function) or [row.function]):
            yield _shown(found, {}, found.return_annotation)
        return
    for place in places:
        yield _shown(found, {place: "TensorView"}, "TensorView")
    yield _shown(found, places, "Scalar")


def _shown(found: inspect.Signature, taken: dict[str, str], result: str) -> inspect.Signature:
    def shown(p: Parameter) -> Parameter:
        default = p.empty if p.default is p.empty else _Shown(p.default)
        return p.replace(annotation=_annotation(taken.get(p.name) or p.annotation), default=default)

    parameters = [shown(p) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=_annotation(result))


def _definitions() -> Iterator[str]:
    for row in ROWS.values():
        signatures = list(_signatures(row))
        for signature in signatures:
            if len(signatures) > 1:
                yield "@overload"
            told = meaning_of(row).replace("\\", "\\\\")
            yield f'def {row.name}{signature}: """{told}"""'


def stub() -> str:
    """Returns the text of the file of signatures."""
    lines = "\n".join(_definitions())
    words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r'""".*', "", lines)))
    names = [name for name in _DEFINED_IN if name in words]
    imports = [f"from {_DEFINED_IN[name]} import {name}" for name in names]
    imports += ["import builtins"] * ("builtins" in words)
    return "\n".join([_STUB_HEAD, *imports, "", lines, "", f"__all__ = {list(ROWS)}", ""])


# ------------------------------------------------------------------ names that raise
_NAMES = re.compile(r"(?<=<!-- by scripts/document_ops\.py -->\n\n).*?(?=\n\n<!-- -->)", re.DOTALL)


def _has_tensors(dtype: DataType) -> bool:
    try:
        with FusionGuard(Fusion()):
            define_tensor([-1], contiguity=True, dtype=dtype)
    except UnsupportedError:
        return False
    return True


def differences() -> str:
    """Returns the page of differences from nvFuser, with the table of the names that raise."""
    names: dict[str, list[str]] = {}
    for owner, found in INSTEAD_OF_NVFUSER.items():
        for name, advice in found.items():
            dotted = f"{owner}.{name}" if "." not in owner or owner == "fd.fec" else ""
            names.setdefault(advice, []).append(dotted or f"{owner}({name}=)")
    for row, why in _refused():
        names.setdefault(f"a call raises: {why}", []).append(f"fd.ops.{row.name}")
    without = "no tensor has this dtype: `define_tensor` raises"
    names[without] = [str(dtype) for dtype in DataType if not _has_tensors(dtype)]
    lines = (
        (" ".join(f"`{n}`" for n in found), advice) for advice, found in names.items() if found
    )
    return _NAMES.sub(lambda _: table(["name", "what to use"], lines), DIFFERENCES.read_text())


# ------------------------------------------------------------------ host programs
_EFFECTS = [cls.__name__ for cls in effects.Effect.__args__]
# The words of a row for the ways in which operand and result may share a buffer.
_SHARING = {
    "same": "element by element",
    "freely": "yes",
    "slot": "its own slot",
    "never": "no",
}


def effect_names(cls: type[HostOp]) -> list[str]:
    """Returns the effects that an op class can have, as its code names them."""
    found: list[str] = []

    def look(code: CodeType, known: dict[str, Any]) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                look(inner, known)
        for name in code.co_names:
            target = known.get(name)
            if name in _EFFECTS:
                found.append(name)
            elif inspect.isfunction(target) and target.__module__ == cls.__module__:
                look(target.__code__, known)

    look(cls.effects.__code__, cls.effects.__globals__)
    return [*dict.fromkeys(found)]


def _host_text(cls: type[HostOp]) -> str:
    """Returns the text of a host op: `<name>` stands for the value of a field."""
    variants = getattr(cls, "variants", tuple)
    text = cls.TEXT or next(template for _, template in variants())
    return " ".join(re.sub(r"\{(\w+)\}", r"<\1>", text).split())


def _constructor(cls: type[HostOp]) -> str:
    parameters = inspect.signature(cls).parameters.values()
    named = [
        f"{p.name}=" if p.default is not p.empty else p.name
        for p in parameters
        if p.name != "where"
    ]
    return f"{cls.__name__}({', '.join(named)})"


def _is_written_over(cls: type[HostOp]) -> str:
    """Returns whether a result of the op may share memory with an operand, in words."""
    if not {"Reads", "Writes"} <= set(effect_names(cls)):
        return ""
    try:
        return _SHARING[cls.buffer_sharing.fget(None)]  # pyright: ignore
    except AttributeError:
        return "by its type"


def _first_sentence(cls: type) -> str:
    return re.split(r"(?<=[^.]\.)\s|[;:] ", " ".join((inspect.getdoc(cls) or "").split()))[
        0
    ].rstrip(".")


def host_ops_table() -> str:
    """Returns the table of all host ops."""
    lines = (
        (
            f"`{_constructor(cls)}`",
            f"`{_host_text(cls)}`",
            _first_sentence(cls),
            ", ".join(effect_names(cls)),
            _is_written_over(cls),
        )
        for cls in HOST_OPS
    )
    titles = ["op", "text", "meaning", "effects", "over its input"]
    return table(titles, lines)


def _side(side: Side) -> str:
    parts = "a part per member" if side.per_member else "one part"
    return f"{parts}, on the root" if side.at_root else parts


def _bus(row: Collective) -> str:
    """Returns the part of a buffer that each of n members sends, as a formula such as
    `(n-1)/n`.
    """
    formulas: dict[str, Callable[[int], float]] = {
        "1": lambda n: 1.0,
        "(n - 1) / n": lambda n: (n - 1) / n,
        "2 (n - 1) / n": lambda n: 2 * (n - 1) / n,
        "0": lambda n: 0.0,
    }
    fits = (text for text, f in formulas.items() if all(f(n) == row.bus(n) for n in range(2, 99)))
    return next(fits, f"{row.bus(2):g} of 2, {row.bus(4):g} of 4")


def collectives_table() -> str:
    """Returns the table of the types of `Communication`."""
    lines = (
        (
            f"`{row.name}`",
            _side(row.inp),
            _side(row.out),
            "yes" if row.reduces else "",
            _bus(row),
            _SHARING[row.sharing],
        )
        for row in COLLECTIVES.values()
    )
    return table(["type", "operand", "result", "`red_op`", "sends", "over its input"], lines)


def host_page() -> str:
    """Returns the page of host ops with its tables made anew."""
    tables = {"host ops": host_ops_table(), "collectives": collectives_table()}
    return with_parts(HOST_PAGE.read_text(), tables, SCRIPT)


# ------------------------------------------------------------------ options
def options_page() -> str:
    """Returns the page of options with its tables made anew."""
    variables = (
        (
            f"`{v.name}`" + (f" (also `{v.alias}`)" if v.alias else ""),
            f"`{v.default}`" if v.default else "",
            v.meaning + (f": {', '.join(v.choices)}" if v.choices else ""),
        )
        for v in options.VARIABLES.values()
    )
    tables = {"variables": table(["variable", "default", "meaning"], variables)}
    for kind, found in options.EFFECTS.items():
        rows = ((f"`{name}`", effect) for name, effect in found.items())
        tables[kind] = table(["name", "effect"], rows)
    without: dict[tuple[str, str], list[str]] = {}
    for kind, found in options.NO_EFFECT.items():
        for name, why in found.items():
            without.setdefault((f"`FUSER_{kind}`", why), []).append(f"`{name}`")
    rows = ((variable, ", ".join(names), why) for (variable, why), names in without.items())
    tables["names without an effect"] = table(["variable", "names", "why"], rows)
    return with_parts(OPTIONS.read_text(), tables, SCRIPT)


if __name__ == "__main__":
    HOST_PAGE.write_text(host_page())
    OPTIONS.write_text(options_page())
    PAGE.write_text(page())
    STUB.write_text(stub())
    DIFFERENCES.write_text(differences())
