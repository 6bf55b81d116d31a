r"""The declaration of ops. Printing, copying and verification of an op follow from its fields.

An op class lists its fields in order with `operand()`, `operands()`, `result()`, `results()`,
`attr()` and `region()`. Its text template has the field names as placeholders:

    class SqueezeOp(Op):
        out: TensorView = result()
        inp: TensorView = operand()
        flags: tuple[bool, ...] = attr()
        TEXT = "{out}\n   = squeeze( {inp}, flags = {flags} )"

`==` compares ops by identity. `fuser.ir.canonical_form.equal_ops` compares their structure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from textwrap import indent
from typing import Any, ClassVar, Literal, Self, dataclass_transform, overload

from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.statement import Expr, numbered
from fuser.ir.types import ParallelType
from fuser.support.record import declare_fields, remembered, replace

Kind = Literal["operand", "operands", "result", "results", "attr", "region", "where"]


def operand(**options: Any) -> Any:
    """Declares a field of an op class: one value that the op reads, or None if it is optional."""
    return field(metadata={"kind": "operand"}, **options)


def operands(*, in_rows: int = 0, **options: Any) -> Any:
    """Declares a field of an op class: a tuple of values that the op reads.

    If `in_rows` is not 0, the text of the op shows the values in groups of this size. For 2: `{ {a,
    b} {c, d} }`.
    """
    return field(metadata={"kind": "operands", "in_rows": in_rows}, **options)


def result() -> Any:
    """Declares a field of an op class: one value that the op defines or writes."""
    return field(metadata={"kind": "result"})


def results() -> Any:
    """Declares a field of an op class: a tuple of values that the op defines or writes."""
    return field(metadata={"kind": "results"})


@overload
def attr(*, kw_only: Literal[True] = True, **default: Any) -> Any:
    """Declares a field of an op class: a constant property, which is passed by keyword."""


@overload
def attr(*, kw_only: Literal[False], **default: Any) -> Any:
    """Declares a field of an op class: a constant property that may be passed by position."""


def attr(*, kw_only: bool = True, **default: Any) -> Any:
    """Declares a field of an op class: a constant property, such as the kind of a reduction.

    `default` is the default value. By default, the property is passed by keyword.
    """
    return field(metadata={"kind": "attr"}, kw_only=kw_only, **default)


def region(*, head: str = "", kw_only: Literal[True] = True, **options: Any) -> Any:
    """Declares a field of an op class: a tuple of nested ops (a region), such as a loop's body.

    In the text of the op, the nested ops are indented, after the line `head` if it is not empty. An
    empty region with a `head` does not appear at all.
    """
    return field(metadata={"kind": "region", "head": head}, kw_only=kw_only, **options)


@Expr.register
@dataclass_transform(
    frozen_default=True,
    eq_default=False,
    field_specifiers=(operand, operands, result, results, attr, region, field),
)
class Op:
    """Base of all ops, of fusions and of host programs (the list of actions that every rank runs).

    A subclass declares its fields with `operand()`, `result()`, `attr()` etc. It becomes a frozen
    dataclass and is registered by its name, so that the parser can create it.
    """

    TEXT: ClassVar[str] = ""
    REGISTRY: ClassVar[dict[str, type[Op]]] = {}

    # Where the user wrote the op ("file.py:12"); not part of its meaning or its text.
    where: str = field(default="", kw_only=True, metadata={"kind": "where"})

    def __init_subclass__(cls) -> None:
        cls.__annotations__ = {**cls.__annotations__}
        if "where" not in cls.__annotations__:
            cls.__annotations__["where"] = "str"
            cls.where = field(default="", kw_only=True, metadata={"kind": "where"})
        declare_fields(cls)
        assert cls.__name__ not in Op.REGISTRY, f"op {cls.__name__} is declared twice"
        Op.REGISTRY[cls.__name__] = cls

    @classmethod
    @functools.cache
    def fields_of(cls, *kinds: Kind) -> tuple[str, ...]:
        """Returns the names of the fields of the given kinds, such as "operand", in order."""
        return tuple(
            f.name
            for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
            if f.metadata.get("kind") in kinds
        )

    @classmethod
    @functools.cache
    def rows(cls) -> Mapping[str, int]:
        """Returns, by field name, how many values of a field form a group in the text of an op.

        For `{ {a, b} {c, d} }`, this is 2. Only fields declared with `operands(in_rows=..)` are
        included.
        """
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        return {f.name: f.metadata["in_rows"] for f in fields if f.metadata.get("in_rows")}

    @classmethod
    @functools.cache
    def _kinds(cls) -> tuple[tuple[str, Kind], ...]:
        """Returns (name, kind) of every field, such as ("inp", "operand"). The result is cached."""
        return tuple(
            (f.name, f.metadata["kind"])
            for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
            if "kind" in f.metadata
        )

    @classmethod
    @functools.cache
    def _value_names(cls, *kinds: Kind) -> tuple[tuple[str, bool], ...]:
        """Returns (name, whether the value is a tuple) of the fields of the kinds `kinds`.

        By default, these are all operands and results.
        """
        wanted = kinds or ("operand", "operands", "result", "results")
        return tuple((name, kind.endswith("s")) for name, kind in cls._kinds() if kind in wanted)

    def _values(self, one: Kind, many: Kind) -> tuple[Any, ...]:
        found: list[Any] = []
        for name, has_many in self._value_names(one, many):
            value = getattr(self, name)
            if has_many:
                found += value
            elif value is not None:
                found.append(value)
        return tuple(found)

    # Analyses read this often, but not of every op: it is computed at the first use.
    @remembered
    def inputs(self) -> tuple[Any, ...]:
        """The values that the op reads, in declaration order, without absent optional operands."""
        return self._values("operand", "operands")

    @remembered
    def outputs(self) -> tuple[Any, ...]:
        """The tensors or other values that the op defines or writes, in declaration order."""
        return self._values("result", "results")

    @property
    def regions(self) -> tuple[tuple[Op, ...], ...]:
        """The nested tuples of ops (regions), such as the body of a loop, in declaration order.

        Most ops have none.
        """
        names = self.fields_of("region")
        return tuple(getattr(self, name) for name in names) if names else ()

    @classmethod
    @functools.cache
    def region_heads(cls) -> dict[str, str]:
        """Returns, by field name, the line that precedes the nested ops in the text of the op."""
        return {
            f.name: f.metadata["head"]
            for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
            if f.metadata.get("kind") == "region"
        }

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The scalars in the attributes of the op, which are not operands. By default, none."""
        return ()

    @property
    def name(self) -> str:
        """The name of the op in error messages: its attribute `kind`, or else its class name."""
        return str(getattr(self, "kind", type(self).__name__))

    def replace(self, **changes: Any) -> Self:
        """Returns a copy of the op in which the fields `changes` have other values."""
        return replace(self, **changes)

    def located(self, where: str) -> Self:
        """Returns the op with the user's source line `where`, if the op has results and no line
        yet.

        Ops that are nested in this op get the line by the same rule. A pass calls this method for
        the ops that it adds, so that they have the line of the user's op that needs them.
        """
        regions = {
            name: tuple(op.located(where) for op in getattr(self, name))
            for name in self.fields_of("region")
        }
        line = self.where or (where if self.outputs else "")
        return self.replace(where=line, **regions) if regions or line != self.where else self

    def map_values(self, fn: Callable[[Any], Any]) -> Self:
        """Returns the op with `fn` applied to every operand and result.

        Nested ops, such as the body of a loop, do not change.
        """
        changes: dict[str, Any] = {}
        for name, has_many in self._value_names():
            value = getattr(self, name)
            if has_many:
                changes[name] = tuple([fn(v) for v in value])
            elif value is not None:
                changes[name] = fn(value)
        return replace(self, **changes)

    def with_values(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> Self:
        """Returns the op with other operands and results.

        `inputs` and `outputs` have the new values in the order of the old ones.
        """
        sources = {"operand": iter(inputs), "result": iter(outputs)}
        changes: dict[str, Any] = {}
        for name, kind in self._kinds():
            value, source = getattr(self, name), sources.get(kind.removesuffix("s"))
            if source is not None and value is not None:
                many = kind.endswith("s")
                changes[name] = tuple(next(source) for _ in value) if many else next(source)
        return self.replace(**changes)

    # nvFuser's `Expr` accessors.
    def input(self, index: int) -> Any:
        """Returns operand `index`.

        Raises:
            NoOperandError: the op has no such operand.
        """
        return numbered("input", self, self.inputs, index)

    def output(self, index: int) -> Any:
        """Returns result `index`.

        Raises:
            NoOperandError: the op has no such result.
        """
        return numbered("output", self, self.outputs, index)

    def verify(self) -> None:
        """Checks the rules for this op that the types of its fields do not express.

        By default, there are none.

        Raises:
            VerifyError: a rule is broken.
        """

    def __str__(self) -> str:
        return op_text(self)


def walk(ops: Sequence[Op]) -> Iterator[Op]:
    """Yields all ops in program order, nested ops (such as the body of a loop) included.

    Nested ops follow the op that contains them.
    """
    for op in ops:
        yield op
        for region in op.regions:
            yield from walk(region)


# ---------------------------------------------------------------- text
# The indentation of one region level.
INDENT = "  "
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


def value_text(value: object) -> str:
    """Returns the text of a field's value in the text of an op. A tuple becomes `{a, b}`."""
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
    """Returns the text of an op: `template`, with placeholders replaced by values of the op.

    A placeholder is `{field}`, or `{field.method}` for the result of a method of the value. Nested
    ops are indented, each on its own line.
    """
    heads, rows = op.region_heads(), op.rows()

    def text_of(match: re.Match[str]) -> str:
        name, _, method = match[1].partition(".")
        value = getattr(op, name)
        if name in heads:
            return region_text(value, heads[name])
        if name in rows:
            return _rows_text(value, rows[name])
        return value_text(getattr(value, method)() if method else value)

    return _PLACEHOLDER.sub(text_of, template)


def _rows_text(values: Sequence[object], length: int) -> str:
    rows = (tuple(values[k : k + length]) for k in range(0, len(values), length))
    return " ".join(["{", *map(value_text, rows), "}"])


def op_text(op: Op) -> str:
    """Returns the text of one op, without indentation or a final newline."""
    template = getattr(op, "template", None)
    return fill_template(op, template() if template is not None else op.TEXT)


def region_text(ops: Sequence[Op], head: str = "") -> str:
    """Returns the text of nested ops: the line `head`, then one indented line per op.

    The line `head` is omitted if it is "" or if there are no ops.
    """
    lines = [indent(op_text(op), INDENT) for op in ops]
    return "".join("\n" + line for line in ([head, *lines] if head and ops else lines))
